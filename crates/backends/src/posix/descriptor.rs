//! An open file and its descriptor, which it may have to do without while nobody uses it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use dray_core::{Errno, Error, Result};

use crate::locks::Flocks;

use super::core::Core;
use super::files::{Files, OpenInode, lock};
use super::lanes::Kept;
use super::reopen::{Granted, Purpose};
use super::sys;
use super::write_back::WriteBack;

/// One open file.
pub(crate) struct FileState {
    pub(crate) inode: Arc<OpenInode>,
    pub(crate) directory: bool,
    /// What to open it again with: access mode and what else lasts.
    granted: Granted,
    /// Its descriptor is for reading alone, though the file is open for more: the file system below
    /// took no changes when the descriptor was opened.
    unchanging: AtomicBool,
    /// Opened with `O_SYNC`, not merely `O_DSYNC`: times are to be on media too.
    pub(crate) syncs_all: bool,
    slot: Mutex<Slot>,
    pub(super) write_back: WriteBack,
    /// Used since the hand last passed.
    used: AtomicBool,
    /// Readers of a directory share the descriptor's position: one at a time.
    pub(crate) reading_dir: Mutex<()>,
    /// Owners of flock locks taken through this file.
    pub(crate) flocks: Flocks,
    files: Arc<Files>,
    /// Itself, for the ring.
    me: Weak<FileState>,
}

enum Slot {
    Open(Arc<Kept>),
    /// Closed for want of descriptors.
    Parked,
    /// Closed by the client.
    Closed,
}

/// A descriptor just opened.
pub(crate) struct Opened {
    pub(crate) fd: OwnedFd,
    /// What it was to be opened with.
    granted: Granted,
    /// It is for reading alone, whatever that says.
    pub(crate) unchanging: bool,
}

impl Opened {
    /// By the kernel for its caller, with these flags of open(2).
    pub(crate) fn for_caller(fd: OwnedFd, flags: i32) -> Opened {
        Opened::new(fd, Granted::to_caller(flags))
    }

    /// With what was granted.
    pub(super) fn new(fd: OwnedFd, granted: Granted) -> Opened {
        Opened { fd, granted, unchanging: false }
    }

    /// What a client has had open, `fd`, is opened again as the server, for reading alone where the file
    /// system below takes no changes any more: then it goes on to be read, and its changes fail.
    pub(super) fn again(core: &Core, fd: BorrowedFd<'_>, granted: Granted) -> Result<Opened> {
        let open = |granted: Granted| core.reopen_as_server(fd, Purpose::GoOn(granted));
        let opened = match granted.changes() {
            true => core.writable().and_then(|()| open(granted)),
            false => open(granted),
        };
        match opened {
            Err(error) if granted.changes() && error.errno() == Errno::EROFS => {
                let fd = open(granted.without_changes())?;
                Ok(Opened { fd, granted, unchanging: true })
            }
            opened => Ok(Opened::new(opened?, granted)),
        }
    }
}

/// What came of taking a descriptor away.
pub(super) enum Parking {
    Parked(Arc<Kept>),
    NotOpen,
    /// What was written through it is to be brought to the disk before.
    Due(Arc<Kept>),
    InUse,
}

impl FileState {
    /// One that was just opened; its client `asked` for more flags than it was opened with.
    pub(super) fn new(
        files: Arc<Files>,
        inode: Arc<OpenInode>,
        directory: bool,
        (asked, opened): (i32, Opened),
    ) -> Arc<FileState> {
        let Opened { fd, granted, unchanging } = opened;
        let fd = Kept::new(fd, &files.lanes);
        Arc::new_cyclic(|me| FileState {
            inode,
            directory,
            granted,
            unchanging: AtomicBool::new(unchanging),
            syncs_all: asked & libc::O_SYNC == libc::O_SYNC,
            slot: Mutex::new(Slot::Open(Arc::new(fd))),
            write_back: WriteBack::default(),
            used: AtomicBool::new(true),
            reading_dir: Mutex::default(),
            flocks: Flocks::default(),
            files,
            me: me.clone(),
        })
    }

