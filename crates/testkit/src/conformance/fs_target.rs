//! `FileSystem` objects as a target: walks paths as a kernel above would.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use dray_core::{
    Access, Allocate, Attr, Buf, BufMut, Context, CreateHow, Entry, Errno, Error, FileId,
    FileSystem, FileType, Fut, Gid, Make, Name, NameBuf, NodeId, OpenFile, OpenHow, Pid,
    RemoveKind, RequestId, Result, Seek, SetAttr, TimeSet, Timestamp, Uid, Write,
};

use super::StepTarget;
use crate::model::{ModelStat, Quirks, StepOutcome};
use crate::step::{self, Action, Path, SLOTS, Step, xattr_name};

/// One or more clients' views of one store.
pub struct FsTarget {
    root: FileId,
    clients: Vec<Arc<dyn FileSystem>>,
    quirks: Quirks,
    slots: [Option<Slot>; SLOTS],
    requests: u64,
}

struct Slot {
    client: usize,
    file: Arc<dyn OpenFile>,
    appends: bool,
}

/// A step's client, and the user on whose behalf it calls.
struct Caller {
    root: FileId,
    client: usize,
    fs: Arc<dyn FileSystem>,
    cx: Context,
}

impl FsTarget {
    /// A target of these clients, which all see the same store. At least one.
    pub fn new(clients: Vec<Arc<dyn FileSystem>>, quirks: Quirks) -> FsTarget {
        assert!(!clients.is_empty(), "a target needs a client");
        let root = clients[0].info().root;
        FsTarget::at(root, clients, quirks)
    }

    /// As [`FsTarget::new`], in the empty directory `root` instead of the whole store.
    pub fn at(root: FileId, clients: Vec<Arc<dyn FileSystem>>, quirks: Quirks) -> FsTarget {
        assert!(!clients.is_empty(), "a target needs a client");
        FsTarget { root, clients, quirks, slots: [const { None }; SLOTS], requests: 0 }
    }

    /// Closes whatever a sequence left open; errors are ignored.
    pub async fn close_all(&mut self) {
        for slot in 0..SLOTS {
            let cx = self.caller(0, 0).cx;
            let _ = self.put(&cx, slot as u8, None).await;
        }
    }

    fn caller(&mut self, client: usize, who: u8) -> Caller {
        self.requests += 1;
        let client = client % self.clients.len();
        let node = NodeId(client as u64 + 1);
        let pid = Pid(100 + u32::from(who));
        let cx = Context::new(node, RequestId(self.requests), step::identity(who), pid);
        Caller { root: self.root, client, fs: self.clients[client].clone(), cx }
    }

    fn slot(&self, slot: u8) -> Option<&Slot> {
        self.slots[usize::from(slot) % SLOTS].as_ref()
    }

    async fn put(&mut self, cx: &Context, slot: u8, new: Option<Slot>) -> Result<()> {
        match std::mem::replace(&mut self.slots[usize::from(slot) % SLOTS], new) {
            Some(old) => old.file.close(cx).await,
            None => Ok(()),
        }
    }

