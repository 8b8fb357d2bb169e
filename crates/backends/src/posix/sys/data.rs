//! Reading and writing, and what else needs a real descriptor.

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};

use dray_core::{Allocate, Errno, Xflags};

use super::{Sys, call};

/// preadv2(2) into memory that need not be initialised; bytes read. Without flags that is pread(2), which has no
/// list of pieces to read and check. It goes around the C library, which takes atomic operations to let threads
/// be cancelled there.
pub(crate) fn read(
    fd: BorrowedFd<'_>,
    at: u64,
    into: &mut [MaybeUninit<u8>],
    flags: i32,
) -> Sys<usize> {
    let at = i64::try_from(at).map_err(|_| Errno::EINVAL)?;
    if flags == 0 {
        let (fd, start, len) = (fd.as_raw_fd(), into.as_mut_ptr(), into.len());
        // SAFETY: the kernel writes at most into.len() bytes behind its start.
        let count = call(|| unsafe { libc::syscall(libc::SYS_pread64, fd, start, len, at) })?;
        return Ok(count as usize);
    }
    let part = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    // SAFETY: the kernel writes at most into.len() bytes behind its start.
    let count = call(|| unsafe { libc::preadv2(fd.as_raw_fd(), &part, 1, at, flags) })?;
    Ok(count as usize)
}

/// pwritev2(2); bytes written.
pub(crate) fn write(fd: BorrowedFd<'_>, at: u64, from: &[u8], flags: i32) -> Sys<usize> {
    let at = i64::try_from(at).map_err(|_| Errno::EFBIG)?;
    let part = libc::iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: from.len() };
    // SAFETY: the kernel only reads from.len() bytes.
    let count = call(|| unsafe { libc::pwritev2(fd.as_raw_fd(), &part, 1, at, flags) })?;
    Ok(count as usize)
}

/// splice(2) from a pipe into a file; bytes written.
pub(crate) fn splice(pipe: BorrowedFd<'_>, fd: BorrowedFd<'_>, at: u64, len: usize) -> Sys<usize> {
    let mut at = libc::loff_t::try_from(at).map_err(|_| Errno::EFBIG)?;
    let (pipe, fd, none) = (pipe.as_raw_fd(), fd.as_raw_fd(), std::ptr::null_mut());
    // SAFETY: the offset outlives the call.
    let count =
        call(|| unsafe { libc::splice(pipe, none, fd, &raw mut at, len, libc::SPLICE_F_MOVE) })?;
    Ok(count as usize)
}

/// Has writes through `fd` go to the end of the file, or not, from now on. Errors: `EPERM` where
/// the file takes appends only.
pub(crate) fn set_append(fd: BorrowedFd<'_>, append: bool) -> Sys<()> {
    // SAFETY: numbers only.
    let flags = call(|| unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) })?;
    let wanted = if append { flags | libc::O_APPEND } else { flags & !libc::O_APPEND };
    if wanted != flags {
        // SAFETY: numbers only.
        call(|| unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, wanted) })?;
    }
    Ok(())
}

/// fsync(2) or fdatasync(2).
pub(crate) fn sync(fd: BorrowedFd<'_>, data_only: bool) -> Sys<()> {
    // SAFETY: numbers only.
    call(|| unsafe {
        if data_only { libc::fdatasync(fd.as_raw_fd()) } else { libc::fsync(fd.as_raw_fd()) }
    })?;
    Ok(())
}

/// sync_file_range(2): brings the data of a file to its disk, neither its size nor its place.
/// Errors: those of writing it, once for each descriptor.
pub(crate) fn write_back(fd: BorrowedFd<'_>) -> Sys<()> {
    let all = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: numbers only; 0 bytes are all that follow.
    call(|| unsafe { libc::sync_file_range(fd.as_raw_fd(), 0, 0, all) })?;
    Ok(())
}

/// sync_file_range(2): has the kernel begin to write these bytes to the disk. Waits for room among the disk's
/// requests at most.
pub(crate) fn start_write_back(fd: BorrowedFd<'_>, at: u64, len_bytes: usize) -> Sys<()> {
    let at = i64::try_from(at).map_err(|_| Errno::EFBIG)?;
    let len_bytes = i64::try_from(len_bytes).map_err(|_| Errno::EFBIG)?;
    // SAFETY: numbers only.
    call(|| unsafe {
        libc::sync_file_range(fd.as_raw_fd(), at, len_bytes, libc::SYNC_FILE_RANGE_WRITE)
    })?;
    Ok(())
}

