//! The audit of an export, where one was asked for.

use std::sync::Arc;

use dray_core::FileSystem;
use dray_layers::Observer;

use super::MaybeObserver;
use crate::serve::audit;
use crate::serve::opening::ExportOpener;

pub(super) fn observer(export: &ExportOpener, fs: &Arc<dyn FileSystem>) -> MaybeObserver {
    let state = export.with_state(|state| state.dir().to_owned())?;
    let audit = audit::open(&export.plan.audit, &export.plan.name, &state, fs.clone())?;
    export.exported.is_audited(audit.as_ref());
    Ok(audit.map(|audit| audit as Arc<dyn Observer>))
}
