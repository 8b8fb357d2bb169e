//! A projection over three servers with their own disks keeps what one server keeps.

use std::sync::Arc;

use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_core::{
    Buf, Context, CreateHow, Errno, FileSystem, Name, OpenHow, RemoveKind, SetAttr, Write,
};
use dray_testkit::conformance::{OptionalFeatures, suite};
use dray_testkit::fixture::{Ext4, block_on, skipped_without_root};
use dray_testkit::model::Quirks;

use crate::site::{agree, generated, own_disks, posix};

const SERVERS: usize = 3;
const FILE: &str = "layout = \"file\"";
const STRIPE: &str = "layout = \"stripe\"\nstripe = \"4K\"";
const LAYOUTS: [&str; 4] = [
    FILE,
    STRIPE,
    "layout = \"stripe\"\nstripe = \"64K\"\nwidth = 2",
    "layout = \"stripe\"\natomic = true",
];

/// Who removes a file looks at it once more behind that, for its objects.
const WHOLE: OptionalFeatures =
    OptionalFeatures { ids_end_at_once: false, ..OptionalFeatures::ALL };
/// Bytes between the places of two targets cannot move from one to the other.
const STRIPED: OptionalFeatures = OptionalFeatures { shift_range: false, ..WHOLE };

type Stack = Arc<dyn FileSystem>;

fn memory() -> Vec<Stack> {
    let options = || MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() };
    (0..SERVERS).map(|_| Arc::new(MemoryFs::new(options())) as Stack).collect()
}

fn features_of(layout: &str) -> OptionalFeatures {
    if layout == FILE { WHOLE } else { STRIPED }
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

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };

/// Writes files of 1 MiB, and answers which of them did not fit.
async fn fill(fs: &dyn FileSystem, cx: &Context, count: usize, layout: &str) -> Vec<usize> {
    let mut refused = Vec::new();
    for number in 0..count {
        let name = format!("f{number}");
        let name = Name::new(name.as_bytes()).unwrap();
        let (_, file) = fs.create(cx, fs.info().root, name, NEW).await.unwrap();
        let mut at = 0;
        while at < 1 << 20 {
            let data = Buf::from(vec![7; 64 << 10]);
            match file.write(cx, Write::at(at as u64), data).await {
                Ok(count) => at += count,
                Err(error) => {
                    assert_eq!(error.errno(), Errno::ENOSPC);
                    refused.push(number);
                    break;
                }
            }
        }
        // Behind a block that did not fit another one of the same write may have found room.
        let size = file.getattr(cx).await.unwrap().size;
        assert!(size == at as u64 || layout == STRIPE && (at as u64..=1 << 20).contains(&size));
        file.close(cx).await.unwrap();
    }
    refused
}

/// A full target refuses what belongs to it, and nothing else.
// proves: P176
#[test]
fn a_full_target_leaves_the_others_alone() {
    if skipped_without_root() {
        return;
    }
    // Ids are drawn: of so many whole files more than fit belong to the small target.
    for (layout, files) in [(FILE, 60), (STRIPE, 24)] {
        let disks = [64, 64, 6].map(|mib| Ext4::new(mib << 20, "").unwrap());
        block_on(async {
            let servers = disks.iter().map(|disk| posix(disk.path()) as Stack).collect();
            let clients = own_disks(servers, 2, layout).await;
            let (fs, cx) = (&*clients[0], Context::system());
            let refused = fill(fs, &cx, files, layout).await.len();
            assert!(refused > 0, "so much cannot have fitted");
            assert!(layout == STRIPE || refused < files / 2, "{refused} of {files} refused");
            // A cut needs no space, and a removal gives it back.
            let name = Name::new(b"f0").unwrap();
            let entry = fs.lookup(&cx, fs.info().root, name).await.unwrap();
            let cut = SetAttr { size: Some(10), ..SetAttr::default() };
            assert_eq!(clients[1].setattr(&cx, entry.id, cut).await.unwrap().size, 10);
            for number in 0..files {
                let name = format!("f{number}");
                let name = Name::new(name.as_bytes()).unwrap();
                fs.remove(&cx, fs.info().root, name, RemoveKind::File).await.unwrap();
            }
            dray_rt::sleep(std::time::Duration::from_millis(500)).await; // space is free a moment later
            assert_eq!(fill(fs, &cx, 3, layout).await, [0; 0], "three files fit");
        });
        dray_backends::posix::release().unwrap();
    }
}
