//! What the operations of one export share: its root, ids, caches and threads.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dray_core::{
    Attr, Context, Entry, Errno, Error, FileId, FileType, FsInfo, FsUuid, Fut, Identity, Name, Op,
    Result,
};
use dray_rt::Pool;

use super::below::Below;
use super::files::Files;
use super::handle::Codec;
use super::mounted::MountsBelow;
use super::nodes::{Node, NodeCache};
use super::options::{Inline, PosixOptions};
use super::path_log::Whose;
use super::paths::PathTable;
use super::sys::Stat;
use super::watch::Watched;
use super::{cred, sys};
use crate::locks::LockTable;

/// Locks that make a change of a directory and the look at its result one step.
const DIRECTORY_LOCKS: usize = 64;

/// Deepest place that the path table follows (`PATH_MAX` over two bytes a component).
const DEPTH_MAX: usize = 2048;

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
    pub(crate) files: Arc<Files>,
    pub(crate) locks: LockTable,
    pub(crate) below: Below,
    /// Calls come back soon enough to be made by whoever asks.
    pub(crate) inline: bool,
    directories: [Mutex<()>; DIRECTORY_LOCKS],
    /// Real descriptor of the root: handles are opened on its mount.
    mount: OwnedFd,
    mount_id: i32,
    mounts_below: MountsBelow,
    dev: u64,
    proc_fd: OwnedFd,
    pub(crate) pool: Pool,
    pub(crate) watched: Watched,
}

/// On whose behalf work is done, after squashing.
pub(crate) struct Caller {
    pub(crate) who: Arc<Identity>,
    /// Only what makes files has to do with it; for the rest it costs a system call.
    umask: Option<u32>,
}

