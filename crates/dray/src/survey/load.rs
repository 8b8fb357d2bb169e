//! Loads of a survey. Each thread repeats one call for a while, and waits for each answer before the next call.

use std::fmt;
use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use dray_client::{Client, ConnectOptions, Target};
use dray_core::{
    Buf, BufMut, Context, CreateHow, FileSystem, NodeId, OpenFile, OpenHow, Pid, RemoveKind,
    RequestId, Write,
};
use dray_rt::{DriverKind, Executor};

use super::{LoadKind, cpu};

/// Size of the files worked on: larger than most caches of processors, small enough for
/// every disk.
const FILE_BYTES: u64 = 32 << 20;
/// Latencies kept of each thread; beyond that they are left out.
const SAMPLES_MAX: usize = 4 << 20;
/// Alignment of memory and offsets that every device is content with.
const ALIGN_BYTES: usize = 4096;

/// Where the load goes.
#[derive(Clone)]
pub enum LoadTarget {
    /// A file system in this process.
    Local(Arc<dyn FileSystem>),
    /// An export, through the library; and the processes of this machine that work for it.
    Remote(Target, ConnectOptions, Vec<u32>),
    /// A directory, by system calls; and the processes that work for it.
    Path(PathBuf, Vec<u32>),
}

/// One measurement.
pub struct SurveyLoad {
    pub work: LoadKind,
    pub threads: usize,
    pub block_bytes: usize,
    pub duration: Duration,
}

/// What came of it.
#[derive(Default)]
pub struct LoadResult {
    pub count: u64,
    pub elapsed: Duration,
    pub cpu: Duration,
    samples_ns: Vec<u32>,
}

pub type LoadError = Box<dyn std::error::Error + Send + Sync>;

impl LoadResult {
    /// With what one thread did.
    pub(super) fn add(&mut self, tally: Tally) {
        self.count += tally.count;
        self.samples_ns.extend(tally.samples_ns);
    }

    /// All threads were added.
    pub(super) fn settle(&mut self) {
        self.samples_ns.sort_unstable();
    }

    /// The latency that a share of the calls did not exceed, microseconds.
    pub fn quantile_us(&self, share: f64) -> f64 {
        let last = self.samples_ns.len().saturating_sub(1);
        let index = (last as f64 * share).round() as usize;
        self.samples_ns.get(index).map_or(0.0, |ns| f64::from(*ns) / 1000.0)
    }
}

