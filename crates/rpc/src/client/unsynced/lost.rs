//! What becomes of what was not on media when the server's machine lost power: it is sent
//! again, or its loss is told.

use std::sync::atomic::Ordering;
use std::task::{Poll, Waker};

use dray_core::{Context, Errno, Error, FileId, Op, Result};

use super::of_file::{Kept, OfFile};
use super::{Expect, Inherited, Moment, Seen, StampsSeen, State, Unsynced, Writer};
use crate::wire::Ticket;

impl Unsynced {
    pub(super) fn note_alert(&self, state: &State) {
        let lost = state.files.values().any(|file| file.lost > 0);
        let alert = lost || state.recovering || state.inherited == Inherited::Lost;
        self.alert.store(alert, Ordering::SeqCst);
    }

    /// The error of a loss that no sync of this open file has told of. Closes of a descriptor
    /// tell each time: a child process that closes what it inherited must not hear of it in
    /// its parent's place.
    pub(crate) fn owed(&self, id: FileId, writer: &Writer, op: Op) -> Result<()> {
        if !self.alert.load(Ordering::SeqCst) || !writer.wrote.load(Ordering::Relaxed) {
            return Ok(());
        }
        let lost = self.lock().files.get(&id).map_or(0, |file| file.lost);
        let told = match op {
            Op::Sync => writer.told.fetch_max(lost, Ordering::Relaxed),
            _ => writer.told.load(Ordering::Relaxed),
        };
        if lost <= told {
            return Ok(());
        }
        let error = Error::new(Errno::EIO).during(op);
        Err(error.because("what was written and not synced was lost at the server"))
    }

    /// The server itself has told this open file that what was written is not on media.
    pub(crate) fn told(&self, id: FileId, writer: &Writer) {
        if self.alert.load(Ordering::SeqCst) {
            let lost = self.lock().files.get(&id).map_or(0, |file| file.lost);
            writer.told.fetch_max(lost, Ordering::Relaxed);
        }
    }

    /// Whether the close of a descriptor of `id` has something to tell, or may have.
    pub(crate) fn owes(&self, id: FileId) -> bool {
        if !self.alert.load(Ordering::SeqCst) {
            return false;
        }
        let state = self.lock();
        let of_file = state.files.get(&id).is_some_and(|file| file.lost > 0 || state.recovering);
        of_file || state.inherited == Inherited::Lost
    }

    /// Waits until it is known what is lost. Errors: `EINTR` when cancelled.
    pub(crate) async fn decided(&self, cx: &Context) -> Result<()> {
        if !self.alert.load(Ordering::SeqCst) {
            return Ok(());
        }
        std::future::poll_fn(|task| {
            let mut state = self.lock();
            if !state.recovering {
                return Poll::Ready(Ok(()));
            }
            state.waiting.push(task.waker().clone());
            drop(state);
            cx.poll_cancelled(task).map(Err)
        })
        .await
    }

    /// The life of the server's machine.
    pub(crate) fn epoch(&self) -> u64 {
        self.lock().epoch
    }

    /// The server's machine has lost power.
    pub(crate) fn power_lost(&self) {
        let mut state = self.lock();
        state.epoch += 1;
        state.recovering = true;
        state.doubtful = false; // what of it is not on media is sent again, or told
        state.losses.power_lost();
        if state.inherited == Inherited::Unknown {
            state.inherited = Inherited::Lost;
            let what = "what the process before this one wrote and did not sync";
            state.losses.report(None, what, "it was not handed on", 0);
        }
        self.note_alert(&state);
    }

    /// A recovery begins, another one if the last was cut short.
    pub(crate) fn recovery_begins(&self) {
        let mut state = self.lock();
        state.recovering = true;
        state.losses.attempt += 1;
        self.note_alert(&state);
    }

    /// The last stamp seen, the one up to which everything is on media, and those of files
    /// of which more is.
    pub(crate) fn stamps_seen(&self) -> Seen {
        let state = self.lock();
        let StampsSeen { newest, floor, floors } = &state.stamps;
        let floors = floors.iter().map(|(file, (stamp, ticket))| (*file, *stamp, *ticket));
        Seen { newest: *newest, floor: *floor, floors: floors.collect() }
    }

    /// With which a file can be opened to make its changes again.
    pub(crate) fn ticket(&self, id: FileId) -> Option<Ticket> {
        self.lock().files.get(&id)?.ticket
    }

    /// Files with changes that are older than the loss of power and have not been sent.
    pub(crate) fn files_to_send(&self) -> Vec<FileId> {
        let state = self.lock();
        let waits = |file: &OfFile| file.changes.iter().any(|one| state.to_send(one));
        state.files.iter().filter(|(_, file)| waits(file)).map(|(id, _)| *id).collect()
    }

