//! Versions as they are at openings, and whole copies.

use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;

use dray_backends::memory::MemoryFs;
use dray_core::{
    Attr, Buf, Context, FileId, FileSystem, FindJobs, Fut, HearChanges, HearRecalls, LocalCopy,
    LockOwner, NoSession, NodeId, OpenFile, OpenHow, RequestId, SessionControl, SetAttr, Write,
};

use super::tests::{SIZE, content, make, memory, read, run, soon};
use crate::fs::{CachedFs, VersionSource};
use crate::options::CacheOptions;
use crate::rules::CacheRules;
use crate::store::LocalCache;
use crate::{BLOCK_BYTES, eviction};

struct Site {
    cache: Arc<LocalCache>,
    fs: CachedFs,
}

impl Site {
    fn new(dir: &Path, below: &MemoryFs) -> Site {
        let rules = CacheRules::default();
        let options = CacheOptions { dir: dir.to_owned(), size_bytes: 1 << 30, rules };
        let cache = LocalCache::open(options).unwrap();
        let fs = CachedFs::new(Arc::new(below.clone()), VersionSource::Openings, cache.clone());
        Site { cache, fs }
    }

    async fn open(&self, id: FileId, how: OpenHow) -> Arc<dyn OpenFile> {
        self.fs.open(&Context::system(), id, how).await.unwrap()
    }

    fn stored_bytes(&self) -> u64 {
        self.cache.counts.stored_bytes.load(std::sync::atomic::Ordering::SeqCst)
    }

    /// The file, all of which is resident.
    async fn open_whole(&self, id: FileId) -> Arc<dyn OpenFile> {
        let file = self.open(id, OpenHow::READ).await;
        read(&*file, 0, SIZE).await;
        soon(|| self.stored_bytes() >= 4 * BLOCK_BYTES).await;
        file
    }
}

async fn write(fs: &dyn FileSystem, id: FileId, at: u64, data: &'static [u8]) {
    let cx = Context::system();
    let file = fs.open(&cx, id, OpenHow::READ_WRITE).await.unwrap();
    file.write(&cx, Write::at(at), Buf::from(data)).await.unwrap();
    file.close(&cx).await.unwrap();
}

fn bytes_of(copy: &dyn LocalCopy) -> Vec<u8> {
    let path = format!("/proc/self/fd/{}", copy.file().as_raw_fd());
    std::fs::read(path).unwrap()
}

// proves: P269
#[test]
fn an_open_file_goes_on_with_its_version_until_a_change_is_known() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let (below, expected) = (memory(), content(SIZE));
        let id = make(&below, "file", &expected).await;
        let site = Site::new(&dir.path().join("cache"), &below);
        let file = site.open_whole(id).await;
        // Another mount changes it, and nobody says so.
        write(&below, id, 5, b"others").await;
        assert_eq!(read(&*file, 5, 6).await, expected[5..11]);
        assert_eq!(read(&*site.open(id, OpenHow::READ).await, 5, 6).await, b"others");
        site.cache.changes.note(id);
        assert_eq!(read(&*file, 5, 6).await, b"others");
    });
}

// proves: P269
#[test]
fn a_mount_sees_its_own_changes_at_once() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let (below, expected) = (memory(), content(SIZE));
        let id = make(&below, "file", &expected).await;
        let (site, cx) = (Site::new(&dir.path().join("cache"), &below), Context::system());
        let file = site.open_whole(id).await;
        write(&site.fs, id, 5, b"written").await;
        assert_eq!(read(&*file, 5, 7).await, b"written");
        dray_rt::sleep(std::time::Duration::from_millis(150)).await;
        let file = site.open_whole(id).await;
        let cut = SetAttr { size: Some(7), ..SetAttr::default() };
        site.fs.setattr(&cx, id, cut).await.unwrap();
        assert_eq!(read(&*file, 5, 7).await, b"wr");
    });
}

/// What is read of a file that has changed since its opening is of another version.
// proves: P269
#[test]
fn data_of_another_version_are_not_kept() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let (below, expected) = (memory(), content(SIZE));
        let id = make(&below, "file", &expected).await;
        let site = Site::new(&dir.path().join("cache"), &below);
        let file = site.open(id, OpenHow::READ).await;
        write(&below, id, 5, b"others").await;
        assert_eq!(read(&*file, 5, 6).await, b"others", "it was not resident");
        assert_eq!(site.stored_bytes(), 0);
    });
}

