//! Files in the run directory that other processes find by name.
//!
//! The last process that takes a name has it. The daemon of a mount that has just been unmounted may
//! still run when the next mount at the same place begins.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A file that other processes find by its name. The name goes when this is dropped, unless somebody
/// else has it by then.
#[derive(Debug)]
pub struct RunFile {
    path: PathBuf,
    inode: u64,
}

impl RunFile {
    fn made(path: PathBuf) -> io::Result<RunFile> {
        let inode = fs::symlink_metadata(&path)?.ino();
        Ok(RunFile { path, inode })
    }

    /// Where it is to be found.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it still has its name.
    pub fn is_there(&self) -> bool {
        fs::symlink_metadata(&self.path).is_ok_and(|meta| meta.ino() == self.inode)
    }

    /// Gives the name `path` to what was made at `made`, and replaces a former file of the name. Errors: those of
    /// rename(2) and flock(2); then nothing is left at `made`.
    pub fn take(made: &Path, path: PathBuf) -> io::Result<RunFile> {
        let taken = lock_directory(&path).and_then(|_lock| {
            fs::rename(made, &path)?;
            RunFile::made(path)
        });
        taken.inspect_err(|_| {
            let _ = fs::remove_file(made); // a name that nobody looks for
        })
    }
}

impl Drop for RunFile {
    fn drop(&mut self) {
        remove_if(&self.path, |meta| meta.ino() == self.inode);
    }
}

/// A name for making something that is then to be found at `path`, in the same directory and
/// hardly longer.
pub fn aside(path: &Path) -> PathBuf {
    path.with_extension(std::process::id().to_string())
}

/// Removes what is at `path` if it is as it should be, before anybody else takes the name.
pub fn remove_if(path: &Path, unwanted: impl FnOnce(&fs::Metadata) -> bool) {
    // A process that cannot lock or look leaves a file that means nothing to anybody.
    let Ok(_lock) = lock_directory(path) else { return };
    if fs::symlink_metadata(path).is_ok_and(|meta| unwanted(&meta)) {
        let _ = fs::remove_file(path);
    }
}

/// Names in a directory change hands one after the other.
fn lock_directory(path: &Path) -> io::Result<File> {
    let dir = File::open(path.parent().unwrap_or(Path::new(".")))?;
    // SAFETY: no memory is passed; the descriptor is open.
    match unsafe { libc::flock(dir.as_raw_fd(), libc::LOCK_EX) } {
        0 => Ok(dir),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // proves: P78
    #[test]
    fn a_name_goes_with_its_file_and_not_with_that_of_others() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("name.sock"), dir.path().join("other"));
        fs::write(aside(&path), "first").unwrap();
        let first = RunFile::take(&aside(&path), path.clone()).unwrap();
        fs::write(&other, "second").unwrap();
        let second = RunFile::take(&other, path.clone()).unwrap();
        assert!(second.is_there() && !first.is_there());
        drop(first);
        assert_eq!(fs::read(&path).unwrap(), b"second");
        drop(second);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
