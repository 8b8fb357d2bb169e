//! What the operations of one export share: its root, ids, caches and threads.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};

use dray_core::{
    Context, Errno, Error, FileId, FileType, FsInfo, FsUuid, Fut, Identity, Op, Result, Taker, Uid,
};
use dray_rt::Instant;

use super::above::Inside;
use super::below::{BTRFS, Below, EXT};
use super::copies::Copies;
use super::departed::{Asker, Departed};
use super::devices::Devices;
use super::directories::Directories;
use super::files::Files;
use super::handle::Codec;
use super::lanes::{Kept, Lane, Lanes};
use super::mounted::MountsBelow;
use super::nodes::{Node, NodeCache};
use super::options::{Inline, PosixOptions};
use super::path_log::Whose;
use super::paths::PathTable;
use super::root::Root;
use super::sys::Stat;
use super::watch::Watched;
use super::{cred, sys};
use crate::locks::LockTable;

/// How ids are made and found again.
pub(crate) enum Ids {
    /// They hold kernel handles.
    Native(Codec),
    /// They are places remembered.
    Table(Box<PathTable>),
}

/// An export.
pub(crate) struct Core {
    pub(crate) options: PosixOptions,
    pub(crate) info: FsInfo,
    pub(crate) root: Arc<Node>,
    pub(crate) ids: Ids,
    pub(crate) nodes: NodeCache,
    pub(super) departed: Departed,
    /// None where nothing is copied to be changed.
    pub(super) inside: Inside,
    pub(super) copies: Option<Box<Copies>>,
    pub(crate) files: Arc<Files>,
    pub(crate) locks: LockTable,
    pub(crate) below: Below,
    /// Calls come back soon enough to be made by whoever asks.
    pub(crate) inline: bool,
    pub(crate) directories: Directories,
    /// Real descriptor of the root: handles are opened on its mount.
    pub(super) mount: OwnedFd,
    pub(super) mount_id: i32,
    /// The kernel's number of the mount that it is on; none where /proc does not say.
    pub(super) mount_number: Option<u64>,
    pub(super) mounts_below: MountsBelow,
    pub(super) devices: Devices,
    proc_fd: OwnedFd,
    pub(crate) lanes: Arc<Lanes>,
    /// The file system below cannot tell whether a read, or a write, would wait.
    pub(super) nowait_reads_fail: AtomicBool,
    pub(super) nowait_writes_fail: AtomicBool,
    pub(crate) watched: Watched,
}

/// On whose behalf work is done, after squashing.
pub(crate) struct Caller {
    pub(crate) who: Arc<Identity>,
    /// Only what makes files has to do with it; for the rest it costs a system call.
    umask: Option<u32>,
    pub(super) asker: Asker,
    /// As one who wants more of what is counted, and whose calls take turns with those of others.
    pub(super) taker: Taker,
    /// It is the server itself who asks.
    pub(super) internal: bool,
}

