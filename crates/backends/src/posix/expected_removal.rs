//! What a program that removes one file after the other is probably about to remove.
//!
//! Each removal is three looks at a name. The client's kernel looks, then the server before it notes the
//! change, and then the removal itself. Each look asked the kernel for the same. So a directory keeps what
//! the first look has found. The second look asks only whether the name still leads there, and the removal
//! believes the second.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::{Entry, FileId, Name};
use dray_rt::Instant;

use super::lanes::is_large;
use super::recently_unlinked::ClientThread;

/// Looks that a removal makes expect another removal: that of the client's kernel, and the server's own
/// before it removes.
const LOOKS_BEFORE_REMOVAL: u64 = 2;

/// The bits that count them.
const LOOKS_MASK: u64 = 3;

/// How long the attributes of the first look may be used. The server uses the type alone, which a file
/// keeps.
const FOUND_LASTS: Duration = Duration::from_millis(100);

/// How long the second look is believed. The server holds the directory's grant over it and the
/// removal, so that only programs beside the server can change the name in between.
const CONFIRMED_LASTS: Duration = Duration::from_millis(1);

/// The file that was looked up in a directory last by a thread that is expected to remove it.
#[derive(Default)]
pub(super) struct ExpectedRemoval {
    /// Looks that are probably followed by a removal. The lowest bits have their count, the others the
    /// client thread.
    passing: AtomicU64,
    /// In a box, since few directories are being emptied.
    found: Mutex<Option<Box<FoundFile>>>,
}

struct FoundFile {
    /// The next name takes the memory of this one.
    name: Vec<u8>,
    entry: Entry,
    at: Instant,
    /// The time of the server's own look, and the thread that it was for.
    confirmed: Option<(ClientThread, Instant)>,
}

impl ExpectedRemoval {
    fn found(&self) -> MutexGuard<'_, Option<Box<FoundFile>>> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something in the directory has been removed by `thread`.
    pub(super) fn removed_by(&self, thread: ClientThread) {
        let thread_bits = thread.mixed() & !LOOKS_MASK;
        self.passing.store(thread_bits | LOOKS_BEFORE_REMOVAL, Ordering::Relaxed);
    }

    /// Whether what `thread` looks up now is probably about to be removed by it.
    pub(super) fn is_near(&self, thread: ClientThread) -> bool {
        let thread_bits = thread.mixed() & !LOOKS_MASK;
        let next = |passing: u64| {
            let expected = passing & LOOKS_MASK != 0 && passing & !LOOKS_MASK == thread_bits;
            expected.then(|| passing - 1)
        };
        self.passing.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
    }

    /// A look has found a regular file by this name. `server_for`: the server looks for this thread, and
    /// holds the directory's grant.
    pub(super) fn note(&self, name: &Name, entry: &Entry, server_for: Option<ClientThread>) {
        let at = dray_rt::now();
        let confirmed = server_for.map(|thread| (thread, at));
        let mut found = self.found();
        match &mut *found {
            Some(found) => {
                found.name.clear();
                found.name.extend_from_slice(name.as_bytes());
                (found.entry, found.at, found.confirmed) = (*entry, at, confirmed);
            }
            none => {
                let name = name.as_bytes().to_vec();
                *none = Some(Box::new(FoundFile { name, entry: *entry, at, confirmed }));
            }
        }
    }

    /// The server's own look for `thread`: the name leads to `id`. Answers what the look before has found,
    /// if that was the same file a moment ago.
    pub(super) fn confirm(&self, name: &Name, id: FileId, thread: ClientThread) -> Option<Entry> {
        let mut found = self.found();
        let found = found.as_mut().filter(|found| found.entry.id == id)?;
        let now = dray_rt::now();
        if found.name != name.as_bytes() || now - found.at > FOUND_LASTS {
            return None;
        }
        found.confirmed = Some((thread, now));
        Some(found.entry)
    }

