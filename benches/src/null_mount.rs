//! A mount of the null file system by dray's own front end: what FUSE costs without a network and without
//! a file system below. With `relay` each read is a bare TCP round trip and a read(2) as well. That is the
//! least that forwarding costs with these processes.

use std::path::Path;
use std::sync::Arc;

use dray_backends::null::{NullFs, ReadHook};
use dray_core::FsUuid;
use dray_fuse::{Device, MountOptions, Options, ServedMount, Transport, TransportWish, mount};

use crate::{CommandResult, context, relay};

/// Size of its one file, bytes: more than any load reads.
const FILE_BYTES: u64 = 1 << 40;

/// Mounts at `at` and serves until the mount ends. Reads are relayed to a server of the file `relay`, if
/// there is one. Errors: those of mounting, and a `transport` that is unknown or that this kernel does not offer.
pub fn serve(at: &Path, transport: &str, relay: Option<&str>) -> CommandResult {
    let (wish, wanted) = match transport {
        "classic" => (TransportWish::Classic, Transport::Classic),
        "uring" => (TransportWish::Uring, Transport::Uring),
        other => return Err(format!("no transport is called {other}")),
    };
    let options = Options { transport: wish, ..Options::default() };
    let mount_options = MountOptions {
        source: "null".to_owned(),
        default_permissions: options.kernel_checks_permissions(),
        ..MountOptions::default()
    };
    let place = at.display().to_string();
    let descriptor = mount(at, &mount_options).map_err(context(&place))?;
    let device = Device::new(descriptor).map_err(context(&place))?;
    let hook = relay.map(|file| -> ReadHook {
        let file = file.to_owned();
        Arc::new(move || relay::ask(&file))
    });
    let fs = NullFs::with_hook(FsUuid(1), FILE_BYTES, hook);
    let mounted = ServedMount::start_with(fs, device, options).map_err(context(&place))?;
    if mounted.stats().transport != wanted {
        return Err(format!("{place}: the kernel does not offer the transport {transport}"));
    }
    mounted.wait().map_err(context(&place))
}