impl Core {
    pub(crate) fn open(root: Root, uuid: FsUuid, options: PosixOptions) -> Result<Arc<Core>> {
        let Root { dir: mount, stat, magic, mount: mount_number, below, .. } = root;
        let fd = sys::reopen_path(mount.as_fd())?;
        let proc_flags = libc::O_PATH | libc::O_DIRECTORY;
        let proc_fd = sys::open_at(libc::AT_FDCWD, c"/proc/self/fd".as_ptr(), proc_flags, 0)
            .map_err(|errno| Error::new(errno).because("/proc is needed"))?;
        let (ids, id, mount_id) = choose_ids(&options, uuid, magic, mount.as_fd(), &stat);
        let quality = if matches!(ids, Ids::Native(_)) { "native ids" } else { "path table" };
        let info = FsInfo {
            uuid,
            root: id,
            kind: format!("{}, {quality}", below.kind),
            read_only: options.read_only,
        };
        let descriptors = descriptor_limit();
        let lanes = Lanes::new(&options, below.is_memory());
        let or = |wanted: usize, else_: usize| if wanted == 0 { else_ } else { wanted };
        Ok(Arc::new(Core {
            info,
            root: Arc::new(Node::new(id, FileType::Directory, Kept::new(fd, &lanes))),
            nodes: NodeCache::new(
                or(options.inode_cache_max, (descriptors / 4).min(4096)),
                options.inode_idle_secs,
            ),
            departed: Departed::default(),
            inside: Inside::default(),
            copies: below.is_overlay().then(Box::default),
            devices: Devices::new(stat.dev, below.is_overlay()),
            files: Files::new(
                (or(options.open_descriptors_max, descriptors / 2).max(1), descriptors),
                options.open_files_max,
                options.keeper.clone().map(|keeper| (keeper, uuid)),
                (matches!(ids, Ids::Native(_)), lanes.clone()),
            ),
            ids,
            locks: LockTable::new(options.locks_max),
            inline: match options.inline {
                Inline::Auto => below.is_local(),
                Inline::Always => true,
                Inline::Never => false,
            },
            nowait_reads_fail: AtomicBool::new(false),
            // `ext4_buffered_write_iter` in fs/ext4/file.c refuses it; btrfs has to reserve space for
            // each copy on write, and seldom can.
            nowait_writes_fail: AtomicBool::new(matches!(below.magic, EXT | BTRFS)),
            below,
            mounts_below: MountsBelow::new(mount.as_fd()),
            directories: Directories::default(),
            mount,
            mount_id,
            mount_number,
            proc_fd,
            lanes,
            watched: Watched::new(),
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

    /// Who asks, after squashing.
    pub(crate) fn caller(&self, cx: &Context, op: Op) -> Caller {
        // The server's own work, such as opening again after a restart what a client had
        // open, is not done as a client.
        let who = if cx.internal { cx.who.clone() } else { self.options.squash.map(&cx.who) };
        let makes = matches!(op, Op::Make | Op::Create | Op::Tmpfile);
        let umask = makes.then_some(cx.umask);
        let (asker, taker, internal) = (Asker::of(cx), cx.taker(), cx.internal);
        Caller { who, umask, asker, taker, internal }
    }

    /// `EROFS` where changes are refused.
    pub(crate) fn writable(&self) -> Result<()> {
        if self.options.read_only { Err(Error::new(Errno::EROFS)) } else { Ok(()) }
    }

    /// Does `work` as the caller: here and now on file systems that answer soon, else on a
    /// thread of the export's own.
    pub(crate) fn run<'a, T: Send + 'static>(
        self: &'a Arc<Core>,
        cx: &'a Context,
        (op, about): (Op, FileId),
        work: impl FnOnce(&Core, &Caller) -> Result<T> + Send + 'static,
    ) -> impl Future<Output = Result<T>> + Send + 'a {
        self.run_in(cx, op, (Lane::of(op), about), work)
    }

    /// As [`Core::run`], in the lane of what takes longer than the operation's name says.
    pub(crate) fn run_in<'a, T: Send + 'static>(
        self: &'a Arc<Core>,
        cx: &'a Context,
        op: Op,
        way: (Lane, FileId),
        work: impl FnOnce(&Core, &Caller) -> Result<T> + Send + 'static,
    ) -> impl Future<Output = Result<T>> + Send + 'a {
        let mut work = Some(work);
        let inline = self.stays(way.0);
        self.run_patient(cx, op, (way, inline), move |core, caller, _| {
            work.take().map(|work| work(core, caller))
        })
    }

    /// Whether calls of this lane are made by whoever asks, now.
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

    /// The one place that decides which thread does the work. If `inline`, `work` is tried
    /// here first and must not wait (its last argument is false); where it answers none,
    /// it is done again on a thread of its lane, and may.
    pub(crate) async fn run_patient<T: Send + 'static>(
        self: &Arc<Core>,
        cx: &Context,
        op: Op,
        ((lane, about), inline): ((Lane, FileId), bool),
        mut work: impl FnMut(&Core, &Caller, bool) -> Option<Result<T>> + Send + 'static,
    ) -> Result<T> {
        cx.check()?;
        let caller = self.caller(cx, op);
        let inline = inline && self.may_become(&caller);
        let done = if inline { self.now(&caller, |core| work(core, &caller, false)) } else { None };
        let result = match done {
            Some(result) => result,
            None => {
                let work = move |core: &Core, caller: &Caller| work(core, caller, true);
                self.on_lane(lane, about, caller, work).await
            }
        };
        self.tend_departed();
        result.map_err(|error| error.during(op))
    }

    /// Becomes the caller and does `work` on a thread of a lane.
    pub(crate) async fn on_lane<T: Send + 'static>(
        self: &Arc<Core>,
        lane: Lane,
        about: FileId,
        caller: Caller,
        work: impl FnOnce(&Core, &Caller) -> Option<Result<T>> + Send + 'static,
    ) -> Result<T> {
        let (core, client) = (self.clone(), caller.taker.holder);
        let work = move || core.now(&caller, |core| work(core, &caller));
        let done = self.lanes.run(lane, (client, Some(about)), work).await;
        done.map_err(|_| busy())?.unwrap_or_else(|| Err(busy()))
    }

    /// Makes a change that takes space; once more, if there was none, and what somebody has removed
    /// was still to give its own back.
    pub(crate) async fn with_space<T, F: Future<Output = Result<T>>>(
        &self,
        change: impl Fn() -> F,
    ) -> Result<T> {
        match change().await {
            Err(error)
                if matches!(error.errno(), Errno::ENOSPC | Errno::EDQUOT)
                    && self.lanes.closed().await =>
            {
                change().await
            }
            changed => changed,
        }
    }