    /// The first such change of a file from the one with this index on, and its index.
    /// Changes that come late can be before it: they are found by another look at all.
    pub(crate) fn next_to_send(&self, id: FileId, from: usize) -> Option<(usize, Kept)> {
        let state = self.lock();
        let changes = &state.files.get(&id)?.changes;
        let mut rest = changes.iter().enumerate().skip(from);
        rest.find(|(_, one)| state.to_send(one)).map(|(index, kept)| (index, kept.clone()))
    }

    /// It has been sent again, and made; it was the one with this index.
    pub(crate) fn sent(&self, id: FileId, index: usize, kept: &Kept) {
        let mut state = self.lock();
        let attempt = state.losses.attempt;
        let same = |one: &Kept| one.stamp == kept.stamp && one.change == kept.change;
        if let Some(file) = state.files.get_mut(&id) {
            // Others may have come or gone meanwhile.
            let index = match file.changes.get(index) {
                Some(one) if same(one) => Some(index),
                _ => file.changes.iter().position(same),
            };
            let one = index.and_then(|index| file.changes.get_mut(index));
            one.into_iter().for_each(|one| one.sent = attempt);
        }
        state.losses.sent(kept.data_bytes());
    }

    /// Names that were changed before the loss of power.
    pub(crate) fn names_to_check(&self) -> Vec<(FileId, Vec<u8>, Expect)> {
        let state = self.lock();
        state.names.before(state.epoch)
    }

    /// A name is not as it was made.
    pub(crate) fn name_lost(&self, dir: FileId, name: &[u8], why: &str) {
        let mut state = self.lock();
        state.names.forget(dir, name);
        let what = format!("the change of the name {}", name.escape_ascii());
        state.losses.report(Some(dir), &what, why, 0);
    }

    /// What of a file could not be made again is lost.
    pub(crate) fn file_lost(&self, id: FileId, why: &str) {
        let mut state = self.lock();
        state.lose(id, why, true);
        self.note_alert(&state);
    }

    /// A file is not there any more; that is a loss unless it had been removed.
    pub(crate) fn file_gone(&self, id: FileId) {
        let mut state = self.lock();
        let state = &mut *state;
        if let Some(file) = state.files.get_mut(&id)
            && file.removed
            && file.writers == 0
        {
            state.kept_bytes -= file.forget(u64::MAX);
            state.files.remove(&id);
            return;
        }
        state.lose(id, "the file is not there any more", true);
        self.note_alert(state);
    }

    /// Everything from before the loss of power that was not sent again is lost: it could
    /// not be kept, or the server takes no more. `why` is for those that were kept.
    pub(crate) fn recovery_ends(&self, why: Option<&str>) {
        let mut state = self.lock();
        let epoch = state.epoch;
        let old = |at: &Moment| at.epoch < epoch;
        let lost: Vec<_> = state
            .files
            .iter()
            .filter_map(|(id, file)| match why {
                Some(why) if file.changes.iter().any(|one| one.epoch < epoch) => Some((*id, why)),
                _ if file.unkept.as_ref().is_some_and(old) => Some((*id, "it was not kept")),
                _ => None,
            })
            .collect();
        lost.into_iter().for_each(|(id, text)| state.lose(id, text, why.is_some()));
        if state.beyond.as_ref().is_some_and(old) {
            state.beyond = None;
            state.losses.report(None, "changes of further files", "they were not noted", 0);
        }
        if let Some(why) = why {
            let lost = state.names.lose_before(epoch);
            if lost > 0 {
                state.losses.report(None, &format!("{lost} changes of names"), why, 0);
            }
        }
        state.recovering = false;
        self.note_alert(&state);
        let waiting = std::mem::take(&mut state.waiting);
        state.tender.call(false, true);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }
}

impl Unsynced {
    /// Losses that the server has not been told of, and their bytes.
    pub(crate) fn losses_untold(&self) -> (u64, u64) {
        self.lock().losses.untold()
    }

    /// It has been told of these.
    pub(crate) fn losses_told(&self, told: (u64, u64)) {
        self.lock().losses.told(told);
    }
}

impl State {
    fn to_send(&self, kept: &Kept) -> bool {
        kept.epoch < self.epoch && kept.sent < self.losses.attempt
    }

    /// What of `id` is from before the loss of power is lost: what was not kept, and, if
    /// `kept_too`, what was.
    pub(super) fn lose(&mut self, id: FileId, why: &str, kept_too: bool) {
        let Some(file) = self.files.get_mut(&id) else { return };
        let (lost_bytes, freed_bytes) = file.lose(self.epoch, kept_too);
        self.kept_bytes -= freed_bytes;
        let number = self.losses.report(Some(id), "changes of a file", why, lost_bytes);
        if file.writers > 0 {
            file.lost = number;
        } else if file.is_done() {
            self.files.remove(&id);
        }
    }
}
