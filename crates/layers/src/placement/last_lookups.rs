//! What threads have just looked up. A kernel looks a name up before it removes or replaces the file of that name, and
//! before it creates one. So it is known by then which file that is, and the name need not be looked up once more.
//!
//! This is a guess: another client may change the name between the lookup and the change. Where a guess may be wrong
//! for longer, or a wrong one does harm, none is made ([`PlacedServers::expects`]).

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::{Context, Entry, Errno, Error, FileId, FileType, Name, NodeId, Pid, fnv1a};
use dray_rt::Instant;

use super::hash::mix;
use super::servers::PlacedServers;

/// Names that are remembered, of 64 bytes each. One that falls together with another takes its place.
const LOOKUPS_MAX: usize = 1024;

/// How long a lookup counts. The kernel makes the change right behind it, unless it has the name in its own cache.
const LOOKUP_LASTS: Duration = Duration::from_millis(100);

/// What a lookup has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FoundName {
    /// There is no such name.
    Absent,
    /// A regular file.
    File(FileId),
    /// A directory, a symbolic link, or a special file: nobody's home has to know when it goes.
    Other,
}

impl FoundName {
    fn of(entry: &Entry) -> FoundName {
        match entry.attr.file_type() {
            FileType::Regular => FoundName::File(entry.id),
            FileType::Directory
            | FileType::Symlink
            | FileType::Fifo
            | FileType::Socket
            | FileType::CharDevice
            | FileType::BlockDevice => FoundName::Other,
        }
    }

    /// The regular file that has the name.
    pub(super) fn file(self) -> Option<FileId> {
        match self {
            FoundName::File(id) => Some(id),
            FoundName::Absent | FoundName::Other => None,
        }
    }
}

/// A lookup, or what has made the file of the name.
#[derive(Clone, Copy, PartialEq, Eq)]
struct NameLookup {
    key: NameKey,
    node: NodeId,
    thread: Pid,
    found: FoundName,
    at: Instant,
}

/// The last lookup of each name, by any thread.
pub(super) struct LastLookups(Box<[Mutex<Option<NameLookup>>]>);

impl Default for LastLookups {
    fn default() -> LastLookups {
        LastLookups((0..LOOKUPS_MAX).map(|_| Mutex::default()).collect())
    }
}

/// A hash of a directory and a name in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NameKey(pub(super) u64);

impl NameKey {
    pub(super) fn of(dir: FileId, name: &Name) -> NameKey {
        NameKey(mix(mix(dir.ino ^ mix(dir.generation)) ^ fnv1a(name.as_bytes())))
    }
}

impl LastLookups {
    fn place(&self, NameKey(key): NameKey) -> MutexGuard<'_, Option<NameLookup>> {
        let place = &self.0[key as usize % LOOKUPS_MAX];
        place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The name leads to `found`, as far as the thread of this request knows. In some containers threads have no
    /// numbers: of these nothing is remembered.
    fn note(&self, cx: &Context, key: NameKey, found: FoundName) {
        let (node, thread) = (cx.origin.node, cx.pid);
        let lookup = NameLookup { key, node, thread, found, at: dray_rt::now() };
        *self.place(key) = (thread != Pid(0)).then_some(lookup);
    }

    /// What the last lookup of this name has found, if it was made by the same thread a moment ago. It counts once:
    /// the change that follows makes it wrong.
    fn take(&self, cx: &Context, key: NameKey) -> Option<FoundName> {
        let lookup = self.place(key).take_if(|lookup| lookup.key == key)?;
        let is_own = lookup.node == cx.origin.node && lookup.thread == cx.pid;
        (is_own && dray_rt::now() - lookup.at <= LOOKUP_LASTS).then_some(lookup.found)
    }
}

