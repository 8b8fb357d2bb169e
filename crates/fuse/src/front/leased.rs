//! Answers under leases on their way to the kernel (ADR 0049).
//!
//! A recall may arrive while an answer is on its way. The answer is published first: that a file's
//! attributes, or a name in a directory, go to the kernel with a time. Then it is looked whether anything
//! was recalled since the file system was asked. A recall notes itself first and looks for what is
//! published then. So one of the two sees the other.

use std::time::Duration;

use dray_core::{Attr, Error, FileId, Name};

use crate::front::Worker;
use crate::proto::reply::{KernelValidity, NodeRef};
use crate::state::changes::ChangeNumber;

/// A file that an answer is about, and how it is known there.
#[derive(Clone, Copy)]
pub(super) struct Answered<'a> {
    /// The directory and the name that led to it.
    pub(super) place: Option<(FileId, &'a Name)>,
    pub(super) id: FileId,
    pub(super) node: NodeRef,
    /// When the file system was asked ([`Worker::asked`]).
    pub(super) asked: ChangeNumber,
}

impl Worker {
    /// To be noted before the file system is asked for what the kernel may believe.
    pub(super) fn asked(&self) -> ChangeNumber {
        self.shared.changes.now()
    }

    /// How long the kernel may believe an entry.
    pub(super) fn entry_validity(&self, attr: &Attr, answered: Answered<'_>) -> KernelValidity {
        let mut valid = self.shared.mode.entry(attr);
        if !self.shared.mode.is_leased() {
            return valid;
        }
        // A recall finds a file by its id, and so one node of it.
        let is_found = self.shared.nodes.find(answered.id) == Some(answered.node.node);
        let node = answered.node.node;
        if !is_found
            || !self.publish_attributes(answered.id, answered.asked, &valid.attr)
            || self.doubts_pages(node)
            || self.doubts_listing(node)
        {
            valid.attr = Default::default();
        }
        let named = answered.place.is_some_and(|place| {
            !valid.entry.is_zero() && self.publish_name(place, answered.asked)
        });
        if !named {
            valid.entry = Default::default();
        }
        valid
    }

    /// How long the kernel may believe the attributes of a node.
    pub(super) fn attributes_validity(
        &self,
        attr: &Attr,
        node: u64,
        asked: ChangeNumber,
    ) -> Duration {
        let valid = self.shared.mode.attributes(attr);
        if !self.shared.mode.is_leased() || valid.is_zero() {
            return valid;
        }
        let id = self.shared.nodes.id(node).ok();
        let id = id.filter(|id| self.shared.nodes.find(*id) == Some(node));
        let holds = id.is_some_and(|id| self.publish_attributes(id, asked, &valid));
        match holds && !self.doubts_pages(node) && !self.doubts_listing(node) {
            true => valid,
            false => Default::default(),
        }
    }

    /// How long the kernel may believe that a name is absent from a directory.
    pub(super) fn absence_validity(
        &self,
        error: &Error,
        (dir, name): (FileId, &Name),
        asked: ChangeNumber,
    ) -> Duration {
        let valid = self.shared.mode.absence(error);
        match !self.shared.mode.is_leased()
            || valid.is_zero()
            || self.publish_name((dir, name), asked)
        {
            true => valid,
            false => Default::default(),
        }
    }

    /// Whether attributes that were asked for then may be believed.
    fn publish_attributes(&self, id: FileId, asked: ChangeNumber, valid: &Duration) -> bool {
        if valid.is_zero() {
            return false;
        }
        self.shared.published.attributes(id);
        !self.shared.changes.since(asked, id)
    }

    fn publish_name(&self, (dir, name): (FileId, &Name), asked: ChangeNumber) -> bool {
        self.shared.published.name(dir, name);
        !self.shared.changes.since(asked, dir)
    }
}
