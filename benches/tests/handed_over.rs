//! A call that another thread makes: what handing it over costs.

use std::time::Duration;

use dray_bench::syscalls_here::{ThreadCounter, own_mounts, thread_id};
use dray_rt::{DriverKind, Executor, Pool, Share};

/// Calls that are counted.
const CALLS: u64 = 500;

/// One wakes the thread, and one waits for the end. A call that ends early costs a look at what is ready more.
const SYSTEM_CALLS_MAX: f64 = 2.6;

/// There were five. The event that ends the wait was read, which was an event by itself: two reads and a wait more.
#[test]
fn the_caller_makes_few_system_calls() {
    own_mounts(); // by which system calls are counted, where nobody has mounted it
    let Some(mut calls) = ThreadCounter::new(thread_id()) else {
        return eprintln!("skipped: system calls cannot be counted here");
    };
    let pool = Pool::new("test", 4, 10);
    let share = Share { client: 1, thing: None };
    // Long enough for the caller to sleep.
    let call = || std::thread::sleep(Duration::from_micros(50));
    let made = Executor::new(DriverKind::Epoll).unwrap().block_on(async {
        let mut before = 0;
        for number in 0..CALLS + 10 {
            if number == 10 {
                before = calls.count(); // the threads have been started
            }
            match number % 2 {
                0 => pool.run_for(share, call).await.unwrap(),
                _ => pool.run_short_for(share, call).await.unwrap(),
            }
        }
        calls.count() - before
    });
    let each = made as f64 / CALLS as f64;
    assert!(each <= SYSTEM_CALLS_MAX, "{each} system calls for each call");
}
