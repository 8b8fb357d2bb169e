//! The callers that a connection speaks for, by the numbers that its client gave them.

use std::sync::Arc;

use dray_core::Identity;

use crate::wire::{Input, Malformed};

/// Identities that one connection may define.
const IDENTITIES_MAX: usize = 256;
/// What they may take together, bytes: a group each takes four.
const IDENTITIES_MAX_BYTES: usize = 4 << 20;

/// Whom the identity numbers of a connection stand for.
#[derive(Default)]
pub(crate) struct Identities {
    known: Vec<Option<Arc<Identity>>>,
    bytes: usize,
}

impl Identities {
    /// The one that `index` stands for, if it was defined.
    pub(crate) fn get(&self, index: u32) -> Option<Arc<Identity>> {
        self.known.get(index as usize).cloned().flatten()
    }

    /// Takes a definition. Errors: it is none, or there are too many.
    pub(crate) fn define(&mut self, mut input: Input<'_>) -> Result<(), Malformed> {
        let index = input.get::<u32>()? as usize;
        let mut who: Identity = Input::whole(input.0)?;
        if index >= IDENTITIES_MAX {
            return Err(Malformed("more identities than there may be"));
        }
        who.groups.sort_unstable(); // membership is looked up by bisection
        if self.known.len() <= index {
            self.known.resize(index + 1, None);
        }
        let before = self.known[index].as_deref().map_or(0, bytes_of);
        self.bytes = self.bytes - before + bytes_of(&who);
        if self.bytes > IDENTITIES_MAX_BYTES {
            return Err(Malformed("identities with more groups than there is room for"));
        }
        self.known[index] = Some(Arc::new(who));
        Ok(())
    }
}

fn bytes_of(who: &Identity) -> usize {
    std::mem::size_of_val(&*who.groups) + who.job.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Wire;
    use dray_core::Gid;

    #[test]
    fn what_they_take_is_bounded_and_redefining_frees_it() {
        let definition = |index: u32, groups: u32| {
            let mut message = Vec::new();
            index.put(&mut message);
            let groups = (0..groups).rev().map(Gid).collect();
            Identity { groups, ..Identity::default() }.put(&mut message);
            message
        };
        let mut all = Identities::default();
        let mut define = |index, groups| all.define(Input(&definition(index, groups)));
        for _ in 0..100 {
            define(3, 60_000).unwrap();
        }
        assert!(define(IDENTITIES_MAX as u32, 1).is_err());
        assert!((4..100).any(|index| define(index, 60_000).is_err()));
        assert!(all.get(2).is_none() && all.get(1000).is_none());
        assert!(all.get(3).unwrap().groups.is_sorted(), "membership is looked up by bisection");
    }
}