impl SurveyLoad {
    /// Runs it. Errors: one of a thread.
    pub fn run(&self, place: &LoadTarget) -> Result<LoadResult, LoadError> {
        let others: &[u32] = match place {
            LoadTarget::Path(_, others) | LoadTarget::Remote(_, _, others) => others,
            LoadTarget::Local(_) => &[],
        };
        // Everybody prepares, then all begin at once, and we note the time; when all have ended we
        // note it again. Only then is cleaned up, which is not part of it.
        let mut gates = Gates::of_phases(self.threads + 1, 1);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.threads)
                .map(|index| {
                    let gates = gates.clone();
                    scope.spawn(move || self.run_thread(place, index, gates))
                })
                .collect();
            gates.pass(Gates::before(0));
            let (begin, cpu_before) = (Instant::now(), cpu::used(others));
            gates.pass(Gates::end(0));
            let (elapsed, cpu_after) = (begin.elapsed(), cpu::used(others));
            let cpu = cpu_after.saturating_sub(cpu_before);
            let mut outcome = LoadResult { elapsed, cpu, ..LoadResult::default() };
            let mut failed = Vec::new();
            for thread in threads {
                match thread.join().map_err(|_| "a thread of the load died")? {
                    Ok(tally) => outcome.add(tally),
                    Err(error) => failed.push(error),
                }
            }
            if let Some(error) = reportable_error(failed) {
                return Err(error);
            }
            outcome.settle();
            Ok(outcome)
        })
    }

    fn run_thread(
        &self,
        place: &LoadTarget,
        index: usize,
        mut gates: Gates,
    ) -> Result<Tally, LoadError> {
        match place {
            LoadTarget::Path(dir, _) => self.run_path(dir, index, &mut gates),
            LoadTarget::Local(fs) => {
                let result = block_on(self.run_on(&**fs, &own_context(), index, &mut gates));
                // The maker of the directory removes it with its content.
                result.map_err(|error| match error.downcast::<CleanupError>() {
                    Ok(left) => left.why,
                    Err(error) => error,
                })
            }
            LoadTarget::Remote(target, options, _) => block_on(async {
                let client = Client::connect(target, options).await?;
                let cx = client.context();
                let result = self.run_on(client.fs(), &cx, index, &mut gates).await;
                client.goodbye();
                result
            }),
        }
    }

    async fn run_on(
        &self,
        fs: &dyn FileSystem,
        cx: &Context,
        index: usize,
        gates: &mut Gates,
    ) -> Result<Tally, LoadError> {
        if self.work == LoadKind::Ping {
            let mut tally = Tally::begin(gates, Gates::begin(0), self.duration);
            while tally.goes_on() {
                fs.statfs(cx).await?;
                tally.did_one();
            }
            gates.pass(Gates::end(0));
            return Ok(tally);
        }
        let name = file_name(index);
        let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o600, exclusive: false };
        let root = fs.info().root;
        let as_name = dray_core::Name::new(name.as_bytes())?;
        let (_, file) = fs.create(cx, root, as_name, how).await?;
        let result = self.run_file(&*file, cx, gates).await;
        gates.pass(Gates::end(0));
        let closed = file.close(cx).await;
        let removed = fs.remove(cx, root, as_name, RemoveKind::File).await;
        let is_left = removed.is_err();
        let done = result.and_then(|tally| {
            closed?;
            removed?;
            Ok(tally)
        });
        done.map_err(|why| if is_left { CleanupError { why }.into() } else { why })
    }

    async fn run_file(
        &self,
        file: &dyn OpenFile,
        cx: &Context,
        gates: &mut Gates,
    ) -> Result<Tally, LoadError> {
        let filling = Buf::from(vec![0xa5; dray_core::IO_MAX_BYTES]);
        let mut at = 0;
        while at < FILE_BYTES {
            at += file.write(cx, Write::at(at), filling.clone()).await?.max(1) as u64;
        }
        let block = filling.slice(0..self.block_bytes);
        let mut into = BufMut::heap(self.block_bytes);
        let mut offsets = Offsets::new(self.block_bytes);
        let mut tally = Tally::begin(gates, Gates::begin(0), self.duration);
        while tally.goes_on() {
            let at = offsets.next();
            if self.work == LoadKind::Read {
                into.clear();
                into = file.read(cx, at, into).await.map_err(|(error, _)| error)?;
                if into.capacity() < self.block_bytes || into.is_empty() {
                    return Err("a read came back empty".into());
                }
            } else {
                file.write(cx, Write::at(at), block.clone()).await?;
            }
            tally.did_one();
        }
        Ok(tally)
    }

    fn run_path(&self, dir: &Path, index: usize, gates: &mut Gates) -> Result<Tally, LoadError> {
        let path = dir.join(file_name(index));
        let result = self.run_system_calls(&path, gates);
        gates.pass(Gates::end(0));
        let removed = std::fs::remove_file(&path);
        let tally = result?;
        removed?;
        Ok(tally)
    }

    fn run_system_calls(&self, path: &Path, gates: &mut Gates) -> Result<Tally, LoadError> {
        // O_DIRECT: what the kernel has cached is not what is to be measured.
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true).mode(0o600);
        let file = options
            .clone()
            .custom_flags(libc::O_DIRECT)
            .open(path)
            .or_else(|_| options.open(path))?;
        let mut memory = vec![0xa5u8; dray_core::IO_MAX_BYTES + ALIGN_BYTES];
        let skip = memory.as_ptr().align_offset(ALIGN_BYTES).min(ALIGN_BYTES);
        let memory = &mut memory[skip..skip + dray_core::IO_MAX_BYTES];
        for at in (0..FILE_BYTES).step_by(memory.len()) {
            file.write_all_at(memory, at)?;
        }
        let block = &mut memory[..self.block_bytes];
        let mut offsets = Offsets::new(self.block_bytes);
        let mut tally = Tally::begin(gates, Gates::begin(0), self.duration);
        while tally.goes_on() {
            match self.work {
                LoadKind::Read => file.read_exact_at(block, offsets.next())?,
                _ => file.write_all_at(block, offsets.next())?,
            }
            tally.did_one();
        }
        Ok(tally)
    }
}

