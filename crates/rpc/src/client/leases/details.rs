//! The lease on a file's attributes covers more than getattr answers. It covers extended attributes, the
//! target of a symbolic link, and the parent of a directory. Whatever changes one of them
//! changes the file's time of change, so it breaks that lease.
//!
//! The server says nothing of a lease with such answers. They are remembered if the lease on the
//! attributes held before the question was sent, and holds when the answer is here.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use dray_core::{Attr, Context, DirPage, Entry, Errno, Error, FileId, Identity, Op, Result, Ttl};

use super::keys::AnswerKey;
use super::recent::ChangeMoment;
use super::{Leased, LeasedAnswers, LeasedAttributes, is_lease};
use crate::wire::AbsentXattrs;

/// Memory for details of all files, in bytes. Files whose absent attributes alone are known take
/// none of it.
pub(super) const DETAILS_MAX_BYTES: usize = 16 << 20;
/// Largest value, list or target that is remembered, in bytes.
const VALUE_MAX_BYTES: usize = 4096;
/// Extended attributes of one file that are remembered.
const XATTRS_MAX: usize = 16;
/// Bytes that an extended attribute takes beside its name and its value.
const XATTR_BYTES: usize = 48;

/// Files that listings may say something of while no program asks. Then they say nothing more until one does.
const UNASKED_MAX: u32 = 16_384;
/// Attributes of users. Who may read the file may read them, which the kernel checks.
const OF_USERS: &[u8] = b"user.";

/// The lease on the attributes of a file, as it was when something was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeldLease {
    pub(super) id: FileId,
    /// When the first answer was asked for that is remembered under it.
    pub(super) since: ChangeMoment,
}

/// What is known of one file.
#[derive(Default)]
pub(super) struct FileDetails {
    absent: AbsentXattrs,
    more: Option<Box<MoreDetails>>,
}

#[derive(Default)]
struct MoreDetails {
    xattrs: Vec<KnownXattr>,
    /// Which names a caller sees depends on who it is.
    list: Option<(Arc<Identity>, Box<[u8]>)>,
    target: Option<Box<[u8]>>,
    parent: Option<FileId>,
    bytes: usize,
}

struct KnownXattr {
    name: Box<[u8]>,
    /// Errors: `ENODATA`, `ENOTSUP`.
    value: std::result::Result<Box<[u8]>, Errno>,
}

/// Whether the answer is the same for each caller that the kernel lets ask.
fn is_remembered(name: &[u8]) -> bool {
    AbsentXattrs::of(name).is_some() || name.starts_with(OF_USERS)
}

impl FileDetails {
    /// Memory on the heap.
    pub(super) fn bytes(&self) -> usize {
        self.more.as_ref().map_or(0, |more| size_of::<MoreDetails>() + more.bytes)
    }

    fn xattr(&self, name: &[u8]) -> Option<std::result::Result<Vec<u8>, Errno>> {
        if AbsentXattrs::of(name).is_some_and(|this| self.absent.contains(this)) {
            return Some(Err(Errno::ENODATA));
        }
        let known = self.more.as_ref()?.xattrs.iter().find(|known| *known.name == *name)?;
        Some(known.value.as_ref().map(|value| value.to_vec()).map_err(|errno| *errno))
    }

    fn put_xattr(&mut self, name: &[u8], value: std::result::Result<&[u8], Errno>) {
        if let (Some(this), Err(Errno::ENODATA)) = (AbsentXattrs::of(name), value) {
            self.absent = self.absent.with(this);
            return;
        }
        let more = self.more.get_or_insert_default();
        if more.xattrs.len() >= XATTRS_MAX || more.xattrs.iter().any(|known| *known.name == *name) {
            return; // of two answers under one lease both are right
        }
        more.bytes += XATTR_BYTES + name.len() + value.map_or(0, <[u8]>::len);
        more.xattrs.push(KnownXattr { name: name.into(), value: value.map(Into::into) });
    }

    fn put_list(&mut self, who: &Arc<Identity>, list: &[u8]) {
        let more = self.more.get_or_insert_default();
        let before = more.list.replace((who.clone(), list.into()));
        more.bytes += list.len();
        more.bytes -= before.map_or(0, |(_, list)| list.len());
    }

    fn put_target(&mut self, target: &[u8]) {
        let more = self.more.get_or_insert_default();
        let before = more.target.replace(target.into());
        more.bytes += target.len();
        more.bytes -= before.map_or(0, |target| target.len());
    }
}

impl LeasedAnswers {
    /// To be asked before a question about `id` is sent whose answer is a detail, or a listing. None: its
    /// answer cannot be remembered. Where the kernel does not check who asks, none can.
    pub(crate) fn held(&self, id: FileId) -> Option<HeldLease> {
        self.checked()?.held(id)
    }

    /// What is remembered of a file whose attributes are leased.
    fn detail<R>(&self, id: FileId, read: impl FnOnce(&FileDetails) -> Option<R>) -> Option<R> {
        let leased = self.checked()?;
        leased.rest()?;
        let found = leased.attributes_with(id, |known, _| read(&known.details))?;
        leased.hits.fetch_add(1, Ordering::Relaxed);
        Some(found)
    }

    /// Remembers something of a file if the lease has held since it was asked for.
    fn remember_detail(&self, held: Option<HeldLease>, put: impl FnOnce(&mut FileDetails)) {
        let Some((leased, held)) = self.checked().zip(held) else { return };
        leased.attributes.update(AnswerKey::of_attributes(held.id), |known| {
            leased.still_holds(held, known).then(|| put(&mut known.details))
        });
    }

