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
//! Nobody goes away for a host that is away, so that one always waits. Whoever is away comes back
//! at once when a worker sees more than that one caller or sees it elsewhere, and by itself
//! when the host does not get on.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use dray_core::Pid;
use dray_rt::sync::Notify;
use dray_rt::timeout;

/// How often a worker that is away looks whether the host gets on. A host that is held up is
/// alone with what comes for at most two of these.
const TICK: Duration = Duration::from_millis(10);
/// Requests that a host serves in a tick if it gets on.
const PROGRESS_MIN: u32 = 8;
/// Requests of one caller in a row after which a worker looks where it runs, for the first time.
const LOOK_AFTER: u32 = 16;
/// Requests between two later looks.
const LOOK_EVERY: u64 = 64;

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
        let post = |&home| Post { home, served: AtomicU32::new(0), recalled: Notify::new() };
        let posts = homes.iter().map(post).collect();
        Attendance { hosting: AtomicU64::new(0), away: AtomicU64::new(0), posts }
    }

    /// The part of worker `index` in it.
    pub(crate) fn attend(self: &Arc<Attendance>, index: usize) -> Attendant {
        let all = self.clone();
        Attendant { all, index, caller: Pid(0), row: 0, asked: 0, hosts: false, relied_on: None }
    }

    fn hosting(&self) -> Option<Hosting> {
        Hosting::unpack(self.hosting.load(Ordering::Relaxed))
    }

    fn served(&self, host: usize) -> u32 {
        self.posts[host].served.load(Ordering::Relaxed)
    }

    /// `index` goes away, if `host` stays. As nobody goes unless somebody else stays, one
    /// always does.
    fn leave(&self, index: usize, host: usize) -> bool {
        let (Some(mine), Some(theirs)) = (bit(index), bit(host)) else { return false };
        let go = |away| (away & theirs == 0).then_some(away | mine);
        self.away.fetch_update(Ordering::AcqRel, Ordering::Acquire, go).is_ok()
    }

    /// Has everybody come back, unless all that is known to go on is the hosting of `caller`.
    fn recall_unless(&self, caller: Option<Pid>) {
        if self.away.load(Ordering::Relaxed) == 0 {
            return; // as a rule
        }
        if caller.is_some() && self.hosting().map(|hosting| hosting.caller) == caller {
            return;
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
    /// This worker is the caller's host, as far as it knows.
    hosts: bool,
    /// The host that this worker left the device to last, and what that had served when this
    /// one looked last.
    relied_on: Option<(Hosting, u32)>,
}

impl Attendant {
    /// A request of `caller` has been taken; `alone`: no other one is under way here. Answers
    /// also whether to look where the caller runs.
    pub(crate) fn took(&mut self, caller: Pid, alone: bool) -> (Next, bool) {
        if caller == Pid(0) && alone {
            return (Next::Wait, false); // the kernel's own, such as FORGET and RELEASE
        }
        self.asked += 1;
        let regular = self.asked.is_multiple_of(LOOK_EVERY);
        if !alone || caller != self.caller {
            (self.caller, self.row) = (caller, 0);
            self.host_no_more();
            self.all.recall_unless(alone.then_some(caller));
            return (Next::Wait, regular);
        }
        self.row = self.row.saturating_add(1);
        if self.hosts {
            self.all.posts[self.index].served.fetch_add(1, Ordering::Relaxed);
        }
        let next = if self.may_leave() { Next::GoAway } else { Next::Wait };
        (next, regular || self.row == LOOK_AFTER)
    }

    /// `caller` was seen on `cpu`.
    pub(crate) fn saw(&mut self, caller: Pid, cpu: usize) -> Next {
        if self.all.posts[self.index].home != cpu {
            if self.host_no_more() {
                self.all.recall_unless(None); // the next host is one of them
            }
            return Next::StepBack;
        }
        if caller == self.caller && self.row >= LOOK_AFTER {
            self.hosts = true;
            let hosting = Hosting { caller, host: self.index };
            self.all.hosting.store(hosting.pack(), Ordering::Relaxed);
        }
        Next::Wait
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

    /// Ends when this worker is to wait for the device again, which [`Attendant::returned`] must
    /// follow.
    pub(crate) async fn away(&mut self) {
        let all = self.all.clone();
        loop {
            let recalled = timeout(TICK, all.posts[self.index].recalled.notified()).await;
            if recalled.is_ok() || !self.stays_away() {
                return;
            }
        }
    }

    /// A tick later: whether the same host has got on with the same caller.
    fn stays_away(&mut self) -> bool {
        let Some((before, _)) = self.relied_on else { return false };
        self.all.hosting() == Some(before) && self.gets_on(before)
    }

    /// This worker waits for the device again.
    pub(crate) fn returned(&mut self) {
        if let Some(bit) = bit(self.index) {
            self.all.away.fetch_and(!bit, Ordering::AcqRel);
        }
    }
}

#[cfg(test)]
mod tests {
    use dray_rt::{DriverKind, Executor, now, sleep, spawn_join};

    use super::*;

    const CALLER: Pid = Pid(77);
    const OTHER: Pid = Pid(78);

    /// Workers that are pinned to CPUs 10, 11 and so on.
    fn workers(count: usize) -> Vec<Attendant> {
        let homes: Vec<usize> = (10..10 + count).collect();
        let all = Arc::new(Attendance::new(&homes));
        (0..count).map(|index| all.attend(index)).collect()
    }

    /// The worker serves one request after the other of `caller` until it looks where that
    /// runs, and sees it at home.
    fn begin(host: &mut Attendant, caller: Pid) {
        while !host.took(caller, true).1 {}
        let home = host.all.posts[host.index].home;
        assert_eq!(host.saw(caller, home), Next::Wait);
    }

    fn serve(host: &mut Attendant, requests: u32) {
        (0..requests).for_each(|_| assert_eq!(host.took(CALLER, true).0, Next::Wait));
    }

    /// The second stray request of the caller.
    fn stray(worker: &mut Attendant) -> Next {
        worker.took(CALLER, true);
        worker.took(CALLER, true).0
    }

    fn away(all: &Attendance) -> u64 {
        all.away.load(Ordering::Relaxed)
    }

    /// Whether the worker has been told to come back.
    fn is_recalled(worker: &Attendant) -> bool {
        let mut executor = Executor::new(DriverKind::Simulated { seed: 1 }).unwrap();
        let told = worker.all.posts[worker.index].recalled.notified();
        executor.block_on(async { timeout(Duration::ZERO, told).await.is_ok() })
    }

    #[test]
    fn who_gets_stray_requests_goes_away_and_the_host_stays() {
        let [mut host, mut second, mut third] = workers(3).try_into().ok().unwrap();
        assert_eq!(stray(&mut second), Next::Wait, "nobody is the host");
        begin(&mut host, CALLER);
        assert_eq!(second.took(CALLER, true).0, Next::GoAway);
        assert_eq!(stray(&mut third), Next::GoAway);
        serve(&mut host, 100);
        assert_eq!(away(&host.all), 0b110);
        assert!(!is_recalled(&second) && !is_recalled(&third));
    }

    #[test]
    fn a_caller_that_is_elsewhere_has_no_host_here() {
        let [mut first, mut second] = workers(2).try_into().ok().unwrap();
        while !first.took(CALLER, true).1 {}
        assert_eq!(first.saw(CALLER, 11), Next::StepBack);
        assert_eq!(first.saw(CALLER, 99), Next::StepBack);
        assert_eq!(stray(&mut second), Next::Wait);
    }

    /// Several threads, or one that has several requests under way.
    #[test]
    fn requests_that_come_together_have_no_host() {
        let [mut first, mut second] = workers(2).try_into().ok().unwrap();
        for _ in 0..1000 {
            for caller in [CALLER, OTHER] {
                first.took(caller, true);
                first.saw(caller, 10);
            }
        }
        assert_eq!(stray(&mut second), Next::Wait);
        for _ in 0..1000 {
            first.took(CALLER, false);
            first.saw(CALLER, 10);
        }
        assert_eq!(stray(&mut second), Next::Wait);
    }

    #[test]
    fn requests_of_the_kernel_itself_tell_nothing() {
        let [mut host, mut second] = workers(2).try_into().ok().unwrap();
        let mut looks = 0;
        for _ in 0..LOOK_AFTER + 1 {
            looks += usize::from(host.took(CALLER, true).1);
            assert_eq!(host.took(Pid(0), true), (Next::Wait, false));
        }
        assert_eq!(looks, 1);
        host.saw(CALLER, 10);
        second.took(CALLER, true);
        assert_eq!(second.took(Pid(0), true).0, Next::Wait);
        assert_eq!(second.took(CALLER, true).0, Next::GoAway);
        host.took(Pid(0), true);
        assert!(!is_recalled(&second));
    }

    #[test]
    fn a_second_caller_brings_everybody_back() {
        let by_another = |host: &mut Attendant, _: &mut Attendant| _ = host.took(OTHER, true);
        let at_once = |host: &mut Attendant, _: &mut Attendant| _ = host.took(CALLER, false);
        let elsewhere = |_: &mut Attendant, third: &mut Attendant| _ = third.took(OTHER, true);
        let moved = |host: &mut Attendant, _: &mut Attendant| _ = host.saw(CALLER, 12);
        type Event = fn(&mut Attendant, &mut Attendant);
        for event in [by_another, at_once, elsewhere, moved] as [Event; 4] {
            let [mut host, mut second, mut third] = workers(3).try_into().ok().unwrap();
            begin(&mut host, CALLER);
            assert_eq!(stray(&mut second), Next::GoAway);
            assert_eq!(third.took(CALLER, true).0, Next::Wait);
            assert!(!is_recalled(&second), "that is the one that it went for");
            event(&mut host, &mut third);
            assert!(is_recalled(&second));
            assert_eq!(away(&host.all), 0);
        }
    }

    #[test]
    fn a_caller_that_moves_is_served_where_it_goes() {
        let [mut first, mut second] = workers(2).try_into().ok().unwrap();
        begin(&mut first, CALLER);
        assert_eq!(stray(&mut second), Next::GoAway);
        assert_eq!(first.saw(CALLER, 11), Next::StepBack);
        assert!(is_recalled(&second));
        second.returned();
        assert_eq!(first.took(CALLER, true).0, Next::Wait, "the other one has not looked");
        begin(&mut second, CALLER);
        assert_eq!(first.took(CALLER, true).0, Next::GoAway);
        assert_eq!(away(&first.all), 0b01);
    }

    /// It would leave its requests to a worker that answers nobody, again and again.
    #[test]
    fn a_host_that_is_held_up_is_relied_on_once() {
        let [mut host, mut second] = workers(2).try_into().ok().unwrap();
        begin(&mut host, CALLER);
        assert_eq!(stray(&mut second), Next::GoAway);
        second.returned();
        for _ in 0..100 {
            assert_eq!(second.took(CALLER, true).0, Next::Wait);
        }
        serve(&mut host, PROGRESS_MIN);
        assert_eq!(second.took(CALLER, true).0, Next::GoAway);
    }

    #[test]
    fn one_always_waits() {
        for seed in 0..200 {
            let mut random = seed * 2 + 1u64;
            let mut draw = |below: u64| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (random >> 33) % below
            };
            let mut workers = workers(4);
            let all = workers[0].all.clone();
            let (mut gone, mut ever) = ([false; 4], 0);
            for _ in 0..2_000 {
                let (index, caller) = (draw(4) as usize, Pid(77 + draw(20) as u32 / 19));
                if gone[index] {
                    workers[index].returned();
                    gone[index] = false;
                } else if draw(4) == 0 {
                    workers[index].saw(caller, 10 + draw(4) as usize);
                } else {
                    gone[index] = workers[index].took(caller, true).0 == Next::GoAway;
                    ever += usize::from(gone[index]);
                }
                assert_ne!(away(&all), 0b1111);
            }
            assert!(ever > 0, "nobody ever went");
        }
    }

    #[test]
    fn who_is_away_comes_back_when_the_host_does_not_get_on() {
        let mut executor = Executor::new(DriverKind::Simulated { seed: 1 }).unwrap();
        executor.block_on(async {
            let [mut host, mut second] = workers(2).try_into().ok().unwrap();
            begin(&mut host, CALLER);
            assert_eq!(stray(&mut second), Next::GoAway);
            let back = spawn_join(async move {
                second.away().await;
                second.returned();
                now()
            });
            for _ in 0..50 {
                serve(&mut host, PROGRESS_MIN);
                sleep(TICK).await;
            }
            assert_eq!(away(&host.all), 0b10);
            let last = now();
            let back = back.await.unwrap();
            assert!(back - last <= 2 * TICK);
            assert_eq!(away(&host.all), 0);
        });
    }

    #[test]
    fn who_is_recalled_comes_back_at_once() {
        let mut executor = Executor::new(DriverKind::Simulated { seed: 1 }).unwrap();
        executor.block_on(async {
            let [mut host, mut second] = workers(2).try_into().ok().unwrap();
            begin(&mut host, CALLER);
            assert_eq!(stray(&mut second), Next::GoAway);
            let back = spawn_join(async move {
                second.away().await;
                now()
            });
            sleep(TICK / 2).await;
            let told = now();
            host.took(OTHER, true);
            assert_eq!(back.await.unwrap(), told);
        });
    }
}
