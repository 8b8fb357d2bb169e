//! Which workers of a classic mount wait for /dev/fuse.
//!
//! The kernel keeps one queue for all of them and wakes the first in its list that sleeps,
//! wherever the caller runs. A worker that finds its caller on another one's CPU goes to the end
//! of the list. That is not enough. A process that asks for one thing after the other runs as
//! soon as it is answered, on the CPU of the worker that answers, and often asks again before
//! that worker sleeps: the request then wakes another worker, on another CPU, which costs more
//! than all else about it, even if that one finds the request taken. Therefore, while one
//! worker, the host, gets the requests of one caller on its own CPU, others that get a stray one
//! go away from the device. The host takes the next one when it comes back to its wait, some
//! microseconds later.
//!
//! A worker that sees its caller on another one's CPU makes that one the host and goes away itself.
//! Nobody goes away for a host that is away, so that one always waits. Whoever is away comes back
//! at once when a worker sees more than that one caller or sees it elsewhere, and by itself
//! when the host does not get on.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use dray_core::Pid;
use dray_rt::sync::Notify;

use crate::transport::lookout::Orders;

/// Requests that a host serves between two looks of its lookout if it gets on.
const PROGRESS_MIN: u32 = 8;
/// Requests of one caller in a row after which a worker looks where it runs, for the first time.
const LOOK_AFTER: u32 = 16;
/// Requests between two later looks.
const LOOK_EVERY: u64 = 64;
/// Requests behind a look, or behind becoming the host, before pauses ask for another one.
const LOOK_AGAIN_AFTER: u32 = 4;
/// By how much pauses must be longer than others before they ask for a look.
const FAR_NS: u32 = 20_000;

/// What the workers of a mount know of each other.
pub(crate) struct Attendance {
    /// The [`Hosting`] that was found last, packed; 0: none.
    hosting: AtomicU64,
    /// A bit for each worker that does not wait for the device. Never all of them.
    away: AtomicU64,
    posts: Vec<Post>,
}

/// What one worker tells the others; in a cache line of its own, since a host writes it for every
/// request.
#[repr(align(64))]
struct Post {
    /// The CPU that it is pinned to.
    home: usize,
    /// Requests of callers that it was the host of, so far.
    served: AtomicU32,
    recalled: Notify,
    /// For its lookout.
    orders: Arc<Orders>,
}

/// A worker serves a caller on that one's CPU, and nobody else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hosting {
    caller: Pid,
    host: usize,
}

impl Hosting {
    fn pack(self) -> u64 {
        u64::from(self.caller.0) << 32 | self.host as u64
    }

    /// No caller is 0.
    fn unpack(packed: u64) -> Option<Hosting> {
        let (caller, host) = (Pid((packed >> 32) as u32), packed as u32 as usize);
        (packed != 0).then_some(Hosting { caller, host })
    }
}

impl Attendance {
    /// For workers that are pinned to these CPUs.
    pub(crate) fn new(homes: &[usize]) -> Attendance {
        let post = |&home| Post {
            home,
            served: AtomicU32::new(0),
            recalled: Notify::new(),
            orders: Arc::default(),
        };
        let posts = homes.iter().map(post).collect();
        Attendance { hosting: AtomicU64::new(0), away: AtomicU64::new(0), posts }
    }

    /// The part of worker `index` in it.
    pub(crate) fn attend(self: &Arc<Attendance>, index: usize) -> Attendant {
        let all = self.clone();
        Attendant {
            all,
            index,
            caller: Pid(0),
            row: 0,
            asked: 0,
            pauses: Pauses::default(),
            hosts: false,
            relied_on: None,
        }
    }

    fn hosting(&self) -> Option<Hosting> {
        Hosting::unpack(self.hosting.load(Ordering::Relaxed))
    }

    fn has_host(&self, hosting: Hosting) {
        self.hosting.store(hosting.pack(), Ordering::Relaxed);
    }

    /// Requests that a worker has served as the host of their caller, so far.
    pub(crate) fn served(&self, host: usize) -> u32 {
        self.posts[host].served.load(Ordering::Relaxed)
    }

