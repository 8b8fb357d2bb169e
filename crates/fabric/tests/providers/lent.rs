//! Memory that tells when nobody has it any more.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dray_core::{Buf, Memory};

struct Lent {
    content: Vec<u8>,
    in_use: Arc<AtomicBool>,
}

impl Memory for Lent {}

impl Drop for Lent {
    fn drop(&mut self) {
        self.in_use.store(false, Ordering::SeqCst);
    }
}

/// A buffer, and whether anybody has it.
pub fn lent(content: Vec<u8>) -> (Buf, Arc<AtomicBool>) {
    let in_use = Arc::new(AtomicBool::new(true));
    let owner = Arc::new(Lent { content, in_use: in_use.clone() });
    let (start, bytes) = (NonNull::from(&owner.content[..]).cast(), owner.content.len());
    // SAFETY: the owner keeps the vector, which is neither moved nor written to.
    (unsafe { Buf::over(start, bytes, owner) }, in_use)
}

/// So many bytes that nobody mistakes for others.
pub fn content(bytes: usize, seed: usize) -> Vec<u8> {
    (0..bytes).map(|at| ((at * 31 + seed * 7) >> 3) as u8).collect()
}
