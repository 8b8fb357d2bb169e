//! Counts, errors, bytes and latencies of every operation.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use dray_core::{Admit, Context, Counted, Errno, ObservedCall, Op};

use crate::observe::{Observer, Outcome};

/// Latency classes: class `n` holds what took from 2^n to 2^(n+1) nanoseconds, the last
/// everything from 2^39 ns (nine minutes) on.
pub const CLASSES: usize = 40;
/// Error numbers with a counter of their own; Linux has none beyond. 0 counts the others.
const ERRNOS: usize = 134;
/// Threads that count without getting in each other's way; further ones share.
const SHARDS: usize = 8;

/// An observer that counts. Its counters are 150 KiB, which one that nothing happens to does not
/// take.
pub struct Metrics {
    shards: [OnceLock<Box<Shard>>; SHARDS],
    errors: OnceLock<Box<Errors>>,
}

type Errors = [[AtomicU64; ERRNOS]; Op::COUNT];

/// Padded apart, so that two threads do not write to the same cache line.
#[repr(align(128))]
struct Shard {
    ops: [Counters; Op::COUNT],
}

struct Counters {
    bytes: AtomicU64,
    nanos: AtomicU64,
    classes: [AtomicU64; CLASSES],
}

impl Default for Counters {
    fn default() -> Counters {
        Counters {
            bytes: AtomicU64::new(0),
            nanos: AtomicU64::new(0),
            classes: [const { AtomicU64::new(0) }; CLASSES],
        }
    }
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics::new()
    }
}

thread_local! {
    static SHARD: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// This thread's shard.
fn shard_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    SHARD.with(|shard| {
        if shard.get() == usize::MAX {
            shard.set(NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS);
        }
        shard.get()
    })
}

impl Metrics {
    /// All counters at zero.
    pub fn new() -> Metrics {
        Metrics { shards: [const { OnceLock::new() }; SHARDS], errors: OnceLock::new() }
    }

    /// This thread's counters of `op`.
    fn counters(&self, op: Op) -> &Counters {
        let shard = || Box::new(Shard { ops: std::array::from_fn(|_| Counters::default()) });
        &self.shards[shard_number()].get_or_init(shard).ops[op as usize]
    }

    fn errors(&self) -> &Errors {
        let none = || Box::new([const { [const { AtomicU64::new(0) }; ERRNOS] }; Op::COUNT]);
        self.errors.get_or_init(none)
    }

    /// The counters as they stand; operations that never happened are left out.
    pub fn snapshot(&self) -> Snapshot {
        let ops = Op::ALL.iter().map(|&op| self.of(op)).filter(|one| one.count > 0);
        Snapshot { ops: ops.collect() }
    }

    fn of(&self, op: Op) -> OpSnapshot {
        let mut one = OpSnapshot::new(op);
        for shard in self.shards.iter().filter_map(OnceLock::get) {
            let counters = &shard.ops[op as usize];
            one.bytes += counters.bytes.load(Ordering::Relaxed);
            one.total += Duration::from_nanos(counters.nanos.load(Ordering::Relaxed));
            for (sum, class) in one.classes.iter_mut().zip(&counters.classes) {
                *sum += class.load(Ordering::Relaxed);
            }
        }
        one.count = one.classes.iter().sum();
        let errors = self.errors.get().map(|errors| &errors[op as usize]);
        for (raw, count) in errors.into_iter().flatten().enumerate() {
            let count = count.load(Ordering::Relaxed);
            if count > 0 {
                one.errors.insert(errno_label(raw), count);
            }
        }
        one
    }
}

fn errno_label(raw: usize) -> String {
    match raw {
        0 => "other".to_owned(),
        _ => match Errno::new(raw as i32).name() {
            "E?" => format!("E{raw}"),
            name => name.to_owned(),
        },
    }
}

impl Observer for Metrics {
    fn admits(&self) -> bool {
        false
    }

    fn admit<'a>(&'a self, _: &'a Context, _: &'a ObservedCall<'a>) -> Admit<'a> {
        Admit::Now
    }

