//! Directories as a target: the same steps by system calls.

mod attributes;

use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path as FsPath;

use dray_core::{Errno, FileType, Fut, Identity, RenameHow};

use super::StepTarget;
use crate::model::{ModelStat, Quirks, StepOutcome};
use crate::step::{self, Action, Path, SLOTS, Step};

type Answer = Result<StepOutcome, Errno>;

/// One or more directories over one store: a bare file system, or mounts. Needs root, to
/// act as other users; acts on the calling thread, whose credentials it changes for the
/// time of a step. Sets the process's umask to 0.
///
/// A step waits for the kernel: the server of a mount must run on other threads.
pub struct PathTarget {
    roots: Vec<OwnedFd>,
    quirks: Quirks,
    slots: [Option<Slot>; SLOTS],
}

struct Slot {
    client: usize,
    fd: OwnedFd,
}

/// The thread acts as somebody until this is dropped.
struct Acting;

fn set_credentials(uid: u32, gid: u32, groups: &[u32]) {
    // SAFETY: raw system calls on numbers and on a slice that outlives them. Unlike the C
    // library's functions they change this thread alone.
    unsafe {
        libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr());
        libc::syscall(libc::SYS_setfsgid, gid);
        libc::syscall(libc::SYS_setfsuid, uid);
    }
}

impl Acting {
    fn as_identity(who: &Identity) -> Acting {
        let groups: Vec<u32> = who.groups.iter().map(|gid| gid.0).collect();
        set_credentials(who.uid.0, who.gid.0, &groups);
        Acting
    }
}

impl Drop for Acting {
    fn drop(&mut self) {
        // The user id first: with it the right to change the others comes back.
        // SAFETY: a system call on a number.
        unsafe { libc::syscall(libc::SYS_setfsuid, 0) };
        set_credentials(0, 0, &[]);
    }
}

/// The value of a C call, or its error.
fn check<T: Into<i64>>(value: T) -> Result<i64, Errno> {
    let value = value.into();
    if value < 0 { Err(Errno::last()) } else { Ok(value) }
}

fn done<T: Into<i64>>(value: T) -> Answer {
    check(value).map(|_| StepOutcome::Done)
}

impl PathTarget {
    /// A target of these directories. Errors: those of opening them; `EPERM` without root.
    pub fn new(roots: &[&FsPath], quirks: Quirks) -> io::Result<PathTarget> {
        // SAFETY: no arguments but a number.
        unsafe { libc::umask(0) };
        // SAFETY: no arguments.
        if unsafe { libc::geteuid() } != 0 {
            return Err(io::Error::from_raw_os_error(libc::EPERM));
        }
        let open = |root: &&FsPath| Ok(OwnedFd::from(std::fs::File::open(root)?));
        let roots = roots.iter().map(open).collect::<io::Result<Vec<_>>>()?;
        assert!(!roots.is_empty(), "a target needs a directory");
        Ok(PathTarget { roots, quirks, slots: [const { None }; SLOTS] })
    }

    fn text(&self, client: usize, path: &Path) -> Vec<u8> {
        let root = self.roots[client % self.roots.len()].as_raw_fd();
        let mut text = format!("/proc/self/fd/{root}/").into_bytes();
        for (index, &part) in path.iter().enumerate() {
            if index > 0 {
                text.push(b'/');
            }
            text.extend(step::name(part));
        }
        text
    }

    fn path(&self, client: usize, path: &Path) -> CString {
        CString::new(self.text(client, path)).expect("no name in the pool has a NUL")
    }

    fn fd(&self, slot: u8) -> Option<RawFd> {
        self.slots[usize::from(slot) % SLOTS].as_ref().map(|slot| slot.fd.as_raw_fd())
    }

