//! The prediction of what follows a lookup: whether a program that looks names up in a directory
//! opens the files that it finds. The habits are learned as a processor learns of branches (Yeh and
//! Patt, "Two-level adaptive training branch prediction", 1991). There is a count for each
//! directory and each outcome of the lookup before.

use dray_core::{FileId, OpenHow};

/// Directories that are remembered; one that falls together with another takes its place.
const DIRECTORIES: usize = 256;
/// From here on the next lookup is expected to be followed by an opening.
const EXPECTED: u8 = 2;
const MOST: u8 = 3;

#[derive(Clone, Copy)]
struct Habit {
    dir: FileId,
    /// The options with which files were last opened there.
    how: OpenHow,
    /// Whether the last lookup was followed by an opening.
    opened: bool,
    /// How much speaks for an opening, after a lookup that was not followed by one, and after
    /// one that was.
    counts: [u8; 2],
}

/// The habits of all threads of a mount.
pub(super) struct LookupHabits(Box<[Option<Habit>]>);

impl LookupHabits {
    pub(super) fn new() -> LookupHabits {
        LookupHabits(vec![None; DIRECTORIES].into())
    }

    fn place(dir: FileId) -> usize {
        // Fibonacci hashing (Knuth 6.4): inode numbers come in runs.
        let mixed = (dir.ino ^ dir.generation).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48;
        mixed as usize % DIRECTORIES
    }

    /// How the next file looked up in `dir` will be opened at once; none: it will not.
    pub(super) fn expected(&self, dir: FileId) -> Option<OpenHow> {
        let habit = self.0[LookupHabits::place(dir)].filter(|habit| habit.dir == dir)?;
        (habit.counts[usize::from(habit.opened)] >= EXPECTED).then_some(habit.how)
    }

    /// A regular file that was looked up was opened, or not.
    pub(super) fn learn(&mut self, dir: FileId, opened: Option<OpenHow>) {
        let place = &mut self.0[LookupHabits::place(dir)];
        let known = place.filter(|habit| habit.dir == dir);
        let mut habit = match (known, opened) {
            (Some(known), _) => known,
            (None, Some(how)) => Habit { dir, how, opened: true, counts: [0; 2] },
            (None, None) => return, // as good as unknown
        };
        let count = &mut habit.counts[usize::from(habit.opened)];
        match opened {
            Some(how) if how == habit.how => *count = (*count + 2).min(MOST),
            Some(how) => (habit.how, *count) = (how, 1),
            None => *count = count.saturating_sub(1),
        }
        habit.opened = opened.is_some();
        *place = Some(habit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIR: FileId = FileId { ino: 5, generation: 1 };
    const READ: Option<OpenHow> = Some(OpenHow::READ);

    /// Lets it learn `pattern` again and again. Returns how often it was wrong in the last round:
    /// that a file would be opened, and that it would not.
    fn wrong(pattern: &[Option<OpenHow>]) -> (usize, usize) {
        let mut habits = LookupHabits::new();
        let (mut in_vain, mut missed) = (0, 0);
        for round in 0..8 {
            for what in pattern {
                let expected = habits.expected(DIR);
                if round == 7 {
                    in_vain += usize::from(expected.is_some() && expected != *what);
                    missed += usize::from(what.is_some() && expected != *what);
                }
                habits.learn(DIR, *what);
            }
        }
        (in_vain, missed)
    }

    #[test]
    fn the_second_file_is_expected_to_be_opened_as_the_first_was() {
        let mut habits = LookupHabits::new();
        assert_eq!(habits.expected(DIR), None);
        habits.learn(DIR, READ);
        assert_eq!(habits.expected(DIR), READ);
        assert_eq!(habits.expected(FileId { ino: 6, generation: 1 }), None);
    }

    #[test]
    fn what_follows_by_rule_is_expected() {
        assert_eq!(wrong(&[READ]), (0, 0));
        assert_eq!(wrong(&[None]), (0, 0));
        assert_eq!(wrong(&[None, READ]), (0, 0), "a look at it and then its opening, as tar does");
    }

    #[test]
    fn lookups_without_opens_are_soon_learned() {
        for before in [&[READ][..], &[None, READ], &[READ, READ, None]] {
            let mut habits = LookupHabits::new();
            (0..100).for_each(|time| habits.learn(DIR, before[time % before.len()]));
            let in_vain = (0..100).filter(|_| {
                let expected = habits.expected(DIR).is_some();
                habits.learn(DIR, None);
                expected
            });
            assert!(in_vain.count() <= 3);
        }
    }

    #[test]
    fn another_way_of_opening_is_learned() {
        let mut habits = LookupHabits::new();
        let write = Some(OpenHow::READ_WRITE);
        (0..5).for_each(|_| habits.learn(DIR, READ));
        (0..2).for_each(|_| habits.learn(DIR, write));
        assert_eq!(habits.expected(DIR), write);
    }
}
