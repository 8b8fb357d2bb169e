//! A projection over three servers that share a file system keeps what one server keeps.

mod site;

use std::path::Path;
use std::sync::Arc;

use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_core::FileSystem;
use dray_testkit::conformance::{OptionalFeatures, suite};
use dray_testkit::fixture::{Ext4, Tmpfs, block_on, skipped_without_root};
use dray_testkit::model::Quirks;

use site::{agree, generated, placed, posix};

const SERVERS: usize = 3;
const STRIPED: &str = "layout = \"cluster-stripe\"\nstripe = \"4K\"";
const LAYOUTS: [&str; 6] = [
    "layout = \"cluster\"",
    STRIPED,
    "layout = \"cluster\"\nspread_creates = true",
    "layout = \"cluster-stripe\"\nstripe = \"8K\"\nwidth = 2\nspread_creates = true",
    "layout = \"cluster\"\ndata_hash = \"modulo\"\nmeta_hash = \"jenkins\"",
    "layout = \"cluster\"\ndata_hash = \"fnv-1a\"",
];

const ON_TMPFS: OptionalFeatures =
    OptionalFeatures { zero_range: false, shift_range: false, ..OptionalFeatures::ALL };

type Stack = Arc<dyn FileSystem>;

fn memory() -> Vec<Stack> {
    let options = MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() };
    let fs: Stack = Arc::new(MemoryFs::new(options));
    vec![fs; SERVERS]
}

/// As many servers as there would be processes: nothing in them is shared but the directory.
fn posix_servers(root: &Path) -> Vec<Stack> {
    (0..SERVERS).map(|_| posix(root) as Stack).collect()
}

// proves: P139
#[test]
fn a_cluster_of_memory_keeps_its_promises() {
    for layout in LAYOUTS {
        for clients in [1, 2] {
            block_on(async {
                suite(&placed(memory(), clients, layout).await, OptionalFeatures::ALL).await
            });
        }
    }
}

#[test]
fn two_clients_of_a_cluster_of_memory_agree_with_the_model() {
    for layout in &LAYOUTS[..2] {
        generated(60, |steps| {
            block_on(async { agree(placed(memory(), 2, layout).await, Quirks::NONE, steps).await })
        });
    }
}

fn on_posix_it_keeps_its_promises(root: &Path, offers: OptionalFeatures) {
    for (number, layout) in LAYOUTS[..2].iter().enumerate() {
        let dir = root.join(number.to_string());
        std::fs::create_dir(&dir).unwrap();
        block_on(async { suite(&placed(posix_servers(&dir), 2, layout).await, offers).await });
        dray_backends::posix::release().unwrap();
    }
}

#[test]
fn a_cluster_over_tmpfs_keeps_its_promises() {
    if skipped_without_root() {
        return;
    }
    let tmpfs = Tmpfs::new(64 << 20).unwrap();
    on_posix_it_keeps_its_promises(tmpfs.path(), ON_TMPFS);
}

// proves: P139
#[test]
fn a_cluster_over_ext4_keeps_its_promises() {
    if skipped_without_root() {
        return;
    }
    let ext4 = Ext4::new(64 << 20, "").unwrap();
    on_posix_it_keeps_its_promises(ext4.path(), OptionalFeatures::ALL);
}

// proves: P139
#[test]
fn three_clients_of_a_cluster_over_tmpfs_agree_with_the_model() {
    if skipped_without_root() {
        return;
    }
    let tmpfs = Tmpfs::new(64 << 20).unwrap();
    generated(60, |steps| {
        let words = |error: std::io::Error| error.to_string();
        let dir = tmpfs.path().join("case");
        std::fs::create_dir(&dir).map_err(words)?;
        let result = block_on(async {
            let clients = placed(posix_servers(&dir), 3, LAYOUTS[0]).await;
            agree(clients, Quirks::served(), steps).await
        });
        dray_backends::posix::release().map_err(|error| error.to_string())?;
        std::fs::remove_dir_all(&dir).map_err(words)?;
        result
    });
}
