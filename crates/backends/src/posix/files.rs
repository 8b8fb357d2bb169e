//! The table of files that clients have open, and the limit on their descriptors.
//!
//! There may be more open files than the server has descriptors. Beyond the limit the server closes
//! descriptors of files that were not used recently, and opens them again on demand. It opens them with
//! its own rights, because the caller's rights were checked at the first open. A file without a name
//! keeps its descriptor, since nothing else keeps the file.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError,
    Weak,
};

use dray_core::{
    Errno, Error, FileId, FsUuid, IdMap, Reservation, Result, Shares, Shortage, Taker,
};

use super::descriptor::{FileState, OpenedDescriptor, Parking};
use super::lanes::{DeferredClose, Lanes};
use super::options::DescriptorStore;
use super::sys;
use super::write_back::WriteBackErrors;

pub(super) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All open files of an export.
pub(crate) struct OpenFileTable {
    inodes: Mutex<IdMap<FileId, Weak<OpenInode>>>,
    ring: Mutex<ParkingRing>,
    /// Files open at clients.
    pub(super) files: AtomicUsize,
    /// Descriptors held for them.
    pub(super) descriptors: AtomicUsize,
    /// Counts the inodes that pins keep, such that no client can have all.
    pins: Arc<Shares>,
    /// Most descriptors of open files and pins together.
    descriptors_max: usize,
    files_max: usize,
    /// Read: a name is being removed. Write: an unused descriptor is being closed. The two exclude
    /// each other, so that the last reference to a file is not lost between them.
    removal: RwLock<()>,
    /// The store that keeps deleted files when this process dies, and the uuid of this file system
    /// there.
    descriptor_store: Option<(Arc<dyn DescriptorStore>, FsUuid)>,
    /// Each descriptor of a file has the same pages. That does not hold on overlays, for example.
    has_pages: bool,
    pub(super) lanes: Arc<Lanes>,
    /// Another server may go on for a client while this one goes on for others. A file that is given up
    /// without a close is open there.
    others_go_on: bool,
    /// This table has been left: clients open their files again in a successor, and closes here are
    /// not theirs.
    left: AtomicBool,
}

/// Files that may have descriptors, in no order. The hand goes round over them.
#[derive(Default)]
struct ParkingRing {
    files: Vec<Weak<FileState>>,
    hand: usize,
}

/// The state that all open files of one inode share.
pub(crate) struct OpenInode {
    pub(crate) id: FileId,
    /// Keeps the inode after its last name was removed.
    pub(super) pin: Mutex<Option<Pin>>,
    /// The descriptor store has it, perhaps from a process before this one.
    kept: AtomicBool,
    /// Open files of it that their clients have not closed.
    unclosed: AtomicUsize,
    pub(super) write_back_errors: WriteBackErrors,
    files: Weak<OpenFileTable>,
}

/// An `O_PATH` descriptor of a file without a name, with its reservation.
pub(super) struct Pin {
    fd: DeferredClose,
    _reservation: Reservation,
}

impl AsFd for Pin {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Deleted files that may be open at least, however low the limit of descriptors is, if they are a
/// small part of the process's limit.
const PINS_MIN: usize = 64;
const PINS_MIN_PART: usize = 8;

impl OpenFileTable {
    pub(crate) fn new(
        (descriptors_max, of_process): (usize, usize),
        files_max: usize,
        descriptor_store: Option<(Arc<dyn DescriptorStore>, FsUuid)>,
        (has_pages, others_go_on, lanes): (bool, bool, Arc<Lanes>),
    ) -> Arc<OpenFileTable> {
        let pins_min = PINS_MIN.min(of_process / PINS_MIN_PART);
        Arc::new(OpenFileTable {
            inodes: Mutex::default(),
            ring: Mutex::default(),
            files: AtomicUsize::new(0),
            descriptors: AtomicUsize::new(0),
            descriptors_max,
            pins: Arc::new(Shares::new((descriptors_max / 4 * 3).max(pins_min))),
            files_max,
            removal: RwLock::new(()),
            descriptor_store,
            has_pages,
            lanes,
            others_go_on,
            left: AtomicBool::new(false),
        })
    }

