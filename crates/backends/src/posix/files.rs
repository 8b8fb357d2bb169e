//! The files that clients have open, and the descriptors that some of them hold.
//!
//! There may be more open files than the server has descriptors: beyond a limit those of
//! files not used lately are closed and opened again when they are needed, as the server,
//! because the caller's rights were checked at the first open. A file that has no name any
//! more keeps its descriptor, since nothing else keeps the file.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, Weak};

use dray_core::{Errno, Error, FileId, FsUuid, IdMap, LockOwner, NodeId, Result};

use super::core::Core;
use super::guard::Ranges;
use super::options::Keeper;
use super::write_back::{Failures, WriteBack};
use super::{cred, sys};

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All open files of an export.
pub(crate) struct Files {
    inodes: Mutex<IdMap<FileId, Weak<OpenInode>>>,
    ring: Mutex<Ring>,
    /// Files open at clients.
    files: AtomicUsize,
    /// Descriptors held for them.
    descriptors: AtomicUsize,
    /// Inodes that a pin of ours keeps.
    pins: AtomicUsize,
    /// Most descriptors for both.
    descriptors_max: usize,
    /// Most pins.
    pins_max: usize,
    files_max: usize,
    /// Read: a name is being removed. Write: a descriptor is being closed because nobody
    /// used it. One after the other, so that the last hold on a file is not lost between.
    removal: RwLock<()>,
    /// Who keeps deleted files over our death, and which file system this is to him.
    keeper: Option<(Arc<dyn Keeper>, FsUuid)>,
    /// The pages of a file are those of its descriptor; on overlays, for one, they are not.
    has_pages: bool,
}

/// Files that may hold descriptors, in no order; the hand goes round over them.
#[derive(Default)]
struct Ring {
    files: Vec<Weak<FileState>>,
    hand: usize,
}

/// What all open files of one inode share.
pub(crate) struct OpenInode {
    pub(crate) id: FileId,
    /// Keeps reads and writes apart.
    pub(crate) ranges: Ranges,
    /// `O_PATH` descriptor that keeps the inode after its last name went.
    pin: Mutex<Option<OwnedFd>>,
    /// The keeper has it, or has had it since before our time.
    kept: AtomicBool,
    failures: Failures,
    files: Weak<Files>,
}

/// One open file.
pub(crate) struct FileState {
    pub(crate) inode: Arc<OpenInode>,
    pub(crate) directory: bool,
    /// Flags to open it again with: access mode and what else lasts.
    flags: i32,
    /// Opened with `O_SYNC`, not merely `O_DSYNC`: times are to be on media too.
    pub(crate) syncs_all: bool,
    slot: Mutex<Slot>,
    write_back: WriteBack,
    /// Used since the hand last passed.
    used: AtomicBool,
    /// Readers of a directory share the descriptor's position: one at a time.
    pub(crate) reading_dir: Mutex<()>,
    /// Owners of flock locks taken through this file.
    pub(crate) flock_owners: Mutex<Vec<(NodeId, LockOwner)>>,
    files: Arc<Files>,
    /// Itself, for the ring.
    me: Weak<FileState>,
}

enum Slot {
    Open(Arc<OwnedFd>),
    /// Closed for want of descriptors.
    Parked,
    /// Closed by the client.
    Closed,
}

/// Deleted files that may be open however few descriptors there are to be, as long as these are
/// a small part of what the process may have.
const PINS_MIN: usize = 64;
const PINS_MIN_PART: usize = 8;

/// Flags of open(2) that matter after the open itself.
const LASTING: i32 = libc::O_ACCMODE
    | libc::O_APPEND
    | libc::O_SYNC
    | libc::O_DIRECT
    | libc::O_DIRECTORY
    | libc::O_NOATIME;

impl Files {
    pub(crate) fn new(
        (descriptors_max, of_process): (usize, usize),
        files_max: usize,
        keeper: Option<(Arc<dyn Keeper>, FsUuid)>,
        has_pages: bool,
    ) -> Arc<Files> {
        let pins_min = PINS_MIN.min(of_process / PINS_MIN_PART);
        Arc::new(Files {
            inodes: Mutex::default(),
            ring: Mutex::default(),
            files: AtomicUsize::new(0),
            descriptors: AtomicUsize::new(0),
            pins: AtomicUsize::new(0),
            descriptors_max,
            pins_max: (descriptors_max / 4 * 3).max(pins_min),
            files_max,
            removal: RwLock::new(()),
            keeper,
            has_pages,
        })
    }

