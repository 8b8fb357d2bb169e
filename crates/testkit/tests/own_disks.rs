//! A projection over three servers with their own disks keeps what one server keeps.

mod site;

use std::sync::Arc;

use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_core::FileSystem;
use dray_testkit::conformance::{OptionalFeatures, suite};
use dray_testkit::fixture::{Ext4, block_on, skipped_without_root};
use dray_testkit::model::Quirks;

use site::{agree, generated, own_disks, posix};

const SERVERS: usize = 3;
const FILE: &str = "layout = \"file\"";
const STRIPE: &str = "layout = \"stripe\"\nstripe = \"4K\"";
const LAYOUTS: [&str; 4] = [
    FILE,
    STRIPE,
    "layout = \"stripe\"\nstripe = \"64K\"\nwidth = 2",
    "layout = \"stripe\"\natomic = true",
];

/// Bytes between the places of two targets cannot move from one to the other.
const STRIPED: OptionalFeatures = OptionalFeatures { shift_range: false, ..OptionalFeatures::ALL };

type Stack = Arc<dyn FileSystem>;

fn memory() -> Vec<Stack> {
    let options = || MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() };
    (0..SERVERS).map(|_| Arc::new(MemoryFs::new(options())) as Stack).collect()
}

fn features_of(layout: &str) -> OptionalFeatures {
    if layout == FILE { OptionalFeatures::ALL } else { STRIPED }
}

// proves: P170
#[test]
fn own_disks_of_memory_keep_their_promises() {
    for layout in LAYOUTS {
        for clients in [1, 2] {
            block_on(async {
                let clients = own_disks(memory(), clients, layout).await;
                suite(&clients, features_of(layout)).await
            });
        }
    }
}

// proves: P170
#[test]
fn two_clients_of_own_disks_of_memory_agree_with_the_model() {
    for layout in &LAYOUTS[..2] {
        generated(60, |steps| {
            block_on(async {
                agree(own_disks(memory(), 2, layout).await, Quirks::NONE, steps).await
            })
        });
    }
}

// proves: P170
#[test]
fn own_disks_over_ext4_keep_their_promises() {
    if skipped_without_root() {
        return;
    }
    for layout in &LAYOUTS[..2] {
        let disks: Vec<Ext4> = (0..SERVERS).map(|_| Ext4::new(64 << 20, "").unwrap()).collect();
        block_on(async {
            let servers = disks.iter().map(|disk| posix(disk.path()) as Stack).collect();
            suite(&own_disks(servers, 2, layout).await, features_of(layout)).await
        });
        dray_backends::posix::release().unwrap();
    }
}
