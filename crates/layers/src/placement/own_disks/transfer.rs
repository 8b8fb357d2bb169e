//! Data of an open file: each piece at the target of its block, several at once.
//!
//! A call is atomic within a block. Of a call over several blocks another client may see a part.

use std::ops::Range;
use std::sync::Arc;

use dray_core::{
    Allocate, Buf, BufMut, Context, Errno, Error, Fut, Io, Lock, LockFamily, LockKind, LockOwner,
    LockRange, Op, Result, Seek, Write,
};

use super::file::OwnDisksFile;
use super::{HOME, ObjectId, step, unrepeated};
use crate::placement::{ServerIndex, parts};

type Piece = (ServerIndex, Range<u64>);

/// Calls that one fallocate(2) may become: more of it has to be asked for piece by piece.
const ALLOCATE_PIECES_MAX: u64 = 4096;
/// Blocks that a search for a hole looks at. Behind them it answers the end of the file.
const SEEK_BLOCKS_MAX: usize = 1024;
/// Steps of a request that change data, from this number on.
const DATA_STEPS: u32 = 1;

impl OwnDisksFile {
    fn pieces(&self, object: ObjectId, at: u64, len_bytes: u64) -> Vec<Piece> {
        self.shared.placement.pieces(object.key(), at, len_bytes).collect()
    }

    /// Whether all data are at one target, as one file with one size.
    fn is_whole(&self) -> bool {
        self.shared.placement.width() == 1
    }

    pub(super) async fn read_at(&self, cx: &Context, at: u64, mut into: BufMut) -> Io<BufMut> {
        if let Err(error) = self.must_read() {
            return Err((error.during(Op::Read), into));
        }
        let object = match self.object_of(cx).await {
            Ok(Some(object)) => object,
            Ok(None) => return self.stub.read(cx, at, into).await, // it is empty, or no file
            Err(error) => return Err((error, into)),
        };
        let before = into.len();
        let rest = into.split_off(before);
        let room = rest.room();
        match self.read_pieces(cx, object, at, rest).await {
            Ok(rest) => Ok(into.with_rest(rest, room)),
            Err((error, rest)) => Err((error, into.with_rest(rest, room))),
        }
    }

    /// Reads into an empty buffer.
    async fn read_pieces(
        &self,
        cx: &Context,
        object: ObjectId,
        at: u64,
        into: BufMut,
    ) -> Io<BufMut> {
        let pieces = self.pieces(object, at, into.room() as u64);
        if let [(target, _)] = pieces[..]
            && self.is_whole()
        {
            return self.read_piece(cx, (target, object), at, into).await; // short at the end only
        }
        let lens = lens_of(&pieces);
        let calls = pieces.iter().zip(parts::split(into, &lens)).map(|((target, range), part)| {
            Box::pin(self.read_piece(cx, (*target, object), range.start, part)) as Fut<'_, _>
        });
        let read: Io<Vec<BufMut>> = dray_rt::join_all(calls.collect()).await.into_iter().collect();
        let mut read = read?;
        if read.iter().zip(&lens).any(|(part, len_bytes)| part.len() < *len_bytes) {
            read = self.complete(cx, object, &pieces, read).await?;
        }
        Ok(parts::together(read, &lens))
    }

    async fn read_piece(
        &self,
        cx: &Context,
        (target, object): (ServerIndex, ObjectId),
        at: u64,
        into: BufMut,
    ) -> Io<BufMut> {
        match self.part(cx, target, object).await {
            Ok(Some(part)) => part.read(&step(cx, 0), at, into).await,
            Ok(None) => Ok(into),
            Err(error) => Err((error, into)),
        }
    }

    /// Where an object ends before the file does there is a hole. The size is asked for first, and
    /// then the object again. So a block that was written before the size grew is not missed.
    async fn complete(
        &self,
        cx: &Context,
        object: ObjectId,
        pieces: &[Piece],
        parts: Vec<BufMut>,
    ) -> Io<Vec<BufMut>> {
        let size = match self.shared.size_of(cx, object).await {
            Ok(size) => size,
            Err(error) => return Err((error, BufMut::heap(0))),
        };
        let calls = pieces.iter().zip(parts).map(|((target, range), part)| {
            Box::pin(self.complete_piece(cx, (*target, object), (range, size), part)) as Fut<'_, _>
        });
        dray_rt::join_all(calls.collect()).await.into_iter().collect()
    }

