//! Changes that clients send again after a loss of power, in whatever order they come. Per byte of
//! a file the change with the greatest stamp prevails, as if all had come in the order of their
//! stamps.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dray_core::{Allocate, Buf, Context, Errno, Error, FileId, OpenFile, Result, SetAttr, Write};

use crate::server::ranges::{RangeTable, Span};
use crate::server::recovery::awaited::{AwaitedRepetition, AwaitedStamps};
use crate::wire::{Change, FileDurableStamp};

/// Ranges, files and failures remembered for one export; beyond it changes are refused.
const RANGES_MAX: usize = 1 << 20;
/// Zeros written at once where no hole can be made, bytes.
const ZEROS_BYTES: u64 = 1 << 20;

/// The changes that have been made again in one export.
#[derive(Default)]
pub(crate) struct ReplayedChanges {
    state: Mutex<State>,
    repetitions: Arc<AwaitedStamps>,
}

#[derive(Default)]
struct State {
    /// Everything up to this stamp was on media.
    durable_stamp: u64,
    files: BTreeMap<FileId, FileState>,
    /// The number of things that are remembered: ranges, files, durable stamps and failures, by
    /// session and in all.
    of_session: BTreeMap<u64, usize>,
    ranges: usize,
}

#[derive(Default)]
struct FileState {
    /// Everything up to this stamp was on media.
    durable_stamp: u64,
    ranges: Ranges,
    /// The latest cut: its stamp.
    cut: u64,
    /// When mode, owner, time of access and time of change were set last.
    attr: [u64; 4],
    /// Changes that could not be made.
    failed: BTreeSet<u64>,
}

/// The last change of each byte: start to end and stamp; no two overlap.
#[derive(Default)]
struct Ranges(BTreeMap<u64, (u64, u64)>);

impl Ranges {
    /// Notes that `start..end` was changed at `stamp`. Answers the parts of it that were not
    /// changed since.
    fn grant(&mut self, start: u64, end: u64, stamp: u64) -> Vec<(u64, u64)> {
        self.grant_over(start, end, stamp, stamp)
    }

    /// The same, for a write. A put cuts and writes at one stamp: it writes what it has cut.
    fn grant_write(&mut self, start: u64, end: u64, stamp: u64) -> Vec<(u64, u64)> {
        self.grant_over(start, end, stamp, stamp.saturating_add(1))
    }

    /// Over everything that was changed before the stamp `over`.
    fn grant_over(&mut self, start: u64, end: u64, stamp: u64, over: u64) -> Vec<(u64, u64)> {
        let before = self.0.range(..start).next_back().filter(|(_, (end, _))| *end > start);
        let first = before.map_or(start, |(from, _)| *from);
        let there: Vec<_> = self.0.range(first..end).map(|(from, to)| (*from, *to)).collect();
        let mut won: Vec<(u64, u64)> = Vec::new();
        let mut win = |from: u64, to: u64| match won.last_mut() {
            _ if from >= to => {}
            Some(last) if last.1 == from => last.1 = to,
            _ => won.push((from, to)),
        };
        let mut at = start;
        for (from, (to, theirs)) in there {
            win(at, from.min(end));
            let (inner_from, inner_to) = (from.max(start), to.min(end));
            if theirs < over {
                self.0.remove(&from);
                if from < inner_from {
                    self.0.insert(from, (inner_from, theirs));
                }
                if inner_to < to {
                    self.0.insert(inner_to, (to, theirs));
                }
                win(inner_from, inner_to);
            }
            at = at.max(inner_to);
        }
        win(at, end);
        for &(from, to) in &won {
            self.0.insert(from, (to, stamp));
        }
        won
    }

    /// The end of what was written behind `from` at `stamp` or later.
    fn end_since(&self, from: u64, stamp: u64) -> u64 {
        let later = self.0.values().filter(|(end, theirs)| *theirs >= stamp && *end != u64::MAX);
        later.map(|(end, _)| *end).max().unwrap_or(0).max(from)
    }
}

/// The next step for a change, given what has been done.
enum Step {
    /// The change is skipped: it was on media, or has been overtaken.
    Skip,
    Write(Vec<(u64, u64)>),
    /// Zeros in these places, then this size unless a later cut decides it.
    Cut(Vec<(u64, u64)>, Option<u64>),
    /// Holes or zeros.
    Allocate(Vec<(u64, u64)>),
    Attr(SetAttr),
}

impl ReplayedChanges {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Everything up to `durable_stamp` was on media, and of these files everything up to theirs.
    pub(crate) fn declare(
        &self,
        session: u64,
        durable_stamp: u64,
        durable_stamps: &[FileDurableStamp],
    ) -> Result<()> {
        let mut state = self.lock();
        state.durable_stamp = state.durable_stamp.max(durable_stamp);
        for FileDurableStamp { file, stamp, .. } in
            durable_stamps.iter().filter(|of_file| of_file.stamp > durable_stamp)
        {
            state.check_room(session)?;
            state.remember(session, 1);
            let file = state.files.entry(*file).or_default();
            file.durable_stamp = file.durable_stamp.max(*stamp);
        }
        Ok(())
    }

