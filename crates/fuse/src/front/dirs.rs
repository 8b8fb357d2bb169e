//! Listing directories.
//!
//! The file system is asked for large pages, out of which several of the kernel's small
//! requests are served. Positions are the file system's own cookies, so that seekdir(3)
//! works as well as it does below; only "." and ".." have positions of ours.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use dray_core::{
    Attr, Context, DirEntry, DirPage, Entry, FileId, FileType, Name, OpenFile, Result,
};
use dray_rt::{Instant, now};

use crate::front::Worker;
use crate::front::kept_listings::AnswerUnderLease;
use crate::front::leased::Answered;
use crate::proto::reply::{DirList, ENTRY_BYTES};
use crate::proto::wire::Small;
use crate::state::changes::ChangeNumber;
use crate::state::handles::OpenHandle;
use crate::state::kernel_listings::ListingDoubt;
use crate::transport::KernelAnswer;

/// Bytes of names and records asked for at a time, by who reads on.
const PAGE_BYTES: usize = 128 << 10;
/// Kernels that ask for no more than this pass on less than they were given, if the program has
/// less room. They ask for the rest again. Newer ones ask for what there is room for
/// (`fuse_readdir_uncached` in fs/fuse/readdir.c).
const KERNEL_PAGE_BYTES: usize = 4096;
/// Largest answer to one request of the kernel.
const LIST_MAX_BYTES: usize = 1 << 20;
/// The positions behind "." and "..": near the end of what a position can be, where no
/// file system puts its own.
const AFTER_DOT: u64 = i64::MAX as u64 - 0xd1;
const AFTER_DOT_DOT: u64 = i64::MAX as u64 - 0xd2;

/// A page of an open directory that has been read, and from where.
#[derive(Default)]
pub(crate) struct Listing {
    page: DirPage,
    /// Position of the page's first entry; none while there is no page.
    from: Option<u64>,
    /// The first entry of the last answer.
    answered: usize,
    /// The entry to go on with, if the position is the expected one.
    next: usize,
    read_at: Option<Instant>,
    /// What this mount has changed since is not in it.
    read_after: ChangeNumber,
    /// Under which doubt of the kernel's listing it was asked for, if there was a lease then.
    asked_under: Option<ListingDoubt>,
}

/// When a page was fetched.
#[derive(Clone, Copy)]
struct FetchedAt {
    age: Duration,
    asked: ChangeNumber,
}

impl Listing {
    /// The index of the entry at position `cookie`, if it comes behind the last answer. The entry
    /// may also be in what the kernel may not have passed on of an answer of `size` bytes. Who goes
    /// back further asks for the directory as it is now.
    fn find(&self, cookie: u64, size: usize) -> Option<usize> {
        let from = self.from?;
        let before = |index: usize| match index.checked_sub(1) {
            None => Some(from),
            Some(before) => self.page.get(before).map(|(_, entry)| entry.cookie),
        };
        let first = if size > KERNEL_PAGE_BYTES { self.next } else { self.answered };
        (first..=self.next).rev().find(|&index| before(index) == Some(cookie))
    }

    /// How large a page to ask for at position `cookie`, for an answer of `size` bytes. Who has
    /// gone elsewhere (seekdir) may do so again behind the next name. Then all that was read ahead
    /// would be for nothing, each time.
    fn page_bytes(&self, cookie: u64, size: usize) -> usize {
        match self.from.is_none() || self.find(cookie, size).is_some() {
            true => PAGE_BYTES,
            false => size.clamp(KERNEL_PAGE_BYTES, PAGE_BYTES),
        }
    }
}

