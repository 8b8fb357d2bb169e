//! An open file and its descriptor. The server may close the descriptor while the file is not in use.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use dray_core::{Errno, Error, Result};
use dray_rt::Instant;

use crate::locks::Flocks;

use super::core::Core;
use super::files::{OpenFileTable, OpenInode, lock};
use super::lanes::DeferredClose;
use super::reopen::{OpenGrant, Purpose};
use super::sys;
use super::write_back::WriteBack;

/// One open file.
pub(crate) struct FileState {
    pub(crate) inode: Arc<OpenInode>,
    pub(crate) directory: bool,
    /// What to open it again with: access mode and what else lasts.
    granted: OpenGrant,
    /// The descriptor is for reading alone, though the file is open for more: the file
    /// system below took no changes when the descriptor was opened.
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
    files: Arc<OpenFileTable>,
    /// Itself, for the ring.
    me: Weak<FileState>,
}

enum Slot {
    Open(Arc<DeferredClose>),
    /// Closed for want of descriptors.
    Parked,
    /// Closed by the client.
    Closed,
}

/// A descriptor just opened.
pub(crate) struct OpenedDescriptor {
    pub(crate) fd: OwnedFd,
    /// What it was to be opened with.
    granted: OpenGrant,
    /// The descriptor is for reading alone, whatever `granted` says.
    pub(crate) unchanging: bool,
    /// The time of the creation of the file, if this opening made it.
    made: Option<Instant>,
}

impl OpenedDescriptor {
    /// By the kernel for its caller, with these flags of open(2).
    pub(crate) fn for_caller(fd: OwnedFd, flags: i32) -> OpenedDescriptor {
        OpenedDescriptor::new(fd, OpenGrant::to_caller(flags))
    }

    /// As [`OpenedDescriptor::for_caller`], of a file that was made with it.
    pub(crate) fn of_new_file(fd: OwnedFd, flags: i32) -> OpenedDescriptor {
        OpenedDescriptor { made: Some(dray_rt::now()), ..OpenedDescriptor::for_caller(fd, flags) }
    }

    /// With what was granted.
    pub(super) fn new(fd: OwnedFd, granted: OpenGrant) -> OpenedDescriptor {
        OpenedDescriptor { fd, granted, unchanging: false, made: None }
    }

    /// What a client has had open, `fd`, is opened again as the server. It is for reading alone
    /// where the file system below takes no changes any more. Then it goes on to be read, and its
    /// changes fail.
    pub(super) fn again(
        core: &Core,
        fd: BorrowedFd<'_>,
        granted: OpenGrant,
    ) -> Result<OpenedDescriptor> {
        let open = |granted: OpenGrant| core.reopen_as_server(fd, Purpose::GoOn(granted));
        let opened = match granted.changes() {
            true => core.writable().and_then(|()| open(granted)),
            false => open(granted),
        };
        match opened {
            Err(error) if granted.changes() && error.errno() == Errno::EROFS => {
                let fd = open(granted.without_changes())?;
                Ok(OpenedDescriptor { unchanging: true, ..OpenedDescriptor::new(fd, granted) })
            }
            opened => Ok(OpenedDescriptor::new(opened?, granted)),
        }
    }
}

/// What came of taking a descriptor away.
pub(super) enum Parking {
    Parked(Arc<DeferredClose>),
    NotOpen,
    /// What was written through it is to be brought to the disk before.
    Due(Arc<DeferredClose>),
    InUse,
}

impl FileState {
    /// A file that was just opened. Its client `asked` for more flags than it was opened with.
    pub(super) fn new(
        files: Arc<OpenFileTable>,
        inode: Arc<OpenInode>,
        directory: bool,
        (asked, opened): (i32, OpenedDescriptor),
    ) -> Arc<FileState> {
        let OpenedDescriptor { fd, granted, unchanging, made } = opened;
        let fd = DeferredClose::of_file(fd, &files.lanes, made);
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

    /// The file's descriptor, if it has one and no thread is about to change that.
    pub(super) fn descriptor_at_hand(&self) -> Option<Arc<DeferredClose>> {
        match &*self.slot.try_lock().ok()? {
            Slot::Open(fd) => Some(fd.clone()),
            Slot::Parked | Slot::Closed => None,
        }
    }

    /// The file takes appends only.
    pub(crate) fn appends_only(&self) -> bool {
        self.granted.appends()
    }

    /// The file's descriptor, opened again if need be. Errors: `EBADF` after the close; `ESTALE` if
    /// the file was removed without the server.
    pub(crate) fn fd(&self, core: &Core) -> Result<Arc<DeferredClose>> {
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
        // Under the lock of the slot: a close or a parking subtracts it again.
        core.files.descriptors.fetch_add(1, Ordering::Relaxed);
        drop(slot);
        self.used.store(true, Ordering::Relaxed);
        core.files.enter_ring(self.me.clone());
        Ok(fd)
    }

    /// The file's descriptor for what changes it. Errors: as [`FileState::fd`]; `EROFS` if the file
    /// system below takes no changes.
    pub(crate) fn fd_to_change(&self, core: &Core) -> Result<Arc<DeferredClose>> {
        if self.unchanging.load(Ordering::Acquire) {
            let mut slot = lock(&self.slot);
            if matches!(*slot, Slot::Open(_)) && self.unchanging.load(Ordering::Acquire) {
                // The file system may take changes again by now.
                self.write_back.parked(&self.inode.write_back_errors);
                self.open_again(core, &mut slot)?;
            }
        }
        let fd = self.fd(core)?;
        if self.unchanging.load(Ordering::Acquire) { Err(Errno::EROFS.into()) } else { Ok(fd) }
    }

    /// The file's descriptor for reading. Errors: as [`FileState::fd`]; `EBADF` if the file is open
    /// for something else only, and has a descriptor for reading for want of another.
    pub(crate) fn fd_to_read(&self, core: &Core) -> Result<Arc<DeferredClose>> {
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

    /// A write that was to be on media failed. The kernel has reported the error, and reports it
    /// once only.
    pub(crate) fn sync_failed(&self, errno: Errno) {
        self.inode.write_back_errors.add(errno);
    }

    /// fsync(2) or fdatasync(2). Errors: also those that were not reported to the client because
    /// another descriptor met them.
    pub(crate) fn sync(&self, core: &Core, data_only: bool) -> Result<()> {
        let fd = self.fd(core)?;
        let sync = || sys::sync(fd.as_fd(), data_only);
        Ok(self.write_back.sync(&self.inode.write_back_errors, sync)?)
    }

    /// Opens it again, as the server.
    fn open_again(
        &self,
        core: &Core,
        slot: &mut MutexGuard<'_, Slot>,
    ) -> Result<Arc<DeferredClose>> {
        let pin = lock(&self.inode.pin);
        let opened = match &*pin {
            Some(pin) => OpenedDescriptor::again(core, pin.as_fd(), self.granted)?,
            None => {
                drop(pin);
                OpenedDescriptor::again(core, core.node(self.inode.id)?.fd(), self.granted)?
            }
        };
        self.unchanging.store(opened.unchanging, Ordering::Release);
        self.write_back.reopened(&self.inode.write_back_errors);
        let fd = Arc::new(DeferredClose::new(opened.fd, &core.lanes));
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
        self.write_back.parked(&self.inode.write_back_errors);
        self.files.descriptors.fetch_sub(1, Ordering::Relaxed);
        Parking::Parked(fd)
    }

    /// Gives the descriptor back. The file can not be used any more.
    pub(crate) fn close(&self) -> Option<Arc<DeferredClose>> {
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
