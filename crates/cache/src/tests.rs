//! A file system in memory behind a cache in a temporary directory.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_core::{
    Attr, Buf, BufMut, Context, FileId, FileSystem, Name, OpenFile, OpenHow, Write, XattrSet,
};
use dray_rt::{DriverKind, Executor};

use crate::fs::{CachedFs, LeasedAttributes, VersionSource};
use crate::options::CacheOptions;
use crate::rules::CacheRules;
use crate::store::{LocalCache, MountFacts};
use crate::{BLOCK_BYTES, STATE_XATTR, eviction};

/// What a server would say under leases, if it gives any.
struct TestLeases {
    fs: MemoryFs,
    leased: AtomicBool,
}

impl LeasedAttributes for TestLeases {
    fn leased(&self, id: FileId) -> Option<Attr> {
        if !self.leased.load(Ordering::SeqCst) {
            return None;
        }
        let (fs, cx) = (self.fs.clone(), Context::system());
        let waker = std::task::Waker::noop();
        let mut getting = fs.getattr(&cx, id);
        match getting.as_mut().poll(&mut std::task::Context::from_waker(waker)) {
            std::task::Poll::Ready(attr) => attr.ok(),
            std::task::Poll::Pending => None,
        }
    }
}

struct Site {
    below: MemoryFs,
    leases: Arc<TestLeases>,
    cache: Arc<LocalCache>,
    fs: CachedFs,
}

impl Site {
    fn new(dir: &Path, below: &MemoryFs, size_bytes: u64) -> Site {
        let rules = CacheRules::default();
        Site::with(CacheOptions { dir: dir.to_owned(), size_bytes, rules }, below)
    }

    fn with(options: CacheOptions, below: &MemoryFs) -> Site {
        let cache = LocalCache::open(options).unwrap();
        let leases = Arc::new(TestLeases { fs: below.clone(), leased: AtomicBool::new(true) });
        let fs = CachedFs::new(
            Arc::new(below.clone()),
            VersionSource::Leases(leases.clone()),
            cache.clone(),
        );
        Site { below: below.clone(), leases, cache, fs }
    }

    async fn open(&self, id: FileId) -> Arc<dyn OpenFile> {
        let read_only = OpenHow::new(libc::O_RDONLY);
        self.fs.open(&Context::system(), id, read_only).await.unwrap()
    }

    fn count(&self, of: impl Fn(&crate::CacheCounts) -> &AtomicU64) -> u64 {
        of(&self.cache.counts).load(Ordering::SeqCst)
    }

    /// Waits until all that was read has been stored.
    async fn stored(&self, bytes: u64) {
        soon(|| self.count(|counts| &counts.stored_bytes) >= bytes).await;
    }

    async fn state(&self, id: FileId) -> String {
        let state = self.fs.getxattr(&Context::system(), id, STATE_XATTR).await.unwrap();
        String::from_utf8(state).unwrap()
    }

    async fn order(&self, id: FileId, order: &str) -> dray_core::Result<()> {
        let (cx, order) = (Context::system(), order.as_bytes());
        self.fs.setxattr(&cx, id, STATE_XATTR, order, XattrSet::Any).await
    }
}

/// Waits for what threads do; not for ever.
pub(crate) async fn soon(done: impl Fn() -> bool) {
    for _ in 0..2000 {
        if done() {
            return;
        }
        dray_rt::sleep(Duration::from_millis(5)).await;
    }
    panic!("it has not come within 10 s");
}

pub(crate) fn memory() -> MemoryFs {
    MemoryFs::new(MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() })
}

/// A file whose times are past.
pub(crate) async fn make(fs: &MemoryFs, name: &str, content: &[u8]) -> FileId {
    let (cx, name) = (Context::system(), Name::new(name.as_bytes()).unwrap());
    let root = fs.info().root;
    fs.put(&cx, root, name, 0o644, Buf::from(content)).await.unwrap();
    dray_rt::sleep(Duration::from_millis(150)).await;
    fs.lookup(&cx, root, name).await.unwrap().id
}

