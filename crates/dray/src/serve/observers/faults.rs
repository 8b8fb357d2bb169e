//! Faults on purpose, for tests.

use std::sync::Arc;

use dray_core::FileSystem;
use dray_layers::faults::Faults;

use super::MaybeObserver;
use crate::serve::opening::ExportOpener;

pub(super) fn observer(export: &ExportOpener, _: &Arc<dyn FileSystem>) -> MaybeObserver {
    if !export.faults.is_empty() {
        log::warn!("export `{}` fails on purpose: `faults` is on", export.plan.name);
    }
    Ok(Some(Arc::new(Faults::new(export.faults.clone()))))
}
