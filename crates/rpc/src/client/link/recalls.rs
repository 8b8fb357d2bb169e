//! Recalls of leases: how they come, and how the server hears that they are done.

use std::io;
use std::sync::Arc;

use dray_core::RecallDone;

use super::Link;
use crate::client::channel::Channel;
use crate::wire::{Input, RecallMessage};

impl Link {
    /// A recall has come by `channel`. It is acknowledged there, or by the session's first channel.
    /// Where neither has a connection, the server sends the recall again with the next one.
    pub(super) fn recalled(
        &self,
        channel: &Arc<Channel>,
        count: u32,
        mut input: Input<'_>,
    ) -> io::Result<()> {
        let RecallMessage { number, items } = RecallMessage::get(count, &mut input)?;
        let session_state = channel.session_state();
        let channels = [Some(Arc::downgrade(channel)), self.first.get().cloned()];
        let done = RecallDone::new(move || {
            let mut channels = channels.iter().flatten().filter_map(|channel| channel.upgrade());
            channels.any(|channel| channel.acknowledge_recall(number, session_state));
        });
        self.leases.recalled(&items);
        let kept = self.kept.recalled(&items);
        if kept.is_empty() {
            self.leases.pass_on(items, done);
            return Ok(()); // nearly always
        }
        let leases = self.leases.clone();
        dray_rt::spawn(async move {
            for file in kept {
                file.settle().await;
            }
            leases.pass_on(items, done);
        });
        Ok(())
    }
}
