//! Files opened at their lookup, which their clients may use without saying so, and what
//! waits for them.
//!
//! A client that looked a name up with [`Call::LookupOpen`](crate::wire::Call::LookupOpen) answers
//! the open(2) behind it by itself, up to [`OPEN_AHEAD_USED_MAX`](crate::wire::OPEN_AHEAD_USED_MAX)
//! after it asked. This open(2) never begins after another client's change of rights has been
//! answered. The change waits until no client can use a file that was opened before. Such changes
//! are rare. The client itself knows of its own changes, and does not wait for itself.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::FileId;
use dray_rt::{Instant, now, sleep};

use crate::wire::OPEN_AHEAD_USED_MAX;

/// How long changes of rights wait, from the opening on: by the server's clock, and with that
/// of a client wrong by this factor.
const HELD: Duration = Duration::from_millis(4 * OPEN_AHEAD_USED_MAX.as_millis() as u64);

/// Independent parts of the table, so that threads rarely meet.
const SHARDS: usize = 64;
/// Files of one part: where there are as many, no further one is opened ahead.
const FILES_MAX: usize = 64;

/// Which files may be open ahead of their use.
pub(crate) struct OpenAheadTable {
    shards: Vec<Mutex<Vec<Watched>>>,
    /// The files that the process before us had opened can be used until then.
    quiet_until: Instant,
}

/// A file that is open ahead, or about to have its rights changed.
struct Watched {
    file: FileId,
    /// The file that was opened ahead may be used until then.
    until: Instant,
    /// By this session; none: by several.
    by: Option<u64>,
    /// Changes of rights that have arrived and not been carried out: it is not opened ahead.
    changing: u32,
}

/// A change of rights between its arrival and its end.
pub(crate) struct PendingRightsChange<'a> {
    table: &'a OpenAheadTable,
    file: FileId,
}

impl OpenAheadTable {
    /// At the start of a server.
    pub(crate) fn new() -> OpenAheadTable {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        OpenAheadTable { shards, quiet_until: now() + HELD }
    }

    fn shard(&self, file: FileId) -> MutexGuard<'_, Vec<Watched>> {
        // Fibonacci hashing (Knuth 6.4): inode numbers come in runs.
        let mixed = (file.ino ^ file.generation).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
        self.shards[mixed as usize % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether `session` may open this file ahead of its use. If so others wait from now on.
    pub(crate) fn opens(&self, file: FileId, session: u64) -> bool {
        let now = now();
        let mut shard = self.shard(file);
        shard.retain(|one| one.changing > 0 || one.until > now);
        let Some(watched) = shard.iter_mut().find(|one| one.file == file) else {
            let room = shard.len() < FILES_MAX;
            if room {
                shard.push(Watched { file, until: now + HELD, by: Some(session), changing: 0 });
            }
            return room;
        };
        if watched.changing > 0 {
            return false;
        }
        watched.by = watched.by.filter(|by| *by == session);
        watched.until = now + HELD;
        true
    }

    /// A change of rights has arrived: from now on the file is not opened ahead.
    pub(crate) fn changes(&self, file: FileId) -> PendingRightsChange<'_> {
        let mut shard = self.shard(file);
        match shard.iter_mut().find(|one| one.file == file) {
            Some(watched) => watched.changing += 1,
            // As many as there are calls under way.
            None => shard.push(Watched { file, until: now(), by: None, changing: 1 }),
        }
        PendingRightsChange { table: self, file }
    }
}

impl PendingRightsChange<'_> {
    /// Waits until nobody but `session` can use what was opened before.
    pub(crate) async fn wait(&self, session: u64) {
        let until = {
            let shard = self.table.shard(self.file);
            let others = shard.iter().find(|one| one.file == self.file && one.by != Some(session));
            let quiet_until = self.table.quiet_until;
            others.map_or(quiet_until, |one| one.until.max(quiet_until))
        };
        let left = until - now();
        if !left.is_zero() {
            sleep(left).await;
        }
    }
}

impl Drop for PendingRightsChange<'_> {
    fn drop(&mut self) {
        let mut shard = self.table.shard(self.file);
        let Some(at) = shard.iter().position(|one| one.file == self.file) else { return };
        shard[at].changing -= 1;
        if shard[at].changing == 0 && shard[at].until <= now() {
            shard.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileId = FileId { ino: 7, generation: 0 };

    fn simulate(test: impl Future<Output = ()>) {
        dray_rt::Executor::new(dray_rt::DriverKind::Simulated { seed: 3 }).unwrap().block_on(test);
    }

    async fn waited(ahead: &OpenAheadTable, session: u64) -> Duration {
        let (before, changing) = (now(), ahead.changes(FILE));
        changing.wait(session).await;
        before.elapsed()
    }

    #[test]
    fn other_sessions_wait_and_the_session_that_opened_does_not() {
        simulate(async {
            let ahead = OpenAheadTable::new();
            assert_eq!(waited(&ahead, 1).await, HELD, "for what a server before us opened");
            assert_eq!(waited(&ahead, 1).await, Duration::ZERO);
            assert!(ahead.opens(FILE, 1));
            assert_eq!(waited(&ahead, 1).await, Duration::ZERO);
            sleep(HELD / 4).await;
            assert_eq!(waited(&ahead, 2).await, HELD * 3 / 4);
            assert!(ahead.opens(FILE, 1) && ahead.opens(FILE, 2));
            assert_eq!(waited(&ahead, 1).await, HELD, "for the other");
        });
    }

    #[test]
    fn there_is_a_bound_and_what_is_over_makes_room() {
        simulate(async {
            let ahead = OpenAheadTable::new();
            let open = || {
                let files = (0..100_000).map(|ino| FileId { ino, generation: 0 });
                files.filter(|file| ahead.opens(*file, 1)).count()
            };
            assert_eq!((open(), open()), (SHARDS * FILES_MAX, SHARDS * FILES_MAX));
            let other = FileId { ino: 100_001, generation: 0 };
            assert!(!ahead.opens(other, 1));
            sleep(HELD).await;
            assert!(ahead.opens(other, 1));
            assert_eq!(open(), SHARDS * FILES_MAX - 1);
        });
    }

    /// Where nobody opens anything at its lookup: each change left one, to be searched by the next.
    #[test]
    fn changes_leave_nothing_behind() {
        simulate(async {
            let ahead = OpenAheadTable::new();
            for ino in 0..1000 {
                drop(ahead.changes(FileId { ino, generation: 0 }));
            }
            assert!(ahead.shards.iter().all(|shard| shard.lock().unwrap().is_empty()));
        });
    }

    /// Else a change could wait for ever for those that open the file again and again.
    #[test]
    fn no_file_is_opened_ahead_while_a_change_of_rights_waits() {
        simulate(async {
            let ahead = OpenAheadTable::new();
            let (one, other) = (ahead.changes(FILE), ahead.changes(FILE));
            assert!(!ahead.opens(FILE, 1));
            drop(one);
            assert!(!ahead.opens(FILE, 1));
            drop(other);
            assert!(ahead.opens(FILE, 1));
        });
    }
}
