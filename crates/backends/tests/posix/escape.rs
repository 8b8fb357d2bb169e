//! Nothing leads out of the export.

use crate::rig::*;
use dray_backends::posix::as_server;
use dray_core::*;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

// proves: P43
#[test]
fn links_that_lead_out_are_not_followed() {
    on_each(&Kind::ALL, async |kit| {
        let cx = &kit.root_user;
        let link = Make::Symlink { target: b"/etc" };
        let id = kit.fs.make(cx, kit.root, name("etc"), link).await.unwrap().id;
        assert_eq!(errno(kit.lookup(cx, id, "passwd").await), Errno::ENOTDIR);
        assert_eq!(errno(kit.create(cx, id, "new", 0o644).await), Errno::ENOTDIR);
        let link = Make::Symlink { target: b"/etc/passwd" };
        let id = kit.fs.make(cx, kit.root, name("passwd"), link).await.unwrap().id;
        assert_eq!(errno(kit.fs.open(cx, id, OpenHow::READ).await), Errno::ELOOP);
        let how = CreateHow { exclusive: false, ..create_how(0o644) };
        assert_eq!(errno(kit.fs.create(cx, kit.root, name("passwd"), how).await), Errno::ELOOP);
        let cut = SetAttr { size: Some(0), ..SetAttr::default() };
        assert_eq!(errno(kit.fs.setattr(cx, id, cut).await), Errno::EINVAL);
        // Owner and times of a link are its own.
        let set = SetAttr { uid: Some(Uid(77)), mtime: Some(TimeSet::Now), ..SetAttr::default() };
        assert_eq!(kit.fs.setattr(cx, id, set).await.unwrap().uid, Uid(77));
        let owner = as_server(|| {
            std::os::unix::fs::MetadataExt::uid(&std::fs::metadata("/etc/passwd").unwrap())
        });
        assert_ne!(owner.unwrap(), 77);
    });
}

// proves: P43
#[test]
fn mounts_below_are_not_entered() {
    for kind in Kind::ALL {
        let Some(mut disk) = Disk::new(kind, 64) else { continue };
        std::fs::create_dir(disk.path.join("mount")).unwrap();
        assert!(disk.mount_inside("mount"));
        std::fs::write(disk.path.join("mount/inside"), "x").unwrap();
        on(&disk, plain(), async |kit| {
            let cx = &kit.root_user;
            assert_eq!(errno(kit.lookup(cx, kit.root, "mount").await), Errno::EXDEV);
            let dir = kit.fs.open(cx, kit.root, OpenHow::DIRECTORY).await.unwrap();
            let page = dir.readdir(cx, 0, 1 << 16, true).await.unwrap();
            let (_, entry) = page.iter().find(|(n, _)| *n == b"mount").unwrap();
            assert!(entry.attr.is_none(), "{entry:?}");
        });
    }
}

/// With the same device as the rest, as bind mounts of the same file system have it, and files on
/// overlays always. A listing showed what the mounted file is like.
// proves: P43
#[test]
fn what_is_bound_below_shows_nothing_of_itself() {
    for kind in Kind::ALL {
        let Some(mut disk) = Disk::new(kind, 64) else { continue };
        for at in ["hidden", "dir"] {
            std::fs::create_dir(disk.path.join(at)).unwrap();
        }
        std::fs::write(disk.path.join("hidden/secret"), "secret").unwrap();
        std::fs::write(disk.path.join("file"), "").unwrap();
        assert!(disk.bind_inside("hidden/secret", "file") && disk.bind_inside("hidden", "dir"));
        on(&disk, plain(), async |kit| {
            let cx = &kit.root_user;
            let dir = kit.fs.open(cx, kit.root, OpenHow::DIRECTORY).await.unwrap();
            let page = dir.readdir(cx, 0, 1 << 16, true).await.unwrap();
            for bound in ["file", "dir"] {
                assert_eq!(errno(kit.lookup(cx, kit.root, bound).await), Errno::EXDEV, "{kind:?}");
                let (_, entry) = page.iter().find(|(n, _)| *n == bound.as_bytes()).unwrap();
                assert!(entry.attr.is_none(), "{kind:?}: {entry:?}");
            }
            let (_, entry) = page.iter().find(|(n, _)| *n == b"hidden").unwrap();
            assert!(entry.attr.is_some(), "{kind:?}");
        });
    }
}

