//! Lanes: thread pools, each for one kind of blocking call to the file system below.
//!
//! A thread that serves connections must not wait for a disk, because all of its connections would
//! wait. So a lane makes the calls that change or sync something, and the reads that would wait. One
//! lane does not wait for another. Lookups of names and attributes stay on the serving thread as long as
//! no recent call was slow. Most of what they need is in memory, and a hand-over costs more than they do.
//!
//! A lone short call runs on the CPU of its caller, by the near thread of its lane (ADR 0062).
//!
//! File systems in memory have no disk. Only moving or freeing much memory takes long there.

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use dray_core::{Attr, FileId, Op};
use dray_rt::sync::Notify;
use dray_rt::{Instant, NoThread, Pool, Share};

use super::options::PosixOptions;
use super::sys;

/// A call that takes longer than this has waited for a disk. A wait for a busy CPU rarely takes as
/// long. A hand-over would wait for a CPU twice more.
const SLOW_MIN: Duration = Duration::from_millis(10);

/// How long after a slow call lookups are expected to be slow, too.
const SLOW_LASTS: Duration = Duration::from_secs(1);

/// Calls on one file that run at once in a lane where the kernel has them wait for each other
/// (`inode->i_rwsem`). There is one that runs, and one that follows.
const SAME_FILE_MAX: usize = 2;

/// Bytes that the kernel frees in memory within some 200 microseconds.
pub(crate) const QUICK_MAX_BYTES: u64 = 4 << 20;

/// So soon after its creation a file in memory is closed without a look at its size. To store data takes
/// longer than to free them.
pub(super) const NEW_LASTS: Duration = Duration::from_millis(2);

/// Data that are copied within some 20 microseconds.
const SHORT_MAX_BYTES: usize = 64 << 10;

/// Descriptors that wait to be closed. A thread that drops a further one closes it itself.
const CLOSES_MAX: usize = 1024;

/// A kind of blocking calls, with threads of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Looks at names and attributes.
    Looks,
    /// Changes of names and attributes.
    Changes,
    /// Reads of data that are not in memory.
    Reads,
    /// Writes, and other calls that take time in proportion to the data.
    Writes,
    /// Syncs, which wait for media.
    Syncs,
    /// Closes of files that were written to or have lost their names. The kernel frees data then.
    Closes,
}

impl Lane {
    /// The lane of an operation, as far as its name alone says.
    pub(crate) fn of(op: Op) -> Lane {
        use Op::*;
        match op {
            Lookup | LookupOpen | Parent | Getattr | Readlink | Access | Statfs | Getxattr
            | Listxattr | Readdir | TestLock | GetFlags | GetXflags | Open | OpenNamed | Learn
            | Reopen | Hold | Release => Lane::Looks,
            // On ext4 and others a search for data waits for a writer.
            Read | Seek => Lane::Reads,
            Write | WriteBack | Allocate | CopyRange | Put | Redo => Lane::Writes,
            Sync | SyncAll | Flush => Lane::Syncs,
            Close => Lane::Closes,
            Setattr | Make | Remove | Rename | Link | Create | Tmpfile | Setxattr | Removexattr
            | SetFlags | SetXflags | Lock | Recover | Declare => Lane::Changes,
        }
    }

    const ALL: [(Lane, &str); 6] = [
        (Lane::Looks, "dray-look"),
        (Lane::Changes, "dray-change"),
        (Lane::Reads, "dray-read"),
        (Lane::Writes, "dray-write"),
        (Lane::Syncs, "dray-sync"),
        (Lane::Closes, "dray-close"),
    ];
}

/// A call in a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LaneCall {
    lane: Lane,
    /// The call uses a CPU for a moment, however long it waits.
    is_short: bool,
}

impl LaneCall {
    /// A call that moves so many bytes.
    pub(crate) fn moving(lane: Lane, len_bytes: usize) -> LaneCall {
        LaneCall { lane, is_short: len_bytes <= SHORT_MAX_BYTES }
    }
}

