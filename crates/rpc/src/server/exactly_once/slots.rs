//! Replay slots: what keeps a change from being applied twice.
//!
//! A client numbers the changes that it sends in a slot and uses the slot again only
//! when it has its answer. So of each slot the last number and its answer are all that
//! has to be remembered (after NFSv4.1 sessions, RFC 8881 section 2.10.6).

mod restore;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use dray_core::{FileId, Fut, Op};
use dray_fabric::Connection;

use crate::server::exactly_once::settle::Amend;
use crate::server::journal::SlotLog;
use crate::server::ranges::RangeGrant;
use crate::server::recovery::awaited::AwaitedRepetition;
use crate::server::reply::Reply;
use crate::server::sabotage::{BrokenPromises, Sabotage};
use crate::wire::OpRow;

/// The slots of a session.
pub(crate) struct ReplaySlots {
    slots: Mutex<Vec<Slot>>,
    log: Arc<dyn SlotLog>,
    broken: BrokenPromises,
}

#[derive(Default)]
struct Slot {
    sequence: u32,
    state: State,
    /// The last answer, encoded; its memory is kept for the next one.
    answer: Vec<u8>,
}

#[derive(Default)]
enum State {
    /// Whatever number comes first is the first.
    #[default]
    Unused,
    /// Changes up to this number are over; no answer is kept.
    Over,
    /// Being applied; the answer goes where the client asked last.
    Running(Route),
    Done,
    /// Answered, or settled, by the answer of a server before us.
    Restored,
    /// The server's death cut it short: its grants are kept until it comes again.
    Cut(Box<Reexecution>),
}

/// The state of a change that is made again.
pub(crate) struct Reexecution {
    pub(crate) op: Op,
    pub(crate) grants: Vec<RangeGrant>,
    pub(crate) amend: Option<Amend>,
    /// The change had been answered.
    pub(crate) answered: Option<Box<AnsweredChange>>,
}

/// A change that was answered, by a server whose machine may have lost it since. It counts among the
/// changes that clients send again, by its stamp.
pub(crate) struct AnsweredChange {
    pub(crate) answer: Reply,
    pub(crate) awaited: AwaitedRepetition,
}

impl Reexecution {
    /// The change's grant of this file.
    pub(crate) fn grant_of(&mut self, file: FileId) -> Option<&mut RangeGrant> {
        self.grants.iter_mut().find(|grant| grant.file() == file)
    }

    /// The files of which it may change any: those that it has grants of, and the one that it was
    /// answered to have changed.
    pub(crate) fn files(&self) -> impl Iterator<Item = FileId> {
        let answered = self.answered.iter().filter_map(|answered| answered.answer.file());
        self.grants.iter().map(RangeGrant::file).chain(answered)
    }

    /// The stamp of the data that it writes.
    pub(crate) fn stamp(&self) -> Option<u64> {
        self.grants.iter().find_map(RangeGrant::stamp)
    }

    /// Whether it is `op` that is made again, and of nothing else than it has the grants of. Where
    /// ids differ between server epochs, the inode numbers are the same.
    pub(crate) fn is_of(&self, op: Op, about: impl IntoIterator<Item = FileId>) -> bool {
        let is_granted =
            |file: FileId| self.grants.iter().any(|grant| grant.file().ino == file.ino);
        self.op == OpRow::of(op).noted_as
            && (self.grants.is_empty() || about.into_iter().all(is_granted))
    }
}

impl Slot {
    /// A slot whose calls up to `sequence` have ended.
    fn over(sequence: u32) -> Slot {
        Slot { sequence, state: State::Over, answer: Vec::new() }
    }
}

/// Where an answer goes.
#[derive(Clone)]
pub(crate) struct Route {
    /// The connection may have gone: a call that a file system holds up does not keep its
    /// descriptor.
    pub(crate) connection: Weak<dyn Connection>,
    pub(crate) tag: u32,
}

