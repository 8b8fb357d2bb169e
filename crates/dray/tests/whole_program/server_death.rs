//! The real server is killed while a mount uses it, and another one takes over.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::common;
use crate::common::{Rig, daemons};

/// The classic transport, and a ring where this machine has one.
const TRANSPORTS: [&str; 2] = ["transport=classic", "transport=auto"];

fn kill_and_serve_again(rig: &mut Rig) {
    rig.end_server(libc::SIGKILL);
    rig.serve(&[]);
}

/// The process that keeps deleted files for clients that come back went on for five minutes, with
/// their space. There was no client any more.
// proves: P89
#[test]
fn what_nobody_can_come_back_for_is_not_kept() {
    if common::skipped() {
        return;
    }
    let (mut rig, at) = Rig::mounted("transport=classic");
    let file = File::create(at.join("f")).unwrap();
    fs::remove_file(at.join("f")).unwrap();
    let status = rig.demand(&["status", "data", "--json", "--interval", "0"]);
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    let session = status["clients"][0]["session"].as_str().unwrap();
    rig.end_server(libc::SIGKILL);
    for kind in ["mount-supervisor", "mount-daemon"] {
        common::processes(kind, &at).iter().for_each(|pid| daemons::signal(*pid, libc::SIGKILL));
    }
    drop(file);
    rig.serve(&[]);
    rig.demand(&["evict", session]);
    rig.end_server(libc::SIGTERM);
    let store = rig.path("state").join("keeper.sock");
    common::wait_for("the end of the descriptor store", || !store.exists());
}

/// The control sockets stayed there for ever where no server came back for the same state
/// directory.
#[test]
fn control_sockets_of_servers_that_were_killed_go_with_the_next_start() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let sockets = |rig: &Rig| -> BTreeSet<PathBuf> {
        let entries = fs::read_dir(rig.path("run/servers")).unwrap().flatten();
        let paths = entries.map(|entry| entry.path());
        paths.filter(|path| path.extension().is_some_and(|end| end == "sock")).collect()
    };
    let start = |rig: &mut Rig, name: &str| {
        let path = |what: &str| rig.path(&format!("{what}-{name}")).display().to_string();
        let (export, socket, state) = (rig.path("export"), path("socket"), path("state"));
        let (export, listen) = (format!("data={}", export.display()), format!("unix://{socket}"));
        let words = ["serve", "--export", &export, "--listen", &listen, "--state", &state];
        let server = rig.start_command(&words);
        common::wait_for("a server", || std::os::unix::net::UnixStream::connect(&socket).is_ok());
        server
    };
    let live_sockets = sockets(&rig);
    let killed = start(&mut rig, "killed");
    common::wait_for("its control socket", || sockets(&rig).len() == 2);
    killed.signal(libc::SIGKILL);
    rig.end_of(killed);
    let left = sockets(&rig);
    assert_eq!(left.len(), 2);
    let next = start(&mut rig, "next");
    // The new server's own socket, which it makes after it listens, and that of the server that
    // still runs.
    common::wait_for("the removal", || {
        let now = sockets(&rig);
        now.len() == 2 && now.intersection(&left).eq(&live_sockets)
    });
    let status = rig.demand(&["status", "--json", "--interval", "0"]);
    assert_eq!(status.lines().count(), 2, "{status}");
    next.signal(libc::SIGTERM);
    assert!(rig.end_of(next).success());
    assert_eq!(sockets(&rig), live_sockets);
}

// proves: P89
#[test]
fn deleted_files_that_are_open_outlive_the_server() {
    if !common::skipped() {
        TRANSPORTS.iter().for_each(|transport| deleted_files_outlive_the_server(transport));
    }
}

fn deleted_files_outlive_the_server(transport: &str) {
    let (mut rig, at) = Rig::mounted(transport);
    let file = File::options()
        .create(true)
        .truncate(true)
        .read(true)
        .write(true)
        .open(at.join("f"))
        .unwrap();
    file.write_all_at(b"before", 0).unwrap();
    fs::remove_file(at.join("f")).unwrap();
    let replaced = File::options()
        .create(true)
        .truncate(true)
        .read(true)
        .write(true)
        .open(at.join("old"))
        .unwrap();
    replaced.write_all_at(b"replaced", 0).unwrap();
    fs::write(at.join("new"), b"new").unwrap();
    fs::rename(at.join("new"), at.join("old")).unwrap();
    let unnamed =
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_TMPFILE).open(&at).unwrap();
    unnamed.write_all_at(b"unnamed", 0).unwrap();
    for round in 0..2u8 {
        kill_and_serve_again(&mut rig);
        for (file, content) in
            [(&file, &b"before"[..]), (&replaced, b"replaced"), (&unnamed, b"unnamed")]
        {
            let mut read = vec![0; content.len()];
            file.read_exact_at(&mut read, 0).unwrap();
            assert_eq!(read, content);
            file.write_all_at(&[round], 100 + u64::from(round)).unwrap();
            assert_eq!(file.metadata().unwrap().len(), 101 + u64::from(round));
        }
    }
    drop((file, replaced, unnamed));
    assert_eq!(fs::read(at.join("old")).unwrap(), b"new");
    rig.umount(&at);
}

