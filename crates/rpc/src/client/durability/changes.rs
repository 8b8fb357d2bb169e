//! Changes as they are answered, and as they come to be on media.

use std::sync::atomic::Ordering;

use dray_core::{Buf, FileId};

use super::copies::DataCopy;
use super::file_changes::{CHANGE_BYTES, FileChanges};
use super::{
    Change, Confirmation, DurableStamp, ExpectedName, FILES_MAX, FileChange, InheritedChanges,
    KeptChange, LoggedWriter, NameChange, SCARCE_PART, SYNCED_FILES_MAX, State, Ticket,
    URGENT_PART, UnsyncedLog,
};

/// The treatment of a change.
enum Plan {
    Keep(Change, Option<DataCopy>),
    /// The change cannot be repeated.
    Note,
    /// There is no room for it.
    Overflow,
}

/// The clients for whom the sync that is over was made.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum SyncedFor {
    ThisClient,
    OtherClients,
}

impl UnsyncedLog {
    /// A change of a file was answered; it was made through `writer`, if through an open file.
    pub(crate) fn change_answered(&self, new: FileChange<'_>, writer: Option<&LoggedWriter>) {
        if new.is_durable && self.limit_bytes == 0 {
            return;
        }
        let plan = self.plan(&new);
        let mut state = self.lock();
        let start = self.note_change(&mut state, new, writer, plan);
        drop(state);
        self.start_scheduler_if(start);
    }

    /// True if a scheduler has to be started.
    fn note_change(
        &self,
        state: &mut State,
        new: FileChange<'_>,
        writer: Option<&LoggedWriter>,
        plan: Plan,
    ) -> bool {
        let (id, Confirmation { stamp, ticket }) = (new.file, new.confirmation);
        state.see(stamp);
        let room = state.files.len() < FILES_MAX || state.files.contains_key(&id);
        if !room && writer.is_none_or(|writer| !writer.wrote.load(Ordering::Relaxed)) {
            if new.is_durable {
                return false;
            }
            state.unnoted = Some(stamp);
            return state.requests.request(false, true);
        }
        let file = state.files.entry(id).or_default();
        file.add_ticket(ticket);
        if let Some(writer) = writer
            && !writer.wrote.swap(true, Ordering::Relaxed)
        {
            file.writers += 1;
            writer.reported.store(file.loss, Ordering::Relaxed);
        }
        let (added_bytes, freed_bytes) = carry_out(plan, file, &new);
        state.kept_bytes = state.kept_bytes + added_bytes - freed_bytes;
        if stamp.is_before(state.power_epoch) && !state.replaying {
            // The machine has lost power since its answer, and it is too late for the replay.
            state.lose(id, "it was answered just before the loss of power", true);
            self.update_alert(state);
        }
        // Where nothing is kept, a sync makes no room.
        let urgent = self.limit_bytes > 0 && self.is_urgent(state);
        state.requests.request(urgent, false)
    }

    fn is_urgent(&self, state: &State) -> bool {
        let much_bytes = self.limit_bytes / URGENT_PART;
        state.kept_bytes > much_bytes
            || state.kept_bytes > much_bytes / SCARCE_PART && self.copies.is_scarce()
    }

    /// The treatment of a change, by its kind and by the room that is left. The data are copied
    /// here, without the lock.
    fn plan(&self, new: &FileChange<'_>) -> Plan {
        let stamped = new.confirmation.stamp.number > 0;
        let Some(change) = new.change.filter(|_| stamped) else { return Plan::Note };
        // The data may end up in two pieces.
        let cost_bytes = new.data.len() as u64 + 2 * CHANGE_BYTES;
        if !self.admits(new.file, cost_bytes) {
            return Plan::Overflow;
        }
        if new.data.is_empty() {
            return Plan::Keep(change, None);
        }
        match self.copies.copy(new.data) {
            Some(copied) => Plan::Keep(change, Some(copied)),
            None => Plan::Overflow,
        }
    }

    /// Whether there is room for another change of a file. Each file may take as much as it leaves
    /// to the others, so that a stream does not push all others out. These are dynamic thresholds
    /// with alpha 1, as in `dray_fabric::BufferPool`. Of a file that has overflowed nothing more is
    /// kept until a sync: a loss of it would be reported anyway.
    fn admits(&self, id: FileId, cost_bytes: u64) -> bool {
        if self.limit_bytes == 0 {
            return false;
        }
        let state = self.lock();
        let free_bytes = self.limit_bytes.saturating_sub(state.kept_bytes);
        let (kept_bytes, overflowed) = match state.files.get(&id) {
            Some(file) => (file.kept_bytes, file.overflowed),
            None => (0, false),
        };
        !overflowed && kept_bytes + cost_bytes <= free_bytes
    }

