//! Content that stays in pages of the kernel on its way from a socket into a file.
//!
//! A pipe holds references to pages, not bytes. What is spliced from a socket into it and out of it
//! into a file is copied once, into the page cache. Otherwise it is copied twice
//! (docs/adr/0015-large-transfers.md). Nothing is moved on before all of it is here. So a change is
//! made at once, or not at all if its connection breaks.
//!
//! Such content has memory, too, for code that looks at it. So what it takes of pools is as if it
//! had been copied there, and the pages come on top for a while. They are as much again where they
//! are full, as a sender on this machine fills them. They are at worst 8 MiB, if each of the 256
//! pieces that a pipe has room for keeps 32 KiB of a sender's. When a pipe is full early its
//! content is copied.

use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dray_core::{BufMut, IO_MAX_BYTES, Memory, Pages, RegionId, Take};

/// Pipes at once: two descriptors and 10 KiB each. What finds none is copied.
const PIPES_MAX: usize = 32;
/// Pipes kept while they are not in use.
const SPARE_MAX: usize = 8;

static SPARE: Mutex<Vec<Pipe>> = Mutex::new(Vec::new());
static PIPES: AtomicUsize = AtomicUsize::new(0);
/// The system gives no pipe of the wanted size (`fs.pipe-max-size`, `fs.pipe-user-pages-soft`).
static REFUSED: AtomicBool = AtomicBool::new(false);

fn spare() -> MutexGuard<'static, Vec<Pipe>> {
    SPARE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One place of [`PIPES_MAX`].
struct Place;

