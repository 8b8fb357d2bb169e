//! What waits for a disk waits on no thread that serves others. The tests run here on a file system
//! that is frozen (fsfreeze(8)), where every change waits until it is thawed.

use std::os::fd::AsRawFd;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::task::{Context as Task, Waker};
use std::time::Duration;

use dray_backends::posix::{self, PosixFs, PosixOptions};
use dray_core::*;

use crate::rig::*;

/// `_IOWR('X', 119, int)` and `_IOWR('X', 120, int)` of linux/fs.h.
const FIFREEZE: libc::c_ulong = 0xc004_5877;
const FITHAW: libc::c_ulong = 0xc004_5878;

/// "For ever".
const LIMIT: Duration = Duration::from_secs(60);

/// Stands still until this is dropped.
struct Frozen(std::fs::File);

impl Frozen {
    fn new(at: &Path) -> Frozen {
        posix::release().unwrap();
        let root = std::fs::File::open(at).unwrap();
        // SAFETY: the argument is not used.
        let frozen = unsafe { libc::ioctl(root.as_raw_fd(), FIFREEZE, 0) };
        assert_eq!(frozen, 0, "{}", std::io::Error::last_os_error());
        Frozen(root)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { libc::ioctl(self.0.as_raw_fd(), FITHAW, 0) };
    }
}

/// Does `begun` and then `meanwhile` on a thread of an executor, over a file system that is frozen
/// in between. It is thawed when `meanwhile` has ended, or should have.
fn frozen_between<T: Send>(
    disk: &Disk,
    prepare: impl AsyncFn() -> T + Send,
    meanwhile: impl AsyncFn(T) -> Vec<dray_rt::Join<()>> + Send,
) {
    let ((is_ready, ready), (freezes, is_frozen)) = (channel(), channel::<()>());
    let ((ends, has_ended), (thaws, is_thawed)) = (channel(), channel::<()>());
    std::thread::scope(|scope| {
        let serving = scope.spawn(move || {
            block_on(async {
                let prepared = prepare().await;
                is_ready.send(()).unwrap();
                is_frozen.recv().unwrap();
                let waiting = meanwhile(prepared).await;
                ends.send(()).unwrap();
                is_thawed.recv().unwrap();
                for one in waiting {
                    one.await.unwrap();
                }
            });
        });
        ready.recv().unwrap();
        let frozen = Frozen::new(&disk.path);
        freezes.send(()).unwrap();
        let held_up = has_ended.recv_timeout(LIMIT).is_err();
        drop(frozen);
        let _ = thaws.send(()); // it has panicked
        let ended = serving.join();
        assert!(!held_up, "the thread that serves others waited for the disk");
        ended.unwrap();
    });
}

fn spawn(change: impl Future<Output = Result<()>> + Send + 'static) -> dray_rt::Join<()> {
    dray_rt::spawn_join(async move { change.await.unwrap() })
}

struct Prepared {
    fs: Arc<PosixFs>,
    root: FileId,
    /// "f", which is changed, and "g", which others have to do with.
    f: (FileId, Arc<dyn OpenFile>),
    g: (FileId, Arc<dyn OpenFile>),
    /// Open, and without a name.
    nameless: Arc<dyn OpenFile>,
}

async fn prepare(path: &Path, options: PosixOptions) -> Prepared {
    let (fs, cx) = (export(path, options), user(0, 0, &[]));
    let root = fs.info().root;
    let make = async |n: &str| {
        let (entry, file) = fs.create(&cx, root, name(n), create_how(0o644)).await.unwrap();
        put(&cx, &*file, 0, &[7; 8192]).await.unwrap();
        (entry.id, file)
    };
    let (f, g, nameless) = (make("f").await, make("g").await, make("nameless").await.1);
    for dir in ["removed", "renamed"] {
        fs.make(&cx, root, name(dir), Make::Directory { mode: 0o755 }).await.unwrap();
    }
    make("other").await;
    fs.remove(&cx, root, name("nameless"), RemoveKind::File).await.unwrap();
    fs.sync_all(&cx).await.unwrap();
    Prepared { fs, root, f, g, nameless }
}

const CHANGES: [&str; 15] = [
    "write and sync",
    "allocate",
    "copy",
    "cut",
    "cut by id",
    "mode",
    "open to cut",
    "create to cut",
    "create",
    "make",
    "remove",
    "rename",
    "link",
    "xattr",
    "close",
];
const WRITES: [&str; 2] = ["write", "append"];

