//! Leases on the fcntl locks of files: who has that of a file decides on its locks, and calls nobody (ADR 0064).
//!
//! No other session gets a lock of that file, or hears of one, before the lease has come back. Its holder may have any
//! lock of the file. So nobody is fenced for such a lease. It ends when the holder gives it back with its locks. Else it
//! ends with the session, as locks do.

use std::hash::BuildHasher;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

use dray_core::{Context, Errno, Error, FileId, IdHash, IdMap, LeaseKinds, RecallItem, Result};
use dray_rt::{Instant, now, timeout};

use super::holder::{LeaseHolder, RecallNumber};
use super::rests::Rest;
use crate::server::options::ServerOptions;
use crate::server::sabotage::Sabotage;

/// Files of one export whose locks are leased.
const LOCK_LEASES_MAX: usize = 1 << 16;
/// Locks that come back with one lease: a client has one or two more than 64 at most.
const TAKEN_BACK_MAX: u32 = 128;
/// Independent parts of the table, so that threads rarely meet.
const SHARDS: usize = 16;
/// Places for rests in a part.
const RESTS: usize = 16;

/// The leases of an export on locks; by default none are given.
#[derive(Default)]
pub(crate) struct LockLeases {
    given: bool,
    never_recalls: bool,
    /// How long a caller waits for a holder, unless it waits for the lock itself.
    wait: Duration,
    shards: Vec<Mutex<Shard>>,
    hash: IdHash,
    held: AtomicUsize,
}

#[derive(Default)]
struct Shard {
    files: IdMap<FileId, FileLocks>,
    rests: [Rest; RESTS],
}

/// A file with calls about its locks under way, or with a lease.
#[derive(Default)]
struct FileLocks {
    under_way: u32,
    /// Counts such calls, as long as the file is here.
    begun: u64,
    lease: Option<LockLease>,
    waiting: Vec<Waker>,
}

struct LockLease {
    who: Arc<LeaseHolder>,
    /// An open file of the session. The lease ends with the last one.
    handle: u64,
    /// The recall that has not been answered, and since when others wait.
    recall: Option<(RecallNumber, Instant)>,
    /// Locks that have come back with it.
    taken_back: u32,
}

/// A call about locks of a file while it is under way: the lease is given to nobody beside it.
pub(crate) struct LockCall<'a> {
    table: &'a LockLeases,
    file: FileId,
    number: u64,
}

impl LockLeases {
    pub(super) fn new(options: &ServerOptions, wait: Duration) -> LockLeases {
        LockLeases {
            given: true,
            never_recalls: options.broken().is(Sabotage::LockLeaseRecalls),
            wait,
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            hash: IdHash::default(),
            held: AtomicUsize::new(0),
        }
    }

    /// Whether there are such leases at all.
    pub(crate) fn are_given(&self) -> bool {
        self.given
    }

    /// Leases that are held now.
    pub(crate) fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    fn shard(&self, file: FileId) -> (MutexGuard<'_, Shard>, usize) {
        let hash = self.hash.hash_one(file) as usize;
        let shard = self.shards[hash % SHARDS].lock().unwrap_or_else(PoisonError::into_inner);
        (shard, hash / SHARDS % RESTS)
    }

