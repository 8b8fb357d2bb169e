//! A change while it breaks leases of others.

use std::sync::Arc;

use dray_core::{FileId, LeaseKinds};
use dray_rt::{Instant, now, sleep_until};

use super::holder::{LeaseHolder, RecallNumber};
use super::marks::{MarkRow, Part};
use super::recalls::{FileBreaks, Recalls};
use super::table::LeaseTable;

/// Marks of one change. A rename has the most: two names, their directories, and two files.
const ROWS_MAX: usize = 8;

/// A change that has marked what it changes. To be dropped when its answer has been noted.
pub(crate) struct LeaseChange {
    table: Arc<LeaseTable>,
    changer: Option<Arc<LeaseHolder>>,
    /// The changer leases on to others what it has.
    leases_on: bool,
    rows: [MarkRow; ROWS_MAX],
    marked: usize,
    recalls: Recalls,
}

impl LeaseChange {
    /// A change by a session, which may have leases itself.
    pub(crate) fn new(
        table: &Arc<LeaseTable>,
        changer: Option<&Arc<LeaseHolder>>,
    ) -> Box<LeaseChange> {
        let rows = [table.marks.row(Part::Attributes(FileId { ino: 0, generation: 0 })); ROWS_MAX];
        let (table, changer, recalls) = (table.clone(), changer.cloned(), Recalls::default());
        Box::new(LeaseChange { table, changer, leases_on: false, rows, marked: 0, recalls })
    }

    /// The same by a session whose client leases on to others what it has.
    pub(crate) fn by_session_that_leases_on(
        mut self: Box<Self>,
        leases_on: bool,
    ) -> Box<LeaseChange> {
        self.leases_on = leases_on;
        self
    }

    /// The places that it has marked.
    pub(super) fn rows(&self) -> &[MarkRow] {
        &self.rows[..self.marked]
    }

    fn mark(&mut self, part: Part<'_>) {
        let row = self.table.marks.row(part);
        if self.table.never_marks || self.rows().contains(&row) {
            return;
        }
        assert!(self.marked < ROWS_MAX, "a change of more than the table of operations knows");
        self.rows[self.marked] = row;
        self.marked += 1;
        self.table.marks.mark(row);
    }

    fn collect(&mut self, broken: &FileBreaks<'_>) {
        self.collect_from(true, broken);
    }

    /// `others`: from others than the changer, which knows.
    fn collect_from(&mut self, others: bool, broken: &FileBreaks<'_>) {
        let changer = self.changer.as_ref().filter(|_| others);
        if !self.table.never_recalls {
            self.table.collect(changer, broken, &mut self.recalls);
        }
    }

    /// The attributes of a file change, and perhaps its data. Nobody waits for this with a grant of ranges: what
    /// others have written of the file may need one.
    pub(crate) fn content(&mut self, id: FileId) {
        self.mark(Part::Attributes(id));
        let kinds = match self.table.never_recalls_writes {
            true => LeaseKinds::ATTRIBUTES,
            false => LeaseKinds::ATTRIBUTES | LeaseKinds::WRITE,
        };
        self.collect(&FileBreaks { id, kinds, name: None });
    }

    /// Attributes of a file change, and neither its data nor its size.
    pub(crate) fn attributes(&mut self, id: FileId) {
        self.mark(Part::Attributes(id));
        self.collect(&FileBreaks { id, kinds: LeaseKinds::ATTRIBUTES, name: None });
    }

    /// The same of a file that the server alone knows to be changed: by a name, or by a process before this one. Who
    /// leases on has recalled from others what it took for this file. That may have been another one.
    pub(crate) fn named(&mut self, id: FileId) {
        self.mark(Part::Attributes(id));
        let broken = FileBreaks { id, kinds: LeaseKinds::ATTRIBUTES, name: None };
        self.collect_from(!self.leases_on, &broken);
    }

    /// A name in a directory changes, and with it the directory's times. Its clients keep listings under the
    /// lease on its attributes.
    pub(crate) fn name(&mut self, (dir, name): (FileId, &[u8])) {
        self.mark(Part::Name(dir, name));
        self.collect(&FileBreaks { id: dir, kinds: LeaseKinds::NAMES, name: Some(name) });
        match self.table.never_recalls_listings {
            true => self.mark(Part::Attributes(dir)),
            false => self.attributes(dir),
        }
    }

    /// The change decides who may look names up in a directory, if this is one.
    pub(crate) fn rights(&mut self, id: FileId) {
        self.mark(Part::Attributes(id));
        self.mark(Part::Names(id));
        let kinds = LeaseKinds::ALL;
        self.collect(&FileBreaks { id, kinds, name: None });
    }

    /// Sends the recalls. The change goes on when the waits have ended; none: at once.
    pub(crate) fn recall(&mut self) -> Option<LeaseWaits> {
        let recalls = std::mem::take(&mut self.recalls);
        LeaseWaits::send(&self.table, self.changer.as_ref(), recalls)
    }
}

impl Drop for LeaseChange {
    fn drop(&mut self) {
        self.table.marks.unmark(self.rows());
    }
}

/// What a change waits for.
pub(crate) struct LeaseWaits {
    table: Arc<LeaseTable>,
    changer: Option<Arc<LeaseHolder>>,
    /// Recalls that were sent.
    sent: Vec<(Arc<LeaseHolder>, RecallNumber)>,
    /// What else there is to wait for, or still to be asked.
    recalls: Recalls,
    begun: Instant,
}

/// Recalls that have ended already, one after the other, before others have their turn.
const LOOKED_AT_ONCE: usize = 256;

impl LeaseWaits {
    /// Sends recalls, the first ones where there are many. None: there is nothing to wait for.
    pub(super) fn send(
        table: &Arc<LeaseTable>,
        changer: Option<&Arc<LeaseHolder>>,
        recalls: Recalls,
    ) -> Option<LeaseWaits> {
        if recalls.is_empty() {
            return None; // nearly always
        }
        let (table, changer) = (table.clone(), changer.cloned());
        let mut waits = LeaseWaits { table, changer, sent: Vec::new(), recalls, begun: now() };
        waits.send_collected();
        Some(waits)
    }

    fn send_collected(&mut self) {
        for (who, number, items) in self.recalls.to_send.drain(..) {
            who.recall(number.number, items);
            self.sent.push((who, number));
        }
    }

    /// Asks those that are left. A call that ends before this has ended leaves no recall behind that was not sent.
    pub(super) async fn ask_all(&mut self) {
        while !self.recalls.unasked.is_empty() {
            dray_rt::yield_now().await; // others are served by this thread, too
            self.table.collect_more(self.changer.as_ref(), &mut self.recalls);
            self.send_collected();
        }
    }

    /// Ends at the latest when no client can believe what was leased to it.
    pub(crate) async fn wait(mut self) {
        self.ask_all().await;
        let Recalls { others, ended, directories, quiet_until, .. } = self.recalls;
        for (count, (who, number)) in others.iter().chain(&self.sent).enumerate() {
            if count % LOOKED_AT_ONCE == LOOKED_AT_ONCE - 1 {
                dray_rt::yield_now().await;
            }
            who.recalled(*number, self.begun).await;
        }
        for dir in &directories {
            self.table.names_recalled(*dir, self.begun.elapsed());
        }
        for who in &ended {
            who.void().await;
        }
        if let Some(until) = quiet_until {
            sleep_until(until).await;
        }
    }
}
