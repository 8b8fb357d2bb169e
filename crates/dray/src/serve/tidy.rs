//! Sees to exports that rest: descriptors of inodes used lately are closed, so that the space of
//! files that somebody removes beside the server becomes free.

use std::sync::Arc;
use std::time::Duration;

use crate::serve::exported::Exported;

/// How often; descriptors are kept for as long without use.
const TIDY_EVERY: Duration = Duration::from_secs(10);

/// Tidies an export for ever. One whose file system hangs waits for that, and no other does.
pub async fn keep(export: Arc<Exported>) {
    loop {
        dray_rt::sleep(TIDY_EVERY).await;
        if let Some(fs) = export.fs() {
            fs.tidy().await;
        }
    }
}
