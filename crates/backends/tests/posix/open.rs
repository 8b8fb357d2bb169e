//! Open files: more than there are descriptors, with the rights of their opening.

use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

use crate::rig::*;
use dray_backends::posix::{DescriptorStore, PosixOptions};
use dray_core::*;

/// Keeps files for a server that is killed: that gives nothing back.
#[derive(Debug, Default)]
struct Holding(Mutex<HashMap<FileId, OwnedFd>>);

impl DescriptorStore for Holding {
    fn hold(&self, _: FsUuid, id: FileId, fd: BorrowedFd<'_>) {
        self.0.lock().unwrap().insert(id, fd.try_clone_to_owned().unwrap());
    }
    fn holds(&self, _: FsUuid, id: FileId) -> bool {
        self.0.lock().unwrap().contains_key(&id)
    }
    fn adopt(&self, fs: FsUuid, id: FileId) -> bool {
        self.holds(fs, id)
    }
    fn release(&self, _: FsUuid, _: FileId) {}
    fn keep_for_recovery(&self, _: FsUuid, _: FileId) {}
}

/// stat(2) of an open file asks by the file's id. Before its client had opened it again the
/// answer was that there is no such file.
// proves: P89
#[test]
fn what_was_deleted_and_is_kept_has_attributes_before_it_is_opened_again() {
    for kind in [Kind::Tmpfs, Kind::Ext4] {
        let Some(disk) = Disk::new(kind, 64) else { continue };
        let descriptor_store = Arc::new(Holding::default());
        let options =
            || PosixOptions { descriptor_store: Some(descriptor_store.clone()), ..plain() };
        let deleted = Mutex::new(Vec::new());
        on(&disk, options(), async |kit| {
            let cx = &kit.root_user;
            let (entry, file) = kit.create(cx, kit.root, "f", 0o640).await.unwrap();
            kit.unlink(cx, kit.root, "f").await.unwrap();
            deleted.lock().unwrap().push(entry.id);
            drop(file);
        });
        on(&disk, options(), async |kit| {
            let cx = &kit.root_user;
            let id = deleted.lock().unwrap()[0];
            for _ in 0..2 {
                let attr = kit.fs.getattr(cx, id).await.unwrap();
                assert_eq!((attr.nlink, attr.mode & 0o777), (0, 0o640), "{kind:?}");
            }
            let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
            assert_eq!(kit.fs.setattr(cx, id, set).await.unwrap().mode & 0o777, 0o600);
            let file = kit.fs.open(cx, id, OpenHow::READ_WRITE).await.unwrap();
            put(cx, &*file, 0, b"still").await.unwrap();
        });
        descriptor_store.0.lock().unwrap().clear();
        on(&disk, options(), async |kit| {
            let id = deleted.lock().unwrap()[0];
            assert_eq!(errno(kit.fs.getattr(&kit.root_user, id).await), Errno::ESTALE);
        });
    }
}

/// Between its lookup and its opening it lost its name, so that no removal will have it kept.
// proves: P33
#[test]
fn what_is_opened_after_its_removal_is_kept_over_the_server_s_death() {
    let Some(disk) = Disk::new(Kind::Tmpfs, 64) else { return };
    let descriptor_store = Arc::new(Holding::default());
    let options = PosixOptions { descriptor_store: Some(descriptor_store.clone()), ..plain() };
    on(&disk, options, async |kit| {
        let (cx, reader) = (&kit.root_user, user(1000, 1000, &[]));
        let reader = Context { pid: Pid(2), ..reader };
        // The moment may have passed where the machine is busy: then again.
        for n in 0.. {
            assert!(n < 100, "it is never there");
            let id = kit.file(cx, kit.root, "f", 0o644, b"data").await;
            kit.lookup(&reader, kit.root, "f").await.unwrap();
            kit.unlink(cx, kit.root, "f").await.unwrap();
            assert!(!descriptor_store.holds(UUID, id));
            let Ok(file) = kit.fs.open(&reader, id, OpenHow::new(libc::O_RDONLY)).await else {
                continue;
            };
            assert!(descriptor_store.holds(UUID, id));
            assert_eq!(get(&reader, &*file, 0, 10).await.unwrap(), b"data");
            break;
        }
    });
}

