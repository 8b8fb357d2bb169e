//! Pools of data buffers.
//!
//! Memory is taken from the system in page-aligned slots of three sizes, up to a bound
//! on the bytes in use, and kept for re-use. The bound is what makes the memory of a
//! server a sum that can be written down: pool + sessions x fixed cost.
//!
//! Users of a pool who must not starve each other take from it by a [`PoolShare`]: each may hold as
//! much as is left over. One alone gets half of the pool. Of n that take what they can, each gets
//! one part of n + 1. As much is always free for the next user (dynamic thresholds with alpha 1;
//! Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998).

mod charge;

use std::alloc::Layout;
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use dray_core::{BufMut, Memory};

pub use charge::Charge;

/// Slot sizes, bytes. 1 MiB is the largest I/O; 64 KiB a page of directory entries.
const CLASS_BYTES: [usize; 3] = [4 << 10, 64 << 10, 1 << 20];
const ALIGN_BYTES: usize = 4096;

/// Shares a bounded amount of memory among everybody who holds data.
#[derive(Clone)]
pub struct BufferPool {
    inner: Arc<Inner>,
    /// Index of the party that this end takes for.
    party: usize,
}

struct Inner {
    limit_bytes: usize,
    kept_bytes_max: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    free: [Vec<Slot>; CLASS_BYTES.len()],
    free_bytes: usize,
    used_bytes: usize,
    peak_bytes: usize,
    /// The waiters for memory, in the order of arrival.
    waiting: VecDeque<Waiter>,
    /// The users that share the pool; the first is its maker.
    parties: Vec<Party>,
    /// What is reserved for them and not used by them.
    unused_bytes: usize,
}

impl State {
    /// What is left for `party`.
    fn free_bytes_of(&self, party: usize, limit_bytes: usize) -> usize {
        let others_unused_bytes = self.unused_bytes - self.parties[party].unused_bytes();
        limit_bytes.saturating_sub(self.used_bytes + others_unused_bytes)
    }

    /// Takes out all who wait.
    fn everybody(&mut self) -> Vec<Waker> {
        self.waiting.drain(..).map(|waiter| waiter.waker).collect()
    }

    /// Takes out those who can have what is free now, not everybody: thousands may wait. Who has
    /// given up says so ([`PoolShare::gave_up`]), since what was meant for him is nobody's.
    fn whom_to_wake(&mut self, limit_bytes: usize) -> Vec<Waker> {
        if self.used_bytes == 0 {
            return self.everybody();
        }
        let (mut waiting, mut wakers) = (std::mem::take(&mut self.waiting), Vec::new());
        let mut promised_bytes = 0;
        waiting.retain(|waiter| {
            let free_bytes = self.free_bytes_of(waiter.party, limit_bytes);
            let wanted_bytes = held_bytes(waiter.share.as_ref()) + waiter.bytes;
            let fits = wanted_bytes + promised_bytes <= free_bytes;
            if fits {
                promised_bytes += waiter.bytes;
                wakers.push(waiter.waker.clone());
            }
            !fits
        });
        self.waiting = waiting;
        wakers
    }

    fn uncount(&mut self, party: usize, bytes: usize, share: Option<&Share>) {
        self.count(party, |used| used - bytes);
        if let Some(share) = share {
            share.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// Changes what `party` uses, by `change`.
    fn count(&mut self, party: usize, change: impl Fn(usize) -> usize) {
        let party = &mut self.parties[party];
        self.unused_bytes -= party.unused_bytes();
        party.used_bytes = change(party.used_bytes);
        self.unused_bytes += party.unused_bytes();
        self.used_bytes = change(self.used_bytes);
    }
}

/// A task that waits for memory.
struct Waiter {
    waker: Waker,
    party: usize,
    bytes: usize,
    share: Option<Arc<Share>>,
}

/// One of the users that share a pool.
#[derive(Clone, Copy, Default)]
struct Party {
    used_bytes: usize,
    /// What the others leave to it, whatever they need.
    reserved_bytes: usize,
}

impl Party {
    fn unused_bytes(self) -> usize {
        self.reserved_bytes.saturating_sub(self.used_bytes)
    }
}

/// What a pool holds now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Bytes lent.
    pub used_bytes: usize,
    /// Most bytes ever lent at once.
    pub peak_bytes: usize,
    /// Bytes that may be lent at once.
    pub limit_bytes: usize,
}

/// One piece of memory of a class's size.
struct Slot {
    start: NonNull<u8>,
    class: usize,
}

// SAFETY: a Slot is the only reference to its memory.
unsafe impl Send for Slot {}

impl Slot {
    fn layout(class: usize) -> Layout {
        Layout::from_size_align(CLASS_BYTES[class], ALIGN_BYTES).expect("a constant that is sound")
    }

