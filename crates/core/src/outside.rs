//! Changes outside dray: by programs at the server, and by other clients of a shared file system.

use crate::{FileId, LeaseKinds};

/// A file that was changed outside dray.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutsideChange {
    /// The file, or the directory.
    pub id: FileId,
    /// The leases that hold no more.
    pub kinds: LeaseKinds,
}

/// Is notified of changes outside dray of the files of one export, by what serves the export. The methods must
/// not wait, and are called on a thread that has no executor.
pub trait OnOutsideChanges: Send + Sync {
    /// These files were changed a moment ago. Each is there once.
    fn changed(&self, changes: &[OutsideChange]);

    /// Changes were missed: any file may have changed, and any name.
    fn missed(&self);
}