    /// The file that the server has just found by this name for `thread`; once for each of its looks. A
    /// removal that was given up leaves its look to no other thread.
    pub(super) fn take_confirmed(&self, name: &Name, thread: ClientThread) -> Option<FileId> {
        let mut found = self.found();
        let found = found.as_mut().filter(|found| found.name == name.as_bytes())?;
        let (of, confirmed) = found.confirmed.take()?;
        let is_sure = of == thread && thread.is_known();
        (is_sure && dray_rt::now() - confirmed <= CONFIRMED_LASTS).then_some(found.entry.id)
    }

    /// Whether the last look has found a small file with this id.
    pub(super) fn was_small(&self, id: FileId) -> bool {
        self.found()
            .as_ref()
            .is_some_and(|found| found.entry.id == id && !is_large(&found.entry.attr))
    }
}

#[cfg(test)]
mod tests {
    use dray_core::{Attr, Context, Pid};

    use super::*;

    const FILE: FileId = FileId { ino: 7, generation: 1 };
    const OTHER: FileId = FileId { ino: 8, generation: 1 };

    fn name(name: &str) -> &Name {
        Name::new(name.as_bytes()).unwrap()
    }

    fn thread() -> ClientThread {
        ClientThread::of(&Context { pid: Pid(7), ..Context::system() })
    }

    fn entry(size: u64) -> Entry {
        Entry { id: FILE, attr: Attr { size, ..Attr::default() } }
    }

    #[test]
    fn a_removal_makes_two_looks_of_its_thread_expect_another() {
        let (removal, thread) = (ExpectedRemoval::default(), ClientThread::of(&Context::system()));
        assert!(!removal.is_near(thread));
        removal.removed_by(thread);
        assert!(removal.is_near(thread) && removal.is_near(thread) && !removal.is_near(thread));
    }

    #[test]
    fn a_removal_believes_the_servers_own_look_once_and_no_other() {
        let removal = ExpectedRemoval::default();
        removal.note(name("a"), &entry(1), None);
        assert_eq!(removal.take_confirmed(name("a"), thread()), None, "a client's look");
        assert!(removal.confirm(name("a"), OTHER, thread()).is_none(), "the name has another file");
        assert!(removal.confirm(name("b"), FILE, thread()).is_none(), "another name");
        assert_eq!(removal.take_confirmed(name("a"), thread()), None);
        assert_eq!(removal.confirm(name("a"), FILE, thread()).map(|found| found.id), Some(FILE));
        assert_eq!(removal.take_confirmed(name("b"), thread()), None);
        removal.note(name("a"), &entry(1), Some(thread()));
        let other = ClientThread::of(&Context { pid: Pid(8), ..Context::system() });
        assert_eq!(removal.take_confirmed(name("a"), other), None, "another thread's look");
        // On a busy machine the moment may be over.
        let mut believed = 0;
        for _ in 0..100 {
            removal.note(name("a"), &entry(1), Some(thread()));
            believed += u32::from(removal.take_confirmed(name("a"), thread()) == Some(FILE));
            assert_eq!(removal.take_confirmed(name("a"), thread()), None, "once");
        }
        assert!(believed > 0);
    }

    #[test]
    fn what_was_found_long_ago_is_not_used() {
        let removal = ExpectedRemoval::default();
        removal.note(name("a"), &entry(1), Some(thread()));
        std::thread::sleep(FOUND_LASTS + Duration::from_millis(1));
        assert_eq!(removal.take_confirmed(name("a"), thread()), None);
        assert!(removal.confirm(name("a"), FILE, thread()).is_none());
    }

    #[test]
    fn a_small_file_is_known_and_a_large_one_is_not_taken_for_it() {
        let removal = ExpectedRemoval::default();
        assert!(!removal.was_small(FILE));
        removal.note(name("a"), &entry(1), None);
        assert!(removal.was_small(FILE) && !removal.was_small(OTHER));
        removal.note(name("a"), &entry(1 << 40), None);
        assert!(!removal.was_small(FILE));
    }
}
