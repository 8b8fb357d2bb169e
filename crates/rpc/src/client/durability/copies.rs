//! Copies of written data. They lie one behind the other in segments, and a segment is used again
//! when nothing in it is kept any more. So keeping a write neither allocates nor has the kernel
//! clear pages, and kept data never move. This is a log in segments without a cleaner (Rosenblum
//! and Ousterhout, ACM TOCS 10(1), 1992, section 3): a sync of everything empties all segments.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dray_core::{Buf, BufMut, Memory};

use super::segments::{SEGMENT_BYTES, SegmentMemory, SegmentSource, SuppliedSegment, segments_for};

/// All copies of one log, and spare memory for more.
pub(super) struct CopyStore {
    segments: Arc<SegmentPool>,
}

/// Segments, those in use and spare ones.
struct SegmentPool {
    segments_max: usize,
    source: Box<dyn SegmentSource>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    spare: Vec<Box<dyn SegmentMemory>>,
    /// Segments in use.
    taken: usize,
    filling: Option<FillingSegment>,
}

/// The segment that is being filled.
struct FillingSegment {
    lease: Arc<SegmentLease>,
    start: NonNull<u8>,
    used_bytes: usize,
    /// The source wants to know how long the first copy takes, and there was none yet.
    measured: bool,
}

/// Room in one segment, or in two that follow each other.
struct CopyRoom {
    first: BufMut,
    rest: Option<BufMut>,
    /// As in [`FillingSegment::measured`].
    measured: bool,
}

// SAFETY: the memory behind `start` belongs to `lease`, which is Send.
unsafe impl Send for FillingSegment {}

/// A segment in use. It goes back to the pool when the last copy in it is forgotten.
struct SegmentLease {
    segment: Mutex<Option<Box<dyn SegmentMemory>>>,
    pool: Arc<SegmentPool>,
}

impl Memory for SegmentLease {}

/// A copy: where the data begin, and the rest if they did not fit there.
pub(super) type DataCopy = (Buf, Option<Buf>);

impl Drop for SegmentLease {
    fn drop(&mut self) {
        let segment = self.segment.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let mut state = self.pool.lock();
        state.taken -= 1;
        state.spare.extend(segment);
    }
}

impl Drop for CopyStore {
    fn drop(&mut self) {
        // The segment that is being filled holds the pool, which holds the segment.
        let filling = self.segments.lock().filling.take();
        drop(filling); // that takes the lock
    }
}

impl SegmentPool {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CopyStore {
    /// Room for `limit_bytes` of data, and for what is unused between them.
    pub(super) fn new(limit_bytes: u64, source: Box<dyn SegmentSource>) -> CopyStore {
        let segments_max = segments_for(limit_bytes);
        let state = Mutex::default();
        CopyStore { segments: Arc::new(SegmentPool { segments_max, source, state }) }
    }

    /// Whether other logs may soon have all memory that this one shares with them.
    pub(super) fn is_scarce(&self) -> bool {
        self.segments.source.is_scarce()
    }

    /// Copies `data`. None if there is no room for it now.
    pub(super) fn copy(&self, data: &[u8]) -> Option<DataCopy> {
        let CopyRoom { mut first, rest, measured } = self.reserve(data.len())?;
        let began = measured.then(dray_rt::now);
        // Outside of the lock: other threads copy at the same time.
        let copied_bytes = first.put(data);
        let rest = rest.map(|mut rest| {
            rest.put(&data[copied_bytes..]);
            rest.freeze()
        });
        if let Some(began) = began {
            self.segments.source.first_copy_took(began.elapsed());
        }
        Some((first.freeze(), rest))
    }

