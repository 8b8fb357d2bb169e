//! Memory for what is read from /dev/fuse and for what is answered, used again and again.
//!
//! The data of a WRITE begin at a page, as do those that answer a READ. The kernel copies page by
//! page to and from the application's memory. Between pages that lie alike that is one copy each,
//! and one look at the page tables, instead of two.
//!
//! What was given back last is used next: it is what the processor's cache has.
//!
//! What the kernel is to write a request to has its memory before it does. Of a process that is being
//! killed it takes none any more, and the request fails with EIO, whose caller should notice nothing.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use dray_core::{Buf, BufMut, IO_MAX_BYTES, Memory};

/// The kernel's head of a request and the arguments of a WRITE (`fuse_in_header`,
/// `fuse_write_in`), bytes: where data begin in a message.
const WRITE_HEAD_BYTES: usize = 80;
/// Pages of a buffer: one in whose last bytes a message begins, the largest WRITE, and one to
/// spare.
const PAGES: usize = IO_MAX_BYTES / PAGE_BYTES + 2;
const PAGE_BYTES: usize = 4096;
/// Where a message begins.
const MESSAGE_AT: usize = PAGE_BYTES - WRITE_HEAD_BYTES;
/// Pages for what comes beside a ring, unless it is a long list of FORGETs.
const SMALL_PAGES: usize = 2;
/// Buffers kept while they are not in use.
const SPARE_MAX: usize = 8;
/// The memory of buffers that have not been used for this long is given back to the system.
/// Few programs that work pause for so long, and a mount without work sleeps soon.
const REST_TIME: Duration = Duration::from_millis(250);

