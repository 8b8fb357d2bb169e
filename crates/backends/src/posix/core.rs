//! What the operations of one export share: its root, ids, caches and threads.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};

use dray_core::{
    Attr, Context, Errno, Error, Fence, FileId, FileType, FsInfo, FsUuid, Fut, Identity, Op,
    Result, Taker, Uid,
};
use dray_rt::Instant;

use super::copy_up::CopyUps;
use super::devices::Devices;
use super::directory_locks::DirectoryLocks;
use super::files::OpenFileTable;
use super::handle::HandleCodec;
use super::inode_cache::{CachedInode, InodeCache};
use super::lanes::{DeferredClose, Lane, LaneCall, Lanes};
use super::lower_fs::{BTRFS, EXT, LowerFs};
use super::mounts_below::MountsBelow;
use super::options::{DescriptorStore, Inline, PosixOptions};
use super::outside::OutsideWatch;
use super::parent::SeenInside;
use super::path_log::LogIdentity;
use super::paths::{Numbering, PathTable};
use super::recently_unlinked::{ClientThread, RecentlyUnlinked};
use super::removed::{REMOVED_DIR, RemovedFiles};
use super::root::Root;
use super::sys::InodeStat;
use super::watch::ExportWatch;
use super::written_ends::WrittenEnds;
use super::{cred, sys, thread_clients};
use crate::locks::LockTable;

/// How ids are made and resolved.
pub(crate) enum Ids {
    /// Ids hold kernel handles.
    Native(HandleCodec),
    /// A table of paths resolves them.
    Table(Box<PathTable>),
}

/// An export.
pub(crate) struct Core {
    pub(crate) options: PosixOptions,
    /// Squashed callers that are in no batch job.
    anonymous: Arc<Identity>,
    pub(crate) info: FsInfo,
    pub(crate) root: Arc<CachedInode>,
    pub(crate) ids: Ids,
    pub(crate) nodes: InodeCache,
    pub(super) recently_unlinked: RecentlyUnlinked,
    /// None where the sizes of the file system below can be believed.
    pub(super) written_ends: Option<WrittenEnds>,
    pub(super) inside: SeenInside,
    /// None where the file system copies no files before a change.
    pub(super) copy_ups: Option<Box<CopyUps>>,
    pub(crate) files: Arc<OpenFileTable>,
    /// Removed files that another server could go on with; none where there is no other.
    pub(super) removed: Option<Arc<RemovedFiles>>,
    pub(crate) locks: LockTable,
    pub(crate) below: LowerFs,
    /// Calls return soon enough to be made by the calling thread.
    pub(crate) inline: bool,
    pub(crate) directory_locks: DirectoryLocks,
    /// Real descriptor of the root: handles are opened on its mount.
    pub(super) mount: OwnedFd,
    pub(super) mount_id: i32,
    /// The kernel's number of the mount of the root; none where /proc does not say.
    pub(super) mount_number: Option<u64>,
    pub(super) mounts_below: MountsBelow,
    pub(super) devices: Devices,
    proc_fd: OwnedFd,
    pub(crate) lanes: Arc<Lanes>,
    /// The file system below cannot tell whether a read, or a write, would wait.
    pub(super) nowait_reads_fail: AtomicBool,
    pub(super) nowait_writes_fail: AtomicBool,
    pub(crate) watch: ExportWatch,
    /// Changes outside dray.
    pub(super) outside: OutsideWatch,
}

/// The caller of an operation, after squashing.
pub(crate) struct SquashedCaller {
    pub(crate) who: Arc<Identity>,
    /// Only for operations that make files; for others it would cost a system call.
    umask: Option<u32>,
    pub(super) thread: ClientThread,
    /// The caller as a taker of shared resources. Lanes serve takers one after the other.
    pub(super) taker: Taker,
    /// The server itself is the caller.
    pub(super) internal: bool,
    fence: Option<Arc<dyn Fence>>,
}

