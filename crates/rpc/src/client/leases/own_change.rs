//! The session's own changes. The server recalls nothing from the session that changes. So what a
//! change touches is forgotten before it is sent. Nothing of it is remembered until it has come to
//! its end. Otherwise this client could show the old state after another one has seen the new.

use std::sync::Arc;
use std::time::Duration;

use dray_core::{FileId, Name};
use dray_rt::sleep;

use super::keys::AnswerKey;
use super::recent::ChangeRow;
use super::{KnownName, Leased};
use crate::wire::{CallRow, Changes, FileRef, Intent, Operand};

/// What a change touches of what may be remembered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Touched {
    names: [Option<AnswerKey>; 2],
    attributes: [Option<AnswerKey>; 4],
    /// The directory in which each name may be answered differently.
    directory: Option<FileId>,
    /// Which files it touches was taken from names that are remembered.
    by_names: bool,
    /// The change touches a file, and it is not known which.
    an_unknown_file: bool,
    everything: bool,
}

/// How long a server may take to carry out a change after the connection broke by which it came. A
/// server that takes longer is unlikely, and harm comes of it only if the caller had given up.
const LINGERING: Duration = Duration::from_secs(30);

/// A change on its way, until its answer has come.
pub(crate) struct OwnChange {
    leased: Arc<Leased>,
    touched: Touched,
    /// How many recalls had come before.
    recalls: u64,
}

impl Touched {
    /// `files`: the open files that the call names, if it names any.
    pub(super) fn of(
        row: &CallRow<'_>,
        files: [Option<FileId>; 2],
        leased: &Leased,
    ) -> Option<Touched> {
        let mut touched = Touched::default();
        match row.changes {
            Changes::Nothing => return None,
            Changes::Redone => return Some(Touched { everything: true, ..touched }),
            Changes::Names | Changes::DataOfReply => {}
            Changes::Attributes(file) | Changes::Data(file, _) => {
                if let FileRef::Id(id) = file {
                    touched.touch_file(id);
                }
                touched.directory = row.takes_rights.and(match file {
                    FileRef::Id(id) => Some(id),
                    FileRef::Handle(_) => files[0],
                });
            }
        }
        for (operand, file) in row.operands.iter().flatten().zip(files) {
            match *operand {
                Operand::Id(id) | Operand::HandleOf(_, id) => touched.touch_file(id),
                Operand::Handle(_) => match file {
                    Some(id) => touched.touch_file(id),
                    None => touched.an_unknown_file = true,
                },
                Operand::Name(dir, name) => {
                    touched.touch_file(dir);
                    touched.touch_name(AnswerKey::of_name(dir, name));
                    if touches_named_file(row) {
                        touched.by_names = true;
                        touched.touch_named(leased, dir, name);
                    }
                }
            }
        }
        Some(touched)
    }

    fn touch_name(&mut self, key: AnswerKey) {
        if let Some(place) = self.names.iter_mut().find(|place| place.is_none()) {
            *place = Some(key);
        }
    }

    fn touch_file(&mut self, id: FileId) {
        let key = Some(AnswerKey::of_attributes(id));
        if self.attributes.contains(&key) {
            return;
        }
        match self.attributes.iter_mut().find(|place| place.is_none()) {
            Some(place) => *place = key,
            None => self.an_unknown_file = true,
        }
    }

    fn touch_named(&mut self, leased: &Leased, dir: FileId, name: &[u8]) {
        let known = Name::new(name).map_or(KnownName::Unknown, |name| leased.known(dir, name));
        match known {
            KnownName::File(id) => self.touch_file(id),
            KnownName::Absent => {}
            KnownName::Unknown => self.an_unknown_file = true,
        }
    }
}

/// Whether the call changes the file that its name leads to before it.
fn touches_named_file(row: &CallRow<'_>) -> bool {
    match row.intent {
        Intent::Remove { .. } | Intent::Rename { .. } | Intent::Put { .. } => true,
        Intent::Create { .. } => row.changes == Changes::DataOfReply,
        Intent::None
        | Intent::Repeat(..)
        | Intent::Make { .. }
        | Intent::Link { .. }
        | Intent::Append { .. }
        | Intent::Copy { .. }
        | Intent::SetXattr { .. }
        | Intent::RemoveXattr { .. } => false,
    }
}

impl OwnChange {
    pub(super) fn begin(leased: &Arc<Leased>, touched: Touched) -> OwnChange {
        let recalls = leased.changes.recalls();
        let change = OwnChange { leased: leased.clone(), touched, recalls };
        change.rows().for_each(|row| leased.changes.begin(row));
        change.touched.names.iter().flatten().for_each(|key| leased.names.forget(*key));
        change.touched.attributes.iter().flatten().for_each(|key| leased.attributes.forget(*key));
        change
    }

    /// No answer comes any more: the caller has given up, and the connection broke. The change may
    /// still be carried out.
    pub(crate) async fn lingers(self) {
        sleep(LINGERING).await;
    }

    /// The rows that the change is noted in.
    fn rows(&self) -> impl Iterator<Item = &ChangeRow> {
        let (changes, touched) = (&self.leased.changes, &self.touched);
        let keys = touched.names.iter().chain(&touched.attributes).flatten();
        // Where the kernel checks rights, a name leads to the same file whoever asks.
        let directory = touched.directory.filter(|_| !self.leased.callers_are_checked);
        let names = touched.everything.then_some(&changes.all_names);
        let unknown = touched.everything || touched.an_unknown_file;
        keys.map(move |key| changes.row(*key))
            .chain(directory.map(|dir| changes.directory(dir)))
            .chain(names)
            .chain(unknown.then_some(&changes.all_attributes))
    }
}

impl Drop for OwnChange {
    fn drop(&mut self) {
        let changes = &self.leased.changes;
        // Another client may have put another file there meanwhile.
        if self.touched.by_names && changes.recalls() != self.recalls {
            changes.note(&changes.all_attributes);
        }
        self.rows().for_each(|row| changes.end(row));
    }
}
