//! The files that this mount has open at the server. When a new server takes the place of the old
//! one, they are opened again there before other clients can remove them. Each has a ticket, from
//! which the new server knows that the file was open. Tickets are noted for a later process of this
//! mount, too.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use dray_core::{FileId, IdMap, OpenHow};

use crate::client::holdings::aliases::Aliases;
use crate::client::holdings::tickets::{StoredTicket, TicketMemory};
use crate::client::link::SessionState;
use crate::client::memory::SessionMemory;
use crate::wire::Ticket;

/// All open files of a mount, by the numbers that it gave them.
pub(crate) struct OpenFiles {
    tickets: TicketMemory,
    pub(crate) aliases: Aliases,
    state: Mutex<State>,
    /// Tickets that took the place of others so far.
    renewed: AtomicU64,
}

#[derive(Default)]
struct State {
    files: IdMap<u64, OpenFileEntry>,
    tickets: IdMap<u64, StoredTicket>,
    /// The server and session that were shown the files, or will be.
    session_state: SessionState,
    /// Being opened again now.
    opening: Vec<u64>,
    /// A process before us had files open that are not among these so far.
    missing: bool,
    waiting: Vec<Waker>,
}

/// An open file, and how many have it. More than one do when a call of a process before us
/// comes again and answers with a file that has been attached already.
struct OpenFileEntry {
    id: FileId,
    how: OpenHow,
    users: u32,
}

/// A file is being opened again; in the end it no longer is.
pub(crate) struct ReopenGuard<'a> {
    files: &'a OpenFiles,
    handle: u64,
    pub(crate) id: FileId,
    pub(crate) how: OpenHow,
}

impl OpenFiles {
    /// With the tickets that a process before us noted in `memory`. `successor`: of a process
    /// whose files will be attached.
    pub(crate) fn new(memory: Arc<SessionMemory>, successor: bool) -> OpenFiles {
        let aliases = Aliases::new(memory.clone());
        let (tickets, noted) = TicketMemory::new(memory);
        let state = State { tickets: noted, missing: successor, ..State::default() };
        OpenFiles { tickets, aliases, state: Mutex::new(state), renewed: AtomicU64::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The server that they are open at from now on: what it does not know of is opened again
    /// there.
    pub(crate) fn begin(&self, session_state: SessionState) {
        self.lock().session_state = session_state;
    }

    /// Whether what was opened in `session_state`, and is noted here, is open now or will be
    /// without further ado. Not if another epoch of the server has been met before that was heard
    /// of.
    pub(crate) fn is_at(&self, session_state: SessionState) -> bool {
        self.lock().session_state == session_state
    }

    /// The files that a process before us had open are among them.
    pub(crate) fn complete(&self) {
        let mut state = self.lock();
        state.missing = false;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Waits until what a process before us had open is among them.
    pub(crate) async fn completed(&self) {
        std::future::poll_fn(|task| {
            let mut state = self.lock();
            if !state.missing {
                return Poll::Ready(());
            }
            if !state.waiting.iter().any(|waiting| waiting.will_wake(task.waker())) {
                state.waiting.push(task.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }

    /// A caller has the file from now on, until [`OpenFiles::leave`]. `ticket`: out of the answer;
    /// none of a file that a process before us opened.
    pub(crate) fn opened(&self, handle: u64, id: FileId, how: OpenHow, ticket: Option<Ticket>) {
        let how = OpenHow::new(how.flags & !(libc::O_TRUNC | libc::O_CREAT | libc::O_EXCL));
        let mut state = self.lock();
        let users = state.files.get(&handle).map_or(0, |known| known.users) + 1;
        state.files.insert(handle, OpenFileEntry { id, how, users });
        if let Some(ticket) = ticket
            && let Some(before) = state.tickets.insert(handle, self.tickets.note(handle, ticket))
        {
            self.tickets.forget(before);
        }
    }

    /// A user of the file is done. True if it was the last: only then may the file be closed.
    pub(crate) fn leave(&self, handle: u64) -> bool {
        let mut state = self.lock();
        let Some(known) = state.files.get_mut(&handle) else { return true };
        known.users = known.users.saturating_sub(1);
        known.users == 0
    }

    /// The ticket that a new server is to be shown.
    pub(crate) fn ticket(&self, handle: u64) -> Option<Ticket> {
        self.lock().tickets.get(&handle).map(|noted| noted.ticket)
    }

    /// How many tickets have taken the place of others so far: while that is the same, nobody's
    /// has changed.
    pub(crate) fn renewed(&self) -> u64 {
        self.renewed.load(Ordering::Relaxed)
    }

    /// A server gave another ticket for a file that is still open: that of its former epoch
    /// runs out.
    pub(crate) fn renew(&self, handle: u64, ticket: Option<Ticket>) {
        let mut state = self.lock();
        let known = state.tickets.get(&handle).map(|noted| noted.ticket);
        let Some(ticket) = ticket.filter(|new| known != Some(*new)) else { return };
        if !state.files.contains_key(&handle) {
            return;
        }
        // Both are noted for a moment: a process after us finds one of them, whole.
        if let Some(before) = state.tickets.insert(handle, self.tickets.note(handle, ticket)) {
            self.tickets.forget(before);
        }
        self.renewed.fetch_add(1, Ordering::Relaxed);
    }

    /// Forgets what processes before us had open under numbers in this range. Answers those.
    pub(crate) fn forget_within(&self, range: &Range<u64>) -> Vec<u64> {
        let mut state = self.lock();
        let known = state.tickets.keys().copied();
        let handles: Vec<u64> = known.filter(|handle| range.contains(handle)).collect();
        handles.iter().for_each(|handle| _ = self.forget_in(&mut state, *handle));
        handles
    }

    /// True unless it is being opened again.
    fn forget_in(&self, state: &mut State, handle: u64) -> bool {
        state.files.remove(&handle);
        self.aliases.forget(handle);
        if let Some(noted) = state.tickets.remove(&handle) {
            self.tickets.forget(noted);
        }
        !state.opening.contains(&handle)
    }

    /// Forgets a file that is about to be closed. False if it is being opened again at
    /// this moment: then [`OpenFiles::closing`] has to be waited for.
    pub(crate) fn forget(&self, handle: u64) -> bool {
        self.forget_in(&mut self.lock(), handle)
    }

    /// Forgets a file that is about to be closed. A file that is being opened again is forgotten
    /// once that is done, so that the close comes last.
    pub(crate) async fn closing(&self, handle: u64) {
        std::future::poll_fn(|task| {
            let mut state = self.lock();
            if self.forget_in(&mut state, handle) {
                return Poll::Ready(());
            }
            state.waiting.push(task.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Everything that is open, in the order of its numbers.
    pub(crate) fn handles(&self) -> Vec<u64> {
        let mut handles: Vec<u64> = self.lock().files.keys().copied().collect();
        handles.sort_unstable();
        handles
    }

    /// Opens a file again; none if it has been closed.
    pub(crate) fn open_again(&self, handle: u64) -> Option<ReopenGuard<'_>> {
        let mut state = self.lock();
        let OpenFileEntry { id, how, .. } = *state.files.get(&handle)?;
        state.opening.push(handle);
        Some(ReopenGuard { files: self, handle, id, how })
    }
}

impl Drop for ReopenGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.files.lock();
        if let Some(at) = state.opening.iter().position(|handle| *handle == self.handle) {
            state.opening.swap_remove(at);
        }
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }
}
