//! The metrics of an export, which outlive its file system.

use std::sync::Arc;

use dray_core::FileSystem;

use super::MaybeObserver;
use crate::serve::opening::ExportOpener;

pub(super) fn observer(export: &ExportOpener, _: &Arc<dyn FileSystem>) -> MaybeObserver {
    Ok(Some(export.exported.metrics.clone()))
}
