//! `FileSystem` over servers with their own disks.

use std::sync::Arc;

use dray_core::{
    Access, Attr, Buf, Context, CreateHow, Entry, Errno, Error, FileId, FileSystem, FileType,
    FsInfo, Fut, Make, Name, OpenFile, OpenHow, RemoveKind, RenameHow, Result, SetAttr, Statfs,
    Timestamp, Uid, XattrSet, put_in_steps,
};

use super::directory::OwnDirectory;
use super::file::OwnDisksFile;
use super::{OWN_ATTRIBUTES, ObjectId, OwnDisks};
use crate::placement::Placement;

/// The file system of a projection whose servers have their own disks.
#[derive(Clone)]
pub struct OwnDisksFs {
    pub(super) shared: Arc<OwnDisks>,
}

impl OwnDisksFs {
    /// `servers` in the order of the definition that `placement` is of, one for each server.
    ///
    /// # Panics
    /// If there is not one file system for each server.
    pub fn new(placement: Placement, servers: Vec<Arc<dyn FileSystem>>) -> OwnDisksFs {
        OwnDisksFs { shared: Arc::new(OwnDisks::new(placement, servers)) }
    }

    fn home(&self) -> &dyn FileSystem {
        self.shared.home()
    }

    async fn whole(&self, cx: &Context, entry: Entry) -> Result<Entry> {
        Ok(Entry { attr: self.shared.whole(cx, entry.id, entry.attr).await?, ..entry })
    }

    /// The regular file of this name, which may be about to lose its last name, and its objects.
    async fn data_of(
        &self,
        cx: &Context,
        (dir, name): (FileId, &Name),
    ) -> Option<(FileId, ObjectId)> {
        let entry = self.home().lookup(cx, dir, name).await.ok()?;
        if entry.attr.file_type() != FileType::Regular {
            return None;
        }
        Some((entry.id, self.shared.object_of(cx, entry.id).await.ok()??))
    }

    fn bury(&self, data: Option<(FileId, ObjectId)>) {
        if let Some((id, object)) = data {
            self.shared.bury(id, object);
        }
    }

    /// A file or directory that was just opened at the home.
    async fn opened(
        &self,
        cx: &Context,
        (id, how): (FileId, OpenHow),
        stub: Arc<dyn OpenFile>,
    ) -> Result<Arc<dyn OpenFile>> {
        if how.directory() {
            return Ok(OwnDirectory::open(&self.shared, id, stub));
        }
        if how.truncates()
            && let Err(error) = self.shared.cut(cx, id, 0).await
        {
            let _ = stub.close(cx).await; // the first error counts
            return Err(error);
        }
        let at_open = match stub.at_open().filter(|_| how.with_attr) {
            // Without attributes the caller asks for them if it wants them.
            Some(seen) => match self.shared.whole(cx, id, seen.attr).await {
                Ok(attr) => Some(dray_core::AtOpen { attr, times_past: None, ..seen }),
                Err(_) => None,
            },
            None => None,
        };
        Ok(OwnDisksFile::open(&self.shared, (how, at_open), stub))
    }

    async fn created(
        &self,
        cx: &Context,
        (entry, stub): (Entry, Arc<dyn OpenFile>),
        how: CreateHow,
    ) -> Result<(Entry, Arc<dyn OpenFile>)> {
        let asked = match how.exclusive {
            true => Ok(entry), // it is new, and has no data
            false => self.cut_and_ask(cx, entry, how).await,
        };
        match asked {
            Ok(entry) => {
                let seen = stub.at_open().filter(|_| how.open.with_attr);
                let at_open = seen.map(|seen| dray_core::AtOpen {
                    attr: entry.attr,
                    times_past: None,
                    ..seen
                });
                Ok((entry, OwnDisksFile::open(&self.shared, (how.open, at_open), stub)))
            }
            Err(error) => {
                let _ = stub.close(cx).await; // the first error counts
                Err(error)
            }
        }
    }

    async fn cut_and_ask(&self, cx: &Context, entry: Entry, how: CreateHow) -> Result<Entry> {
        if how.open.truncates() {
            self.shared.cut(cx, entry.id, 0).await?;
        }
        self.whole(cx, entry).await
    }
}

/// What the stub is opened with: nothing is read or written there.
pub(super) fn of_stub(how: OpenHow) -> OpenHow {
    let flags = how.flags & !(libc::O_DIRECT | libc::O_SYNC);
    OpenHow { flags, ..how }
}

fn is_own(attribute: &[u8]) -> bool {
    attribute.starts_with(OWN_ATTRIBUTES)
}

