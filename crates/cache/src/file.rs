//! An open file whose reads may go to the local disk.

use std::any::Any;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::{
    Allocate, AtOpen, Attr, Buf, BufMut, Context, DirPage, FileId, FileType, Fut, IO_MAX_BYTES, Io,
    LocalCopy, Lock, LockOwner, OpenFile, Result, Seek, SetAttr, Write, Xflags,
};
use dray_rt::Instant;

use crate::blocks::BLOCK_BYTES;
use crate::changes::OpeningMoment;
use crate::copy::EntryCopy;
use crate::entry::CacheEntry;
use crate::fs::{CacheUser, LeasedAttributes, VersionSource};
use crate::key::{EntryKey, FileVersion};
use crate::rules::Candidate;
use crate::store::{EntryInUse, add};

/// A version that old was there long before it was seen, also if a clock is wrong by nearly as much.
const OLD_S: i64 = 60;
/// Without a lease the server is not asked for one again before this.
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// An open file, mostly for reading.
pub(crate) struct CachedFile {
    user: Arc<CacheUser>,
    inner: Arc<dyn OpenFile>,
    opened: OpenedAs,
    choice: Mutex<Choice>,
    /// When the server was last asked for a lease: nanoseconds of the clock.
    asked: AtomicU64,
}

/// What an open file is to the cache.
pub(crate) enum OpenedAs {
    /// An open file that is not read through the cache.
    Uncached,
    /// A file whose version is known by a lease.
    Leased,
    /// A file whose version was seen at the opening, which began at this moment.
    Seen(Option<AtOpen>, OpeningMoment),
}

/// The entry for the version that was seen last; none so far if that version is not kept.
#[derive(Default)]
struct Choice(Option<(FileVersion, EntryInUse)>);

impl CachedFile {
    pub(crate) fn new(
        user: Arc<CacheUser>,
        inner: Arc<dyn OpenFile>,
        opened: OpenedAs,
    ) -> CachedFile {
        let (choice, asked) = (Mutex::default(), AtomicU64::new(0));
        CachedFile { user, inner, opened, choice, asked }
    }

    fn choice(&self) -> MutexGuard<'_, Choice> {
        self.choice.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The entry of the version that the file has now.
    async fn entry(&self, cx: &Context) -> Option<Arc<CacheEntry>> {
        let current = match (&self.opened, &self.user.versions) {
            (OpenedAs::Uncached, _) => return None,
            (_, VersionSource::Leases(leases)) => self.leased(cx, &**leases).await,
            (_, VersionSource::Openings) => self.as_opened().map(|seen| seen.attr),
        };
        let Some(attr) = current else {
            add(&self.user.cache.counts.unleased, 1);
            return None;
        };
        let version = FileVersion::of(&attr);
        if let Some((known, entry)) = &self.choice().0
            && *known == version
        {
            return Some(entry.entry().clone()).filter(|_| !self.user.cache.is_paused());
        }
        let entry = match self.may_be_kept(cx, &attr).await {
            true => self.user.cache.entry(self.key(version)).await,
            false => None,
        };
        // A version that is too young now is looked at again.
        if let Some(entry) = &entry {
            let in_use = EntryInUse::new(&self.user.cache, entry);
            self.choice().0 = Some((version, in_use));
        }
        entry
    }

    /// The attributes under a lease. The server is asked if there is none, but not at each read.
    async fn leased(&self, cx: &Context, leases: &dyn LeasedAttributes) -> Option<Attr> {
        let id = self.inner.id();
        let leased = leases.leased(id);
        let now = dray_rt::now();
        let asked = Instant::from_nanos(self.asked.load(Ordering::Relaxed));
        if leased.is_some() || now - asked < ASK_AGAIN {
            return leased;
        }
        self.asked.store(now.as_nanos(), Ordering::Relaxed);
        self.user.inner.getattr(cx, id).await.ok()?;
        leases.leased(id)
    }

    /// What was seen at the opening, if nothing is known of a change since.
    fn as_opened(&self) -> Option<AtOpen> {
        match self.opened {
            OpenedAs::Seen(seen, before) => {
                seen.filter(|_| !self.user.cache.changes.since(before, self.inner.id()))
            }
            OpenedAs::Uncached | OpenedAs::Leased => None,
        }
    }

    /// The attributes of what has just been read. Only if they were the same all the time are the data of their version.
    async fn confirmed(&self, cx: &Context) -> Option<Attr> {
        match &self.user.versions {
            VersionSource::Leases(leases) => leases.leased(self.inner.id()),
            // Others may have changed the file, and it is not known yet.
            VersionSource::Openings => self.inner.getattr(cx).await.ok(),
        }
    }

    async fn whole_copy(&self, cx: &Context) -> Option<Arc<dyn LocalCopy>> {
        let entry = self.entry(cx).await.filter(|entry| entry.is_whole())?;
        let cache = &self.user.cache;
        Some(Arc::new(EntryCopy::new(cache, EntryInUse::new(cache, &entry))))
    }

