//! The content of an open file whose blocks are at several servers that share one file system.
//!
//! A request is split at the ends of blocks, and its parts leave together. Each part is as atomic as a
//! request to one server; the whole request is not. Attributes, locks, appends and changes of the size are
//! at the home and are not split.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use dray_core::{Buf, BufMut, Context, Errno, FileId, Fut, Io, OpenFile, OpenHow, Result, Write};
use dray_rt::join_all;
use dray_rt::sync::Semaphore;

use super::parts;
use super::servers::PlacedServers;
use super::slices::SliceIndex;

/// Times that a part of a read is asked for once more because the file has grown meanwhile.
const SHORT_READS_MAX: usize = 3;

/// An open file at the servers of its blocks. Each further server is opened when its first block is used.
pub(super) struct StripedFile {
    shared: Arc<PlacedServers>,
    id: FileId,
    how: OpenHow,
    /// Open at the file's home.
    home: (SliceIndex, Arc<dyn OpenFile>),
    /// At each server but the home, in the order of the definition.
    further: Box<[OnceLock<Arc<dyn OpenFile>>]>,
    /// One opening at a time, so that no server is opened twice.
    opening: Semaphore,
    /// A further server could not open the file. All servers share the file system, so that the home can
    /// serve every block: it does so from then on.
    at_home_alone: AtomicBool,
}

/// A part of a request, within one block.
type Part = (SliceIndex, Range<u64>);

impl StripedFile {
    /// `inner` is open at `home`.
    pub(super) fn new(
        shared: &Arc<PlacedServers>,
        (home, how): (SliceIndex, OpenHow),
        inner: Arc<dyn OpenFile>,
    ) -> StripedFile {
        StripedFile {
            shared: shared.clone(),
            id: inner.id(),
            // Rights were checked at the home. The owner may have taken them away since.
            how: OpenHow { with_attr: false, ..how.of_created() },
            home: (home, inner),
            further: (0..shared.slices.count()).map(|_| OnceLock::new()).collect(),
            opening: Semaphore::new(1),
            at_home_alone: AtomicBool::new(false),
        }
    }

    /// The parts of a request; none if it lies within one block.
    fn parts(&self, at: u64, len_bytes: usize) -> Option<Vec<Part>> {
        let slices = &self.shared.slices;
        let split = slices.placement().is_split(at, len_bytes as u64);
        split.then(|| slices.pieces(self.id, at, len_bytes as u64).collect())
    }

    /// Every server where the file is open, the home first.
    pub(super) fn opened(&self) -> impl Iterator<Item = &Arc<dyn OpenFile>> {
        std::iter::once(&self.home.1).chain(self.further.iter().filter_map(OnceLock::get))
    }

    /// Syncs what has been written at every server that can have a block, of all writers. Errors: the
    /// first.
    pub(super) async fn sync(&self, cx: &Context, data_only: bool) -> Result<()> {
        let size = self.home.1.getattr(cx).await?.size;
        let mut files: Vec<&dyn OpenFile> = Vec::new();
        for server in self.shared.slices.slices_of(self.id, size) {
            let file = self.at(cx, server).await;
            if !files.iter().any(|other| std::ptr::addr_eq(*other, file)) {
                files.push(file);
            }
        }
        let syncs = files.into_iter().map(|file| file.sync(cx, data_only)).collect();
        join_all(syncs).await.into_iter().collect()
    }

    /// The file at the server of a block.
    async fn at(&self, cx: &Context, server: SliceIndex) -> &dyn OpenFile {
        if server == self.home.0 || self.at_home_alone.load(Ordering::Relaxed) {
            return &*self.home.1;
        }
        let place = &self.further[usize::from(server.0)];
        match place.get() {
            Some(file) => &**file,
            None => self.open_at(cx, server, place).await,
        }
    }

