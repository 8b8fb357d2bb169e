//! Files that two clients store into through shared mappings. Each client's kernel keeps the stored
//! bytes until they are synced, and no kernel sees the other's. Programs that share memory in this
//! way lose data without an error. SQLite with a write-ahead log is one. Clients say so with their
//! first such write of each open file ([`NotifyHead::MAPPED`](crate::wire::NotifyHead::MAPPED)).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use dray_core::FileId;

use crate::server::log_throttle::LogThrottle;
use crate::server::session::ServerSession;

/// Files that are remembered; the oldest is forgotten for one more.
const FILES_MAX: usize = 256;

/// The mappings of an export.
#[derive(Default)]
pub(crate) struct Mappings {
    state: Mutex<State>,
    complaint: LogThrottle,
    /// Numbers opens: who had a file open when somebody else stored into it.
    orders: AtomicU64,
}

#[derive(Default)]
struct State {
    files: VecDeque<Mapped>,
    conflicts: u64,
}

struct Mapped {
    file: FileId,
    by: Weak<ServerSession>,
    /// The session's number, also if the session has gone.
    session: u64,
    host: String,
    /// The number of the session's last report ([`Mappings::next_order`]).
    order: u64,
    /// The session has been counted.
    reported: bool,
}

impl Mappings {
    /// A number for something that happens now, for an open or a store.
    pub(crate) fn next_order(&self) -> u64 {
        self.orders.fetch_add(1, Ordering::Relaxed)
    }

    /// How many files two clients have stored into at the same time.
    pub(crate) fn conflicts(&self) -> u64 {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).conflicts
    }

    /// `session` stores into a mapping of `file`, as its client says. A false report causes one
    /// line in the log for each file.
    pub(crate) fn stored(&self, session: &Arc<ServerSession>, file: FileId) {
        let Some(since) = session.first_open(file) else { return }; // it is closed by now
        if let Some(other) = self.other(session, file, since) {
            self.complaint.say(|more| {
                log::warn!(
                    "export `{}`: clients {other} and {} store into shared mappings of one file (inode \
                     {}) and do not see each other's: its programs may lose data; have them on \
                     one mount, or mount with noshared_mmap{more}",
                    session.export.name,
                    session.host,
                    file.ino
                );
            });
        }
    }

    /// The host of another session that had the file open at the same time and stored into it, too.
    /// It is given once for each file. `since`: when this session has opened the file.
    fn other(&self, session: &Arc<ServerSession>, file: FileId, since: u64) -> Option<String> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = |reported| Mapped {
            file,
            by: Arc::downgrade(session),
            session: session.id,
            host: session.host.clone(),
            order: self.next_order(),
            reported,
        };
        let Some(mapped) = state.files.iter_mut().find(|mapped| mapped.file == file) else {
            if state.files.len() >= FILES_MAX {
                state.files.pop_front();
            }
            state.files.push_back(now(false));
            return None;
        };
        // The other session stored when this one had it open, or has it open still and may store at
        // any time.
        let meets =
            |by: &Weak<ServerSession>| by.upgrade().is_some_and(|by| by.first_open(file).is_some());
        let is_new = mapped.session != session.id
            && !mapped.reported
            && (since < mapped.order || meets(&mapped.by));
        let before = std::mem::replace(mapped, now(mapped.reported || is_new));
        is_new.then(|| {
            state.conflicts += 1;
            before.host
        })
    }
}