    /// Room for `bytes` in the segment that is being filled and, if that is too little, in the
    /// next.
    fn reserve(&self, bytes: usize) -> Option<CopyRoom> {
        if bytes > SEGMENT_BYTES {
            return None;
        }
        let mut state = self.segments.lock();
        let left_bytes =
            state.filling.as_ref().map_or(0, |filling| SEGMENT_BYTES - filling.used_bytes);
        if bytes <= left_bytes {
            return state.filling.as_mut().map(|filling| {
                let measured = std::mem::take(&mut filling.measured);
                CopyRoom { first: filling.cut(bytes), rest: None, measured }
            });
        }
        let next = self.segments.take(&mut state)?;
        let mut full = state.filling.replace(next);
        let first = match &mut full {
            Some(full) if left_bytes > 0 => Some(full.cut(left_bytes)),
            _ => None,
        };
        let rest_bytes = bytes - first.as_ref().map_or(0, BufMut::capacity);
        let filling = state.filling.as_mut()?;
        let (rest, measured) = (filling.cut(rest_bytes), std::mem::take(&mut filling.measured));
        drop(state);
        drop(full); // it may be the last lease of its segment: that takes the lock
        match first {
            Some(first) => Some(CopyRoom { first, rest: Some(rest), measured }),
            None => Some(CopyRoom { first: rest, rest: None, measured }),
        }
    }

    /// Gives spare segments back to their source, and the one that is being filled if nothing in
    /// it is kept.
    pub(super) fn trim(&self) {
        let is_empty = |filling: &mut FillingSegment| Arc::strong_count(&filling.lease) == 1;
        let filling = self.segments.lock().filling.take_if(is_empty);
        drop(filling); // that makes it a spare one
        let spare = std::mem::take(&mut self.segments.lock().spare);
        drop(spare);
    }

    /// Bytes of memory, in use or spare.
    pub(super) fn memory_bytes(&self) -> u64 {
        let state = self.segments.lock();
        ((state.taken + state.spare.len()) * SEGMENT_BYTES) as u64
    }
}

impl SegmentPool {
    fn take(self: &Arc<SegmentPool>, state: &mut State) -> Option<FillingSegment> {
        if state.taken >= self.segments_max {
            return None;
        }
        let supplied = match state.spare.pop() {
            Some(memory) => SuppliedSegment { memory, measured: false },
            None => self.source.segment(state.taken == 0)?,
        };
        state.taken += 1;
        let SuppliedSegment { memory, measured } = supplied;
        let start = memory.start();
        let lease = SegmentLease { segment: Mutex::new(Some(memory)), pool: self.clone() };
        Some(FillingSegment { lease: Arc::new(lease), start, used_bytes: 0, measured })
    }
}

impl FillingSegment {
    /// The next `bytes` of it.
    fn cut(&mut self, bytes: usize) -> BufMut {
        assert!(bytes <= SEGMENT_BYTES - self.used_bytes);
        // SAFETY: within the segment, which lives as long as `lease`. Cut bytes are not cut again
        // before all of the segment is free.
        let buf = unsafe {
            let start = self.start.add(self.used_bytes);
            BufMut::over(start, bytes, self.lease.clone())
        };
        self.used_bytes += bytes;
        buf
    }
}

#[cfg(test)]
mod tests {
    use super::super::segments::MappedSegments;
    use super::*;

    fn new_store(limit_bytes: u64) -> CopyStore {
        CopyStore::new(limit_bytes, Box::new(MappedSegments::default()))
    }

    fn whole((first, rest): &DataCopy) -> Vec<u8> {
        [&first[..], rest.as_deref().unwrap_or_default()].concat()
    }

    #[test]
    fn data_come_back_as_they_were_and_memory_is_used_again() {
        let store = new_store(4 << 20);
        let data: Vec<u8> = (0..700_000u32).map(|at| (at % 251) as u8).collect();
        let mut most_bytes = 0;
        for round in 0..20 {
            let kept: Vec<DataCopy> = (0..5).map(|_| store.copy(&data).expect("room")).collect();
            assert!(kept.iter().all(|one| whole(one) == data), "round {round}");
            most_bytes = most_bytes.max(store.memory_bytes());
        }
        assert!(most_bytes <= 6 << 20, "{most_bytes}");
    }

