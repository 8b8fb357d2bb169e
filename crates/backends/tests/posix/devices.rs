//! One export, several devices: equal inode numbers are not one file.

use std::cell::Cell;
use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::rig::*;
use crate::twins::Twins;
use dray_backends::posix::PosixOptions;
use dray_core::*;

/// What each device has: a file with two names, one with one, and a directory.
const PARTS: [&str; 4] = ["", "-link", "-single", "-dir"];

fn fill(at: &Path, layer: &str) {
    fs::write(at.join(layer), layer).unwrap();
    fs::hard_link(at.join(layer), at.join(format!("{layer}-link"))).unwrap();
    fs::write(at.join(format!("{layer}-single")), format!("{layer} alone")).unwrap();
    fs::create_dir(at.join(format!("{layer}-dir"))).unwrap();
}

/// None where it cannot be had.
fn disk() -> Option<Disk> {
    let disk = Disk::of_two_devices(fill)?;
    for part in ["", "-link", "-single"] {
        let meta = ["one", "two"]
            .map(|layer| fs::metadata(disk.path.join(format!("{layer}{part}"))).unwrap());
        assert_eq!(meta[0].ino(), meta[1].ino(), "the test is about equal numbers");
        assert_ne!(meta[0].dev(), meta[1].dev());
    }
    Some(disk)
}

async fn read(kit: &Kit, id: FileId) -> String {
    let cx = &kit.root_user;
    let file = kit.fs.open(cx, id, OpenHow::READ).await.unwrap();
    String::from_utf8(get(cx, &*file, 0, 99).await.unwrap()).unwrap()
}

/// Entries of all that [`fill`] has made: first those of `one`.
async fn entries(kit: &Kit) -> Vec<Entry> {
    let mut entries = Vec::new();
    for layer in ["one", "two"] {
        for part in PARTS {
            let name = format!("{layer}{part}");
            entries.push(kit.lookup(&kit.root_user, kit.root, &name).await.unwrap());
        }
    }
    entries
}

/// Files of the two devices differ, in their ids and in the numbers that applications see.
async fn have_different_ids(kit: &Kit, entries: &[Entry]) {
    let ids: HashSet<FileId> = entries.iter().map(|entry| entry.id).collect();
    let numbers: HashSet<u64> = entries.iter().map(|entry| entry.attr.ino).collect();
    assert_eq!((ids.len(), numbers.len()), (6, 6), "{entries:?}");
    for (at, layer) in [(0, "one"), (4, "two")] {
        let both = [entries[at], entries[at + 1]].map(|entry| (entry.id, entry.attr.ino));
        assert_eq!(both[0], both[1], "two names of one file");
        assert_eq!(read(kit, entries[at].id).await, layer);
        assert_eq!(read(kit, entries[at + 2].id).await, format!("{layer} alone"));
    }
}

/// `cp -a` and `tar` took them for links of one file, and under close-to-open opening one of them
/// read the other.
// proves: P41
#[test]
fn files_of_two_devices_are_two_files() {
    let Some(disk) = disk() else { return };
    // Listed before anything was looked up, and after.
    for plus in [false, true, false] {
        on(&disk, plain(), async |kit| {
            let cx = &kit.root_user;
            let how = OpenHow::new(libc::O_RDONLY | libc::O_DIRECTORY);
            let dir = kit.fs.open(cx, kit.root, how).await.unwrap();
            let listed = dir.readdir(cx, 0, 1 << 16, plus).await.unwrap();
            let entries = entries(kit).await;
            have_different_ids(kit, &entries).await;
            let again = dir.readdir(cx, 0, 1 << 16, plus).await.unwrap();
            for (page, dirs) in [(&listed, plus), (&again, true)] {
                let mut count = 0;
                while let Some((name, entry)) = page.get(count) {
                    let name = str::from_utf8(name).unwrap();
                    let found = kit.lookup(cx, kit.root, name).await.unwrap();
                    let number = entry.attr.map_or(entry.id.ino, |attr| attr.ino);
                    if dirs || found.attr.file_type() != FileType::Directory {
                        assert_eq!(number, found.attr.ino, "{name}");
                    }
                    count += 1;
                }
                assert_eq!(count, 8);
            }
            for entry in &entries {
                let attr = kit.fs.getattr(cx, entry.id).await.unwrap();
                assert_eq!(attr.ino, entry.attr.ino);
                let file = kit.fs.open(cx, entry.id, OpenHow::READ).await.unwrap();
                assert_eq!(file.getattr(cx).await.unwrap().ino, entry.attr.ino);
            }
        });
    }
}

