//! Giving the memory of a ring's payloads back when the mount rests.
//!
//! The kernel hands requests to the entry that became free last, so that the payloads of a calm
//! mount are few. After an hour in which hundreds of large requests stood still, all of them have
//! memory. The memory of an idle entry must not be touched: a request may lie in it at any time
//! without our knowing. So somebody else asks each queue for something as often as it has entries,
//! at once ([`crate::reclaim_entries`]). Each of these questions is kept waiting until all are
//! there. Then they hold all entries, and what an entry with such a question has in its payload is
//! ours to give back.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_rt::sleep;
use dray_rt::sync::watch;

use crate::front::Worker;
use crate::transport::area::{PAGE_BYTES, PAYLOAD_BYTES};
use crate::transport::queues::Queues;

/// A mount in which no large request came for so long is at rest.
const REST_TIME: Duration = Duration::from_secs(7);
/// Payloads that keep their memory, in the whole mount. So a daemon that is killed while one stream
/// begins has all that the kernel copies to.
const KEPT_MAX: usize = 4;
/// Longest time for which the questions of one queue hold its entries.
const RECLAIM_MAX: Duration = Duration::from_millis(250);
/// Attempts for one rest: entries that hold something else, or whose CPU nobody may run on, keep
/// their memory until the next.
const ATTEMPTS_MAX: u32 = 3;

/// What all payloads of a mount have taken.
#[derive(Default)]
pub(crate) struct Payloads {
    /// Bytes that have memory.
    used_bytes: AtomicUsize,
    /// Large requests so far.
    uses: AtomicUsize,
    /// A task looks whether the mount rests.
    tended: AtomicBool,
}

impl Payloads {
    /// The memory of one entry, of which a predecessor has used so much.
    pub(crate) fn of_entry(self: &Arc<Payloads>, used_bytes: usize) -> PayloadUse {
        let used = PayloadUse { bytes: AtomicUsize::new(0), all: self.clone() };
        used.takes(used_bytes);
        used
    }

    fn are_many(&self) -> bool {
        self.used_bytes.load(Ordering::Relaxed) > KEPT_MAX * PAYLOAD_BYTES
    }
}

/// How much of an entry's payload has memory.
pub(crate) struct PayloadUse {
    bytes: AtomicUsize,
    all: Arc<Payloads>,
}

impl PayloadUse {
    /// A request or its answer takes the first `bytes` of the payload.
    pub(crate) fn takes(&self, bytes: usize) {
        if bytes <= PAGE_BYTES {
            return; // the first page is always there
        }
        let before = self.bytes.fetch_max(bytes, Ordering::Relaxed);
        self.all.used_bytes.fetch_add(bytes.saturating_sub(before), Ordering::Relaxed);
        self.all.uses.fetch_add(1, Ordering::Relaxed);
    }