/// syncfs(2): the whole file system that `fd` is on.
pub(crate) fn sync_all(fd: BorrowedFd<'_>) -> Sys<()> {
    // SAFETY: numbers only.
    call(|| unsafe { libc::syncfs(fd.as_raw_fd()) })?;
    Ok(())
}

/// fallocate(2).
pub(crate) fn allocate(fd: BorrowedFd<'_>, what: Allocate) -> Sys<()> {
    let at = i64::try_from(what.at).map_err(|_| Errno::EFBIG)?;
    let len_bytes = i64::try_from(what.len_bytes).map_err(|_| Errno::EFBIG)?;
    // SAFETY: numbers only.
    call(|| unsafe { libc::fallocate64(fd.as_raw_fd(), what.flags, at, len_bytes) })?;
    Ok(())
}

/// lseek(2).
pub(crate) fn seek(fd: BorrowedFd<'_>, at: u64, whence: i32) -> Sys<u64> {
    // Directory cookies use all 64 bits on no file system known; those of ext4 use 63.
    let at = i64::try_from(at).map_err(|_| Errno::EINVAL)?;
    // SAFETY: numbers only.
    let found = call(|| unsafe { libc::lseek64(fd.as_raw_fd(), at, whence) })?;
    Ok(found as u64)
}

/// copy_file_range(2); bytes copied.
pub(crate) fn copy_range(
    from: BorrowedFd<'_>,
    at: u64,
    to: BorrowedFd<'_>,
    to_at: u64,
    len_bytes: usize,
) -> Sys<usize> {
    let mut at = i64::try_from(at).map_err(|_| Errno::EINVAL)?;
    let mut to_at = i64::try_from(to_at).map_err(|_| Errno::EFBIG)?;
    // SAFETY: both offsets outlive the call.
    let count = call(|| unsafe {
        libc::copy_file_range(from.as_raw_fd(), &mut at, to.as_raw_fd(), &mut to_at, len_bytes, 0)
    })?;
    Ok(count as usize)
}

/// `FS_IOC_GETFLAGS`.
pub(crate) fn get_flags(fd: BorrowedFd<'_>) -> Sys<u32> {
    // The ioctl is declared with a long but has always moved an int.
    let mut flags = [0u32; 2];
    // SAFETY: there is room for a long.
    call(|| unsafe { libc::ioctl(fd.as_raw_fd(), libc::FS_IOC_GETFLAGS, flags.as_mut_ptr()) })?;
    Ok(flags[0])
}

/// `FS_IOC_SETFLAGS`.
pub(crate) fn set_flags(fd: BorrowedFd<'_>, flags: u32) -> Sys<()> {
    let flags = [flags, 0];
    // SAFETY: the kernel reads an int, for which there is room.
    call(|| unsafe { libc::ioctl(fd.as_raw_fd(), libc::FS_IOC_SETFLAGS, flags.as_ptr()) })?;
    Ok(())
}

/// `struct fsxattr` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct FsXattr {
    flags: u32,
    extent_bytes: u32,
    extents: u32,
    project: u32,
    cow_extent_bytes: u32,
    _padding: [u8; 8],
}

const FS_IOC_FSGETXATTR: libc::Ioctl = 0x801c_581f;
const FS_IOC_FSSETXATTR: libc::Ioctl = 0x401c_5820;

/// `FS_IOC_FSGETXATTR`.
pub(crate) fn get_xflags(fd: BorrowedFd<'_>) -> Sys<Xflags> {
    let mut got = FsXattr::default();
    // SAFETY: the kernel fills in a struct of this layout, which outlives the call.
    call(|| unsafe { libc::ioctl(fd.as_raw_fd(), FS_IOC_FSGETXATTR, &raw mut got) })?;
    let FsXattr { flags, extent_bytes, extents, project, cow_extent_bytes, .. } = got;
    Ok(Xflags { flags, extent_bytes, extents, project, cow_extent_bytes })
}

/// `FS_IOC_FSSETXATTR`.
pub(crate) fn set_xflags(fd: BorrowedFd<'_>, set: Xflags) -> Sys<()> {
    let Xflags { flags, extent_bytes, extents, project, cow_extent_bytes } = set;
    let set = FsXattr { flags, extent_bytes, extents, project, cow_extent_bytes, _padding: [0; 8] };
    // SAFETY: the kernel reads a struct of this layout, which outlives the call.
    call(|| unsafe { libc::ioctl(fd.as_raw_fd(), FS_IOC_FSSETXATTR, &raw const set) })?;
    Ok(())
}
