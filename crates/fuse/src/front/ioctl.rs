//! ioctl(2): the flags of inodes, in the terms of ext and of xfs.

use dray_core::{Context, Errno, Error, Result, Xflags};

use crate::front::Worker;
use crate::proto::wire::{FieldReader, Small};
use crate::transport::KernelAnswer;

/// `FS_IOC_GETFLAGS` and `FS_IOC_SETFLAGS` as 64-bit and as 32-bit programs number them.
const GET_FLAGS: [u32; 2] = [0x8008_6601, 0x8004_6601];
const SET_FLAGS: [u32; 2] = [0x4008_6602, 0x4004_6602];

/// `FS_IOC_FSGETXATTR`, which the kernel also asks before it sets flags (`vfs_fileattr_set` in
/// fs/file_attr.c), and `FS_IOC_FSSETXATTR`.
const GET_XFLAGS: u32 = 0x801c_581f;
const SET_XFLAGS: u32 = 0x401c_5820;
/// Bytes of their `struct fsxattr`: five fields and padding.
const FSXATTR_BYTES: usize = 28;
/// Flags of an inode and what they are in `fsx_xflags` (linux/fs.h).
const XFLAGS: [(u32, u32); 7] = [
    (0x0000_0008, 0x0000_0020), // SYNC
    (0x0000_0010, 0x0000_0008), // IMMUTABLE
    (0x0000_0020, 0x0000_0010), // APPEND
    (0x0000_0040, 0x0000_0080), // NODUMP
    (0x0000_0080, 0x0000_0040), // NOATIME
    (0x0200_0000, 0x0000_8000), // DAX
    (0x2000_0000, 0x0000_0200), // PROJINHERIT
];

fn xflags_of(flags: u32) -> u32 {
    let set = XFLAGS.iter().filter(|(flag, _)| flags & flag != 0);
    set.fold(0, |xflags, (_, xflag)| xflags | xflag)
}

fn put_xflags(out: Small, xflags: Xflags) -> Small {
    let Xflags { flags, extent_bytes, extents, project, cow_extent_bytes } = xflags;
    let fields = [flags, extent_bytes, extents, project, cow_extent_bytes];
    let out = fields.into_iter().fold(out, Small::u32);
    out.zeros(FSXATTR_BYTES - size_of_val(&fields))
}

/// None if they are cut short.
fn take_xflags(data: &[u8]) -> Option<Xflags> {
    let mut fields = FieldReader(data.get(..FSXATTR_BYTES)?);
    Some(Xflags {
        flags: fields.u32()?,
        extent_bytes: fields.u32()?,
        extents: fields.u32()?,
        project: fields.u32()?,
        cow_extent_bytes: fields.u32()?,
    })
}

/// A file system or a server that knows nothing of such flags has no such ioctl.
fn not_here(error: Error) -> Error {
    if is_not_here(&error) { Errno::ENOTTY.into() } else { error }
}

fn is_not_here(error: &Error) -> bool {
    matches!(error.errno(), Errno::ENOTTY | Errno::ENOSYS)
}

impl Worker {
    /// Where there are none, those that the flags of the inode are in their terms.
    async fn xflags(&self, cx: &Context, fh: u64) -> Result<Xflags> {
        let file = self.file(cx, fh).await?;
        match file.get_xflags(cx).await {
            Err(error) if is_not_here(&error) => {
                let flags = xflags_of(file.get_flags(cx).await?);
                Ok(Xflags { flags, ..Xflags::default() })
            }
            got => got,
        }
    }

    /// `data` is what the caller gives; the answer may have `out_size` bytes.
    pub(crate) async fn ioctl(
        &self,
        cx: &Context,
        (fh, cmd): (u64, u32),
        (data, out_size): (&[u8], u32),
    ) -> Result<KernelAnswer> {
        match cmd {
            GET_XFLAGS => {
                if (out_size as usize) < FSXATTR_BYTES {
                    return Err(Errno::EINVAL.into());
                }
                let xflags = self.xflags(cx, fh).await?;
                Ok(KernelAnswer::Small(put_xflags(Small::new().zeros(16), xflags)))
            }
            SET_XFLAGS => {
                let set = take_xflags(data).ok_or(Errno::EINVAL)?;
                self.file(cx, fh).await?.set_xflags(cx, set).await.map_err(not_here)?;
                Ok(KernelAnswer::Small(Small::new().zeros(16)))
            }
            _ if GET_FLAGS.contains(&cmd) => {
                let flags = self.file(cx, fh).await?.get_flags(cx).await?;
                let out = Small::new().zeros(16);
                Ok(KernelAnswer::Small(match out_size {
                    8 => out.u64(u64::from(flags)),
                    4 => out.u32(flags),
                    _ => return Err(Errno::EINVAL.into()),
                }))
            }
            _ if SET_FLAGS.contains(&cmd) => {
                let flags = data.first_chunk().ok_or(Errno::EINVAL)?;
                let flags = u32::from_ne_bytes(*flags);
                self.file(cx, fh).await?.set_flags(cx, flags).await?;
                Ok(KernelAnswer::Small(Small::new().zeros(16)))
            }
            _ => Err(Errno::ENOTTY.into()),
        }
    }
}
