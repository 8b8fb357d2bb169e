//! The whole content of a file in a data file of the cache, for a kernel that reads it by itself.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};

use dray_core::{BufMut, Context, Errno, Error, Fut, IO_MAX_BYTES, LocalCopy, OpenFile, Result};
use dray_rt::sync::Semaphore;

use crate::key::FileVersion;
use crate::store::{EntryInUse, LocalCache};

/// An entry all of which is resident. It stays while this is there.
pub(crate) struct EntryCopy {
    cache: Arc<LocalCache>,
    entry: EntryInUse,
    /// The version of the content.
    content: Mutex<FileVersion>,
    /// One refreshes at a time.
    turn: Semaphore,
}

impl EntryCopy {
    pub(crate) fn new(cache: &Arc<LocalCache>, entry: EntryInUse) -> EntryCopy {
        let content = Mutex::new(entry.entry().key.version);
        EntryCopy { cache: cache.clone(), entry, content, turn: Semaphore::new(1) }
    }

    fn content(&self) -> FileVersion {
        *self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn follow(&self, cx: &Context, from: &dyn OpenFile) -> Result<()> {
        let _turn = self.turn.acquire().await;
        let version = FileVersion::of(&from.getattr(cx).await?);
        if version == self.content() {
            return Ok(());
        }
        let entry = self.entry.entry().clone();
        self.on_disk(move || entry.leave_the_cache()).await?;
        let mut at = 0;
        loop {
            let read = from.read(cx, at, BufMut::heap(IO_MAX_BYTES)).await;
            let data = read.map_err(|(error, _)| error)?.freeze();
            let (entry, len_bytes) = (self.entry.entry().clone(), data.len() as u64);
            self.on_disk(move || entry.replace(at, &data)).await?;
            at += len_bytes;
            if len_bytes < IO_MAX_BYTES as u64 {
                break;
            }
        }
        let entry = self.entry.entry().clone();
        self.on_disk(move || entry.cut(at)).await?;
        *self.content.lock().unwrap_or_else(PoisonError::into_inner) = version;
        Ok(())
    }

    async fn on_disk(&self, work: impl Fn() -> std::io::Result<()> + Send + 'static) -> Result<()> {
        let cache = self.cache.clone();
        match self.cache.pool.run(move || cache.with_room(0, work)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => {
                self.cache.failed(&error);
                Err(Errno::EIO.into())
            }
            Err(_) => Err(Error::new(Errno::EAGAIN).because("too much waits for the cache's disk")),
        }
    }
}

impl LocalCopy for EntryCopy {
    fn file(&self) -> BorrowedFd<'_> {
        self.entry.entry().data()
    }

    fn refresh<'a>(&'a self, cx: &'a Context, from: &'a dyn OpenFile) -> Fut<'a, Result<()>> {
        Box::pin(self.follow(cx, from))
    }
}
