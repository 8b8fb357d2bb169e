//! The files that this mount has open at the server, to open them again when a new one
//! has taken its place: before anybody removes them.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use dray_core::{FileId, OpenHow};

/// All open files of a mount, by the numbers that it gave them.
pub(crate) struct OpenFiles {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    files: HashMap<u64, (FileId, OpenHow)>,
    /// Being opened again now.
    opening: Vec<u64>,
    /// A process before us had files open that are not among these so far.
    missing: bool,
    waiting: Vec<Waker>,
}

/// A file is being opened again; in the end it no longer is.
pub(crate) struct Opening<'a> {
    files: &'a OpenFiles,
    handle: u64,
    pub(crate) id: FileId,
    pub(crate) how: OpenHow,
}

impl State {
    fn forget(&mut self, handle: u64) -> bool {
        self.files.remove(&handle);
        !self.opening.contains(&handle)
    }
}

impl OpenFiles {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `successor`: of a process whose files will be attached.
    pub(crate) fn new(successor: bool) -> OpenFiles {
        OpenFiles { state: Mutex::new(State { missing: successor, ..State::default() }) }
    }

    /// What a process before us had open is among them.
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
            state.waiting.push(task.waker().clone());
            Poll::Pending
        })
        .await;
    }

    pub(crate) fn opened(&self, handle: u64, id: FileId, how: OpenHow) {
        let how = OpenHow::new(how.flags & !(libc::O_TRUNC | libc::O_CREAT | libc::O_EXCL));
        self.lock().files.insert(handle, (id, how));
    }

    /// Forgets a file that is about to be closed. False if it is being opened again at
    /// this moment: then [`OpenFiles::closing`] has to be waited for.
    pub(crate) fn forget(&self, handle: u64) -> bool {
        self.lock().forget(handle)
    }

    /// Forgets a file that is about to be closed; if it is being opened again, once that
    /// is done, so that the closing is what comes last.
    pub(crate) async fn closing(&self, handle: u64) {
        std::future::poll_fn(|task| {
            let mut state = self.lock();
            if state.forget(handle) {
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
    pub(crate) fn open_again(&self, handle: u64) -> Option<Opening<'_>> {
        let mut state = self.lock();
        let (id, how) = *state.files.get(&handle)?;
        state.opening.push(handle);
        Some(Opening { files: self, handle, id, how })
    }
}

impl Drop for Opening<'_> {
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