    pub(crate) fn orders(&self, index: usize) -> &Arc<Orders> {
        &self.posts[index].orders
    }

    /// What `host` has served by now, if it got on since that was `before`. Else everybody comes back.
    pub(crate) fn still_relied_on(&self, host: usize, before: u32) -> Option<u32> {
        let served = self.served(host);
        let gets_on = served.wrapping_sub(before) >= PROGRESS_MIN;
        if !gets_on || self.hosting().is_none_or(|hosting| hosting.host != host) {
            self.recall();
        }
        (self.away.load(Ordering::Acquire) != 0).then_some(served)
    }

    /// `index` goes away, if `host` stays and is watched. As nobody goes unless somebody else
    /// stays, one always does.
    fn leave(&self, index: usize, host: usize) -> bool {
        let (Some(mine), Some(theirs)) = (bit(index), bit(host)) else { return false };
        let go = |away| (away & theirs == 0).then_some(away | mine);
        if self.away.fetch_update(Ordering::AcqRel, Ordering::Acquire, go).is_err() {
            return false;
        }
        let watched = self.posts[host].orders.watch();
        if !watched {
            self.away.fetch_and(!mine, Ordering::AcqRel);
        }
        watched
    }

    /// Has everybody come back, unless all that is known to go on is the hosting of `caller`.
    fn recall_unless(&self, caller: Pid) {
        if self.hosting().map(|hosting| hosting.caller) != Some(caller) {
            self.recall();
        }
    }

    /// Has everybody come back.
    pub(crate) fn recall(&self) {
        if self.away.load(Ordering::Relaxed) == 0 {
            return; // as a rule
        }
        let away = self.away.swap(0, Ordering::AcqRel);
        for (index, post) in self.posts.iter().enumerate() {
            if bit(index).is_some_and(|bit| away & bit != 0) {
                post.recalled.notify_one();
            }
        }
    }
}

fn bit(index: usize) -> Option<u64> {
    1u64.checked_shl(u32::try_from(index).ok()?)
}

/// What a worker does before it waits for the next request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// It waits as before.
    Wait,
    /// It lets the others be woken before it.
    StepBack,
    /// It leaves the device to the host until [`Attendant::away`] ends.
    GoAway,
}

/// One worker's view. It looks at nothing outside: it is told.
pub(crate) struct Attendant {
    all: Arc<Attendance>,
    index: usize,
    /// Whose request came last.
    caller: Pid,
    /// Requests of it in a row behind the first one, with no other one under way here.
    row: u32,
    /// Requests of all callers, so far.
    asked: u64,
    pauses: Pauses,
    /// This worker is the caller's host, as far as it knows.
    hosts: bool,
    /// The host that this worker left the device to last, and what that had served when this
    /// one looked last.
    relied_on: Option<(Hosting, u32)>,
}

impl Attendant {
    /// A request of `caller` has been taken; `alone`: no other one is under way here; `pause_ns`:
    /// how long after the last answer, in ns. Answers also whether to look where the caller runs.
    pub(crate) fn took(&mut self, caller: Pid, alone: bool, pause_ns: u32) -> (Next, bool) {
        if caller == Pid(0) && alone {
            return (Next::Wait, false); // the kernel's own, such as FORGET and RELEASE
        }
        self.asked += 1;
        let regular = self.asked.is_multiple_of(LOOK_EVERY);
        if !alone || caller != self.caller {
            (self.caller, self.row) = (caller, 0);
            self.host_no_more();
            if alone {
                self.all.recall_unless(caller)
            } else {
                self.all.recall()
            }
            return (Next::Wait, regular);
        }
        self.row = self.row.saturating_add(1);
        if !self.hosts && self.was_made_host() {
            self.hosts = true;
            self.pauses = Pauses::default();
        }
        if self.hosts {
            self.all.posts[self.index].served.fetch_add(1, Ordering::Relaxed);
        }
        let moved = self.pauses.tell(pause_ns) && self.hosts;
        let next = if self.may_leave() { Next::GoAway } else { Next::Wait };
        (next, regular || moved || self.row == LOOK_AFTER)
    }