/// The treatment of a change that came in. What is rare is in a box, since a verdict is moved.
pub(crate) enum Verdict {
    /// Apply it.
    Fresh,
    /// Apply it: a server before us began to.
    Reexecute(Box<Reexecution>),
    /// The change was applied: this was the answer.
    Replay(Box<Reply>),
    /// The same, by a server before us, which need not have notified its observers.
    Restored(Box<Reply>),
    /// The change is being applied; the answer will go to the connection that asked last.
    Running,
    /// Older than what the slot has seen: a leftover of a connection long gone.
    Stale,
    /// There is no such slot.
    Unknown,
}

impl Verdict {
    /// Whether the same call had come before.
    pub(crate) fn is_repeated(&self) -> bool {
        !matches!(self, Verdict::Fresh | Verdict::Unknown)
    }
}

impl ReplaySlots {
    /// New slots, as many as there is room for in `log`.
    pub(crate) fn new(log: Arc<dyn SlotLog>, broken: BrokenPromises) -> ReplaySlots {
        let slots = Mutex::new((0..log.count()).map(|_| Slot::default()).collect());
        ReplaySlots { slots, log, broken }
    }

    /// Gives up the grants of changes that were cut short, and leaves the notes on them to the next
    /// opening of the export. Else calls of the same session that wait for these grants would never end.
    pub(crate) fn release_cut(&self) {
        let mut released = Vec::new(); // their grants end outside of the lock
        for slot in self.lock().iter_mut() {
            if matches!(slot.state, State::Cut(_)) {
                released.push(std::mem::replace(&mut slot.state, State::Over));
            }
        }
    }

    /// Abandons changes that were cut short and not repeated by their clients, so that they block
    /// no other change any longer. A client that repeats one later gets an unknown outcome. Answers
    /// how many changes were abandoned.
    pub(crate) fn give_up_cut(&self) -> usize {
        let mut slots = self.lock();
        let mut given_up = Vec::new(); // their grants end outside of the lock
        for (number, slot) in slots.iter_mut().enumerate() {
            // For what is only to be answered nobody waits.
            let waited_for = |again: &Reexecution| !matches!(again.amend, Some(Amend::Made { .. }));
            if matches!(&slot.state, State::Cut(again) if waited_for(again)) {
                let unknown = self.unknown(number as u32, slot.sequence);
                given_up.push(std::mem::replace(slot, unknown));
            }
        }
        drop(slots);
        given_up.len()
    }

    /// The client has nothing under way in this slot: what was cut short there will not
    /// be asked for again.
    pub(crate) fn idle(&self, number: u32) {
        let mut slots = self.lock();
        let Some(slot) = slots.get_mut(number as usize) else { return };
        if matches!(slot.state, State::Cut(_)) {
            let over = self.undone(number, slot.sequence);
            let cut = std::mem::replace(slot, over);
            drop(slots);
            drop(cut);
        }
    }

    /// The session is over, and all that was kept for it.
    pub(crate) fn end(&self) {
        let count = self.lock().len() as u32;
        (0..count).for_each(|number| self.idle(number));
    }

    /// The log of the slots.
    pub(crate) fn log(&self) -> Arc<dyn SlotLog> {
        self.log.clone()
    }

