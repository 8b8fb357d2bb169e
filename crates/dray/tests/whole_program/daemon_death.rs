//! kill -9 of the daemon under a mount, again and again: applications notice nothing but
//! pauses, nothing is lost and nothing is applied twice.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::common;
use crate::common::daemons::{daemon, signal, supervisor, wait_for_daemon};
use crate::common::hangs::waits_for_a_lock;
use crate::common::load::{KeptFiles, Load, check_load, load, lock, overwrite};
use crate::common::{Rig, on_transports, wait_for};

/// Time over which daemons are killed, and how often at least: on a slow machine that takes longer.
const KILLING_TIME: Duration = Duration::from_secs(6);
const KILLS_MIN: u64 = 11;
const KILLS_OF_BOTH_MIN: u64 = 3;

/// A different wait each time, without a generator: enough to meet every moment.
fn some_time(round: u64) -> Duration {
    Duration::from_millis(100 + (round.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & 0x7f))
}

/// Kills the daemon, and holds up the supervisor, so that no other one is started until that goes
/// on.
fn kill_and_start_no_other(at: &Path) -> i32 {
    let supervisor = supervisor(at);
    signal(supervisor, libc::SIGSTOP);
    signal(daemon(at).unwrap(), libc::SIGKILL);
    wait_for("the daemon's end", || daemon(at).is_none());
    supervisor
}

/// Kills daemons for a while; answers how many.
fn kill_for_a_while(at: &Path, load: &Load) -> u64 {
    let (begin, mut kills) = (Instant::now(), 0);
    while begin.elapsed() < KILLING_TIME || kills < KILLS_MIN {
        std::thread::sleep(some_time(kills));
        signal(wait_for_daemon(at), libc::SIGKILL);
        let before = load.steps.load(Ordering::Relaxed);
        kills += 1;
        wait_for("progress", || load.steps.load(Ordering::Relaxed) > before);
    }
    kills
}

