//! Listings of directories. Each change of a name changes the times of its directory. So the lease on
//! the directory's attributes covers the listing, and is asked back before the listing changes.
//!
//! A listing that was read to its end also says which names are absent. It goes on to say so when this
//! client has changed names itself: of those it says nothing any more.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use dray_core::{Attr, DirPage, FileId, FileType, IdHash, Name, Ttl};

use super::answers::Weighed;
use super::details::HeldLease;
use super::keys::AnswerKey;
use super::{Leased, LeasedAnswers};

/// Memory for listings, in bytes. A name of 20 bytes takes 60.
pub(super) const LISTINGS_MAX_BYTES: usize = 32 << 20;
/// Bytes that a listing takes beside its pages, about.
const LISTING_BYTES: usize = 128;
/// If more than one in so many entries have no attributes that are leased, the server is asked for the page.
/// Without that the kernel would look each of them up.
const MISSING_MAX_PART: usize = 8;
/// Bytes of an entry beside its name, as the server counts them for the size of a page (`struct
/// linux_dirent64`).
const ENTRY_BYTES: usize = 24;

/// The listing of a directory, as far as it was read from the beginning.
pub(super) struct LeasedListing {
    held: HeldLease,
    /// None are left when this client has changed a name.
    pages: Vec<Arc<ListedPage>>,
    /// The listing was read to its end.
    is_whole: bool,
    /// The server has leased the directory's names with it, or since.
    names_are_leased: bool,
    /// Keys of all names that may be there, once that was asked.
    may_be_there: Option<HashSet<u64, IdHash>>,
    bytes: usize,
}

/// A page as the server gave it, but for attributes.
struct ListedPage {
    from: u64,
    end: bool,
    /// Asked for with attributes: ids are whole.
    plus: bool,
    entries: Box<[ListedEntry]>,
    names: Box<[u8]>,
}

struct ListedEntry {
    id: FileId,
    /// Position behind it.
    cookie: u64,
    name_end: u32,
    kind: Option<FileType>,
}

impl Weighed for LeasedListing {
    fn bytes(&self) -> usize {
        let keys = self.may_be_there.as_ref().map_or(0, |keys| keys.capacity() * 9);
        LISTING_BYTES + self.bytes + keys
    }
}

impl ListedPage {
    /// None: the numbers of its files are not those of their ids.
    fn of(page: &DirPage, from: u64, plus: bool) -> Option<ListedPage> {
        let (mut entries, mut names) = (Vec::with_capacity(page.len()), Vec::new());
        for (name, entry) in page.iter() {
            if entry.attr.is_some_and(|attr| attr.ino != entry.id.ino) {
                return None;
            }
            names.extend_from_slice(name);
            let name_end = u32::try_from(names.len()).ok()?;
            let (id, cookie, kind) = (entry.id, entry.cookie, entry.kind);
            entries.push(ListedEntry { id, cookie, name_end, kind });
        }
        let (entries, names) = (entries.into(), names.into());
        Some(ListedPage { from, end: page.end, plus, entries, names })
    }

    fn bytes(&self) -> usize {
        size_of::<ListedPage>() + self.names.len() + size_of_val(&*self.entries)
    }

    fn name(&self, index: usize) -> &[u8] {
        let begin = index.checked_sub(1).map_or(0, |before| self.entries[before].name_end);
        &self.names[begin as usize..self.entries[index].name_end as usize]
    }

    /// The position behind the page.
    fn to(&self) -> u64 {
        self.entries.last().map_or(self.from, |entry| entry.cookie)
    }

    /// The entry at position `cookie`. It may be the one behind the last if the listing ends here.
    fn at(&self, cookie: u64) -> Option<usize> {
        if cookie == self.from {
            return Some(0);
        }
        let behind = 1 + self.entries.iter().position(|entry| entry.cookie == cookie)?;
        (behind < self.entries.len() || self.end).then_some(behind)
    }
}

impl LeasedListing {
    /// A new listing that begins with this page.
    fn new(held: HeldLease, page: ListedPage, names_are_leased: bool) -> LeasedListing {
        let mut listing = LeasedListing {
            held,
            pages: Vec::new(),
            is_whole: false,
            names_are_leased: false,
            may_be_there: None,
            bytes: 0,
        };
        listing.add(page, names_are_leased);
        listing
    }

    fn add(&mut self, page: ListedPage, names_are_leased: bool) {
        self.bytes += page.bytes();
        self.is_whole |= page.end;
        self.names_are_leased |= names_are_leased;
        self.pages.push(Arc::new(page));
    }

    /// Whether a page at this position goes on where the listing ends so far.
    fn is_continued(&self, held: HeldLease, page: &ListedPage) -> bool {
        let last = self.pages.last();
        self.held == held
            && !self.is_whole
            && last.is_some_and(|last| last.to() == page.from && last.plus == page.plus)
    }

    /// The page that has position `cookie`, and the entry there.
    fn find(&self, cookie: u64, plus: bool) -> Option<(Arc<ListedPage>, usize)> {
        let serves = |page: &&Arc<ListedPage>| page.plus || !plus;
        self.pages.iter().filter(serves).find_map(|page| Some((page.clone(), page.at(cookie)?)))
    }

