//! The files that a workload loads: a directory, or an NFS export without a kernel client between.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::PathBuf;

use crate::{CommandResult, context, nfs};

/// Where a workload finds its files.
#[derive(Clone, Debug)]
pub enum FileLocation {
    /// A directory of this machine, through the kernel.
    Directory(PathBuf),
    /// `nfs://HOST/PATH?...`, through libnfs.
    Nfs(String),
}

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenKind {
    /// To read, through the page cache.
    Read,
    /// To read, with `O_DIRECT`.
    ReadDirect,
    /// To read and write an existing file, with `O_DIRECT`.
    WriteDirect,
    /// As `WriteDirect`; what is written is on media when the call returns (`O_SYNC`).
    WriteSync,
    /// To write; made if it is not there.
    Fill,
    /// To write; must not be there (`O_EXCL`).
    Create,
}

/// File operations as an application makes them. One thread uses one of these.
pub trait FileCalls {
    /// Path of `name` at the place.
    fn path(&self, name: &str) -> CString;
    /// open(2).
    fn open(&self, path: &CStr, how: OpenKind) -> io::Result<Box<dyn LoadedFile>>;
    /// stat(2); answers the size, bytes.
    fn stat(&self, path: &CStr) -> io::Result<u64>;
    /// unlink(2).
    fn unlink(&self, path: &CStr) -> io::Result<()>;
}

/// An open file; dropping closes it.
pub trait LoadedFile {
    /// pread(2).
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<usize>;
    /// pwrite(2).
    fn write_at(&self, from: &[u8], at: u64) -> io::Result<usize>;
    /// fsync(2).
    fn sync(&self) -> io::Result<()>;
}

impl FileLocation {
    /// Connects, for one thread.
    pub fn target(&self) -> CommandResult<Box<dyn FileCalls>> {
        match self {
            FileLocation::Directory(dir) => Ok(Box::new(Directory(dir.clone()))),
            FileLocation::Nfs(url) => Ok(Box::new(nfs::NfsMount::new(url).map_err(context(url))?)),
        }
    }
}

struct Directory(PathBuf);
struct Descriptor(OwnedFd);

fn checked(result: i64) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

impl FileCalls for Directory {
    fn path(&self, name: &str) -> CString {
        let path = self.0.join(name).into_os_string().into_encoded_bytes();
        CString::new(path).unwrap_or_default() // names are ours: no NUL
    }

    fn open(&self, path: &CStr, how: OpenKind) -> io::Result<Box<dyn LoadedFile>> {
        let flags = match how {
            OpenKind::Read => libc::O_RDONLY,
            OpenKind::ReadDirect => libc::O_RDONLY | libc::O_DIRECT,
            OpenKind::WriteDirect => libc::O_RDWR | libc::O_DIRECT,
            OpenKind::WriteSync => libc::O_RDWR | libc::O_DIRECT | libc::O_SYNC,
            OpenKind::Fill => libc::O_WRONLY | libc::O_CREAT,
            OpenKind::Create => libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL,
        };
        let open = |flags| {
            // SAFETY: `path` ends with NUL.
            checked(unsafe { libc::open(path.as_ptr(), flags | libc::O_CLOEXEC, 0o644) }.into())
        };
        let fd = match open(flags) {
            // tmpfs before Linux 6.6 has no O_DIRECT; it has no page cache of its own either.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                open(flags & !libc::O_DIRECT)?
            }
            other => other?,
        };
        // SAFETY: a new descriptor that nobody else knows.
        Ok(Box::new(Descriptor(unsafe { OwnedFd::from_raw_fd(fd as i32) })))
    }

    fn stat(&self, path: &CStr) -> io::Result<u64> {
        // SAFETY: plain data, for which zeros are valid.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: `path` ends with NUL, and `stat` is ours to be written.
        checked(unsafe { libc::stat(path.as_ptr(), &mut stat) } as i64)?;
        Ok(stat.st_size as u64)
    }

    fn unlink(&self, path: &CStr) -> io::Result<()> {
        // SAFETY: `path` ends with NUL.
        checked(unsafe { libc::unlink(path.as_ptr()) } as i64).map(drop)
    }
}

impl LoadedFile for Descriptor {
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<usize> {
        // SAFETY: `into` is ours to be written.
        checked(unsafe {
            libc::pread(self.0.as_raw_fd(), into.as_mut_ptr().cast(), into.len(), at as i64)
        } as i64)
    }

    fn write_at(&self, from: &[u8], at: u64) -> io::Result<usize> {
        // SAFETY: `from` is readable for its length.
        checked(unsafe {
            libc::pwrite(self.0.as_raw_fd(), from.as_ptr().cast(), from.len(), at as i64)
        } as i64)
    }

    fn sync(&self) -> io::Result<()> {
        // SAFETY: no memory is passed.
        checked(i64::from(unsafe { libc::fsync(self.0.as_raw_fd()) })).map(drop)
    }
}
