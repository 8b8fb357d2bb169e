//! What the layer has done, for status and metrics.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! figures {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counts since the export was opened.
        #[derive(Debug, Default)]
        pub struct AggregateFigures { $(pub(super) $name: AtomicU64),* }

        /// The same at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct AggregateCounts { $($(#[$doc])* pub $name: u64),* }

        impl AggregateFigures {
            /// What they are now.
            pub fn counts(&self) -> AggregateCounts {
                AggregateCounts { $($name: self.$name.load(Ordering::Relaxed)),* }
            }
        }

        impl AggregateCounts {
            /// Each count with its name.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }
        }
    };
}

figures! {
    /// Reads that were answered from memory.
    read_hits,
    /// The bytes of these reads.
    read_hit_bytes,
    /// Reads that the file system below was asked for as they came.
    reads_passed,
    /// Requests that read ahead.
    ahead_requests,
    /// What these have read.
    ahead_bytes,
    /// Bytes that are in memory because they were read ahead.
    ahead_held_bytes,
    /// Writes that were merged.
    writes_merged,
    /// The bytes of these writes.
    merged_bytes,
    /// Writes that the file system below was asked for as they came.
    writes_passed,
    /// Requests that wrote what was merged.
    late_requests,
    /// What these have written.
    late_bytes,
    /// Bytes that are pending.
    pending_bytes,
    /// Late writes that failed.
    late_errors,
}

/// Adds to a count.
pub(super) fn add(count: &AtomicU64, by: u64) {
    count.fetch_add(by, Ordering::Relaxed);
}

/// Takes from the count of something that is held.
pub(super) fn take(count: &AtomicU64, by: u64) {
    count.fetch_sub(by, Ordering::Relaxed);
}