impl Place {
    fn take() -> Option<Place> {
        let next = |count| (count < PIPES_MAX).then_some(count + 1);
        let taken = PIPES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        taken.ok().map(|_| Place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        PIPES.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A pipe with room for the pages of the largest transfer.
struct Pipe {
    read: io::PipeReader,
    write: io::PipeWriter,
    _place: Place,
}

impl Pipe {
    /// An empty one; none if there are too many, or the system has once given none of this size.
    fn get() -> Option<Pipe> {
        let spare = spare().pop();
        if spare.is_some() {
            return spare;
        }
        if REFUSED.load(Ordering::Relaxed) {
            return None;
        }
        let place = Place::take()?;
        let (read, write) = io::pipe().ok()?;
        let wanted = IO_MAX_BYTES as libc::c_int;
        // SAFETY: no memory is passed.
        let size = unsafe { libc::fcntl(write.as_raw_fd(), libc::F_SETPIPE_SZ, wanted) };
        if size < wanted {
            REFUSED.store(true, Ordering::Relaxed);
            return None;
        }
        Some(Pipe { read, write, _place: place })
    }

    /// Reads `bytes` bytes, which are in it.
    ///
    /// # Safety
    /// There is memory for them behind `to`, to which nobody has a reference.
    unsafe fn read_all(&self, to: *mut u8, bytes: usize) -> io::Result<()> {
        let mut done = 0;
        while done < bytes {
            // SAFETY: within the caller's memory.
            let read =
                unsafe { libc::read(self.read.as_raw_fd(), to.add(done).cast(), bytes - done) };
            match usize::try_from(read) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => done += read,
                Err(_) => match io::Error::last_os_error() {
                    error if error.kind() == io::ErrorKind::Interrupted => {}
                    error => return Err(error),
                },
            }
        }
        Ok(())
    }

    /// Keeps it for the next; to be called with an empty one.
    fn give_back(self) {
        let mut spare = spare();
        if spare.len() < SPARE_MAX {
            spare.push(self);
        }
    }
}

/// What comes from a socket, in pages.
pub(crate) struct IncomingPages {
    pipe: Pipe,
    bytes: usize,
}

impl IncomingPages {
    /// Nothing yet; none where there is no pipe for it.
    pub(crate) fn new() -> Option<IncomingPages> {
        Pipe::get().map(|pipe| IncomingPages { pipe, bytes: 0 })
    }

    /// Bytes here.
    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// Adds what has been read already. To be called first; asserts that it is much less than
    /// what fits.
    pub(crate) fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        assert!(self.bytes == 0 && bytes.len() <= IO_MAX_BYTES / 2, "a pipe would block");
        self.pipe.write.write_all(bytes)?;
        self.bytes = bytes.len();
        Ok(())
    }

    /// Takes up to `count` bytes off `socket`: how many, 0 at the end of the stream; and whether
    /// nothing more was there. Errors: `EAGAIN` if there are none; anything else if that is not
    /// the way: reading says why.
    pub(crate) fn receive(&mut self, socket: RawFd, count: usize) -> io::Result<(usize, bool)> {
        let mut moved = self.splice_from(socket, count);
        // A full pipe and an empty socket give the same error. Between the two calls something may
        // have come.
        for _ in 0..2 {
            match moved {
                Ok(bytes) => return Ok((bytes, bytes < count && is_empty(socket))),
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                Err(error) if is_empty(socket) => return Err(error),
                Err(_) => moved = self.splice_from(socket, count),
            }
        }
        match moved {
            Ok(bytes) => Ok((bytes, false)),
            Err(_) => Err(io::ErrorKind::StorageFull.into()),
        }
    }

    fn splice_from(&mut self, socket: RawFd, count: usize) -> io::Result<usize> {
        let (none, flags) = (std::ptr::null_mut(), libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK);
        let pipe = self.pipe.write.as_raw_fd();
        // SAFETY: no memory is passed.
        let moved = unsafe { libc::splice(socket, none, pipe, none, count, flags) };
        let moved = usize::try_from(moved).map_err(|_| io::Error::last_os_error())?;
        self.bytes += moved;
        Ok(moved)
    }

    /// Copies it into `memory`, which is empty and large enough.
    pub(crate) fn fetch_into(self, memory: &mut BufMut) -> io::Result<()> {
        assert!(memory.is_empty() && self.bytes <= memory.room());
        // SAFETY: the memory has room for as much, which is initialised then.
        unsafe {
            self.pipe.read_all(memory.spare().as_mut_ptr().cast(), self.bytes)?;
            memory.advance(self.bytes);
        }
        self.pipe.give_back();
        Ok(())
    }

    /// All of it, as a buffer over `memory`, which is empty and large enough.
    pub(crate) fn into_buffer(self, memory: BufMut) -> BufMut {
        let IncomingPages { pipe, bytes } = self;
        // SAFETY: `fetch` reads `bytes` bytes, since as many are in the pipe, or nothing a
        // second time.
        unsafe {
            memory.filled_with_pages(bytes, |start, memory| {
                let content = Mutex::new(Content { pipe: Some(pipe), taken: 0 });
                Arc::new(Piped { start, bytes, content, memory })
            })
        }
    }
}

/// Whether nothing can be read from a socket. One that does not say counts as empty.
fn is_empty(socket: RawFd) -> bool {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the answer is written to `bytes` during the call.
    unsafe { libc::ioctl(socket, libc::FIONREAD, &raw mut bytes) };
    bytes <= 0
}

/// Owner of a buffer whose content is in a pipe.
struct Piped {
    start: NonNull<u8>,
    bytes: usize,
    content: Mutex<Content>,
    memory: Arc<dyn Memory>,
}

struct Content {
    /// Until all of it has been fetched.
    pipe: Option<Pipe>,
    /// Bytes that have been taken.
    taken: usize,
}

// SAFETY: the memory is written once, behind the lock, before anybody has a reference to it.
unsafe impl Send for Piped {}
// SAFETY: as above.
unsafe impl Sync for Piped {}

impl Piped {
    fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Memory for Piped {
    fn pages(&self) -> Option<&dyn Pages> {
        Some(self)
    }

    fn region(&self) -> Option<RegionId> {
        self.memory.region()
    }
}

impl Pages for Piped {
    fn take(&self, at: usize, to: Take<'_>) -> Option<io::Result<usize>> {
        let mut content = self.content();
        let pipe = content.pipe.as_ref()?;
        assert_eq!(at, content.taken, "pages are taken in their order");
        let taken = to(pipe.read.as_fd(), self.bytes - at);
        content.taken += taken.as_ref().copied().unwrap_or(0);
        Some(taken)
    }

    fn fetch(&self) {
        let mut content = self.content();
        let Some(pipe) = content.pipe.take() else { return };
        assert_eq!(content.taken, 0, "somebody looks at what has been moved on");
        // SAFETY: the memory has room for as much, and nobody has a reference to it yet.
        let read = unsafe { pipe.read_all(self.start.as_ptr(), self.bytes) };
        read.expect("a pipe gives what has been put into it");
        pipe.give_back();
    }
}

impl Drop for Piped {
    fn drop(&mut self) {
        let mut content = self.content();
        let all = content.taken == self.bytes;
        // A pipe with something in it is closed.
        content.pipe.take().filter(|_| all).into_iter().for_each(Pipe::give_back);
    }
}
