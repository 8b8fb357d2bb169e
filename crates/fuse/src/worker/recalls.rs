//! Recalled leases: the kernel forgets what they covered, and then the server hears of it (ADR 0049).

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use dray_core::{FileId, LeaseKinds, Name, Recall, RecallDone, RecallItem};
use dray_rt::{now, sleep, timeout};

use crate::notify::inval_inode;
use crate::worker::invalidator::{drop_nodes_soon, name_dropped, pages_dropped};
use crate::worker::shared::MountShared;

/// How long a recall waits for pages. The kernel may wait for one that is being read, by a read that waits for
/// the change that recalls.
pub(crate) const PAGES_MAX: Duration = Duration::from_millis(200);

/// Has the kernel forget what is recalled. Does not wait.
pub(crate) fn recalled(shared: &Arc<MountShared>, recall: Recall, done: RecallDone) {
    let Recall::Items(items) = recall else {
        // All leases ended before this, and with them the times that the kernel was given. Pages have none.
        shared.pages.doubt_all();
        shared.listings.doubt_all();
        return drop_nodes_soon(shared, shared.pages.nodes().into_iter().collect());
    };
    items.iter().for_each(|item| shared.changes.note(item.id));
    items.iter().filter_map(|item| attributes_node(shared, item)).for_each(|node| {
        shared.pages.doubt(node);
        shared.listings.doubt(node);
    });
    let shared = shared.clone();
    dray_rt::spawn(async move {
        for item in &items {
            if item.kinds.contains(LeaseKinds::ATTRIBUTES) {
                drop_attributes(&shared, item.id);
            }
        }
        let _ = timeout(PAGES_MAX, drop_pages(&shared, &items)).await; // else they stay in doubt
        for item in &items {
            if item.kinds.contains(LeaseKinds::NAMES) {
                drop_names(&shared, item).await;
            }
        }
        settle(&shared, &items).await;
        drop(done);
    });
}

/// The node of a file whose attributes are recalled.
fn attributes_node(shared: &MountShared, item: &RecallItem) -> Option<u64> {
    item.kinds.contains(LeaseKinds::ATTRIBUTES).then(|| shared.nodes.find(item.id)).flatten()
}

/// The pages of files whose attributes are recalled, and listings of directories. A read(2) drops them itself. This is for mappings, and for
/// splice(2), which ask for no attributes.
async fn drop_pages(shared: &Arc<MountShared>, items: &[RecallItem]) {
    for node in items.iter().filter_map(|item| attributes_node(shared, item)) {
        if let Some(doubt) = shared.pages.doubted(node)
            && pages_dropped(shared, node).await
        {
            shared.pages.dropped(node, doubt);
        }
        listing_dropped(shared, node).await;
    }
}

/// Has the kernel drop what it keeps of a directory's listing that is in doubt, as soon as all that was answered
/// has reached it.
pub(crate) async fn listing_dropped(shared: &Arc<MountShared>, node: u64) {
    let Some((doubt, settled)) = shared.listings.doubted(node) else { return };
    sleep(settled - now()).await;
    if pages_dropped(shared, node).await {
        shared.listings.dropped(node, doubt);
    }
}

/// The same soon, if nobody does it.
pub(crate) fn drop_listing_soon(shared: &Arc<MountShared>, node: u64) {
    if shared.listings.doubted(node).is_none() || !shared.listings.begin_dropping(node) {
        return;
    }
    let shared = shared.clone();
    dray_rt::spawn(async move {
        listing_dropped(&shared, node).await;
        shared.listings.end_dropping(node);
    });
}

/// Takes no lock that a request could hold. The attributes of a node that is not there need not be dropped.
fn drop_attributes(shared: &MountShared, id: FileId) {
    if let Some(node) = shared.nodes.find(id) {
        let _ = inval_inode(shared.device.as_fd(), node, None); // else the mount has ended
    }
}

/// Once more for files whose inodes the kernel may have made meanwhile.
async fn settle(shared: &MountShared, items: &[RecallItem]) {
    let of_attributes = || items.iter().filter(|item| item.kinds.contains(LeaseKinds::ATTRIBUTES));
    let settled = of_attributes().map(|item| shared.published.settled_at(item.id)).max();
    let Some(left) = settled.map(|settled| settled - now()).filter(|left| !left.is_zero()) else {
        return;
    };
    sleep(left).await;
    of_attributes().for_each(|item| drop_attributes(shared, item.id));
}

/// Has the kernel ask for a name again. Twice, if a thread may just have been answered. False: there is nobody
/// to do it.
async fn name_expired(shared: &Arc<MountShared>, (id, dir): (FileId, u64), name: &Name) -> bool {
    let settled = shared.published.name_settled_at(id, name);
    if !name_dropped(shared, dir, name).await {
        return false;
    }
    let left = settled - now();
    if left.is_zero() {
        return true;
    }
    sleep(left).await;
    name_dropped(shared, dir, name).await
}

/// Ends at the latest when the kernel believes no name in the directory any more.
async fn drop_names(shared: &Arc<MountShared>, item: &RecallItem) {
    let name: Option<&Name> = item.name.as_deref();
    let left = shared.published.names_until(item.id, name) - now();
    if left.is_zero() {
        return;
    }
    let dropped = match (name, shared.nodes.find(item.id)) {
        (_, None) => return, // the kernel has forgotten the directory, and its names before
        (Some(name), Some(dir)) => {
            timeout(left, name_expired(shared, (item.id, dir), name)).await.unwrap_or(false)
        }
        (None, Some(_)) => false,
    };
    if !dropped {
        sleep(shared.published.names_until(item.id, name) - now()).await;
    }
}
