//! Extended attributes. Under `strict` POSIX ACLs are such, too: the file system below
//! interprets them.

use dray_core::{Context, Errno, Result, XattrSet};

use crate::front::{Worker, invalid};
use crate::proto::Operation;
use crate::proto::wire::Small;
use crate::transport::Answer;

impl Worker {
    pub(crate) async fn xattrs(
        &self,
        cx: &Context,
        node: u64,
        op: &Operation<'_>,
    ) -> Result<Answer> {
        let id = self.id(node)?;
        match *op {
            Operation::Getxattr { name, size } => {
                sized(self.fs.getxattr(cx, id, name).await?, size)
            }
            Operation::Listxattr { size } => sized(self.fs.listxattr(cx, id).await?, size),
            Operation::Setxattr { name, value, flags } => {
                let how = match flags as i32 {
                    0 => XattrSet::Any,
                    libc::XATTR_CREATE => XattrSet::Create,
                    libc::XATTR_REPLACE => XattrSet::Replace,
                    _ => return Err(invalid("a flag of setxattr that is not served")),
                };
                self.fs.setxattr(cx, id, name, value, how).await?;
                Ok(Answer::Empty)
            }
            Operation::Removexattr { name } => {
                self.fs.removexattr(cx, id, name).await?;
                Ok(Answer::Empty)
            }
            _ => Err(Errno::EIO.into()),
        }
    }
}

/// The value, or how long it is where no room was offered; `ERANGE` for too little.
fn sized(value: Vec<u8>, room_bytes: u32) -> Result<Answer> {
    if room_bytes == 0 {
        return Ok(Answer::Small(Small::new().u32(value.len() as u32).u32(0)));
    }
    if value.len() > room_bytes as usize {
        return Err(Errno::ERANGE.into());
    }
    Ok(Answer::Bytes(value))
}
