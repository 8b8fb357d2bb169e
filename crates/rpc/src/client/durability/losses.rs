//! Losses, as people see them: log lines, events and counters. A loss is a change that was
//! answered and is gone, because the server's machine lost power or its disks failed.

use std::collections::VecDeque;
use std::time::Duration;

use dray_core::FileId;
use dray_rt::Instant;

/// Losses remembered for the status.
const EVENTS_MAX: usize = 64;
/// Losses that are named in the log after one loss of power; of the rest their number.
const LINES_MAX: u64 = 100;

/// A loss, for the status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LossEvent {
    /// How long ago.
    pub age: Duration,
    /// The file, or the directory of a name.
    pub file: Option<FileId>,
    /// The loss and its cause, for people.
    pub what: String,
    /// Data, as far as it was counted.
    pub bytes: u64,
}

/// The changes that are not known to be on media, and the losses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnsyncedStatus {
    /// How much is kept at most.
    pub limit_bytes: u64,
    /// Kept, to be sent again.
    pub kept_bytes: u64,
    /// Memory that this takes, spare memory included.
    pub memory_bytes: u64,
    /// Written and not kept: lost if the server's machine loses power now.
    pub unkept_bytes: u64,
    /// Files with changes that may not be on media.
    pub files: u64,
    /// Names made, changed or removed, for which the same holds.
    pub names: u64,
    /// The kept changes are being sent again.
    pub recovering: bool,
    /// Times that the server's machine lost power.
    pub power_losses: u64,
    /// Changes sent again, and their data.
    pub sent_changes: u64,
    /// The data of the changes sent again, bytes.
    pub sent_bytes: u64,
    /// Losses reported.
    pub losses: u64,
    /// The data of these changes, as far as it was counted.
    pub lost_bytes: u64,
    /// The last of them.
    pub events: Vec<LossEvent>,
}

impl UnsyncedStatus {
    /// Of several sessions of one client, as if they were one.
    pub fn sum<'a>(statuses: impl Iterator<Item = &'a UnsyncedStatus>) -> UnsyncedStatus {
        statuses.fold(UnsyncedStatus::default(), |mut sum, one| {
            sum.limit_bytes += one.limit_bytes;
            sum.kept_bytes += one.kept_bytes;
            sum.memory_bytes += one.memory_bytes;
            sum.unkept_bytes += one.unkept_bytes;
            sum.files += one.files;
            sum.names += one.names;
            sum.recovering |= one.recovering;
            sum.power_losses += one.power_losses;
            sum.sent_changes += one.sent_changes;
            sum.sent_bytes += one.sent_bytes;
            sum.losses += one.losses;
            sum.lost_bytes += one.lost_bytes;
            sum.events.extend(one.events.iter().cloned());
            sum
        })
    }
}

/// All losses of one mount.
#[derive(Default)]
pub(super) struct Losses {
    /// Replays begun.
    pub(super) replays: u64,
    power_losses: u64,
    sent_changes: u64,
    sent_bytes: u64,
    losses: u64,
    lost_bytes: u64,
    lines: u64,
    /// Losses and their bytes that were reported to the server.
    reported: (u64, u64),
    events: VecDeque<(Instant, LossEvent)>,
}

impl Losses {
    pub(super) fn power_lost(&mut self) {
        self.power_losses += 1;
        self.lines = 0;
    }

    pub(super) fn replayed(&mut self, bytes: u64) {
        self.sent_changes += 1;
        self.sent_bytes += bytes;
    }

    /// Losses that the server does not know of, and their bytes.
    pub(super) fn unreported(&self) -> (u64, u64) {
        (self.losses - self.reported.0, self.lost_bytes - self.reported.1)
    }

    /// So many were reported to the server.
    pub(super) fn reported(&mut self, (losses, bytes): (u64, u64)) {
        self.reported.0 += losses;
        self.reported.1 += bytes;
    }

    /// Number of the last loss.
    pub(super) fn number(&self) -> u64 {
        self.losses
    }

    /// Notes a loss: log line, event, metric. Answers its number.
    pub(super) fn report(
        &mut self,
        file: Option<FileId>,
        what: &str,
        why: &str,
        bytes: u64,
    ) -> u64 {
        self.losses += 1;
        self.lost_bytes += bytes;
        let of = file.map_or_else(String::new, |file| format!("{file}: "));
        let text = format!("{of}{what} ({bytes} bytes counted): {why}");
        self.lines += 1;
        match self.lines {
            ..LINES_MAX => log::error!("lost at the server: {text}"),
            LINES_MAX => {
                log::error!("and further losses: `dray status` has their number")
            }
            _ => {}
        }
        if self.events.len() >= EVENTS_MAX {
            self.events.pop_front();
        }
        let event = LossEvent { age: Duration::ZERO, file, what: text, bytes };
        self.events.push_back((dray_rt::now(), event));
        self.losses
    }

    pub(super) fn status(&self) -> UnsyncedStatus {
        let events = self.events.iter();
        UnsyncedStatus {
            power_losses: self.power_losses,
            sent_changes: self.sent_changes,
            sent_bytes: self.sent_bytes,
            losses: self.losses,
            lost_bytes: self.lost_bytes,
            events: events
                .map(|(at, event)| LossEvent { age: at.elapsed(), ..event.clone() })
                .collect(),
            ..UnsyncedStatus::default()
        }
    }
}
