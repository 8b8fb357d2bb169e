//! Data of open files: read, write, sync, allocate, seek, copy.

use std::os::fd::AsFd;

use dray_core::{Allocate, Context, Errno, Error, IO_MAX_BYTES, OpenFile, Result, Seek, Write};

use crate::front::{Worker, invalid};
use crate::notify::inval_inode;
use crate::proto::abi::{self, FSYNC_FDATASYNC};
use crate::proto::wire::Small;
use crate::proto::{CopyArgs, FileOperation, WriteArgs};
use crate::transport::{KernelAnswer, KernelMessage};

/// Most bytes of one copy whose answer has room for 32 bits.
const NARROW_COPY_BYTES: u64 = 0x7fff_f000;

impl Worker {
    pub(crate) async fn read(
        &self,
        cx: &Context,
        (node, fh): (u64, u64),
        (at, size): (u64, u32),
        message: &KernelMessage,
    ) -> Result<KernelAnswer> {
        let size = size as usize;
        if size > IO_MAX_BYTES {
            return Err(invalid("a read larger than was agreed on"));
        }
        let handle = self.handle(fh)?;
        self.used(node, &handle);
        self.asked_for_pages((node, handle.id));
        let file = self.file_of(cx, &handle).await?;
        match file.read(cx, at, message.read_buffer(size)).await {
            Ok(data) => {
                self.shared.flights.has_read(self.index, data.len());
                Ok(KernelAnswer::Data(data))
            }
            Err((error, _)) => Err(error),
        }
    }

    pub(crate) async fn write(
        &self,
        cx: &Context,
        node: u64,
        WriteArgs { fh, at, size, write_flags, flags }: WriteArgs,
        message: &KernelMessage,
    ) -> Result<KernelAnswer> {
        let file = self.file(cx, fh).await?;
        let from_cache = write_flags & abi::WRITE_CACHE != 0;
        if from_cache && self.handle(fh)?.note_mapped() {
            self.shared.control.mapped(self.id(node)?);
        }
        let how = Write {
            at,
            // A page has its place; only what was just written by a call is appended.
            append: !from_cache && flags as i32 & libc::O_APPEND != 0,
            sync: flags as i32 & libc::O_DSYNC != 0, // part of O_SYNC
            kill_set_id: write_flags & abi::WRITE_KILL_SUIDGID != 0,
        };
        let written = file.write(cx, how, message.data(size as usize)).await;
        let failed = !written.as_ref().is_ok_and(|written| *written >= size as usize);
        self.shared.failed_writes.answered((cx.pid, node), failed);
        let written = written?;
        self.shared.flights.has_written(self.index, written);
        Ok(KernelAnswer::Small(Small::new().u32(written.min(size as usize) as u32).u32(0)))
    }

    /// What an open file is asked beside reads and writes.
    pub(crate) async fn file_operation(
        &self,
        cx: &Context,
        node: u64,
        op: &FileOperation,
    ) -> Result<KernelAnswer> {
        match *op {
            FileOperation::Fsync { fh, fsync_flags }
            | FileOperation::Fsyncdir { fh, fsync_flags } => {
                let data_only = fsync_flags & FSYNC_FDATASYNC != 0;
                self.file(cx, fh).await?.sync(cx, data_only).await?;
                Ok(KernelAnswer::Empty)
            }
            FileOperation::Fallocate { fh, at, len_bytes, mode } => {
                let what = Allocate { flags: mode as i32, at, len_bytes };
                let allocated = self.file(cx, fh).await?.allocate(cx, what).await;
                if allocated.is_err() {
                    // ext4 keeps what it could allocate, and the kernel looks anew after success
                    // alone. If this fails, the attributes run out by themselves.
                    let _ = inval_inode(self.shared.device.as_fd(), node, None);
                }
                allocated.map(|()| KernelAnswer::Empty)
            }
            FileOperation::Lseek { fh, at, whence } => {
                let what = match whence as i32 {
                    libc::SEEK_DATA => Seek::Data,
                    libc::SEEK_HOLE => Seek::Hole,
                    _ => return Err(invalid("only SEEK_DATA and SEEK_HOLE ask the server")),
                };
                let found = self.file(cx, fh).await?.seek(cx, at, what).await?;
                Ok(KernelAnswer::Small(Small::new().u64(found)))
            }
            FileOperation::CopyFileRange(ref args) => self.copy(cx, args).await,
        }
    }

    async fn copy(&self, cx: &Context, args: &CopyArgs) -> Result<KernelAnswer> {
        if args.flags != 0 {
            return Err(invalid("a flag of copy_file_range that is not served"));
        }
        let from = self.file(cx, args.fh_in).await?;
        let to = self.file(cx, args.fh_out).await?;
        let len = if args.wide { args.len_bytes } else { args.len_bytes.min(NARROW_COPY_BYTES) };
        let to: &dyn OpenFile = &*to;
        let copied = from.copy_range(cx, args.at_in, to, args.at_out, len).await?;
        if copied > len {
            return Err(Error::new(Errno::EIO).because("more copied than was asked for"));
        }
        Ok(KernelAnswer::Small(match args.wide {
            true => Small::new().u64(copied),
            false => Small::new().u32(copied as u32).u32(0),
        }))
    }
}
