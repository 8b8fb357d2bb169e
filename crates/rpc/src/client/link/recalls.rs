//! Recalls of leases: how they come, and how the server hears that they are done.

use std::io;
use std::sync::Arc;

use dray_core::{Context, FileId, LeaseKinds, RecallDone, RecallItem};

use super::Link;
use crate::client::channel::Channel;
use crate::wire::{Input, RecallMessage};

impl Link {
    /// A recall has come by `channel`. It is acknowledged there, or by the session's first channel.
    /// Where neither has a connection, the server sends the recall again with the next one.
    pub(super) fn recalled(
        self: &Arc<Link>,
        channel: &Arc<Channel>,
        count: u32,
        mut input: Input<'_>,
    ) -> io::Result<()> {
        let RecallMessage { number, mut items } = RecallMessage::get(count, &mut input)?;
        let session_state = channel.session_state();
        let channels = [Some(Arc::downgrade(channel)), self.first.get().cloned()];
        let done = RecallDone::new(move || {
            let mut channels = channels.iter().flatten().filter_map(|channel| channel.upgrade());
            channels.any(|channel| channel.acknowledge_recall(number, session_state));
        });
        self.leases.recalled(&items);
        let kept = self.kept.recalled(&items);
        let locks = self.recall_locks(channel, &mut items);
        if kept.is_empty() && locks.is_empty() {
            self.leases.pass_on(items, done);
            return Ok(()); // nearly always
        }
        let (leases, held) = (self.leases.clone(), self.held.clone());
        dray_rt::spawn(async move {
            for id in locks {
                let _ = held.lock_lease_back(&Context::system(), id).await; // nobody gives up
            }
            for file in kept {
                file.settle().await;
            }
            leases.pass_on(items, done);
        });
        Ok(())
    }

    /// Takes out what concerns locks, and begins to give these leases back. No front end has to hear of it.
    fn recall_locks(
        self: &Arc<Link>,
        channel: &Arc<Channel>,
        items: &mut Vec<RecallItem>,
    ) -> Vec<FileId> {
        let locks = items.iter().filter(|item| item.kinds.contains(LeaseKinds::LOCKS));
        let locks: Vec<_> = locks.map(|item| item.id).collect();
        items.iter_mut().for_each(|item| item.kinds = item.kinds.without(LeaseKinds::LOCKS));
        items.retain(|item| !item.kinds.is_empty());
        for id in &locks {
            self.give_back_lock_lease(self.lasting(channel), *id);
        }
        locks
    }
}
