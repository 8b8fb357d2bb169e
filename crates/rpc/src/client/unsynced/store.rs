//! Memory for data that are kept: they are copied one behind the other into segments, and a
//! segment is used again when nothing in it is kept any more. So keeping neither allocates
//! nor has the kernel clear pages, and what is still kept is never moved (a log in segments,
//! as in Rosenblum and Ousterhout, ACM TOCS 10(1), 1992, section 3, without a cleaner: a sync
//! of everything empties all of them).

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dray_core::{Buf, BufMut, Memory};

use super::segment::{Choice, SEGMENT_BYTES, Segment};

/// Segments, those in use and spare ones.
pub(super) struct Store {
    inner: Arc<Inner>,
}

struct Inner {
    segments_max: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    spare: Vec<Segment>,
    /// Segments in use.
    taken: usize,
    open: Option<Open>,
    pages: Choice,
}

/// The segment that is being filled.
struct Open {
    lent: Arc<Lent>,
    start: NonNull<u8>,
    used_bytes: usize,
    /// Of a huge page that nobody has used yet.
    fresh: bool,
}

/// Room in one segment, or in two that follow each other.
struct Room {
    first: BufMut,
    rest: Option<BufMut>,
    /// The first that is copied here has the system find a huge page.
    fresh: bool,
}

// SAFETY: the memory behind `start` belongs to `lent`, which is Send.
unsafe impl Send for Open {}

/// A segment in use; goes back when the last that lies in it is no longer kept.
struct Lent {
    segment: Mutex<Option<Segment>>,
    home: Arc<Inner>,
}

impl Memory for Lent {}

/// Data that were copied: where they begin, and the rest if they did not fit there.
pub(super) type Copied = (Buf, Option<Buf>);

