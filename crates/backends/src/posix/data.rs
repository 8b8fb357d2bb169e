//! The content of open files: reading, writing, copying, and pages of directories.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use dray_core::{
    Allocate, Buf, BufMut, DirPage, Errno, Error, FileId, FileType, IO_MAX_BYTES, Result, Seek,
    Write,
};

use super::attrs::clear_set_id;
use super::core::{Core, SquashedCaller};
use super::descriptor::FileState;
use super::lanes::DeferredClose;
use super::sys;

/// Bytes that one call copies at most; the caller asks again for the rest.
const COPY_MAX_BYTES: u64 = 64 << 20;

/// What a file system reads in one piece, at least: a read that ends elsewhere ends the file.
const PAGE_BYTES: u64 = 4096;

/// Bytes of directory records fetched at a time.
const DIR_BUFFER_BYTES: usize = 32 << 10;

/// What an entry takes beside its name when it is sent: without and with attributes.
const ENTRY_BYTES: usize = 32;
const ENTRY_PLUS_BYTES: usize = 160;

/// Fills `into` from offset `at`. None, and nothing filled in, if that
/// would have to wait for a disk and may not.
pub(crate) fn read(
    core: &Core,
    file: &FileState,
    at: u64,
    into: &mut BufMut,
    may_block: bool,
) -> Option<Result<()>> {
    let fd = match file.fd_to_read(core) {
        Ok(fd) => fd,
        Err(error) => return Some(Err(error)),
    };
    let cautious = !may_block && !core.below.is_memory();
    if cautious && core.nowait_reads_fail.load(Ordering::Relaxed) {
        return None;
    }
    let flags = if cautious { libc::RWF_NOWAIT } else { 0 };
    let filled =
        fill(at, into, !cautious, |offset, spare| sys::read(fd.as_fd(), offset, spare, flags));
    match filled {
        // What went wrong on the way the next try finds out, which may wait.
        Err((Errno::EAGAIN, _)) | Err((_, true)) if cautious => None,
        Err((Errno::ENOTSUP, _)) if cautious => {
            core.nowait_reads_fail.store(true, Ordering::Relaxed);
            None
        }
        filled => Some(filled.map_err(|(errno, _)| errno.into())),
    }
}

/// Fills `into` from offset `at` up to the end of the file. `waits`: whatever `read` leaves out is
/// not there. Errors: those of `read`, and whether something had been read before. Then nothing is
/// filled in, since a reader takes a short answer for the end of the file.
fn fill(
    at: u64,
    into: &mut BufMut,
    waits: bool,
    mut read: impl FnMut(u64, &mut [MaybeUninit<u8>]) -> sys::Sys<usize>,
) -> std::result::Result<(), (Errno, bool)> {
    let before = into.len();
    let mut offset = at;
    while into.room() > 0 {
        match read(offset, into.spare()) {
            Ok(0) => break,
            Ok(count) => {
                // SAFETY: the kernel has filled that many bytes in.
                unsafe { into.advance(count) };
                offset += count as u64;
                if waits && !offset.is_multiple_of(PAGE_BYTES) {
                    break; // within a page only the file can end
                }
            }
            Err(errno) => {
                let partly = into.len() > before;
                into.truncate(before);
                return Err((errno, partly));
            }
        }
    }
    Ok(())
}

fn fd_to_write(core: &Core, file: &FileState, how: Write) -> Result<Arc<DeferredClose>> {
    if file.appends_only() && !how.append {
        return Err(Error::new(Errno::EPERM).because("the file is append-only"));
    }
    file.fd_to_change(core)
}

/// What came of a write that may not wait.
pub(crate) enum WriteAttempt {
    Written(Result<usize>),
    /// So many bytes are written; the rest would have to wait.
    Waits(usize),
}