impl FileSystem for OwnDisksFs {
    fn info(&self) -> &FsInfo {
        &self.shared.info
    }

    fn path(&self, id: FileId) -> Option<Vec<u8>> {
        self.home().path(id)
    }

    /// Times of files are of several clocks, of which none is known here.
    fn clock(&self) -> Option<Timestamp> {
        None
    }

    fn user_of(&self, cx: &Context) -> Uid {
        self.home().user_of(cx)
    }

    fn lookup<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
    ) -> Fut<'a, Result<Entry>> {
        Box::pin(async move {
            let dir = self.shared.at_home(cx, dir).await?;
            let entry = self.home().lookup(cx, dir, name).await?;
            self.whole(cx, entry).await
        })
    }

    fn parent<'a>(&'a self, cx: &'a Context, dir: FileId) -> Fut<'a, Result<Entry>> {
        Box::pin(async move {
            let entry = match dir == self.shared.info.root {
                true => {
                    let id = self.shared.at_home(cx, dir).await?;
                    Entry { id, attr: self.home().getattr(cx, id).await? }
                }
                false => {
                    self.shared.at_home(cx, self.shared.info.root).await?;
                    self.home().parent(cx, dir).await?
                }
            };
            Ok(Entry { id: self.shared.seen(entry.id), ..entry })
        })
    }

    fn getattr<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Attr>> {
        Box::pin(async move {
            let id = self.shared.at_home(cx, id).await?;
            let stub = self.home().getattr(cx, id).await?;
            self.shared.whole(cx, id, stub).await
        })
    }

    /// The home decides whether the caller may; then the objects follow.
    fn setattr<'a>(&'a self, cx: &'a Context, id: FileId, set: SetAttr) -> Fut<'a, Result<Attr>> {
        Box::pin(async move {
            let id = self.shared.at_home(cx, id).await?;
            let stub = self.home().setattr(cx, id, of_stub_attr(set)).await?;
            self.shared.followed(cx, id, (set, stub)).await
        })
    }

    fn readlink<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Vec<u8>>> {
        self.home().readlink(cx, id)
    }

    fn make<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        what: Make<'a>,
    ) -> Fut<'a, Result<Entry>> {
        Box::pin(async move {
            let dir = self.shared.at_home(cx, dir).await?;
            self.home().make(cx, dir, name, what).await
        })
    }

    fn remove<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        kind: RemoveKind,
    ) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            let dir = self.shared.at_home(cx, dir).await?;
            let data = match kind {
                RemoveKind::File => self.data_of(cx, (dir, name)).await,
                RemoveKind::Directory => None,
            };
            self.home().remove(cx, dir, name, kind).await?;
            self.bury(data);
            Ok(())
        })
    }

    fn rename<'a>(
        &'a self,
        cx: &'a Context,
        from: (FileId, &'a Name),
        to: (FileId, &'a Name),
        how: RenameHow,
    ) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            let from = (self.shared.at_home(cx, from.0).await?, from.1);
            let to = (self.shared.at_home(cx, to.0).await?, to.1);
            let replaced = match how {
                RenameHow::Replace => self.data_of(cx, to).await,
                RenameHow::NoReplace | RenameHow::Exchange => None,
            };
            self.home().rename(cx, from, to, how).await?;
            self.bury(replaced);
            Ok(())
        })
    }

    fn link<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        dir: FileId,
        name: &'a Name,
    ) -> Fut<'a, Result<Entry>> {
        Box::pin(async move {
            let dir = self.shared.at_home(cx, dir).await?;
            let entry = self.home().link(cx, id, dir, name).await?;
            self.whole(cx, entry).await
        })
    }

    fn learn<'a>(
        &'a self,
        _: &'a Context,
        _: (FileId, &'a Name),
        _: FileId,
    ) -> Fut<'a, Result<()>> {
        Box::pin(async { Err(Errno::ENOTSUP.into()) })
    }

    fn open<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        how: OpenHow,
    ) -> Fut<'a, Result<Arc<dyn OpenFile>>> {
        Box::pin(async move {
            let at_home = self.shared.at_home(cx, id).await?;
            let stub = self.home().open(cx, at_home, of_stub(how)).await?;
            self.opened(cx, (id, how), stub).await
        })
    }

    fn open_named<'a>(
        &'a self,
        cx: &'a Context,
        (dir, name): (FileId, &'a Name),
        id: FileId,
        how: OpenHow,
    ) -> Fut<'a, Result<Arc<dyn OpenFile>>> {
        Box::pin(async move {
            let dir = self.shared.at_home(cx, dir).await?;
            let stub = self.home().open_named(cx, (dir, name), id, of_stub(how)).await?;
            self.opened(cx, (id, how), stub).await
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
            let dir = self.shared.at_home(cx, dir).await?;
            let stub = CreateHow { open: of_stub(how.open), ..how };
            let made = self.home().create(cx, dir, name, stub).await?;
            self.created(cx, made, how).await
        })
    }

    fn tmpfile<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        how: CreateHow,
    ) -> Fut<'a, Result<(Entry, Arc<dyn OpenFile>)>> {
        Box::pin(async move {
            let dir = self.shared.at_home(cx, dir).await?;
            let stub = CreateHow { open: of_stub(how.open), ..how };
            let made = self.home().tmpfile(cx, dir, stub).await?;
            self.created(cx, made, CreateHow { exclusive: true, ..how }).await
        })
    }

    /// In steps, at the home and at the targets.
    fn put<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        mode: u32,
        data: Buf,
    ) -> Fut<'a, Result<()>> {
        Box::pin(put_in_steps(self, cx, (dir, name), mode, data))
    }

    fn access<'a>(&'a self, cx: &'a Context, id: FileId, want: Access) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            let id = self.shared.at_home(cx, id).await?;
            self.home().access(cx, id, want).await
        })
    }

    /// The space of all targets together, and the inodes of the home.
    fn statfs<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Statfs>> {
        Box::pin(async move {
            let calls = self.shared.servers.iter().map(|server| server.statfs(cx)).collect();
            let all: Result<Vec<Statfs>> = dray_rt::join_all(calls).await.into_iter().collect();
            let mut sum = Statfs::default();
            for one in all? {
                sum = if sum.block_bytes == 0 { one } else { with_space(sum, one) };
            }
            Ok(sum)
        })
    }

    /// At every server at once. Errors: the first.
    fn sync_all<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            let calls = self.shared.servers.iter().map(|server| server.sync_all(cx)).collect();
            dray_rt::join_all(calls).await.into_iter().collect()
        })
    }

    fn getxattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
    ) -> Fut<'a, Result<Vec<u8>>> {
        Box::pin(async move {
            if is_own(name) {
                return Err(Error::new(Errno::ENODATA));
            }
            let id = self.shared.at_home(cx, id).await?;
            self.home().getxattr(cx, id, name).await
        })
    }

    fn setxattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
        value: &'a [u8],
        how: XattrSet,
    ) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            if is_own(name) {
                return Err(Error::new(Errno::EPERM));
            }
            let id = self.shared.at_home(cx, id).await?;
            self.home().setxattr(cx, id, name, value, how).await
        })
    }

    fn listxattr<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Vec<u8>>> {
        Box::pin(async move {
            let id = self.shared.at_home(cx, id).await?;
            let names = self.home().listxattr(cx, id).await?;
            let shown = names.split_inclusive(|byte| *byte == 0).filter(|name| !is_own(name));
            Ok(shown.flatten().copied().collect())
        })
    }

    fn removexattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
    ) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            if is_own(name) {
                return Err(Error::new(Errno::ENODATA));
            }
            let id = self.shared.at_home(cx, id).await?;
            self.home().removexattr(cx, id, name).await
        })
    }
}

