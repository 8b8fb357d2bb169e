//! Which listings the kernel may keep of directories under leases (ADR 0059).
//!
//! The kernel puts together what it was answered, in whatever order the answers reach it, and keeps that once it
//! has heard of the end. So it may keep a listing only if each answer that is in it was asked for under one lease.
//! An answer that was not puts the directory in doubt, and so does a recall. In doubt the kernel does not
//! hear of an end. Doubt is over when all that the kernel had was dropped, and what was answered before had
//! reached it.
//!
//! The kernel notices changes of this mount by itself: it counts them (`fuse_dir_changed`).

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::IdMap;
use dray_rt::{Instant, now};

use crate::state::changes::ChangeNumber;
use crate::state::published::{NAME_VALIDITY_MAX, UNSETTLED};

/// Directories whose listings are looked after, about. Of others the kernel keeps none.
const DIRECTORIES_MAX: usize = 1 << 16;
/// Independent parts, so that threads rarely meet.
const SHARDS: usize = 16;
/// A listing that is older is made anew, which renews its names. Names last for twice as long. So a program that
/// lists a directory again and again looks no name up, however often it does so.
const YOUNG: Duration = Duration::from_millis(NAME_VALIDITY_MAX.as_millis() as u64 / 2);

/// The listings of all directories of which the kernel may have one.
pub(crate) struct KernelListings {
    directories: Box<[Mutex<IdMap<u64, KernelListing>>]>,
    /// How many: nearly all that is asked ends here where there are none.
    count: AtomicUsize,
    /// The number of the last doubt.
    doubts: AtomicU64,
    /// What a predecessor answered nobody knows.
    inherits: bool,
}

struct KernelListing {
    /// The last doubt.
    doubt: u64,
    /// All was dropped after this doubt.
    dropped: u64,
    /// When the kernel was last answered something that it may keep; none since that was dropped.
    answered: Option<Instant>,
    /// What this mount had changed by then is not in a listing that is kept.
    changed: ChangeNumber,
    /// When a listing was last begun. Its names are as old.
    begun: Option<Instant>,
    /// That listing was read to its end.
    is_whole: bool,
    /// A task is about to drop what the kernel has.
    is_dropping: bool,
}

/// What the kernel may do with the listing of a directory that it opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListingAtOpen {
    /// The kernel keeps nothing, and uses nothing that it has.
    Past,
    /// The kernel drops what it has, and keeps what it reads.
    Anew,
    /// The kernel uses what it has.
    Kept,
}

/// Doubt of a directory's listing, by its number. No two are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ListingDoubt(u64);

impl KernelListings {
    /// `inherits`: a predecessor has answered this kernel.
    pub(crate) fn new(inherits: bool) -> KernelListings {
        KernelListings {
            directories: (0..SHARDS).map(|_| Mutex::default()).collect(),
            count: AtomicUsize::new(0),
            doubts: AtomicU64::new(0),
            inherits,
        }
    }

    fn shard(&self, node: u64) -> MutexGuard<'_, IdMap<u64, KernelListing>> {
        let shard = &self.directories[node as usize % SHARDS];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What `read` makes of a directory, if it is looked after.
    fn find<R>(&self, node: u64, read: impl FnOnce(&mut KernelListing) -> R) -> Option<R> {
        if self.count.load(Ordering::SeqCst) == 0 {
            return None;
        }
        self.shard(node).get_mut(&node).map(read)
    }