pub(crate) async fn read(file: &dyn OpenFile, at: u64, len_bytes: usize) -> Vec<u8> {
    let into = BufMut::heap(len_bytes);
    let read = file.read(&Context::system(), at, into).await;
    read.unwrap_or_else(|(error, _)| panic!("{error:?}")).filled().to_vec()
}

pub(crate) fn run(test: impl Future<Output = ()>) {
    Executor::new(DriverKind::Epoll).unwrap().block_on(test);
}

pub(crate) fn content(len_bytes: usize) -> Vec<u8> {
    (0..len_bytes).map(|at| (at / 7 + at % 251) as u8).collect()
}

pub(crate) const SIZE: usize = 3 * BLOCK_BYTES as usize + 1000;

// proves: P222
#[test]
fn what_was_read_is_there_for_the_next_process_and_never_after_a_change() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let (below, expected) = (memory(), content(SIZE));
        let id = make(&below, "file", &expected).await;
        let site = Site::new(&dir.path().join("cache"), &below, 1 << 30);
        let file = site.open(id).await;
        // A small read brings its block, and the last one is shorter.
        for at in [100, BLOCK_BYTES * 3 + 10] {
            assert_eq!(read(&*file, at, 50).await, expected[at as usize..at as usize + 50]);
        }
        site.stored(2 * BLOCK_BYTES).await;
        assert_eq!(read(&*file, 0, 300).await, expected[..300]);
        assert_eq!(read(&*file, SIZE as u64 - 100, 4096).await, expected[SIZE - 100..]);
        assert!(read(&*file, SIZE as u64, 10).await.is_empty());
        assert_eq!((site.count(|c| &c.hits), site.count(|c| &c.misses)), (2, 2));
        assert_eq!(read(&*file, 10, SIZE).await, expected[10..]);
        site.stored(4 * BLOCK_BYTES).await;
        drop(file);
        soon(|| !eviction::list(&dir.path().join("cache")).unwrap().is_empty()).await;
        // Another process: the server is not asked for data.
        let next = Site::new(&dir.path().join("cache"), &below, 1 << 30);
        let file = next.open(id).await;
        assert_eq!(read(&*file, 0, SIZE + 10).await, expected);
        assert_eq!((next.count(|c| &c.hits), next.count(|c| &c.misses)), (1, 0));
        assert_eq!(next.state(id).await, format!("resident={SIZE} size={SIZE} pinned=no"));
        // Others change the file.
        let cx = Context::system();
        let writes = below.open(&cx, id, OpenHow::READ_WRITE).await.unwrap();
        writes.write(&cx, Write::at(5), Buf::from(&b"changed"[..])).await.unwrap();
        assert_eq!(read(&*file, 5, 7).await, b"changed");
        assert_eq!(read(&*next.open(id).await, 5, 7).await, b"changed");
    });
}

#[test]
fn without_a_lease_each_read_goes_to_the_server() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let (below, expected) = (memory(), content(SIZE));
        let id = make(&below, "file", &expected).await;
        let site = Site::new(&dir.path().join("cache"), &below, 1 << 30);
        let file = site.open(id).await;
        read(&*file, 0, SIZE).await;
        site.stored(4 * BLOCK_BYTES).await;
        site.leases.leased.store(false, Ordering::SeqCst);
        assert_eq!(read(&*file, 0, 10).await, expected[..10]);
        assert_eq!((site.count(|c| &c.hits), site.count(|c| &c.unleased)), (0, 1));
        site.leases.leased.store(true, Ordering::SeqCst);
        assert_eq!(read(&*file, 0, 10).await, expected[..10]);
        assert_eq!(site.count(|c| &c.hits), 1);
    });
}

/// Times are coarse: a change soon after another could leave a version with the name of the one before.
#[test]
fn a_file_that_has_just_changed_is_not_kept() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let below = memory();
        let (cx, name) = (Context::system(), Name::new(b"file").unwrap());
        let root = below.info().root;
        below.put(&cx, root, name, 0o644, Buf::from(content(SIZE))).await.unwrap();
        let id = below.lookup(&cx, root, name).await.unwrap().id;
        let site = Site::new(&dir.path().join("cache"), &below, 1 << 30);
        read(&*site.open(id).await, 0, SIZE).await;
        assert_eq!((site.count(|c| &c.misses), site.count(|c| &c.hits)), (0, 0));
    });
}