impl Drop for Lent {
    fn drop(&mut self) {
        let segment = self.segment.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let mut state = self.home.lock();
        state.taken -= 1;
        state.spare.extend(segment);
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // It holds its home, which holds it.
        let open = self.inner.lock().open.take();
        drop(open); // that takes the lock
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store {
    /// Room for `limit_bytes`, and for what is lost between what is kept.
    pub(super) fn new(limit_bytes: u64) -> Store {
        let segments = limit_bytes.div_ceil(SEGMENT_BYTES as u64) + 1;
        let segments_max = if limit_bytes == 0 { 0 } else { segments as usize };
        Store { inner: Arc::new(Inner { segments_max, state: Mutex::default() }) }
    }

    /// Copies `data`. None if there is no room for it now.
    pub(super) fn copy(&self, data: &[u8]) -> Option<Copied> {
        let Room { mut first, rest, fresh } = self.reserve(data.len())?;
        let began = fresh.then(dray_rt::now);
        // Outside of the lock: others copy at the same time.
        let copied_bytes = first.put(data);
        let rest = rest.map(|mut rest| {
            rest.put(&data[copied_bytes..]);
            rest.freeze()
        });
        if let Some(began) = began {
            self.inner.lock().pages.took(began.elapsed());
        }
        Some((first.freeze(), rest))
    }

    /// Room for `bytes` in the open segment and, if that is too little, in the next.
    fn reserve(&self, bytes: usize) -> Option<Room> {
        if bytes > SEGMENT_BYTES {
            return None;
        }
        let mut state = self.inner.lock();
        let left_bytes = state.open.as_ref().map_or(0, |open| SEGMENT_BYTES - open.used_bytes);
        if bytes <= left_bytes {
            return state.open.as_mut().map(|open| {
                let fresh = std::mem::take(&mut open.fresh);
                Room { first: open.cut(bytes), rest: None, fresh }
            });
        }
        let next = self.inner.take(&mut state)?;
        let mut full = state.open.replace(next);
        let first = match &mut full {
            Some(full) if left_bytes > 0 => Some(full.cut(left_bytes)),
            _ => None,
        };
        let rest_bytes = bytes - first.as_ref().map_or(0, BufMut::capacity);
        let open = state.open.as_mut()?;
        let (rest, fresh) = (open.cut(rest_bytes), std::mem::take(&mut open.fresh));
        drop(state);
        drop(full); // which may be the last that held it: that takes the lock
        match first {
            Some(first) => Some(Room { first, rest: Some(rest), fresh }),
            None => Some(Room { first: rest, rest: None, fresh }),
        }
    }

    /// Gives spare segments back to the system, and the open one if nothing in it is kept.
    pub(super) fn trim(&self) {
        let open = self.inner.lock().open.take_if(|open| Arc::strong_count(&open.lent) == 1);
        drop(open); // which makes it a spare one
        let spare = std::mem::take(&mut self.inner.lock().spare);
        drop(spare);
    }

    /// Bytes of memory, in use or spare.
    pub(super) fn memory_bytes(&self) -> u64 {
        let state = self.inner.lock();
        ((state.taken + state.spare.len()) * SEGMENT_BYTES) as u64
    }
}

impl Inner {
    fn take(self: &Arc<Inner>, state: &mut State) -> Option<Open> {
        if state.taken >= self.segments_max {
            return None;
        }
        let (segment, fresh) = match state.spare.pop() {
            Some(used) => (used, false),
            None => {
                let huge = state.pages.next_is_huge(state.taken == 0);
                (Segment::map(huge)?, huge)
            }
        };
        state.taken += 1;
        let start = segment.start();
        let lent = Lent { segment: Mutex::new(Some(segment)), home: self.clone() };
        Some(Open { lent: Arc::new(lent), start, used_bytes: 0, fresh })
    }
}

impl Open {
    /// The next `bytes` of it.
    fn cut(&mut self, bytes: usize) -> BufMut {
        assert!(bytes <= SEGMENT_BYTES - self.used_bytes);
        // SAFETY: within the segment, which lives as long as `lent`; what has been cut off
        // is not cut off again before all of it is free.
        let buf = unsafe {
            let start = self.start.add(self.used_bytes);
            BufMut::over(start, bytes, self.lent.clone())
        };
        self.used_bytes += bytes;
        buf
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole((first, rest): &Copied) -> Vec<u8> {
        [&first[..], rest.as_deref().unwrap_or_default()].concat()
    }

    #[test]
    fn data_come_back_as_they_were_and_memory_is_used_again() {
        let store = Store::new(4 << 20);
        let data: Vec<u8> = (0..700_000u32).map(|at| (at % 251) as u8).collect();
        let mut most_bytes = 0;
        for round in 0..20 {
            let kept: Vec<Copied> = (0..5).map(|_| store.copy(&data).expect("room")).collect();
            assert!(kept.iter().all(|one| whole(one) == data), "round {round}");
            most_bytes = most_bytes.max(store.memory_bytes());
        }
        assert!(most_bytes <= 6 << 20, "{most_bytes}");
    }

    #[test]
    fn a_full_segment_of_which_nothing_is_kept_is_left_behind() {
        let (store, data) = (Store::new(2 << 20), vec![7; 1 << 20]);
        for _ in 0..10 {
            drop(store.copy(&data).expect("room"));
        }
        assert!(store.memory_bytes() <= 4 << 20);
    }

    #[test]
    fn there_is_a_bound_and_what_is_free_goes_back_to_the_system() {
        let store = Store::new(4 << 20);
        let data = vec![7; 1 << 20];
        let small = store.copy(b"small").expect("room");
        let kept: Vec<Copied> = std::iter::from_fn(|| store.copy(&data)).collect();
        assert_eq!(kept.len(), 5, "three segments, of which five bytes were gone");
        store.trim();
        assert_eq!(store.memory_bytes(), 6 << 20, "nothing of it is free");
        drop(kept);
        store.trim();
        assert_eq!((store.memory_bytes(), &small.0[..]), (2 << 20, &b"small"[..]));
        drop(small);
        store.trim();
        assert_eq!(store.memory_bytes(), 0);
        assert!(Store::new(0).copy(b"x").is_none());
    }

    /// The open segment and its home kept each other: each session that had kept anything left
    /// a segment behind.
    #[test]
    fn memory_goes_with_the_last_that_is_kept() {
        let store = Store::new(4 << 20);
        let home = Arc::downgrade(&store.inner);
        let kept = store.copy(b"kept").expect("room");
        drop(store);
        assert_eq!(&kept.0[..], b"kept", "it is still there");
        assert_eq!(home.strong_count(), 1);
        drop(kept);
        assert_eq!(home.strong_count(), 0);
    }
}