impl PlacedServers {
    /// Whether a lookup tells which file a change of the name is about. Not under leases: the kernel need not look the
    /// name up then, and another lookup of a name that is leased costs nothing. Not with failover either: the home of
    /// an open file has to carry out its removal, so that the successor finds the file (P149).
    fn expects(&self) -> bool {
        self.holders.is_empty() && !self.slices.placement().fails_over()
    }

    /// A lookup for the caller has ended so, or the making of what has the name.
    pub(super) fn looked_up(&self, cx: &Context, key: NameKey, outcome: Result<&Entry, &Error>) {
        if !self.expects() {
            return;
        }
        match outcome {
            Ok(entry) => self.places.lookups.note(cx, key, FoundName::of(entry)),
            Err(error) if error.errno() == Errno::ENOENT => {
                self.places.lookups.note(cx, key, FoundName::Absent);
            }
            Err(_) => drop(self.places.lookups.take(cx, key)),
        }
    }

    /// What the thread of this request has just found by this name, which it is about to change.
    pub(super) fn last_found(&self, cx: &Context, key: NameKey) -> Option<FoundName> {
        if !self.expects() {
            return None;
        }
        self.places.lookups.take(cx, key)
    }
}

#[cfg(test)]
mod tests {
    use dray_core::{Identity, RequestId};
    use dray_rt::{DriverKind, Executor, sleep};

    use super::*;

    const DIR: FileId = FileId { ino: 7, generation: 1 };
    const FILE: FoundName = FoundName::File(FileId { ino: 8, generation: 2 });

    fn thread(node: u64, number: u32) -> Context {
        Context::new(NodeId(node), RequestId(0), Identity::system(), Pid(number))
    }

    fn key(dir: FileId, text: &str) -> NameKey {
        NameKey::of(dir, Name::new(text.as_bytes()).unwrap())
    }

    #[test]
    fn a_lookup_counts_once_and_for_its_own_thread() {
        let (lookups, own) = (LastLookups::default(), thread(1, 5));
        for other in [thread(1, 6), thread(2, 5)] {
            lookups.note(&own, key(DIR, "a"), FILE);
            assert_eq!(lookups.take(&other, key(DIR, "a")), None);
            assert_eq!(lookups.take(&own, key(DIR, "a")), None, "the other has changed the name");
        }
        lookups.note(&own, key(DIR, "a"), FILE);
        assert_eq!(lookups.take(&own, key(DIR, "b")), None);
        assert_eq!(lookups.take(&own, key(FileId { generation: 2, ..DIR }, "a")), None);
        assert_eq!(lookups.take(&own, key(DIR, "a")), Some(FILE));
        assert_eq!(lookups.take(&own, key(DIR, "a")), None);
    }

    #[test]
    fn the_last_of_several_threads_counts() {
        let (lookups, [one, other]) = (LastLookups::default(), [1, 2].map(|pid| thread(1, pid)));
        lookups.note(&one, key(DIR, "a"), FILE);
        lookups.note(&other, key(DIR, "a"), FoundName::Absent);
        assert_eq!(lookups.take(&one, key(DIR, "a")), None);
        let unknown = thread(1, 0);
        lookups.note(&one, key(DIR, "a"), FILE);
        lookups.note(&unknown, key(DIR, "a"), FILE);
        assert_eq!([&one, &unknown].map(|cx| lookups.take(cx, key(DIR, "a"))), [None; 2]);
    }

    #[test]
    fn a_lookup_of_long_ago_counts_for_nothing() {
        let mut simulation = Executor::new(DriverKind::Simulated { seed: 1 }).unwrap();
        simulation.block_on(async {
            let (lookups, own) = (LastLookups::default(), thread(1, 5));
            for (wait, found) in [(LOOKUP_LASTS / 2, Some(FILE)), (LOOKUP_LASTS * 2, None)] {
                lookups.note(&own, key(DIR, "a"), FILE);
                sleep(wait).await;
                assert_eq!(lookups.take(&own, key(DIR, "a")), found);
            }
        });
    }
}
