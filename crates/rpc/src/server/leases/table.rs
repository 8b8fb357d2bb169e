//! Which session has a lease of which file.

use std::collections::HashSet;
use std::collections::hash_map::Entry;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::{FileId, IdHash, IdMap, LeaseKinds, RecallItem};
use dray_rt::{Instant, now, random_u64};

use super::above::LeasesFromAbove;
use super::counts::{LeaseStatus, RecallCounts};
use super::file_leases::FileLeases;
use super::holder::{LeaseHolder, RecallNumber};
use super::lock_leases::LockLeases;
use super::marks::{FinishedChanges, MarkRow, Marks, Part};
use super::outside::OutsideRests;
use super::recalls::{FileBreaks, Recalls};
use super::rests::Rest;
use crate::server::log_throttle::LogThrottle;
use crate::server::options::ServerOptions;
use crate::server::sabotage::Sabotage;

/// Leases of one export: pairs of a file and a session.
const LEASES_MAX: usize = 1 << 20;
/// Independent parts of the table, so that threads rarely meet.
const SHARDS: usize = 64;
/// Places for rests, of each kind, in a part.
const RESTS: usize = 32;
/// Leases that one step of a session's end takes.
const FORGOTTEN_AT_ONCE: usize = 1024;
/// Sessions of a server before us that each change asks. If there are more, changes wait for a term.
const FORMER_MAX: usize = 64;

/// The leases of an export.
pub(crate) struct LeaseTable {
    pub(super) marks: Marks,
    shards: Vec<Mutex<Shard>>,
    hash: IdHash,
    term: Duration,
    held: AtomicUsize,
    /// Until then clients may believe what a server before us leased: nanoseconds of the clock.
    former_until: AtomicU64,
    /// Who they are.
    former: Mutex<Former>,
    /// How long a hold lasts at most, if there are any: other servers may change what is leased here.
    hold_time: Option<Duration>,
    /// Nothing is leased before: nanoseconds of the clock.
    leases_from: AtomicU64,
    pub(super) counts: RecallCounts,
    pub(super) fenced: LogThrottle,
    pub(super) outside: OutsideRests,
    /// None: the export is not forwarded.
    above: Option<LeasesFromAbove>,
    /// Files whose data may be out: pairs of a file and the session that writes it.
    pub(super) written: AtomicUsize,
    pub(super) next_write_lease: AtomicU64,
    /// Leases on locks, which nothing else here is about.
    pub(crate) locks: LockLeases,
    /// The export gives write leases.
    pub(super) leases_writes: bool,
    pub(super) never_recalls_writes: bool,
    pub(super) ignores_base: bool,
    pub(super) never_recalls: bool,
    pub(super) never_recalls_listings: bool,
    pub(super) never_marks: bool,
    pub(super) never_fences: bool,
    pub(super) never_ends_recalls: bool,
    pub(super) has_second_writers: bool,
    never_waits: bool,
    never_rests: bool,
    leases_what_is_asked_back: bool,
    /// Leases of one session.
    pub(super) session_leases_max: usize,
}

pub(super) struct Shard {
    pub(super) files: IdMap<FileId, FileLeases>,
    pub(super) rests: [[Rest; RESTS]; 3],
}

/// The rests of one file, and of those that share its place.
pub(super) struct FileRests<'a> {
    all: &'a mut [[Rest; RESTS]; 3],
    place: usize,
}

impl FileRests<'_> {
    pub(super) fn of(&mut self, kind: usize) -> &mut Rest {
        &mut self.all[kind][self.place]
    }
}

impl Shard {
    pub(super) fn leases_and_rests(
        &mut self,
        file: FileId,
        place: usize,
    ) -> (Option<&mut FileLeases>, FileRests<'_>) {
        let rests = FileRests { all: &mut self.rests, place };
        (self.files.get_mut(&file), rests)
    }
}

/// Sessions to which a server before us may have leased anything.
#[derive(Default)]
enum Former {
    #[default]
    Nobody,
    /// Sessions, with the epoch of those leases.
    Sessions(Vec<(Arc<LeaseHolder>, u32)>),
    /// More than each change can ask, or clients of whom nothing is known.
    Anybody,
}

