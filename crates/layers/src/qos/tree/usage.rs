//! What nodes use of their limits, and limits that change while calls wait.

use super::super::meter::Usage;
use super::{Nanos, NodeIndex, Rates, Tree};

impl Tree {
    /// Other rates for the limits and reservations that a node has, from now on.
    pub fn set_rates(&mut self, node: NodeIndex, rates: &Rates) {
        let Rates { limit, limit_ops, reservation, reservation_ops, .. } = *rates;
        let per_s = [limit, limit_ops, reservation, reservation_ops];
        for (bucket, per_s) in self.nodes[node.at()].buckets().zip(per_s) {
            bucket.iter_mut().for_each(|bucket| bucket.set_rate(per_s));
        }
        self.renew_call_cost();
    }

    /// Whether calls of a node, or of one below it, wait.
    pub fn has_work(&self, node: NodeIndex) -> bool {
        self.nodes[node.at()].has_work()
    }

    /// What nodes with limits or reservations have used since the last time. A node that has nothing
    /// any more is among them once.
    pub fn read_usage(&mut self, now: Nanos) -> Vec<(NodeIndex, Usage)> {
        let period = now.saturating_sub(std::mem::replace(&mut self.metered_at, now));
        let mut used = Vec::with_capacity(self.metered.len());
        let nodes = &mut self.nodes;
        self.metered.retain(|index| {
            let node = &mut nodes[index.at()];
            let usage = node.meter.read(now, period);
            used.push((*index, usage));
            node.meter.is_listed = !usage.is_nothing() || node.has_work();
            node.meter.is_listed
        });
        used
    }

    /// The weights of the children of each node that have had calls since then, by the node's place.
    pub fn busy_weights(&self, since: Nanos) -> Vec<u64> {
        let mut weights = vec![0; self.nodes.len()];
        for node in &self.nodes[1..] {
            if node.last_used >= since || node.has_work() {
                weights[node.parent.at()] += node.weight_milli;
            }
        }
        weights
    }

    /// The node's number in lists of all nodes.
    pub fn place(node: NodeIndex) -> usize {
        node.at()
    }

    /// Somebody will read what it uses.
    pub(super) fn list(&mut self, index: NodeIndex) {
        let node = &mut self.nodes[index.at()];
        if !node.meter.is_listed && node.buckets().any(|bucket| bucket.is_some()) {
            node.meter.is_listed = true;
            self.metered.push(index);
        }
    }
}