/// A lookup of the directory above one that was known before asked the file system that had
/// been mounted over it.
// proves: P42
#[test]
fn what_hangs_below_is_not_asked() {
    const PATIENCE: Duration = Duration::from_secs(60);
    for kind in [Kind::Tmpfs, Kind::Ext4, Kind::Overlay] {
        let Some(disk) = Disk::new(kind, 64) else { continue };
        std::fs::create_dir_all(disk.path.join("at/known")).unwrap();
        on(&disk, plain(), async |kit| {
            let (sender, receiver) = channel::<()>();
            let cx = &kit.root_user;
            let at = kit.lookup(cx, kit.root, "at").await.unwrap().id;
            let known = kit.lookup(cx, at, "known").await.unwrap().id;
            let device = as_server(|| disk.hang_inside("at")).unwrap();
            // So that a failure of this test is one, and does not hang.
            let guard = std::thread::spawn(move || {
                let in_time = receiver.recv_timeout(PATIENCE) != Err(RecvTimeoutError::Timeout);
                drop(device);
                in_time
            });
            // Soon, and once it is known that there is a mount.
            for _ in 0..2 {
                for plus in [false, true] {
                    let dir = kit.fs.open(cx, kit.root, OpenHow::DIRECTORY).await.unwrap();
                    let page = dir.readdir(cx, 0, 1 << 16, plus).await.unwrap();
                    let (_, entry) = page.iter().find(|(n, _)| *n == b"at").unwrap();
                    assert!(entry.attr.is_none(), "{entry:?}");
                }
                assert_eq!(errno(kit.fs.parent(cx, known).await), Errno::ESTALE);
                assert_eq!(errno(kit.lookup(cx, kit.root, "at").await), Errno::EXDEV);
                assert_eq!(errno(kit.create(cx, kit.root, "at", 0o600).await), Errno::EEXIST);
                let how = CreateHow { exclusive: false, ..create_how(0o600) };
                let made = kit.fs.create(cx, kit.root, name("at"), how).await;
                assert_eq!(errno(made), Errno::EXDEV);
                let (root, at, to) = (kit.root, name("at"), name("to"));
                let removed = kit.fs.remove(cx, root, at, RemoveKind::Directory).await;
                assert_eq!(errno(removed), Errno::EBUSY);
                let moved = kit.fs.rename(cx, (root, at), (root, to), RenameHow::Replace).await;
                assert_eq!(errno(moved), Errno::EBUSY);
                std::thread::sleep(Duration::from_millis(150));
            }
            drop(sender);
            assert!(guard.join().unwrap(), "{kind:?}: it was asked");
        });
    }
}

// proves: P43
#[test]
fn a_part_of_a_file_system_shows_nothing_of_the_rest() {
    for kind in Kind::NATIVE {
        let Some(disk) = Disk::new(kind, 64) else { continue };
        let exported = disk.path.join("exported");
        std::fs::create_dir(&exported).unwrap();
        std::fs::create_dir(exported.join("inner")).unwrap();
        std::fs::write(disk.path.join("secret"), "s").unwrap();
        let whole = export(&disk.path, plain());
        let part =
            export(&exported, dray_backends::posix::PosixOptions { id_key: Some(99), ..plain() });
        let cx = user(0, 0, &[]);
        block_on(async {
            let root = part.info().root;
            assert_eq!(part.parent(&cx, root).await.unwrap().id, root);
            let secret = whole.lookup(&cx, whole.info().root, name("secret")).await.unwrap().id;
            // Even a client that knows number and generation cannot make up the id.
            for tag in [0, secret.generation >> 32, 1] {
                let id =
                    FileId { generation: tag << 32 | (secret.generation & 0xffff_ffff), ..secret };
                assert_eq!(errno(part.getattr(&cx, id).await), Errno::ESTALE);
            }
            // A directory that leaves the export does not take it along.
            let inner = part.lookup(&cx, root, name("inner")).await.unwrap().id;
            as_server(|| std::fs::rename(exported.join("inner"), disk.path.join("outer")).unwrap())
                .unwrap();
            assert_eq!(errno(part.parent(&cx, inner).await), Errno::ESTALE);
        });
    }
}

// proves: P43
#[test]
fn made_up_ids_are_stale_everywhere() {
    on_each(&Kind::ALL, async |kit| {
        let cx = &kit.root_user;
        for id in [
            FileId { ino: 2, generation: 0 },
            FileId { ino: u64::MAX, generation: u64::MAX },
            FileId { ino: kit.root.ino, generation: 5 },
        ] {
            assert_eq!(errno(kit.fs.getattr(cx, id).await), Errno::ESTALE);
            assert_eq!(errno(kit.fs.open(cx, id, OpenHow::READ).await), Errno::ESTALE);
            assert_eq!(errno(kit.lookup(cx, id, "x").await), Errno::ESTALE);
            assert_eq!(errno(kit.fs.link(cx, id, kit.root, name("x")).await), Errno::ESTALE);
        }
    });
}
