//! The session's own changes. The server recalls nothing from the session that changes. So what a
//! change touches is forgotten before it is sent. Nothing of it is remembered until it has come to
//! its end. Otherwise this client could show the old state after another one has seen the new.

use std::sync::Arc;
use std::time::Duration;

use dray_core::{Attr, Context, Entry, FileId, FileType, Name, Ttl};
use dray_rt::sleep;

use super::keys::AnswerKey;
use super::recent::{ChangeMoment, ChangeRow};
use super::{KnownName, Leased, LeasedAnswers, is_lease};
use crate::wire::{CallRow, Changes, FileRef, Intent, Operand};

/// What a change touches of what may be remembered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Touched {
    names: [Option<AnswerKey>; 2],
    /// The directory of each name, by the key of its attributes.
    directories: [Option<AnswerKey>; 2],
    /// A directory may be touched in another way than by a name in it.
    may_be_of_directory: bool,
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
    /// How many recalls of names had come before.
    recalls: u64,
    /// When it was noted.
    begun: ChangeMoment,
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
            Changes::Names | Changes::Leases | Changes::DataOfReply => {
                touched.may_be_of_directory = true;
            }
            Changes::Attributes(file) | Changes::Data(file, _) => {
                touched.may_be_of_directory = matches!(row.changes, Changes::Attributes(_));
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
                    touched.touch_name(dir, name);
                    if touches_named_file(row) {
                        touched.by_names = true;
                        touched.touch_named(leased, dir, name);
                    }
                }
            }
        }
        Some(touched)
    }

    fn touch_name(&mut self, dir: FileId, name: &[u8]) {
        if let Some(place) = self.names.iter().position(|place| place.is_none()) {
            self.names[place] = Some(AnswerKey::of_name(dir, name));
            self.directories[place] = Some(AnswerKey::of_attributes(dir));
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
        let (recalls, begun) = (leased.changes.recalls_of_names(), ChangeMoment::default());
        let mut change = OwnChange { leased: leased.clone(), touched, recalls, begun };
        change.rows().for_each(|row| leased.changes.begin(row));
        change.begun = leased.changes.now();
        change.touched.names.iter().flatten().for_each(|key| leased.names.forget(*key));
        change.touched.attributes.iter().flatten().for_each(|key| leased.attributes.forget(*key));
        // Behind the attributes: a page on its way needs them to be remembered.
        change.forget_listings();
        change
    }

    fn forget_listings(&self) {
        let (touched, listings) = (&self.touched, &self.leased.listings);
        if !touched.may_be_of_directory {
            return; // content is written: nothing here concerns directories
        }
        for (dir, name) in touched.directories.iter().zip(touched.names) {
            let Some((dir, name)) = dir.zip(name) else { continue };
            if listings.update(dir, |listing| Some(listing.name_changes(name))) == Some(false) {
                listings.forget(dir);
            }
        }
        let others = touched.attributes.iter().filter(|key| !touched.directories.contains(key));
        others.flatten().for_each(|key| listings.forget(*key));
    }

    /// Whether nothing but this change has touched a row since it began. To be asked under the lock by which
    /// answers of that row are forgotten.
    fn is_alone_in(&self, row: &ChangeRow) -> bool {
        let own = self.rows().filter(|own| std::ptr::eq(*own, row)).count();
        self.leased.changes.is_alone_since(row, own, self.begun)
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
        // Where the kernel checks rights, a name leads to the same file for every caller.
        let directory = touched.directory.filter(|_| !self.leased.callers_are_checked);
        let names = touched.everything.then_some(&changes.all_names);
        let unknown = touched.everything || touched.an_unknown_file;
        keys.map(move |key| changes.row(*key))
            .chain(directory.map(|dir| changes.directory(dir)))
            .chain(names)
            .chain(unknown.then_some(&changes.all_attributes))
    }
}

impl LeasedAnswers {
    /// Takes the answer to a change of this client, which gave `entry` the name. Says in it how long it may
    /// be believed. The server has leased it in the state behind the change.
    pub(crate) fn named(
        &self,
        change: Option<Box<OwnChange>>,
        place: (&Context, FileId, &Name),
        entry: Entry,
    ) -> Entry {
        let Some((leased, change)) = self.active().zip(change) else {
            return Entry { attr: self.not_remembered(entry.attr), ..entry };
        };
        let mut attr = entry.attr;
        let said = attr.validity;
        let is_leased = is_lease(said.name) && leased.owns(place.1);
        let holds = is_leased && leased.remember_new_name(&change, place, entry.id);
        if holds {
            leased.names_are_leased(place.1);
        }
        attr.validity.name = leased.time(said.name, holds);
        let believed = match is_lease(said.attributes) {
            true => leased.remember_made(&change, (entry.id, holds), attr),
            false => None,
        };
        let time = believed.unwrap_or(Ttl::ZERO);
        attr.validity.attributes = said.attributes.map(|said| said.min(time));
        if believed.is_some() && attr.file_type() == FileType::Directory {
            leased.remember_empty(entry.id);
        }
        Entry { attr, ..entry }
    }
}

impl LeasedAnswers {
    /// Takes the attributes of a file that this client has changed. Says in them how long they may be
    /// believed.
    pub(crate) fn set(
        &self,
        change: Option<Box<OwnChange>>,
        (id, mut attr): (FileId, Attr),
    ) -> Attr {
        let Some((leased, change)) = self.active().zip(change) else {
            return self.not_remembered(attr);
        };
        let said = attr.validity.attributes;
        let believed = match is_lease(said) {
            true => leased.remember_made(&change, (id, false), attr),
            false => None,
        };
        attr.validity.attributes = said.map(|said| said.min(believed.unwrap_or(Ttl::ZERO)));
        attr
    }

    /// Takes the attributes of files that a change of this client has changed. The server has leased them in
    /// the state behind the change.
    pub(crate) fn changed_files(&self, change: &OwnChange, files: Vec<(FileId, Attr)>) {
        let Some(leased) = self.active() else { return };
        for (id, attr) in files {
            if is_lease(attr.validity.attributes) {
                leased.remember_made(change, (id, false), attr);
            }
        }
    }
}

impl Leased {
    fn remember_made(&self, change: &OwnChange, of: (FileId, bool), attr: Attr) -> Option<Ttl> {
        let (key, changes) = (AnswerKey::of_attributes(of.0), &self.changes);
        self.remember_if(of, change.begun, attr, |_| {
            let alone =
                [changes.row(key), &changes.all_attributes].map(|row| change.is_alone_in(row));
            (alone == [true; 2]).then_some(None)
        })
    }

    fn remember_new_name(
        &self,
        change: &OwnChange,
        (cx, dir, name): (&Context, FileId, &Name),
        found: FileId,
    ) -> bool {
        let key = AnswerKey::of_name(dir, name.as_bytes());
        let answer = self.leased_name((cx, dir, name), Some(found), change.begun);
        let changes = &self.changes;
        self.names.remember(key, |_| {
            let rows = [changes.row(key), changes.directory(dir), &changes.all_names];
            rows.into_iter().all(|row| change.is_alone_in(row)).then_some(answer)
        })
    }
}

impl Drop for OwnChange {
    fn drop(&mut self) {
        let changes = &self.leased.changes;
        // Another client may have put another file there meanwhile. The name was leased, or is not known.
        if self.touched.by_names && changes.recalls_of_names() != self.recalls {
            changes.note(&changes.all_attributes);
        }
        self.rows().for_each(|row| changes.end(row));
    }
}
