//! The file system whose reads may go to the local disk.

use std::sync::Arc;

use dray_core::{
    Access, AtOpen, Attr, Buf, Context, CreateHow, Entry, Errno, Error, FileId, FileSystem, FsInfo,
    Fut, Make, Name, OpenFile, OpenHow, RemoveKind, RenameHow, Result, SessionControl, SetAttr,
    Statfs, Timestamp, Uid, XattrSet,
};

use crate::STATE_XATTR;
use crate::changes::OpeningMoment;
use crate::entry::CacheEntry;
use crate::file::{CachedFile, OpenedAs};
use crate::key::{EntryKey, FileVersion};
use crate::session::CachedSession;
use crate::store::LocalCache;

/// What a session may believe now.
pub trait LeasedAttributes: Send + Sync + 'static {
    /// The attributes of a file, while the server's lease on them holds. While it holds nobody but this
    /// mount changes the file. Asked at each read: it must be cheap.
    fn leased(&self, id: FileId) -> Option<Attr>;
}

/// By what it is known which version an open file has.
#[derive(Clone)]
pub enum VersionSource {
    /// By the server's lease, at each read.
    Leases(Arc<dyn LeasedAttributes>),
    /// By the opening, until it is known that the file was changed: where programs may go on with what they opened.
    Openings,
}

/// What open files share.
pub(crate) struct CacheUser {
    pub(crate) inner: Arc<dyn FileSystem>,
    pub(crate) versions: VersionSource,
    pub(crate) cache: Arc<LocalCache>,
}

/// A file system with a cache on the local disk.
pub struct CachedFs {
    user: Arc<CacheUser>,
}

impl CacheUser {
    /// This mount has changed a file, or may have. To be noted when the server has answered.
    pub(crate) fn note_change(&self, id: FileId) {
        match self.versions {
            VersionSource::Leases(_) => {} // the session knows
            VersionSource::Openings => self.cache.changes.note(id),
        }
    }
}

impl CachedFs {
    /// Around `inner`. Where versions are those at openings the session has to be that of
    /// [`CachedFs::session`].
    pub fn new(
        inner: Arc<dyn FileSystem>,
        versions: VersionSource,
        cache: Arc<LocalCache>,
    ) -> CachedFs {
        CachedFs { user: Arc::new(CacheUser { inner, versions, cache }) }
    }

    /// What has to stand around the session below, where versions are those at openings.
    pub fn session(&self, inner: Arc<dyn SessionControl>) -> CachedSession {
        CachedSession::new(inner, self.user.clone())
    }

    fn inner(&self) -> &dyn FileSystem {
        &*self.user.inner
    }

    /// `before` is from before it was opened.
    async fn file(
        &self,
        cx: &Context,
        inner: Arc<dyn OpenFile>,
        how: OpenHow,
        before: OpeningMoment,
    ) -> Arc<dyn OpenFile> {
        let is_cached = is_cached(how);
        let tells = match self.user.versions {
            VersionSource::Leases(_) => false,
            VersionSource::Openings => how.flags & libc::O_ACCMODE != libc::O_RDONLY,
        };
        if how.flags & libc::O_TRUNC != 0 {
            self.user.note_change(inner.id());
        }
        if !is_cached && !tells {
            return inner;
        }
        if !is_cached {
            return Arc::new(CachedFile::new(self.user.clone(), inner, OpenedAs::Uncached));
        }
        self.user.cache.expects(cx.pid);
        let opened = match self.user.versions {
            VersionSource::Leases(_) => OpenedAs::Leased,
            VersionSource::Openings => OpenedAs::Seen(self.seen(cx, &*inner).await, before),
        };
        Arc::new(CachedFile::new(self.user.clone(), inner, opened))
    }

    /// The state of a file that has just been opened. None: nobody can say it.
    async fn seen(&self, cx: &Context, file: &dyn OpenFile) -> Option<AtOpen> {
        if let Some(seen) = file.at_open() {
            return Some(seen);
        }
        let clock = self.inner().clock();
        let attr = file.getattr(cx).await.ok()?;
        let times_past = clock.map(|clock| attr.is_past(clock));
        Some(AtOpen { attr, no_capability: false, times_past })
    }

    fn now(&self) -> OpeningMoment {
        self.user.cache.changes.now()
    }

    /// The entry of the version that the server says a file has.
    async fn entry(&self, cx: &Context, id: FileId) -> Result<Arc<CacheEntry>> {
        let attr = self.inner().getattr(cx, id).await?;
        let key = EntryKey { fs: self.inner().info().uuid, id, version: FileVersion::of(&attr) };
        let entry = self.user.cache.entry(key).await;
        entry.ok_or_else(|| self.user.cache.trouble())
    }

    /// The state of a file, for people and programs: `resident=BYTES size=BYTES pinned=yes|no`.
    async fn state(&self, cx: &Context, id: FileId) -> Result<Vec<u8>> {
        let entry = self.entry(cx, id).await?;
        let ((resident, pinned), size) = (entry.residence(), entry.key.version.size);
        let pinned = if pinned { "yes" } else { "no" };
        Ok(format!("resident={resident} size={size} pinned={pinned}").into_bytes())
    }

    /// Carries out `pin`, `unpin` or `drop`. Errors: `EINVAL`, it is another word.
    async fn order(&self, cx: &Context, id: FileId, order: &[u8]) -> Result<()> {
        let entry = self.entry(cx, id).await?;
        let change: fn(&CacheEntry) -> std::io::Result<()> = match order {
            b"pin" => |entry| entry.pin(true),
            b"unpin" => |entry| entry.pin(false),
            b"drop" => |entry| {
                entry.take_away();
                Ok(())
            },
            _ => return Err(Error::new(Errno::EINVAL).because("pin, unpin or drop is wanted")),
        };
        let cache = self.user.cache.clone();
        let change = move || cache.with_room(0, || change(&entry));
        let changed = self.user.cache.pool.run(change).await;
        match changed {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => {
                self.user.cache.failed(&error);
                Err(self.user.cache.trouble())
            }
            Err(_) => Err(Errno::EAGAIN.into()),
        }
    }
}

