//! Ids: stable over rename and restart, never another file's.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::rig::*;
use dray_backends::posix::{PosixOptions, as_server};
use dray_core::*;

/// `FS_NODUMP_FL` of linux/fs.h.
const NO_DUMP: u32 = 0x40;
/// After this time whatever is copied is of another birth than its copy, by the kernel's clock.
const OLDER: Duration = Duration::from_millis(20);
/// How long numbers are used again for a look that falls into it.
const REUSE: Duration = Duration::from_secs(1);

// proves: P38
#[test]
fn ids_survive_renames_and_a_restart_of_the_server() {
    for kind in Kind::NATIVE {
        let Some(disk) = Disk::new(kind, 64) else { continue };
        let ids = std::cell::Cell::new(None);
        on(&disk, plain(), async |kit| {
            let cx = &kit.root_user;
            let (one, two) = (kit.common("1").await, kit.common("2").await);
            let id = kit.file(cx, one, "a", 0o644, b"content").await;
            let to = (two, "b");
            kit.rename(cx, (one, "a"), to, RenameHow::Replace).await.unwrap();
            assert_eq!(kit.lookup(cx, two, "b").await.unwrap().id, id);
            assert!(kit.fs.info().kind.contains("native"), "{}", kit.fs.info().kind);
            ids.set(Some((kit.root, two, id)));
        });
        disk.drop_caches();
        on(&disk, plain(), async |kit| {
            let cx = &kit.root_user;
            let (root, two, id) = ids.get().unwrap();
            assert_eq!(kit.root, root);
            // Used at once, without any lookup before.
            let file = kit.fs.open(cx, id, OpenHow::READ).await.unwrap();
            assert_eq!(get(cx, &*file, 0, 99).await.unwrap(), b"content");
            kit.unlink(cx, two, "b").await.unwrap();
            file.close(cx).await.unwrap();
            drop(file);
            assert_eq!(errno(kit.fs.getattr(cx, id).await), Errno::ESTALE);
            assert_eq!(errno(kit.fs.open(cx, id, OpenHow::READ).await), Errno::ESTALE);
        });
    }
}

/// A program that opened a file that was replaced at that moment got ENOMEM, and programs do not try
/// that again.
// proves: P38
#[test]
fn a_file_whose_number_is_just_being_used_again_is_stale() {
    for kind in Kind::NATIVE {
        let Some(disk) = Disk::new(kind, 64) else { continue };
        on(&disk, plain(), async |kit| {
            let cx = &kit.root_user;
            let dir = kit.common("d").await;
            let old = kit.file(cx, dir, "old", 0o644, b"old").await;
            kit.unlink(cx, dir, "old").await.unwrap();
            let (ends, path) = (&AtomicBool::new(false), &disk.path.join("d/new"));
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    while !ends.load(Ordering::Relaxed) {
                        std::fs::write(path, "new").unwrap();
                        std::fs::remove_file(path).unwrap();
                    }
                });
                let begin = Instant::now();
                let mut found = Errno::ESTALE;
                while found == Errno::ESTALE && begin.elapsed() < REUSE {
                    found = errno(block_on(kit.fs.getattr(cx, old)));
                }
                ends.store(true, Ordering::Relaxed);
                assert_eq!(found, Errno::ESTALE, "{kind:?}");
            });
        });
    }
}

// proves: P38
#[test]
fn a_number_used_again_is_another_id() {
    on_each(&Kind::ALL, async |kit| {
        let cx = &kit.root_user;
        let dir = kit.common("d").await;
        let old = kit.file(cx, dir, "old", 0o644, b"old").await;
        kit.unlink(cx, dir, "old").await.unwrap();
        for number in 0..200 {
            let new = kit.file(cx, dir, &format!("new{number}"), 0o644, b"new").await;
            assert_ne!(new, old);
            assert_eq!(errno(kit.fs.getattr(cx, old).await), Errno::ESTALE);
            if new.ino == old.ino {
                return;
            }
        }
    });
}

#[test]
fn what_changes_behind_the_servers_back_is_noticed() {
    on_each(&Kind::ALL, async |kit| {
        let cx = &kit.root_user;
        let dir = kit.common("d").await;
        let id = kit.file(cx, dir, "f", 0o644, b"f").await;
        kit.fs.getattr(cx, id).await.unwrap();
        let path = kit.path.join("d/f");
        dray_backends::posix::as_server(|| std::fs::remove_file(&path).unwrap()).unwrap();
        assert_eq!(errno(kit.fs.getattr(cx, id).await), Errno::ESTALE);
        assert_eq!(errno(kit.lookup(cx, dir, "f").await), Errno::ENOENT);
    });
}