    /// Begins to wait for the repetition of a change of `file` that had been answered with `stamp`.
    pub(crate) fn await_repetition(&self, stamp: u64, file: FileId) -> AwaitedRepetition {
        AwaitedRepetition::begin(&self.repetitions, stamp, file)
    }

    /// The changes that may still be asked for again.
    pub(crate) fn awaited(&self) -> &AwaitedStamps {
        &self.repetitions
    }

    /// Forgets everything.
    pub(crate) fn clear(&self) {
        *self.lock() = State::default();
    }

    /// Makes a change again, as far as no later one has been. Errors: those of the file
    /// system below; `ENOMEM`, too much is to be remembered.
    pub(crate) async fn redo(
        &self,
        cx: &Context,
        session: u64,
        ranges: &Arc<RangeTable>,
        file: &dyn OpenFile,
        (stamp, change, data): (u64, Change, Buf),
    ) -> Result<()> {
        let id = file.id();
        if stamp > ranges.stamps.before() {
            let error = Error::new(Errno::EINVAL);
            return Err(error.because("a change from before the loss of power with a later stamp"));
        }
        let _alone = ranges.write(id, Span::ALL).await;
        let step = self.plan(session, id, (stamp, change, data.len() as u64))?;
        let made = carry_out(cx, file, step, change, data).await;
        if made.is_err() {
            self.failed(session, id, stamp);
        }
        made
    }

    /// A change has been made for which nobody waited in the queue of ranges, as one that a server before
    /// began. An answered one of before may be made again behind it: then it does not stand over this one.
    pub(crate) fn made_besides(&self, session: u64, id: FileId, made: (u64, Change, u64)) {
        let (stamp, change, data_bytes) = made;
        let mut state = self.lock();
        if self.repetitions.is_empty() {
            return;
        }
        let known = usize::from(!state.files.contains_key(&id));
        let file = state.files.entry(id).or_default();
        let before = file.ranges.0.len();
        file.plan(stamp, change, data_bytes);
        // As many as there are replay slots, at most: there is room for them.
        let more = file.ranges.0.len().saturating_sub(before) + known;
        state.remember(session, more);
    }

    /// A change could not be made: it does not become one that was when it is asked for again.
    fn failed(&self, session: u64, id: FileId, stamp: u64) {
        let mut state = self.lock();
        let Some(file) = state.files.get_mut(&id) else { return };
        if file.failed.insert(stamp) {
            state.remember(session, 1);
        }
    }

    fn plan(
        &self,
        session: u64,
        id: FileId,
        (stamp, change, data_bytes): (u64, Change, u64),
    ) -> Result<Step> {
        let mut state = self.lock();
        if stamp <= state.durable_stamp {
            return Ok(Step::Skip);
        }
        state.check_room(session)?;
        if !state.files.contains_key(&id) {
            state.remember(session, 1);
        }
        let file = state.files.entry(id).or_default();
        if file.failed.contains(&stamp) {
            return Err(Error::new(Errno::EIO).because("it failed when it was made again before"));
        }
        if stamp <= file.durable_stamp {
            return Ok(Step::Skip);
        }
        let before = file.ranges.0.len();
        let step = file.plan(stamp, change, data_bytes);
        let more = file.ranges.0.len().saturating_sub(before);
        state.remember(session, more);
        Ok(step)
    }
}

impl State {
    /// A session may have as much as is left to the others (dynamic thresholds, as with buffers).
    /// So one session alone cannot keep others' changes from being made again.
    fn check_room(&self, session: u64) -> Result<()> {
        let its_own = self.of_session.get(&session).copied().unwrap_or(0);
        let left = RANGES_MAX.saturating_sub(self.ranges);
        if its_own < left { Ok(()) } else { Err(full()) }
    }

    fn remember(&mut self, session: u64, ranges: usize) {
        *self.of_session.entry(session).or_default() += ranges;
        self.ranges += ranges;
    }
}

fn full() -> Error {
    Error::new(Errno::ENOMEM).because("more changes to be made again than can be remembered")
}

