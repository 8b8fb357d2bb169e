//! Looks whether the file systems below answer, and says so when one does not.

use std::time::Duration;

use dray_backends::posix::Hang;

use crate::report::{ExportReport, ServerReport};

/// A file system that has not answered a call for this long is said to hang.
const HANG_AFTER: Duration = Duration::from_secs(5);

/// How often that is looked at: the server's only wake-up while it is idle.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// What is known of the file system below `export`, if it hangs.
pub fn of(export: &ExportReport) -> Option<Hang> {
    export.fs.hang(HANG_AFTER)
}

/// Logs each beginning and each end of a hang, for ever.
pub async fn watch(report: &ServerReport) {
    let mut hanging = vec![None; report.exports.len()];
    loop {
        for (export, known) in report.exports.iter().zip(&mut hanging) {
            let now = of(export);
            tell(export, *known, now);
            *known = now;
        }
        dray_rt::sleep(LOOK_EVERY).await;
    }
}

fn tell(export: &ExportReport, before: Option<Hang>, now: Option<Hang>) {
    let (name, dir) = (&export.name, &export.dir);
    match (before, now) {
        (None, Some(hang)) => log::error!(
            "export `{name}` hangs: calls stuck in the file system below {dir}: {1}, the first for \
             {0} s; other exports go on, and this one does so once its file system answers",
            hang.since.as_secs(),
            hang.calls,
        ),
        (Some(hang), None) => {
            log::warn!("export `{name}` goes on after more than {} s", hang.since.as_secs());
        }
        _ => {}
    }
}
