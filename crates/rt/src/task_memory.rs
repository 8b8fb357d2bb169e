//! Memory of futures, kept for the next ones.
//!
//! The future of a request takes some kilobytes. That is more than the C library's allocator keeps at
//! hand for a thread, so that each request would have it search for memory.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::cell::RefCell;
use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::pin::Pin;
use std::ptr::NonNull;

/// As many blocks a thread keeps. Most requests end before the next begins.
const KEPT_MAX: usize = 8;
/// A larger block is not kept, bytes.
const KEPT_MAX_BYTES: usize = 16 << 10;

thread_local! {
    static KEPT: RefCell<Vec<Block>> = const { RefCell::new(Vec::new()) };
}

/// Memory that holds no value.
struct Block {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory belongs to the block alone.
unsafe impl Send for Block {}

/// Bytes that this thread keeps for futures. For tests that count what is left behind.
pub fn kept_task_bytes() -> usize {
    KEPT.with(|kept| kept.borrow().iter().map(|block| block.layout.size()).sum())
}

impl Block {
    /// `layout` has bytes.
    fn new(layout: Layout) -> Block {
        let kept = KEPT.try_with(|kept| {
            let mut kept = kept.borrow_mut();
            let last = kept.iter().rposition(|block| block.layout == layout)?;
            Some(kept.swap_remove(last))
        });
        // The thread may be ending.
        kept.ok().flatten().unwrap_or_else(|| Block::allocate(layout))
    }

    #[cold]
    fn allocate(layout: Layout) -> Block {
        assert_ne!(layout.size(), 0);
        // SAFETY: the layout has bytes.
        let start = NonNull::new(unsafe { alloc(layout) });
        Block { start: start.unwrap_or_else(|| handle_alloc_error(layout)), layout }
    }

    /// Keeps it for the next future of this thread, if there is room.
    fn give_back(self) {
        if self.layout.size() > KEPT_MAX_BYTES {
            return;
        }
        let mut block = Some(self);
        let _ = KEPT.try_with(|kept| {
            let mut kept = kept.borrow_mut();
            if kept.len() < KEPT_MAX {
                kept.extend(block.take());
            }
        }); // the thread may be ending
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// A future in a block, as `Box<dyn Future>` is one on the heap.
pub(crate) struct TaskBox {
    future: NonNull<dyn Future<Output = ()> + Send>,
    /// The memory that `future` is in. Present until the drop.
    block: Option<Block>,
}

// SAFETY: the future is, and belongs to the box alone.
unsafe impl Send for TaskBox {}

impl TaskBox {
    #[inline]
    pub(crate) fn pin<F: Future<Output = ()> + Send + 'static>(future: F) -> Pin<TaskBox> {
        const { assert!(size_of::<F>() > 0) }
        let block = Block::new(Layout::new::<F>());
        let start = block.start.cast::<F>();
        // SAFETY: the block has the layout of the future.
        unsafe { start.write(future) };
        // SAFETY: the future stays in its block until it is dropped there.
        unsafe { Pin::new_unchecked(TaskBox { future: start, block: Some(block) }) }
    }
}

impl Deref for TaskBox {
    type Target = dyn Future<Output = ()> + Send;

    fn deref(&self) -> &Self::Target {
        // SAFETY: it is there until the drop, and lent as the box is.
        unsafe { self.future.as_ref() }
    }
}

impl DerefMut for TaskBox {
    fn deref_mut(&mut self) -> &mut Self::Target {
        // SAFETY: it is there until the drop, and lent as the box is.
        unsafe { self.future.as_mut() }
    }
}

impl Drop for TaskBox {
    fn drop(&mut self) {
        // SAFETY: it was written when the box was made, and is not used again.
        unsafe { self.future.drop_in_place() };
        if let Some(block) = self.block.take() {
            block.give_back();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn holding(held: &Arc<[u8; 64]>) -> Pin<TaskBox> {
        let held = held.clone();
        TaskBox::pin(async move { drop(held) })
    }

    fn address(future: &Pin<TaskBox>) -> *const u8 {
        std::ptr::from_ref(&**future).cast()
    }

    #[test]
    fn the_memory_of_a_future_is_used_again() {
        let held = Arc::new([0; 64]);
        let first = holding(&held);
        let at = address(&first);
        assert_eq!(Arc::strong_count(&held), 2);
        drop(first);
        assert_eq!(Arc::strong_count(&held), 1, "a future is dropped before its memory is kept");
        let [again, other] = [holding(&held), holding(&held)];
        assert_eq!(address(&again), at);
        assert_ne!(address(&other), at);
        let larger = [held.clone(), held.clone()];
        drop(again);
        assert_ne!(address(&TaskBox::pin(async move { drop(larger) })), at);
    }

    #[test]
    fn a_thread_keeps_few_and_small_blocks() {
        let held = Arc::new([0; 64]);
        let many: Vec<_> = (0..2 * KEPT_MAX).map(|_| holding(&held)).collect();
        drop(many);
        assert_eq!(KEPT.with(|kept| kept.borrow().len()), KEPT_MAX);
        KEPT.take();
        let large = [0u8; KEPT_MAX_BYTES + 1];
        drop(TaskBox::pin(async move { assert!(large.is_ascii()) }));
        assert_eq!(KEPT.with(|kept| kept.borrow().len()), 0);
    }

    #[test]
    fn a_future_may_end_on_another_thread() {
        let held = Arc::new([0; 64]);
        let future = holding(&held);
        std::thread::spawn(move || drop(future)).join().unwrap();
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