impl Core {
    pub(crate) fn open(root: Root, uuid: FsUuid, options: PosixOptions) -> Result<Arc<Core>> {
        let Root { dir: mount, stat, mount: mount_number, below, .. } = root;
        let fd = sys::reopen_path(mount.as_fd())?;
        let proc_flags = libc::O_PATH | libc::O_DIRECTORY;
        let proc_fd = sys::open_at(libc::AT_FDCWD, c"/proc/self/fd".as_ptr(), proc_flags, 0)
            .map_err(|errno| Error::new(errno).because("/proc is not mounted"))?;
        let (ids, id, mount_id) = choose_ids(&options, uuid, &below, mount.as_fd(), &stat);
        let quality = if matches!(ids, Ids::Native(_)) { "native ids" } else { "path table" };
        let info = FsInfo {
            uuid,
            root: id,
            kind: format!("{}, {quality}", below.kind),
            read_only: options.read_only,
        };
        let removed = match options.keeps_removed && !options.read_only {
            true => Some(Arc::new(RemovedFiles::open(mount.as_fd(), proc_fd.as_fd())?)),
            false => None,
        };
        let store = match &removed {
            Some(removed) => Some(removed.clone() as Arc<dyn DescriptorStore>),
            None => options.descriptor_store.clone(),
        };
        let descriptors = descriptor_limit();
        let lanes = Lanes::new(&options, below.is_memory());
        let or = |wanted: usize, else_: usize| if wanted == 0 { else_ } else { wanted };
        Ok(Arc::new(Core {
            info,
            root: Arc::new(CachedInode::new(
                id,
                FileType::Directory,
                DeferredClose::new(fd, &lanes),
            )),
            nodes: InodeCache::new(
                or(options.inode_cache_max, (descriptors / 4).min(4096)),
                options.inode_idle_secs,
            ),
            recently_unlinked: RecentlyUnlinked::default(),
            written_ends: below.sizes_lag.then(WrittenEnds::default),
            inside: SeenInside::default(),
            copy_ups: below.is_overlay().then(Box::default),
            devices: Devices::new(stat.dev, below.is_overlay()),
            files: OpenFileTable::new(
                (or(options.open_descriptors_max, descriptors / 2).max(1), descriptors),
                options.open_files_max,
                store.map(|store| (store, uuid)),
                (matches!(ids, Ids::Native(_)), removed.is_some(), lanes.clone()),
            ),
            ids,
            removed,
            locks: LockTable::new(options.locks_max),
            inline: match options.inline {
                Inline::Auto => below.is_local(),
                Inline::Always => true,
                Inline::Never => false,
            },
            nowait_reads_fail: AtomicBool::new(false),
            // `ext4_buffered_write_iter` in fs/ext4/file.c refuses it; btrfs has to reserve space for
            // each copy on write, and rarely can.
            nowait_writes_fail: AtomicBool::new(matches!(below.magic, EXT | BTRFS)),
            below,
            mounts_below: MountsBelow::new(mount.as_fd()),
            directory_locks: DirectoryLocks::default(),
            mount,
            mount_id,
            mount_number,
            proc_fd,
            lanes,
            watch: ExportWatch::new(),
            outside: OutsideWatch::default(),
            anonymous: options.squash.anonymous(),
            options,
        }))
    }

