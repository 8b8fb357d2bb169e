//! Compares the table with the simplest model of it. The model has the lock of each byte, and a
//! list of waiting requests, all of which are examined after each change.

use super::*;
use dray_core::{LockKind, LockOwner, LockRange, Pid};

const BYTES: usize = 10;
const OWNERS: usize = 6;
const FILES: usize = 3;
const FAMILIES: [LockFamily; 2] = [LockFamily::Posix, LockFamily::Flock];

fn file(at: usize) -> FileId {
    FileId { ino: at as u64, generation: 1 }
}

fn holder(owner: usize) -> HolderId {
    HolderId(owner as u64 % 2)
}

fn owner(at: usize) -> Owner {
    Owner { holder: holder(at), owner: LockOwner::own(at as u64) }
}

/// A request; its bytes are those from the first one to the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ask {
    file: usize,
    owner: usize,
    family: usize,
    kind: LockKind,
    bytes: (usize, usize),
}

impl Ask {
    fn lock(&self) -> Lock {
        let flock = LockRange::ALL;
        let range = LockRange { start: self.bytes.0 as u64, end: self.bytes.1 as u64 };
        let range = if self.family == 0 { range } else { flock };
        let owner = LockOwner::own(self.owner as u64);
        Lock { family: FAMILIES[self.family], kind: self.kind, range, owner, pid: Pid(1) }
    }

    fn bars(&self, other: &Ask) -> bool {
        self.owner != other.owner && self.file == other.file && self.lock().conflicts(&other.lock())
    }
}

#[derive(Default)]
struct Model {
    /// By file, family and owner.
    held: [[[[Option<LockKind>; BYTES]; OWNERS]; 2]; FILES],
    /// With the number that the table has given each.
    waits: Vec<(u64, Ask)>,
    granted: Vec<(u64, Ask)>,
    circles: usize,
}

#[derive(Debug, PartialEq, Eq)]
enum Answer {
    Done,
    Waits,
    Error(Errno),
}

impl Model {
    fn set(&mut self, ask: &Ask) {
        let kind = Some(ask.kind).filter(|kind| *kind != LockKind::Unlock);
        let bytes = &mut self.held[ask.file][ask.family][ask.owner];
        bytes[ask.bytes.0..=ask.bytes.1].fill(kind);
    }

    fn has_any(&self, owner: usize) -> bool {
        let has = |bytes: &[Option<LockKind>; BYTES]| bytes.iter().any(Option::is_some);
        self.held.iter().flatten().any(|owners| has(&owners[owner]))
    }

    fn holders(&self, ask: &Ask) -> Vec<usize> {
        let in_the_way = |held: &Option<LockKind>| match ask.kind {
            LockKind::Shared => *held == Some(LockKind::Exclusive),
            LockKind::Exclusive => held.is_some(),
            LockKind::Unlock => false,
        };
        let owners = &self.held[ask.file][ask.family];
        let bars = |other: &usize| owners[*other][ask.bytes.0..=ask.bytes.1].iter().any(in_the_way);
        (0..OWNERS).filter(|other| *other != ask.owner).filter(bars).collect()
    }

    fn ask(&mut self, ask: &Ask, wait: bool) -> Answer {
        let mut gave_back = false;
        if ask.family == 1 && ask.kind != LockKind::Unlock {
            let had = self.held[ask.file][1][ask.owner][0];
            if had == Some(ask.kind) {
                return Answer::Done;
            }
            gave_back = had.is_some();
            self.set(&Ask { kind: LockKind::Unlock, ..*ask });
        }
        let passes = !wait || gave_back || self.has_any(ask.owner);
        let queued = !passes && self.waits.iter().any(|(_, other)| other.bars(ask));
        let outcome = if !queued && self.holders(ask).is_empty() {
            self.set(ask);
            Answer::Done
        } else if !wait {
            Answer::Error(Errno::EAGAIN)
        } else if ask.family == 0 && self.closes_circle(ask) {
            self.circles += 1;
            Answer::Error(Errno::EDEADLK)
        } else {
            Answer::Waits
        };
        self.settle(ask.file);
        outcome
    }

