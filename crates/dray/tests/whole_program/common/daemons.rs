//! The processes of a mount.

use std::path::Path;

use super::{Rig, is_mounted, processes, wait_for};

pub fn daemon(at: &Path) -> Option<i32> {
    processes("mount-daemon", at).first().copied()
}

/// The daemon, once there is one: between two of them there is none for a while.
pub fn wait_for_daemon(at: &Path) -> i32 {
    let mut found = None;
    // Looked for once each time: one that dies is gone at the next look.
    wait_for("a daemon", || {
        found = daemon(at);
        found.is_some()
    });
    found.unwrap()
}

/// Waits until each worker of a mount has its connection, for they are made one by one; how many
/// there are.
pub fn wait_for_connections(rig: &Rig, at: &Path) -> usize {
    let mut count = 0;
    wait_for("all connections of the mount", || {
        let text = rig.demand(&["status", at.to_str().unwrap(), "--json"]);
        let status: serde_json::Value = serde_json::from_str(&text).unwrap();
        count = status["workers"].as_u64().unwrap();
        status["server"]["connections"] == count
    });
    count as usize
}

pub fn supervisor(at: &Path) -> i32 {
    processes("mount-supervisor", at)[0]
}

pub fn signal(pid: i32, signal: i32) {
    // SAFETY: no memory is passed. A process that has ended meanwhile is what is wanted.
    unsafe { libc::kill(pid, signal) };
}

/// Whether it has ended and given up what it had: locks outlive the command line by a moment.
pub fn has_ended(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // Behind its name, which may hold anything: a zombie has nothing any more.
    stat.rsplit(") ").next().is_none_or(|rest| rest.is_empty() || rest.starts_with('Z'))
}

pub fn gone(at: &Path) {
    wait_for("the end of the processes", || {
        processes("mount-daemon", at).is_empty() && processes("mount-supervisor", at).is_empty()
    });
    assert!(!is_mounted(at));
}