    /// How many there are: as many as the session was granted by whichever server.
    pub(crate) fn count(&self) -> u32 {
        self.lock().len() as u32
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn begin(&self, slot: u32, sequence: u32, route: &Route) -> Verdict {
        let mut slots = self.lock();
        let Some(slot) = slots.get_mut(slot as usize) else { return Verdict::Unknown };
        let first = matches!(slot.state, State::Unused);
        if sequence == slot.sequence && !first {
            let running = State::Running(route.clone());
            return match &mut slot.state {
                State::Unused | State::Over => Verdict::Stale,
                State::Cut(_) => match std::mem::replace(&mut slot.state, running) {
                    State::Cut(again) => Verdict::Reexecute(again),
                    _ => Verdict::Stale,
                },
                State::Running(old) => {
                    *old = route.clone();
                    Verdict::Running
                }
                State::Done => Verdict::Replay(Box::new(Reply::remembered(&slot.answer))),
                State::Restored => {
                    slot.state = State::Done; // its observers hear of it once
                    Verdict::Restored(Box::new(Reply::remembered(&slot.answer)))
                }
            };
        }
        // Numbers wrap: half of them lie ahead.
        if !first && sequence.wrapping_sub(slot.sequence) > u32::MAX / 2 {
            return Verdict::Stale;
        }
        slot.sequence = sequence;
        // The change that was cut short there has been given up.
        let before = std::mem::replace(&mut slot.state, State::Running(route.clone()));
        drop(slots);
        drop(before);
        Verdict::Fresh
    }

    /// Notes a change that is about to be made. It is not noted if its client has given up on it
    /// and used the slot again. Then the later change is the one to remember.
    pub(crate) fn intend(&self, number: u32, sequence: u32, op: Op, intent: &[u8]) {
        let slots = self.lock();
        if slots.get(number as usize).is_some_and(|slot| slot.sequence == sequence) {
            self.log.begin(number, sequence, op, intent);
        }
    }

    /// As [`SlotLog::settled`].
    pub(crate) fn settled(&self) -> Option<Fut<'_, bool>> {
        self.log.settled()
    }

    /// Notes whether the session holds locks.
    pub(crate) fn set_locks(&self, held: bool) {
        self.log.set_locks(held);
    }

    /// Whether the session held locks in the last server epoch.
    pub(crate) fn had_locks(&self) -> bool {
        self.log.had_locks()
    }

    /// Notes whether the session may have leases.
    pub(crate) fn set_leases(&self, may: bool) {
        self.log.set_leases(may && !self.broken.is(Sabotage::LeaseNotes));
    }

    /// Whether the session may have had leases when the process before died.
    pub(crate) fn may_have_leases(&self) -> bool {
        self.log.may_have_leases()
    }

