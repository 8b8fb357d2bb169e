//! The callers that a connection speaks for, by the numbers that its client gave them.

use std::sync::Arc;

use dray_core::{GROUPS_MAX, Gid, Identity, NodeId, Uid};
use dray_fabric::{Charge, PoolShare};

use crate::server::counted::CALLERS_FREE_BYTES;
use crate::wire::{Input, Malformed};

/// Identities that one connection may define.
const IDENTITIES_MAX: usize = 256;
/// Longest name of a job, bytes: clients send 64 at most.
const JOB_MAX_BYTES: usize = 256;
/// The memory that callers take is counted in steps of this size, bytes.
const STEP_BYTES: usize = 4096;

/// For whom a connection may speak.
#[derive(Default)]
pub(crate) enum CallerScope {
    /// The peer is root of its machine, or has the key: it is trusted to name the caller.
    #[default]
    Anybody,
    /// The caller is this user alone, whatever it says.
    Only(Identity),
}

impl CallerScope {
    /// The scope of a user of this machine, as the kernel reports the user.
    pub(crate) fn only(uid: Uid, gid: Gid, mut groups: Vec<Gid>) -> CallerScope {
        groups.sort_unstable();
        CallerScope::Only(Identity { uid, gid, groups: groups.into(), ..Identity::default() })
    }

    /// The caller, where the client says that it is `said`. Which of its groups a user acts with is
    /// its own affair.
    fn squash(&self, said: Identity) -> Identity {
        let CallerScope::Only(user) = self else { return said };
        if said.uid != user.uid {
            return Identity { job: said.job, ..user.clone() };
        }
        let has = |gid: &Gid| *gid == user.gid || user.groups.binary_search(gid).is_ok();
        let gid = if has(&said.gid) { said.gid } else { user.gid };
        let groups = said.groups.iter().filter(|gid| has(gid)).copied().collect();
        Identity { gid, groups, ..said }
    }
}

/// A caller.
#[derive(Clone)]
pub(crate) struct KnownCaller {
    /// Without groups, if there are too many.
    pub(crate) who: Arc<Identity>,
    /// The node where the caller is, if that is not the client itself: the client is then a server
    /// to it.
    pub(crate) node: Option<NodeId>,
    /// The caller is in more groups than a server takes. A call that its groups can decide is
    /// refused.
    pub(crate) too_many_groups: bool,
}

/// The callers that the identity numbers of a connection stand for.
#[derive(Default)]
pub(crate) struct Identities {
    whom: CallerScope,
    known: Vec<Option<KnownCaller>>,
    bytes: usize,
    /// The charge for these callers within the share of the session.
    charge: Option<Charge>,
}

impl Identities {
    /// The one that `index` stands for, if it was defined.
    pub(crate) fn get(&self, index: u32) -> Option<KnownCaller> {
        self.known.get(index as usize).cloned().flatten()
    }

    /// Has all callers that are defined from now on be `whom`, or among them.
    pub(crate) fn speaks_for(&mut self, whom: CallerScope) {
        self.whom = whom;
    }

    /// Takes a definition, which takes of the memory in `share` what is beyond a little. Errors: it
    /// is none, there are too many, or there is no memory for it.
    pub(crate) fn define(
        &mut self,
        mut input: Input<'_>,
        share: &PoolShare,
    ) -> Result<(), Malformed> {
        let index = input.get::<u32>()? as usize;
        let mut who = self.whom.squash(input.get()?);
        let node = if input.0.is_empty() { None } else { Some(Input::whole(input.0)?) };
        if index >= IDENTITIES_MAX {
            return Err(Malformed("more identities than there may be"));
        }
        if who.job.len() > JOB_MAX_BYTES {
            return Err(Malformed("a job of a longer name than there may be"));
        }
        let too_many_groups = who.groups.len() > GROUPS_MAX;
        if too_many_groups {
            who.groups = Box::default();
        }
        who.groups.sort_unstable(); // membership is looked up by bisection
        if self.known.len() <= index {
            self.known.resize(index + 1, None);
        }
        let before = self.known[index].as_ref().map_or(0, |known| bytes_of(&known.who));
        self.bytes = self.bytes - before + bytes_of(&who);
        if !self.count(share) {
            return Err(Malformed("identities with more groups than there is room for"));
        }
        self.known[index] = Some(KnownCaller { who: Arc::new(who), node, too_many_groups });
        Ok(())
    }