    /// The memory is given back.
    pub(crate) fn given_back(&self) {
        self.all.used_bytes.fetch_sub(self.bytes.swap(0, Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// How far the entries of one queue are with coming together.
pub(crate) struct PayloadReclaim {
    stage: Mutex<Stage>,
    /// Changes at the end of each reclaim.
    ended: watch::Sender<u64>,
}

#[derive(Clone, Copy)]
enum Stage {
    /// No caller wants a reclaim.
    Off,
    /// The first caller learns how many entries there are.
    Wanted,
    /// So many are still to come; those that come first keep their memory.
    Coming { left: usize, kept: usize },
}

impl Default for PayloadReclaim {
    fn default() -> PayloadReclaim {
        PayloadReclaim { stage: Mutex::new(Stage::Off), ended: watch::channel(0).0 }
    }
}

/// What becomes of an entry that holds such a question.
pub(crate) enum ReclaimPart {
    /// Nothing: the question is answered as for an attribute that is not there.
    None,
    /// The entry is the first: so many further entries are awaited.
    First(usize),
    /// The entry waits for the others; its memory may be given back if `gives`.
    Waits { gives: bool, end: watch::Receiver<u64> },
}

impl PayloadReclaim {
    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on the first who asks begins.
    fn want(&self) {
        let mut stage = self.stage();
        if matches!(*stage, Stage::Off) {
            *stage = Stage::Wanted;
        }
    }

    /// A question has come to the queue, `free` of whose entries hold nothing else. `kept`
    /// entries keep their memory.
    pub(crate) fn join(&self, free: usize, kept: usize) -> ReclaimPart {
        let mut stage = self.stage();
        match *stage {
            Stage::Off => ReclaimPart::None,
            Stage::Wanted if free == 0 => ReclaimPart::None,
            Stage::Wanted => {
                *stage = Stage::Coming { left: free, kept };
                ReclaimPart::First(free)
            }
            Stage::Coming { left, kept } => {
                let end = self.ended.subscribe();
                *stage = Stage::Coming { left: left - 1, kept: kept.saturating_sub(1) };
                if left == 1 {
                    self.end_in(&mut stage);
                }
                ReclaimPart::Waits { gives: kept == 0, end }
            }
        }
    }

    /// All who wait are answered, and nobody is awaited any more.
    pub(crate) fn end(&self) {
        self.end_in(&mut self.stage());
    }

    fn end_in(&self, stage: &mut Stage) {
        *stage = Stage::Off;
        self.ended.send_modify(|ends| *ends += 1);
    }
}

impl Queues {
    /// Called after each request: has somebody look after the payloads if they have taken much.
    pub(crate) fn tend_payloads(self: &Arc<Queues>, worker: &Arc<Worker>) {
        let payloads = &self.payloads;
        if payloads.are_many() && !payloads.tended.swap(true, Ordering::SeqCst) {
            dray_rt::spawn(self.clone().tend(worker.clone()));
        }
    }

    /// Waits until the mount rests, and has its entries come together then. Ends when that has
    /// helped, or does not: a mount without work is not woken for ever.
    async fn tend(self: Arc<Queues>, worker: Arc<Worker>) {
        let payloads = &self.payloads;
        let (mut before, mut attempts) = (payloads.uses.load(Ordering::Relaxed), 0);
        loop {
            sleep(REST_TIME).await;
            let uses = payloads.uses.load(Ordering::Relaxed);
            if std::mem::replace(&mut before, uses) != uses {
                attempts = 0;
                continue;
            }
            self.reclaims().for_each(PayloadReclaim::end); // of an attempt that nobody heeded
            if !payloads.are_many() || attempts == ATTEMPTS_MAX {
                payloads.tended.store(false, Ordering::SeqCst);
                // Something may have come meanwhile, and nobody else looked then.
                if payloads.uses.load(Ordering::SeqCst) == uses
                    || payloads.tended.swap(true, Ordering::SeqCst)
                {
                    return;
                }
                attempts = 0;
                continue;
            }
            attempts += 1;
            self.reclaims().for_each(PayloadReclaim::want);
            worker.shared.options.host.reclaim_entries();
        }
    }

    /// The part that an entry of the queue of `cpu` takes which holds a question for it.
    pub(crate) fn reclaim_part(self: &Arc<Queues>, cpu: u16) -> ReclaimPart {
        let kept = KEPT_MAX / self.cpus();
        let part = self.reclaim(cpu).join(self.free_entries(cpu), kept);
        if matches!(part, ReclaimPart::First(_)) {
            let queues = self.clone();
            let mut end = self.reclaim(cpu).ended.subscribe();
            dray_rt::spawn(async move {
                let _ = dray_rt::timeout(RECLAIM_MAX, end.changed()).await;
                queues.reclaim(cpu).end();
            });
        }
        part
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_waits_where_nothing_is_wanted() {
        let reclaim = PayloadReclaim::default();
        assert!(matches!(reclaim.join(8, 2), ReclaimPart::None));
        reclaim.want();
        assert!(matches!(reclaim.join(0, 2), ReclaimPart::None), "all entries hold something else");
    }

    // proves: P133
    #[test]
    fn all_wait_for_the_last_and_the_first_keep_their_memory() {
        let reclaim = PayloadReclaim::default();
        reclaim.want();
        assert!(matches!(reclaim.join(3, 1), ReclaimPart::First(3)));
        reclaim.want(); // while they come: no second beginning
        let mut waiting = Vec::new();
        for gives in [false, true] {
            match reclaim.join(3, 1) {
                ReclaimPart::Waits { gives: does, end } if does == gives => waiting.push(end),
                _ => panic!("it should wait, and give its memory back: {gives}"),
            }
        }
        assert!(waiting.iter().all(|end| !end.has_changed().unwrap()));
        assert!(matches!(reclaim.join(3, 1), ReclaimPart::Waits { gives: true, .. }));
        assert!(waiting.iter().all(|end| end.has_changed().unwrap()));
        assert!(matches!(reclaim.join(3, 1), ReclaimPart::None), "it is over");
    }

    #[test]
    fn who_waits_is_answered_though_not_all_have_come() {
        let reclaim = PayloadReclaim::default();
        reclaim.want();
        reclaim.join(3, 0);
        let ReclaimPart::Waits { end, .. } = reclaim.join(3, 0) else { panic!("it should wait") };
        reclaim.end();
        assert!(end.has_changed().unwrap());
        assert!(matches!(reclaim.join(3, 0), ReclaimPart::None));
    }

    #[test]
    fn memory_is_counted_once_and_what_is_small_not_at_all() {
        let all = Arc::new(Payloads::default());
        let entries: Vec<PayloadUse> = (0..=KEPT_MAX).map(|_| all.of_entry(0)).collect();
        for entry in &entries {
            entry.takes(PAYLOAD_BYTES);
            entry.takes(PAGE_BYTES);
            entry.takes(PAYLOAD_BYTES / 2);
        }
        assert!(all.are_many());
        entries[0].given_back();
        assert!(!all.are_many());
        assert_eq!(all.used_bytes.load(Ordering::Relaxed), KEPT_MAX * PAYLOAD_BYTES);
        assert_eq!(all.uses.load(Ordering::Relaxed), 2 * entries.len());
        let inherited = all.of_entry(PAYLOAD_BYTES);
        assert!(all.are_many());
        inherited.given_back();
        inherited.given_back();
        assert_eq!(all.used_bytes.load(Ordering::Relaxed), KEPT_MAX * PAYLOAD_BYTES);
    }
}
