//! The [`FileSystem`] trait over the store: finds the file, runs the operation.

use std::future::ready;
use std::sync::Arc;

use dray_core::{
    Access, Attr, Buf, Context, CreateHow, Entry, Errno, FileId, FileSystem, FileType, FsInfo, Fut,
    Make, Name, OpenFile, OpenHow, RemoveKind, RenameHow, Result, SetAttr, Statfs, Timestamp, Uid,
    XattrSet, open_named, put_in_steps,
};

use super::store::Store;
use super::{MemoryFile, MemoryFs};

type Opened = (Entry, Arc<dyn OpenFile>);

/// Answers at once: nothing here waits.
fn answer<'a, T: Send + 'a>(result: Result<T>) -> Fut<'a, Result<T>> {
    Box::pin(ready(result))
}

impl MemoryFs {
    /// Opens what is there, as may_open of Linux decides it.
    fn open_existing(
        &self,
        store: &mut Store,
        cx: &Context,
        ino: u64,
        how: OpenHow,
    ) -> Result<MemoryFile> {
        let meta = &store.inode(ino)?.meta;
        if how.directory() && !meta.is_dir() {
            return Err(Errno::ENOTDIR.into());
        }
        let mode = how.flags & libc::O_ACCMODE;
        let changes = mode != libc::O_RDONLY || how.truncates();
        match meta.kind() {
            FileType::Symlink => return Err(Errno::ELOOP.into()),
            FileType::Directory if changes => return Err(Errno::EISDIR.into()),
            FileType::Directory | FileType::Regular => {}
            _ => return Err(Errno::ENXIO.into()), // the node's own kernel opens these
        }
        let want = match how.executes() {
            true => libc::X_OK,
            false => {
                i32::from(mode != libc::O_WRONLY) * libc::R_OK + i32::from(changes) * libc::W_OK
            }
        };
        if !(how.is_by_creator() && meta.uid == cx.who.uid) {
            meta.may(cx, want as u32)?;
        }
        if how.truncates() {
            store.set_size(ino, 0)?;
            store.content_changed(cx, ino, how.kill_set_id)?;
        }
        self.opened(store, ino, how)
    }

    fn create_or_open(
        &self,
        store: &mut Store,
        cx: &Context,
        dir: FileId,
        name: &Name,
        how: CreateHow,
    ) -> Result<Opened> {
        let dir = store.find(dir)?;
        let file = match store.named(cx, dir, name)? {
            Some(_) if how.exclusive => return Err(Errno::EEXIST.into()),
            Some(ino) if store.inode(ino)?.meta.is_dir() => return Err(Errno::EISDIR.into()),
            Some(ino) => self.open_existing(store, cx, ino, how.open)?,
            None => {
                let ino = store.new_file(cx, dir, Some(name), how.mode)?;
                self.opened(store, ino, how.open)?
            }
        };
        with_entry(store, file)
    }

    fn make_unnamed(
        &self,
        store: &mut Store,
        cx: &Context,
        dir: FileId,
        how: CreateHow,
    ) -> Result<Opened> {
        let dir = store.find(dir)?;
        store.inode(dir)?.directory()?;
        if !how.open.writes() {
            return Err(Errno::EINVAL.into());
        }
        let ino = store.new_file(cx, dir, None, how.mode)?;
        store.change(ino)?.linkable = !how.exclusive;
        let file = self.opened(store, ino, how.open)?;
        with_entry(store, file)
    }
}

fn with_entry(store: &Store, file: MemoryFile) -> Result<Opened> {
    Ok((store.entry(file.id().ino)?, Arc::new(file)))
}

impl FileSystem for MemoryFs {
    fn info(&self) -> &FsInfo {
        &self.shared.info
    }

    fn path(&self, _: FileId) -> Option<Vec<u8>> {
        None
    }

    fn clock(&self) -> Option<Timestamp> {
        Some(super::inode::now())
    }

    fn user_of(&self, cx: &Context) -> Uid {
        cx.who.uid
    }