    /// Begins a call about locks of a file. None: nothing is leased here.
    pub(crate) fn begin(&self, file: FileId) -> Option<LockCall<'_>> {
        if !self.given {
            return None;
        }
        let (mut shard, _) = self.shard(file);
        let locks = shard.files.entry(file).or_default();
        locks.under_way += 1;
        locks.begun += 1;
        Some(LockCall { table: self, file, number: locks.begun })
    }

    /// The session gives its lease back, or has lost all use for it. False: it had none.
    pub(crate) fn end(&self, who: &Arc<LeaseHolder>, file: FileId) -> bool {
        self.end_if(file, |lease| Arc::ptr_eq(&lease.who, who))
    }

    /// The client has answered this recall. What it had to give back has come before.
    pub(super) fn acknowledged(&self, who: &Arc<LeaseHolder>, file: FileId, number: u64) -> bool {
        self.end_if(file, |lease| {
            let is_asked = lease.recall.is_some_and(|(recall, _)| recall.number == number);
            is_asked && Arc::ptr_eq(&lease.who, who)
        })
    }

    fn end_if(&self, file: FileId, ends: impl FnOnce(&LockLease) -> bool) -> bool {
        if !self.given {
            return false;
        }
        let (mut shard, _) = self.shard(file);
        let Some(locks) = shard.files.get_mut(&file) else { return false };
        if !locks.lease.as_ref().is_some_and(ends) {
            return false;
        }
        locks.lease = None;
        self.held.fetch_sub(1, Ordering::Relaxed);
        let waiting = std::mem::take(&mut locks.waiting);
        shard.forget_unused(file);
        drop(shard);
        waiting.into_iter().for_each(Waker::wake);
        true
    }

    /// Whether a session has the lease.
    pub(crate) fn is_held_by(&self, who: &Arc<LeaseHolder>, file: FileId) -> bool {
        if !self.given {
            return false;
        }
        let (shard, _) = self.shard(file);
        let lease = shard.files.get(&file).and_then(|locks| locks.lease.as_ref());
        lease.is_some_and(|lease| Arc::ptr_eq(&lease.who, who))
    }

    /// The session begins to give the lease back, perhaps once more.
    pub(crate) fn begin_taking_back(&self, who: &Arc<LeaseHolder>, file: FileId) {
        let (mut shard, _) = self.shard(file);
        let lease = shard.files.get_mut(&file).and_then(|locks| locks.lease.as_mut());
        if let Some(lease) = lease.filter(|lease| Arc::ptr_eq(&lease.who, who)) {
            lease.taken_back = 0;
        }
    }

    /// Whether one more lock may come back with the lease. Its client has granted it already, so it counts as one that the
    /// client had before: there must not be any number of them.
    pub(crate) fn takes_back(&self, who: &Arc<LeaseHolder>, file: FileId) -> bool {
        let (mut shard, _) = self.shard(file);
        let lease = shard.files.get_mut(&file).and_then(|locks| locks.lease.as_mut());
        lease.filter(|lease| Arc::ptr_eq(&lease.who, who)).is_some_and(|lease| {
            lease.taken_back += 1;
            lease.taken_back <= TAKEN_BACK_MAX
        })
    }

    /// The session closes this open file, and has `other` of the same file. None: no other one, so that the lease ends
    /// if it was had through the closed one. True: it has ended.
    pub(crate) fn closed(
        &self,
        who: &Arc<LeaseHolder>,
        (file, handle): (FileId, u64),
        other: impl FnOnce() -> Option<u64>,
    ) -> bool {
        if self.held() == 0 || !self.is_held_by(who, file) {
            return false; // nearly always
        }
        let other = other();
        let (mut shard, _) = self.shard(file);
        let lease = shard.files.get_mut(&file).and_then(|locks| locks.lease.as_mut());
        let Some(lease) = lease.filter(|lease| Arc::ptr_eq(&lease.who, who)) else { return false };
        if lease.handle != handle {
            return false;
        }
        if let Some(other) = other {
            lease.handle = other;
            return false;
        }
        drop(shard);
        self.end(who, file)
    }
}

impl Shard {
    fn forget_unused(&mut self, file: FileId) {
        let is_used = |locks: &FileLocks| locks.under_way > 0 || locks.lease.is_some();
        if !self.files.get(&file).is_some_and(is_used) {
            self.files.remove(&file);
        }
    }
}

