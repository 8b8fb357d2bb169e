//! Sees to exports that rest: descriptors of inodes used lately are closed, so that the space of
//! files that somebody removes beside the server becomes free; and an export whose directory itself
//! has been removed or replaced is told of.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use dray_backends::posix::PosixFs;
use dray_core::{Context, Errno, FileSystem};

use crate::serve::exported::{Exported, Place};

/// How often; descriptors are kept for as long without use.
const TIDY_EVERY: Duration = Duration::from_secs(10);

/// Tidies an export for ever. One whose file system hangs waits for that, and no other does.
pub async fn keep(export: Arc<Exported>) {
    loop {
        dray_rt::sleep(TIDY_EVERY).await;
        let Some(fs) = export.fs() else { continue };
        fs.tidy().await;
        let place = place_of(fs, export.path()).await;
        if export.found(place) {
            tell(&export, place);
        }
    }
}

async fn place_of(fs: &PosixFs, path: &Path) -> Place {
    let root = fs.getattr(&Context::system(), fs.info().root).await;
    match root {
        Err(error) if error.errno() == Errno::ESTALE => Place::Gone,
        _ if fs.is_at(path).await => Place::There,
        _ => Place::Elsewhere,
    }
}

fn tell(export: &Exported, place: Place) {
    let (name, dir) = (&export.name, export.dir());
    match place {
        Place::There => log::warn!("export `{name}`: its directory {dir} is there again"),
        Place::Gone => log::error!(
            "export `{name}`: its directory {dir} is gone: it was removed, or another one is in its \
             place; whatever clients ask for fails with ESTALE; have the right one there, and \
             restart this server"
        ),
        Place::Elsewhere => log::error!(
            "export `{name}`: its directory is no longer at {dir}: it was moved, or something is mounted \
             over it; clients are served what they had there, wherever it is now; have it there \
             again, or restart this server and mount anew to have what is there"
        ),
    }
}
