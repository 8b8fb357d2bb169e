//! The queues of a ring: which entries there are, when new requests may come, and whether
//! the kernel has taken them.
//!
//! The kernel sends requests to the ring once every queue has had an entry. If it refuses
//! all those of a queue before that, it goes on with /dev/fuse, and so do we.

use std::convert::Infallible;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use dray_rt::sync::watch;
use dray_rt::{Ring, sleep};

use crate::front::Worker;
use crate::state::{State, header};
use crate::transport::area::{Area, AreaEntry};
use crate::transport::payloads::{PayloadReclaim, Payloads};
use crate::transport::ring::start_entry;

/// A queue whose entries all hold requests, of which none has been answered for so long, gets more
/// of them. Who waits for a server that is away must not keep others from ending, whose closes need
/// an entry.
const STALLED: Duration = Duration::from_millis(500);

/// What the entries of a mount have in common.
pub(crate) struct Queues {
    state: State,
    pub(crate) area: Arc<Area>,
    pub(crate) device: Arc<OwnedFd>,
    pub(crate) payloads: Arc<Payloads>,
    depth: usize,
    queues: Vec<Queue>,
    /// Entries that may still be added to queues that stand still: half of the spare ones.
    for_stalled: AtomicUsize,
    /// The last error with which the kernel refused an entry, negative.
    refusal: AtomicI32,
    /// A predecessor's requests are under way: new ones may come.
    open: watch::Sender<bool>,
    /// Held by every entry until it is in its queue or serves a request.
    settling: Mutex<Option<mpsc::Sender<Infallible>>>,
    settled: Mutex<mpsc::Receiver<Infallible>>,
}

/// Entries of one CPU's queue, and how many of them hold requests that may block.
#[derive(Default)]
struct Queue {
    entries: AtomicUsize,
    /// Entries that the kernel has.
    taken: AtomicUsize,
    blocking: AtomicUsize,
    /// Requests that came, and those that were answered.
    begun: AtomicUsize,
    answered: AtomicUsize,
    /// A task looks whether the queue stands still.
    watched: AtomicBool,
    /// The queue's entries come together for a moment when the mount rests.
    reclaim: PayloadReclaim,
}

impl Queue {
    fn has_free_entry(&self) -> bool {
        self.free_entries() > 0
    }

    fn free_entries(&self) -> usize {
        let answered = self.answered.load(Ordering::SeqCst);
        let busy = self.begun.load(Ordering::SeqCst).saturating_sub(answered);
        self.entries.load(Ordering::SeqCst).saturating_sub(busy)
    }
}

impl Queues {
    /// Queues for `cpus` possible CPUs of `depth` entries each, and `spares_max` in all
    /// for requests that block; `adopted` if a predecessor has been here. Errors: those of
    /// [`Area::open`].
    pub(crate) fn new(
        device: Arc<OwnedFd>,
        state: &State,
        (cpus, depth, spares_max): (usize, usize, usize),
        adopted: bool,
    ) -> io::Result<Queues> {
        let (settling, settled) = mpsc::channel();
        Ok(Queues {
            state: state.clone(),
            area: Arc::new(Area::open(state, cpus * depth + spares_max)?),
            device,
            payloads: Arc::default(),
            depth,
            for_stalled: AtomicUsize::new(spares_max / 2),
            refusal: AtomicI32::new(0),
            queues: (0..cpus).map(|_| Queue::default()).collect(),
            open: watch::channel(!adopted).0,
            settling: Mutex::new(Some(settling)),
            settled: Mutex::new(settled),
        })
    }

    /// Number of queues: one for each possible CPU.
    pub(crate) fn cpus(&self) -> usize {
        self.queues.len()
    }

