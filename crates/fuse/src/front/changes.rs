//! Which files and directories a request changes, for what was read ahead of it.

use crate::front::Worker;
use crate::proto::abi::{fattr, init};
use crate::proto::{CopyArgs, Operation, Request};

impl Worker {
    /// Notes what a request has changed, however it went, before it is answered. Nothing is read ahead
    /// where the kernel takes no attributes with names.
    pub(super) fn note_changes(&self, request: &Request<'_>) {
        if let Some(node) = changed_data(request) {
            // A read that was under way may leave what was there before.
            self.shared.pages.doubt(node);
        }
        if !self.shared.session.has(init::DO_READDIRPLUS) {
            return;
        }
        let node = request.head.node;
        let changed = match request.op {
            Operation::Symlink { .. }
            | Operation::Mknod { .. }
            | Operation::Mkdir { .. }
            | Operation::Unlink { .. }
            | Operation::Rmdir { .. }
            | Operation::Create { .. }
            | Operation::Setattr(_)
            | Operation::Setxattr { .. }
            | Operation::Removexattr { .. }
            | Operation::Write { .. }
            | Operation::Fallocate { .. }
            | Operation::Ioctl { .. } => [Some(node), None],
            Operation::Open { flags, .. } if flags as i32 & libc::O_TRUNC != 0 => {
                [Some(node), None]
            }
            Operation::Rename { to_dir, .. } => [Some(node), Some(to_dir)],
            Operation::Link { node: file, .. } => [Some(node), Some(file)],
            Operation::CopyFileRange(CopyArgs { node_out, .. }) => [Some(node_out), None],
            _ => return,
        };
        for node in changed.into_iter().flatten() {
            if let Ok(id) = self.id(node) {
                self.shared.changes.note(id);
            }
        }
    }
}

/// The file whose data a request may have changed.
fn changed_data(request: &Request<'_>) -> Option<u64> {
    let node = request.head.node;
    match &request.op {
        Operation::Write { .. } | Operation::Fallocate { .. } => Some(node),
        Operation::Setattr(args) => (args.valid & fattr::SIZE != 0).then_some(node),
        Operation::Open { flags, .. } => (*flags as i32 & libc::O_TRUNC != 0).then_some(node),
        Operation::CopyFileRange(CopyArgs { node_out, .. }) => Some(*node_out),
        _ => None,
    }
}
