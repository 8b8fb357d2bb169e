//! fanotify(7): the kernel reports changes on a whole file system.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use dray_core::Errno;

use super::{Sys, call};

/// Changes of names, of contents and of attributes, of directories too.
const CHANGES: u64 = libc::FAN_MODIFY
    | libc::FAN_ATTRIB
    | libc::FAN_CREATE
    | libc::FAN_DELETE
    | libc::FAN_MOVED_FROM
    | libc::FAN_MOVED_TO
    | libc::FAN_MOVE_SELF
    | libc::FAN_ONDIR;

/// Has the kernel report each change on the file system of `dir`, all callers alike. Files are named by their
/// handles, changers by their thread. Needs `CAP_SYS_ADMIN`. Errors: `EPERM` without it. `EOPNOTSUPP` or `ENODEV`
/// where the file system has no handles, or no identity. `EXDEV` on a part of a file system. `ENFILE` for `EMFILE`,
/// beyond `fs.fanotify.max_user_groups`. `EINVAL` before Linux 5.1.
pub(crate) fn watch_changes(dir: BorrowedFd<'_>) -> Sys<OwnedFd> {
    let flags = libc::FAN_CLASS_NOTIF
        | libc::FAN_REPORT_FID
        | libc::FAN_REPORT_TID
        | libc::FAN_NONBLOCK
        | libc::FAN_CLOEXEC;
    // SAFETY: the call takes numbers alone.
    let group = call(|| unsafe { libc::fanotify_init(flags, libc::O_RDONLY as u32) })?;
    // SAFETY: the kernel has just given us this descriptor; nobody else knows it.
    let group = unsafe { OwnedFd::from_raw_fd(group) };
    let how = libc::FAN_MARK_ADD | libc::FAN_MARK_FILESYSTEM;
    // SAFETY: without a path the call is about the descriptor.
    call(|| unsafe {
        libc::fanotify_mark(group.as_raw_fd(), how, CHANGES, dir.as_raw_fd(), std::ptr::null())
    })?;
    Ok(group)
}

/// Reads what there is. Errors: `EAGAIN` if there is nothing.
pub(crate) fn read_some(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> Sys<usize> {
    // SAFETY: the kernel writes at most the length of the buffer, which outlives the call.
    let read =
        call(|| unsafe { libc::read(fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len()) });
    read.map(|bytes| bytes as usize) // not negative
}

/// Waits until one of two descriptors has something to read, or its other end is closed, or until the time is over
/// (-1: for ever). Says which have.
pub(crate) fn wait_readable(fds: [BorrowedFd<'_>; 2], time_ms: i32) -> Sys<[bool; 2]> {
    let entry =
        |fd: BorrowedFd<'_>| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let mut entries = fds.map(entry);
    // SAFETY: two entries, which outlive the call.
    match unsafe { libc::poll(entries.as_mut_ptr(), 2, time_ms) } {
        -1 => match Errno::last() {
            Errno::EINTR => Ok([false; 2]),
            errno => Err(errno),
        },
        _ => Ok(entries.map(|entry| entry.revents != 0)),
    }
}
