//! Answers that the server has leased to this session (ADR 0049). Lookups and questions for
//! attributes are answered from here while nobody changes what they ask for.
//!
//! An answer is believed while it is here and the session is in contact ([`contact`]). Recalls and
//! the session's own changes take it out ([`own_change`]). An answer on its way is taken in only if
//! nothing of that kind has come since it was asked for ([`recent`]).
//!
//! The lease on a file's attributes covers more than the server says with it: see [`details`] and
//! [`listings`].

mod answers;
mod beside;
mod contact;
mod details;
mod keys;
mod listings;
mod own_change;
mod recall;
mod recent;
mod status;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use dray_core::{
    Attr, Context, DirPage, Entry, Errno, Error, FileId, Identity, NAME_MAX_BYTES, Name, Op,
    Result, Ttl,
};
use dray_rt::{Instant, now_with_sleeps};

use self::answers::{Answers, Weighed};
use self::beside::Beside;
pub use self::beside::{LeaseGroup, LeaseShare};
use self::contact::Contact;
use self::details::{DETAILS_MAX_BYTES, FileDetails};
use self::keys::AnswerKey;
use self::listings::{LISTINGS_MAX_BYTES, LeasedListing};
pub(crate) use self::own_change::OwnChange;
use self::own_change::Touched;
use self::recall::RecallListener;
pub(crate) use self::recent::ChangeMoment;
use self::recent::RecentAnswers;
pub use self::status::LeaseMemoryStatus;
use crate::wire::Call;

/// Memory for the text of names, in bytes: as much as there may be.
const NAMES_MAX_BYTES: usize = answers::ANSWERS_MAX * NAME_MAX_BYTES;

/// Whether a session wants leases, and who checks the permissions of callers then.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LeaseWish {
    /// The session wants none.
    #[default]
    No,
    /// The session wants them.
    Yes {
        /// The front end's kernel checks what each caller may do. If it does not, a remembered name
        /// answers only callers with the identity of the one that asked the server.
        callers_are_checked: bool,
        /// The session may keep writes for a while (ADR 0053).
        keeps_writes: bool,
    },
    /// The session is a server's, which leases on to its own clients what is leased to it (ADR 0061). Names answer
    /// the caller alone that asked, as without a kernel that checks.
    LeasedOn,
}

/// What a session remembers under leases; nothing if it wants none.
#[derive(Clone, Default)]
pub(crate) struct LeasedAnswers(Option<Arc<Leased>>);

/// The same of a session that wants leases.
struct Leased {
    callers_are_checked: bool,
    /// The sessions with other servers, if they lease parts of the same files.
    share: Option<LeaseShare>,
    contact: Contact,
    changes: RecentAnswers,
    names: Answers<LeasedName>,
    attributes: Answers<LeasedAttributes>,
    listings: Answers<LeasedListing>,
    listener: RecallListener,
    hits: AtomicU64,
    /// Files of which listings have said something since a program asked for extended attributes.
    unasked: AtomicU32,
}

/// What a name leads to.
struct LeasedName {
    dir: FileId,
    name: Box<[u8]>,
    /// None: there is no such name.
    found: Option<FileId>,
    /// The caller that asked, if no other one may be answered.
    asker: Option<Arc<Identity>>,
    asked: ChangeMoment,
}

struct LeasedAttributes {
    id: FileId,
    attr: Attr,
    asked: ChangeMoment,
    /// When the first answer was asked for under this lease, which has held since.
    held: ChangeMoment,
    /// Since when the server leases them together with a name of the file.
    named: Option<ChangeMoment>,
    /// The file was read here, and the time of its last access is to be asked for.
    was_read: bool,
    details: FileDetails,
}

/// What is remembered of a name.
enum KnownName {
    File(FileId),
    Absent,
    Unknown,
}

