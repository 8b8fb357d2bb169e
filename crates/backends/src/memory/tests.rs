//! Limits, and what a disk keeps when the power fails.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll, Waker};

use dray_core::{
    Buf, BufMut, Context, CreateHow, Errno, FileId, FileSystem, Make, NameBuf, OpenFile, OpenHow,
    RemoveKind, SetAttr, Write,
};

use super::{MemoryDisk, MemoryFs, MemoryOptions};

/// Nothing in memory waits: one poll is the whole run.
fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut TaskContext::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("memory never waits"),
    }
}

fn name(text: &str) -> NameBuf {
    NameBuf::new(text.as_bytes()).unwrap()
}

fn system() -> Context {
    Context::system()
}

fn create(fs: &MemoryFs, text: &str) -> Arc<dyn OpenFile> {
    let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };
    now(fs.create(&system(), fs.info().root, &name(text), how)).unwrap().1
}

fn write(file: &Arc<dyn OpenFile>, at: u64, bytes: &[u8]) -> Result<usize, Errno> {
    now(file.write(&system(), Write::at(at), Buf::from(bytes))).map_err(|error| error.errno())
}

fn sync(file: &Arc<dyn OpenFile>) {
    now(file.sync(&system(), false)).unwrap();
}

fn find(fs: &MemoryFs, text: &str) -> Option<FileId> {
    now(fs.lookup(&system(), fs.info().root, &name(text))).ok().map(|entry| entry.id)
}

fn content(fs: &MemoryFs, id: FileId) -> Vec<u8> {
    let file = now(fs.open(&system(), id, OpenHow::READ)).unwrap();
    now(file.read(&system(), 0, BufMut::heap(1 << 20))).unwrap().filled().to_vec()
}

fn disk() -> MemoryDisk {
    MemoryDisk::new(MemoryOptions::default())
}

#[test]
fn a_full_file_system_says_so_and_gives_space_back() {
    let options = MemoryOptions { capacity_bytes: 5 * 4096, inodes_max: 3, ..Default::default() };
    let fs = MemoryFs::new(options);
    let file = create(&fs, "file");
    assert_eq!(write(&file, 0, &[1; 4 * 4096]), Ok(4 * 4096));
    assert_eq!(write(&file, 4 * 4096, &[1; 2 * 4096]), Ok(4096), "as much as fits");
    assert_eq!(write(&file, 6 * 4096, b"x"), Err(Errno::ENOSPC));
    assert_eq!(write(&file, 0, &[2; 4096]), Ok(4096), "over what is there");
    assert_eq!(now(fs.statfs(&system())).unwrap().blocks_free, 0);
    drop(create(&fs, "last"));
    let made = now(fs.make(&system(), fs.info().root, &name("x"), Make::Directory { mode: 0o755 }));
    assert_eq!(made.unwrap_err().errno(), Errno::ENOSPC);
    now(fs.remove(&system(), fs.info().root, &name("file"), RemoveKind::File)).unwrap();
    assert_eq!(now(fs.statfs(&system())).unwrap().blocks_free, 0, "still open");
    drop(file);
    let left = now(fs.statfs(&system())).unwrap();
    assert_eq!((left.blocks_free, left.files_free), (5, 1));
}

#[test]
fn hostile_offsets_are_errors() {
    let fs = MemoryFs::new(MemoryOptions::default());
    let file = create(&fs, "file");
    assert_eq!(write(&file, u64::MAX, b"x"), Err(Errno::EFBIG));
    assert_eq!(write(&file, i64::MAX as u64 - 1, b"xyz"), Ok(1));
    let cut = SetAttr { size: Some(u64::MAX), ..SetAttr::default() };
    assert_eq!(now(file.setattr(&system(), cut)).unwrap_err().errno(), Errno::EFBIG);
    for flags in [0, 0x01, 0x03, 0x10, 0x08, 0x20, -1] {
        for (at, len_bytes) in [(u64::MAX, u64::MAX), (0, u64::MAX), (1 << 62, 1 << 61), (3, 0)] {
            let what = dray_core::Allocate { flags, at, len_bytes };
            let _ = now(file.allocate(&system(), what)); // any answer, but an answer
        }
    }
    let copied = now(file.copy_range(&system(), u64::MAX, &*file, 1, u64::MAX));
    assert_eq!(copied.unwrap_err().errno(), Errno::EOVERFLOW);
    assert!(now(file.read(&system(), u64::MAX, BufMut::heap(10))).unwrap().is_empty());
    assert!(now(file.seek(&system(), u64::MAX, dray_core::Seek::Hole)).is_err());
}

#[test]
fn a_read_only_file_system_refuses_changes() {
    let fs = MemoryFs::new(MemoryOptions { read_only: true, ..Default::default() });
    let root = fs.info().root;
    let made = now(fs.make(&system(), root, &name("x"), Make::Directory { mode: 0o755 }));
    assert_eq!(made.unwrap_err().errno(), Errno::EROFS);
    now(fs.open(&system(), root, OpenHow::DIRECTORY)).unwrap();
}

