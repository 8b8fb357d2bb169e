//! Clients that cache what they have open, and are told when another client changes it.
//!
//! What they may believe ends at the next open or when their attributes run out, told or not: this
//! is advice, which comes soon where it comes. What changes within [`GATHER_TIME`] is told in one
//! message, so that a file that is written to all the time costs its readers a hundred messages a
//! second at most. Who is away, or is to be told of too much at once, is not told.

use std::collections::{BTreeSet, HashMap};
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::FileId;
use dray_rt::sleep;

use crate::server::service::{Inner, lock};
use crate::server::session::ServerSession;
use crate::wire::{CHANGED_MAX, NotifyHead, put_changed};

/// How long changes are gathered before they are told.
const GATHER_TIME: Duration = Duration::from_millis(10);
/// Until it is tried again to tell a client that has not read what it was told before.
const UNREAD_TIME: Duration = Duration::from_millis(100);

/// Open files of an export by those sessions that want to hear of changes.
#[derive(Default)]
pub(crate) struct Watchers {
    /// There are some.
    any: AtomicBool,
    /// By file: sessions, and how often each has it open.
    files: Mutex<HashMap<FileId, Vec<(u64, u32)>>>,
}

impl Watchers {
    fn files(&self) -> MutexGuard<'_, HashMap<FileId, Vec<(u64, u32)>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A session has opened a file.
    pub(crate) fn opened(&self, file: FileId, session: u64) {
        let mut files = self.files();
        let sessions = files.entry(file).or_default();
        match sessions.iter_mut().find(|(id, _)| *id == session) {
            Some((_, opens)) => *opens += 1,
            None => sessions.push((session, 1)),
        }
        self.any.store(true, Ordering::Release);
    }

    /// It has closed one that it had opened.
    pub(crate) fn closed(&self, file: FileId, session: u64) {
        let mut files = self.files();
        let Some(sessions) = files.get_mut(&file) else { return };
        sessions.iter_mut().filter(|(id, _)| *id == session).for_each(|(_, opens)| *opens -= 1);
        sessions.retain(|(_, opens)| *opens > 0);
        if sessions.is_empty() {
            files.remove(&file);
        }
        self.any.store(!files.is_empty(), Ordering::Release);
    }

    /// Whether nobody watches anything: nearly always.
    pub(crate) fn is_empty(&self) -> bool {
        !self.any.load(Ordering::Acquire)
    }

    /// Those who have it open, but for `changer`.
    fn others(&self, file: FileId, changer: u64) -> Vec<u64> {
        let files = self.files();
        let sessions = files.get(&file).into_iter().flatten().map(|(id, _)| *id);
        sessions.filter(|id| *id != changer).collect()
    }
}

/// What a session has not been told of yet.
#[derive(Default)]
pub(crate) struct Untold(Mutex<BTreeSet<FileId>>);

impl Untold {
    fn files(&self) -> MutexGuard<'_, BTreeSet<FileId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if it is the first: somebody has to tell it then. What is too much is left out.
    fn add(&self, file: FileId) -> bool {
        let mut files = self.files();
        let first = files.is_empty();
        if files.len() < CHANGED_MAX {
            files.insert(file);
        }
        first
    }
}

impl Inner {
    /// Has the others who have `file` open told that `changer` has changed it.
    pub(crate) fn tell_change(&self, changer: &ServerSession, file: FileId) {
        let others = changer.export.watchers.others(file, changer.id);
        if others.is_empty() || self.options.broken().leaves_untold() {
            return;
        }
        let sessions = lock(&self.sessions);
        let others: Vec<_> = others.iter().filter_map(|id| sessions.get(id).cloned()).collect();
        drop(sessions);
        for session in others.into_iter().filter(|session| session.untold.add(file)) {
            match session.home() {
                Some(home) => home.spawn(tell_soon(session)),
                None => session.untold.files().clear(), // it is away
            }
        }
    }
}

/// While its client does not read, what is untold is gathered further.
async fn tell_soon(session: Arc<ServerSession>) {
    sleep(GATHER_TIME).await;
    while !is_told(&session) {
        sleep(UNREAD_TIME).await;
    }
}

/// Tells a client that is there what is untold; false if so much waits for it already that it has
/// to be tried again.
fn is_told(session: &ServerSession) -> bool {
    let mut untold = session.untold.files();
    if let Some(connection) = session.connections().into_iter().next() {
        let files: Vec<FileId> = untold.iter().copied().collect();
        let mut message = Vec::new();
        NotifyHead { what: NotifyHead::CHANGED, flags: 0, tag: files.len() as u32 }
            .put_message(&mut message);
        put_changed(&files, &mut message);
        match connection.notify(&message) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
            _ => connection.flush(), // a broken one ends by itself
        }
    }
    untold.clear();
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(ino: u64) -> FileId {
        FileId { ino, generation: 1 }
    }

    #[test]
    fn who_has_it_open_is_told_until_its_last_close() {
        let watchers = Watchers::default();
        assert!(watchers.is_empty());
        for session in [7, 7, 8] {
            watchers.opened(file(1), session);
        }
        assert_eq!(
            (watchers.others(file(1), 8), watchers.others(file(1), 9)),
            (vec![7], vec![7, 8])
        );
        assert!(watchers.others(file(2), 9).is_empty());
        watchers.closed(file(1), 7);
        watchers.closed(file(1), 9); // it had opened nothing that was watched
        assert_eq!(watchers.others(file(1), 8), [7]);
        watchers.closed(file(1), 7);
        watchers.closed(file(1), 8);
        assert!(watchers.is_empty() && watchers.files().is_empty());
    }

    #[test]
    fn what_is_not_told_yet_is_bounded() {
        let untold = Untold::default();
        assert!(untold.add(file(1)) && !untold.add(file(1)) && !untold.add(file(2)));
        (0..=CHANGED_MAX as u64).for_each(|ino| assert!(!untold.add(file(ino))));
        assert_eq!(untold.files().len(), CHANGED_MAX);
    }
}
