//! Memory that somebody has elsewhere, and that counts as lent all the same.
//!
//! A server keeps other things for a client besides data: heads of messages, pages of listings,
//! callers. These are taken from the heap in whatever size they have. It is counted here, so that
//! all of it together stays within the pool's bound, and each user within its share.

use std::ptr::NonNull;
use std::sync::Arc;
use std::task::{Context, Poll};

use dray_core::{Buf, BufMut, Memory};

use super::{BufferPool, CLASS_BYTES, PoolShare, Share};

/// So many bytes that count as lent until this is dropped.
pub struct Charge {
    pool: BufferPool,
    share: Arc<Share>,
    bytes: usize,
}

impl PoolShare {
    /// Counts `bytes` bytes, if there is room for them now.
    pub fn try_charge(&self, bytes: usize) -> Option<Charge> {
        let mut state = self.pool.inner.lock();
        if !self.pool.fits(&state, bytes, Some(&self.share)) {
            return None;
        }
        self.pool.count(&mut state, bytes, Some(&self.share));
        Some(self.counted(bytes))
    }

    /// As [`PoolShare::poll_get`], without a buffer. Asserts `bytes` <= 1 MiB.
    pub fn poll_charge(&self, cx: &mut Context<'_>, bytes: usize) -> Poll<Charge> {
        assert!(bytes <= CLASS_BYTES[CLASS_BYTES.len() - 1], "it could wait for ever");
        let mut state = self.pool.inner.lock();
        if self.pool.fits(&state, bytes, Some(&self.share)) {
            self.pool.count(&mut state, bytes, Some(&self.share));
            return Poll::Ready(self.counted(bytes));
        }
        self.pool.wait_in(&mut state, cx, bytes, Some(&self.share));
        Poll::Pending
    }

    /// Waits until `bytes` bytes are counted.
    pub async fn charge(&self, bytes: usize) -> Charge {
        std::future::poll_fn(|cx| self.poll_charge(cx, bytes)).await
    }

    fn counted(&self, bytes: usize) -> Charge {
        Charge { pool: self.pool.clone(), share: self.share.clone(), bytes }
    }
}

impl Charge {
    /// Counts `bytes` bytes from now on. False, and as before, if they are more, and there is no
    /// room for these.
    pub fn resize(&mut self, bytes: usize) -> bool {
        let more = bytes.saturating_sub(self.bytes);
        if more > 0 {
            let mut state = self.pool.inner.lock();
            if !self.pool.fits(&state, more, Some(&self.share)) {
                return false;
            }
            self.pool.count(&mut state, more, Some(&self.share));
        } else {
            self.pool.inner.uncount(self.bytes - bytes, self.pool.party, &self.share);
        }
        self.bytes = bytes;
        true
    }

    /// `bytes`, which count until nobody has them any more.
    pub fn over(self, bytes: Vec<u8>) -> Buf {
        let start = NonNull::from(bytes.as_slice()).cast();
        let len_bytes = bytes.len();
        let owner = Arc::new(Charged { _bytes: bytes, _charge: self });
        // SAFETY: all bytes of a vector are initialised. It is the owner's alone, which neither
        // moves them nor changes them while it lives.
        unsafe { Buf::over(start, len_bytes, owner) }
    }

    /// A buffer without room, to go where what is counted goes.
    pub fn beside(self) -> BufMut {
        let owner = Arc::new(Charged { _bytes: Vec::new(), _charge: self });
        // SAFETY: no byte belongs to it.
        unsafe { BufMut::over(NonNull::dangling(), 0, owner) }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.pool.inner.uncount(self.bytes, self.pool.party, &self.share);
    }
}

/// Bytes of the heap, and that they are counted.
struct Charged {
    _bytes: Vec<u8>,
    _charge: Charge,
}

impl Memory for Charged {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::Waker;

    const MIB: usize = 1 << 20;

    #[test]
    fn what_is_counted_takes_of_the_share_and_comes_back() {
        let pool = BufferPool::new(8 * MIB, 0);
        let (one, other) = (pool.share(), pool.share());
        let cx = &mut Context::from_waker(Waker::noop());
        let mut charges: Vec<_> = std::iter::from_fn(|| one.try_charge(MIB / 2)).collect();
        assert_eq!((charges.len(), one.used_bytes()), (8, 4 * MIB));
        assert!(one.poll_get(cx, MIB).is_pending() && one.poll_charge(cx, 1).is_pending());
        assert!(other.poll_get(cx, MIB).is_ready(), "it has its own share");
        assert!(!charges[0].resize(MIB), "more than its share");
        assert!(charges[0].resize(MIB / 4) && charges[0].resize(MIB / 2));
        let page = charges.pop().unwrap().over(vec![7; 100]);
        assert_eq!((&page[..3], page.len(), one.used_bytes()), (&[7, 7, 7][..], 100, 4 * MIB));
        let (part, beside) = (page.slice(1..2), charges.pop().unwrap().beside().freeze());
        drop(page);
        assert_eq!(one.used_bytes(), 4 * MIB, "a part keeps all of it");
        assert!(beside.is_empty());
        drop((part, beside));
        assert_eq!(one.used_bytes(), 3 * MIB);
        drop(charges);
        assert_eq!(pool.stats().used_bytes, 0);
    }

    #[test]
    fn who_waits_is_woken_when_what_is_counted_comes_back() {
        let mut executor = dray_rt::Executor::new(dray_rt::DriverKind::Epoll).unwrap();
        executor.block_on(async {
            let pool = BufferPool::new(4096, 0);
            let (one, other) = (pool.share(), pool.share());
            let first = one.charge(2048).await;
            let second = dray_rt::spawn_join(async move { other.charge(2049).await.bytes });
            dray_rt::yield_now().await;
            drop(first);
            assert_eq!(second.await.unwrap(), 2049);
        });
    }
}
