//! The processes of a mount are found by every permitted user, whatever run directory they were given;
//! and what was killed leaves nothing for ever. Needs root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::common;
use crate::common::daemons::{gone, has_ended, signal, supervisor};
use crate::common::{Rig, is_mounted, on_transports, processes, wait_for};
use serde_json::Value;

/// Runs the command with a run directory that is not the mount's.
fn elsewhere(rig: &Rig, args: &[&str]) -> Output {
    rig.command(args).env("DRAY_RUN_DIR", rig.path("elsewhere")).output().unwrap()
}

/// The supervisor was not found, and unmounting did not wait for its end.
#[test]
fn a_supervisor_is_found_from_another_run_directory() {
    if common::skipped() {
        return;
    }
    let (rig, at) = Rig::mounted("");
    let place = at.to_str().unwrap();
    let before = processes("mount-daemon", &at);
    let upgraded = elsewhere(&rig, &["upgrade", place]);
    assert!(upgraded.status.success(), "{upgraded:?}");
    assert_ne!(processes("mount-daemon", &at), before);
    let status = elsewhere(&rig, &["status", "--interval", "0", place]);
    assert!(status.stdout.starts_with(b"MOUNT"), "{status:?}");
    // The supervisor cannot end, and the command that waits for it says so.
    let stopped = supervisor(&at);
    signal(stopped, libc::SIGSTOP);
    let unmounted = elsewhere(&rig, &["umount", place]);
    signal(stopped, libc::SIGCONT);
    let said = String::from_utf8_lossy(&unmounted.stderr);
    assert!(unmounted.status.success() && said.contains("its processes still run"), "{said}");
    gone(&at);
}

fn status(rig: &Rig, at: &Path) -> Value {
    let text = rig.demand(&["status", at.to_str().unwrap(), "--json", "--interval", "0"]);
    serde_json::from_str(&text).unwrap_or_else(|_| panic!("{text}"))
}

/// The same; none, if nobody answers just now.
fn status_of(rig: &Rig, at: &Path) -> Option<Value> {
    let output = rig.run(&["status", at.to_str().unwrap(), "--json", "--interval", "0"]);
    serde_json::from_slice(&output.stdout).ok().filter(|_| output.status.success())
}

fn pid_in(status: &Value) -> i32 {
    status["pid"].as_i64().unwrap() as i32
}

/// Process of the daemon of the mount at `at`, which says that it is there.
fn daemon_at(rig: &Rig, at: &Path) -> i32 {
    let status = status(rig, at);
    assert_eq!(status["mountpoint"], *at.to_str().unwrap());
    pid_in(&status)
}

/// Ends the daemon at `at`, and waits for the next one.
fn end_daemon(rig: &Rig, at: &Path, with: i32) {
    let before = daemon_at(rig, at);
    signal(before, with);
    fs::write(at.join("file"), "served").unwrap();
    // A daemon that a signal ends by a core dump may go on serving for a moment.
    wait_for("the next daemon", || {
        status_of(rig, at).is_some_and(|status| pid_in(&status) != before)
    });
}

/// The mount was called by its former place. It stayed in the tree when it was ended. What was
/// asked of it was asked of the next mount there. The queues of its ring were not set going.
// proves: P99
#[test]
fn a_mount_is_known_where_it_has_been_moved_to() {
    on_transports(|options| {
        for is_given_up in [false, true] {
            let mut rig = Rig::new();
            rig.serve(&[]);
            fs::create_dir(rig.path("before")).unwrap();
            let was = rig.mount("before/mount", options);
            let ours = supervisor(&was);
            fs::rename(rig.path("before"), rig.path("after")).unwrap();
            let at = rig.moved_to("after/mount");
            let place = at.to_str().unwrap();
            daemon_at(&rig, &at);
            assert!(!rig.run(&["status", was.to_str().unwrap()]).status.success());
            // Another mount takes its place.
            fs::create_dir(rig.path("before")).unwrap();
            rig.mount("before/mount", options);
            let (first, other) = (daemon_at(&rig, &at), daemon_at(&rig, &was));
            rig.demand(&["upgrade", place]);
            assert_ne!(daemon_at(&rig, &at), first);
            end_daemon(&rig, &at, libc::SIGKILL);
            if is_given_up {
                (1..5).for_each(|_crash| end_daemon(&rig, &at, libc::SIGABRT));
                signal(daemon_at(&rig, &at), libc::SIGABRT);
            } else {
                rig.umount(&at);
            }
            wait_for("the end of the supervisor", || has_ended(ours));
            assert!(!is_mounted(&at));
            assert_eq!(daemon_at(&rig, &was), other, "another one has suffered");
            rig.end_of_mount(&was);
        }
    });
}

