//! Which pages the kernel has of files under leases, and whether they may be those of a former
//! version (ADR 0051).
//!
//! A page is beyond doubt if the session had the lease when the kernel asked for it. No recall and no
//! change of this mount's own may have come since. All other pages of a file are in doubt together. Doubt
//! ends when they have all been dropped. The kernel locks a page before it asks for it. So a drop waits
//! for what is under way.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::{IdMap, Timestamp};
use dray_rt::{Instant, now};

use crate::worker::versions::PageDrop;

/// Files whose pages are looked after, about. Further ones are opened past the cache.
const FILES_MAX: usize = 1 << 20;
/// Independent parts, so that threads rarely meet: each read and each lookup looks here.
const SHARDS: usize = 64;
/// Where the times of change begin that no file has: seconds.
const NEVER_S: i64 = -(1 << 60);

/// The pages of all files of which the kernel may have some.
pub(crate) struct KernelPages {
    files: Box<[Mutex<IdMap<u64, FilePages>>]>,
    /// How many: nearly all that is asked ends here where there are none.
    count: AtomicUsize,
    /// The number of the last doubt.
    doubts: AtomicU64,
    /// The last doubt of the pages of all files.
    doubt_of_all: AtomicU64,
}

struct FilePages {
    /// The last doubt.
    doubt: u64,
    /// All pages were dropped after this doubt.
    dropped: u64,
    /// When the kernel was last had drop them by another time of change.
    renewed: Option<Instant>,
    /// A task is about to drop them.
    is_dropping: bool,
}

/// What an open has to do about pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PagesAtOpen {
    /// The pages that the kernel has are right.
    Kept,
    /// The kernel has to drop them at the opening, which the first request through the file shows to be done.
    Dropped(PageDrop),
    /// The pages of this file are not looked after.
    Unknown,
}

impl Default for KernelPages {
    fn default() -> KernelPages {
        KernelPages {
            files: (0..SHARDS).map(|_| Mutex::default()).collect(),
            count: AtomicUsize::new(0),
            doubts: AtomicU64::new(0),
            doubt_of_all: AtomicU64::new(0),
        }
    }
}

impl KernelPages {
    /// The part that has a file, if any does. Nodes are numbered one after the other.
    fn shard(&self, node: u64) -> MutexGuard<'_, IdMap<u64, FilePages>> {
        self.files[node as usize % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self) -> u64 {
        self.doubts.fetch_add(1, Ordering::SeqCst) + 1
    }

    fn last_doubt(&self, pages: &FilePages) -> Option<PageDrop> {
        let last = pages.doubt.max(self.doubt_of_all.load(Ordering::SeqCst));
        (last > pages.dropped).then_some(PageDrop(last))
    }

    /// What `read` makes of the pages of a file, if they are looked after.
    fn find<R>(&self, node: u64, read: impl FnOnce(&mut FilePages) -> R) -> Option<R> {
        if self.count.load(Ordering::SeqCst) == 0 {
            return None;
        }
        self.shard(node).get_mut(&node).map(read)
    }

    /// A file is opened, and its pages are looked after from now on.
    pub(crate) fn opened(&self, node: u64) -> PagesAtOpen {
        let mut files = self.shard(node);
        if let Some(pages) = files.get(&node) {
            return self.last_doubt(pages).map_or(PagesAtOpen::Kept, PagesAtOpen::Dropped);
        }
        if self.count.load(Ordering::SeqCst) >= FILES_MAX {
            return PagesAtOpen::Unknown;
        }
        // Mappings may have left some.
        let doubt = self.next();
        files.insert(node, FilePages { doubt, dropped: 0, renewed: None, is_dropping: false });
        self.count.fetch_add(1, Ordering::SeqCst);
        PagesAtOpen::Dropped(PageDrop(doubt))
    }

    /// A file is opened past the cache.
    pub(crate) fn opened_past_them(&self, node: u64) -> PagesAtOpen {
        let at_open = |pages: &mut FilePages| {
            self.last_doubt(pages).map_or(PagesAtOpen::Kept, PagesAtOpen::Dropped)
        };
        self.find(node, at_open).unwrap_or(PagesAtOpen::Unknown)
    }

    pub(crate) fn are_known(&self, node: u64) -> bool {
        self.find(node, |_| ()).is_some()
    }

    /// All files of which there may be pages.
    pub(crate) fn nodes(&self) -> Vec<u64> {
        let nodes = |files: &Mutex<IdMap<u64, FilePages>>| -> Vec<u64> {
            files.lock().unwrap_or_else(PoisonError::into_inner).keys().copied().collect()
        };
        self.files.iter().flat_map(nodes).collect()
    }

