//! Messages to the kernel that it did not ask for.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use dray_core::{FileId, Name};

use crate::mount::device::write_answer;
use crate::proto::abi::{self, notify};
use crate::proto::reply::header;
use crate::worker::shared::MountShared;

/// Sends notifications of one mount. The kernel takes locks to carry them out. Never send one from
/// within an operation on the same file or directory, except where it is said to be safe.
#[derive(Clone)]
pub struct Notifier {
    pub(crate) device: Arc<OwnedFd>,
    pub(crate) shared: Arc<MountShared>,
}

impl Notifier {
    /// Drops cached attributes of `id`, and cached data from `at` on if given (0 bytes:
    /// to the end). Nothing to do is no error. Errors: those of write(2).
    pub fn inval_inode(&self, id: FileId, data: Option<(u64, u64)>) -> io::Result<()> {
        let Some(node) = self.shared.nodes.find(id) else { return Ok(()) };
        inval_inode(self.device.as_fd(), node, data)
    }

    /// Has the kernel send again every request that was read and not answered, marked as
    /// such: for a successor, once its readers run. Errors: `EOPNOTSUPP` where the kernel
    /// cannot; those of write(2).
    pub fn resend(&self) -> io::Result<()> {
        if !self.shared.session.has(abi::init::HAS_RESEND) {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        send(self.device.as_fd(), notify::RESEND, &[])
    }
}

/// As [`Notifier::resend`], for a successor that does not serve yet. What the kernel sends again
/// goes in front of its queue, before what nobody has read. The death of its caller takes it out.
/// Errors: `EINVAL` where the kernel cannot; those of write(2).
pub fn resend(device: BorrowedFd<'_>) -> io::Result<()> {
    write_answer(device, &header(0, notify::RESEND, 0), &[])
}

/// As [`Notifier::inval_inode`], for a node number other than the root's.
pub(crate) fn inval_inode(
    device: BorrowedFd<'_>,
    node: u64,
    data: Option<(u64, u64)>,
) -> io::Result<()> {
    let (at, len) = match data {
        Some((at, len)) => (at as i64, len as i64),
        None => (-1, 0), // attributes alone
    };
    let mut body = [0; 24];
    body[0..8].copy_from_slice(&node.to_ne_bytes());
    body[8..16].copy_from_slice(&at.to_ne_bytes());
    body[16..24].copy_from_slice(&len.to_ne_bytes());
    send(device, notify::INVAL_INODE, &body)
}

/// Ends the time of a name in the directory of node `dir`, also of one that is absent. The kernel asks for
/// it when it is used next, and what is mounted behind it stays. The kernel waits for the directory's
/// lock, which a request may hold that a daemon has to answer. Only with `HAS_EXPIRE_ONLY`.
pub(crate) fn expire_entry(device: BorrowedFd<'_>, dir: u64, name: &Name) -> io::Result<()> {
    let name = name.as_bytes();
    let mut body = Vec::with_capacity(16 + name.len() + 1);
    body.extend(dir.to_ne_bytes());
    body.extend((name.len() as u32).to_ne_bytes());
    body.extend(notify::EXPIRE_ONLY.to_ne_bytes());
    body.extend(name);
    body.push(0);
    send(device, notify::INVAL_ENTRY, &body)
}

fn send(device: BorrowedFd<'_>, code: i32, body: &[u8]) -> io::Result<()> {
    match write_answer(device, &header(0, code, body.len()), body) {
        // The kernel does not have it cached: that is what was wanted.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        result => result,
    }
}
