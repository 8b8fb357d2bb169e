//! Files that an earlier process of a client had open and the present one has no use for.

use std::ops::Range;
use std::sync::Arc;

use dray_core::Context;

use super::ServerSession;
use crate::server::as_server;

impl ServerSession {
    /// Closes the open files with numbers in this range, and gives back the locks that were taken
    /// through them alone. Calls that came by connections that are gone, and still open such files,
    /// come first. Ends early where `connection` goes: its client says it again on the next one.
    pub(crate) async fn release(self: Arc<ServerSession>, connection: u64, handles: Range<u64>) {
        // A range from the network may be none.
        if handles.is_empty() || self.unslotted(connection, None).await.is_none() {
            return;
        }
        let cx = Context { holder: self.holder(), ..as_server::of_nobody() };
        for handle in self.handles_within(&handles) {
            let Some(_unslotted) = self.unslotted(connection, Some(handle)).await else { return };
            if let Some(file) = self.take_file(handle) {
                let _ = self.close_file(&cx, handle, &*file).await; // there is no caller to report to
            }
        }
    }

    /// Open files and those that are being opened, by their numbers.
    fn handles_within(&self, range: &Range<u64>) -> Vec<u64> {
        let opening: Vec<u64> =
            self.state().opening.range(range.clone()).map(|(one, _)| *one).collect();
        let mut handles = opening;
        handles.extend(self.files().keys().filter(|one| range.contains(one)));
        handles.sort_unstable();
        handles.dedup();
        handles
    }
}