fn left_in(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// The supervisor was said to be dead, or in another container, and could not be found until it
/// ended.
#[test]
fn a_supervisor_whose_run_directory_was_removed_is_found_again() {
    if common::skipped() {
        return;
    }
    let (mut rig, at) = Rig::mounted("");
    let place = at.to_str().unwrap().to_owned();
    fs::remove_dir_all(rig.path("run")).unwrap();
    let refused = rig.run(&["upgrade", &place]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    let ours = supervisor(&at);
    assert!(!refused.status.success() && said.contains(&format!("kill -HUP {ours}`")), "{said}");
    signal(ours, libc::SIGHUP);
    wait_for("it to be found", || rig.run(&["upgrade", &place]).status.success());
    let status = rig.demand(&["status", "--interval", "0", &place]);
    assert!(status.starts_with("MOUNT"), "{status}");
    rig.end_of_mount(&at);
    assert!(left_in(&rig.path("run/mounts")).is_empty());
}

/// Nothing was said of it, or that a socket did not answer.
#[test]
fn a_mount_whose_processes_have_died_is_shown_as_that() {
    if common::skipped() {
        return;
    }
    let (mut rig, at) = Rig::mounted("");
    let place = at.to_str().unwrap().to_owned();
    for process in [processes("mount-supervisor", &at), processes("mount-daemon", &at)].concat() {
        signal(process, libc::SIGKILL);
        wait_for("its end", || has_ended(process));
    }
    let (advice, line) =
        (format!("`dray umount --lazy {place}`"), format!("NO ANSWER from {place}"));
    // The supervisor of another test's mount, whose connection had the same number, may take a moment
    // to end.
    wait_for("what is to be done to be said", || {
        // Of the whole machine, whatever else there is.
        let mut all = rig.command(&["status", "--interval", "0"]);
        let shown = all.env_remove("DRAY_RUN_DIR").output().unwrap();
        let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
        assert!(shown.contains(&line), "{shown}");
        shown.contains(&advice)
    });
    let said = rig.run(&["status", &place]);
    assert_eq!(said.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&said.stderr).contains(&advice), "{said:?}");
    rig.umount(&at);
}

/// A socket was named, in which nobody finds what to look at. Of a server that was stopped `dray
/// evict` said that there was none, though it evicts as soon as it goes on.
#[test]
fn what_is_stopped_is_named_with_its_mount_and_process() {
    if common::skipped() {
        return;
    }
    let (mut rig, at) = Rig::mounted("");
    let (daemon, server) = (daemon_at(&rig, &at), rig.server().0);
    [daemon, server].into_iter().for_each(|process| signal(process, libc::SIGSTOP));
    let shown = rig.demand(&["status", "--interval", "0"]);
    let evicted = rig.run(&["evict", "nobody"]);
    [daemon, server].into_iter().for_each(|process| signal(process, libc::SIGCONT));
    let place = at.display();
    assert!(shown.contains(&format!("NO ANSWER from {place}, pid {daemon}: ")), "{shown}");
    assert!(shown.contains(&format!(".sock, pid {server}: ")), "{shown}");
    let said = String::from_utf8_lossy(&evicted.stderr);
    assert_eq!(evicted.status.code(), Some(1));
    assert!(said.contains(&format!(", pid {server}: it says nothing")), "{said}");
    assert!(said.contains("when it runs again"), "{said}");
    rig.end_of_mount(&at);
}

/// The files of killed processes stayed until somebody mounted at the same place again.
#[test]
fn what_killed_processes_have_left_is_removed_by_the_next_mount() {
    if common::skipped() {
        return;
    }
    let (mut rig, at) = Rig::mounted("");
    let mounts = rig.path("run/mounts");
    let killed = [processes("mount-supervisor", &at), processes("mount-daemon", &at)].concat();
    assert_eq!(killed.len(), 2);
    killed.iter().for_each(|pid| signal(*pid, libc::SIGKILL));
    wait_for("the end of the killed processes", || killed.iter().all(|pid| has_ended(*pid)));
    assert!(Command::new("umount").arg("-l").arg(&at).status().unwrap().success());
    let left = left_in(&mounts);
    assert_eq!(left.len(), 2, "{left:?}");
    let surviving = rig.mount("another", "");
    wait_for("what is left of the first, and that of the second", || {
        let now = left_in(&mounts);
        now.len() == 2 && left.iter().all(|path| !now.contains(path))
    });
    // A daemon that goes on without its supervisor can still be asked.
    let killed = supervisor(&surviving);
    signal(killed, libc::SIGKILL);
    wait_for("the end of the supervisor", || has_ended(killed));
    let third = rig.mount("third", "");
    let status = rig.demand(&["status", "--interval", "0", surviving.to_str().unwrap()]);
    assert!(status.starts_with("MOUNT"), "{status}");
    rig.end_of_mount(&surviving);
    rig.end_of_mount(&third);
    assert!(left_in(&mounts).is_empty(), "{:?}", left_in(&mounts));
}
