//! The cache of a process: entries in use, and the threads that wait for the disk.

use std::collections::HashMap;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use dray_core::{Buf, Context, Errno, Error, FileId, FindJobs, Pid};
use dray_rt::{Instant, Pool, Share, now};

use crate::changes::KnownChanges;
use crate::entry::CacheEntry;
use crate::eviction;
use crate::jobs::ReaderJobs;
use crate::key::EntryKey;
use crate::options::CacheOptions;
use crate::room::{self, DiskRoom};

/// Threads that wait for the disk.
const THREADS_MAX: usize = 8;
/// Calls that wait for a thread.
const QUEUE_MAX: usize = 256;
/// Bytes that wait to be stored. Who reads further waits with them.
const STORING_MAX_BYTES: u64 = 64 << 20;
/// So long the disk is left alone after an error.
const PAUSE: Duration = Duration::from_secs(10);

/// Counters of a cache.
#[derive(Debug, Default)]
pub struct CacheCounts {
    /// Reads that the local disk answered.
    pub hits: AtomicU64,
    /// Bytes that the local disk answered.
    pub hit_bytes: AtomicU64,
    /// Reads that were passed on and stored.
    pub misses: AtomicU64,
    /// Bytes that were stored.
    pub stored_bytes: AtomicU64,
    /// Reads that were passed on without a lease.
    pub unleased: AtomicU64,
    /// Bytes that were given up because the local disk was full.
    pub evicted_bytes: AtomicU64,
    /// Errors of the local disk.
    pub errors: AtomicU64,
}

pub(crate) fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

/// What a mount knows of its files and readers. Rules may go by it.
pub struct MountFacts {
    /// Where a file was last seen, from the mount's root on and beginning with a slash. None: it is not known.
    pub find_path: Box<dyn Fn(FileId) -> Option<Vec<u8>> + Send + Sync>,
    /// Finds the batch jobs of readers.
    pub find_jobs: FindJobs,
}

/// A cache on a local disk, shared by all threads of a mount.
pub struct LocalCache {
    pub(crate) options: CacheOptions,
    mount: OnceLock<MountFacts>,
    jobs: ReaderJobs,
    /// Known changes of files, where versions are those at openings.
    pub(crate) changes: KnownChanges,
    /// What it has done.
    pub counts: CacheCounts,
    pub(crate) pool: Pool,
    entries: Mutex<HashMap<EntryKey, Weak<CacheEntry>>>,
    storing_bytes: AtomicU64,
    pub(crate) room: DiskRoom,
    pause: Mutex<Option<Pause>>,
}

/// The disk is left alone.
#[derive(Clone, Copy)]
struct Pause {
    until: Instant,
    /// What was wrong.
    why: Errno,
}

/// Bytes that wait to be stored, until they are or never will be.
struct Storing {
    cache: Arc<LocalCache>,
    len_bytes: u64,
}

impl Drop for Storing {
    fn drop(&mut self) {
        self.cache.storing_bytes.fetch_sub(self.len_bytes, Ordering::Relaxed);
    }
}