    /// To be called when the server has answered, whatever it did.
    fn changed<T>(&self, answer: T) -> T {
        self.user.note_change(self.inner.id());
        answer
    }

    fn key(&self, version: FileVersion) -> EntryKey {
        EntryKey { fs: self.user.inner.info().uuid, id: self.inner.id(), version }
    }

    async fn may_be_kept(&self, cx: &Context, attr: &Attr) -> bool {
        let now_s = dray_rt::wall_clock().as_secs() as i64;
        let is_old = now_s.saturating_sub(attr.mtime.sec.max(attr.ctime.sec)) > OLD_S;
        let is_past = || {
            let clock = match self.user.versions {
                VersionSource::Leases(_) => self.user.inner.clock(),
                VersionSource::Openings => None, // it may have changed since, at the same time
            };
            let seen = self.as_opened().or(self.inner.at_open());
            let seen = seen.filter(|seen| seen.times_past == Some(true));
            clock.is_some_and(|clock| attr.is_past(clock))
                || seen.is_some_and(|seen| FileVersion::of(&seen.attr) == FileVersion::of(attr))
        };
        attr.file_type() == FileType::Regular
            && attr.size > 0
            && (is_old || is_past())
            && self.is_by_rules(cx, attr, now_s).await
    }

    async fn is_by_rules(&self, cx: &Context, attr: &Attr, now_s: i64) -> bool {
        let cache = &self.user.cache;
        let (rules, path, job) = (&cache.options.rules, cache.path(self.inner.id()), cache.job(cx));
        let project = match rules.ask_for_projects() {
            true => self.inner.get_xflags(cx).await.ok().map(|xflags| xflags.project),
            false => None,
        };
        let path = path.as_deref();
        rules.keep(&Candidate { attr, path, project, job: &job, now_s })
    }

    async fn read_all(&self, cx: &Context, at: u64, into: BufMut) -> Io<BufMut> {
        let Some(entry) = self.entry(cx).await else { return self.inner.read(cx, at, into).await };
        let size = entry.key.version.size;
        let wanted = (into.room() as u64).min(size.saturating_sub(at));
        if wanted == 0 {
            return Ok(into); // the end of the file
        }
        if !entry.has(at, wanted) {
            return self.fetch(cx, &entry, (at, wanted), into).await;
        }
        match self.read_here(&entry, (at, wanted as usize), into).await {
            Ok(into) => {
                let counts = &self.user.cache.counts;
                add(&counts.hits, 1);
                add(&counts.hit_bytes, wanted);
                Ok(into)
            }
            Err(into) => self.inner.read(cx, at, into).await,
        }
    }

    /// Reads what is resident. Errors: the disk failed, and nothing was read.
    async fn read_here(
        &self,
        entry: &Arc<CacheEntry>,
        (at, len_bytes): (u64, usize),
        mut into: BufMut,
    ) -> std::result::Result<BufMut, BufMut> {
        let cache = &self.user.cache;
        match entry.read(at, len_bytes, &mut into, true) {
            Ok(()) => return Ok(into),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // Some file systems cannot say whether they would wait.
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
            Err(error) => {
                cache.failed(&error);
                return Err(into);
            }
        }
        let (shared, room) = (entry.clone(), into.len());
        let shelf = Arc::new(Mutex::new(Some(into)));
        let theirs = shelf.clone();
        let read = move || {
            let taken = theirs.lock().unwrap_or_else(PoisonError::into_inner).take();
            let mut into = taken.expect("the buffer is taken once");
            let read = shared.read(at, len_bytes, &mut into, false);
            *theirs.lock().unwrap_or_else(PoisonError::into_inner) = Some(into);
            read
        };
        let read = cache.pool.run(read).await;
        let mut into = shelf
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
            .expect("the buffer is given back");
        match read {
            Ok(Ok(())) => Ok(into),
            Ok(Err(error)) => {
                cache.failed(&error);
                into.truncate(room);
                Err(into)
            }
            Err(_) => {
                into.truncate(room);
                Err(into)
            }
        }
    }

    /// Reads from the server, whole blocks if they fit one call, and stores what was read.
    async fn fetch(
        &self,
        cx: &Context,
        entry: &Arc<CacheEntry>,
        (at, wanted): (u64, u64),
        mut into: BufMut,
    ) -> Io<BufMut> {
        let size = entry.key.version.size;
        let from = at / BLOCK_BYTES * BLOCK_BYTES;
        let to = (at + wanted).next_multiple_of(BLOCK_BYTES).min(size);
        if to - from > IO_MAX_BYTES as u64 {
            return self.fetch_plain(cx, entry, at, into).await;
        }
        let around = BufMut::heap((to - from) as usize);
        let around = match self.inner.read(cx, from, around).await {
            Ok(around) => around.freeze(),
            Err((error, _)) => return Err((error, into)),
        };
        let skipped = ((at - from) as usize).min(around.len());
        let end = (skipped + wanted as usize).min(around.len());
        into.put(&around[skipped..end]);
        self.keep(cx, entry, (from, to - from), around).await;
        Ok(into)
    }