    fn run(&mut self, step: &Step) -> Answer {
        let who = step::identity(step.who);
        let client = usize::from(step.client) % self.roots.len();
        let _acting = Acting::as_identity(&who);
        match &step.action {
            Action::Open { path, flags, slot } => self.open(client, path, *flags, 0, *slot),
            Action::Create { path, flags, mode, exclusive, slot } => {
                let exclusive = if *exclusive { libc::O_EXCL } else { 0 };
                let flags = flags | libc::O_CREAT | exclusive;
                self.open(client, path, flags, *mode, *slot)
            }
            Action::Tmpfile { dir, mode, slot } => {
                self.open(client, dir, libc::O_TMPFILE | libc::O_RDWR, *mode, *slot)
            }
            Action::Close { slot } => {
                let old = self.slots[usize::from(*slot) % SLOTS].take();
                Ok(if old.is_some() { StepOutcome::Done } else { StepOutcome::NoSlot })
            }
            Action::LinkSlot { slot, to } => self.link_slot(*slot, to),
            action => match self.run_on_slot(action) {
                Some(answer) => answer,
                None => self.run_on_path(client, action),
            },
        }
    }

    fn open(&mut self, client: usize, path: &Path, flags: i32, mode: u32, slot: u8) -> Answer {
        let number = usize::from(slot) % SLOTS;
        let path = self.path(client, path);
        let exclusive = flags & (libc::O_CREAT | libc::O_EXCL) == libc::O_CREAT | libc::O_EXCL;
        if !exclusive && flags & libc::O_DIRECTORY == 0 && self.is_special(&path) {
            return Err(Errno::ENXIO);
        }
        let flags = flags | libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: `path` is a C string that outlives the call.
        let fd = check(unsafe { libc::open(path.as_ptr(), flags, mode) })?;
        // SAFETY: a new descriptor that nobody else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(fd as RawFd) };
        self.slots[number] = Some(Slot { client, fd });
        Ok(StepOutcome::Done)
    }

    /// Whether opening would mean a FIFO or a socket.
    fn is_special(&self, path: &CString) -> bool {
        let path = std::ffi::OsString::from_vec(path.as_bytes().to_vec());
        let kind = std::fs::symlink_metadata(path).map(|found| found.file_type());
        kind.is_ok_and(|kind| kind.is_fifo() || kind.is_socket())
    }

