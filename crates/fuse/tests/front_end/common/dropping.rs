//! Drops what others have changed in a thread, where a mount with a supervisor has a process for it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use dray_fuse::{Host, InvalidatorProcess, invalidate_nodes};

pub struct DroppingHost;

impl Host for DroppingHost {
    fn wake_queues(&self) {}

    fn reclaim_entries(&self) {}

    fn start_invalidator(&self, device: BorrowedFd<'_>) -> io::Result<InvalidatorProcess> {
        let ((reader, nodes), (dropped, tells)) = (io::pipe()?, io::pipe()?);
        let device = device.try_clone_to_owned()?;
        std::thread::spawn(move || invalidate_nodes(device.as_fd(), reader, tells));
        Ok(InvalidatorProcess { nodes, dropped })
    }
}
