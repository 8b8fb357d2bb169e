//! What the kernel was lately given to believe under leases: files with attributes, and directories
//! with names. A recall looks here for what the kernel may have.
//!
//! Tables without keys: files that fall together are taken for given with each other, which costs
//! a recall some time.

use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dray_core::{FileId, IdHash, Name};
use dray_rt::{Instant, now};

/// Rows of each table.
const ROWS: usize = 4096;
/// Longest time for which the kernel believes a name. A recall of a name waits for no longer, whatever
/// holds the lock of its directory in the kernel.
pub(crate) const NAME_VALIDITY_MAX: Duration = Duration::from_secs(1);
/// The kernel counts from when the thread that asked goes on, which is later than the answer.
const LATE: Duration = Duration::from_millis(250);
/// So long after an answer the thread that asked may not have used it yet. A notice would find no inode,
/// or a name whose time is about to be counted.
pub(crate) const UNSETTLED: Duration = Duration::from_millis(20);

/// When files and directories were last given to the kernel.
pub(crate) struct PublishedAnswers {
    attributes: Box<[AtomicU64]>,
    names: Box<[AtomicU64]>,
    /// Of any name in a directory.
    directories: Box<[AtomicU64]>,
}

impl Default for PublishedAnswers {
    fn default() -> PublishedAnswers {
        let rows = || (0..ROWS).map(|_| AtomicU64::new(0)).collect();
        PublishedAnswers { attributes: rows(), names: rows(), directories: rows() }
    }
}

impl PublishedAnswers {
    fn row(rows: &[AtomicU64], id: FileId) -> &AtomicU64 {
        // Fibonacci hashing (Knuth 6.4): inode numbers come in runs.
        let mixed = (id.ino ^ id.generation).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48;
        &rows[mixed as usize % ROWS]
    }

    /// The row of a name, or of all names in a directory.
    fn row_of(&self, dir: FileId, name: Option<&Name>) -> &AtomicU64 {
        match name {
            Some(name) => {
                let hash = IdHash::default().hash_one((dir, name.as_bytes()));
                &self.names[hash as usize % ROWS]
            }
            None => Self::row(&self.directories, dir),
        }
    }

    /// Attributes of a file are about to go to the kernel.
    pub(crate) fn attributes(&self, id: FileId) {
        Self::row(&self.attributes, id).store(now().as_nanos(), Ordering::SeqCst);
    }

    /// A name in a directory is about to go to the kernel, or that it is absent.
    pub(crate) fn name(&self, dir: FileId, name: &Name) {
        let now = now().as_nanos();
        for name in [Some(name), None] {
            self.row_of(dir, name).store(now, Ordering::SeqCst);
        }
    }

    /// A successor does not know what its predecessor gave.
    pub(crate) fn assume_names(&self) {
        let rows = self.names.iter().chain(&self.directories);
        rows.for_each(|row| row.store(now().as_nanos(), Ordering::SeqCst));
    }

    /// From then on the kernel has made the inode of whatever was answered of `id`.
    pub(crate) fn settled_at(&self, id: FileId) -> Instant {
        Instant::from_nanos(Self::row(&self.attributes, id).load(Ordering::SeqCst)) + UNSETTLED
    }

    /// From then on the kernel has counted the time of the name.
    pub(crate) fn name_settled_at(&self, dir: FileId, name: &Name) -> Instant {
        Instant::from_nanos(self.row_of(dir, Some(name)).load(Ordering::SeqCst)) + UNSETTLED
    }

    /// From then on the kernel believes no such name in `dir`, if it gets none from now on. None: none
    /// at all.
    pub(crate) fn names_until(&self, dir: FileId, name: Option<&Name>) -> Instant {
        let given = self.row_of(dir, name).load(Ordering::SeqCst);
        Instant::from_nanos(given) + NAME_VALIDITY_MAX + LATE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_is_believed_for_a_while() {
        let driver = dray_rt::DriverKind::Simulated { seed: 1 };
        dray_rt::Executor::new(driver).unwrap().block_on(async {
            let (published, id) =
                (PublishedAnswers::default(), |ino| FileId { ino, generation: 0 });
            let name = Name::new(b"name").unwrap();
            let until = |dir| published.names_until(id(dir), Some(name));
            dray_rt::sleep(Duration::from_secs(10)).await;
            assert!(until(7) < now() && published.settled_at(id(7)) < now());
            published.name(id(7), name);
            published.attributes(id(8));
            assert_eq!(until(7), now() + NAME_VALIDITY_MAX + LATE);
            assert_eq!(published.names_until(id(7), None), until(7));
            assert!(published.names_until(id(7), Some(Name::new(b"other").unwrap())) < now());
            assert_eq!(published.settled_at(id(8)), now() + UNSETTLED);
            assert_eq!(published.name_settled_at(id(7), name), now() + UNSETTLED);
            assert!(until(8) < now() && published.settled_at(id(7)) < now());
            published.assume_names();
            assert!(until(8) > now() && published.names_until(id(8), None) > now());
        });
    }
}
