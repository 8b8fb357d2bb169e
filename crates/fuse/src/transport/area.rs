//! The memory of ring entries: one memfd, a page of headers and a payload for each entry,
//! at an address that does not change.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use dray_core::IO_MAX_BYTES;

use crate::region::memfd;

/// Bytes of an entry's header page.
const PAGE_BYTES: usize = 4096;
/// Bytes of an entry's payload: the largest READ or WRITE.
pub(crate) const PAYLOAD_BYTES: usize = IO_MAX_BYTES;
/// Bytes of the part of the page that the kernel uses.
pub(crate) const HEADERS_BYTES: usize = 288;
/// Where in the page the kernel is told of the two memory areas.
const IOVEC_AT: usize = 3072;

pub(crate) struct Area {
    start: NonNull<u8>,
    slots: usize,
    used: AtomicUsize,
    _memory: OwnedFd,
}

// SAFETY: the mapping is valid on every thread; each slot is handed out once.
unsafe impl Send for Area {}
// SAFETY: as above.
unsafe impl Sync for Area {}

impl Area {
    /// Room for `slots` entries. Memory is taken for those parts that are used.
    pub(crate) fn new(slots: usize) -> io::Result<Area> {
        let len = slots * (PAGE_BYTES + PAYLOAD_BYTES);
        let memory = memfd(c"dray-fuse-ring", len)?;
        // SAFETY: no address is asked for, so that nothing that is mapped is replaced.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                memory.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Area { start, slots, used: AtomicUsize::new(0), _memory: memory })
    }

    /// A slot for one more entry; none when all are taken. They are never given back:
    /// the kernel has no command for it.
    pub(crate) fn take(&self) -> Option<Slot> {
        let next = |used| (used < self.slots).then_some(used + 1);
        let index = self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, next).ok()?;
        // SAFETY: within the mapping: headers in front, payloads behind all of them, so
        // that those are aligned to pages and lie side by side.
        unsafe {
            let page = self.start.add(index * PAGE_BYTES);
            let payload = self.start.add(self.slots * PAGE_BYTES + index * PAYLOAD_BYTES);
            let vectors = page.add(IOVEC_AT).cast::<[libc::iovec; 2]>();
            vectors.write([
                libc::iovec { iov_base: page.as_ptr().cast(), iov_len: HEADERS_BYTES },
                libc::iovec { iov_base: payload.as_ptr().cast(), iov_len: PAYLOAD_BYTES },
            ]);
            Some(Slot { page, payload, vectors: vectors.as_ptr() as u64 })
        }
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours; every entry keeps the area alive.
        unsafe {
            let len = self.slots * (PAGE_BYTES + PAYLOAD_BYTES);
            libc::munmap(self.start.as_ptr().cast(), len);
        }
    }
}

/// The memory of one entry.
#[derive(Clone, Copy)]
pub(crate) struct Slot {
    pub(crate) page: NonNull<u8>,
    pub(crate) payload: NonNull<u8>,
    /// Address of the two iovecs for the kernel.
    pub(crate) vectors: u64,
}
