//! How a directory is exported.

use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::Arc;

use dray_core::{FileId, FsUuid, Gid, Identity, Uid};

use super::place::OnDeath;

/// Whose identities are not taken at their word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Squash {
    /// Everybody is who the client says.
    None,
    /// The super-user becomes this user with this one group.
    Root(Uid, Gid),
    /// Everybody becomes this user with this one group.
    All(Uid, Gid),
}

impl Squash {
    /// The user that files are left to when nobody is named: `nobody` of most systems.
    pub const NOBODY: (Uid, Gid) = (Uid(65_534), Gid(65_534));

    /// Which user `who` is here.
    pub(crate) fn user_of(self, who: &Identity) -> Uid {
        match self {
            Squash::Root(uid, _) if who.is_root() => uid,
            Squash::All(uid, _) => uid,
            Squash::None | Squash::Root(..) => who.uid,
        }
    }

    /// Who `who` is here. A group 0 of somebody else than root is squashed with root.
    pub(crate) fn map(self, who: &Arc<Identity>) -> Arc<Identity> {
        let (uid, gid) = match self {
            Squash::None => return who.clone(),
            Squash::Root(uid, gid) if who.is_root() => (uid, gid),
            Squash::Root(_, gid) => return squash_group(who, gid),
            Squash::All(uid, gid) => (uid, gid),
        };
        Arc::new(Identity { uid, gid, groups: Box::default(), job: who.job.clone() })
    }
}

fn squash_group(who: &Arc<Identity>, anonymous: Gid) -> Arc<Identity> {
    if !who.in_group(Gid(0)) {
        return who.clone();
    }
    let groups = who.groups.iter().copied().filter(|gid| *gid != Gid(0)).collect();
    let gid = if who.gid == Gid(0) { anonymous } else { who.gid };
    Arc::new(Identity { uid: who.uid, gid, groups, job: who.job.clone() })
}

/// Where calls to the file system below are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inline {
    /// On the calling thread what does not wait: for file systems in memory nearly everything,
    /// for those on local disks looks at names and attributes and reading what is in memory. On
    /// the export's own threads the rest, and everything for all others (FUSE, NFS and whatever is
    /// not known), which take long. A look can wait after all, and keeps its thread then: a
    /// calling thread must not serve other exports.
    Auto,
    /// Always on the calling thread.
    Always,
    /// Always on the export's own threads.
    Never,
}

