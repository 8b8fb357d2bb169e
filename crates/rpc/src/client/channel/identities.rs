//! The identities of callers on a connection. Each is sent once and named by a number from then on.

use std::sync::Arc;

use dray_core::Identity;

use crate::wire::{Kind, Wire};

/// Identities that a connection remembers; the oldest is redefined for the next.
const IDENTITIES_MAX: usize = 256;

/// The identities that the server knows on this connection, or is about to.
#[derive(Default)]
pub(super) struct IdentityNumbers {
    known: Vec<(Arc<Identity>, bool)>,
    next: usize,
}

impl IdentityNumbers {
    /// The number that stands for `who`.
    pub(super) fn index(&mut self, who: &Arc<Identity>) -> u32 {
        let same = |known: &(Arc<Identity>, bool)| Arc::ptr_eq(&known.0, who) || known.0 == *who;
        if let Some(index) = self.known.iter().position(same) {
            return index as u32;
        }
        if self.known.len() < IDENTITIES_MAX {
            self.known.push((who.clone(), false));
            return self.known.len() as u32 - 1;
        }
        let index = self.next;
        self.next = (self.next + 1) % IDENTITIES_MAX;
        self.known[index] = (who.clone(), false);
        index as u32
    }

    /// The server has not heard of it.
    pub(super) fn forget(&mut self, who: &Arc<Identity>) {
        let same = self.known.iter_mut().filter(|(known, _)| known == who);
        same.for_each(|(_, defined)| *defined = false);
    }

    /// A new connection has heard of none.
    pub(super) fn forget_all(&mut self) {
        self.known.iter_mut().for_each(|(_, defined)| *defined = false);
    }

    /// The message that defines it, unless this connection has had it.
    pub(super) fn define(&mut self, index: u32) -> Option<Vec<u8>> {
        let (who, defined) = self.known.get_mut(index as usize)?;
        if std::mem::replace(defined, true) {
            return None;
        }
        let mut message = Vec::new();
        Kind::Identity.put(&mut message);
        index.put(&mut message);
        who.put(&mut message);
        Some(message)
    }
}