    /// From now on a close is not a client's close, and the descriptor store keeps the file for its
    /// client.
    pub(super) fn leave(&self) {
        self.left.store(true, Ordering::SeqCst);
    }

    /// Makes room for one more descriptor. Errors: `ENFILE` if there are too many open files. To be
    /// called before a file is opened, since opening can change it.
    pub(crate) fn admit(&self) -> Result<()> {
        if self.files.load(Ordering::Relaxed) >= self.files_max {
            return Err(
                Error::new(Errno::ENFILE).because("the export has reached its limit of open files")
            );
        }
        self.make_room();
        Ok(())
    }

    /// Makes room for a pin that a removal may need. To be called before
    /// [`OpenFileTable::removing`], under which nothing can be parked.
    pub(crate) fn before_removal(&self) {
        self.make_room();
    }

    /// Registers a file just opened; the client `asked` for more flags than it was opened with.
    pub(crate) fn opened(
        self: &Arc<OpenFileTable>,
        id: FileId,
        directory: bool,
        asked: i32,
        opened: OpenedDescriptor,
    ) -> Arc<FileState> {
        let inode = self.inode(id);
        inode.unclosed.fetch_add(1, Ordering::Relaxed);
        let file = FileState::new(self.clone(), inode, directory, (asked, opened));
        self.files.fetch_add(1, Ordering::Relaxed);
        self.descriptors.fetch_add(1, Ordering::Relaxed);
        self.enter_ring(Arc::downgrade(&file));
        file
    }

    fn inode(self: &Arc<OpenFileTable>, id: FileId) -> Arc<OpenInode> {
        let mut inodes = lock(&self.inodes);
        if let Some(inode) = inodes.get(&id).and_then(Weak::upgrade) {
            return inode;
        }
        let inode = Arc::new(OpenInode {
            id,
            pin: Mutex::default(),
            kept: AtomicBool::new(
                self.descriptor_store
                    .as_ref()
                    .is_some_and(|(descriptor_store, fs)| descriptor_store.adopt(*fs, id)),
            ),
            unclosed: AtomicUsize::new(0),
            write_back_errors: WriteBackErrors::default(),
            files: Arc::downgrade(self),
        });
        inodes.insert(id, Arc::downgrade(&inode));
        inode
    }

    /// The open inode with this id, if any file of it is open.
    pub(crate) fn find(&self, id: FileId) -> Option<Arc<OpenInode>> {
        lock(&self.inodes).get(&id).and_then(Weak::upgrade)
    }

    /// Whether a client has the file open, or had it open in the server epoch before.
    pub(crate) fn in_use(&self, id: FileId) -> bool {
        let kept = |(descriptor_store, fs): &(Arc<dyn DescriptorStore>, FsUuid)| {
            descriptor_store.holds(*fs, id)
        };
        self.find(id).is_some() || self.descriptor_store.as_ref().is_some_and(kept)
    }

    /// A descriptor of an open inode, if its id cannot be resolved otherwise.
    pub(crate) fn any_descriptor(&self, id: FileId) -> Option<Arc<DeferredClose>> {
        self.find(id)?;
        let ring = lock(&self.ring);
        let files = ring.files.iter().filter_map(Weak::upgrade);
        let mut of_inode = files.filter(|file| file.inode.id == id);
        let found = of_inode.find_map(|file| file.descriptor_at_hand());
        drop(ring);
        found
    }

