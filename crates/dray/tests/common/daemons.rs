//! The processes of a mount.

use std::path::Path;

use super::{is_mounted, processes, wait_for};

pub fn daemon(at: &Path) -> Option<i32> {
    processes("mount-daemon", at).first().copied()
}

pub fn supervisor(at: &Path) -> i32 {
    processes("mount-supervisor", at)[0]
}

pub fn signal(pid: i32, signal: i32) {
    // SAFETY: no memory is passed. A process that has ended meanwhile is what is wanted.
    unsafe { libc::kill(pid, signal) };
}

pub fn gone(at: &Path) {
    wait_for("the end of the processes", || {
        processes("mount-daemon", at).is_empty() && processes("mount-supervisor", at).is_empty()
    });
    assert!(!is_mounted(at));
}
