//! What was changed or recalled lately, and what this session is changing now. An answer that was
//! asked for before must not be remembered.
//!
//! A table without keys: what falls together is taken for changed together, which costs a call.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use dray_core::{FileId, Name};

use super::keys::AnswerKey;

/// Rows of the table for single answers.
const ROWS: usize = 1024;
/// Rows of the table for directories of which each name may mean something else.
const DIRECTORY_ROWS: usize = 256;

/// A moment in the order of changes and recalls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ChangeMoment(u64);

/// The changes of one answer, or of a group of them.
#[derive(Default)]
pub(super) struct ChangeRow {
    /// The number of the last one.
    last: AtomicU64,
    /// Changes of our own that have no answer yet.
    under_way: AtomicU32,
}

/// All of that, for one session.
pub(super) struct RecentAnswers {
    number: Arc<AtomicU64>,
    rows: Box<[ChangeRow]>,
    directories: Box<[ChangeRow]>,
    /// What changed all names.
    pub(super) all_names: ChangeRow,
    /// What changed attributes of an unknown file.
    pub(super) all_attributes: ChangeRow,
    recalls: AtomicU64,
    /// Recalls that were of names, too.
    recalls_of_names: AtomicU64,
}

impl ChangeRow {
    fn is_unchanged_since(&self, ChangeMoment(then): ChangeMoment) -> bool {
        self.last.load(Ordering::SeqCst) <= then
    }

    fn is_at_rest_since(&self, then: ChangeMoment) -> bool {
        self.under_way.load(Ordering::SeqCst) == 0 && self.is_unchanged_since(then)
    }
}

impl RecentAnswers {
    /// Moments are counted by `number`.
    pub(super) fn counted_by(number: Arc<AtomicU64>) -> RecentAnswers {
        let rows = |count| (0..count).map(|_| ChangeRow::default()).collect();
        RecentAnswers {
            number,
            rows: rows(ROWS),
            directories: rows(DIRECTORY_ROWS),
            all_names: ChangeRow::default(),
            all_attributes: ChangeRow::default(),
            recalls: AtomicU64::new(0),
            recalls_of_names: AtomicU64::new(0),
        }
    }

    /// A moment behind all that were asked for until now.
    pub(super) fn next(&self) -> ChangeMoment {
        ChangeMoment(self.number.fetch_add(1, Ordering::SeqCst) + 1)
    }

    /// To be asked before a call is sent whose answer may be remembered.
    pub(super) fn now(&self) -> ChangeMoment {
        ChangeMoment(self.number.load(Ordering::SeqCst))
    }

    /// The row of one answer.
    pub(super) fn row(&self, key: AnswerKey) -> &ChangeRow {
        &self.rows[key.0 as usize % ROWS]
    }

    /// The row of all names in a directory.
    pub(super) fn directory(&self, dir: FileId) -> &ChangeRow {
        &self.directories[AnswerKey::of_attributes(dir).0 as usize % DIRECTORY_ROWS]
    }

    /// Something changed. To be said before it is forgotten.
    pub(super) fn note(&self, row: &ChangeRow) {
        let ChangeMoment(number) = self.next();
        row.last.fetch_max(number, Ordering::SeqCst);
    }

    /// A change of our own is about to be sent.
    pub(super) fn begin(&self, row: &ChangeRow) {
        row.under_way.fetch_add(1, Ordering::SeqCst);
        self.note(row);
    }

    /// The change has come to its end.
    pub(super) fn end(&self, row: &ChangeRow) {
        self.note(row);
        row.under_way.fetch_sub(1, Ordering::SeqCst);
    }

    /// A recall has come, and names are in it or not. To be said before anything of it is noted.
    pub(super) fn note_recall(&self, of_names: bool) {
        self.recalls.fetch_add(1, Ordering::SeqCst);
        self.recalls_of_names.fetch_add(u64::from(of_names), Ordering::SeqCst);
    }

    /// How many recalls of names have come.
    pub(super) fn recalls_of_names(&self) -> u64 {
        self.recalls_of_names.load(Ordering::SeqCst)
    }

    /// How many recalls have come.
    pub(super) fn recalls(&self) -> u64 {
        self.recalls.load(Ordering::SeqCst)
    }

    /// Whether nothing has changed there since, and `own` changes are under way that this began. To be
    /// asked as [`RecentAnswers::attributes_hold`].
    pub(super) fn is_alone_since(&self, row: &ChangeRow, own: usize, then: ChangeMoment) -> bool {
        row.under_way.load(Ordering::SeqCst) as usize == own && row.is_unchanged_since(then)
    }

    /// Whether attributes that were asked for at `then` may be remembered. To be asked under the
    /// lock by which they are forgotten.
    pub(super) fn attributes_hold(&self, key: AnswerKey, then: ChangeMoment) -> bool {
        self.row(key).is_at_rest_since(then) && self.all_attributes.is_at_rest_since(then)
    }

    /// The same of a name.
    pub(super) fn name_holds(
        &self,
        key: AnswerKey,
        (dir, _): (FileId, &Name),
        then: ChangeMoment,
    ) -> bool {
        self.row(key).is_at_rest_since(then)
            && self.directory(dir).is_at_rest_since(then)
            && self.all_names.is_at_rest_since(then)
    }

    /// Whether remembered attributes may still be believed: single ones are forgotten by their key.
    pub(super) fn attributes_stand(&self, then: ChangeMoment) -> bool {
        self.all_attributes.is_unchanged_since(then)
    }

    /// The same of a name in `dir`.
    pub(super) fn name_stands(&self, dir: FileId, then: ChangeMoment) -> bool {
        self.directory(dir).is_unchanged_since(then) && self.all_names.is_unchanged_since(then)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: FileId = FileId { ino: 7, generation: 1 };

    #[test]
    fn an_answer_asked_for_before_or_during_a_change_is_not_remembered() {
        let (changes, key) =
            (RecentAnswers::counted_by(Arc::default()), AnswerKey::of_attributes(ID));
        let before = changes.now();
        assert!(changes.attributes_hold(key, before));
        changes.begin(changes.row(key));
        let during = changes.now();
        assert!(!changes.attributes_hold(key, before) && !changes.attributes_hold(key, during));
        changes.end(changes.row(key));
        assert!(!changes.attributes_hold(key, during));
        assert!(changes.attributes_hold(key, changes.now()));
        assert!(changes.attributes_stand(before), "the others are not concerned");
    }

    #[test]
    fn a_change_of_a_whole_directory_or_of_everything_reaches_what_is_remembered() {
        let changes = RecentAnswers::counted_by(Arc::default());
        let shares_row = |id: &FileId| std::ptr::eq(changes.directory(*id), changes.directory(ID));
        let mut others = (8..).map(|ino| FileId { ino, generation: 1 });
        let other = others.find(|id| !shares_row(id)).unwrap();
        let before = changes.now();
        changes.note(changes.directory(ID));
        assert!(!changes.name_stands(ID, before));
        assert!(changes.name_stands(other, before) && changes.attributes_stand(before));
        changes.note(&changes.all_names);
        changes.note(&changes.all_attributes);
        assert!(!changes.name_stands(other, before) && !changes.attributes_stand(before));
        let after = changes.now();
        assert!(changes.name_stands(ID, after) && changes.attributes_stand(after));
    }
}
