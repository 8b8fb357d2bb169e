//! Mounting and unmounting.

pub(crate) mod agree;
pub(crate) mod choice;
pub(crate) mod device;
pub(crate) mod entry_reclaim;
pub(crate) mod pages;
pub(crate) mod session;
pub(crate) mod wake;

use std::ffi::{CString, OsStr};
use std::io::{self, IoSliceMut};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use dray_core::IO_MAX_BYTES;

use crate::mount::device::open_device;

/// The helper that mounts for ordinary users.
const FUSERMOUNT: &str = "fusermount3";
/// The environment variable that names the socket to send the descriptor over.
const COMM_FD: &str = "_FUSE_COMMFD";

/// How to mount.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// What is mounted, to be shown as the source: the target string.
    pub source: String,
    /// The kernel checks permissions by mode and ACL.
    pub default_permissions: bool,
    /// Users other than the one who mounts may use it. Where that is not root, /etc/fuse.conf
    /// must allow it.
    pub allow_other: bool,
    /// What may not be done there.
    pub flags: MountFlags,
    /// The largest read that is one request, bytes ([`Options::io_max_bytes`](crate::Options::io_max_bytes)).
    pub read_max_bytes: usize,
}

/// Flags of mount(2) that may also be changed later.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MountFlags {
    /// Read only.
    pub read_only: bool,
    /// Set-id programs do not change identity. Always so for ordinary users.
    pub no_suid: bool,
    /// Device files are not devices. Always so for ordinary users.
    pub no_dev: bool,
    /// Nothing can be executed.
    pub no_exec: bool,
}

impl MountFlags {
    fn bits(self) -> libc::c_ulong {
        let flags = [
            (self.read_only, libc::MS_RDONLY),
            (self.no_suid, libc::MS_NOSUID),
            (self.no_dev, libc::MS_NODEV),
            (self.no_exec, libc::MS_NOEXEC),
        ];
        flags.iter().filter(|(set, _)| *set).fold(0, |all, (_, flag)| all | flag)
    }
}

impl Default for MountOptions {
    fn default() -> MountOptions {
        MountOptions {
            source: "dray".to_owned(),
            default_permissions: false,
            allow_other: false,
            flags: MountFlags::default(),
            read_max_bytes: IO_MAX_BYTES,
        }
    }
}

/// Mounts on `at` and answers the descriptor to be served. Errors: those of mount(2), or
/// what the helper for ordinary users said.
pub fn mount(at: &Path, options: &MountOptions) -> io::Result<OwnedFd> {
    // SAFETY: no memory is passed.
    if unsafe { libc::geteuid() } == 0 {
        mount_as_root(at, options)
    } else {
        mount_as_user(at, options)
    }
}

fn mount_as_root(at: &Path, options: &MountOptions) -> io::Result<OwnedFd> {
    pages::raise_limit();
    let device = open_device().map_err(without_device)?;
    let mode = mode_at(at)?;
    let mut data = format!(
        "fd={},rootmode={:o},user_id=0,group_id=0,max_read={}",
        device.as_raw_fd(),
        mode & libc::S_IFMT,
        options.read_max_bytes,
    );
    let words = [
        (options.default_permissions, ",default_permissions"),
        (options.allow_other, ",allow_other"),
    ];
    words.iter().filter(|(set, _)| *set).for_each(|(_, word)| data.push_str(word));
    let (source, target) = (c_string(OsStr::new(&options.source))?, c_string(at.as_os_str())?);
    let data = c_string(OsStr::new(&data))?;
    // SAFETY: all pointers are to C strings that outlive the call.
    let result = unsafe {
        libc::mount(
            source.as_ptr(),
            target.as_ptr(),
            c"fuse.dray".as_ptr(),
            options.flags.bits(),
            data.as_ptr().cast(),
        )
    };
    if result == 0 { Ok(device) } else { Err(io::Error::last_os_error()) }
}