impl LockCall<'_> {
    /// Waits until no other session has the lease. `who`: the session that calls. Errors: `EAGAIN` where the holder does
    /// not answer in time, unless the caller is `patient`; `EINTR` when the caller gives up.
    pub(crate) async fn clear(
        &self,
        cx: &Context,
        who: Option<&Arc<LeaseHolder>>,
        patient: bool,
    ) -> Result<()> {
        while let Some(since) = self.recall(who) {
            let left = if patient { self.table.wait } else { since + self.table.wait - now() };
            if left == Duration::ZERO {
                let error = Error::new(Errno::EAGAIN);
                return Err(error.because("a client that may have the lock does not answer"));
            }
            // It is asked once more if it has lost the recall with its connections.
            if let Ok(ended) = timeout(left, self.ended(cx, who)).await {
                ended?;
            }
        }
        Ok(())
    }

    /// Asks the lease of another session back, once. Answers since when it is asked for; none: there is no such lease.
    fn recall(&self, who: Option<&Arc<LeaseHolder>>) -> Option<Instant> {
        if self.table.never_recalls {
            return None;
        }
        let (mut shard, place) = self.table.shard(self.file);
        let Shard { files, rests } = &mut *shard;
        let lease = files.get_mut(&self.file)?.lease.as_mut()?;
        if who.is_some_and(|who| Arc::ptr_eq(who, &lease.who)) {
            return None;
        }
        let before = lease.recall;
        if let Some((recall, since)) = before
            && lease.who.is_pending(recall)
        {
            return Some(since);
        }
        let since = before.map_or_else(now, |(_, since)| since);
        if before.is_none() {
            rests[place].begin(since);
        }
        let (holder, number) = (lease.who.clone(), lease.who.begin_recall());
        lease.recall = Some((number, since));
        drop(shard);
        let item = RecallItem { id: self.file, kinds: LeaseKinds::LOCKS, name: None };
        holder.recall(number.number, vec![item]);
        Some(since)
    }

    async fn ended(&self, cx: &Context, who: Option<&Arc<LeaseHolder>>) -> Result<()> {
        std::future::poll_fn(|task| {
            let (mut shard, _) = self.table.shard(self.file);
            let locks = shard.files.entry(self.file).or_default();
            let is_other = |lease: &LockLease| who.is_none_or(|who| !Arc::ptr_eq(who, &lease.who));
            if !locks.lease.as_ref().is_some_and(is_other) {
                return Poll::Ready(Ok(()));
            }
            locks.waiting.push(task.waker().clone());
            drop(shard);
            cx.poll_cancelled(task).map(Err)
        })
        .await
    }

    /// Gives the lease with the answer to this call. No other session has any lock of the file, as the caller knows. False:
    /// another call has come meanwhile, or the file is fought over.
    pub(crate) fn lease(&self, who: &Arc<LeaseHolder>, handle: u64) -> bool {
        let (mut shard, place) = self.table.shard(self.file);
        let Shard { files, rests } = &mut *shard;
        let Some(locks) = files.get_mut(&self.file) else { return false };
        if rests[place].rests(now()) || locks.under_way != 1 || locks.begun != self.number {
            return false;
        }
        if let Some(lease) = &mut locks.lease {
            // Its client has not taken what was given before: it did not get that answer, say.
            let stays = Arc::ptr_eq(&lease.who, who) && lease.recall.is_none();
            if stays {
                lease.handle = handle;
            }
            return stays;
        }
        if self.table.held.load(Ordering::Relaxed) >= LOCK_LEASES_MAX {
            return false;
        }
        locks.lease = Some(LockLease { who: who.clone(), handle, recall: None, taken_back: 0 });
        self.table.held.fetch_add(1, Ordering::Relaxed);
        true
    }
}

impl Drop for LockCall<'_> {
    fn drop(&mut self) {
        let (mut shard, _) = self.table.shard(self.file);
        if let Some(locks) = shard.files.get_mut(&self.file) {
            locks.under_way -= 1;
        }
        shard.forget_unused(self.file);
    }
}