/// Begins each of these changes in a task of its own.
fn begin(with: &Prepared, ops: &[&'static str]) -> Vec<dray_rt::Join<()>> {
    let begin = |op: &&'static str| {
        let (fs, op, root, id) = (with.fs.clone(), *op, with.root, with.f.0);
        let files = (with.f.1.clone(), with.g.1.clone(), with.nameless.clone());
        spawn(async move {
            match op {
                "cut by id" | "mode" | "open to cut" | "link" | "xattr" => {
                    change_by_id(&fs, op, id).await
                }
                "create to cut" | "create" | "make" | "remove" | "rename" => {
                    change_names(&fs, op, root).await
                }
                _ => change_open(op, (&*files.0, &*files.1, &*files.2)).await,
            }
        })
    };
    ops.iter().map(begin).collect()
}

const CUT: SetAttr = SetAttr { size: Some(100), ..NOTHING };
const NOTHING: SetAttr = SetAttr {
    mode: None,
    uid: None,
    gid: None,
    size: None,
    atime: None,
    mtime: None,
    kill_set_id: false,
};

async fn change_open(
    op: &str,
    (file, other, nameless): (&dyn OpenFile, &dyn OpenFile, &dyn OpenFile),
) -> Result<()> {
    let (cx, data) = (user(0, 0, &[]), Buf::from(&b"new"[..]));
    match op {
        "write" => file.write(&cx, Write::at(0), data).await.map(drop),
        "append" => file.write(&cx, Write { append: true, ..Write::at(0) }, data).await.map(drop),
        "write and sync" => {
            file.write(&cx, Write { sync: true, ..Write::at(8192) }, data).await.map(drop)
        }
        "allocate" => file.allocate(&cx, Allocate { flags: 0, at: 8192, len_bytes: 4096 }).await,
        "copy" => file.copy_range(&cx, 0, other, 100_000, 4096).await.map(drop),
        "cut" => file.setattr(&cx, CUT).await.map(drop),
        "close" => nameless.close(&cx).await,
        _ => unreachable!("{op}"),
    }
}

const CUTS: i32 = libc::O_RDWR | libc::O_TRUNC;

async fn change_by_id(fs: &PosixFs, op: &str, id: FileId) -> Result<()> {
    let (cx, root) = (user(0, 0, &[]), fs.info().root);
    match op {
        "cut by id" => fs.setattr(&cx, id, CUT).await.map(drop),
        "mode" => fs.setattr(&cx, id, SetAttr { mode: Some(0o600), ..NOTHING }).await.map(drop),
        "open to cut" => fs.open(&cx, id, OpenHow::new(CUTS)).await?.close(&cx).await,
        "link" => fs.link(&cx, id, root, name("link")).await.map(drop),
        "xattr" => fs.setxattr(&cx, id, b"user.x", b"1", XattrSet::Any).await,
        _ => unreachable!("{op}"),
    }
}

async fn change_names(fs: &PosixFs, op: &str, dir: FileId) -> Result<()> {
    let cx = user(0, 0, &[]);
    match op {
        "create to cut" => {
            let open = OpenHow::new(CUTS);
            let how = CreateHow { open, mode: 0o600, exclusive: false };
            fs.create(&cx, dir, name("other"), how).await?.1.close(&cx).await
        }
        "create" => fs.create(&cx, dir, name("new"), create_how(0o600)).await?.1.close(&cx).await,
        "make" => fs.make(&cx, dir, name("dir"), Make::Directory { mode: 0o755 }).await.map(drop),
        "remove" => fs.remove(&cx, dir, name("removed"), RemoveKind::Directory).await,
        "rename" => {
            let (from, to) = ((dir, name("renamed")), (dir, name("renamed as well")));
            fs.rename(&cx, from, to, RenameHow::Replace).await
        }
        _ => unreachable!("{op}"),
    }
}

/// What another client does meanwhile.
async fn look(with: &Prepared) {
    let cx = Context { holder: HolderId(2), ..user(0, 0, &[]) };
    let entry = with.fs.lookup(&cx, with.root, name("g")).await.unwrap();
    assert_eq!(entry.id, with.g.0);
    with.fs.getattr(&cx, with.root).await.unwrap();
    with.fs.statfs(&cx).await.unwrap();
    with.fs.access(&cx, with.g.0, Access(4)).await.unwrap();
    let opened = with.fs.open(&cx, with.g.0, OpenHow::READ).await.unwrap();
    assert_eq!(get(&cx, &*opened, 0, 100).await.unwrap(), [7; 100]);
    opened.close(&cx).await.unwrap();
}

