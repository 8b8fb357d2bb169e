//! The content of files.

use std::io::Write as _;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::rig::*;
use dray_backends::posix::{self, Inline, PosixOptions};
use dray_core::*;

// proves: P21
#[test]
fn reads_and_writes_and_their_edges() {
    on_each(&Kind::ALL, async |kit| {
        let cx = user(1000, 1000, &[]);
        let dir = kit.common("d").await;
        let (entry, file) = kit.create(&cx, dir, "f", 0o600).await.unwrap();
        let data: Vec<u8> = (0..(1 << 20) + 4097u32).map(|at| ((at * 31) >> 3) as u8).collect();
        assert_eq!(put(&cx, &*file, 5000, &data).await.unwrap(), data.len());
        file.sync(&cx, true).await.unwrap();
        drop_pages(&kit.path.join("d/f"));
        assert_eq!(get(&cx, &*file, 5000, data.len() + 100).await.unwrap(), data);
        assert_eq!(get(&cx, &*file, 0, 5000).await.unwrap(), [0; 5000]);
        assert!(get(&cx, &*file, 1 << 40, 10).await.unwrap().is_empty());
        assert!(get(&cx, &*file, 0, 0).await.unwrap().is_empty());
        assert_eq!(put(&cx, &*file, 0, b"").await.unwrap(), 0);
        assert_eq!(errno(get(&cx, &*file, u64::MAX, 10).await), Errno::EINVAL);
        assert_eq!(errno(put(&cx, &*file, u64::MAX, b"x").await), Errno::EFBIG);
        let dir = kit.fs.open(&cx, dir, OpenHow::DIRECTORY).await.unwrap();
        assert_eq!(errno(get(&cx, &*dir, 0, 10).await), Errno::EISDIR);
        assert_eq!(errno(file.readdir(&cx, 0, 100, false).await), Errno::ENOTDIR);
        let synced = Write { sync: true, ..Write::at(1) };
        file.write(&cx, synced, Buf::from(&b"s"[..])).await.unwrap();
        file.sync(&cx, false).await.unwrap();
        assert_eq!(kit.fs.getattr(&cx, entry.id).await.unwrap().size, 5000 + data.len() as u64);
    });
}

/// A small call waited for the copy of 1 MiB.
// proves: P356
#[test]
fn large_writes_into_memory_let_other_calls_pass() {
    let Some(disk) = Disk::new(Kind::Tmpfs, 16) else { return };
    on(&disk, plain(), async |kit| {
        let cx = &kit.root_user;
        let (_, file) = kit.create(cx, kit.root, "f", 0o600).await.unwrap();
        let data: Vec<u8> = (0..1 << 20).map(|at: u32| ((at * 31) >> 3) as u8).collect();
        let mut other = user(1000, 1000, &[]);
        other.holder = HolderId(cx.holder.0 + 1);
        for (how, len, passes) in [
            // The server has this client alone.
            (Write::at(5), data.len(), 0),
            (Write::at(5), data.len(), 15),
            (Write::at(5), data.len() / 2 + 1, 8),
            (Write::at(5), 64 << 10, 0),
            (Write::at(5), 0, 0),
            // Processes of the server's machine append nothing in between.
            (Write { append: true, ..Write::at(0) }, data.len(), 0),
        ] {
            let mut write = file.write(cx, how, Buf::from(&data[..len]));
            let mut passed = 0;
            let written = std::future::poll_fn(|cx| {
                let written = write.as_mut().poll(cx);
                passed += u32::from(written.is_pending());
                written
            });
            assert_eq!((written.await.unwrap(), passed), (len, passes), "{how:?} of {len}");
            kit.fs.getattr(&other, kit.root).await.unwrap();
        }
        assert_eq!(get(cx, &*file, 5, data.len()).await.unwrap(), data);
        assert_eq!(get(cx, &*file, 5 + data.len() as u64, data.len() + 1).await.unwrap(), data);
    });
}

/// Has the kernel drop what it caches of a file, not of all: tests of others count what they cause.
fn drop_pages(path: &std::path::Path) {
    let file = posix::as_server(|| std::fs::File::open(path)).unwrap().unwrap();
    // SAFETY: no memory is passed, and the descriptor is open.
    let error = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    assert_eq!(error, 0);
}

