//! What the kernel has cached and other clients have changed. Only advice: at an open it is looked
//! at anyway.
//!
//! Dropped on a thread of its own. The kernel waits for pages that are being read, and has those
//! written back that were stored into through a mapping; both take the mount's workers.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dray_core::FileId;

use crate::notify::Notifier;
use crate::worker::shared::Shared;

/// Files that may wait to be dropped; more are left to their next open.
const FILES_MAX: usize = 1024;

/// Files whose pages and attributes are to be dropped.
#[derive(Default)]
pub(crate) struct Outdated(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    files: BTreeSet<FileId>,
    /// A thread comes to them.
    tended: bool,
}

impl Outdated {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if nobody comes to them yet.
    fn add(&self, files: Vec<FileId>) -> bool {
        let mut waiting = self.lock();
        for file in files {
            if waiting.files.len() < FILES_MAX {
                waiting.files.insert(file);
            }
        }
        !waiting.files.is_empty() && !std::mem::replace(&mut waiting.tended, true)
    }

    /// The next one; none ends whoever asks.
    fn next(&self) -> Option<FileId> {
        let mut waiting = self.lock();
        let next = waiting.files.pop_first();
        waiting.tended = next.is_some();
        next
    }
}

/// Has the kernel forget what it knows of `files`, soon.
pub(crate) fn drop_soon(shared: &Arc<Shared>, files: Vec<FileId>) {
    if !shared.outdated.add(files) {
        return;
    }
    let kernel = Notifier { device: shared.device.clone(), shared: shared.clone() };
    let tend = move || {
        while let Some(file) = kernel.shared.outdated.next() {
            let _ = kernel.inval_inode(file, Some((0, 0))); // else they run out
        }
    };
    if std::thread::Builder::new().name("dray-outdated".into()).spawn(tend).is_err() {
        *shared.outdated.lock() = Waiting::default(); // there is no thread to be had
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_comes_to_all_that_wait_and_they_are_bounded() {
        let outdated = Outdated::default();
        let file = |ino| FileId { ino, generation: 1 };
        assert!(!outdated.add(Vec::new()));
        assert!(outdated.add(vec![file(1), file(2), file(1)]) && !outdated.add(vec![file(3)]));
        let all: Vec<_> = std::iter::from_fn(|| outdated.next()).collect();
        assert_eq!(all, [file(1), file(2), file(3)]);
        assert!(outdated.add((0..=FILES_MAX as u64).map(file).collect()), "the last one has left");
        assert_eq!(outdated.lock().files.len(), FILES_MAX);
    }
}
