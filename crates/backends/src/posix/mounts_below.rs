//! Whether anything is mounted below an export.
//!
//! name_to_handle_at(2) and statx(2) of a name step onto the file system that is mounted there. Some
//! file systems then ask a server over the network (`d_weak_revalidate` in fs/namei.c, as NFS has it).
//! If that server is gone, the call blocks our thread. Only openat2(2) can be asked to stay off mounts,
//! and takes two more system calls. So the short way is used where nothing is mounted below, which is
//! nearly everywhere.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::shown_path::link_of;

/// How long something may be mounted before it is noticed. It answered when it was mounted.
const LOOK_EVERY_MS: u64 = 100;

/// What is known of the mounts below a directory.
pub(crate) struct MountsBelow {
    /// The table of mounts (proc_pid_mountinfo(5)); none where it cannot be had.
    table: Option<Mutex<File>>,
    any: AtomicBool,
    next_look_ms: AtomicU64,
}

fn now_ms() -> u64 {
    dray_rt::now().as_nanos() / 1_000_000
}

impl MountsBelow {
    /// Below `root`.
    pub(crate) fn new(root: BorrowedFd<'_>) -> MountsBelow {
        // The thread's: its mounts may be others than those of the process.
        let table = File::open("/proc/thread-self/mountinfo").ok().map(Mutex::new);
        let (any, next_look_ms) = (AtomicBool::new(true), AtomicU64::new(0));
        let below = MountsBelow { table, any, next_look_ms };
        below.look(root, true);
        below
    }

    /// Whether there are any, or it is not known.
    pub(crate) fn any(&self, root: BorrowedFd<'_>) -> bool {
        if self.claims_check() {
            self.look(root, false);
        }
        self.any.load(Ordering::Relaxed)
    }

    fn claims_check(&self) -> bool {
        let (now, due) = (now_ms(), self.next_look_ms.load(Ordering::Relaxed));
        let (relaxed, next) = (Ordering::Relaxed, now + LOOK_EVERY_MS);
        now >= due && self.next_look_ms.compare_exchange(due, next, relaxed, relaxed).is_ok()
    }

    fn look(&self, root: BorrowedFd<'_>, first: bool) {
        let Some(table) = &self.table else { return };
        let table = &mut *table.lock().unwrap_or_else(PoisonError::into_inner);
        if !first && !has_changed(table) {
            return;
        }
        let any = match (path_of(root), read(table)) {
            (Some(root), Ok(table)) => is_above_any(&root, &table),
            _ => true,
        };
        self.any.store(any, Ordering::Relaxed);
    }
}

/// Whether anything was mounted or unmounted since this was last asked, or the file was opened.
fn has_changed(table: &File) -> bool {
    let mut poll = libc::pollfd { fd: table.as_raw_fd(), events: libc::POLLPRI, revents: 0 };
    // SAFETY: one entry, which outlives the call.
    let count = unsafe { libc::poll(&raw mut poll, 1, 0) };
    count != 0 // an error, too: rather once too often
}

fn read(table: &mut File) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    table.rewind()?;
    table.read_to_end(&mut text)?;
    Ok(text)
}

/// The path of a directory, escaped as in the table. None for a directory that has no path any
/// more.
fn path_of(root: BorrowedFd<'_>) -> Option<Vec<u8>> {
    let path = link_of(root)?;
    let escape = |byte: &u8| match byte {
        b' ' | b'\t' | b'\n' | b'\\' => format!("\\{byte:03o}").into_bytes(),
        byte => vec![*byte],
    };
    path.starts_with(b"/").then(|| path.iter().flat_map(escape).collect())
}

/// Whether one of the mounts in `table` is below `root`. That on the root itself is none: what
/// was exported is under it.
fn is_above_any(root: &[u8], table: &[u8]) -> bool {
    let root = root.strip_suffix(b"/").unwrap_or(root);
    let below = |at: &[u8]| at.strip_prefix(root).is_some_and(|rest| rest.starts_with(b"/"));
    let places =
        table.split(|byte| *byte == b'\n').filter_map(|line| line.split(|b| *b == b' ').nth(4));
    places.filter(|at| *at != b"/").any(below)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    // proves: P42
    #[test]
    fn mounts_below_are_distinguished_from_mounts_beside() {
        let table =
            b"20 1 8:1 / / rw - ext4 /dev/x rw\n21 20 0:5 / /srv/a\\040b/x rw - nfs n:/ rw\n\
            22 20 0:6 / /srv/c rw - tmpfs none rw\n";
        for root in ["/", "/srv", "/srv/a\\040b"] {
            assert!(is_above_any(root.as_bytes(), table), "{root}");
        }
        for root in ["/srv/a", "/srv/c", "/srv/a\\040b/x", "/srv/a\\040b/x/y", "/home"] {
            assert!(!is_above_any(root.as_bytes(), table), "{root}");
        }
        assert!(!is_above_any(b"/", b"20 1 8:1 / / rw - ext4 /dev/x rw\n"));
    }

    #[test]
    fn paths_are_escaped_as_the_table_has_them() {
        let dir = std::env::temp_dir().join(format!("dray a\\b\t{:x}", dray_rt::random_u64()));
        std::fs::create_dir(&dir).unwrap();
        let path = path_of(File::open(&dir).unwrap().as_fd()).unwrap();
        let path = String::from_utf8(path).unwrap();
        assert!(path.contains("dray\\040a\\134b\\011"), "{path}");
        std::fs::remove_dir(&dir).unwrap();
    }
}
