//! Targets of different kinds over one store, as front ends of one export are.

use dray_core::Fut;

use super::StepTarget;
use crate::model::{Quirks, StepOutcome};
use crate::step::{Action, SLOTS, Step};

/// Several targets, each a client of the same store. Steps go to them in turn, and those on an open
/// file to the one that opened it.
pub struct FrontEnds {
    targets: Vec<Box<dyn StepTarget>>,
    quirks: Quirks,
    /// The target that has the file of a slot open.
    holders: [Option<usize>; SLOTS],
}

/// The slots that an action uses.
enum Slots {
    None,
    /// Of the file that it opens.
    Opens(u8),
    One(u8),
    Two(u8, u8),
}

impl FrontEnds {
    /// Of at least one target. `quirks`: those of all of them.
    pub fn new(targets: Vec<Box<dyn StepTarget>>, quirks: Quirks) -> FrontEnds {
        assert!(!targets.is_empty(), "a store needs a front end");
        FrontEnds { targets, quirks, holders: [None; SLOTS] }
    }

    fn holder(&self, slot: u8) -> Option<usize> {
        self.holders[usize::from(slot) % SLOTS]
    }

    /// The target that carries a step out; none: it would take two of them.
    fn target_of(&self, step: &Step) -> Option<usize> {
        let by_turns = usize::from(step.client) % self.targets.len();
        match slots(&step.action) {
            Slots::None | Slots::Opens(_) => Some(by_turns),
            Slots::One(slot) => Some(self.holder(slot).unwrap_or(by_turns)),
            Slots::Two(one, other) => match (self.holder(one), self.holder(other)) {
                (Some(one), Some(other)) => (one == other).then_some(one),
                (one, other) => Some(one.or(other).unwrap_or(by_turns)),
            },
        }
    }

    /// `target` has opened a file in `slot`: what another one had there is closed.
    async fn opened(&mut self, target: usize, slot: u8, step: &Step) {
        let before = self.holders[usize::from(slot) % SLOTS].replace(target);
        if let Some(before) = before.filter(|before| *before != target) {
            let close = Step { action: Action::Close { slot }, ..step.clone() };
            self.targets[before].apply(&close).await;
        }
    }

    async fn carry_out(&mut self, step: &Step) -> StepOutcome {
        let target = self.target_of(step).expect("what takes two is left out");
        let outcome = self.targets[target].apply(step).await;
        match slots(&step.action) {
            Slots::Opens(slot) if outcome == StepOutcome::Done => {
                self.opened(target, slot, step).await;
            }
            Slots::One(slot) if matches!(step.action, Action::Close { .. }) => {
                self.holders[usize::from(slot) % SLOTS] = None;
            }
            Slots::None | Slots::Opens(_) | Slots::One(_) | Slots::Two(..) => {}
        }
        outcome
    }
}

impl StepTarget for FrontEnds {
    fn quirks(&self) -> Quirks {
        self.quirks
    }

    fn skips(&self, step: &Step) -> bool {
        self.target_of(step).is_none() || self.targets.iter().any(|target| target.skips(step))
    }

    fn prepare(&mut self) -> Fut<'_, Result<(), String>> {
        self.targets[0].prepare()
    }

    fn apply<'a>(&'a mut self, step: &'a Step) -> Fut<'a, StepOutcome> {
        Box::pin(self.carry_out(step))
    }
}

fn slots(action: &Action) -> Slots {
    match action {
        Action::Open { slot, .. } | Action::Create { slot, .. } | Action::Tmpfile { slot, .. } => {
            Slots::Opens(*slot)
        }
        Action::LinkSlot { slot, .. }
        | Action::Close { slot }
        | Action::Read { slot, .. }
        | Action::Write { slot, .. }
        | Action::Fsync { slot }
        | Action::Fstat { slot }
        | Action::Ftruncate { slot, .. }
        | Action::Fallocate { slot, .. }
        | Action::Seek { slot, .. } => Slots::One(*slot),
        Action::CopyRange { from, to, .. } => Slots::Two(*from, *to),
        Action::Mkdir { .. }
        | Action::Mknod { .. }
        | Action::Symlink { .. }
        | Action::Link { .. }
        | Action::Unlink { .. }
        | Action::Rmdir { .. }
        | Action::Rename { .. }
        | Action::Lstat { .. }
        | Action::Chmod { .. }
        | Action::Lchown { .. }
        | Action::Truncate { .. }
        | Action::Utimens { .. }
        | Action::Readlink { .. }
        | Action::Access { .. }
        | Action::List { .. }
        | Action::Setxattr { .. }
        | Action::Getxattr { .. }
        | Action::Listxattr { .. }
        | Action::Removexattr { .. } => Slots::None,
    }
}
