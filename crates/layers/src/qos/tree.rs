//! The scheduler: which call is next. It has no clock and makes no calls: the time comes as an
//! argument, and the caller says how much room there is below.
//!
//! Nodes make a tree: the export, rules, classes. Calls wait in the leaves, first come first
//! served. Each node has a weight among its siblings, and may have limits and a reservation. The tags
//! are those of mClock (Gulati, Merchant, Varman, OSDI 2010). The weight tag is the start tag of
//! start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996), at each level of the tree.
//!
//! - A node with a limit that is used up does not take part until its limit tag is reached.
//! - A node that has had less than its reservation goes first, the one that is most behind.
//! - Otherwise the child with the smallest start tag is next, from the root down to a leaf.
//!
//! A node that had nothing to do begins at the virtual time of its parent. It does not save up what
//! it did not use, nor pays for what it used while others were idle.

mod usage;

use std::collections::{BTreeSet, VecDeque};

use dray_core::IO_MAX_BYTES;

use super::bucket::{Bucket, Nanos};
use super::meter::Meter;

/// A call that waits, by the caller's number.
pub type WaiterNumber = u32;

/// What one call costs among classes, beside its bytes, at most: bytes.
pub const CALL_COST_BYTES: u64 = 32 << 10;
/// Where the export has a limit of bytes, a call costs as much as the limit allows in this time. Calls without data
/// take nothing of such a limit, and the lower it is, the less they count beside data.
const CALL_COST: Nanos = 100_000;
/// What a reservation that came late may catch up.
const LATE_MAX: Nanos = 100_000_000;
/// How far a class may run ahead with small calls while others wait, bytes of cost at weight 1.
const AHEAD_BYTES: u64 = 256 << 10;
/// Virtual time of one byte at weight 1, where weights are thousandths.
const SCALE: u64 = 1_000_000;
/// Nodes with a reservation that are looked at to find one that may be served.
const LOOKED_AT_MAX: usize = 16;

/// A node of the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeIndex(u32);

impl NodeIndex {
    /// The whole export.
    pub const ROOT: NodeIndex = NodeIndex(0);

    fn at(self) -> usize {
        self.0 as usize
    }
}

/// What a node gets. Zero: none of that kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rates {
    /// Thousandths; at least 1.
    pub weight_milli: u32,
    /// Bytes a second that it has before others are served by their weights.
    pub reservation: u64,
    /// Calls a second, likewise.
    pub reservation_ops: u64,
    /// Bytes a second at most.
    pub limit: u64,
    /// Calls a second at most.
    pub limit_ops: u64,
    /// What it may take ahead of its limits, as time.
    pub burst: Nanos,
}

impl Rates {
    /// Whether there is neither a limit nor a reservation.
    pub fn is_free(&self) -> bool {
        let Rates { reservation, reservation_ops, limit, limit_ops, .. } = *self;
        [reservation, reservation_ops, limit, limit_ops] == [0; 4]
    }
}

impl Default for Rates {
    fn default() -> Rates {
        Rates {
            weight_milli: 1000,
            reservation: 0,
            reservation_ops: 0,
            limit: 0,
            limit_ops: 0,
            burst: 100_000_000,
        }
    }
}

/// A call to be scheduled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// The call's data, bytes.
    pub bytes: u64,
}

impl Cost {
    /// For the weights, where a call costs so much.
    pub fn weighed(self, call_cost_bytes: u64) -> u64 {
        self.bytes.saturating_add(call_cost_bytes)
    }
}

#[derive(Debug)]
struct Node {
    parent: NodeIndex,
    weight_milli: u64,
    /// Of bytes and of calls.
    limits: [Option<Bucket>; 2],
    reservations: [Option<Bucket>; 2],
    /// The virtual time at which its next call starts, among its siblings.
    start: u64,
    /// The virtual time among its children.
    virtual_now: u64,
    /// Children that may be served, by their start.
    active: BTreeSet<(u64, NodeIndex)>,
    /// The node's key among its parent's active children; none: it is not there.
    key: Option<u64>,
    /// When its limit lets it go on, where it is held up.
    held_until: Option<Nanos>,
    /// The node's key among those with a reservation.
    due: Option<Nanos>,
    queue: VecDeque<(WaiterNumber, Cost)>,
    last_used: Nanos,
    meter: Meter,
}

