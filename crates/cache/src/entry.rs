//! One version of a file on the local disk: its data, and which blocks of it are there.

use std::fs::{self, DirBuilder, File, FileTimes};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};
use std::time::SystemTime;

use dray_core::BufMut;

use crate::blocks::{BLOCK_BYTES, BlockSet, blocks_of};
use crate::key::EntryKey;
use crate::map_file::EntryMap;

/// Tries to open files that another process evicts at the same moment.
const OPENS_MAX: usize = 10;
/// The map is written after so many new blocks: 16 MiB.
const UNSAVED_MAX_BLOCKS: u64 = 256;

/// An entry in use. While it is, no process evicts it.
pub(crate) struct CacheEntry {
    pub(crate) key: EntryKey,
    data: File,
    data_path: PathBuf,
    map_path: PathBuf,
    state: Mutex<EntryState>,
    /// Held while the map is written: several threads store blocks.
    saving: Mutex<()>,
    /// Held while blocks are written, and alone when the entry is dropped: nothing is written behind that.
    storing: RwLock<()>,
}

struct EntryState {
    map: EntryMap,
    /// Blocks that the map on disk does not have.
    unsaved: u64,
    /// Open files that read it. When the last one is closed the map is written.
    users: usize,
    /// The entry was dropped: nothing is stored any more.
    dropped: bool,
}

