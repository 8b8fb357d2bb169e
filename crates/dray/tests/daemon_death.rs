//! kill -9 of the daemon under a mount, again and again: applications notice nothing but
//! pauses, nothing is lost and nothing is applied twice.

mod common;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::{Rig, is_mounted, processes, wait_for};

/// Time over which daemons are killed.
const KILLING_TIME: Duration = Duration::from_secs(6);

fn daemon(at: &Path) -> Option<i32> {
    processes("mount-daemon", at).first().copied()
}

fn supervisor(at: &Path) -> i32 {
    processes("mount-supervisor", at)[0]
}

fn signal(pid: i32, signal: i32) {
    // SAFETY: no memory is passed. A process that has ended meanwhile is what is wanted.
    unsafe { libc::kill(pid, signal) };
}

/// A different wait each time, without a generator: enough to meet every moment.
fn some_time(turn: u64) -> Duration {
    Duration::from_millis(100 + (turn.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & 0x7f))
}

/// Applications at work; whatever one of them complains about is the test's failure.
struct Load {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<io::Result<u64>>>,
    steps: Arc<AtomicU64>,
}

impl Load {
    fn new() -> Load {
        Load { stop: Arc::default(), threads: Vec::new(), steps: Arc::default() }
    }

    /// Runs `step` over and over, with the number of the turn.
    fn add(&mut self, mut step: impl FnMut(u64) -> io::Result<()> + Send + 'static) {
        let (stop, steps) = (self.stop.clone(), self.steps.clone());
        self.threads.push(std::thread::spawn(move || {
            let mut turn = 0;
            while !stop.load(Ordering::Relaxed) {
                step(turn)?;
                turn += 1;
                steps.fetch_add(1, Ordering::Relaxed);
            }
            Ok(turn)
        }));
    }

    /// Turns of each.
    fn end(self) -> Vec<u64> {
        self.stop.store(true, Ordering::Relaxed);
        let results = self.threads.into_iter().map(|thread| thread.join().unwrap());
        results.map(|turns| turns.expect("an application saw an error")).collect()
    }
}

/// Kills daemons for a while; answers how many.
fn kill_for(at: &Path, time: Duration, kill: i32, load: &Load) -> usize {
    let (begin, mut kills) = (Instant::now(), 0);
    while begin.elapsed() < time {
        std::thread::sleep(some_time(kills));
        let before = load.steps.load(Ordering::Relaxed);
        let Some(pid) = daemon(at) else { continue };
        signal(pid, kill);
        kills += 1;
        wait_for("progress", || load.steps.load(Ordering::Relaxed) > before);
    }
    kills as usize
}

fn append(path: PathBuf) -> io::Result<impl FnMut(u64) -> io::Result<()>> {
    let mut file = OpenOptions::new().create(true).append(true).open(path)?;
    Ok(move |turn| {
        let written = file.write(format!("{turn:015}\n").as_bytes())?;
        if written == 16 { Ok(()) } else { Err(io::Error::other("a short write")) }
    })
}

/// Makes, renames and removes; each would fail if it were applied twice.
fn names(dir: PathBuf) -> impl FnMut(u64) -> io::Result<()> {
    move |turn| {
        let (from, to) = (dir.join(format!("{turn}.a")), dir.join(format!("{turn}.b")));
        fs::create_dir(&from)?;
        fs::rename(&from, &to)?;
        fs::remove_dir(&to)?;
        let file = OpenOptions::new().write(true).create_new(true).open(&from)?;
        drop(file);
        fs::hard_link(&from, &to)?;
        fs::remove_file(&from)?;
        fs::remove_file(&to)
    }
}

