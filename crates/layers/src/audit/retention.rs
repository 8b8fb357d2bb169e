//! How large a log may be, and what becomes of its oldest segments.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use super::consumers::{Consumer, Consumers};
use super::log::{SegmentFile, segments};
use super::{AuditOptions, FullPolicy};

/// Whether the log may grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// There is room.
    Some,
    /// There is none, by the log's policy.
    None,
}

/// The limits of a log, and what was found when it was looked at last.
pub(super) struct Retention {
    dir: PathBuf,
    spill: Option<PathBuf>,
    export: String,
    full: FullPolicy,
    max_bytes: u64,
    known: Vec<Consumer>,
    /// Why the consumers cannot be read, which has been logged.
    unreadable: Option<String>,
    /// How many segments there are, and their bytes.
    pub(super) found: (u64, u64),
}

impl Retention {
    pub(super) fn new(options: &AuditOptions) -> Retention {
        Retention {
            dir: options.dir.clone(),
            spill: options.spill.clone(),
            export: options.export.clone(),
            full: options.full,
            max_bytes: options.max_bytes,
            known: Vec::new(),
            unreadable: None,
            found: (0, 0),
        }
    }

    /// How many consumers there are, and how many records the slowest has not seen.
    pub(super) fn consumers(&self, next_index: u64) -> (u64, u64) {
        let lag = self.known.iter().map(|one| next_index.saturating_sub(one.bookmark)).max();
        (self.known.len() as u64, lag.unwrap_or(0))
    }

    /// The consumer that needs the oldest records, in words.
    pub(super) fn slowest(&self) -> String {
        let now_us = dray_rt::wall_clock().as_micros() as u64;
        let keeping = self.known.iter().filter(|one| !one.is_idle(now_us));
        match (&self.unreadable, keeping.min_by_key(|one| one.bookmark)) {
            (None, Some(slowest)) => format!("consumer `{}`", slowest.name),
            (None, None) => "a consumer".to_owned(),
            (Some(_), _) => "a consumer whose file cannot be read".to_owned(),
        }
    }

    /// Removes or moves the oldest segments, as far as the log is too large and the policy allows
    /// that. `current` stays. Errors: those of the files.
    pub(super) fn make_room(
        &mut self,
        current: Option<&Path>,
        next_index: u64,
    ) -> io::Result<Room> {
        self.read_consumers();
        let now_us = dray_rt::wall_clock().as_micros() as u64;
        let keeping = self.known.iter().filter(|one| !one.is_idle(now_us));
        // Of consumers that cannot be read nobody knows what they need.
        let unknown = self.unreadable.is_some().then_some(0);
        let needed_from = keeping.map(|one| one.bookmark).chain(unknown).min();
        let all = segments(std::slice::from_ref(&self.dir))?;
        let mut bytes: u64 = all.iter().map(|one| one.bytes).sum();
        let mut count = all.len() as u64;
        let mut room = Room::Some;
        for (number, oldest) in all.iter().enumerate() {
            if bytes <= self.max_bytes || Some(&*oldest.path) == current {
                break;
            }
            let end = all.get(number + 1).map_or(next_index, |next| next.first_index);
            let is_needed = needed_from.is_some_and(|from| from < end);
            match (is_needed, self.full) {
                (true, FullPolicy::Block) => {
                    room = Room::None;
                    break;
                }
                (true, FullPolicy::Spill) if self.spill(oldest).is_ok() => {}
                (true, FullPolicy::Spill) => {
                    room = Room::None;
                    break;
                }
                (true, FullPolicy::Drop) => {
                    let export = &self.export;
                    let (first, last) = (oldest.first_index, end - 1);
                    log::warn!(
                        "audit of export `{export}`: records {first} to {last} are removed, which a consumer has \
                         not seen"
                    );
                    fs::remove_file(&oldest.path)?;
                }
                (false, _) => fs::remove_file(&oldest.path)?,
            }
            (bytes, count) = (bytes - oldest.bytes, count - 1);
        }
        self.found = (count, bytes);
        self.clear_spilled(needed_from)?;
        Ok(room)
    }

    fn read_consumers(&mut self) {
        match Consumers::of(&self.dir).all() {
            Ok(known) => (self.known, self.unreadable) = (known, None),
            Err(error) => {
                let why = error.to_string();
                if self.unreadable.as_ref() != Some(&why) {
                    log::error!(
                        "audit of export `{}`: a consumer cannot be read: {why}; the log keeps all records",
                        self.export
                    );
                }
                self.unreadable = Some(why);
            }
        }
    }

    /// Moves a segment to the other directory, which may be on another file system.
    fn spill(&self, segment: &SegmentFile) -> io::Result<()> {
        let dir = self.spill.as_deref().ok_or(io::ErrorKind::NotFound)?;
        let name = segment.path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let (to, new) = (dir.join(name), dir.join(name).with_extension("new"));
        let moved = (|| {
            fs::copy(&segment.path, &new)?;
            File::open(&new)?.sync_all()?;
            fs::rename(&new, &to)?;
            File::open(dir)?.sync_all()?;
            fs::remove_file(&segment.path)
        })();
        moved.inspect_err(|error: &io::Error| {
            let _ = fs::remove_file(&new);
            let shown = dir.display();
            log::error!("audit of export `{}`: cannot spill to {shown}: {error}", self.export);
        })
    }

    /// Removes what was spilled and is no longer needed.
    fn clear_spilled(&self, needed_from: Option<u64>) -> io::Result<()> {
        let Some(dir) = &self.spill else { return Ok(()) };
        let spilled = segments(std::slice::from_ref(dir))?;
        let own = segments(std::slice::from_ref(&self.dir))?;
        for (number, one) in spilled.iter().enumerate() {
            let behind = spilled.get(number + 1).or(own.first());
            let Some(behind) = behind.filter(|behind| behind.first_index > one.first_index) else {
                break; // it is the last one
            };
            if needed_from.is_some_and(|from| from < behind.first_index) {
                break;
            }
            fs::remove_file(&one.path)?;
        }
        Ok(())
    }
}
