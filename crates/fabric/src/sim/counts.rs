//! What a simulated network did to its traffic: a simulation that nothing happened in proves
//! nothing.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts since the network was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Frames sent.
    pub frames: u64,
    /// Of these, those that never arrived.
    pub lost: u64,
    /// Of the lost, those that the accepting end had sent: replies, mostly.
    pub lost_replies: u64,
    /// Frames that arrived when their sender had given up their connection.
    pub late: u64,
    /// Frames that arrived behind one that was sent later, between the same two ends.
    pub overtaken: u64,
    /// Connections that broke, other than by being closed.
    pub breaks: u64,
    /// Times that somebody was cut off from everybody.
    pub partitions: u64,
}

/// Counts that are being made.
#[derive(Default)]
pub(super) struct FrameCounts {
    pub(super) frames: AtomicU64,
    lost: [AtomicU64; 2],
    pub(super) late: AtomicU64,
    pub(super) overtaken: AtomicU64,
    pub(super) breaks: AtomicU64,
    pub(super) partitions: AtomicU64,
}

impl FrameCounts {
    /// So many frames that end `from` of a connection had sent do not arrive.
    pub(super) fn lost(&self, from: usize, frames: usize) {
        self.lost[from].fetch_add(frames as u64, Ordering::Relaxed);
    }

    pub(super) fn counts(&self) -> Counts {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let lost_replies = get(&self.lost[1]);
        Counts {
            frames: get(&self.frames),
            lost: get(&self.lost[0]) + lost_replies,
            lost_replies,
            late: get(&self.late),
            overtaken: get(&self.overtaken),
            breaks: get(&self.breaks),
            partitions: get(&self.partitions),
        }
    }
}

/// Adds so much.
pub(super) fn add(count: &AtomicU64, more: u64) {
    count.fetch_add(more, Ordering::Relaxed);
}