impl Node {
    fn new(parent: NodeIndex, rates: Rates) -> Node {
        let limit = |per_s, large| (per_s > 0).then(|| Bucket::new(per_s, rates.burst, large));
        let reserved = |per_s| (per_s > 0).then(|| Bucket::new(per_s, 0, 1));
        Node {
            parent,
            weight_milli: rates.weight_milli.max(1).into(),
            limits: [limit(rates.limit, IO_MAX_BYTES as u64), limit(rates.limit_ops, 1)],
            reservations: [reserved(rates.reservation), reserved(rates.reservation_ops)],
            start: 0,
            virtual_now: 0,
            active: BTreeSet::new(),
            key: None,
            held_until: None,
            due: None,
            queue: VecDeque::new(),
            last_used: 0,
            meter: Meter::default(),
        }
    }

    /// The limits and reservations of the node.
    fn buckets(&mut self) -> impl Iterator<Item = &mut Option<Bucket>> {
        self.limits.iter_mut().chain(&mut self.reservations)
    }

    fn has_work(&self) -> bool {
        !self.queue.is_empty() || !self.active.is_empty()
    }

    /// When its limits let a call begin. A call without data does not wait for those of bytes. A kernel
    /// that makes a file has its directory locked, and others wait for that.
    fn ready_at(&self, small: bool, has_data: bool) -> Nanos {
        let [bytes, calls] = match small {
            true => self.limits.map(|limit| limit.map(|bucket| bucket.ready_at())),
            false => self.ready_for_large_at(),
        };
        bytes.filter(|_| has_data).max(calls).unwrap_or(0)
    }

    /// When each of its limits lets large calls begin.
    fn ready_for_large_at(&self) -> [Option<Nanos>; 2] {
        self.limits.map(|limit| limit.map(|bucket| bucket.ready_for_large_at()))
    }

    /// Which of its limits lets calls begin last.
    fn slowest_limit(&self) -> usize {
        let [bytes, calls] = self.ready_for_large_at();
        usize::from(calls > bytes)
    }

    /// The earliest time at which one of its reservations is due.
    fn due_at(&self) -> Option<Nanos> {
        self.reservations.iter().flatten().map(|bucket| bucket.ready_at()).min()
    }

    fn charge(&mut self, now: Nanos, cost: Cost) {
        self.meter.take([cost.bytes, 1]);
        for (bucket, units) in self.limits.iter_mut().zip([cost.bytes, 1]) {
            bucket.iter_mut().for_each(|bucket| bucket.take(now, units, 0));
        }
        for (bucket, units) in self.reservations.iter_mut().zip([cost.bytes, 1]) {
            bucket.iter_mut().for_each(|bucket| bucket.take(now, units, LATE_MAX));
        }
        self.last_used = now;
    }

    /// Virtual time of so much cost.
    fn length(&self, cost_bytes: u64) -> u64 {
        cost_bytes.saturating_mul(SCALE) / self.weight_milli
    }
}

/// The scheduler of one export.
#[derive(Debug)]
pub struct Tree {
    nodes: Vec<Node>,
    free: Vec<NodeIndex>,
    /// Nodes that their limits hold up.
    held: BTreeSet<(Nanos, NodeIndex)>,
    /// Nodes with work and a reservation, by when it is due.
    due: BTreeSet<(Nanos, NodeIndex)>,
    waiting: usize,
    /// The nodes with limits or reservations that have worked since their usage was nothing.
    metered: Vec<NodeIndex>,
    metered_at: Nanos,
    call_cost_bytes: u64,
}

impl Tree {
    /// A tree of a root alone.
    pub fn new(root: Rates) -> Tree {
        let nodes = vec![Node::new(NodeIndex::ROOT, root)];
        let (held, due) = (BTreeSet::new(), BTreeSet::new());
        let (free, metered) = (Vec::new(), Vec::new());
        let (waiting, metered_at, call_cost_bytes) = (0, 0, 0);
        let mut tree =
            Tree { nodes, free, held, due, waiting, metered, metered_at, call_cost_bytes };
        tree.renew_call_cost();
        tree
    }

    /// A new child of `parent`. `now`: it counts as used then.
    pub fn add(&mut self, parent: NodeIndex, rates: Rates, now: Nanos) -> NodeIndex {
        let node = Node { last_used: now, ..Node::new(parent, rates) };
        match self.free.pop() {
            Some(index) => {
                self.nodes[index.at()] = node;
                index
            }
            None => {
                let index = u32::try_from(self.nodes.len()).expect("classes are limited");
                self.nodes.push(node);
                NodeIndex(index)
            }
        }
    }

    /// Removes a leaf that nothing waits in. Whether it was one.
    pub fn remove(&mut self, leaf: NodeIndex) -> bool {
        let node = &self.nodes[leaf.at()];
        let is_idle = !node.has_work() && node.held_until.is_none() && node.key.is_none();
        if is_idle {
            self.metered.retain(|one| *one != leaf);
            self.free.push(leaf);
        }
        is_idle
    }