// proves: P27
#[test]
fn twenty_thousand_open_files_on_a_hundred_descriptors() {
    let Some(disk) = Disk::new(Kind::Tmpfs, 256) else { return };
    let options = PosixOptions { open_descriptors_max: 100, ..plain() };
    on(&disk, options, async |kit| {
        let cx = user(1000, 1000, &[]);
        let dir = kit.common("d").await;
        let mut files = Vec::new();
        for number in 0..20_500 {
            let (_, file) = kit.create(&cx, dir, &format!("{number}"), 0o444).await.unwrap();
            files.push(file);
        }
        let holdings = kit.fs.holdings();
        assert_eq!(holdings.open_files, 20_500);
        assert!(holdings.open_descriptors <= 100, "{holdings:?}");
        // A file of mode 0444 stays open for writing, to whom it was.
        for (number, file) in files.iter().enumerate().step_by(7) {
            put(&cx, &**file, 0, format!("{number}").as_bytes()).await.unwrap();
        }
        for (number, file) in files.iter().enumerate().step_by(77) {
            assert_eq!(get(&cx, &**file, 0, 20).await.unwrap(), format!("{number}").as_bytes());
        }
        assert!(kit.fs.holdings().open_descriptors <= 100);
        for file in &files {
            file.close(&cx).await.unwrap();
        }
        assert_eq!((kit.fs.holdings().open_files, kit.fs.holdings().open_descriptors), (0, 0));
        assert_eq!(errno(put(&cx, &*files[0], 0, b"x").await), Errno::EBADF);
    });
}

/// The kernel tells each descriptor once. The error was lost to a file whose descriptor had been
/// closed for want of others when the disk failed, or was closed then.
// proves: P29
#[test]
fn an_error_of_the_disk_is_reported_once_through_each_open_file_whatever_its_descriptor() {
    let Some(disk) = Disk::fragile() else { return };
    let options = PosixOptions { open_descriptors_max: 1, ..plain() };
    on(&disk, options, async |kit| {
        let cx = &kit.root_user;
        let (entry, one) = kit.create(cx, kit.root, "f", 0o600).await.unwrap();
        let other = kit.fs.open(cx, entry.id, OpenHow::READ_WRITE).await.unwrap();
        assert_eq!(kit.fs.holdings().open_descriptors, 1);
        // The first has none while the second gets the error.
        put(cx, &*other, 0, &[1; 65_536]).await.unwrap();
        disk.break_down();
        // Which of both a loop device says depends on the kernel.
        let error = errno(other.sync(cx, false).await);
        assert!(matches!(error, Errno::EIO | Errno::ENOSPC), "{error}");
        disk.mend();
        assert_eq!(
            errno(one.sync(cx, false).await),
            error,
            "other callers have received the error"
        );
        one.sync(cx, false).await.unwrap();
        other.sync(cx, false).await.unwrap();
        // Here the closing of the descriptor finds the error.
        put(cx, &*one, 1 << 20, &[2; 65_536]).await.unwrap();
        disk.break_down();
        get(cx, &*other, 0, 1).await.unwrap();
        assert_eq!(kit.fs.holdings().open_descriptors, 1);
        disk.mend();
        for file in [&one, &other] {
            assert_eq!(errno(file.sync(cx, false).await), error);
            file.sync(cx, false).await.unwrap();
        }
    });
}

/// `O_SYNC` and `O_DSYNC`: what does not reach the disk is an error of the write itself.
// proves: P101
#[test]
fn a_write_that_is_to_be_on_the_disk_fails_where_the_disk_does() {
    for (flag, append) in [(libc::O_SYNC, false), (libc::O_DSYNC, false), (libc::O_DSYNC, true)] {
        let Some(disk) = Disk::fragile() else { return };
        on(&disk, plain(), async |kit| {
            let cx = &kit.root_user;
            let how = CreateHow { open: OpenHow::new(libc::O_RDWR | flag), ..create_how(0o600) };
            let (_, file) = kit.fs.create(cx, kit.root, name("f"), how).await.unwrap();
            disk.break_down();
            let write = async |sync: bool| {
                let how = Write { append, sync, ..Write::at(0) };
                file.write(cx, how, Buf::from(&[1; 65_536][..])).await
            };
            assert_eq!(write(false).await.unwrap(), 65_536, "it is in memory");
            let error = errno(write(true).await);
            assert!(matches!(error, Errno::EIO | Errno::ENOSPC), "{error}, {flag:#x}, {append}");
            disk.mend();
        });
    }
}