fn read_back(path: PathBuf, content: Vec<u8>) -> impl FnMut(u64) -> io::Result<()> {
    move |turn| {
        let mut file = File::open(&path)?;
        let mut read = vec![0; 4096];
        let at = turn * 4096 % (content.len() as u64 - 4096);
        file.read_exact_at(&mut read, at)?;
        if read != content[at as usize..][..4096] {
            return Err(io::Error::other("read something else"));
        }
        read.clear();
        if turn % 16 == 0 {
            file.read_to_end(&mut read)?;
            if read != content {
                return Err(io::Error::other("read something else"));
            }
        }
        Ok(())
    }
}

fn lock(file: &File, kind: i32, command: i32) -> io::Result<()> {
    // SAFETY: an all-zero flock is valid, and outlives the call.
    let done = unsafe {
        let mut lock: libc::flock = std::mem::zeroed();
        lock.l_type = kind as _;
        libc::fcntl(file.as_raw_fd(), command, &mut lock)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Two open file descriptions take turns; the holder checks that it is alone.
fn locking(path: PathBuf, inside: Arc<AtomicU64>) -> impl FnMut(u64) -> io::Result<()> {
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(path).unwrap();
    move |_| {
        lock(&file, libc::F_WRLCK, libc::F_OFD_SETLKW)?;
        let alone = inside.fetch_add(1, Ordering::SeqCst) == 0;
        std::thread::sleep(Duration::from_micros(300));
        inside.fetch_sub(1, Ordering::SeqCst);
        lock(&file, libc::F_UNLCK, libc::F_OFD_SETLK)?;
        if alone { Ok(()) } else { Err(io::Error::other("two had the lock")) }
    }
}

fn check_records(path: &Path, turns: u64) {
    let text = fs::read_to_string(path).unwrap();
    let records: Vec<u64> = text.lines().map(|line| line.parse().unwrap()).collect();
    let expected: Vec<u64> = (0..turns).collect();
    let wrong = records.iter().zip(&expected).find(|(found, expected)| found != expected);
    assert!(records == expected, "{} first differs at {wrong:?}", path.display());
}

/// Open before the deaths, and used behind them.
struct Kept {
    file: File,
    deleted: File,
    locked: File,
}

impl Kept {
    fn new(at: &Path) -> Kept {
        let open = |name: &str| {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create_new(true).open(at.join(name)).unwrap()
        };
        let kept = Kept { file: open("kept"), deleted: open("deleted"), locked: open("locked") };
        kept.deleted.write_all_at(b"still here", 0).unwrap();
        fs::remove_file(at.join("deleted")).unwrap();
        // What is open for writing stays so, whatever the mode says by then.
        fs::set_permissions(at.join("kept"), std::os::unix::fs::PermissionsExt::from_mode(0o444))
            .unwrap();
        lock(&kept.locked, libc::F_WRLCK, libc::F_OFD_SETLK).unwrap();
        kept
    }

    fn check(&self, at: &Path) {
        self.file.write_all_at(b"written later", 0).unwrap();
        assert_eq!(fs::read(at.join("kept")).unwrap(), b"written later");
        let mut text = String::new();
        (&self.deleted).read_to_string(&mut text).unwrap();
        assert_eq!(text, "still here");
        let other = OpenOptions::new().write(true).open(at.join("locked")).unwrap();
        let refused = lock(&other, libc::F_WRLCK, libc::F_OFD_SETLK).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EAGAIN));
        lock(&self.locked, libc::F_UNLCK, libc::F_OFD_SETLK).unwrap();
        lock(&other, libc::F_WRLCK, libc::F_OFD_SETLK).unwrap();
    }
}

fn load(at: &Path) -> Load {
    let mut load = Load::new();
    for name in ["one", "two", "three"] {
        load.add(append(at.join(name)).unwrap());
    }
    for name in ["names1", "names2"] {
        fs::create_dir(at.join(name)).unwrap();
        load.add(names(at.join(name)));
    }
    let content: Vec<u8> = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
    fs::write(at.join("content"), &content).unwrap();
    load.add(read_back(at.join("content"), content));
    let inside = Arc::new(AtomicU64::new(0));
    for _ in 0..2 {
        load.add(locking(at.join("lock"), inside.clone()));
    }
    load
}

