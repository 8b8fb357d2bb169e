//! Writes what an earlier server has left pending, before anybody is served.

use std::io;
use std::path::Path;
use std::sync::Arc;

use dray_core::{Context, Errno, FileId, FileSystem, IdMap, OpenFile, OpenHow, Result};

use super::BLOCK_BYTES;
use super::pending::LateWrite;
use super::store::{LeftBlock, PendingEra, PendingStore};

/// What became of pending data that were left.
#[derive(Debug, Default)]
pub struct Recovered {
    /// Written now.
    pub bytes: u64,
    /// Of files that are gone: nobody could have read them.
    pub gone_bytes: u64,
    /// Files of which data could not be written. Who opens one again gets the error.
    pub failed: IdMap<FileId, Errno>,
}

/// Writes to `fs` what is pending in the file at `path`. Afterwards the file holds nothing. `is_lost`: what
/// serves the export has gone. Errors: those of the file; then nothing is lost, and it can be tried again.
pub async fn recover(
    path: &Path,
    era: PendingEra,
    fs: &dyn FileSystem,
    is_lost: impl Fn() -> bool,
) -> io::Result<Recovered> {
    let mut recovered = Recovered::default();
    let left = PendingStore::left(path, era)?.unwrap_or_default();
    let cx = Context { reclaims: true, ..Context::system().uncounted() };
    for block in left {
        let bytes = block.extents.bytes();
        match write(&cx, fs, &block).await {
            Ok(()) => recovered.bytes += bytes,
            Err(_) if is_lost() => return Err(io::Error::other("the file system below has gone")),
            Err(error) if matches!(error.errno(), Errno::ESTALE | Errno::ENOENT) => {
                recovered.gone_bytes += bytes;
            }
            Err(error) => {
                let ino = block.id.ino;
                log::error!("{bytes} pending bytes of inode {ino} could not be written: {error}");
                recovered.failed.insert(block.id, error.errno());
            }
        }
        block.lease.clear();
    }
    Ok(recovered)
}

async fn write(cx: &Context, fs: &dyn FileSystem, block: &LeftBlock) -> Result<()> {
    let file: Arc<dyn OpenFile> = fs.open(cx, block.id, OpenHow::new(libc::O_WRONLY)).await?;
    let late = LateWrite {
        at: block.block.saturating_mul(BLOCK_BYTES as u64),
        lease: block.lease.clone(),
        extents: block.extents,
        cx: cx.clone(),
        file: file.clone(),
        kill_set_id: block.kill_set_id,
    };
    for extent in block.extents.iter() {
        late.write_extent(extent, |_| {}).await?;
    }
    file.close(cx).await
}
