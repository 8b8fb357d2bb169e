//! Sees to exports that rest: descriptors of inodes used lately are closed, so that the space of
//! files that somebody removes beside the server becomes free; and an export whose directory itself
//! has been removed is told of.

use std::sync::Arc;
use std::time::Duration;

use dray_backends::posix::PosixFs;
use dray_core::{Context, Errno, FileSystem};

use crate::serve::exported::Exported;

/// How often; descriptors are kept for as long without use.
const TIDY_EVERY: Duration = Duration::from_secs(10);

/// Tidies an export for ever. One whose file system hangs waits for that, and no other does.
pub async fn keep(export: Arc<Exported>) {
    loop {
        dray_rt::sleep(TIDY_EVERY).await;
        let Some(fs) = export.fs() else { continue };
        fs.tidy().await;
        if is_gone(fs).await && export.lost() {
            let (name, dir) = (&export.name, export.dir());
            log::error!(
                "export `{name}`: its directory {dir} is gone: it was removed, or another one is in \
                 its place; whatever clients ask for fails with ESTALE; have the right one there, \
                 and restart this server"
            );
        }
    }
}

/// Whether the exported directory itself has been removed.
async fn is_gone(fs: &PosixFs) -> bool {
    let root = fs.getattr(&Context::system(), fs.info().root).await;
    root.is_err_and(|error| error.errno() == Errno::ESTALE)
}
