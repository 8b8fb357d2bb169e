//! What sessions of before have left in their logs, because their machine died. The next mount writes it, if nobody has
//! changed the files since.

use std::io;
use std::path::Path;
use std::sync::Arc;

use dray_core::{
    BufMut, Context, Errno, Error, Fate, FileSystem, OpenFile, OpenHow, Pid, RequestId, Result,
};

use super::BATCH_MAX_BYTES;
use super::aside::{self, LostWrites};
use super::extents::KeptExtents;
use super::store::identity_of;
use super::unsent::UnsentWrites;
use crate::client::dirty_log::{FoundFile, LeftLog, WriteBackOptions, left_logs};
use crate::client::file::RemoteFile;
use crate::client::fs::RemoteFs;
use crate::client::session::ClientSession;

/// No server gives it to a write lease: what is left was written under one that is over.
const NO_LEASE: u64 = 0;

/// What became of the logs of sessions that are over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeftBehind {
    /// Files whose data are written now.
    pub files: u64,
    /// Bytes of that.
    pub bytes: u64,
    /// Files that others have changed, or that cannot be written. Their data are beside.
    pub aside: u64,
    /// Files whose data are in the log still, because neither could be done.
    pub left: u64,
}

impl ClientSession {
    /// Writes what sessions of before with the same export have left. To be called before programs see the files.
    /// Nothing without a log ([`ClientOptions::write_back`](crate::client::ClientOptions::write_back)).
    pub async fn write_left_behind(self: &Arc<ClientSession>) -> LeftBehind {
        let mut sum = LeftBehind::default();
        let Some(options) = self.link.options.write_back.clone() else { return sum };
        let logs = match self.own_left_logs(&options) {
            Ok(logs) => logs,
            Err(error) => {
                log::error!("{}: {error}", options.dir.display());
                return sum;
            }
        };
        for log in logs {
            let before = sum.left;
            for file in &log.found.files {
                self.write_left(&log.dir.path, file, &mut sum).await;
            }
            if sum.left == before
                && let Err(error) = log.remove()
            {
                log::warn!("{}: {error}", log.dir.path.display());
            }
        }
        if sum != LeftBehind::default() {
            let LeftBehind { files, bytes, aside, left } = sum;
            log::warn!(
                "what a mount of before had kept on this disk: {bytes} bytes of {files} files are written now, \
                 those of {aside} are kept aside, and those of {left} are still in {}",
                options.dir.display()
            );
        }
        sum
    }

    fn own_left_logs(&self, options: &WriteBackOptions) -> io::Result<Vec<LeftLog>> {
        let identity = identity_of(self);
        let mut logs = left_logs(&options.logs(), self.node())?;
        // One without segments is of a process that died before its first write.
        logs.retain(|log| {
            log.found.segments.is_empty() || log.found.identity.as_ref() == Some(&identity)
        });
        Ok(logs)
    }

    async fn write_left(
        self: &Arc<ClientSession>,
        dir: &Path,
        found: &FoundFile,
        sum: &mut LeftBehind,
    ) {
        let Some(first) = found.writes.first().map(|write| &write.record) else { return };
        let who = Arc::new(first.who.clone());
        let cx = Context::new(self.link.node, RequestId(0), who, Pid(first.pid));
        match self.write_left_file(&cx, found).await {
            Ok(()) => {
                sum.files += 1;
                sum.bytes += found.bytes();
            }
            // Who can reach the server later tries again.
            Err(error) if error.fate() == Fate::Retry => {
                log::error!(
                    "file {}: what is kept in {} is not written: {error}",
                    found.id,
                    dir.display()
                );
                sum.left += 1;
            }
            Err(error) => {
                let extents = extents_of(found);
                let lost =
                    LostWrites { id: found.id, who: &cx.who, extents: &extents, why: &error };
                match aside::keep(self.link.options.aside.as_deref(), &lost) {
                    Some(_) => sum.aside += 1,
                    None => sum.left += 1,
                }
            }
        }
    }

    async fn write_left_file(
        self: &Arc<ClientSession>,
        cx: &Context,
        found: &FoundFile,
    ) -> Result<()> {
        let fs = RemoteFs::new(self.clone());
        let flags = found.writes.first().map_or(libc::O_WRONLY, |write| write.record.flags);
        let kept_flags = libc::O_TRUNC | libc::O_CREAT | libc::O_EXCL;
        let how = OpenHow::new(flags & !kept_flags);
        let opened = fs.open(cx, found.id, how).await?;
        let written = self.write_batches(cx, (&*opened, &fs), found).await;
        let closed = opened.close(cx).await;
        written.and(closed)
    }

    async fn write_batches(
        &self,
        cx: &Context,
        (opened, fs): (&dyn OpenFile, &RemoteFs),
        found: &FoundFile,
    ) -> Result<()> {
        let file = opened.as_any().downcast_ref::<RemoteFile>();
        let file = file.ok_or_else(|| Error::new(Errno::EIO))?;
        let mut unsent = UnsentWrites::default();
        found.writes.iter().for_each(|write| {
            unsent.open(write.data.len(), BATCH_MAX_BYTES).add(write);
        });
        let mut base = found.base;
        while let Some(batch) = unsent.remove_first() {
            let request = RequestId(self.link.own_handle());
            let message = batch.message((NO_LEASE, base), (request, false));
            match file.write_back(cx, message).await {
                Ok(behind) => base = behind,
                // What was sent last before the machine died may be there, without a note of it.
                Err(error) if error.errno() == Errno::EREMCHG => {
                    let is_there = has_all(cx, fs, found).await;
                    return if is_there { file.sync_written(cx).await } else { Err(error) };
                }
                Err(error) => return Err(error),
            }
        }
        file.sync_written(cx).await
    }
}

/// All that was written to a file, each byte as it was written last.
fn extents_of(found: &FoundFile) -> KeptExtents {
    let mut extents = KeptExtents::default();
    found.writes.iter().for_each(|write| extents.write(write.record.at, &write.data));
    extents
}

/// Whether the file has all that is to be written already.
async fn has_all(cx: &Context, fs: &RemoteFs, found: &FoundFile) -> bool {
    let Ok(file) = fs.open(cx, found.id, OpenHow::new(libc::O_RDONLY)).await else { return false };
    let mut is_there = true;
    for (at, piece) in extents_of(found).iter() {
        is_there = is_there && has(cx, &*file, at, piece).await;
    }
    let closed = file.close(cx).await;
    is_there && closed.is_ok()
}

async fn has(cx: &Context, file: &dyn OpenFile, at: u64, piece: &[u8]) -> bool {
    let mut done = 0;
    while done < piece.len() {
        let into = BufMut::heap((piece.len() - done).min(dray_core::IO_MAX_BYTES));
        let Ok(read) = file.read(cx, at + done as u64, into).await else { return false };
        let read = read.filled();
        if read.is_empty() || !piece[done..].starts_with(read) {
            return false;
        }
        done += read.len();
    }
    true
}
