use std::time::Duration;

use dray_rt::{DriverKind, Executor, timeout};

use super::*;

const CALLER: Pid = Pid(77);
const OTHER: Pid = Pid(78);

/// Between an answer and the next request of a caller that is on its worker's CPU, ns.
const NEAR_NS: u32 = 8_000;
/// The same of one that has moved.
const FAR_AWAY_NS: u32 = 70_000;

/// Workers that are pinned to CPUs 10, 11 and so on, all of them watched.
fn workers(count: usize) -> Vec<Attendant> {
    let homes: Vec<usize> = (10..10 + count).collect();
    let all = Arc::new(Attendance::new(&homes));
    all.posts.iter().for_each(|post| post.orders.follow());
    (0..count).map(|index| all.attend(index)).collect()
}

/// A request of a caller that is not far.
fn take(worker: &mut Attendant, caller: Pid) -> Next {
    worker.took(caller, true, NEAR_NS).0
}

/// The worker serves one request after the other of `caller` until it looks where that
/// runs, and sees it at home.
fn begin(host: &mut Attendant, caller: Pid) {
    while !host.took(caller, true, NEAR_NS).1 {}
    let home = host.all.posts[host.index].home;
    assert_eq!(host.saw(caller, home), Next::Wait);
}

fn serve(host: &mut Attendant, requests: u32) {
    (0..requests).for_each(|_| assert_eq!(take(host, CALLER), Next::Wait));
}

/// The second stray request of the caller.
fn stray(worker: &mut Attendant) -> Next {
    take(worker, CALLER);
    take(worker, CALLER)
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
    assert_eq!(take(&mut second, CALLER), Next::GoAway);
    assert_eq!(stray(&mut third), Next::GoAway);
    serve(&mut host, 100);
    assert_eq!(away(&host.all), 0b110);
    assert!(!is_recalled(&second) && !is_recalled(&third));
}

#[test]
fn whoever_sees_its_caller_at_another_worker_s_home_makes_that_one_the_host() {
    let [mut first, mut second] = workers(2).try_into().ok().unwrap();
    while !first.took(CALLER, true, NEAR_NS).1 {}
    assert_eq!(first.saw(CALLER, 99), Next::StepBack, "nobody is at home there");
    assert_eq!(first.saw(CALLER, 11), Next::GoAway);
    assert_eq!(away(&first.all), 0b01);
    assert_eq!(stray(&mut second), Next::Wait);
    assert!(second.hosts);
}

#[test]
fn nobody_is_made_host_of_one_caller_among_others() {
    let [mut first, mut second] = workers(2).try_into().ok().unwrap();
    while !first.took(CALLER, true, NEAR_NS).1 {}
    take(&mut first, OTHER);
    assert_eq!(first.saw(CALLER, 11), Next::StepBack);
    stray(&mut second);
    assert!(!second.hosts);
}

/// Several threads, or one that has several requests under way.
#[test]
fn requests_that_come_together_have_no_host() {
    let [mut first, mut second] = workers(2).try_into().ok().unwrap();
    for _ in 0..1000 {
        for caller in [CALLER, OTHER] {
            take(&mut first, caller);
            first.saw(caller, 10);
        }
    }
    assert_eq!(stray(&mut second), Next::Wait);
    for _ in 0..1000 {
        first.took(CALLER, false, NEAR_NS);
        first.saw(CALLER, 10);
    }
    assert_eq!(stray(&mut second), Next::Wait);
}

#[test]
fn requests_of_the_kernel_itself_tell_nothing() {
    let [mut host, mut second] = workers(2).try_into().ok().unwrap();
    let mut looks = 0;
    for _ in 0..LOOK_AFTER + 1 {
        looks += usize::from(host.took(CALLER, true, NEAR_NS).1);
        assert_eq!(host.took(Pid(0), true, NEAR_NS), (Next::Wait, false));
    }
    assert_eq!(looks, 1);
    host.saw(CALLER, 10);
    take(&mut second, CALLER);
    assert_eq!(take(&mut second, Pid(0)), Next::Wait);
    assert_eq!(take(&mut second, CALLER), Next::GoAway);
    take(&mut host, Pid(0));
    assert!(!is_recalled(&second));
}