/// As many as descriptors can be spared for; then a removal is refused, and nothing is lost.
// proves: P27, P127
#[test]
fn more_deleted_files_than_descriptors_are_refused_and_none_is_lost() {
    let Some(disk) = Disk::new(Kind::Tmpfs, 64) else { return };
    let options = PosixOptions { open_descriptors_max: 100, ..plain() };
    on(&disk, options, async |kit| {
        let cx = user(1000, 1000, &[]);
        let dir = kit.common("d").await;
        let (mut files, mut removed, mut left) = (Vec::new(), 0, String::new());
        for number in 0..200u8 {
            let n = format!("{number}");
            let (_, file) = kit.create(&cx, dir, &n, 0o600).await.unwrap();
            put(&cx, &*file, 0, &[number; 10]).await.unwrap();
            files.push(file);
            let gone = match number % 2 {
                0 => kit.unlink(&cx, dir, &n).await,
                _ => {
                    let over = format!("over{number}");
                    kit.file(&cx, dir, &over, 0o600, b"").await;
                    kit.rename(&cx, (dir, &over), (dir, &n), RenameHow::Replace).await
                }
            };
            match gone {
                Ok(()) => removed += 1,
                Err(error) => {
                    assert_eq!(error.errno(), Errno::ENFILE);
                    left = n;
                }
            }
        }
        assert!((75..=130).contains(&removed), "{removed}");
        let unnamed = kit.fs.tmpfile(&cx, dir, create_how(0o600)).await;
        assert_eq!(errno(unnamed), Errno::ENFILE);
        // There is room for another client's file, and for removing what the first client has open.
        let other = Context { holder: HolderId(9), address: ClientAddress(9), ..cx.clone() };
        kit.fs.tmpfile(&other, dir, create_how(0o600)).await.unwrap();
        kit.unlink(&other, dir, &left).await.unwrap();
        for (number, file) in files.iter().enumerate() {
            assert_eq!(get(&cx, &**file, 0, 20).await.unwrap(), [number as u8; 10], "{number}");
        }
        assert!(kit.fs.holdings().open_descriptors <= 65, "{:?}", kit.fs.holdings());
        // A name that is not the last one may go.
        kit.create(&cx, dir, "linked", 0o600).await.unwrap().1.close(&cx).await.unwrap();
        let linked = kit.lookup(&cx, dir, "linked").await.unwrap().id;
        let open = kit.fs.open(&cx, linked, OpenHow::READ).await.unwrap();
        kit.fs.link(&cx, linked, dir, name("again")).await.unwrap();
        kit.unlink(&cx, dir, "linked").await.unwrap();
        assert_eq!(get(&cx, &*open, 0, 1).await.unwrap(), b"");
        for file in &files {
            file.close(&cx).await.unwrap();
        }
        drop(files);
        kit.unlink(&cx, dir, "again").await.unwrap();
        kit.fs.tmpfile(&cx, dir, create_how(0o600)).await.unwrap();
    });
}

