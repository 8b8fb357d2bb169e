//! File systems in files, to be mounted where and when a test wants.

use std::cell::RefCell;
use std::ffi::CString;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::wait_for;

/// A file system of its own, with a uuid of its own.
pub struct Disk {
    dir: tempfile::TempDir,
    kind: &'static str,
    /// Where it may be mounted.
    places: RefCell<Vec<PathBuf>>,
}

impl Disk {
    /// Makes one. None where this machine has no such thing, which is said.
    pub fn new(kind: &'static str) -> Option<Disk> {
        let dir = tempfile::Builder::new().prefix("dray-disk-").tempdir().unwrap();
        let image = dir.path().join("image");
        File::create(&image).unwrap().set_len(300 << 20).unwrap();
        let made = Command::new(format!("mkfs.{kind}")).arg("-q").arg(&image).output();
        if !made.is_ok_and(|output| output.status.success()) {
            eprintln!("left out: mkfs.{kind} is not there");
            return None;
        }
        Some(Disk { dir, kind, places: RefCell::default() })
    }

    /// Mounts it. What was mounted there before, and is still in use by somebody, may keep it from that
    /// for a while.
    pub fn mount(&self, at: &Path) {
        self.places.borrow_mut().push(at.to_owned());
        wait_for("a disk to be mounted", || self.try_mount(at, "loop"));
    }

    /// The same with other options.
    pub fn mount_with(&self, at: &Path, options: &str) {
        self.places.borrow_mut().push(at.to_owned());
        wait_for("a disk to be mounted", || self.try_mount(at, &format!("loop,{options}")));
    }

    fn try_mount(&self, at: &Path, options: &str) -> bool {
        let mut mount = Command::new("mount");
        mount.args(["-t", self.kind, "-o", options]).arg(self.dir.path().join("image")).arg(at);
        mount.output().unwrap().status.success()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.places.borrow().iter().rev().for_each(|at| detach(at));
    }
}

/// A file system in memory that is soon full, for as long as a test takes.
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Mounts it at a directory that is made. `size` as mount(8) has it. None where nothing can be mounted, which is said.
    pub fn mount(at: PathBuf, size: &str) -> Option<SmallDisk> {
        fs::create_dir(&at).unwrap();
        let options = format!("size={size},mode=700");
        let made =
            Command::new("mount").args(["-t", "tmpfs", "-o", &options, "none"]).arg(&at).output();
        if !made.is_ok_and(|output| output.status.success()) {
            eprintln!("left out: no tmpfs can be mounted");
            return None;
        }
        Some(SmallDisk(at))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        detach(&self.0);
    }
}

/// As `umount -l`; what is not mounted stays so.
pub fn detach(at: &Path) {
    let path = CString::new(at.as_os_str().as_bytes()).unwrap();
    // SAFETY: the C string outlives the call.
    unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
}

/// As umount(8): it is not in use.
pub fn unmount(at: &Path) {
    let path = CString::new(at.as_os_str().as_bytes()).unwrap();
    // SAFETY: as above. Children that other tests are just starting may have inherited a file of it.
    wait_for("an unmount", || unsafe { libc::umount2(path.as_ptr(), 0) } == 0);
}

/// A directory on a disk, on which another disk is to be mounted: as a server's own tree, and a mount
/// point in it.
pub struct Places {
    /// On the disk of the server.
    pub own: PathBuf,
    /// The mount point.
    pub at: PathBuf,
    _disk: Disk,
}

impl Places {
    pub fn new(kind: &'static str, below: &Path) -> Option<Places> {
        let disk = Disk::new(kind)?;
        let own = below.join("own");
        fs::create_dir(&own).unwrap();
        disk.mount(&own);
        fs::write(own.join("secret"), "the server's own").unwrap();
        let at = own.join("at");
        fs::create_dir(&at).unwrap();
        Some(Places { own, at, _disk: disk })
    }
}