    /// Makes room for one more descriptor; `ENFILE` if there are too many open files. To be
    /// asked before a file is opened, since opening can change it.
    pub(crate) fn admit(&self) -> Result<()> {
        if self.files.load(Ordering::Relaxed) >= self.files_max {
            return Err(Error::new(Errno::ENFILE).because("the export's limit of open files"));
        }
        self.make_room();
        Ok(())
    }

    /// Makes room for what a removal may have to pin. To be called before
    /// [`Files::removing`], under which nothing can be parked.
    pub(crate) fn before_removal(&self) {
        self.make_room();
    }

    /// Registers a file just opened with `flags`; the client `asked` for more.
    pub(crate) fn opened(
        self: &Arc<Files>,
        id: FileId,
        directory: bool,
        asked: i32,
        flags: i32,
        fd: OwnedFd,
    ) -> Arc<FileState> {
        let inode = self.inode(id);
        let file = Arc::new_cyclic(|me| FileState {
            inode,
            directory,
            flags: flags & LASTING,
            syncs_all: asked & libc::O_SYNC == libc::O_SYNC,
            slot: Mutex::new(Slot::Open(Arc::new(fd))),
            write_back: WriteBack::default(),
            used: AtomicBool::new(true),
            reading_dir: Mutex::default(),
            flock_owners: Mutex::default(),
            files: self.clone(),
            me: me.clone(),
        });
        self.files.fetch_add(1, Ordering::Relaxed);
        self.descriptors.fetch_add(1, Ordering::Relaxed);
        self.enter_ring(Arc::downgrade(&file));
        file
    }

    fn inode(self: &Arc<Files>, id: FileId) -> Arc<OpenInode> {
        let mut inodes = lock(&self.inodes);
        if let Some(inode) = inodes.get(&id).and_then(Weak::upgrade) {
            return inode;
        }
        let inode = Arc::new(OpenInode {
            id,
            ranges: Ranges::default(),
            pin: Mutex::default(),
            kept: AtomicBool::new(
                self.keeper.as_ref().is_some_and(|(keeper, fs)| keeper.adopt(*fs, id)),
            ),
            failures: Failures::default(),
            files: Arc::downgrade(self),
        });
        inodes.insert(id, Arc::downgrade(&inode));
        inode
    }

    /// The open inode with this id, if any file of it is open.
    pub(crate) fn find(&self, id: FileId) -> Option<Arc<OpenInode>> {
        lock(&self.inodes).get(&id).and_then(Weak::upgrade)
    }

    /// Whether somebody has it open, or had in the server's last life.
    pub(crate) fn in_use(&self, id: FileId) -> bool {
        let kept = |(keeper, fs): &(Arc<dyn Keeper>, FsUuid)| keeper.holds(*fs, id);
        self.find(id).is_some() || self.keeper.as_ref().is_some_and(kept)
    }

    /// A descriptor of an open inode, for when it cannot be found by its id otherwise.
    pub(crate) fn any_descriptor(&self, id: FileId) -> Option<Arc<OwnedFd>> {
        self.find(id)?;
        let ring = lock(&self.ring);
        let files = ring.files.iter().filter_map(Weak::upgrade);
        let found = files.filter(|file| file.inode.id == id).find_map(|file| {
            match &*file.slot.try_lock().ok()? {
                Slot::Open(fd) => Some(fd.clone()),
                _ => None,
            }
        });
        drop(ring);
        found
    }

    /// To be held while a name is removed, after asking [`Files::needs_pin`].
    pub(crate) fn removing(&self) -> RwLockReadGuard<'_, ()> {
        self.removal.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The open inode that would be lost with its last name, or would keep more descriptors
    /// than there are to spare: some file of it has no descriptor or should have none, and
    /// nothing pins it. To be asked under [`Files::removing`].
    pub(crate) fn needs_pin(&self, id: FileId) -> Option<Arc<OpenInode>> {
        let parked = self.files.load(Ordering::Relaxed) > self.descriptors.load(Ordering::Relaxed);
        if !parked && !self.is_crowded() {
            return None;
        }
        self.find(id).filter(|inode| lock(&inode.pin).is_none())
    }

    /// Whether a file without a name had better be pinned, so that its descriptor can be had.
    pub(crate) fn is_crowded(&self) -> bool {
        self.used() >= self.descriptors_max / 2
    }

    fn used(&self) -> usize {
        self.descriptors.load(Ordering::Relaxed) + self.pins.load(Ordering::Relaxed)
    }