// proves: P27
#[test]
fn what_was_deleted_while_open_goes_on() {
    for kind in Kind::ALL {
        let Some(disk) = Disk::new(kind, 64) else { continue };
        // One descriptor: nearly every file has none when its name goes.
        let options = PosixOptions { open_descriptors_max: 1, ..plain() };
        on(&disk, options, async |kit| {
            let cx = user(1000, 1000, &[]);
            let dir = kit.common("d").await;
            // This one has a descriptor when its name goes, and others would push it out.
            let (_, first) = kit.create(&cx, dir, "first", 0o600).await.unwrap();
            put(&cx, &*first, 0, b"first").await.unwrap();
            kit.unlink(&cx, dir, "first").await.unwrap();
            let mut files = Vec::new();
            for number in 0..20u8 {
                let (entry, file) =
                    kit.create(&cx, dir, &format!("{number}"), 0o600).await.unwrap();
                put(&cx, &*file, 0, &[number; 100]).await.unwrap();
                files.push((entry.id, file));
            }
            kit.file(&cx, dir, "other", 0o600, b"").await;
            for number in 0..20u8 {
                let n = format!("{number}");
                if number % 2 == 0 {
                    kit.unlink(&cx, dir, &n).await.unwrap();
                } else {
                    kit.file(&cx, dir, "over", 0o600, b"").await;
                    kit.rename(&cx, (dir, "over"), (dir, &n), RenameHow::Replace).await.unwrap();
                }
            }
            assert_eq!(get(&cx, &*first, 0, 9).await.unwrap(), b"first");
            for (number, (id, file)) in files.iter().enumerate() {
                assert_eq!(get(&cx, &**file, 0, 200).await.unwrap(), [number as u8; 100]);
                put(&cx, &**file, 100, b"more").await.unwrap();
                let attr = file.getattr(&cx).await.unwrap();
                assert_eq!((attr.nlink, attr.size), (0, 104));
                assert_eq!(kit.fs.getattr(&cx, *id).await.unwrap().size, 104);
            }
            for (id, file) in files {
                file.close(&cx).await.unwrap();
                drop(file);
                assert_eq!(errno(kit.fs.getattr(&cx, id).await), Errno::ESTALE);
            }
        });
    }
}

// proves: P50
#[test]
fn an_open_file_keeps_the_rights_of_its_opening() {
    for kind in Kind::ALL {
        let Some(disk) = Disk::new(kind, 64) else { continue };
        let options = PosixOptions { open_descriptors_max: 1, ..plain() };
        on(&disk, options, async |kit| {
            let (ann, bob) = (user(1000, 1000, &[]), user(1001, 1001, &[]));
            let dir = kit.common("d").await;
            let id = kit.file(&ann, dir, "f", 0o666, b"data").await;
            let reader = kit.fs.open(&bob, id, OpenHow::READ).await.unwrap();
            let writer = kit.fs.open(&bob, id, OpenHow::new(libc::O_WRONLY)).await.unwrap();
            let mode = SetAttr { mode: Some(0), ..SetAttr::default() };
            kit.fs.setattr(&ann, id, mode).await.unwrap();
            let _pushes_the_others_out = kit.create(&ann, dir, "g", 0o600).await.unwrap();
            assert_eq!(get(&bob, &*reader, 0, 4).await.unwrap(), b"data");
            assert_eq!(errno(put(&bob, &*reader, 0, b"x").await), Errno::EBADF);
            put(&bob, &*writer, 0, b"x").await.unwrap();
            assert_eq!(errno(get(&bob, &*writer, 0, 4).await), Errno::EBADF);
            let size = SetAttr { size: Some(2), ..SetAttr::default() };
            assert_eq!(writer.setattr(&bob, size).await.unwrap().size, 2);
            assert_eq!(errno(reader.setattr(&bob, size).await), Errno::EINVAL);
            assert_eq!(errno(kit.fs.open(&bob, id, OpenHow::READ).await), Errno::EACCES);
        });
    }
}

#[test]
fn truncation_and_creation_happen_once() {
    let Some(disk) = Disk::new(Kind::Tmpfs, 16) else { return };
    let options = PosixOptions { open_descriptors_max: 1, ..plain() };
    on(&disk, options, async |kit| {
        let cx = user(1000, 1000, &[]);
        let dir = kit.common("d").await;
        let id = kit.file(&cx, dir, "f", 0o600, b"old").await;
        let how = OpenHow::new(libc::O_RDWR | libc::O_TRUNC);
        let file = kit.fs.open(&cx, id, how).await.unwrap();
        assert_eq!(file.getattr(&cx).await.unwrap().size, 0);
        put(&cx, &*file, 0, b"new").await.unwrap();
        let _pushes_it_out = kit.create(&cx, dir, "g", 0o600).await.unwrap();
        assert_eq!(get(&cx, &*file, 0, 9).await.unwrap(), b"new");

        assert_eq!(errno(kit.create(&cx, dir, "f", 0o600).await), Errno::EEXIST);
        let open = CreateHow { exclusive: false, ..create_how(0o777) };
        let (entry, again) = kit.fs.create(&cx, dir, name("f"), open).await.unwrap();
        assert_eq!((entry.id, entry.attr.mode & 0o777, entry.attr.size), (id, 0o600, 3));
        assert_eq!(get(&cx, &*again, 0, 9).await.unwrap(), b"new");
        let cut = CreateHow { open: how, ..open };
        let (entry, _cut) = kit.fs.create(&cx, dir, name("f"), cut).await.unwrap();
        assert_eq!(entry.attr.size, 0);
    });
}