    /// A real descriptor of the root, not one for paths alone.
    pub(crate) fn mount_fd(&self) -> BorrowedFd<'_> {
        self.mount.as_fd()
    }

    pub(crate) fn proc_fd(&self) -> BorrowedFd<'_> {
        self.proc_fd.as_fd()
    }

    /// The user of [`Core::caller`].
    pub(crate) fn user_of(&self, cx: &Context) -> Uid {
        if cx.internal { cx.who.uid } else { self.options.squash.user_of(&cx.who) }
    }

    /// The caller of `cx`, after squashing.
    pub(crate) fn caller(&self, cx: &Context, op: Op) -> SquashedCaller {
        // The server's own work, such as the reopening of a client's files after a restart, is not
        // squashed.
        let who = if cx.internal { cx.who.clone() } else { self.squashed(&cx.who) };
        let umask = op.facts().masks_mode.then_some(cx.umask);
        let (thread, taker, internal) = (ClientThread::of(cx), cx.taker(), cx.internal);
        SquashedCaller { who, umask, thread, taker, internal, fence: cx.fence.clone() }
    }

    /// To be called once the size of a file was set, other than by writing.
    pub(super) fn size_was_set(&self, id: FileId) {
        if let Some(ends) = &self.written_ends {
            ends.size_was_set(id);
        }
    }

    fn squashed(&self, who: &Arc<Identity>) -> Arc<Identity> {
        self.options.squash.map(who, &self.anonymous)
    }

    /// Whether clients do not see this name in the directory `dir`.
    pub(super) fn hides(&self, dir: FileId, name: &[u8]) -> bool {
        self.removed.is_some() && dir == self.info.root && name == REMOVED_DIR
    }

    /// `attr` as clients see it: a hidden name does not count.
    pub(super) fn shown(&self, id: FileId, attr: Attr) -> Attr {
        let hidden = self.removed.as_ref().is_some_and(|removed| removed.has(id));
        Attr { nlink: attr.nlink.saturating_sub(u32::from(hidden)), ..attr }
    }

    /// `EROFS` where changes are refused.
    pub(crate) fn writable(&self) -> Result<()> {
        if self.options.read_only { Err(Error::new(Errno::EROFS)) } else { Ok(()) }
    }

    /// Does `work` as the caller: on the calling thread if the file system answers soon, else on a
    /// thread of the export.
    pub(crate) fn run<'a, T: Send + 'static>(
        self: &'a Arc<Core>,
        cx: &'a Context,
        (op, about): (Op, FileId),
        work: impl FnOnce(&Core, &SquashedCaller) -> Result<T> + Send + 'static,
    ) -> impl Future<Output = Result<T>> + Send + 'a {
        self.run_in(cx, op, (Lane::of(op), about), work)
    }

    /// As [`Core::run`], in another lane than the one of the operation, because the call takes
    /// longer.
    pub(crate) fn run_in<'a, T: Send + 'static>(
        self: &'a Arc<Core>,
        cx: &'a Context,
        op: Op,
        way: (Lane, FileId),
        work: impl FnOnce(&Core, &SquashedCaller) -> Result<T> + Send + 'static,
    ) -> impl Future<Output = Result<T>> + Send + 'a {
        let mut work = Some(work);
        let inline = self.stays(way.0);
        self.run_patient(cx, op, (way, inline), move |core, caller, _| {
            work.take().map(|work| work(core, caller))
        })
    }

    /// Whether the calling thread makes calls of this lane, now.
    pub(crate) fn stays(&self, lane: Lane) -> bool {
        if self.options.inline == Inline::Always {
            return true;
        }
        self.inline
            && match lane {
                Lane::Looks | Lane::Reads => self.below.is_memory() || !self.lanes.are_busy(),
                Lane::Changes | Lane::Closes => self.below.is_memory(),
                Lane::Writes | Lane::Syncs => false,
            }
    }

    /// Decides which thread does the work; no other code does. If `inline`, the calling thread
    /// tries `work` first, which must not wait then (its last argument is false). If that gives no
    /// answer, a thread of the lane does the work again, and may wait.
    pub(crate) async fn run_patient<T: Send + 'static>(
        self: &Arc<Core>,
        cx: &Context,
        op: Op,
        ((lane, about), inline): ((Lane, FileId), bool),
        mut work: impl FnMut(&Core, &SquashedCaller, bool) -> Option<Result<T>> + Send + 'static,
    ) -> Result<T> {
        cx.check()?;
        let caller = self.caller(cx, op);
        let inline = inline && self.may_become(&caller);
        let done = if inline { self.now(&caller, |core| work(core, &caller, false)) } else { None };
        let result = match done {
            Some(result) => result,
            None => {
                let work = move |core: &Core, caller: &SquashedCaller| work(core, caller, true);
                // In a box, so that calls that end on this thread are no larger.
                Box::pin(self.on_lane(lane, about, caller, work)).await
            }
        };
        self.start_release_task();
        result.map_err(|error| error.during(op))
    }

    /// Becomes the caller and does `work` on a thread of a lane.
    pub(crate) async fn on_lane<T: Send + 'static>(
        self: &Arc<Core>,
        lane: impl Into<LaneCall>,
        about: FileId,
        caller: SquashedCaller,
        work: impl FnOnce(&Core, &SquashedCaller) -> Option<Result<T>> + Send + 'static,
    ) -> Result<T> {
        let (core, client) = (self.clone(), caller.taker.holder);
        let work = move || core.now(&caller, |core| work(core, &caller));
        let done = self.lanes.run(lane, (client, Some(about)), work).await;
        done.map_err(|_| busy())?.unwrap_or_else(|| Err(busy()))
    }

    /// Makes a change that takes space. If there was no space, it waits for the release of removed
    /// files and tries once more.
    pub(crate) async fn with_space<T, F: Future<Output = Result<T>>>(
        &self,
        change: impl Fn() -> F,
    ) -> Result<T> {
        match change().await {
            Err(error)
                if matches!(error.errno(), Errno::ENOSPC | Errno::EDQUOT)
                    && self.lanes.closed().await =>
            {
                Box::pin(change()).await // in a box, as it is rare
            }
            changed => changed,
        }
    }

    /// Does `work` of the export itself, for no caller.
    pub(crate) async fn run_for_all<T: Send + 'static>(
        self: &Arc<Core>,
        work: impl FnOnce(&Core) -> T + Send + 'static,
    ) -> Option<T> {
        let core = self.clone();
        self.lanes.run(Lane::Looks, (0, None), move || work(&core)).await.ok()
    }

    /// Whether a serving thread may become `caller`. A caller with many groups pays for that cost
    /// on a thread of a lane.
    pub(super) fn may_become(&self, caller: &SquashedCaller) -> bool {
        self.options.inline == Inline::Always || cred::is_quick(&caller.who)
    }

    /// Converts the errors of an operation by id. A file system without handles, such as most FUSE
    /// ones, knows an inode by a path. It answers `ENOENT` where the path is gone. A client's
    /// kernel looks the path up again for `ESTALE` only.
    pub(crate) fn by_id<'a, T: 'a>(&self, done: Fut<'a, Result<T>>) -> Fut<'a, Result<T>> {
        if self.below.is_local() {
            return done;
        }
        let learns = self.learns_ids();
        Box::pin(async move {
            done.await.map_err(|error| match error.errno() {
                Errno::ENOENT => Error::new(Errno::ESTALE)
                    .unmet(learns)
                    .because("a directory on the path to the file is missing"),
                _ => error,
            })
        })
    }

    /// Starts the task that releases recently unlinked files when their moment is over.
    fn start_release_task(self: &Arc<Core>) {
        if !self.recently_unlinked.needs_release_task() {
            return;
        }
        let tending = UnlinkedRelease(Arc::downgrade(self));
        dray_rt::spawn(async move {
            while let Some(end) = tending.next_end() {
                dray_rt::sleep_until(end).await;
                tending.trim();
            }
        });
    }

    /// Becomes the caller and does `work` on this thread, unless another server may have the right to it by
    /// now. The check comes behind all waits: for a thread, and of a process that was stopped.
    pub(crate) fn now<T>(
        &self,
        caller: &SquashedCaller,
        work: impl FnOnce(&Core) -> Option<Result<T>>,
    ) -> Option<Result<T>> {
        thread_clients::note(caller.taker.holder);
        let assumed = cred::assume(&caller.who, caller.umask);
        match assumed.and_then(|()| Context::check_fence(caller.fence.as_ref())) {
            // Only a disk makes a call slow, so calls in memory are not timed.
            Ok(()) if self.below.is_memory() => self.watch.mark(|| work(self)),
            Ok(()) => self.lanes.timed(|| self.watch.mark(|| self.noticing_death(work(self)))),
            Err(error) => Some(Err(error)),
        }
    }
}