#[test]
fn what_was_used_least_lately_makes_room_and_what_is_pinned_stays() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        // The cache is large enough: nothing is evicted before the test does so.
        let (below, size) = (memory(), 16 * BLOCK_BYTES as usize);
        let site = Site::new(&dir.path().join("cache"), &below, 8 << 20);
        let mut ids = Vec::new();
        for name in ["pinned", "old", "newer", "newest"] {
            let id = make(&below, name, &content(size)).await;
            read(&*site.open(id).await, 0, size).await;
            ids.push(id);
            site.stored(ids.len() as u64 * size as u64).await;
            if name == "pinned" {
                site.order(id, "pin").await.unwrap();
            }
        }
        let known = || {
            let list = eviction::list(&dir.path().join("cache")).unwrap();
            let known = ids.iter().map(|id| list.iter().any(|entry| entry.map.key.id == *id));
            known.collect::<Vec<_>>()
        };
        soon(|| known() == [true; 4] && site.cache.entries_in_use() == 0).await;
        assert!(eviction::evict(&dir.path().join("cache"), 3 << 20).unwrap());
        assert_eq!(known(), [true, false, false, true]);
        site.order(ids[0], "unpin").await.unwrap();
        assert!(site.state(ids[0]).await.ends_with("pinned=no"));
        site.order(ids[3], "drop").await.unwrap();
        assert_eq!(known(), [true, false, false, false]);
        assert!(site.order(ids[0], "eat").await.is_err());
    });
}

/// The file was closed, and its map written, before a thread had stored what was read.
#[test]
fn what_is_stored_after_the_last_close_is_noted() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let site = Site::new(dir.path().join("cache").as_path(), &memory(), 1 << 30);
        let version = crate::FileVersion::of(&Attr { size: BLOCK_BYTES, ..Attr::default() });
        let id = FileId { ino: 1, generation: 1 };
        let key = crate::EntryKey { fs: dray_core::FsUuid(1), id, version };
        let entry = site.cache.entry(key).await.unwrap();
        drop(crate::store::EntryInUse::new(&site.cache, &entry));
        entry.save().unwrap();
        site.cache.store_now(&entry, 0, &content(BLOCK_BYTES as usize));
        assert_eq!(eviction::list(&dir.path().join("cache")).unwrap().len(), 1);
    });
}

/// Two threads that wrote the map of one entry took each other's new one away.
#[test]
fn threads_that_store_blocks_of_one_file_write_its_map_one_after_the_other() {
    let dir = tempfile::tempdir().unwrap();
    let size = 64 * BLOCK_BYTES;
    let version = crate::FileVersion::of(&Attr { size, ..Attr::default() });
    let id = FileId { ino: 1, generation: 1 };
    let key = crate::EntryKey { fs: dray_core::FsUuid(1), id, version };
    let entry = crate::entry::CacheEntry::open(dir.path(), key).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let entry = &entry;
            scope.spawn(move || {
                for block in (thread..64).step_by(8) {
                    let data = vec![block as u8; BLOCK_BYTES as usize];
                    assert_eq!(entry.store(block * BLOCK_BYTES, &data).unwrap(), BLOCK_BYTES);
                    entry.save().unwrap();
                }
            });
        }
    });
    drop(entry);
    let again = crate::entry::CacheEntry::open(dir.path(), key).unwrap();
    assert!(again.has(0, size));
}

/// The disk goes away under the mount: no program gets an error.
// proves: P222
#[test]
fn errors_of_the_disk_reach_nobody() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let (below, expected) = (memory(), content(SIZE));
        let id = make(&below, "file", &expected).await;
        let cache_dir = dir.path().join("cache");
        let site = Site::new(&cache_dir, &below, 1 << 30);
        let file = site.open(id).await;
        read(&*file, 0, SIZE).await;
        site.stored(4 * BLOCK_BYTES).await;
        // Somebody cuts the data.
        for system in fs::read_dir(&cache_dir).unwrap().map(Result::unwrap) {
            for entry in fs::read_dir(system.path()).into_iter().flatten().map(Result::unwrap) {
                fs::File::create(entry.path()).unwrap();
            }
        }
        assert_eq!(read(&*file, 0, SIZE).await, expected);
        assert_eq!(site.count(|c| &c.errors), 1);
        fs::remove_dir_all(&cache_dir).unwrap();
        assert_eq!(read(&*site.open(id).await, 0, SIZE).await, expected);
    });
}

