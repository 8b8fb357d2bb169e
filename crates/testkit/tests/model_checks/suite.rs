//! The directed tests, on what this room can reach.

use std::sync::Arc;

use dray_backends::memory::{MemoryDisk, MemoryFs, MemoryOptions};
use dray_backends::posix::{PosixFs, PosixOptions, Squash};
use dray_core::{FileSystem, FsUuid};
use dray_testkit::conformance::{OptionalFeatures, suite};
use dray_testkit::fixture::{Ext4, Tmpfs, block_on, simulate, skipped_without_root};

#[test]
fn memory_keeps_its_promises() {
    let fs = MemoryFs::new(MemoryOptions::default());
    block_on(suite(&[Arc::new(fs.clone()), Arc::new(fs)], OptionalFeatures::ALL));
}

#[test]
fn a_simulated_disk_keeps_them_in_the_simulator() {
    simulate(1, async {
        let disk = MemoryDisk::new(MemoryOptions::default());
        let client = || Arc::new(disk.mount()) as Arc<dyn FileSystem>;
        suite(&[client(), client()], OptionalFeatures::ALL).await;
    });
}

/// Two servers' processes are not meant: both clients are the same export.
fn posix_keeps_its_promises(root: &std::path::Path, offers: OptionalFeatures) {
    let options = PosixOptions { squash: Squash::None, ..PosixOptions::default() };
    let fs = PosixFs::open(root, FsUuid(7), options).unwrap();
    block_on(suite(&[fs.clone(), fs], offers));
    dray_backends::posix::release().unwrap();
}

#[test]
fn posix_on_tmpfs_keeps_its_promises() {
    if skipped_without_root() {
        return;
    }
    let tmpfs = Tmpfs::new(64 << 20).unwrap();
    let offers =
        OptionalFeatures { zero_range: false, shift_range: false, ..OptionalFeatures::ALL };
    posix_keeps_its_promises(tmpfs.path(), offers);
}

#[test]
fn posix_on_ext4_keeps_its_promises() {
    if skipped_without_root() {
        return;
    }
    let ext4 = Ext4::new(64 << 20, "").unwrap();
    posix_keeps_its_promises(ext4.path(), OptionalFeatures::ALL);
}
