//! The disk that logs of dirty data lie on: that of the machine, or one of a simulation.

use std::any::Any;
use std::fmt;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What a log needs of a disk. Errors: those of the disk. What is not there is `NotFound`.
pub trait LogDisk: fmt::Debug + Send + Sync {
    /// Makes a directory for its owner alone, and those above it. The directory may be there.
    fn make_dir(&self, dir: &Path) -> io::Result<()>;

    /// The names in a directory, in any order.
    fn list(&self, dir: &Path) -> io::Result<Vec<PathBuf>>;

    /// The first `max_bytes` bytes of a file, or all of it.
    fn read(&self, path: &Path, max_bytes: u64) -> io::Result<Vec<u8>>;

    /// Makes a file of a few bytes, or replaces it.
    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()>;

    /// A file that is not there yet, for its owner alone.
    fn create(&self, path: &Path) -> io::Result<Arc<dyn LogFile>>;

    /// A file that is there, to be written.
    fn open(&self, path: &Path) -> io::Result<Arc<dyn LogFile>>;

    /// Removes a file.
    fn remove_file(&self, path: &Path) -> io::Result<()>;

    /// Removes a directory with all files in it.
    fn remove_dir(&self, dir: &Path) -> io::Result<()>;

    /// Brings the names in a directory to media.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;

    /// Locks a directory for this process. None: another one has it.
    fn lock(&self, dir: &Path) -> io::Result<Option<LogLock>>;
}

/// A file of a log that is written. Errors: those of the disk.
pub trait LogFile: Send + Sync {
    /// Writes all bytes at this offset.
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()>;

    /// Brings what was written to media.
    fn sync_data(&self) -> io::Result<()>;
}

/// A directory is locked as long as this is there.
pub type LogLock = Box<dyn Any + Send + Sync>;

/// The disk of the machine.
#[derive(Clone, Copy, Debug)]
pub struct LocalLogDisk;

impl LogDisk for LocalLogDisk {
    fn make_dir(&self, dir: &Path) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(dir)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<PathBuf>> {
        fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name().into())).collect()
    }

    fn read(&self, path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        File::open(path)?.take(max_bytes).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let file = File::options().create(true).truncate(true).write(true).mode(0o600).open(path);
        file?.write_all(bytes)
    }

    fn create(&self, path: &Path) -> io::Result<Arc<dyn LogFile>> {
        let file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
        Ok(Arc::new(file))
    }

    fn open(&self, path: &Path) -> io::Result<Arc<dyn LogFile>> {
        Ok(Arc::new(File::options().write(true).open(path)?))
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_dir(&self, dir: &Path) -> io::Result<()> {
        fs::remove_dir_all(dir)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        File::open(dir)?.sync_all()
    }

    fn lock(&self, dir: &Path) -> io::Result<Option<LogLock>> {
        let path = dir.join("lock");
        let file =
            File::options().create(true).truncate(false).write(true).mode(0o600).open(path)?;
        // SAFETY: no memory is passed.
        if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
            return Ok(Some(Box::new(file)));
        }
        let error = io::Error::last_os_error();
        if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) }
    }
}

impl LogFile for File {
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.write_all_at(bytes, at)
    }

    fn sync_data(&self) -> io::Result<()> {
        File::sync_data(self)
    }
}

/// Where a log lies: a directory of a disk.
#[derive(Clone, Debug)]
pub(crate) struct LogDir {
    pub(crate) disk: Arc<dyn LogDisk>,
    pub(crate) path: PathBuf,
}

impl LogDir {
    /// Whether it is there.
    pub(super) fn is_there(&self) -> bool {
        !matches!(self.disk.list(&self.path), Err(error) if error.kind() == io::ErrorKind::NotFound)
    }

    /// The names in it. None if it is not there.
    pub(super) fn names(&self) -> io::Result<Vec<PathBuf>> {
        match self.disk.list(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            names => names,
        }
    }

    /// A directory in it.
    pub(super) fn below(&self, name: &Path) -> LogDir {
        LogDir { disk: self.disk.clone(), path: self.path.join(name) }
    }

    /// The path of a segment.
    pub(super) fn segment(&self, number: u64) -> PathBuf {
        self.path.join(format!("{number:016x}.log"))
    }

    /// The file that says who starts the processes of the log.
    pub(super) fn supervisor(&self) -> PathBuf {
        self.path.join("supervisor")
    }

    /// See [`LogDisk::lock`].
    pub(super) fn lock(&self) -> io::Result<Option<LogLock>> {
        self.disk.lock(&self.path)
    }

    /// Brings the names in it to media.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.disk.sync_dir(&self.path)
    }

    /// See [`sync_above`].
    pub(super) fn sync_above(&self) -> io::Result<()> {
        sync_above(&self.path, |dir| self.disk.sync_dir(dir))
    }
}

/// Brings the name of a directory to media, and those of all directories above. Any of these may be new, or made by a
/// process that has died since. `sync` brings the names in one directory to media. Errors: those of the disk.
pub(crate) fn sync_above(dir: &Path, sync: impl Fn(&Path) -> io::Result<()>) -> io::Result<()> {
    for above in dir.ancestors().skip(1) {
        let is_here = above.as_os_str().is_empty(); // a relative path has come to its beginning
        match sync(if is_here { Path::new(".") } else { above }) {
            Err(error) if has_nothing_new(&error) => {}
            synced => synced?,
        }
    }
    Ok(())
}

/// Whether a directory that cannot be synced for this reason has no name that was made here. It may not be read by
/// this user, or be on a file system that is never written.
fn has_nothing_new(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EROFS | libc::EINVAL))
}