    async fn run(&mut self, step: &Step) -> Result<StepOutcome> {
        let caller = self.caller(usize::from(step.client), step.who);
        match &step.action {
            Action::Open { path, flags, slot } => {
                let file = caller.open(path, *flags).await?;
                self.opened(&caller, *slot, *flags, file).await
            }
            Action::Create { path, flags, mode, exclusive, slot } => {
                let file = caller.create(path, *flags, *mode, *exclusive).await?;
                self.opened(&caller, *slot, *flags, file).await
            }
            Action::Tmpfile { dir, mode, slot } => {
                let dir = caller.walk(dir, true).await?.id;
                let open = OpenHow::READ_WRITE;
                let how = CreateHow { open, mode: *mode, exclusive: false };
                let (_, file) = caller.fs.tmpfile(&caller.cx, dir, how).await?;
                self.opened(&caller, *slot, libc::O_RDWR, file).await
            }
            Action::Close { slot } => {
                if self.slot(*slot).is_none() {
                    return Ok(StepOutcome::NoSlot);
                }
                self.put(&caller.cx, *slot, None).await?;
                Ok(StepOutcome::Done)
            }
            Action::LinkSlot { slot, to } => {
                let Some((client, id)) = self.slot(*slot).map(|slot| (slot.client, slot.file.id()))
                else {
                    return Ok(StepOutcome::NoSlot);
                };
                let caller = self.caller(client, step.who);
                let (dir, name) = caller.parent(to).await?;
                caller.fs.link(&caller.cx, id, dir, &name).await?;
                Ok(StepOutcome::Done)
            }
            action => match self.run_on_slot(step, action).await {
                Some(result) => result,
                None => caller.run_on_path(action).await,
            },
        }
    }

    async fn opened(
        &mut self,
        caller: &Caller,
        slot: u8,
        flags: i32,
        file: Arc<dyn OpenFile>,
    ) -> Result<StepOutcome> {
        let appends = flags & libc::O_APPEND != 0;
        self.put(&caller.cx, slot, Some(Slot { client: caller.client, file, appends })).await?;
        Ok(StepOutcome::Done)
    }

    /// None for an action that is not on an open file.
    async fn run_on_slot(&mut self, step: &Step, action: &Action) -> Option<Result<StepOutcome>> {
        let (Action::Read { slot, .. }
        | Action::Write { slot, .. }
        | Action::Fsync { slot }
        | Action::Fstat { slot }
        | Action::Ftruncate { slot, .. }
        | Action::Fallocate { slot, .. }
        | Action::Seek { slot, .. }
        | Action::CopyRange { from: slot, .. }) = action
        else {
            return None;
        };
        let Some(client) = self.slot(*slot).map(|slot| slot.client) else {
            return Some(Ok(StepOutcome::NoSlot));
        };
        let cx = self.caller(client, step.who).cx;
        let to = match action {
            Action::CopyRange { to, .. } => match self.slot(*to) {
                Some(to) => Some(&*to.file),
                None => return Some(Ok(StepOutcome::NoSlot)),
            },
            _ => None,
        };
        let slot = self.slot(*slot)?;
        Some(on_file(&cx, slot, to, action).await)
    }
}

async fn on_file(
    cx: &Context,
    slot: &Slot,
    to: Option<&dyn OpenFile>,
    action: &Action,
) -> Result<StepOutcome> {
    let file = &slot.file;
    match *action {
        Action::Read { at, len, .. } => {
            let read = file.read(cx, at, BufMut::heap(len as usize)).await;
            let buf = read.map_err(|(error, _)| error)?;
            Ok(StepOutcome::Bytes(buf.filled().to_vec()))
        }
        Action::Write { at, len, fill, .. } => {
            let how = Write { append: slot.appends, ..Write::at(at) };
            let bytes = Buf::from(step::pattern(fill, len));
            Ok(StepOutcome::Count(file.write(cx, how, bytes).await? as u64))
        }
        Action::Fsync { .. } => file.sync(cx, false).await.map(|()| StepOutcome::Done),
        Action::Fstat { .. } => file.getattr(cx).await.map(|attr| stat(&attr)),
        Action::Ftruncate { size, .. } => {
            let set = SetAttr { size: Some(size), ..SetAttr::default() };
            file.setattr(cx, set).await.map(|_| StepOutcome::Done)
        }
        Action::Fallocate { flags, at, len, .. } => {
            let what = Allocate { flags, at, len_bytes: len };
            file.allocate(cx, what).await.map(|()| StepOutcome::Done)
        }
        Action::Seek { at, hole, .. } => {
            let what = if hole { Seek::Hole } else { Seek::Data };
            file.seek(cx, at, what).await.map(StepOutcome::Count)
        }
        Action::CopyRange { at, to_at, len, .. } => match to {
            Some(to) => copy_whole(cx, (file, at), (to, to_at), len).await.map(StepOutcome::Count),
            None => Ok(StepOutcome::NoSlot),
        },
        _ => Err(Errno::ENOSYS.into()),
    }
}

