//! Opens a file under a name that the caller remembers.

use std::sync::Arc;

use crate::{Context, Errno, Error, FileId, FileSystem, Name, OpenFile, OpenHow, Result};

/// Errors of a lookup by which the caller finds nothing under a name.
const NOT_FOUND: [Errno; 4] = [Errno::ENOENT, Errno::ENOTDIR, Errno::EACCES, Errno::EXDEV];

/// [`FileSystem::open_named`] in two steps.
pub async fn open_named<F: FileSystem + ?Sized>(
    fs: &F,
    cx: &Context,
    place: (FileId, &Name),
    id: FileId,
    how: OpenHow,
) -> Result<Arc<dyn OpenFile>> {
    must_be_named(fs, cx, place, id).await?;
    fs.open(cx, id, how).await
}

/// `ESTALE` unless the caller finds `id` under this name. Errors besides: those of the file system
/// below that say nothing of the name.
pub async fn must_be_named<F: FileSystem + ?Sized>(
    fs: &F,
    cx: &Context,
    (dir, name): (FileId, &Name),
    id: FileId,
) -> Result<()> {
    match fs.lookup(cx, dir, name).await {
        Ok(entry) if entry.id == id => Ok(()),
        Err(error) if !NOT_FOUND.contains(&error.errno()) => Err(error),
        _ => Err(Error::new(Errno::ESTALE).because("the name is that of another file now")),
    }
}
