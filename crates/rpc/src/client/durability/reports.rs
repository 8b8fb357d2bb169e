//! Losses, as open files report them: an error at the next sync, and at each close until then.

use std::sync::atomic::Ordering;
use std::task::Poll;

use dray_core::{Context, Errno, Error, FileId, Op, Result};

use super::{InheritedChanges, LoggedWriter, State, UnsyncedLog};

impl UnsyncedLog {
    /// A file is open and was written by a process before this one.
    pub(crate) fn writer_inherited(&self, writer: &LoggedWriter) {
        let mut state = self.lock();
        let lost = state.inherited == InheritedChanges::Lost;
        let number = state.losses.number();
        let file = state.files.entry(writer.file).or_default();
        file.writers += 1;
        writer.wrote.store(true, Ordering::Relaxed);
        if lost {
            file.loss = number;
            self.update_alert(&state);
        }
    }

    /// An open file is closed. To say so twice does no harm.
    pub(crate) fn writer_closed(&self, writer: &LoggedWriter) {
        if !writer.wrote.swap(false, Ordering::Relaxed) {
            return;
        }
        let mut state = self.lock();
        if let Some(file) = state.files.get_mut(&writer.file) {
            file.writers = file.writers.saturating_sub(1);
            if file.writers == 0 {
                file.loss = 0;
            }
            if file.is_done() {
                state.files.remove(&writer.file);
            }
        }
        if self.alert.load(Ordering::Relaxed) {
            self.update_alert(&state);
        }
    }

    /// Fails if a loss is to be reported through this open file. Errors: `EIO`, for a loss that no
    /// sync through it has reported. A sync reports a loss once. Closes report a loss each time: a
    /// child process that closes an inherited descriptor must not take the report from its parent.
    pub(crate) fn loss_to_report(&self, writer: &LoggedWriter, op: Op) -> Result<()> {
        if !self.alert.load(Ordering::SeqCst) || !writer.wrote.load(Ordering::Relaxed) {
            return Ok(());
        }
        let loss = self.lock().files.get(&writer.file).map_or(0, |file| file.loss);
        let reported = match op == Op::Sync {
            true => writer.reported.fetch_max(loss, Ordering::Relaxed),
            false => writer.reported.load(Ordering::Relaxed),
        };
        if loss <= reported {
            return Ok(());
        }
        let error = Error::new(Errno::EIO).during(op);
        Err(error.because("what was written and not synced was lost at the server"))
    }

    /// The server itself has reported to this open file that its changes are not on media.
    pub(crate) fn loss_reported_by_server(&self, writer: &LoggedWriter) {
        if self.alert.load(Ordering::SeqCst) {
            let loss = self.lock().files.get(&writer.file).map_or(0, |file| file.loss);
            writer.reported.fetch_max(loss, Ordering::Relaxed);
        }
    }

    /// Whether the close of a descriptor of `id` has a loss to report, or may have.
    pub(crate) fn may_report_loss(&self, id: FileId) -> bool {
        if !self.alert.load(Ordering::SeqCst) {
            return false;
        }
        let state = self.lock();
        let of_file = state.files.get(&id).is_some_and(|file| file.loss > 0 || state.replaying);
        of_file || state.inherited == InheritedChanges::Lost
    }

    /// Whether changes of `id` may not be on media.
    pub(crate) fn has_changes_of(&self, id: FileId) -> bool {
        self.lock().files.get(&id).is_some_and(|file| !file.is_clean())
    }

    /// Waits for the end of a replay: only then it is known what is lost. Errors: `EINTR` when
    /// cancelled.
    pub(crate) async fn losses_known(&self, cx: &Context) -> Result<()> {
        if !self.alert.load(Ordering::SeqCst) {
            return Ok(());
        }
        std::future::poll_fn(|task| {
            let mut state = self.lock();
            if !state.replaying {
                return Poll::Ready(Ok(()));
            }
            state.waiting.push(task.waker().clone());
            drop(state);
            cx.poll_cancelled(task).map(Err)
        })
        .await
    }

    /// Losses that the server does not know of, and their bytes.
    pub(crate) fn unreported_losses(&self) -> (u64, u64) {
        self.lock().losses.unreported()
    }

    /// The losses with these numbers were reported to the server.
    pub(crate) fn losses_reported(&self, losses: (u64, u64)) {
        self.lock().losses.reported(losses);
    }

    /// To be called when something was lost, or a replay begins or ends.
    pub(super) fn update_alert(&self, state: &State) {
        let lost = state.files.values().any(|file| file.loss > 0);
        let alert = lost || state.replaying || state.inherited == InheritedChanges::Lost;
        self.alert.store(alert, Ordering::SeqCst);
    }
}

impl State {
    /// The changes of `id` from before the loss of power are lost: those not kept, and, with
    /// `kept_too`, the kept ones.
    pub(super) fn lose(&mut self, id: FileId, why: &str, kept_too: bool) {
        let Some(file) = self.files.get_mut(&id) else { return };
        let (lost_bytes, freed_bytes) = file.lose(self.power_epoch, kept_too);
        self.kept_bytes -= freed_bytes;
        let number = self.losses.report(Some(id), "changes of a file", why, lost_bytes);
        if file.writers > 0 {
            file.loss = number;
        } else if file.is_done() {
            self.files.remove(&id);
        }
    }
}
