//! The kernel's end of a mount: descriptors of /dev/fuse.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use crate::proto::abi;

/// Opens /dev/fuse, non-blocking. Errors: those of open(2).
pub fn open_device() -> io::Result<OwnedFd> {
    use std::os::unix::fs::OpenOptionsExt;
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK)
        .open("/dev/fuse")?;
    Ok(file.into())
}

/// A further descriptor of the mount behind `device`, with a queue of running requests of
/// its own. Closing it ends the requests that were read from it: a mount that is to
/// survive its daemon needs somebody who holds every clone. Errors: those of open(2) and
/// ioctl(2).
pub fn clone_device(device: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let clone = open_device()?;
    let source = device.as_raw_fd() as u32;
    // SAFETY: the kernel reads a u32 from `source`.
    match unsafe { libc::ioctl(clone.as_raw_fd(), abi::DEV_IOC_CLONE as _, &source) } {
        0 => Ok(clone),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Hands the kernel `file`, which it may read in the place of a file of the mount. Answers the number by which it
/// is known. Errors: `EPERM` without `CAP_SYS_ADMIN`, `ELOOP` where the file lies on a stacked file system.
pub(crate) fn open_backing(device: BorrowedFd<'_>, file: BorrowedFd<'_>) -> io::Result<u32> {
    // `struct fuse_backing_map`: descriptor, flags, padding.
    let map: [i32; 4] = [file.as_raw_fd(), 0, 0, 0];
    // SAFETY: the kernel reads 16 bytes from `map`.
    match unsafe { libc::ioctl(device.as_raw_fd(), abi::DEV_IOC_BACKING_OPEN as _, &map) } {
        number @ 1.. => Ok(number as u32),
        0 => Err(io::ErrorKind::InvalidData.into()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Gives a number of [`open_backing`] back. Open files that read the file go on.
pub(crate) fn close_backing(device: BorrowedFd<'_>, number: u32) -> io::Result<()> {
    // SAFETY: the kernel reads a u32 from `number`.
    match unsafe { libc::ioctl(device.as_raw_fd(), abi::DEV_IOC_BACKING_CLOSE as _, &number) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Puts a descriptor that somebody else opened into non-blocking mode.
pub(crate) fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: no memory is passed.
    let done = unsafe {
        let flags = libc::fcntl(fd.as_raw_fd(), libc::F_GETFL);
        flags >= 0 && libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) == 0
    };
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Writes an answer: its header, then its body.
pub(crate) fn write_answer(fd: BorrowedFd<'_>, header: &[u8], body: &[u8]) -> io::Result<()> {
    let parts = [
        libc::iovec { iov_base: header.as_ptr() as *mut _, iov_len: header.len() },
        libc::iovec { iov_base: body.as_ptr() as *mut _, iov_len: body.len() },
    ];
    let count = if body.is_empty() { 1 } else { 2 };
    // SAFETY: the kernel reads from the two slices, which outlive the call. A write to
    // /dev/fuse is taken whole or not at all.
    match unsafe { libc::writev(fd.as_raw_fd(), parts.as_ptr(), count) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
