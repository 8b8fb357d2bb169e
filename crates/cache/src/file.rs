//! An open file whose reads may go to the local disk.

use std::any::Any;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::{
    Allocate, AtOpen, Attr, Buf, BufMut, Context, DirPage, FileId, FileType, Fut, IO_MAX_BYTES, Io,
    Lock, LockOwner, OpenFile, Result, Seek, SetAttr, Write, Xflags,
};
use dray_rt::Instant;

use crate::blocks::BLOCK_BYTES;
use crate::entry::CacheEntry;
use crate::fs::CacheUser;
use crate::key::{EntryKey, FileVersion};
use crate::rules::Candidate;
use crate::store::{EntryInUse, add};

/// A version that old was there long before it was seen, also if a clock is wrong by nearly as much.
const OLD_S: i64 = 60;
/// Without a lease the server is not asked for one again before this.
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// A file that is open for reading.
pub(crate) struct CachedFile {
    user: Arc<CacheUser>,
    inner: Arc<dyn OpenFile>,
    choice: Mutex<Choice>,
    /// When the server was last asked for a lease: nanoseconds of the clock.
    asked: AtomicU64,
}

/// The entry for the version that was seen last; none so far if that version is not kept.
#[derive(Default)]
struct Choice(Option<(FileVersion, EntryInUse)>);

impl CachedFile {
    pub(crate) fn new(user: Arc<CacheUser>, inner: Arc<dyn OpenFile>) -> CachedFile {
        CachedFile { user, inner, choice: Mutex::default(), asked: AtomicU64::new(0) }
    }

    fn choice(&self) -> MutexGuard<'_, Choice> {
        self.choice.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The entry of the version that the file has now, by the server's lease.
    async fn entry(&self, cx: &Context) -> Option<Arc<CacheEntry>> {
        let Some(attr) = self.leased(cx).await else {
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
    async fn leased(&self, cx: &Context) -> Option<Attr> {
        let id = self.inner.id();
        let leased = self.user.leases.leased(id);
        let now = dray_rt::now();
        let asked = Instant::from_nanos(self.asked.load(Ordering::Relaxed));
        if leased.is_some() || now - asked < ASK_AGAIN {
            return leased;
        }
        self.asked.store(now.as_nanos(), Ordering::Relaxed);
        self.user.inner.getattr(cx, id).await.ok()?;
        self.user.leases.leased(id)
    }

    fn key(&self, version: FileVersion) -> EntryKey {
        EntryKey { fs: self.user.inner.info().uuid, id: self.inner.id(), version }
    }

    async fn may_be_kept(&self, cx: &Context, attr: &Attr) -> bool {
        let now_s = dray_rt::wall_clock().as_secs() as i64;
        let is_old = now_s.saturating_sub(attr.mtime.sec.max(attr.ctime.sec)) > OLD_S;
        let is_past = || {
            let clock = self.user.inner.clock();
            let seen = self.inner.at_open().filter(|seen| seen.times_past == Some(true));
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
        self.keep(entry, from, around, to - from).await;
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
        self.keep(entry, at, Buf::from(read), len_bytes).await;
        Ok(into)
    }

    /// Stores what was read, if the file had the version of the entry all the time.
    async fn keep(&self, entry: &Arc<CacheEntry>, at: u64, data: Buf, expected_bytes: u64) {
        add(&self.user.cache.counts.misses, 1);
        let leased = self.user.leases.leased(entry.key.id);
        let same = leased.is_some_and(|attr| FileVersion::of(&attr) == entry.key.version);
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
        self.inner.at_open()
    }

    /// The file below, so that it recognises its own.
    fn as_any(&self) -> &dyn Any {
        self.inner.as_any()
    }

    fn read<'a>(&'a self, cx: &'a Context, at: u64, into: BufMut) -> Fut<'a, Io<BufMut>> {
        Box::pin(self.read_all(cx, at, into))
    }

    fn write<'a>(&'a self, cx: &'a Context, how: Write, from: Buf) -> Fut<'a, Result<usize>> {
        self.inner.write(cx, how, from)
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
        self.inner.setattr(cx, set)
    }

    fn flush<'a>(&'a self, cx: &'a Context, owner: LockOwner) -> Fut<'a, Result<()>> {
        self.inner.flush(cx, owner)
    }

    fn sync<'a>(&'a self, cx: &'a Context, data_only: bool) -> Fut<'a, Result<()>> {
        self.inner.sync(cx, data_only)
    }

    fn allocate<'a>(&'a self, cx: &'a Context, what: Allocate) -> Fut<'a, Result<()>> {
        self.inner.allocate(cx, what)
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
        self.inner.copy_range(cx, at, to, to_at, len_bytes)
    }

    fn lock<'a>(&'a self, cx: &'a Context, lock: Lock, wait: bool) -> Fut<'a, Result<()>> {
        self.inner.lock(cx, lock, wait)
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
