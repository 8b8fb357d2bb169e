//! Pending data in a mapped file, so that they survive the death of the server process.
//!
//! ```text
//! 0     8  magic and version          slot n at 4096 + 512 n:
//! 8     8  slots                      0    8  state: 0 free, 1 or 2: bank 0 or 1 holds
//! 16   16  the boot of the machine    8   16  file
//! 32   16  the file system            24   8  number of the block in the file
//!                                     32   8  1: set-id bits are to be cleared
//! block n behind all slots, at        64 136  bank 0: count, then extents
//! a multiple of a block               256     bank 1
//! ```
//! A write copies its data, then notes the extents in the bank that does not hold, then switches the
//! banks by one store. Whatever instruction the process dies at, all acknowledged data are found. A loss of
//! power can tear all that, so that nothing is believed of an earlier boot: clients send it again.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use dray_core::{Buf, BufMut, FileId, FsUuid, Memory};

use super::BLOCK_BYTES;
use super::extents::{BlockExtent, EXTENTS_MAX, Extents};
use super::map::Map;

/// "draypd" and, in the last byte, the version of the layout, 1.
const MAGIC: u64 = u64::from_le_bytes(*b"draypd\0\x01");
const HEADER_BYTES: usize = 4096;
const SLOT_BYTES: usize = 512;
const BANKS_AT: [usize; 2] = [64, 256];
const FREE: u64 = 0;
const EXTENT_BYTES: usize = 8;
const _: () = assert!(BANKS_AT[0] + 8 + EXTENTS_MAX * EXTENT_BYTES <= BANKS_AT[1]);
const _: () = assert!(BANKS_AT[1] + 8 + EXTENTS_MAX * EXTENT_BYTES <= SLOT_BYTES);

/// Most slots of a file.
pub(super) const SLOTS_MAX: usize = 65_536;

/// To which time and file system pending data belong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PendingEra {
    /// The start of the machine.
    pub boot: u128,
    /// The file system.
    pub uuid: FsUuid,
}

/// The mapped file, locked as long as it is in use.
pub(super) struct PendingStore {
    map: Map,
    slots: usize,
    free: Mutex<Vec<usize>>,
    _locked: File,
}

impl PendingStore {
    /// A new store of `slots` blocks, in the place of one that holds nothing. Errors: those of the
    /// file, `ENOSPC` among them, and `EAGAIN`: another process or another opening uses it.
    pub(super) fn create(
        path: &Path,
        slots: usize,
        era: PendingEra,
    ) -> io::Result<Arc<PendingStore>> {
        let slots = slots.clamp(1, SLOTS_MAX);
        let file = open_locked(path, true)?;
        file.set_len(0)?;
        write_in_place(&file);
        reserve(&file, blocks_at(slots) + slots * BLOCK_BYTES)?;
        let map = Map::new(&file)?;
        map.word(8).store(slots as u64, Ordering::Release);
        map.write(16, &era.boot.to_le_bytes());
        map.write(32, &era.uuid.0.to_le_bytes());
        map.word(0).store(MAGIC, Ordering::Release);
        let free = Mutex::new((0..slots).rev().collect());
        Ok(Arc::new(PendingStore { map, slots, free, _locked: file }))
    }

    /// What an earlier server has left. None: there is no file. Errors: those of the file, and of
    /// [`PendingStore::create`].
    pub(super) fn left(path: &Path, era: PendingEra) -> io::Result<Option<Vec<LeftBlock>>> {
        let file = match open_locked(path, false) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        let Some(slots) = slots_of(&file, era)? else { return Ok(Some(Vec::new())) };
        let map = Map::new(&file)?;
        if map.len_bytes() < blocks_at(slots) + slots * BLOCK_BYTES {
            return Ok(Some(Vec::new()));
        }
        let free = Mutex::default();
        let store = Arc::new(PendingStore { map, slots, free, _locked: file });
        Ok(Some((0..slots).filter_map(|slot| store.left_in(slot)).collect()))
    }

    fn left_in(self: &Arc<Self>, slot: usize) -> Option<LeftBlock> {
        let at = slot_at(slot);
        let bank = match self.map.word(at).load(Ordering::Acquire) {
            1 => BANKS_AT[0],
            2 => BANKS_AT[1],
            _ => return None,
        };
        let word = |at| self.map.word(at).load(Ordering::Acquire);
        let half = |at| self.map.half_word(at).load(Ordering::Acquire);
        let count = usize::try_from(word(at + bank)).ok().filter(|count| *count <= EXTENTS_MAX)?;
        let places = (0..count).map(|number| at + bank + 8 + number * EXTENT_BYTES);
        let list: Vec<_> =
            places.map(|place| BlockExtent { start: half(place), end: half(place + 4) }).collect();
        let extents = Extents::checked(&list, BLOCK_BYTES as u32)?;
        Some(LeftBlock {
            id: FileId { ino: word(at + 8), generation: word(at + 16) },
            block: word(at + 24),
            kill_set_id: word(at + 32) == 1,
            extents,
            lease: Arc::new(SlotLease { store: self.clone(), slot, kept: AtomicBool::new(false) }),
        })
    }

