//! Which files and directories a request changes, for what was read ahead of it.

use crate::front::Worker;
use crate::front::passthrough::follow_soon;
use crate::proto::abi::{fattr, init};
use crate::proto::{
    AttributeOperation, CopyArgs, FileOperation, NameOperation, OpenOperation, Operation, Request,
    XattrOperation,
};

impl Worker {
    /// Notes what a request has changed, however it went, before it is answered. Nothing is read ahead
    /// where the kernel takes no attributes with names.
    pub(super) fn note_changes(&self, request: &Request<'_>) {
        if let Some(node) = changed_data(request) {
            // A read that was under way may leave what was there before.
            self.shared.pages.doubt(node);
            if let Ok(id) = self.id(node) {
                follow_soon(&self.shared, id);
            }
        }
        if !self.shared.session.has(init::DO_READDIRPLUS) {
            return;
        }
        let node = request.head.node;
        let changed = match &request.op {
            Operation::Names(operation) => match operation {
                NameOperation::Symlink { .. }
                | NameOperation::Mknod { .. }
                | NameOperation::Mkdir { .. }
                | NameOperation::Unlink { .. }
                | NameOperation::Rmdir { .. } => [Some(node), None],
                NameOperation::Rename { to_dir, .. } => [Some(node), Some(*to_dir)],
                NameOperation::Link { node: file, .. } => [Some(node), Some(*file)],
                NameOperation::Lookup { .. } | NameOperation::Readlink => return,
            },
            Operation::Opens(operation) => match operation {
                OpenOperation::Create { .. } => [Some(node), None],
                OpenOperation::Open { flags, .. } if truncates(*flags) => [Some(node), None],
                OpenOperation::Open { .. }
                | OpenOperation::Tmpfile { .. }
                | OpenOperation::Opendir { .. } => return,
            },
            Operation::Attributes(operation) => match operation {
                AttributeOperation::Setattr(_) => [Some(node), None],
                AttributeOperation::Getattr { .. }
                | AttributeOperation::Statx { .. }
                | AttributeOperation::Access { .. } => return,
            },
            Operation::Xattrs(operation) => match operation {
                XattrOperation::Setxattr { .. } | XattrOperation::Removexattr { .. } => {
                    [Some(node), None]
                }
                XattrOperation::Getxattr { .. } | XattrOperation::Listxattr { .. } => return,
            },
            Operation::Files(operation) => match operation {
                FileOperation::Fallocate { .. } => [Some(node), None],
                FileOperation::CopyFileRange(CopyArgs { node_out, .. }) => [Some(*node_out), None],
                FileOperation::Fsync { .. }
                | FileOperation::Fsyncdir { .. }
                | FileOperation::Lseek { .. } => return,
            },
            Operation::Write(_) | Operation::Ioctl { .. } => [Some(node), None],
            Operation::LookupSelf
            | Operation::LookupParent
            | Operation::Session(_)
            | Operation::Read { .. }
            | Operation::Flush { .. }
            | Operation::Release { .. }
            | Operation::Releasedir { .. }
            | Operation::Readdir { .. }
            | Operation::Getlk(_)
            | Operation::Setlk { .. }
            | Operation::Statfs => return,
        };
        for node in changed.into_iter().flatten() {
            if let Ok(id) = self.id(node) {
                self.shared.changes.note(id);
            }
        }
    }
}

fn truncates(flags: u32) -> bool {
    flags as i32 & libc::O_TRUNC != 0
}

/// The file whose data a request may have changed.
fn changed_data(request: &Request<'_>) -> Option<u64> {
    let node = request.head.node;
    match &request.op {
        Operation::Write(_) => Some(node),
        Operation::Files(operation) => match operation {
            FileOperation::Fallocate { .. } => Some(node),
            FileOperation::CopyFileRange(CopyArgs { node_out, .. }) => Some(*node_out),
            FileOperation::Fsync { .. }
            | FileOperation::Fsyncdir { .. }
            | FileOperation::Lseek { .. } => None,
        },
        Operation::Attributes(operation) => match operation {
            AttributeOperation::Setattr(args) => (args.valid & fattr::SIZE != 0).then_some(node),
            AttributeOperation::Getattr { .. }
            | AttributeOperation::Statx { .. }
            | AttributeOperation::Access { .. } => None,
        },
        Operation::Opens(operation) => match operation {
            OpenOperation::Open { flags, .. } => truncates(*flags).then_some(node),
            // The node of a file that is created, and was there, is found with the answer.
            OpenOperation::Create { .. }
            | OpenOperation::Tmpfile { .. }
            | OpenOperation::Opendir { .. } => None,
        },
        Operation::Names(_)
        | Operation::LookupSelf
        | Operation::LookupParent
        | Operation::Xattrs(_)
        | Operation::Session(_)
        | Operation::Read { .. }
        | Operation::Flush { .. }
        | Operation::Release { .. }
        | Operation::Releasedir { .. }
        | Operation::Readdir { .. }
        | Operation::Getlk(_)
        | Operation::Setlk { .. }
        | Operation::Statfs
        | Operation::Ioctl { .. } => None,
    }
}