    /// When the last call of a node began.
    pub fn last_used(&self, node: NodeIndex) -> Nanos {
        self.nodes[node.at()].last_used
    }

    /// Calls that wait.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Calls that wait in this leaf.
    pub fn waiting_in(&self, leaf: NodeIndex) -> usize {
        self.nodes[leaf.at()].queue.len()
    }

    /// A call of `leaf` has come. Whether it may begin at once; it is charged then. `room`: the
    /// file system below takes another call. `small`: the call may pass large calls that wait, also
    /// of its class. Its class must have had no more than the others.
    pub fn pass(
        &mut self,
        now: Nanos,
        leaf: NodeIndex,
        cost: Cost,
        (room, small): (bool, bool),
    ) -> bool {
        let nobody_waits = self.nodes[NodeIndex::ROOT.at()].active.is_empty();
        let may = match small {
            true => nobody_waits || self.is_behind(leaf),
            false => nobody_waits && room && self.nodes[leaf.at()].queue.is_empty(),
        };
        let is_ready = |one: NodeIndex| self.nodes[one.at()].ready_at(small, cost.bytes > 0) <= now;
        if !may || !self.path(leaf).all(is_ready) {
            return false;
        }
        self.charge(now, leaf, cost);
        true
    }

    /// Whether `leaf` has had no more than those that wait, but for a little.
    fn is_behind(&self, leaf: NodeIndex) -> bool {
        self.path(leaf).filter(|index| *index != NodeIndex::ROOT).all(|index| {
            let node = &self.nodes[index.at()];
            let parent = &self.nodes[node.parent.at()];
            let Some((first, _)) = parent.active.first() else { return true };
            node.start.max(parent.virtual_now) <= first.saturating_add(node.length(AHEAD_BYTES))
        })
    }