    /// `ENFILE` if files without a name take all the descriptors that they may, so that
    /// others go on to be served.
    pub(crate) fn admit_pin(&self) -> Result<()> {
        if self.pins.load(Ordering::Relaxed) < self.pins_max {
            return Ok(());
        }
        let why = "as many deleted files are open as the server has descriptors for";
        Err(Error::new(Errno::ENFILE).because(why))
    }

    /// The open inode that a keeper should have before it loses a name.
    pub(crate) fn needs_keeping(&self, id: FileId) -> Option<Arc<OpenInode>> {
        self.keeper.as_ref()?;
        self.find(id).filter(|inode| !inode.kept.load(Ordering::Relaxed))
    }

    /// Has `inode` kept over our death; `fd` may be an `O_PATH` descriptor.
    pub(crate) fn keep(&self, inode: &OpenInode, fd: BorrowedFd<'_>) {
        if let Some((keeper, fs)) = &self.keeper
            && !inode.kept.swap(true, Ordering::Relaxed)
        {
            keeper.hold(*fs, inode.id, fd);
        }
    }

    /// Files open at clients, and descriptors held for them.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.files.load(Ordering::Relaxed), self.descriptors.load(Ordering::Relaxed))
    }

    fn enter_ring(&self, file: Weak<FileState>) {
        let mut ring = lock(&self.ring);
        if ring.files.len() >= 64 && ring.files.len() > 2 * self.descriptors.load(Ordering::Relaxed)
        {
            ring.files.retain(|file| file.strong_count() > 0);
            ring.hand = 0;
        }
        ring.files.push(file);
    }

    /// Closes descriptors of idle files until there is room for one more. Where all are in
    /// use or must be kept the limit is exceeded: the process's own is twice as high.
    fn make_room(&self) {
        let mut written_back = 0;
        while self.used() >= self.descriptors_max && written_back < WRITTEN_BACK_MAX {
            match self.park_one() {
                Room::Made => {}
                Room::Soon(file, fd) => {
                    written_back += 1;
                    file.write_back.write_back(&file.inode.failures, || match self.has_pages {
                        true => sys::write_back(fd.as_fd()),
                        false => sys::sync(fd.as_fd(), true),
                    });
                }
                Room::None => return,
            }
        }
    }

    /// Whoever has written is asked last: that would have to be brought to the disk first.
    fn park_one(&self) -> Room {
        let mut ring = lock(&self.ring);
        let mut steps = 3 * ring.files.len();
        while steps > 0 && !ring.files.is_empty() {
            steps -= 1;
            let at = (ring.hand + 1) % ring.files.len();
            ring.hand = at;
            let Some(file) = ring.files[at].upgrade() else {
                ring.files.swap_remove(at);
                continue;
            };
            let due = file.write_back.is_due();
            if file.used.swap(false, Ordering::Relaxed) || due && steps > ring.files.len() {
                continue;
            }
            match file.park() {
                Parking::Parked(fd) => {
                    ring.files.swap_remove(at);
                    drop(ring);
                    drop(fd); // closing may take a while
                    return Room::Made;
                }
                Parking::NotOpen => {
                    ring.files.swap_remove(at);
                }
                Parking::Due(fd) => {
                    drop(ring);
                    return Room::Soon(file, fd);
                }
                Parking::InUse => {}
            }
        }
        Room::None
    }
}

/// Files that are written back at most to make room for one descriptor.
const WRITTEN_BACK_MAX: u32 = 16;

/// Whether there is room for one more descriptor.
enum Room {
    Made,
    /// Once what was written through this one is on the disk.
    Soon(Arc<FileState>, Arc<OwnedFd>),
    None,
}

enum Parking {
    Parked(Arc<OwnedFd>),
    NotOpen,
    /// What was written through it is to be brought to the disk before.
    Due(Arc<OwnedFd>),
    InUse,
}