impl FileState {
    fn plan(&mut self, stamp: u64, change: Change, data_bytes: u64) -> Step {
        match change {
            Change::Write { at } => {
                Step::Write(self.ranges.grant_write(at, at.saturating_add(data_bytes), stamp))
            }
            Change::Size { size } => {
                let won = self.ranges.grant(size, u64::MAX, stamp);
                let decides = stamp >= self.cut;
                self.cut = self.cut.max(stamp);
                Step::Cut(won, decides.then(|| self.ranges.end_since(size, stamp)))
            }
            Change::Allocate { flags, at, len_bytes } => {
                let end = at.saturating_add(len_bytes);
                let erases = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE;
                match flags & erases {
                    0 if stamp < self.cut => Step::Skip,
                    0 => Step::Allocate(vec![(at, end)]),
                    _ => Step::Allocate(self.ranges.grant(at, end, stamp)),
                }
            }
            Change::Attr(set) => Step::Attr(self.latest(stamp, set)),
        }
    }

    /// The part of `set` that has not been set since.
    fn latest(&mut self, stamp: u64, mut set: SetAttr) -> SetAttr {
        let mut prevails = |which: usize, wanted: bool| {
            let later = self.attr[which] > stamp;
            if wanted && !later {
                self.attr[which] = stamp;
            }
            !later
        };
        set.mode = set.mode.filter(|_| prevails(0, true));
        let owned = prevails(1, set.uid.is_some() || set.gid.is_some());
        (set.uid, set.gid) = (set.uid.filter(|_| owned), set.gid.filter(|_| owned));
        set.atime = set.atime.filter(|_| prevails(2, true));
        set.mtime = set.mtime.filter(|_| prevails(3, true));
        (set.size, set.kill_set_id) = (None, false);
        set
    }
}

async fn carry_out(
    cx: &Context,
    file: &dyn OpenFile,
    step: Step,
    change: Change,
    data: Buf,
) -> Result<()> {
    match step {
        Step::Skip => Ok(()),
        Step::Write(parts) => {
            let Change::Write { at: begin } = change else { return Ok(()) };
            for (from, to) in parts {
                let piece = data.slice((from - begin) as usize..(to - begin) as usize);
                write_all(cx, file, from, piece).await?;
            }
            Ok(())
        }
        Step::Cut(parts, size) => {
            if let Some(size) = size {
                file.setattr(cx, SetAttr { size: Some(size), ..SetAttr::default() }).await?;
            }
            zero(cx, file, parts).await
        }
        Step::Allocate(parts) => {
            let Change::Allocate { flags, .. } = change else { return Ok(()) };
            for (at, end) in parts {
                file.allocate(cx, Allocate { flags, at, len_bytes: end - at }).await?;
            }
            Ok(())
        }
        Step::Attr(set) if set == SetAttr::default() => Ok(()),
        Step::Attr(set) => file.setattr(cx, set).await.map(drop),
    }
}

async fn write_all(cx: &Context, file: &dyn OpenFile, mut at: u64, mut data: Buf) -> Result<()> {
    while !data.is_empty() {
        match file.write(cx, Write::at(at), data.clone()).await? {
            0 => return Err(Error::new(Errno::ENOSPC)),
            count => {
                at += count as u64;
                data = data.slice(count..data.len());
            }
        }
    }
    Ok(())
}

