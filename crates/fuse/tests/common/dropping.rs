//! Drops what is outdated in a thread, where a mount with a supervisor has a process for it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use dray_fuse::{Dropper, Host, drop_outdated};

pub struct Dropping;

impl Host for Dropping {
    fn wake_queues(&self) {}

    fn gather_entries(&self) {}

    fn start_dropping(&self, device: BorrowedFd<'_>) -> io::Result<Dropper> {
        let ((reader, nodes), (dropped, tells)) = (io::pipe()?, io::pipe()?);
        let device = device.try_clone_to_owned()?;
        std::thread::spawn(move || drop_outdated(device.as_fd(), reader, tells));
        Ok(Dropper { nodes, dropped })
    }
}
