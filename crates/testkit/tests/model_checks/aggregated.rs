//! Read-ahead and merged writes at the server change nothing that applications can see. The
//! directed suite and generated sequences run with the layer around memory and posix, and under a
//! whole server.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_core::{Buf, Context, CreateHow, Errno, FileSystem, FsUuid, IdMap, Name, OpenHow, Write};
use dray_fabric::sim::Network;
use dray_layers::aggregate::{
    Aggregate, AggregateCounts, AggregateFigures, AggregateOptions, PendingEra, PendingOptions,
};
use dray_testkit::conformance::{OptionalFeatures, suite};
use dray_testkit::fixture::{Ext4, TempDir, Tmpfs, block_on, simulate, skipped_without_root};
use dray_testkit::model::Quirks;
use dray_testkit::simulator::{WorkloadKind, run_merging, run_power_losses_merging};

use crate::site::{
    FOUL, IdleObserver, agree, generated, generated_with_seeds, on_posix, posix, simulated,
};

type Stack = Arc<dyn FileSystem>;

const ON_TMPFS: OptionalFeatures =
    OptionalFeatures { zero_range: false, shift_range: false, ..OptionalFeatures::ALL };

fn memory() -> Stack {
    Arc::new(MemoryFs::new(MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() }))
}

/// The layer around `fs`, with its pending data in `dir`.
fn aggregated(fs: Stack, dir: &Path) -> (Stack, Arc<AggregateFigures>) {
    let era = PendingEra { boot: 1, uuid: FsUuid(1) };
    let path = dir.join("pending");
    let _ = std::fs::remove_file(&path); // the one before may still be in use
    let pending = Some(PendingOptions { path, bytes: 8 << 20, era });
    let options = AggregateOptions { read_ahead_bytes: 8 << 20, pending, ..Default::default() };
    let failed: IdMap<_, Errno> = IdMap::default();
    let layer = Aggregate::new(fs, options, failed).expect("room for pending data");
    let figures = layer.figures();
    (Arc::new(layer), figures)
}

fn assert_used(counts: AggregateCounts) {
    assert!(counts.writes_merged > 0 && counts.read_hits > 0, "{counts:?}");
    assert_eq!(counts.late_errors, 0, "{counts:?}");
}

// proves: P165
#[test]
fn the_layer_over_memory_keeps_its_promises() {
    let dir = TempDir::new("aggregated").unwrap();
    let (fs, figures) = aggregated(memory(), dir.path());
    block_on(suite(&[fs.clone(), fs], OptionalFeatures::ALL));
    assert_used(figures.counts());
}

// proves: P165
#[test]
fn the_layer_over_memory_agrees_with_the_model() {
    let dir = TempDir::new("aggregated").unwrap();
    let merged = std::cell::Cell::new(0);
    generated(200, |steps| {
        let (fs, figures) = aggregated(memory(), dir.path());
        let agreed = block_on(agree(vec![fs.clone(), fs], Quirks::NONE, steps));
        merged.set(merged.get() + figures.counts().writes_merged);
        agreed
    });
    assert!(merged.get() > 20, "{} writes were merged", merged.get());
}

// proves: P165
#[test]
fn the_layer_over_posix_keeps_its_promises() {
    if skipped_without_root() {
        return;
    }
    let (tmpfs, dir) = (Tmpfs::new(64 << 20).unwrap(), TempDir::new("aggregated").unwrap());
    let (fs, figures) = aggregated(posix(tmpfs.path()), dir.path());
    block_on(suite(&[fs.clone(), fs], ON_TMPFS));
    dray_backends::posix::release().unwrap();
    assert_used(figures.counts());
}

// proves: P165
#[test]
fn the_layer_over_posix_agrees_with_the_model() {
    if skipped_without_root() {
        return;
    }
    let (tmpfs, dir) = (Tmpfs::new(64 << 20).unwrap(), TempDir::new("aggregated").unwrap());
    on_posix(tmpfs.path(), 80, |fs, _, steps| {
        let (fs, _) = aggregated(fs, dir.path());
        block_on(agree(vec![fs.clone(), fs], Quirks::served(), steps))
    });
}

async fn served(dir: &Path, clients: usize, foul: bool) -> (Network, Vec<Stack>) {
    let network = Network::new();
    let (fs, _) = aggregated(memory(), dir);
    let clients = simulated(&network, fs, clients, &Arc::new(IdleObserver::default())).await;
    if foul {
        network.set_weather(FOUL);
    }
    (network, clients)
}

