//! For tests: a journal in memory that somebody watches.

use std::io;
use std::sync::Arc;

use super::{Journal, MemoryJournal, PersistentRecord, SessionRecord, SlotLog, SlotRecord};

/// Observes each operation of a journal before it happens.
pub(crate) trait Watch: Send + Sync + 'static {
    /// Something is to be kept.
    fn keeps(&self) {}
    /// The answer of a change is noted.
    fn answers(&self) {}
    /// No session uses its log any more.
    fn lets_go(&self) {}
}

/// A journal in memory whose notes `W` watches.
#[derive(Default)]
pub(crate) struct WatchedJournal<W>(MemoryJournal, pub(crate) Arc<W>);

impl<W> WatchedJournal<W> {
    pub(crate) fn by(watch: W) -> WatchedJournal<W> {
        WatchedJournal(MemoryJournal::default(), Arc::new(watch))
    }
}

struct WatchedLog<W: Watch>(Arc<dyn SlotLog>, Arc<W>);

impl<W: Watch> Drop for WatchedLog<W> {
    fn drop(&mut self) {
        self.1.lets_go();
    }
}

impl<W: Watch> Journal for WatchedJournal<W> {
    fn create(&self, session: &SessionRecord, slots: u32) -> io::Result<Arc<dyn SlotLog>> {
        Ok(Arc::new(WatchedLog(self.0.create(session, slots)?, self.1.clone())))
    }
    fn remove(&self, session: u64) {
        self.0.remove(session);
    }
    fn load(&self) -> Vec<(SessionRecord, Arc<dyn SlotLog>)> {
        self.0.load()
    }
    fn kept(&self, what: PersistentRecord) -> io::Result<Option<Vec<u8>>> {
        self.0.kept(what)
    }
    fn keep(&self, what: PersistentRecord, bytes: &[u8]) -> io::Result<()> {
        self.1.keeps();
        self.0.keep(what, bytes)
    }
    fn settled(&self) -> Option<dray_core::Fut<'_, bool>> {
        self.0.settled()
    }
}

impl<W: Watch> SlotLog for WatchedLog<W> {
    fn begin(&self, slot: u32, sequence: u32, op: dray_core::Op, intent: &[u8]) {
        self.0.begin(slot, sequence, op, intent);
    }
    fn done(&self, slot: u32, sequence: u32, answer: &[u8]) {
        self.1.answers();
        self.0.done(slot, sequence, answer);
    }
    fn count(&self) -> u32 {
        self.0.count()
    }
    fn records(&self) -> Vec<(u32, SlotRecord)> {
        self.0.records()
    }
    fn set_locks(&self, held: bool) {
        self.0.set_locks(held);
    }
    fn had_locks(&self) -> bool {
        self.0.had_locks()
    }
    fn set_leases(&self, may: bool) {
        self.0.set_leases(may);
    }
    fn may_have_leases(&self) -> bool {
        self.0.may_have_leases()
    }
    fn settled(&self) -> Option<dray_core::Fut<'_, bool>> {
        self.0.settled()
    }
}
