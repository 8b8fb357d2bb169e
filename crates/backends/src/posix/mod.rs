//! The posix backend: a directory of the server's machine.
//!
//! Operations run under the caller's identity, so the file system below decides about permissions.
//! Kernel handles name inodes, so ids outlive renames and the server (see the decision records on
//! handles and credentials). Where a file system has no lasting handles, a table of paths replaces
//! them.

mod attrs;
mod copy_up;
mod core;
mod cred;
mod data;
mod descriptor;
mod devices;
mod directory_locks;
mod expected_removal;
mod export_location;
mod files;
mod find;
mod fs_identity;
mod handle;
mod inode_cache;
mod kind;
mod lanes;
mod learned;
mod lower_fs;
mod mounts_below;
mod names;
mod open_file;
mod options;
mod outside;
mod parent;
mod path_log;
mod path_rewrite;
mod paths;
mod recently_unlinked;
mod removed;
mod reopen;
mod root;
mod shared_key;
mod shown_path;
mod siphash;
mod source;
mod sys;
mod thread_clients;
mod watch;
mod write_back;
mod written_ends;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use dray_core::{
    Access, Attr, Buf, Context, CreateHow, Entry, Errno, Error, FileId, FileSystem, FsInfo, FsUuid,
    Fut, Make, Name, Op, OpenFile, OpenHow, RemoveKind, RenameHow, Result, SetAttr, Statfs,
    Timestamp, Uid, XattrSet, open_named, put_in_steps,
};

use self::attrs::AttrTarget;
use self::core::{Core, SquashedCaller};
pub use self::cred::{as_server, release};
pub use self::export_location::{ExportLocation, OnDeath};
pub use self::fs_identity::{Difference, FsIdentity};
pub use self::kind::PosixKind;
use self::lanes::Lane;
use self::names::{CREATE_TRIES, CreateOutcome};
use self::open_file::PosixFile;
pub use self::options::{DescriptorStore, Inline, PosixOptions, Squash};
pub use self::root::Root;
use crate::backend::Hang;
use crate::locks::LockTable;

/// A directory, served.
pub struct PosixFs {
    core: Arc<Core>,
}

/// What an export holds at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holdings {
    /// Files open at clients.
    pub open_files: usize,
    /// Descriptors held for them.
    pub open_descriptors: usize,
    /// Descriptors of inodes used lately.
    pub cached_inodes: usize,
    /// Advisory locks held.
    pub locks: usize,
}

impl PosixFs {
    /// Serves `dir` as the file system `uuid`. The process must be root's and must not fork
    /// and go on as the child afterwards. Errors: `EPERM` without the rights, and those of
    /// open(2), such as `ENOTDIR`.
    pub fn open(dir: &Path, uuid: FsUuid, options: PosixOptions) -> Result<Arc<PosixFs>> {
        PosixFs::serve(Root::open(dir)?, uuid, options)
    }

    /// As [`PosixFs::open`], of a directory that was opened before.
    pub fn serve(root: Root, uuid: FsUuid, options: PosixOptions) -> Result<Arc<PosixFs>> {
        Ok(Arc::new(PosixFs { core: Core::open(root, uuid, options)? }))
    }

    /// Closes descriptors of inodes that were not used recently. An export in use does that by
    /// itself. An idle export that is to be unmounted needs this call.
    pub fn trim(&self) {
        self.core.nodes.trim();
    }

    /// Whether a call has been in the file system below for `least` or longer. Time counts
    /// from the first time that this was asked while the call was under way: ask every now
    /// and then. Never waits for the file system.
    pub fn hang(&self, least: Duration) -> Option<Hang> {
        let lasting = self.core.watch.lasting(least)?;
        Some(Hang { calls: lasting.calls + self.core.lanes.waiting(), since: lasting.longest })
    }

    /// The advisory locks of this export, for leases that end and for status.
    pub fn locks(&self) -> &LockTable {
        &self.core.locks
    }

    /// Closes descriptors of inodes that were not used for a while, for an idle export; calls do
    /// the same by the way. A thread of the export does it, since the file system may hang.
    pub async fn close_idle_inodes(&self) {
        if self.core.nodes.is_to_be_trimmed() {
            let _ = self.core.run_for_all(|core| core.nodes.trim()).await; // else the next time
        }
    }

    /// The guarantees that the file system below does not give, for the administrator: sentences
    /// without their ends.
    pub fn caveats(&self) -> Vec<String> {
        self.core.below.caveats(matches!(self.core.ids, core::Ids::Native(_)))
    }

    /// Looks for removed files that another server has kept for its clients
    /// ([`PosixOptions::keeps_removed`]). To be called before those clients open them here. Errors: those of
    /// reading the directory where they are kept.
    pub fn find_removed(&self) -> Result<()> {
        self.core.removed.as_ref().map_or(Ok(()), |removed| removed.find())
    }

    /// Removes files that were kept, are not open here, and `are_ours`: no client has come back for them.
    pub fn forget_removed(&self, are_ours: impl Fn(FileId) -> bool) {
        if let Some(removed) = &self.core.removed {
            removed.forget(|id| are_ours(id) && self.core.files.find(id).is_none());
        }
    }

