//! What is left: statfs, ioctl, and the rest of the file operations.

use dray_core::{Context, Errno, Result};

use crate::front::Worker;
use crate::proto::wire::Small;
use crate::proto::{Operation, reply};
use crate::transport::Answer;

/// `FS_IOC_GETFLAGS` and `FS_IOC_SETFLAGS` as 64-bit and as 32-bit programs number them.
const GET_FLAGS: [u32; 2] = [0x8008_6601, 0x8004_6601];
const SET_FLAGS: [u32; 2] = [0x4008_6602, 0x4004_6602];

impl Worker {
    pub(crate) async fn misc(&self, cx: &Context, op: &Operation<'_>) -> Result<Answer> {
        match *op {
            Operation::Statfs => Ok(Answer::Small(reply::statfs(&self.fs.statfs(cx).await?))),
            Operation::Ioctl { fh, cmd, data, out_size } if GET_FLAGS.contains(&cmd) => {
                let _ = data;
                let flags = self.file(cx, fh).await?.get_flags(cx).await?;
                let out = Small::new().zeros(16);
                Ok(Answer::Small(match out_size {
                    8 => out.u64(u64::from(flags)),
                    4 => out.u32(flags),
                    _ => return Err(Errno::EINVAL.into()),
                }))
            }
            Operation::Ioctl { fh, cmd, data, .. } if SET_FLAGS.contains(&cmd) => {
                let flags = data.first_chunk().ok_or(Errno::EINVAL)?;
                let flags = u32::from_ne_bytes(*flags);
                self.file(cx, fh).await?.set_flags(cx, flags).await?;
                Ok(Answer::Small(Small::new().zeros(16)))
            }
            Operation::Ioctl { .. } => Err(Errno::ENOTTY.into()),
            _ => self.file_misc(cx, op).await,
        }
    }
}
