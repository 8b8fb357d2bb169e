//! The metrics of `script/bench serial`, and what they have to reach.

use crate::measure::Measure;
use crate::report::Measures;
use crate::report::sums::{self, over_sum};
use crate::report::table::{figure, figure_or_dash, markdown};

/// What a metric has to reach.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Goal {
    /// At least this much.
    AtLeast(f64),
    /// At most this much.
    AtMost(f64),
}

/// How a figure stands to its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GoalVerdict {
    /// Reached.
    Pass,
    /// Not reached.
    Miss,
}

impl Goal {
    /// Whether `value` reaches it. Counts per operation carry a little noise of theirs
    /// (a late release): a hundredth above is still the count.
    pub fn judge(self, value: f64) -> GoalVerdict {
        let reached = match self {
            Goal::AtLeast(least) => value >= least,
            Goal::AtMost(most) => value <= most + 0.01,
        };
        if reached { GoalVerdict::Pass } else { GoalVerdict::Miss }
    }

    /// For people: `>= 0.50`.
    pub fn text(self) -> String {
        match self {
            Goal::AtLeast(least) => format!(">= {}", figure(least)),
            Goal::AtMost(most) => format!("<= {}", figure(most)),
        }
    }
}

/// Metrics, their units, and their targets. None names the pace of a machine: what depends on that is a
/// ratio to what was measured in the same run.
pub const GOALS: [(&str, &str, Goal); 21] = [
    ("stream_read_vs_tcp", "ratio", Goal::AtLeast(0.5)),
    ("stream_write_vs_tcp", "ratio", Goal::AtLeast(0.5)),
    ("stream_cpu_vs_sum", "ratio", Goal::AtMost(1.35)),
    ("stream4_read_vs_tmpfs", "ratio", Goal::AtLeast(0.27)),
    ("stream4_write_vs_tmpfs", "ratio", Goal::AtLeast(0.5)),
    ("rand4k_cpu_vs_sum", "ratio", Goal::AtMost(1.3)),
    ("rand4k_vs_pingpong", "ratio", Goal::AtLeast(0.4)),
    ("rand4k_t4_vs_one", "ratio", Goal::AtLeast(2.2)),
    ("create_write_close_round_trips", "1/op", Goal::AtMost(3.0)),
    ("stat_cached_round_trips", "1/op", Goal::AtMost(0.0)),
    ("open_cached_round_trips", "1/op", Goal::AtMost(1.0)),
    ("open_strict_round_trips", "1/op", Goal::AtMost(2.0)),
    ("open_strict_4_components_round_trips", "1/op", Goal::AtMost(5.0)),
    ("readdir_round_trips_per_64_kib", "ratio", Goal::AtMost(1.0)),
    ("warm_read_vs_native", "ratio", Goal::AtLeast(0.9)),
    ("idle_wakeups_10s", "1/10s", Goal::AtMost(0.0)),
    ("idle_rss_mib", "MiB", Goal::AtMost(24.0)),
    ("server_kib_per_idle_conn", "KiB", Goal::AtMost(32.0)),
    ("create_cpu_vs_sum", "ratio", Goal::AtMost(1.4)),
    ("open_close_cpu_vs_sum", "ratio", Goal::AtMost(1.5)),
    ("unlink_cpu_vs_sum", "ratio", Goal::AtMost(1.4)),
];

/// What a small read takes that is relayed and nothing else, by the sum. It is no target, but the floor of one.
const RELAYED: &str = "rand4k_relay_vs_sum";

/// What the kernel is given for a listing of `many`. That is 10,000 records of `fuse_direntplus`
/// with names of 13 bytes (128 + 24 + 13, rounded up to 8), in 64 KiB.
const LISTING_64_KIB: f64 = 10_000.0 * 168.0 / 65_536.0;