    fn closes_circle(&self, ask: &Ask) -> bool {
        let mut reached = self.holders(ask);
        let mut at = 0;
        while at < reached.len() {
            let waits = self.waits.iter().filter(|(_, wait)| wait.owner == reached[at]);
            let waits = waits.filter(|(_, wait)| wait.family == 0);
            let more: Vec<usize> = waits.flat_map(|(_, wait)| self.holders(wait)).collect();
            more.into_iter().for_each(|owner| {
                if !reached.contains(&owner) {
                    reached.push(owner);
                }
            });
            at += 1;
        }
        reached.contains(&ask.owner)
    }

    /// Grants what can be granted: first at the file that has changed.
    fn settle(&mut self, changed: usize) {
        self.settle_file(changed);
        while (0..FILES).any(|file| self.settle_file(file)) {}
    }

    fn settle_file(&mut self, file: usize) -> bool {
        let mut any = false;
        let grantable = |model: &Model, at: usize| {
            let ask = &model.waits[at].1;
            let earlier = || model.waits[..at].iter().any(|(_, other)| other.bars(ask));
            ask.file == file
                && model.holders(ask).is_empty()
                && (model.has_any(ask.owner) || !earlier())
        };
        while let Some(at) = (0..self.waits.len()).find(|at| grantable(self, *at)) {
            let (number, ask) = self.waits.remove(at);
            self.set(&ask);
            self.granted.push((number, ask));
            any = true;
        }
        any
    }
}

struct Beside {
    table: LockTable,
    model: Model,
    random: u64,
}

