//! The state that a session needs to outlive the client's process. It is some words of memory that
//! somebody else may keep (a memfd held by a supervisor).

mod file;
mod held;
mod kept;
mod layout;
mod slots;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use dray_core::{FileId, FsInfo, FsUuid, NodeId};
use dray_rt::random_u64;

pub(crate) use kept::{InheritedKept, KeptPlace, KeptPlaces, KeptRecord, NotedFile};
use layout::*;
pub(crate) use layout::{CLOSES_MAX, LOCKS_MAX, OPEN_AHEAD_MAX, SLOTS_MAX};
pub(crate) use slots::SlotState;

/// Memory of one session.
pub struct SessionMemory {
    start: NonNull<AtomicU64>,
    /// The memfd or file that it lies in; none: on the heap, and ours alone.
    fd: Option<OwnedFd>,
}

// SAFETY: the memory is only used as atomics.
unsafe impl Send for SessionMemory {}
// SAFETY: as above.
unsafe impl Sync for SessionMemory {}

fn refused(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

impl SessionMemory {
    /// Memory that ends with the process.
    pub fn heap() -> SessionMemory {
        let words: Box<[AtomicU64]> = (0..HEAP_WORDS).map(|_| AtomicU64::new(0)).collect();
        let start = NonNull::from(Box::leak(words)).cast(); // freed in `drop`
        SessionMemory { start, fd: None }
    }

    /// Memory that lasts as long as somebody holds [`SessionMemory::fd`]. Errors: those of
    /// memfd_create(2) and mmap(2).
    pub fn create_memfd() -> io::Result<SessionMemory> {
        // SAFETY: the name is a C string; no other memory is passed.
        let fd = unsafe { libc::memfd_create(c"dray-session".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just made, owned by nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        SessionMemory::lengthen(&fd, 0)?;
        SessionMemory::map(fd, 0)
    }

    fn lengthen(fd: &OwnedFd, index: usize) -> io::Result<()> {
        let len_bytes = (index * STRIDE_BYTES + BYTES) as libc::off_t;
        // SAFETY: no memory is passed.
        match unsafe { libc::ftruncate(fd.as_raw_fd(), len_bytes) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The memory of a process before us. Errors: it is none of this version (`InvalidData`, with
    /// words that say so); those of fstat(2), ftruncate(2) and mmap(2).
    pub fn from_fd(fd: OwnedFd) -> io::Result<SessionMemory> {
        SessionMemory::from_fd_at(fd, 0)
    }

    /// The memory of the session with this index among several sessions of one client, which lie in
    /// one file. Only pages that are written to take memory. Errors: as [`SessionMemory::from_fd`].
    pub fn from_fd_at(fd: OwnedFd, index: usize) -> io::Result<SessionMemory> {
        // SAFETY: an all-zero stat is valid, and the kernel writes to it during the call.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        if unsafe { libc::fstat(fd.as_raw_fd(), &mut stat) } != 0 {
            return Err(io::Error::last_os_error());
        }
        if stat.st_size < OLD_BYTES as libc::off_t {
            return Err(refused(format!("it has {} bytes of {OLD_BYTES}", stat.st_size)));
        }
        if stat.st_size < (index * STRIDE_BYTES + BYTES) as libc::off_t {
            SessionMemory::lengthen(&fd, index)?;
        }
        let memory = SessionMemory::map(fd, index)?;
        match memory.word(0).load(Ordering::Acquire) {
            0 => Ok(memory), // it died before its first welcome
            MAGIC => {
                if memory.get(REOPENED) == 0 {
                    memory.set_reestablished(memory.get(INSTANCE)); // as an earlier release believed
                }
                Ok(memory)
            }
            other if other << VERSION_BITS == MAGIC << VERSION_BITS => {
                let [version, known] = [other, MAGIC].map(|word| word >> (64 - VERSION_BITS));
                Err(refused(format!("its layout is version {version}, this dray knows {known}")))
            }
            _ => Err(refused("it is something else".into())),
        }
    }

    fn map(fd: OwnedFd, index: usize) -> io::Result<SessionMemory> {
        // SAFETY: a fresh mapping of a file of at least this size that nobody cuts.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                (index * STRIDE_BYTES) as libc::off_t,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mapped at 0"))?;
        Ok(SessionMemory { start, fd: Some(fd) })
    }

    /// The descriptor that a supervisor has to hold; none for memory on the heap.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(std::os::fd::AsFd::as_fd)
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < if self.fd.is_some() { WORDS } else { HEAP_WORDS });
        // SAFETY: within the memory, which lives as long as we do.
        unsafe { self.start.add(index).as_ref() }
    }

    fn get(&self, index: usize) -> u64 {
        self.word(index).load(Ordering::Acquire)
    }

    fn set(&self, index: usize, value: u64) {
        self.word(index).store(value, Ordering::Release);
    }

    /// The client's node, drawn at random by the first process that asks.
    pub fn node(&self) -> NodeId {
        if self.get(NODE) == 0 {
            self.set(NODE, random_u64() | 1); // 0 is nobody
        }
        NodeId(self.get(NODE))
    }

    /// Whether its node is known, be it drawn or said.
    pub fn has_node(&self) -> bool {
        self.get(NODE) != 0
    }

    /// The client's node is `node`: that of another session of this client, whose requests and
    /// locks are known by the same numbers. To be said before the session begins.
    ///
    /// # Panics
    /// If it has another node already.
    pub fn set_node(&self, node: NodeId) {
        let known = self.get(NODE);
        assert!(known == 0 || known == node.0, "a session keeps its node");
        self.set(NODE, node.0);
    }

    /// The same once it has been drawn, before that [`NodeId::OWN`].
    pub(crate) fn drawn_node(&self) -> NodeId {
        NodeId(self.get(NODE))
    }

    /// Session, secret and server instance; none before the first welcome.
    pub(crate) fn session(&self) -> Option<(u64, [u8; 16], u64)> {
        let session = self.get(SESSION);
        let mut secret = [0; 16];
        secret[..8].copy_from_slice(&self.get(SECRET).to_le_bytes());
        secret[8..].copy_from_slice(&self.get(SECRET + 1).to_le_bytes());
        (session != 0).then(|| (session, secret, self.get(INSTANCE)))
    }

    /// Notes what a welcome says. The locks and files of another session are not reestablished in
    /// this one.
    pub(crate) fn set_session(&self, session: u64, secret: &[u8; 16], instance: u64) {
        if self.get(SESSION) != session {
            self.set_reestablished(NO_INSTANCE);
        }
        let half = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| secret[at + index]));
        self.set(SECRET, half(0));
        self.set(SECRET + 1, half(8));
        self.set(INSTANCE, instance);
        self.set(SESSION, session);
        self.set(0, MAGIC);
    }

    /// The instance of the server where all locks were reclaimed, and the one where all open files
    /// were reopened. A process that dies in the middle of that leaves the rest to its successor.
    pub(crate) fn reestablished(&self) -> (u64, u64) {
        match self.fd {
            Some(_) => (self.get(RECLAIMED), self.get(REOPENED)),
            None => (NO_INSTANCE, NO_INSTANCE),
        }
    }

    pub(crate) fn set_reclaimed(&self, instance: u64) {
        if self.fd.is_some() {
            self.set(RECLAIMED, instance);
        }
    }

    pub(crate) fn set_reestablished(&self, instance: u64) {
        self.set_reclaimed(instance);
        if self.fd.is_some() {
            self.set(REOPENED, instance);
        }
    }

    /// The start of the server's machine after which nothing has to be replayed any more; 0 for
    /// none.
    pub(crate) fn boot(&self) -> u64 {
        self.get(BOOT)
    }

    pub(crate) fn set_boot(&self, boot: u64) {
        self.set(BOOT, boot);
    }

    /// The export's properties, without those of the file system below. None before the first
    /// welcome, and in memory of an earlier release.
    pub(crate) fn export(&self) -> Option<FsInfo> {
        self.fd.as_ref()?;
        let words: [u64; 5] = std::array::from_fn(|index| self.get(EXPORT + index));
        let [state, ino, generation, low, high] = words;
        (state & EXPORT_KNOWN != 0).then(|| FsInfo {
            uuid: FsUuid(u128::from(high) << 64 | u128::from(low)),
            root: FileId { ino, generation },
            kind: String::new(),
            read_only: state & EXPORT_READ_ONLY != 0,
        })
    }

    /// Notes it for a successor, which is nothing to memory that nobody takes over.
    pub(crate) fn set_export(&self, info: &FsInfo) {
        if self.fd.is_none() {
            return;
        }
        let uuid = info.uuid.0;
        let words = [info.root.ino, info.root.generation, uuid as u64, (uuid >> 64) as u64];
        words.iter().enumerate().for_each(|(index, word)| self.set(EXPORT + 1 + index, *word));
        let read_only = if info.read_only { EXPORT_READ_ONLY } else { 0 };
        self.set(EXPORT, EXPORT_KNOWN | read_only);
    }

    /// Counts one more process that has it. Answers how many there were before.
    pub(crate) fn begin_process(&self) -> u64 {
        match self.fd {
            Some(_) => self.word(PROCESSES).fetch_add(1, Ordering::AcqRel),
            None => 0,
        }
    }

    /// The handle in one of the places for closes, 0 if it is free.
    pub(crate) fn close(&self, place: u32) -> u64 {
        self.get(FIRST_CLOSE + place as usize)
    }

    pub(crate) fn set_close(&self, place: u32, handle: u64) {
        self.set(FIRST_CLOSE + place as usize, handle);
    }
}

impl Drop for SessionMemory {
    fn drop(&mut self) {
        match self.fd {
            // SAFETY: mapped by us with this length; nobody can refer to it any more.
            Some(_) => unsafe {
                libc::munmap(self.start.as_ptr().cast(), BYTES);
            },
            // SAFETY: leaked from a box of this length in `heap`.
            None => unsafe {
                let words = std::ptr::slice_from_raw_parts_mut(self.start.as_ptr(), HEAP_WORDS);
                drop(Box::from_raw(words));
            },
        }
    }
}