/// One metric of one transport, from the raw lines.
pub fn value(m: &Measures, arm: &str, metric: &str) -> Option<f64> {
    let cto = &format!("{arm}.cto")[..];
    let (read, write) = ("stream_read.mib_per_s", "stream_write.mib_per_s");
    let (read4, write4) = ("stream_read_j4.mib_per_s", "stream_write_j4.mib_per_s");
    match metric {
        "stream_read_vs_tcp" => m.ratio((arm, read), ("tcp", read)),
        "stream_write_vs_tcp" => m.ratio((arm, write), ("tcp", write)),
        // One name for both directions: the dearer one counts.
        "stream_cpu_vs_sum" => {
            Some(over_sum(m, arm, &sums::READ)?.max(over_sum(m, arm, &sums::WRITE)?))
        }
        "stream4_read_vs_tmpfs" => m.ratio((arm, read4), ("native", read4)),
        "stream4_write_vs_tmpfs" => m.ratio((arm, write4), ("native", write4)),
        "rand4k_cpu_vs_sum" => over_sum(m, arm, &sums::SMALL_READ),
        // Both sides on one CPU or as they fall: the faster ping-pong counts.
        "rand4k_vs_pingpong" => {
            let (rand, tcp) = ((arm, "rand4k.per_s"), "tcp");
            let free = m.ratio(rand, (tcp, "pingpong.per_s"))?;
            Some(free.min(m.ratio(rand, (tcp, "pingpong_same_cpu.per_s"))?))
        }
        "rand4k_t4_vs_one" => m.ratio((arm, "rand4k_j4.per_s"), (arm, "rand4k.per_s")),
        "create_write_close_round_trips" => m.median(arm, "create_write_close.round_trips"),
        "stat_cached_round_trips" => m.median(cto, "stat.round_trips"),
        "open_cached_round_trips" => m.median(cto, "open.round_trips"),
        "open_strict_round_trips" => m.median(arm, "open.round_trips"),
        "open_strict_4_components_round_trips" => m.median(arm, "open_deep.round_trips"),
        "readdir_round_trips_per_64_kib" => {
            Some(m.median(arm, "readdir.round_trips")? / LISTING_64_KIB.ceil())
        }
        "warm_read_vs_native" => {
            let native = &format!("native.{arm}")[..];
            m.ratio((cto, "warm_read.mib_per_s"), (native, "warm_read.mib_per_s"))
        }
        "server_kib_per_idle_conn" => m.median("server", metric),
        "create_cpu_vs_sum" => over_sum(m, arm, &sums::CREATE),
        "open_close_cpu_vs_sum" => over_sum(m, arm, &sums::OPEN_CLOSE),
        "unlink_cpu_vs_sum" => over_sum(m, arm, &sums::UNLINK),
        _ => m.median(arm, metric),
    }
}

/// The derived lines, and the table.
pub fn report(measures: &Measures) -> (Vec<Measure>, String) {
    let arms: Vec<&str> =
        ["classic", "uring"].into_iter().filter(|arm| measures.arms().contains(arm)).collect();
    let mut lines = Vec::new();
    let mut head = vec!["metric".to_owned()];
    head.extend(arms.iter().flat_map(|arm| [(*arm).to_owned(), String::new()]));
    head.extend(["target".to_owned(), "unit".to_owned()]);
    let mut rows = vec![head];
    for (metric, unit, target) in GOALS {
        let mut row = vec![metric.to_owned()];
        for arm in &arms {
            let value = value(measures, arm, metric);
            row.push(figure_or_dash(value));
            row.push(value.map_or("", |value| verdict(target, value)).to_owned());
            lines.extend(value.map(|value| line(arm, metric, value, unit)));
        }
        row.extend([target.text(), unit.to_owned()]);
        rows.push(row);
    }
    let mut row = vec![RELAYED.to_owned()];
    for arm in &arms {
        let value = sums::relay_over_sum(measures, arm, &sums::SMALL_READ);
        row.extend([figure_or_dash(value), String::new()]);
        lines.extend(value.map(|value| line(arm, RELAYED, value, "ratio")));
    }
    row.extend(["-".to_owned(), "ratio".to_owned()]);
    rows.push(row);
    let mut text = markdown(&rows);
    let parts = sums::table(measures, &arms);
    text.push_str(&format!("\nWhat an operation costs at least:\n\n{parts}"));
    text.push_str(&format!("\n{}", absolute(measures, &arms)));
    text.push_str(&format!("\nKeeping of unsynced changes:\n\n{}", keeping(measures, &arms)));
    text.push_str(&format!("\nPer operation:\n\n{}", counters(measures, &arms)));
    (lines, text)
}

fn verdict(target: Goal, value: f64) -> &'static str {
    match target.judge(value) {
        GoalVerdict::Pass => "pass",
        GoalVerdict::Miss => "MISS",
    }
}

fn line(arm: &str, metric: &str, value: f64, unit: &str) -> Measure {
    Measure {
        bench: "serial".to_owned(),
        arm: arm.to_owned(),
        metric: metric.to_owned(),
        value,
        unit: unit.to_owned(),
        round: 0,
    }
}

/// What was measured, without ratios.
fn absolute(measures: &Measures, arms: &[&str]) -> String {
    let metrics = [
        "stream_read.mib_per_s",
        "stream_write.mib_per_s",
        "stream_read.cpu_ms_per_gb",
        "stream_write.cpu_ms_per_gb",
        "stream_read_j4.mib_per_s",
        "stream_write_j4.mib_per_s",
        "pingpong.per_s",
        "pingpong_same_cpu.per_s",
        "rand4k.per_s",
        "rand4k.cpu_us",
        "rand4k_j4.per_s",
        "create.per_s",
        "stat_cold.per_s",
        "open_close.per_s",
        "unlink.per_s",
        "create_write_close.per_s",
    ];
    let columns: Vec<&str> = ["tcp", "tcp.reno", "native"].iter().chain(arms).copied().collect();
    let mut rows = vec![vec!["median".to_owned()]];
    rows[0].extend(columns.iter().map(|arm| (*arm).to_owned()));
    for metric in metrics {
        let mut row = vec![metric.to_owned()];
        row.extend(columns.iter().map(|arm| figure_or_dash(measures.median(arm, metric))));
        rows.push(row);
    }
    markdown(&rows)
}