impl Beside {
    fn pick(&mut self, below: usize) -> usize {
        self.random =
            self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.random >> 33) % below as u64) as usize
    }

    fn any_ask(&mut self) -> Ask {
        let (one, two) = (self.pick(BYTES), self.pick(BYTES));
        let family = usize::from(self.pick(5) == 0);
        let bytes = if family == 0 { (one.min(two), one.max(two)) } else { (0, BYTES - 1) };
        let kinds = [LockKind::Shared, LockKind::Exclusive, LockKind::Unlock];
        let (file, owner) = (self.pick(FILES), self.pick(OWNERS));
        Ask { file, owner, family, kind: kinds[self.pick(3)], bytes }
    }

    fn step(&mut self) {
        match self.pick(20) {
            0 => {
                let (at, of, family) = (self.pick(FILES), self.pick(OWNERS), self.pick(2));
                self.table.release(file(at), FAMILIES[family], owner(of));
                self.model.held[at][family][of] = [None; BYTES];
                self.model.settle(at);
            }
            1 => self.release_holder(),
            2..=6 if !self.model.waits.is_empty() => {
                let at = self.pick(self.model.waits.len());
                let (number, ask) = self.model.waits.remove(at);
                self.model.settle(ask.file);
                let gave_up = self
                    .table
                    .change(file(ask.file), |locks, changes| locks.withdraw(changes, number));
                assert_eq!(gave_up, None);
            }
            _ => self.ask(),
        }
    }

    fn ask(&mut self) {
        let ask = self.any_ask();
        let wait = self.pick(3) > 0;
        let outcome = self.model.ask(&ask, wait);
        let asked = self.table.ask(file(ask.file), owner(ask.owner), ask.lock(), wait);
        let answer = match asked {
            Ok(None) => Answer::Done,
            Ok(Some(number)) => {
                self.model.waits.push((number, ask));
                Answer::Waits
            }
            Err(error) => Answer::Error(error.errno()),
        };
        assert_eq!(answer, outcome, "{ask:?}");
    }

    fn release_holder(&mut self) {
        let gone = HolderId(self.pick(2) as u64);
        self.table.release_holder(gone);
        for at in 0..FILES {
            let model = &mut self.model;
            for family in 0..2 {
                let owners = (0..OWNERS).filter(|of| holder(*of) == gone);
                owners.for_each(|of| model.held[at][family][of] = [None; BYTES]);
            }
            let theirs = |wait: &mut (u64, Ask)| wait.1.file == at && holder(wait.1.owner) == gone;
            let dropped: Vec<(u64, Ask)> = model.waits.extract_if(.., theirs).collect();
            model.settle(at);
            for (number, _) in dropped {
                let ended = self.table.poll_ended(file(at), number, Waker::noop());
                assert_eq!(ended, Some(WaitOutcome::Dropped));
            }
        }
    }

    fn check(&mut self) {
        for (number, ask) in std::mem::take(&mut self.model.granted) {
            let ended = self.table.poll_ended(file(ask.file), number, Waker::noop());
            assert_eq!(ended, Some(WaitOutcome::Granted), "{ask:?}");
        }
        let mut held = [[[[None; BYTES]; OWNERS]; 2]; FILES];
        let mut waits = Vec::new();
        for locked in self.table.list(usize::MAX) {
            let (at, of) = (locked.file.ino as usize, locked.owner.owner.number as usize);
            let family = usize::from(locked.lock.family == LockFamily::Flock);
            let end = locked.lock.range.end.min(BYTES as u64 - 1) as usize;
            let bytes = (locked.lock.range.start as usize, end);
            match locked.waiting {
                true => {
                    waits.push(Ask { file: at, owner: of, family, kind: locked.lock.kind, bytes });
                }
                false => held[at][family][of][bytes.0..=bytes.1].fill(Some(locked.lock.kind)),
            }
        }
        assert_eq!(held, self.model.held);
        waits.sort_by_key(|ask| ask.file);
        let mut expected: Vec<Ask> = self.model.waits.iter().map(|(_, ask)| *ask).collect();
        expected.sort_by_key(|ask| ask.file);
        assert_eq!(waits, expected);
        for at in 0..OWNERS {
            assert_eq!(self.table.owners.has_any(owner(at)), self.model.has_any(at));
        }
    }
}

/// Over several files, whose locks have a mutex each, the order of arrival is that of one list of
/// all. So are the owners that may pass it because they have locks anywhere, and so are circles.
// proves: P57
#[test]
fn any_sequence_is_answered_as_by_a_list_of_all() {
    let (mut granted, mut circles) = (0, 0);
    for seed in 0..60 {
        let (table, model) = (LockTable::new(usize::MAX), Model::default());
        let mut beside = Beside { table, model, random: seed };
        for _ in 0..500 {
            beside.step();
            granted += beside.model.granted.len();
            beside.check();
        }
        circles += beside.model.circles;
    }
    assert!(granted > 200 && circles > 50, "{granted} {circles}");
}

/// An owner that gets a lock on one file waits for nobody on another one any more. Nothing was granted
/// there until something else changed: here all waited for ever, and no circle was seen.
#[test]
fn who_gets_a_lock_on_another_file_passes_those_it_stood_behind() {
    let table = LockTable::new(usize::MAX);
    let lock = |owner, bytes| {
        let kind = LockKind::Exclusive;
        Ask { file: 0, owner, family: 0, kind, bytes }.lock()
    };
    let ask = |at, of, bytes| table.ask(file(at), owner(of), lock(of, bytes), true).unwrap();
    assert_eq!(ask(0, 0, (0, 0)), None);
    assert!(ask(0, 1, (0, 9)).is_some());
    let third = ask(0, 2, (5, 5)).expect("it stands behind the second one");
    assert_eq!(table.poll_ended(file(0), third, Waker::noop()), None);
    assert_eq!(ask(1, 2, (0, 0)), None);
    assert_eq!(table.poll_ended(file(0), third, Waker::noop()), Some(WaitOutcome::Granted));
}
