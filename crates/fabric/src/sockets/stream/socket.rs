//! The system calls on a connected stream socket.
//!
//! The frequent ones go around the C library. Its functions are places where a thread can be cancelled, which
//! no thread of ours is. To be ready for that costs two atomic operations and thirty instructions each.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, RawFd};

use dray_rt::Source;

/// Sets from how many bytes on the socket counts as readable.
pub(super) fn set_low_water(source: &Source, bytes: usize) {
    let value = bytes as libc::c_int;
    // SAFETY: the option's value is read from `value` during the call. A socket that does
    // not know the option (Unix) is readable from the first byte on, which is right too.
    unsafe {
        libc::setsockopt(
            source.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVLOWAT,
            (&raw const value).cast(),
            std::mem::size_of_val(&value) as libc::socklen_t,
        )
    };
}

pub(super) fn slice(bytes: &[u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_ptr() as *mut _, iov_len: bytes.len() }
}

pub(super) fn send_parts(fd: RawFd, parts: &mut [libc::iovec]) -> io::Result<usize> {
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    if let [part] = parts {
        // SAFETY: the part describes a slice that outlives the call, and is only read.
        let sent = unsafe {
            let nobody = std::ptr::null::<libc::sockaddr>();
            libc::syscall(libc::SYS_sendto, fd, part.iov_base, part.iov_len, flags, nobody, 0)
        };
        return usize::try_from(sent).map_err(|_| io::Error::last_os_error());
    }
    // SAFETY: an all-zero msghdr is a valid, empty one.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len();
    // SAFETY: the parts describe slices that outlive the call, and are only read.
    let sent = unsafe { libc::syscall(libc::SYS_sendmsg, fd, &raw const message, flags) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Reads into `target` and, behind it, into `scratch`.
pub(super) fn read2(
    fd: RawFd,
    target: &mut [MaybeUninit<u8>],
    scratch: &mut [u8],
) -> io::Result<usize> {
    if target.is_empty() {
        // SAFETY: the slice is exclusive and outlives the call.
        let read = unsafe {
            let nobody = std::ptr::null::<libc::sockaddr>();
            libc::syscall(
                libc::SYS_recvfrom,
                fd,
                scratch.as_mut_ptr(),
                scratch.len(),
                0,
                nobody,
                nobody,
            )
        };
        return usize::try_from(read).map_err(|_| io::Error::last_os_error());
    }
    let parts = [
        libc::iovec { iov_base: target.as_mut_ptr().cast(), iov_len: target.len() },
        libc::iovec { iov_base: scratch.as_mut_ptr().cast(), iov_len: scratch.len() },
    ];
    // SAFETY: the parts describe exclusive slices that outlive the call.
    let read = unsafe { libc::readv(fd, parts.as_ptr(), parts.len() as i32) };
    usize::try_from(read).map_err(|_| io::Error::last_os_error())
}