// proves: P41
#[test]
fn they_have_the_same_ids_and_numbers_after_a_restart_of_the_server() {
    let Some(disk) = disk() else { return };
    let options = || PosixOptions { path_table_file: Some(disk.beside("paths")), ..plain() };
    let before = Cell::new(Vec::new());
    on(&disk, options(), async |kit| before.set(entries(kit).await));
    let before = before.take();
    let known = |entry: &Entry| (entry.id, entry.attr.ino);
    on(&disk, options(), async |kit| {
        // By their ids, before anything was looked up.
        have_different_ids(kit, &before).await;
        let now = entries(kit).await;
        assert!(now.iter().map(known).eq(before.iter().map(known)));
    });
}

/// Devices of layers have other numbers whenever an overlay is mounted, and other files may have
/// those by then.
// proves: D6
#[test]
fn after_another_mount_an_id_is_of_its_file_or_of_none() {
    let Some(mut disk) = disk() else { return };
    let options =
        |disk: &Disk| PosixOptions { path_table_file: Some(disk.beside("paths")), ..plain() };
    let before = Cell::new(Vec::new());
    on(&disk, options(&disk), async |kit| before.set(entries(kit).await));
    let before = before.take();
    disk.unmount();
    assert!(disk.mount_two_devices("two:one"));
    on(&disk, options(&disk), async |kit| {
        for (at, layer) in [(0, "one"), (4, "two")] {
            match kit.fs.open(&kit.root_user, before[at].id, OpenHow::READ).await {
                Ok(_) => assert_eq!(read(kit, before[at].id).await, layer),
                Err(error) => assert_eq!(error.errno(), Errno::ESTALE),
            }
        }
        let now = entries(kit).await;
        have_different_ids(kit, &now).await;
    });
}

/// What an overlay copies to be changed comes to a third device.
// proves: P41
#[test]
fn a_file_that_is_copied_to_another_device_differs_from_files_there() {
    let Some(disk) = disk() else { return };
    on(&disk, plain(), async |kit| {
        let cx = &kit.root_user;
        let before = entries(kit).await;
        for at in [2, 4, 6] {
            let file = kit.fs.open(cx, before[at].id, OpenHow::READ_WRITE).await.unwrap();
            put(cx, &*file, 0, b"new").await.unwrap();
        }
        let new = kit.file(cx, kit.root, "new", 0o644, b"made here").await;
        let mut numbers = HashSet::new();
        for (at, said) in [(0, "one"), (2, "new alone"), (4, "new"), (6, "new alone")] {
            let id = before[at].id;
            assert_eq!(read(kit, id).await, said);
            numbers.insert(kit.fs.getattr(cx, id).await.unwrap().ino);
        }
        numbers.insert(kit.fs.getattr(cx, new).await.unwrap().ino);
        assert_eq!(numbers.len(), 5);
        // Of the names of a file that was copied without an index, one is of the copy.
        let mut ids = HashSet::new();
        for name in ["two", "two-link"] {
            let found = kit.lookup(cx, kit.root, name).await.unwrap().id;
            assert_eq!(read(kit, found).await, fs::read_to_string(kit.path.join(name)).unwrap());
            ids.insert(found);
        }
        assert!(ids.len() == 2 && ids.contains(&before[4].id));
    });
}

