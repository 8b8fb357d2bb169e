//! What the kernel has a handle of: name_to_handle_at(2), and the kernel's own NFS server.
//!
//! A handle is a node number and its generation (`fuse_encode_fh` in fs/fuse/inode.c). If the kernel
//! has forgotten the node it looks up `.` in it (`fuse_get_dentry`), and compares the generation.
//! To find the place of a directory it looks up `..` (`fuse_get_parent`) and lists that.

use dray_core::{Context, Entry, Errno, Error, Result};

use crate::front::Worker;
use crate::front::leased::Answered;
use crate::transport::KernelAnswer;

impl Worker {
    /// Looks up `.` in a node, which the kernel may have forgotten. `ESTALE` if its file is gone.
    pub(super) async fn lookup_self(&self, cx: &Context, node: u64) -> Result<KernelAnswer> {
        let asked = self.asked();
        let known = self.shared.nodes.in_handle(node)?;
        let attr = self.believable(node, self.fs.getattr(cx, known.id).await?)?;
        let entry = Entry { id: known.id, attr };
        if !self.may_be_opened(cx, &entry).await? {
            // The kernel would open it without asking anybody, and no other node is its file's.
            return Err(
                Error::new(Errno::ESTALE).because("a special file that is not to be opened")
            );
        }
        let node = self.shared.nodes.remember_handle(node, known)?;
        let answered = Answered { place: None, id: entry.id, node, asked };
        Ok(KernelAnswer::Small(self.entry_reply(answered, &entry)))
    }

    /// Looks up `..` in a directory.
    pub(super) async fn lookup_parent(&self, cx: &Context, node: u64) -> Result<KernelAnswer> {
        let asked = self.asked();
        let entry = self.fs.parent(cx, self.id(node)?).await?;
        self.entry(&entry, None, asked).map(KernelAnswer::Small)
    }
}
