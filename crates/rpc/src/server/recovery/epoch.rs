//! The state that a server epoch takes over from the one before it, beside sessions. It is the keys
//! of tickets, the evicted sessions, and the bound of the stamps.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::server::journal::{Journal, PersistentRecord};
use crate::server::recovery::keys::TicketKeys;
use crate::wire::{Input, Wire};

/// Evicted sessions remembered.
pub(crate) const EVICTED_MAX: usize = 4096;

/// So many stamps may be given until the bound is noted anew. That is more than a server gives
/// between two looks. The clock still overtakes what is skipped at a start: stamps begin with its
/// nanoseconds, and these are 4.3 s.
const STAMPS_AHEAD: u64 = 1 << 32;

/// Keeps it.
pub(crate) struct ServerEpoch {
    journal: Arc<dyn Journal>,
    pub(crate) ticket_keys: TicketKeys,
    evicted: Mutex<Evicted>,
    /// How many evictions there were when they were noted last. The lock is held while they are
    /// noted: that waits for media, and clients that reconnect must not.
    noted: Mutex<u64>,
    /// The bound that the epoch before this one left.
    stamps_before: u64,
    stamps_bound: Mutex<u64>,
}

/// Sessions whose clients are not to begin anew as if nothing had happened.
struct Evicted {
    last: VecDeque<u64>,
    /// Evictions in this epoch.
    count: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ServerEpoch {
    /// Takes over what `journal` has. State that is not there begins anew. State that cannot be
    /// kept begins anew at the next start.
    pub(crate) fn begin(journal: Arc<dyn Journal>) -> ServerEpoch {
        let evicted =
            words(&*journal, PersistentRecord::Evicted).into_iter().rev().take(EVICTED_MAX);
        let evicted = Mutex::new(Evicted { last: evicted.rev().collect(), count: 0 });
        let stamps_before =
            words(&*journal, PersistentRecord::StampsBound).first().copied().unwrap_or(0);
        let stamps_bound = Mutex::new(stamps_before);
        let (ticket_keys, noted) = (TicketKeys::begin(&*journal), Mutex::default());
        ServerEpoch { ticket_keys, journal, evicted, noted, stamps_before, stamps_bound }
    }

    /// A stamp above all stamps of earlier epochs.
    pub(crate) fn stamps_before(&self) -> u64 {
        self.stamps_before
    }

    /// Makes the next epoch begin above `newest`, the greatest stamp given, and above those that
    /// will be given until this is called again.
    pub(crate) fn stamps_given(&self, newest: u64) {
        let mut bound = lock(&self.stamps_bound);
        if newest.saturating_add(STAMPS_AHEAD / 2) < *bound {
            return;
        }
        let next = newest.saturating_add(STAMPS_AHEAD);
        match keep(&*self.journal, PersistentRecord::StampsBound, [next]) {
            true => *bound = next,
            false => log::error!("a next server goes on counting changes with the clock"),
        }
    }

    pub(crate) fn is_evicted(&self, session: u64) -> bool {
        lock(&self.evicted).last.contains(&session)
    }

    /// `session` is not to come back.
    pub(crate) fn evict(&self, session: u64) {
        let mut evicted = lock(&self.evicted);
        if evicted.last.len() >= EVICTED_MAX {
            evicted.last.pop_front();
        }
        evicted.last.push_back(session);
        evicted.count += 1;
    }

    /// Evicted clients are not to come back after a restart either. Waits for media, once for all
    /// that were evicted meanwhile.
    pub(crate) fn note_evicted(&self) {
        let asked = lock(&self.evicted).count;
        let mut noted = lock(&self.noted);
        if *noted >= asked {
            return;
        }
        let (all, count): (Vec<u64>, u64) = {
            let evicted = lock(&self.evicted);
            (evicted.last.iter().copied().collect(), evicted.count)
        };
        match keep(&*self.journal, PersistentRecord::Evicted, all) {
            true => *noted = count,
            false => log::error!("evicted clients may begin anew after a restart of the server"),
        }
    }
}

fn read(journal: &dyn Journal, what: PersistentRecord) -> Option<Vec<u8>> {
    journal.kept(what).unwrap_or_else(|error| {
        log::error!("what was kept cannot be read, and begins anew: {error}");
        None
    })
}

fn words(journal: &dyn Journal, what: PersistentRecord) -> Vec<u64> {
    let bytes = read(journal, what).unwrap_or_default();
    let mut input = Input(&bytes);
    std::iter::from_fn(|| input.get().ok()).collect()
}

fn keep(
    journal: &dyn Journal,
    what: PersistentRecord,
    words: impl IntoIterator<Item = u64>,
) -> bool {
    let mut bytes = Vec::new();
    words.into_iter().for_each(|word| word.put(&mut bytes));
    let kept = journal.keep(what, &bytes);
    let complain = |error: &std::io::Error| {
        log::error!("cannot keep `{}` in the state directory: {error}", what.name());
    };
    kept.inspect_err(complain).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use crate::server::journal::MemoryJournal;
    use crate::server::journal::watched::{Watch, WatchedJournal};

    /// Counts what is kept.
    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Watch for Count {
        fn keeps(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Each eviction of a thousand clients of one name had all of them written and synced once
    /// more, one after the other. Nobody could come in meanwhile.
    // proves: P132
    #[test]
    fn evictions_of_many_are_noted_together() {
        let journal = Arc::new(WatchedJournal::<Count>::default());
        let epoch = ServerEpoch::begin(journal.clone());
        let kept = || journal.1.0.swap(0, Ordering::SeqCst);
        kept();
        (0..1000).for_each(|session| epoch.evict(session));
        (0..1000).for_each(|_| epoch.note_evicted());
        assert_eq!(kept(), 1);
        epoch.evict(1000);
        epoch.note_evicted();
        assert_eq!(kept(), 1);
        assert!(ServerEpoch::begin(journal.clone()).is_evicted(1000));
    }

    /// Each of a thousand exports began where the one before it had had the bound noted, and had it
    /// noted anew. That took a quarter of a minute of syncs, and the stamps were an hour ahead of
    /// the clock.
    #[test]
    fn exports_that_begin_together_have_the_bound_noted_once() {
        let journal = Arc::new(WatchedJournal::<Count>::default());
        ServerEpoch::begin(journal.clone()).stamps_given(1000);
        let epoch = ServerEpoch::begin(journal.clone());
        journal.1.0.store(0, Ordering::SeqCst);
        let before = epoch.stamps_before();
        for _ in 0..1000 {
            epoch.stamps_given(epoch.stamps_before() + 1);
        }
        assert_eq!((journal.1.0.load(Ordering::SeqCst), epoch.stamps_before()), (1, before));
        assert!(ServerEpoch::begin(journal).stamps_before() > before);
    }

    #[test]
    fn the_next_server_epoch_continues_where_this_one_ended() {
        let journal = Arc::new(MemoryJournal::default());
        let first = ServerEpoch::begin(journal.clone());
        first.stamps_given(1000);
        first.stamps_given(1001);
        (0..EVICTED_MAX as u64 + 3).for_each(|session| first.evict(session));
        first.note_evicted();
        let next = ServerEpoch::begin(journal.clone());
        assert_eq!(next.ticket_keys, first.ticket_keys);
        assert!(next.stamps_before() >= 1001 + STAMPS_AHEAD / 2);
        for epoch in [&first, &next] {
            assert!(!epoch.is_evicted(2) && epoch.is_evicted(3));
            assert!(epoch.is_evicted(EVICTED_MAX as u64 + 2));
        }
        let many = next.stamps_before() - 5;
        next.stamps_given(many);
        assert!(ServerEpoch::begin(journal).stamps_before() > many + STAMPS_AHEAD / 2);
    }
}
