//! The file system of the cache is full.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use dray_core::{Attr, BufMut, FileId, FsUuid};

use crate::entry::CacheEntry;
use crate::options::CacheOptions;
use crate::rules::CacheRules;
use crate::store::LocalCache;
use crate::tests::{content, run};
use crate::{BLOCK_BYTES, EntryKey, FileVersion, eviction};

const ENTRY_BLOCKS: u64 = 8;
const ENTRY_BYTES: u64 = ENTRY_BLOCKS * BLOCK_BYTES;

/// A tmpfs of its own, for as long as a test takes.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    /// None: nothing can be mounted here.
    fn new(size_bytes: u64) -> Option<SmallDisk> {
        let dir = tempfile::tempdir().unwrap();
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size_bytes},mode=700"), "none"])
            .arg(dir.path())
            .output();
        if !mount.is_ok_and(|output| output.status.success()) {
            eprintln!("skipped: no tmpfs can be mounted");
            return None;
        }
        Some(SmallDisk(dir))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Another program takes all that is left.
    fn fill(&self) -> PathBuf {
        let path = self.path().join("filler");
        let _ = std::io::copy(&mut std::io::repeat(1), &mut fs::File::create(&path).unwrap());
        path
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).status(); // it may be gone
    }
}

/// A cache that thinks it has room for a gibibyte.
fn cache_at(disk: &SmallDisk) -> Arc<LocalCache> {
    let dir = disk.path().join("cache");
    LocalCache::open(CacheOptions { dir, size_bytes: 1 << 30, rules: CacheRules::default() })
        .unwrap()
}

async fn entry(cache: &Arc<LocalCache>, ino: u64) -> Arc<CacheEntry> {
    let version = FileVersion::of(&Attr { size: ENTRY_BYTES, ..Attr::default() });
    let key = EntryKey { fs: FsUuid(1), id: FileId { ino, generation: 1 }, version };
    cache.entry(key).await.unwrap()
}

fn store(cache: &LocalCache, entry: &CacheEntry) {
    cache.store_now(entry, 0, &content(ENTRY_BYTES as usize));
}

fn kept(cache: &LocalCache) -> Vec<u64> {
    let list = eviction::list(cache.dir()).unwrap();
    let mut kept: Vec<u64> = list.iter().map(|entry| entry.map.key.id.ino).collect();
    kept.sort();
    kept
}

// proves: P410
#[test]
fn a_full_disk_evicts_by_use_and_never_what_is_pinned_or_in_use() {
    let Some(disk) = SmallDisk::new(6 * ENTRY_BYTES) else { return };
    run(async {
        let cache = cache_at(&disk);
        let in_use = entry(&cache, 2).await;
        for ino in [1, 2, 3, 4] {
            let entry = entry(&cache, ino).await;
            store(&cache, &entry);
            if ino == 1 {
                entry.pin(true).unwrap();
            }
        }
        assert_eq!(kept(&cache), [1, 2, 3, 4]);
        disk.fill();
        for ino in 5..9 {
            let entry = entry(&cache, ino).await;
            store(&cache, &entry);
            assert!(entry.has(0, ENTRY_BYTES), "{ino}");
            assert_eq!(cache.counts.errors.load(Ordering::SeqCst), 0, "{ino}");
        }
        assert!(kept(&cache).starts_with(&[1, 2]) && kept(&cache).ends_with(&[8]));
        assert!(!kept(&cache).contains(&3), "it was used least lately");
        assert!(cache.counts.evicted_bytes.load(Ordering::SeqCst) >= 2 * ENTRY_BYTES);
        let mut read = BufMut::heap(ENTRY_BYTES as usize);
        in_use.read(0, ENTRY_BYTES as usize, &mut read, false).unwrap();
        assert_eq!(read.filled(), content(ENTRY_BYTES as usize));
    });
}

/// Nothing may go: what was read is not kept, and it is said why.
// proves: P410
#[test]
fn a_full_disk_without_anything_to_evict_is_left_alone() {
    let Some(disk) = SmallDisk::new(4 * ENTRY_BYTES) else { return };
    run(async {
        let cache = cache_at(&disk);
        let (pinned, late) = (entry(&cache, 1).await, entry(&cache, 2).await);
        store(&cache, &pinned);
        pinned.pin(true).unwrap();
        let filler = disk.fill();
        store(&cache, &late);
        assert!(!late.has(0, ENTRY_BYTES) && cache.is_paused());
        assert_eq!(cache.trouble().errno(), dray_core::Errno::ENOSPC);
        assert_eq!(cache.counts.errors.load(Ordering::SeqCst), 1);
        assert_eq!(kept(&cache), [1]);
        fs::remove_file(filler).unwrap();
        store(&cache, &late);
        assert!(late.has(0, ENTRY_BYTES), "the disk has room again");
    });
}
