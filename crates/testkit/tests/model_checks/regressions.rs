//! Sequences that once failed, each with what was wrong.

use std::sync::Arc;

use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_backends::posix::{PosixFs, PosixOptions, Squash};
use dray_core::{FsUuid, RenameHow};
use dray_testkit::conformance::{FsTarget, PathTarget, run};
use dray_testkit::fixture::{TempDir, block_on, is_root};
use dray_testkit::model::Quirks;
use dray_testkit::step::{Action, Step};

fn step(who: u8, action: Action) -> Step {
    Step { client: 0, who, action }
}

/// On memory, on the bare file system below the temporary directory, and on the posix
/// backend over it.
fn hold(steps: &[Step]) {
    let fs = Arc::new(MemoryFs::new(MemoryOptions::default()));
    block_on(run(&mut FsTarget::new(vec![fs], Quirks::NONE), steps)).unwrap();
    if !is_root() {
        return eprintln!("left out: file systems, as not root");
    }
    let dir = TempDir::new("regression").unwrap();
    let mut target = PathTarget::new(&[dir.path()], Quirks::kernel()).unwrap();
    block_on(run(&mut target, steps)).unwrap();
    let dir = TempDir::new("regression").unwrap();
    let options = PosixOptions { squash: Squash::None, ..PosixOptions::default() };
    let fs = PosixFs::open(dir.path(), FsUuid(7), options).unwrap();
    block_on(run(&mut FsTarget::new(vec![fs], Quirks::served()), steps)).unwrap();
    dray_backends::posix::release().unwrap();
}

/// The model looked at rename's second path before it checked the right to search the directory
/// that the first one ends in. Linux walks the first path to its end.
#[test]
fn rename_checks_the_first_parent_before_the_second_path() {
    let (from, to) = (vec![1, 0], vec![2, 0]);
    hold(&[
        step(0, Action::Mkdir { path: vec![1], mode: 0o644 }),
        step(1, Action::Rename { from, to, how: RenameHow::Replace }),
    ]);
}

/// Memory looked at a descriptor's mode first: `EBADF` where Linux says `EISDIR`.
#[test]
fn copying_from_a_directory_is_eisdir() {
    hold(&[
        step(0, Action::Mkdir { path: vec![2], mode: 0o777 }),
        step(0, Action::Open { path: vec![2], flags: libc::O_RDONLY, slot: 1 }),
        step(0, Action::CopyRange { from: 1, at: 0, to: 1, to_at: 0, len: 4096 }),
    ]);
}

/// Memory said `EISDIR`, as truncate(2) does; ftruncate(2) looks at the descriptor first.
#[test]
fn cutting_an_open_directory_is_einval() {
    hold(&[
        step(0, Action::Mkdir { path: vec![0], mode: 0o777 }),
        step(0, Action::Open { path: vec![0], flags: libc::O_RDONLY, slot: 3 }),
        step(0, Action::Ftruncate { slot: 3, size: 0 }),
    ]);
}

/// The model took tmpfs to leave set-id bits alone in fallocate(2); it does not any more.
#[test]
fn fallocate_by_a_user_clears_set_id_bits() {
    let (flags, mode) = (libc::O_RDWR, 0o4755);
    hold(&[
        step(0, Action::Create { path: vec![1], flags, mode, exclusive: true, slot: 1 }),
        step(1, Action::Fallocate { slot: 1, flags: 0, at: 0, len: 4096 }),
        step(0, Action::Fstat { slot: 1 }),
    ]);
}

/// The posix backend compared the ranges as asked for: `EINVAL` where nothing is left to
/// copy behind the end of the file, and where the descriptor is at fault (`EBADF`).
#[test]
fn copying_within_a_file_looks_at_the_end_and_at_the_descriptor_first() {
    let create =
        |flags, slot| Action::Create { path: vec![0], flags, mode: 0o666, exclusive: false, slot };
    hold(&[
        step(0, create(libc::O_RDWR, 0)),
        step(0, Action::CopyRange { from: 0, at: 0, to: 0, to_at: 0, len: 4096 }),
        step(0, Action::Ftruncate { slot: 0, size: 3613 }),
        step(0, create(libc::O_RDONLY, 1)),
        step(0, Action::CopyRange { from: 0, at: 0, to: 1, to_at: 0, len: 4096 }),
    ]);
}

/// The target went on copying what it had itself put there. A copy that comes back short is
/// repeated, since file systems that share blocks copy whole ones first (xfs, btrfs). It is
/// repeated only for what there was when it began.
#[test]
fn copying_a_file_to_its_own_end_ends() {
    let (flags, mode) = (libc::O_RDWR, 0o666);
    hold(&[
        step(0, Action::Create { path: vec![0], flags, mode, exclusive: true, slot: 1 }),
        step(0, Action::Write { slot: 1, at: 0, len: 1, fill: 0 }),
        step(0, Action::CopyRange { from: 1, at: 0, to: 1, to_at: 1, len: 4096 }),
    ]);
}
