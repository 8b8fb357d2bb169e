//! Calls that give descriptors, and the kernel's file handles.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use dray_core::{Errno, Name};

use super::{CName, EMPTY, Sys, call};

/// A descriptor just made by the kernel becomes ours.
fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: the kernel has just given us this descriptor; nobody else knows it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// openat(2) of any path; only for paths of our own making.
pub(crate) fn open_at(
    dir: RawFd,
    path: *const libc::c_char,
    flags: i32,
    mode: u32,
) -> Sys<OwnedFd> {
    // SAFETY: callers pass NUL-terminated paths that outlive the call.
    call(|| unsafe { libc::openat(dir, path, flags | libc::O_CLOEXEC, mode) }).map(own)
}

/// As [`open_at`], but nothing that is mounted on the way is entered (`EXDEV`), nor asked
/// anything; and with what else `resolve` says (openat2(2)).
fn open_on_mount(
    dir: BorrowedFd<'_>,
    path: *const libc::c_char,
    (flags, mode): (i32, u32),
    resolve: u64,
) -> Sys<OwnedFd> {
    static NO_OPENAT2: AtomicBool = AtomicBool::new(false);
    if NO_OPENAT2.load(Ordering::Relaxed) {
        // Linux before 5.6. The caller compares mounts, so that the mount point is
        // found out one call later.
        return open_at(dir.as_raw_fd(), path, flags, mode);
    }
    // SAFETY: open_how is plain numbers, for which zero is a valid value.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = (flags | libc::O_CLOEXEC) as u64;
    how.mode = u64::from(mode);
    how.resolve = libc::RESOLVE_NO_XDEV | libc::RESOLVE_NO_MAGICLINKS | resolve;
    // SAFETY: path and how outlive the call, and the size is that of how.
    let opened = call(|| unsafe {
        libc::syscall(
            libc::SYS_openat2,
            dir.as_raw_fd(),
            path,
            &raw mut how,
            size_of::<libc::open_how>(),
        )
    });
    match opened {
        Ok(fd) => Ok(own(fd as RawFd)),
        Err(Errno::ENOSYS) => {
            NO_OPENAT2.store(true, Ordering::Relaxed);
            open_at(dir.as_raw_fd(), path, flags, mode)
        }
        // A rename of some directory at the same time makes the kernel give up.
        Err(Errno::EAGAIN) => open_at(dir.as_raw_fd(), path, flags, mode),
        Err(errno) => Err(errno),
    }
}

/// `O_PATH` descriptor of `name` in `dir`: no symbolic link is followed and no mount below
/// is entered (`EXDEV`).
pub(crate) fn open_path(dir: BorrowedFd<'_>, name: &Name) -> Sys<OwnedFd> {
    let flags = libc::O_PATH | libc::O_NOFOLLOW;
    open_on_mount(dir, CName::new(name).as_ptr(), (flags, 0), libc::RESOLVE_BENEATH)
}

/// `O_PATH` descriptor of the directory that `dir` is in. `EXDEV` if another mount is there.
pub(crate) fn open_parent(dir: BorrowedFd<'_>) -> Sys<OwnedFd> {
    let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW;
    open_on_mount(dir, c"..".as_ptr(), (flags, 0), 0)
}

/// Makes `name` in `dir` as a file, with `flags` as well.
pub(crate) fn open_new(dir: BorrowedFd<'_>, name: &Name, flags: i32, mode: u32) -> Sys<OwnedFd> {
    let flags = flags | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW;
    match open_on_mount(dir, CName::new(name).as_ptr(), (flags, mode), 0) {
        Err(Errno::EXDEV) => Err(Errno::EEXIST), // it is there, and something is mounted on it
        opened => opened,
    }
}

/// An unnamed file in `dir` (`O_TMPFILE`).
pub(crate) fn open_unnamed(dir: BorrowedFd<'_>, flags: i32, mode: u32) -> Sys<OwnedFd> {
    open_at(dir.as_raw_fd(), c".".as_ptr(), flags | libc::O_TMPFILE, mode)
}

/// Opens what `fd` refers to once more, with other flags, through a kept descriptor of
/// /proc/self/fd. That is immune to renames, and the kernel checks the caller's rights.
pub(crate) fn reopen(proc_fd: BorrowedFd<'_>, fd: BorrowedFd<'_>, flags: i32) -> Sys<OwnedFd> {
    open_at(proc_fd.as_raw_fd(), CName::number(fd.as_raw_fd()).as_ptr(), flags, 0)
}