impl LeasedAnswers {
    /// `inherited`: a process before this one had the session.
    pub(crate) fn new(
        wish: LeaseWish,
        inherited: bool,
        share: Option<LeaseShare>,
    ) -> LeasedAnswers {
        let callers_are_checked = match wish {
            LeaseWish::No => return LeasedAnswers(None),
            LeaseWish::Yes { callers_are_checked, .. } => callers_are_checked,
            LeaseWish::LeasedOn => false,
        };
        let moments = share.as_ref().map_or_else(Arc::default, LeaseShare::moments);
        let leased = Arc::new(Leased {
            callers_are_checked,
            share,
            contact: Contact::default(),
            changes: RecentAnswers::counted_by(moments),
            names: Answers::small(NAMES_MAX_BYTES),
            attributes: Answers::small(DETAILS_MAX_BYTES),
            listings: Answers::large(LISTINGS_MAX_BYTES),
            listener: RecallListener::new(inherited),
            hits: AtomicU64::new(0),
            unasked: AtomicU32::new(0),
        });
        leased.share.iter().for_each(|share| share.join(&leased));
        LeasedAnswers(Some(leased))
    }

    /// That of a session whose server leases something.
    fn active(&self) -> Option<&Arc<Leased>> {
        self.0.as_ref().filter(|leased| leased.contact.has_term())
    }

    /// The same if the kernel checks what each caller may do.
    fn checked(&self) -> Option<&Arc<Leased>> {
        self.active().filter(|leased| leased.callers_are_checked)
    }

    /// Whether the server leases anything.
    pub(crate) fn are_given(&self) -> bool {
        self.active().is_some()
    }

    /// The time at which a call is sent, if the answer to it is to be reported.
    pub(crate) fn sent(&self) -> Option<Instant> {
        self.active().map(|_| now_with_sleeps())
    }

    /// A call that was sent then is answered.
    pub(crate) fn answered(&self, sent: Instant) {
        if let Some(leased) = &self.0 {
            leased.contact.answered(sent);
        }
    }

    /// The term of what is leased; zero if nothing is.
    pub(crate) fn term(&self) -> Duration {
        self.active().map_or(Duration::ZERO, |leased| leased.contact.term())
    }

    /// How long what is leased may be believed from now on.
    pub(crate) fn rest(&self) -> Duration {
        self.active().map_or(Duration::ZERO, |leased| leased.contact.rest())
    }

    /// How many recalls have come.
    pub(crate) fn recalls(&self) -> u64 {
        self.0.as_ref().map_or(0, |leased| leased.changes.recalls())
    }

    /// Whether what is leased may be believed now.
    pub(crate) fn are_believed(&self) -> bool {
        self.active().is_some_and(|leased| leased.rest().is_some())
    }

    /// Until when, if nothing more is answered. By the clock that counts sleeps.
    pub(crate) fn believed_until(&self) -> Instant {
        let rest = self.0.as_ref().map_or(Duration::ZERO, |leased| leased.contact.rest());
        now_with_sleeps() + rest
    }

    /// This session changes a file, of which the server hears later.
    pub(crate) fn file_changes(&self, id: FileId) {
        let Some(leased) = &self.0 else { return };
        let key = AnswerKey::of_attributes(id);
        leased.changes.note(leased.changes.row(key));
        leased.attributes.forget(key);
    }

    /// To be asked before a call is made whose answer may be leased.
    pub(crate) fn asking(&self) -> ChangeMoment {
        self.0.as_ref().map_or_else(ChangeMoment::default, |leased| leased.changes.now())
    }

    /// To be called before a call is sent. What is returned has to be kept until it is answered.
    /// `files`: the open files that the call names.
    pub(crate) fn own_change(
        &self,
        call: &Call<'_>,
        files: [Option<FileId>; 2],
    ) -> Option<OwnChange> {
        // Also where nothing is leased yet: the change may be carried out when something is.
        let leased = self.0.as_ref()?;
        Some(OwnChange::begin(leased, Touched::of(&call.row(), files, leased)?))
    }