/// Copies all that there is: file systems that share blocks copy whole ones first, and stop.
async fn copy_whole(
    cx: &Context,
    (from, at): (&Arc<dyn OpenFile>, u64),
    (to, to_at): (&dyn OpenFile, u64),
    len: u64,
) -> Result<u64> {
    let size = from.getattr(cx).await?.size; // the file may be copied to its own end
    let mut copied = from.copy_range(cx, at, to, to_at, len).await?;
    let len = len.min(size.saturating_sub(at));
    while copied > 0 && copied < len {
        let more = from.copy_range(cx, at + copied, to, to_at + copied, len - copied).await;
        match more {
            Ok(0) | Err(_) => break,
            Ok(more) => copied += more,
        }
    }
    Ok(copied)
}

impl Caller {
    /// Where a path leads. The links that are made lead to nothing.
    async fn walk(&self, path: &Path, follow_last: bool) -> Result<Entry> {
        let id = self.root;
        let mut at = Entry { id, attr: self.fs.getattr(&self.cx, id).await? };
        for (index, &part) in path.iter().enumerate() {
            if at.attr.file_type() != FileType::Directory {
                return Err(Errno::ENOTDIR.into());
            }
            let name = NameBuf::new(&step::name(part))?;
            at = self.fs.lookup(&self.cx, at.id, &name).await?;
            let last = index + 1 == path.len();
            if at.attr.file_type() == FileType::Symlink && (!last || follow_last) {
                return Err(Errno::ENOENT.into());
            }
        }
        Ok(at)
    }

    async fn parent(&self, path: &Path) -> Result<(FileId, NameBuf)> {
        let (&last, above) = path.split_last().ok_or(Error::new(Errno::EINVAL))?;
        let dir = self.walk(&above.to_vec(), true).await?;
        if dir.attr.file_type() != FileType::Directory {
            return Err(Errno::ENOTDIR.into());
        }
        // A kernel checks this while it walks: before it looks at another path.
        self.fs.access(&self.cx, dir.id, Access(libc::X_OK as u32)).await?;
        Ok((dir.id, NameBuf::new(&step::name(last))?))
    }

    async fn open(&self, path: &Path, flags: i32) -> Result<Arc<dyn OpenFile>> {
        let entry = self.walk(path, flags & libc::O_NOFOLLOW == 0).await?;
        if flags & libc::O_DIRECTORY != 0 && entry.attr.file_type() != FileType::Directory {
            return Err(Errno::ENOTDIR.into());
        }
        if is_special(&entry.attr) {
            return Err(Errno::ENXIO.into());
        }
        self.fs.open(&self.cx, entry.id, OpenHow::new(flags)).await
    }

    async fn create(
        &self,
        path: &Path,
        flags: i32,
        mode: u32,
        exclusive: bool,
    ) -> Result<Arc<dyn OpenFile>> {
        let (dir, name) = self.parent(path).await?;
        match self.fs.lookup(&self.cx, dir, &name).await {
            Ok(found) if !exclusive && is_special(&found.attr) => return Err(Errno::ENXIO.into()),
            Ok(found) if !exclusive && found.attr.file_type() == FileType::Symlink => {
                let refused = flags & libc::O_NOFOLLOW != 0;
                return Err(if refused { Errno::ELOOP } else { Errno::ENOENT }.into());
            }
            Err(error) if error.errno() != Errno::ENOENT => return Err(error),
            _ => {}
        }
        let how = CreateHow { open: OpenHow::new(flags), mode, exclusive };
        Ok(self.fs.create(&self.cx, dir, &name, how).await?.1)
    }