#[test]
fn open_files_are_bounded() {
    let Some(disk) = Disk::new(Kind::Tmpfs, 16) else { return };
    on(&disk, PosixOptions { open_files_max: 10, ..plain() }, async |kit| {
        let cx = &kit.root_user;
        let mut files = Vec::new();
        for number in 0..10 {
            files.push(kit.create(cx, kit.root, &format!("{number}"), 0o600).await.unwrap());
        }
        assert_eq!(errno(kit.create(cx, kit.root, "more", 0o600).await), Errno::ENFILE);
        assert_eq!(errno(kit.lookup(cx, kit.root, "more").await), Errno::ENOENT);
        files.pop();
        kit.create(cx, kit.root, "more", 0o600).await.unwrap();
    });
}

// proves: P59
#[test]
fn locks_end_with_flush_and_close() {
    let Some(disk) = Disk::new(Kind::Tmpfs, 16) else { return };
    on(&disk, plain(), async |kit| {
        let cx = &kit.root_user;
        let id = kit.file(cx, kit.root, "f", 0o600, b"").await;
        let (one, two) = (
            kit.fs.open(cx, id, OpenHow::READ_WRITE).await.unwrap(),
            kit.fs.open(cx, id, OpenHow::READ_WRITE).await.unwrap(),
        );
        let lock = |family, owner| Lock {
            family,
            kind: LockKind::Exclusive,
            range: LockRange::ALL,
            owner: LockOwner::own(owner),
            pid: Pid(1),
        };
        one.lock(cx, lock(LockFamily::Posix, 1), false).await.unwrap();
        one.lock(cx, lock(LockFamily::Flock, 1), false).await.unwrap();
        for family in [LockFamily::Posix, LockFamily::Flock] {
            assert_eq!(errno(two.lock(cx, lock(family, 2), false).await), Errno::EAGAIN);
            assert_eq!(
                two.test_lock(cx, lock(family, 2)).await.unwrap().unwrap().owner,
                LockOwner::own(1)
            );
        }
        one.flush(cx, LockOwner::own(1)).await.unwrap();
        two.lock(cx, lock(LockFamily::Posix, 2), false).await.unwrap();
        assert_eq!(errno(two.lock(cx, lock(LockFamily::Flock, 2), false).await), Errno::EAGAIN);
        one.close(cx).await.unwrap();
        two.lock(cx, lock(LockFamily::Flock, 2), false).await.unwrap();
        drop(two);
        assert_eq!(
            kit.fs.locks().release_holder(cx.holder),
            1,
            "the fcntl lock, for want of a flush"
        );
        assert!(kit.fs.locks().is_empty());
    });
}

/// The server's own doing, as when it opens again what clients had open.
fn server() -> Context {
    Context { internal: true, ..Context::system() }
}

/// A client opens again after a restart what it has a ticket for, and says itself with which flags.
// proves: P48
#[test]
fn the_server_itself_opens_nothing_that_cuts_a_file_or_leaves_no_trace() {
    on_each(&[Kind::Tmpfs, Kind::Ext4], async |kit| {
        let root = &kit.root_user;
        let id = kit.file(root, kit.root, "f", 0o600, b"content").await;
        let cut = OpenHow::new(libc::O_RDWR | libc::O_TRUNC);
        assert_eq!(errno(kit.fs.open(&server(), id, cut).await), Errno::EPERM);
        let old = Some(TimeSet::At(Timestamp { sec: 1, nsec: 0 }));
        let set = SetAttr { atime: old, ..SetAttr::default() };
        let before = kit.fs.setattr(root, id, set).await.unwrap().atime;
        for (cx, leaves_trace) in [(root, false), (&server(), true)] {
            let how = OpenHow::new(libc::O_RDONLY | libc::O_NOATIME);
            let file = kit.fs.open(cx, id, how).await.unwrap();
            assert_eq!(get(cx, &*file, 0, 10).await.unwrap(), b"content");
            let after = file.getattr(cx).await.unwrap().atime;
            assert_eq!(after != before, leaves_trace);
        }
    });
}