impl From<Lane> for LaneCall {
    fn from(lane: Lane) -> LaneCall {
        let is_short = match lane {
            Lane::Changes => true,
            // What these take depends on the data, or on what is in memory.
            Lane::Looks | Lane::Reads | Lane::Writes | Lane::Syncs | Lane::Closes => false,
        };
        LaneCall { lane, is_short }
    }
}

/// The threads of one export, except those that serve connections.
pub(crate) struct Lanes {
    pools: [Pool; Lane::ALL.len()],
    is_memory: bool,
    running: Arc<RunningCalls>,
    /// Until when looks are expected to be slow, in nanoseconds of [`dray_rt::now`].
    slow_until: AtomicU64,
    closing: Arc<PendingCloses>,
}

thread_local! {
    /// This thread is one of a lane, and may wait.
    static MAY_WAIT: Cell<bool> = const { Cell::new(false) };
}

impl Lanes {
    pub(crate) fn new(options: &PosixOptions, is_memory: bool) -> Arc<Lanes> {
        let threads = options.threads_max.max(1);
        // A client whose calls all block leaves a quarter of the threads to others.
        let each = (threads - threads / 4).max(1);
        let same_file = |lane| match lane {
            Lane::Writes | Lane::Changes if !options.direct => SAME_FILE_MAX.min(each),
            _ => (threads / 2).max(1),
        };
        Arc::new(Lanes {
            pools: Lane::ALL.map(|(lane, name)| {
                Pool::shared(name, threads, options.queue_max, (each, same_file(lane)))
            }),
            is_memory,
            running: Arc::new(RunningCalls::new((threads + 1) * Lane::ALL.len())),
            slow_until: AtomicU64::new(0),
            closing: Arc::default(),
        })
    }

    fn pool(&self, lane: Lane) -> &Pool {
        &self.pools[lane as usize]
    }

    /// Does `work` on a thread of this lane. Clients are served one after the other, and calls on
    /// the same file one after the other.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        call: impl Into<LaneCall>,
        (client, file): (u64, Option<FileId>),
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NoThread> {
        let LaneCall { lane, is_short } = call.into();
        let thing = file.map(|id| id.ino ^ id.generation.rotate_left(32));
        let running = self.running.clone();
        let work = move || {
            MAY_WAIT.set(true);
            let _running = running.begin();
            work()
        };
        let (pool, share) = (self.pool(lane), Share { client, thing });
        match is_short {
            true => pool.run_short_for(share, work).await,
            false => pool.run_for(share, work).await,
        }
    }

    /// Whether looks at names and attributes may have to wait for the disk now.
    pub(crate) fn are_busy(&self) -> bool {
        let until = self.slow_until.load(Ordering::Relaxed);
        let running = self.running.count.load(Ordering::Relaxed) > 0;
        if until == 0 && !running {
            return false; // without a look at the clock
        }
        let now = dray_rt::now().as_nanos();
        now < until || running && self.running.any_since(now)
    }

    /// Does `work`, and records whether it was slow.
    pub(crate) fn timed<T>(&self, work: impl FnOnce() -> T) -> T {
        let before = dray_rt::now();
        let done = work();
        let after = dray_rt::now();
        if after - before >= SLOW_MIN {
            self.slow_until.store((after + SLOW_LASTS).as_nanos(), Ordering::Relaxed);
        }
        done
    }

    /// Calls that wait for a thread.
    pub(crate) fn waiting(&self) -> usize {
        self.pools.iter().map(Pool::waiting).sum()
    }

    /// Waits until files without a name that are being closed now are gone and their space is free.
    /// Answers whether there were any.
    pub(crate) async fn closed(&self) -> bool {
        self.closing.closed().await
    }

    /// Descriptors that have been given to the threads that close.
    #[cfg(test)]
    pub(crate) fn closes(&self) -> usize {
        self.closing.begun.load(Ordering::SeqCst)
    }