    async fn make(&self, path: &Path, what: Make<'_>) -> Result<StepOutcome> {
        let (dir, name) = self.parent(path).await?;
        self.fs.make(&self.cx, dir, &name, what).await.map(|_| StepOutcome::Done)
    }

    async fn remove(&self, path: &Path, kind: RemoveKind) -> Result<StepOutcome> {
        let (dir, name) = self.parent(path).await?;
        self.fs.remove(&self.cx, dir, &name, kind).await.map(|()| StepOutcome::Done)
    }

    async fn setattr(&self, path: &Path, follow: bool, set: SetAttr) -> Result<StepOutcome> {
        let id = self.walk(path, follow).await?.id;
        self.fs.setattr(&self.cx, id, set).await.map(|_| StepOutcome::Done)
    }

    async fn run_on_path(&self, action: &Action) -> Result<StepOutcome> {
        let (fs, cx) = (&self.fs, &self.cx);
        match action {
            Action::Mkdir { path, mode } => self.make(path, Make::Directory { mode: *mode }).await,
            Action::Mknod { path, mode } => {
                self.make(path, Make::Node { mode: *mode, rdev: 0 }).await
            }
            Action::Symlink { path, target } => {
                let target = step::NOWHERE[usize::from(*target) % step::NOWHERE.len()];
                self.make(path, Make::Symlink { target }).await
            }
            Action::Link { from, to } => {
                let id = self.walk(from, false).await?.id;
                let (dir, name) = self.parent(to).await?;
                fs.link(cx, id, dir, &name).await.map(|_| StepOutcome::Done)
            }
            Action::Unlink { path } => self.remove(path, RemoveKind::File).await,
            Action::Rmdir { path } => self.remove(path, RemoveKind::Directory).await,
            Action::Rename { from, to, how } => {
                let (from, to) = (self.parent(from).await?, self.parent(to).await?);
                fs.rename(cx, (from.0, &from.1), (to.0, &to.1), *how).await?;
                Ok(StepOutcome::Done)
            }
            Action::Readlink { path } => {
                let id = self.walk(path, false).await?.id;
                fs.readlink(cx, id).await.map(StepOutcome::Bytes)
            }
            Action::List { path } => self.list(path).await,
            _ => self.run_on_attributes(action).await,
        }
    }

    async fn list(&self, path: &Path) -> Result<StepOutcome> {
        let dir = self.open(path, libc::O_RDONLY | libc::O_DIRECTORY).await?;
        let id = dir.id();
        let mut names = BTreeMap::new();
        let mut cookie = 0;
        loop {
            // Small pages, so that going on from a cookie is tried too.
            let page = dir.readdir(&self.cx, cookie, 300, true).await?;
            for (name, entry) in page.iter() {
                let kind = match entry.kind {
                    Some(kind) => kind,
                    None => self.fs.lookup(&self.cx, id, Name::new(name)?).await?.attr.file_type(),
                };
                cookie = entry.cookie;
                if names.insert(name.to_vec(), kind).is_some() {
                    return Err(Error::new(Errno::EUCLEAN).because("a name was listed twice"));
                }
            }
            if page.end || page.is_empty() {
                break;
            }
        }
        dir.close(&self.cx).await?;
        Ok(StepOutcome::Names(names))
    }