    /// The answer to a lookup, if it is leased.
    pub(crate) fn lookup(&self, cx: &Context, dir: FileId, name: &Name) -> Option<Result<Entry>> {
        let leased = self.active()?;
        let rest = leased.rest()?;
        let found = leased.name(dir, name, |known| known.answers(cx));
        let (found, believed) = match found {
            Some(found) => (found, rest),
            None => (None, leased.absence_by_listing(dir, name, rest)?),
        };
        let outcome = match found {
            Some(id) => {
                let mut attr = leased.attributes_of(id)?;
                attr.validity.name = Some(rest);
                Ok(Entry { id, attr })
            }
            None => Err(Error::new(Errno::ENOENT).absent_for(Some(believed)).during(Op::Lookup)),
        };
        leased.hits.fetch_add(1, Ordering::Relaxed);
        Some(outcome)
    }

    /// The attributes of a file, if they are leased.
    pub(crate) fn getattr(&self, id: FileId) -> Option<Attr> {
        let leased = self.active()?;
        leased.rest()?;
        let attr = leased.attributes_of(id)?;
        leased.hits.fetch_add(1, Ordering::Relaxed);
        Some(attr)
    }

    /// The same for a cache, which is not counted. The time of access may be an old one: the lease does not
    /// cover it.
    pub(crate) fn leased_attributes(&self, id: FileId) -> Option<Attr> {
        let leased = self.active()?;
        leased.rest()?;
        leased.attributes_with(id, |known, _| Some(known.attr))
    }

    /// Takes the answer of the server to a lookup that was asked for at `asked`. Says in it how
    /// long it may be believed.
    pub(crate) fn looked_up(
        &self,
        asked: ChangeMoment,
        (cx, dir, name): (&Context, FileId, &Name),
        answer: Result<Entry>,
    ) -> Result<Entry> {
        let Some(leased) = self.active() else { return answer };
        let owns = leased.owns(dir);
        let remember = |found| owns && leased.remember_name(asked, (cx, dir, name), found);
        match answer {
            Ok(entry) => {
                let name = entry.attr.validity.name;
                let holds = is_lease(name) && remember(Some(entry.id));
                let mut attr = leased.got_attributes(asked, (entry.id, holds), entry.attr);
                attr.validity.name = leased.time(name, holds);
                Ok(Entry { attr, ..entry })
            }
            Err(error) => {
                let absence = error.absence();
                let is_absent = error.errno() == Errno::ENOENT && is_lease(absence);
                let holds = is_absent && remember(None);
                Err(error.absent_for(leased.time(absence, holds)))
            }
        }
    }

    /// The same of a page of a listing of `dir`.
    pub(crate) fn listed(
        &self,
        asked: ChangeMoment,
        (cx, dir): (&Context, FileId),
        page: &mut DirPage,
    ) {
        if self.active().is_none() {
            return;
        }
        for index in 0..page.len() {
            let entry = page.get(index).and_then(|(name, entry)| {
                let (attr, name) = (entry.attr?, Name::new(name).ok()?);
                self.looked_up(asked, (cx, dir, name), Ok(Entry { id: entry.id, attr })).ok()
            });
            if let Some(Entry { attr, .. }) = entry {
                page.set_attr(index, Some(attr));
            }
        }
    }

    /// The same of attributes alone.
    pub(crate) fn attributes(&self, asked: ChangeMoment, id: FileId, attr: Attr) -> Attr {
        match self.active() {
            Some(leased) => leased.got_attributes(asked, (id, false), attr),
            None => attr,
        }
    }

    /// Of an answer that is not remembered: it may have been recalled by now.
    pub(crate) fn not_remembered(&self, mut attr: Attr) -> Attr {
        if let Some(leased) = self.active() {
            let validity = &mut attr.validity;
            validity.name = leased.time(validity.name, false);
            validity.attributes = leased.time(validity.attributes, false);
        }
        attr
    }