/// Most bytes of a handle that the codecs know (btrfs: 20) and some to spare.
pub(crate) const HANDLE_MAX_BYTES: usize = 128;

/// A kernel file handle, laid out as the kernel's `struct file_handle`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct KernelHandle {
    len_bytes: u32,
    kind: i32,
    bytes: [u8; HANDLE_MAX_BYTES],
}

impl KernelHandle {
    /// Puts a handle together. None if it is longer than any known one.
    pub(crate) fn new(kind: i32, parts: &[&[u8]]) -> Option<KernelHandle> {
        let mut handle = KernelHandle { len_bytes: 0, kind, bytes: [0; HANDLE_MAX_BYTES] };
        for part in parts {
            let at = handle.len_bytes as usize;
            handle.bytes.get_mut(at..at + part.len())?.copy_from_slice(part);
            handle.len_bytes += part.len() as u32;
        }
        Some(handle)
    }

    /// The type that the file system gave it.
    pub(crate) fn kind(&self) -> i32 {
        self.kind
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..(self.len_bytes as usize).min(HANDLE_MAX_BYTES)]
    }
}

/// The handle of what `fd` refers to, and the id of its mount.
pub(crate) fn handle_of(fd: BorrowedFd<'_>) -> Sys<(KernelHandle, i32)> {
    name_to_handle(fd, EMPTY.as_ptr(), libc::AT_EMPTY_PATH)
}

/// The handle of `name` in `dir`, without following a link, and the id of its mount.
pub(crate) fn handle_at(dir: BorrowedFd<'_>, name: &Name) -> Sys<(KernelHandle, i32)> {
    name_to_handle(dir, CName::new(name).as_ptr(), 0)
}

/// What the kernel says that an inode is, for comparing two that are open; none where it says
/// nothing. It need not be a handle that can be opened (`AT_HANDLE_FID`, Linux 6.5).
pub(crate) fn identity_of(fd: BorrowedFd<'_>) -> Option<(i32, Vec<u8>)> {
    const AT_HANDLE_FID: i32 = 0x200;
    let (empty, flags) = (EMPTY.as_ptr(), libc::AT_EMPTY_PATH);
    let named = name_to_handle(fd, empty, flags | AT_HANDLE_FID);
    let (handle, _) = named.or_else(|_| name_to_handle(fd, empty, flags)).ok()?;
    Some((handle.kind, handle.bytes().to_vec()))
}

fn name_to_handle(
    dir: BorrowedFd<'_>,
    path: *const libc::c_char,
    flags: i32,
) -> Sys<(KernelHandle, i32)> {
    let mut handle =
        KernelHandle { len_bytes: HANDLE_MAX_BYTES as u32, kind: 0, bytes: [0; HANDLE_MAX_BYTES] };
    let mut mount = 0;
    // SAFETY: the path is NUL-terminated; handle has the layout of struct file_handle and
    // says how much room it has.
    call(|| unsafe {
        libc::name_to_handle_at(dir.as_raw_fd(), path, (&raw mut handle).cast(), &mut mount, flags)
    })?;
    Ok((handle, mount))
}

/// Opens by handle on the mount of `mount`, which must be a real descriptor. Needs
/// `CAP_DAC_READ_SEARCH`.
pub(crate) fn open_by_handle(mount: BorrowedFd<'_>, handle: &KernelHandle) -> Sys<OwnedFd> {
    let mut handle = *handle;
    let flags = libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    // SAFETY: handle has the layout of struct file_handle and outlives the call.
    call(|| unsafe { libc::open_by_handle_at(mount.as_raw_fd(), (&raw mut handle).cast(), flags) })
        .map(own)
}

/// A second descriptor of the same open file; closing it makes file systems such as NFS
/// tell the write errors that they hold back.
pub(crate) fn flush_by_close(fd: &OwnedFd) -> Sys<()> {
    use std::os::fd::IntoRawFd;
    let copy = fd.as_fd().try_clone_to_owned().map_err(Errno::from)?;
    // SAFETY: the descriptor is ours, and given up here.
    match unsafe { libc::close(copy.into_raw_fd()) } {
        0 => Ok(()),
        _ => match Errno::last() {
            Errno::EINTR => Ok(()), // it is closed all the same
            errno => Err(errno),
        },
    }
}

/// `O_PATH` descriptor of the directory that a real descriptor refers to.
pub(crate) fn reopen_path(dir: BorrowedFd<'_>) -> Sys<OwnedFd> {
    open_at(dir.as_raw_fd(), c".".as_ptr(), libc::O_PATH | libc::O_DIRECTORY, 0)
}
