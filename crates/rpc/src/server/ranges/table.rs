//! The table of ranges of one export.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use dray_core::{FileId, IdMap};
use dray_rt::random_u64;

use super::grant::{RangeGrant, ReadGrant};
use super::queue::{Arrival, RangeQueue, RangeRequest};
use super::{Span, Stamps};

/// Independent parts of the table, so that threads rarely meet.
const SHARDS: usize = 64;

/// Queues without entries that a shard keeps for files to come, so that a call rarely takes memory. One more is
/// that of its last unused file.
/// The second number is the most entries that one of them has room for.
const SPARE_MAX: usize = 8;
const SPARE_ENTRIES_MAX: usize = 64;

/// The ranges in use of one export, and its stamps.
pub(crate) struct RangeTable {
    shards: Box<[Mutex<Shard>]>,
    /// Grants of changes that a server's death cut short.
    cut: AtomicUsize,
    /// The stamps of its changes.
    pub(crate) stamps: Stamps,
}

struct Shard {
    next_arrival: u64,
    /// Counts the changes that are under way, or wait to be.
    version: u64,
    files: IdMap<FileId, FileRanges>,
    /// The file whose ranges were all given back last. It stays among the files until another one takes its
    /// place, because its next call often comes soon.
    last_unused: Option<FileId>,
    spare: Vec<FileRanges>,
}

/// The ranges in use of one file or directory.
#[derive(Default)]
struct FileRanges {
    /// Changes, of which those of the same are under way one after the other.
    changes: RangeQueue<Began>,
    /// Bytes that are being read, which is shared, or written, with the stamp of the change.
    data: RangeQueue<Option<u64>>,
    /// Wakers of tasks that wait until no write with this stamp or an earlier one is under way.
    settling: Vec<(u64, Waker)>,
}

/// The server process that began a change that is under way.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Began {
    Here,
    /// A server that died; reads wait for it, too.
    Before,
}

impl Default for RangeTable {
    fn default() -> RangeTable {
        let shard = || Shard {
            next_arrival: 0,
            // Another run of the server has other versions of files than the one before it.
            version: (random_u64() >> 1) | 1,
            files: IdMap::default(),
            last_unused: None,
            spare: Vec::new(),
        };
        RangeTable {
            shards: (0..SHARDS).map(|_| Mutex::new(shard())).collect(),
            cut: AtomicUsize::new(0),
            stamps: Stamps::default(),
        }
    }
}

impl Shard {
    fn arrival(&mut self) -> Arrival {
        self.next_arrival += 1;
        Arrival(self.next_arrival)
    }

    fn file(&mut self, file: FileId) -> &mut FileRanges {
        let spare = &mut self.spare;
        self.files.entry(file).or_insert_with(|| spare.pop().unwrap_or_default())
    }

    /// A file has neither granted nor requested ranges. Forgets the one before it.
    fn note_unused(&mut self, file: FileId) {
        let before = self.last_unused.replace(file).filter(|before| *before != file);
        if let Some(before) = before
            && self.files.get(&before).is_some_and(FileRanges::is_unused)
            && let Some(ranges) = self.files.remove(&before)
            && ranges.is_small()
            && self.spare.len() < SPARE_MAX
        {
            self.spare.push(ranges);
        }
    }
}

impl FileRanges {
    fn is_unused(&self) -> bool {
        self.changes.is_empty() && self.data.is_empty() && self.settling.is_empty()
    }

    /// Whether it has little memory, so that it may be kept.
    fn is_small(&self) -> bool {
        self.changes.capacity().max(self.data.capacity()) <= SPARE_ENTRIES_MAX
    }

    /// Whether no write is under way whose stamp is `upto` or an earlier one. The writes that wait
    /// get later stamps.
    fn is_settled(&self, upto: u64) -> bool {
        self.data.having(Span::ALL).flatten().all(|stamp| *stamp > upto)
    }

