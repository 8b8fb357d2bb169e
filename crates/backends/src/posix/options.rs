//! Options of an exported directory.

use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::Arc;

use dray_core::{FileId, FsUuid, Gid, Identity, Uid};

use super::export_location::OnDeath;

/// Which identities are replaced (squashed) although the client names others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Squash {
    /// No identity is replaced: the client's word counts.
    None,
    /// The super-user becomes this user with this one group.
    Root(Uid, Gid),
    /// Every caller becomes this user with this one group.
    All(Uid, Gid),
}

impl Squash {
    /// The user and group of squashed callers if the configuration names none: `nobody` of most
    /// systems.
    pub const NOBODY: (Uid, Gid) = (Uid(65_534), Gid(65_534));

    /// Which user `who` is here.
    pub fn user_of(self, who: &Identity) -> Uid {
        match self {
            Squash::Root(uid, _) if who.is_root() => uid,
            Squash::All(uid, _) => uid,
            Squash::None | Squash::Root(..) => who.uid,
        }
    }

    /// The identity here of the client's `who`. Group 0 of a caller that is not root is squashed
    /// with root.
    ///
    /// `anonymous`: the identity of all who are squashed and in no batch job ([`Squash::anonymous`]).
    pub fn map(self, who: &Arc<Identity>, anonymous: &Arc<Identity>) -> Arc<Identity> {
        match self {
            Squash::None => return who.clone(),
            Squash::Root(_, gid) if !who.is_root() => return squash_group(who, gid),
            Squash::Root(..) | Squash::All(..) => {}
        }
        match who.job.is_empty() {
            true => anonymous.clone(), // a call takes no memory for it
            false => Arc::new(Identity { job: who.job.clone(), ..(**anonymous).clone() }),
        }
    }