    /// Closes a descriptor, perhaps the last one of a file without a name. The kernel then frees
    /// the data. That takes time in proportion to the data, and on a disk waits for writes that are
    /// under way (`evict` in fs/inode.c).
    fn close(&self, fd: OwnedFd, made: Option<Instant>) {
        let is_new = |made: Instant| dray_rt::now() - made <= NEW_LASTS;
        if self.is_memory && made.is_some_and(is_new) {
            return;
        }
        let is_slow = |attr: &Attr| {
            attr.nlink == 0
                && (is_large(attr) || !self.is_memory && (!MAY_WAIT.get() || self.are_busy()))
        };
        let is_slow = sys::stat(fd.as_fd()).is_ok_and(|stat| is_slow(&stat.attr));
        if is_slow && self.closing.enter() {
            let (closing, running) = (self.closing.clone(), self.running.clone());
            let share = Share { client: 0, thing: None };
            self.pool(Lane::Closes).spawn_for(share, move || {
                let _running = running.begin();
                drop(fd);
                closing.leave();
            });
        }
    }
}

/// Whether a file has so many data, or blocks without, that it takes long to free them.
pub(crate) fn is_large(attr: &Attr) -> bool {
    attr.size.max(attr.blocks.saturating_mul(512)) > QUICK_MAX_BYTES
}

/// The times at which the running calls of lanes began.
struct RunningCalls {
    count: AtomicUsize,
    /// In nanoseconds; 0 marks a free entry.
    since: Box<[AtomicU64]>,
}

/// A running call.
struct RunningCall<'a> {
    running: &'a RunningCalls,
    place: Option<&'a AtomicU64>,
}

impl RunningCalls {
    fn new(places: usize) -> RunningCalls {
        let since = (0..places).map(|_| AtomicU64::new(0)).collect();
        RunningCalls { count: AtomicUsize::new(0), since }
    }

    fn begin(&self) -> RunningCall<'_> {
        self.count.fetch_add(1, Ordering::Relaxed);
        let now = dray_rt::now().as_nanos();
        let take = |place: &&AtomicU64| {
            place.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        RunningCall { running: self, place: self.since.iter().find(take) }
    }

    /// Whether a running call has lasted long enough to count as slow.
    fn any_since(&self, now: u64) -> bool {
        let before = now.saturating_sub(SLOW_MIN.as_nanos() as u64);
        self.since.iter().any(|since| (1..=before).contains(&since.load(Ordering::Relaxed)))
    }
}

impl Drop for RunningCall<'_> {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            place.store(0, Ordering::Relaxed);
        }
        self.running.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Counts of the closes that were begun and of those that have ended.
#[derive(Default)]
struct PendingCloses {
    begun: AtomicUsize,
    over: AtomicUsize,
    one_is_over: Notify,
}

impl PendingCloses {
    /// Whether there is room for one more close.
    fn enter(&self) -> bool {
        let over = self.over.load(Ordering::SeqCst);
        let next =
            |begun: usize| (begun.wrapping_sub(over) < CLOSES_MAX).then(|| begun.wrapping_add(1));
        self.begun.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next).is_ok()
    }

    fn leave(&self) {
        self.over.fetch_add(1, Ordering::SeqCst);
        self.one_is_over.notify_waiters();
    }

    /// Waits until all closes that have begun by now have ended.
    async fn closed(&self) -> bool {
        let begun = self.begun.load(Ordering::SeqCst);
        let mut waited = false;
        loop {
            let next = self.one_is_over.notified();
            if begun.wrapping_sub(self.over.load(Ordering::SeqCst)) as isize <= 0 {
                return waited;
            }
            waited = true;
            next.await;
        }
    }
}

/// A descriptor that a lane closes, so that no serving thread waits for the close.
pub(crate) struct DeferredClose {
    /// Present until the drop.
    fd: Option<OwnedFd>,
    lanes: Option<Arc<Lanes>>,
    /// The time of the creation of its file, if it was opened by that.
    made: Option<Instant>,
}

impl DeferredClose {
    pub(crate) fn new(fd: OwnedFd, lanes: &Arc<Lanes>) -> DeferredClose {
        DeferredClose::of_file(fd, lanes, None)
    }

    /// A descriptor of a file; `made` by its opening, then.
    pub(crate) fn of_file(fd: OwnedFd, lanes: &Arc<Lanes>, made: Option<Instant>) -> DeferredClose {
        DeferredClose { fd: Some(fd), lanes: Some(lanes.clone()), made }
    }

