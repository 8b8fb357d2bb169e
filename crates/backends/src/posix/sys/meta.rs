//! Attributes, names and directories.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use dray_core::{Access, Attr, Errno, Gid, Name, Statfs, TimeSet, Timestamp, Uid, Validity};

use super::{CName, EMPTY, Sys, call};

/// What statx(2) tells: attributes, and where the file is.
#[derive(Clone, Copy)]
pub(crate) struct InodeStat {
    pub(crate) attr: Attr,
    pub(crate) dev: u64,
}

/// Attributes of what `fd` refers to, with any kind of descriptor.
pub(crate) fn stat(fd: BorrowedFd<'_>) -> Sys<InodeStat> {
    statx(fd, EMPTY.as_ptr(), libc::AT_EMPTY_PATH)
}

/// Attributes of `name` in `dir`, without following a link.
pub(crate) fn stat_at(dir: BorrowedFd<'_>, name: &Name) -> Sys<InodeStat> {
    statx(dir, CName::new(name).as_ptr(), libc::AT_SYMLINK_NOFOLLOW | libc::AT_NO_AUTOMOUNT)
}

fn statx(dir: BorrowedFd<'_>, path: *const libc::c_char, flags: i32) -> Sys<InodeStat> {
    // SAFETY: statx is plain numbers, for which zero is a valid value.
    let mut raw: libc::statx = unsafe { std::mem::zeroed() };
    let mask = libc::STATX_BASIC_STATS | libc::STATX_BTIME;
    // SAFETY: the path is NUL-terminated and raw is as large as the kernel expects.
    call(|| unsafe { libc::statx(dir.as_raw_fd(), path, flags, mask, &mut raw) })?;
    Ok(InodeStat { attr: attr_of(&raw), dev: libc::makedev(raw.stx_dev_major, raw.stx_dev_minor) })
}

fn attr_of(raw: &libc::statx) -> Attr {
    let time = |t: libc::statx_timestamp| Timestamp { sec: t.tv_sec, nsec: t.tv_nsec };
    Attr {
        ino: raw.stx_ino,
        mode: u32::from(raw.stx_mode),
        nlink: raw.stx_nlink,
        uid: Uid(raw.stx_uid),
        gid: Gid(raw.stx_gid),
        rdev: encode_dev(raw.stx_rdev_major, raw.stx_rdev_minor),
        block_bytes: raw.stx_blksize,
        size: raw.stx_size,
        blocks: raw.stx_blocks,
        atime: time(raw.stx_atime),
        mtime: time(raw.stx_mtime),
        ctime: time(raw.stx_ctime),
        btime: if raw.stx_mask & libc::STATX_BTIME == 0 {
            Timestamp::default()
        } else {
            time(raw.stx_btime)
        },
        attributes: raw.stx_attributes,
        attributes_mask: raw.stx_attributes_mask,
        validity: Validity::UNSAID,
    }
}

/// The kernel's 32-bit encoding of a device number.
fn encode_dev(major: u32, minor: u32) -> u32 {
    (minor & 0xff) | (major & 0xfff) << 8 | (minor & 0xfff00) << 12
}

/// The C library's device number for the kernel's 32-bit encoding.
fn decode_dev(rdev: u32) -> libc::dev_t {
    libc::makedev(rdev >> 8 & 0xfff, rdev & 0xff | rdev >> 12 & 0xfff00)
}

/// statfs(2) with the file system's magic number.
pub(crate) fn statfs(fd: BorrowedFd<'_>) -> Sys<(Statfs, i64)> {
    // SAFETY: statfs64 is plain numbers, for which zero is a valid value.
    let mut raw: libc::statfs64 = unsafe { std::mem::zeroed() };
    // SAFETY: raw outlives the call.
    call(|| unsafe { libc::fstatfs64(fd.as_raw_fd(), &mut raw) })?;
    let clip = |bytes: i64| u32::try_from(bytes).unwrap_or(4096);
    let statfs = Statfs {
        block_bytes: clip(raw.f_bsize as i64),
        fragment_bytes: clip(raw.f_frsize as i64),
        blocks: raw.f_blocks,
        blocks_free: raw.f_bfree,
        blocks_available: raw.f_bavail,
        files: raw.f_files,
        files_free: raw.f_ffree,
        name_max_bytes: clip(raw.f_namelen as i64),
    };
    Ok((statfs, raw.f_type as i64))
}