/// Writes as much of `from` as can be done without waiting, for a disk or for room in memory.
pub(crate) fn try_write(core: &Core, file: &FileState, how: Write, from: &Buf) -> WriteAttempt {
    let fails = &core.nowait_writes_fail;
    // What lies in pages of the kernel is moved at once, which cannot be tried.
    if core.written_ends.is_some()
        || how.sync
        || how.kill_set_id
        || from.pages().is_some()
        || fails.load(Ordering::Relaxed)
    {
        return WriteAttempt::Waits(0);
    }
    let fd = match fd_to_write(core, file, how) {
        Ok(fd) => fd,
        Err(error) => return WriteAttempt::Written(Err(error)),
    };
    let flags = libc::RWF_NOWAIT | if how.append { libc::RWF_APPEND } else { 0 };
    let mut done = 0;
    let tried = loop {
        let at = if how.append { 0 } else { how.at.saturating_add(done as u64) };
        match sys::write(fd.as_fd(), at, &from[done..], flags) {
            Ok(count) if done + count >= from.len() => {
                break WriteAttempt::Written(Ok(done + count));
            }
            Ok(count) if count > 0 => done += count,
            Err(Errno::ENOTSUP) => {
                fails.store(true, Ordering::Relaxed);
                break WriteAttempt::Waits(done);
            }
            // What is wrong the next try finds out, which may wait.
            _ => break WriteAttempt::Waits(done),
        }
    };
    file.written();
    tried
}

/// Writes the bytes `part` of `from`, before which all are written, whatever that takes. Answers how far it came, counted
/// from the beginning of `from`.
pub(crate) fn write(
    core: &Core,
    caller: &SquashedCaller,
    file: &FileState,
    how: Write,
    from: &Buf,
    part: Range<usize>,
) -> Result<usize> {
    let done = part.start;
    match write_part(core, caller, file, how, from, part) {
        Ok(count) => Ok(done + count),
        Err(_) if done > 0 => Ok(done),
        Err(error) => Err(error),
    }
}

fn write_part(
    core: &Core,
    caller: &SquashedCaller,
    file: &FileState,
    how: Write,
    from: &Buf,
    part: Range<usize>,
) -> Result<usize> {
    let fd = fd_to_write(core, file, how)?;
    let sync = if !how.sync {
        0
    } else if file.syncs_all {
        libc::RWF_SYNC
    } else {
        libc::RWF_DSYNC
    };
    let how = placed(core, (file, &fd), how, part.start)?;
    let (begin, is_append) = (how.at.saturating_add(part.start as u64), how.append);
    let written = (|| {
        if how.kill_set_id {
            clear_set_id(core, fd.as_fd(), caller)?;
        }
        if !core.below.is_local() {
            // The file system below sees the flags of the open file, not those of a call. No other
            // write is under way beside an append (`rpc::server::ranges`).
            sys::set_append(fd.as_fd(), how.append)?;
        }
        if !how.append {
            let moved = if sync == 0 { move_part(&fd, how.at, from, part.clone()) } else { None };
            return moved.unwrap_or_else(|| write_all(&fd, begin, &from[part], sync));
        }
        let written = append_all(&fd, &from[part])?;
        if how.sync {
            sys::sync(fd.as_fd(), sync == libc::RWF_DSYNC)?;
        }
        Ok(written)
    })();
    if let (Some(ends), Ok(count), false) = (&core.written_ends, &written, is_append) {
        ends.written(file.inode.id, begin.saturating_add(*count as u64));
    }
    match &written {
        Err(error) if how.sync && error.errno() == Errno::EIO => file.sync_failed(Errno::EIO),
        _ => file.written(),
    }
    written
}

/// An append with the place where it goes, if the size that the kernel has may be from before the last write. No other
/// write of a client is under way beside an append (`rpc::server::ranges`).
/// `done`: bytes of the append that are written.
fn placed(
    core: &Core,
    (file, fd): (&FileState, &OwnedFd),
    how: Write,
    done: usize,
) -> Result<Write> {
    let Some(ends) = &core.written_ends else { return Ok(how) };
    if !how.append || file.appends_only() {
        return Ok(how);
    }
    let size = ends.size(file.inode.id, sys::stat(fd.as_fd())?.attr.size);
    Ok(Write { append: false, at: size.saturating_sub(done as u64), ..how })
}

/// Has the kernel move what lies in its pages, the bytes `part` of `from`; answers how many it moved. None, and nothing
/// has ever been moved, if it lies in memory, or cannot be moved into this file: writing it says why.
fn move_part(fd: &OwnedFd, at: u64, from: &Buf, part: Range<usize>) -> Option<Result<usize>> {
    let pages = from.pages()?;
    let mut done = part.start;
    while done < part.end {
        let at = at.saturating_add(done as u64);
        let moved = pages.take(done, &mut |pipe, left_bytes| {
            let len_bytes = left_bytes.min(part.end - done);
            sys::splice(pipe, fd.as_fd(), at, len_bytes).map_err(to_io)
        })?;
        match moved {
            Ok(count) if count > 0 => done += count,
            _ if done > 0 => break,
            _ => return None,
        }
    }
    Some(Ok(done - part.start))
}

