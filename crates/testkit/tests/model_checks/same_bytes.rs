//! Sessions that want the same bytes at the same time, of a server whose threads serve one each.
//! The file systems below copy page by page, so that the server has to keep their calls apart.
//!
//! Needs root, mkfs.ext4, mkfs.xfs and mkfs.btrfs; what is missing is said and left out.

use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use dray_backends::posix::{Inline, PosixFs, PosixOptions, Squash, release};
use dray_core::{
    Buf, BufMut, Context, CreateHow, FileSystem, FsUuid, IO_MAX_BYTES, Name, OpenFile, OpenHow,
    Write,
};
use dray_testkit::fixture::{Ext4, Image, TempDir, Tmpfs, block_on, skipped_without_root};

use crate::site::{IdleObserver, on_a_socket_of, server_of};

const DISK_BYTES: u64 = 64 << 20;
const NAME: &[u8] = b"file";

/// A mount as those of the fixture are, as long as it is wanted.
type Disk = Box<dyn AsRef<Path>>;

struct Mounted<T>(T, fn(&T) -> &Path);

impl<T> AsRef<Path> for Mounted<T> {
    fn as_ref(&self) -> &Path {
        (self.1)(&self.0)
    }
}

/// A file system of each kind that can be had here.
fn disks() -> Vec<(&'static str, Disk)> {
    if skipped_without_root() {
        return Vec::new();
    }
    fn disk<T: 'static>(made: io::Result<T>, path: fn(&T) -> &Path) -> io::Result<Disk> {
        Ok(Box::new(Mounted(made?, path)))
    }
    let disks = [
        ("tmpfs", disk(Tmpfs::new(DISK_BYTES), Tmpfs::path)),
        ("ext4", disk(Ext4::new(DISK_BYTES, ""), Ext4::path)),
        ("xfs", disk(Image::xfs(), Image::path)),
        ("btrfs", disk(Image::btrfs(), Image::path)),
    ];
    let had = |(kind, disk): (&'static str, io::Result<Disk>)| match disk {
        Ok(disk) => Some((kind, disk)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            eprintln!("skipped: {kind}: {error}");
            None
        }
        Err(error) => panic!("{kind}: {error}"),
    };
    disks.into_iter().filter_map(had).collect()
}

/// Runs `work` in so many threads, with a session of each, and the file open in it. Answers what is in
/// the file in the end.
fn at_once(
    root: &Path,
    inline: Inline,
    count: u8,
    work: impl AsyncFn(u8, Arc<dyn OpenFile>) + Sync,
) -> Vec<u8> {
    let options = PosixOptions { inline, squash: Squash::None, ..PosixOptions::default() };
    let fs = PosixFs::open(root, FsUuid(7), options).unwrap();
    let (cx, name) = (Context::system(), Name::new(NAME).unwrap());
    let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o666, exclusive: true };
    let id = block_on(fs.create(&cx, fs.info().root, name, how)).unwrap().0.id;
    let server = server_of(fs.clone());
    std::thread::scope(|scope| {
        for number in 0..count {
            let (server, work) = (&server, &work);
            scope.spawn(move || {
                block_on(async {
                    let dir = TempDir::new("same-bytes").unwrap();
                    let idle = Arc::new(IdleObserver::default());
                    let clients = on_a_socket_of(dir.path(), server, 1, &idle).await;
                    let cx = Context::system();
                    let file = clients[0].open(&cx, id, OpenHow::READ_WRITE).await.unwrap();
                    work(number, file).await;
                })
            });
        }
    });
    release().unwrap();
    let content = std::fs::read(root.join("file")).unwrap();
    std::fs::remove_file(root.join("file")).unwrap();
    content
}

// proves: P17
#[test]
fn a_read_sees_all_of_a_write_or_nothing() {
    const ROUNDS: u8 = 60;
    for (kind, disk) in disks() {
        let at_the_end = at_once((*disk).as_ref(), Inline::Auto, 3, async |number, file| {
            let cx = Context::system();
            for round in 1..=ROUNDS {
                if number == 0 {
                    let data = Buf::from(vec![round; IO_MAX_BYTES]);
                    let written = file.write(&cx, Write::at(0), data).await;
                    assert_eq!(written.unwrap(), IO_MAX_BYTES);
                } else {
                    let seen = file.read(&cx, 0, BufMut::heap(IO_MAX_BYTES)).await;
                    let seen = seen.map_err(|(error, _)| error).unwrap();
                    let is_whole = seen.filled().iter().all(|byte| *byte == seen.filled()[0]);
                    assert!(is_whole, "{kind}: a torn read");
                }
            }
        });
        assert!(at_the_end == vec![ROUNDS; IO_MAX_BYTES], "{kind}");
    }
}