impl Worker {
    pub(crate) async fn readdir(
        &self,
        cx: &Context,
        (node, fh): (u64, u64),
        (at, size): (u64, usize),
        plus: bool,
    ) -> Result<KernelAnswer> {
        let handle = self.handle(fh)?;
        let file = self.file(cx, fh).await?;
        let keeps = self.shared.mode.is_leased() && handle.may_keep_listing();
        let mut under = self.begin_answer(node);
        if keeps && at == 0 {
            self.shared.listings.begins(node);
        }
        let mut list = DirList::new(size.min(LIST_MAX_BYTES));
        let mut listing = take(&handle);
        let filling =
            self.fill(cx, (node, &file), (&mut listing, &mut under), (at, plus), &mut list);
        let result = filling.await;
        *handle.listing.lock().unwrap_or_else(PoisonError::into_inner) = listing;
        // Entries in the list have been counted as known to the kernel.
        if list.is_empty() {
            result?;
        }
        if keeps && !self.may_be_kept(node, &under, list.is_empty()) && list.is_empty() {
            return Ok(KernelAnswer::Bytes(DirList::end_that_is_not_kept(plus)));
        }
        Ok(KernelAnswer::Bytes(list.into_bytes()))
    }

    async fn fill(
        &self,
        cx: &Context,
        (node, file): (u64, &Arc<dyn OpenFile>),
        (listing, under): (&mut Listing, &mut AnswerUnderLease),
        (at, plus): (u64, bool),
        list: &mut DirList,
    ) -> Result<()> {
        let mut cookie = at;
        let mut asked = false;
        if at == 0 {
            *listing = Listing::default(); // from the beginning means anew
        }
        if matches!(at, 0 | AFTER_DOT) {
            if !self.dots(cx, file, at, plus, list).await? {
                return Ok(());
            }
            cookie = AFTER_DOT_DOT;
        }
        if cookie == AFTER_DOT_DOT {
            cookie = 0;
        }
        let dir = file.id();
        // What was removed since would be there again for the kernel, which learns of each file.
        if plus && self.shared.changes.since(listing.read_after, dir) {
            *listing = Listing::default();
        }
        loop {
            let index = match listing.find(cookie, list.max_bytes()) {
                Some(index) if index < listing.page.len() => {
                    under.has(listing.asked_under);
                    index
                }
                Some(_) if listing.page.end => {
                    under.has(listing.asked_under);
                    return Ok(());
                }
                // Waiting once for the file system is enough for one answer.
                _ if asked => return Ok(()),
                _ => {
                    asked = true;
                    let read_after = self.shared.changes.now();
                    let asked_under = self.asks_under(node, dir);
                    let page_bytes = listing.page_bytes(cookie, list.max_bytes());
                    let mut page = file.readdir(cx, cookie, page_bytes, plus).await?;
                    page.end |= page.is_empty();
                    *listing = Listing {
                        page,
                        from: Some(cookie),
                        read_at: Some(now()),
                        read_after,
                        asked_under,
                        ..Listing::default()
                    };
                    continue;
                }
            };
            match self.entries(dir, listing, index, plus, list) {
                Some(reached) => cookie = reached,
                None => return Ok(()),
            }
        }
    }

    /// Puts entries of the page from `index` on into the list. Answers the position
    /// behind the page's last one if all went in.
    fn entries(
        &self,
        dir: FileId,
        listing: &mut Listing,
        index: usize,
        plus: bool,
        list: &mut DirList,
    ) -> Option<u64> {
        let age = listing.read_at.filter(|_| plus).map(|read_at| read_at.elapsed());
        let mut reached = None;
        (listing.answered, listing.next) = (index, index);
        while let Some((name, entry)) = listing.page.get(listing.next) {
            if !list.fits(name, plus) {
                return None;
            }
            let kind = entry.kind.map_or(0, FileType::dirent_type);
            let fresh = self.is_young(entry, age)
                && !self.shared.changes.since(listing.read_after, entry.id)
                && !self.was_opened_since(entry);
            let fetched = FetchedAt { age: age.unwrap_or_default(), asked: listing.read_after };
            let head = plus.then(|| self.plus_entry((dir, name), entry, fresh.then_some(fetched)));
            let head = head.as_ref().map(Small::as_slice);
            let ino = entry.attr.map_or(entry.id.ino, |attr| attr.ino);
            list.push(name, ino, entry.cookie, kind, head);
            reached = Some(entry.cookie);
            listing.next += 1;
        }
        reached
    }