    /// Does `work` of the export's own, for nobody.
    pub(crate) async fn run_for_all<T: Send + 'static>(
        self: &Arc<Core>,
        work: impl FnOnce(&Core) -> T + Send + 'static,
    ) -> Option<T> {
        let core = self.clone();
        self.lanes.run(Lane::Looks, (0, None), move || work(&core)).await.ok()
    }

    /// Whether a thread that serves others may become `caller`: whoever is in many groups bears what
    /// that costs on a thread of a lane.
    pub(super) fn may_become(&self, caller: &Caller) -> bool {
        self.options.inline == Inline::Always || cred::is_quick(&caller.who)
    }

    /// Of what was done with a file by its id alone. A file system without handles, such as most below FUSE,
    /// knows an inode by a path, and says `ENOENT` where that leads nowhere any more: a client's kernel
    /// looks its path up again for `ESTALE` alone.
    pub(crate) fn by_id<'a, T: 'a>(&self, done: Fut<'a, Result<T>>) -> Fut<'a, Result<T>> {
        if self.below.is_local() {
            return done;
        }
        Box::pin(async move {
            done.await.map_err(|error| match error.errno() {
                Errno::ENOENT => Error::new(Errno::ESTALE).because("it has lost its place"),
                _ => error,
            })
        })
    }

    /// Sees to it that what has been removed and is kept for a moment is let go after that.
    fn tend_departed(self: &Arc<Core>) {
        if !self.departed.is_to_be_tended() {
            return;
        }
        let tending = Tending(Arc::downgrade(self));
        dray_rt::spawn(async move {
            while let Some(end) = tending.next_end() {
                dray_rt::sleep_until(end).await;
                tending.trim();
            }
        });
    }

    /// Becomes the caller and does `work` on this thread.
    pub(crate) fn now<T>(
        &self,
        caller: &Caller,
        work: impl FnOnce(&Core) -> Option<Result<T>>,
    ) -> Option<Result<T>> {
        match cred::assume(&caller.who, caller.umask) {
            // What is in memory is as slow as it is.
            Ok(()) if self.below.is_memory() => self.watched.mark(|| work(self)),
            Ok(()) => self.lanes.timed(|| self.watched.mark(|| self.noticing_death(work(self)))),
            Err(error) => Some(Err(error)),
        }
    }
}

/// Whoever lets go what has been removed. Dropped with its executor, it leaves that to the next.
struct Tending(Weak<Core>);

impl Tending {
    /// When there is something to do next; none if nobody has to stay for that.
    fn next_end(&self) -> Option<Instant> {
        let core = self.0.upgrade()?;
        loop {
            if let Some(end) = core.departed.next_end() {
                return Some(end);
            }
            core.departed.is_left();
            if !core.departed.is_to_be_tended() {
                return None;
            }
        }
    }

    fn trim(&self) {
        if let Some(core) = self.0.upgrade() {
            core.watched.mark(|| core.departed.trim());
        }
    }
}

impl Drop for Tending {
    fn drop(&mut self) {
        if let Some(core) = self.0.upgrade() {
            core.departed.is_left();
        }
    }
}

fn choose_ids(
    options: &PosixOptions,
    uuid: FsUuid,
    magic: i64,
    mount: BorrowedFd<'_>,
    stat: &Stat,
) -> (Ids, FileId, i32) {
    // Not a secret, but the same after every restart.
    let key = options.id_key.unwrap_or(uuid.0 ^ 0x6472_6179_2069_6473_206f_6620_6669_6c65);
    if let Ok((handle, mount_id)) = sys::handle_of(mount)
        && let Some(codec) = Codec::detect(magic, &handle, key)
        && let Some(id) = codec.encode(&handle)
        && let Some(decoded) = codec.decode(id)
        && let Ok(again) = sys::open_by_handle(mount, &decoded)
        && let Ok(seen) = sys::stat(again.as_fd())
        && (seen.dev, seen.attr.ino) == (stat.dev, stat.attr.ino)
    {
        return (Ids::Native(codec), id, mount_id);
    }
    let boot = dray_rt::random_u64() as u32;
    // The root is the root in every run: its id must not change with the table.
    let id = FileId { ino: stat.attr.ino, generation: 1 };
    let entries_max = options.path_table_max.max(1);
    let table = match options.path_table_file.clone() {
        Some(path) => {
            let whose = Whose { path, uuid, root_ino: id.ino, magic };
            PathTable::noted(entries_max, boot, whose)
        }
        None => PathTable::new(entries_max, boot),
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
impl Caller {
    /// A caller for tests of what needs no export.
    pub(crate) fn of(who: Identity) -> Caller {
        let cx = Context::system();
        let (asker, taker, internal) = (Asker::of(&cx), cx.taker(), cx.internal);
        Caller { who: Arc::new(who), umask: None, asker, taker, internal }
    }
}