/// What was open for reading and writing, or for writing alone, and a file that takes appends only.
const WAYS: [i32; 3] = [libc::O_RDWR, libc::O_WRONLY, libc::O_RDWR | libc::O_APPEND];

async fn is_read_and_not_changed(kit: &Kit, id: FileId, file: &dyn OpenFile, how: i32) {
    let cx = &kit.root_user;
    let read = get(cx, file, 0, 10).await;
    match how & libc::O_ACCMODE {
        libc::O_WRONLY => assert_eq!(errno(read), Errno::EBADF, "it never was open for that"),
        _ => assert_eq!(read.unwrap(), b"content"),
    }
    assert_eq!(file.getattr(cx).await.unwrap().size, 7);
    file.sync(cx, false).await.unwrap();
    let append = how & libc::O_APPEND != 0;
    let write = Write { append, ..Write::at(0) };
    assert_eq!(errno(file.write(cx, write, Buf::from(&b"x"[..])).await), Errno::EROFS);
    let cut = SetAttr { size: Some(1), ..SetAttr::default() };
    assert_eq!(errno(file.setattr(cx, cut).await), Errno::EROFS);
    let more = Allocate { flags: 0, at: 0, len_bytes: 100 };
    assert_eq!(errno(file.allocate(cx, more).await), Errno::EROFS);
    let from = kit.fs.open(cx, id, OpenHow::READ).await.unwrap();
    let copied = from.copy_range(cx, 0, file, 0, 3).await;
    assert_eq!(errno(copied), Errno::EROFS);
    assert_eq!(errno(kit.fs.open(cx, id, OpenHow::new(how)).await), Errno::EROFS, "it is new");
}

/// After a restart of the server reading a file failed with EROFS, because it had been open for
/// writing, too. The file system below had become read-only meanwhile.
// proves: P90
#[test]
fn what_was_open_for_more_is_read_where_nothing_can_be_changed_any_more() {
    for kind in [Kind::Ext4, Kind::Xfs, Kind::Tmpfs] {
        let Some(disk) = Disk::new(kind, 64) else { continue };
        let made = Mutex::new(None);
        on(&disk, plain(), async |kit| {
            let id = kit.file(&kit.root_user, kit.root, "f", 0o640, b"content").await;
            *made.lock().unwrap() = Some(id);
        });
        let id = made.lock().unwrap().unwrap();
        assert!(disk.remount("ro"));
        on(&disk, plain(), async |kit| {
            let cx = &kit.root_user;
            for how in WAYS {
                let file = kit.fs.open(&server(), id, OpenHow::new(how)).await.unwrap();
                is_read_and_not_changed(kit, id, &*file, how).await;
                // As an open file on one machine goes on once the file system does.
                assert!(disk.remount("rw"));
                let append = how & libc::O_APPEND != 0;
                let write = Write { append, ..Write::at(0) };
                file.write(cx, write, Buf::from(&b"C"[..])).await.unwrap();
                let cut = SetAttr { size: Some(0), ..SetAttr::default() };
                file.setattr(cx, cut).await.unwrap();
                file.write(cx, Write { append, ..Write::at(0) }, Buf::from(&b"content"[..]))
                    .await
                    .unwrap();
                file.close(cx).await.unwrap();
                drop(file);
                assert!(disk.remount("ro"), "something is open for writing");
            }
        });
        assert!(disk.remount("rw"));
        on(&disk, PosixOptions { read_only: true, ..plain() }, async |kit| {
            for how in WAYS {
                let file = kit.fs.open(&server(), id, OpenHow::new(how)).await.unwrap();
                is_read_and_not_changed(kit, id, &*file, how).await;
            }
        });
    }
}