    /// Whether another server of the directory gives its files the same ids, if it has the same key.
    pub fn has_shared_ids(&self) -> bool {
        matches!(self.core.ids, core::Ids::Native(_)) || self.core.learns_ids()
    }

    /// What it holds at the moment.
    pub fn holdings(&self) -> Holdings {
        let (open_files, open_descriptors) = self.core.files.counts();
        Holdings {
            open_files,
            open_descriptors,
            cached_inodes: self.core.nodes.len(),
            locks: self.core.locks.len(),
        }
    }
}

impl PosixFs {
    /// Makes or opens a file. The entry is there if the caller `wants_attr`.
    fn create_with<'a>(
        &'a self,
        cx: &'a Context,
        (dir, name): (FileId, &'a Name),
        how: CreateHow,
        wants_attr: bool,
    ) -> impl Future<Output = Result<(Option<Entry>, Arc<dyn OpenFile>)>> + Send + 'a {
        self.core.with_space(move || async move {
            let mut cuts: Option<FileId> = None;
            for _ in 0..CREATE_TRIES {
                let _lock = self.core.directory_locks.lock(dir).await;
                let (lane, about) = match cuts {
                    Some(id) => (Lane::Writes, id),
                    None => (Lane::Changes, dir),
                };
                let name = name.to_owned();
                let create = move |core: &Core, caller: &SquashedCaller| {
                    core.create(caller, (dir, &name), how, (cuts, wants_attr))
                };
                match self.core.run_in(cx, Op::Create, (lane, about), create).await? {
                    CreateOutcome::Opened(entry, file) => {
                        return Ok((entry, PosixFile::shared(&self.core, file)));
                    }
                    CreateOutcome::Cuts(id) => cuts = Some(id),
                }
            }
            Err(Error::retry(Errno::EAGAIN)
                .because("other clients rename files to this name again and again"))
        })
    }
}

impl FileSystem for PosixFs {
    fn info(&self) -> &FsInfo {
        &self.core.info
    }

    fn path(&self, id: FileId) -> Option<Vec<u8>> {
        self.core.path(id)
    }

    fn clock(&self) -> Option<Timestamp> {
        self.core.below.is_local().then(|| dray_rt::coarse_wall_clock().into())
    }

    fn user_of(&self, cx: &Context) -> Uid {
        self.core.user_of(cx)
    }