    /// Whether it was used since this was asked last.
    pub(super) fn take_used(&self) -> bool {
        self.used.swap(false, Ordering::Relaxed)
    }

    /// Its descriptor, if it has one and nobody is about to change that.
    pub(super) fn descriptor_at_hand(&self) -> Option<Arc<Kept>> {
        match &*self.slot.try_lock().ok()? {
            Slot::Open(fd) => Some(fd.clone()),
            Slot::Parked | Slot::Closed => None,
        }
    }

    /// The file takes appends only.
    pub(crate) fn appends_only(&self) -> bool {
        self.granted.appends()
    }

    /// Its descriptor, opened again if need be. Errors: `EBADF` after the close, `ESTALE` if
    /// the file has gone behind our back.
    pub(crate) fn fd(&self, core: &Core) -> Result<Arc<Kept>> {
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
        let fd = self.open_again(core, &mut slot)?;
        // While nobody else gets at it: whoever closes or parks it takes it off the count.
        core.files.descriptors.fetch_add(1, Ordering::Relaxed);
        drop(slot);
        self.used.store(true, Ordering::Relaxed);
        core.files.enter_ring(self.me.clone());
        Ok(fd)
    }

    /// Its descriptor for what changes the file. Errors: as [`FileState::fd`]; `EROFS` if the file
    /// system below takes no changes.
    pub(crate) fn fd_to_change(&self, core: &Core) -> Result<Arc<Kept>> {
        if self.unchanging.load(Ordering::Acquire) {
            let mut slot = lock(&self.slot);
            if matches!(*slot, Slot::Open(_)) && self.unchanging.load(Ordering::Acquire) {
                // It may take changes again by now.
                self.write_back.parked(&self.inode.failures);
                self.open_again(core, &mut slot)?;
            }
        }
        let fd = self.fd(core)?;
        if self.unchanging.load(Ordering::Acquire) { Err(Errno::EROFS.into()) } else { Ok(fd) }
    }

    /// Its descriptor for reading. Errors: as [`FileState::fd`]; `EBADF` if it is open for something
    /// else only, and has a descriptor for reading for want of another.
    pub(crate) fn fd_to_read(&self, core: &Core) -> Result<Arc<Kept>> {
        let fd = self.fd(core)?;
        if self.granted.reads() || !self.unchanging.load(Ordering::Acquire) {
            Ok(fd)
        } else {
            Err(Errno::EBADF.into())
        }
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

    /// Opens it again, as the server.
    fn open_again(&self, core: &Core, slot: &mut MutexGuard<'_, Slot>) -> Result<Arc<Kept>> {
        let pin = lock(&self.inode.pin);
        let opened = match &*pin {
            Some(pin) => Opened::again(core, pin.as_fd(), self.granted)?,
            None => {
                drop(pin);
                Opened::again(core, core.node(self.inode.id)?.fd(), self.granted)?
            }
        };
        self.unchanging.store(opened.unchanging, Ordering::Release);
        self.write_back.reopened(&self.inode.failures);
        let fd = Arc::new(Kept::new(opened.fd, &core.lanes));
        **slot = Slot::Open(fd.clone());
        Ok(fd)
    }

    /// Takes its descriptor away, if it can do without.
    pub(super) fn park(&self) -> Parking {
        let Ok(mut slot) = self.slot.try_lock() else { return Parking::InUse };
        let Slot::Open(fd) = &*slot else { return Parking::NotOpen };
        if Arc::strong_count(fd) > 1 {
            return Parking::InUse;
        }
        if self.write_back.is_due() {
            return Parking::Due(fd.clone());
        }
        // A removal takes as long as the disk does, and others wait for us.
        let Some(_no_removal) = self.files.no_removal() else { return Parking::InUse };
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
    pub(crate) fn close(&self) -> Option<Arc<Kept>> {
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
}

impl Drop for FileState {
    fn drop(&mut self) {
        self.close();
    }
}