    fn may_be_there(&mut self, dir: FileId) -> &mut HashSet<u64, IdHash> {
        self.may_be_there.get_or_insert_with(|| {
            let pages = self.pages.iter();
            let names = pages.flat_map(|page| (0..page.entries.len()).map(|at| page.name(at)));
            names.map(|name| AnswerKey::of_name(dir, name).0).collect()
        })
    }

    /// This client changes a name. False: nothing is left that the listing says.
    pub(super) fn name_changes(&mut self, name: AnswerKey) -> bool {
        if self.is_whole {
            let dir = self.held.id;
            self.may_be_there(dir).insert(name.0);
        }
        (self.pages, self.bytes) = (Vec::new(), 0);
        self.is_whole
    }
}

impl LeasedAnswers {
    /// A page of the listing of `dir` from position `cookie` on, if it is leased.
    pub(crate) fn listing(
        &self,
        dir: FileId,
        (cookie, max_bytes): (u64, usize),
        plus: bool,
    ) -> Option<DirPage> {
        let leased = self.checked()?;
        let rest = leased.rest()?;
        let (page, first, names) =
            leased.listings.find(AnswerKey::of_attributes(dir), |listing| {
                leased.listing_stands(listing, dir).then_some(())?;
                let (page, first) = listing.find(cookie, plus)?;
                Some((page, first, listing.names_are_leased))
            })?;
        let name = Some(if names { rest } else { Ttl::ZERO });
        let mut answer = DirPage::default();
        let (mut bytes, mut missing) = (0, 0);
        for (index, entry) in page.entries.iter().enumerate().skip(first) {
            let text = page.name(index);
            bytes += ENTRY_BYTES + text.len();
            if bytes > max_bytes && !answer.is_empty() {
                break;
            }
            let attr = if plus { leased.attributes_of(entry.id) } else { None };
            missing += usize::from(attr.is_none());
            let attr = attr.map(|mut attr: Attr| {
                attr.validity.name = name;
                attr
            });
            answer.push(text, entry.id, entry.kind, entry.cookie, attr);
        }
        if plus && missing * MISSING_MAX_PART > answer.len() {
            return None;
        }
        answer.end = page.end && first + answer.len() == page.entries.len();
        leased.hits.fetch_add(1, Ordering::Relaxed);
        Some(answer)
    }

    /// Whether the beginning of a listing is remembered.
    pub(crate) fn has_listing(&self, dir: FileId) -> bool {
        self.checked().filter(|leased| leased.rest().is_some()).is_some_and(|leased| {
            let begins = leased.listings.find(AnswerKey::of_attributes(dir), |listing| {
                (leased.listing_stands(listing, dir) && !listing.pages.is_empty()).then_some(())
            });
            begins.is_some()
        })
    }

    /// The server has given a page of the listing of a directory. `held`: the lease on the directory's
    /// attributes when it was asked.
    pub(crate) fn listed_page(
        &self,
        held: Option<HeldLease>,
        (cookie, plus): (u64, bool),
        page: &DirPage,
    ) {
        let Some((leased, held)) = self.checked().zip(held) else { return };
        let is_leased = |attr: Attr| super::is_lease(attr.validity.name);
        let names = page.iter().any(|(_, entry)| entry.attr.is_some_and(is_leased));
        if let Some(page) = ListedPage::of(page, cookie, plus) {
            leased.remember_page(held, page, names);
        }
    }
}

impl Leased {
    fn remember_page(&self, held: HeldLease, page: ListedPage, names: bool) {
        let key = AnswerKey::of_attributes(held.id);
        self.listings.remember(key, |known| {
            // Within the lock: what breaks the lease forgets the attributes first, and then the listing.
            self.attributes.find(key, |known| self.still_holds(held, known).then_some(()))?;
            match known {
                Some(known) if known.is_continued(held, &page) => {
                    known.add(page, names);
                    None
                }
                _ if page.from == 0 => Some(LeasedListing::new(held, page, names)),
                _ => None,
            }
        });
    }

    /// A directory that was just made is empty, as long as its attributes are leased.
    pub(super) fn remember_empty(&self, dir: FileId) {
        let (from, end, plus) = (0, true, true);
        let page = ListedPage { from, end, plus, entries: Box::default(), names: Box::default() };
        if let Some(held) = self.held(dir) {
            self.remember_page(held, page, false);
        }
    }

    /// The server has leased all names of a directory with one of them.
    pub(super) fn names_are_leased(&self, dir: FileId) {
        self.listings.update(AnswerKey::of_attributes(dir), |listing| {
            listing.names_are_leased |= self.listing_stands(listing, dir);
            Some(())
        });
    }

    fn listing_stands(&self, listing: &LeasedListing, dir: FileId) -> bool {
        let HeldLease { id, since } = listing.held;
        id == dir && self.changes.attributes_stand(since) && self.changes.name_stands(dir, since)
    }

    /// Whether a listing says that a name is absent, and for how long that may be believed.
    pub(super) fn absence_by_listing(&self, dir: FileId, name: &Name, rest: Ttl) -> Option<Ttl> {
        if !self.callers_are_checked {
            return None;
        }
        let name = AnswerKey::of_name(dir, name.as_bytes());
        self.listings.update(AnswerKey::of_attributes(dir), |listing| {
            let says = listing.is_whole && self.listing_stands(listing, dir);
            let is_absent = says && !listing.may_be_there(dir).contains(&name.0);
            is_absent.then_some(if listing.names_are_leased { rest } else { Ttl::ZERO })
        })
    }
}
