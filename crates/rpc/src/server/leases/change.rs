//! A change while it breaks leases of others.

use std::sync::Arc;

use dray_core::{FileId, LeaseKinds};
use dray_rt::{Instant, now, sleep_until};

use super::holder::{LeaseHolder, RecallNumber};
use super::marks::{MarkRow, Part};
use super::table::{FileBreaks, LeaseTable, Recalls};

/// Marks of one change. A rename has the most: two names, their directories, and two files.
const ROWS_MAX: usize = 8;

/// A change that has marked what it changes. To be dropped when its answer has been noted.
pub(crate) struct LeaseChange {
    table: Arc<LeaseTable>,
    changer: Option<Arc<LeaseHolder>>,
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
        let (table, changer) = (table.clone(), changer.cloned());
        Box::new(LeaseChange { table, changer, rows, marked: 0, recalls: Recalls::default() })
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
        if !self.table.never_recalls {
            self.table.collect(self.changer.as_ref(), broken, &mut self.recalls);
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
        LeaseWaits::send(&self.table, std::mem::take(&mut self.recalls))
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
    recalls: Vec<(Arc<LeaseHolder>, RecallNumber)>,
    ended: Vec<Arc<LeaseHolder>>,
    directories: Vec<FileId>,
    quiet_until: Option<Instant>,
    begun: Instant,
}

impl LeaseWaits {
    /// Sends recalls. None: there is nothing to wait for.
    pub(super) fn send(table: &Arc<LeaseTable>, recalls: Recalls) -> Option<LeaseWaits> {
        let Recalls { to_send, others, ended, directories, quiet_until } = recalls;
        if to_send.is_empty() && others.is_empty() && ended.is_empty() && quiet_until.is_none() {
            return None; // nearly always
        }
        let mut recalls = others;
        for (who, number, items) in to_send {
            who.recall(number.number, items);
            recalls.push((who, number));
        }
        let table = table.clone();
        Some(LeaseWaits { table, recalls, ended, directories, quiet_until, begun: now() })
    }

    /// Ends at the latest when no client can believe what was leased to it.
    pub(crate) async fn wait(self) {
        for (who, number) in &self.recalls {
            who.recalled(*number, self.begun).await;
        }
        for dir in &self.directories {
            self.table.names_recalled(*dir, self.begun.elapsed());
        }
        for who in &self.ended {
            who.void().await;
        }
        if let Some(until) = self.quiet_until {
            sleep_until(until).await;
        }
    }
}