/// All connections of a serving thread waited for whatever one of them wrote, made, removed, cut or
/// closed on a disk.
// proves: P110
#[test]
fn what_waits_for_a_disk_keeps_no_thread_that_serves_others() {
    for kind in [Kind::Ext4, Kind::Xfs, Kind::Btrfs] {
        let Some(disk) = Disk::new(kind, 128) else { continue };
        eprintln!("on {kind:?}");
        frozen_between(
            &disk,
            async || prepare(&disk.path, plain()).await,
            async |with| {
                let mut changes = begin(&with, &CHANGES);
                dray_rt::yield_now().await;
                look(&with).await;
                // XFS takes what needs no waiting at once, but on a frozen one the kernel waits in
                // any case. So not as long as others are seen to wait.
                dray_rt::sleep(Duration::from_millis(50)).await;
                changes.append(&mut begin(&with, &WRITES));
                dray_rt::yield_now().await;
                look(&with).await;
                changes
            },
        );
    }
}

/// The kernel frees the data of a file without a name with its last descriptor.
// proves: P110
#[test]
fn closing_what_has_no_name_keeps_no_thread_that_serves_others() {
    let Some(disk) = Disk::new(Kind::Ext4, 64) else { return };
    frozen_between(
        &disk,
        async || prepare(&disk.path, plain()).await,
        async |with| {
            let closing = begin(&with, &["close"]);
            dray_rt::yield_now().await;
            look(&with).await;
            closing
        },
    );
}

/// One client's writes kept all threads, and the next one had none.
// proves: P110
#[test]
fn a_client_whose_writes_wait_leaves_threads_to_others() {
    let Some(disk) = Disk::new(Kind::Ext4, 64) else { return };
    let options = PosixOptions { threads_max: 4, ..plain() };
    frozen_between(
        &disk,
        async || {
            let with = prepare(&disk.path, options.clone()).await;
            let cx = user(0, 0, &[]);
            let mut files = Vec::new();
            for number in 0..20 {
                let n = number.to_string();
                let how = create_how(0o644);
                files.push(with.fs.create(&cx, with.root, name(&n), how).await.unwrap().1);
            }
            with.fs.sync_all(&cx).await.unwrap();
            (with, files)
        },
        async |(with, files)| {
            let write = |file: &Arc<dyn OpenFile>| {
                let (file, cx) = (file.clone(), user(0, 0, &[]));
                spawn(async move { put(&cx, &*file, 0, b"new").await.map(drop) })
            };
            let waiting: Vec<_> = files.iter().map(write).collect();
            dray_rt::yield_now().await;
            // A write to a file that is open for reading fails at once, on a thread of the same
            // kind.
            let cx = Context { holder: HolderId(2), ..user(0, 0, &[]) };
            let read_only = with.fs.open(&cx, with.g.0, OpenHow::READ).await.unwrap();
            assert_eq!(errno(put(&cx, &*read_only, 0, b"x").await), Errno::EBADF);
            waiting
        },
    );
}

/// The kernel frees the data of a large file behind the answer to its removal.
// proves: D1
#[test]
fn space_of_what_was_removed_is_there_for_the_next_write() {
    const MIB: usize = 1 << 20;
    on_each(&[Kind::Tmpfs], async |kit| {
        let (cx, data) = (&kit.root_user, vec![1; MIB]);
        for _ in 0..10 {
            let (_, file) = kit.create(cx, kit.root, "large", 0o600).await.unwrap();
            for at in 0..40 {
                let mut written = 0;
                while written < MIB {
                    let at = at * MIB + written;
                    written += put(cx, &*file, at as u64, &data[written..]).await.unwrap();
                }
            }
            kit.unlink(cx, kit.root, "large").await.unwrap();
            file.close(cx).await.unwrap();
        }
        // Nothing of it was waited for here.
        let mut closing = pin!(kit.fs.statfs(cx));
        assert!(closing.as_mut().poll(&mut Task::from_waker(Waker::noop())).is_ready());
    });
}
