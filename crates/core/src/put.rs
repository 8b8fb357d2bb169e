//! Creates or replaces a whole small file.

use crate::{
    Buf, Context, CreateHow, Errno, Error, FileId, FileSystem, IO_MAX_BYTES, LockOwner, Name,
    OpenFile, OpenHow, Result, Write,
};

/// [`FileSystem::put`] in several calls: create, write, flush and close.
pub async fn put_in_steps<F: FileSystem + ?Sized>(
    fs: &F,
    cx: &Context,
    (dir, name): (FileId, &Name),
    mode: u32,
    data: Buf,
) -> Result<()> {
    must_fit_one_call(&data)?;
    let open = OpenHow::new(libc::O_WRONLY | libc::O_TRUNC);
    let how = CreateHow { open, mode, exclusive: false };
    let (_, file) = fs.create(cx, dir, name, how).await?;
    let written = write_all(&*file, cx, data).await;
    let flushed = file.flush(cx, LockOwner::own(0)).await;
    let closed = file.close(cx).await;
    written.and(flushed).and(closed)
}

/// `EINVAL` for more data than one call may carry.
pub fn must_fit_one_call(data: &Buf) -> Result<()> {
    match data.len() {
        0..=IO_MAX_BYTES => Ok(()),
        _ => Err(Error::new(Errno::EINVAL).because("the data do not fit into one call")),
    }
}

/// Writes all of `data` at the beginning of `file`. Errors: those of [`OpenFile::write`], and `EIO`
/// for a write that writes nothing.
async fn write_all(file: &dyn OpenFile, cx: &Context, mut data: Buf) -> Result<()> {
    let mut at = 0;
    while !data.is_empty() {
        let count = file.write(cx, Write::at(at), data.clone()).await?;
        if count == 0 {
            return Err(Error::new(Errno::EIO).because("a write wrote no bytes"));
        }
        (at, data) = (at + count as u64, data.slice(count.min(data.len())..data.len()));
    }
    Ok(())
}
