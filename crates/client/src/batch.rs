//! Many small files in one call.

use std::sync::atomic::{AtomicUsize, Ordering};

use dray_core::{Fut, Result};
use dray_rt::join_all;
use dray_rt::sync::Semaphore;

use crate::client::Dir;

/// Files of one batch that are put at the same time. A session has 64 changes, of which others need some.
const PUTS_MAX: usize = 32;
/// Bytes of their data that are under way, in KiB. A larger file is under way alone.
const DATA_MAX_KIB: usize = 8 << 10;

impl Dir {
    /// Makes or replaces many files, each of them as [`Dir::put`] does. A file costs a round trip, and up to 32 are
    /// under way together. So a batch costs much less time than one file after the other.
    ///
    /// The results are in the order of `files`, which are pairs of a name and its content. A file that fails
    /// holds up no other one. If two of them have one name, either may be the last.
    pub async fn put_all(&self, files: &[(&str, &[u8])]) -> Vec<Result<()>> {
        let (next, room) = (AtomicUsize::new(0), Semaphore::new(DATA_MAX_KIB));
        let putting = |_| Box::pin(self.put_in_turn(files, (&next, &room))) as Fut<'_, _>;
        let put = join_all((0..files.len().min(PUTS_MAX)).map(putting).collect()).await;
        let mut results: Vec<(usize, Result<()>)> = put.into_iter().flatten().collect();
        results.sort_unstable_by_key(|(index, _)| *index);
        results.into_iter().map(|(_, result)| result).collect()
    }

    /// Puts one file after the other, each time the next that nobody has begun. Answers what came of them.
    async fn put_in_turn(
        &self,
        files: &[(&str, &[u8])],
        (next, room): (&AtomicUsize, &Semaphore),
    ) -> Vec<(usize, Result<()>)> {
        let mut results = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some((name, data)) = files.get(index) else { return results };
            let kib = data.len().div_ceil(1 << 10).clamp(1, DATA_MAX_KIB);
            let _room = room.acquire_many(kib as u32).await; // it is never closed
            results.push((index, self.put(name, data).await));
        }
    }
}
