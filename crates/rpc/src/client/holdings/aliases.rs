//! Open files that are known by two numbers. The front end names such a file by the request that
//! opened it, the server by the lookup before it, which did open it. Both are noted for a later
//! process of this mount, which knows only the first number.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dray_core::IdMap;

use crate::client::memory::SessionMemory;

pub(crate) struct Aliases {
    memory: Arc<SessionMemory>,
    /// The notes of a process before us: numbers by request. Requests do not come twice.
    inherited: IdMap<u64, u64>,
    /// Places from here on have never been used.
    end: AtomicU32,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    free: Vec<u32>,
    /// Places by number.
    noted: IdMap<u64, u32>,
}

impl Aliases {
    pub(crate) fn new(memory: Arc<SessionMemory>) -> Aliases {
        let (mut inherited, mut state) = (IdMap::default(), State::default());
        let end = memory.aliases_end();
        for place in 0..end {
            match memory.alias(place) {
                Some((request, handle)) => {
                    inherited.insert(request, handle);
                    state.noted.insert(handle, place);
                }
                None => state.free.push(place),
            }
        }
        Aliases { memory, inherited, end: AtomicU32::new(end), state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of a file that `request` opened, here or in a process before us.
    pub(crate) fn number_of(&self, request: u64) -> u64 {
        self.inherited.get(&request).copied().unwrap_or(request)
    }

    /// Whether a process before us used the file of this number.
    pub(crate) fn has_inherited(&self, handle: u64) -> bool {
        self.inherited.values().any(|known| *known == handle)
    }

    /// Notes that what `request` opens has this number. False if there is no room for it.
    pub(crate) fn note(&self, request: u64, handle: u64) -> bool {
        // No successor takes over, or the front end knows no number either.
        let Some(max) = self.memory.aliases_max().filter(|_| request != 0) else { return true };
        let mut state = self.lock();
        let next = |end: u32| (end < max).then_some(end + 1);
        let new = || self.end.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next).ok();
        let Some(place) = state.free.pop().or_else(new) else { return false };
        self.memory.put_alias(place, request, handle);
        state.noted.insert(handle, place);
        true
    }

    /// The file is being closed.
    pub(crate) fn forget(&self, handle: u64) {
        let mut state = self.lock();
        if let Some(place) = state.noted.remove(&handle) {
            self.memory.remove_alias(place);
            state.free.push(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_successor_knows_what_is_open_by_either_number() {
        let memory = Arc::new(SessionMemory::create_memfd().unwrap());
        let aliases = Aliases::new(memory.clone());
        (1..=5).for_each(|one| assert!(aliases.note(100 + one, one)));
        [1, 4].into_iter().for_each(|closed| aliases.forget(closed));
        assert!(aliases.note(110, 10)); // where one was
        let next = Aliases::new(memory.clone());
        assert_eq!([101, 102, 103, 110].map(|request| next.number_of(request)), [101, 2, 3, 10]);
        assert!(next.has_inherited(10) && !next.has_inherited(4));
        next.forget(2);
        assert!(next.note(120, 20) && next.note(121, 21) && next.note(122, 22));
        assert_eq!(memory.aliases_end(), 6, "two where others were");
    }

    #[test]
    fn without_a_successor_nothing_is_noted() {
        let aliases = Aliases::new(Arc::new(SessionMemory::heap()));
        assert!(aliases.note(7, 1));
        aliases.forget(1);
        assert_eq!(aliases.number_of(7), 7);
    }
}