    /// Whether there is room for what it takes now.
    fn count(&mut self, share: &PoolShare) -> bool {
        let counted = self.bytes.saturating_sub(CALLERS_FREE_BYTES).next_multiple_of(STEP_BYTES);
        match &mut self.charge {
            Some(charge) => charge.resize(counted),
            None if counted == 0 => true,
            none => {
                *none = share.try_charge(counted);
                none.is_some()
            }
        }
    }
}

fn bytes_of(who: &Identity) -> usize {
    size_of::<Identity>() + size_of_val(&*who.groups) + who.job.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Wire;
    use dray_fabric::BufferPool;

    // proves: P118
    #[test]
    fn a_user_of_this_machine_cannot_act_as_another_user() {
        let ids = |uid, gid, groups: &[u32]| Identity {
            uid: Uid(uid),
            gid: Gid(gid),
            groups: groups.iter().copied().map(Gid).collect(),
            job: "7".into(),
        };
        let whom = CallerScope::only(Uid(1000), Gid(100), vec![Gid(30), Gid(20)]);
        for (said, is) in [
            (ids(0, 0, &[0, 20]), ids(1000, 100, &[20, 30])),
            (ids(1001, 100, &[]), ids(1000, 100, &[20, 30])),
            (ids(1000, 0, &[0, 20, 100]), ids(1000, 100, &[20, 100])),
            (ids(1000, 30, &[30]), ids(1000, 30, &[30])),
            (ids(1000, 100, &[]), ids(1000, 100, &[])),
        ] {
            assert_eq!(whom.squash(said), is);
        }
        assert_eq!(CallerScope::Anybody.squash(ids(0, 0, &[1])), ids(0, 0, &[1]));
    }

    /// Each connection had 4 MiB beside all other bounds, and a thousand of them a GiB.
    #[test]
    fn what_they_take_is_counted_in_the_share_and_redefining_frees_it() {
        let definition = |index: u32, groups: u32| {
            let mut message = Vec::new();
            index.put(&mut message);
            let groups = (0..groups).rev().map(Gid).collect();
            Identity { groups, ..Identity::default() }.put(&mut message);
            message
        };
        let mut all = Identities::default();
        let pool = BufferPool::new(256 << 10, 0);
        let (share, other) = (pool.share(), pool.share());
        let define = |all: &mut Identities, index, groups| {
            all.define(Input(&definition(index, groups)), &share)
        };
        for _ in 0..5_000 {
            define(&mut all, 3, GROUPS_MAX as u32).unwrap();
        }
        define(&mut all, 4, GROUPS_MAX as u32 + 1).unwrap();
        assert!(define(&mut all, IDENTITIES_MAX as u32, 1).is_err());
        let crowded = all.get(4).unwrap();
        assert!(crowded.too_many_groups && crowded.who.groups.is_empty());
        assert!(!all.get(3).unwrap().too_many_groups);
        assert_eq!(share.used_bytes(), 0, "an ordinary mount's are not counted");
        let taken =
            (5..200).map_while(|index| define(&mut all, index, GROUPS_MAX as u32).ok()).count();
        assert!((30..36).contains(&taken), "{taken}: half of what there is");
        assert!(share.used_bytes() <= 128 << 10 && other.try_charge(60 << 10).is_some());
        assert!(all.get(2).is_none() && all.get(1000).is_none());
        assert!(all.get(3).unwrap().who.groups.is_sorted(), "membership is looked up by bisection");
        drop(all);
        assert_eq!(pool.stats().used_bytes, 0);
    }
}