/// The leases of one file that one session has.
pub(super) struct Lease {
    pub(super) who: Arc<LeaseHolder>,
    pub(super) epoch: u32,
    pub(super) kinds: LeaseKinds,
    /// What the recall `recall` asks back, which has not ended.
    pub(super) recalled: LeaseKinds,
    pub(super) recall: u64,
    /// The number of the write lease, if there is one.
    pub(super) write_lease: u64,
}

/// The state when a call began whose answer may be leased.
#[derive(Clone, Copy)]
pub(crate) struct LeaseSince {
    pub(super) changes: FinishedChanges,
    pub(super) epoch: u32,
}

impl LeaseTable {
    pub(crate) fn new(options: &ServerOptions, leases_writes: bool) -> LeaseTable {
        let shard = || Shard { files: IdMap::default(), rests: [[Rest::default(); RESTS]; 3] };
        let broken = options.broken();
        LeaseTable {
            marks: Marks::new(),
            shards: (0..SHARDS).map(|_| Mutex::new(shard())).collect(),
            hash: IdHash::default(),
            term: options.lease_term,
            held: AtomicUsize::new(0),
            former_until: AtomicU64::new(0),
            former: Mutex::default(),
            hold_time: None,
            leases_from: AtomicU64::new(0),
            counts: RecallCounts::default(),
            fenced: LogThrottle::default(),
            outside: OutsideRests::default(),
            above: None,
            written: AtomicUsize::new(0),
            next_write_lease: AtomicU64::new(random_u64()), // no other server gives the same
            locks: LockLeases::default(),
            leases_writes,
            never_recalls_writes: broken.is(Sabotage::WriteLeaseRecalls),
            ignores_base: broken.is(Sabotage::DirtyOverNewer),
            never_recalls: broken.is(Sabotage::LeaseRecalls),
            never_recalls_listings: broken.is(Sabotage::LeaseListings),
            never_marks: broken.is(Sabotage::LeaseMarks),
            never_fences: broken.is(Sabotage::LeaseFences),
            never_ends_recalls: broken.is(Sabotage::RecallEnds),
            has_second_writers: broken.is(Sabotage::SecondWriter),
            never_waits: broken.is(Sabotage::LeaseRestart),
            never_rests: broken.is(Sabotage::LeaseRest),
            leases_what_is_asked_back: broken.is(Sabotage::LeaseRoom),
            session_leases_max: options.session_leases_max,
        }
    }

    /// The table of an export that leases locks, too, if `given`.
    pub(crate) fn with_locks(self, options: &ServerOptions, given: bool) -> LeaseTable {
        if !given {
            return self;
        }
        let locks = LockLeases::new(options, self.wait());
        LeaseTable { locks, ..self }
    }

    /// The table of a server beside others, which hold what they change for so long.
    pub(crate) fn of_several_servers(self, hold_time: Option<Duration>) -> LeaseTable {
        LeaseTable { hold_time, ..self }
    }

    /// The table of an export that is forwarded, whose clients believe for a `term` of its own.
    pub(super) fn leased_from(self, above: LeasesFromAbove, term: Duration) -> LeaseTable {
        LeaseTable { above: Some(above), term, ..self }
    }

    /// What servers above lease, if the export is forwarded.
    pub(crate) fn above(&self) -> Option<&LeasesFromAbove> {
        self.above.as_ref()
    }

    /// How long a hold lasts at most.
    pub(crate) fn hold_time(&self) -> Duration {
        self.hold_time.unwrap_or_default()
    }

    /// How long a client believes what is leased.
    pub(crate) fn term(&self) -> Duration {
        self.term
    }

    /// How long others wait for that: a tenth more, for clocks that differ.
    pub(crate) fn wait(&self) -> Duration {
        self.term + self.term / 10
    }

    /// Leases and recalls of all sessions.
    pub(crate) fn status(&self) -> LeaseStatus {
        let only_of_one = (self.written.load(Ordering::Relaxed), self.locks.held());
        self.counts.with(self.held.load(Ordering::Relaxed), only_of_one)
    }

