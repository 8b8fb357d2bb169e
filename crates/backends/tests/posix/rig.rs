//! A directory of some file system, exported, and what a client does with it.

use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use dray_backends::posix::{self, PosixFs, PosixOptions, Squash};
use dray_core::*;
use dray_rt::{DriverKind, Executor};

/// File systems to test on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Tmpfs,
    /// Has no handles that the backend knows: the path table. What is in it goes with the mount.
    Ramfs,
    /// This and the next two on a loop device.
    Ext4,
    Xfs,
    Btrfs,
    /// tmpfs below an overlay without handles: the path table.
    Overlay,
    /// The same, and what it copies of a file that has several names has all of them.
    OverlayOfLinks,
}

impl Kind {
    /// Kinds of file systems whose handles are ids.
    pub const NATIVE: [Kind; 4] = [Kind::Tmpfs, Kind::Ext4, Kind::Xfs, Kind::Btrfs];
    pub const ALL: [Kind; 5] = [Kind::Tmpfs, Kind::Ext4, Kind::Xfs, Kind::Btrfs, Kind::Overlay];
}

/// A mounted file system, unmounted and removed when it is dropped.
pub struct Disk {
    base: PathBuf,
    pub path: PathBuf,
    mounts: Vec<PathBuf>,
}

fn run(program: &str, args: &[&str]) -> bool {
    Command::new(program).args(args).output().is_ok_and(|output| output.status.success())
}

/// Gives the thread a mount namespace of its own: what it mounts goes with it, whatever
/// becomes of the process.
fn own_mounts() {
    let (root, none) = (c"/".as_ptr(), std::ptr::null());
    let private = libc::MS_REC | libc::MS_PRIVATE;
    // SAFETY: the path is a literal, and no other argument is looked at.
    let own = unsafe {
        libc::unshare(libc::CLONE_NEWNS) == 0
            && libc::mount(none, root, none, private, none.cast()) == 0
    };
    assert!(own, "{}", std::io::Error::last_os_error());
    // Mounts of other tests live as long as one of their copies.
    let table = std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    for line in table.lines().filter(|line| line.contains(" - fuse.dray ")) {
        let at = CString::new(line.split(' ').nth(4).unwrap()).unwrap();
        // SAFETY: the path outlives the call. What others have taken away meanwhile is gone.
        unsafe { libc::umount2(at.as_ptr(), libc::MNT_DETACH) };
    }
}

impl Disk {
    /// None, with a reason printed, where it cannot be had.
    pub fn new(kind: Kind, mib: usize) -> Option<Disk> {
        posix::release().unwrap();
        // SAFETY: geteuid cannot fail.
        if unsafe { libc::geteuid() } != 0 {
            eprintln!("skipped: not root");
            return None;
        }
        own_mounts();
        let name = format!("dray-posix-{}-{:x}", std::process::id(), dray_rt::random_u64());
        let base = std::env::temp_dir().join(name);
        std::fs::create_dir(&base).unwrap();
        let path = base.join("fs");
        std::fs::create_dir(&path).unwrap();
        let mut disk = Disk { base, path, mounts: Vec::new() };
        let mounted = match kind {
            Kind::Tmpfs => disk.mount(&["-t", "tmpfs", "-o", &format!("size={mib}m"), "tmpfs"]),
            Kind::Ext4 => disk.mount_image(mib, &["mkfs.ext4", "-q", "-m", "0", "-N", "65536"]),
            Kind::Ramfs => disk.mount(&["-t", "ramfs", "ramfs"]),
            // The least that their mkfs takes.
            Kind::Xfs => disk.mount_image(mib.max(300), &["mkfs.xfs", "-q"]),
            Kind::Btrfs => disk.mount_image(mib.max(128), &["mkfs.btrfs", "-q"]),
            Kind::Overlay => disk.mount_overlay(mib, "index=off"),
            Kind::OverlayOfLinks => disk.mount_overlay(mib, "index=on"),
        };
        if !mounted {
            eprintln!("left out: {kind:?} cannot be mounted here");
            return None;
        }
        Some(disk)
    }