    /// A change of a name was answered.
    pub(crate) fn name_answered(&self, new: NameChange<'_>) {
        let NameChange { dir, name, stamp, expected } = new;
        let mut state = self.lock();
        state.see(stamp);
        let (before, room) = state.names.note((dir, name), stamp, expected);
        if let Some(ExpectedName::File(id)) = before
            && expected != ExpectedName::File(id)
            && let Some(file) = state.files.get_mut(&id)
        {
            file.removed = true;
        }
        if !room {
            state.unnoted = Some(stamp);
        }
        let many = !room || state.names.crowded();
        let start = state.requests.request(false, many);
        drop(state);
        self.start_scheduler_if(start);
    }

    /// The expected state of a name that was changed lately.
    pub(crate) fn expected_name(&self, dir: FileId, name: &[u8]) -> Option<ExpectedName> {
        self.lock().names.expected(dir, name)
    }

    /// A sync of `id` was answered: everything of it up to the stamp is on media.
    pub(crate) fn sync_answered(&self, id: FileId, answer: Confirmation) {
        let Confirmation { stamp, ticket } = answer;
        let mut state = self.lock();
        state.forget_file(id, stamp.number);
        state.names.forget_in(id, stamp.number);
        if stamp.number == 0 {
            return;
        }
        state.see(stamp);
        state.durable.files.insert(id, DurableStamp { number: stamp.number, ticket });
        let many = state.durable.files.len() >= SYNCED_FILES_MAX;
        let urgent = self.is_urgent(&state);
        state.relax(urgent);
        let start = many && state.requests.request(false, true);
        drop(state);
        self.start_scheduler_if(start);
    }

    /// Everything up to `stamp` is on media, says the server, with `ticket`. The log does not
    /// believe it while it is not known what a failed sync has left out. The server's kernel
    /// reports a failure once, and the next sync succeeds.
    pub(crate) fn durable_up_to(&self, stamp: u64, ticket: Option<Ticket>, synced: SyncedFor) {
        let mut state = self.lock();
        let state = &mut *state;
        if state.sync_failed {
            return;
        }
        let mut freed_bytes = 0;
        state.files.retain(|_, file| {
            freed_bytes += file.forget(stamp);
            !file.is_done()
        });
        state.kept_bytes -= freed_bytes;
        state.names.forget_all(stamp);
        state.unnoted = state.unnoted.filter(|last| last.number > stamp);
        if stamp > state.durable.all.number {
            state.durable.all = DurableStamp { number: stamp, ticket };
        }
        state.durable.files.retain(|_, file| file.number > stamp);
        match (synced, state.inherited) {
            (SyncedFor::ThisClient, InheritedChanges::Unknown) => {
                state.inherited = InheritedChanges::None;
            }
            (SyncedFor::ThisClient, InheritedChanges::None | InheritedChanges::Lost)
            | (SyncedFor::OtherClients, InheritedChanges::Unknown) => {}
            (SyncedFor::OtherClients, InheritedChanges::None | InheritedChanges::Lost) => {
                state.synced_by_others = Some(dray_rt::now());
            }
        }
        let urgent = self.is_urgent(state);
        state.relax(urgent);
    }
}

/// Keeps a change of a file, or notes that it is not kept. Answers the bytes of kept changes that
/// were added and freed.
fn carry_out(plan: Plan, file: &mut FileChanges, new: &FileChange<'_>) -> (u64, u64) {
    let (stamp, bytes) = (new.confirmation.stamp, new.data.len() as u64);
    let (mut added_bytes, mut freed_bytes) = (0, 0);
    match plan {
        Plan::Keep(change, copied) => {
            for (change, data) in pieces(change, copied) {
                let (who, is_durable) = (new.who.clone(), new.is_durable);
                let kept = KeptChange { stamp, change, data, who, is_durable, replayed_in: 0 };
                added_bytes += file.keep(kept);
            }
        }
        // Nothing of a durable change is lost, unless a replay repeats an older one over it.
        Plan::Note | Plan::Overflow if new.is_durable => {
            freed_bytes = file.forget_durable();
            if file.kept_bytes > 0 {
                file.note(stamp, bytes, true);
            }
        }
        Plan::Note => file.note(stamp, bytes, false),
        Plan::Overflow => file.note(stamp, bytes, true),
    }
    (added_bytes, freed_bytes)
}

impl State {
    /// Everything of a file up to stamp `durable` is on media.
    fn forget_file(&mut self, id: FileId, durable: u64) {
        if let Some(file) = self.files.get_mut(&id) {
            self.kept_bytes -= file.forget(durable);
            if file.is_done() {
                self.files.remove(&id);
            }
        }
    }
}

/// A write whose data did not fit into one segment is kept as two.
fn pieces(change: Change, copied: Option<DataCopy>) -> impl Iterator<Item = (Change, Option<Buf>)> {
    let (first, rest) = match copied {
        Some((first, rest)) => (Some(first), rest),
        None => (None, None),
    };
    let behind_bytes = first.as_deref().map_or(0, <[u8]>::len) as u64;
    let behind = rest.map(|rest| match change {
        Change::Write { at } => (Change::Write { at: at + behind_bytes }, Some(rest)),
        other @ (Change::Size { .. } | Change::Allocate { .. } | Change::Attr(_)) => {
            (other, Some(rest))
        }
    });
    std::iter::once((change, first)).chain(behind)
}