    /// A server before us had clients, with leases or without. What it held for them is gone, and their changes may
    /// still be under way.
    pub(crate) fn had_clients(&self) {
        if let Some(time) = self.hold_time.filter(|_| !self.never_rests) {
            self.leases_from.store((now() + time).as_nanos(), Ordering::SeqCst);
        }
    }

    /// A server before us may have leased anything to these sessions. `anybody`: to others, too.
    pub(crate) fn was_leased_to(&self, sessions: Vec<Arc<LeaseHolder>>, anybody: bool) {
        if self.never_waits || sessions.is_empty() && !anybody {
            return;
        }
        let known = |who: Arc<LeaseHolder>| {
            let epoch = who.epoch();
            (who, epoch)
        };
        *self.former() = match anybody || sessions.len() > FORMER_MAX {
            true => Former::Anybody,
            false => Former::Sessions(sessions.into_iter().map(known).collect()),
        };
        self.former_until.store((now() + self.wait()).as_nanos(), Ordering::SeqCst);
    }

    fn former(&self) -> MutexGuard<'_, Former> {
        self.former.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds those to whom a server before us may have leased what a change breaks.
    pub(super) fn collect_former(
        &self,
        changer: Option<&Arc<LeaseHolder>>,
        broken: &FileBreaks<'_>,
        recalls: &mut Recalls,
    ) {
        let until = self.former_until.load(Ordering::Relaxed);
        if until == 0 {
            return; // nearly always
        }
        let until = Instant::from_nanos(until);
        let mut former = self.former();
        if now() >= until {
            *former = Former::Nobody;
            self.former_until.store(0, Ordering::Relaxed);
        }
        match &*former {
            Former::Nobody => {}
            Former::Anybody => recalls.quiet_until = Some(until),
            Former::Sessions(sessions) => {
                // What clients may have kept they have written by now: no client of before is asked for that.
                let item =
                    RecallItem { kinds: broken.kinds.without(LeaseKinds::WRITE), ..broken.item() };
                let is_other = |who: &Arc<LeaseHolder>| {
                    changer.is_none_or(|changer| !Arc::ptr_eq(who, changer))
                };
                for (who, epoch) in sessions.iter().filter(|(who, _)| is_other(who)) {
                    if who.epoch() == *epoch {
                        recalls.add(who, item.clone());
                    } else {
                        recalls.ended.push(who.clone());
                    }
                }
            }
        }
    }

    /// Before a call is carried out.
    pub(crate) fn since(&self, who: &LeaseHolder) -> LeaseSince {
        LeaseSince { changes: self.marks.now(), epoch: who.epoch() }
    }

    /// Whether anything of these kinds is leased of a file.
    pub(super) fn is_leased(&self, file: FileId, kinds: LeaseKinds) -> bool {
        let (shard, _) = self.shard(file);
        let leases = shard.files.get(&file).into_iter().flat_map(FileLeases::iter);
        leases.into_iter().any(|lease| !lease.kinds.common(kinds).is_empty())
    }

    /// All that have leases, each once.
    pub(super) async fn holders(&self) -> Vec<Arc<LeaseHolder>> {
        let mut holders: IdMap<usize, Arc<LeaseHolder>> = IdMap::default();
        for shard in &self.shards {
            add_holders(&shard.lock().unwrap_or_else(PoisonError::into_inner), &mut holders);
            dray_rt::yield_now().await; // others are served by this thread, too
        }
        holders.into_values().collect()
    }

    /// The same without a pause, which takes some 10 ms where there are many.
    pub(super) fn holders_at_once(&self) -> Vec<Arc<LeaseHolder>> {
        let mut holders: IdMap<usize, Arc<LeaseHolder>> = IdMap::default();
        for shard in &self.shards {
            add_holders(&shard.lock().unwrap_or_else(PoisonError::into_inner), &mut holders);
        }
        holders.into_values().collect()
    }

    pub(super) fn shard(&self, file: FileId) -> (MutexGuard<'_, Shard>, usize) {
        let hash = self.hash.hash_one(file) as usize;
        let shard = self.shards[hash % SHARDS].lock().unwrap_or_else(PoisonError::into_inner);
        (shard, hash / SHARDS % RESTS)
    }