    /// To be held while a name is removed, after asking [`OpenFileTable::needs_pin`].
    pub(crate) fn removing(&self) -> RwLockReadGuard<'_, ()> {
        self.removal.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held while an unused descriptor is closed; none while a name is removed.
    pub(super) fn no_removal(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        match self.removal.try_write() {
            Ok(held) => Some(held),
            Err(TryLockError::Poisoned(held)) => Some(held.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The open inode that needs a pin, because its last name is about to be removed. Some file of
    /// it has no descriptor, or should have none, and no pin keeps it. To be asked under
    /// [`OpenFileTable::removing`].
    pub(crate) fn needs_pin(&self, id: FileId) -> Option<Arc<OpenInode>> {
        let parked = self.files.load(Ordering::Relaxed) > self.descriptors.load(Ordering::Relaxed);
        if !parked && !self.is_crowded() {
            return None;
        }
        self.find(id).filter(|inode| lock(&inode.pin).is_none())
    }

    /// Whether a file without a name should be pinned, so that its descriptor can be closed.
    pub(crate) fn is_crowded(&self) -> bool {
        self.used() >= self.descriptors_max / 2
    }

    fn used(&self) -> usize {
        self.descriptors.load(Ordering::Relaxed) + self.pins.used()
    }

    /// Errors: `ENFILE` if files without a name, or those of `taker`, have reached their share of
    /// the descriptors. The rest stays free for other files.
    pub(crate) fn admit_pin(&self, taker: Taker) -> Result<()> {
        self.pins.room(taker).map_err(|shortage| {
            Error::new(Errno::ENFILE).because(match shortage {
                Shortage::None => "the server has no descriptors for more open deleted files",
                _ => "the client or its address has reached its share of open deleted files",
            })
        })
    }

    /// The open inode that the descriptor store should have before the inode loses a name.
    pub(crate) fn needs_keeping(&self, id: FileId) -> Option<Arc<OpenInode>> {
        self.descriptor_store.as_ref()?;
        self.find(id).filter(|inode| !inode.kept.load(Ordering::Relaxed))
    }

    /// Has the descriptor store keep `inode`; `fd` may be an `O_PATH` descriptor.
    pub(crate) fn keep(&self, inode: &OpenInode, fd: BorrowedFd<'_>) {
        if let Some((descriptor_store, fs)) = &self.descriptor_store
            && !inode.kept.swap(true, Ordering::Relaxed)
        {
            descriptor_store.hold(*fs, inode.id, fd);
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

    /// Closes descriptors of idle files until there is room for one more. If all are in use or must
    /// stay, the limit is exceeded: the process's limit is twice as high.
    pub(super) fn make_room(&self) {
        let mut written_back = 0;
        while self.used() >= self.descriptors_max && written_back < WRITTEN_BACK_MAX {
            match self.park_one() {
                Room::Made => {}
                Room::Soon(file, fd) => {
                    written_back += 1;
                    file.write_back.write_back(&file.inode.write_back_errors, || {
                        match self.has_pages {
                            true => sys::write_back(fd.as_fd()),
                            false => sys::sync(fd.as_fd(), true),
                        }
                    });
                }
                Room::None => return,
            }
        }
    }

    /// A descriptor with unsynced writes is the last choice, since its data would have to be synced
    /// first.
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

/// Files that are synced at most to make room for one descriptor.
const WRITTEN_BACK_MAX: u32 = 16;

/// Whether there is room for one more descriptor.
enum Room {
    Made,
    /// There is room once the data that this descriptor wrote are synced.
    Soon(Arc<FileState>, Arc<DeferredClose>),
    None,
}

impl OpenInode {
    /// Keeps the inode by this `O_PATH` descriptor until its last file is closed. `taker` pays for
    /// it.
    pub(crate) fn pin(&self, fd: OwnedFd, taker: Taker) {
        let Some(files) = self.files.upgrade() else { return };
        let pin =
            Pin { fd: DeferredClose::new(fd, &files.lanes), _reservation: files.pins.hold(taker) };
        let before = lock(&self.pin).replace(pin);
        drop(before); // outside of the lock
    }
}

impl OpenInode {
    /// A client has closed one of its files.
    pub(crate) fn closed(&self) {
        let less = |unclosed: usize| unclosed.checked_sub(1);
        let _ = self.unclosed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less); // never below 0
    }
}

impl Drop for OpenInode {
    fn drop(&mut self) {
        let Some(files) = self.files.upgrade() else { return };
        let mut inodes = lock(&files.inodes);
        // A client may have opened it again since this object was given up.
        if inodes.get(&self.id).is_some_and(|inode| inode.strong_count() == 0) {
            inodes.remove(&self.id);
        }
        if let Some((descriptor_store, fs)) = &files.descriptor_store
            && self.kept.load(Ordering::Relaxed)
        {
            let given_up = files.others_go_on && self.unclosed.load(Ordering::Relaxed) > 0;
            // Once for each open file of it.
            match given_up || files.left.load(Ordering::SeqCst) {
                true => descriptor_store.keep_for_recovery(*fs, self.id),
                false => descriptor_store.release(*fs, self.id),
            }
        }
    }
}
