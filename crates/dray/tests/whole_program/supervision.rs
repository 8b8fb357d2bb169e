//! What the supervisor of a mount does when it is asked, and when its daemon cannot go on.

use std::fs::{self, File};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common;
use crate::common::daemons::{daemon, gone, signal, supervisor, wait_for_connections};
use crate::common::{LEAVE_OTHERS_MOUNTS, Rig, is_mounted, on_transports, processes, wait_for};

/// A way to the server at `socket` for the first client; later clients find it closed.
fn way_for_one(socket: PathBuf) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let (client, _) = listener.accept().unwrap();
        let server = UnixStream::connect(socket).unwrap();
        let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        let there = std::thread::spawn(move || std::io::copy(&mut from, &mut to));
        let (mut from, mut to): (UnixStream, TcpStream) = (server, client);
        let _ = std::io::copy(&mut from, &mut to); // until either end goes
        drop((from, to));
        let _ = there.join().unwrap();
        listener.incoming().for_each(drop);
    });
    port
}

/// The failure was reported in two lines, the last of which was `No route to host`, and the exit
/// code was 1.
#[test]
fn a_server_that_goes_while_it_is_mounted_is_reported_as_one_that_does_not_answer() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let target = format!("dray://127.0.0.1:{}/data", way_for_one(rig.path("socket")));
    let at = rig.path("mount");
    fs::create_dir(&at).unwrap();
    let output = rig.run(&["mount", &target, at.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.starts_with("dray: cannot connect to tcp://127.0.0.1:"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(!is_mounted(&at));
}

/// The former supervisor may not have ended when the next one begins, or still runs behind a lazy
/// unmounting.
#[test]
fn who_mounts_again_at_once_can_ask_for_status_and_upgrade() {
    on_transports(|options| {
        let (mut rig, at) = Rig::mounted(options);
        let (place, target) = (at.to_str().unwrap().to_owned(), rig.target());
        for round in 0..6 {
            let unmounted = Command::new("umount").arg(&at).status().unwrap();
            assert!(unmounted.success());
            let output = rig.run(&["mount", &target, &place, "-o", options]);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success() && said.is_empty(), "{round}: {said}");
        }
        rig.demand(&["upgrade", &place]);
        fs::write(at.join("file"), "held").unwrap();
        let held = fs::File::open(at.join("file")).unwrap();
        rig.demand(&["umount", "--lazy", &place]);
        let output = rig.run(&["mount", &target, &place, "-o", options]);
        assert!(output.status.success());
        drop(held); // the former mount ends
        let former_gone = || processes("mount-daemon", &at).len() == 1;
        wait_for("the end of the former mount", former_gone);
        let status = rig.demand(&["status", "--interval", "0", &place]);
        assert!(status.starts_with("MOUNT"), "{status}");
        rig.end_of_mount(&at);
    });
}

/// Nor does a former supervisor that is late take the next mount for its own. That holds where the
/// kernel's list of connections is not mounted, as in many containers.
#[test]
fn who_mounts_again_at_once_keeps_the_mount_without_the_list_of_connections() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let at = rig.path("mount");
    fs::create_dir(&at).unwrap();
    let script = "trap 'umount -l $AT 2>/dev/null' EXIT
        words() { tr '\\0' ' ' 2>/dev/null </proc/$1/cmdline; }
        umount /sys/fs/fuse/connections 2>/dev/null
        \"$DRAY\" mount $TARGET $AT || exit 1
        for process in /proc/[0-9]*; do
            case $(words ${process#/proc/}) in *mount-supervisor*\" $AT \"*) former=${process#/proc/} ;; esac
        done
        kill -STOP $former || exit 2
        until umount $AT; do mountpoint -q $AT || exit 3; sleep 0.05; done
        \"$DRAY\" mount $TARGET $AT || exit 4
        kill -CONT $former
        while [ -n \"$(words $former)\" ]; do sleep 0.05; done
        mountpoint -q $AT || exit 5
        until umount $AT; do mountpoint -q $AT || exit 6; sleep 0.05; done";
    let output = Command::new("timeout")
        .args(["120", "unshare", "-m", "--propagation", "private", "sh", "-c"])
        .arg(format!("{LEAVE_OTHERS_MOUNTS}{script}"))
        .env("AT", &at)
        .env("TARGET", rig.target())
        .env("DRAY", env!("CARGO_BIN_EXE_dray"))
        .env("DRAY_RUN_DIR", rig.path("run"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    gone(&at);
}

#[test]
fn a_mount_that_somebody_aborts_is_taken_out_of_the_tree() {
    on_transports(|options| {
        let (_rig, at) = Rig::mounted(options);
        let held = File::create(at.join("file")).unwrap();
        // The mount is in use, so that the kernel does not unmount it, and aborts it all the same.
        Command::new("umount").arg("-f").arg(&at).output().unwrap();
        gone(&at);
        assert!(held.set_len(1).is_err());
    });
}

/// A command that was interrupted between mounting and serving left a mount that nobody served.
#[test]
fn who_is_interrupted_as_soon_as_it_is_mounted_leaves_no_mount() {
    if common::skipped() {
        return;
    }
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGINT, libc::SIGTERM] {
        let mut rig = Rig::new();
        rig.serve(&[]);
        let at = rig.path("mount");
        fs::create_dir(&at).unwrap();
        let (target, place) = (rig.target(), at.to_str().unwrap().to_owned());
        let mounting = rig.start_command(&["mount", "--foreground", &target, &place]);
        let begin = Instant::now();
        while !is_mounted(&at) && begin.elapsed() < Duration::from_secs(60) {
            std::thread::yield_now();
        }
        mounting.signal(signal);
        rig.end_of(mounting);
        let left = is_mounted(&at);
        if left {
            Command::new("umount").arg("-l").arg(&at).status().unwrap();
        }
        assert!(!left, "signal {signal}");
    }
}

/// A mount that is out of the tree and still in use took no notice of SIGTERM.
#[test]
fn a_mount_that_cannot_be_unmounted_any_more_ends_when_it_is_asked_to() {
    if common::skipped() {
        return;
    }
    for options in ["transport=classic", "transport=uring"] {
        let mut rig = Rig::new();
        rig.serve(&[]);
        let at = rig.mount("mount", options);
        let held = File::create(at.join("file")).unwrap();
        rig.demand(&["umount", "--lazy", at.to_str().unwrap()]);
        held.set_len(1).unwrap();
        signal(supervisor(&at), libc::SIGTERM);
        gone(&at);
        assert!(held.set_len(2).is_err());
    }
}

/// A container that was started after it has a copy of the mount, which is not to be seen.
#[test]
fn a_mount_that_a_container_has_too_goes_on_until_its_end_is_asked_for() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let at = rig.mount("mount", "");
    fs::write(at.join("file"), "some").unwrap();
    let begins = rig.path("begins");
    fs::write(&begins, format!("{LEAVE_OTHERS_MOUNTS}exec sleep 1000")).unwrap();
    let script = format!("exec unshare -m --propagation private sh {}", begins.display());
    let container = rig.start(&script, &at);
    let other = container.0.to_string();
    let runs = || fs::read_to_string(format!("/proc/{other}/comm")).unwrap() == "sleep\n";
    wait_for("a container", runs);
    let inside = Path::new("/proc").join(&other).join("root").join(at.strip_prefix("/").unwrap());
    let output = rig.run(&["umount", at.to_str().unwrap()]);
    assert!(output.status.success() && !is_mounted(&at));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("another mount namespace"), "{said}");
    assert_eq!(fs::read(inside.join("file")).unwrap(), b"some");
    signal(supervisor(&at), libc::SIGTERM);
    gone(&at);
    assert!(fs::read(inside.join("file")).is_err());
    container.signal(libc::SIGKILL);
    rig.end_of(container);
}

// proves: P98
#[test]
fn a_mount_whose_daemons_all_fail_is_ended() {
    if common::skipped() {
        return;
    }
    let (rig, at) = Rig::mounted("");
    let mut blocked = std::process::Command::new("sh");
    let script = "flock -x 9; exec flock -x \"$0\" true";
    let mut blocked = blocked.args(["-c", &format!("exec 9>\"$0\"; {script}")]);
    blocked = blocked.arg(at.join("lock"));
    let mut blocked = blocked.spawn().unwrap();
    wait_for("the lock file", || at.join("lock").exists());
    // No daemon can go on with a session that makes no sense. The number is that of held.rs; with
    // each connection the first word is written anew.
    wait_for_connections(&rig, &at);
    let session = format!("/proc/{}/fd/102", supervisor(&at));
    File::options().write(true).open(session).unwrap().write_all_at(b"nonsense", 0).unwrap();
    signal(daemon(&at).unwrap(), libc::SIGKILL);
    gone(&at);
    let _ = blocked.kill(); // it may have ended with an error
    blocked.wait().unwrap();
}

/// A daemon that crashes again and again is given up: applications get errors and can end.
// proves: P98
#[test]
fn crashes_are_bounded() {
    on_transports(|options| {
        let (_rig, at) = Rig::mounted(options);
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
    });
}

/// A process, and those that it starts, which can be kept from starting more.
struct Confined(PathBuf);

impl Confined {
    /// None, which is said, where there is no such control group.
    fn new(pid: i32) -> Option<Confined> {
        let name = format!("dray-test-{pid}");
        for controller in ["/sys/fs/cgroup/pids", "/sys/fs/cgroup"] {
            let group = Path::new(controller).join(&name);
            if fs::create_dir(&group).is_err() {
                continue;
            }
            let confined = Confined(group);
            let entered = fs::write(confined.0.join("cgroup.procs"), pid.to_string());
            if entered.is_ok() && confined.0.join("pids.max").exists() {
                return Some(confined);
            }
        }
        eprintln!("left out: no control group for the number of processes is to be had");
        None
    }

    fn limit(&self, max: &str) {
        fs::write(self.0.join("pids.max"), max).unwrap();
    }
}

impl Drop for Confined {
    fn drop(&mut self) {
        let parent = self.0.parent().unwrap().join("cgroup.procs");
        for pid in fs::read_to_string(self.0.join("cgroup.procs")).unwrap_or_default().lines() {
            let _ = fs::write(&parent, pid); // it may have ended
        }
        let _ = fs::remove_dir(&self.0);
    }
}

/// A supervisor that could start no process for a second gave the mount up. And one that could start
/// no thread left in the tree what it had given up.
// proves: P98
#[test]
fn a_mount_outlives_a_shortage_of_processes_and_leaves_nothing_if_it_does_not() {
    if common::skipped() {
        return;
    }
    let (_rig, at) = Rig::mounted("transport=classic");
    let Some(processes) = Confined::new(supervisor(&at)) else { return };
    let file = File::create(at.join("file")).unwrap();
    let next = |before: i32| {
        wait_for("the next daemon", || daemon(&at).is_some_and(|pid| pid != before));
        file.write_all_at(b"still there", 0).unwrap();
        daemon(&at).expect("a daemon")
    };
    let first = daemon(&at).expect("a daemon");
    processes.limit("1");
    signal(first, libc::SIGKILL);
    std::thread::sleep(Duration::from_secs(2)); // to be found out
    processes.limit("max");
    let mut pid = next(first);
    for _crash in 1..5 {
        signal(pid, libc::SIGABRT);
        pid = next(pid);
    }
    processes.limit("1");
    signal(pid, libc::SIGABRT);
    gone(&at);
}

/// A daemon that could be started and got no thread counted as a failure: five tries within a
/// second ended the mount.
// proves: P98
#[test]
fn a_mount_outlives_a_shortage_of_threads() {
    on_transports(|options| {
        let (mut rig, at) = Rig::mounted(options);
        let Some(processes) = Confined::new(supervisor(&at)) else { return };
        let file = File::create(at.join("file")).unwrap();
        let first = daemon(&at).expect("a daemon");
        processes.limit("2"); // the supervisor, and one that has no thread but its first
        signal(first, libc::SIGKILL);
        std::thread::sleep(Duration::from_secs(3)); // to be found out
        processes.limit("max");
        file.write_all_at(b"still there", 0).unwrap();
        drop((file, processes));
        rig.end_of_mount(&at);
    });
}

#[test]
fn signals_to_the_supervisor_unmount_unless_it_is_busy() {
    if common::skipped() {
        return;
    }
    let (_rig, at) = Rig::mounted("");
    let file = File::create(at.join("file")).unwrap();
    signal(supervisor(&at), libc::SIGTERM);
    signal(daemon(&at).unwrap(), libc::SIGTERM);
    std::thread::sleep(Duration::from_millis(500));
    file.write_all_at(b"x", 0).unwrap();
    assert!(is_mounted(&at) && daemon(&at).is_some());
    drop(file);
    // Children that other tests are just starting may have inherited the file for a moment.
    wait_for("the unmounting", || {
        processes("mount-supervisor", &at).iter().for_each(|pid| signal(*pid, libc::SIGTERM));
        !is_mounted(&at)
    });
    gone(&at);
}

#[test]
fn a_daemon_without_supervisor_goes_on() {
    if common::skipped() {
        return;
    }
    let (mut rig, at) = Rig::mounted("");
    fs::write(at.join("file"), "before").unwrap();
    signal(supervisor(&at), libc::SIGKILL);
    wait_for("its end", || processes("mount-supervisor", &at).is_empty());
    assert_eq!(fs::read(at.join("file")).unwrap(), b"before");
    rig.end_of_mount(&at);
}

/// The kernel gives the number of a connection that has ended to the next one. A supervisor that
/// was still about to end took that for its own mount, and unmounted it.
// proves: P78
#[test]
fn what_is_mounted_anew_is_left_alone_by_what_served_there_before() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    for _ in 0..5 {
        let at = rig.mount("mount", "transport=classic");
        let place = at.to_str().unwrap().to_owned();
        let before = supervisor(&at);
        signal(before, libc::SIGSTOP);
        rig.umount(&at);
        wait_for("the daemon's end", || daemon(&at).is_none());
        rig.mount("mount", "transport=classic");
        let next = daemon(&at).unwrap();
        signal(before, libc::SIGCONT);
        wait_for("its end", || !is_there(before));
        assert!(is_mounted(&at), "it took away another one's mount");
        fs::write(at.join("file"), "content").unwrap();
        let status = rig.demand(&["status", &place, "--json"]);
        assert!(status.contains("\"connected\":true"), "{status}");
        rig.demand(&["upgrade", &place]);
        wait_for("the next daemon", || daemon(&at).is_some_and(|daemon| daemon != next));
        rig.end_of_mount(&at);
        let left: Vec<_> = fs::read_dir(rig.path("run").join("mounts")).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

fn is_there(pid: i32) -> bool {
    fs::metadata(format!("/proc/{pid}")).is_ok()
}

/// No process is left to say goodbye: the lease decides.
// proves: P73
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
    let begin = std::time::Instant::now();
    signal(supervisor(&one), libc::SIGKILL);
    while let Some(daemon) = daemon(&one) {
        signal(daemon, libc::SIGKILL);
        std::thread::sleep(Duration::from_millis(20));
    }
    other.lock().unwrap();
    assert!(begin.elapsed() > Duration::from_secs(1), "the lease was not waited for");
    drop((holder, other));
    rig.umount(&two);
}
