//! Monitors the exports while they are open.
//!
//! The monitor closes descriptors of inodes that were used lately. So the space of files that are removed
//! beside the server becomes free. It reports an export whose directory has been removed or replaced.
//! An export whose file system was unmounted, covered or has died is taken away from its clients, until the file
//! system is there again.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use dray_backends::backend::{Backend, ExportLocation};
use dray_core::{Context, Errno};

use crate::serve::export_state::{DirectoryState, ExportState};
use crate::serve::opening::ExportOpener;
use crate::serve::slices::ServedSince;

/// How often; descriptors are kept for as long without use. Mounts are looked at when they change.
const UPKEEP_EVERY: Duration = Duration::from_secs(10);
/// The same where a file system may die without anybody noticing.
const MORTAL_EVERY: Duration = Duration::from_secs(2);

/// Monitors an export for ever. One whose file system hangs waits for that, and no other does.
pub async fn run(opening: Arc<ExportOpener>) {
    let export = &opening.exported;
    let (mut kept_up, mut served_since) = (dray_rt::now(), ServedSince::default());
    loop {
        let mortal = export.fs().is_some_and(|fs| fs.is_mortal());
        let pause = if mortal { MORTAL_EVERY } else { UPKEEP_EVERY };
        let _ = dray_rt::timeout(pause, export.stirred()).await; // whichever comes first
        if export.starting().is_some() {
            continue;
        }
        let Some(fs) = export.fs() else { continue };
        let path = export.path();
        if is_to_be_withdrawn(export, &*fs, &path).await {
            drop(fs);
            if let Err(failure) = opening.withdraw() {
                log::error!("{}; trying again", failure.message);
                dray_rt::sleep(MORTAL_EVERY).await;
                export.stir();
            }
            continue;
        }
        if kept_up.elapsed() >= UPKEEP_EVERY {
            kept_up = dray_rt::now();
            fs.upkeep().await;
            release_unclaimed(&opening, &*fs);
            if let Some(slices) = &opening.slices {
                served_since.forget_removed(slices, &*fs, opening.server.lease() * 2);
            }
            let state = directory_state(&*fs, &path).await;
            if export.directory_is(state) {
                report(export, state);
            }
        }
    }
}

/// Lets go what was kept for clients of before. By then each has come back, or has been given up.
fn release_unclaimed(opening: &ExportOpener, fs: &dyn Backend) {
    let export = &opening.exported;
    if export.open_for().is_none_or(|open_for| open_for < opening.server.lease() * 2) {
        return;
    }
    fs.recovered();
    if let (Some(descriptor_store), Some(uuid)) = (&opening.descriptor_store, export.uuid()) {
        descriptor_store.release_inherited(|fs| fs == uuid);
    }
}

/// Whether what serves it is no longer what is at its place, or has died.
async fn is_to_be_withdrawn(export: &ExportState, fs: &dyn Backend, path: &Path) -> bool {
    let (name, dir) = (&export.name, export.dir());
    if fs.location(path).await == ExportLocation::OtherMount {
        log::error!(
            "export `{name}`: its file system is no longer mounted at {dir}, or is covered by another \
             mount; clients wait"
        );
        return true;
    }
    if fs.is_mortal() && fs.is_dead().await {
        log::error!("export `{name}`: the file system below {dir} has died; clients wait");
        return true;
    }
    false
}

async fn directory_state(fs: &dyn Backend, path: &Path) -> DirectoryState {
    let root = fs.getattr(&Context::system(), fs.info().root).await;
    match root {
        Err(error) if error.errno() == Errno::ESTALE => DirectoryState::Gone,
        _ if fs.location(path).await == ExportLocation::Elsewhere => DirectoryState::Elsewhere,
        _ => DirectoryState::There,
    }
}

fn report(export: &ExportState, state: DirectoryState) {
    let (name, dir) = (&export.name, export.dir());
    match state {
        DirectoryState::There => log::warn!("export `{name}`: its directory {dir} is there again"),
        DirectoryState::Gone => log::error!(
            "export `{name}`: its directory {dir} is gone: it was removed, or another one is in its \
             place; every call of a client fails with ESTALE; put the right one there, and \
             restart this server"
        ),
        DirectoryState::Elsewhere => log::error!(
            "export `{name}`: its directory is no longer at {dir}: it was moved; clients are served \
             the moved directory; move it back, or, to serve what is at {dir} now, restart this \
             server, say `dray accept {name}` and mount its clients again"
        ),
    }
}