// proves: P40
#[test]
fn the_path_table_follows_directories_that_move() {
    on_each(&[Kind::Overlay], async |kit| {
        assert!(kit.fs.info().kind.contains("path table"));
        let cx = &kit.root_user;
        let (one, two) = (kit.common("1").await, kit.common("2").await);
        let deep = kit.mkdir(cx, one, "deep", 0o755).await.unwrap().id;
        let id = kit.file(cx, deep, "f", 0o644, b"f").await;
        kit.rename(cx, (one, "deep"), (two, "moved"), RenameHow::Replace).await.unwrap();
        let fresh = kit.lookup(cx, two, "moved").await.unwrap().id;
        assert_eq!(fresh, deep);
        assert_eq!(kit.fs.getattr(cx, id).await.unwrap().size, 1);
    });
}

/// What an overlay copies is of another birth. The file had another id from then on. A client that
/// opened it next did not meet the locks of those who had it open.
// proves: P40
#[test]
fn a_file_that_an_overlay_copies_keeps_its_id() {
    let Some(disk) = Disk::new(Kind::Overlay, 16) else { return };
    for file in ["opened", "cut", "chmod", "xattr", "flags", "linked", "moved"] {
        std::fs::write(disk.lower().join(file), file).unwrap();
    }
    std::thread::sleep(OLDER);
    let options = PosixOptions { inode_cache_max: 8, ..plain() };
    on(&disk, options, async |kit| {
        let (cx, root) = (&kit.root_user, kit.root);
        let id = async |name: &str| kit.lookup(cx, root, name).await.unwrap().id;
        let before = [id("opened").await, id("cut").await, id("chmod").await, id("xattr").await];
        let flagged = id("flags").await;
        let moved = [id("linked").await, id("moved").await];
        let close = async |file: Arc<dyn OpenFile>| file.close(cx).await.unwrap();
        close(kit.fs.open(cx, before[0], OpenHow::READ_WRITE).await.unwrap()).await;
        let cutting = OpenHow::new(libc::O_WRONLY | libc::O_TRUNC);
        close(kit.fs.open(cx, before[1], cutting).await.unwrap()).await;
        let mode = SetAttr { mode: Some(0o600), ..SetAttr::default() };
        kit.fs.setattr(cx, before[2], mode).await.unwrap();
        let set = kit.fs.setxattr(cx, before[3], b"user.x", b"x", XattrSet::Any);
        if let Err(error) = set.await {
            assert_eq!(error.errno(), Errno::ENOTSUP, "not every file system has them");
        }
        let file = kit.fs.open(cx, flagged, OpenHow::READ).await.unwrap();
        if let Err(error) = file.set_flags(cx, NO_DUMP).await {
            assert_eq!(error.errno(), Errno::ENOTTY, "nor these");
        }
        close(file).await;
        kit.fs.link(cx, moved[0], root, name("further")).await.unwrap();
        kit.rename(cx, (root, "moved"), (root, "there"), RenameHow::Replace).await.unwrap();
        // So that nothing of them is at hand.
        for number in 0..100 {
            kit.file(cx, root, &format!("other{number}"), 0o644, b"").await;
        }
        let after = [id("opened").await, id("cut").await, id("chmod").await, id("xattr").await];
        assert_eq!((after, id("flags").await), (before, flagged));
        assert_eq!([id("further").await, id("there").await], moved);
    });
}