    fn done(&self, cx: &Context, call: &ObservedCall<'_>, outcome: Outcome<'_>, elapsed: Duration) {
        let counters = match cx.counted {
            Counted::Nothing => return,
            Counted::Whole | Counted::IfDone | Counted::Bytes => self.counters(call.op),
        };
        if cx.counted == Counted::Bytes {
            counters.bytes.fetch_add(outcome.bytes, Ordering::Relaxed);
            return;
        }
        let nanos = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
        counters.classes[class_of(nanos)].fetch_add(1, Ordering::Relaxed);
        counters.nanos.fetch_add(nanos, Ordering::Relaxed);
        if outcome.bytes > 0 {
            counters.bytes.fetch_add(outcome.bytes, Ordering::Relaxed);
        }
        if let Some(error) = outcome.error {
            let raw = error.errno().raw() as usize;
            let raw = if raw < ERRNOS { raw } else { 0 };
            self.errors()[call.op as usize][raw].fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn class_of(nanos: u64) -> usize {
    (nanos.max(1).ilog2() as usize).min(CLASSES - 1)
}

/// Counters at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// One snapshot for every operation that has happened, in the order of their numbers.
    pub ops: Vec<OpSnapshot>,
}

/// Counters of one operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpSnapshot {
    /// Which.
    pub op: Op,
    /// Calls that ended, failed ones included.
    pub count: u64,
    /// Failures by the name of the error number.
    pub errors: BTreeMap<String, u64>,
    /// Bytes moved.
    pub bytes: u64,
    /// Time of all calls together.
    pub total: Duration,
    /// Calls by latency; see [`CLASSES`].
    pub classes: [u64; CLASSES],
}

impl OpSnapshot {
    fn new(op: Op) -> OpSnapshot {
        let (errors, total) = (BTreeMap::new(), Duration::ZERO);
        OpSnapshot { op, count: 0, errors, bytes: 0, total, classes: [0; CLASSES] }
    }

    /// The latency that a share of the calls did not exceed (0.5: the median), evenly spread within
    /// a class. It is right to a factor of two, usually much better.
    pub fn quantile(&self, share: f64) -> Duration {
        let wanted = share.clamp(0.0, 1.0) * self.count as f64;
        let mut below = 0.0;
        for (class, &count) in self.classes.iter().enumerate() {
            let count = count as f64;
            if count > 0.0 && below + count >= wanted {
                let part = ((wanted - below) / count).clamp(0.0, 1.0);
                let base = (1u64 << class) as f64;
                return Duration::from_nanos((base + base * part) as u64);
            }
            below += count;
        }
        Duration::ZERO
    }
}

impl Snapshot {
    /// Adds the samples of `self` under `labels` (such as `export="home"`), in the text
    /// format of Prometheus. Headers are written by [`PrometheusText::finish`], once.
    pub fn prometheus(&self, labels: &str, out: &mut PrometheusText) {
        let comma = if labels.is_empty() { "" } else { "," };
        for one in &self.ops {
            let all = format!("{labels}{comma}op=\"{}\"", one.op.name());
            let prefix = out.prefix;
            // Writing to a string cannot fail.
            let _ = writeln!(out.bytes, "{prefix}_bytes_total{{{all}}} {}", one.bytes);
            for (errno, count) in &one.errors {
                let name = "errors_total";
                let _ = writeln!(out.errors, "{prefix}_{name}{{{all},errno=\"{errno}\"}} {count}");
            }
            out.histogram(one, &all);
        }
    }

    /// As JSON: an object with one member an operation.
    pub fn json(&self) -> String {
        let mut out = String::from("{");
        for (index, one) in self.ops.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            let errors: Vec<String> =
                one.errors.iter().map(|(errno, count)| format!("\"{errno}\":{count}")).collect();
            let _ = write!(
                out,
                "{comma}\"{}\":{{\"count\":{},\"bytes\":{},\"p50_us\":{:.3},\"p99_us\":{:.3},\
                 \"mean_us\":{:.3},\"errors\":{{{}}}}}",
                one.op.name(),
                one.count,
                one.bytes,
                micros(one.quantile(0.5)),
                micros(one.quantile(0.99)),
                micros(one.total) / one.count.max(1) as f64,
                errors.join(","),
            );
        }
        out.push('}');
        out
    }
}

fn micros(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1000.0
}

/// Samples on their way into one text, in which all those of a metric stand together.
pub struct PrometheusText {
    prefix: &'static str,
    bytes: String,
    errors: String,
    latency: String,
}

impl PrometheusText {
    /// No samples yet, of metrics whose names begin with `prefix` and an underscore.
    pub fn new(prefix: &'static str) -> PrometheusText {
        let (bytes, errors, latency) = Default::default();
        PrometheusText { prefix, bytes, errors, latency }
    }

    fn histogram(&mut self, one: &OpSnapshot, labels: &str) {
        let name = format!("{}_latency_seconds", self.prefix);
        let mut sum = 0;
        let last = one.classes.iter().rposition(|&count| count > 0).unwrap_or(0);
        for (class, count) in one.classes.iter().enumerate().take(last + 1) {
            sum += count;
            if sum > 0 && class + 1 < CLASSES {
                let bound = (2u64 << class) as f64 / 1e9;
                let _ = writeln!(self.latency, "{name}_bucket{{{labels},le=\"{bound:e}\"}} {sum}");
            }
        }
        let _ = writeln!(self.latency, "{name}_bucket{{{labels},le=\"+Inf\"}} {}", one.count);
        let _ = writeln!(self.latency, "{name}_sum{{{labels}}} {}", one.total.as_secs_f64());
        let _ = writeln!(self.latency, "{name}_count{{{labels}}} {}", one.count);
    }