/// The task that releases recently unlinked files. Dropped with its executor, it leaves them to the
/// next task.
struct UnlinkedRelease(Weak<Core>);

impl UnlinkedRelease {
    /// The time of the next release; none if the task can end.
    fn next_end(&self) -> Option<Instant> {
        let core = self.0.upgrade()?;
        loop {
            if let Some(end) = core.recently_unlinked.next_end() {
                return Some(end);
            }
            core.recently_unlinked.release_task_ended();
            if !core.recently_unlinked.needs_release_task() {
                return None;
            }
        }
    }

    fn trim(&self) {
        if let Some(core) = self.0.upgrade() {
            core.watch.mark(|| core.recently_unlinked.trim());
        }
    }
}

impl Drop for UnlinkedRelease {
    fn drop(&mut self) {
        if let Some(core) = self.0.upgrade() {
            core.recently_unlinked.release_task_ended();
        }
    }
}

fn choose_ids(
    options: &PosixOptions,
    uuid: FsUuid,
    below: &LowerFs,
    mount: BorrowedFd<'_>,
    stat: &InodeStat,
) -> (Ids, FileId, i32) {
    // Not a secret, but the same after every restart.
    let key = options.id_key.unwrap_or(uuid.0 ^ 0x6472_6179_2069_6473_206f_6620_6669_6c65);
    let magic = below.magic;
    if let Ok((handle, mount_id)) = sys::handle_of(mount)
        && let Some(codec) = HandleCodec::detect(magic, &handle, key)
        && let Some(id) = codec.encode(&handle)
        && let Some(decoded) = codec.decode(id)
        && let Ok(again) = sys::open_by_handle(mount, &decoded)
        && let Ok(seen) = sys::stat(again.as_fd())
        && (seen.dev, seen.attr.ino) == (stat.dev, stat.attr.ino)
    {
        return (Ids::Native(codec), id, mount_id);
    }
    // An overlay gives a file another number when it copies it.
    let numbering = match options.shared_ids && !below.is_overlay() {
        true => Numbering::Signed(key),
        false => Numbering::Counted { boot: dray_rt::random_u64() as u32 },
    };
    // The root is the root in every run: its id must not change with the table.
    let generation = match numbering {
        Numbering::Signed(_) => FsInfo::LEARNING_ROOT,
        Numbering::Counted { .. } => 1,
    };
    let id = FileId { ino: stat.attr.ino, generation };
    let entries_max = options.path_table_max.max(1);
    let table = match options.path_table_file.clone() {
        Some(path) => {
            let whose = LogIdentity { path, uuid, root_ino: id.ino, magic };
            PathTable::noted(entries_max, numbering, whose)
        }
        None => PathTable::new(entries_max, numbering),
    };
    (Ids::Table(Box::new(table)), id, 0)
}

/// The process's limit of descriptors.
fn descriptor_limit() -> usize {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: limit outlives the call.
    match unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } {
        0 => usize::try_from(limit.rlim_cur).unwrap_or(1 << 20).min(1 << 20),
        _ => 1024,
    }
}

fn busy() -> Error {
    Error::retry(Errno::EAGAIN).because("the server cannot start a thread for the export")
}

#[cfg(test)]
impl SquashedCaller {
    /// A caller for tests of what needs no export.
    pub(crate) fn of(who: Identity) -> SquashedCaller {
        let cx = Context::system();
        let (thread, taker, internal) = (ClientThread::of(&cx), cx.taker(), cx.internal);
        SquashedCaller { who: Arc::new(who), umask: None, thread, taker, internal, fence: None }
    }
}