/// While it was being copied, and that had not been noted, a lookup took the copy for another file.
// proves: P40
#[test]
fn a_file_that_an_overlay_copies_keeps_its_id_for_who_looks_meanwhile() {
    const FILES: usize = 3000;
    let Some(disk) = Disk::new(Kind::Overlay, 64) else { return };
    for number in 0..FILES {
        std::fs::write(disk.lower().join(format!("f{number}")), "").unwrap();
    }
    std::thread::sleep(OLDER);
    let fs = export(&disk.path, plain());
    let (cx, root) = (user(0, 0, &[]), fs.info().root);
    let at = |number: usize| NameBuf::new(format!("f{number}").as_bytes()).unwrap();
    let ids: Vec<FileId> = block_on(async {
        let mut ids = Vec::new();
        for number in 0..FILES {
            ids.push(fs.lookup(&cx, root, &at(number)).await.unwrap().id);
        }
        ids
    });
    let round = std::sync::atomic::AtomicUsize::new(0);
    let others = std::thread::scope(|scope| {
        let looks = scope.spawn(|| {
            block_on(async {
                let (mut others, mut number) = (0, 0);
                while number < FILES {
                    let entry = fs.lookup(&cx, root, &at(number)).await;
                    others += usize::from(entry.map(|entry| entry.id).ok() != Some(ids[number]));
                    number = number.max(round.load(std::sync::atomic::Ordering::Relaxed));
                }
                others
            })
        });
        block_on(async {
            for (number, id) in ids.iter().enumerate() {
                match number % 3 {
                    0 => {
                        let file = fs.open(&cx, *id, OpenHow::READ_WRITE).await.unwrap();
                        file.close(&cx).await.unwrap();
                    }
                    1 => {
                        let mode = SetAttr { mode: Some(0o600), ..SetAttr::default() };
                        fs.setattr(&cx, *id, mode).await.unwrap();
                    }
                    _ => _ = fs.link(&cx, *id, root, name(&format!("l{number}"))).await.unwrap(),
                }
                round.store(number + 1, std::sync::atomic::Ordering::Relaxed);
            }
        });
        looks.join().unwrap()
    });
    assert_eq!(others, 0, "looks that found another file");
    block_on(async {
        for (number, id) in ids.iter().enumerate() {
            assert_eq!(fs.lookup(&cx, root, &at(number)).await.unwrap().id, *id, "{number}");
            fs.getattr(&cx, *id).await.unwrap();
        }
    });
}

/// One of several names of a file is removed, and the overlay copies the file because it has one
/// name less.
// proves: P40
#[test]
fn a_file_that_an_overlay_copies_for_want_of_a_name_keeps_its_id() {
    let Some(disk) = Disk::new(Kind::OverlayOfLinks, 16) else { return };
    std::fs::write(disk.lower().join("file"), "").unwrap();
    for link in ["removed", "kept"] {
        std::fs::hard_link(disk.lower().join("file"), disk.lower().join(link)).unwrap();
    }
    std::thread::sleep(OLDER);
    on(&disk, plain(), async |kit| {
        let (cx, root) = (&kit.root_user, kit.root);
        let before = kit.lookup(cx, root, "file").await.unwrap().id;
        for link in ["removed", "kept"] {
            assert_eq!(kit.lookup(cx, root, link).await.unwrap().id, before);
        }
        kit.unlink(cx, root, "removed").await.unwrap();
        for link in ["file", "kept"] {
            assert_eq!(kit.lookup(cx, root, link).await.unwrap().id, before);
        }
    });
}

/// The first change of what is in a directory copies it, and all above it. Processes that worked
/// there had ESTALE from when the server had let go of its descriptors.
// proves: P40
#[test]
fn a_directory_that_an_overlay_copies_keeps_its_id() {
    let Some(disk) = Disk::new(Kind::Overlay, 16) else { return };
    for dir in ["new/in", "below/in", "gone/in", "moved/in"] {
        std::fs::create_dir_all(disk.lower().join(dir)).unwrap();
        std::fs::write(disk.lower().join(dir).join("file"), "").unwrap();
    }
    std::thread::sleep(OLDER);
    on(&disk, PosixOptions { inode_cache_max: 8, ..plain() }, async |kit| {
        let cx = &kit.root_user;
        let ids = async |dir: &str| {
            let above = kit.lookup(cx, kit.root, dir).await.unwrap().id;
            (above, kit.lookup(cx, above, "in").await.unwrap().id)
        };
        let all = ["new", "below", "gone", "moved"];
        let [new, below, gone, moved] =
            [ids(all[0]).await, ids(all[1]).await, ids(all[2]).await, ids(all[3]).await];
        kit.file(cx, new.1, "f", 0o600, b"").await;
        let file = kit.lookup(cx, below.1, "file").await.unwrap().id;
        let mode = SetAttr { mode: Some(0o600), ..SetAttr::default() };
        kit.fs.setattr(cx, file, mode).await.unwrap();
        kit.unlink(cx, gone.1, "file").await.unwrap();
        let to = (moved.1, "there");
        kit.rename(cx, (moved.1, "file"), to, RenameHow::Replace).await.unwrap();
        for number in 0..100 {
            kit.file(cx, kit.root, &format!("other{number}"), 0o644, b"").await;
        }
        // At hand is none of them; some are looked up again before they are used, some are not.
        kit.lookup(cx, new.1, "f").await.unwrap();
        kit.lookup(cx, gone.1, "file").await.unwrap_err();
        for (dir, before) in all.into_iter().zip([new, below, gone, moved]) {
            assert_eq!(ids(dir).await, before, "{dir}");
        }
        kit.fs.getattr(cx, file).await.unwrap();
    });
}