    /// Whether a part can be leased, as far as that is known now.
    pub(super) fn may_lease(&self, since: LeaseSince, own: &[MarkRow], part: Part<'_>) -> bool {
        let (shard, place) = self.shard(part.file());
        self.is_leasable((&shard, place), since, own, part)
    }

    fn is_leasable(
        &self,
        (shard, place): (&Shard, usize),
        since: LeaseSince,
        own: &[MarkRow],
        part: Part<'_>,
    ) -> bool {
        let rests = shard.rests[rest_of(part.kind())][place].rests(now());
        if rests || self.outside.rests() || !self.leases_by_now() {
            return false;
        }
        let unchanged = |part| {
            let row = self.marks.row(part);
            self.marks.is_unchanged(row, since.changes, own.contains(&row))
        };
        let is_name = matches!(part, Part::Name(..));
        unchanged(part) && (!is_name || unchanged(Part::Names(part.file())))
    }

    /// Leases a part of `id`, if nothing has changed it since. The caller's own change is `own`.
    pub(super) fn lease(
        &self,
        who: &Arc<LeaseHolder>,
        since: LeaseSince,
        own: &[MarkRow],
        part: Part<'_>,
    ) -> bool {
        let (id, kind) = (part.file(), part.kind());
        let (mut shard, place) = self.shard(id);
        // Within the lock: a change marks first, and then looks here.
        if !self.is_leasable((&shard, place), since, own, part) {
            return false;
        }
        // What is shown may be out by now. And nobody has any lease beside a writer.
        if self.is_written_by_other(&shard, Some(who), id) {
            return false;
        }
        let is_held = self.hold(&mut shard, who, since.epoch, (id, kind));
        if is_held {
            return true;
        }
        let is_full = self.held.load(Ordering::Relaxed) >= LEASES_MAX;
        // Of a full export somebody else gives something back, where the caller has nothing.
        let other = || {
            shard.files.values().flat_map(FileLeases::iter).next().map(|lease| lease.who.clone())
        };
        let from = match is_full && who.status().held == 0 {
            true => other(),
            false => (is_full || who.is_full()).then(|| who.clone()),
        };
        drop(shard);
        if let Some(from) = from {
            self.make_room(&from);
        }
        false
    }

    /// Whether no hold of a server before us counts any more.
    fn leases_by_now(&self) -> bool {
        let from = self.leases_from.load(Ordering::Relaxed);
        if from == 0 {
            return true; // nearly always
        }
        let is_over = now() >= Instant::from_nanos(from);
        if is_over {
            self.leases_from.store(0, Ordering::SeqCst);
        }
        is_over
    }

    /// What a session has of a file is asked back by the recall `number`, to make room. None: it has nothing,
    /// or it is asked back already.
    pub(super) fn ask_back(
        &self,
        who: &Arc<LeaseHolder>,
        id: FileId,
        RecallNumber { number, epoch }: RecallNumber,
    ) -> Option<LeaseKinds> {
        let (mut shard, _) = self.shard(id);
        let lease = shard.files.get_mut(&id)?.of(who)?;
        if lease.epoch != epoch || !lease.recalled.is_empty() {
            return None;
        }
        (lease.recalled, lease.recall) = (lease.kinds, number);
        Some(lease.kinds)
    }