    /// The pages of a file may be old by now, or those that the kernel has asked for may be.
    pub(crate) fn doubt(&self, node: u64) {
        self.find(node, |pages| pages.doubt = self.next());
    }

    /// The same of all files.
    pub(crate) fn doubt_all(&self) {
        self.doubt_of_all.store(self.next(), Ordering::SeqCst);
    }

    /// The doubt that a drop from now on will end.
    pub(crate) fn doubted(&self, node: u64) -> Option<PageDrop> {
        self.find(node, |pages| self.last_doubt(pages)).flatten()
    }

    /// All pages were dropped that were there when this doubt was noted.
    pub(crate) fn dropped(&self, node: u64, PageDrop(doubt): PageDrop) {
        self.find(node, |pages| pages.dropped = pages.dropped.max(doubt));
    }

    /// A time of change that no file has, and that the kernel has not seen before. A kernel that gets it with
    /// the attributes of a file drops the pages by itself. None: they are beyond doubt.
    pub(crate) fn time_that_drops(&self, node: u64) -> Option<Timestamp> {
        self.find(node, |pages| {
            self.last_doubt(pages)?;
            pages.renewed = Some(now());
            Some(Timestamp { sec: NEVER_S + self.next() as i64, nsec: 0 })
        })
        .flatten()
    }

    /// How long ago the kernel got such a time.
    pub(crate) fn since_renewed(&self, node: u64) -> Option<Duration> {
        self.find(node, |pages| pages.renewed).flatten().map(|then| then.elapsed())
    }

    /// A task drops the pages from now on. False: one does, or there is nothing to drop.
    pub(crate) fn begin_dropping(&self, node: u64) -> bool {
        let begin = |pages: &mut FilePages| {
            self.last_doubt(pages).is_some() && !std::mem::replace(&mut pages.is_dropping, true)
        };
        self.find(node, begin).unwrap_or(false)
    }

    pub(crate) fn end_dropping(&self, node: u64) {
        self.find(node, |pages| pages.is_dropping = false);
    }

    /// The kernel has forgotten the file.
    pub(crate) fn forget(&self, node: u64) {
        if self.count.load(Ordering::SeqCst) == 0 {
            return;
        }
        if self.shard(node).remove(&node).is_some() {
            self.count.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drop_of(at_open: PagesAtOpen) -> PageDrop {
        match at_open {
            PagesAtOpen::Dropped(doubt) => doubt,
            PagesAtOpen::Kept | PagesAtOpen::Unknown => panic!("{at_open:?}"),
        }
    }

    #[test]
    fn pages_are_kept_once_they_were_dropped_after_the_last_doubt() {
        let pages = KernelPages::default();
        pages.doubt(7);
        assert_eq!(pages.opened_past_them(7), PagesAtOpen::Unknown);
        assert!(!pages.are_known(7) && pages.doubted(7).is_none());
        let first = drop_of(pages.opened(7));
        assert_eq!(pages.opened(7), PagesAtOpen::Dropped(first), "nothing shows that it is done");
        pages.dropped(7, first);
        assert_eq!(
            (pages.opened(7), pages.opened_past_them(7)),
            (PagesAtOpen::Kept, PagesAtOpen::Kept)
        );
        pages.doubt(7);
        pages.doubt(8);
        pages.dropped(7, first);
        let second = pages.doubted(7).unwrap();
        assert_ne!(first, second);
        pages.doubt(7); // while they are dropped
        pages.dropped(7, second);
        assert!(pages.doubted(7).is_some());
        pages.dropped(7, pages.doubted(7).unwrap());
        pages.doubt_all();
        assert!(pages.doubted(7).is_some() && !pages.are_known(8));
        pages.dropped(7, pages.doubted(7).unwrap());
        pages.forget(7);
        drop_of(pages.opened(7));
    }

    #[test]
    fn a_time_that_drops_is_always_another_one() {
        let driver = dray_rt::DriverKind::Simulated { seed: 1 };
        dray_rt::Executor::new(driver).unwrap().block_on(async {
            let pages = KernelPages::default();
            let first = drop_of(pages.opened(7));
            let [one, other] = [(), ()].map(|()| pages.time_that_drops(7).unwrap());
            assert!(one.sec < other.sec && other.sec < -(1 << 59));
            assert!(pages.begin_dropping(7) && !pages.begin_dropping(7));
            pages.end_dropping(7);
            pages.dropped(7, first);
            assert!(pages.time_that_drops(7).is_none() && !pages.begin_dropping(7));
        });
    }
}