/// Clients that had a file open got ESTALE once the server had been killed.
// proves: P40
#[test]
fn ids_of_the_path_table_survive_a_restart_of_the_server() {
    let Some(disk) = Disk::new(Kind::Overlay, 16) else { return };
    let options = || PosixOptions {
        path_table_file: Some(disk.beside("paths")),
        inode_cache_max: 8,
        ..plain()
    };
    let ids = std::cell::Cell::new(None);
    on(&disk, options(), async |kit| {
        let cx = &kit.root_user;
        let (one, two) = (kit.common("1").await, kit.common("2").await);
        let deep = kit.mkdir(cx, one, "deep", 0o755).await.unwrap().id;
        let file = kit.file(cx, deep, "f", 0o644, b"content").await;
        let gone = kit.file(cx, deep, "gone", 0o644, b"").await;
        kit.unlink(cx, deep, "gone").await.unwrap();
        kit.rename(cx, (one, "deep"), (two, "moved"), RenameHow::Replace).await.unwrap();
        let swapped = kit.file(cx, one, "a", 0o644, b"a").await;
        kit.file(cx, two, "b", 0o644, b"b").await;
        kit.rename(cx, (one, "a"), (two, "b"), RenameHow::Exchange).await.unwrap();
        ids.set(Some((file, gone, swapped)));
    });
    on(&disk, options(), async |kit| {
        let cx = &kit.root_user;
        let (file, gone, swapped) = ids.get().unwrap();
        let read = async |id| {
            let file = kit.fs.open(cx, id, OpenHow::READ).await.unwrap();
            get(cx, &*file, 0, 99).await.unwrap()
        };
        assert_eq!((read(file).await, read(swapped).await), (b"content".to_vec(), b"a".to_vec()));
        assert_eq!(errno(kit.fs.getattr(cx, gone).await), Errno::ESTALE);
        let moved = kit.lookup(cx, kit.root, "2").await.unwrap().id;
        let moved = kit.lookup(cx, moved, "moved").await.unwrap().id;
        assert_eq!(kit.lookup(cx, moved, "f").await.unwrap().id, file, "it has one id");
    });
}

#[test]
fn the_path_table_walks_when_nothing_is_cached() {
    let Some(disk) = Disk::new(Kind::Overlay, 16) else { return };
    let options = dray_backends::posix::PosixOptions { inode_cache_max: 8, ..plain() };
    on(&disk, options, async |kit| {
        let cx = &kit.root_user;
        let mut dir = kit.root;
        for depth in 0..50 {
            dir = kit.mkdir(cx, dir, &format!("level{depth}"), 0o755).await.unwrap().id;
        }
        let id = kit.file(cx, dir, "f", 0o644, b"f").await;
        for number in 0..100 {
            kit.file(cx, kit.root, &format!("other{number}"), 0o644, b"").await;
        }
        assert_eq!(kit.fs.getattr(cx, id).await.unwrap().size, 1);
        kit.unlink(cx, dir, "f").await.unwrap();
        assert_eq!(errno(kit.fs.getattr(cx, id).await), Errno::ESTALE);
    });
}

/// The space of the removed file was not free before somebody used the export again.
// proves: P28
#[test]
fn what_somebody_removes_beside_a_server_at_rest_is_let_go() {
    let Some(disk) = Disk::new(Kind::Tmpfs, 64) else { return };
    std::fs::write(disk.path.join("large"), vec![1; 32 << 20]).unwrap();
    let options = PosixOptions { inode_idle_secs: 1, ..plain() };
    on(&disk, options, async |kit| {
        let cx = &kit.root_user;
        let full = kit.fs.statfs(cx).await.unwrap().blocks_free;
        kit.lookup(cx, kit.root, "large").await.unwrap();
        as_server(|| std::fs::remove_file(kit.path.join("large")).unwrap()).unwrap();
        assert_eq!(kit.fs.statfs(cx).await.unwrap().blocks_free, full, "nothing keeps it");
        let free = async {
            while kit.fs.statfs(cx).await.unwrap().blocks_free == full {
                dray_rt::sleep(std::time::Duration::from_millis(100)).await;
                kit.fs.close_idle_inodes().await;
            }
        };
        dray_rt::timeout(std::time::Duration::from_secs(60), free).await.expect("it is kept");
    });
}