    pub(super) fn hold(
        &self,
        shard: &mut Shard,
        who: &Arc<LeaseHolder>,
        epoch: u32,
        (id, kind): (FileId, LeaseKinds),
    ) -> bool {
        match shard.files.get_mut(&id).and_then(|leases| leases.of(who)) {
            Some(lease) if lease.epoch == epoch && who.epoch() == epoch => {
                // The answer to the recall would take it.
                if !lease.recalled.common(kind).is_empty() && !self.leases_what_is_asked_back {
                    return false;
                }
                self.count_written(who, lease.kinds, lease.kinds | kind);
                lease.kinds = lease.kinds | kind;
                return true;
            }
            // Its client has forgotten what it had before.
            Some(lease) if who.hold(id, epoch) => {
                self.count_written(who, lease.kinds, kind);
                *lease = Lease::new(who, epoch, kind);
                return true;
            }
            Some(_) => return false,
            None => {}
        }
        if self.held.load(Ordering::Relaxed) >= LEASES_MAX || !who.hold(id, epoch) {
            return false;
        }
        self.count_written(who, LeaseKinds::NONE, kind);
        let lease = Lease::new(who, epoch, kind);
        match shard.files.entry(id) {
            Entry::Occupied(leases) => leases.into_mut().add(lease),
            Entry::Vacant(place) => _ = place.insert(FileLeases::one(lease)),
        }
        self.held.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// The names of a directory were asked back, which took so long.
    pub(super) fn names_recalled(&self, dir: FileId, took: Duration) {
        let (mut shard, place) = self.shard(dir);
        shard.rests[rest_of(LeaseKinds::NAMES)][place].recall_took(now(), took);
    }

    /// A client has given back what the recall `number` asked for.
    pub(super) fn take_back(
        &self,
        who: &Arc<LeaseHolder>,
        (id, kinds): (FileId, LeaseKinds),
        epoch: u32,
        number: u64,
    ) {
        let (mut shard, _) = self.shard(id);
        self.take(&mut shard, who, id, |lease| {
            if lease.epoch != epoch {
                return;
            }
            lease.kinds = lease.kinds.without(kinds);
            if lease.recall == number {
                lease.recalled = LeaseKinds::NONE;
            }
        });
    }

    /// Takes something off a lease, which goes if nothing is left.
    pub(super) fn take(
        &self,
        shard: &mut Shard,
        who: &Arc<LeaseHolder>,
        id: FileId,
        take: impl FnOnce(&mut Lease),
    ) {
        let Some(leases) = shard.files.get_mut(&id) else { return };
        let Some(lease) = leases.of(who) else { return };
        let before = lease.kinds;
        take(lease);
        let (left, epoch) = (lease.kinds, lease.epoch);
        self.count_written(who, before, left);
        if !left.is_empty() {
            return;
        }
        leases.remove(who);
        if leases.len() == 0 {
            shard.files.remove(&id);
        }
        if epoch == who.epoch() {
            who.let_go(id);
        }
        self.held.fetch_sub(1, Ordering::Relaxed);
    }

    /// Forgets the leases of an epoch that has ended.
    pub(super) async fn forget(
        &self,
        who: &Arc<LeaseHolder>,
        held: HashSet<FileId, IdHash>,
        epoch: u32,
    ) {
        for (number, id) in held.into_iter().enumerate() {
            if number > 0 && number.is_multiple_of(FORGOTTEN_AT_ONCE) {
                dray_rt::yield_now().await; // others are served by this thread, too
            }
            let (mut shard, _) = self.shard(id);
            self.take(&mut shard, who, id, |lease| {
                if lease.epoch <= epoch {
                    lease.kinds = LeaseKinds::NONE;
                }
            });
        }
    }
}

impl Lease {
    pub(super) fn new(who: &Arc<LeaseHolder>, epoch: u32, kinds: LeaseKinds) -> Lease {
        let (recalled, recall) = (LeaseKinds::NONE, 0);
        Lease { who: who.clone(), epoch, kinds, recalled, recall, write_lease: 0 }
    }
}

/// The rests of a kind.
pub(super) fn rest_of(kind: LeaseKinds) -> usize {
    match kind {
        LeaseKinds::WRITE => 2,
        _ => usize::from(kind.contains(LeaseKinds::NAMES)),
    }
}

/// Notes that leases of these kinds are recalled. True: of a name, all names are to be recalled.
pub(super) fn note(rests: &mut FileRests<'_>, kinds: LeaseKinds, is_name: bool) -> bool {
    let now = now();
    if is_name {
        return rests.of(rest_of(LeaseKinds::NAMES)).name_recalled(now);
    }
    for kind in [LeaseKinds::ATTRIBUTES, LeaseKinds::NAMES, LeaseKinds::WRITE] {
        if kinds.contains(kind) {
            rests.of(rest_of(kind)).begin(now);
        }
    }
    false
}

fn add_holders(shard: &Shard, holders: &mut IdMap<usize, Arc<LeaseHolder>>) {
    for lease in shard.files.values().flat_map(FileLeases::iter) {
        holders.entry(Arc::as_ptr(&lease.who).addr()).or_insert_with(|| lease.who.clone());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use super::*;

    fn simulate(test: impl FnOnce(&Arc<LeaseTable>) + Send) {
        let driver = dray_rt::DriverKind::Simulated { seed: 1 };
        let table = Arc::new(LeaseTable::new(&ServerOptions::default(), true));
        dray_rt::Executor::new(driver).unwrap().block_on(async { test(&table) });
    }

    fn holder(table: &Arc<LeaseTable>) -> Arc<LeaseHolder> {
        Arc::new(LeaseHolder::new(table, Weak::new(), "host"))
    }

    fn lease(table: &LeaseTable, who: &Arc<LeaseHolder>, ino: u64) -> bool {
        let part = Part::Attributes(FileId { ino, generation: 0 });
        table.lease(who, table.since(who), &[], part)
    }

    // proves: P217
    #[test]
    fn a_session_and_an_export_have_so_many_leases_and_no_more() {
        simulate(|table| {
            let (one, other) = (holder(table), holder(table));
            let leased = (0..70_000).filter(|ino| lease(table, &one, *ino)).count();
            assert_eq!((leased, one.status().held, table.status().held), (65_536, 65_536, 65_536));
            assert!(lease(table, &one, 9999), "it has that one");
            assert!(lease(table, &other, 7) && lease(table, &other, 69_999));
            table.held.store(LEASES_MAX, Ordering::Relaxed);
            assert!(!lease(table, &other, 69_998) && lease(table, &other, 69_999));
        });
    }

    /// What was leased the longest ago is asked back, once. It is not leased anew before the answer, which would
    /// take that, too.
    // proves: P217
    #[test]
    fn a_full_session_gives_back_what_it_got_first() {
        simulate(|table| {
            let one = holder(table);
            let all = (0..65_536).all(|ino| lease(table, &one, ino));
            assert!(all && !lease(table, &one, 70_000) && !lease(table, &one, 70_001));
            assert_eq!(one.status().recalls, 1);
            assert!(!lease(table, &one, 0) && !lease(table, &one, 255) && lease(table, &one, 256));
            one.acknowledged(2); // the second one found that the first one was under way
            assert_eq!(one.status().held, 65_536);
            one.acknowledged(1);
            assert_eq!((one.status().held, table.status().held), (65_280, 65_280));
            assert!(lease(table, &one, 70_000) && lease(table, &one, 0));
            // Of a full export others give something back, too.
            let other = holder(table);
            table.held.store(LEASES_MAX, Ordering::Relaxed);
            let of_others = (0..65_536).find(|ino| {
                assert!(!lease(table, &other, 80_000 + ino));
                one.status().recalls == 2
            });
            assert!(of_others.is_some());
        });
    }

    /// Else a lease that a client got behind its fence would be forgotten with those from before.
    #[test]
    fn what_is_leased_after_the_end_of_an_epoch_stays() {
        let table = Arc::new(LeaseTable::new(&ServerOptions::default(), true));
        let driver = dray_rt::DriverKind::Simulated { seed: 1 };
        dray_rt::Executor::new(driver).unwrap().block_on(async {
            let (one, other) = (holder(&table), holder(&table));
            assert!(lease(&table, &one, 1) && lease(&table, &one, 2));
            let since = table.since(&one);
            one.end_epoch_for_tests();
            let part = Part::Attributes(FileId { ino: 3, generation: 0 });
            assert!(!table.lease(&one, since, &[], part), "its call began before");
            assert!(lease(&table, &one, 1));
            dray_rt::sleep(table.wait() * 2).await;
            let theirs = |ino| {
                let mut recalls = Recalls::default();
                let id = FileId { ino, generation: 0 };
                let broken = FileBreaks { id, kinds: LeaseKinds::ATTRIBUTES, name: None };
                table.collect(Some(&other), &broken, &mut recalls);
                recalls.to_send.len()
            };
            assert_eq!([1, 2, 3].map(theirs), [1, 0, 0]);
            assert_eq!((one.status().held, table.status().held), (1, 1));
        });
    }
}
