//! A bounded memory of answers, for threads that look at it all the time.
//!
//! Where it is full, the hand of a clock looks for one that was not used since the hand was there
//! before. The source is Corbato, "A paging experiment with the Multics system", 1968.

use std::sync::{Mutex, MutexGuard, PoisonError};

use dray_core::IdMap;

use super::keys::AnswerKey;

/// Answers of one kind that a session remembers (ADR 0049). With a name of 20 bytes one takes about
/// 280 bytes, its attributes included.
pub(super) const ANSWERS_MAX: usize = 65_536;
/// Parts of a memory whose answers are asked for all the time.
const SHARDS: usize = 16;

/// The memory that an answer takes beside the place of each one.
pub(super) trait Weighed {
    /// Bytes. It is asked often: it must be cheap.
    fn bytes(&self) -> usize;
}

/// Answers of one kind, by their keys.
pub(super) struct Answers<T>(Box<[Mutex<Shard<T>>]>);

struct Shard<T> {
    places: IdMap<u64, u32>,
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
    hand: usize,
    count_max: usize,
    bytes_max: usize,
    bytes: usize,
}

struct Entry<T> {
    key: u64,
    used: bool,
    /// None: the place is free.
    answer: Option<T>,
}

impl<T: Weighed> Answers<T> {
    /// For small answers, which together weigh at most `bytes_max`.
    pub(super) fn small(bytes_max: usize) -> Answers<T> {
        Answers::in_shards(SHARDS, bytes_max)
    }

    /// For large answers, one of which may weigh as much as all of them may.
    pub(super) fn large(bytes_max: usize) -> Answers<T> {
        Answers::in_shards(1, bytes_max)
    }

    fn in_shards(shards: usize, bytes_max: usize) -> Answers<T> {
        let shard = || Shard {
            places: IdMap::default(),
            entries: Vec::new(),
            free: Vec::new(),
            hand: 0,
            count_max: ANSWERS_MAX / shards,
            bytes_max: bytes_max / shards,
            bytes: 0,
        };
        Answers((0..shards).map(|_| Mutex::new(shard())).collect())
    }

    fn shard(&self, AnswerKey(key): AnswerKey) -> MutexGuard<'_, Shard<T>> {
        let shard = &self.0[(key >> 32) as usize % self.0.len()];
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

    /// Remembers what `make` makes under the lock, of the answer with this key that is there. That
    /// one leaves. None: it stays as it is. Answers whether there is a new one.
    pub(super) fn remember(
        &self,
        key: AnswerKey,
        make: impl FnOnce(Option<&mut T>) -> Option<T>,
    ) -> bool {
        let mut shard = self.shard(key);
        let mut there = shard.answer_mut(key.0);
        let before = there.as_ref().map_or(0, |answer| answer.bytes());
        let made = make(there.as_deref_mut());
        let after = there.map_or(0, |answer| answer.bytes());
        shard.bytes = shard.bytes - before + after;
        let is_made = made.is_some();
        if let Some(answer) = made {
            shard.put(key.0, answer);
        }
        shard.shrink(); // the one that stayed may have grown
        is_made
    }

    /// Changes an answer, if there is one.
    pub(super) fn update<R>(
        &self,
        key: AnswerKey,
        change: impl FnOnce(&mut T) -> Option<R>,
    ) -> Option<R> {
        let mut shard = self.shard(key);
        let answer = shard.answer_mut(key.0)?;
        let before = answer.bytes();
        let changed = change(answer);
        let after = answer.bytes();
        shard.bytes = shard.bytes - before + after;
        shard.shrink();
        changed
    }

    pub(super) fn forget(&self, key: AnswerKey) {
        self.shard(key).remove(key.0);
    }

    pub(super) fn forget_all(&self) {
        for shard in &self.0 {
            shard.lock().unwrap_or_else(PoisonError::into_inner).clear();
        }
    }

    /// Bytes that they take beside their places.
    pub(super) fn bytes(&self) -> u64 {
        let bytes = |shard: &Mutex<Shard<T>>| {
            shard.lock().unwrap_or_else(PoisonError::into_inner).bytes as u64
        };
        self.0.iter().map(bytes).sum()
    }

    /// How many are remembered.
    pub(super) fn count(&self) -> u64 {
        let count = |shard: &Mutex<Shard<T>>| {
            shard.lock().unwrap_or_else(PoisonError::into_inner).places.len() as u64
        };
        self.0.iter().map(count).sum()
    }
}

impl<T: Weighed> Shard<T> {
    fn clear(&mut self) {
        (self.places, self.entries, self.free) = Default::default();
        (self.hand, self.bytes) = (0, 0);
    }

