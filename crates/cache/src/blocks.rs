//! Which blocks of a file are resident.

/// The unit of what is kept, bytes.
pub const BLOCK_BYTES: u64 = 64 << 10;

/// One bit for each block of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BlockSet {
    words: Vec<u64>,
    count: u64,
}

/// How many blocks a file of so many bytes has.
pub(crate) fn blocks_of(size_bytes: u64) -> u64 {
    size_bytes.div_ceil(BLOCK_BYTES)
}

impl BlockSet {
    /// From words as [`BlockSet::words`] gives them. None: they are not those of a file of `blocks`.
    pub(crate) fn from_words(words: Vec<u64>, blocks: u64) -> Option<BlockSet> {
        let fits = words.len() as u64 <= blocks.div_ceil(64);
        let count = words.iter().map(|word| u64::from(word.count_ones())).sum();
        let last = words.iter().rposition(|word| *word != 0);
        let within = last.is_none_or(|index| {
            index as u64 * 64 + 63 - u64::from(words[index].leading_zeros()) < blocks
        });
        (fits && within).then_some(BlockSet { words, count })
    }

    pub(crate) fn words(&self) -> &[u64] {
        &self.words
    }

    /// How many are in it.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    pub(crate) fn contains(&self, block: u64) -> bool {
        let word = self.words.get((block / 64) as usize);
        word.is_some_and(|word| word >> (block % 64) & 1 != 0)
    }

    /// Whether all of `first..end` are in it.
    pub(crate) fn contains_all(&self, first: u64, end: u64) -> bool {
        (first..end).all(|block| self.contains(block))
    }

    pub(crate) fn insert(&mut self, block: u64) {
        let index = (block / 64) as usize;
        if self.words.len() <= index {
            self.words.resize(index + 1, 0);
        }
        let bit = 1 << (block % 64);
        self.count += u64::from(self.words[index] & bit == 0);
        self.words[index] |= bit;
    }

    /// Adds all of `other`: those that another process has stored.
    pub(crate) fn join(&mut self, other: &BlockSet) {
        if self.words.len() < other.words.len() {
            self.words.resize(other.words.len(), 0);
        }
        self.words.iter_mut().zip(&other.words).for_each(|(word, more)| *word |= more);
        self.count = self.words.iter().map(|word| u64::from(word.count_ones())).sum();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_counted_once() {
        let mut set = BlockSet::default();
        for block in [0, 3, 64, 3, 200] {
            set.insert(block);
        }
        assert_eq!(set.count(), 4);
        assert!(set.contains(64) && !set.contains(65) && !set.contains(10_000));
        set.insert(1);
        assert!(set.contains_all(0, 2) && !set.contains_all(0, 3) && set.contains_all(5, 5));
        let mut other = BlockSet::default();
        other.insert(2);
        other.join(&set);
        assert!(other.contains_all(0, 4) && other.count() == 6);
    }

    #[test]
    fn words_of_another_file_are_refused() {
        let mut set = BlockSet::default();
        set.insert(70);
        let words = set.words().to_vec();
        assert_eq!(BlockSet::from_words(words.clone(), 71), Some(set));
        assert_eq!(BlockSet::from_words(words.clone(), 70), None);
        assert_eq!(BlockSet::from_words(words, 1), None);
    }
}