    /// The value of an extended attribute, or that there is none, if that is leased.
    pub(crate) fn xattr(&self, id: FileId, name: &[u8]) -> Option<Result<Vec<u8>>> {
        self.asked_for_details();
        let value = self.detail(id, |details| details.xattr(name))?;
        Some(value.map_err(|errno| Error::new(errno).during(Op::Getxattr)))
    }

    /// The server's answer to the question for an extended attribute.
    pub(crate) fn got_xattr(&self, held: Option<HeldLease>, name: &[u8], got: &Result<Vec<u8>>) {
        let value = match got {
            Ok(value) if value.len() <= VALUE_MAX_BYTES => Ok(value.as_slice()),
            Err(error) if matches!(error.errno(), Errno::ENODATA | Errno::ENOTSUP) => {
                Err(error.errno())
            }
            Ok(_) | Err(_) => return,
        };
        if is_remembered(name) {
            self.remember_detail(held, |details| details.put_xattr(name, value));
        }
    }

    /// The names of extended attributes that the caller sees.
    pub(crate) fn xattr_list(&self, cx: &Context, id: FileId) -> Option<Vec<u8>> {
        self.asked_for_details();
        self.detail(id, |details| {
            if details.absent.contains(AbsentXattrs::ALL) {
                return Some(Vec::new());
            }
            let (who, list) = details.more.as_ref()?.list.as_ref()?;
            (Arc::ptr_eq(who, &cx.who) || **who == *cx.who).then(|| list.to_vec())
        })
    }

    /// The server's answer to that question.
    pub(crate) fn listed_xattrs(&self, held: Option<HeldLease>, cx: &Context, list: &[u8]) {
        if list.len() <= VALUE_MAX_BYTES {
            self.remember_detail(held, |details| details.put_list(&cx.who, list));
        }
    }

    fn asked_for_details(&self) {
        if let Some(leased) = self.checked() {
            leased.unasked.store(0, Ordering::Relaxed);
        }
    }

    /// Whether a listing is to say which extended attributes its files do not have. It costs the server
    /// something, and some programs list files and ask for none.
    pub(crate) fn wants_absences(&self) -> bool {
        self.checked().is_some_and(|leased| leased.unasked.load(Ordering::Relaxed) < UNASKED_MAX)
    }

    /// A page of a listing that was asked for then, and what it says of its files. The lease on the attributes
    /// that it brought covers that. So nothing is taken of a file whose attributes were not taken from it
    /// ([`LeasedAnswers::listed`]).
    pub(crate) fn listed_absences(
        &self,
        asked: ChangeMoment,
        (page, absent): (&DirPage, &[AbsentXattrs]),
    ) {
        let Some(leased) = self.checked() else { return };
        for ((_, entry), absent) in page.iter().zip(absent) {
            let is_covered = entry.attr.is_some_and(|attr| is_lease(attr.validity.attributes));
            if *absent == AbsentXattrs::UNKNOWN || !is_covered {
                continue;
            }
            leased.attributes.update(AnswerKey::of_attributes(entry.id), |known| {
                let is_this = known.id == entry.id && known.asked == asked;
                is_this.then(|| known.details.absent = known.details.absent.with(*absent))
            });
        }
        leased.unasked.fetch_add(absent.len() as u32, Ordering::Relaxed);
    }

    /// The target of a symbolic link.
    pub(crate) fn target(&self, id: FileId) -> Option<Vec<u8>> {
        self.detail(id, |details| {
            details.more.as_ref()?.target.as_ref().map(|target| target.to_vec())
        })
    }

    /// The server's answer to that question.
    pub(crate) fn got_target(&self, held: Option<HeldLease>, target: &[u8]) {
        if target.len() <= VALUE_MAX_BYTES {
            self.remember_detail(held, |details| details.put_target(target));
        }
    }

    /// The directory that a directory is in. Its time of the last access may be another one by now, and no
    /// part of the answer may be believed for longer.
    pub(crate) fn parent(&self, dir: FileId) -> Option<Entry> {
        let id = self.detail(dir, |details| details.more.as_ref()?.parent)?;
        let leased = self.checked()?;
        let mut attr = match leased.owns(id) {
            true => leased.attributes_with(id, |known, _| Some(known.attr))?,
            // The directory's own server is asked for them.
            false => Attr { ino: id.ino, mode: libc::S_IFDIR, ..Attr::default() },
        };
        (attr.validity.name, attr.validity.attributes) = (Some(Ttl::ZERO), Some(Ttl::ZERO));
        Some(Entry { id, attr })
    }

    /// The server's answer to that question.
    pub(crate) fn got_parent(&self, held: Option<HeldLease>, parent: FileId) {
        self.remember_detail(held, |details| {
            details.more.get_or_insert_default().parent = Some(parent);
        });
    }
}

impl Leased {
    pub(super) fn held(&self, id: FileId) -> Option<HeldLease> {
        self.attributes_with(id, |known, _| Some(HeldLease { id, since: known.held }))
    }

    /// Whether `known` is remembered under this lease.
    pub(super) fn still_holds(&self, held: HeldLease, known: &LeasedAttributes) -> bool {
        known.id == held.id
            && known.held == held.since
            && self.changes.attributes_stand(known.asked)
    }
}