/// A stub stays empty. A change of its size shows whether the caller may change it, and clears its
/// set-id bits.
pub(super) fn of_stub_attr(set: SetAttr) -> SetAttr {
    SetAttr { size: set.size.map(|_| 0), ..set }
}

impl OwnDisks {
    /// The objects follow a change of the attributes of their stub. Answers those of the file.
    pub(super) async fn followed(
        &self,
        cx: &Context,
        id: FileId,
        (set, stub): (SetAttr, Attr),
    ) -> Result<Attr> {
        if stub.file_type() == FileType::Regular {
            if let Some(size) = set.size {
                self.cut(cx, id, size).await?;
            }
            self.set_times(cx, id, (set, stub)).await?;
        }
        self.whole(cx, id, stub).await
    }
}

/// `sum` with the space of `one`, in the units of `sum`.
fn with_space(sum: Statfs, one: Statfs) -> Statfs {
    let unit = u128::from(sum.fragment_bytes.max(1));
    let scaled = |blocks: u64| {
        let bytes = u128::from(blocks) * u128::from(one.fragment_bytes);
        u64::try_from(bytes / unit).unwrap_or(u64::MAX)
    };
    Statfs {
        blocks: sum.blocks.saturating_add(scaled(one.blocks)),
        blocks_free: sum.blocks_free.saturating_add(scaled(one.blocks_free)),
        blocks_available: sum.blocks_available.saturating_add(scaled(one.blocks_available)),
        ..sum
    }
}