fn check_load(at: &Path, turns: &[u64]) {
    for (name, turns) in ["one", "two", "three"].iter().zip(turns) {
        check_records(&at.join(name), *turns);
    }
    for name in ["names1", "names2"] {
        assert_eq!(fs::read_dir(at.join(name)).unwrap().count(), 0);
    }
}

fn gone(at: &Path) {
    wait_for("the end of the processes", || {
        processes("mount-daemon", at).is_empty() && processes("mount-supervisor", at).is_empty()
    });
    assert!(!is_mounted(at));
}

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
        let mut rig = Rig::new();
        rig.serve(&[]);
        let at = rig.mount("mount", options);
        let kept = Kept::new(&at);
        let load = load(&at);
        let kills = kill_for(&at, KILLING_TIME, libc::SIGKILL, &load);
        let turns = load.end();
        eprintln!("{options}: {kills} kills, turns {turns:?}");
        assert!(kills > 10, "{kills}");
        check_load(&at, &turns);
        kept.check(&at);
        drop(kept);
        rig.umount(&at);
        gone(&at);
        let left: Vec<_> = fs::read_dir(rig.path("run").join("mounts")).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn the_server_and_the_daemon_die_together() {
    if common::skipped() {
        return;
    }
    for options in ["transport=classic", "transport=uring"] {
        let mut rig = Rig::new();
        rig.serve(&[]);
        let at = rig.mount("mount", options);
        let load = load(&at);
        let (begin, mut kills) = (Instant::now(), 0);
        while begin.elapsed() < KILLING_TIME {
            std::thread::sleep(some_time(kills));
            let before = load.steps.load(Ordering::Relaxed);
            let daemon = daemon(&at).expect("a daemon");
            if kills % 2 == 0 {
                signal(daemon, libc::SIGKILL);
                rig.end_server(libc::SIGKILL);
            } else {
                rig.end_server(libc::SIGKILL);
                signal(daemon, libc::SIGKILL);
            }
            kills += 1;
            rig.serve(&[]);
            wait_for("progress", || load.steps.load(Ordering::Relaxed) > before);
        }
        let turns = load.end();
        eprintln!("{options}: {kills} kills of both, turns {turns:?}");
        assert!(kills >= 3, "{kills}");
        check_load(&at, &turns);
        rig.umount(&at);
        gone(&at);
    }
}

/// The next daemon has open again what the dead one had, before anybody can remove it.
#[test]
fn files_deleted_by_others_after_both_died_live_on() {
    if common::skipped() {
        return;
    }
    for options in ["transport=classic", "transport=uring"] {
        let mut rig = Rig::new();
        rig.serve(&[]);
        let at = rig.mount("mount", options);
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
        rig.umount(&at);
        gone(&at);
    }
}

#[test]
fn a_blocked_lock_survives_and_can_be_killed() {
    if common::skipped() {
        return;
    }
    for options in ["transport=classic", "transport=uring"] {
        blocked_lock(options);
    }
}

