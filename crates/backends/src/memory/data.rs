//! Data: read, write, allocate, seek, copy.

use dray_core::{Allocate, Buf, BufMut, Context, Errno, Result, Seek, Write};

use super::content::CHUNK_BYTES;
use super::inode::{Body, now};
use super::store::Store;

/// Bytes of the largest file: what an off_t can say.
pub(super) const FILE_MAX_BYTES: u64 = i64::MAX as u64;
/// Bytes that one copy_range moves at most; callers ask again for the rest.
const COPY_MAX_BYTES: u64 = 8 << 20;
/// Seconds after which a read is noted even if the last one was (relatime).
const ATIME_STALE_SECS: i64 = 24 * 3600;

impl Store {
    pub(super) fn read(&mut self, ino: u64, at: u64, into: &mut BufMut) -> Result<()> {
        self.inode(ino)?.content()?.read(at, into);
        let time = now();
        let meta = &mut self.unlogged(ino)?.meta;
        if meta.atime <= meta.mtime || time.sec - meta.atime.sec > ATIME_STALE_SECS {
            meta.atime = time;
        }
        Ok(())
    }

    /// Writes as much as fits in; `ENOSPC` or `EFBIG` only if that is nothing.
    pub(super) fn write(
        &mut self,
        cx: &Context,
        ino: u64,
        how: Write,
        from: &Buf,
    ) -> Result<usize> {
        let content = self.inode(ino)?.content()?;
        let at = if how.append { content.size() } else { how.at };
        if from.is_empty() {
            return Ok(0);
        }
        if at >= FILE_MAX_BYTES {
            return Err(Errno::EFBIG.into());
        }
        let mut len = (from.len() as u64).min(FILE_MAX_BYTES - at);
        while content.missing(at, len) > self.free_chunks() {
            // Give up the last chunk until the rest fits.
            let last = (at + len - 1) / CHUNK_BYTES * CHUNK_BYTES;
            if last <= at {
                return Err(Errno::ENOSPC.into());
            }
            len = last - at;
        }
        let len = len as usize;
        self.content_changed(cx, ino, how.kill_set_id)?;
        self.write_bytes(ino, at, &from[..len])?;
        if how.sync {
            self.sync(ino);
        }
        Ok(len)
    }

    /// fallocate(2).
    pub(super) fn allocate(&mut self, cx: &Context, ino: u64, what: Allocate) -> Result<()> {
        let Allocate { flags, at, len_bytes: len } = what;
        let size = match &self.inode(ino)?.body {
            Body::File(content) => content.size(),
            Body::Directory(_) => return Err(Errno::EISDIR.into()),
            _ => return Err(Errno::ENODEV.into()),
        };
        if len == 0 {
            return Err(Errno::EINVAL.into());
        }
        let end = at.checked_add(len).filter(|end| *end <= FILE_MAX_BYTES).ok_or(Errno::EFBIG)?;
        let keep = libc::FALLOC_FL_KEEP_SIZE;
        let punch_and_keep = libc::FALLOC_FL_PUNCH_HOLE | keep;
        match flags {
            f if f == punch_and_keep => self.punch(ino, at, len)?,
            f if f & !keep == libc::FALLOC_FL_ZERO_RANGE || f & !keep == 0 => {
                if self.inode(ino)?.content()?.missing(at, len) > self.free_chunks() {
                    return Err(Errno::ENOSPC.into());
                }
                if f & keep == 0 && end > size {
                    self.set_size(ino, end)?;
                }
                if f & libc::FALLOC_FL_ZERO_RANGE != 0 {
                    self.punch(ino, at, len)?;
                }
                self.edit(ino, |content| content.allocate(at, len))?;
            }
            libc::FALLOC_FL_COLLAPSE_RANGE | libc::FALLOC_FL_INSERT_RANGE => {
                self.shift(ino, flags, at, len, size)?;
            }
            _ => return Err(Errno::ENOTSUP.into()),
        }
        self.content_changed(cx, ino, false)
    }

    /// Collapses or inserts a range. Durable at once: a half-moved file after a crash is
    /// nothing that ext4 would show.
    fn shift(&mut self, ino: u64, flags: i32, at: u64, len: u64, size: u64) -> Result<()> {
        if !at.is_multiple_of(CHUNK_BYTES) || !len.is_multiple_of(CHUNK_BYTES) {
            return Err(Errno::EINVAL.into());
        }
        let collapses = flags == libc::FALLOC_FL_COLLAPSE_RANGE;
        if collapses && at + len >= size || !collapses && at >= size {
            return Err(Errno::EINVAL.into());
        }
        if !collapses && size > FILE_MAX_BYTES - len {
            return Err(Errno::EFBIG.into());
        }
        self.sync(ino);
        self.edit(ino, |content| {
            if collapses { content.collapse(at, len) } else { content.insert(at, len) }
        })?;
        self.finish();
        if let Some((journal, inodes)) = self.journal_mut() {
            journal.replace_content(ino, inodes);
        }
        Ok(())
    }

    pub(super) fn seek(&self, ino: u64, at: u64, what: Seek) -> Result<u64> {
        let content = self.inode(ino)?.content().map_err(|_| Errno::EINVAL)?;
        if at >= content.size() {
            return Err(Errno::ENXIO.into());
        }
        match what {
            Seek::Data => content.next_data(at).ok_or(Errno::ENXIO.into()),
            Seek::Hole => Ok(content.next_hole(at)),
        }
    }

    /// copy_file_range(2) between two files of this file system, or within one if the
    /// ranges are apart.
    pub(super) fn copy_range(
        &mut self,
        cx: &Context,
        (from, at): (u64, u64),
        (to, to_at): (u64, u64),
        len: u64,
    ) -> Result<u64> {
        let source = self.inode(from)?.content()?;
        self.inode(to)?.content()?;
        if at.checked_add(len).is_none() || to_at.checked_add(len).is_none() {
            return Err(Errno::EOVERFLOW.into());
        }
        let len = len.min(source.size().saturating_sub(at)).min(COPY_MAX_BYTES);
        if from == to && at < to_at + len && to_at < at + len {
            return Err(Errno::EINVAL.into());
        }
        let mut bytes = BufMut::heap(len as usize);
        source.read(at, &mut bytes);
        let copied = self.write(cx, to, Write::at(to_at), &bytes.freeze())?;
        Ok(copied as u64)
    }
}