    async fn complete_piece(
        &self,
        cx: &Context,
        at: (ServerIndex, ObjectId),
        (range, size): (&Range<u64>, u64),
        mut part: BufMut,
    ) -> Io<BufMut> {
        let end = range.end.min(size);
        let have = range.start + part.len() as u64;
        if have >= end {
            return Ok(part);
        }
        part = parts::with_room(part, (range.end - range.start) as usize);
        let rest = part.split_off(part.len());
        let room = rest.room();
        let rest = self.read_piece(cx, at, have, rest).await?;
        part = part.with_rest(rest, room);
        let have = range.start + part.len() as u64;
        part.put_zeros(end.saturating_sub(have) as usize);
        Ok(part)
    }

    /// Writes each piece. What was written behind one that was not, or not all, does not count.
    pub(super) async fn write_at(
        &self,
        cx: &Context,
        object: ObjectId,
        (how, from): (Write, Buf),
    ) -> Result<usize> {
        let pieces = self.pieces(object, how.at, from.len() as u64);
        let mut calls = Vec::with_capacity(pieces.len());
        for (index, (target, range)) in pieces.iter().enumerate() {
            let begin = (range.start - how.at) as usize;
            let part = from.slice(begin..begin + (range.end - range.start) as usize);
            let how = Write { at: range.start, append: false, sync: how.sync, kill_set_id: false };
            let number = DATA_STEPS + index as u32;
            let call = self.write_piece(cx, (*target, object), number, (how, part));
            calls.push(Box::pin(call) as Fut<'_, Result<usize>>);
        }
        parts::written(dray_rt::join_all(calls).await, &lens_of(&pieces))
    }

    async fn write_piece(
        &self,
        cx: &Context,
        (target, object): (ServerIndex, ObjectId),
        number: u32,
        (how, data): (Write, Buf),
    ) -> Result<usize> {
        let part = self.made_part(cx, target, object).await?;
        part.write(&step(cx, number), how, data).await
    }

    /// One target knows its end. Over several the end is asked for under a lock of one object,
    /// which nobody else locks. A client that dies gives the lock up with its session. A client
    /// process that takes over gives up what the one before had open at all targets but the home.
    /// So the lock is not there.
    pub(super) async fn append(
        &self,
        cx: &Context,
        object: ObjectId,
        (how, from): (Write, Buf),
    ) -> Result<usize> {
        let first = self.shared.placement.block(object.key(), 0);
        if self.is_whole() {
            let how = Write { kill_set_id: false, ..how };
            return self.write_piece(cx, (first, object), DATA_STEPS, (how, from)).await;
        }
        let _alone = self.appending.acquire().await;
        let locked = self.shared.targets_of(object).find(|target| *target != HOME);
        let part = self.made_part(cx, locked.unwrap_or(first), object).await?;
        let owner = LockOwner::own(Arc::as_ptr(&part).cast::<()>() as u64);
        let lock = |kind| Lock {
            family: LockFamily::Flock,
            kind,
            range: LockRange::ALL,
            owner,
            pid: cx.pid,
        };
        let cx_of_lock = unrepeated(cx);
        part.lock(&cx_of_lock, lock(LockKind::Exclusive), true).await?;
        let written = async {
            let at = self.shared.size_of(cx, object).await?;
            self.write_at(cx, object, (Write { at, append: false, ..how }, from)).await
        };
        let written = written.await;
        // A caller that is interrupted leaves no lock behind.
        let cx_of_unlock = Context { cancel: None, ..cx_of_lock };
        let unlocked = part.lock(&cx_of_unlock, lock(LockKind::Unlock), false).await;
        written.and_then(|count| unlocked.map(|()| count))
    }

    pub(super) async fn allocate_parts(
        &self,
        cx: &Context,
        object: ObjectId,
        what: Allocate,
    ) -> Result<()> {
        let has = |flag| what.flags & flag != 0;
        let end = what.at.checked_add(what.len_bytes).filter(|end| *end <= i64::MAX as u64);
        match end {
            _ if what.len_bytes == 0 => return Err(Error::new(Errno::EINVAL).during(Op::Allocate)),
            None => return Err(Error::new(Errno::EFBIG).during(Op::Allocate)),
            Some(_) => {}
        }
        if self.is_whole() {
            let target = self.shared.placement.block(object.key(), 0);
            let part = self.made_part(cx, target, object).await?;
            return part.allocate(&step(cx, DATA_STEPS), what).await;
        }
        let moves = has(libc::FALLOC_FL_COLLAPSE_RANGE) || has(libc::FALLOC_FL_INSERT_RANGE);
        // As fallocate(2) has it, a hole that is punched keeps the size.
        let grows = has(libc::FALLOC_FL_PUNCH_HOLE) && !has(libc::FALLOC_FL_KEEP_SIZE);
        if moves || grows {
            return Err(Error::new(Errno::ENOTSUP).during(Op::Allocate));
        }
        if has(libc::FALLOC_FL_PUNCH_HOLE) {
            // A hole in what is another target's block is a hole already.
            for target in self.shared.targets_of(object) {
                if let Some(part) = self.part(cx, target, object).await? {
                    part.allocate(&step(cx, DATA_STEPS + u32::from(target.0)), what).await?;
                }
            }
            return Ok(());
        }
        let first = what.at / self.shared.placement.stripe_bytes();
        let last = what.at.saturating_add(what.len_bytes) / self.shared.placement.stripe_bytes();
        if last - first >= ALLOCATE_PIECES_MAX {
            return Err(Error::new(Errno::ENOTSUP).during(Op::Allocate));
        }
        for (index, (target, range)) in
            self.pieces(object, what.at, what.len_bytes).into_iter().enumerate()
        {
            let part = self.made_part(cx, target, object).await?;
            let len_bytes = range.end - range.start;
            let piece = Allocate { at: range.start, len_bytes, ..what };
            part.allocate(&step(cx, DATA_STEPS + index as u32), piece).await?;
        }
        Ok(())
    }

    pub(super) async fn seek_in(
        &self,
        cx: &Context,
        object: ObjectId,
        (at, what): (u64, Seek),
    ) -> Result<u64> {
        let size = self.shared.size_of(cx, object).await?;
        if at >= size {
            return Err(Error::new(Errno::ENXIO).during(Op::Seek));
        }
        match what {
            Seek::Data => self.next_data(cx, object, at).await,
            Seek::Hole => self.next_hole(cx, object, at..size).await,
        }
    }

    /// The first data of any object: each has data in its own blocks only.
    async fn next_data(&self, cx: &Context, object: ObjectId, at: u64) -> Result<u64> {
        let mut found = None;
        for target in self.shared.targets_of(object) {
            if let Some(data) = self.seek_part(cx, (target, object), (at, Seek::Data)).await? {
                found = Some(found.map_or(data, |before: u64| before.min(data)));
            }
        }
        found.ok_or_else(|| Error::new(Errno::ENXIO).during(Op::Seek))
    }

    /// Block by block, since an object has holes where other targets have their blocks.
    async fn next_hole(&self, cx: &Context, object: ObjectId, range: Range<u64>) -> Result<u64> {
        let size = range.end;
        let blocks = self.shared.placement.pieces(object.key(), range.start, size - range.start);
        for (target, block) in blocks.take(SEEK_BLOCKS_MAX) {
            let hole = self.seek_part(cx, (target, object), (block.start, Seek::Hole)).await?;
            match hole {
                Some(hole) if hole >= block.end => {}
                Some(hole) => return Ok(hole.max(block.start)),
                None => return Ok(block.start), // behind the object's end
            }
        }
        Ok(size)
    }

    /// None: there is no such thing behind `at`, or no object.
    async fn seek_part(
        &self,
        cx: &Context,
        (target, object): (ServerIndex, ObjectId),
        (at, what): (u64, Seek),
    ) -> Result<Option<u64>> {
        let Some(part) = self.part(cx, target, object).await? else { return Ok(None) };
        match part.seek(&unrepeated(cx), at, what).await {
            Ok(found) => Ok(Some(found)),
            Err(error) if error.errno() == Errno::ENXIO => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn lens_of(pieces: &[Piece]) -> Vec<usize> {
    pieces.iter().map(|(_, range)| (range.end - range.start) as usize).collect()
}