    /// A file was read here. Its time of access may be another one by now: under `relatime`, if the
    /// last access was before the last change. The lease on all else goes on.
    pub(crate) fn was_read(&self, id: FileId) {
        let Some(leased) = self.active() else { return };
        let key = AnswerKey::of_attributes(id);
        let is_late = |known: &LeasedAttributes| {
            let Attr { atime, mtime, ctime, .. } = known.attr;
            (!known.was_read && (atime <= mtime || atime <= ctime)).then_some(())
        };
        if leased.attributes.find(key, is_late).is_some() {
            leased.changes.note(leased.changes.row(key));
            leased.attributes.update(key, |known| {
                known.was_read |= known.id == id;
                Some(())
            });
        }
    }
}

impl Leased {
    /// How long leases may be believed from now on; none if not at all.
    fn rest(&self) -> Option<Ttl> {
        Some(Ttl::of(self.contact.rest())).filter(|rest| *rest != Ttl::ZERO)
    }

    /// How long an answer of the server may be believed that says `said`.
    fn time(&self, said: Option<Ttl>, holds: bool) -> Option<Ttl> {
        let rest = if holds { self.contact.rest() } else { Duration::ZERO };
        said.map(|said| said.min(Ttl::of(rest)))
    }

    /// What `read` makes of a remembered name.
    fn name<R>(
        &self,
        dir: FileId,
        name: &Name,
        read: impl FnOnce(&LeasedName) -> Option<R>,
    ) -> Option<R> {
        self.names.find(AnswerKey::of_name(dir, name.as_bytes()), |known| {
            let same = known.dir == dir && *known.name == *name.as_bytes();
            let stands = same && self.changes.name_stands(dir, known.asked);
            if stands { read(known) } else { None }
        })
    }

    /// What `read` makes of what is remembered under the lease on a file's attributes.
    fn attributes_with<R>(
        &self,
        id: FileId,
        read: impl FnOnce(&LeasedAttributes, Ttl) -> Option<R>,
    ) -> Option<R> {
        let (beside, rest) = (self.beside(id), Ttl::of(self.contact.rest()));
        self.attributes.find(AnswerKey::of_attributes(id), |known| {
            let stands = known.id == id && self.changes.attributes_stand(known.asked);
            let believed = if stands { known.believed(beside, rest) } else { None };
            read(known, believed?)
        })
    }

    /// The attributes of a file, with the time for which they may be believed.
    fn attributes_of(&self, id: FileId) -> Option<Attr> {
        self.attributes_with(id, |known, believed| {
            let mut attr = known.attr;
            attr.validity.attributes = Some(believed);
            (!known.was_read).then_some(attr)
        })
    }

    /// What is under a name, for every caller.
    fn known(&self, dir: FileId, name: &Name) -> KnownName {
        if self.contact.rest().is_zero() {
            return KnownName::Unknown;
        }
        match self.name(dir, name, |known| Some(known.found)) {
            Some(Some(id)) => KnownName::File(id),
            Some(None) => KnownName::Absent,
            None if self.absence_by_listing(dir, name, Ttl::ZERO).is_some() => KnownName::Absent,
            None => KnownName::Unknown,
        }
    }

    fn remember_name(
        &self,
        asked: ChangeMoment,
        (cx, dir, name): (&Context, FileId, &Name),
        found: Option<FileId>,
    ) -> bool {
        let key = AnswerKey::of_name(dir, name.as_bytes());
        let answer = self.leased_name((cx, dir, name), found, asked);
        let holds = || self.changes.name_holds(key, (dir, name), asked);
        self.names.remember(key, |_| holds().then_some(answer))
    }