    fn lookup<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
    ) -> Fut<'a, Result<Entry>> {
        answer(self.with(|store| store.lookup(cx, dir, name)))
    }

    fn parent<'a>(&'a self, cx: &'a Context, dir: FileId) -> Fut<'a, Result<Entry>> {
        answer(self.with(|store| store.parent(cx, dir)))
    }

    fn getattr<'a>(&'a self, _cx: &'a Context, id: FileId) -> Fut<'a, Result<Attr>> {
        answer(self.with(|store| store.getattr(store.find(id)?)))
    }

    fn setattr<'a>(&'a self, cx: &'a Context, id: FileId, set: SetAttr) -> Fut<'a, Result<Attr>> {
        answer(self.with_change(|store| {
            let ino = store.find(id)?;
            store.setattr(cx, ino, set, None)
        }))
    }

    fn readlink<'a>(&'a self, _cx: &'a Context, id: FileId) -> Fut<'a, Result<Vec<u8>>> {
        answer(self.with(|store| match &store.inode(store.find(id)?)?.body {
            super::inode::Body::Symlink(target) => Ok(target.to_vec()),
            _ => Err(Errno::EINVAL.into()),
        }))
    }

    fn make<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        what: Make<'a>,
    ) -> Fut<'a, Result<Entry>> {
        answer(self.with_change(|store| store.make(cx, dir, name, what)))
    }

    fn remove<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        kind: RemoveKind,
    ) -> Fut<'a, Result<()>> {
        answer(self.with_change(|store| store.remove(cx, dir, name, kind)))
    }

    fn rename<'a>(
        &'a self,
        cx: &'a Context,
        from: (FileId, &'a Name),
        to: (FileId, &'a Name),
        how: RenameHow,
    ) -> Fut<'a, Result<()>> {
        answer(self.with_change(|store| store.rename(cx, from, to, how)))
    }

    fn link<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        dir: FileId,
        name: &'a Name,
    ) -> Fut<'a, Result<Entry>> {
        answer(self.with_change(|store| store.link(cx, id, dir, name)))
    }

    fn open<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        how: OpenHow,
    ) -> Fut<'a, Result<Arc<dyn OpenFile>>> {
        let op = |store: &mut Store| {
            let ino = store.find(id)?;
            let file = self.open_existing(store, cx, ino, how)?;
            Ok(Arc::new(file) as Arc<dyn OpenFile>)
        };
        let changes = how.writes() || how.truncates();
        answer(if changes { self.with_change(op) } else { self.with(op) })
    }

    fn open_named<'a>(
        &'a self,
        cx: &'a Context,
        place: (FileId, &'a Name),
        id: FileId,
        how: OpenHow,
    ) -> Fut<'a, Result<Arc<dyn OpenFile>>> {
        Box::pin(open_named(self, cx, place, id, how))
    }

    fn learn<'a>(
        &'a self,
        _: &'a Context,
        _: (FileId, &'a Name),
        _: FileId,
    ) -> Fut<'a, Result<()>> {
        Box::pin(async { Err(Errno::ENOTSUP.into()) })
    }

    fn create<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        how: CreateHow,
    ) -> Fut<'a, Result<Opened>> {
        answer(self.with_change(|store| self.create_or_open(store, cx, dir, name, how)))
    }

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

    fn tmpfile<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        how: CreateHow,
    ) -> Fut<'a, Result<Opened>> {
        answer(self.with_change(|store| self.make_unnamed(store, cx, dir, how)))
    }

    fn access<'a>(&'a self, cx: &'a Context, id: FileId, want: Access) -> Fut<'a, Result<()>> {
        answer(self.with(|store| store.access(cx, store.find(id)?, want)))
    }

    fn statfs<'a>(&'a self, _cx: &'a Context) -> Fut<'a, Result<Statfs>> {
        answer(self.with(|store| Ok(store.statfs())))
    }

    fn sync_all<'a>(&'a self, _cx: &'a Context) -> Fut<'a, Result<()>> {
        answer(self.with(|store| {
            store.sync_all();
            Ok(())
        }))
    }

    fn getxattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
    ) -> Fut<'a, Result<Vec<u8>>> {
        answer(self.with(|store| store.getxattr(cx, store.find(id)?, name)))
    }

    fn setxattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
        value: &'a [u8],
        how: XattrSet,
    ) -> Fut<'a, Result<()>> {
        answer(self.with_change(|store| {
            let ino = store.find(id)?;
            store.setxattr(cx, ino, name, value, how)
        }))
    }

    fn listxattr<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Vec<u8>>> {
        answer(self.with(|store| store.listxattr(cx, store.find(id)?)))
    }

    fn removexattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
    ) -> Fut<'a, Result<()>> {
        answer(self.with_change(|store| {
            let ino = store.find(id)?;
            store.removexattr(cx, ino, name)
        }))
    }
}
