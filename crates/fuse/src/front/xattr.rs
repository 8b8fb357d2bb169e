//! Extended attributes. Under `strict` POSIX ACLs are such, too: the file system below
//! interprets them.

use dray_core::{Context, Errno, Error, FileId, Result, XattrSet};

use crate::front::{Worker, invalid, label};
use crate::mount::{entry_reclaim, wake};
use crate::proto::XattrOperation;
use crate::proto::wire::Small;
use crate::state::capabilities;
use crate::transport::KernelAnswer;
use crate::worker::caller::call_that_waits;

impl Worker {
    pub(crate) async fn xattrs(
        &self,
        cx: &Context,
        node: u64,
        op: &XattrOperation<'_>,
    ) -> Result<KernelAnswer> {
        let id = self.id(node)?;
        match *op {
            XattrOperation::Getxattr { name, .. }
                if [wake::ATTRIBUTE, entry_reclaim::ATTRIBUTE].contains(&name) =>
            {
                Err(Errno::ENODATA.into())
            }
            XattrOperation::Getxattr { name, size } if name == capabilities::NAME => {
                self.get_capability(cx, node, size).await
            }
            XattrOperation::Getxattr { name, size } => {
                let value = self.fs.getxattr(cx, id, name).await;
                sized(value.map_err(|error| label::absent(name, error))?, size)
            }
            XattrOperation::Listxattr { size } => sized(self.fs.listxattr(cx, id).await?, size),
            XattrOperation::Setxattr { name, value, flags } => {
                const BOTH: i32 = libc::XATTR_CREATE | libc::XATTR_REPLACE;
                let how = match flags as i32 {
                    0 => XattrSet::Any,
                    libc::XATTR_CREATE => XattrSet::Create,
                    libc::XATTR_REPLACE => XattrSet::Replace,
                    BOTH => return Err(self.never_set(cx, id, name).await),
                    _ => return Err(invalid("a flag of setxattr that is not served")),
                };
                let capability = name == capabilities::NAME;
                if capability {
                    self.shared.capabilities.changes(node);
                }
                let set = self.fs.setxattr(cx, id, name, value, how).await;
                if capability {
                    self.shared.capabilities.changes(node);
                }
                set.map(|()| KernelAnswer::Empty)
            }
            XattrOperation::Removexattr { name }
                if name == capabilities::NAME && gives_away(cx).await =>
            {
                Ok(KernelAnswer::Empty)
            }
            XattrOperation::Removexattr { name } => {
                self.fs.removexattr(cx, id, name).await?;
                Ok(KernelAnswer::Empty)
            }
        }
    }

    /// Why an attribute cannot be set that must not be there, and must: one of both fails, and
    /// local file systems say which.
    async fn never_set(&self, cx: &Context, id: FileId, name: &[u8]) -> Error {
        match self.fs.getxattr(cx, id, name).await {
            Ok(_) => Errno::EEXIST.into(),
            Err(error) => error,
        }
    }

    async fn get_capability(&self, cx: &Context, node: u64, size: u32) -> Result<KernelAnswer> {
        let believed = self.shared.mode.unsaid();
        if believed.is_zero() {
            return sized(self.fs.getxattr(cx, self.id(node)?, capabilities::NAME).await?, size);
        }
        let known = &self.shared.capabilities;
        if known.absent(node) {
            return Err(Errno::ENODATA.into());
        }
        let asked = known.asked();
        let value = self.fs.getxattr(cx, self.id(node)?, capabilities::NAME).await;
        if value.as_ref().is_err_and(|error| error.errno() == Errno::ENODATA) {
            known.note_absent(node, asked, believed);
        }
        sized(value?, size)
    }
}

/// Whether the caller is in chown(2) or its like. The kernel takes a program's capabilities first
/// (`security_inode_killpriv`) and asks for the change of the owner then, which may be refused. If it is
/// made, the server's kernel takes them.
async fn gives_away(cx: &Context) -> bool {
    const CALLS: &[i64] = &[
        #[cfg(target_arch = "x86_64")]
        libc::SYS_chown,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_lchown,
        libc::SYS_fchown,
        libc::SYS_fchownat,
    ];
    call_that_waits(cx.pid).await.is_some_and(|call| CALLS.contains(&call.number))
}

/// The value, or how long it is where no room was offered; `ERANGE` for too little.
fn sized(value: Vec<u8>, room_bytes: u32) -> Result<KernelAnswer> {
    if room_bytes == 0 {
        return Ok(KernelAnswer::Small(Small::new().u32(value.len() as u32).u32(0)));
    }
    if value.len() > room_bytes as usize {
        return Err(Errno::ERANGE.into());
    }
    Ok(KernelAnswer::Bytes(value))
}
