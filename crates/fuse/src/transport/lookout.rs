//! Where callers run, and whether the worker that others rely on gets on: a thread beside each
//! classic worker.
//!
//! The kernel shows nobody the stat of a process in exec(2), and that process may be waiting for
//! us to answer the closing of its files: whoever serves requests must not look.
//!
//! The thread stays on its worker's CPU, since to wake up on another one does harm: a CPU that has
//! just become idle again draws the caller over (`select_idle_sibling` in kernel/sched/fair.c).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::Pid;
use dray_rt::{Instant, now};

use crate::transport::attendance::Attendance;

/// How often the lookout of a host that others left the device to looks whether that gets on. A
/// host that is held up is alone with what comes for at most two of these.
const TICK: Duration = Duration::from_millis(10);
/// Bytes of /proc/PID/stat that are looked at: its 52 numbers fit.
const STAT_MAX_BYTES: usize = 1200;
/// Nothing has been seen since the last answer.
const NOT_SEEN: u64 = u64::MAX;

/// What a lookout is told: by its worker to look, by any worker to watch.
#[derive(Default)]
pub(crate) struct Orders {
    list: Mutex<List>,
    told: Condvar,
    seen: AtomicU64,
}

#[derive(Default)]
struct List {
    /// There is a thread that follows them.
    followed: bool,
    look: Option<Pid>,
    watch: bool,
}

enum Order {
    Look(Pid),
    Watch,
    Time,
    End,
}

impl Orders {
    /// Has the worker watched while anybody relies on it. False if there is no lookout.
    pub(crate) fn watch(&self) -> bool {
        let mut list = self.list();
        list.watch = true;
        self.told.notify_one();
        list.followed
    }

    /// There is somebody who follows them from now on.
    pub(crate) fn follow(&self) {
        self.list().followed = true;
    }

    /// There is no more.
    pub(crate) fn end(&self) {
        self.list().followed = false;
        self.told.notify_one();
    }

    fn list(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next one, until `until` if that is given.
    fn next(&self, until: Option<Instant>) -> Order {
        let mut list = self.list();
        loop {
            let left = until.map(|until| until - now());
            if !list.followed {
                return Order::End;
            } else if left == Some(Duration::ZERO) {
                return Order::Time;
            } else if std::mem::take(&mut list.watch) {
                return Order::Watch;
            } else if let Some(pid) = list.look.take() {
                return Order::Look(pid);
            }
            let long = left.unwrap_or(Duration::MAX);
            let waited = self.told.wait_timeout(list, long);
            (list, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The thread, until this is dropped.
pub(crate) struct Lookout {
    orders: Arc<Orders>,
}

impl Lookout {
    /// For worker `index`, by whose thread it is called. Errors: those of making a thread.
    pub(crate) fn start(all: &Arc<Attendance>, index: usize) -> io::Result<Lookout> {
        let lookout = Lookout { orders: all.orders(index).clone() };
        lookout.orders.seen.store(NOT_SEEN, Ordering::Relaxed);
        lookout.orders.follow();
        let all = all.clone();
        std::thread::Builder::new()
            .name("dray-lookout".into())
            .stack_size(64 << 10)
            .spawn(move || follow(&all, index))?;
        Ok(lookout)
    }

    /// Asks where thread `pid` runs. Of questions that come faster than answers the last one counts.
    pub(crate) fn ask(&self, pid: Pid) {
        self.orders.list().look = Some(pid);
        self.orders.told.notify_one();
    }

    /// The last answer, once: a thread that was asked about, and the CPU it ran on.
    pub(crate) fn answer(&self) -> Option<(Pid, usize)> {
        let seen = &self.orders.seen;
        if seen.load(Ordering::Relaxed) == NOT_SEEN {
            return None; // most often
        }
        let seen = seen.swap(NOT_SEEN, Ordering::Relaxed);
        (seen != NOT_SEEN).then_some((Pid((seen >> 32) as u32), seen as u32 as usize))
    }
}

impl Drop for Lookout {
    fn drop(&mut self) {
        self.orders.end();
    }
}

fn follow(all: &Attendance, index: usize) {
    let orders = all.orders(index);
    let mut last = None;
    let mut watch = None;
    loop {
        match orders.next(watch.map(|(until, _)| until)) {
            Order::Look(pid) => {
                last = look(pid, last);
                if let Some((_, cpu, _)) = last {
                    orders.seen.store(u64::from(pid.0) << 32 | cpu as u64, Ordering::Relaxed);
                }
            }
            Order::Watch if watch.is_some() => {}
            Order::Watch => watch = Some((now() + TICK, all.served(index))),
            Order::Time => {
                let served = watch.and_then(|(_, before)| all.still_relied_on(index, before));
                watch = served.map(|served| (now() + TICK, served));
            }
            Order::End => return all.recall(),
        }
    }
}

/// A thread, the CPU that it runs on or ran on last (proc(5), field 39 of stat), and the file that says so.
type Seen = (Pid, usize, File);

/// None if the thread is gone. `last`: what was found before; opening the file is two thirds of a look.
fn look(pid: Pid, last: Option<Seen>) -> Option<Seen> {
    let read = |stat: File| {
        let mut text = [0u8; STAT_MAX_BYTES];
        let len = stat.read_at(&mut text, 0).ok()?;
        Some((pid, cpu_in(&text[..len])?, stat))
    };
    // The open file of a thread that has ended says so, even if another one has its number.
    let known = last.filter(|(known, ..)| *known == pid).and_then(|(.., stat)| read(stat));
    known.or_else(|| read(File::open(format!("/proc/{}/stat", pid.0)).ok()?))
}

fn cpu_in(stat: &[u8]) -> Option<usize> {
    // The name in parentheses may hold anything; field 3 is the first behind it.
    let behind_name = stat.iter().rposition(|&byte| byte == b')')? + 1;
    let text = std::str::from_utf8(&stat[behind_name..]).ok()?;
    text.split_ascii_whitespace().nth(39 - 3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_a_thread_runs_is_found_whatever_it_is_called() {
        let own = Pid(std::process::id());
        let seen = look(own, None);
        assert!(seen.as_ref().is_some_and(|(_, cpu, _)| *cpu < libc::CPU_SETSIZE as usize));
        assert!(look(own, seen).is_some());
        let fields: Vec<String> = (4..=52).map(|field| field.to_string()).collect();
        let stat = format!("17 (a) 1 (b) S {}", fields.join(" "));
        assert_eq!(cpu_in(stat.as_bytes()), Some(39));
        assert_eq!(cpu_in(b"17 (cut short) S 1 2"), None);
    }

    #[test]
    fn a_lookout_answers_and_watches_until_it_ends() {
        let all = Arc::new(Attendance::new(&[0]));
        assert!(!all.orders(0).watch(), "there is none yet");
        let lookout = Lookout::start(&all, 0).unwrap();
        lookout.ask(Pid(std::process::id()));
        let begin = now();
        let seen = loop {
            if let Some((pid, _)) = lookout.answer() {
                break pid;
            }
            assert!(begin.elapsed().as_secs() < 60, "it never looked");
            std::thread::sleep(Duration::from_millis(1));
        };
        assert_eq!(seen, Pid(std::process::id()));
        assert!(all.orders(0).watch());
        drop(lookout);
        assert!(!all.orders(0).watch());
    }
}