    fn mount(&mut self, args: &[&str]) -> bool {
        let path = self.path.clone();
        self.mount_at(args, path)
    }

    fn mount_at(&mut self, args: &[&str], path: PathBuf) -> bool {
        let mut args = args.to_vec();
        args.push(path.to_str().unwrap());
        let mounted = run("mount", &args);
        if mounted {
            self.mounts.push(path);
        }
        mounted
    }

    fn mount_image(&mut self, mib: usize, mkfs: &[&str]) -> bool {
        let image = self.base.join("image");
        let file = std::fs::File::create(&image).unwrap();
        file.set_len((mib as u64) << 20).unwrap();
        let image = image.to_str().unwrap().to_owned();
        run(mkfs[0], &[&mkfs[1..], &[&image]].concat()) && self.mount(&["-o", "loop", &image])
    }

    fn mount_overlay(&mut self, mib: usize, index: &str) -> bool {
        let below = self.base.join("below");
        std::fs::create_dir(&below).unwrap();
        let size = format!("size={mib}m");
        if !self.mount_at(&["-t", "tmpfs", "-o", &size, "tmpfs"], below.clone()) {
            return false;
        }
        for part in ["lower", "upper", "work"] {
            std::fs::create_dir(below.join(part)).unwrap();
        }
        let below = below.to_str().unwrap();
        let upper = format!("upperdir={below}/upper,workdir={below}/work");
        let options = format!("lowerdir={below}/lower,{upper},{index}");
        self.mount(&["-t", "overlay", "-o", &options, "overlay"])
    }

    /// Mounts another tmpfs on a directory of this file system.
    pub fn mount_inside(&mut self, name: &str) -> bool {
        let path = self.path.join(name);
        self.mount_at(&["-t", "tmpfs", "tmpfs"], path)
    }

    /// Mounts what is at `from`, both of them names in this file system, on `to`, too.
    pub fn bind_inside(&mut self, from: &str, to: &str) -> bool {
        let (from, to) = (self.path.join(from), self.path.join(to));
        self.mount_at(&["--bind", from.to_str().unwrap()], to)
    }

    /// Mounts a file system on `name` that answers nothing, until the file is closed.
    pub fn hang_inside(&self, name: &str) -> std::fs::File {
        use std::os::fd::AsRawFd;
        let mut options = std::fs::OpenOptions::new();
        let device = options.read(true).write(true).open("/dev/fuse").expect("/dev/fuse");
        let data = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
        let data = CString::new(data).unwrap();
        let at = CString::new(self.path.join(name).to_str().unwrap()).unwrap();
        let (none, kind) = (c"hangs".as_ptr(), c"fuse".as_ptr());
        // SAFETY: all strings outlive the call.
        let mounted = unsafe { libc::mount(none, at.as_ptr(), kind, 0, data.as_ptr().cast()) };
        assert_eq!(mounted, 0, "{}", std::io::Error::last_os_error());
        device
    }

    /// An ext4 without a journal on a disk that takes nothing more once [`Disk::break_down`] was
    /// called. None, with a reason printed, where it cannot be had.
    pub fn fragile() -> Option<Disk> {
        let mut disk = Disk::new(Kind::Tmpfs, 32)?;
        let (image, path) = (disk.path.join("image"), disk.base.join("fragile"));
        std::fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
        std::fs::create_dir(&path).unwrap();
        let image = image.to_str().unwrap();
        let mkfs = ["-q", "-O", "^has_journal", "-E", "lazy_itable_init=0", "-N", "64", image];
        if !run("mkfs.ext4", &mkfs) || !disk.mount_at(&["-o", "loop", image], path.clone()) {
            eprintln!("left out: no ext4 on a loop device of a tmpfs");
            return None;
        }
        disk.path = path;
        Some(disk)
    }

