//! Checks whether the file systems below answer, and logs it when one does not.

use std::time::Duration;

use dray_backends::backend::Hang;

use crate::serve::export_state::ExportState;
use crate::status::report::ServerReport;

/// How often that is looked at, also while the server is idle.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Logs each beginning and each end of a hang, for ever.
pub async fn watch(report: &ServerReport) {
    let mut hanging = vec![None; report.exports.len()];
    loop {
        for (export, known) in report.exports.iter().zip(&mut hanging) {
            let now = export.hang();
            tell(export, *known, now);
            *known = now;
        }
        dray_rt::sleep(LOOK_EVERY).await;
    }
}

fn tell(export: &ExportState, before: Option<Hang>, now: Option<Hang>) {
    let (name, dir) = (&export.name, export.dir());
    match (before, now) {
        (None, Some(hang)) => log::error!(
            "export `{name}` hangs: calls stuck in the file system below {dir}: {1}, the first for \
             {0} s{2}; other exports are served, and this one when its file system answers",
            hang.since.as_secs(),
            hang.calls,
            export.servers_away().map(|away| format!(" ({away})")).unwrap_or_default(),
        ),
        (Some(hang), None) => {
            log::warn!("export `{name}` answers again after more than {} s", hang.since.as_secs());
        }
        _ => {}
    }
}