/// Whether a file opened so is read through the cache.
fn is_cached(how: OpenHow) -> bool {
    how.reads() && how.flags & (libc::O_DIRECT | libc::O_DIRECTORY | libc::O_PATH) == 0
}

/// The opening says whether the file's times are past.
fn with_attr(how: OpenHow) -> OpenHow {
    OpenHow { with_attr: how.with_attr || is_cached(how), ..how }
}

impl FileSystem for CachedFs {
    fn info(&self) -> &FsInfo {
        self.inner().info()
    }

    fn path(&self, id: FileId) -> Option<Vec<u8>> {
        self.inner().path(id)
    }

    fn clock(&self) -> Option<Timestamp> {
        self.inner().clock()
    }

    fn user_of(&self, cx: &Context) -> Uid {
        self.inner().user_of(cx)
    }

    fn lookup<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
    ) -> Fut<'a, Result<Entry>> {
        self.inner().lookup(cx, dir, name)
    }

    fn parent<'a>(&'a self, cx: &'a Context, dir: FileId) -> Fut<'a, Result<Entry>> {
        self.inner().parent(cx, dir)
    }

    fn getattr<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Attr>> {
        self.inner().getattr(cx, id)
    }

    fn setattr<'a>(&'a self, cx: &'a Context, id: FileId, set: SetAttr) -> Fut<'a, Result<Attr>> {
        Box::pin(async move {
            let cuts = set.size.is_some();
            let attr = self.inner().setattr(cx, id, set).await;
            if cuts {
                self.user.note_change(id);
            }
            attr
        })
    }

    fn readlink<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Vec<u8>>> {
        self.inner().readlink(cx, id)
    }

    fn make<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        what: Make<'a>,
    ) -> Fut<'a, Result<Entry>> {
        self.inner().make(cx, dir, name, what)
    }

    fn remove<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        kind: RemoveKind,
    ) -> Fut<'a, Result<()>> {
        self.inner().remove(cx, dir, name, kind)
    }

    fn rename<'a>(
        &'a self,
        cx: &'a Context,
        from: (FileId, &'a Name),
        to: (FileId, &'a Name),
        how: RenameHow,
    ) -> Fut<'a, Result<()>> {
        self.inner().rename(cx, from, to, how)
    }

    fn link<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        dir: FileId,
        name: &'a Name,
    ) -> Fut<'a, Result<Entry>> {
        self.inner().link(cx, id, dir, name)
    }

    fn learn<'a>(
        &'a self,
        cx: &'a Context,
        place: (FileId, &'a Name),
        id: FileId,
    ) -> Fut<'a, Result<()>> {
        self.inner().learn(cx, place, id)
    }

    fn open<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        how: OpenHow,
    ) -> Fut<'a, Result<Arc<dyn OpenFile>>> {
        Box::pin(async move {
            let before = self.now();
            let opened = self.inner().open(cx, id, with_attr(how)).await?;
            Ok(self.file(cx, opened, how, before).await)
        })
    }

    fn open_named<'a>(
        &'a self,
        cx: &'a Context,
        place: (FileId, &'a Name),
        id: FileId,
        how: OpenHow,
    ) -> Fut<'a, Result<Arc<dyn OpenFile>>> {
        Box::pin(async move {
            let before = self.now();
            let opened = self.inner().open_named(cx, place, id, with_attr(how)).await?;
            Ok(self.file(cx, opened, how, before).await)
        })
    }

    fn create<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        how: CreateHow,
    ) -> Fut<'a, Result<(Entry, Arc<dyn OpenFile>)>> {
        Box::pin(async move {
            let before = self.now();
            let (entry, file) = self.inner().create(cx, dir, name, how).await?;
            Ok((entry, self.file(cx, file, how.open, before).await))
        })
    }

    fn tmpfile<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        how: CreateHow,
    ) -> Fut<'a, Result<(Entry, Arc<dyn OpenFile>)>> {
        self.inner().tmpfile(cx, dir, how)
    }

    fn put<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        mode: u32,
        data: Buf,
    ) -> Fut<'a, Result<()>> {
        self.inner().put(cx, dir, name, mode, data)
    }

    fn access<'a>(&'a self, cx: &'a Context, id: FileId, want: Access) -> Fut<'a, Result<()>> {
        self.inner().access(cx, id, want)
    }

    fn statfs<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Statfs>> {
        self.inner().statfs(cx)
    }

    fn sync_all<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<()>> {
        self.inner().sync_all(cx)
    }

    fn getxattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
    ) -> Fut<'a, Result<Vec<u8>>> {
        match name == STATE_XATTR {
            true => Box::pin(self.state(cx, id)),
            false => self.inner().getxattr(cx, id, name),
        }
    }

    fn setxattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
        value: &'a [u8],
        how: XattrSet,
    ) -> Fut<'a, Result<()>> {
        match name == STATE_XATTR {
            true => Box::pin(self.order(cx, id, value)),
            false => self.inner().setxattr(cx, id, name, value, how),
        }
    }

    fn listxattr<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Vec<u8>>> {
        self.inner().listxattr(cx, id)
    }

    fn removexattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
    ) -> Fut<'a, Result<()>> {
        self.inner().removexattr(cx, id, name)
    }
}