/// The copy that the kernel reads follows the file, and the cache does not take it for the former version.
// proves: P268
#[test]
fn a_copy_is_the_whole_file_and_follows_it_out_of_the_cache() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("cache");
    run(async {
        let (below, expected) = (memory(), content(SIZE));
        let id = make(&below, "file", &expected).await;
        let (site, cx) = (Site::new(&at, &below), Context::system());
        let part = site.open(id, OpenHow::READ).await;
        read(&*part, 0, 10).await;
        soon(|| site.stored_bytes() >= BLOCK_BYTES).await;
        assert!(part.local_copy(&cx).await.is_none(), "one block is there");
        drop((part, site.open_whole(id).await));
        soon(|| eviction::list(&at).unwrap().len() == 1).await;
        let file = site.open(id, OpenHow::READ).await;
        let copy = file.local_copy(&cx).await.unwrap();
        assert_eq!(bytes_of(&*copy), expected);
        copy.refresh(&cx, &*file).await.unwrap();
        assert_eq!(eviction::list(&at).unwrap().len(), 1, "nothing has changed");
        // Two mounts of this machine have it open when it changes, and becomes longer.
        let other = Site::new(&at, &below);
        let theirs = other.open(id, OpenHow::READ).await;
        assert_eq!(read(&*theirs, 0, 10).await, expected[..10]);
        write(&below, id, 5, b"others").await;
        write(&below, id, SIZE as u64, b"longer").await;
        site.cache.changes.note(id);
        assert!(file.local_copy(&cx).await.is_none());
        copy.refresh(&cx, &*file).await.unwrap();
        let now = [&expected[..5], b"others", &expected[11..], b"longer"].concat();
        assert_eq!(bytes_of(&*copy), now);
        drop((theirs, file));
        assert!(eviction::list(&at).unwrap().is_empty());
        // It becomes shorter.
        write(&below, id, 0, b"again").await;
        let cut = SetAttr { size: Some(5), ..SetAttr::default() };
        below.setattr(&cx, id, cut).await.unwrap();
        let file = site.open(id, OpenHow::READ).await;
        copy.refresh(&cx, &*file).await.unwrap();
        assert_eq!(bytes_of(&*copy), b"again");
    });
}

/// A mount wrote a map for data that another mount of the machine had taken away. So a later mount took
/// zeros for the file.
#[test]
fn no_map_is_written_for_data_that_another_process_has_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let version =
        crate::FileVersion { size: BLOCK_BYTES, ..crate::FileVersion::of(&Default::default()) };
    let id = FileId { ino: 1, generation: 1 };
    let key = crate::EntryKey { fs: dray_core::FsUuid(1), id, version };
    let [one, other] = [(), ()].map(|()| crate::entry::CacheEntry::open(dir.path(), key).unwrap());
    one.store(0, &content(BLOCK_BYTES as usize)).unwrap();
    other.leave_the_cache().unwrap();
    one.save().unwrap();
    drop((one, other));
    let again = crate::entry::CacheEntry::open(dir.path(), key).unwrap();
    assert!(!again.has(0, BLOCK_BYTES));
}

/// Changes that a server reports reach the cache first.
// proves: P269
#[test]
fn news_of_a_session_reach_the_cache() {
    let dir = tempfile::tempdir().unwrap();
    let site = Site::new(&dir.path().join("cache"), &memory());
    let id = FileId { ino: 1, generation: 1 };
    let before = site.cache.changes.now();
    let session = site.fs.session(Arc::new(NoSession));
    let (tell, heard) = std::sync::mpsc::channel();
    let cache = site.cache.clone();
    let hear = session.hearing(Box::new(move |files| {
        tell.send((files, cache.changes.since(before, id))).unwrap();
    }));
    hear(vec![id]);
    assert_eq!(heard.recv().unwrap(), (vec![id], true));
}

/// A session with a file that a process before this one has left open.
struct Inherited(Arc<dyn OpenFile>);

impl SessionControl for Inherited {
    fn node(&self) -> NodeId {
        NodeId(0)
    }

    fn attach(&self, _: FileId, _: OpenHow, _: RequestId) -> Option<Arc<dyn OpenFile>> {
        Some(self.0.clone())
    }

    fn attached(&self) {}

    fn release_inherited(&self) {}

    fn lock_owners(&self) -> Option<Vec<(FileId, LockOwner)>> {
        None
    }

    fn owes_error(&self, _: FileId) -> bool {
        false
    }

    fn mapped(&self, _: FileId) {}

    fn hear_changes_by(&self, _: HearChanges) {}

    fn hear_recalls_by(&self, _: HearRecalls) {}

    fn leased_attributes(&self, _: FileId) -> Option<Attr> {
        None
    }

    fn find_jobs_by(&self, _: FindJobs) {}

    fn finish(&self) -> Fut<'_, ()> {
        Box::pin(async {})
    }

    fn goodbye(&self) {}
}

/// A daemon that took over wrote through files of the one before, and read what was there before that.
// proves: P269
#[test]
fn what_is_written_through_an_inherited_file_is_seen_at_once() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let (below, expected) = (memory(), content(SIZE));
        let id = make(&below, "file", &expected).await;
        let (site, cx) = (Site::new(&dir.path().join("cache"), &below), Context::system());
        let file = site.open_whole(id).await;
        assert_eq!(read(&*file, 5, 7).await, expected[5..12]);
        let left = below.open(&cx, id, OpenHow::READ_WRITE).await.unwrap();
        let session = site.fs.session(Arc::new(Inherited(left)));
        let writer = session.attach(id, OpenHow::READ_WRITE, RequestId(1)).unwrap();
        writer.write(&cx, Write::at(5), Buf::from(&b"written"[..])).await.unwrap();
        assert_eq!(read(&*file, 5, 7).await, b"written");
    });
}