    fn leased_name(
        &self,
        (cx, dir, name): (&Context, FileId, &Name),
        found: Option<FileId>,
        asked: ChangeMoment,
    ) -> LeasedName {
        let asker = (!self.callers_are_checked).then(|| cx.who.clone());
        LeasedName { dir, name: name.as_bytes().into(), found, asker, asked }
    }

    /// Takes attributes that the server has answered. `is_named`: it has leased a name of the file with them.
    /// Says in them how long they may be believed.
    fn got_attributes(
        &self,
        asked: ChangeMoment,
        (id, is_named): (FileId, bool),
        mut attr: Attr,
    ) -> Attr {
        let said = attr.validity.attributes;
        let believed = match is_lease(said) {
            true => self.remember_attributes(asked, (id, is_named), attr),
            false => None,
        };
        attr.validity.attributes = said.map(|said| said.min(believed.unwrap_or(Ttl::ZERO)));
        attr
    }

    /// None: they are not to be believed.
    fn remember_attributes(
        &self,
        asked: ChangeMoment,
        of: (FileId, bool),
        attr: Attr,
    ) -> Option<Ttl> {
        let key = AnswerKey::of_attributes(of.0);
        self.remember_if(of, asked, attr, |before| {
            self.changes.attributes_hold(key, asked).then_some(before)
        })
    }

    /// Remembers attributes if `holds` answers what was remembered before, of which some may stay.
    fn remember_if(
        &self,
        (id, is_named): (FileId, bool),
        asked: ChangeMoment,
        attr: Attr,
        holds: impl FnOnce(Option<&mut LeasedAttributes>) -> Option<Option<&mut LeasedAttributes>>,
    ) -> Option<Ttl> {
        let (beside, rest) = (self.beside(id), Ttl::of(self.contact.rest()));
        let mut believed = None;
        self.attributes.remember(AnswerKey::of_attributes(id), |before| {
            let mut known = self.renewed((holds(before)?, beside), asked, id, attr);
            if is_named {
                known.named = known.named.or_else(|| Some(self.changes.next()));
            }
            believed = known.believed(beside, rest);
            Some(known)
        });
        believed
    }

    /// New attributes. What is known besides stays while the lease does.
    fn renewed(
        &self,
        (before, beside): (Option<&mut LeasedAttributes>, Beside),
        asked: ChangeMoment,
        id: FileId,
        attr: Attr,
    ) -> LeasedAttributes {
        let stands = |known: &&mut LeasedAttributes| {
            known.id == id && self.changes.attributes_stand(known.asked)
        };
        let (mut held, mut named, mut details) = (asked, None, FileDetails::default());
        if let Some(known) = before.filter(stands) {
            named = known.named;
            if known.believed(beside, Ttl::ZERO).is_some() {
                (held, details) = (known.held, std::mem::take(&mut known.details));
            }
        }
        LeasedAttributes { id, attr, asked, held, named, was_read: false, details }
    }

    /// Forgets all that is remembered, and what is on its way.
    fn forget_all(&self) {
        self.changes.note_recall(true);
        self.changes.note(&self.changes.all_names);
        self.changes.note(&self.changes.all_attributes);
        self.names.forget_all();
        self.attributes.forget_all();
        self.listings.forget_all();
    }
}

impl Weighed for LeasedName {
    fn bytes(&self) -> usize {
        self.name.len()
    }
}

impl Weighed for LeasedAttributes {
    fn bytes(&self) -> usize {
        self.details.bytes()
    }
}

impl LeasedName {
    /// What it leads to, if `cx` may be answered.
    fn answers(&self, cx: &Context) -> Option<Option<FileId>> {
        let may = match &self.asker {
            None => true,
            Some(asker) => Arc::ptr_eq(asker, &cx.who) || **asker == *cx.who,
        };
        may.then_some(self.found)
    }
}

/// Whether a time is a lease: from a session with leases each one is.
fn is_lease(said: Option<Ttl>) -> bool {
    said.is_some_and(|said| said != Ttl::ZERO)
}