    /// From a leaf to the root.
    fn path(&self, leaf: NodeIndex) -> impl Iterator<Item = NodeIndex> + '_ {
        let parent =
            |index: &NodeIndex| (*index != NodeIndex::ROOT).then(|| self.nodes[index.at()].parent);
        std::iter::successors(Some(leaf), parent)
    }

    /// A call of `leaf` waits.
    pub fn wait(&mut self, now: Nanos, leaf: NodeIndex, ticket: WaiterNumber, cost: Cost) {
        self.nodes[leaf.at()].queue.push_back((ticket, cost));
        self.waiting += 1;
        self.update(now, leaf);
    }

    /// A call gives up. Whether it waited there.
    pub fn give_up(&mut self, now: Nanos, leaf: NodeIndex, ticket: WaiterNumber) -> bool {
        let queue = &mut self.nodes[leaf.at()].queue;
        let Some(place) = queue.iter().position(|(one, _)| *one == ticket) else { return false };
        queue.remove(place);
        self.waiting -= 1;
        self.update(now, leaf);
        true
    }

    /// All that wait, taken out, in no order.
    pub fn take_all(&mut self) -> Vec<WaiterNumber> {
        let queues = self.nodes.iter_mut().flat_map(|node| node.queue.drain(..));
        self.waiting = 0;
        queues.map(|(ticket, _)| ticket).collect()
    }

    /// The next call to begin, which is charged. `fits` says whether there is room for a call of
    /// that cost; if not for the next one, there is none for any. None: nobody waits, or all who do
    /// are held up.
    pub fn next(&mut self, now: Nanos, fits: impl Fn(Cost) -> bool) -> Option<WaiterNumber> {
        self.release_held(now);
        let from = self.first_due(now).unwrap_or(NodeIndex::ROOT);
        let leaf = self.descend(from)?;
        let (ticket, cost) = *self.nodes[leaf.at()].queue.front()?;
        if !fits(cost) {
            return None;
        }
        self.nodes[leaf.at()].queue.pop_front();
        self.waiting -= 1;
        self.charge(now, leaf, cost);
        Some(ticket)
    }

    /// When a limit lets somebody go on who waits.
    pub fn next_event(&self) -> Option<Nanos> {
        self.held.first().map(|(until, _)| *until)
    }

    fn release_held(&mut self, now: Nanos) {
        while let Some((until, index)) = self.held.first().copied()
            && until <= now
        {
            self.held.pop_first();
            let node = &mut self.nodes[index.at()];
            node.held_until = None;
            node.meter.held_by(now, None);
            self.update(now, index);
        }
    }

    /// The node that is most behind its reservation, of those that may be served.
    fn first_due(&self, now: Nanos) -> Option<NodeIndex> {
        let behind = self.due.iter().take_while(|(due, _)| *due <= now).take(LOOKED_AT_MAX);
        behind.map(|(_, index)| *index).find(|index| {
            self.path(*index)
                .all(|one| one == NodeIndex::ROOT || self.nodes[one.at()].key.is_some())
                && self.nodes[NodeIndex::ROOT.at()].held_until.is_none()
        })
    }

    fn descend(&self, from: NodeIndex) -> Option<NodeIndex> {
        let mut index = from;
        if self.nodes[NodeIndex::ROOT.at()].held_until.is_some() {
            return None;
        }
        loop {
            let node = &self.nodes[index.at()];
            match node.active.first() {
                Some((_, child)) => index = *child,
                None => return (!node.queue.is_empty()).then_some(index),
            }
        }
    }

    /// What one call costs among classes, beside its bytes: bytes.
    pub fn call_cost_bytes(&self) -> u64 {
        self.call_cost_bytes
    }

    /// After the limit of the export has changed.
    fn renew_call_cost(&mut self) {
        let [limit, _] = self.nodes[NodeIndex::ROOT.at()].limits;
        let within = |limit: Bucket| limit.units_in(CALL_COST).min(CALL_COST_BYTES);
        self.call_cost_bytes = limit.map_or(CALL_COST_BYTES, within);
    }

    /// Charges a call to its leaf and all above.
    fn charge(&mut self, now: Nanos, leaf: NodeIndex, cost: Cost) {
        let weighed = cost.weighed(self.call_cost_bytes());
        let mut index = leaf;
        while index != NodeIndex::ROOT {
            let parent = &self.nodes[self.nodes[index.at()].parent.at()];
            let (virtual_now, first) = (parent.virtual_now, parent.active.first().copied());
            let node = &mut self.nodes[index.at()];
            let started = node.start.max(virtual_now);
            node.start = started.saturating_add(node.length(weighed));
            node.charge(now, cost);
            self.list(index);
            // A call out of turn does not move the time past those that wait.
            let begun = first.map_or(started, |(first, _)| first.min(started));
            index = self.nodes[index.at()].parent;
            self.nodes[index.at()].virtual_now = virtual_now.max(begun);
        }
        self.nodes[NodeIndex::ROOT.at()].charge(now, cost);
        self.list(NodeIndex::ROOT);
        self.update(now, leaf);
    }

    /// Puts a node, and those above, where it belongs now: among the active ones, those that are
    /// held up, or those with nothing to do.
    fn update(&mut self, now: Nanos, from: NodeIndex) {
        let mut index = from;
        loop {
            self.update_hold(now, index);
            self.update_due(index);
            if index == NodeIndex::ROOT {
                return;
            }
            self.update_place(index);
            index = self.nodes[index.at()].parent;
        }
    }

    fn update_hold(&mut self, now: Nanos, index: NodeIndex) {
        let node = &mut self.nodes[index.at()];
        let ready_at = node.ready_at(false, true); // as if only large ones waited
        let until = (node.has_work() && ready_at > now).then_some(ready_at);
        if until == node.held_until {
            return;
        }
        let limit = until.map(|_| node.slowest_limit());
        node.meter.held_by(now, limit);
        if let Some(before) = std::mem::replace(&mut node.held_until, until) {
            self.held.remove(&(before, index));
        }
        if let Some(until) = until {
            self.held.insert((until, index));
        }
    }

    fn update_due(&mut self, index: NodeIndex) {
        let node = &mut self.nodes[index.at()];
        let due = node.due_at().filter(|_| node.has_work());
        if due == node.due {
            return;
        }
        if let Some(before) = std::mem::replace(&mut node.due, due) {
            self.due.remove(&(before, index));
        }
        if let Some(due) = due {
            self.due.insert((due, index));
        }
    }

    fn update_place(&mut self, index: NodeIndex) {
        let node = &self.nodes[index.at()];
        let parent = node.parent;
        let takes_part = node.has_work() && node.held_until.is_none();
        let key = match node.key {
            // It keeps its place until it is served.
            Some(key) if takes_part && key >= node.start => Some(key),
            _ if takes_part => Some(node.start.max(self.nodes[parent.at()].virtual_now)),
            _ => None,
        };
        let before = std::mem::replace(&mut self.nodes[index.at()].key, key);
        if before == key {
            return;
        }
        let active = &mut self.nodes[parent.at()].active;
        if let Some(before) = before {
            active.remove(&(before, index));
        }
        if let Some(key) = key {
            active.insert((key, index));
        }
    }
}