    fn link_slot(&self, slot: u8, to: &Path) -> Answer {
        let Some(slot) = &self.slots[usize::from(slot) % SLOTS] else {
            return Ok(StepOutcome::NoSlot);
        };
        // The kernel judges the link by the mode that it saw last (`may_linkat` in fs/namei.c). Of
        // set-id bits that a write through a mount has taken it hears at the next look.
        size_of(slot.fd.as_raw_fd())?;
        let from = CString::new(format!("/proc/self/fd/{}", slot.fd.as_raw_fd()));
        let from = from.map_err(|_| Errno::EINVAL)?;
        let (to, follow) = (self.path(slot.client, to), libc::AT_SYMLINK_FOLLOW);
        // SAFETY: both are C strings that outlive the call.
        done(unsafe {
            libc::linkat(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), follow)
        })
    }

    fn run_on_slot(&self, action: &Action) -> Option<Answer> {
        let (Action::Read { slot, .. }
        | Action::Write { slot, .. }
        | Action::Fsync { slot }
        | Action::Fstat { slot }
        | Action::Ftruncate { slot, .. }
        | Action::Fallocate { slot, .. }
        | Action::Seek { slot, .. }
        | Action::CopyRange { from: slot, .. }) = action
        else {
            return None;
        };
        let Some(fd) = self.fd(*slot) else {
            return Some(Ok(StepOutcome::NoSlot));
        };
        let to = match action {
            Action::CopyRange { to, .. } => match self.fd(*to) {
                Some(to) => to,
                None => return Some(Ok(StepOutcome::NoSlot)),
            },
            _ => fd,
        };
        Some(on_file(fd, to, action))
    }

    fn run_on_path(&self, client: usize, action: &Action) -> Answer {
        let path = |path: &Path| self.path(client, path);
        let at = libc::AT_FDCWD;
        // SAFETY (of all calls below): C strings that outlive the calls, and numbers.
        match action {
            Action::Mkdir { path: dir, mode } => {
                // SAFETY: as above.
                done(unsafe { libc::mkdir(path(dir).as_ptr(), *mode) })
            }
            Action::Mknod { path: node, mode } => {
                // SAFETY: as above.
                done(unsafe { libc::mknod(path(node).as_ptr(), *mode, 0) })
            }
            Action::Symlink { path: link, target } => {
                let target = step::NOWHERE[usize::from(*target) % step::NOWHERE.len()];
                let target = CString::new(target).map_err(|_| Errno::EINVAL)?;
                // SAFETY: as above.
                done(unsafe { libc::symlink(target.as_ptr(), path(link).as_ptr()) })
            }
            Action::Link { from, to } => {
                let (from, to) = (path(from), path(to));
                // SAFETY: as above.
                done(unsafe { libc::linkat(at, from.as_ptr(), at, to.as_ptr(), 0) })
            }
            Action::Unlink { path: file } => {
                // SAFETY: as above.
                done(unsafe { libc::unlink(path(file).as_ptr()) })
            }
            Action::Rmdir { path: dir } => {
                // SAFETY: as above.
                done(unsafe { libc::rmdir(path(dir).as_ptr()) })
            }
            Action::Rename { from, to, how } => {
                let flags = match how {
                    RenameHow::Replace => 0,
                    RenameHow::NoReplace => libc::RENAME_NOREPLACE,
                    RenameHow::Exchange => libc::RENAME_EXCHANGE,
                };
                self.look_at(client, from);
                self.look_at(client, to);
                let (from, to) = (path(from), path(to));
                // SAFETY: as above.
                done(unsafe {
                    libc::syscall(libc::SYS_renameat2, at, from.as_ptr(), at, to.as_ptr(), flags)
                })
            }
            Action::List { path } => self.list(client, path),
            Action::Readlink { path } => {
                let path = std::ffi::OsString::from_vec(self.text(client, path));
                let target = std::fs::read_link(path)?;
                Ok(StepOutcome::Bytes(target.into_os_string().into_vec()))
            }
            Action::Lstat { path } => {
                let text = std::ffi::OsString::from_vec(self.text(client, path));
                Ok(stat(&std::fs::symlink_metadata(text)?))
            }
            _ => self.run_on_attributes(client, action),
        }
    }

    /// Has the kernel look a path up outside of rename(2), as mv(1) does. Within it the kernel
    /// cannot give a directory that another mount has moved its new place in its tree, and says
    /// `ESTALE` (`__d_unalias` in fs/dcache.c). One mount alone is to do without.
    fn look_at(&self, client: usize, path: &Path) {
        if self.roots.len() > 1 {
            let text = std::ffi::OsString::from_vec(self.text(client, path));
            let _ = std::fs::symlink_metadata(text); // whatever is wrong, rename will say
        }
    }

    fn list(&self, client: usize, path: &Path) -> Answer {
        let path = std::ffi::OsString::from_vec(self.text(client, path));
        let mut names = BTreeMap::new();
        for entry in std::fs::read_dir(path)? {
            let entry = entry?;
            let kind = file_type(entry.file_type()?);
            if names.insert(entry.file_name().into_vec(), kind).is_some() {
                return Err(Errno::EUCLEAN); // listed twice
            }
        }
        Ok(StepOutcome::Names(names))
    }
}

fn on_file(fd: RawFd, to: RawFd, action: &Action) -> Answer {
    let offset = |value: u64| i64::try_from(value).map_err(|_| Errno::EINVAL);
    match *action {
        Action::Read { at, len, .. } => {
            let mut bytes = vec![0u8; len as usize];
            // SAFETY: room for `len` bytes.
            let count = check(unsafe {
                libc::pread(fd, bytes.as_mut_ptr().cast(), bytes.len(), offset(at)?) as i64
            })?;
            bytes.truncate(count as usize);
            Ok(StepOutcome::Bytes(bytes))
        }
        Action::Write { at, len, fill, .. } => {
            let bytes = step::pattern(fill, len);
            // SAFETY: a slice that outlives the call.
            let count = check(unsafe {
                libc::pwrite(fd, bytes.as_ptr().cast(), bytes.len(), offset(at)?) as i64
            })?;
            Ok(StepOutcome::Count(count as u64))
        }
        Action::Fsync { .. } => {
            // SAFETY: a number.
            done(unsafe { libc::fsync(fd) })
        }
        Action::Fstat { .. } => {
            let path = format!("/proc/self/fd/{fd}");
            Ok(stat(&std::fs::metadata(path)?))
        }
        Action::Ftruncate { size, .. } => {
            // SAFETY: numbers.
            done(unsafe { libc::ftruncate(fd, offset(size)?) })
        }
        Action::Fallocate { flags, at, len, .. } => {
            // SAFETY: numbers.
            done(unsafe { libc::fallocate(fd, flags, offset(at)?, offset(len)?) })
        }
        Action::Seek { at, hole, .. } => {
            let whence = if hole { libc::SEEK_HOLE } else { libc::SEEK_DATA };
            // SAFETY: numbers.
            let found = check(unsafe { libc::lseek(fd, offset(at)?, whence) })?;
            Ok(StepOutcome::Count(found as u64))
        }
        Action::CopyRange { at, to_at, len, .. } => {
            let copied = copy_whole((fd, offset(at)?), (to, offset(to_at)?), len)?;
            Ok(StepOutcome::Count(copied))
        }
        _ => Err(Errno::ENOSYS),
    }
}

