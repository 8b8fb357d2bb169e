//! The journal in mapped files: one a session, in the server's state directory.
//!
//! ```text
//! 0     8  magic and version        slot n at 4096 + 1024 n:
//! 8     4  slots                    0   8  sequence << 32 | state << 8 | operation
//! 12    4  bytes of the record      8   4  bytes of the intent
//! 16    4  locks are held           12  4  bytes of the answer
//! 20    4  the client has no leases 16  704  intent
//! 32       the session's record     720 272  answer
//! ```
//! The first word of a slot is stored last, in one piece. So a slot says what was begun or answered
//! before, whatever instruction the process dies at.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use dray_core::{Fut, Op};

use crate::server::journal::records;
use crate::server::journal::{
    ANSWER_MAX_BYTES, INTENT_MAX_BYTES, Journal, PersistentRecord, SessionRecord, SlotLog,
    SlotRecord,
};
use crate::wire::{Input, Wire};

/// "draysl" and, in the last byte, the version of the layout, 1.
const MAGIC: u64 = u64::from_le_bytes(*b"draysl\0\x01");
const VERSION_SHIFT: u32 = 56;
const HEADER_BYTES: usize = 4096;
const SLOT_BYTES: usize = 1024;
const RECORD_AT: usize = 32;
const RECORD_MAX_BYTES: usize = HEADER_BYTES - RECORD_AT;
const LOCKS_AT: usize = 16;
/// Zero where a dray has written the file that notes nothing here.
const NO_LEASES_AT: usize = 20;
const INTENT_AT: usize = 16;
const ANSWER_AT: usize = INTENT_AT + INTENT_MAX_BYTES;
const SLOTS_MAX: u32 = 65_536;
/// Slots that are read at once: a page of them.
const SLOTS_READ: usize = 4;
const FILE_MAX_BYTES: u64 = HEADER_BYTES as u64 + SLOTS_MAX as u64 * SLOT_BYTES as u64;
const _: () = assert!(ANSWER_AT + ANSWER_MAX_BYTES <= SLOT_BYTES);

const STATE_INTENT: u64 = 1;
const STATE_ANSWER: u64 = 2;
/// Operation of an answer before which nothing was noted: a lookup changes nothing.
const NOT_BEGUN: u8 = Op::Lookup as u8;

/// Keeps sessions as files `session-ID` in a directory, and small files beside it.
pub struct FileJournal {
    dir: PathBuf,
    /// Where the small files are.
    beside: PathBuf,
}

impl FileJournal {
    /// A journal in `dir`, which is made if need be, and in the directory above it. Errors: those
    /// of making it.
    pub fn open(dir: &Path) -> io::Result<FileJournal> {
        fs::create_dir_all(dir)?;
        fs::read_dir(dir)?; // now, rather than that all clients seem to be gone
        let beside = dir.parent().unwrap_or(dir).to_owned();
        Ok(FileJournal { dir: dir.to_owned(), beside })
    }

    fn path(&self, session: u64) -> PathBuf {
        self.dir.join(format!("session-{session:016x}"))
    }
}

impl Journal for FileJournal {
    fn create(&self, session: &SessionRecord, slots: u32) -> io::Result<Arc<dyn SlotLog>> {
        let mut record = Vec::new();
        put_record(session, &mut record);
        if record.len() > RECORD_MAX_BYTES || slots > SLOTS_MAX {
            return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
        }
        let path = self.path(session.id);
        let file =
            OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
        let bytes = HEADER_BYTES + slots as usize * SLOT_BYTES;
        write_in_place(&file);
        let map = reserve(&file, bytes).and_then(|()| Map::new(&file));
        let map = map.inspect_err(|_| _ = fs::remove_file(&path))?;
        map.write(RECORD_AT, &record);
        map.write(8, &slots.to_le_bytes());
        map.write(12, &(record.len() as u32).to_le_bytes());
        map.word(0).store(MAGIC, Ordering::Release);
        // After a loss of power the server has to know whom to wait for.
        file.sync_all()?;
        File::open(&self.dir)?.sync_all()?;
        Ok(Arc::new(FileLog { map, slots, used: Mutex::default() }))
    }

    fn remove(&self, session: u64) {
        // At worst the session expires once more. Synced, since after a loss of power all clients
        // would wait for one that has ended its session.
        let _ = fs::remove_file(self.path(session));
        let _ = File::open(&self.dir).and_then(|dir| dir.sync_all());
    }