/// Type and permissions of what is at `at`, links followed. A mount that is made when somebody
/// looks (`x-systemd.automount`) is not made for this. It may be the one that is being made. Then
/// both would wait for each other. Errors: those of stat(2).
pub fn mode_at(at: &Path) -> io::Result<libc::mode_t> {
    let path = c_string(at.as_os_str())?;
    // SAFETY: an all-zero stat is valid; it and the C string outlive the call.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        match libc::fstatat(libc::AT_FDCWD, path.as_ptr(), &mut stat, libc::AT_NO_AUTOMOUNT) {
            0 => Ok(stat.st_mode),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Gives the mount on `at` other flags; everything else stays. Errors: those of mount(2),
/// `EPERM` for ordinary users among them.
pub fn remount(at: &Path, flags: MountFlags) -> io::Result<()> {
    let target = c_string(at.as_os_str())?;
    let nothing = std::ptr::null();
    // SAFETY: the target is a C string that outlives the call; source, type and data are not
    // looked at, and may be null (mount(2)).
    let result = unsafe {
        libc::mount(
            nothing,
            target.as_ptr(),
            nothing,
            libc::MS_REMOUNT | flags.bits(),
            nothing.cast(),
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn without_device(error: io::Error) -> io::Error {
    io::Error::new(
        error.kind(),
        format!(
            "/dev/fuse cannot be opened ({error}): has the kernel FUSE (`modprobe fuse`), and this \
             container the device?"
        ),
    )
}

fn c_string(text: &OsStr) -> io::Result<CString> {
    CString::new(text.as_bytes()).map_err(|_| io::ErrorKind::InvalidInput.into())
}

/// The helper opens the device, mounts it and sends the descriptor over a socket.
fn mount_as_user(at: &Path, options: &MountOptions) -> io::Result<OwnedFd> {
    let (ours, theirs) = UnixStream::pair()?;
    set_inherited(&theirs)?;
    let mut list = format!(
        "fsname={},subtype=dray,max_read={}",
        options.source.replace('\\', "\\\\").replace(',', "\\,"),
        options.read_max_bytes,
    );
    let words = [
        (options.default_permissions, ",default_permissions"),
        (options.allow_other, ",allow_other"),
        (options.flags.read_only, ",ro"),
        (options.flags.no_exec, ",noexec"),
    ];
    words.iter().filter(|(set, _)| *set).for_each(|(_, word)| list.push_str(word));
    let output = Command::new(FUSERMOUNT)
        .arg("-o")
        .arg(list)
        .arg("--")
        .arg(at)
        .env(COMM_FD, theirs.as_raw_fd().to_string())
        .output()
        .map_err(without_helper)?;
    drop(theirs);
    if !output.status.success() {
        return Err(io::Error::other(said_by_helper(&output.stderr)));
    }
    // Without the descriptor it is a mount that nobody can serve.
    receive_descriptor(&ours).inspect_err(|_| _ = unmount(at, true))
}

/// Why an ordinary user can neither mount nor unmount, if the helper does not start.
fn without_helper(error: io::Error) -> io::Error {
    io::Error::new(
        error.kind(),
        format!("{FUSERMOUNT} does not start ({error}): ordinary users need the package fuse3"),
    )
}

/// What the helper said. That a minimal system has no /etc/mtab keeps it from unmounting, and is
/// a mere warning where something else is wrong.
fn said_by_helper(stderr: &[u8]) -> String {
    let said = String::from_utf8_lossy(stderr);
    let (warnings, errors): (Vec<&str>, Vec<&str>) =
        said.trim().lines().partition(|line| line.contains("/etc/mtab"));
    match errors.is_empty() && !warnings.is_empty() {
        true => format!("{}; `ln -s /proc/self/mounts /etc/mtab`, as root", warnings.join("; ")),
        false => errors.join("; ") + advice(&errors),
    }
}

/// What to do about what the helper said, where that is not plain.
fn advice(errors: &[&str]) -> &'static str {
    let said = |words: &str| errors.iter().any(|line| line.contains(words));
    match (said("failed to open /dev/fuse: Permission denied"), said("user_allow_other")) {
        (true, _) => "; its mode is 0666 on most systems: `chmod 666 /dev/fuse`, as root",
        (_, true) => ": root may allow that there",
        _ => "",
    }
}

/// Lets a child inherit the descriptor. This is set before the fork, since there is no other way to
/// say it to [`Command`] without code between fork and exec.
fn set_inherited(socket: &UnixStream) -> io::Result<()> {
    // SAFETY: no memory is passed.
    match unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_SETFD, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn receive_descriptor(socket: &UnixStream) -> io::Result<OwnedFd> {
    let mut byte = [0u8; 1];
    let mut parts = [IoSliceMut::new(&mut byte)];
    let mut control = [0u64; 8]; // aligned as control messages must be
    // SAFETY: a zeroed msghdr is a valid one, and all that it points to outlives the call.
    let (message, received) = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = parts.as_mut_ptr().cast(); // IoSliceMut is an iovec
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control) as _;
        let received = libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_CMSG_CLOEXEC);
        (message, received)
    };
    if received < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel filled `control`; the header is checked before its data is read.
    unsafe {
        let first = libc::CMSG_FIRSTHDR(&message);
        if first.is_null()
            || (*first).cmsg_level != libc::SOL_SOCKET
            || (*first).cmsg_type != libc::SCM_RIGHTS
            || ((*first).cmsg_len as usize) < libc::CMSG_LEN(4) as usize
        {
            return Err(io::Error::other("fusermount3 sent no descriptor"));
        }
        let raw = libc::CMSG_DATA(first).cast::<i32>().read_unaligned();
        Ok(OwnedFd::from_raw_fd(raw))
    }
}

/// Unmounts `at`; `lazy` also while it is in use: it then disappears from the tree and
/// ends with its last user. Errors: those of umount2(2), or what the helper said.
pub fn unmount(at: &Path, lazy: bool) -> io::Result<()> {
    // SAFETY: no memory is passed.
    if unsafe { libc::geteuid() } == 0 {
        let target = c_string(at.as_os_str())?;
        let flags = libc::UMOUNT_NOFOLLOW | if lazy { libc::MNT_DETACH } else { 0 };
        // SAFETY: the C string outlives the call.
        return match unsafe { libc::umount2(target.as_ptr(), flags) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        };
    }
    let mut command = Command::new(FUSERMOUNT);
    command.arg("-u");
    if lazy {
        command.arg("-z");
    }
    let output = command.arg("--").arg(at).output().map_err(without_helper)?;
    if output.status.success() {
        return Ok(());
    }
    Err(io::Error::other(said_by_helper(&output.stderr)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_mtab_is_reported_where_it_is_the_only_cause() {
        let missing = "fusermount3: failed to open /etc/mtab: No such file or directory\n";
        let refused = "fusermount3: user has no write access to mountpoint /mnt\n";
        assert!(said_by_helper(missing.as_bytes()).contains("ln -s /proc/self/mounts /etc/mtab"));
        assert_eq!(said_by_helper(format!("{missing}{refused}").as_bytes()), refused.trim());
        assert_eq!(said_by_helper(refused.as_bytes()), refused.trim());
        assert_eq!(said_by_helper(b""), "");
        let closed = "fusermount3: failed to open /dev/fuse: Permission denied\n";
        assert!(said_by_helper(closed.as_bytes()).contains("chmod 666 /dev/fuse"));
    }
}
