//! Recalled leases: the kernel forgets what they covered, and then the server hears of it (ADR 0049).

use std::os::fd::AsFd;
use std::sync::Arc;

use dray_core::{FileId, LeaseKinds, Name, Recall, RecallDone, RecallItem};
use dray_rt::{now, sleep, timeout};

use crate::notify::inval_inode;
use crate::worker::invalidator::name_dropped;
use crate::worker::shared::MountShared;

/// Has the kernel forget what is recalled. Does not wait.
pub(crate) fn recalled(shared: &Arc<MountShared>, recall: Recall, done: RecallDone) {
    // All leases ended before this, and with them what the kernel was given.
    let Recall::Items(items) = recall else { return };
    items.iter().for_each(|item| shared.changes.note(item.id));
    let shared = shared.clone();
    dray_rt::spawn(async move {
        for item in &items {
            if item.kinds.contains(LeaseKinds::ATTRIBUTES) {
                drop_attributes(&shared, item.id);
            }
        }
        for item in &items {
            if item.kinds.contains(LeaseKinds::NAMES) {
                drop_names(&shared, item).await;
            }
        }
        settle(&shared, &items).await;
        drop(done);
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