    fn load(&self) -> Vec<(SessionRecord, Arc<dyn SlotLog>)> {
        let unread = |error: &io::Error| {
            let shown = self.dir.display();
            log::error!("{shown}: cannot read all of it, its clients begin anew: {error}");
        };
        let entries = fs::read_dir(&self.dir).inspect_err(unread).into_iter().flatten();
        let entries = entries.filter_map(|entry| entry.inspect_err(unread).ok());
        let mut loaded = Vec::new();
        for path in entries.map(|entry| entry.path()) {
            let ours =
                path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("session-"));
            if !ours {
                continue;
            }
            let shown = path.display();
            match load_one(&path) {
                Ok((record, log)) => loaded.push((record, Arc::new(log) as Arc<dyn SlotLog>)),
                Err(Unusable::Garbage) => {
                    log::warn!("{shown}: not a session; removed");
                    let _ = fs::remove_file(&path); // tried again at the next start
                }
                Err(Unusable::Newer(version)) => log::warn!(
                    "{shown}: a session of a newer dray (layout {version}), whose client begins \
                     anew; remove the file if that dray is not to come back"
                ),
                Err(Unusable::Unread(error)) => {
                    log::error!("{shown}: cannot read it, its client begins anew: {error}");
                }
            }
        }
        loaded.sort_by_key(|(record, _)| record.id);
        loaded
    }

    fn kept(&self, what: PersistentRecord) -> io::Result<Option<Vec<u8>>> {
        records::read(&self.beside, what)
    }

    fn keep(&self, what: PersistentRecord, bytes: &[u8]) -> io::Result<()> {
        records::write(&self.beside, what, bytes)
    }

    fn settled(&self) -> Option<Fut<'_, bool>> {
        None
    }
}

/// Why a file is no session that can be gone on with.
enum Unusable {
    Garbage,
    /// The file has a later version of the layout.
    Newer(u64),
    Unread(io::Error),
}

impl From<io::Error> for Unusable {
    fn from(error: io::Error) -> Unusable {
        Unusable::Unread(error)
    }
}

fn load_one(path: &Path) -> Result<(SessionRecord, FileLog), Unusable> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    if !(HEADER_BYTES as u64..=FILE_MAX_BYTES).contains(&file.metadata()?.len()) {
        return Err(Unusable::Garbage);
    }
    // Page by page: what is read ahead is kept in larger pieces, and forgotten as a whole or not.
    // SAFETY: no memory is passed; the descriptor is open. It is advice, and no more.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) };
    // Where a disk cannot read the header, this is an error. Reading mapped memory would kill the
    // process (SIGBUS), and the next one.
    file.read_exact_at(&mut [0; HEADER_BYTES], 0)?;
    let map = Map::new(&file)?;
    let magic = map.word(0).load(Ordering::Acquire);
    if magic != MAGIC {
        let same_name =
            magic << (u64::BITS - VERSION_SHIFT) == MAGIC << (u64::BITS - VERSION_SHIFT);
        let newer = same_name && magic >> VERSION_SHIFT > MAGIC >> VERSION_SHIFT;
        return Err(if newer {
            Unusable::Newer(magic >> VERSION_SHIFT)
        } else {
            Unusable::Garbage
        });
    }
    let slots = map.u32(8);
    let record_bytes = map.u32(12) as usize;
    let sound = slots <= SLOTS_MAX
        && record_bytes <= RECORD_MAX_BYTES
        && map.len >= HEADER_BYTES + slots as usize * SLOT_BYTES;
    if !sound {
        return Err(Unusable::Garbage);
    }
    let record = get_record(&map.read(RECORD_AT, record_bytes)).ok_or(Unusable::Garbage)?;
    let used = used_slots(&file, slots)?;
    map.rest();
    forget_unused(&file, slots, &used);
    Ok((record, FileLog { map, slots, used: Mutex::new(Some(used)) }))
}

/// Slots in which there is something, found by reading the file, as above, too. Pages that are
/// looked at in mapped memory count as ours. Most slots of most sessions, of which there may be
/// thousands, are never used. (An unwritten slot cannot be recognized. When something beside blocks
/// that were only set aside is written, ext4 writes zeros over them, `extent_max_zeroout_kb` in
/// ext4(5).)
fn used_slots(file: &File, slots: u32) -> io::Result<Vec<u32>> {
    let (mut used, mut bytes) = (Vec::new(), [0; SLOTS_READ * SLOT_BYTES]);
    for first in (0..slots).step_by(SLOTS_READ) {
        let count = SLOTS_READ.min((slots - first) as usize);
        let part = &mut bytes[..count * SLOT_BYTES];
        file.read_exact_at(part, place_of(first) as u64)?;
        let words = part.chunks(SLOT_BYTES).map(|slot| slot.first_chunk::<8>());
        let there = (first..).zip(words).filter(|(_, word)| *word != Some(&[0; 8]));
        used.extend(there.map(|(slot, _)| slot));
    }
    Ok(used)
}

