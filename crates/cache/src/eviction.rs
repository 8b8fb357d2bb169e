//! What lies in a cache's directory, and what is taken away when there is too much.

use std::fs::{self, DirEntry, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::entry::lock;
use crate::map_file::EntryMap;

/// Eviction begins above this share of the size, and goes on down to the other one.
const HIGH_PERCENT: u64 = 95;
const LOW_PERCENT: u64 = 85;
/// Data without a map that are so old belong to nobody.
const ORPHAN_AGE: Duration = Duration::from_secs(3600);

/// An entry as it lies on the disk.
#[derive(Clone, Debug)]
pub struct CacheUse {
    /// What it is.
    pub map: EntryMap,
    /// Bytes that it takes of the disk.
    pub disk_bytes: u64,
    /// When it was opened last.
    pub used: SystemTime,
    data: PathBuf,
    map_path: PathBuf,
}

impl CacheUse {
    /// The file that says which blocks there are.
    #[cfg(test)]
    pub(crate) fn map_path(&self) -> PathBuf {
        self.map_path.clone()
    }
}

/// In each directory of a cache, from its first use on.
const MARKER: &str = "dray-cache";

/// Marks `dir` as a cache. Errors: those of the disk.
pub(crate) fn mark(dir: &Path) -> io::Result<()> {
    File::options().append(true).create(true).mode(0o600).open(dir.join(MARKER)).map(drop)
}

/// Whether `dir` is a cache, also one of before caches were marked. Errors: those of the disk.
pub fn is_cache(dir: &Path) -> io::Result<bool> {
    if dir.join(MARKER).try_exists()? {
        return Ok(true);
    }
    for system in fs::read_dir(dir)? {
        if is_of_a_file_system(&system?)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether entries of some file system are in it.
fn is_of_a_file_system(entry: &DirEntry) -> io::Result<bool> {
    let name = entry.file_name();
    let is_hexadecimal = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
    let bytes = name.as_encoded_bytes();
    Ok(bytes.len() == 32 && bytes.iter().all(is_hexadecimal) && entry.file_type()?.is_dir())
}

/// All entries of the cache at `dir`. Errors: those of the disk.
pub fn list(dir: &Path) -> io::Result<Vec<CacheUse>> {
    let mut list = Vec::new();
    for system in fs::read_dir(dir)? {
        let system = system?;
        if !is_of_a_file_system(&system)? {
            continue; // whatever it is, it is not ours
        }
        for file in fs::read_dir(system.path())? {
            let data = file?.path();
            if data.extension().is_none_or(|ending| ending != "data") {
                continue;
            }
            list.extend(entry_at(data)?);
        }
    }
    Ok(list)
}

/// None: it has just gone, or is without a map so far.
fn entry_at(data: PathBuf) -> io::Result<Option<CacheUse>> {
    let map_path = data.with_extension("map");
    let Ok(stat) = fs::metadata(&data) else { return Ok(None) };
    let disk_bytes = stat.blocks() * 512;
    let Some(map) = EntryMap::read(&map_path)? else {
        let age = stat.modified()?.elapsed().unwrap_or_default();
        if age > ORPHAN_AGE && is_unused(&data) {
            let _ = fs::remove_file(&data); // somebody else may have done so
        }
        return Ok(None);
    };
    let used = fs::metadata(&map_path).and_then(|map| map.modified());
    let used = used.unwrap_or(SystemTime::UNIX_EPOCH);
    Ok(Some(CacheUse { map, disk_bytes, used, data, map_path }))
}

/// Whether no process has the data open.
fn is_unused(data: &Path) -> bool {
    File::open(data).is_ok_and(|file| lock(&file, true).is_ok())
}

/// Bytes that all entries take. Errors: those of the disk.
pub fn usage(dir: &Path) -> io::Result<u64> {
    Ok(total_bytes(&list(dir)?))
}

/// Takes the entries away that were used least lately, until the rest is within `size_bytes`. Entries that are pinned
/// or in use stay. Answers whether there is room now. Errors: those of the disk.
pub(crate) fn evict(dir: &Path, size_bytes: u64) -> io::Result<bool> {
    let Some(_turn) = turn(dir)? else { return Ok(true) }; // another process is at it
    let entries = list(dir)?;
    let total = total_bytes(&entries);
    let (high, low) = (size_bytes / 100 * HIGH_PERCENT, size_bytes / 100 * LOW_PERCENT);
    if total <= high {
        return Ok(true);
    }
    Ok(total - remove_by_use(entries, total.saturating_sub(low)) <= high)
}

/// The same when the disk is full, as if the entries had reached the high-water mark. At least `need_bytes` are freed,
/// if they are there. Answers how many bytes were freed. Errors: those of the disk.
pub(crate) fn evict_from_full_disk(dir: &Path, need_bytes: u64) -> io::Result<u64> {
    let Some(_turn) = turn(dir)? else { return Ok(0) }; // another process is at it
    let entries = list(dir)?;
    let surplus = total_bytes(&entries) / HIGH_PERCENT * (HIGH_PERCENT - LOW_PERCENT);
    Ok(remove_by_use(entries, surplus.max(need_bytes).max(1)))
}

/// The right to evict, for one process at a time. It takes nothing of a disk that may be full.
fn turn(dir: &Path) -> io::Result<Option<File>> {
    let guard = File::open(dir)?;
    Ok(lock(&guard, true).is_ok().then_some(guard))
}

fn total_bytes(entries: &[CacheUse]) -> u64 {
    entries.iter().map(|entry| entry.disk_bytes).sum()
}

/// Answers how many bytes were freed: as many as are wanted, or more, or all that may go.
fn remove_by_use(mut entries: Vec<CacheUse>, wanted_bytes: u64) -> u64 {
    entries.sort_by_key(|entry| entry.used);
    let mut freed_bytes = 0;
    for entry in entries.iter().filter(|entry| !entry.map.pinned) {
        if freed_bytes >= wanted_bytes {
            break;
        }
        if remove(entry) {
            freed_bytes += entry.disk_bytes;
        }
    }
    freed_bytes
}

/// The map goes first: a map without data would say too much.
fn remove(entry: &CacheUse) -> bool {
    let Ok(data) = File::open(&entry.data) else { return false };
    if lock(&data, true).is_err() {
        return false; // it is in use
    }
    fs::remove_file(&entry.map_path).and_then(|()| fs::remove_file(&entry.data)).is_ok()
}

/// Takes all entries away that no process has open. Answers how many. Errors: those of the disk.
pub fn clear(dir: &Path) -> io::Result<usize> {
    Ok(list(dir)?.iter().filter(|entry| remove(entry)).count())
}
