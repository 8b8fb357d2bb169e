//! Which bytes of a block are pending.

/// Bytes of a block, from `start` to before `end`, counted from the block's beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct BlockExtent {
    pub(super) start: u32,
    pub(super) end: u32,
}

impl BlockExtent {
    pub(super) fn len_bytes(self) -> usize {
        (self.end - self.start) as usize
    }

    fn touches(self, other: BlockExtent) -> bool {
        self.start <= other.end && other.start <= self.end
    }

    fn overlaps(self, other: BlockExtent) -> bool {
        self.start < other.end && other.start < self.end
    }
}

/// Most extents of a block. Writers that leave more gaps than that do not fill the block soon.
pub(super) const EXTENTS_MAX: usize = 16;

/// The pending bytes of a block: extents in order, with gaps between them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Extents {
    list: [BlockExtent; EXTENTS_MAX],
    count: usize,
}

impl Extents {
    /// From what was noted, if it is in order and within `block_bytes`.
    pub(super) fn checked(list: &[BlockExtent], block_bytes: u32) -> Option<Extents> {
        let mut extents = Extents::default();
        for one in list {
            let behind = extents.iter().next_back().is_none_or(|last| last.end < one.start);
            if !behind || one.start >= one.end || one.end > block_bytes {
                return None;
            }
            *extents.list.get_mut(extents.count)? = *one;
            extents.count += 1;
        }
        Some(extents)
    }

    /// With `new` in addition. None: there would be too many.
    pub(super) fn with(&self, new: BlockExtent) -> Option<Extents> {
        let mut merged = Extents::default();
        let mut new = Some(new);
        for one in self.iter() {
            match new {
                Some(wide) if wide.touches(one) => {
                    let (start, end) = (wide.start.min(one.start), wide.end.max(one.end));
                    new = Some(BlockExtent { start, end });
                }
                Some(before) if before.end < one.start => {
                    merged.push(before)?;
                    merged.push(one)?;
                    new = None;
                }
                Some(_) | None => merged.push(one)?,
            }
        }
        new.map_or(Some(()), |last| merged.push(last))?;
        Some(merged)
    }

    fn push(&mut self, one: BlockExtent) -> Option<()> {
        *self.list.get_mut(self.count)? = one;
        self.count += 1;
        Some(())
    }

    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = BlockExtent> + '_ {
        self.list[..self.count].iter().copied()
    }

    /// Whether all of `wanted` is pending.
    pub(super) fn cover(&self, wanted: BlockExtent) -> bool {
        self.iter().any(|one| one.start <= wanted.start && wanted.end <= one.end)
    }

    /// Whether some of `wanted` is pending.
    pub(super) fn overlap(&self, wanted: BlockExtent) -> bool {
        self.iter().any(|one| one.overlaps(wanted))
    }

    pub(super) fn bytes(&self) -> u64 {
        self.iter().map(|one| one.len_bytes() as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(list: &[(u32, u32)]) -> Extents {
        let list: Vec<_> = list.iter().map(|&(start, end)| BlockExtent { start, end }).collect();
        Extents::checked(&list, 1 << 20).expect("in order")
    }

    #[test]
    fn writes_that_touch_become_one() {
        let with = |list: &[(u32, u32)], (start, end)| of(list).with(BlockExtent { start, end });
        assert_eq!(with(&[], (0, 4)), Some(of(&[(0, 4)])));
        assert_eq!(with(&[(0, 4)], (4, 8)), Some(of(&[(0, 8)])));
        assert_eq!(with(&[(4, 8)], (0, 4)), Some(of(&[(0, 8)])));
        assert_eq!(with(&[(0, 4), (8, 12)], (4, 8)), Some(of(&[(0, 12)])));
        assert_eq!(with(&[(0, 4), (8, 12)], (5, 7)), Some(of(&[(0, 4), (5, 7), (8, 12)])));
        assert_eq!(with(&[(0, 4), (8, 12)], (20, 21)), Some(of(&[(0, 4), (8, 12), (20, 21)])));
        assert_eq!(with(&[(2, 4), (8, 12)], (0, 100)), Some(of(&[(0, 100)])));
    }

    /// Against a set of bytes.
    #[test]
    fn what_is_pending_is_what_was_written() {
        let mut random = 7u64;
        let mut draw = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % below
        };
        for _ in 0..500 {
            let (mut extents, mut bytes) = (Extents::default(), [false; 64]);
            for _ in 0..12 {
                let start = draw(60) as u32;
                let end = start + 1 + draw(u64::from(64 - start - 1).max(1)) as u32;
                extents = extents.with(BlockExtent { start, end }).expect("few");
                bytes[start as usize..end as usize].fill(true);
            }
            for start in 0..63u32 {
                let (one, two) = (bytes[start as usize], bytes[start as usize + 1]);
                assert_eq!(extents.overlap(BlockExtent { start, end: start + 1 }), one);
                assert_eq!(extents.cover(BlockExtent { start, end: start + 2 }), one && two);
            }
            assert_eq!(extents.bytes() as usize, bytes.iter().filter(|byte| **byte).count());
        }
    }

    #[test]
    fn there_are_not_too_many() {
        let mut extents = Extents::default();
        for number in 0..EXTENTS_MAX as u32 {
            extents =
                extents.with(BlockExtent { start: 10 * number, end: 10 * number + 1 }).unwrap();
        }
        assert_eq!(extents.with(BlockExtent { start: 5, end: 6 }), None);
        assert!(extents.with(BlockExtent { start: 1, end: 10 }).is_some(), "it closes a gap");
    }

    #[test]
    fn garbage_is_not_taken_for_extents() {
        let bad = |list: &[(u32, u32)]| {
            let list: Vec<_> =
                list.iter().map(|&(start, end)| BlockExtent { start, end }).collect();
            Extents::checked(&list, 100).is_none()
        };
        assert!(bad(&[(4, 4)]) && bad(&[(5, 4)]) && bad(&[(0, 101)]));
        assert!(bad(&[(0, 4), (4, 8)]) && bad(&[(8, 9), (0, 4)]));
        assert!(!bad(&[(0, 4), (5, 100)]));
    }
}