    async fn open_at<'a>(
        &'a self,
        cx: &Context,
        server: SliceIndex,
        place: &'a OnceLock<Arc<dyn OpenFile>>,
    ) -> &'a dyn OpenFile {
        let _only_one = self.opening.acquire().await; // never closed
        if let Some(file) = place.get() {
            return &**file;
        }
        let cx = &cx.without_request();
        let open = || self.shared.at(server).open(cx, self.id, self.how);
        match self.shared.taught(cx, (server, [self.id]), open).await {
            Ok(file) => &**place.get_or_init(|| file),
            Err(_) => {
                self.at_home_alone.store(true, Ordering::Relaxed);
                &*self.home.1
            }
        }
    }

    /// Whether the home has to make a call that another server has just refused, because that server
    /// has the file no longer.
    fn goes_home(&self, server: SliceIndex, errno: Errno) -> bool {
        let lost = matches!(errno, Errno::ESTALE | Errno::EBADF) && server != self.home.0;
        if lost {
            self.at_home_alone.store(true, Ordering::Relaxed);
        }
        lost
    }

    async fn read_part(
        &self,
        cx: &Context,
        (server, at): (SliceIndex, u64),
        into: BufMut,
    ) -> Io<BufMut> {
        let room = into.room();
        match self.at(cx, server).await.read(cx, at, into).await {
            Err((error, into)) if self.goes_home(server, error.errno()) => {
                self.home.1.read(cx, at, parts::with_room(into, room)).await
            }
            outcome => outcome,
        }
    }

    pub(super) async fn read(&self, cx: &Context, at: u64, mut into: BufMut) -> Io<BufMut> {
        let Some(parts) = self.parts(at, into.room()) else {
            let server = self.shared.slices.block_at(self.id, at);
            return self.read_part(cx, (server, at), into).await;
        };
        let rest = into.split_off(into.len()); // what is in there stays
        let room = rest.room();
        match self.read_parts(cx, &parts, rest).await {
            Ok(rest) => Ok(into.with_rest(rest, room)),
            Err(error) => Err((error, into.with_rest(BufMut::heap(0), room))),
        }
    }

    /// Reads into an empty buffer.
    async fn read_parts(&self, cx: &Context, parts: &[Part], into: BufMut) -> Result<BufMut> {
        let lens = lens_of(parts);
        let contexts: Vec<Context> = (0..parts.len()).map(|number| cx.part(number)).collect();
        let rooms = parts::split(into, &lens);
        let calls = parts.iter().zip(rooms).zip(&contexts).map(|(((server, range), room), cx)| {
            Box::pin(self.read_part(cx, (*server, range.start), room)) as Fut<'_, Io<BufMut>>
        });
        let read: Io<Vec<BufMut>> = join_all(calls.collect()).await.into_iter().collect();
        let mut rooms = read.map_err(|(error, _)| error)?;
        self.fill_gaps(cx, parts, &mut rooms).await?;
        Ok(parts::together(rooms, &lens))
    }

    /// A part that ended at the end of the file, before the file grew and the next part was read.
    async fn fill_gaps(&self, cx: &Context, parts: &[Part], rooms: &mut [BufMut]) -> Result<()> {
        for (number, (server, range)) in parts.iter().enumerate() {
            for _ in 0..SHORT_READS_MAX {
                let later = rooms[number + 1..].iter().any(|room| !room.is_empty());
                let room = &mut rooms[number];
                let at = range.start + room.len() as u64;
                if at == range.end || !later {
                    break;
                }
                let mut part = std::mem::replace(room, BufMut::heap(0));
                part = parts::with_room(part, (range.end - range.start) as usize);
                let rest = part.split_off(part.len());
                let left = rest.room();
                let rest = self.read_part(cx, (*server, at), rest).await;
                *room = part.with_rest(rest.map_err(|(error, _)| error)?, left);
            }
        }
        Ok(())
    }

    async fn write_part(
        &self,
        cx: &Context,
        (server, how): (SliceIndex, Write),
        from: Buf,
    ) -> Result<usize> {
        let file = self.at(cx, server).await;
        match file.write(cx, how, from.clone()).await {
            Err(error) if self.goes_home(server, error.errno()) => {
                self.home.1.write(cx, how, from).await
            }
            outcome => outcome,
        }
    }

    /// Answers what was written without a gap. Errors: that of the first part, if nothing was.
    pub(super) async fn write(&self, cx: &Context, how: Write, from: Buf) -> Result<usize> {
        if how.append {
            return self.home.1.write(cx, how, from).await; // the home knows where the end is
        }
        let Some(parts) = self.parts(how.at, from.len()) else {
            let server = self.shared.slices.block_at(self.id, how.at);
            return self.write_part(cx, (server, how), from).await;
        };
        let contexts: Vec<Context> = (0..parts.len()).map(|number| cx.part(number)).collect();
        let calls = parts.iter().zip(&contexts).map(|((server, range), cx)| {
            let bytes = (range.start - how.at) as usize..(range.end - how.at) as usize;
            let how = Write { at: range.start, ..how };
            Box::pin(self.write_part(cx, (*server, how), from.slice(bytes)))
                as Fut<'_, Result<usize>>
        });
        parts::written(join_all(calls.collect()).await, &lens_of(&parts))
    }
}

fn lens_of(parts: &[Part]) -> Vec<usize> {
    parts.iter().map(|(_, range)| (range.end - range.start) as usize).collect()
}