/// What a symbolic link says.
pub(crate) fn read_link(fd: BorrowedFd<'_>) -> Sys<Vec<u8>> {
    let mut target = vec![0u8; dray_core::PATH_MAX_BYTES];
    // SAFETY: the kernel writes at most target.len() bytes.
    let count = call(|| unsafe {
        libc::readlinkat(fd.as_raw_fd(), EMPTY.as_ptr(), target.as_mut_ptr().cast(), target.len())
    })?;
    target.truncate(count as usize);
    Ok(target)
}

/// fchownat(2) on the descriptor itself.
pub(crate) fn chown(fd: BorrowedFd<'_>, uid: Option<Uid>, gid: Option<Gid>) -> Sys<()> {
    let uid = uid.map_or(u32::MAX, |uid| uid.0);
    let gid = gid.map_or(u32::MAX, |gid| gid.0);
    let flags = libc::AT_EMPTY_PATH | libc::AT_SYMLINK_NOFOLLOW;
    // SAFETY: the path is a literal.
    call(|| unsafe { libc::fchownat(fd.as_raw_fd(), EMPTY.as_ptr(), uid, gid, flags) })?;
    Ok(())
}

/// chmod(2) of what any descriptor refers to.
pub(crate) fn chmod(proc_fd: BorrowedFd<'_>, fd: BorrowedFd<'_>, mode: u32) -> Sys<()> {
    static NO_FCHMODAT2: AtomicBool = AtomicBool::new(false);
    const SYS_FCHMODAT2: libc::c_long = 452; // Linux 6.6; the same on every architecture
    let mode = mode & 0o7777;
    if !NO_FCHMODAT2.load(Ordering::Relaxed) {
        // SAFETY: the path is a literal.
        let changed = call(|| unsafe {
            libc::syscall(SYS_FCHMODAT2, fd.as_raw_fd(), EMPTY.as_ptr(), mode, libc::AT_EMPTY_PATH)
        });
        match changed {
            Ok(_) => return Ok(()),
            Err(Errno::ENOSYS) => NO_FCHMODAT2.store(true, Ordering::Relaxed),
            Err(errno) => return Err(errno),
        }
    }
    let name = CName::number(fd.as_raw_fd());
    // SAFETY: the name is NUL-terminated and outlives the call.
    call(|| unsafe { libc::fchmodat(proc_fd.as_raw_fd(), name.as_ptr(), mode, 0) })?;
    Ok(())
}

/// utimensat(2) of what any descriptor refers to.
pub(crate) fn set_times(
    proc_fd: BorrowedFd<'_>,
    fd: BorrowedFd<'_>,
    atime: Option<TimeSet>,
    mtime: Option<TimeSet>,
) -> Sys<()> {
    let spec = |time: Option<TimeSet>| match time {
        None => libc::timespec { tv_sec: 0, tv_nsec: libc::UTIME_OMIT },
        Some(TimeSet::Now) => libc::timespec { tv_sec: 0, tv_nsec: libc::UTIME_NOW },
        Some(TimeSet::At(time)) => {
            libc::timespec { tv_sec: time.sec, tv_nsec: i64::from(time.nsec.min(999_999_999)) }
        }
    };
    let times = [spec(atime), spec(mtime)];
    // SAFETY: times are two, and the path is a literal.
    let set = call(|| unsafe {
        libc::utimensat(fd.as_raw_fd(), EMPTY.as_ptr(), times.as_ptr(), libc::AT_EMPTY_PATH)
    });
    if !matches!(set, Err(Errno::EINVAL | Errno::ENOENT)) {
        return set.map(drop);
    }
    // Linux before 5.8 does not know the flag.
    let name = CName::number(fd.as_raw_fd());
    // SAFETY: times are two; the name is NUL-terminated and outlives the call.
    call(|| unsafe { libc::utimensat(proc_fd.as_raw_fd(), name.as_ptr(), times.as_ptr(), 0) })?;
    Ok(())
}

/// truncate(2) of what any descriptor refers to: the kernel checks the right to write.
pub(crate) fn truncate_path(fd: BorrowedFd<'_>, size: u64) -> Sys<()> {
    let size = i64::try_from(size).map_err(|_| Errno::EFBIG)?;
    let path = CName::proc_path(fd.as_raw_fd());
    // SAFETY: the path is NUL-terminated and outlives the call.
    call(|| unsafe { libc::truncate64(path.as_ptr(), size) })?;
    Ok(())
}

/// ftruncate(2): the descriptor's rights decide.
pub(crate) fn truncate_open(fd: BorrowedFd<'_>, size: u64) -> Sys<()> {
    let size = i64::try_from(size).map_err(|_| Errno::EFBIG)?;
    // SAFETY: numbers only.
    call(|| unsafe { libc::ftruncate64(fd.as_raw_fd(), size) })?;
    Ok(())
}