impl LocalCache {
    /// The cache in the directory that the options name, which is made. Errors: those of the disk;
    /// `PermissionDenied`: others may read or change the directory.
    pub fn open(options: CacheOptions) -> io::Result<Arc<LocalCache>> {
        DirBuilder::new().recursive(true).mode(0o700).create(&options.dir)?;
        let stat = fs::metadata(&options.dir)?;
        // SAFETY: no memory is passed.
        let own = stat.uid() == unsafe { libc::geteuid() };
        if !own || stat.permissions().mode() & 0o077 != 0 {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        if let Err(error) = eviction::mark(&options.dir) {
            // A full disk makes room later.
            log::warn!("cache {}: {error}", options.dir.display());
        }
        Ok(Arc::new(LocalCache {
            options,
            counts: CacheCounts::default(),
            pool: Pool::new("dray-cache", THREADS_MAX, QUEUE_MAX),
            entries: Mutex::default(),
            storing_bytes: AtomicU64::new(0),
            room: DiskRoom::default(),
            pause: Mutex::new(None),
            mount: OnceLock::new(),
            jobs: ReaderJobs::default(),
            changes: KnownChanges::default(),
        }))
    }

    /// The mount has begun. Before that rules know no paths and no jobs.
    pub fn knows(&self, mount: MountFacts) {
        let _ = self.mount.set(mount); // it begins once
    }

    /// A process opens a file, and will read soon.
    pub(crate) fn expects(&self, reader: Pid) {
        if let Some(mount) = self.mount.get().filter(|_| self.options.rules.ask_for_jobs()) {
            self.jobs.look_for(reader, &mount.find_jobs);
        }
    }

    /// Where a file was last seen, if rules ask for that.
    pub(crate) fn path(&self, id: FileId) -> Option<Vec<u8>> {
        let mount = self.mount.get().filter(|_| self.options.rules.ask_for_paths())?;
        (mount.find_path)(id)
    }

    /// The batch job of a reader, if rules ask for that.
    pub(crate) fn job(&self, cx: &Context) -> Box<str> {
        match self.options.rules.ask_for_jobs() && cx.who.job.is_empty() {
            true => self.jobs.of(cx.pid).unwrap_or_default(),
            false => cx.who.job.clone(),
        }
    }

    /// The directory in which it lies.
    pub fn dir(&self) -> &Path {
        &self.options.dir
    }

    /// Most bytes that it takes.
    pub fn size_bytes(&self) -> u64 {
        self.options.size_bytes
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<EntryKey, Weak<CacheEntry>>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(crate) fn entries_in_use(&self) -> usize {
        self.entries().values().filter(|entry| entry.strong_count() > 0).count()
    }

    fn pause(&self) -> Option<Pause> {
        let mut pause = self.pause.lock().unwrap_or_else(PoisonError::into_inner);
        *pause = pause.filter(|pause| pause.until > now());
        *pause
    }

    /// Whether the disk is left alone for now.
    pub(crate) fn is_paused(&self) -> bool {
        self.pause().is_some()
    }

    /// Why the disk cannot be used now: its last error, for who asks for the cache itself.
    pub(crate) fn trouble(&self) -> Error {
        let why = self.pause().map_or(Errno::EIO, |pause| pause.why);
        Error::new(why).because("the cache's disk cannot be used")
    }

    /// Something is wrong with the disk. Reads go to the server for a while.
    pub(crate) fn failed(&self, error: &io::Error) {
        add(&self.counts.errors, 1);
        let dir = self.options.dir.display();
        if !self.is_paused() {
            log::warn!("cache {dir}: {error}; reads go to the server for {} s", PAUSE.as_secs());
        }
        let why = match room::is_full(error) {
            true => Errno::ENOSPC,
            false => Errno::EIO,
        };
        let mut pause = self.pause.lock().unwrap_or_else(PoisonError::into_inner);
        *pause = Some(Pause { until: now() + PAUSE, why });
    }

    /// The entry of a version, in use from now on. None: the disk cannot be used.
    pub(crate) async fn entry(self: &Arc<Self>, key: EntryKey) -> Option<Arc<CacheEntry>> {
        if self.is_paused() {
            return None;
        }
        let known = self.entries().get(&key).and_then(Weak::upgrade);
        if let Some(entry) = known.filter(|entry| !entry.is_dropped()) {
            return Some(entry);
        }
        let cache = self.clone();
        let open = move || cache.with_room(0, || CacheEntry::open(&cache.options.dir, key));
        let opened = self.pool.run(open).await.ok()?;
        let opened = opened.inspect_err(|error| self.failed(error)).ok()?;
        let mut entries = self.entries();
        let known = entries.get(&key).and_then(Weak::upgrade);
        if let Some(entry) = known.filter(|entry| !entry.is_dropped()) {
            return Some(entry); // another thread was faster
        }
        entries.retain(|_, entry| entry.strong_count() > 0);
        let opened = Arc::new(opened);
        entries.insert(key, Arc::downgrade(&opened));
        Some(opened)
    }

    /// Stores what was read, later. Waits only while too much waits.
    pub(crate) async fn store(self: &Arc<Self>, entry: &Arc<CacheEntry>, at: u64, data: Buf) {
        let len_bytes = data.len() as u64;
        let entry = entry.clone();
        let waiting = self.storing_bytes.fetch_add(len_bytes, Ordering::Relaxed);
        let storing = Storing { cache: self.clone(), len_bytes };
        let store = move || storing.cache.store_now(&entry, at, &data);
        if waiting > STORING_MAX_BYTES {
            let _ = self.pool.run(store).await; // what is not stored is read again
        } else {
            self.pool.spawn_for(Share { client: 0, thing: None }, store);
        }
    }

    pub(crate) fn store_now(&self, entry: &CacheEntry, at: u64, data: &[u8]) {
        let stored = self.with_room(data.len() as u64, || entry.store(at, data)).and_then(|new| {
            if entry.is_due() {
                self.with_room(0, || entry.save())?;
            }
            add(&self.counts.stored_bytes, new);
            self.make_room(new)
        });
        if let Err(error) = stored {
            self.failed(&error);
        }
    }

    /// Notes what was stored of an entry that somebody has stopped using.
    fn save_later(self: &Arc<Self>, entry: Arc<CacheEntry>) {
        let cache = self.clone();
        self.pool.spawn_for(Share { client: 0, thing: None }, move || {
            if let Err(error) = cache.with_room(0, || entry.save()) {
                cache.failed(&error);
            }
        });
    }
}

/// An entry that an open file reads. When the file lets go, what was stored is noted.
pub(crate) struct EntryInUse {
    cache: Arc<LocalCache>,
    entry: Arc<CacheEntry>,
}

impl EntryInUse {
    pub(crate) fn new(cache: &Arc<LocalCache>, entry: &Arc<CacheEntry>) -> EntryInUse {
        entry.add_user();
        EntryInUse { cache: cache.clone(), entry: entry.clone() }
    }

    pub(crate) fn entry(&self) -> &Arc<CacheEntry> {
        &self.entry
    }
}

impl Drop for EntryInUse {
    fn drop(&mut self) {
        self.entry.remove_user();
        self.cache.save_later(self.entry.clone());
    }
}
