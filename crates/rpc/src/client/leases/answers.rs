//! A bounded memory of answers, for threads that look at it all the time.
//!
//! Where it is full, the hand of a clock looks for one that was not used since the hand was there
//! before. The source is Corbato, "A paging experiment with the Multics system", 1968.

use std::sync::{Mutex, MutexGuard, PoisonError};

use dray_core::IdMap;

use super::keys::AnswerKey;

/// Answers of one kind that a session remembers (ADR 0049). With a name of 20 bytes one takes about
/// 250 bytes, its attributes included.
pub(super) const ANSWERS_MAX: usize = 65_536;
const SHARDS: usize = 16;
const SHARD_MAX: usize = ANSWERS_MAX / SHARDS;

/// Answers of one kind, by their keys.
pub(super) struct Answers<T>(Box<[Mutex<Shard<T>>]>);

struct Shard<T> {
    places: IdMap<u64, u32>,
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
    hand: usize,
}

struct Entry<T> {
    key: u64,
    used: bool,
    /// None: the place is free.
    answer: Option<T>,
}

impl<T> Default for Answers<T> {
    fn default() -> Answers<T> {
        Answers((0..SHARDS).map(|_| Mutex::default()).collect())
    }
}

impl<T> Default for Shard<T> {
    fn default() -> Shard<T> {
        Shard { places: IdMap::default(), entries: Vec::new(), free: Vec::new(), hand: 0 }
    }
}

impl<T> Answers<T> {
    fn shard(&self, AnswerKey(key): AnswerKey) -> MutexGuard<'_, Shard<T>> {
        let shard = &self.0[(key >> 32) as usize % SHARDS];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What `read` makes of the answer, if there is one.
    pub(super) fn find<R>(&self, key: AnswerKey, read: impl FnOnce(&T) -> Option<R>) -> Option<R> {
        let mut shard = self.shard(key);
        let place = *shard.places.get(&key.0)?;
        let entry = &mut shard.entries[place as usize];
        let found = read(entry.answer.as_ref()?)?;
        entry.used = true;
        Some(found)
    }

    /// Remembers an answer if `holds` says so under the lock. Whatever has the same key leaves.
    /// Answers whether it was remembered.
    pub(super) fn remember(&self, key: AnswerKey, answer: T, holds: impl FnOnce() -> bool) -> bool {
        let mut shard = self.shard(key);
        let holds = holds();
        if holds {
            shard.put(key.0, answer);
        }
        holds
    }

    pub(super) fn forget(&self, key: AnswerKey) {
        self.shard(key).remove(key.0);
    }

    pub(super) fn forget_all(&self) {
        for shard in &self.0 {
            *shard.lock().unwrap_or_else(PoisonError::into_inner) = Shard::default();
        }
    }

    /// How many are remembered.
    pub(super) fn count(&self) -> u64 {
        let count = |shard: &Mutex<Shard<T>>| {
            shard.lock().unwrap_or_else(PoisonError::into_inner).places.len() as u64
        };
        self.0.iter().map(count).sum()
    }
}

impl<T> Shard<T> {
    fn put(&mut self, key: u64, answer: T) {
        let entry = Entry { key, used: false, answer: Some(answer) };
        if let Some(place) = self.places.get(&key) {
            self.entries[*place as usize] = entry;
            return;
        }
        let place = match self.free.pop() {
            Some(place) => place,
            None if self.entries.len() < SHARD_MAX => {
                self.entries.push(Entry { key, used: false, answer: None });
                self.entries.len() as u32 - 1
            }
            None => self.make_room(),
        };
        self.places.insert(key, place);
        self.entries[place as usize] = entry;
    }

    /// The place of one that has to leave. None is free.
    fn make_room(&mut self) -> u32 {
        loop {
            let place = self.hand;
            self.hand = (place + 1) % self.entries.len();
            let entry = &mut self.entries[place];
            if !std::mem::take(&mut entry.used) {
                self.places.remove(&entry.key);
                return place as u32;
            }
        }
    }

    fn remove(&mut self, key: u64) {
        if let Some(place) = self.places.remove(&key) {
            self.entries[place as usize].answer = None;
            self.free.push(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use dray_core::FileId;

    use super::*;

    fn key(ino: u64) -> AnswerKey {
        AnswerKey::of_attributes(FileId { ino, generation: 0 })
    }

    fn found(answers: &Answers<u64>, ino: u64) -> Option<u64> {
        answers.find(key(ino), |answer| Some(*answer))
    }

    #[test]
    fn answers_are_remembered_and_forgotten() {
        let answers = Answers::default();
        assert!(answers.remember(key(1), 10, || true) && answers.remember(key(1), 11, || true));
        assert!(!answers.remember(key(2), 20, || false));
        assert_eq!([1, 2].map(|ino| found(&answers, ino)), [Some(11), None]);
        answers.forget(key(1));
        assert_eq!((found(&answers, 1), answers.count()), (None, 0));
        answers.remember(key(3), 30, || true);
        answers.forget_all();
        assert_eq!((found(&answers, 3), answers.count()), (None, 0));
    }

    #[test]
    fn a_full_memory_keeps_what_is_used() {
        let answers = Answers::default();
        for ino in 0..2 * ANSWERS_MAX as u64 {
            assert!(answers.remember(key(ino), ino, || true));
            assert_eq!(found(&answers, 0), Some(0), "it is used all the time");
        }
        assert!(answers.count() <= ANSWERS_MAX as u64);
        assert!(answers.count() > ANSWERS_MAX as u64 / 10 * 9);
        assert_eq!(found(&answers, 1), None);
    }
}