impl OpenInode {
    /// Keeps the inode by this `O_PATH` descriptor until its last file is closed.
    pub(crate) fn pin(&self, fd: OwnedFd) {
        let before = lock(&self.pin).replace(fd);
        if let (None, Some(files)) = (before, self.files.upgrade()) {
            files.pins.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Drop for OpenInode {
    fn drop(&mut self) {
        let Some(files) = self.files.upgrade() else { return };
        if lock(&self.pin).is_some() {
            files.pins.fetch_sub(1, Ordering::Relaxed);
        }
        let mut inodes = lock(&files.inodes);
        // Somebody may have opened it again since we were given up.
        if inodes.get(&self.id).is_some_and(|inode| inode.strong_count() == 0) {
            inodes.remove(&self.id);
        }
        if let Some((keeper, fs)) = &files.keeper
            && self.kept.load(Ordering::Relaxed)
        {
            keeper.release(*fs, self.id); // once for each that has it
        }
    }
}

impl FileState {
    /// The file takes appends only.
    pub(crate) fn appends_only(&self) -> bool {
        self.flags & libc::O_APPEND != 0
    }

    /// Its descriptor, opened again if need be. Errors: `EBADF` after the close, `ESTALE` if
    /// the file has gone behind our back.
    pub(crate) fn fd(&self, core: &Core) -> Result<Arc<OwnedFd>> {
        let mut slot = lock(&self.slot);
        match &*slot {
            Slot::Open(fd) => {
                self.used.store(true, Ordering::Relaxed);
                return Ok(fd.clone());
            }
            Slot::Closed => return Err(Error::new(Errno::EBADF)),
            Slot::Parked => {}
        }
        core.files.make_room();
        let fd = Arc::new(self.open_again(core)?);
        self.write_back.reopened(&self.inode.failures);
        *slot = Slot::Open(fd.clone());
        // While nobody else gets at it: whoever closes or parks it takes it off the count.
        core.files.descriptors.fetch_add(1, Ordering::Relaxed);
        drop(slot);
        self.used.store(true, Ordering::Relaxed);
        core.files.enter_ring(self.me.clone());
        Ok(fd)
    }

    /// Something was written through it.
    pub(crate) fn written(&self) {
        self.write_back.written();
    }

    /// A write that was to be on media failed: the kernel has told of it what it tells once.
    pub(crate) fn sync_failed(&self, errno: Errno) {
        self.inode.failures.add(errno);
    }

    /// fsync(2) or fdatasync(2). Errors: also those that its client has not been told because the
    /// descriptor was another one.
    pub(crate) fn sync(&self, core: &Core, data_only: bool) -> Result<()> {
        let fd = self.fd(core)?;
        let sync = || sys::sync(fd.as_fd(), data_only);
        Ok(self.write_back.sync(&self.inode.failures, sync)?)
    }

    fn open_again(&self, core: &Core) -> Result<OwnedFd> {
        let pin = lock(&self.inode.pin);
        if let Some(pin) = &*pin {
            let opened = cred::as_root(|| sys::reopen(core.proc_fd(), pin.as_fd(), self.flags))?;
            return Ok(opened?);
        }
        drop(pin);
        let node = core.node(self.inode.id)?;
        Ok(cred::as_root(|| sys::reopen(core.proc_fd(), node.fd(), self.flags))??)
    }

    fn park(&self) -> Parking {
        let Ok(mut slot) = self.slot.try_lock() else { return Parking::InUse };
        let Slot::Open(fd) = &*slot else { return Parking::NotOpen };
        if Arc::strong_count(fd) > 1 {
            return Parking::InUse;
        }
        if self.write_back.is_due() {
            return Parking::Due(fd.clone());
        }
        let _no_removal = self.files.removal.write().unwrap_or_else(PoisonError::into_inner);
        let kept = lock(&self.inode.pin).is_some();
        if !kept && !sys::stat(fd.as_fd()).is_ok_and(|stat| stat.attr.nlink > 0) {
            return Parking::InUse;
        }
        let Slot::Open(fd) = std::mem::replace(&mut *slot, Slot::Parked) else {
            return Parking::NotOpen;
        };
        self.write_back.parked(&self.inode.failures);
        self.files.descriptors.fetch_sub(1, Ordering::Relaxed);
        Parking::Parked(fd)
    }

    /// Gives the descriptor back. The file can not be used any more.
    pub(crate) fn close(&self) -> Option<Arc<OwnedFd>> {
        let old = std::mem::replace(&mut *lock(&self.slot), Slot::Closed);
        match old {
            Slot::Open(fd) => {
                self.files.descriptors.fetch_sub(1, Ordering::Relaxed);
                self.files.files.fetch_sub(1, Ordering::Relaxed);
                Some(fd)
            }
            Slot::Parked => {
                self.files.files.fetch_sub(1, Ordering::Relaxed);
                None
            }
            Slot::Closed => None,
        }
    }

    /// Remembers who took a flock lock, to give it back at the close.
    pub(crate) fn remember_flock(&self, owner: (NodeId, LockOwner)) {
        let mut owners = lock(&self.flock_owners);
        if !owners.contains(&owner) {
            owners.push(owner);
        }
    }

    /// Who took flock locks, once.
    pub(crate) fn take_flock_owners(&self) -> Vec<(NodeId, LockOwner)> {
        std::mem::take(&mut *lock(&self.flock_owners))
    }
}

impl Drop for FileState {
    fn drop(&mut self) {
        self.close();
    }
}
