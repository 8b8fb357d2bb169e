//! Files that have just lost a name, for the client threads that had looked them up.
//!
//! A client's kernel makes two calls for one system call by path: a lookup of the name, and then the
//! operation on the file. Between the two, another client may remove the name or give it to another
//! file. On one machine the system call goes on with the file that it has found. So the server keeps
//! the file for a moment. Threads that looked it up can use its id, and no other thread can.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::{Context, FileId, NodeId, Pid};
use dray_rt::Instant;

use super::inode_cache::CachedInode;

/// How long before its removal a file may have been looked up, and how long it is kept after that.
/// That is time for an answer and the next call, over a network and on a busy machine.
const MOMENT: Duration = Duration::from_millis(250);

/// Files kept at once. Beyond that the oldest are released.
const RECENTLY_UNLINKED_MAX: usize = 256;

/// Client threads that are remembered for one file. With more lookups within a moment, every thread
/// counts as one that looked the file up.
const HOLDERS_MAX: usize = 4;

/// A thread of a client, which makes one system call at a time.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct ClientThread {
    node: NodeId,
    pid: Pid,
}

impl ClientThread {
    pub(crate) fn of(cx: &Context) -> ClientThread {
        ClientThread { node: cx.origin.node, pid: cx.pid }
    }

    /// A number that is nearly unique among threads.
    pub(crate) fn mixed(self) -> u64 {
        (self.node.0 ^ u64::from(self.pid.0) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    /// Whether its number identifies it. In some containers threads have no numbers.
    pub(crate) fn is_known(self) -> bool {
        self.pid != Pid(0)
    }
}

/// The client threads that looked a file up within the last moment, and whether it still had its
/// name.
#[derive(Default)]
pub(crate) struct LookupHolders {
    last: [Option<(ClientThread, Instant)>; HOLDERS_MAX],
    /// The time of the last lookup for which there was no room.
    crowd: Option<Instant>,
    gone: bool,
}

fn is_recent(at: Instant, now: Instant) -> bool {
    now - at <= MOMENT
}

impl LookupHolders {
    /// Records a lookup by `thread`. False if the file had lost the name before, so that the name
    /// has to be looked up again.
    pub(crate) fn add(&mut self, thread: ClientThread, now: Instant) -> bool {
        if self.gone {
            return false;
        }
        let own =
            |place: &Option<(ClientThread, Instant)>| place.is_some_and(|(by, _)| by == thread);
        let free = |place: &Option<(ClientThread, Instant)>| {
            place.is_none_or(|(_, at)| !is_recent(at, now))
        };
        let at = self.last.iter().position(own).or_else(|| self.last.iter().position(free));
        match at.and_then(|at| self.last.get_mut(at)) {
            Some(place) if thread.is_known() => *place = Some((thread, now)),
            _ => self.crowd = Some(now),
        }
        true
    }

    /// Takes over the lookups through another descriptor of the file.
    pub(crate) fn take_over(&mut self, former: &LookupHolders) {
        if !former.gone {
            (self.last, self.crowd) = (former.last, former.crowd);
        }
    }

    fn was_crowded(&self, now: Instant) -> bool {
        self.crowd.is_some_and(|at| is_recent(at, now))
    }

    /// Whether `thread` may still use the file.
    pub(crate) fn has(&self, thread: ClientThread, now: Instant) -> bool {
        // Twice as long, since the file may have been kept for a moment in between.
        let mut last = self.last.iter().flatten();
        last.any(|(by, at)| *by == thread && now - *at <= 2 * MOMENT)
            || self.crowd.is_some_and(|at| now - at <= 2 * MOMENT)
    }

    /// `thread` has removed its name. Answers whether other threads may be about to use the file.
    fn leave(&mut self, thread: ClientThread, now: Instant) -> bool {
        self.gone = true;
        let mut last = self.last.iter().flatten();
        last.any(|(by, at)| *by != thread && is_recent(*at, now)) || self.was_crowded(now)
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone
    }
}

/// The recently unlinked files, the oldest first, each with the time until which it is kept.
#[derive(Default)]
pub(crate) struct RecentlyUnlinked {
    kept: Mutex<VecDeque<(Instant, Arc<CachedInode>)>>,
    /// The number of the kept files, which can be read without the mutex.
    len: AtomicUsize,
    /// A task releases them.
    has_release_task: AtomicBool,
}

impl RecentlyUnlinked {
    fn lock(&self) -> MutexGuard<'_, VecDeque<(Instant, Arc<CachedInode>)>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `thread` has removed a name of `node`. The file is kept for a moment if another thread has
    /// looked it up a moment ago.
    pub(crate) fn add(&self, node: &Arc<CachedInode>, thread: ClientThread) {
        let now = dray_rt::now();
        if !node.lookup_holders().leave(thread, now) {
            return;
        }
        let mut kept = self.lock();
        kept.push_back((now + MOMENT, node.clone()));
        let _closed_after_the_lock =
            if kept.len() > RECENTLY_UNLINKED_MAX { kept.pop_front() } else { None };
        self.len.store(kept.len(), Ordering::Relaxed);
        drop(kept);
    }

    /// The one with this id, if it was looked up by `thread`.
    pub(crate) fn find(&self, id: FileId, thread: ClientThread) -> Option<Arc<CachedInode>> {
        if self.len.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let now = dray_rt::now();
        // A file that lost several names has several descriptors here, each with its own threads.
        let there = |(until, node): &(Instant, Arc<CachedInode>)| {
            (*until > now && node.id == id).then(|| node.clone())
        };
        let nodes: Vec<_> = self.lock().iter().rev().filter_map(there).collect();
        nodes.into_iter().find(|node| node.lookup_holders().has(thread, now))
    }

    /// Whether the caller has to release them from now on.
    pub(crate) fn needs_release_task(&self) -> bool {
        self.len.load(Ordering::Relaxed) > 0 && !self.has_release_task.swap(true, Ordering::AcqRel)
    }

    /// The task that released them has ended.
    pub(crate) fn release_task_ended(&self) {
        self.has_release_task.store(false, Ordering::Release);
    }

    /// The time at which the next one is to be released.
    pub(crate) fn next_end(&self) -> Option<Instant> {
        self.lock().front().map(|(until, _)| *until)
    }

    /// Releases the files whose moment is over.
    pub(crate) fn trim(&self) {
        let now = dray_rt::now();
        let mut kept = self.lock();
        let over = kept.iter().take_while(|(until, _)| *until <= now).count();
        let gone: Vec<_> = kept.drain(..over).collect();
        self.len.store(kept.len(), Ordering::Relaxed);
        drop(kept);
        drop(gone); // which may take a while
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread(pid: u32) -> ClientThread {
        ClientThread { node: NodeId(1), pid: Pid(pid) }
    }

    #[test]
    fn it_is_for_those_who_looked_a_moment_ago() {
        let mut lookup_holders = LookupHolders::default();
        let start = dray_rt::now();
        assert!(lookup_holders.add(thread(1), start) && lookup_holders.add(thread(2), start));
        assert!(!lookup_holders.leave(thread(2), start + 2 * MOMENT), "too long ago");
        assert!(!lookup_holders.add(thread(3), start), "it has gone");
        let mut lookup_holders = LookupHolders::default();
        lookup_holders.add(thread(1), start);
        assert!(!lookup_holders.leave(thread(1), start), "nobody else");
        assert!(lookup_holders.leave(thread(2), start + MOMENT));
        let later = start + 2 * MOMENT;
        assert!(lookup_holders.has(thread(1), later) && !lookup_holders.has(thread(2), later));
        assert!(!lookup_holders.has(thread(1), later + MOMENT));
    }

    #[test]
    fn a_crowd_is_everybody_and_so_is_who_has_no_number() {
        let start = dray_rt::now();
        let mut lookup_holders = LookupHolders::default();
        for pid in 1..=HOLDERS_MAX as u32 {
            lookup_holders.add(thread(pid), start);
            lookup_holders.add(thread(pid), start);
        }
        assert!(!lookup_holders.has(thread(99), start));
        lookup_holders.add(thread(98), start);
        assert!(lookup_holders.has(thread(99), start));
        let mut lookup_holders = LookupHolders::default();
        lookup_holders.add(thread(0), start);
        assert!(lookup_holders.leave(thread(0), start) && lookup_holders.has(thread(0), start));
    }

    #[test]
    fn there_are_so_many_and_no_more() {
        let recently_unlinked = RecentlyUnlinked::default();
        for ino in 0..1000 {
            let node = Arc::new(super::super::inode_cache::tests::node(ino));
            node.lookup_holders().add(thread(1), dray_rt::now());
            recently_unlinked.add(&node, thread(2));
        }
        assert_eq!(recently_unlinked.lock().len(), RECENTLY_UNLINKED_MAX);
        assert_eq!(recently_unlinked.len.load(Ordering::Relaxed), RECENTLY_UNLINKED_MAX);
    }
}
