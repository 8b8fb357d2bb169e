//! The identities of callers on a connection. Each is sent once and named by a number from then on.

use std::sync::Arc;

use dray_core::{Context, Identity, NodeId};

use crate::wire::{Kind, Wire};

/// Identities that a connection remembers; the oldest is redefined for the next.
const IDENTITIES_MAX: usize = 256;

/// A caller and its node. Calls name both by one number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CallerAtNode {
    who: Arc<Identity>,
    /// Where the call began, if that is not this client; else [`NodeId::OWN`].
    node: NodeId,
}

impl CallerAtNode {
    /// The caller of `cx`, for the client that is `own`.
    pub(super) fn of(cx: &Context, own: NodeId) -> CallerAtNode {
        let node = if cx.origin.node == own { NodeId::OWN } else { cx.origin.node };
        CallerAtNode { who: cx.who.clone(), node }
    }

    /// This client itself.
    pub(super) fn itself() -> CallerAtNode {
        CallerAtNode { who: Identity::system(), node: NodeId::OWN }
    }

    fn is(&self, other: &CallerAtNode) -> bool {
        self.node == other.node && (Arc::ptr_eq(&self.who, &other.who) || self.who == other.who)
    }
}

/// The callers that the server knows on this connection, or is about to.
#[derive(Default)]
pub(super) struct IdentityNumbers {
    known: Vec<(CallerAtNode, bool)>,
    next: usize,
}

impl IdentityNumbers {
    /// The number that stands for `caller`.
    pub(super) fn index(&mut self, caller: &CallerAtNode) -> u32 {
        if let Some(index) = self.known.iter().position(|(known, _)| known.is(caller)) {
            return index as u32;
        }
        if self.known.len() < IDENTITIES_MAX {
            self.known.push((caller.clone(), false));
            return self.known.len() as u32 - 1;
        }
        let index = self.next;
        self.next = (self.next + 1) % IDENTITIES_MAX;
        self.known[index] = (caller.clone(), false);
        index as u32
    }

    /// The server has not heard of it.
    pub(super) fn forget(&mut self, caller: &CallerAtNode) {
        let same = self.known.iter_mut().filter(|(known, _)| known == caller);
        same.for_each(|(_, defined)| *defined = false);
    }

    /// A new connection has heard of none.
    pub(super) fn forget_all(&mut self) {
        self.known.iter_mut().for_each(|(_, defined)| *defined = false);
    }

    /// The message that defines it, unless this connection has had it.
    pub(super) fn define(&mut self, index: u32) -> Option<Vec<u8>> {
        let (CallerAtNode { who, node }, defined) = self.known.get_mut(index as usize)?;
        if std::mem::replace(defined, true) {
            return None;
        }
        let mut message = Vec::new();
        Kind::Identity.put(&mut message);
        index.put(&mut message);
        who.put(&mut message);
        if *node != NodeId::OWN {
            node.put(&mut message); // else it is that of the session
        }
        Some(message)
    }
}