/// Has the system forget the pages that were read of slots that are not used. A page that is at
/// hand is mapped with its neighbours, and counts as ours, too.
fn forget_unused(file: &File, slots: u32, used: &[u32]) {
    for first in (0..slots).step_by(SLOTS_READ) {
        if used.iter().any(|slot| (first..first + SLOTS_READ as u32).contains(slot)) {
            continue;
        }
        let (at, len) = (place_of(first), SLOTS_READ * SLOT_BYTES);
        let (at, len) = (at as libc::off_t, len as libc::off_t);
        // SAFETY: no memory is passed; the descriptor is open. It is advice, and no more.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), at, len, libc::POSIX_FADV_DONTNEED) };
    }
}

fn place_of(slot: u32) -> usize {
    HEADER_BYTES + slot as usize * SLOT_BYTES
}

/// Takes all of the file's blocks from the disk. Writing to mapped memory without a block behind it
/// would kill the process (SIGBUS) once the disk is full.
fn reserve(file: &File, bytes: usize) -> io::Result<()> {
    // SAFETY: no memory is passed; the descriptor is open.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, bytes as libc::off_t) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Has btrfs write changed pages to where they were, as others do. Otherwise btrfs takes another
/// block for each changed page, and on a full disk that is SIGBUS, too. To be called while the file
/// is empty.
fn write_in_place(file: &File) {
    const NO_COPY: libc::c_long = 0x0080_0000; // FS_NOCOW_FL
    let mut flags: libc::c_long = 0;
    // SAFETY: the kernel reads and writes an int, for which there is room. Where there are no such
    // flags they are not needed.
    unsafe {
        if libc::ioctl(file.as_raw_fd(), libc::FS_IOC_GETFLAGS, &raw mut flags) == 0 {
            flags |= NO_COPY;
            libc::ioctl(file.as_raw_fd(), libc::FS_IOC_SETFLAGS, &raw const flags);
        }
    }
}

fn put_record(session: &SessionRecord, out: &mut Vec<u8>) {
    session.id.put(out);
    session.secret.put(out);
    session.node.put(out);
    session.export.put(out);
    session.host.put(out);
}

fn get_record(bytes: &[u8]) -> Option<SessionRecord> {
    let mut input = Input(bytes);
    Some(SessionRecord {
        id: input.get().ok()?,
        secret: input.get().ok()?,
        node: input.get().ok()?,
        export: input.get().ok()?,
        host: input.get().ok()?,
    })
}

/// A file's memory, shared with later processes that map it.
struct Map {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory; who may write where is said at `write`.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    fn new(file: &File) -> io::Result<Map> {
        let len = file.metadata()?.len() as usize;
        // SAFETY: a fresh mapping of a file that only this process uses (the state
        // directory is locked); it is not cut while it is mapped.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // A slot that is used is no reason to read the others ahead: thousands of sessions may each
        // use one. Without it they are read, and that is all.
        // SAFETY: the mapping is ours; what is in it does not change.
        unsafe { libc::madvise(start, len, libc::MADV_RANDOM) };
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mapped at 0"))?;
        Ok(Map { start, len })
    }

    /// Writes bytes. A slot is written by the one change that uses it at a time; the
    /// header before anybody else has the map.
    fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        // SAFETY: within the mapping; see above for who else writes there.
        unsafe {
            let target = self.start.as_ptr().add(at);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len());
        }
    }

    fn read(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= self.len);
        // SAFETY: within the mapping.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(at), len) }.to_vec()
    }

    /// Gives back memory that was looked at; it comes again out of the file.
    fn rest(&self) {
        // SAFETY: the mapping is ours, and shared with the file: nothing of it is lost
        // (madvise(2), MADV_DONTNEED).
        unsafe { libc::madvise(self.start.as_ptr().cast(), self.len, libc::MADV_DONTNEED) };
    }

    fn u32(&self, at: usize) -> u32 {
        self.half_word(at).load(Ordering::Acquire)
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.len);
        // SAFETY: within the mapping, aligned (mappings begin at a page), only used
        // as an atomic.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(at).cast()) }
    }

    fn half_word(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at + 4 <= self.len);
        // SAFETY: as for `word`.
        unsafe { AtomicU32::from_ptr(self.start.as_ptr().add(at).cast()) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: mapped by us with this length; nobody can refer to it any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

struct FileLog {
    map: Map,
    slots: u32,
    /// Slots that a server before us had used, until they are asked for; none: any may be.
    used: Mutex<Option<Vec<u32>>>,
}

impl FileLog {
    fn slot(&self, slot: u32) -> Option<usize> {
        (slot < self.slots).then(|| place_of(slot))
    }

    fn store(&self, at: usize, sequence: u32, state: u64, op: u8) {
        let word = u64::from(sequence) << 32 | state << 8 | u64::from(op);
        self.map.word(at).store(word, Ordering::Release);
    }

    fn record(&self, at: usize) -> Option<SlotRecord> {
        let word = self.map.word(at).load(Ordering::Acquire);
        let sequence = (word >> 32) as u32;
        match word >> 8 & 0xff {
            STATE_INTENT => {
                let (op, intent) = self.begun(at, word)?;
                Some(SlotRecord::Intent { sequence, op, intent })
            }
            STATE_ANSWER => {
                let len = (self.map.u32(at + 12) as usize).min(ANSWER_MAX_BYTES);
                let answer = self.map.read(at + ANSWER_AT, len);
                let begun = (word as u8 != NOT_BEGUN).then(|| self.begun(at, word)).flatten();
                Some(SlotRecord::Answer { sequence, answer, begun })
            }
            _ => None,
        }
    }

    fn begun(&self, at: usize, word: u64) -> Option<(Op, Vec<u8>)> {
        let op = *Op::ALL.get((word & 0xff) as usize)?;
        let len = (self.map.u32(at + 8) as usize).min(INTENT_MAX_BYTES);
        Some((op, self.map.read(at + INTENT_AT, len)))
    }
}

impl SlotLog for FileLog {
    fn begin(&self, slot: u32, sequence: u32, op: Op, intent: &[u8]) {
        assert!(intent.len() <= INTENT_MAX_BYTES);
        let Some(at) = self.slot(slot) else { return };
        // The answer of the change before stays valid until the last store.
        self.map.half_word(at + 8).store(intent.len() as u32, Ordering::Release);
        self.map.write(at + INTENT_AT, intent);
        self.store(at, sequence, STATE_INTENT, op as u8);
    }

    fn done(&self, slot: u32, sequence: u32, answer: &[u8]) {
        assert!(answer.len() <= ANSWER_MAX_BYTES);
        let Some(at) = self.slot(slot) else { return };
        let word = self.map.word(at).load(Ordering::Acquire);
        // An answer that is noted once more keeps its intent: the change was made again, and the next loss may take it.
        let state = word >> 8 & 0xff;
        let noted =
            (word >> 32) as u32 == sequence && [STATE_INTENT, STATE_ANSWER].contains(&state);
        let begun = if noted { word as u8 } else { NOT_BEGUN };
        self.map.half_word(at + 12).store(answer.len() as u32, Ordering::Release);
        self.map.write(at + ANSWER_AT, answer);
        self.store(at, sequence, STATE_ANSWER, begun);
    }

    fn count(&self) -> u32 {
        self.slots
    }

    fn records(&self) -> Vec<(u32, SlotRecord)> {
        let slot = |slot| Some((slot, self.record(self.slot(slot)?)?));
        // A client that repeats its call has used other slots.
        match self.used.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(used) => used.into_iter().filter_map(slot).collect(),
            None => (0..self.slots).filter_map(slot).collect(),
        }
    }

    fn set_locks(&self, held: bool) {
        self.map.half_word(LOCKS_AT).store(u32::from(held), Ordering::Release);
    }

    fn had_locks(&self) -> bool {
        self.map.u32(LOCKS_AT) != 0
    }

    fn set_leases(&self, may: bool) {
        self.map.half_word(NO_LEASES_AT).store(u32::from(!may), Ordering::Release);
    }

    fn may_have_leases(&self) -> bool {
        self.map.u32(NO_LEASES_AT) == 0
    }

    fn settled(&self) -> Option<Fut<'_, bool>> {
        None
    }
}

#[cfg(test)]
mod tests;