    /// A free slot; none: all are in use.
    pub(super) fn lease(self: &Arc<Self>) -> Option<Arc<SlotLease>> {
        let slot = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
        let kept = AtomicBool::new(false);
        Some(Arc::new(SlotLease { store: self.clone(), slot, kept }))
    }
}

/// A block that an earlier server has not written.
pub(super) struct LeftBlock {
    pub(super) id: FileId,
    pub(super) block: u64,
    pub(super) kill_set_id: bool,
    pub(super) extents: Extents,
    pub(super) lease: Arc<SlotLease>,
}

/// A slot that is in use. It is free again when nothing refers to it, buffers included.
pub(super) struct SlotLease {
    store: Arc<PendingStore>,
    slot: usize,
    /// What it holds is the next server's.
    kept: AtomicBool,
}

impl Memory for SlotLease {}

impl SlotLease {
    /// Says whose data it will hold.
    pub(super) fn begin(&self, id: FileId, block: u64, kill_set_id: bool) {
        let (map, at) = (&self.store.map, slot_at(self.slot));
        map.word(at + 8).store(id.ino, Ordering::Release);
        map.word(at + 16).store(id.generation, Ordering::Release);
        map.word(at + 24).store(block, Ordering::Release);
        map.word(at + 32).store(u64::from(kill_set_id), Ordering::Release);
    }

    /// Copies data in, at byte `at` of the block.
    pub(super) fn write(&self, at: u32, bytes: &[u8]) {
        assert!(at as usize + bytes.len() <= BLOCK_BYTES);
        self.store.map.write(self.block_at() + at as usize, bytes);
    }

    /// From now on these bytes of the block are pending.
    pub(super) fn note(&self, extents: &Extents) {
        let (map, at) = (&self.store.map, slot_at(self.slot));
        let next = if map.word(at).load(Ordering::Acquire) == 1 { 1 } else { 0 };
        let bank = at + BANKS_AT[next];
        let mut count = 0;
        for (number, one) in extents.iter().enumerate() {
            let place = bank + 8 + number * EXTENT_BYTES;
            map.half_word(place).store(one.start, Ordering::Release);
            map.half_word(place + 4).store(one.end, Ordering::Release);
            count += 1;
        }
        map.word(bank).store(count, Ordering::Release);
        map.word(at).store(next as u64 + 1, Ordering::SeqCst);
    }

    /// Nothing of it is pending any more.
    pub(super) fn clear(&self) {
        self.store.map.word(slot_at(self.slot)).store(FREE, Ordering::SeqCst);
    }

    /// Leaves what it holds to the next opening of the export.
    pub(super) fn keep(&self) {
        self.kept.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_kept(&self) -> bool {
        self.kept.load(Ordering::SeqCst)
    }

    /// The bytes of `extent`, which must be pending.
    pub(super) fn bytes(&self, extent: BlockExtent) -> &[u8] {
        self.store.map.slice(self.block_at(), extent)
    }

    /// The same without a copy. While the buffer lives, nobody may write to the slot.
    pub(super) fn buf(self: &Arc<Self>, extent: BlockExtent) -> Buf {
        let (at, len_bytes) = (self.block_at() + extent.start as usize, extent.len_bytes());
        let start = self.store.map.place(at, len_bytes);
        // SAFETY: the lease keeps the mapping. A block that is being written takes no more data, and
        // its slot is used for another block only when the last lease has gone.
        let mut buffer = unsafe { BufMut::over(start, len_bytes, self.clone()) };
        // SAFETY: all bytes of a mapping are initialised.
        unsafe { buffer.advance(len_bytes) };
        buffer.freeze()
    }

    fn block_at(&self) -> usize {
        blocks_at(self.store.slots) + self.slot * BLOCK_BYTES
    }
}

impl Drop for SlotLease {
    fn drop(&mut self) {
        if !*self.kept.get_mut() {
            let free = &self.store.free;
            free.lock().unwrap_or_else(PoisonError::into_inner).push(self.slot);
        }
    }
}

fn slot_at(slot: usize) -> usize {
    HEADER_BYTES + slot * SLOT_BYTES
}

fn blocks_at(slots: usize) -> usize {
    (HEADER_BYTES + slots * SLOT_BYTES).next_multiple_of(BLOCK_BYTES)
}

/// The slots of a file that holds something of this era. The file is read, because a disk that cannot
/// be read would kill a process that looks at mapped memory (SIGBUS).
fn slots_of(file: &File, era: PendingEra) -> io::Result<Option<usize>> {
    let mut head = [0; 48];
    match file.read_exact_at(&mut head, 0) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let word = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().unwrap_or_default());
    let long = |at: usize| u128::from_le_bytes(head[at..at + 16].try_into().unwrap_or_default());
    if word(0) != MAGIC {
        return Ok(None);
    }
    if long(16) != era.boot || long(32) != era.uuid.0 {
        log::info!("pending data of an earlier boot or of another file system are left out");
        return Ok(None);
    }
    Ok(usize::try_from(word(8)).ok().filter(|slots| (1..=SLOTS_MAX).contains(slots)))
}