    /// Starts serving the queues with these numbers on this thread's executor, what a
    /// predecessor had read first. New requests come when they are [opened](Queues::open).
    pub(crate) fn serve(self: &Arc<Queues>, worker: &Arc<Worker>, ring: &Ring, cpus: &[u16]) {
        for &cpu in cpus {
            let adopted: Vec<(AreaEntry, usize)> = self.area.adopted(cpu).collect();
            // All are counted before the first request asks whether there are enough.
            let entries = &self.queues[usize::from(cpu)].entries;
            entries.store(adopted.len(), Ordering::Release);
            for slot in adopted {
                start_entry(self, worker, ring, (cpu, slot), false);
            }
            while entries.load(Ordering::Acquire) < self.depth
                && self.add_entry(worker, ring, cpu, false)
            {}
        }
    }

    /// Every thread has begun with what its predecessor had read, so that these requests have found
    /// their replay slots: new ones may come. Returns when all entries are in their queues, so that
    /// a request that comes from now on finds one. Errors: the kernel's for a queue that has no
    /// entry. In that case it does not use the ring unless a predecessor had filled all queues
    /// ([`Queues::was_filled`]).
    pub(crate) fn open(&self) -> io::Result<()> {
        self.open.send_replace(true);
        drop(lock(&self.settling).take());
        let _ = lock(&self.settled).recv(); // ends when all have let go
        let refusal = -self.refusal.load(Ordering::Acquire);
        let filled = self.queues.iter().all(|queue| queue.taken.load(Ordering::Acquire) > 0);
        // The end of the mount is seen by those who read from the device.
        if !filled && !matches!(refusal, libc::ENOTCONN | libc::ECONNABORTED | libc::ENODEV) {
            return Err(io::Error::from_raw_os_error(refusal));
        }
        self.state.region.store(header::RING_READY, 1);
        Ok(())
    }

    /// Whether every queue has had an entry, in a predecessor's time, too.
    pub(crate) fn was_filled(state: &State) -> bool {
        state.region.load(header::RING_READY) != 0
    }

    pub(crate) async fn wait_open(&self) {
        let mut open = self.open.subscribe();
        let _ = open.wait_for(|open| *open).await; // the sender is ours
    }

    /// To be kept by an entry until it is settled.
    pub(crate) fn settling(&self) -> Option<mpsc::Sender<Infallible>> {
        lock(&self.settling).clone()
    }

    /// Entries of this queue that hold no request.
    pub(crate) fn free_entries(&self, cpu: u16) -> usize {
        self.queues[usize::from(cpu)].free_entries()
    }

    pub(crate) fn reclaim(&self, cpu: u16) -> &PayloadReclaim {
        &self.queues[usize::from(cpu)].reclaim
    }

    pub(crate) fn reclaims(&self) -> impl Iterator<Item = &PayloadReclaim> {
        self.queues.iter().map(|queue| &queue.reclaim)
    }

    /// The kernel has an entry of this queue.
    pub(crate) fn taken(&self, cpu: u16) {
        self.queues[usize::from(cpu)].taken.fetch_add(1, Ordering::AcqRel);
    }

    /// The kernel has refused an entry with this error, a negative number.
    pub(crate) fn refused(&self, cpu: u16, error: i32) {
        self.queues[usize::from(cpu)].entries.fetch_sub(1, Ordering::AcqRel);
        self.refusal.store(error, Ordering::Release);
    }

    /// Adds an entry to a queue; false when the memory for entries is used up. `spare`: while
    /// requests come.
    fn add_entry(
        self: &Arc<Queues>,
        worker: &Arc<Worker>,
        ring: &Ring,
        cpu: u16,
        spare: bool,
    ) -> bool {
        let Some(slot) = self.area.take(cpu).map(|slot| (slot, 0)) else { return false };
        self.queues[usize::from(cpu)].entries.fetch_add(1, Ordering::AcqRel);
        start_entry(self, worker, ring, (cpu, slot), spare);
        true
    }

