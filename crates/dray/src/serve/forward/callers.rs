//! Who the callers of an export are at the servers above, and what they may do there.

use dray_backends::backend::Squash;
use dray_core::{Context, Errno, Error, Op, OpenHow, Result, Uid};

/// Replaces callers, and refuses changes, as the administrator of this server has said.
#[derive(Clone, Copy, Debug)]
pub struct CallerPolicy {
    pub squash: Squash,
    pub read_only: bool,
}

impl CallerPolicy {
    /// Whether each call is passed on as it is.
    pub fn all_pass(&self) -> bool {
        self.squash == Squash::None && !self.read_only
    }

    /// The context of the caller whose identity is replaced; none if it stays as it is. What the server
    /// does by itself is not squashed.
    pub fn replaced(&self, cx: &Context) -> Option<Context> {
        let replaces = match self.squash {
            _ if cx.internal => false,
            Squash::None => false,
            Squash::Root(..) => cx.who.is_root() || cx.who.in_group(dray_core::Gid(0)),
            Squash::All(..) => true,
        };
        let who = || self.squash.map(&cx.who, &self.squash.anonymous());
        replaces.then(|| Context { who: who(), ..cx.clone() })
    }

    /// The user that the caller is above.
    pub fn user_of(&self, cx: &Context) -> Uid {
        if cx.internal { cx.who.uid } else { self.squash.user_of(&cx.who) }
    }

    /// Errors: `EROFS` where changes are refused.
    pub fn may_change(&self, op: Op) -> Result<()> {
        if self.read_only { Err(Error::new(Errno::EROFS).during(op)) } else { Ok(()) }
    }

    /// Errors: `EROFS` for an opening that changes something, or leads to changes.
    pub fn may_open(&self, how: OpenHow, op: Op) -> Result<()> {
        if how.writes() || how.truncates() { self.may_change(op) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use dray_core::{Gid, Identity, NodeId, Pid, RequestId};

    use super::*;

    fn cx(uid: u32, gid: u32) -> Context {
        let who = Identity { uid: Uid(uid), gid: Gid(gid), job: "7".into(), ..Identity::default() };
        Context::new(NodeId(1), RequestId(2), Arc::new(who), Pid(3))
    }

    #[test]
    fn callers_are_squashed_and_keep_job_and_origin() {
        let of = |squash| CallerPolicy { squash, read_only: false };
        let nobody = (Uid(9), Gid(8));
        let root = of(Squash::Root(nobody.0, nobody.1));
        let replaced = root.replaced(&cx(0, 0)).unwrap();
        assert_eq!((replaced.who.uid, replaced.who.gid, &*replaced.who.job), (Uid(9), Gid(8), "7"));
        assert_eq!(replaced.origin, cx(0, 0).origin);
        assert!(root.replaced(&cx(5, 5)).is_none());
        assert_eq!(root.replaced(&cx(5, 0)).unwrap().who.gid, Gid(8));
        assert!(root.replaced(&Context::system()).is_none(), "the server itself");
        let all = of(Squash::All(nobody.0, nobody.1));
        assert_eq!(all.replaced(&cx(5, 5)).unwrap().who.uid, Uid(9));
        assert_eq!((all.user_of(&cx(5, 5)), root.user_of(&cx(5, 5))), (Uid(9), Uid(5)));
        assert!(of(Squash::None).replaced(&cx(0, 0)).is_none() && of(Squash::None).all_pass());
    }

    #[test]
    fn changes_are_refused_where_they_are_to_be() {
        let callers = CallerPolicy { squash: Squash::None, read_only: true };
        assert_eq!(callers.may_change(Op::Write).unwrap_err().errno(), Errno::EROFS);
        assert!(callers.may_open(OpenHow::READ, Op::Open).is_ok() && !callers.all_pass());
        for how in [OpenHow::READ_WRITE, OpenHow::new(libc::O_RDONLY | libc::O_TRUNC)] {
            assert!(callers.may_open(how, Op::Open).is_err());
        }
    }
}