#[test]
fn a_second_caller_brings_everybody_back() {
    let by_another = |host: &mut Attendant, _: &mut Attendant| _ = take(host, OTHER);
    let at_once = |host: &mut Attendant, _: &mut Attendant| _ = host.took(CALLER, false, NEAR_NS);
    let elsewhere = |_: &mut Attendant, third: &mut Attendant| _ = take(third, OTHER);
    let moved = |host: &mut Attendant, _: &mut Attendant| _ = host.saw(CALLER, 99);
    type Event = fn(&mut Attendant, &mut Attendant);
    for event in [by_another, at_once, elsewhere, moved] as [Event; 4] {
        let [mut host, mut second, mut third] = workers(3).try_into().ok().unwrap();
        begin(&mut host, CALLER);
        assert_eq!(stray(&mut second), Next::GoAway);
        assert_eq!(take(&mut third, CALLER), Next::Wait);
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
    assert_eq!(first.saw(CALLER, 11), Next::GoAway);
    assert!(is_recalled(&second));
    assert_eq!(away(&first.all), 0b01);
    assert_eq!(stray(&mut second), Next::Wait);
    // It has gone back before it was told from here.
    assert!((0..LOOK_AGAIN_AFTER).any(|_| second.took(CALLER, true, FAR_AWAY_NS).1));
    assert_eq!(second.saw(CALLER, 10), Next::GoAway);
    assert!(is_recalled(&first));
    assert_eq!(away(&first.all), 0b10);
}

#[test]
fn two_long_pauses_in_a_row_ask_where_the_caller_is() {
    let [mut host] = workers(1).try_into().ok().unwrap();
    begin(&mut host, CALLER);
    let mut looks = |pauses: &[u32]| -> Vec<bool> {
        pauses.iter().map(|&pause_ns| host.took(CALLER, true, pause_ns).1).collect()
    };
    assert_eq!(looks(&[FAR_AWAY_NS; 2]), [false; 2], "nothing to compare with");
    assert_eq!(looks(&[NEAR_NS; 4]), [false; 4]);
    assert_eq!(looks(&[FAR_AWAY_NS, NEAR_NS, FAR_AWAY_NS, NEAR_NS]), [false; 4]);
    assert_eq!(looks(&[FAR_AWAY_NS; 4]), [false, true, false, false], "once");
}

/// It computes between its requests, and is at home.
#[test]
fn pauses_that_were_seen_at_home_are_not_long() {
    let [mut host] = workers(1).try_into().ok().unwrap();
    begin(&mut host, CALLER);
    serve(&mut host, LOOK_AGAIN_AFTER);
    while !host.took(CALLER, true, FAR_AWAY_NS).1 {}
    host.saw(CALLER, 10);
    let looks = (0..LOOK_EVERY).filter(|_| host.took(CALLER, true, FAR_AWAY_NS).1).count();
    assert_eq!(looks, 1, "the regular one");
}

/// It would leave its requests to a worker that answers nobody, again and again.
#[test]
fn a_host_that_is_held_up_is_relied_on_once() {
    let [mut host, mut second] = workers(2).try_into().ok().unwrap();
    begin(&mut host, CALLER);
    assert_eq!(stray(&mut second), Next::GoAway);
    host.all.recall();
    for _ in 0..100 {
        assert_eq!(take(&mut second, CALLER), Next::Wait);
    }
    serve(&mut host, PROGRESS_MIN);
    assert_eq!(take(&mut second, CALLER), Next::GoAway);
}

#[test]
fn nobody_leaves_for_a_host_that_is_not_watched() {
    let [mut host, mut second] = workers(2).try_into().ok().unwrap();
    begin(&mut host, CALLER);
    host.all.orders(0).end();
    assert_eq!(stray(&mut second), Next::Wait);
    assert_eq!(away(&host.all), 0);
}

#[test]
fn who_is_away_is_recalled_when_the_host_does_not_get_on() {
    let [mut host, mut second] = workers(2).try_into().ok().unwrap();
    begin(&mut host, CALLER);
    assert_eq!(stray(&mut second), Next::GoAway);
    let mut served = host.all.served(0);
    for _ in 0..50 {
        serve(&mut host, PROGRESS_MIN);
        served = host.all.still_relied_on(0, served).unwrap();
    }
    assert!(!is_recalled(&second));
    serve(&mut host, PROGRESS_MIN - 1);
    assert_eq!(host.all.still_relied_on(0, served), None);
    assert!(is_recalled(&second));
    assert_eq!(away(&host.all), 0);
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
        let mut ever = 0;
        for _ in 0..2_000 {
            let (index, caller) = (draw(4) as usize, Pid(77 + draw(20) as u32 / 19));
            // Who was recalled is back, and who is away does nothing.
            if away(&all) & 1 << index != 0 {
                continue;
            }
            let next = match draw(4) {
                0 => workers[index].saw(caller, 10 + draw(4) as usize),
                _ => take(&mut workers[index], caller),
            };
            let gone = away(&all) & 1 << index != 0;
            assert_eq!(next == Next::GoAway, gone);
            ever += usize::from(gone);
            assert_ne!(away(&all), 0b1111);
        }
        assert!(ever > 0, "nobody ever went");
    }
}

#[test]
fn who_is_recalled_comes_back() {
    let mut executor = Executor::new(DriverKind::Simulated { seed: 1 }).unwrap();
    executor.block_on(async {
        let [mut host, mut second] = workers(2).try_into().ok().unwrap();
        begin(&mut host, CALLER);
        assert_eq!(stray(&mut second), Next::GoAway);
        let back = timeout(Duration::from_secs(1000), second.away()).await;
        assert!(back.is_err(), "nobody has called");
        take(&mut host, OTHER);
        second.away().await;
    });
}