fn to_io(errno: Errno) -> std::io::Error {
    std::io::Error::from_raw_os_error(errno.raw())
}

fn write_all(fd: &OwnedFd, at: u64, from: &[u8], flags: i32) -> Result<usize> {
    all_of(from.len(), |done| {
        sys::write(fd.as_fd(), at.saturating_add(done as u64), &from[done..], flags)
    })
}

/// The kernel places each part at the end, also against processes of the server's machine.
fn append_all(fd: &OwnedFd, from: &[u8]) -> Result<usize> {
    all_of(from.len(), |done| sys::write(fd.as_fd(), 0, &from[done..], libc::RWF_APPEND))
}

/// Calls `write` with the number of bytes written so far, until all `len_bytes` are written.
/// Answers how many were written. Errors: those of the first call; `EIO` where a file system writes
/// nothing and gives no error, as one in user space can.
fn all_of(len_bytes: usize, mut write: impl FnMut(usize) -> sys::Sys<usize>) -> Result<usize> {
    let mut done = 0;
    loop {
        match write(done) {
            Ok(0) if done < len_bytes && done > 0 => return Ok(done),
            Ok(0) if done < len_bytes => {
                return Err(Error::new(Errno::EIO).because("the file system wrote nothing"));
            }
            Ok(count) => done += count,
            Err(_) if done > 0 => return Ok(done),
            Err(errno) => return Err(errno.into()),
        }
        if done >= len_bytes {
            return Ok(done);
        }
    }
}

/// fallocate(2).
pub(crate) fn allocate(core: &Core, file: &FileState, what: Allocate) -> Result<()> {
    core.writable()?;
    let fd = file.fd_to_change(core)?;
    let allocated = sys::allocate(fd.as_fd(), what);
    file.written();
    Ok(allocated?)
}

/// The next data or hole.
pub(crate) fn seek(core: &Core, file: &FileState, at: u64, what: Seek) -> Result<u64> {
    if file.directory {
        return Err(Errno::EISDIR.into());
    }
    let whence = match what {
        Seek::Data => libc::SEEK_DATA,
        Seek::Hole => libc::SEEK_HOLE,
    };
    // An offset past what a file can have is past the end.
    let at = if i64::try_from(at).is_ok() { at } else { i64::MAX as u64 };
    Ok(sys::seek(file.fd(core)?.as_fd(), at, whence)?)
}

/// What is copied, from where to where.
pub(crate) struct Copy {
    pub(crate) from: (Arc<FileState>, u64),
    pub(crate) to: (Arc<FileState>, u64),
    pub(crate) len_bytes: u64,
}

/// Copies within the export; answers how far it came.
pub(crate) fn copy_range(core: &Core, copy: &Copy) -> Result<u64> {
    core.writable()?;
    let (from, to) = (&copy.from, &copy.to);
    let len_bytes = copy.len_bytes.min(COPY_MAX_BYTES);
    let (source, target) = (from.0.fd_to_read(core)?, to.0.fd_to_change(core)?);
    let same = from.0.inode.id == to.0.inode.id;
    let len_bytes =
        if same { len_bytes.min(bytes_behind(source.as_fd(), from.1)?) } else { len_bytes };
    let overlap =
        same && from.1 < to.1.saturating_add(len_bytes) && to.1 < from.1.saturating_add(len_bytes);
    if len_bytes == 0 || overlap {
        // The kernel comes first: it may have something against the descriptors.
        sys::copy_range(source.as_fd(), from.1, target.as_fd(), to.1, 0)?;
        return if overlap { Err(Errno::EINVAL.into()) } else { Ok(0) };
    }
    let count = usize::try_from(len_bytes).unwrap_or(usize::MAX);
    let copied = match sys::copy_range(source.as_fd(), from.1, target.as_fd(), to.1, count) {
        Err(Errno::EXDEV | Errno::EINVAL | Errno::ENOSYS | Errno::ENOTSUP) => {
            copy_by_hand(&source, from.1, &target, to.1, len_bytes)
        }
        result => result.map(|count| count as u64).map_err(Error::from),
    };
    to.0.written();
    if let (Some(ends), Ok(count)) = (&core.written_ends, &copied) {
        ends.written(to.0.inode.id, to.1.saturating_add(*count));
    }
    copied
}

