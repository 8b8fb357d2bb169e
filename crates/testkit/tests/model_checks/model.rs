//! Generated sequences: the model against everything that this room can reach.

use std::sync::Arc;

use dray_backends::memory::{MemoryDisk, MemoryFs, MemoryOptions};
use dray_backends::posix::{PosixFs, PosixOptions, Squash};
use dray_core::{FileSystem, FsUuid};
use dray_testkit::conformance::{FsTarget, PathTarget, run};
use dray_testkit::fixture::{self, Ext4, TempDir, Tmpfs, block_on, skipped_without_root};
use dray_testkit::model::Quirks;
use dray_testkit::step::{Step, sequences};

/// Steps of one sequence.
const STEPS: std::ops::Range<usize> = 1..120;

fn generated(default_cases: u32, case: impl Fn(&[Step]) -> Result<(), String>) {
    fixture::generated(&sequences(STEPS), default_cases, 20_000, |steps| case(&steps));
}

fn hold_against_model(clients: Vec<Arc<dyn FileSystem>>, steps: &[Step]) -> Result<(), String> {
    let mut target = FsTarget::new(clients, Quirks::NONE);
    block_on(run(&mut target, steps)).map_err(|divergence| format!("{divergence:?}"))
}

fn memory() -> MemoryFs {
    MemoryFs::new(MemoryOptions::default())
}

#[test]
fn memory_agrees_with_the_model() {
    generated(800, |steps| hold_against_model(vec![Arc::new(memory())], steps));
}

#[test]
fn three_clients_of_one_memory_agree_with_the_model() {
    generated(200, |steps| {
        let fs = memory();
        let client = || Arc::new(fs.clone()) as Arc<dyn FileSystem>;
        hold_against_model(vec![client(), client(), client()], steps)
    });
}

#[test]
fn a_simulated_disk_agrees_with_the_model() {
    generated(200, |steps| {
        let disk = MemoryDisk::new(MemoryOptions::default());
        hold_against_model(vec![Arc::new(disk.mount())], steps)
    });
}

fn on_directories(root: &std::path::Path, quirks: Quirks, default_cases: u32) {
    generated(default_cases, |steps| {
        let dir = root.join("case");
        std::fs::create_dir(&dir).map_err(|error| error.to_string())?;
        let mut target = PathTarget::new(&[&dir], quirks).map_err(|error| error.to_string())?;
        let result = block_on(run(&mut target, steps));
        drop(target);
        std::fs::remove_dir_all(&dir).map_err(|error| error.to_string())?;
        result.map_err(|divergence| format!("{divergence:?}"))
    });
}

/// Tells whether the model is right.
#[test]
fn a_bare_tmpfs_agrees_with_the_model() {
    if skipped_without_root() {
        return;
    }
    let tmpfs = Tmpfs::new(64 << 20).unwrap();
    on_directories(tmpfs.path(), Quirks::kernel(), 400);
}

/// The same on the usual file system of a server.
#[test]
fn a_bare_ext4_agrees_with_the_model() {
    if skipped_without_root() {
        return;
    }
    let ext4 = Ext4::new(64 << 20, "").unwrap();
    on_directories(ext4.path(), Quirks::kernel(), 200);
}

/// Two ways to one store, as two mounts are.
#[test]
fn two_paths_to_one_directory_agree_with_the_model() {
    if skipped_without_root() {
        return;
    }
    generated(60, |steps| {
        let dir = TempDir::new("two").map_err(|error| error.to_string())?;
        let roots = [dir.path(), dir.path()];
        let mut target = PathTarget::new(&roots, Quirks::kernel()).map_err(|e| e.to_string())?;
        block_on(run(&mut target, steps)).map_err(|divergence| format!("{divergence:?}"))
    });
}

fn posix_agrees(root: &std::path::Path, default_cases: u32) {
    generated(default_cases, |steps| {
        let dir = root.join("case");
        std::fs::create_dir(&dir).map_err(|error| error.to_string())?;
        let options = PosixOptions { squash: Squash::None, ..PosixOptions::default() };
        let fs = PosixFs::open(&dir, FsUuid(7), options).map_err(|error| error.to_string())?;
        let mut target = FsTarget::new(vec![fs.clone(), fs], Quirks::served());
        let result = block_on(run(&mut target, steps));
        drop(target);
        dray_backends::posix::release().map_err(|error| error.to_string())?;
        std::fs::remove_dir_all(&dir).map_err(|error| error.to_string())?;
        result.map_err(|divergence| format!("{divergence:?}"))
    });
}

#[test]
fn posix_on_tmpfs_agrees_with_the_model() {
    if skipped_without_root() {
        return;
    }
    let tmpfs = Tmpfs::new(64 << 20).unwrap();
    posix_agrees(tmpfs.path(), 200);
}

#[test]
fn posix_on_ext4_agrees_with_the_model() {
    if skipped_without_root() {
        return;
    }
    let ext4 = Ext4::new(64 << 20, "").unwrap();
    posix_agrees(ext4.path(), 100);
}
