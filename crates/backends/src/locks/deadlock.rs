//! Deadlock detection: cycles of owners that wait for each other, over all files of an export.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, PoisonError};

use dray_core::{FileId, LockFamily};

use super::Owner;
use super::files::LockedFiles;
use super::owners::{OwnerIndex, WaitId};

/// Holders that one search examines at most. Then it gives up, and the caller waits.
const SEARCH_STEPS_MAX: usize = 4096;

/// Files of an owner that are examined before a search. If no request waits at any of them, no
/// search is needed. An owner with more files is always searched for.
const FILES_MAX: usize = 16;

/// Searches for cycles, one search at a time. Of requests that close a cycle at the same time, one
/// search sees the whole cycle. Its request is withdrawn before the next search begins.
///
/// A search follows waits, which are recorded before it begins. It takes the mutex of one file at a
/// time.
#[derive(Default)]
pub(super) struct DeadlockGraph {
    search: Mutex<()>,
}

/// One search.
struct Search<'a> {
    files: &'a LockedFiles,
    owners: &'a OwnerIndex,
    steps_left: usize,
}

impl DeadlockGraph {
    /// Ends the wait of `owner` by `withdraw` if the wait closes a cycle. In a cycle a holder in
    /// its way waits, over any number of other owners, for `owner`.
    pub(super) fn break_at<R>(
        &self,
        (files, owners): (&LockedFiles, &OwnerIndex),
        owner: Owner,
        wait: WaitId,
        withdraw: impl FnOnce() -> R,
    ) -> Option<R> {
        let _one_at_a_time = self.search.lock().unwrap_or_else(PoisonError::into_inner);
        let mut search = Search { files, owners, steps_left: SEARCH_STEPS_MAX };
        if !search.somebody_may_wait_for(owner, wait) {
            return None;
        }
        let cycle = search.cycle(owner, wait)?;
        // The parts were seen one after the other: only what is still there closes a circle.
        cycle.iter().all(|link| search.is_there(link)).then(withdraw)
    }
}

/// A wait, and an owner with a lock in its way.
type Link = (WaitId, Owner);

impl Search<'_> {
    /// Whether anybody waits at a file on which `owner` has locks, apart from this wait of its own.
    fn somebody_may_wait_for(&self, owner: Owner, (file, _): WaitId) -> bool {
        let held = self.owners.held_by(owner, FILES_MAX);
        let waiting = |at: &FileId| self.files.look(*at, |locks| locks.queue.len()).unwrap_or(0);
        held.len() == FILES_MAX || held.iter().any(|at| waiting(at) > usize::from(*at == file))
    }

    /// Waits each for the next one's owner, the last one for `owner`.
    fn cycle(&mut self, owner: Owner, wait: WaitId) -> Option<Vec<Link>> {
        let mut seen = HashSet::new();
        let mut found_by: HashMap<WaitId, Link> = HashMap::new();
        let mut next = vec![wait];
        while let Some(wait) = next.pop() {
            for holder in self.holders_against(wait) {
                self.steps_left = self.steps_left.checked_sub(1)?;
                let link = (wait, holder);
                if holder == owner {
                    let way_back =
                        std::iter::successors(Some(link), |(wait, _)| found_by.get(wait).copied());
                    return Some(way_back.collect());
                }
                if seen.insert(holder) {
                    for wait in self.owners.waits_of(holder, self.steps_left) {
                        found_by.insert(wait, link);
                        next.push(wait);
                    }
                }
            }
        }
        None
    }

    fn holders_against(&self, (file, number): WaitId) -> Vec<Owner> {
        let max = self.steps_left + 1;
        let fcntl = |waiter: &super::queue::Waiter| waiter.lock.family == LockFamily::Posix;
        let holders = self.files.look(file, |locks| {
            let waiter = locks.queue.get(number).filter(|waiter| fcntl(waiter));
            waiter.map(|_| locks.holders_against(number, max))
        });
        holders.flatten().unwrap_or_default()
    }

    fn is_there(&self, (wait, holder): &Link) -> bool {
        self.holders_against(*wait).contains(holder)
    }
}