    /// By the worker that was the caller's host before.
    fn was_made_host(&self) -> bool {
        self.all.hosting() == Some(Hosting { caller: self.caller, host: self.index })
    }

    /// `caller` was seen on `cpu`.
    pub(crate) fn saw(&mut self, caller: Pid, cpu: usize) -> Next {
        let by_itself = caller == self.caller && (self.hosts || self.row >= LOOK_AFTER);
        if self.all.posts[self.index].home != cpu {
            return self.saw_elsewhere(by_itself.then_some(caller), cpu);
        }
        if by_itself {
            self.hosts = true;
            self.pauses = Pauses { looked: true, ..Pauses::default() };
            self.all.has_host(Hosting { caller, host: self.index });
        }
        Next::Wait
    }

    /// `alone`: the caller, if nobody else asks.
    fn saw_elsewhere(&mut self, alone: Option<Pid>, cpu: usize) -> Next {
        if self.host_no_more() {
            self.all.recall(); // the next host is one of them
        }
        let there = self.all.posts.iter().position(|post| post.home == cpu);
        let (Some(caller), Some(host)) = (alone, there) else { return Next::StepBack };
        let hosting = Hosting { caller, host };
        self.all.has_host(hosting);
        self.relied_on = Some((hosting, self.all.served(host)));
        if self.all.leave(self.index, host) { Next::GoAway } else { Next::StepBack }
    }

    /// Answers whether it was one.
    fn host_no_more(&mut self) -> bool {
        let was = std::mem::take(&mut self.hosts);
        if was {
            let is_mine = |packed| Hosting::unpack(packed).is_some_and(|it| it.host == self.index);
            let end = |packed| is_mine(packed).then_some(0);
            let _ = self.all.hosting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, end);
        }
        was
    }

    /// Notes that this worker goes away, if its caller has a host that gets on.
    fn may_leave(&mut self) -> bool {
        let Some(hosting) = self.all.hosting() else { return false };
        hosting.caller == self.caller
            && hosting.host != self.index
            && self.gets_on(hosting)
            && self.all.leave(self.index, hosting.host)
    }

    /// Whether the host has served enough since it was relied on before.
    fn gets_on(&mut self, hosting: Hosting) -> bool {
        let served = self.all.served(hosting.host);
        let before = self.relied_on.replace((hosting, served));
        match before.filter(|(before, _)| *before == hosting) {
            Some((_, before)) => served.wrapping_sub(before) >= PROGRESS_MIN,
            None => true, // it has just been found
        }
    }

    /// Ends when this worker is to wait for the device again.
    pub(crate) async fn away(&self) {
        self.all.posts[self.index].recalled.notified().await;
    }
}

/// How long a caller takes from an answer to its next request, of which a host learns that it has
/// moved: about 10 us on one CPU, 50 to 100 us when two CPUs wake each other.
#[derive(Clone, Copy, Default)]
struct Pauses {
    count: u32,
    /// The caller has been seen at home since the host took over.
    looked: bool,
    shortest_ns: u32,
    /// Of the last ones, how many in a row were far longer than the shortest.
    long_in_a_row: u32,
}

impl Pauses {
    /// Whether to look now where the caller runs.
    fn tell(&mut self, pause_ns: u32) -> bool {
        self.count = self.count.saturating_add(1);
        if self.count == 1 || pause_ns < self.shortest_ns {
            self.shortest_ns = pause_ns;
        }
        let far = self.shortest_ns.saturating_mul(2).saturating_add(FAR_NS);
        self.long_in_a_row = if pause_ns > far { self.long_in_a_row + 1 } else { 0 };
        let unsure = !self.looked && self.count == LOOK_AGAIN_AFTER;
        let moved = self.count > LOOK_AGAIN_AFTER && self.long_in_a_row == 2;
        unsure || moved
    }
}

#[cfg(test)]
mod tests;
