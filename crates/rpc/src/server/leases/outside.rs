//! Leases after changes outside dray.
//!
//! Such a change is over when the server hears of it. So nobody waits for its recalls but the task that fences
//! clients that do not answer. If changes were missed, everything is recalled, and nothing is leased for a
//! while. So changes that are missed again and again cost one recall of everything for each such rest.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use dray_core::{LeaseKinds, OnOutsideChanges, OutsideChange, RecallItem};
use dray_rt::{Instant, now};

use super::change::LeaseWaits;
use super::holder::LeaseHolder;
use super::marks::Part;
use super::recalls::{FileBreaks, Recalls};
use super::rests::Rest;
use super::table::LeaseTable;
use crate::server::export::Export;
use crate::server::log_throttle::LogThrottle;
use crate::wire::RECALL_ITEMS_MAX;

/// What became of changes outside dray since an export was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutsideStatus {
    /// Changes of files of which something was leased.
    pub changes: u64,
    /// How often changes were missed, so that everything was recalled.
    pub missed: u64,
}

/// Hears of changes outside dray for an export, and recalls what they break.
#[derive(Default)]
pub(crate) struct OutsideChanges {
    /// None until the export belongs to a server. Before that nothing is leased.
    export: OnceLock<Weak<Export>>,
    changes: AtomicU64,
    missed: AtomicU64,
    said: LogThrottle,
}

impl OutsideChanges {
    /// The export of which it hears.
    pub(crate) fn are_of(&self, export: &Arc<Export>) {
        let _ = self.export.set(Arc::downgrade(export)); // once
    }

    pub(crate) fn status(&self) -> OutsideStatus {
        OutsideStatus {
            changes: self.changes.load(Ordering::Relaxed),
            missed: self.missed.load(Ordering::Relaxed),
        }
    }

    fn export(&self) -> Option<Arc<Export>> {
        self.export.get().and_then(Weak::upgrade)
    }
}

impl OnOutsideChanges for OutsideChanges {
    fn changed(&self, changes: &[OutsideChange]) {
        let Some(export) = self.export() else { return };
        let Some(table) = &export.lease_table else { return };
        let leased = table.changed_outside(changes);
        // Where no connection ever was, nothing is leased.
        let Some(home) = export.home().filter(|_| !leased.is_empty()) else { return };
        self.changes.fetch_add(leased.len() as u64, Ordering::Relaxed);
        let table = table.clone();
        home.spawn(async move {
            let sent =
                leased.chunks(RECALL_ITEMS_MAX).filter_map(|some| table.recall_changed(some));
            let mut sent: Vec<LeaseWaits> = sent.collect();
            for waits in &mut sent {
                waits.ask_all().await;
            }
            for waits in sent {
                waits.wait().await;
            }
        });
    }

    fn missed(&self) {
        let Some(export) = self.export() else { return };
        let Some(table) = &export.lease_table else { return };
        self.missed.fetch_add(1, Ordering::Relaxed);
        let name = &export.name;
        self.said.say(|more| {
            log::warn!(
                "export `{name}`: more was changed beside dray than the kernel reported: all leases are \
                 recalled{more}"
            );
        });
        let Some(home) = table.missed_outside().then(|| export.home()).flatten() else { return };
        let table = table.clone();
        home.spawn(async move {
            for who in table.holders().await {
                let table = table.clone();
                dray_rt::spawn(async move { table.recall_all_of(&who).await });
            }
        });
    }
}

/// While nothing is leased, because changes were missed.
#[derive(Default)]
pub(super) struct OutsideRests {
    /// Nanoseconds of the clock.
    until: AtomicU64,
    rest: Mutex<Rest>,
}

impl OutsideRests {
    /// Whether nothing is leased now.
    pub(super) fn rests(&self) -> bool {
        let until = self.until.load(Ordering::SeqCst);
        until != 0 && now() < Instant::from_nanos(until)
    }

    /// Begins a rest, or makes one longer. True: it begins.
    fn begin(&self) -> bool {
        let mut rest = self.rest.lock().unwrap_or_else(PoisonError::into_inner);
        let began = !self.rests();
        rest.begin(now());
        self.until.store(rest.ends().map_or(0, Instant::as_nanos), Ordering::SeqCst);
        began
    }
}

/// What such a change breaks: also the right to keep what is written to a file. What is kept is written then.
fn with_writes(kinds: LeaseKinds) -> LeaseKinds {
    match kinds.contains(LeaseKinds::ATTRIBUTES) {
        true => kinds | LeaseKinds::WRITE,
        false => kinds,
    }
}