#[test]
fn what_was_synced_survives_every_crash_and_the_rest_goes_in_order() {
    for seed in 0..200 {
        let disk = disk();
        let fs = disk.mount();
        let file = create(&fs, "synced");
        write(&file, 0, &[1; 10_000]).unwrap();
        sync(&file);
        write(&file, 4096, &[2; 4096]).unwrap();
        let later: Vec<_> = (0..10).map(|number| create(&fs, &format!("later-{number}"))).collect();
        disk.crash(seed);
        assert_eq!(now(fs.getattr(&system(), fs.info().root)).unwrap_err().errno(), Errno::EIO);
        let fs = disk.mount();
        let id = find(&fs, "synced").expect("the name was synced with the file");
        assert_eq!(id, file.id(), "ids survive");
        let bytes = content(&fs, id);
        assert_eq!(bytes.len(), 10_000);
        assert!(bytes[..4096].iter().chain(&bytes[8192..]).all(|&byte| byte == 1));
        let overwritten = bytes[4096];
        assert!(overwritten == 1 || overwritten == 2);
        assert!(bytes[4096..8192].iter().all(|&byte| byte == overwritten), "a chunk is whole");
        let left =
            later.iter().enumerate().map(|(n, _)| find(&fs, &format!("later-{n}")).is_some());
        assert!(left.collect::<Vec<_>>().is_sorted_by(|one, next| one >= next), "a prefix");
        let new = create(&fs, "new").id();
        assert!(later.iter().all(|file| file.id() != new), "lost numbers are not used again");
    }
}

#[test]
fn crashes_differ_by_seed_and_repeat() {
    let left = |seed| {
        let disk = disk();
        let fs = disk.mount();
        (0..20).for_each(|number| drop(create(&fs, &format!("{number}"))));
        disk.crash(seed);
        let fs = disk.mount();
        (0..20).filter(|number| find(&fs, &format!("{number}")).is_some()).count()
    };
    let all: std::collections::BTreeSet<usize> = (0..100).map(left).collect();
    assert!(all.len() > 10, "{all:?}");
    assert!((0..100).all(|seed| left(seed) == left(seed)));
}

#[test]
fn a_cut_that_was_synced_does_not_bring_data_back() {
    for seed in 0..200 {
        let disk = disk();
        let fs = disk.mount();
        let file = create(&fs, "file");
        write(&file, 0, &[7; 20_000]).unwrap();
        sync(&file);
        let cut = |size| SetAttr { size: Some(size), ..SetAttr::default() };
        now(file.setattr(&system(), cut(100))).unwrap();
        sync(&file);
        now(file.setattr(&system(), cut(20_000))).unwrap();
        write(&file, 10_000, b"new").unwrap();
        disk.crash(seed);
        let fs = disk.mount();
        let bytes = content(&fs, find(&fs, "file").unwrap());
        assert!(bytes.len() == 100 || bytes.len() == 20_000, "{}", bytes.len());
        assert_eq!(bytes[..100], [7; 100]);
        assert!(!bytes[100..].contains(&7), "seed {seed}");
    }
}

#[test]
fn data_written_behind_an_unsynced_cut_do_not_land_in_the_old_file() {
    for seed in 0..200 {
        let disk = disk();
        let fs = disk.mount();
        let file = create(&fs, "file");
        write(&file, 0, &[1; 8192]).unwrap();
        sync(&file);
        let cut = SetAttr { size: Some(0), ..SetAttr::default() };
        now(file.setattr(&system(), cut)).unwrap();
        write(&file, 0, &[2; 4096]).unwrap();
        disk.crash(seed);
        let fs = disk.mount();
        let bytes = content(&fs, find(&fs, "file").unwrap());
        match bytes.len() {
            8192 => assert!(bytes.iter().all(|&byte| byte == 1), "seed {seed}: the old file whole"),
            _ => assert!(!bytes.contains(&1), "seed {seed}: nothing of the old file"),
        }
    }
}

#[test]
fn a_directory_sync_makes_its_names_durable() {
    for seed in 0..50 {
        let disk = disk();
        let fs = disk.mount();
        drop(create(&fs, "one"));
        let root = now(fs.open(&system(), fs.info().root, OpenHow::DIRECTORY)).unwrap();
        sync(&root);
        drop(create(&fs, "two"));
        disk.crash(seed);
        assert!(find(&disk.mount(), "one").is_some());
    }
    let disk = disk();
    drop(create(&disk.mount(), "one"));
    disk.sync_all();
    disk.crash(1);
    assert!(find(&disk.mount(), "one").is_some());
}

#[test]
fn a_kill_loses_nothing_not_even_deleted_open_files() {
    let disk = disk();
    let fs = disk.mount();
    let file = create(&fs, "doomed");
    let doomed = file.id();
    write(&file, 0, b"unsynced").unwrap();
    drop(create(&fs, "kept"));
    now(fs.remove(&system(), fs.info().root, &name("doomed"), RemoveKind::File)).unwrap();
    disk.kill();
    assert_eq!(write(&file, 0, b"x"), Err(Errno::EIO));
    drop(file); // the dead process's object must not free what the new one has
    let fs = disk.mount();
    assert!(find(&fs, "kept").is_some());
    assert_eq!(now(fs.getattr(&system(), doomed)).unwrap().nlink, 0);
    assert_eq!(content(&fs, doomed), b"unsynced");
    disk.drop_orphans();
    let gone = now(fs.getattr(&system(), doomed)).unwrap_err();
    assert_eq!(gone.errno(), Errno::ESTALE);
}

#[test]
fn a_file_deleted_while_open_goes_with_the_machine() {
    let disk = disk();
    let fs = disk.mount();
    let free = || now(disk.mount().statfs(&system())).unwrap().blocks_free;
    let empty = free();
    let file = create(&fs, "doomed");
    write(&file, 0, &[1; 8192]).unwrap();
    now(fs.remove(&system(), fs.info().root, &name("doomed"), RemoveKind::File)).unwrap();
    disk.sync_all();
    disk.crash(1);
    let gone = now(disk.mount().getattr(&system(), file.id())).unwrap_err();
    assert_eq!((gone.errno(), free()), (Errno::ESTALE, empty));
}