/// The mount knows paths and jobs, and the first read need not know the job.
// proves: P222
#[test]
fn rules_go_by_what_the_mount_knows() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let (below, expected) = (memory(), content(SIZE));
        let ids = [make(&below, "a.h5", &expected).await, make(&below, "b.txt", &expected).await];
        let rules = CacheRules::parse("path=/data/*&ext=h5&job=j7").unwrap();
        let options = CacheOptions { dir: dir.path().join("cache"), size_bytes: 1 << 30, rules };
        let site = Site::with(options, &below);
        read(&*site.open(ids[0]).await, 0, SIZE).await;
        assert_eq!(site.count(|c| &c.misses), 0, "no mount has begun");
        site.cache.knows(MountFacts {
            find_path: Box::new(move |id| {
                let name = if id == ids[0] { "/data/a.h5" } else { "/data/b.txt" };
                Some(name.into())
            }),
            find_jobs: Box::new(|readers, tell| tell(vec![(readers[0], "j7".into())])),
        });
        for id in ids {
            read(&*site.open(id).await, 0, SIZE).await;
        }
        assert_eq!(site.count(|c| &c.misses), 1);
        site.stored(4 * BLOCK_BYTES).await;
        assert_eq!(read(&*site.open(ids[0]).await, 0, SIZE).await, expected);
        assert_eq!(site.count(|c| &c.hits), 1);
    });
}

#[test]
fn a_directory_that_others_can_read_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let rules = CacheRules::default();
    let options = CacheOptions { dir: dir.path().to_owned(), size_bytes: 1 << 20, rules };
    assert!(LocalCache::open(options).is_err());
}

// proves: P222
#[test]
fn what_a_crash_left_is_looked_at_before_use() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let (below, expected) = (memory(), content(SIZE));
        let id = make(&below, "file", &expected).await;
        let site = Site::new(&dir.path().join("cache"), &below, 1 << 30);
        read(&*site.open(id).await, 0, SIZE).await;
        site.stored(4 * BLOCK_BYTES).await;
        let map = loop {
            match &eviction::list(&dir.path().join("cache")).unwrap()[..] {
                [entry] => break entry.clone(),
                _ => dray_rt::sleep(Duration::from_millis(5)).await,
            }
        };
        // Half a map.
        let path = map.map_path();
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
        let next = Site::new(&dir.path().join("cache"), &below, 1 << 30);
        let file = next.open(id).await;
        assert_eq!(read(&*file, 0, SIZE).await, expected);
        assert_eq!((next.count(|c| &c.hits), next.count(|c| &c.misses)), (0, 1));
        assert!(next.below.getattr(&Context::system(), id).await.is_ok());
    });
}

/// Data without a map that are an hour old belong to nobody, in a cache. Elsewhere they are somebody's.
// proves: P413
#[test]
fn nothing_is_taken_from_a_directory_that_is_no_cache() {
    let dir = tempfile::tempdir().unwrap();
    let (home, cache) = (dir.path().join("home"), dir.path().join("cache"));
    fs::create_dir_all(home.join("experiment")).unwrap();
    let path = home.join("experiment/results.data");
    let file = fs::File::create(&path).unwrap();
    file.set_modified(std::time::SystemTime::now() - Duration::from_secs(7200)).unwrap();
    drop(file);
    assert!(!eviction::is_cache(&home).unwrap());
    assert_eq!(eviction::clear(&home).unwrap(), 0);
    assert!(path.exists());
    let site = Site::new(&cache, &memory(), 1 << 30);
    assert!(eviction::is_cache(site.cache.dir()).unwrap());
    // One of before caches were marked.
    fs::create_dir(home.join("0123456789abcdef0123456789abcdef")).unwrap();
    assert!(eviction::is_cache(&home).unwrap());
    assert!(eviction::is_cache(&dir.path().join("nowhere")).is_err());
}