    fn lookup<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
    ) -> Fut<'a, Result<Entry>> {
        let name = name.to_owned();
        let look = move |core: &Core, caller: &SquashedCaller| core.lookup(caller, dir, &name);
        Box::pin(self.core.run(cx, (Op::Lookup, dir), look))
    }

    fn parent<'a>(&'a self, cx: &'a Context, dir: FileId) -> Fut<'a, Result<Entry>> {
        Box::pin(self.core.run(cx, (Op::Parent, dir), move |core, _| core.parent_of(dir)))
    }

    fn getattr<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Attr>> {
        let look = move |core: &Core, caller: &SquashedCaller| core.attr(caller, id);
        self.core.by_id(Box::pin(self.core.run(cx, (Op::Getattr, id), look)))
    }

    fn setattr<'a>(&'a self, cx: &'a Context, id: FileId, set: SetAttr) -> Fut<'a, Result<Attr>> {
        let change = move |core: &Core, caller: &SquashedCaller, may_block| match core
            .node_for(caller, id)
        {
            Ok(node) => core.set_attr(caller, id, &AttrTarget::Path(node.fd()), set, may_block),
            Err(error) => Some(Err(error)),
        };
        let lane = self.core.lane_to_set(id, set);
        self.core.by_id(Box::pin(self.core.run_patient(cx, Op::Setattr, lane, change)))
    }

    fn readlink<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Vec<u8>>> {
        self.core.by_id(Box::pin(self.core.run(cx, (Op::Readlink, id), move |core, caller| {
            let node = core.node_for(caller, id)?;
            match node.kind {
                dray_core::FileType::Symlink => Ok(sys::read_link(node.fd())?),
                _ => Err(dray_core::Errno::EINVAL.into()),
            }
        })))
    }

    fn make<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        what: Make<'a>,
    ) -> Fut<'a, Result<Entry>> {
        Box::pin(self.core.with_space(move || async move {
            let (name, what) = (name.to_owned(), what.into());
            let _lock = self.core.directory_locks.lock(dir).await;
            let make = move |core: &Core, _: &SquashedCaller| core.make(dir, &name, what);
            self.core.run(cx, (Op::Make, dir), make).await
        }))
    }

    fn remove<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        kind: RemoveKind,
    ) -> Fut<'a, Result<()>> {
        let name = name.to_owned();
        Box::pin(async move {
            let _lock = self.core.directory_locks.lock(dir).await;
            let remove =
                move |core: &Core, caller: &SquashedCaller| core.remove(caller, dir, &name, kind);
            self.core.run(cx, (Op::Remove, dir), remove).await
        })
    }

    fn rename<'a>(
        &'a self,
        cx: &'a Context,
        from: (FileId, &'a Name),
        to: (FileId, &'a Name),
        how: RenameHow,
    ) -> Fut<'a, Result<()>> {
        let (from, to) = ((from.0, from.1.to_owned()), (to.0, to.1.to_owned()));
        Box::pin(async move {
            let _locks = self.core.directory_locks.lock_both(from.0, to.0).await;
            let about = to.0;
            let rename = move |core: &Core, caller: &SquashedCaller| {
                core.rename(caller, (from.0, &from.1), (to.0, &to.1), how)
            };
            self.core.run(cx, (Op::Rename, about), rename).await
        })
    }

    fn link<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        dir: FileId,
        name: &'a Name,
    ) -> Fut<'a, Result<Entry>> {
        let name = name.to_owned();
        Box::pin(async move {
            let _lock = self.core.directory_locks.lock(dir).await;
            self.core.run(cx, (Op::Link, dir), move |core, _| core.link(id, dir, &name)).await
        })
    }

    fn open<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        how: OpenHow,
    ) -> Fut<'a, Result<Arc<dyn OpenFile>>> {
        let open = move |core: &Core, caller: &SquashedCaller, may_block| {
            core.open_node(caller, id, how, may_block)
        };
        let lane = self.core.lane_to_open(id, how);
        let opened = self.core.by_id(Box::pin(self.core.run_patient(cx, Op::Open, lane, open)));
        Box::pin(async move { Ok(PosixFile::shared(&self.core, opened.await?)) })
    }

    fn learn<'a>(
        &'a self,
        cx: &'a Context,
        (dir, name): (FileId, &'a Name),
        id: FileId,
    ) -> Fut<'a, Result<()>> {
        let name = name.to_owned();
        let learn = move |core: &Core, _: &SquashedCaller| core.learn((dir, &name), id);
        Box::pin(self.core.run(cx, (Op::Learn, dir), learn))
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

    fn create<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        how: CreateHow,
    ) -> Fut<'a, Result<(Entry, Arc<dyn OpenFile>)>> {
        Box::pin(async move {
            let (entry, file) = self.create_with(cx, (dir, name), how, true).await?;
            Ok((entry.expect("it was asked for"), file))
        })
    }

    fn create_without_attr<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        how: CreateHow,
    ) -> Fut<'a, Result<Arc<dyn OpenFile>>> {
        Box::pin(async move {
            self.create_with(cx, (dir, name), how, false).await.map(|(_, file)| file)
        })
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
    ) -> Fut<'a, Result<(Entry, Arc<dyn OpenFile>)>> {
        Box::pin(async move {
            let make = move |core: &Core, caller: &SquashedCaller| core.tmpfile(caller, dir, how);
            let (entry, file) = self.core.run(cx, (Op::Tmpfile, dir), make).await?;
            Ok((entry, PosixFile::shared(&self.core, file)))
        })
    }

    fn access<'a>(&'a self, cx: &'a Context, id: FileId, want: Access) -> Fut<'a, Result<()>> {
        let check = move |core: &Core, caller: &SquashedCaller| core.check_access(caller, id, want);
        self.core.by_id(Box::pin(self.core.run(cx, (Op::Access, id), check)))
    }

    fn statfs<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Statfs>> {
        let about = self.core.info.root;
        let look = |core: &Core, _: &SquashedCaller| Ok(sys::statfs(core.root.fd())?.0);
        Box::pin(self.core.run(cx, (Op::Statfs, about), look))
    }

    fn sync_all<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<()>> {
        let about = self.core.info.root;
        let sync = |core: &Core, _: &SquashedCaller| Ok(sys::sync_all(core.mount_fd())?);
        Box::pin(self.core.run(cx, (Op::SyncAll, about), sync))
    }

    fn getxattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
    ) -> Fut<'a, Result<Vec<u8>>> {
        let name = name.to_vec();
        let get = move |core: &Core, caller: &SquashedCaller| core.get_xattr(caller, id, &name);
        self.core.by_id(Box::pin(self.core.run(cx, (Op::Getxattr, id), get)))
    }

    fn setxattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
        value: &'a [u8],
        how: XattrSet,
    ) -> Fut<'a, Result<()>> {
        let (name, value) = (name.to_vec(), value.to_vec());
        let set = move |core: &Core, caller: &SquashedCaller| {
            core.set_xattr(caller, id, &name, &value, how)
        };
        self.core.by_id(Box::pin(self.core.run(cx, (Op::Setxattr, id), set)))
    }

    fn listxattr<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Vec<u8>>> {
        let list = move |core: &Core, caller: &SquashedCaller| core.list_xattr(caller, id);
        self.core.by_id(Box::pin(self.core.run(cx, (Op::Listxattr, id), list)))
    }

    fn removexattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
    ) -> Fut<'a, Result<()>> {
        let name = name.to_vec();
        let remove =
            move |core: &Core, caller: &SquashedCaller| core.remove_xattr(caller, id, &name);
        self.core.by_id(Box::pin(self.core.run(cx, (Op::Removexattr, id), remove)))
    }
}