/// What `replay=` costs: nothing kept, the default, and what else was measured.
fn keeping(measures: &Measures, arms: &[&str]) -> String {
    let metrics = [
        "stream_write.mib_per_s",
        "stream_write.cpu_us",
        "stream_write_j4.mib_per_s",
        "stream_write_j4.cpu_us",
        "stream_sync.cpu_us",
        "sync4k.cpu_us",
        "create.cpu_us",
        "unlink.cpu_us",
        "idle_rss_mib",
    ];
    let all = measures.arms();
    let mut columns = Vec::new();
    for arm in arms {
        let (nothing, others) = (format!("{arm}.replay0"), format!("{arm}.replay"));
        let others = all.iter().filter(|one| one.starts_with(&others) && **one != nothing);
        let with_others = [nothing.as_str(), *arm].into_iter().chain(others.copied());
        columns.extend(with_others.map(str::to_owned));
    }
    let mut rows = vec![vec!["median".to_owned()]];
    rows[0].extend(columns.iter().cloned());
    for metric in metrics {
        let mut row = vec![metric.to_owned()];
        row.extend(columns.iter().map(|arm| figure_or_dash(measures.median(arm, metric))));
        rows.push(row);
    }
    markdown(&rows)
}

/// Round trips, system calls, allocations and copies: through the mounts, and of single
/// calls over a socket.
fn counters(measures: &Measures, arms: &[&str]) -> String {
    let figures = [
        "round_trips",
        "client_system_calls",
        "server_system_calls",
        "client_allocations",
        "server_allocations",
        "client_copied_bytes",
        "copied_bytes",
    ];
    let mut rows = vec![vec!["arm".to_owned(), "operation".to_owned()]];
    rows[0].extend(figures.iter().map(|figure| figure.replace('_', " ")));
    let all: Vec<String> =
        arms.iter().flat_map(|arm| [(*arm).to_owned(), format!("{arm}.cto")]).collect();
    for arm in all.iter().map(String::as_str).chain(["socket"]) {
        for op in operations(measures, arm) {
            let value = |figure: &&str| measures.median(arm, &format!("{op}.{figure}"));
            let values: Vec<Option<f64>> = figures.iter().map(value).collect();
            if values.iter().any(Option::is_some) {
                let mut row = vec![arm.to_owned(), op.to_owned()];
                row.extend(values.into_iter().map(figure_or_dash));
                rows.push(row);
            }
        }
    }
    markdown(&rows)
}

fn operations<'a>(measures: &'a Measures, arm: &str) -> Vec<&'a str> {
    let mut operations = Vec::new();
    for measure in measures.0.iter().filter(|measure| measure.arm == arm) {
        if let Some((op, _)) = measure.metric.split_once('.')
            && !operations.contains(&op)
        {
            operations.push(op);
        }
    }
    operations
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_judged_from_the_right_side() {
        assert_eq!(Goal::AtLeast(0.5).judge(0.5), GoalVerdict::Pass);
        assert_eq!(Goal::AtLeast(0.5).judge(0.49), GoalVerdict::Miss);
        assert_eq!(Goal::AtMost(0.0).judge(0.0), GoalVerdict::Pass);
        assert_eq!(Goal::AtMost(0.0).judge(1.0), GoalVerdict::Miss);
    }

    #[test]
    fn what_keeping_costs_stands_side_by_side() {
        let raw = |arm, value| line(arm, "stream_write.cpu_us", value, "us");
        let arms = [("uring", 440.0), ("uring.replay256M", 500.0), ("uring.replay0", 420.0)];
        let measures = Measures::new(arms.map(|(arm, value)| raw(arm, value)).to_vec());
        let table = keeping(&measures, &["uring"]);
        assert!(table.contains("| uring.replay0 | uring | uring.replay256M |"), "{table}");
        assert!(table.contains("| 420           | 440   | 500              |"), "{table}");
    }

    #[test]
    fn the_dearer_direction_counts() {
        let raw = |arm, metric, value| line(arm, metric, value, "us");
        let measures = Measures::new(vec![
            raw("tcp", "stream_read.cpu_us", 200.0),
            raw("tcp", "stream_write.cpu_us", 200.0),
            raw("native", "stream_read.cpu_us", 100.0),
            raw("native", "stream_write.cpu_us", 100.0),
            raw("native", "zeros.cpu_us", 50.0),
            raw("null.uring", "stream_read.cpu_us", 150.0),
            raw("null.uring", "stream_write.cpu_us", 100.0),
            raw("uring", "stream_read.cpu_us", 500.0),
            raw("uring", "stream_write.cpu_us", 600.0),
        ]);
        let (lines, table) = report(&measures);
        let found = lines.iter().find(|line| line.metric == "stream_cpu_vs_sum").unwrap();
        assert_eq!(found.value, 1.5);
        assert!(table.contains("MISS"), "{table}");
    }

    #[test]
    fn four_threads_are_held_against_one() {
        let raw = |metric, value| line("classic", metric, value, "1/s");
        let measures =
            Measures::new(vec![raw("rand4k.per_s", 20_000.0), raw("rand4k_j4.per_s", 50_000.0)]);
        assert_eq!(value(&measures, "classic", "rand4k_t4_vs_one"), Some(2.5));
    }
}