    /// Closes it here: another descriptor keeps the file, so that this close frees no data.
    pub(crate) fn close_beside(mut self, _other_descriptor: BorrowedFd<'_>) {
        drop(self.fd.take());
    }

    /// A descriptor without lanes, for tests.
    #[cfg(test)]
    pub(crate) fn without_lanes(fd: OwnedFd) -> DeferredClose {
        DeferredClose { fd: Some(fd), lanes: None, made: None }
    }
}

impl std::ops::Deref for DeferredClose {
    type Target = OwnedFd;

    fn deref(&self) -> &OwnedFd {
        self.fd.as_ref().expect("it is taken when it is dropped")
    }
}

impl Drop for DeferredClose {
    fn drop(&mut self) {
        if let (Some(fd), Some(lanes)) = (self.fd.take(), &self.lanes) {
            lanes.close(fd, self.made);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use dray_rt::{CpuSet, DriverKind, Executor};

    use super::*;

    fn lanes() -> Arc<Lanes> {
        Lanes::new(&PosixOptions::default(), false)
    }

    #[test]
    fn after_a_slow_call_looks_are_expected_to_be_slow() {
        let lanes = lanes();
        lanes.timed(|| ());
        assert!(!lanes.are_busy());
        lanes.timed(|| std::thread::sleep(SLOW_MIN));
        assert!(lanes.are_busy());
        lanes.slow_until.store(1, Ordering::Relaxed);
        assert!(!lanes.are_busy(), "it is long ago");
    }

    #[test]
    fn while_a_call_lasts_looks_are_expected_to_be_slow() {
        let lanes = lanes();
        let (thaw, frozen) = channel::<()>();
        let (begins, begun) = channel();
        let theirs = lanes.clone();
        let thread = std::thread::spawn(move || {
            let block = move || {
                begins.send(()).unwrap();
                frozen.recv().is_err()
            };
            let run = theirs.run(Lane::Writes, (1, None), block);
            Executor::new(DriverKind::Epoll).unwrap().block_on(run).unwrap()
        });
        begun.recv().unwrap();
        std::thread::sleep(SLOW_MIN);
        assert!(lanes.are_busy());
        drop(thaw);
        assert!(thread.join().unwrap());
        assert!(!lanes.are_busy(), "what it was is for who did it to say");
    }

    /// A lone small write took twice as long: it was made on another CPU, which had to be woken (ADR 0062).
    #[test]
    fn lone_short_calls_stay_on_the_cpu_of_the_serving_thread() {
        let allowed = CpuSet::allowed().unwrap();
        let first = CpuSet::only(allowed.iter().next().unwrap());
        let lanes = lanes();
        let serving = std::thread::spawn(move || {
            first.pin().unwrap();
            Executor::new(DriverKind::Epoll).unwrap().block_on(async {
                for (call, cpus) in [
                    (LaneCall::moving(Lane::Writes, SHORT_MAX_BYTES), &first),
                    (LaneCall::moving(Lane::Syncs, 1), &first),
                    (Lane::Changes.into(), &first),
                    (LaneCall::moving(Lane::Writes, SHORT_MAX_BYTES + 1), &allowed),
                    (Lane::Syncs.into(), &allowed),
                    (Lane::Reads.into(), &allowed),
                ] {
                    let ran = lanes.run(call, (1, None), || CpuSet::allowed().unwrap()).await;
                    assert_eq!(ran.as_ref(), Ok(cpus), "{call:?}");
                }
            });
        });
        serving.join().unwrap();
    }

    #[test]
    fn every_lane_is_where_its_number_says() {
        for (at, (lane, _)) in Lane::ALL.iter().enumerate() {
            assert_eq!(*lane as usize, at);
        }
    }

    #[test]
    fn so_many_are_being_closed_and_no_more() {
        let closing = PendingCloses::default();
        assert!((0..CLOSES_MAX).all(|_| closing.enter()) && !closing.enter());
        closing.leave();
        assert!(closing.enter() && !closing.enter());
    }
}