/// Marks a file as in use, by the whole process and until it is closed.
pub(crate) fn lock(file: &File, exclusive: bool) -> io::Result<()> {
    let how = if exclusive { libc::LOCK_EX | libc::LOCK_NB } else { libc::LOCK_SH };
    // SAFETY: no memory is passed.
    match unsafe { libc::flock(file.as_raw_fd(), how) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

impl CacheEntry {
    /// Opens an entry in the cache at `dir`, or makes it. Waits for the disk. Errors: those of the disk.
    pub(crate) fn open(dir: &Path, key: EntryKey) -> io::Result<CacheEntry> {
        let dir = dir.join(key.directory());
        DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        let name = key.name();
        let data_path = dir.join(format!("{name}.data"));
        let map_path = dir.join(format!("{name}.map"));
        let data = open_data(&data_path)?;
        let known = EntryMap::read(&map_path)?.filter(|map| map.key == key);
        if known.is_some() {
            touch(&map_path);
        }
        let empty = EntryMap { key, pinned: false, blocks: BlockSet::default() };
        let state =
            EntryState { map: known.unwrap_or(empty), unsaved: 0, users: 0, dropped: false };
        Ok(CacheEntry {
            key,
            data,
            data_path,
            map_path,
            state: Mutex::new(state),
            saving: Mutex::new(()),
            storing: RwLock::new(()),
        })
    }

    fn state(&self) -> MutexGuard<'_, EntryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that are resident, and whether the entry is pinned.
    pub(crate) fn residence(&self) -> (u64, bool) {
        let state = self.state();
        (state.map.resident_bytes(), state.map.pinned)
    }

    /// Whether all of `at..at + len_bytes` is resident. `len_bytes` > 0, and all is within the file.
    pub(crate) fn has(&self, at: u64, len_bytes: u64) -> bool {
        let (first, end) = (at / BLOCK_BYTES, (at + len_bytes).div_ceil(BLOCK_BYTES));
        self.state().map.blocks.contains_all(first, end)
    }

    /// Appends `len_bytes` from `at` on, which are resident, to `into`. With `at_once` it fails with
    /// `WouldBlock` if the disk would have to be waited for. Errors: those of the disk; then `into` is as it was.
    pub(crate) fn read(
        &self,
        at: u64,
        len_bytes: usize,
        into: &mut BufMut,
        at_once: bool,
    ) -> io::Result<()> {
        let before = into.len();
        let mut left = len_bytes;
        while left > 0 {
            let done = (len_bytes - left) as u64;
            match self.read_some(at + done, left, into, at_once) {
                Ok(0) => {
                    into.truncate(before);
                    return Err(io::ErrorKind::UnexpectedEof.into()); // somebody cut the file
                }
                Ok(count) => left -= count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    into.truncate(before);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn read_some(
        &self,
        at: u64,
        len_bytes: usize,
        into: &mut BufMut,
        at_once: bool,
    ) -> io::Result<usize> {
        let spare: &mut [MaybeUninit<u8>] = &mut into.spare()[..len_bytes];
        let iov = libc::iovec { iov_base: spare.as_mut_ptr().cast(), iov_len: spare.len() };
        let flags = if at_once { libc::RWF_NOWAIT } else { 0 };
        let fd = self.data.as_raw_fd();
        // SAFETY: the kernel writes within the spare part.
        let count = unsafe { libc::preadv2(fd, &iov, 1, at as libc::off_t, flags) };
        if count < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: as many bytes were read.
        unsafe { into.advance(count as usize) };
        Ok(count as usize)
    }

    /// Stores what was read at `at`: whole blocks, and the last one of the file. Answers the number of bytes that
    /// are new. Waits for the disk. Errors: those of the disk.
    pub(crate) fn store(&self, at: u64, data: &[u8]) -> io::Result<u64> {
        let size = self.key.version.size;
        let first = at.div_ceil(BLOCK_BYTES);
        let reached = at + data.len() as u64;
        let end = if reached >= size { blocks_of(size) } else { reached / BLOCK_BYTES };
        if first >= end {
            return Ok(0);
        }
        let (from, to) = (first * BLOCK_BYTES, (end * BLOCK_BYTES).min(size));
        let _storing = self.storing.read().unwrap_or_else(PoisonError::into_inner);
        if self.is_dropped() {
            return Ok(0);
        }
        self.data.write_all_at(&data[(from - at) as usize..(to - at) as usize], from)?;
        let mut state = self.state();
        let before = state.map.blocks.count();
        (first..end).for_each(|block| state.map.blocks.insert(block));
        let new = state.map.blocks.count() - before;
        state.unsaved += new;
        Ok(new * BLOCK_BYTES)
    }

    /// Whether the map is to be written now. What is stored after the last file was closed is noted at once:
    /// nobody comes later to do so.
    pub(crate) fn is_due(&self) -> bool {
        let state = self.state();
        state.unsaved >= UNSAVED_MAX_BLOCKS || (state.users == 0 && state.unsaved > 0)
    }

    pub(crate) fn add_user(&self) {
        self.state().users += 1;
    }

    pub(crate) fn remove_user(&self) {
        self.state().users -= 1;
    }

    /// Notes on media what has been stored. Waits for the disk. Errors: those of the disk.
    pub(crate) fn save(&self) -> io::Result<()> {
        let _saving = self.saving();
        let (map, unsaved) = {
            let state = self.state();
            if state.unsaved == 0 || state.dropped {
                return Ok(());
            }
            (state.map.clone(), state.unsaved)
        };
        self.data.sync_data()?;
        self.write_map(map)?;
        self.state().unsaved -= unsaved;
        Ok(())
    }

    fn saving(&self) -> MutexGuard<'_, ()> {
        self.saving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Other processes may have stored further blocks. To be called with `saving` held.
    fn write_map(&self, mut map: EntryMap) -> io::Result<()> {
        if self.data.metadata()?.nlink() == 0 {
            return Ok(()); // another process has dropped it: a map would be of data that are not there
        }
        if let Some(known) = EntryMap::read(&self.map_path)?.filter(|known| known.key == map.key) {
            map.blocks.join(&known.blocks);
        }
        if !self.state().dropped {
            map.write(&self.map_path)?;
        }
        Ok(())
    }

    /// Keeps the entry from eviction, or no more. Errors: those of the disk.
    pub(crate) fn pin(&self, pinned: bool) -> io::Result<()> {
        let _saving = self.saving();
        let map = {
            let mut state = self.state();
            state.map.pinned = pinned;
            state.map.clone()
        };
        self.data.sync_data()?;
        self.write_map(map)
    }

    /// Takes the entry off the disk. Its users read from the server from now on.
    pub(crate) fn take_away(&self) {
        let _storing = self.storing.write().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.state();
        if std::mem::replace(&mut state.dropped, true) {
            return; // what has the name now is another one
        }
        state.map.blocks = BlockSet::default();
        let _ = fs::remove_file(&self.map_path); // it may not have been written yet
        let _ = fs::remove_file(&self.data_path); // or be gone already
    }
}

/// An entry as a file that somebody else reads.
impl CacheEntry {
    pub(crate) fn is_dropped(&self) -> bool {
        self.state().dropped
    }

    /// Whether the data file is the file, from beginning to end.
    pub(crate) fn is_whole(&self) -> bool {
        let size = self.key.version.size;
        let has_all = self.state().map.blocks.count() == blocks_of(size);
        has_all && self.data.metadata().is_ok_and(|stat| stat.len() == size)
    }

    pub(crate) fn data(&self) -> BorrowedFd<'_> {
        self.data.as_fd()
    }

    /// Drops the entry, so that no crash brings it back: its data are about to be others. Waits for the disk. Errors:
    /// those of the disk.
    pub(crate) fn leave_the_cache(&self) -> io::Result<()> {
        self.take_away();
        self.data_path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
    }

    /// Overwrites data of an entry that has left the cache. Errors: those of the disk.
    pub(crate) fn replace(&self, at: u64, data: &[u8]) -> io::Result<()> {
        assert!(self.is_dropped(), "a version in the cache does not change");
        self.data.write_all_at(data, at)
    }

    /// Sets the length of an entry that has left the cache, bytes. Errors: those of the disk.
    pub(crate) fn cut(&self, len_bytes: u64) -> io::Result<()> {
        assert!(self.is_dropped(), "a version in the cache does not change");
        self.data.set_len(len_bytes)
    }
}

/// Notes that the entry is used now.
fn touch(map_path: &Path) {
    let times = FileTimes::new().set_modified(SystemTime::now());
    let _ = File::open(map_path).and_then(|map| map.set_times(times)); // it is evicted sooner else
}

/// The data, marked as in use.
fn open_data(path: &Path) -> io::Result<File> {
    for _ in 0..OPENS_MAX {
        let data = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)?;
        lock(&data, false)?;
        // Else it was evicted between the two.
        if data.metadata()?.nlink() > 0 {
            return Ok(data);
        }
    }
    Err(io::ErrorKind::ResourceBusy.into())
}
