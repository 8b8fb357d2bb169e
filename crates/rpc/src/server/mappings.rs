//! Files that two clients store into through shared mappings. Each client's kernel keeps what is stored
//! there until it is synced, and none sees the other's: programs that share memory in this way, such as
//! SQLite with a write-ahead log, lose data without an error. Clients say so with their first such write
//! of each open file ([`NotifyHead::MAPPED`](crate::wire::NotifyHead::MAPPED)).

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use dray_core::FileId;

use crate::server::seldom::Seldom;
use crate::server::session::Session;

/// Files that are remembered; the oldest is forgotten for one more.
const FILES_MAX: usize = 256;

/// Those of an export.
#[derive(Default)]
pub(crate) struct Mappings {
    state: Mutex<State>,
    complaint: Seldom,
}

#[derive(Default)]
struct State {
    files: VecDeque<Mapped>,
    conflicts: u64,
}

struct Mapped {
    file: FileId,
    by: Weak<Session>,
    /// It has been counted.
    told: bool,
}

impl Mappings {
    /// How many files two clients have stored into at the same time.
    pub(crate) fn conflicts(&self) -> u64 {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).conflicts
    }

    /// `session` stores into a mapping of `file`, as it says: whoever says what is not so causes a
    /// line in the log, once for each file.
    pub(crate) fn stored(&self, session: &Arc<Session>, file: FileId) {
        if let Some(other) = self.other(session, file) {
            let (export, hosts) = (&session.export.name, [&other.host, &session.host]);
            self.complaint.say(|more| {
                log::warn!(
                    "export `{export}`: clients {} and {} store into shared mappings of one file (inode {}) \
                     and do not see each other's: its programs may lose data; have them on one \
                     mount, or mount with noshared_mmap{more}",
                    hosts[0],
                    hosts[1],
                    file.ino
                );
            });
        }
    }

    /// Another session that does so and still has the file open, once for each file.
    fn other(&self, session: &Arc<Session>, file: FileId) -> Option<Arc<Session>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let by = Arc::downgrade(session);
        let Some(mapped) = state.files.iter_mut().find(|mapped| mapped.file == file) else {
            if state.files.len() >= FILES_MAX {
                state.files.pop_front();
            }
            state.files.push_back(Mapped { file, by, told: false });
            return None;
        };
        let before = mapped.by.upgrade().filter(|before| !Arc::ptr_eq(before, session));
        mapped.by = by;
        let other = before.filter(|before| !mapped.told && before.has_open(file))?;
        mapped.told = true;
        state.conflicts += 1;
        Some(other)
    }
}