    /// A request that may block begins: makes sure that as many entries as without it
    /// are left. False if that cannot be had.
    pub(crate) fn begin_blocking(
        self: &Arc<Queues>,
        worker: &Arc<Worker>,
        ring: &Ring,
        cpu: u16,
    ) -> bool {
        let queue = &self.queues[usize::from(cpu)];
        let blocking = queue.blocking.fetch_add(1, Ordering::AcqRel) + 1;
        if queue.entries.load(Ordering::Acquire) >= self.depth + blocking
            || self.add_entry(worker, ring, cpu, true)
        {
            return true;
        }
        self.end_blocking(cpu);
        false
    }

    pub(crate) fn end_blocking(&self, cpu: u16) {
        self.queues[usize::from(cpu)].blocking.fetch_sub(1, Ordering::AcqRel);
    }

    /// A request has come, perhaps into the last entry.
    pub(crate) fn begin_request(self: &Arc<Queues>, worker: &Arc<Worker>, ring: &Ring, cpu: u16) {
        let queue = &self.queues[usize::from(cpu)];
        queue.begun.fetch_add(1, Ordering::SeqCst);
        if !queue.has_free_entry() && !queue.watched.swap(true, Ordering::SeqCst) {
            dray_rt::spawn(self.clone().watch_queue(worker.clone(), ring.clone(), cpu));
        }
    }

    /// A request was answered.
    pub(crate) fn end_request(&self, cpu: u16) {
        self.queues[usize::from(cpu)].answered.fetch_add(1, Ordering::SeqCst);
    }

    /// Adds entries while nothing is answered, until one is free.
    async fn watch_queue(self: Arc<Queues>, worker: Arc<Worker>, ring: Ring, cpu: u16) {
        let queue = &self.queues[usize::from(cpu)];
        let mut before = queue.answered.load(Ordering::SeqCst);
        loop {
            sleep(STALLED).await;
            if queue.has_free_entry() {
                queue.watched.store(false, Ordering::SeqCst);
                // The last may have been taken meanwhile, and nobody else looks then.
                if queue.has_free_entry() || queue.watched.swap(true, Ordering::SeqCst) {
                    return;
                }
            }
            let answered = queue.answered.load(Ordering::SeqCst);
            if std::mem::replace(&mut before, answered) == answered {
                self.add_for_stalled(&worker, &ring, cpu);
            }
        }
    }

    fn add_for_stalled(self: &Arc<Queues>, worker: &Arc<Worker>, ring: &Ring, cpu: u16) {
        let added = (0..self.share()).take_while(|_| self.add_entry(worker, ring, cpu, true));
        added.for_each(drop);
    }

    /// How many entries a queue gets that stands still: as many as one begins with, as far as they
    /// can be had. However many it has, it gets no more: others want what it does not need.
    fn share(&self) -> usize {
        let without = |left: usize| Some(left.saturating_sub(self.depth));
        let left = self.for_stalled.fetch_update(Ordering::SeqCst, Ordering::SeqCst, without);
        left.map_or(0, |left| left.min(self.depth))
    }
}

/// CPUs that can ever be there: as many queues as the kernel wants served.
pub(crate) fn possible_cpus() -> io::Result<usize> {
    let list = std::fs::read_to_string("/sys/devices/system/cpu/possible")?;
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(last.parse::<usize>().ok()?.checked_sub(first.parse().ok()?)? + 1)
    };
    let count = list.trim().split(',').map(range).sum::<Option<usize>>();
    count.filter(|count| *count > 0).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    // proves: P68
    #[test]
    fn what_a_queue_that_stands_still_gets_does_not_grow_with_what_it_has() {
        let device = Arc::new(OwnedFd::from(std::fs::File::open("/dev/null").unwrap()));
        let state = State::create().unwrap();
        let queues = Queues::new(device, &state, (2, 8, 2 * 28), false).unwrap();
        let given: Vec<usize> = (0..6)
            .map(|_| {
                let share = queues.share();
                queues.queues[0].entries.fetch_add(share, Ordering::SeqCst);
                share
            })
            .collect();
        assert_eq!(given, [8, 8, 8, 4, 0, 0]);
    }
}
