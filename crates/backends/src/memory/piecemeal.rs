//! Reads and writes in pieces, with other calls between them, for tests.

use std::time::Duration;

use dray_core::{Buf, BufMut, Context, Io, Result, Write};

use super::MemoryFile;

/// Pieces that a call is made in.
const PIECES: usize = 3;

/// Bytes of each piece but the last.
fn piece_bytes(all: usize) -> usize {
    all.div_ceil(PIECES).max(1)
}

impl MemoryFile {
    pub(super) async fn read_in_pieces(
        &self,
        pause: Duration,
        at: u64,
        mut into: BufMut,
    ) -> Io<BufMut> {
        let (before, piece) = (into.len(), piece_bytes(into.room()));
        loop {
            let done = (into.len() - before) as u64;
            let mut part = BufMut::heap(piece.min(into.room()));
            if let Err(error) = self.read_now(at.saturating_add(done), &mut part) {
                into.truncate(before);
                return Err((error, into));
            }
            into.put(part.filled());
            if part.room() > 0 || into.room() == 0 {
                return Ok(into);
            }
            dray_rt::sleep(pause).await;
        }
    }

    /// Without a pause in time, in which a death of the server would cut it in two. A process that
    /// crashes then leaves half of it, as on other file systems. Of an append each piece goes where
    /// the end is then.
    pub(super) async fn write_in_pieces(
        &self,
        cx: &Context,
        how: Write,
        from: Buf,
    ) -> Result<usize> {
        let (mut done, piece) = (0, piece_bytes(from.len()));
        loop {
            let part = from.slice(done..from.len().min(done + piece));
            let how = Write { at: how.at.saturating_add(done as u64), ..how };
            match self.write_now(cx, how, &part) {
                Ok(count) => done += count,
                Err(_) if done > 0 => return Ok(done),
                Err(error) => return Err(error),
            }
            if done >= from.len() {
                return Ok(done);
            }
            dray_rt::yield_now().await;
        }
    }
}