    fn answer_mut(&mut self, key: u64) -> Option<&mut T> {
        let entry = &mut self.entries[*self.places.get(&key)? as usize];
        entry.used = true;
        entry.answer.as_mut()
    }

    fn put(&mut self, key: u64, answer: T) {
        self.bytes += answer.bytes();
        if let Some(place) = self.places.get(&key) {
            let before = self.entries[*place as usize].answer.replace(answer);
            self.bytes -= before.map_or(0, |before| before.bytes());
        } else {
            let place = self.free_place();
            self.places.insert(key, place);
            self.entries[place as usize] = Entry { key, used: false, answer: Some(answer) };
        }
    }

    fn free_place(&mut self) -> u32 {
        if self.places.len() >= self.count_max {
            self.drop_one();
        }
        self.free.pop().unwrap_or_else(|| {
            self.entries.push(Entry { key: 0, used: false, answer: None });
            self.entries.len() as u32 - 1
        })
    }

    /// Drops what was not used for a while, until the rest weighs no more than it may.
    fn shrink(&mut self) {
        while self.bytes > self.bytes_max && !self.places.is_empty() {
            self.drop_one();
        }
    }

    /// Drops an answer. There is one.
    fn drop_one(&mut self) {
        loop {
            let count = self.entries.len();
            let entry = &mut self.entries[self.hand];
            self.hand = (self.hand + 1) % count;
            let (key, was_used) = (entry.key, std::mem::take(&mut entry.used));
            if entry.answer.is_some() && !was_used {
                return self.remove(key);
            }
        }
    }

    fn remove(&mut self, key: u64) {
        if let Some(place) = self.places.remove(&key) {
            let gone = self.entries[place as usize].answer.take();
            self.bytes -= gone.map_or(0, |gone| gone.bytes());
            self.free.push(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use dray_core::FileId;

    use super::*;

    impl Weighed for u64 {
        fn bytes(&self) -> usize {
            *self as usize % 1000
        }
    }

    fn remember(answers: &Answers<u64>, ino: u64, answer: u64) -> bool {
        answers.remember(key(ino), |_| Some(answer))
    }

    fn key(ino: u64) -> AnswerKey {
        AnswerKey::of_attributes(FileId { ino, generation: 0 })
    }

    fn found(answers: &Answers<u64>, ino: u64) -> Option<u64> {
        answers.find(key(ino), |answer| Some(*answer))
    }

    #[test]
    fn answers_are_remembered_and_forgotten() {
        let answers = Answers::small(1 << 20);
        assert!(remember(&answers, 1, 10) && remember(&answers, 1, 11));
        assert!(!answers.remember(key(2), |_| None));
        assert_eq!([1, 2].map(|ino| found(&answers, ino)), [Some(11), None]);
        answers.forget(key(1));
        assert_eq!((found(&answers, 1), answers.count()), (None, 0));
        remember(&answers, 3, 30);
        answers.update(key(3), |answer| Some(std::mem::replace(answer, 31)));
        assert_eq!((found(&answers, 3), answers.bytes()), (Some(31), 31));
        answers.forget_all();
        assert_eq!((found(&answers, 3), answers.count(), answers.bytes()), (None, 0, 0));
    }

    #[test]
    fn a_full_memory_keeps_what_is_used() {
        let answers = Answers::small(1 << 30);
        for ino in 0..2 * ANSWERS_MAX as u64 {
            assert!(remember(&answers, ino, ino));
            assert_eq!(found(&answers, 0), Some(0), "it is used all the time");
        }
        assert!(answers.count() <= ANSWERS_MAX as u64);
        assert!(answers.count() > ANSWERS_MAX as u64 / 10 * 9);
        assert_eq!(found(&answers, 1), None);
    }

    // proves: P231
    #[test]
    fn answers_weigh_no_more_than_they_may() {
        let answers = Answers::large(10_000);
        for ino in 0..1000 {
            remember(&answers, ino, 999);
            assert!(answers.bytes() <= 10_000 && found(&answers, 0) == Some(999));
        }
        assert_eq!((answers.count(), answers.bytes()), (10, 9990));
        answers.update(key(0), |answer| Some(std::mem::replace(answer, 0)));
        assert_eq!(answers.bytes(), 8991);
    }

    /// The pages of a large directory were added to its listing, and nobody looked at the sum.
    // proves: P231
    #[test]
    fn an_answer_that_grows_where_it_is_weighs_no_more_than_it_may() {
        let answers = Answers::large(1500);
        for ino in 0..3 {
            remember(&answers, ino, 1);
            answers.remember(key(ino), |known| {
                *known? = 900;
                None
            });
            assert!(answers.bytes() <= 1500, "{}", answers.bytes());
        }
    }
}