    #[test]
    fn a_full_segment_of_which_nothing_is_kept_is_left_behind() {
        let (store, data) = (new_store(2 << 20), vec![7; 1 << 20]);
        for _ in 0..10 {
            drop(store.copy(&data).expect("room"));
        }
        assert!(store.memory_bytes() <= 4 << 20);
    }

    #[test]
    fn there_is_a_bound_and_what_is_free_goes_back_to_the_system() {
        let store = new_store(4 << 20);
        let data = vec![7; 1 << 20];
        let small = store.copy(b"small").expect("room");
        let kept: Vec<DataCopy> = std::iter::from_fn(|| store.copy(&data)).collect();
        assert_eq!(kept.len(), 5, "three segments, of which five bytes were gone");
        store.trim();
        assert_eq!(store.memory_bytes(), 6 << 20, "nothing of it is free");
        drop(kept);
        store.trim();
        assert_eq!((store.memory_bytes(), &small.0[..]), (2 << 20, &b"small"[..]));
        drop(small);
        store.trim();
        assert_eq!(store.memory_bytes(), 0);
        assert!(new_store(0).copy(b"x").is_none());
    }

    /// The segment that was being filled and the pool held each other: each session that had kept
    /// anything left a segment behind.
    // proves: P133
    #[test]
    fn memory_goes_with_the_last_copy() {
        let store = new_store(4 << 20);
        let pool = Arc::downgrade(&store.segments);
        let kept = store.copy(b"kept").expect("room");
        drop(store);
        assert_eq!(&kept.0[..], b"kept", "it is still there");
        assert_eq!(pool.strong_count(), 1);
        drop(kept);
        assert_eq!(pool.strong_count(), 0);
    }

    /// Memory of the test's, as registered memory would be: few segments, each counted.
    struct FewSegments(Arc<Mutex<usize>>);

    struct OneOfFew(NonNull<u8>, Arc<Mutex<usize>>);

    // SAFETY: it is the only reference to its memory.
    unsafe impl Send for OneOfFew {}

    // SAFETY: the vector of `FewSegments::segment` had this size, and is freed with the drop.
    unsafe impl SegmentMemory for OneOfFew {
        fn start(&self) -> NonNull<u8> {
            self.0
        }
    }

    impl Drop for OneOfFew {
        fn drop(&mut self) {
            let whole = std::ptr::slice_from_raw_parts_mut(self.0.as_ptr(), SEGMENT_BYTES);
            // SAFETY: out of a boxed slice of this size, and dropped once.
            drop(unsafe { Box::from_raw(whole) });
            *self.1.lock().unwrap() += 1;
        }
    }

    impl SegmentSource for FewSegments {
        fn segment(&self, _: bool) -> Option<SuppliedSegment> {
            let mut left = self.0.lock().unwrap();
            *left = left.checked_sub(1)?;
            let bytes = Box::leak(vec![0u8; SEGMENT_BYTES].into_boxed_slice());
            let memory = Box::new(OneOfFew(NonNull::from(bytes).cast(), self.0.clone()));
            Some(SuppliedSegment { memory, measured: false })
        }

        fn first_copy_took(&self, _: std::time::Duration) {
            unreachable!("no segment asks for it");
        }

        fn is_scarce(&self) -> bool {
            false
        }
    }

    #[test]
    fn all_memory_comes_from_the_source_and_goes_back_to_it() {
        let left = Arc::new(Mutex::new(2));
        let store = CopyStore::new(64 << 20, Box::new(FewSegments(left.clone())));
        let data = vec![7; 1 << 20];
        let kept: Vec<DataCopy> = std::iter::from_fn(|| store.copy(&data)).collect();
        assert_eq!((kept.len(), *left.lock().unwrap()), (4, 0), "what the source has is the limit");
        drop(store);
        assert_eq!(*left.lock().unwrap(), 0, "copies hold their segments");
        assert!(kept.iter().all(|one| whole(one) == data));
        drop(kept);
        assert_eq!(*left.lock().unwrap(), 2);
    }
}