#[repr(align(4096))]
struct Page(#[allow(dead_code)] [u8; PAGE_BYTES]); // memory alone

type Pages = Box<[MaybeUninit<Page>]>;

/// The buffers of one reader of /dev/fuse.
#[derive(Default)]
pub(crate) struct Buffers {
    spare: Mutex<Vec<Spare>>,
    /// No WRITE comes this way.
    small_only: bool,
    /// Buffers taken so far.
    taken: AtomicU64,
    /// A task waits for the buffers to rest.
    tended: AtomicBool,
}

/// A buffer that is not in use.
struct Spare {
    pages: Pages,
    has_memory: bool,
}

impl Buffers {
    /// For a reader beside a ring, to whom no WRITE comes.
    pub(crate) fn small() -> Buffers {
        Buffers { small_only: true, ..Buffers::default() }
    }

    fn spare(&self) -> MutexGuard<'_, Vec<Spare>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The buffer that was used last, or a new one.
    pub(crate) fn take(self: &Arc<Buffers>) -> Buffer {
        self.taken.fetch_add(1, Ordering::Relaxed);
        let spare = self.spare().pop();
        // The system gives memory for a new one when it is written.
        let new = || Spare { pages: Box::new_uninit_slice(PAGES), has_memory: false };
        let Spare { pages, has_memory } = spare.unwrap_or_else(new);
        Buffer { pages, has_memory, filled_bytes: 0, home: self.clone() }
    }
}

impl Buffers {
    /// Whether somebody should begin to [`tend`] them: they were used, and nobody does.
    pub(crate) fn are_untended(&self) -> bool {
        self.taken.load(Ordering::Relaxed) > 0 && !self.tended.swap(true, Ordering::Relaxed)
    }

    /// Gives the memory of buffers that are not in use back to the system. They stay.
    fn trim(&self) {
        self.taken.store(0, Ordering::Relaxed);
        for Spare { pages, has_memory } in self.spare().iter_mut() {
            let len_bytes = size_of_val(&**pages);
            // SAFETY: whole pages, ours alone, whose content nobody relies on.
            unsafe { libc::madvise(pages.as_mut_ptr().cast(), len_bytes, libc::MADV_DONTNEED) };
            *has_memory = false;
        }
    }
}

/// Gives the memory of buffers back once they rest, and ends then: a mount without work is
/// not woken a second time.
pub(crate) async fn tend(buffers: Weak<Buffers>) {
    let mut before = 0;
    loop {
        {
            let Some(buffers) = buffers.upgrade() else { return };
            let taken = buffers.taken.load(Ordering::Relaxed);
            if taken == before {
                buffers.trim();
                buffers.tended.store(false, Ordering::Relaxed);
                return;
            }
            before = taken;
        }
        dray_rt::sleep(REST_TIME).await;
    }
}

/// A buffer in use.
pub(crate) struct Buffer {
    pages: Pages,
    /// As much of it as a request may take.
    has_memory: bool,
    /// Bytes of the message in it.
    filled_bytes: usize,
    home: Arc<Buffers>,
}

impl Memory for Buffer {}

impl Drop for Buffer {
    fn drop(&mut self) {
        let pages = std::mem::take(&mut self.pages);
        let mut spare = self.home.spare();
        if spare.len() < SPARE_MAX {
            spare.push(Spare { pages, has_memory: self.has_memory });
        }
    }
}

impl Buffer {
    fn at(&mut self, offset: usize) -> NonNull<u8> {
        let start = NonNull::from(&mut *self.pages).cast::<u8>();
        // SAFETY: every offset asked for lies within the pages.
        unsafe { start.add(offset) }
    }

    /// Becomes the buffer that was given back last, if there is one.
    pub(crate) fn warm(&mut self) {
        let mut spare = self.home.spare();
        if let Some(warmer) = spare.pop() {
            let pages = std::mem::replace(&mut self.pages, warmer.pages);
            let has_memory = std::mem::replace(&mut self.has_memory, warmer.has_memory);
            spare.insert(0, Spare { pages, has_memory });
        }
        self.filled_bytes = 0;
    }

    /// Has the system give it memory, if it did not do so before. One that cannot (before Linux
    /// 5.14) does not send the requests of a dead process again, either.
    fn have_memory(&mut self) {
        if std::mem::replace(&mut self.has_memory, true) {
            return;
        }
        let pages = if self.home.small_only { SMALL_PAGES } else { PAGES };
        let (start, len_bytes) = (self.at(0).as_ptr(), pages * PAGE_BYTES);
        // SAFETY: whole pages, ours alone; nothing in them is changed.
        unsafe { libc::madvise(start.cast(), len_bytes, libc::MADV_POPULATE_WRITE) };
    }

    /// Reads one message from /dev/fuse. Errors: those of read(2).
    pub(crate) fn read(&mut self, fd: RawFd) -> io::Result<usize> {
        self.have_memory();
        self.filled_bytes = 0;
        let room_bytes = PAGES * PAGE_BYTES - MESSAGE_AT;
        // SAFETY: the kernel writes at most that many bytes, which lie within the pages.
        let count = unsafe { libc::read(fd, self.at(MESSAGE_AT).as_ptr().cast(), room_bytes) };
        self.filled_bytes = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        Ok(self.filled_bytes)
    }

    /// The message in it.
    pub(crate) fn message(&self) -> &[u8] {
        // SAFETY: the kernel has filled these bytes; they lie within the pages.
        unsafe {
            let start = self.pages.as_ptr().cast::<u8>().add(MESSAGE_AT);
            std::slice::from_raw_parts(start, self.filled_bytes)
        }
    }

    /// The message in it, shared from now on.
    pub(crate) fn into_message(mut self) -> Buf {
        let (start, len_bytes) = (self.at(MESSAGE_AT), self.filled_bytes);
        // SAFETY: the kernel has filled these bytes. They stay where they are, in the box that
        // the owner keeps, and nobody writes them until the owner is dropped.
        unsafe { Buf::over(start, len_bytes, Arc::new(self)) }
    }

    /// Empty memory for up to `size` bytes of an answer, at most [`IO_MAX_BYTES`].
    pub(crate) fn into_answer(mut self, size: usize) -> BufMut {
        let start = self.at(PAGE_BYTES);
        // SAFETY: within the pages, which the owner keeps in place and for nobody else.
        unsafe { BufMut::over(start, size.min(IO_MAX_BYTES), Arc::new(self)) }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;

    use dray_rt::{DriverKind, Executor};

    use super::*;

    /// A message of `len` bytes as the kernel would hand it over.
    fn message(buffer: &mut Buffer, len: usize) {
        let (read, mut write) = io::pipe().unwrap();
        write.write_all(&vec![7; len]).unwrap();
        assert_eq!(buffer.read(read.as_raw_fd()).unwrap(), len);
    }

    #[test]
    fn data_begin_at_a_page() {
        let buffers = Arc::new(Buffers::default());
        let mut buffer = buffers.take();
        message(&mut buffer, WRITE_HEAD_BYTES + 5);
        assert_eq!(buffer.message(), [7; WRITE_HEAD_BYTES + 5]);
        let data = buffer.into_message().slice(WRITE_HEAD_BYTES..WRITE_HEAD_BYTES + 5);
        assert_eq!((data.as_ptr() as usize % PAGE_BYTES, &*data), (0, &[7; 5][..]));
        let answer = buffers.take().into_answer(IO_MAX_BYTES);
        assert_eq!(
            (answer.filled().as_ptr() as usize % PAGE_BYTES, answer.room()),
            (0, IO_MAX_BYTES)
        );
    }

    fn resident_pages(at: NonNull<u8>) -> usize {
        let mut pages = vec![0u8; PAGES];
        // SAFETY: the range is a buffer's, and there is a byte for each page.
        let result =
            unsafe { libc::mincore(at.as_ptr().cast(), PAGES * PAGE_BYTES, pages.as_mut_ptr()) };
        assert_eq!(result, 0);
        pages.iter().filter(|page| **page & 1 != 0).count()
    }

    /// Large WRITEs failed with EIO where the daemon was killed as the kernel copied them. They
    /// went to memory that had never been used, or had been given back.
    #[test]
    fn what_the_kernel_writes_to_has_its_memory_before() {
        let buffers = Arc::new(Buffers::default());
        let (mut first, mut second) = (buffers.take(), buffers.take());
        message(&mut first, 1);
        assert_eq!(resident_pages(first.at(0)), PAGES);
        drop(first);
        buffers.trim();
        second.warm();
        assert_eq!(resident_pages(second.at(0)), 0);
        message(&mut second, 1);
        assert_eq!(resident_pages(second.at(0)), PAGES);
        let mut beside_ring = Arc::new(Buffers::small()).take();
        // What other tests have used and freed may be in it.
        let (start, len_bytes) = (beside_ring.at(0).as_ptr().cast(), PAGES * PAGE_BYTES);
        // SAFETY: whole pages, the buffer's alone, with nothing in them so far.
        unsafe { libc::madvise(start, len_bytes, libc::MADV_DONTNEED) };
        message(&mut beside_ring, 1);
        assert_eq!(resident_pages(beside_ring.at(0)), SMALL_PAGES);
    }

    #[test]
    fn buffers_at_rest_take_no_memory_and_wake_nobody() {
        let mut executor = Executor::new(DriverKind::Simulated { seed: 1 }).unwrap();
        let buffers = Arc::new(Buffers::default());
        assert!(!buffers.are_untended(), "never used");
        let mut buffer = buffers.take();
        message(&mut buffer, 60_000);
        let at = buffer.at(0);
        assert!(resident_pages(at) >= 15);
        drop(buffer);
        assert!(buffers.are_untended() && !buffers.are_untended());
        executor.block_on(async {
            let begin = dray_rt::now();
            tend(Arc::downgrade(&buffers)).await;
            assert_eq!(begin.elapsed(), REST_TIME, "it ends when they rest");
        });
        assert_eq!(resident_pages(at), 0);
        assert!(!buffers.are_untended());
        drop(buffers.take());
        assert!(buffers.are_untended());
    }

    #[test]
    fn what_was_given_back_last_is_used_next() {
        let buffers = Arc::new(Buffers::default());
        let (mut waiting, mut used) = (buffers.take(), buffers.take());
        let (cold, warm) = (waiting.at(0), used.at(0));
        drop(used);
        waiting.warm();
        assert_eq!(waiting.at(0), warm);
        assert_eq!(buffers.take().at(0), cold);
    }
}