/// For calls of this process to a file system that it has itself.
pub(super) fn own_context() -> Context {
    Context::new(NodeId(0), RequestId(1), dray_client::own_identity(), Pid(std::process::id()))
}

pub(super) fn block_on<T>(
    work: impl Future<Output = Result<T, LoadError>>,
) -> Result<T, LoadError> {
    Executor::new(DriverKind::Epoll)?.block_on(work)
}

fn file_name(index: usize) -> String {
    format!("{}{index}", file_names())
}

/// How the names of all files begin.
pub(super) fn file_names() -> String {
    format!(".dray-survey-{}-", std::process::id())
}

/// A load failed, and what it wrote could not be removed, either.
#[derive(Debug)]
pub struct CleanupError {
    pub why: LoadError,
}

impl fmt::Display for CleanupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (why, names) = (&self.why, file_names());
        write!(f, "{why}; {names}* are left behind at the top of the export: remove them there")
    }
}

impl std::error::Error for CleanupError {}

/// Of the errors of the threads: one that the user has to act on, else the first.
pub(super) fn reportable_error(mut failed: Vec<LoadError>) -> Option<LoadError> {
    let left = failed.iter().position(|error| error.is::<CleanupError>()).unwrap_or(0);
    (!failed.is_empty()).then(|| failed.swap_remove(left))
}

/// Gates that all threads of a load, and who started them, pass together. They are for who has prepared, and
/// for the begin and the end of each phase. Who has failed passes them all when this is dropped: the
/// others must not wait for it.
pub(super) struct Gates {
    all: Vec<Arc<Barrier>>,
    passed: usize,
}

impl Gates {
    pub(super) fn of_phases(threads: usize, phases: usize) -> Gates {
        let all = (0..=2 * phases).map(|_| Arc::new(Barrier::new(threads))).collect();
        Gates { all, passed: 0 }
    }

    /// So many gates are passed before a phase can begin.
    pub(super) fn before(phase: usize) -> usize {
        1 + 2 * phase
    }

    /// So many are passed when the phase begins.
    pub(super) fn begin(phase: usize) -> usize {
        2 + 2 * phase
    }

    /// So many are passed when all have done the work of the phase.
    pub(super) fn end(phase: usize) -> usize {
        3 + 2 * phase
    }

    /// Passes those that are left of the first `count`.
    pub(super) fn pass(&mut self, count: usize) {
        while self.passed < count.min(self.all.len()) {
            self.all[self.passed].wait();
            self.passed += 1;
        }
    }
}

impl Clone for Gates {
    /// For one more thread, before any of them.
    fn clone(&self) -> Gates {
        Gates { all: self.all.clone(), passed: 0 }
    }
}

impl Drop for Gates {
    fn drop(&mut self) {
        self.pass(usize::MAX);
    }
}

/// Counts one thread's calls.
pub(super) struct Tally {
    count: u64,
    samples_ns: Vec<u32>,
    last: Instant,
    end: Instant,
}

impl Tally {
    /// For a phase that begins when so many gates are passed.
    pub(super) fn begin(gates: &mut Gates, begin: usize, duration: Duration) -> Tally {
        gates.pass(begin);
        let now = Instant::now();
        Tally { count: 0, samples_ns: Vec::new(), last: now, end: now + duration }
    }

    pub(super) fn goes_on(&self) -> bool {
        self.last < self.end && !crate::interrupt::came()
    }

    pub(super) fn did_one(&mut self) {
        let now = Instant::now();
        let nanos = u32::try_from((now - self.last).as_nanos()).unwrap_or(u32::MAX);
        if self.samples_ns.len() < SAMPLES_MAX {
            self.samples_ns.push(nanos);
        }
        self.count += 1;
        self.last = now;
    }
}

/// Offsets of blocks in the file, in no order that anybody could guess (a linear
/// congruential generator of full period).
struct Offsets {
    state: u64,
    blocks: u64,
    block_bytes: u64,
}

impl Offsets {
    fn new(block_bytes: usize) -> Offsets {
        let block_bytes = block_bytes as u64;
        Offsets { state: 1, blocks: FILE_BYTES / block_bytes, block_bytes }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.state >> 33) % self.blocks * self.block_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_backends::null::NullFs;
    use dray_core::{Errno, FsUuid, Op};
    use dray_layers::Observed;
    use dray_layers::faults::{Fault, Faults, When};