    fn next(&self) -> u64 {
        self.doubts.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// A directory is opened under a lease. `changed`: the last change before that; `is_changed`: whether this
    /// mount has changed it since such a number.
    pub(crate) fn opened(
        &self,
        node: u64,
        changed: ChangeNumber,
        is_changed: impl FnOnce(ChangeNumber) -> bool,
    ) -> ListingAtOpen {
        let mut shard = self.shard(node);
        let Some(listing) = shard.get_mut(&node) else {
            if self.count.load(Ordering::SeqCst) >= DIRECTORIES_MAX {
                return ListingAtOpen::Past;
            }
            let doubt = if self.inherits { self.next() } else { 0 };
            shard.insert(node, KernelListing::new(doubt, changed));
            self.count.fetch_add(1, Ordering::SeqCst);
            return if self.inherits { ListingAtOpen::Past } else { ListingAtOpen::Anew };
        };
        if listing.last_doubt().is_some() {
            return ListingAtOpen::Past;
        }
        if is_changed(listing.changed) {
            listing.changed = changed;
            return ListingAtOpen::Anew;
        }
        // A kernel that has a part drops that, and then keeps nothing until it forgets the directory.
        let is_young = listing.begun.is_some_and(|begun| begun.elapsed() < YOUNG);
        match is_young || !listing.is_whole {
            true => ListingAtOpen::Kept,
            false => ListingAtOpen::Anew,
        }
    }

    /// A predecessor has this directory open.
    pub(crate) fn inherited(&self, node: u64) {
        let doubt = self.next();
        let listing = KernelListing::new(doubt, ChangeNumber::default());
        if self.shard(node).insert(node, listing).is_none() {
            self.count.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// To be asked before the file system is asked, and before it is looked whether there is a lease: what
    /// [`answers`](KernelListings::answers) wants to know then.
    pub(crate) fn last_doubt(&self, node: u64) -> Option<ListingDoubt> {
        self.find(node, |listing| ListingDoubt(listing.doubt))
    }

    /// The kernel begins to list a directory.
    pub(crate) fn begins(&self, node: u64) {
        self.find(node, |listing| (listing.begun, listing.is_whole) = (Some(now()), false));
    }

    /// The kernel is about to be answered what it may keep. `asked`: the last doubt when all of that was asked
    /// for, if there was a lease then. False: it must not keep that, and so must not hear that this is the end.
    pub(crate) fn answers(&self, node: u64, asked: Option<ListingDoubt>, is_end: bool) -> bool {
        let answers = |listing: &mut KernelListing| {
            listing.answered = Some(now());
            let stands =
                asked == Some(ListingDoubt(listing.doubt)) && listing.last_doubt().is_none();
            match stands {
                true => listing.is_whole |= is_end,
                false => listing.doubt = self.next(),
            }
            stands
        };
        self.find(node, answers).unwrap_or(false)
    }

    /// What the kernel has of a directory, or is about to get, may be old by now.
    pub(crate) fn doubt(&self, node: u64) {
        self.find(node, |listing| listing.is_doubted(self.next()));
    }

    /// The same of all directories.
    pub(crate) fn doubt_all(&self) {
        for shard in &self.directories {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard.values_mut().for_each(|listing| listing.is_doubted(self.next()));
        }
    }

    /// The doubt that a drop will end, and when it may begin: what was answered has reached the kernel by
    /// then.
    pub(crate) fn doubted(&self, node: u64) -> Option<(ListingDoubt, Instant)> {
        let doubted = |listing: &mut KernelListing| {
            let settled = listing.answered.map_or_else(now, |answered| answered + UNSETTLED);
            listing.last_doubt().map(|doubt| (doubt, settled))
        };
        self.find(node, doubted).flatten()
    }

    /// All was dropped that the kernel had when this doubt was noted, or got until it was settled.
    pub(crate) fn dropped(&self, node: u64, ListingDoubt(doubt): ListingDoubt) {
        self.find(node, |listing| {
            listing.dropped = listing.dropped.max(doubt);
            if listing.last_doubt().is_none() {
                (listing.answered, listing.begun, listing.is_whole) = (None, None, false);
            }
        });
    }

    /// A task drops what the kernel has from now on. False: one does.
    pub(crate) fn begin_dropping(&self, node: u64) -> bool {
        let begin =
            |listing: &mut KernelListing| !std::mem::replace(&mut listing.is_dropping, true);
        self.find(node, begin).unwrap_or(false)
    }

    pub(crate) fn end_dropping(&self, node: u64) {
        self.find(node, |listing| listing.is_dropping = false);
    }

    /// The kernel has forgotten the directory.
    pub(crate) fn forget(&self, node: u64) {
        if self.count.load(Ordering::SeqCst) == 0 {
            return;
        }
        if self.shard(node).remove(&node).is_some() {
            self.count.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

impl KernelListing {
    fn new(doubt: u64, changed: ChangeNumber) -> KernelListing {
        KernelListing {
            doubt,
            dropped: 0,
            answered: None,
            changed,
            begun: None,
            is_whole: false,
            is_dropping: false,
        }
    }

    fn last_doubt(&self) -> Option<ListingDoubt> {
        (self.doubt > self.dropped).then_some(ListingDoubt(self.doubt))
    }

    /// Pages that were read ahead are in doubt in any case. The kernel has nothing if it was answered nothing.
    fn is_doubted(&mut self, number: u64) {
        if self.answered.is_none() && self.last_doubt().is_none() {
            self.dropped = number;
        }
        self.doubt = number;
    }
}

#[cfg(test)]
mod tests {
    use dray_core::FileId;

    use super::*;
    use crate::state::changes::RecentChanges;

    const DIR: FileId = FileId { ino: 7, generation: 0 };
    const NODE: u64 = 70;

    /// The listings of a mount, with its own changes.
    struct Mount {
        listings: KernelListings,
        changes: RecentChanges,
    }

    impl Mount {
        fn new(inherits: bool) -> Mount {
            Mount { listings: KernelListings::new(inherits), changes: RecentChanges::default() }
        }

        fn open(&self) -> ListingAtOpen {
            let changed = self.changes.now();
            self.listings.opened(NODE, changed, |before| self.changes.since(before, DIR))
        }

        /// Lists to the end under one lease. Whether the kernel may keep both answers.
        fn list(&self) -> [bool; 2] {
            self.listings.begins(NODE);
            let asked = self.listings.last_doubt(NODE);
            [false, true].map(|is_end| self.listings.answers(NODE, asked, is_end))
        }

        async fn drop(&self) {
            let (doubt, settled) = self.listings.doubted(NODE).unwrap();
            dray_rt::sleep(settled - now()).await;
            self.listings.dropped(NODE, doubt);
        }
    }

    fn simulated(test: impl Future<Output = ()>) {
        let driver = dray_rt::DriverKind::Simulated { seed: 1 };
        dray_rt::Executor::new(driver).unwrap().block_on(test);
    }

    #[test]
    fn a_young_listing_is_kept_and_an_older_one_is_made_anew() {
        simulated(async {
            let mount = Mount::new(false);
            assert_eq!(mount.open(), ListingAtOpen::Anew);
            assert_eq!(mount.list(), [true; 2]);
            assert_eq!((mount.open(), mount.open()), (ListingAtOpen::Kept, ListingAtOpen::Kept));
            dray_rt::sleep(YOUNG).await;
            assert_eq!((mount.open(), mount.open()), (ListingAtOpen::Anew, ListingAtOpen::Anew));
            assert_eq!((mount.list(), mount.open()), ([true; 2], ListingAtOpen::Kept));
            mount.changes.note(DIR);
            assert_eq!((mount.open(), mount.list()), (ListingAtOpen::Anew, [true; 2]));
            // A part is gone on with, however old it is.
            let asked = mount.listings.last_doubt(NODE);
            mount.listings.begins(NODE);
            assert!(mount.listings.answers(NODE, asked, false));
            dray_rt::sleep(YOUNG).await;
            assert_eq!(mount.open(), ListingAtOpen::Kept);
            mount.listings.forget(NODE);
            assert_eq!(mount.open(), ListingAtOpen::Anew);
        });
    }

    #[test]
    fn nothing_is_kept_in_doubt_until_what_was_answered_is_dropped() {
        simulated(async {
            let mount = Mount::new(false);
            assert_eq!((mount.open(), mount.listings.doubted(NODE)), (ListingAtOpen::Anew, None));
            let early = mount.listings.last_doubt(NODE);
            mount.listings.doubt(NODE);
            assert_eq!(mount.listings.doubted(NODE), None, "the kernel has nothing");
            assert!(!mount.listings.answers(NODE, early, false), "asked for before the recall");
            let settled = mount.listings.doubted(NODE).unwrap().1;
            assert_eq!((settled, mount.open()), (now() + UNSETTLED, ListingAtOpen::Past));
            assert_eq!(mount.list(), [false; 2]);
            mount.drop().await;
            assert_eq!(mount.listings.doubted(NODE), None);
            assert_eq!((mount.open(), mount.list()), (ListingAtOpen::Kept, [true; 2]));
            mount.listings.doubt_all();
            let (doubt, _) = mount.listings.doubted(NODE).unwrap();
            assert!(!mount.listings.answers(NODE, None, false), "without a lease");
            mount.listings.dropped(NODE, doubt);
            assert!(mount.listings.doubted(NODE).is_some(), "that came while it was dropped");
            mount.drop().await;
            assert_eq!(mount.open(), ListingAtOpen::Kept);
        });
    }

    #[test]
    fn what_a_predecessor_has_answered_is_in_doubt() {
        simulated(async {
            let mount = Mount::new(true);
            assert_eq!((mount.open(), mount.list()), (ListingAtOpen::Past, [false; 2]));
            mount.drop().await;
            assert_eq!((mount.open(), mount.list()), (ListingAtOpen::Kept, [true; 2]));
            mount.listings.inherited(NODE);
            assert_eq!(mount.open(), ListingAtOpen::Past);
        });
    }

    #[test]
    fn directories_are_bounded() {
        simulated(async {
            let mount = Mount::new(false);
            let open = |node: u64| mount.listings.opened(node, mount.changes.now(), |_| false);
            assert!((1..=DIRECTORIES_MAX as u64).all(|node| open(node) == ListingAtOpen::Anew));
            assert_eq!(open(1 << 40), ListingAtOpen::Past);
            assert!(!mount.listings.answers(1 << 40, None, true));
            mount.listings.forget(5);
            assert_eq!(open(1 << 40), ListingAtOpen::Anew);
        });
    }
}