/// The holder of the files does nothing between the server's return and the removal. It has to come
/// back by itself, or the removed files have to be kept for it.
// proves: P89
#[test]
fn files_deleted_by_others_right_after_the_restart_live_on() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let holders = TRANSPORTS.map(|transport| rig.mount(transport, transport));
    for round in 0..5 {
        let at = &holders[round % 2];
        let open = |name: &str| {
            let path = at.join(format!("{name}{round}"));
            let mut options = File::options();
            let file = options.create(true).truncate(true).read(true).write(true).open(path);
            let file = file.unwrap();
            file.write_all_at(name.as_bytes(), 0).unwrap();
            file
        };
        let (removed, replaced) = (open("removed"), open("replaced"));
        kill_and_serve_again(&mut rig);
        // By a mount that has not waited for anything: it is not the one that had them open.
        let other = rig.mount(&format!("other{round}"), "transport=classic");
        fs::remove_file(other.join(format!("removed{round}"))).unwrap();
        fs::write(other.join("new"), b"new").unwrap();
        fs::rename(other.join("new"), other.join(format!("replaced{round}"))).unwrap();
        for (file, text) in [(&removed, &b"removed"[..]), (&replaced, b"replaced")] {
            let mut read = vec![0; text.len()];
            file.read_exact_at(&mut read, 0).unwrap();
            assert_eq!(read, text);
        }
        kill_and_serve_again(&mut rig);
        removed.write_all_at(b"after another death", 100).unwrap();
        assert_eq!(removed.metadata().unwrap().len(), 119);
        rig.umount(&other);
    }
    holders.iter().for_each(|at| rig.umount(at));
}

// proves: P90
#[test]
fn what_was_open_for_writing_stays_so_whatever_its_mode() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let mounts = TRANSPORTS.map(|transport| rig.mount(transport, transport));
    let files = TRANSPORTS.map(|name| {
        let (path, mut open) = (rig.path(name).join(name), OpenOptions::new());
        let file = open.create_new(true).write(true).mode(0o444).open(&path).unwrap();
        file.write_all_at(b"one", 0).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
        file
    });
    kill_and_serve_again(&mut rig);
    for (file, name) in files.into_iter().zip(TRANSPORTS) {
        file.write_all_at(b"two", 3).unwrap();
        drop(file);
        assert_eq!(fs::read(rig.path("export").join(name)).unwrap(), b"onetwo");
    }
    mounts.iter().for_each(|at| rig.umount(at));
}

/// A lock of the open file on all of it; whether there is none in the way.
fn lock_range(file: &File) -> bool {
    // SAFETY: an all-zero flock is valid, and outlives the call.
    unsafe {
        let mut lock: libc::flock = std::mem::zeroed();
        lock.l_type = libc::F_WRLCK as _;
        libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &mut lock) == 0
    }
}

// proves: P91
#[test]
fn locks_outlive_the_server_and_stay_exclusive() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let one = rig.mount("one", TRANSPORTS[0]);
    let two = rig.mount("two", TRANSPORTS[1]);
    let holder = File::create(one.join("f")).unwrap();
    holder.lock().unwrap();
    assert!(lock_range(&holder));
    let other = OpenOptions::new().write(true).open(two.join("f")).unwrap();
    let both_are_held = || {
        assert!(matches!(other.try_lock(), Err(fs::TryLockError::WouldBlock)));
        assert!(!lock_range(&other));
    };
    both_are_held();
    kill_and_serve_again(&mut rig);
    both_are_held();
    holder.unlock().unwrap();
    other.lock().unwrap();
    drop(holder);
    common::wait_for("the other lock", || lock_range(&other)); // the server hears of closes later
    drop(other);
    rig.umount(&one);
    rig.umount(&two);
}

/// As after a loss of power: another boot, and nothing is left of the journal.
// proves: P106
#[test]
fn locks_are_reclaimed_from_a_machine_that_lost_everything() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let config = rig.path("config.toml");
    fs::write(&config, "lease_s = 4\n").unwrap();
    let boot = |id| ["--config", config.to_str().unwrap(), "--boot-id", id];
    rig.serve(&boot("1"));
    let one = rig.mount("one", TRANSPORTS[0]);
    let two = rig.mount("two", TRANSPORTS[1]);
    let holder = File::create(one.join("f")).unwrap();
    holder.lock().unwrap();
    assert!(lock_range(&holder));
    rig.end_server(libc::SIGKILL);
    fs::remove_dir_all(rig.path("state/sessions")).unwrap();
    let begin = Instant::now();
    rig.serve(&boot("2"));
    // No client gets a lock before all clients that may have held one could claim it.
    let apart = File::create(two.join("apart")).unwrap();
    apart.lock().unwrap();
    assert!(begin.elapsed() > Duration::from_secs(3), "no grace period");
    let other = OpenOptions::new().write(true).open(two.join("f")).unwrap();
    assert!(matches!(other.try_lock(), Err(fs::TryLockError::WouldBlock)));
    assert!(!lock_range(&other));
    (&holder).write_all(b"still mine").unwrap();
    holder.unlock().unwrap();
    other.lock().unwrap();
    drop((holder, other, apart));
    rig.umount(&one);
    rig.umount(&two);
}