impl LeaseTable {
    /// Answers to calls that began before these changes are leased no more. Gives those changes of which something
    /// is leased.
    fn changed_outside(&self, changes: &[OutsideChange]) -> Vec<OutsideChange> {
        let leased = changes.iter().filter(|change| {
            let OutsideChange { id, kinds } = **change;
            let parts = [
                (LeaseKinds::ATTRIBUTES, Part::Attributes(id)),
                (LeaseKinds::NAMES, Part::Names(id)),
            ];
            for (_, part) in parts.iter().filter(|(kind, _)| kinds.contains(*kind)) {
                let row = self.marks.row(*part);
                self.marks.mark(row);
                self.marks.unmark(&[row]);
            }
            self.is_leased(id, with_writes(kinds))
        });
        leased.copied().collect()
    }

    /// Recalls what is leased of changed files. At most [`RECALL_ITEMS_MAX`]. A client that has not come back
    /// since the start of the server believes nothing when it does: it is not asked.
    fn recall_changed(self: &Arc<Self>, changes: &[OutsideChange]) -> Option<LeaseWaits> {
        let mut recalls = Recalls::default();
        for OutsideChange { id, kinds } in changes {
            let broken = FileBreaks { id: *id, kinds: with_writes(*kinds), name: None };
            self.collect_held(None, &broken, &mut recalls);
        }
        LeaseWaits::send(self, None, recalls)
    }

    /// Nothing is leased for a while. True: all that was leased before is to be recalled.
    fn missed_outside(&self) -> bool {
        let begins = self.outside.begin();
        self.marks.all_changed();
        begins
    }

    /// Recalls all that a client has, a message after the other.
    async fn recall_all_of(self: Arc<Self>, who: &Arc<LeaseHolder>) {
        let messages = who.status().held.div_ceil(RECALL_ITEMS_MAX);
        for _ in 0..messages {
            let (number, oldest) = who.begin_to_take();
            let asked = |id| {
                let kinds = self.ask_back(who, id, number)?;
                Some(RecallItem { id, kinds, name: None })
            };
            let items: Vec<RecallItem> = oldest.into_iter().filter_map(asked).collect();
            if items.is_empty() {
                who.nothing_to_give_back(number); // others have asked for it
                continue;
            }
            let begun = now();
            who.recall(number.number, items);
            who.recalled(number, begun).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use dray_core::FileId;

    use super::*;
    use crate::server::options::ServerOptions;

    /// The answer may be older than the change, and nobody would ask it back.
    // proves: P277, P279
    #[test]
    fn an_answer_to_a_call_that_began_before_the_change_is_not_leased() {
        let driver = dray_rt::DriverKind::Simulated { seed: 1 };
        dray_rt::Executor::new(driver).unwrap().block_on(async {
            let table = Arc::new(LeaseTable::new(&ServerOptions::default(), false));
            let who = Arc::new(LeaseHolder::new(&table, Weak::new(), "host"));
            let id = |ino| FileId { ino, generation: 0 };
            let leases = |since, part| table.lease(&who, since, &[], part);
            let attributes = |ino| Part::Attributes(id(ino));
            let since = table.since(&who);
            let change = |ino, kinds| OutsideChange { id: id(ino), kinds };
            let changes = [change(1, LeaseKinds::ATTRIBUTES), change(2, LeaseKinds::ALL)];
            assert_eq!(table.changed_outside(&changes), [], "nothing is leased");
            assert!(!leases(since, attributes(1)) && !leases(since, attributes(2)));
            assert!(!leases(since, Part::Name(id(2), b"name")));
            assert!(leases(since, attributes(3)) && leases(since, Part::Name(id(1), b"name")));
            let since = table.since(&who);
            assert!(leases(since, attributes(1)) && leases(since, Part::Name(id(2), b"name")));
            assert_eq!(table.changed_outside(&changes), changes);
            let since = table.since(&who);
            assert!(table.missed_outside() && !table.missed_outside(), "it has begun");
            let rests = dray_rt::now();
            while !leases(table.since(&who), attributes(5)) {
                dray_rt::sleep(Duration::from_millis(10)).await;
            }
            let rested = rests.elapsed();
            assert!((450..600).contains(&rested.as_millis()), "{rested:?}");
            assert!(!leases(since, attributes(6)), "it may be older than what was missed");
            assert!(table.missed_outside(), "all that is leased is recalled once more");
        });
    }
}