/// Else a change could leave a file with the times that it had at an open. It could leave a client
/// that caches it with the pages of then.
// proves: P7
#[test]
fn no_change_gives_a_file_times_before_what_the_clock_shows() {
    on_each(&Kind::ALL, async |kit| {
        let cx = &kit.root_user;
        let (_, file) = kit.create(cx, kit.root, "f", 0o600).await.unwrap();
        for number in 0..3000 {
            let clock = kit.fs.clock().expect("it is local");
            put(cx, &*file, 0, &[number as u8]).await.unwrap();
            let attr = file.getattr(cx).await.unwrap();
            assert!(attr.mtime >= clock && attr.ctime >= clock, "{attr:?} at {clock:?}");
            assert!(!attr.is_past(clock));
        }
    });
}

// proves: P23
#[test]
fn holes_are_made_and_found() {
    on_each(&Kind::NATIVE, async |kit| {
        let cx = &kit.root_user;
        let (_, file) = kit.create(cx, kit.root, "f", 0o600).await.unwrap();
        put(cx, &*file, 0, &[1; 1 << 16]).await.unwrap();
        let flags = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let punch = Allocate { flags, at: 1 << 14, len_bytes: 1 << 14 };
        file.allocate(cx, punch).await.unwrap();
        assert_eq!(file.seek(cx, 0, Seek::Hole).await.unwrap(), 1 << 14);
        assert_eq!(file.seek(cx, 1 << 14, Seek::Data).await.unwrap(), 1 << 15);
        assert_eq!(errno(file.seek(cx, 1 << 20, Seek::Data).await), Errno::ENXIO);
        assert_eq!(errno(file.seek(cx, u64::MAX, Seek::Hole).await), Errno::ENXIO);
        assert_eq!(get(cx, &*file, 1 << 14, 10).await.unwrap(), [0; 10]);
        file.allocate(cx, Allocate { flags: 0, at: 0, len_bytes: 1 << 17 }).await.unwrap();
        assert_eq!(file.getattr(cx).await.unwrap().size, 1 << 17);
        let bad = Allocate { flags: 0, at: 0, len_bytes: 0 };
        assert_eq!(errno(file.allocate(cx, bad).await), Errno::EINVAL);
    });
}

// proves: P24
#[test]
fn ranges_are_copied_at_the_server() {
    on_each(&Kind::ALL, async |kit| {
        let cx = &kit.root_user;
        let (_, from) = kit.create(cx, kit.root, "from", 0o600).await.unwrap();
        let (_, to) = kit.create(cx, kit.root, "to", 0o600).await.unwrap();
        let data: Vec<u8> = (0..100_000u32).map(|at| ((at * 7) >> 2) as u8).collect();
        put(cx, &*from, 0, &data).await.unwrap();
        assert_eq!(
            from.copy_range(cx, 10, &*to, 20, 1 << 30).await.unwrap(),
            data.len() as u64 - 10
        );
        assert_eq!(get(cx, &*to, 20, data.len()).await.unwrap(), &data[10..]);
        assert_eq!(errno(from.copy_range(cx, 0, &*from, 10, 100).await), Errno::EINVAL);
        assert_eq!(from.copy_range(cx, 0, &*from, 100_000, 1000).await.unwrap(), 1000);
        assert_eq!(from.copy_range(cx, 1 << 30, &*to, 0, 10).await.unwrap(), 0);
        let elsewhere = export(&kit.path, plain());
        let other = elsewhere.lookup(cx, elsewhere.info().root, name("to")).await.unwrap().id;
        let other = elsewhere.open(cx, other, OpenHow::READ_WRITE).await.unwrap();
        assert_eq!(errno(from.copy_range(cx, 0, &*other, 0, 10).await), Errno::EXDEV);
    });
}

// proves: P22
#[test]
fn a_full_disk_says_so() {
    let Some(disk) = Disk::new(Kind::Tmpfs, 1) else { return };
    on(&disk, plain(), async |kit| {
        let cx = &kit.root_user;
        let (_, file) = kit.create(cx, kit.root, "f", 0o600).await.unwrap();
        let written = put(cx, &*file, 0, &vec![1; 2 << 20]).await.unwrap();
        assert!(written > 0 && written <= 1 << 20, "what fitted was written: {written}");
        assert_eq!(errno(put(cx, &*file, written as u64, b"x").await), Errno::ENOSPC);
        let more = Allocate { flags: 0, at: 0, len_bytes: 4 << 20 };
        assert_eq!(errno(file.allocate(cx, more).await), Errno::ENOSPC);
        assert_eq!(kit.fs.statfs(cx).await.unwrap().blocks_available, 0);
    });
}