fn open_locked(path: &Path, make: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(make).truncate(false).mode(0o600);
    let file = options.open(path)?;
    // SAFETY: no memory is passed; the descriptor is open.
    match unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } {
        0 => Ok(file),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Takes all blocks from the disk. Once the disk is full, a store to mapped memory without a block
/// behind it would kill the process (SIGBUS).
fn reserve(file: &File, bytes: usize) -> io::Result<()> {
    // SAFETY: no memory is passed; the descriptor is open.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, bytes as libc::off_t) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Has btrfs overwrite in place. Otherwise a page that is changed takes a new block, and a full disk has
/// none (SIGBUS). The file must be empty.
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

#[cfg(test)]
mod tests {
    use super::*;

    const ERA: PendingEra = PendingEra { boot: 5, uuid: FsUuid(7) };
    const ID: FileId = FileId { ino: 3, generation: 4 };

    fn scratch(name: &str) -> std::path::PathBuf {
        std::env::temp_dir().join(format!("dray-pending-{name}-{}", std::process::id()))
    }

    fn pending(lease: &SlotLease, at: u32, bytes: &[u8], before: &Extents) -> Extents {
        let end = at + bytes.len() as u32;
        let extents = before.with(BlockExtent { start: at, end }).unwrap();
        lease.write(at, bytes);
        lease.note(&extents);
        extents
    }

    #[test]
    fn what_is_noted_is_found_by_the_next_process() {
        let path = scratch("noted");
        let store = PendingStore::create(&path, 4, ERA).unwrap();
        let (first, second) = (store.lease().unwrap(), store.lease().unwrap());
        first.begin(ID, 9, true);
        let extents = pending(&first, 10, b"hello", &Extents::default());
        let extents = pending(&first, 15, b" world", &extents);
        second.begin(ID, 10, false);
        pending(&second, 0, b"gone", &Extents::default());
        second.clear();
        assert!(PendingStore::left(&path, ERA).is_err(), "it is in use");
        first.keep();
        drop((first, second, store));
        let left = PendingStore::left(&path, ERA).unwrap().unwrap();
        assert_eq!(left.len(), 1);
        let one = &left[0];
        assert_eq!((one.id, one.block, one.kill_set_id), (ID, 9, true));
        assert_eq!(one.extents, extents);
        assert_eq!(&*one.lease.buf(BlockExtent { start: 10, end: 21 }), b"hello world");
        drop(left);
        std::fs::remove_file(&path).unwrap();
        assert!(PendingStore::left(&path, ERA).unwrap().is_none());
    }

    /// A loss of power can have torn them.
    #[test]
    fn what_is_of_another_boot_or_file_system_is_not_believed() {
        let path = scratch("boot");
        let store = PendingStore::create(&path, 1, ERA).unwrap();
        let lease = store.lease().unwrap();
        lease.begin(ID, 0, false);
        pending(&lease, 0, b"x", &Extents::default());
        lease.keep();
        drop((lease, store));
        let count = |era| PendingStore::left(&path, era).unwrap().unwrap().len();
        assert_eq!(count(PendingEra { boot: 6, ..ERA }), 0);
        assert_eq!(count(PendingEra { uuid: FsUuid(8), ..ERA }), 0);
        assert_eq!(count(ERA), 1);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn garbage_is_nothing() {
        let path = scratch("garbage");
        for content in [&b""[..], b"x", &[0xff; 8192]] {
            std::fs::write(&path, content).unwrap();
            assert_eq!(PendingStore::left(&path, ERA).unwrap().unwrap().len(), 0);
        }
        let store = PendingStore::create(&path, 1, ERA).unwrap();
        let lease = store.lease().unwrap();
        lease.begin(ID, 0, false);
        pending(&lease, 0, b"x", &Extents::default());
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        lease.keep();
        drop((lease, store));
        // The count of extents, then an extent behind the block's end.
        for (at, bytes) in [(0, 17u64.to_le_bytes()), (8, [0xff; 8])] {
            let bank = slot_at(0) + BANKS_AT[0];
            file.write_all_at(&1u64.to_le_bytes(), bank as u64).unwrap();
            file.write_all_at(&bytes, (bank + at) as u64).unwrap();
            assert_eq!(PendingStore::left(&path, ERA).unwrap().unwrap().len(), 0);
        }
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_slot_is_used_again_when_its_last_buffer_has_gone() {
        let path = scratch("again");
        let store = PendingStore::create(&path, 1, ERA).unwrap();
        let lease = store.lease().unwrap();
        lease.write(0, b"abc");
        let buffer = lease.buf(BlockExtent { start: 0, end: 3 });
        drop(lease);
        assert!(store.lease().is_none());
        assert_eq!(&*buffer, b"abc");
        drop(buffer);
        assert!(store.lease().is_some());
        std::fs::remove_file(&path).unwrap();
    }
}