    /// Who squashed callers are that are in no batch job, if there are any.
    pub fn anonymous(self) -> Arc<Identity> {
        let (uid, gid) = match self {
            Squash::None => Squash::NOBODY,
            Squash::Root(uid, gid) | Squash::All(uid, gid) => (uid, gid),
        };
        Arc::new(Identity { uid, gid, ..Identity::default() })
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

/// Which threads call the file system below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inline {
    /// The calling thread makes the calls that do not wait. For file systems in memory that is
    /// nearly everything. For file systems on local disks that is looks at names and attributes,
    /// and reads of cached data. Threads of the export make all other calls, and all calls to other
    /// file systems (FUSE, NFS and unknown ones), which take long.
    ///
    /// A look can wait all the same, and keeps its thread then. So a calling thread must not serve
    /// other exports.
    Auto,
    /// Always on the calling thread.
    Always,
    /// Always on the export's own threads.
    Never,
}

/// A store outside of this process that keeps deleted files while they are open. If this process
/// dies, its successor still finds them. Two exports of one directory share their files: a file
/// that was held or adopted twice is released twice.
pub trait DescriptorStore: Send + Sync + std::fmt::Debug {
    /// Keeps what `fd` refers to until it is released. Failing is allowed: then such a
    /// file ends with this process.
    fn hold(&self, fs: FsUuid, id: FileId, fd: BorrowedFd<'_>);

    /// Whether it is kept, perhaps for a process before this one.
    fn holds(&self, fs: FsUuid, id: FileId) -> bool;

    /// As [`DescriptorStore::holds`], for a file that has been opened. From now on it is kept until
    /// it is released, even if it was kept for a process before this one.
    fn adopt(&self, fs: FsUuid, id: FileId) -> bool;

    /// The last open file of it was closed. This undoes one [`DescriptorStore::hold`] or one
    /// [`DescriptorStore::adopt`].
    fn release(&self, fs: FsUuid, id: FileId);

    /// The file is no longer open here, and its client will open it again, as after the end of a
    /// server epoch.
    fn keep_for_recovery(&self, fs: FsUuid, id: FileId);
}

/// Options of [`PosixFs::open`](super::PosixFs::open).
#[derive(Clone, Debug)]
pub struct PosixOptions {
    /// Refuse changes with `EROFS`.
    pub read_only: bool,
    /// Which identities are replaced.
    pub squash: Squash,
    /// Which threads do the work.
    pub inline: Inline,
    /// Threads of each lane.
    pub threads_max: usize,
    /// Calls of one client that wait in the queue of a lane. Further calls wait for a place in the
    /// queue; each connection has a limit of those.
    pub queue_max: usize,
    /// Descriptors kept open for files that are open at clients. 0: half of the process's
    /// limit (`RLIMIT_NOFILE`).
    pub open_descriptors_max: usize,
    /// Files that clients may have open, with or without a descriptor. Further opens fail with
    /// `ENFILE`.
    pub open_files_max: usize,
    /// `O_PATH` descriptors kept for inodes used lately. 0: 4,096, or a quarter of
    /// `RLIMIT_NOFILE` if that is less.
    pub inode_cache_max: usize,
    /// Seconds after which an unused descriptor of that cache is closed.
    pub inode_idle_secs: u64,
    /// Inodes that the path table remembers on file systems without handles.
    pub path_table_max: usize,
    /// The file that records that table, so that it outlives the process. None: it does not.
    pub path_table_file: Option<PathBuf>,
    /// Pass `O_DIRECT` on. Else data goes through the server's page cache.
    pub direct: bool,
    /// Secret that signs file ids, so that a client cannot make up the id of a file outside
    /// of the export. It must stay the same over restarts, or known ids answer `ESTALE`.
    /// None: derived from the export's uuid, which clients know.
    pub id_key: Option<u128>,
    /// Several servers serve the directory: they must give its files the same ids. Without handles an id is
    /// then made of the inode number, and learned from names.
    pub shared_ids: bool,
    /// Advisory locks that the export may hold. Further requests fail with `ENOLCK`.
    pub locks_max: usize,
    /// Keeps deleted files that are open; none: they end with this process.
    pub descriptor_store: Option<Arc<dyn DescriptorStore>>,
    /// Deleted files that are open are kept in a hidden directory of the export, for another server that
    /// goes on for their clients. Then there is no use for `descriptor_store`.
    pub keeps_removed: bool,
    /// Changes outside dray are noticed, if somebody asks for them
    /// ([`PosixFs::watch_outside`](super::PosixFs::watch_outside)). Each change of the export itself costs up to a
    /// microsecond then.
    pub watches_outside: bool,
    /// Is notified when the file system below has died. None: its calls fail, and nothing else
    /// happens.
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
            shared_ids: false,
            locks_max: 1 << 20,
            descriptor_store: None,
            keeps_removed: false,
            watches_outside: false,
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

    // proves: P52
    #[test]
    fn squashing_leaves_nothing_of_root() {
        let squash = Squash::Root(Uid(99), Gid(98));
        let root = squash.map(&identity(0, 0, &[0, 4]), &squash.anonymous());
        assert_eq!((root.uid, root.gid, &*root.groups), (Uid(99), Gid(98), &[][..]));
        let user = squash.map(&identity(5, 0, &[0, 4]), &squash.anonymous());
        assert_eq!((user.uid, user.gid, &*user.groups), (Uid(5), Gid(98), &[Gid(4)][..]));
        let other = identity(5, 6, &[7]);
        assert!(Arc::ptr_eq(&squash.map(&other, &squash.anonymous()), &other));
    }

    #[test]
    fn a_user_is_who_the_identity_is() {
        for squash in [Squash::None, Squash::Root(Uid(9), Gid(8)), Squash::All(Uid(9), Gid(8))] {
            for who in [identity(0, 0, &[]), identity(5, 0, &[4]), identity(5, 6, &[])] {
                assert_eq!(squash.user_of(&who), squash.map(&who, &squash.anonymous()).uid);
            }
        }
    }

    #[test]
    fn squashing_all_keeps_the_job() {
        let squash = Squash::All(Uid(1), Gid(2));
        let anonymous = squash.anonymous();
        let mapped = squash.map(&identity(5, 6, &[7]), &anonymous);
        assert_eq!(*mapped, *identity(1, 2, &[]));
        let without = Arc::new(Identity { job: "".into(), ..(*identity(5, 6, &[7])).clone() });
        assert!(Arc::ptr_eq(&squash.map(&without, &anonymous), &anonymous));
    }
}