    /// Adds to `wakers` those that waited for writes that are over.
    fn wake_settled(&mut self, wakers: &mut Vec<Waker>) {
        if self.settling.is_empty() {
            return; // nearly always
        }
        let oldest = self.data.having(Span::ALL).flatten().min().copied();
        let settled = |upto: u64| oldest.is_none_or(|oldest| oldest > upto);
        wakers.extend(self.settling.extract_if(.., |one| settled(one.0)).map(|(_, waker)| waker));
    }
}

impl RangeTable {
    fn shard(&self, file: FileId) -> MutexGuard<'_, Shard> {
        // Fibonacci hashing (Knuth 6.4): inode numbers come in runs.
        let mixed = (file.ino ^ file.generation).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
        lock(&self.shards[mixed as usize % SHARDS])
    }

    /// Waits until no other change of any of the same is under way. The change that came first goes
    /// first.
    pub(crate) async fn change(self: &Arc<RangeTable>, file: FileId, span: Span) -> RangeGrant {
        let (arrival, has) = {
            let mut shard = self.shard(file);
            shard.version += 1;
            let arrival = shard.arrival();
            let changes = &mut shard.file(file).changes;
            (arrival, changes.enter(arrival, RangeRequest::exclusive(span), || Began::Here))
        };
        let grant = RangeGrant::of_change(self, file, arrival);
        if !has {
            self.wait(file, |ranges, waker| ranges.changes.poll(arrival, waker, || Began::Here))
                .await;
        }
        grant
    }

    /// The grants of a change of two files or directories, taken in the same order by everybody. If
    /// both are one, that of the first alone.
    pub(crate) async fn change_both(
        self: &Arc<RangeTable>,
        one: (FileId, Span),
        two: (FileId, Span),
    ) -> (RangeGrant, Option<RangeGrant>) {
        let key = |(file, _): &(FileId, Span)| (file.ino, file.generation);
        let (first, second) = if key(&one) <= key(&two) { (one, two) } else { (two, one) };
        let grant = self.change(first.0, first.1).await;
        if first.0 == second.0 {
            return (grant, None);
        }
        (grant, Some(self.change(second.0, second.1).await))
    }

    /// The grant of a change that a server before us had begun. Nobody can be in the way:
    /// it was under way when that server died.
    pub(crate) fn change_cut_short(self: &Arc<RangeTable>, file: FileId, span: Span) -> RangeGrant {
        self.cut.fetch_add(1, Ordering::SeqCst);
        let mut shard = self.shard(file);
        shard.version += 1;
        let arrival = shard.arrival();
        shard.file(file).changes.have(arrival, RangeRequest::exclusive(span), Began::Before);
        RangeGrant::of_cut(self, file, arrival)
    }

    /// Whether there is any such grant.
    pub(crate) fn has_cut(&self) -> bool {
        self.cut.load(Ordering::SeqCst) != 0
    }

    /// Waits until nobody reads or writes these bytes, but not for changes that are under way and
    /// do not write yet. The changes that a client sends again after a loss of power come before
    /// these.
    pub(crate) async fn write(self: &Arc<RangeTable>, file: FileId, span: Span) -> RangeGrant {
        self.shard(file).version += 1;
        let mut grant = RangeGrant::of_write(self, file);
        grant.write(span).await;
        grant
    }

    /// Waits until no write of these bytes is under way; reads may be. A reader checks first
    /// whether they are [whole](RangeTable::whole).
    pub(crate) async fn read(&self, file: FileId, span: Span) -> ReadGrant<'_> {
        let (arrival, has) = {
            let mut shard = self.shard(file);
            let arrival = shard.arrival();
            (arrival, shard.file(file).data.enter(arrival, RangeRequest::shared(span), || None))
        };
        let grant = ReadGrant { table: self, file, arrival };
        if !has {
            self.wait(file, |ranges, waker| ranges.data.poll(arrival, waker, || None)).await;
        }
        grant
    }

    /// Comes to the bytes of a file for a write. Answers its stamp, if it has them at once.
    pub(super) fn enter_write(&self, file: FileId, span: Span) -> (Arrival, Option<u64>) {
        let mut shard = self.shard(file);
        let (arrival, mut stamp) = (shard.arrival(), None);
        shard.file(file).data.enter(arrival, RangeRequest::exclusive(span), || {
            stamp = Some(self.stamps.next());
            stamp
        });
        (arrival, stamp)
    }

    /// Waits for the bytes, and answers the stamp.
    pub(super) async fn wait_to_write(&self, file: FileId, arrival: Arrival) -> u64 {
        let mut stamp = 0;
        self.wait(file, |ranges, waker| {
            ranges.data.poll(arrival, waker, || {
                stamp = self.stamps.next();
                Some(stamp)
            })
        })
        .await;
        stamp
    }

    async fn wait(&self, file: FileId, mut poll: impl FnMut(&mut FileRanges, &Waker) -> bool) {
        std::future::poll_fn(|task| {
            let mut shard = self.shard(file);
            match poll(shard.file(file), task.waker()) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        })
        .await;
    }

    /// Ends what came to the queues of a file at these times.
    pub(super) fn release(&self, file: FileId, change: Option<Arrival>, data: Option<Arrival>) {
        let mut wakers = Vec::new();
        let mut shard = self.shard(file);
        let Some(ranges) = shard.files.get_mut(&file) else { return }; // it had not come to its queues
        if let Some(change) = change {
            ranges.changes.remove(change, &mut wakers);
        }
        if let Some(data) = data {
            ranges.data.remove(data, &mut wakers);
            ranges.wake_settled(&mut wakers);
        }
        match ranges.is_unused() {
            true if ranges.is_small() => shard.note_unused(file),
            true => drop(shard.files.remove(&file)),
            false => {}
        }
        drop(shard);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// A change that was cut short is over.
    pub(super) fn one_cut_less(&self) {
        self.cut.fetch_sub(1, Ordering::SeqCst);
    }

    /// A number that is another as soon as anybody begins to change the file; none while somebody
    /// changes these bytes, or waits to. If the versions before a read began and after it ended are
    /// equal, there was no change in between. Changes of what shares the shard give other numbers,
    /// too.
    pub(crate) fn version(&self, file: FileId, span: Span) -> Option<u64> {
        let shard = self.shard(file);
        let is_quiet = |ranges: &FileRanges| {
            !ranges.changes.any_excludes(span) && !ranges.data.any_excludes(span)
        };
        shard.files.get(&file).is_none_or(is_quiet).then_some(shard.version)
    }

    /// Waits until no change of these bytes is cut short: they may be half written.
    pub(crate) async fn whole(self: &Arc<RangeTable>, file: FileId, span: Span) {
        if !self.has_cut() {
            return; // as good as always
        }
        let is_cut = {
            let shard = self.shard(file);
            let ranges = shard.files.get(&file);
            ranges.is_some_and(|ranges| ranges.changes.having(span).any(|by| *by == Began::Before))
        };
        if is_cut {
            drop(self.change(file, span).await);
        }
    }

    /// Whether data of the file are being written, or somebody waits to write some.
    pub(crate) fn is_changing(&self, file: FileId) -> bool {
        let shard = self.shard(file);
        shard.files.get(&file).is_some_and(|ranges| ranges.data.any_exclusive())
    }

    /// A stamp such that every change of the file's data up to it is over. Changes that come later
    /// are not waited for.
    pub(crate) async fn settled_in(&self, file: FileId) -> u64 {
        let newest = self.stamps.newest();
        std::future::poll_fn(|task| {
            let mut shard = self.shard(file);
            let Some(ranges) = shard.files.get_mut(&file) else { return Poll::Ready(()) };
            if ranges.is_settled(newest) {
                return Poll::Ready(());
            }
            ranges.settling.push((newest, task.waker().clone()));
            Poll::Pending
        })
        .await;
        newest
    }

    /// A stamp such that every change of data up to it is over.
    pub(crate) async fn settled(&self) -> u64 {
        let newest = self.stamps.newest();
        for shard in &self.shards {
            std::future::poll_fn(|task| {
                let mut shard = lock(shard);
                let Some(ranges) = shard.files.values_mut().find(|file| !file.is_settled(newest))
                else {
                    return Poll::Ready(());
                };
                ranges.settling.push((newest, task.waker().clone()));
                Poll::Pending
            })
            .await;
        }
        newest
    }
}

fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