// proves: P19
#[test]
fn appends_do_not_mix() {
    const RECORD_BYTES: usize = 5000;
    const RECORDS: usize = 100;
    for (kind, disk) in disks() {
        for inline in [Inline::Auto, Inline::Never] {
            let content = at_once((*disk).as_ref(), inline, 4, async |number, file| {
                let record = Buf::from(vec![number + 1; RECORD_BYTES]);
                for _ in 0..RECORDS {
                    let how = Write { append: true, at: 12345, ..Write::default() };
                    let written = file.write(&Context::system(), how, record.clone()).await;
                    assert_eq!(written.unwrap(), RECORD_BYTES);
                }
            });
            assert_eq!(content.len(), 4 * RECORDS * RECORD_BYTES, "{kind}");
            let mut counts = [0; 5];
            for record in content.chunks(RECORD_BYTES) {
                assert!(record.iter().all(|byte| *byte == record[0]), "{kind}");
                counts[usize::from(record[0])] += 1;
            }
            assert_eq!(counts, [0, RECORDS, RECORDS, RECORDS, RECORDS], "{kind}");
        }
    }
}

/// `_IOWR('X', 119, int)` and `_IOWR('X', 120, int)` of linux/fs.h: fsfreeze(8).
const FIFREEZE: libc::c_ulong = 0xc004_5877;
const FITHAW: libc::c_ulong = 0xc004_5878;

/// A file system on which every change waits until this is dropped.
struct Frozen(std::fs::File);

impl Frozen {
    fn new(at: &Path) -> Frozen {
        let root = std::fs::File::open(at).unwrap();
        // SAFETY: the argument is not used.
        let frozen = unsafe { libc::ioctl(root.as_raw_fd(), FIFREEZE, 0) };
        assert_eq!(frozen, 0, "{}", io::Error::last_os_error());
        Frozen(root)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { libc::ioctl(self.0.as_raw_fd(), FITHAW, 0) };
    }
}

async fn three_bytes(file: Arc<dyn OpenFile>) -> Vec<u8> {
    let read = file.read(&Context::system(), 0, BufMut::heap(3)).await;
    read.map_err(|(error, _)| error).unwrap().filled().to_vec()
}

/// A server of one thread, and of two for each kind of calls that wait for the disk. `is_frozen`
/// says when the disk stands still; `ends` is notified when somebody has read what nobody writes to.
async fn write_and_read_beside(
    root: &Path,
    is_ready: impl Fn(),
    is_frozen: impl Fn(),
    ends: impl Fn(),
) {
    let options = PosixOptions {
        inline: Inline::Never,
        threads_max: 2,
        squash: Squash::None,
        ..PosixOptions::default()
    };
    let (fs, dir) = (PosixFs::open(root, FsUuid(7), options).unwrap(), TempDir::new("s").unwrap());
    let idle = Arc::new(IdleObserver::default());
    let clients = on_a_socket_of(dir.path(), &server_of(fs), 2, &idle).await;
    let (cx, top) = (Context::system(), clients[0].info().root);
    let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o666, exclusive: true };
    let mut files = Vec::new();
    for name in ["f", "g"] {
        let name = Name::new(name.as_bytes()).unwrap();
        let (_, file) = clients[0].create(&cx, top, name, how).await.unwrap();
        file.write(&cx, Write::at(0), Buf::from(&b"old"[..])).await.unwrap();
        files.push(file);
    }
    let theirs = clients[1].open(&cx, files[0].id(), OpenHow::READ).await.unwrap();
    release().unwrap();
    is_ready();
    is_frozen();
    let writing = dray_rt::spawn_join({
        let file = files[0].clone();
        let new = Buf::from(&b"new"[..]);
        async move { file.write(&Context::system(), Write::at(0), new).await.unwrap() }
    });
    dray_rt::sleep(Duration::from_millis(100)).await;
    let reading: Vec<_> =
        (0..20).map(|_| dray_rt::spawn_join(three_bytes(theirs.clone()))).collect();
    dray_rt::sleep(Duration::from_millis(100)).await;
    assert_eq!(three_bytes(files[1].clone()).await, b"old");
    ends();
    assert_eq!(writing.await.unwrap(), 3);
    for read in reading {
        assert_eq!(read.await.unwrap(), b"new");
    }
}

/// A call that waited for a range under change kept one of the few threads. Other calls had none to
/// read bytes that nobody writes to.
// proves: P110
#[test]
fn waiting_for_a_range_keeps_no_thread() {
    if skipped_without_root() {
        return;
    }
    let disk = Ext4::new(DISK_BYTES, "").unwrap();
    let ((readies, ready), (freezes, is_frozen)) = (channel(), channel::<()>());
    let (ends, has_ended) = channel();
    std::thread::scope(|scope| {
        let path = disk.path();
        let serving = scope.spawn(move || {
            block_on(write_and_read_beside(
                path,
                || readies.send(()).unwrap(),
                || is_frozen.recv().unwrap(),
                || ends.send(()).unwrap(),
            ));
        });
        ready.recv().unwrap();
        let frozen = Frozen::new(path);
        freezes.send(()).unwrap();
        let held_up = has_ended.recv_timeout(Duration::from_secs(60)).is_err();
        drop(frozen);
        assert!(!held_up, "others waited for the disk");
        serving.join().unwrap();
    });
}
