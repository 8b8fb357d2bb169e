//! The files that clients have open, and how many descriptors there are for them.
//!
//! There may be more open files than the server has descriptors: beyond a limit those of
//! files not used lately are closed and opened again when they are needed, as the server,
//! because the caller's rights were checked at the first open. A file that has no name any
//! more keeps its descriptor, since nothing else keeps the file.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError,
    Weak,
};

use dray_core::{Errno, Error, FileId, FsUuid, IdMap, Place, Result, Shares, Shortage, Taker};

use super::descriptor::{FileState, Opened, Parking};
use super::lanes::{Kept, Lanes};
use super::options::Keeper;
use super::sys;
use super::write_back::Failures;

pub(super) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All open files of an export.
pub(crate) struct Files {
    inodes: Mutex<IdMap<FileId, Weak<OpenInode>>>,
    ring: Mutex<Ring>,
    /// Files open at clients.
    pub(super) files: AtomicUsize,
    /// Descriptors held for them.
    pub(super) descriptors: AtomicUsize,
    /// Inodes that a pin of ours keeps, of which no client can have all.
    pins: Arc<Shares>,
    /// Most descriptors for both.
    descriptors_max: usize,
    files_max: usize,
    /// Read: a name is being removed. Write: a descriptor is being closed because nobody
    /// used it. One after the other, so that the last hold on a file is not lost between.
    removal: RwLock<()>,
    /// Who keeps deleted files over our death, and which file system this is to him.
    keeper: Option<(Arc<dyn Keeper>, FsUuid)>,
    /// The pages of a file are those of its descriptor; on overlays, for one, they are not.
    has_pages: bool,
    pub(super) lanes: Arc<Lanes>,
    /// Nobody closes files any more: who has them open will open them again elsewhere.
    left: AtomicBool,
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
    /// What keeps the inode after its last name went.
    pub(super) pin: Mutex<Option<Pin>>,
    /// The keeper has it, or has had it since before our time.
    kept: AtomicBool,
    pub(super) failures: Failures,
    files: Weak<Files>,
}

/// An `O_PATH` descriptor of a file without a name, and that it is counted.
pub(super) struct Pin {
    fd: Kept,
    _place: Place,
}

impl AsFd for Pin {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Deleted files that may be open however few descriptors there are to be, as long as these are
/// a small part of what the process may have.
const PINS_MIN: usize = 64;
const PINS_MIN_PART: usize = 8;

impl Files {
    pub(crate) fn new(
        (descriptors_max, of_process): (usize, usize),
        files_max: usize,
        keeper: Option<(Arc<dyn Keeper>, FsUuid)>,
        (has_pages, lanes): (bool, Arc<Lanes>),
    ) -> Arc<Files> {
        let pins_min = PINS_MIN.min(of_process / PINS_MIN_PART);
        Arc::new(Files {
            inodes: Mutex::default(),
            ring: Mutex::default(),
            files: AtomicUsize::new(0),
            descriptors: AtomicUsize::new(0),
            descriptors_max,
            pins: Arc::new(Shares::new((descriptors_max / 4 * 3).max(pins_min))),
            files_max,
            removal: RwLock::new(()),
            keeper,
            has_pages,
            lanes,
            left: AtomicBool::new(false),
        })
    }

    /// What is closed from now on was not closed by whoever had it open: it is kept for them.
    pub(super) fn leave(&self) {
        self.left.store(true, Ordering::SeqCst);
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

    /// Registers a file just opened; the client `asked` for more flags than it was opened with.
    pub(crate) fn opened(
        self: &Arc<Files>,
        id: FileId,
        directory: bool,
        asked: i32,
        opened: Opened,
    ) -> Arc<FileState> {
        let inode = self.inode(id);
        let file = FileState::new(self.clone(), inode, directory, (asked, opened));
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
    pub(crate) fn any_descriptor(&self, id: FileId) -> Option<Arc<Kept>> {
        self.find(id)?;
        let ring = lock(&self.ring);
        let files = ring.files.iter().filter_map(Weak::upgrade);
        let mut of_inode = files.filter(|file| file.inode.id == id);
        let found = of_inode.find_map(|file| file.descriptor_at_hand());
        drop(ring);
        found
    }

    /// To be held while a name is removed, after asking [`Files::needs_pin`].
    pub(crate) fn removing(&self) -> RwLockReadGuard<'_, ()> {
        self.removal.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held while a descriptor is closed because nobody used it; none while a name is removed.
    pub(super) fn no_removal(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        match self.removal.try_write() {
            Ok(held) => Some(held),
            Err(TryLockError::Poisoned(held)) => Some(held.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
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
        self.descriptors.load(Ordering::Relaxed) + self.pins.used()
    }

    /// `ENFILE` if files without a name take all the descriptors that they may, so that
    /// others go on to be served, or those of `taker` its share of them.
    pub(crate) fn admit_pin(&self, taker: Taker) -> Result<()> {
        self.pins.room(taker).map_err(|shortage| {
            Error::new(Errno::ENFILE).because(match shortage {
                Shortage::None => {
                    "as many deleted files are open as the server has descriptors for"
                }
                _ => "the client, or its address, has its share of deleted files that are open",
            })
        })
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

    pub(super) fn enter_ring(&self, file: Weak<FileState>) {
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
    pub(super) fn make_room(&self) {
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
            if file.take_used() || due && steps > ring.files.len() {
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
    Soon(Arc<FileState>, Arc<Kept>),
    None,
}

impl OpenInode {
    /// Keeps the inode by this `O_PATH` descriptor until its last file is closed, on account of
    /// `taker`.
    pub(crate) fn pin(&self, fd: OwnedFd, taker: Taker) {
        let Some(files) = self.files.upgrade() else { return };
        let pin = Pin { fd: Kept::new(fd, &files.lanes), _place: files.pins.hold(taker) };
        let before = lock(&self.pin).replace(pin);
        drop(before); // outside of the lock
    }
}

impl Drop for OpenInode {
    fn drop(&mut self) {
        let Some(files) = self.files.upgrade() else { return };
        let mut inodes = lock(&files.inodes);
        // Somebody may have opened it again since we were given up.
        if inodes.get(&self.id).is_some_and(|inode| inode.strong_count() == 0) {
            inodes.remove(&self.id);
        }
        if let Some((keeper, fs)) = &files.keeper
            && self.kept.load(Ordering::Relaxed)
        {
            // Once for each that has it.
            match files.left.load(Ordering::SeqCst) {
                true => keeper.keep_for_return(*fs, self.id),
                false => keeper.release(*fs, self.id),
            }
        }
    }
}