/// Bytes that a file has behind `at`, none if it is no regular file: what does not exist
/// overlaps with nothing.
fn bytes_behind(fd: BorrowedFd<'_>, at: u64) -> Result<u64> {
    let attr = sys::stat(fd)?.attr;
    let regular = attr.file_type() == dray_core::FileType::Regular;
    Ok(if regular { attr.size.saturating_sub(at) } else { 0 })
}

fn copy_by_hand(from: &OwnedFd, at: u64, to: &OwnedFd, to_at: u64, len_bytes: u64) -> Result<u64> {
    let mut buffer =
        BufMut::heap(IO_MAX_BYTES.min(usize::try_from(len_bytes).unwrap_or(usize::MAX)));
    let mut done = 0;
    while done < len_bytes {
        buffer.clear();
        let room = buffer.room().min(usize::try_from(len_bytes - done).unwrap_or(usize::MAX));
        let read = sys::read(from.as_fd(), at + done, &mut buffer.spare()[..room], 0);
        let count = match read {
            Ok(0) => break,
            Ok(count) => count,
            Err(_) if done > 0 => break,
            Err(errno) => return Err(errno.into()),
        };
        // SAFETY: the kernel has filled that many bytes in.
        unsafe { buffer.advance(count) };
        match write_all(to, to_at + done, buffer.filled(), 0) {
            Ok(written) => done += written as u64,
            Err(_) if done > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// Entries from `cookie` on.
pub(crate) fn read_dir(
    core: &Core,
    file: &FileState,
    cookie: u64,
    max_bytes: usize,
    plus: bool,
) -> Result<DirPage> {
    if !file.directory {
        return Err(Errno::ENOTDIR.into());
    }
    let fd = file.fd(core)?;
    let _one_at_a_time = file.reading_dir.lock().unwrap_or_else(PoisonError::into_inner);
    sys::seek(fd.as_fd(), cookie, libc::SEEK_SET)?;
    let mut page = Filling {
        core,
        dir: file.inode.id,
        fd: &fd,
        plus,
        page: DirPage::default(),
        room_bytes: max_bytes,
    };
    let mut records = [0u64; DIR_BUFFER_BYTES / 8];
    // Small requests fetch few records, since what does not fit is fetched again.
    let words = (max_bytes / 8 + 40).min(records.len());
    loop {
        let bytes = sys::read_dir(fd.as_fd(), &mut records[..words])?;
        if bytes == 0 {
            page.page.end = true;
            return Ok(page.page);
        }
        // SAFETY: the array's memory, read as bytes, within its bounds.
        let records = unsafe { std::slice::from_raw_parts(records.as_ptr().cast::<u8>(), bytes) };
        if !page.take(records) {
            return Ok(page.page);
        }
    }
}

/// Passes each name in the directory `fd` on. Errors: those of lseek(2) and getdents64(2).
pub(super) fn names_in(fd: BorrowedFd<'_>, mut each: impl FnMut(&[u8])) -> Result<()> {
    sys::seek(fd, 0, libc::SEEK_SET)?;
    let mut records = [0u64; DIR_BUFFER_BYTES / 8];
    loop {
        let bytes = sys::read_dir(fd, &mut records)?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the array's memory, read as bytes, within its bounds.
        let all = unsafe { std::slice::from_raw_parts(records.as_ptr().cast::<u8>(), bytes) };
        let mut rest = all;
        while let Some(record) = Record::first(rest) {
            each(record.name);
            rest = &rest[record.len_bytes..];
        }
    }
}

struct Filling<'a> {
    core: &'a Core,
    dir: FileId,
    fd: &'a OwnedFd,
    plus: bool,
    page: DirPage,
    room_bytes: usize,
}

impl Filling<'_> {
    /// Adds what fits of these records; false once something did not.
    fn take(&mut self, mut records: &[u8]) -> bool {
        while let Some(record) = Record::first(records) {
            records = &records[record.len_bytes..];
            if record.name == b"." || record.name == b".." {
                continue;
            }
            if self.core.hides(self.dir, record.name) {
                continue;
            }
            let beside = if self.plus { ENTRY_PLUS_BYTES } else { ENTRY_BYTES };
            let takes = beside + record.name.len();
            if takes > self.room_bytes && !self.page.is_empty() {
                return false;
            }
            self.room_bytes = self.room_bytes.saturating_sub(takes);
            self.add(&record);
        }
        true
    }

    fn add(&mut self, record: &Record<'_>) {
        let (fd, kind) = (self.fd.as_fd(), record.kind);
        let name = dray_core::Name::new(record.name).ok();
        let seen = name
            .filter(|_| self.plus)
            .and_then(|name| self.core.stat_without_opening(self.dir, fd, name));
        let number = || {
            name.map_or(record.ino, |name| self.core.listed_number(fd, name, (record.ino, kind)))
        };
        let id = seen.map_or_else(|| FileId { ino: number(), generation: 0 }, |entry| entry.id);
        let kind = seen.map(|entry| entry.attr.file_type()).or(record.kind);
        self.page.push(record.name, id, kind, record.cookie, seen.map(|entry| entry.attr));
    }
}

/// One record of getdents64(2).
struct Record<'a> {
    ino: u64,
    cookie: u64,
    kind: Option<FileType>,
    name: &'a [u8],
    len_bytes: usize,
}