    async fn run_on_attributes(&self, action: &Action) -> Result<StepOutcome> {
        let (fs, cx) = (&self.fs, &self.cx);
        match action {
            Action::Lstat { path } => Ok(stat(&self.walk(path, false).await?.attr)),
            Action::Chmod { path, mode } => {
                self.setattr(path, true, SetAttr { mode: Some(*mode), ..SetAttr::default() }).await
            }
            Action::Lchown { path, uid, gid } => {
                let (uid, gid) = (uid.map(Uid), gid.map(Gid));
                self.setattr(path, false, SetAttr { uid, gid, ..SetAttr::default() }).await
            }
            Action::Truncate { path, size } => {
                self.setattr(path, true, SetAttr { size: Some(*size), ..SetAttr::default() }).await
            }
            Action::Utimens { path, mtime_sec } => {
                let at = |sec: u32| TimeSet::At(Timestamp { sec: sec.into(), nsec: 0 });
                let set = match mtime_sec {
                    Some(sec) => SetAttr { mtime: Some(at(*sec)), ..SetAttr::default() },
                    None => SetAttr {
                        atime: Some(TimeSet::Now),
                        mtime: Some(TimeSet::Now),
                        ..SetAttr::default()
                    },
                };
                self.setattr(path, true, set).await
            }
            Action::Access { path, want } => {
                let id = self.walk(path, true).await?.id;
                fs.access(cx, id, Access(*want)).await.map(|()| StepOutcome::Done)
            }
            Action::Setxattr { path, name, value, how } => {
                let id = self.walk(path, false).await?.id;
                fs.setxattr(cx, id, xattr_name(*name), value, *how)
                    .await
                    .map(|()| StepOutcome::Done)
            }
            Action::Getxattr { path, name } => {
                let id = self.walk(path, false).await?.id;
                fs.getxattr(cx, id, xattr_name(*name)).await.map(StepOutcome::Bytes)
            }
            Action::Listxattr { path } => {
                let id = self.walk(path, false).await?.id;
                fs.listxattr(cx, id).await.map(|list| user_names(&list))
            }
            Action::Removexattr { path, name } => {
                let id = self.walk(path, false).await?.id;
                fs.removexattr(cx, id, xattr_name(*name)).await.map(|()| StepOutcome::Done)
            }
            _ => Err(Errno::ENOSYS.into()),
        }
    }
}

fn is_special(attr: &Attr) -> bool {
    matches!(attr.file_type(), FileType::Fifo | FileType::Socket)
}

/// The names of a listxattr(2) answer that are the user's.
pub(super) fn user_names(list: &[u8]) -> StepOutcome {
    let names = list.split(|&byte| byte == 0).filter(|name| name.starts_with(b"user."));
    StepOutcome::XattrNames(names.map(<[u8]>::to_vec).collect::<BTreeSet<_>>())
}

fn stat(attr: &Attr) -> StepOutcome {
    let is_dir = attr.file_type() == FileType::Directory;
    StepOutcome::Stat(ModelStat {
        mode: attr.mode,
        nlink: attr.nlink,
        uid: attr.uid.0,
        gid: attr.gid.0,
        size: if is_dir { 0 } else { attr.size },
        mtime_sec: Some(attr.mtime.sec),
    })
}

impl StepTarget for FsTarget {
    fn quirks(&self) -> Quirks {
        self.quirks
    }

    /// What no kernel above would ask for: copies between the open files of two clients, or
    /// to one opened with `O_APPEND`, and transfers of nothing.
    fn skips(&self, step: &Step) -> bool {
        match step.action {
            Action::Read { len: 0, .. } | Action::Write { len: 0, .. } => true,
            Action::CopyRange { from, to, .. } => match (self.slot(from), self.slot(to)) {
                (Some(from), Some(to)) => from.client != to.client || to.appends,
                _ => false,
            },
            _ => false,
        }
    }

    fn prepare(&mut self) -> Fut<'_, std::result::Result<(), String>> {
        Box::pin(async {
            let Caller { fs, cx, .. } = self.caller(0, 0);
            let set = SetAttr { mode: Some(0o777), ..SetAttr::default() };
            match fs.setattr(&cx, self.root, set).await {
                Ok(_) => Ok(()),
                Err(error) => Err(error.to_string()),
            }
        })
    }

    fn apply<'a>(&'a mut self, step: &'a Step) -> Fut<'a, StepOutcome> {
        Box::pin(async {
            self.run(step).await.unwrap_or_else(|error| StepOutcome::Failed(error.errno()))
        })
    }
}