/// Somebody outside of this process who keeps files that were deleted while they are open,
/// so that they are still there for the process that takes over should this one die. Two exports
/// of one directory have the same files: what was held or adopted twice is released twice.
pub trait Keeper: Send + Sync + std::fmt::Debug {
    /// Keeps what `fd` refers to until it is released. Failing is allowed: then such a
    /// file ends with this process.
    fn hold(&self, fs: FsUuid, id: FileId, fd: BorrowedFd<'_>);

    /// Whether it is kept, perhaps for a process before this one.
    fn holds(&self, fs: FsUuid, id: FileId) -> bool;

    /// As [`Keeper::holds`], of a file that has been opened: from now on it is kept until it is
    /// released, also if it was kept for a process before this one.
    fn adopt(&self, fs: FsUuid, id: FileId) -> bool;

    /// The last open file of it was closed, of whoever held or adopted it.
    fn release(&self, fs: FsUuid, id: FileId);

    /// It is no longer open here, and whoever had it open will come back for it: as in the life of a
    /// process that ends.
    fn keep_for_return(&self, fs: FsUuid, id: FileId);
}

/// Options of [`PosixFs::open`](super::PosixFs::open).
#[derive(Clone, Debug)]
pub struct PosixOptions {
    /// Refuse changes with `EROFS`.
    pub read_only: bool,
    /// Whose identities are replaced.
    pub squash: Squash,
    /// Which thread does the work.
    pub inline: Inline,
    /// Threads of the export's own, for calls that block, of each kind of these.
    pub threads_max: usize,
    /// Calls of one client that wait for one of these threads in its queue. Further ones, of which
    /// each connection has a bound, wait for a place in that.
    pub queue_max: usize,
    /// Descriptors kept open for files that are open at clients. 0: half of the process's
    /// limit (`RLIMIT_NOFILE`).
    pub open_descriptors_max: usize,
    /// Files that clients may have open, with or without a descriptor; more answer `ENFILE`.
    pub open_files_max: usize,
    /// `O_PATH` descriptors kept for inodes used lately. 0: 4,096, or a quarter of
    /// `RLIMIT_NOFILE` if that is less.
    pub inode_cache_max: usize,
    /// Seconds after which a descriptor of that cache that nobody used is closed.
    pub inode_idle_secs: u64,
    /// Inodes that the path table remembers on file systems without handles.
    pub path_table_max: usize,
    /// Where that table is noted, so that it outlives the process. None: it does not.
    pub path_table_file: Option<PathBuf>,
    /// Pass `O_DIRECT` on. Else data goes through the server's page cache.
    pub direct: bool,
    /// Secret that signs file ids, so that a client cannot make up the id of a file outside
    /// of the export. It must stay the same over restarts, or known ids answer `ESTALE`.
    /// None: derived from the export's uuid, which clients know.
    pub id_key: Option<u128>,
    /// Advisory locks that the export may hold; more answer `ENOLCK`.
    pub locks_max: usize,
    /// Keeps deleted files that are open; none: they end with this process.
    pub keeper: Option<Arc<dyn Keeper>>,
    /// Is told when the file system below has died. None: its calls fail, and that is all.
    pub on_death: Option<Arc<dyn OnDeath>>,
}

impl Default for PosixOptions {
    fn default() -> PosixOptions {
        PosixOptions {
            read_only: false,
            squash: Squash::Root(Squash::NOBODY.0, Squash::NOBODY.1),
            inline: Inline::Auto,
            threads_max: 16,
            queue_max: 4096,
            open_descriptors_max: 0,
            open_files_max: 1 << 20,
            inode_cache_max: 0,
            inode_idle_secs: 10,
            path_table_max: 1 << 20,
            path_table_file: None,
            direct: false,
            id_key: None,
            locks_max: 1 << 20,
            keeper: None,
            on_death: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(uid: u32, gid: u32, groups: &[u32]) -> Arc<Identity> {
        let groups = groups.iter().map(|gid| Gid(*gid)).collect();
        Arc::new(Identity { uid: Uid(uid), gid: Gid(gid), groups, job: "7".into() })
    }

    #[test]
    fn squashing_leaves_nothing_of_root() {
        let squash = Squash::Root(Uid(99), Gid(98));
        let root = squash.map(&identity(0, 0, &[0, 4]));
        assert_eq!((root.uid, root.gid, &*root.groups), (Uid(99), Gid(98), &[][..]));
        let user = squash.map(&identity(5, 0, &[0, 4]));
        assert_eq!((user.uid, user.gid, &*user.groups), (Uid(5), Gid(98), &[Gid(4)][..]));
        let other = identity(5, 6, &[7]);
        assert!(Arc::ptr_eq(&squash.map(&other), &other));
    }

    #[test]
    fn a_user_is_who_the_identity_is() {
        for squash in [Squash::None, Squash::Root(Uid(9), Gid(8)), Squash::All(Uid(9), Gid(8))] {
            for who in [identity(0, 0, &[]), identity(5, 0, &[4]), identity(5, 6, &[])] {
                assert_eq!(squash.user_of(&who), squash.map(&who).uid);
            }
        }
    }

    #[test]
    fn squashing_all_keeps_the_job() {
        let mapped = Squash::All(Uid(1), Gid(2)).map(&identity(5, 6, &[7]));
        assert_eq!(*mapped, *identity(1, 2, &[]));
    }
}
