//! Mounts a file system in memory: `memory_mount MOUNTPOINT [strict|cto|immutable]
//! [classic|uring] [WORKERS]`. For measuring what the front end and the kernel cost
//! alone, and for trying things out. Ends when it is unmounted; prints its counts then.

use std::path::Path;
use std::sync::Arc;

use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_fuse::{Consistency, Device, MountOptions, Options, ServedMount, TransportWish, mount};

fn main() -> std::io::Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let word = |index: usize| args.get(index).map_or("", String::as_str);
    let consistency = match word(2) {
        "cto" => Consistency::CloseToOpen,
        "immutable" => Consistency::Immutable,
        _ => Consistency::Strict,
    };
    let transport = match word(3) {
        "uring" => TransportWish::Uring,
        _ => TransportWish::Classic,
    };
    let workers = word(4).parse().unwrap_or(0);
    let options = Options { consistency, transport, workers, ..Options::default() };
    let mount_options = MountOptions {
        source: "memory".to_owned(),
        default_permissions: options.kernel_checks_permissions(),
        allow_other: true,
        ..MountOptions::default()
    };
    let fs = Arc::new(MemoryFs::new(MemoryOptions::default()));
    let device = Device::new(mount(Path::new(word(1)), &mount_options)?)?;
    let mounted = ServedMount::start_with(fs, device, options)?;
    let stats = mounted.stats();
    println!(
        "{:?} on {} workers, {:?}",
        stats.transport,
        stats.workers,
        stats.session.flag_names()
    );
    let reporter = mounted.reporter();
    mounted.wait()?;
    println!("{:?}", reporter.stats().counts);
    Ok(())
}
