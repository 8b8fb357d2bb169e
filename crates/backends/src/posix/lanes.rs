//! Which thread makes a call to the file system below.
//!
//! A thread that serves connections must not wait for a disk: everybody whose connection it
//! serves would wait, too. So what changes something, syncs, or cannot be read without waiting is
//! done by threads of its own kind (a lane), and one kind does not wait for another. Looks at names
//! and attributes stay on the serving thread as long as nobody has been slow lately: most of what
//! they need is in memory, and the hand-over costs more than they do.
//!
//! File systems in memory have no disk to wait for. What takes long there is moving or freeing much
//! memory, and nothing else.

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use dray_core::{Attr, FileId, Op};
use dray_rt::sync::Notify;
use dray_rt::{NoThread, Pool, Share};

use super::options::PosixOptions;
use super::sys;

/// A call that takes longer has waited for a disk. Waiting for a busy CPU seldom takes as long, and
/// the hand-over that follows would wait for one twice more.
const SLOW_MIN: Duration = Duration::from_millis(10);

/// For so long after a slow call looks are expected to be slow, too.
const SLOW_LASTS: Duration = Duration::from_secs(1);

/// Calls that one file has under way at once in a lane where they wait for each other
/// in the kernel (`inode->i_rwsem`): one that runs, and one that follows.
const SAME_FILE_MAX: usize = 2;

/// What is freed in memory within some 200 microseconds.
pub(crate) const QUICK_MAX_BYTES: u64 = 4 << 20;

/// Descriptors that wait at once to be closed. Further ones are closed by who lets go of them.
const CLOSES_MAX: usize = 1024;

/// A kind of calls, which has threads of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Looks at names and attributes.
    Looks,
    /// Changes of these.
    Changes,
    /// Reading what is not in memory.
    Reads,
    /// Writing, and what else takes as long as there are data.
    Writes,
    /// Waiting for media.
    Syncs,
    /// Closing what has been written to, or has lost its names, whose data the kernel frees then.
    Closes,
}

impl Lane {
    /// Where a call belongs that says no more than what it is.
    pub(crate) fn of(op: Op) -> Lane {
        use Op::*;
        match op {
            Lookup | LookupOpen | Parent | Getattr | Readlink | Access | Statfs | Getxattr
            | Listxattr | Readdir | TestLock | GetFlags | GetXflags | Open | OpenNamed | Reopen => {
                Lane::Looks
            }
            // ext4 and others have who looks for data wait for who writes.
            Read | Seek => Lane::Reads,
            Write | Allocate | CopyRange | Put | Redo => Lane::Writes,
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

/// The threads of one export, but for those that serve connections.
pub(crate) struct Lanes {
    pools: [Pool; Lane::ALL.len()],
    is_memory: bool,
    running: Arc<Running>,
    /// Until when looks are expected to be slow, in nanoseconds of [`dray_rt::now`].
    slow_until: AtomicU64,
    closing: Arc<Closing>,
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
            running: Arc::new(Running::new(threads * Lane::ALL.len())),
            slow_until: AtomicU64::new(0),
            closing: Arc::default(),
        })
    }

    fn pool(&self, lane: Lane) -> &Pool {
        &self.pools[lane as usize]
    }

    /// Does `work` on a thread of this lane: in turn with the work of other clients, and behind
    /// what is to be done with the same file.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        lane: Lane,
        (client, file): (u64, Option<FileId>),
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NoThread> {
        let thing = file.map(|id| id.ino ^ id.generation.rotate_left(32));
        let running = self.running.clone();
        let work = move || {
            MAY_WAIT.set(true);
            let _running = running.begin();
            work()
        };
        self.pool(lane).run_for(Share { client, thing }, work).await
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

    /// Does `work`, and notes whether it was slow.
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

    /// Waits until what has no name any more, and is being closed now, has gone: its space is free
    /// then. Answers whether there was any.
    pub(crate) async fn closed(&self) -> bool {
        self.closing.closed().await
    }

    /// Descriptors that have been given to the threads that close.
    #[cfg(test)]
    pub(crate) fn closes(&self) -> usize {
        self.closing.begun.load(Ordering::SeqCst)
    }

    /// Closes a descriptor, perhaps the last one of a file without a name, whose data the kernel frees
    /// then: that takes as long as there are data, and on a disk until what is being written of
    /// them is there (`evict` in fs/inode.c).
    fn close(&self, fd: OwnedFd) {
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

/// When the calls began that run on threads of lanes.
struct Running {
    count: AtomicUsize,
    /// In nanoseconds; 0: a place for another.
    since: Box<[AtomicU64]>,
}

/// A call that runs.
struct Begun<'a> {
    running: &'a Running,
    place: Option<&'a AtomicU64>,
}

impl Running {
    fn new(places: usize) -> Running {
        let since = (0..places).map(|_| AtomicU64::new(0)).collect();
        Running { count: AtomicUsize::new(0), since }
    }

    fn begin(&self) -> Begun<'_> {
        self.count.fetch_add(1, Ordering::Relaxed);
        let now = dray_rt::now().as_nanos();
        let take = |place: &&AtomicU64| {
            place.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        Begun { running: self, place: self.since.iter().find(take) }
    }

    /// Whether one has lasted long enough to be called slow.
    fn any_since(&self, now: u64) -> bool {
        let before = now.saturating_sub(SLOW_MIN.as_nanos() as u64);
        self.since.iter().any(|since| (1..=before).contains(&since.load(Ordering::Relaxed)))
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            place.store(0, Ordering::Relaxed);
        }
        self.running.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What is being closed: how many have been begun and how many are over.
#[derive(Default)]
struct Closing {
    begun: AtomicUsize,
    over: AtomicUsize,
    one_is_over: Notify,
}

impl Closing {
    /// Whether there is a place for one more.
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

    /// Waits until as many are over as have been begun by now.
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

/// A descriptor that is closed where that holds up nobody.
pub(crate) struct Kept {
    /// Always there, but while it is being dropped.
    fd: Option<OwnedFd>,
    lanes: Option<Arc<Lanes>>,
}

impl Kept {
    pub(crate) fn new(fd: OwnedFd, lanes: &Arc<Lanes>) -> Kept {
        Kept { fd: Some(fd), lanes: Some(lanes.clone()) }
    }

    /// Closes it here: another descriptor keeps the file, so that this close frees no data.
    pub(crate) fn close_beside(mut self, _keeper: BorrowedFd<'_>) {
        drop(self.fd.take());
    }

    /// One that nobody waits for.
    #[cfg(test)]
    pub(crate) fn of_no_export(fd: OwnedFd) -> Kept {
        Kept { fd: Some(fd), lanes: None }
    }
}

impl std::ops::Deref for Kept {
    type Target = OwnedFd;

    fn deref(&self) -> &OwnedFd {
        self.fd.as_ref().expect("it is taken when it is dropped")
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let (Some(fd), Some(lanes)) = (self.fd.take(), &self.lanes) {
            lanes.close(fd);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use dray_rt::{DriverKind, Executor};

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

    #[test]
    fn every_lane_is_where_its_number_says() {
        for (at, (lane, _)) in Lane::ALL.iter().enumerate() {
            assert_eq!(*lane as usize, at);
        }
    }

    #[test]
    fn so_many_are_being_closed_and_no_more() {
        let closing = Closing::default();
        assert!((0..CLOSES_MAX).all(|_| closing.enter()) && !closing.enter());
        closing.leave();
        assert!(closing.enter() && !closing.enter());
    }
}
