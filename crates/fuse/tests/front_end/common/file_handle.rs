//! name_to_handle_at(2) and open_by_handle_at(2).

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// `MAX_HANDLE_SZ` of linux/exportfs.h.
const BYTES_MAX: usize = 128;

/// As `struct file_handle` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct FileHandle {
    len_bytes: u32,
    kind: i32,
    bytes: [u8; BYTES_MAX],
}

impl FileHandle {
    pub fn of(path: &Path) -> io::Result<FileHandle> {
        let mut handle = FileHandle { len_bytes: BYTES_MAX as u32, kind: 0, bytes: [0; BYTES_MAX] };
        let (path, mut mount) = (CString::new(path.as_os_str().as_bytes())?, 0);
        // SAFETY: the path outlives the call, and the handle says how much room it has.
        let result = unsafe {
            let handle = (&raw mut handle).cast();
            libc::name_to_handle_at(libc::AT_FDCWD, path.as_ptr(), handle, &raw mut mount, 0)
        };
        if result == 0 { Ok(handle) } else { Err(io::Error::last_os_error()) }
    }

    /// Out of the bytes that the kernel tells, as fanotify(7) does.
    pub fn in_bytes(bytes: &[u8]) -> FileHandle {
        let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        let mut handle =
            FileHandle { len_bytes: word(0), kind: word(4) as i32, bytes: [0; BYTES_MAX] };
        let len_bytes = handle.len_bytes as usize;
        handle.bytes[..len_bytes].copy_from_slice(&bytes[8..8 + len_bytes]);
        handle
    }

    /// Opens it on the mount at `mount`.
    pub fn open(&self, mount: &Path, flags: i32) -> io::Result<File> {
        let mount = File::open(mount)?;
        let mut handle = *self;
        let flags = flags | libc::O_CLOEXEC;
        // SAFETY: the handle outlives the call; the descriptor is owned by nobody else.
        unsafe {
            let handle = (&raw mut handle).cast();
            match libc::open_by_handle_at(mount.as_raw_fd(), handle, flags) {
                -1 => Err(io::Error::last_os_error()),
                fd => Ok(OwnedFd::from_raw_fd(fd).into()),
            }
        }
    }

    /// What is in the file.
    pub fn read(&self, mount: &Path) -> io::Result<String> {
        self.open(mount, libc::O_RDONLY).and_then(io::read_to_string)
    }

    /// Where the kernel has what the handle leads to.
    pub fn path(&self, mount: &Path) -> io::Result<std::path::PathBuf> {
        let file = self.open(mount, libc::O_RDONLY)?;
        std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
    }
}

/// Has the kernel forget inodes that nobody uses.
pub fn drop_inodes() {
    std::fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
}