/// Zeros, as far as the file goes.
async fn zero(cx: &Context, file: &dyn OpenFile, parts: Vec<(u64, u64)>) -> Result<()> {
    if parts.is_empty() {
        return Ok(());
    }
    let size = file.getattr(cx).await?.size;
    for (from, to) in parts.into_iter().map(|(from, to)| (from, to.min(size))) {
        if from >= to {
            continue;
        }
        let flags = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let what = Allocate { flags, at: from, len_bytes: to - from };
        match file.allocate(cx, what).await {
            Ok(()) => {}
            Err(error) if error.errno() == Errno::ENOTSUP => {
                let mut at = from;
                while at < to {
                    let len_bytes = (to - at).min(ZEROS_BYTES);
                    write_all(cx, file, at, Buf::from(vec![0; len_bytes as usize])).await?;
                    at += len_bytes;
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    // proves: P102
    #[test]
    fn the_later_change_prevails_whatever_the_order_of_arrival() {
        let mut ranges = Ranges::default();
        assert_eq!(ranges.grant(10, 20, 5), [(10, 20)]);
        assert_eq!(ranges.grant(0, 30, 3), [(0, 10), (20, 30)]);
        assert_eq!(ranges.grant(15, 25, 7), [(15, 25)]);
        assert_eq!(ranges.grant(12, 28, 6), [(12, 15), (25, 28)]);
        assert_eq!(ranges.grant(12, 28, 6), [], "what comes again has been done");
        assert_eq!(ranges.grant(0, 40, 4), [(0, 10), (28, 40)]);
    }

    // proves: P102
    #[test]
    fn a_cut_spares_what_was_written_after_it_and_hides_what_was_before() {
        let mut file = FileState::default();
        file.plan(9, Change::Write { at: 100 }, 50);
        let Step::Cut(parts, size) = file.plan(5, Change::Size { size: 10 }, 0) else {
            panic!("not a cut")
        };
        assert_eq!(parts, [(10, 100), (150, u64::MAX)]);
        assert_eq!(size, Some(150));
        let Step::Write(parts) = file.plan(3, Change::Write { at: 0 }, 200) else {
            panic!("not a write")
        };
        assert_eq!(parts, [(0, 10)]);
        let Step::Cut(parts, size) = file.plan(4, Change::Size { size: 5 }, 0) else {
            panic!("not a cut")
        };
        assert_eq!((parts, size), (vec![(5, 10)], None), "a later cut decides the size");
    }

    /// Of two writes of one place, both from a server that had died, the earlier one had been answered.
    /// The later one was made first, and then the earlier one stood over it.
    // proves: P142
    #[test]
    fn an_answered_change_does_not_stand_over_one_that_was_begun_behind_it() {
        let (replayed, id) = (ReplayedChanges::default(), FileId { ino: 1, generation: 0 });
        let write = |stamp, at| (stamp, Change::Write { at }, 20);
        replayed.made_besides(1, id, write(7, 0));
        assert!(replayed.lock().files.is_empty(), "nothing is awaited");
        let awaited = replayed.await_repetition(5, id);
        replayed.made_besides(1, id, write(9, 0));
        let Step::Write(parts) = replayed.plan(2, id, write(5, 10)).unwrap() else {
            panic!("not a write")
        };
        assert_eq!(parts, [(20, 30)]);
        drop(awaited);
    }

    /// The write of a put lost against the put's own cut, and the file was empty.
    // proves: P102
    #[test]
    fn a_put_that_is_sent_again_writes_what_it_has_cut() {
        let mut file = FileState::default();
        file.plan(3, Change::Write { at: 0 }, 20);
        file.plan(5, Change::Size { size: 0 }, 0);
        let Step::Write(parts) = file.plan(5, Change::Write { at: 0 }, 10) else {
            panic!("not a write")
        };
        assert_eq!(parts, [(0, 10)]);
        let Step::Cut(parts, size) = file.plan(5, Change::Size { size: 0 }, 0) else {
            panic!("not a cut")
        };
        assert_eq!((parts, size), (vec![], Some(10)), "a cut that comes late cuts nothing of it");
    }

    /// One session that sends more than there is room for does not take all the room.
    #[test]
    fn what_is_remembered_is_bounded_and_a_session_leaves_as_much_as_it_takes() {
        let replayed = ReplayedChanges::default();
        let durable_stamp = |ino| FileDurableStamp {
            file: FileId { ino, generation: 0 },
            stamp: 2,
            ticket: crate::wire::Ticket([0; crate::wire::Ticket::BYTES]),
        };
        replayed.lock().remember(1, RANGES_MAX / 2 - 1);
        replayed.declare(1, 1, &[durable_stamp(1)]).unwrap();
        let error = replayed.declare(1, 1, &[durable_stamp(2)]).unwrap_err();
        assert_eq!(error.errno(), Errno::ENOMEM);
        let write = |at| (5, Change::Write { at }, 10);
        assert!(replayed.plan(1, FileId { ino: 3, generation: 0 }, write(0)).is_err());
        assert!(replayed.plan(2, FileId { ino: 3, generation: 0 }, write(0)).is_ok());
        replayed.lock().remember(3, RANGES_MAX / 2);
        assert!(replayed.plan(2, FileId { ino: 3, generation: 0 }, write(50)).is_err());
    }

    /// Changes of attributes alone, and those that fail, were remembered without an end.
    #[test]
    fn files_and_failures_count_too() {
        let replayed = ReplayedChanges::default();
        let id = |ino| FileId { ino, generation: 0 };
        let attr = (5, Change::Attr(SetAttr { mode: Some(0o600), ..SetAttr::default() }), 0);
        for ino in [1, 2, 2] {
            replayed.plan(1, id(ino), attr).unwrap();
        }
        assert_eq!(replayed.lock().ranges, 2);
        for stamp in [5, 6, 6] {
            replayed.failed(1, id(1), stamp);
        }
        assert_eq!(replayed.lock().ranges, 4);
        assert!(replayed.plan(1, id(1), attr).is_err(), "it failed before");
    }

    #[test]
    fn each_attribute_keeps_the_value_of_its_latest_change() {
        let mut file = FileState::default();
        let mode = |mode| SetAttr { mode: Some(mode), ..SetAttr::default() };
        assert_eq!(file.latest(7, mode(0o600)), mode(0o600));
        assert_eq!(file.latest(5, mode(0o644)), SetAttr::default());
        let owner = SetAttr { uid: Some(dray_core::Uid(3)), ..mode(0o644) };
        let rest = SetAttr { mode: None, ..owner };
        assert_eq!(file.latest(6, owner), rest);
    }
}
