//! Changes by other clients to files that are open here. The server notifies a client that caches.

use std::io;
use std::sync::OnceLock;

use dray_core::HearChanges;

use super::Link;
use crate::wire::{Input, get_changed};

/// The listener for changes, if there is one.
#[derive(Default)]
pub(super) struct ChangeListener(OnceLock<HearChanges>);

impl Link {
    /// The first one stays.
    pub(crate) fn hear_changes_by(&self, hear: HearChanges) {
        let _ = self.changes.0.set(hear); // as it says
    }

    pub(super) fn others_changed(&self, count: u32, mut input: Input<'_>) -> io::Result<()> {
        let files = get_changed(count, &mut input)?;
        if let Some(hear) = self.changes.0.get() {
            hear(files);
        }
        Ok(())
    }
}