/// Content in a pipe, over memory with something else in it.
struct Piped {
    pipe: (std::io::PipeReader, std::io::PipeWriter),
    bytes: usize,
    /// The kernel does not move the content.
    stuck: bool,
    /// The content is in the memory now, and no longer here.
    fetched: AtomicBool,
}

impl Memory for Piped {
    fn pages(&self) -> Option<&dyn Pages> {
        Some(self)
    }
}

impl Pages for Piped {
    fn take(&self, at: usize, to: Take<'_>) -> Option<std::io::Result<usize>> {
        match self.stuck {
            _ if self.fetched.load(Ordering::Relaxed) => None,
            true => Some(Err(std::io::Error::from_raw_os_error(libc::EINVAL))),
            false => Some(to(self.pipe.0.as_fd(), self.bytes - at)),
        }
    }

    fn fetch(&self) {
        self.fetched.store(true, Ordering::Relaxed);
    }
}

const IN_MEMORY: &[u8] = &[b'm'; IO_MAX_BYTES];

fn piped(content: &[u8], stuck: bool) -> Buf {
    let pipe = std::io::pipe().unwrap();
    // SAFETY: numbers only.
    let size =
        unsafe { libc::fcntl(pipe.1.as_raw_fd(), libc::F_SETPIPE_SZ, IO_MAX_BYTES as libc::c_int) };
    assert!(size >= IO_MAX_BYTES as libc::c_int);
    (&pipe.1).write_all(content).unwrap();
    let owner = Arc::new(Piped { pipe, bytes: content.len(), stuck, fetched: false.into() });
    // SAFETY: the memory is there for ever, and nobody writes it.
    unsafe { Buf::over(std::ptr::NonNull::from(&IN_MEMORY[0]), content.len(), owner) }
}

#[test]
fn what_lies_in_pages_is_moved_to_its_place() {
    on_each(&Kind::ALL, async |kit| {
        let cx = &kit.root_user;
        let (_, file) = kit.create(cx, kit.root, "f", 0o600).await.unwrap();
        let data: Vec<u8> = (0..IO_MAX_BYTES as u32).map(|at| ((at * 31) >> 3) as u8).collect();
        for at in [0, 5000] {
            let written = file.write(cx, Write::at(at), piped(&data, false)).await.unwrap();
            assert_eq!(
                (written, get(cx, &*file, at, written + 1).await.unwrap()),
                (data.len(), data.clone())
            );
        }
        // Behind the end of what is there, through the memory.
        let at = 2 << 20;
        let (append, sync) =
            (Write { append: true, ..Write::at(0) }, Write { sync: true, ..Write::at(at) });
        for (how, stuck) in [(Write::at(at), true), (sync, false), (append, false)] {
            let end = file.getattr(cx).await.unwrap().size;
            assert_eq!(file.write(cx, how, piped(&data, stuck)).await.unwrap(), data.len());
            let at = if how.append { end } else { at };
            assert!(get(cx, &*file, at, data.len()).await.unwrap() == IN_MEMORY);
        }
        assert_eq!(
            errno(file.write(cx, Write::at(u64::MAX), piped(b"x", false)).await),
            Errno::EFBIG
        );
    });
}

#[test]
fn of_what_lies_in_pages_a_full_disk_takes_a_part() {
    let Some(disk) = Disk::new(Kind::Tmpfs, 1) else { return };
    on(&disk, plain(), async |kit| {
        let cx = &kit.root_user;
        let (_, file) = kit.create(cx, kit.root, "f", 0o600).await.unwrap();
        let data = vec![7; IO_MAX_BYTES];
        let at = put(cx, &*file, 0, &data[..512 << 10]).await.unwrap();
        let written = file.write(cx, Write::at(at as u64), piped(&data, false)).await.unwrap();
        assert!(written > 0 && written < data.len(), "{written}");
        let end = (at + written) as u64;
        assert_eq!(get(cx, &*file, 0, data.len()).await.unwrap(), data[..at + written]);
        let error = file.write(cx, Write::at(end), piped(&data, false)).await;
        assert_eq!(errno(error), Errno::ENOSPC);
    });
}