/// File systems mounted below are not part of the export: nothing in them has an id here. Listings
/// show what the file systems are mounted on.
// proves: P41
#[test]
fn file_systems_mounted_below_lend_no_numbers() {
    for kind in [Kind::Tmpfs, Kind::Overlay] {
        let Some(mut disk) = Disk::new(kind, 64) else { continue };
        for dir in ["sub", "bound"] {
            fs::create_dir(disk.path.join(dir)).unwrap();
        }
        let under = fs::metadata(disk.path.join("sub")).unwrap().ino();
        fs::write(disk.path.join("f"), "outer").unwrap();
        fs::hard_link(disk.path.join("f"), disk.path.join("g")).unwrap();
        fs::write(disk.path.join("file"), "outer").unwrap();
        assert!(disk.mount_inside("sub") && disk.mount_inside("bound"));
        fs::write(disk.path.join("sub/f"), "inner").unwrap();
        fs::hard_link(disk.path.join("sub/f"), disk.path.join("sub/g")).unwrap();
        assert!(disk.bind_inside("sub/f", "file"));
        on(&disk, plain(), async |kit| {
            let cx = &kit.root_user;
            let [f, g] = [kit.lookup(cx, kit.root, "f").await, kit.lookup(cx, kit.root, "g").await];
            assert_eq!(f.as_ref().unwrap().id, g.unwrap().id);
            assert_eq!(read(kit, f.unwrap().id).await, "outer");
            for mounted in ["sub", "bound", "file"] {
                assert_eq!(errno(kit.lookup(cx, kit.root, mounted).await), Errno::EXDEV);
            }
            for plus in [false, true] {
                let how = OpenHow::new(libc::O_RDONLY | libc::O_DIRECTORY);
                let dir = kit.fs.open(cx, kit.root, how).await.unwrap();
                let page = dir.readdir(cx, 0, 1 << 16, plus).await.unwrap();
                let sub = (0..).map_while(|at| page.get(at)).find(|(name, _)| *name == b"sub");
                let (_, sub) = sub.unwrap();
                assert_eq!((sub.id.ino, sub.attr), (under, None));
            }
        });
    }
}

/// What the kernel says of both is the same, also the times: as with bindfs over two images that were
/// made alike.
// proves: P41
#[test]
fn files_that_only_their_handles_tell_apart_are_two_files() {
    let Some(disk) = Disk::new(Kind::Tmpfs, 16) else { return };
    let twins = Twins::serve(&disk.path);
    on(&disk, plain(), async |kit| {
        let cx = &kit.root_user;
        let mut found = Vec::new();
        for name in ["one", "one-link", "two", "two-link"] {
            found.push(kit.lookup(cx, kit.root, name).await.unwrap());
        }
        assert!(found.iter().all(|entry| entry.attr == found[0].attr), "{found:?}");
        assert_eq!((found[0].id, found[2].id), (found[1].id, found[3].id));
        assert_ne!(found[0].id, found[2].id);
        for (entry, said) in found.iter().zip(["one", "one", "two", "two"]) {
            assert_eq!(read(kit, entry.id).await, said);
        }
    });
    drop(twins);
}

/// All subvolumes number their files from the same number on.
// proves: P41
#[test]
fn a_subvolume_lends_no_numbers() {
    let Some(disk) = Disk::new(Kind::Btrfs, 128) else { return };
    if !disk.subvolume("sub") {
        eprintln!("left out: no subvolume can be made here");
        return;
    }
    fs::write(disk.path.join("f"), "outer").unwrap();
    fs::write(disk.path.join("sub/f"), "inner").unwrap();
    on(&disk, plain(), async |kit| {
        let cx = &kit.root_user;
        let found = kit.lookup(cx, kit.root, "f").await.unwrap();
        assert_eq!(read(kit, found.id).await, "outer");
        assert_eq!(errno(kit.lookup(cx, kit.root, "sub").await), Errno::EXDEV);
    });
}
