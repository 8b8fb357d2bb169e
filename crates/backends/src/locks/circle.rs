//! Circles of those who wait for each other, over all files of an export.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, PoisonError};

use dray_core::{FileId, LockFamily};

use super::Owner;
use super::files::Files;
use super::owners::{Owners, Wait};

/// Locks in somebody's way that one search looks at before it gives up and lets the caller wait.
const SEARCH_STEPS_MAX: usize = 4096;

/// Files with locks of somebody that are looked at before a search: with nobody waiting there it is
/// over. Who has more is searched for.
const FILES_MAX: usize = 16;

/// Searches for circles, one at a time: of those that close a circle at the same time one sees all
/// of it, and is gone from it before the next one looks.
///
/// A search follows waits, which are noted before, and takes the mutex of one file at a time.
#[derive(Default)]
pub(super) struct Circles {
    search: Mutex<()>,
}

/// One search.
struct Search<'a> {
    files: &'a Files,
    owners: &'a Owners,
    steps_left: usize,
}

impl Circles {
    /// Ends the wait of `owner` by `withdraw` if somebody in its way waits, over any number of
    /// others, for `owner`.
    pub(super) fn break_at<R>(
        &self,
        (files, owners): (&Files, &Owners),
        owner: Owner,
        wait: Wait,
        withdraw: impl FnOnce() -> R,
    ) -> Option<R> {
        let _one_at_a_time = self.search.lock().unwrap_or_else(PoisonError::into_inner);
        let mut search = Search { files, owners, steps_left: SEARCH_STEPS_MAX };
        if !search.somebody_may_wait_for(owner, wait) {
            return None;
        }
        let circle = search.circle(owner, wait)?;
        // The parts were seen one after the other: only what is still there closes a circle.
        circle.iter().all(|link| search.is_there(link)).then(withdraw)
    }
}

/// A wait, and one who has a lock in its way.
type Link = (Wait, Owner);

impl Search<'_> {
    /// Whether anybody waits at a file on which `owner` has locks, apart from this wait of its own.
    fn somebody_may_wait_for(&self, owner: Owner, (file, _): Wait) -> bool {
        let held = self.owners.held_by(owner, FILES_MAX);
        let waiting = |at: &FileId| self.files.look(*at, |locks| locks.queue.len()).unwrap_or(0);
        held.len() == FILES_MAX || held.iter().any(|at| waiting(at) > usize::from(*at == file))
    }

    /// Waits each for the next one's owner, the last one for `owner`.
    fn circle(&mut self, owner: Owner, wait: Wait) -> Option<Vec<Link>> {
        let mut seen = HashSet::new();
        let mut found_by: HashMap<Wait, Link> = HashMap::new();
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

    fn holders_against(&self, (file, number): Wait) -> Vec<Owner> {
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
