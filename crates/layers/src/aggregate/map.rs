//! A file's memory, shared with the process that maps it next.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use super::extents::BlockExtent;

/// A mapped file. A process that is killed leaves in it all that it has stored.
pub(crate) struct Map {
    start: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: the mapping is plain memory; `write` says who may write where.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    /// Maps all of `file`, which has no holes and is locked by this process.
    pub(crate) fn new(file: &File) -> io::Result<Map> {
        let len_bytes = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        // SAFETY: a fresh mapping of a file that only this process uses. Nobody cuts it.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mapped at 0"))?;
        Ok(Map { start, len_bytes })
    }

    pub(crate) fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Where byte `at` is, with `len_bytes` behind it.
    pub(crate) fn place(&self, at: usize, len_bytes: usize) -> NonNull<u8> {
        assert!(at.checked_add(len_bytes).is_some_and(|end| end <= self.len_bytes));
        // SAFETY: within the mapping.
        unsafe { self.start.add(at) }
    }

    /// Copies bytes in. The holder of a slot writes to it, one call at a time, and only to bytes
    /// that no buffer is made of.
    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        let target = self.place(at, bytes.len());
        // SAFETY: within the mapping; see above for who else uses the bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.as_ptr(), bytes.len()) };
    }

    pub(crate) fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8));
        // SAFETY: within the mapping, aligned (mappings begin at a page), and used as an atomic only.
        unsafe { AtomicU64::from_ptr(self.place(at, 8).as_ptr().cast()) }
    }

    pub(crate) fn half_word(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4));
        // SAFETY: as for `word`.
        unsafe { AtomicU32::from_ptr(self.place(at, 4).as_ptr().cast()) }
    }

    /// A copy of `len_bytes` at `at`, which nobody writes to meanwhile.
    pub(crate) fn copied(&self, at: usize, len_bytes: usize) -> Vec<u8> {
        let start = self.place(at, len_bytes);
        // SAFETY: within the mapping; see above for who else uses the bytes.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), len_bytes) }.to_vec()
    }

    /// The bytes of `extent` of what begins at `at`.
    pub(super) fn slice(&self, at: usize, extent: BlockExtent) -> &[u8] {
        let start = self.place(at + extent.start as usize, extent.len_bytes());
        // SAFETY: within the mapping. Its holder does not write to what is being read.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), extent.len_bytes()) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: mapped by us with this length; no reference to it is left.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len_bytes) };
    }
}
