//! Pages of files under leases (ADR 0051).
//!
//! Before a read(2) the kernel makes sure that it has valid attributes. Those are valid only under a lease and
//! if the pages are beyond doubt. Otherwise the kernel asks for them. Then it is answered with a time of change
//! that it has not seen, and so drops all pages itself, before it reads.

use std::sync::Arc;
use std::time::Duration;

use dray_core::{Attr, FileId, FileType};
use dray_rt::{Instant, now, sleep, wall_clock};

use crate::front::Worker;
use crate::proto::abi::{fopen, init};
use crate::state::kernel_pages::PagesAtOpen;
use crate::worker::invalidator::pages_dropped;
use crate::worker::shared::MountShared;
use crate::worker::versions::PageDrop;

/// A file that was written less long ago may be about to be written again. It is read past the cache.
const AT_REST: Duration = Duration::from_secs(1);
/// How soon a lease is looked for under which pages in doubt can be dropped for good.
const LOOK_FIRST: Duration = Duration::from_millis(20);
/// Without a lease pages of mappings are dropped after this time, unless reads drop them.
const MAPPED_TIME: Duration = Duration::from_secs(1);

impl Worker {
    /// How a strict mount opens a file, and which pages the kernel drops with that.
    pub(super) fn open_strictly(
        &self,
        (node, id): (u64, FileId),
        flags: i32,
    ) -> (u32, Option<PageDrop>) {
        let past = fopen::DIRECT_IO | fopen::PARALLEL_DIRECT_WRITES;
        if !self.shared.mode.is_leased() {
            return (past, None);
        }
        let pages = &self.shared.pages;
        let (kernel, at_open) = match self.may_keep_pages((node, id), flags) {
            true => match pages.opened(node) {
                PagesAtOpen::Unknown => (past, PagesAtOpen::Unknown),
                known => (0, known),
            },
            false => (past, pages.opened_past_them(node)),
        };
        match at_open {
            PagesAtOpen::Kept => (kernel | fopen::KEEP_CACHE, None),
            PagesAtOpen::Dropped(doubt) => (kernel, Some(doubt)),
            PagesAtOpen::Unknown => (kernel, None),
        }
    }

    /// Whether a file that is opened so may be read from pages.
    fn may_keep_pages(&self, (node, id): (u64, FileId), flags: i32) -> bool {
        let MountShared { options, session, nodes, control, .. } = &*self.shared;
        let reads = flags & (libc::O_ACCMODE | libc::O_DIRECT | libc::O_TRUNC) == libc::O_RDONLY;
        reads
            && options.shared_mmap
            && session.has(init::AUTO_INVAL_DATA)
            && nodes.type_of(node) == Some(FileType::Regular)
            // A recall finds a file by its id, and so one node of it.
            && nodes.find(id) == Some(node)
            && control.leased_attributes(id).is_some_and(|attr| is_at_rest(&attr))
    }

    /// The kernel has asked for data, perhaps for pages, which it has locked. To be called before the file
    /// system is asked.
    pub(super) fn asked_for_pages(&self, (node, id): (u64, FileId)) {
        let MountShared { mode, pages, control, .. } = &*self.shared;
        if mode.is_leased() && pages.are_known(node) && control.leased_attributes(id).is_none() {
            pages.doubt(node);
            self.drop_in_time(node, id);
        }
    }

    /// The attributes are for a read(2) through an open file, and not for people. If the pages are in doubt,
    /// the kernel drops them with this answer. False: they are beyond doubt.
    pub(super) fn drops_pages(&self, node: u64, attr: &mut Attr) -> bool {
        let time = self.shared.pages.time_that_drops(node);
        attr.mtime = time.unwrap_or(attr.mtime);
        time.is_some()
    }

    /// Whether the kernel must not believe attributes that it could, since it would read pages in doubt.
    pub(super) fn doubts_pages(&self, node: u64) -> bool {
        let doubted = self.shared.pages.doubted(node).is_some();
        if doubted && let Ok(id) = self.shared.nodes.id(node) {
            self.drop_in_time(node, id);
        }
        doubted
    }

    /// Has the pages of a file dropped when there is a lease again, or nobody else drops them.
    fn drop_in_time(&self, node: u64, id: FileId) {
        if !self.shared.pages.begin_dropping(node) {
            return;
        }
        let shared = self.shared.clone();
        dray_rt::spawn(async move {
            wait_to_drop(&shared, node, id).await;
            if let Some(doubt) = shared.pages.doubted(node)
                && pages_dropped(&shared, node).await
            {
                shared.pages.dropped(node, doubt);
            }
            shared.pages.end_dropping(node);
        });
    }
}

/// Waits until there is a lease under which new pages are beyond doubt. A drop ends the time of attributes
/// that are on their way. So where read(2) goes on to ask, and has pages dropped, nothing else drops them.
async fn wait_to_drop(shared: &Arc<MountShared>, node: u64, id: FileId) {
    let (begun, mut pause): (Instant, Duration) = (now(), LOOK_FIRST);
    loop {
        sleep(pause).await;
        let is_leased = shared.control.leased_attributes(id).is_some();
        if is_leased || shared.pages.doubted(node).is_none() {
            return;
        }
        let is_read = shared.pages.since_renewed(node).is_some_and(|since| since < MAPPED_TIME);
        if begun.elapsed() >= MAPPED_TIME && !is_read {
            return;
        }
        pause = (pause * 2).min(MAPPED_TIME);
    }
}

fn is_at_rest(attr: &Attr) -> bool {
    let now_s = wall_clock().as_secs() as i64;
    now_s.abs_diff(attr.mtime.sec) > AT_REST.as_secs()
}