/// Bytes before the name: number, position, length, type.
const RECORD_HEAD_BYTES: usize = 19;

impl Record<'_> {
    fn first(records: &[u8]) -> Option<Record<'_>> {
        let head = records.get(..RECORD_HEAD_BYTES)?;
        let len_bytes = usize::from(u16::from_ne_bytes(head[16..18].try_into().ok()?));
        let name = records.get(RECORD_HEAD_BYTES..len_bytes)?;
        let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
        Some(Record {
            ino: u64::from_ne_bytes(head[0..8].try_into().ok()?),
            cookie: u64::from_ne_bytes(head[8..16].try_into().ok()?),
            kind: FileType::from_mode(u32::from(head[18]) << 12),
            name: &name[..end],
            len_bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What came before a place that a disk cannot read was answered alone, and taken for all of
    /// the file. So was what ended at a page and began within one.
    // proves: P21
    #[test]
    fn what_is_short_is_the_end_of_the_file_and_no_error() {
        let reads = |at: u64, answers: &[sys::Sys<usize>]| {
            let (mut into, mut left) = (BufMut::heap(65_536), answers.iter().copied());
            let result = fill(at, &mut into, true, |_, _| left.next().expect("it was asked again"));
            (result, into.len())
        };
        let eio = Errno::EIO;
        assert_eq!(reads(0, &[Ok(4096), Err(eio)]), (Err((eio, true)), 0));
        assert_eq!(reads(0, &[Err(eio)]), (Err((eio, false)), 0));
        assert_eq!(reads(100, &[Ok(8092), Ok(57_344 + 100)]), (Ok(()), 65_536));
        assert_eq!(reads(100, &[Ok(8092), Ok(0)]), (Ok(()), 8092));
        assert_eq!(reads(100, &[Ok(900)]), (Ok(()), 900));
        assert_eq!(reads(0, &[Ok(4096), Ok(10)]), (Ok(()), 4106));
    }

    /// What a file system in user space may answer to a write: the thread asked it for ever.
    // proves: P22
    #[test]
    fn a_write_that_takes_nothing_ends() {
        let writes = |answers: &[sys::Sys<usize>]| {
            let mut left = answers.iter().copied();
            all_of(10, |_| left.next().expect("it was asked again"))
        };
        assert_eq!(writes(&[Ok(4), Ok(6)]).unwrap(), 10);
        assert_eq!(writes(&[Ok(0)]).unwrap_err().errno(), Errno::EIO);
        assert_eq!(writes(&[Ok(4), Ok(0)]).unwrap(), 4);
        assert_eq!(writes(&[Ok(4), Err(Errno::ENOSPC)]).unwrap(), 4);
        assert_eq!(all_of(0, |_| Ok(0)).unwrap(), 0, "a write of nothing is asked for");
    }
}