fn blocked_lock(options: &str) {
    let mut rig = Rig::new();
    rig.serve(&[]);
    let at = rig.mount("mount", options);
    let holder = File::create(at.join("lock")).unwrap();
    lock(&holder, libc::F_WRLCK, libc::F_OFD_SETLK).unwrap();
    let path = at.join("lock");
    let waiter = std::thread::spawn(move || {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        lock(&file, libc::F_WRLCK, libc::F_OFD_SETLKW)
    });
    let mut flock = std::process::Command::new("flock")
        .arg(at.join("lock2"))
        .args(["-c", "exec flock \"$0\" true"])
        .arg(at.join("lock2"))
        .spawn()
        .unwrap();
    for _ in 0..5 {
        std::thread::sleep(Duration::from_millis(150));
        signal(daemon(&at).unwrap(), libc::SIGKILL);
    }
    assert!(!waiter.is_finished());
    lock(&holder, libc::F_UNLCK, libc::F_OFD_SETLK).unwrap();
    waiter.join().unwrap().unwrap();
    // One that waits for itself would wait for ever: a signal ends it.
    let _ = flock.kill();
    let begin = Instant::now();
    flock.wait().unwrap();
    assert!(begin.elapsed() < Duration::from_secs(3));
    drop(holder);
    rig.umount(&at);
    gone(&at);
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

/// A ring's entry that the kernel gave to a lock that is waited for gave nothing more to
/// what stood behind it in the queue: the unlocking.
#[test]
fn an_unlocking_behind_its_lock_in_the_queue_is_reached_over_a_death() {
    if common::skipped() {
        return;
    }
    for options in ["transport=classic", "transport=uring"] {
        let mut rig = Rig::new();
        rig.serve(&[]);
        let at = rig.mount("mount", options);
        let holder = Arc::new(File::create(at.join("lock")).unwrap());
        let waiter = OpenOptions::new().write(true).open(at.join("lock")).unwrap();
        lock(&holder, libc::F_WRLCK, libc::F_OFD_SETLK).unwrap();
        let supervisor = supervisor(&at);
        signal(supervisor, libc::SIGSTOP);
        signal(daemon(&at).unwrap(), libc::SIGKILL);
        wait_for("the daemon's end", || daemon(&at).is_none());
        let mut waiting = Vec::new();
        let held = holder.clone();
        let steps: [Box<dyn FnOnce() -> io::Result<()> + Send>; 2] = [
            Box::new(move || lock(&waiter, libc::F_WRLCK, libc::F_OFD_SETLKW)),
            Box::new(move || lock(&held, libc::F_UNLCK, libc::F_OFD_SETLK)),
        ];
        for step in steps {
            waiting.push(std::thread::spawn(move || {
                stay_on_one_cpu();
                step()
            }));
            std::thread::sleep(Duration::from_millis(200)); // one behind the other
        }
        signal(supervisor, libc::SIGCONT);
        wait_for("the lock to change hands", || waiting.iter().all(JoinHandle::is_finished));
        waiting.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
        drop(holder);
        rig.umount(&at);
        gone(&at);
    }
}

#[test]
fn an_upgrade_is_a_pause_and_a_broken_one_no_harm() {
    if common::skipped() {
        return;
    }
    for options in ["transport=classic", "transport=uring"] {
        upgrade(options);
    }
}

fn upgrade(options: &str) {
    let mut rig = Rig::new();
    rig.serve(&[]);
    let program = rig.path("dray");
    fs::copy(env!("CARGO_BIN_EXE_dray"), &program).unwrap();
    let at = rig.mount_with(&program, "mount", options);
    let kept = Kept::new(&at);
    let load = load(&at);
    let place = at.to_str().unwrap().to_owned();
    for _ in 0..3 {
        let before = daemon(&at).unwrap();
        fs::remove_file(&program).unwrap();
        fs::copy(env!("CARGO_BIN_EXE_dray"), &program).unwrap();
        rig.demand(&["upgrade", &place]);
        let after = daemon(&at).unwrap();
        assert_ne!(before, after);
        assert_eq!(fs::read_link(format!("/proc/{after}/exe")).unwrap(), program);
    }
    fs::remove_file(&program).unwrap();
    fs::copy("/bin/false", &program).unwrap();
    let refused = rig.run(&["upgrade", &place]);
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("former one goes on"));
    let turns = load.end();
    check_load(&at, &turns);
    kept.check(&at);
    drop(kept);
    rig.umount(&at);
    gone(&at);
}