    /// An overlay of two ext4 that keep no times of birth, with `below` a tmpfs for what is
    /// changed. Each of the two has files of the same numbers, of its own names: `fill` makes them,
    /// given where and `one` or `two`. None, with a reason printed, where it cannot be had.
    pub fn of_two_devices(fill: impl Fn(&Path, &str)) -> Option<Disk> {
        let mut disk = Disk::new(Kind::Tmpfs, 64)?;
        let base = disk.path.clone();
        for layer in ["one", "two"] {
            let (image, path) = (base.join(format!("{layer}.image")), base.join(layer));
            std::fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
            std::fs::create_dir(&path).unwrap();
            let image = image.to_str().unwrap();
            let made = run("mkfs.ext4", &["-q", "-I", "128", "-N", "128", image]);
            if !made || !disk.mount_at(&["-o", "loop", image], path.clone()) {
                eprintln!("left out: no ext4 on a loop device of a tmpfs");
                return None;
            }
            std::fs::remove_dir(path.join("lost+found")).unwrap();
            fill(&path, layer);
        }
        for dir in ["upper", "work", "overlay"] {
            std::fs::create_dir(base.join(dir)).unwrap();
        }
        disk.path = base.join("overlay");
        if !disk.mount_two_devices("one:two") {
            eprintln!("left out: no overlay can be mounted here");
            return None;
        }
        Some(disk)
    }

    /// Mounts the overlay of [`Disk::of_two_devices`], of `layers` in this order.
    pub fn mount_two_devices(&mut self, layers: &str) -> bool {
        let base = self.base.join("fs");
        let base = base.to_str().unwrap();
        let layers: Vec<_> = layers.split(':').map(|layer| format!("{base}/{layer}")).collect();
        let upper = format!("upperdir={base}/upper,workdir={base}/work,xino=off,index=off");
        let options = format!("lowerdir={},{upper}", layers.join(":"));
        self.mount(&["-t", "overlay", "-o", &options, "overlay"])
    }

    /// The lower directory of an overlay.
    pub fn lower(&self) -> PathBuf {
        self.base.join("below/lower")
    }

    /// A file beside the disk.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.base.join(name)
    }

    /// From now on the disk of [`Disk::fragile`] takes no block that it has not taken before.
    pub fn break_down(&self) {
        posix::release().unwrap();
        let mut filler = std::fs::File::create(self.base.join("fs/filler")).unwrap();
        while std::io::Write::write_all(&mut filler, &[1; 4096]).is_ok() {}
    }

    /// The disk takes blocks again.
    pub fn mend(&self) {
        posix::release().unwrap();
        std::fs::remove_file(self.base.join("fs/filler")).unwrap();
    }

    /// Makes a further subvolume of a btrfs; whether that could be done.
    pub fn subvolume(&self, name: &str) -> bool {
        run("btrfs", &["subvolume", "create", self.path.join(name).to_str().unwrap()])
    }

    /// Limits what the subvolume of a btrfs takes; whether that could be done.
    pub fn limit(&self, bytes: usize) -> bool {
        let at = self.path.to_str().unwrap();
        run("btrfs", &["quota", "enable", at])
            && run("btrfs", &["qgroup", "limit", &bytes.to_string(), "0/5", at])
    }

    /// Lets the file system take no changes (`ro`), or take them again (`rw`); whether it did.
    pub fn remount(&self, how: &str) -> bool {
        posix::release().unwrap();
        run("mount", &["-o", &format!("remount,{how}"), self.path.to_str().unwrap()])
    }

    /// Takes away what was mounted last.
    pub fn unmount(&mut self) {
        posix::release().unwrap();
        let path = self.mounts.pop().unwrap();
        assert!(run("umount", &[path.to_str().unwrap()]));
    }

    /// Drops what the kernel caches, so that inodes are read anew.
    pub fn drop_caches(&self) {
        posix::release().unwrap();
        let _ = std::fs::write("/proc/sys/vm/drop_caches", "2");
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = posix::release();
        for path in self.mounts.iter().rev() {
            let path = CString::new(path.to_str().unwrap()).unwrap();
            // SAFETY: the path outlives the call.
            unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
        }
        let _ = std::fs::remove_dir_all(&self.base);
    }
}

pub const UUID: FsUuid = FsUuid(77);

/// The options most tests want.
pub fn plain() -> PosixOptions {
    PosixOptions { squash: Squash::None, ..PosixOptions::default() }
}

pub fn export(path: &Path, options: PosixOptions) -> Arc<PosixFs> {
    PosixFs::open(path, UUID, options).unwrap()
}