// proves: P165
#[test]
fn a_server_with_the_layer_keeps_its_promises_in_foul_weather() {
    let dir = TempDir::new("aggregated").unwrap();
    for seed in 0..10 {
        simulate(seed, async {
            let (_network, clients) = served(dir.path(), 2, true).await;
            suite(&clients, OptionalFeatures::ALL).await;
        });
    }
}

// proves: P165
#[test]
fn clients_of_a_server_with_the_layer_agree_with_the_model() {
    let dir = TempDir::new("aggregated").unwrap();
    for (clients, foul) in [(2, false), (3, false), (2, true)] {
        generated_with_seeds(60, |seed, steps| {
            simulate(seed, async {
                let (_network, clients) = served(dir.path(), clients, foul).await;
                agree(clients, Quirks::NONE, steps).await
            })
        });
    }
}

/// Seeds of each kind of work in the simulator.
const SIMULATED_SEEDS: u64 = 2;

// proves: P166
#[test]
fn nothing_acknowledged_is_lost_when_a_server_that_merges_writes_dies_all_the_time() {
    let mut merged = 0;
    for kind in WorkloadKind::ALL {
        for seed in 0..SIMULATED_SEEDS {
            let kill_every = (seed % 2 == 0).then_some(Duration::from_millis(5));
            let ran = run_merging(kind, seed, kill_every);
            merged += ran.unwrap_or_else(|failure| panic!("{failure}")).merged;
        }
    }
    assert!(merged > 100, "{merged} writes were merged");
}

// proves: P167
#[test]
fn what_clients_kept_outlives_a_loss_of_power_of_a_server_that_merges_writes() {
    let mut merged = 0;
    for seed in 0..60 {
        merged +=
            run_power_losses_merging(seed).unwrap_or_else(|failure| panic!("{failure}")).merged;
    }
    assert!(merged > 100, "{merged} writes were merged");
}

/// Bytes that the disk of a directory was given to write.
fn written_to_disk(dir: &Path) -> u64 {
    let device = std::fs::metadata(dir).unwrap().dev();
    let (major, minor) = (libc::major(device), libc::minor(device));
    let stat = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/stat")).unwrap();
    // Documentation/block/stat.rst: the seventh field, in sectors of 512 bytes.
    512 * stat.split_whitespace().nth(6).unwrap().parse::<u64>().unwrap()
}

/// A program wrote at the pace of its calls while the disk did nothing, and waited for the disk at its sync.
// proves: P251
#[test]
fn what_fills_a_block_is_on_its_way_to_the_disk_before_any_sync() {
    // As many blocks as one client can have. The first write is passed on, so that the first block is not full.
    const BYTES: u64 = 4 << 20;
    const STEP_BYTES: usize = 128 << 10;
    // The kernel leaves what nobody has asked for in memory for 30 s (vm.dirty_expire_centisecs).
    const SOON: Duration = Duration::from_secs(20);
    if skipped_without_root() {
        return;
    }
    let (ext4, dir) = (Ext4::new(64 << 20, "").unwrap(), TempDir::new("aggregated").unwrap());
    let (fs, _) = aggregated(posix(ext4.path()), dir.path());
    let before = written_to_disk(ext4.path());
    let given = block_on(async {
        let (cx, name) = (Context::system(), Name::new(b"f").unwrap());
        let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };
        let (_, file) = fs.create(&cx, fs.info().root, name, how).await.unwrap();
        // A second after its first write a block goes as it is.
        for at in (0..BYTES).step_by(STEP_BYTES) {
            let data = Buf::from(vec![1; STEP_BYTES]);
            assert_eq!(file.write(&cx, Write::at(at), data).await.unwrap(), STEP_BYTES);
        }
        let given = async {
            while written_to_disk(ext4.path()) - before < BYTES - (1 << 20) {
                dray_rt::sleep(Duration::from_millis(20)).await;
            }
        };
        let given = dray_rt::timeout(SOON, given).await.is_ok();
        file.close(&cx).await.unwrap();
        given
    });
    drop(fs);
    dray_backends::posix::release().unwrap();
    assert!(given, "the disk has got {} bytes", written_to_disk(ext4.path()) - before);
}