#[test]
fn a_mount_whose_daemons_all_fail_is_ended() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let key = rig.path("key");
    fs::write(&key, "0123456789abcdef0123456789abcdef\n").unwrap();
    fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let auth = format!("psk:{}", key.display());
    rig.serve(&["--auth", &auth]);
    let at = rig.mount("mount", &format!("auth={auth}"));
    let mut blocked = std::process::Command::new("sh");
    let script = "flock -x 9; exec flock -x \"$0\" true";
    let mut blocked = blocked.args(["-c", &format!("exec 9>\"$0\"; {script}")]);
    blocked = blocked.arg(at.join("lock"));
    let mut blocked = blocked.spawn().unwrap();
    wait_for("the lock file", || at.join("lock").exists());
    // No daemon can start without the key.
    fs::remove_file(&key).unwrap();
    signal(daemon(&at).unwrap(), libc::SIGKILL);
    gone(&at);
    let _ = blocked.kill(); // it may have ended with an error
    blocked.wait().unwrap();
}

/// A daemon that crashes again and again is given up: applications get errors and can end.
#[test]
fn crashes_are_bounded() {
    if common::skipped() {
        return;
    }
    for options in ["transport=classic", "transport=uring"] {
        let mut rig = Rig::new();
        rig.serve(&[]);
        let at = rig.mount("mount", options);
        let file = File::create(at.join("file")).unwrap();
        for crash in 1..=5 {
            let pid = daemon(&at).expect("a daemon");
            signal(pid, libc::SIGABRT); // Rust takes the first SIGSEGV for itself
            if crash < 5 {
                wait_for("the next daemon", || daemon(&at).is_some_and(|next| next != pid));
                file.write_all_at(b"still there", 0).unwrap();
            }
        }
        gone(&at);
        let refused = file.write_all_at(b"no more", 0).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::ENOTCONN));
    }
}

#[test]
fn signals_to_the_supervisor_unmount_unless_it_is_busy() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let at = rig.mount("mount", "");
    let file = File::create(at.join("file")).unwrap();
    signal(supervisor(&at), libc::SIGTERM);
    signal(daemon(&at).unwrap(), libc::SIGTERM);
    std::thread::sleep(Duration::from_millis(500));
    file.write_all_at(b"x", 0).unwrap();
    assert!(is_mounted(&at) && daemon(&at).is_some());
    drop(file);
    signal(supervisor(&at), libc::SIGTERM);
    gone(&at);
}

#[test]
fn a_daemon_without_supervisor_goes_on() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let at = rig.mount("mount", "");
    fs::write(at.join("file"), "before").unwrap();
    signal(supervisor(&at), libc::SIGKILL);
    wait_for("its end", || processes("mount-supervisor", &at).is_empty());
    assert_eq!(fs::read(at.join("file")).unwrap(), b"before");
    rig.umount(&at);
    gone(&at);
}

/// Nobody is left to say goodbye: the lease decides.
#[test]
fn a_client_that_is_gone_gives_its_locks_back_after_its_lease() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let config = rig.path("config.toml");
    fs::write(&config, "lease_s = 3\n").unwrap();
    rig.serve(&["--config", config.to_str().unwrap()]);
    let one = rig.mount("one", "transport=classic");
    let two = rig.mount("two", "transport=classic");
    let holder = fs::File::create(one.join("f")).unwrap();
    holder.lock().unwrap();
    let other = fs::File::open(two.join("f")).unwrap();
    assert!(matches!(other.try_lock(), Err(fs::TryLockError::WouldBlock)));
    signal(supervisor(&one), libc::SIGKILL);
    while let Some(daemon) = daemon(&one) {
        signal(daemon, libc::SIGKILL);
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(matches!(other.try_lock(), Err(fs::TryLockError::WouldBlock)));
    let begin = std::time::Instant::now();
    other.lock().unwrap();
    assert!(begin.elapsed() > Duration::from_secs(1), "the lease was not waited for");
    drop((holder, other));
    rig.umount(&two);
}