/// Quotas of a btrfs subvolume: those of users are not to be had everywhere (CONFIG_QFMT_V2).
// proves: P22
#[test]
fn a_quota_that_is_used_up_says_so() {
    let Some(disk) = Disk::new(Kind::Btrfs, 256) else { return };
    if !disk.limit(64 << 20) {
        return eprintln!("left out: no quotas on btrfs here");
    }
    on(&disk, plain(), async |kit| {
        let ann = user(1000, 1000, &[]);
        let dir = kit.common("d").await;
        let (_, file) = kit.create(&ann, dir, "f", 0o600).await.unwrap();
        let mut written = 0;
        let error = loop {
            match put(&ann, &*file, written, &vec![7; IO_MAX_BYTES]).await {
                Ok(count) => written += count as u64,
                Err(error) => break error,
            }
            assert!(written < 128 << 20, "nobody counts");
        };
        assert_eq!(error.errno(), Errno::EDQUOT);
        assert_eq!(errno(kit.mkdir(&ann, dir, "more", 0o755).await), Errno::EDQUOT);
        assert_eq!(errno(kit.create(&ann, dir, "more", 0o644).await), Errno::EDQUOT);
    });
}

// proves: P25
#[test]
fn flags_of_an_inode() {
    on_each(&[Kind::Ext4, Kind::Xfs, Kind::Btrfs], async |kit| {
        let (ann, root) = (user(1000, 1000, &[]), &kit.root_user);
        let dir = kit.common("d").await;
        let (_, file) = kit.create(&ann, dir, "f", 0o600).await.unwrap();
        let flags = file.get_flags(&ann).await.unwrap();
        let no_dump = 0x40u32;
        file.set_flags(&ann, flags | no_dump).await.unwrap();
        assert_eq!(file.get_flags(&ann).await.unwrap(), flags | no_dump);
        let immutable = 0x10u32;
        assert_eq!(errno(file.set_flags(&ann, flags | immutable).await), Errno::EPERM);
        file.set_flags(root, flags | immutable).await.unwrap();
        assert_eq!(errno(kit.unlink(root, dir, "f").await), Errno::EPERM);
        file.set_flags(root, flags).await.unwrap();
    });
}

// proves: P25
#[test]
fn a_file_counts_for_a_project() {
    on_each(&[Kind::Xfs], async |kit| {
        let (ann, bob) = (user(1000, 1000, &[]), user(1001, 1001, &[]));
        let dir = kit.common("d").await;
        let (_, file) = kit.create(&ann, dir, "f", 0o644).await.unwrap();
        let before = file.get_xflags(&ann).await.unwrap();
        assert_eq!(before.project, 0);
        file.set_xflags(&ann, Xflags { project: 42, ..before }).await.unwrap();
        assert_eq!(file.get_xflags(&bob).await.unwrap().project, 42);
        let theirs = file.set_xflags(&bob, Xflags { project: 43, ..before }).await;
        assert_eq!(errno(theirs), Errno::EPERM);
        const INHERITED: u32 = 0x200;
        let root = kit.fs.open(&kit.root_user, dir, OpenHow::DIRECTORY).await.unwrap();
        let set = Xflags { flags: INHERITED, project: 7, ..Xflags::default() };
        root.set_xflags(&kit.root_user, set).await.unwrap();
        let (_, heir) = kit.create(&ann, dir, "heir", 0o644).await.unwrap();
        assert_eq!(heir.get_xflags(&ann).await.unwrap().project, 7);
        let foreign = kit.fs.link(&ann, file.id(), dir, name("g")).await;
        assert_eq!(errno(foreign), Errno::EXDEV, "of another project");
    });
}

#[test]
fn the_exports_own_threads_are_the_callers_too() {
    let Some(disk) = Disk::new(Kind::Tmpfs, 16) else { return };
    let options = PosixOptions { inline: Inline::Never, threads_max: 2, ..plain() };
    on(&disk, options, async |kit| {
        let dir = kit.common("d").await;
        for uid in 1000..1020 {
            let mut cx = user(uid, uid, &[]);
            cx.umask = 0o027;
            let (entry, file) = kit.create(&cx, dir, &format!("{uid}"), 0o666).await.unwrap();
            assert_eq!((entry.attr.uid, entry.attr.mode & 0o777), (Uid(uid), 0o640));
            put(&cx, &*file, 0, b"x").await.unwrap();
            let other = user(1, 1, &[]);
            assert_eq!(errno(kit.fs.open(&other, entry.id, OpenHow::READ).await), Errno::EACCES);
        }
    });
}