    /// As much as was asked for, and no more.
    async fn fetch_plain(
        &self,
        cx: &Context,
        entry: &Arc<CacheEntry>,
        at: u64,
        into: BufMut,
    ) -> Io<BufMut> {
        let before = into.len();
        let into = self.inner.read(cx, at, into).await?;
        let read = into.filled()[before..].to_vec();
        let len_bytes = read.len() as u64;
        self.keep(cx, entry, (at, len_bytes), Buf::from(read)).await;
        Ok(into)
    }

    /// Stores what was read, if the file had the version of the entry all the time.
    async fn keep(
        &self,
        cx: &Context,
        entry: &Arc<CacheEntry>,
        (at, expected_bytes): (u64, u64),
        data: Buf,
    ) {
        add(&self.user.cache.counts.misses, 1);
        let confirmed = self.confirmed(cx).await;
        let same = confirmed.is_some_and(|attr| FileVersion::of(&attr) == entry.key.version);
        if same && data.len() as u64 == expected_bytes {
            self.user.cache.store(entry, at, data).await;
        }
    }
}

impl OpenFile for CachedFile {
    fn id(&self) -> FileId {
        self.inner.id()
    }

    fn at_open(&self) -> Option<AtOpen> {
        match self.opened {
            OpenedAs::Seen(seen, _) => seen,
            OpenedAs::Uncached | OpenedAs::Leased => self.inner.at_open(),
        }
    }

    /// The file below, so that it recognises its own.
    fn as_any(&self) -> &dyn Any {
        self.inner.as_any()
    }

    fn local_copy<'a>(&'a self, cx: &'a Context) -> Fut<'a, Option<Arc<dyn LocalCopy>>> {
        Box::pin(self.whole_copy(cx))
    }

    fn read<'a>(&'a self, cx: &'a Context, at: u64, into: BufMut) -> Fut<'a, Io<BufMut>> {
        Box::pin(self.read_all(cx, at, into))
    }

    fn write<'a>(&'a self, cx: &'a Context, how: Write, from: Buf) -> Fut<'a, Result<usize>> {
        Box::pin(async move { self.changed(self.inner.write(cx, how, from).await) })
    }

    fn readdir<'a>(
        &'a self,
        cx: &'a Context,
        cookie: u64,
        max_bytes: usize,
        plus: bool,
    ) -> Fut<'a, Result<DirPage>> {
        self.inner.readdir(cx, cookie, max_bytes, plus)
    }

    fn getattr<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Attr>> {
        self.inner.getattr(cx)
    }

    fn setattr<'a>(&'a self, cx: &'a Context, set: SetAttr) -> Fut<'a, Result<Attr>> {
        Box::pin(async move {
            match set.size {
                Some(_) => self.changed(self.inner.setattr(cx, set).await),
                None => self.inner.setattr(cx, set).await,
            }
        })
    }

    fn flush<'a>(&'a self, cx: &'a Context, owner: LockOwner) -> Fut<'a, Result<()>> {
        self.inner.flush(cx, owner)
    }

    fn sync<'a>(&'a self, cx: &'a Context, data_only: bool) -> Fut<'a, Result<()>> {
        self.inner.sync(cx, data_only)
    }

    fn allocate<'a>(&'a self, cx: &'a Context, what: Allocate) -> Fut<'a, Result<()>> {
        Box::pin(async move { self.changed(self.inner.allocate(cx, what).await) })
    }

    fn seek<'a>(&'a self, cx: &'a Context, at: u64, what: Seek) -> Fut<'a, Result<u64>> {
        self.inner.seek(cx, at, what)
    }

    fn copy_range<'a>(
        &'a self,
        cx: &'a Context,
        at: u64,
        to: &'a dyn OpenFile,
        to_at: u64,
        len_bytes: u64,
    ) -> Fut<'a, Result<u64>> {
        Box::pin(async move {
            let copied = self.inner.copy_range(cx, at, to, to_at, len_bytes).await;
            self.user.note_change(to.id());
            copied
        })
    }

    fn lock<'a>(&'a self, cx: &'a Context, lock: Lock, wait: bool) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            let locked = self.inner.lock(cx, lock, wait).await;
            // What was written under the lock before is to be read. Nothing else may have said so.
            self.changed(locked)
        })
    }

    fn test_lock<'a>(&'a self, cx: &'a Context, lock: Lock) -> Fut<'a, Result<Option<Lock>>> {
        self.inner.test_lock(cx, lock)
    }

    fn get_flags<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<u32>> {
        self.inner.get_flags(cx)
    }

    fn set_flags<'a>(&'a self, cx: &'a Context, flags: u32) -> Fut<'a, Result<()>> {
        self.inner.set_flags(cx, flags)
    }

    fn get_xflags<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Xflags>> {
        self.inner.get_xflags(cx)
    }

    fn set_xflags<'a>(&'a self, cx: &'a Context, set: Xflags) -> Fut<'a, Result<()>> {
        self.inner.set_xflags(cx, set)
    }

    fn close<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<()>> {
        self.inner.close(cx)
    }
}