/// Runs a test's asynchronous part, then makes the thread the server's again.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    let value = Executor::new(DriverKind::Epoll).unwrap().block_on(future);
    posix::release().unwrap();
    value
}

/// Runs `test` on each kind of file system that can be had.
pub fn on_each(kinds: &[Kind], test: impl AsyncFn(&Kit)) {
    for kind in kinds {
        let Some(disk) = Disk::new(*kind, 64) else { continue };
        eprintln!("on {kind:?}");
        on(&disk, plain(), &test);
    }
}

/// Runs `test` on an export of `disk`.
pub fn on(disk: &Disk, options: PosixOptions, test: impl AsyncFn(&Kit)) {
    posix::release().unwrap();
    let fs = export(&disk.path, options);
    let kit = Kit { root: fs.info().root, fs, path: disk.path.clone(), root_user: user(0, 0, &[]) };
    block_on(test(&kit));
}

/// A user's context.
pub fn user(uid: u32, gid: u32, groups: &[u32]) -> Context {
    let groups = groups.iter().map(|gid| Gid(*gid)).collect();
    let who = Identity { uid: Uid(uid), gid: Gid(gid), groups, job: "".into() };
    Context::new(NodeId(1), RequestId(0), Arc::new(who), Pid(1))
}

pub fn name(name: &str) -> &Name {
    Name::new(name.as_bytes()).unwrap()
}

pub fn errno<T>(result: Result<T>) -> Errno {
    match result {
        Ok(_) => panic!("this should have failed"),
        Err(error) => error.errno(),
    }
}

pub fn create_how(mode: u32) -> CreateHow {
    CreateHow { open: OpenHow::READ_WRITE, mode, exclusive: true }
}

/// An export and short names for what tests do with it.
pub struct Kit {
    pub fs: Arc<PosixFs>,
    pub root: FileId,
    pub path: PathBuf,
    pub root_user: Context,
}

impl Kit {
    pub async fn mkdir(&self, cx: &Context, dir: FileId, n: &str, mode: u32) -> Result<Entry> {
        self.fs.make(cx, dir, name(n), Make::Directory { mode }).await
    }

    /// A directory in the root where everybody may do everything.
    pub async fn common(&self, n: &str) -> FileId {
        self.mkdir(&self.root_user, self.root, n, 0o777).await.unwrap().id
    }

    pub async fn create(
        &self,
        cx: &Context,
        dir: FileId,
        n: &str,
        mode: u32,
    ) -> Result<(Entry, Arc<dyn OpenFile>)> {
        self.fs.create(cx, dir, name(n), create_how(mode)).await
    }

    /// A file with this content.
    pub async fn file(&self, cx: &Context, dir: FileId, n: &str, mode: u32, data: &[u8]) -> FileId {
        let (entry, file) = self.create(cx, dir, n, mode).await.unwrap();
        put(cx, &*file, 0, data).await.unwrap();
        file.close(cx).await.unwrap();
        entry.id
    }

    pub async fn lookup(&self, cx: &Context, dir: FileId, n: &str) -> Result<Entry> {
        self.fs.lookup(cx, dir, name(n)).await
    }

    pub async fn unlink(&self, cx: &Context, dir: FileId, n: &str) -> Result<()> {
        self.fs.remove(cx, dir, name(n), RemoveKind::File).await
    }

    pub async fn rename(
        &self,
        cx: &Context,
        from: (FileId, &str),
        to: (FileId, &str),
        how: RenameHow,
    ) -> Result<()> {
        self.fs.rename(cx, (from.0, name(from.1)), (to.0, name(to.1)), how).await
    }
}

pub async fn put(cx: &Context, file: &dyn OpenFile, at: u64, data: &[u8]) -> Result<usize> {
    file.write(cx, Write::at(at), Buf::from(data)).await
}

pub async fn get(cx: &Context, file: &dyn OpenFile, at: u64, count: usize) -> Result<Vec<u8>> {
    let read = file.read(cx, at, BufMut::heap(count)).await.map_err(|(error, _)| error)?;
    Ok(read.filled().to_vec())
}