impl Core {
    pub(crate) fn open(dir: &Path, uuid: FsUuid, options: PosixOptions) -> Result<Arc<Core>> {
        // SAFETY: geteuid cannot fail.
        if unsafe { libc::geteuid() } != 0 {
            return Err(Error::new(Errno::EPERM)
                .because("serving a directory under its users' identities takes root"));
        }
        let path = std::ffi::CString::new(dir.as_os_str().as_encoded_bytes())
            .map_err(|_| Error::new(Errno::EINVAL).because("a path with a NUL byte"))?;
        let open = |flags: i32| sys::open_at(libc::AT_FDCWD, path.as_ptr(), flags, 0);
        let mount = open(libc::O_RDONLY | libc::O_DIRECTORY)?;
        let fd = sys::reopen_path(mount.as_fd())?;
        let proc_flags = libc::O_PATH | libc::O_DIRECTORY;
        let proc_fd = sys::open_at(libc::AT_FDCWD, c"/proc/self/fd".as_ptr(), proc_flags, 0)
            .map_err(|errno| Error::new(errno).because("/proc is needed"))?;
        let (_, magic) = sys::statfs(fd.as_fd())?;
        let stat = sys::stat(fd.as_fd())?;
        let (ids, id, mount_id) = choose_ids(&options, uuid, magic, mount.as_fd(), &stat);
        let below = Below::of(mount.as_fd(), magic);
        let quality = if matches!(ids, Ids::Native(_)) { "native ids" } else { "path table" };
        let info = FsInfo {
            uuid,
            root: id,
            kind: format!("{}, {quality}", below.kind),
            read_only: options.read_only,
        };
        let descriptors = descriptor_limit();
        let or = |wanted: usize, else_: usize| if wanted == 0 { else_ } else { wanted };
        Ok(Arc::new(Core {
            info,
            root: Arc::new(Node::new(id, FileType::Directory, fd)),
            nodes: NodeCache::new(
                or(options.inode_cache_max, (descriptors / 4).min(4096)),
                options.inode_idle_secs,
            ),
            files: Files::new(
                (or(options.open_descriptors_max, descriptors / 2).max(1), descriptors),
                options.open_files_max,
                options.keeper.clone().map(|keeper| (keeper, uuid)),
                matches!(ids, Ids::Native(_)),
            ),
            ids,
            locks: LockTable::new(options.locks_max),
            inline: match options.inline {
                Inline::Auto => below.is_local(),
                Inline::Always => true,
                Inline::Never => false,
            },
            below,
            mounts_below: MountsBelow::new(mount.as_fd()),
            directories: [const { Mutex::new(()) }; DIRECTORY_LOCKS],
            mount,
            mount_id,
            dev: stat.dev,
            proc_fd,
            pool: Pool::new("dray-posix", options.threads_max.max(1), options.queue_max),
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

    /// Who asks, after squashing.
    pub(crate) fn caller(&self, cx: &Context, op: Op) -> Caller {
        // The server's own work, such as opening again after a restart what a client had
        // open, is not done as a client.
        let who = if cx.internal { cx.who.clone() } else { self.options.squash.map(&cx.who) };
        let makes = matches!(op, Op::Make | Op::Create | Op::Tmpfile);
        Caller { who, umask: makes.then_some(cx.umask) }
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
        op: Op,
        work: impl FnOnce(&Core, &Caller) -> Result<T> + Send + 'static,
    ) -> Fut<'a, Result<T>> {
        let mut work = Some(work);
        self.run_patient(cx, op, self.inline, move |core, caller, _| {
            work.take().map(|work| work(core, caller))
        })
    }

    /// Does `work` as the caller on a thread of the export's own: for what waits for media.
    pub(crate) fn run_slow<'a, T: Send + 'static>(
        self: &'a Arc<Core>,
        cx: &'a Context,
        op: Op,
        work: impl FnOnce(&Core, &Caller) -> Result<T> + Send + 'static,
    ) -> Fut<'a, Result<T>> {
        let mut work = Some(work);
        let inline = self.options.inline == Inline::Always;
        self.run_patient(cx, op, inline, move |core, caller, _| {
            work.take().map(|work| work(core, caller))
        })
    }

    /// The one place that decides which thread does the work. If `inline`, `work` is tried
    /// here first and must not wait (its last argument is false); where it answers none,
    /// it is done again on a thread of the export's own, and may.
    pub(crate) fn run_patient<'a, T: Send + 'static>(
        self: &'a Arc<Core>,
        cx: &'a Context,
        op: Op,
        inline: bool,
        mut work: impl FnMut(&Core, &Caller, bool) -> Option<Result<T>> + Send + 'static,
    ) -> Fut<'a, Result<T>> {
        Box::pin(async move {
            cx.check()?;
            let caller = self.caller(cx, op);
            if inline && let Some(result) = self.now(&caller, |core| work(core, &caller, false)) {
                return result.map_err(|error| error.during(op));
            }
            let core = self.clone();
            let done = self.pool.run(move || core.now(&caller, |core| work(core, &caller, true)));
            let result = done.await.map_err(|_| busy())?.unwrap_or_else(|| Err(busy()));
            result.map_err(|error| error.during(op))
        })
    }

    /// Becomes the caller and does `work` on this thread.
    pub(crate) fn now<T>(
        &self,
        caller: &Caller,
        work: impl FnOnce(&Core) -> Option<Result<T>>,
    ) -> Option<Result<T>> {
        match cred::assume(&caller.who, caller.umask) {
            Ok(()) => self.watched.mark(|| work(self)),
            Err(error) => Some(Err(error)),
        }
    }

    /// Serialises changes of one directory.
    pub(crate) fn lock_directory(&self, dir: FileId) -> MutexGuard<'_, ()> {
        let stripe = directory_stripe(dir);
        self.directories[stripe].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serialises changes of two directories, in an order that cannot dead-lock.
    pub(crate) fn lock_directories(
        &self,
        one: FileId,
        two: FileId,
    ) -> (MutexGuard<'_, ()>, Option<MutexGuard<'_, ()>>) {
        let (first, second) = (directory_stripe(one), directory_stripe(two));
        let lock =
            |stripe: usize| self.directories[stripe].lock().unwrap_or_else(PoisonError::into_inner);
        let held = lock(first.min(second));
        (held, (first != second).then(|| lock(first.max(second))))
    }

    /// The inode with this id. Errors: `ESTALE` if there is none any more, or the id was
    /// never given out.
    pub(crate) fn node(&self, id: FileId) -> Result<Arc<Node>> {
        if id == self.root.id {
            return Ok(self.root.clone());
        }
        if let Some(node) = self.nodes.get(id) {
            return Ok(node);
        }
        match &self.ids {
            Ids::Native(codec) => self.node_by_handle(codec, id),
            Ids::Table(table) => self.node_by_place(table, id),
        }
    }

    /// The directory with this id; `ENOTDIR` if it is something else.
    pub(crate) fn directory(&self, id: FileId) -> Result<Arc<Node>> {
        let node = self.node(id)?;
        if node.kind == FileType::Directory { Ok(node) } else { Err(Errno::ENOTDIR.into()) }
    }

    fn node_by_handle(&self, codec: &Codec, id: FileId) -> Result<Arc<Node>> {
        let handle = codec.decode(id).ok_or_else(stale)?;
        let opened = cred::as_root(|| sys::open_by_handle(self.mount.as_fd(), &handle))?;
        let fd = opened.map_err(|errno| match errno {
            // What the file systems say when a handle makes no sense to them.
            Errno::ENOENT | Errno::EINVAL => stale(),
            errno => errno.into(),
        })?;
        let stat = sys::stat(fd.as_fd())?;
        if stat.dev != self.dev {
            return Err(stale().because("the file is on another file system"));
        }
        // The file system has not let go of it yet, and would not as long as we keep it.
        if stat.attr.nlink == 0 && !self.files.in_use(id) {
            return Err(stale());
        }
        Ok(self.nodes.insert(Node::new(id, stat.attr.file_type(), fd)))
    }

    fn node_by_place(&self, table: &PathTable, id: FileId) -> Result<Arc<Node>> {
        if let Some(fd) = self.files.any_descriptor(id) {
            let path = cred::as_root(|| sys::reopen(self.proc_fd(), fd.as_fd(), libc::O_PATH))??;
            let kind = sys::stat(path.as_fd())?.attr.file_type();
            return Ok(self.nodes.insert(Node::new(id, kind, path)));
        }
        // Up to something that is open, then down again.
        let mut missing = vec![id];
        let mut above = None;
        while above.is_none() {
            let last = *missing.last().ok_or_else(stale)?;
            let known = table.find(last).ok_or_else(stale)?;
            let parent = known.places.first().ok_or_else(stale)?.0;
            above = if parent == self.root.id {
                Some(self.root.clone())
            } else {
                self.nodes.get(parent)
            };
            if above.is_none() {
                missing.push(parent);
            }
            if missing.len() > DEPTH_MAX {
                return Err(stale());
            }
        }
        let mut node = above.ok_or_else(stale)?;
        while let Some(id) = missing.pop() {
            node = self.step_down(table, &node, id)?;
        }
        Ok(node)
    }

    fn step_down(&self, table: &PathTable, dir: &Node, id: FileId) -> Result<Arc<Node>> {
        let known = table.find(id).ok_or_else(stale)?;
        for (parent, name) in &known.places {
            let other;
            let dir = if *parent == dir.id {
                dir
            } else {
                match self.nodes.get(*parent) {
                    Some(node) => other = node,
                    None => continue,
                }
                &*other
            };
            let Ok(fd) = cred::as_root(|| sys::open_path(dir.fd(), name))? else { continue };
            let attr = sys::stat(fd.as_fd())?.attr;
            if known.is(&attr) {
                return Ok(self.nodes.insert(Node::new(id, attr.file_type(), fd)));
            }
        }
        Err(stale())
    }

    /// Identity and attributes of what was opened at `place`; none for a file without a
    /// name. `EXDEV` if it is on another mount.
    pub(crate) fn identify(
        &self,
        place: Option<(FileId, &Name)>,
        fd: BorrowedFd<'_>,
    ) -> Result<Entry> {
        match &self.ids {
            Ids::Native(codec) => {
                let (handle, mount_id) = sys::handle_of(fd)?;
                if mount_id != self.mount_id {
                    return Err(other_mount());
                }
                let id = codec.encode(&handle).ok_or_else(other_mount)?;
                let stat = sys::stat(fd)?;
                if stat.dev != self.dev {
                    Err(other_mount())
                } else {
                    Ok(Entry { id, attr: stat.attr })
                }
            }
            Ids::Table(table) => {
                let stat = sys::stat(fd)?;
                self.same_mount(&stat)?;
                let id = match place {
                    Some((dir, name)) => table.seen(dir, name, &stat.attr),
                    None => table.unnamed(&stat.attr),
                };
                Ok(Entry { id, attr: stat.attr })
            }
        }
    }

    /// `EXDEV` for what is mounted on a name. On overlays files may have devices of the layers
    /// below; directories never.
    pub(crate) fn same_mount(&self, stat: &Stat) -> Result<()> {
        let other_device = stat.attr.file_type() == FileType::Directory && stat.dev != self.dev;
        // Of the same device is what was mounted with `--bind`.
        let mounted = stat.attr.attributes & libc::STATX_ATTR_MOUNT_ROOT as u64 != 0;
        if other_device || mounted { Err(other_mount()) } else { Ok(()) }
    }

    /// Whether names are to be looked at the long way, which stays off what is mounted on them.
    fn has_mounts_below(&self) -> bool {
        self.mounts_below.any(self.mount.as_fd())
    }

    /// As [`Core::find`], where what has the name is at hand already, which spares opening
    /// it; none where it is not. Errors: `ENOENT`.
    pub(crate) fn find_at_hand(&self, dir: &Node, name: &Name) -> Result<Option<Entry>> {
        let Ids::Native(codec) = &self.ids else { return Ok(None) };
        if self.has_mounts_below() {
            return Ok(None);
        }
        let (handle, mount_id) = match sys::handle_at(dir.fd(), name) {
            Ok(found) => found,
            Err(Errno::ENOENT) => return Err(Errno::ENOENT.into()),
            Err(_) => return Ok(None), // the slow way says what is wrong
        };
        if mount_id != self.mount_id {
            return Ok(None);
        }
        let Some(node) = codec.encode(&handle).and_then(|id| self.nodes.get(id)) else {
            return Ok(None);
        };
        Ok(Some(Entry { id: node.id, attr: sys::stat(node.fd())?.attr }))
    }

    /// Finds `name` in `dir` as the caller, and keeps what it found at hand.
    pub(crate) fn find(&self, dir: &Node, name: &Name) -> Result<(Entry, Arc<Node>)> {
        let fd = sys::open_path(dir.fd(), name)?;
        let entry = self.identify(Some((dir.id, name)), fd.as_fd())?;
        let node = Node::new(entry.id, entry.attr.file_type(), fd);
        let node = match self.ids {
            Ids::Native(_) => self.nodes.insert(node),
            Ids::Table(_) => self.nodes.replace(node),
        };
        Ok((entry, node))
    }

    /// Identity and attributes of `name` in `dir` for whoever does not open it: two looks that must
    /// agree. None where something changed between, or is on another mount. What is mounted there
    /// is not asked: it may hang, or be a mount of this very export, which waits for us.
    pub(crate) fn glance(&self, dir: FileId, fd: BorrowedFd<'_>, name: &Name) -> Option<Entry> {
        match &self.ids {
            Ids::Native(_) if self.has_mounts_below() => {
                let fd = sys::open_path(fd, name).ok()?;
                self.identify(Some((dir, name)), fd.as_fd()).ok()
            }
            Ids::Native(codec) => {
                let (handle, mount_id) = sys::handle_at(fd, name).ok()?;
                if mount_id != self.mount_id {
                    return None;
                }
                let id = codec.encode(&handle)?;
                let stat = sys::stat_at(fd, name).ok()?;
                let same = stat.dev == self.dev && stat.attr.ino == id.ino;
                same.then_some(Entry { id, attr: stat.attr })
            }
            Ids::Table(table) => {
                let fd = sys::open_path(fd, name).ok()?;
                let stat = sys::stat(fd.as_fd()).ok()?;
                self.same_mount(&stat).ok()?;
                Some(Entry { id: table.seen(dir, name, &stat.attr), attr: stat.attr })
            }
        }
    }

    /// The id at `name` in `dir`, if it can be told cheaply.
    pub(crate) fn id_at(&self, dir: &Node, name: &Name) -> Option<FileId> {
        match &self.ids {
            Ids::Native(codec) if self.has_mounts_below() => {
                let fd = sys::open_path(dir.fd(), name).ok()?;
                codec.encode(&sys::handle_of(fd.as_fd()).ok()?.0)
            }
            Ids::Native(codec) => codec.encode(&sys::handle_at(dir.fd(), name).ok()?.0),
            Ids::Table(table) => table.at(dir.id, name),
        }
    }

    /// What the path table knows to be at `name`, held for [`Core::changed`] after it has moved.
    pub(crate) fn known_at(&self, dir: &Node, name: &Name) -> Option<(FileId, OwnedFd)> {
        let Ids::Table(table) = &self.ids else { return None };
        let id = table.at(dir.id, name)?;
        let fd = sys::open_path(dir.fd(), name).ok()?;
        let attr = sys::stat(fd.as_fd()).ok()?.attr;
        table.find(id)?.is(&attr).then_some((id, fd))
    }

    /// To be called after a change of the inode with this id: an overlay copies what is changed,
    /// and the copy has another time of birth, perhaps another number.
    pub(crate) fn changed(&self, id: FileId, fd: BorrowedFd<'_>) {
        if let Ids::Table(table) = &self.ids
            && let Ok(stat) = sys::stat(fd)
        {
            table.changed(id, &stat.attr);
        }
    }

    /// Attributes through an id; `ESTALE` for an inode that is only still there because we
    /// hold it.
    pub(crate) fn attr(&self, node: &Node) -> Result<Attr> {
        let attr = sys::stat(node.fd())?.attr;
        if attr.nlink == 0 && !self.files.in_use(node.id) {
            self.nodes.forget(node.id);
            return Err(stale());
        }
        Ok(attr)
    }
}

fn directory_stripe(dir: FileId) -> usize {
    ((dir.ino ^ dir.generation).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize
        % DIRECTORY_LOCKS
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

pub(crate) fn stale() -> Error {
    Error::new(Errno::ESTALE)
}

fn other_mount() -> Error {
    Error::new(Errno::EXDEV).because("another file system is mounted there")
}

fn busy() -> Error {
    Error::retry(Errno::EAGAIN).because("the server cannot start a thread for the export")
}

#[cfg(test)]
impl Caller {
    /// A caller for tests of what needs no export.
    pub(crate) fn of(who: Identity) -> Caller {
        Caller { who: Arc::new(who), umask: None }
    }
}