    fn new(class: usize) -> Option<Slot> {
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { std::alloc::alloc(Slot::layout(class)) })?;
        Some(Slot { start, class })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { std::alloc::dealloc(self.start.as_ptr(), Slot::layout(self.class)) };
    }
}

/// A slot that is lent; goes back when the last buffer over it is dropped.
struct Lent {
    slot: Option<Slot>,
    pool: Arc<Inner>,
    party: usize,
    share: Option<Arc<Share>>,
}

/// What one user holds. It is written only while the pool is locked.
#[derive(Default)]
struct Share {
    used_bytes: AtomicUsize,
}

fn held_bytes(share: Option<&Arc<Share>>) -> usize {
    share.map_or(0, |share| share.used_bytes.load(Ordering::Relaxed))
}

// SAFETY: Lent only holds the slot; access to its memory goes through the buffers.
unsafe impl Sync for Lent {}

impl Memory for Lent {}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            self.pool.give_back(slot, self.party, self.share.as_deref());
        }
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_back(&self, slot: Slot, party: usize, share: Option<&Share>) {
        let bytes = CLASS_BYTES[slot.class];
        let mut state = self.lock();
        state.uncount(party, bytes, share);
        let surplus = if state.free_bytes + bytes <= self.kept_bytes_max {
            state.free_bytes += bytes;
            state.free[slot.class].push(slot);
            None
        } else {
            Some(slot)
        };
        let wakers = state.whom_to_wake(self.limit_bytes);
        drop(state);
        drop(surplus); // to the system, outside of the lock
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Bytes that were counted, and are no longer.
    fn uncount(&self, bytes: usize, party: usize, share: &Share) {
        if bytes == 0 {
            return;
        }
        let mut state = self.lock();
        state.uncount(party, bytes, Some(share));
        let wakers = state.whom_to_wake(self.limit_bytes);
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl BufferPool {
    /// A pool that lends at most `limit_bytes` and keeps up to `kept_bytes_max` of
    /// returned memory for the next.
    pub fn new(limit_bytes: usize, kept_bytes_max: usize) -> BufferPool {
        let state = State { parties: vec![Party::default()], ..State::default() };
        let inner = Inner { limit_bytes, kept_bytes_max, state: Mutex::new(state) };
        BufferPool { inner: Arc::new(inner), party: 0 }
    }

    /// Ends of this pool for `count` parties that must not be able to starve each other. Half of
    /// the memory is set aside for them in equal parts. The other half goes to the first that asks.
    /// To be called once a pool.
    pub fn divide(&self, count: usize) -> Vec<BufferPool> {
        let mut state = self.inner.lock();
        let reserved_bytes = self.inner.limit_bytes / 2 / count.max(1);
        let first = state.parties.len();
        state.parties.resize(first + count, Party { used_bytes: 0, reserved_bytes });
        state.unused_bytes += reserved_bytes * count;
        let end = |party| BufferPool { inner: self.inner.clone(), party };
        (first..first + count).map(end).collect()
    }

    /// An empty buffer with room for at least `bytes` (at most 1 MiB), if the pool's
    /// bound allows it now.
    pub fn get(&self, bytes: usize) -> Option<BufMut> {
        let class = CLASS_BYTES.iter().position(|&size| size >= bytes)?;
        let mut state = self.inner.lock();
        self.take(&mut state, class, None).map(|slot| self.lend(slot, None))
    }

    /// As [`BufferPool::get`], but waits for memory. Asserts `bytes` <= 1 MiB.
    pub fn poll_get(&self, cx: &mut Context<'_>, bytes: usize) -> Poll<BufMut> {
        self.poll_take(cx, bytes, None)
    }

    /// Waits for a buffer with room for at least `bytes`.
    pub async fn wait(&self, bytes: usize) -> BufMut {
        std::future::poll_fn(|cx| self.poll_get(cx, bytes)).await
    }

    /// A share for another user of the pool, which is kept from taking everything.
    pub fn share(&self) -> PoolShare {
        PoolShare { pool: self.clone(), share: Arc::default() }
    }

    fn poll_take(
        &self,
        cx: &mut Context<'_>,
        bytes: usize,
        share: Option<&Arc<Share>>,
    ) -> Poll<BufMut> {
        let class = CLASS_BYTES.iter().position(|&size| size >= bytes);
        let class = class.expect("no request is larger than the largest slot");
        let mut state = self.inner.lock();
        match self.take(&mut state, class, share) {
            Some(slot) => Poll::Ready(self.lend(slot, share.cloned())),
            None => {
                self.wait_in(&mut state, cx, CLASS_BYTES[class], share);
                Poll::Pending
            }
        }
    }

    /// The task of `cx` is woken when there may be room.
    fn wait_in(
        &self,
        state: &mut State,
        cx: &Context<'_>,
        bytes: usize,
        share: Option<&Arc<Share>>,
    ) {
        let (waker, share) = (cx.waker().clone(), share.cloned());
        let waiter = Waiter { waker, party: self.party, bytes, share };
        let mut waiting = state.waiting.iter_mut();
        match waiting.find(|known| known.waker.will_wake(cx.waker())) {
            Some(known) => *known = waiter,
            None => state.waiting.push_back(waiter),
        }
    }

    /// What is lent now.
    pub fn stats(&self) -> PoolStats {
        let state = self.inner.lock();
        PoolStats {
            used_bytes: state.used_bytes,
            peak_bytes: state.peak_bytes,
            limit_bytes: self.inner.limit_bytes,
        }
    }

    fn take(&self, state: &mut State, class: usize, share: Option<&Arc<Share>>) -> Option<Slot> {
        let bytes = CLASS_BYTES[class];
        if !self.fits(state, bytes, share) {
            return None;
        }
        let slot = match state.free[class].pop() {
            Some(slot) => {
                state.free_bytes -= bytes;
                slot
            }
            None => Slot::new(class)?,
        };
        self.count(state, bytes, share);
        Some(slot)
    }

    /// Whether there is room for `bytes` more of this user's.
    fn fits(&self, state: &State, bytes: usize, share: Option<&Arc<Share>>) -> bool {
        let free_bytes = state.free_bytes_of(self.party, self.inner.limit_bytes);
        held_bytes(share) + bytes <= free_bytes
    }

    fn count(&self, state: &mut State, bytes: usize, share: Option<&Arc<Share>>) {
        if let Some(share) = share {
            share.used_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        state.count(self.party, |used| used + bytes);
        state.peak_bytes = state.peak_bytes.max(state.used_bytes);
    }

    fn lend(&self, slot: Slot, share: Option<Arc<Share>>) -> BufMut {
        let (start, bytes) = (slot.start, CLASS_BYTES[slot.class]);
        let (pool, party) = (self.inner.clone(), self.party);
        let lent = Arc::new(Lent { slot: Some(slot), pool, party, share });
        // SAFETY: the slot's memory is valid while `lent` lives, and nobody else has it.
        unsafe { BufMut::over(start, bytes, lent) }
    }
}

/// One user's way to a pool: cheap to clone, and all clones count together.
#[derive(Clone)]
pub struct PoolShare {
    pool: BufferPool,
    share: Arc<Share>,
}

impl PoolShare {
    /// As [`BufferPool::poll_get`], and waits too while this user holds more than is free.
    pub fn poll_get(&self, cx: &mut Context<'_>, bytes: usize) -> Poll<BufMut> {
        self.pool.poll_take(cx, bytes, Some(&self.share))
    }

    /// As [`BufferPool::wait`], within this user's share.
    pub async fn wait(&self, bytes: usize) -> BufMut {
        std::future::poll_fn(|cx| self.poll_get(cx, bytes)).await
    }

    /// A task that waited for memory with [`PoolShare::poll_get`] may not come for it: others may.
    pub fn gave_up(&self) {
        let wakers = self.pool.inner.lock().everybody();
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Bytes that this user holds.
    pub fn used_bytes(&self) -> usize {
        self.share.used_bytes.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::Wake;

    // proves: P128
    #[test]
    fn greedy_users_leave_room_for_the_next() {
        let pool = BufferPool::new(24 << 20, 0);
        let cx = &mut Context::from_waker(Waker::noop());
        let mut greedy = |users: usize| {
            let shares: Vec<PoolShare> = (0..users).map(|_| pool.share()).collect();
            let mut held = Vec::new();
            let mut grew = true;
            while std::mem::take(&mut grew) {
                for share in &shares {
                    if let Poll::Ready(buf) = share.poll_get(cx, 1 << 20) {
                        held.push(buf);
                        grew = true;
                    }
                }
            }
            let used: Vec<usize> = shares.iter().map(|share| share.used_bytes() >> 20).collect();
            drop(held);
            assert!(shares.iter().all(|share| share.used_bytes() == 0));
            used
        };
        assert_eq!(greedy(1), [12]);
        assert_eq!(greedy(2), [8, 8]);
        assert_eq!(greedy(5), [4, 4, 4, 4, 4]);
        assert_eq!(pool.stats().used_bytes, 0);
    }

    #[test]
    fn the_bound_holds_and_memory_comes_back() {
        let pool = BufferPool::new(1 << 20 | 8 << 10, 64 << 10);
        let large = pool.get(100_000).unwrap();
        assert!(large.capacity() >= 100_000);
        let small = [pool.get(1).unwrap(), pool.get(4096).unwrap()];
        assert!(pool.get(1).is_none());
        assert_eq!(pool.stats().used_bytes, pool.stats().limit_bytes);
        drop(large);
        assert!(pool.get(65_536).is_some());
        let shared = small.map(BufMut::freeze);
        let part = shared[0].slice(0..0);
        drop(shared);
        assert_eq!(pool.stats().used_bytes, 4096, "a slice keeps its slot");
        drop(part);
        assert_eq!(pool.stats().used_bytes, 0);
    }

    // proves: P109
    #[test]
    fn one_party_cannot_starve_the_others() {
        let pool = BufferPool::new(8 << 20, 0);
        let ends = pool.divide(2);
        let greedy: Vec<_> = std::iter::from_fn(|| ends[0].get(1 << 20)).collect();
        assert_eq!(greedy.len(), 6, "its own part and the common half");
        let modest: Vec<_> = std::iter::from_fn(|| ends[1].get(1 << 20)).collect();
        assert_eq!(modest.len(), 2, "what is set aside for it");
        assert_eq!(pool.stats().used_bytes, 8 << 20);
        drop(greedy);
        let more: Vec<_> = std::iter::from_fn(|| ends[1].get(1 << 20)).collect();
        assert_eq!(more.len(), 4, "the common half");
        drop((modest, more));
        assert_eq!(pool.stats().used_bytes, 0);
    }

    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Woken>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Each buffer that came back woke everybody, each of whom looked through all that waited.
    // proves: P129
    #[test]
    fn as_many_are_woken_as_there_is_memory_for() {
        const MIB: usize = 1 << 20;
        let pool = BufferPool::new(8 * MIB, 0);
        let mut held: Vec<BufMut> = std::iter::from_fn(|| pool.get(MIB)).collect();
        let shares: Vec<PoolShare> = (0..200).map(|_| pool.share()).collect();
        let woken: Vec<_> = shares.iter().map(|_| Arc::new(Woken(AtomicUsize::new(0)))).collect();
        for (share, woken) in shares.iter().zip(&woken) {
            let waker = Waker::from(woken.clone());
            assert!(share.poll_get(&mut Context::from_waker(&waker), MIB).is_pending());
        }
        let count = || -> usize { woken.iter().map(|one| one.0.load(Ordering::SeqCst)).sum() };
        held.pop();
        assert_eq!(count(), 1);
        held.pop();
        assert_eq!(count(), 3, "for two buffers: nobody has come for the first");
        shares[0].gave_up();
        assert_eq!(count(), 200);
        // All that there is is back: nobody is forgotten.
        let waker = Waker::from(woken[7].clone());
        assert!(shares[7].poll_get(&mut Context::from_waker(&waker), MIB).is_ready());
        let all: Vec<BufMut> = std::iter::from_fn(|| pool.get(MIB)).collect();
        for share in &shares {
            assert!(share.poll_get(&mut Context::from_waker(&waker), MIB).is_pending());
        }
        drop((held, all));
        assert_eq!(count(), 201, "one task, however often it asks");
    }

    #[test]
    fn who_waits_gets_memory_when_it_comes_back() {
        let mut executor = dray_rt::Executor::new(dray_rt::DriverKind::Epoll).unwrap();
        executor.block_on(async {
            let pool = BufferPool::new(4096, 0);
            let first = pool.wait(10).await;
            let second = dray_rt::spawn_join({
                let pool = pool.clone();
                async move { pool.wait(10).await.capacity() }
            });
            dray_rt::yield_now().await;
            drop(first);
            assert_eq!(second.await.unwrap(), 4096);
        });
    }
}
