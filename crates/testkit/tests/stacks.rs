//! The directed suite and generated sequences through stacks: layers that do nothing, and the
//! whole stack over rpc, in fair weather and in foul.

mod site;

use std::path::Path;
use std::sync::Arc;

use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_core::FileSystem;
use dray_fabric::sim::Network;
use dray_testkit::conformance::{OptionalFeatures, suite};
use dray_testkit::fixture::{Ext4, TempDir, Tmpfs, block_on, simulate, skipped_without_root};
use dray_testkit::model::Quirks;

use site::{
    FOUL, IdleObserver, agree, generated, generated_with_seeds, layered, on_a_socket,
    on_leased_levels, on_posix, posix, simulated, within,
};

/// Seeds of the suite in foul weather.
const SEEDS: u64 = 25;

const ON_TMPFS: OptionalFeatures =
    OptionalFeatures { zero_range: false, shift_range: false, ..OptionalFeatures::ALL };

fn memory() -> Arc<dyn FileSystem> {
    Arc::new(MemoryFs::new(MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() }))
}

#[test]
fn layers_over_memory_keep_its_promises() {
    let idle = Arc::new(IdleObserver::default());
    let fs = layered(memory(), &idle);
    block_on(suite(&[fs.clone(), fs], OptionalFeatures::ALL));
    assert!(idle.calls() > 500, "{} calls", idle.calls());
}

#[test]
fn layers_over_memory_agree_with_the_model() {
    generated(200, |steps| {
        let fs = layered(memory(), &Arc::default());
        block_on(agree(vec![fs.clone(), fs], Quirks::NONE, steps))
    });
}

#[test]
fn layers_over_posix_agree_with_the_model() {
    if skipped_without_root() {
        return;
    }
    let tmpfs = Tmpfs::new(64 << 20).unwrap();
    on_posix(tmpfs.path(), 80, |fs, _, steps| {
        let fs = layered(fs, &Arc::default());
        block_on(agree(vec![fs.clone(), fs], Quirks::served(), steps))
    });
}

/// Over a server of memory in a simulation; foul weather begins once all are connected.
async fn over_memory(
    clients: usize,
    foul: bool,
) -> (Network, Vec<Arc<dyn FileSystem>>, Arc<IdleObserver>) {
    let (network, idle) = (Network::new(), Arc::default());
    let clients = simulated(&network, memory(), clients, &idle).await;
    if foul {
        network.set_weather(FOUL);
    }
    (network, clients, idle)
}

#[test]
fn the_whole_stack_over_memory_keeps_its_promises() {
    for clients in [1, 2] {
        simulate(1, async {
            let (_network, clients, idle) = over_memory(clients, false).await;
            suite(&clients, OptionalFeatures::ALL).await;
            // Each call is seen by three layers at the client, and by three at the server.
            assert!(idle.calls() > 1000, "{} calls", idle.calls());
        });
    }
}

#[test]
fn the_whole_stack_keeps_its_promises_in_foul_weather() {
    let mut breaks = 0;
    for seed in 0..SEEDS {
        simulate(seed, async {
            let (network, clients, _) = over_memory(2, true).await;
            suite(&clients, OptionalFeatures::ALL).await;
            breaks += network.breaks();
        });
    }
    assert!(breaks > SEEDS * 10, "{breaks} breaks: too fair a weather");
}

fn the_whole_stack_agrees(clients: usize, foul: bool, default_cases: u32) {
    generated_with_seeds(default_cases, |seed, steps| {
        simulate(seed, async {
            let (_network, clients, _) = over_memory(clients, foul).await;
            agree(clients, Quirks::NONE, steps).await
        })
    });
}

#[test]
fn the_whole_stack_agrees_with_the_model() {
    the_whole_stack_agrees(1, false, 150);
}

#[test]
fn two_clients_of_the_whole_stack_agree_with_the_model() {
    the_whole_stack_agrees(2, false, 150);
}

// proves: P2
#[test]
fn three_clients_of_the_whole_stack_agree_with_the_model() {
    the_whole_stack_agrees(3, false, 150);
}

// proves: P2
#[test]
fn three_clients_in_foul_weather_agree_with_the_model() {
    the_whole_stack_agrees(3, true, 150);
}

#[test]
fn the_whole_stack_within_a_process_keeps_its_promises() {
    for clients in [1, 2] {
        let idle = Arc::default();
        block_on(async {
            suite(&within(memory(), clients, &idle).await, OptionalFeatures::ALL).await
        });
        assert!(idle.calls() > 1000, "{} calls", idle.calls());
    }
}

/// So many clients of a server whose file system is a client of another server.
async fn on_two_levels(clients: usize) -> Vec<Arc<dyn FileSystem>> {
    let idle = Arc::default();
    let upper = within(memory(), 1, &idle).await.remove(0);
    within(upper, clients, &idle).await
}

// proves: P160
#[test]
fn two_levels_of_servers_keep_the_promises_of_one() {
    for clients in [1, 2] {
        block_on(async { suite(&on_two_levels(clients).await, OptionalFeatures::ALL).await });
    }
}

// proves: P160
#[test]
fn three_clients_of_two_levels_agree_with_the_model() {
    generated(50, |steps| {
        block_on(async { agree(on_two_levels(3).await, Quirks::NONE, steps).await })
    });
}

/// A client of each server, under leases.
// proves: P329
#[test]
fn two_levels_under_leases_keep_the_promises_of_one() {
    block_on(async { suite(&on_leased_levels(memory(), 1).await, OptionalFeatures::ALL).await });
}

// proves: P329
#[test]
fn clients_of_two_levels_under_leases_agree_with_the_model() {
    generated(25, |steps| {
        block_on(async { agree(on_leased_levels(memory(), 2).await, Quirks::NONE, steps).await })
    });
}

#[test]
fn three_clients_within_a_process_agree_with_the_model() {
    generated(100, |steps| {
        block_on(async {
            agree(within(memory(), 3, &Arc::default()).await, Quirks::NONE, steps).await
        })
    });
}

fn over_posix_keeps_its_promises(root: &Path, offers: OptionalFeatures) {
    let dir = TempDir::new("stacks").unwrap();
    block_on(async {
        let clients = on_a_socket(dir.path(), posix(root), 2, &Arc::default()).await;
        suite(&clients, offers).await;
    });
    dray_backends::posix::release().unwrap();
}

#[test]
fn the_whole_stack_over_tmpfs_keeps_its_promises() {
    if skipped_without_root() {
        return;
    }
    let tmpfs = Tmpfs::new(64 << 20).unwrap();
    over_posix_keeps_its_promises(tmpfs.path(), ON_TMPFS);
}

#[test]
fn the_whole_stack_over_ext4_keeps_its_promises() {
    if skipped_without_root() {
        return;
    }
    let ext4 = Ext4::new(64 << 20, "").unwrap();
    over_posix_keeps_its_promises(ext4.path(), OptionalFeatures::ALL);
}

fn over_posix_agrees(clients: usize) {
    if skipped_without_root() {
        return;
    }
    let tmpfs = Tmpfs::new(64 << 20).unwrap();
    on_posix(tmpfs.path(), 60, |fs, socket, steps| {
        block_on(async {
            let clients = on_a_socket(socket, fs, clients, &Arc::default()).await;
            agree(clients, Quirks::served(), steps).await
        })
    });
}

#[test]
fn two_clients_of_a_served_tmpfs_agree_with_the_model() {
    over_posix_agrees(2);
}

#[test]
fn three_clients_of_a_served_tmpfs_agree_with_the_model() {
    over_posix_agrees(3);
}