    /// Whether what was read so long ago may still be believed.
    fn is_young(&self, entry: &DirEntry, age: Option<Duration>) -> bool {
        let Some((attr, age)) = entry.attr.as_ref().zip(age) else { return false };
        age <= self.shared.mode.attributes(attr)
    }

    /// Whether what others have changed was opened since the page was read: the kernel knows it as it
    /// was then.
    fn was_opened_since(&self, entry: &DirEntry) -> bool {
        let Some(attr) = entry.attr else { return false };
        let node = self.shared.nodes.find(entry.id);
        node.is_some_and(|node| self.shared.versions.may_be_older(node, &attr))
    }

    /// The entry answer within a list: node 0, which says nothing, where there are no
    /// attributes young enough to be believed.
    fn plus_entry(
        &self,
        place: (FileId, &[u8]),
        entry: &DirEntry,
        fresh: Option<FetchedAt>,
    ) -> Small {
        let known = entry.attr.zip(fresh).and_then(|(attr, FetchedAt { age, asked })| {
            let attr = match self.shared.mode.is_leased() {
                true => Attr { validity: attr.validity.after(age), ..attr },
                false => attr,
            };
            let (dir, name) = place;
            let place = Name::new(name).ok().map(|name| (dir, name));
            let seen = place.map(|place| self.binding(&attr, place));
            let node = self.shared.nodes.remember(entry.id, seen).ok()?;
            let answered = Answered { place, id: entry.id, node, asked };
            Some(self.entry_reply(answered, &Entry { id: entry.id, attr }))
        });
        known.unwrap_or_else(nothing_known)
    }

    /// "." and "..", as far as they fit; whether both are done.
    async fn dots(
        &self,
        cx: &Context,
        file: &Arc<dyn OpenFile>,
        at: u64,
        plus: bool,
        list: &mut DirList,
    ) -> Result<bool> {
        let nothing = nothing_known();
        let head = plus.then_some(nothing.as_slice());
        let kind = FileType::Directory.dirent_type();
        let id = file.id();
        if at == 0 {
            if !list.fits(b".", plus) {
                return Ok(false);
            }
            list.push(b".", id.ino, AFTER_DOT, kind, head);
        }
        if !list.fits(b"..", plus) {
            return Ok(false);
        }
        let above = match id == self.fs.info().root {
            true => id.ino, // what is above the mount is the kernel's affair
            // A parent that may not be looked at, or is gone, still has a name here.
            false => self.fs.parent(cx, id).await.map_or(id.ino, |parent| parent.attr.ino),
        };
        list.push(b"..", above, AFTER_DOT_DOT, kind, head);
        Ok(true)
    }
}

fn nothing_known() -> Small {
    Small::new().zeros(ENTRY_BYTES)
}

fn take(handle: &OpenHandle) -> Listing {
    std::mem::take(&mut *handle.listing.lock().unwrap_or_else(PoisonError::into_inner))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each step of a program that jumped about in a directory of 4,000 names fetched all of it.
    #[test]
    fn who_jumps_about_in_a_directory_has_little_read_ahead() {
        let mut listing = Listing::default();
        assert_eq!(listing.page_bytes(7, 280), PAGE_BYTES, "nothing is known of this reader yet");
        for cookie in 1..=3 {
            let id = FileId { ino: cookie, generation: 0 };
            listing.page.push(b"name", id, None, cookie, None);
        }
        (listing.from, listing.next) = (Some(0), 3);
        assert_eq!(listing.page_bytes(3, 280), PAGE_BYTES, "behind the last entry: it reads on");
        assert_eq!(listing.page_bytes(9, 280), KERNEL_PAGE_BYTES);
        assert_eq!(listing.page_bytes(0, 32 << 10), 32 << 10);
        assert_eq!(listing.page_bytes(9, 1 << 20), PAGE_BYTES);
    }
}
