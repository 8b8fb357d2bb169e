//! What a call costs does not depend on how deep in a tree its directory is: counted in system calls.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use dray_backends::posix::{self, Inline, PosixFs, PosixOptions, Squash};
use dray_bench::syscalls_here::{ThreadCounter, mount, own_mounts, thread_id};
use dray_core::{
    Context, FileId, FileSystem, FsUuid, Identity, Make, Name, NodeId, OpenHow, Pid, RemoveKind,
    RenameHow, RequestId,
};
use dray_rt::{DriverKind, Executor};

const DEPTHS: [usize; 2] = [10, 2000];

/// Of so many times the cheapest counts.
const TIMES: usize = 5;

fn open(dir: &Path) -> Arc<PosixFs> {
    // All work on the counted thread, and nothing closed between for want of use.
    let (squash, inline) = (Squash::None, Inline::Always);
    let options =
        PosixOptions { squash, inline, inode_idle_secs: 1 << 30, ..PosixOptions::default() };
    PosixFs::open(dir, FsUuid(77), options).unwrap()
}

fn cx() -> Context {
    Context::new(NodeId(1), RequestId(0), Arc::new(Identity::default()), Pid(1))
}

fn name(name: &str) -> &Name {
    Name::new(name.as_bytes()).unwrap()
}

/// An overlay without handles. None where it cannot be had.
fn overlay(dir: &Path) -> Option<PathBuf> {
    if !mount("tmpfs", dir, 0, "") {
        return None;
    }
    for part in ["lower", "upper", "work", "merged"] {
        std::fs::create_dir(dir.join(part)).unwrap();
    }
    let (merged, at) = (dir.join("merged"), dir.display());
    let data = format!("lowerdir={at}/lower,upperdir={at}/upper,workdir={at}/work,index=off");
    mount("overlay", &merged, 0, &data).then_some(merged)
}

/// What a program does in each directory of a tree.
async fn use_directory(fs: &PosixFs, cx: &Context, above: FileId, dir: FileId) {
    assert_eq!(fs.lookup(cx, above, name("d")).await.unwrap().id, dir);
    fs.getattr(cx, dir).await.unwrap();
    assert_eq!(fs.parent(cx, dir).await.unwrap().id, above);
    let open = fs.open(cx, dir, OpenHow::DIRECTORY).await.unwrap();
    assert_eq!(open.readdir(cx, 0, 4096, true).await.unwrap().len(), 1);
    open.close(cx).await.unwrap();
    fs.make(cx, dir, name("new"), Make::Directory { mode: 0o755 }).await.unwrap();
    fs.rename(cx, (dir, name("new")), (dir, name("old")), RenameHow::Replace).await.unwrap();
    fs.remove(cx, dir, name("old"), RemoveKind::Directory).await.unwrap();
}

/// Makes a tree of one directory in the other, and uses some of them.
async fn costs(fs: &PosixFs, calls: &mut ThreadCounter) -> ([u64; 2], Vec<FileId>) {
    let (cx, mut path) = (cx(), vec![fs.info().root]);
    for at in 0..=DEPTHS[1] {
        let made = fs.make(&cx, path[at], name("d"), Make::Directory { mode: 0o755 }).await;
        path.push(made.unwrap().id);
    }
    let mut costs = [0; 2];
    for (cost, depth) in costs.iter_mut().zip(DEPTHS) {
        use_directory(fs, &cx, path[depth - 1], path[depth]).await;
        *cost = u64::MAX;
        // The heap of a thread grows by system calls, too: not each time.
        for _ in 0..TIMES {
            let before = calls.count();
            use_directory(fs, &cx, path[depth - 1], path[depth]).await;
            *cost = (*cost).min(calls.count() - before);
        }
    }
    (costs, path)
}

/// Of a server that has just started: the parents of all directories, from the bottom up.
async fn all_parents(fs: &PosixFs, calls: &mut ThreadCounter, path: &[FileId]) -> u64 {
    let (cx, before) = (cx(), calls.count());
    for pair in path.windows(2).rev() {
        assert_eq!(fs.parent(&cx, pair[1]).await.unwrap().id, pair[0]);
    }
    calls.count() - before
}

/// On a file system whose handles are ids, or on one for which the server has a table of paths.
fn check(below: impl FnOnce(&Path) -> Option<PathBuf>) {
    // SAFETY: geteuid cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        return eprintln!("skipped: not root");
    }
    if !own_mounts() {
        return eprintln!("skipped: no mounts of its own");
    }
    let Some(mut calls) = ThreadCounter::new(thread_id()) else {
        return eprintln!("skipped: system calls cannot be counted here");
    };
    let dir = tempfile::tempdir().unwrap();
    let Some(export) = below(dir.path()) else {
        return eprintln!("skipped: no overlay here");
    };
    let fs = open(&export);
    let run = || Executor::new(DriverKind::Epoll).unwrap();
    let ([flat, deep], path) = run().block_on(costs(&fs, &mut calls));
    assert!(deep <= flat + 2, "{flat} system calls at depth 10, {deep} at depth 2000");
    if fs.info().kind.ends_with("native ids") {
        drop(fs);
        let fs = open(&export);
        let all = run().block_on(all_parents(&fs, &mut calls, &path));
        let most = 20 * path.len() as u64;
        assert!(all <= most, "{all} system calls for {} directories", path.len());
    }
    posix::release().unwrap();
}

/// Each listing of a directory looked for the export's root above it. A program that removed a tree
/// of 4000 directories, one in the other, waited 44 s.
// proves: P16
#[test]
fn a_call_in_a_deep_directory_costs_what_it_costs_in_another() {
    check(|dir| Some(dir.to_owned()));
}

// proves: P16
#[test]
fn nor_does_it_cost_more_where_ids_are_of_a_table() {
    check(overlay);
}
