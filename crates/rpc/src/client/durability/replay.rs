//! The replay after a loss of power at the server's machine. This module decides which changes are
//! sent again, in which order, and what is lost at its end.

use std::sync::atomic::Ordering;
use std::task::Waker;

use dray_core::FileId;

use super::{
    ChangeStamp, DurableStamps, ExpectedName, FileChanges, InheritedChanges, KeptChange, State,
    Ticket, UnsyncedLog,
};

impl UnsyncedLog {
    /// The server's machine has lost power. From now on no sync succeeds until the replay ends.
    pub(crate) fn server_lost_power(&self) {
        let mut state = self.lock();
        state.power_epoch += 1;
        self.power_epoch.store(state.power_epoch, Ordering::SeqCst);
        state.replaying = true;
        state.sync_failed = false; // what that left out is replayed, or reported
        state.losses.power_lost();
        if state.inherited == InheritedChanges::Unknown {
            state.inherited = InheritedChanges::Lost;
            let what = "what the process before this one wrote and did not sync";
            state.losses.report(None, what, "it was not handed on", 0);
        }
        self.update_alert(&state);
    }

    /// A replay begins; another one if the last was cut short.
    pub(crate) fn replay_begins(&self) {
        let mut state = self.lock();
        state.replaying = true;
        state.losses.replays += 1;
        self.update_alert(&state);
    }

    /// The changes that this client knows to be on media.
    pub(crate) fn durable_stamps(&self) -> DurableStamps {
        self.lock().durable.clone()
    }

    /// The ticket with which a file can be opened to repeat its changes.
    pub(crate) fn ticket(&self, id: FileId) -> Option<Ticket> {
        self.lock().files.get(&id)?.ticket
    }

    /// Files with kept changes that are older than the loss of power and were not sent again.
    pub(crate) fn files_to_replay(&self) -> Vec<FileId> {
        let state = self.lock();
        let waits = |file: &FileChanges| file.kept.iter().any(|one| state.is_to_replay(one));
        state.files.iter().filter(|(_, file)| waits(file)).map(|(id, _)| *id).collect()
    }

    /// The first such change of a file from the one with this index on, and its index. Changes
    /// that come late can be before that index: the next [`UnsyncedLog::files_to_replay`] finds
    /// them.
    pub(crate) fn next_to_replay(&self, id: FileId, from: usize) -> Option<(usize, KeptChange)> {
        let state = self.lock();
        let kept = &state.files.get(&id)?.kept;
        let mut rest = kept.iter().enumerate().skip(from);
        rest.find(|(_, one)| state.is_to_replay(one)).map(|(index, kept)| (index, kept.clone()))
    }

    /// A change, which had this index, has been sent again and made.
    pub(crate) fn replayed(&self, id: FileId, index: usize, kept: &KeptChange) {
        let mut state = self.lock();
        let replay = state.losses.replays;
        let same = |one: &KeptChange| one.number() == kept.number() && one.change == kept.change;
        if let Some(file) = state.files.get_mut(&id) {
            // Other changes may have come or gone meanwhile.
            let index = match file.kept.get(index) {
                Some(one) if same(one) => Some(index),
                _ => file.kept.iter().position(same),
            };
            let one = index.and_then(|index| file.kept.get_mut(index));
            one.into_iter().for_each(|one| one.replayed_in = replay);
        }
        state.losses.replayed(kept.data_bytes());
    }

    /// Names that were changed before the loss of power.
    pub(crate) fn names_to_verify(&self) -> Vec<(FileId, Vec<u8>, ExpectedName)> {
        let state = self.lock();
        state.names.before(state.power_epoch)
    }

    /// A name is not as its last change left it.
    pub(crate) fn name_lost(&self, dir: FileId, name: &[u8], why: &str) {
        let mut state = self.lock();
        state.names.forget(dir, name);
        let what = format!("the change of the name {}", name.escape_ascii());
        state.losses.report(Some(dir), &what, why, 0);
    }

    /// The changes of a file that could not be repeated are lost.
    pub(crate) fn file_lost(&self, id: FileId, why: &str) {
        let mut state = self.lock();
        state.lose(id, why, true);
        self.update_alert(&state);
    }

    /// A file does not exist any more. That is a loss unless it had been removed.
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
        state.lose(id, "the file does not exist any more", true);
        self.update_alert(state);
    }

    /// The replay is over. Everything from before the loss of power that was not sent again is
    /// lost. It was not kept, or the server takes no more, for the reason `why`.
    pub(crate) fn replay_ends(&self, why: Option<&str>) {
        let mut state = self.lock();
        let lost = state.lost_files(why);
        lost.into_iter().for_each(|(id, text)| state.lose(id, text, why.is_some()));
        state.lose_unnoted(why);
        state.replaying = false;
        self.update_alert(&state);
        let waiting = std::mem::take(&mut state.waiting);
        let start = state.request_sync_unless_clean();
        drop(state);
        self.start_scheduler_if(start);
        waiting.into_iter().for_each(Waker::wake);
    }
}

impl State {
    fn is_to_replay(&self, kept: &KeptChange) -> bool {
        kept.stamp.is_before(self.power_epoch) && kept.replayed_in < self.losses.replays
    }

    /// Files with lost changes at the end of a replay, and why they are lost.
    fn lost_files<'a>(&self, why: Option<&'a str>) -> Vec<(FileId, &'a str)> {
        let old = |stamp: &ChangeStamp| stamp.is_before(self.power_epoch);
        let files = self.files.iter().filter_map(|(id, file)| match why {
            Some(why) if file.kept.iter().any(|one| old(&one.stamp)) => Some((*id, why)),
            _ if file.unkept.as_ref().is_some_and(old) => Some((*id, "it was not kept")),
            _ => None,
        });
        files.collect()
    }

    /// The same for what is in no file's list.
    fn lose_unnoted(&mut self, why: Option<&str>) {
        let power_epoch = self.power_epoch;
        if self.unnoted.is_some_and(|last| last.is_before(power_epoch)) {
            self.unnoted = None;
            self.losses.report(None, "changes of further files", "they were not noted", 0);
        }
        if let Some(why) = why {
            let lost = self.names.lose_before(power_epoch);
            if lost > 0 {
                self.losses.report(None, &format!("{lost} changes of names"), why, 0);
            }
        }
    }
}
