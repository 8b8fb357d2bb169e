//! Answers say what is leased with them.

use std::sync::Arc;

use dray_core::{Attr, DirPage, Entry, Errno, FileId, Ttl};

use super::above::SaidAbove;
use super::change::LeaseChange;
use super::holder::LeaseHolder;
use super::marks::{MarkRow, Part};
use super::table::{LeaseSince, LeaseTable};
use crate::server::reply::Reply;
use crate::server::session::ServerSession;
use crate::wire::{CallRow, Changes, NameLease, OpRow, Opening, Operand, Results, SessionChange};

/// Leases answers of one call to the session that asked.
pub(crate) struct LeaseGrants<'a> {
    table: &'a LeaseTable,
    who: &'a Arc<LeaseHolder>,
    since: LeaseSince,
    /// The places that the call has marked itself.
    own: &'a [MarkRow],
    /// Of an export that is forwarded: how the results were leased from above.
    said: SaidAbove,
}

impl<'a> LeaseGrants<'a> {
    /// Of a call that began `since` then, with its own change.
    pub(crate) fn new(
        table: &'a LeaseTable,
        who: &'a Arc<LeaseHolder>,
        since: LeaseSince,
        change: Option<&'a LeaseChange>,
    ) -> LeaseGrants<'a> {
        let (own, said) = (change.map_or(&[][..], LeaseChange::rows), SaidAbove::default());
        LeaseGrants { table, who, since, own, said }
    }

    /// The same where servers above have leased the results like that.
    pub(crate) fn leased_above(self, said: SaidAbove) -> LeaseGrants<'a> {
        LeaseGrants { said, ..self }
    }

    /// The time of a part that is leased now. `said`: by the file system. That stays, unless servers above said it.
    fn time(&self, said: Option<Ttl>, part: Part<'_>) -> Option<Ttl> {
        if said.is_some() && self.table.above().is_none() {
            return said;
        }
        let leased =
            self.table.may_lease_on(said) && self.table.lease(self.who, self.since, self.own, part);
        leased.then(|| Ttl::of(self.table.term()))
    }

    /// Whether a part can be leased, as far as that is known now.
    pub(super) fn may_lease(&self, part: Part<'_>) -> bool {
        self.table.may_lease(self.since, self.own, part)
    }

    fn attributes(&self, id: FileId, said: Option<Ttl>, attr: &mut Attr) {
        let said = attr.validity.attributes.or(said);
        attr.validity.attributes = self.time(said, Part::Attributes(id));
    }

    fn name(&self, said: Option<Ttl>, (dir, name): (FileId, &[u8])) -> Option<Ttl> {
        self.time(said, Part::Name(dir, name))
    }

    fn entry(&self, said: SaidAbove, entry: &mut Entry, place: Option<(FileId, &[u8])>) {
        self.attributes(entry.id, said.attributes, &mut entry.attr);
        if let Some(place) = place {
            let said = entry.attr.validity.name.or(said.name);
            entry.attr.validity.name = self.name(said, place);
        }
    }

    /// Leases what the answer to a call says.
    pub(crate) fn answer(
        &self,
        session: &ServerSession,
        (op, row): (OpRow, &CallRow<'_>),
        reply: &mut Reply,
    ) {
        let place = row.operands.iter().flatten().find_map(|operand| match operand {
            Operand::Name(dir, name) => Some((*dir, *name)),
            Operand::Id(_) | Operand::Handle(_) | Operand::HandleOf(..) => None,
        });
        if let Some(errno) = reply.errno() {
            let place = place.filter(|_| op.leases_name == NameLease::WithAbsence);
            if let Some(place) = place.filter(|_| errno == Errno::ENOENT) {
                let said = reply.take_absence().or(self.said.absence);
                reply.absent_for(self.name(said, place));
            }
            return;
        }
        let place = place.filter(|_| op.leases_name != NameLease::None);
        reply.changed_files_mut().retain_mut(|(id, attr)| {
            self.attributes(*id, None, attr);
            attr.validity.attributes.is_some()
        });
        match reply.results_mut() {
            Results::Entry(entry) => self.entry(self.said, entry, place),
            Results::FlaggedEntry((entry, _)) => {
                self.entry(self.said, entry, place);
                // A lookup that opens ahead has opened nothing that is written.
                let made = (row.changes != Changes::Nothing).then_some(entry.id);
                if let Some(id) = made {
                    self.writing(session, row, id, reply);
                }
            }
            Results::Attr(attr) => {
                if let Some(id) = asked(session, row) {
                    self.attributes(id, self.said.attributes, attr);
                }
            }
            Results::Opened(Some(at_open)) => {
                if let Some(id) = opened(row) {
                    self.attributes(id, self.said.attributes, &mut at_open.attr);
                    self.writing(session, row, id, reply);
                }
            }
            // A reply of before says what was leased then, which is nothing by now.
            Results::Encoded(_)
            | Results::Done(())
            | Results::File(_)
            | Results::Opened(None)
            | Results::Statfs(_)
            | Results::Bytes(_)
            | Results::Number(_)
            | Results::Offset(_)
            | Results::Lock(_)
            | Results::Xflags(_) => {}
        }
    }

    /// Gives the write lease of a regular file that was opened for writing, if the client knows what that is.
    fn writing(&self, session: &ServerSession, row: &CallRow<'_>, id: FileId, reply: &mut Reply) {
        let SessionChange::Opens(Opening { how, .. }) = row.session else { return };
        if how.writes() && session.keeps_writes() {
            reply.lease_writing(self.table.lease_writing(self.who, self.since, self.own, id));
        }
    }

    /// Leases what a page of a listing says.
    pub(crate) fn page(&self, dir: FileId, page: &mut DirPage) {
        for index in 0..page.len() {
            let Some((name, entry)) = page.get(index) else { continue };
            let Some(attr) = &entry.attr else { continue };
            let mut leased = Entry { id: entry.id, attr: *attr };
            self.entry(SaidAbove::default(), &mut leased, Some((dir, name)));
            page.set_attr(index, Some(leased.attr));
        }
    }
}

/// The file that a call asks about.
fn asked(session: &ServerSession, row: &CallRow<'_>) -> Option<FileId> {
    match row.operands[0]? {
        Operand::Id(id) | Operand::HandleOf(_, id) => Some(id),
        Operand::Handle(handle) => session.file(handle).map(|file| file.id()),
        Operand::Name(..) => None,
    }
}

/// The file that a call opens, if it says which.
fn opened(row: &CallRow<'_>) -> Option<FileId> {
    match row.session {
        SessionChange::Opens(opening) | SessionChange::Reopens(opening) => opening.file,
        SessionChange::None | SessionChange::Closes(_) | SessionChange::Locks { .. } => None,
    }
}
