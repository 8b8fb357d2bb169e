//! Tables in memory that outlives the process: fixed-size records in a memfd, which a
//! supervisor holds and a successor maps again.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// A mapped memfd. The memory is shared with nobody but a predecessor that is dead, and all access
/// goes through atomics. So a kill leaves no half-written word.
pub(crate) struct Region {
    start: NonNull<u8>,
    len_bytes: usize,
    fd: OwnedFd,
}

// SAFETY: the mapping is valid on every thread and is accessed through atomics only.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

/// Makes an anonymous file of `len_bytes`, which takes no memory until it is written.
pub(crate) fn memfd(name: &std::ffi::CStr, len_bytes: usize) -> io::Result<OwnedFd> {
    // SAFETY: the name is a C string; the answer is checked and owned by nobody else.
    let fd = unsafe {
        let raw = libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC);
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        OwnedFd::from_raw_fd(raw)
    };
    // SAFETY: no memory is passed.
    match unsafe { libc::ftruncate(fd.as_raw_fd(), len_bytes as libc::off_t) } {
        0 => Ok(fd),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Region {
    /// Maps `len_bytes` of `fd`.
    pub(crate) fn map(fd: OwnedFd, len_bytes: usize) -> io::Result<Region> {
        // SAFETY: no address is asked for, so that nothing that is mapped is replaced.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                fd.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // A core dump would touch every page, and so take memory for all of the empty tables.
        // SAFETY: the range is the mapping just made; it changes nothing but dumps. A kernel
        // that refuses leaves it as it was.
        unsafe { libc::madvise(start, len_bytes, libc::MADV_DONTDUMP) };
        let start =
            NonNull::new(start.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        Ok(Region { start, len_bytes, fd })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        use std::os::fd::AsFd;
        self.fd.as_fd()
    }

    /// The word at `offset` bytes, a multiple of eight within the region.
    pub(crate) fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.len_bytes);
        // SAFETY: within the mapping, aligned, and only ever used as an atomic.
        unsafe { &*self.start.as_ptr().add(offset).cast::<AtomicU64>() }
    }

    pub(crate) fn load(&self, offset: usize) -> u64 {
        self.word(offset).load(Ordering::Acquire)
    }

    pub(crate) fn store(&self, offset: usize, value: u64) {
        self.word(offset).store(value, Ordering::Release);
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours; no reference to it outlives the region.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len_bytes) };
    }
}