/// Looks at an open file: its size, bytes.
fn size_of(fd: RawFd) -> Result<u64, Errno> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: a descriptor, and room for what is written.
    check(unsafe { libc::fstat(fd, stat.as_mut_ptr()) })?;
    // SAFETY: filled by the call, which succeeded.
    Ok(unsafe { stat.assume_init() }.st_size as u64)
}

/// Copies all that there is: file systems that share blocks copy whole ones first, and stop.
fn copy_whole(
    (from, mut at): (RawFd, i64),
    (to, mut to_at): (RawFd, i64),
    len: u64,
) -> Result<u64, Errno> {
    // The kernel clamps the length at the size that it last heard of, before it asks anybody;
    // another mount may have written since. Looking makes it ask, as cp does.
    let size = size_of(from)?;
    // No more than there was: the file may be copied to its own end.
    let whole = len.min(size.saturating_sub(at as u64));
    let (mut copied, mut left) = (0, len);
    loop {
        // SAFETY: the offsets outlive the call.
        let result = check(unsafe {
            libc::copy_file_range(from, &mut at, to, &mut to_at, left as usize, 0) as i64
        });
        match result {
            Err(errno) if copied == 0 => return Err(errno),
            Ok(0) | Err(_) => return Ok(copied),
            Ok(count) => copied += count as u64,
        }
        if copied >= whole {
            return Ok(copied);
        }
        left = whole - copied;
    }
}

fn file_type(kind: std::fs::FileType) -> FileType {
    if kind.is_dir() {
        FileType::Directory
    } else if kind.is_symlink() {
        FileType::Symlink
    } else if kind.is_fifo() {
        FileType::Fifo
    } else if kind.is_socket() {
        FileType::Socket
    } else {
        FileType::Regular
    }
}

fn stat(found: &std::fs::Metadata) -> StepOutcome {
    StepOutcome::Stat(ModelStat {
        mode: found.mode(),
        nlink: found.nlink() as u32,
        uid: found.uid(),
        gid: found.gid(),
        size: if found.is_dir() { 0 } else { found.len() },
        mtime_sec: Some(found.mtime()),
    })
}

impl StepTarget for PathTarget {
    fn quirks(&self) -> Quirks {
        self.quirks
    }

    /// Copies between two mounts, which the kernel refuses with `EXDEV`.
    fn skips(&self, step: &Step) -> bool {
        let Action::CopyRange { from, to, .. } = step.action else {
            return false;
        };
        let client = |slot: u8| self.slots[usize::from(slot) % SLOTS].as_ref().map(|s| s.client);
        matches!((client(from), client(to)), (Some(from), Some(to)) if from != to)
    }

    fn prepare(&mut self) -> Fut<'_, Result<(), String>> {
        // SAFETY: numbers.
        let result = done(unsafe { libc::fchmod(self.roots[0].as_raw_fd(), 0o777) });
        Box::pin(std::future::ready(result.map(|_| ()).map_err(|errno| errno.to_string())))
    }

    fn apply<'a>(&'a mut self, step: &'a Step) -> Fut<'a, StepOutcome> {
        Box::pin(std::future::ready(self.run(step).unwrap_or_else(StepOutcome::Failed)))
    }
}