    /// The whole text.
    pub fn finish(self) -> String {
        let prefix = self.prefix;
        format!(
            "# HELP {prefix}_bytes_total Bytes moved by an operation.\n\
             # TYPE {prefix}_bytes_total counter\n{}\
             # HELP {prefix}_errors_total Operations that failed, by error number.\n\
             # TYPE {prefix}_errors_total counter\n{}\
             # HELP {prefix}_latency_seconds Time that operations took.\n\
             # TYPE {prefix}_latency_seconds histogram\n{}",
            self.bytes, self.errors, self.latency
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_core::{Error, FileId};

    fn observe(metrics: &Metrics, op: Op, bytes: u64, error: Option<Errno>, micros: u64) {
        let error = error.map(Error::new);
        let call = ObservedCall::new(op, FileId { ino: 1, generation: 1 });
        let outcome = Outcome { error: error.as_ref(), ..Outcome::moved(bytes) };
        metrics.done(&Context::system(), &call, outcome, Duration::from_micros(micros));
    }

    #[test]
    fn counts_bytes_errors_and_latencies_add_up() {
        let metrics = Metrics::new();
        for _ in 0..98 {
            observe(&metrics, Op::Read, 4096, None, 10);
        }
        observe(&metrics, Op::Read, 0, Some(Errno::EIO), 5000);
        observe(&metrics, Op::Read, 0, Some(Errno::new(4000)), 5000);
        observe(&metrics, Op::Lookup, 0, Some(Errno::ENOENT), 1);
        let snapshot = metrics.snapshot();
        assert_eq!(snapshot.ops.len(), 2);
        let read = snapshot.ops.iter().find(|one| one.op == Op::Read).unwrap();
        assert_eq!((read.count, read.bytes), (100, 98 * 4096));
        assert_eq!(read.errors, BTreeMap::from([("EIO".into(), 1), ("other".into(), 1)]));
        let median = read.quantile(0.5);
        assert!((8..17).contains(&median.as_micros()), "{median:?}");
        let tail = read.quantile(0.99);
        assert!((4000..8400).contains(&tail.as_micros()), "{tail:?}");
    }

    /// A server of a thousand exports began with 150 MiB of counters.
    #[test]
    fn what_never_happened_takes_no_memory() {
        let metrics = Metrics::new();
        assert_eq!(metrics.snapshot(), Snapshot::default());
        observe(&metrics, Op::Read, 1, None, 1);
        let shards = metrics.shards.iter().filter(|shard| shard.get().is_some());
        assert_eq!((shards.count(), metrics.errors.get().is_some()), (1, false));
        assert!(size_of::<Metrics>() < 512);
    }

    #[test]
    fn what_no_client_asked_for_is_not_counted() {
        let (metrics, call) =
            (Metrics::new(), ObservedCall::new(Op::Lookup, FileId { ino: 1, generation: 1 }));
        let error = Error::new(Errno::ENOENT);
        for error in [None, Some(&error)] {
            let outcome = Outcome { error, ..Outcome::moved(7) };
            metrics.done(&Context::system().uncounted(), &call, outcome, Duration::from_micros(1));
        }
        assert_eq!(metrics.snapshot(), Snapshot::default());
    }

    #[test]
    fn latency_classes_cover_everything() {
        assert_eq!((class_of(0), class_of(1), class_of(2), class_of(3)), (0, 0, 1, 1));
        assert_eq!(class_of(u64::MAX), CLASSES - 1);
    }

    #[test]
    fn prometheus_text_has_cumulative_buckets_grouped_by_metric() {
        let metrics = Metrics::new();
        observe(&metrics, Op::Write, 10, None, 1);
        observe(&metrics, Op::Write, 10, None, 100);
        let mut text = PrometheusText::new("dray");
        metrics.snapshot().prometheus("export=\"a\"", &mut text);
        metrics.snapshot().prometheus("export=\"b\"", &mut text);
        let text = text.finish();
        assert!(text.contains("dray_bytes_total{export=\"a\",op=\"write\"} 20\n"), "{text}");
        assert!(text.contains("{export=\"b\",op=\"write\",le=\"+Inf\"} 2\n"), "{text}");
        assert!(text.contains("dray_latency_seconds_count{export=\"a\",op=\"write\"} 2\n"));
        assert_eq!(text.matches("# TYPE").count(), 3);
        let buckets: Vec<u64> = text
            .lines()
            .filter(|line| line.starts_with("dray_latency_seconds_bucket{export=\"a\""))
            .map(|line| line.rsplit(' ').next().unwrap().parse().unwrap())
            .collect();
        assert!(buckets.is_sorted() && buckets.first() == Some(&1), "{buckets:?}");
    }

    #[test]
    fn json_names_what_happened() {
        let metrics = Metrics::new();
        observe(&metrics, Op::Open, 0, Some(Errno::EACCES), 3);
        let json = metrics.snapshot().json();
        assert!(json.starts_with("{\"open\":{\"count\":1,\"bytes\":0,"), "{json}");
        assert!(json.ends_with("\"errors\":{\"EACCES\":1}}}"), "{json}");
    }
}
