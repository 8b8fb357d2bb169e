//! Notifies clients that cache open files when another client changes one.
//!
//! A notification is advice. The validity of cached data ends at the next open or with the
//! attributes, with or without one. Changes within [`COALESCE_TIME`] go into one message, so that a
//! file under constant writes costs its readers at most a hundred messages a second. A client that
//! is away is not notified. Changes beyond the bound of a message are left out.

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

/// How long changes are coalesced before the notification is sent.
const COALESCE_TIME: Duration = Duration::from_millis(10);
/// Until the next try to notify a client that has not read the notification before.
const UNREAD_TIME: Duration = Duration::from_millis(100);

/// Open files of an export by those sessions that want to hear of changes.
#[derive(Default)]
pub(crate) struct Watchers {
    /// Whether there are any.
    any: AtomicBool,
    /// The sessions that have each file open, and how often.
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

    /// The session has closed a file that it had opened.
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

    /// Whether no session watches any file, as is nearly always so.
    pub(crate) fn is_empty(&self) -> bool {
        !self.any.load(Ordering::Acquire)
    }

    /// The sessions that have the file open, without `changer`.
    fn others(&self, file: FileId, changer: u64) -> Vec<u64> {
        let files = self.files();
        let sessions = files.get(&file).into_iter().flatten().map(|(id, _)| *id);
        sessions.filter(|id| *id != changer).collect()
    }
}

/// The files whose changes a session has not been notified of yet.
#[derive(Default)]
pub(crate) struct PendingNotifications(Mutex<BTreeSet<FileId>>);

impl PendingNotifications {
    fn files(&self) -> MutexGuard<'_, BTreeSet<FileId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if the file is the first: the caller has to start a notification then. Files beyond the
    /// bound are left out.
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
    /// Notifies the other sessions that have `file` open that `changer` has changed it.
    pub(crate) fn notify_change(&self, changer: &ServerSession, file: FileId) {
        let others = changer.export.watchers.others(file, changer.id);
        if others.is_empty() || self.options.broken().drops_notification() {
            return;
        }
        let sessions = lock(&self.sessions);
        let others: Vec<_> = others.iter().filter_map(|id| sessions.get(id).cloned()).collect();
        drop(sessions);
        for session in others.into_iter().filter(|session| session.pending_notifications.add(file))
        {
            match session.home() {
                Some(home) => home.spawn(notify_later(session)),
                None => session.pending_notifications.files().clear(), // it is away
            }
        }
    }
}

/// While the client does not read, pending notifications are coalesced further.
async fn notify_later(session: Arc<ServerSession>) {
    sleep(COALESCE_TIME).await;
    while !notify_pending(&session) {
        sleep(UNREAD_TIME).await;
    }
}

/// Sends the pending notifications to a connected client. False if its connection is full, and the
/// caller has to try again.
fn notify_pending(session: &ServerSession) -> bool {
    let mut pending = session.pending_notifications.files();
    if let Some(connection) = session.connections().into_iter().next() {
        let files: Vec<FileId> = pending.iter().copied().collect();
        let mut message = Vec::new();
        NotifyHead { what: NotifyHead::CHANGED, flags: 0, tag: files.len() as u32 }
            .put_message(&mut message);
        put_changed(&files, &mut message);
        match connection.notify(&message) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
            _ => connection.flush(), // a broken one ends by itself
        }
    }
    pending.clear();
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(ino: u64) -> FileId {
        FileId { ino, generation: 1 }
    }

    #[test]
    fn a_session_is_notified_until_its_last_close() {
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
    fn pending_notifications_are_bounded() {
        let pending = PendingNotifications::default();
        assert!(pending.add(file(1)) && !pending.add(file(1)) && !pending.add(file(2)));
        (0..=CHANGED_MAX as u64).for_each(|ino| assert!(!pending.add(file(ino))));
        assert_eq!(pending.files().len(), CHANGED_MAX);
    }
}