    #[test]
    fn loads_count_what_they_do() {
        let place = LoadTarget::Local(NullFs::new(FsUuid(1), 1 << 40));
        for work in [LoadKind::Ping, LoadKind::Read, LoadKind::Write] {
            let duration = Duration::from_millis(20);
            let load = SurveyLoad { work, threads: 2, block_bytes: 4096, duration };
            // Both threads may be held up for all of that time where others use the CPUs: then again.
            let counts = (0..100).any(|_| {
                let outcome = load.run(&place).unwrap();
                assert!(outcome.quantile_us(0.5) <= outcome.quantile_us(0.99));
                outcome.count > 10
            });
            assert!(counts, "{work:?}");
        }
    }

    #[test]
    fn a_load_that_cannot_begin_fails_and_does_not_hang() {
        let place = LoadTarget::Path("/nowhere/at/all".into(), Vec::new());
        let duration = Duration::from_millis(5);
        let load = SurveyLoad { work: LoadKind::Read, threads: 3, block_bytes: 4096, duration };
        assert!(load.run(&place).is_err());
    }

    /// What the first thread cleaned up was counted, and of what took longer than twice its time
    /// the rest was not.
    #[test]
    fn the_time_is_that_of_the_work() {
        let held_up = |op: Op, delay: Duration| {
            let faults = vec![Fault { op: Some(op), when: When::Always, delay, error: None }];
            let fs = NullFs::new(FsUuid(1), 1 << 40);
            LoadTarget::Local(Arc::new(Observed::new(fs, Arc::new(Faults::new(faults)))))
        };
        let delay = Duration::from_millis(500);
        let duration = Duration::from_millis(10);
        let load = SurveyLoad { work: LoadKind::Read, threads: 2, block_bytes: 4096, duration };
        let begin = Instant::now();
        let outcome = load.run(&held_up(Op::Remove, delay)).unwrap();
        assert!(begin.elapsed() >= outcome.elapsed + delay, "{:?}", outcome.elapsed);
        let outcome = load.run(&held_up(Op::Read, delay)).unwrap();
        assert!(outcome.elapsed >= delay && outcome.count == 2, "{:?}", outcome.elapsed);
    }

    /// "remove: Host is down" was all that was said where the server went away.
    #[test]
    fn files_left_behind_are_reported_after_the_failure() {
        let fails = |op, errno| Fault {
            op: Some(op),
            when: When::Always,
            delay: Duration::ZERO,
            error: Some(errno),
        };
        let plan = vec![fails(Op::Read, Errno::EIO), fails(Op::Remove, Errno::EHOSTDOWN)];
        let fs = NullFs::new(FsUuid(1), 1 << 40);
        let fs: Arc<dyn FileSystem> = Arc::new(Observed::new(fs, Arc::new(Faults::new(plan))));
        let duration = Duration::from_millis(1);
        let load = SurveyLoad { work: LoadKind::Read, threads: 1, block_bytes: 4096, duration };
        let mut gates = Gates::of_phases(1, 1);
        let error = block_on(load.run_on(&*fs, &own_context(), 0, &mut gates));
        let error = error.err().unwrap().to_string();
        assert!(error.contains("EIO") && error.contains(&file_names()), "{error}");
        assert!(error.contains("left behind"), "{error}");
        let error = load.run(&LoadTarget::Local(fs)).err().unwrap().to_string();
        assert!(error.contains("EIO") && !error.contains("left behind"), "{error}");
        // One thread could not come back, and another thread had written: only the former was
        // reported.
        let left = || CleanupError { why: "gone".into() }.into();
        let error = reportable_error(vec!["cannot connect".into(), left()]).unwrap();
        assert!(error.is::<CleanupError>());
        assert_eq!(reportable_error(vec!["a".into(), "b".into()]).unwrap().to_string(), "a");
        assert!(reportable_error(Vec::new()).is_none());
    }

    #[test]
    fn offsets_are_within_the_file() {
        for block_bytes in [4096, 1 << 20] {
            let mut offsets = Offsets::new(block_bytes);
            for _ in 0..1000 {
                let at = offsets.next();
                assert!(
                    at + block_bytes as u64 <= FILE_BYTES && at.is_multiple_of(block_bytes as u64)
                );
            }
        }
    }
}
