//! Files of an export as this machine sees them. No symbolic link is followed below the root: a user
//! who may write there must not lead a policy elsewhere.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// A file as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenFile {
    pub size_bytes: u64,
    pub uid: u32,
    /// When its data were changed last, microseconds since 1970.
    pub changed_us: u64,
    /// When it was read last, as far as its file system notes that.
    pub read_us: u64,
}

/// A directory with the name of a file in it.
pub struct PolicyFile {
    dir: OwnedFd,
    name: CString,
}

fn open_dir(at: &OwnedFd, name: &[u8]) -> io::Result<OwnedFd> {
    let name = CString::new(name)?;
    let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    // SAFETY: the name ends with a NUL, and the descriptor is open.
    let fd = unsafe { libc::openat(at.as_raw_fd(), name.as_ptr(), flags) };
    match fd {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: it was just made, and nobody else has it.
        fd => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
    }
}

impl PolicyFile {
    /// The place of this path of the export. Errors: those of open(2); `ELOOP` or `ENOTDIR` where a
    /// symbolic link is on the way.
    pub fn find(root: &Path, path: &[u8]) -> io::Result<PolicyFile> {
        let flags = libc::O_PATH | libc::O_DIRECTORY;
        let root = File::options().read(true).custom_flags(flags).open(root)?;
        let mut dir = OwnedFd::from(root);
        let names: Vec<&[u8]> =
            path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()).collect();
        let Some((name, above)) = names.split_last() else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        if names.iter().any(|name| matches!(*name, b"." | b"..")) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        for one in above {
            dir = open_dir(&dir, one)?;
        }
        Ok(PolicyFile { dir, name: CString::new(*name)? })
    }

    /// The file; none if there is none, or it is no regular one. Errors: those of stat(2).
    pub fn look(&self) -> io::Result<Option<SeenFile>> {
        // SAFETY: it is a struct of numbers.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        let (fd, name) = (self.dir.as_raw_fd(), self.name.as_ptr());
        // SAFETY: the name ends with a NUL, and the kernel writes no more than a stat.
        let failed = unsafe { libc::fstatat(fd, name, &mut stat, libc::AT_SYMLINK_NOFOLLOW) } != 0;
        if failed {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::NotFound => Ok(None),
                _ => Err(error),
            };
        }
        if stat.st_mode & libc::S_IFMT != libc::S_IFREG {
            return Ok(None);
        }
        let micros = |seconds: i64, nanos: i64| {
            u64::try_from(seconds).unwrap_or(0).saturating_mul(1_000_000) + nanos as u64 / 1000
        };
        Ok(Some(SeenFile {
            size_bytes: stat.st_size as u64,
            uid: stat.st_uid,
            changed_us: micros(stat.st_mtime, stat.st_mtime_nsec),
            read_us: micros(stat.st_atime, stat.st_atime_nsec),
        }))
    }

    /// The directory, for a command that is started in it; the descriptor is this process's.
    pub fn dir(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.dir.as_raw_fd()).into()
    }

    /// The name of the file in its directory, as a path that no command takes for an option.
    pub fn name(&self) -> PathBuf {
        Path::new(".").join(std::ffi::OsStr::from_bytes(self.name.as_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_symbolic_link_leads_elsewhere() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        std::fs::create_dir_all(root.join("d")).unwrap();
        std::fs::write(root.join("d/f"), "12345").unwrap();
        std::os::unix::fs::symlink(root.join("d"), root.join("l")).unwrap();
        std::os::unix::fs::symlink("f", root.join("d/g")).unwrap();
        let look = |path: &str| PolicyFile::find(&root, path.as_bytes())?.look();
        assert_eq!(look("/d/f").unwrap().unwrap().size_bytes, 5);
        assert!(look("/l/f").is_err());
        assert_eq!(look("/d/g").unwrap(), None, "it is a link");
        assert_eq!((look("/d").unwrap(), look("/d/none").unwrap()), (None, None));
        assert!(look("/d/../d/f").is_err() && look("/").is_err());
        let place = PolicyFile::find(&root, b"/d/f").unwrap();
        let mut cat = std::process::Command::new("cat");
        cat.arg(place.name()).current_dir(place.dir());
        assert_eq!(cat.output().unwrap().stdout, b"12345");
    }
}