    /// Remembers the answer and says where it goes; none if the client has since used
    /// the slot for something else, having given up on this.
    pub(crate) fn done(&self, number: u32, sequence: u32, answer: &Reply) -> Option<Route> {
        let mut slots = self.lock();
        let slot = slots.get_mut(number as usize)?;
        if slot.sequence != sequence {
            return None;
        }
        slot.answer.clear();
        answer.put(&mut slot.answer);
        self.log.done(number, sequence, &slot.answer);
        match std::mem::replace(&mut slot.state, State::Done) {
            State::Running(route) => Some(route),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::exactly_once::maker::Maker;
    use crate::server::export::Export;
    use crate::server::journal::{Journal, MemoryJournal, SessionRecord};
    use crate::server::options::StateLoss;
    use crate::wire::Wire;
    use dray_backends::memory::{MemoryFs, MemoryOptions};
    use dray_core::{Context, CreateHow, Errno, Fate, FileSystem, Name, OpenHow, RenameHow};
    use dray_fabric::sim::Network;
    use dray_layers::Observed;
    use dray_layers::faults::{Fault, Faults, When};
    use std::time::Duration;

    fn encoded(reply: &Reply) -> Vec<u8> {
        let mut encoded = Vec::new();
        reply.put(&mut encoded);
        encoded
    }

    /// A client that goes on counting in a new session was never answered once it had
    /// counted half way round.
    #[test]
    fn a_new_session_begins_at_any_number_and_wraps() {
        let mut executor =
            dray_rt::Executor::new(dray_rt::DriverKind::Simulated { seed: 1 }).unwrap();
        executor.block_on(async {
            let network = Network::new();
            let _incoming = network.listen("s");
            let connection = network.connector("s").connect().await.unwrap();
            let route = Route { connection: Arc::downgrade(&connection), tag: 0 };
            let record = SessionRecord {
                id: 1,
                secret: [0; 16],
                node: 1,
                export: String::new(),
                host: String::new(),
            };
            let log = MemoryJournal::default().create(&record, 2).unwrap();
            let slots = ReplaySlots::new(log, BrokenPromises::default());
            for sequence in [u32::MAX - 1, u32::MAX, 0, 1] {
                assert!(matches!(slots.begin(1, sequence, &route), Verdict::Fresh));
                slots.done(1, sequence, &Reply::success(()));
                assert!(matches!(slots.begin(1, sequence, &route), Verdict::Replay(_)));
            }
            assert!(matches!(slots.begin(1, u32::MAX, &route), Verdict::Stale));
            assert!(matches!(slots.begin(2, 1, &route), Verdict::Unknown));
        });
    }

    /// The client had given up on a change, and used the slot for the next one, when the answer
    /// came. That answer is not the answer to the next change.
    #[test]
    fn a_late_answer_is_not_that_of_the_change_after_it() {
        let driver = dray_rt::DriverKind::Simulated { seed: 1 };
        dray_rt::Executor::new(driver).unwrap().block_on(async {
            let answered = Answered::new(Op::Make, &[]).await;
            let (slots, route) =
                (ReplaySlots::new(answered.log, BrokenPromises::default()), &answered.route);
            for sequence in [1, 2] {
                assert!(matches!(slots.begin(0, sequence, route), Verdict::Fresh));
            }
            assert!(slots.done(0, 1, &Reply::success(1u32)).is_none());
            assert!(matches!(slots.begin(0, 2, route), Verdict::Running));
            assert!(slots.done(0, 2, &Reply::success(2u32)).is_some());
            let Verdict::Replay(answer) = slots.begin(0, 2, route) else { panic!("no answer") };
            assert_eq!(encoded(&answer), encoded(&Reply::success(2u32)));
        });
    }

    /// A change in slot 0 with number 1 that was answered, by a server whose machine then
    /// loses power, over and over.
    struct Answered {
        fs: MemoryFs,
        log: Arc<dyn SlotLog>,
        route: Route,
    }

    const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };

    impl Answered {
        async fn new(op: Op, intent: &[u8]) -> Answered {
            let answered = Answered::begun(op, intent).await;
            answered.log.done(0, 1, &encoded(&Reply::success(())));
            answered
        }

        /// A change that was not answered.
        async fn begun(op: Op, intent: &[u8]) -> Answered {
            let network = Network::new();
            let _incoming = network.listen("s");
            let connection = network.connector("s").connect().await.unwrap();
            let record = SessionRecord {
                id: 1,
                secret: [0; 16],
                node: 1,
                export: String::new(),
                host: String::new(),
            };
            let log = MemoryJournal::default().create(&record, 1).unwrap();
            log.begin(0, 1, op, intent);
            let fs = MemoryFs::new(MemoryOptions::default());
            Answered { fs, log, route: Route { connection: Arc::downgrade(&connection), tag: 0 } }
        }

        fn export(&self) -> Export {
            Export::new("data", Arc::new(self.fs.clone()), Vec::new())
        }

        /// The next server's verdict on the change when it comes again.
        async fn next_epoch(&self, lost: bool) -> (ReplaySlots, Verdict) {
            let slots = ReplaySlots::new(self.log.clone(), BrokenPromises::default());
            let loss = if lost { StateLoss::Unsynced } else { StateLoss::Nothing };
            slots.restore(&self.export(), loss).await;
            let verdict = slots.begin(0, 1, &self.route);
            (slots, verdict)
        }
    }

    fn simulated(work: impl Future<Output = ()>) {
        let driver = dray_rt::DriverKind::Simulated { seed: 1 };
        dray_rt::Executor::new(driver).unwrap().block_on(work);
    }

    /// The append was taken for one that had not been made, and put behind its first half.
    // proves: P102
    #[test]
    fn an_append_keeps_its_place_over_two_losses() {
        simulated(async {
            let (cx, name) = (Context::system(), Name::new(b"log").unwrap());
            let id = {
                let fs = MemoryFs::new(MemoryOptions::default());
                fs.create(&cx, fs.info().root, name, NEW).await.unwrap().0.id
            };
            let mut intent = Vec::new();
            (true, (id, (100u64, 10u64))).put(&mut intent);
            let answered = Answered::new(Op::Write, &intent).await;
            // The same first file of an empty file system.
            answered.fs.create(&cx, answered.fs.info().root, name, NEW).await.unwrap();
            for (lost, asked_again) in [(true, true), (true, false), (false, false), (true, true)] {
                let (slots, verdict) = answered.next_epoch(lost).await;
                let Verdict::Reexecute(again) = verdict else { panic!("it is not made again") };
                assert!(matches!(again.amend, Some(Amend::AppendAt(100))));
                if asked_again {
                    slots.done(0, 1, &Reply::success(10u32));
                }
            }
            let (slots, verdict) = answered.next_epoch(false).await;
            assert!(matches!(verdict, Verdict::Restored(_)));
            // Observers hear of it once.
            let again = slots.begin(0, 1, &answered.route);
            assert!(matches!(again, Verdict::Replay(_)));
        });
    }

    /// The answer of before the loss was given by a server that began after the recovery.
    // proves: P102
    #[test]
    fn what_a_loss_undid_is_made_again_by_a_later_server_too() {
        simulated(async {
            let mut intent = Vec::new();
            let name: &[u8] = b"dir";
            let root = MemoryFs::new(MemoryOptions::default()).info().root;
            (root, name).put(&mut intent);
            None::<FileId>.put(&mut intent);
            let answered = Answered::new(Op::Make, &intent).await;
            // No client asks in the first epoch.
            let slots = ReplaySlots::new(answered.log.clone(), BrokenPromises::default());
            slots.restore(&answered.export(), StateLoss::Unsynced).await;
            let (_, verdict) = answered.next_epoch(false).await;
            assert!(matches!(verdict, Verdict::Fresh));
        });
    }

    /// A loss of power spared what was made, and the server after it noted that. A file that the
    /// next loss took was opened nevertheless, with `ESTALE`, and a put of it was answered and not
    /// made.
    // proves: P102
    #[test]
    fn what_one_loss_spares_and_the_next_takes_is_made_again() {
        simulated(async {
            let (cx, name) = (Context::system(), Name::new(b"f").unwrap());
            for op in [Op::Make, Op::Create, Op::Put] {
                let empty = MemoryFs::new(MemoryOptions::default());
                let (root, by) = (empty.info().root, Maker::of(&empty, &cx, libc::S_IFREG, 0));
                let mut intent = Vec::new();
                ((root, name.as_bytes()), None::<FileId>).put(&mut intent);
                (None::<(FileId, bool)>, Some(by)).put(&mut intent);
                let spared = Answered::begun(op, &intent).await;
                let id = spared.fs.create(&cx, root, name, NEW).await.unwrap().0.id;
                let is_of_it = |verdict| match verdict {
                    Verdict::Reexecute(again) => {
                        let made = again.amend.and_then(|amend| amend.made().or(amend.put()));
                        made == Some((id, true))
                    }
                    _ => false,
                };
                for lost in [true, false, true] {
                    assert!(is_of_it(spared.next_epoch(lost).await.1), "{op:?}, lost: {lost}");
                }
                let taken = Answered { fs: empty, ..spared };
                assert!(is_of_it(taken.next_epoch(false).await.1), "{op:?}: others removed it");
                let (_, verdict) = taken.next_epoch(true).await;
                assert!(matches!(verdict, Verdict::Fresh), "{op:?} is not made again");
            }
        });
    }

    /// On file systems without handles, ids are others after a restart. There a file that was still
    /// there was taken for removed, and one that had been moved for not moved.
    // proves: P80
    #[test]
    fn the_fate_of_a_name_is_found_by_its_file_whatever_id_that_has_now() {
        simulated(async {
            let cx = Context::system();
            let fs = MemoryFs::new(MemoryOptions::default());
            let (root, name) = (fs.info().root, Name::new(b"f").unwrap());
            let id = fs.create(&cx, root, name, NEW).await.unwrap().0.id;
            let before = FileId { generation: id.generation + 1, ..id };
            let gone = FileId { ino: 4711, generation: 1 };
            let removal = |dir: FileId| {
                let mut intent = Vec::new();
                ((dir, name.as_bytes()), Some(before)).put(&mut intent);
                intent
            };
            let mut rename = Vec::new();
            ((root, &b"old"[..]), (root, name.as_bytes())).put(&mut rename);
            (RenameHow::Replace, (Some(before), None::<FileId>)).put(&mut rename);
            for (op, intent, made) in [
                (Op::Remove, removal(root), false),
                (Op::Remove, removal(gone), false),
                (Op::Rename, rename, true),
            ] {
                let begun = Answered { fs: fs.clone(), ..Answered::begun(op, &intent).await };
                let (_, verdict) = begun.next_epoch(false).await;
                assert_eq!(matches!(verdict, Verdict::Restored(_)), made, "{op:?}");
                assert_eq!(matches!(verdict, Verdict::Fresh), !made, "{op:?}");
            }
        });
    }

    /// A disk that failed was taken for "it is not there". The change that had been made was made
    /// once more: an append put its data behind those that it had written.
    // proves: P84
    #[test]
    fn what_the_file_system_does_not_tell_is_not_taken_for_undone() {
        simulated(async {
            let fs = MemoryFs::new(MemoryOptions::default());
            let (cx, root, name) = (Context::system(), fs.info().root, Name::new(b"f").unwrap());
            let id = fs.create(&cx, root, name, NEW).await.unwrap().0.id;
            let place = (root, name.as_bytes());
            let noted = |op: Op, note: &dyn Fn(&mut Vec<u8>)| {
                let mut intent = Vec::new();
                note(&mut intent);
                (op, intent)
            };
            let made = |op| noted(op, &|intent| (place, None::<FileId>).put(intent));
            for (op, intent) in [
                made(Op::Make),
                made(Op::Create),
                made(Op::Link),
                noted(Op::Remove, &|intent| (place, Some(id)).put(intent)),
                noted(Op::Rename, &|intent| {
                    (place, (root, &b"g"[..])).put(intent);
                    (RenameHow::Replace, (Some(id), None::<FileId>)).put(intent);
                }),
                noted(Op::Write, &|intent| (true, (id, (0u64, 4u64))).put(intent)),
                noted(Op::Put, &|intent| {
                    (place, (None::<FileId>, None::<(FileId, bool)>)).put(intent);
                }),
                noted(Op::Setxattr, &|intent| (id, (&b"user.a"[..], false)).put(intent)),
                noted(Op::Removexattr, &|intent| (id, (&b"user.a"[..], true)).put(intent)),
            ] {
                let broken = [Op::Lookup, Op::Getattr, Op::Getxattr].map(|op| Fault {
                    op: Some(op),
                    when: When::Always,
                    delay: Duration::ZERO,
                    error: Some(Errno::EIO),
                });
                let below =
                    Observed::new(Arc::new(fs.clone()), Arc::new(Faults::new(broken.into())));
                let export = Export::new("data", Arc::new(below), Vec::new());
                let begun = Answered::begun(op, &intent).await;
                let slots = ReplaySlots::new(begun.log.clone(), BrokenPromises::default());
                slots.restore(&export, StateLoss::Nothing).await;
                let Verdict::Restored(answer) = slots.begin(0, 1, &begun.route) else {
                    panic!("{op:?} is made once more, or is said to have been");
                };
                let error = answer.error().expect("it is not known");
                assert_eq!((error.errno(), error.fate()), (Errno::EIO, Fate::Unknown), "{op:?}");
                // A later epoch, in which the file system answers, gives the same verdict.
                let (_, verdict) = begun.next_epoch(false).await;
                assert!(
                    matches!(verdict, Verdict::Restored(again) if encoded(&again) == encoded(&answer)),
                    "{op:?}"
                );
            }
        });
    }
}