/// The processes that would have kept them die with the machine, too.
// proves: P107
#[test]
fn deleted_files_are_stale_once_the_server_s_machine_was_lost() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&["--boot-id", "1"]);
    let mounts = TRANSPORTS.map(|transport| rig.mount(transport, transport));
    let files = [&mounts[0], &mounts[1]].map(|at| {
        let mut open = OpenOptions::new();
        let open = open.read(true).write(true);
        let unnamed = open.clone().custom_flags(libc::O_TMPFILE).open(at).unwrap();
        let [deleted, kept] = ["deleted", "kept"].map(|name| {
            let path = at.join(format!("{name}-{}", at.file_name().unwrap().to_str().unwrap()));
            (open.clone().create(true).open(&path).unwrap(), path)
        });
        [&unnamed, &deleted.0, &kept.0].iter().for_each(|file| file.write_all_at(b"x", 0).unwrap());
        fs::remove_file(deleted.1).unwrap();
        ([unnamed, deleted.0], kept.0)
    });
    rig.end_server(libc::SIGKILL);
    let store = || common::processes("keep-files", &rig.path("state"));
    assert_eq!(store().len(), 1);
    daemons::signal(store()[0], libc::SIGKILL);
    common::wait_for("the end of the descriptor store", || store().is_empty());
    rig.serve(&["--boot-id", "2"]);
    for (gone, kept) in &files {
        for file in gone {
            let read = file.read_at(&mut [0], 0).unwrap_err();
            let written = file.write_at(b"y", 0).unwrap_err();
            let errors = [read, written].map(|error| error.raw_os_error());
            assert_eq!(errors, [Some(libc::ESTALE); 2]);
        }
        let mut byte = [0];
        kept.read_exact_at(&mut byte, 0).unwrap();
        assert_eq!(byte, *b"x");
    }
    drop(files);
    mounts.iter().for_each(|at| rig.umount(at));
}

/// Appends, directories and renames go on while the server is killed again and again.
// proves: P80
#[test]
fn work_goes_on_over_deaths_and_nothing_is_applied_twice() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let mounts = TRANSPORTS.map(|transport| rig.mount(transport, transport));
    let stop = Arc::new(AtomicBool::new(false));
    let rounds: [Arc<AtomicU32>; 3] = Default::default();
    let workers: Vec<_> = (0..3)
        .map(|worker| {
            let (at, stop, round) =
                (mounts[worker % 2].clone(), stop.clone(), rounds[worker].clone());
            std::thread::spawn(move || {
                let mut log =
                    OpenOptions::new().create(true).append(true).open(at.join("log")).unwrap();
                let mut done = 0u32;
                while !stop.load(Ordering::Relaxed) {
                    let dir = at.join(format!("dir-{worker}-{done}"));
                    fs::create_dir(&dir).unwrap();
                    log.write_all(format!("{worker}:{done:06};").as_bytes()).unwrap();
                    let to = at.join(format!("moved-{worker}"));
                    fs::rename(&dir, &to).unwrap();
                    fs::remove_dir(&to).unwrap();
                    done += 1;
                    round.store(done, Ordering::Relaxed);
                }
                done
            })
        })
        .collect();
    // Until all have done something in between, however slow the machine is.
    let (begin, mut kills) = (Instant::now(), 0);
    let busy = || rounds.iter().all(|round| round.load(Ordering::Relaxed) > 20);
    let done = || rounds.iter().map(|round| round.load(Ordering::Relaxed)).sum::<u32>();
    while kills < 20 || !busy() {
        assert!(begin.elapsed() < Duration::from_secs(300), "{kills} kills, {rounds:?} rounds");
        std::thread::sleep(Duration::from_millis(150));
        let before = done();
        kill_and_serve_again(&mut rig);
        kills += 1;
        common::wait_for("progress", || done() > before);
    }
    stop.store(true, Ordering::Relaxed);
    let done: Vec<u32> = workers.into_iter().map(|worker| worker.join().unwrap()).collect();
    let log = fs::read_to_string(mounts[0].join("log")).unwrap();
    for (worker, done) in done.iter().enumerate() {
        let mine: Vec<String> = log
            .split_terminator(';')
            .filter(|record| record.starts_with(&format!("{worker}:")))
            .map(str::to_owned)
            .collect();
        let expected: Vec<String> = (0..*done).map(|n| format!("{worker}:{n:06}")).collect();
        assert_eq!(mine, expected);
    }
    mounts.iter().for_each(|at| rig.umount(at));
}