/// access(2) with the thread's file system ids. `ENOSYS` before Linux 5.8.
pub(crate) fn access(fd: BorrowedFd<'_>, want: Access) -> Sys<()> {
    // The C library's wrapper may emulate the flags, wrongly for us; the kernel does not.
    // SAFETY: the path is a literal.
    call(|| unsafe {
        libc::syscall(
            libc::SYS_faccessat2,
            fd.as_raw_fd(),
            EMPTY.as_ptr(),
            want.0 & 7,
            libc::AT_EACCESS | libc::AT_EMPTY_PATH,
        )
    })?;
    Ok(())
}

pub(crate) fn make_dir(dir: BorrowedFd<'_>, name: &Name, mode: u32) -> Sys<()> {
    let name = CName::new(name);
    // SAFETY: the name is NUL-terminated and outlives the call.
    call(|| unsafe { libc::mkdirat(dir.as_raw_fd(), name.as_ptr(), mode & 0o7777) })?;
    Ok(())
}

pub(crate) fn make_node(dir: BorrowedFd<'_>, name: &Name, mode: u32, rdev: u32) -> Sys<()> {
    let name = CName::new(name);
    // SAFETY: the name is NUL-terminated and outlives the call.
    call(|| unsafe { libc::mknodat(dir.as_raw_fd(), name.as_ptr(), mode, decode_dev(rdev)) })?;
    Ok(())
}

/// symlinkat(2). `EINVAL` for a target with a NUL byte.
pub(crate) fn make_symlink(dir: BorrowedFd<'_>, name: &Name, target: &[u8]) -> Sys<()> {
    let target = std::ffi::CString::new(target).map_err(|_| Errno::EINVAL)?;
    let name = CName::new(name);
    // SAFETY: both strings are NUL-terminated and outlive the call.
    call(|| unsafe { libc::symlinkat(target.as_ptr(), dir.as_raw_fd(), name.as_ptr()) })?;
    Ok(())
}

/// unlinkat(2), of a directory or of anything else.
pub(crate) fn unlink(dir: BorrowedFd<'_>, name: &Name, directory: bool) -> Sys<()> {
    let name = CName::new(name);
    let flags = if directory { libc::AT_REMOVEDIR } else { 0 };
    // SAFETY: the name is NUL-terminated and outlives the call.
    call(|| unsafe { libc::unlinkat(dir.as_raw_fd(), name.as_ptr(), flags) })?;
    Ok(())
}

/// renameat2(2) with `RENAME_*` flags.
pub(crate) fn rename(
    from: (BorrowedFd<'_>, &Name),
    to: (BorrowedFd<'_>, &Name),
    flags: u32,
) -> Sys<()> {
    let (old, new) = (CName::new(from.1), CName::new(to.1));
    // SAFETY: both names are NUL-terminated and outlive the call.
    call(|| unsafe {
        libc::syscall(
            libc::SYS_renameat2,
            from.0.as_raw_fd(),
            old.as_ptr(),
            to.0.as_raw_fd(),
            new.as_ptr(),
            flags,
        )
    })?;
    Ok(())
}

/// linkat(2) of what any descriptor refers to.
pub(crate) fn link(
    proc_fd: BorrowedFd<'_>,
    fd: BorrowedFd<'_>,
    dir: BorrowedFd<'_>,
    name: &Name,
) -> Sys<()> {
    let (old, new) = (CName::number(fd.as_raw_fd()), CName::new(name));
    // SAFETY: both names are NUL-terminated and outlive the call.
    call(|| unsafe {
        libc::linkat(
            proc_fd.as_raw_fd(),
            old.as_ptr(),
            dir.as_raw_fd(),
            new.as_ptr(),
            libc::AT_SYMLINK_FOLLOW,
        )
    })?;
    Ok(())
}

/// getdents64(2) into `buffer`, aligned as the records want it; bytes filled, 0 at the end.
pub(crate) fn read_dir(fd: BorrowedFd<'_>, buffer: &mut [u64]) -> Sys<usize> {
    let bytes = size_of_val(buffer);
    // SAFETY: the kernel writes at most that many bytes into the buffer.
    let count = call(|| unsafe {
        libc::syscall(libc::SYS_getdents64, fd.as_raw_fd(), buffer.as_mut_ptr(), bytes)
    })?;
    Ok(count as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_survive_both_encodings() {
        for (major, minor) in [(0, 0), (8, 1), (259, 0xf_ffff), (4095, 256)] {
            let raw = decode_dev(encode_dev(major, minor));
            assert_eq!((libc::major(raw), libc::minor(raw)), (major, minor));
        }
    }
}
