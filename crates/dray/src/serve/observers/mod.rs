//! The observers of calls to an export: a file here for each, and a line in the list below.

use std::sync::Arc;

use dray_core::FileSystem;
use dray_layers::Observer;

use crate::error::Failure;
use crate::serve::opening::ExportOpener;

/// What a file's `observer` answers. None: it does not look on at this export.
type MaybeObserver = Result<Option<Arc<dyn Observer>>, Failure>;

/// Declares the files, and asks each for its observer. rustfmt does not see such files by itself:
/// `script/test format` names them.
macro_rules! observers {
    ($($name:ident,)*) => {
        $(mod $name;)*

        /// The observers of an export, whose files are in `fs`. Errors: one of them cannot begin.
        pub(super) fn of(
            export: &ExportOpener,
            fs: &Arc<dyn FileSystem>,
        ) -> Result<Vec<Arc<dyn Observer>>, Failure> {
            let all = [$($name::observer(export, fs)?,)*];
            Ok(all.into_iter().flatten().collect())
        }
    };
}

// They are asked in this order.
observers! {
    faults,
    metrics,
    audit,
}