// proves: P93
#[test]
fn applications_notice_no_death_of_the_daemon() {
    if common::skipped() {
        return;
    }
    for options in [
        "transport=classic",
        "transport=classic,consistency=close-to-open",
        "transport=uring",
        "transport=uring,consistency=close-to-open",
    ] {
        let (mut rig, at) = Rig::mounted(options);
        let kept = KeptFiles::new(&at);
        let mut load = load(&at);
        // Over a ring the first use of an entry's memory may fail: see ADR 0001, at its end.
        let large = if options.starts_with("transport=classic") { 2 } else { 0 };
        (0..large).for_each(|one| load.add(overwrite(at.join(format!("large{one}"))).unwrap()));
        let kills = kill_for_a_while(&at, &load);
        let rounds = load.end();
        eprintln!("{options}: {kills} kills, rounds {rounds:?}");
        check_load(&at, &rounds);
        kept.check(&at);
        drop(kept);
        rig.end_of_mount(&at);
        let left: Vec<_> = fs::read_dir(rig.path("run").join("mounts")).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

// proves: P93
#[test]
fn the_server_and_the_daemon_die_together() {
    on_transports(|options| {
        let (mut rig, at) = Rig::mounted(options);
        let load = load(&at);
        let (begin, mut kills) = (Instant::now(), 0);
        while begin.elapsed() < KILLING_TIME || kills < KILLS_OF_BOTH_MIN {
            std::thread::sleep(some_time(kills));
            let daemon = wait_for_daemon(&at);
            if kills % 2 == 0 {
                signal(daemon, libc::SIGKILL);
                rig.end_server(libc::SIGKILL);
            } else {
                rig.end_server(libc::SIGKILL);
                signal(daemon, libc::SIGKILL);
            }
            kills += 1;
            let before = load.steps.load(Ordering::Relaxed);
            rig.serve(&[]);
            wait_for("progress", || load.steps.load(Ordering::Relaxed) > before);
        }
        let rounds = load.end();
        eprintln!("{options}: {kills} kills of both, rounds {rounds:?}");
        check_load(&at, &rounds);
        rig.end_of_mount(&at);
    });
}

/// Before it drops pages the kernel waits for those that are being read. A daemon that waited with it
/// could not be reaped when it was killed, and so had no successor that would have answered the read.
// proves: P93
#[test]
fn a_daemon_dies_while_the_kernel_drops_what_others_change() {
    const PIECE_BYTES: usize = 256 << 10;
    const PIECES: u64 = 64;
    on_transports(|options| {
        let options = format!("{options},consistency=close-to-open");
        let (mut rig, at) = Rig::mounted(&options);
        let other = rig.mount("other", &options);
        let written = File::create(other.join("file")).unwrap();
        written.set_len(PIECES * PIECE_BYTES as u64).unwrap();
        let read = File::open(at.join("file")).unwrap();
        let (mut load, mut piece) = (Load::new(), vec![0; PIECE_BYTES]);
        let place = |round: u64| round % PIECES * PIECE_BYTES as u64;
        load.add(move |round| written.write_all_at(&round.to_ne_bytes(), place(round)));
        let reads = Arc::new(AtomicU64::new(0));
        let count = reads.clone();
        load.add(move |round| {
            count.fetch_add(1, Ordering::Relaxed);
            read.read_exact_at(&mut piece, place(round))
        });
        for kill in 0..KILLS_MIN {
            let before = reads.load(Ordering::Relaxed);
            wait_for("reads", || reads.load(Ordering::Relaxed) > before + 2 * PIECES);
            std::thread::sleep(some_time(kill));
            signal(wait_for_daemon(&at), libc::SIGKILL);
        }
        let before = reads.load(Ordering::Relaxed);
        wait_for("the last successor", || reads.load(Ordering::Relaxed) > before + 2 * PIECES);
        load.end();
        rig.umount(&other);
        rig.end_of_mount(&at);
    });
}

/// The next daemon has open again what the dead one had, before anybody can remove it.
// proves: P96
#[test]
fn files_deleted_by_others_after_both_died_live_on() {
    on_transports(|options| {
        let (mut rig, at) = Rig::mounted(options);
        let mut file = OpenOptions::new();
        let file = file.create_new(true).read(true).write(true).open(at.join("file")).unwrap();
        file.write_all_at(b"still here", 0).unwrap();
        let dead = daemon(&at).unwrap();
        signal(dead, libc::SIGKILL);
        rig.end_server(libc::SIGKILL);
        rig.serve(&[]);
        let back = || {
            let status = rig.run(&["status", at.to_str().unwrap(), "--json"]).stdout;
            String::from_utf8_lossy(&status).contains("\"connected\":true")
        };
        wait_for("the next daemon", || daemon(&at).is_some_and(|next| next != dead) && back());
        std::thread::sleep(Duration::from_millis(500)); // it says that it has returned
        let other = rig.mount("other", options);
        fs::remove_file(other.join("file")).unwrap();
        let mut text = [0; 10];
        file.read_exact_at(&mut text, 0).unwrap();
        assert_eq!(&text, b"still here");
        drop(file);
        rig.umount(&other);
        rig.end_of_mount(&at);
    });
}

// proves: P96
#[test]
fn a_blocked_lock_survives_and_can_be_killed() {
    on_transports(blocked_lock);
}

fn blocked_lock(options: &str) {
    let (mut rig, at) = Rig::mounted(options);
    let holder = File::create(at.join("lock")).unwrap();
    lock(&holder, libc::F_WRLCK, libc::F_OFD_SETLK).unwrap();
    let path = at.join("lock");
    let waiter = std::thread::spawn(move || {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        lock(&file, libc::F_WRLCK, libc::F_OFD_SETLKW)
    });
    // The script waits for its own lock, for ever.
    let script = "exec 9>$AT/lock2; flock 9; exec flock $AT/lock2 true";
    let flock = rig.start(script, &at);
    wait_for("the lock to be waited for", || waits_for_a_lock(flock));
    for _ in 0..5 {
        std::thread::sleep(Duration::from_millis(150));
        signal(wait_for_daemon(&at), libc::SIGKILL);
    }
    assert!(!waiter.is_finished());
    lock(&holder, libc::F_UNLCK, libc::F_OFD_SETLK).unwrap();
    waiter.join().unwrap().unwrap();
    assert!(!flock.is_over());
    flock.signal(libc::SIGKILL);
    rig.end_of(flock);
    drop(holder);
    rig.end_of_mount(&at);
}

/// Keeps this thread on the first CPU that it may use: its requests go through one queue of
/// a ring.
fn stay_on_one_cpu() {
    let done = (0..libc::CPU_SETSIZE as usize).any(|cpu| {
        // SAFETY: an all-zero set is an empty one, and outlives the calls.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(cpu, &mut set);
            libc::sched_setaffinity(0, size_of_val(&set), &set) == 0
        }
    });
    assert!(done);
}

/// Whether a thread of this process waits in a system call.
fn is_asleep_in(thread: i32, number: libc::c_long) -> bool {
    let of_thread = |file: &str| {
        fs::read_to_string(format!("/proc/self/task/{thread}/{file}")).unwrap_or_default()
    };
    let sleeps = of_thread("stat").rsplit(')').next().is_some_and(|rest| !rest.starts_with(" R"));
    sleeps && of_thread("syscall").starts_with(&format!("{number} "))
}

/// A ring's entry that the kernel gave to a lock that is waited for gave nothing more to the
/// request behind it in the queue. That request was the unlocking.
// proves: P96
#[test]
fn an_unlocking_behind_its_lock_in_the_queue_is_reached_over_a_death() {
    on_transports(|options| {
        let (mut rig, at) = Rig::mounted(options);
        let holder = Arc::new(File::create(at.join("lock")).unwrap());
        let waiter = OpenOptions::new().write(true).open(at.join("lock")).unwrap();
        lock(&holder, libc::F_WRLCK, libc::F_OFD_SETLK).unwrap();
        let supervisor = kill_and_start_no_other(&at);
        let mut waiting = Vec::new();
        let held = holder.clone();
        let steps: [Box<dyn FnOnce() -> io::Result<()> + Send>; 2] = [
            Box::new(move || lock(&waiter, libc::F_WRLCK, libc::F_OFD_SETLKW)),
            Box::new(move || lock(&held, libc::F_UNLCK, libc::F_OFD_SETLK)),
        ];
        for step in steps {
            let (sender, receiver) = std::sync::mpsc::channel();
            waiting.push(std::thread::spawn(move || {
                stay_on_one_cpu();
                // SAFETY: no memory is passed.
                sender.send(unsafe { libc::gettid() }).unwrap();
                step()
            }));
            let thread = receiver.recv().unwrap();
            wait_for("the request", || is_asleep_in(thread, libc::SYS_fcntl)); // one behind the other
        }
        signal(supervisor, libc::SIGCONT);
        wait_for("the lock to change hands", || waiting.iter().all(JoinHandle::is_finished));
        waiting.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
        drop(holder);
        rig.end_of_mount(&at);
    });
}

/// The signal comes when nobody is there who could be notified. Over a ring the kernel never
/// tells; on the classic transport it does so with the request, sent again.
#[test]
fn who_waits_for_a_lock_can_be_killed_between_two_daemons() {
    on_transports(|options| {
        let (mut rig, at) = Rig::mounted(options);
        let holder = File::create(at.join("lock")).unwrap();
        holder.lock().unwrap();
        let waiters: Vec<_> =
            (0..3).map(|_| rig.start("exec 9<$AT/lock; exec flock 9", &at)).collect();
        wait_for("the lock to be waited for", || waiters.iter().all(|one| waits_for_a_lock(*one)));
        let supervisor = kill_and_start_no_other(&at);
        waiters[0].signal(libc::SIGKILL);
        waiters[1].signal(libc::SIGTERM);
        signal(supervisor, libc::SIGCONT);
        for waiter in &waiters[..2] {
            assert!(!rig.end_of(*waiter).success(), "{options}");
        }
        assert!(!waiters[2].is_over());
        holder.unlock().unwrap();
        assert!(rig.end_of(waiters[2]).success(), "{options}");
        drop(holder);
        rig.end_of_mount(&at);
    });
}
