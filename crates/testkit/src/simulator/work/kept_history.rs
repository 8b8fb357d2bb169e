//! What is known of files whose writes are kept, and what the clients' kernels have open.

use std::collections::HashMap;

use dray_core::{FileId, OpenHow, RequestId};

use super::kept::FILES;
use crate::simulator::Outcome;
use crate::simulator::history::{HistoryEvent, judge, linearizable_from};

/// What was done to the value of a file.
#[derive(Clone, Copy, Debug)]
pub(super) enum KeptOp {
    /// A read found it.
    Read(u64),
    /// A write set it.
    Write(u64),
    /// The same of a write that came later than its answer: only if the value before was this one.
    Late { upon: u64, value: u64 },
}

/// A write that was answered, and may be kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingWrite {
    pub(super) file: usize,
    pub(super) event: usize,
    pub(super) upon: u64,
    pub(super) value: u64,
    /// A sync behind it was answered.
    pub(super) is_synced: bool,
    /// The client has gone down since: the write is made when that is back.
    pub(super) is_down: bool,
}

#[derive(Default)]
pub(super) struct FileHistory {
    pub(super) events: Vec<HistoryEvent<KeptOp>>,
    /// Of each write: its event, and the size that the file has behind it.
    pub(super) sizes: Vec<(usize, u64)>,
    /// When a size was asked for, and what it was.
    pub(super) looks: Vec<(u64, u64)>,
}

#[derive(Default)]
pub(super) struct KeptState {
    pub(super) ticks: u64,
    pub(super) writes: u64,
    pub(super) files: [FileHistory; FILES.len()],
    /// The file of each value.
    pub(super) file_of: HashMap<u64, usize>,
    /// Of each client that is gone: nothing that it hears counts any more.
    pub(super) gone: Vec<usize>,
    pub(super) pending: Vec<(usize, PendingWrite)>,
    /// Of each client, what it is about to open.
    pub(super) opening: HashMap<usize, KernelOpening>,
    pub(super) handles: Vec<Handle>,
    /// Of each client, what its status said last of mishaps.
    pub(super) mishaps: HashMap<usize, (u64, u64)>,
}

/// A file that the kernel of a client has open, by the request that opened it.
#[derive(Clone, Copy)]
pub(super) struct Handle {
    pub(super) client: usize,
    pub(super) request: RequestId,
    pub(super) how: OpenHow,
    pub(super) id: FileId,
}

/// An opening that is asked for. The kernel asks once more if the daemon dies before it answers.
#[derive(Clone, Copy)]
pub(super) struct KernelOpening {
    pub(super) request: RequestId,
    pub(super) index: usize,
    /// None: by the name.
    pub(super) id: Option<FileId>,
    pub(super) how: OpenHow,
}

impl FileHistory {
    /// Some order explains what was read, and no size is older than a write. Errors: what is wrong.
    pub(super) fn verify(&self) -> Outcome<()> {
        let FileHistory { events, sizes, looks } = self;
        for (at, size) in looks {
            let is_before = |event: &HistoryEvent<KeptOp>| {
                event.to < *at && matches!(event.kind, KeptOp::Write(_))
            };
            let longer =
                |(event, long): &&(usize, u64)| *long > *size && is_before(&events[*event]);
            if let Some(longer) = sizes.iter().find(longer) {
                return Err(format!("a size is older than a write: {size} {longer:?}"));
            }
        }
        judge(linearizable_from(0, events, behind), events)
    }
}

impl KeptState {
    pub(super) fn tick(&mut self) -> u64 {
        self.ticks += 1;
        self.ticks
    }

    /// The pending writes of a client may have been made by now, later than they were answered. Or they may be lost.
    /// `sent`: nothing is kept any more.
    pub(super) fn are_late(
        &mut self,
        client: usize,
        sent: bool,
        lost: impl Fn(&PendingWrite) -> bool,
    ) {
        let now = self.tick();
        for (_, write) in self.pending.iter().filter(|(of, _)| *of == client) {
            let event = &mut self.files[write.file].events[write.event];
            event.kind = KeptOp::Late { upon: write.upon, value: write.value };
            event.optional |= lost(write);
            let is_made = sent || !write.is_down;
            event.to = if event.optional || !is_made { u64::MAX } else { now };
        }
    }

    /// Whether the data of a write were kept aside, or those of a later one, which had replaced them.
    pub(super) fn is_aside(&self, aside: &[u64], write: &PendingWrite) -> bool {
        let of_file = |value: &&u64| self.file_of.get(value) == Some(&write.file);
        aside.iter().filter(of_file).any(|value| *value >= write.value)
    }
}

/// The value behind an operation; none if that could not have happened.
fn behind(value: &u64, kind: &KeptOp) -> Option<u64> {
    match *kind {
        KeptOp::Read(found) => (found == *value).then_some(found),
        KeptOp::Write(new) => Some(new),
        KeptOp::Late { upon, value: new } => (upon == *value).then_some(new),
    }
}
