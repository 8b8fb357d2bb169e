//! Limits that the servers of a projection keep together. Each says what it uses, ten times a second, and takes
//! its part of each limit by what the others say ([`division`](super::division)).

use std::collections::HashMap;

use super::bucket::Nanos;
use super::division::{Demand, OtherServer, even_part, part_of};
use super::gate::{QosGate, nanos};
use super::meter::Usage;
use super::state::State;
use super::tree::{NodeIndex, Rates, Tree};

/// A server keeps the last part that it had beside one that is not heard of for so long. Then that one counts
/// with an even part.
const SILENT_MAX: Nanos = 10_000_000_000;
/// What a server has said counts for so long, if it is still there.
const SAID_MAX: Nanos = 1_000_000_000;
/// Classes that have had calls within this time count with their weight.
const BUSY: Nanos = 500_000_000;
/// Entries of a report; more busy classes with limits are not known to other servers.
pub const REPORT_MAX: usize = 4096;

/// What one class, or all of a rule that others are within, uses at one server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassUsage {
    /// The rule; empty: the export as a whole.
    pub rule: String,
    /// The class among those of the rule; may be empty.
    pub value: String,
    /// Of the classes that have work below it, thousandths.
    pub weight_milli: u64,
    /// Bytes and calls a second.
    pub per_s: [u64; 2],
    /// The limits of bytes and of calls hold calls up.
    pub is_held_up: [bool; 2],
    /// Calls wait, whatever for.
    pub is_waiting: bool,
}

/// A server of the projection, as this one knows it.
#[derive(Debug, Default)]
pub(super) struct SharingServer {
    heard_at: Option<Nanos>,
    said_at: Nanos,
    usage: HashMap<(String, String), ClassUsage>,
}

/// The other servers, and which node of this server's tree has which name among them.
#[derive(Debug, Default)]
pub(super) struct Sharing {
    /// Empty: this server has no others beside it.
    pub peers: Vec<SharingServer>,
    names: HashMap<NodeIndex, NodeName>,
}

#[derive(Clone, Debug)]
struct NodeName {
    rule: String,
    value: String,
    /// Of all servers together.
    rates: Rates,
}

/// Which rates of a node are divided, and by which demand.
#[derive(Clone, Copy)]
enum Resource {
    Limit(usize),
    Reservation(usize),
}

impl SharingServer {
    fn demand(&self, name: &NodeName, resource: Resource, now: Nanos) -> OtherServer {
        let is_silent = self.heard_at.is_none_or(|at| now.saturating_sub(at) > SILENT_MAX);
        if is_silent {
            return OtherServer { demand: Demand::Unknown, weight: 1 };
        }
        let said = self.usage.get(&(name.rule.clone(), name.value.clone()));
        let Some(said) = said else { return OtherServer { demand: Demand::Units(0), weight: 1 } };
        let (index, wants_more) = match resource {
            Resource::Limit(index) => (index, said.is_held_up[index]),
            Resource::Reservation(index) => (index, said.is_waiting),
        };
        let demand = if wants_more { Demand::More } else { Demand::Units(said.per_s[index]) };
        OtherServer { demand, weight: said.weight_milli }
    }

    /// The server is there. What it said long ago counts no more, since it has nothing to say.
    fn is_there(&mut self, now: Nanos) {
        self.heard_at = Some(now);
        if now.saturating_sub(self.said_at) > SAID_MAX {
            self.usage.clear();
        }
    }
}

impl Sharing {
    /// The rates with which a node begins.
    pub fn first_rates(&self, rates: Rates) -> Rates {
        let servers = self.peers.len() + 1;
        divided(rates, |_, rate| even_part(rate, servers))
    }

    pub fn name(&mut self, node: NodeIndex, (rule, value): (&str, &str), rates: Rates) {
        if !self.peers.is_empty() && !rates.is_free() {
            let (rule, value) = (rule.to_owned(), value.to_owned());
            self.names.insert(node, NodeName { rule, value, rates });
        }
    }

    pub fn forget(&mut self, node: NodeIndex) {
        self.names.remove(&node);
    }

    pub fn forget_all(&mut self) {
        self.names.clear();
    }

    fn part(&self, name: &NodeName, weight: u64, now: Nanos) -> Rates {
        divided(name.rates, |resource, rate| {
            let others = self.peers.iter().map(|peer| peer.demand(name, resource, now));
            part_of(rate, weight, &others.collect::<Vec<_>>())
        })
    }
}

/// Rates of which each that there is becomes another one.
fn divided(rates: Rates, of: impl Fn(Resource, u64) -> u64) -> Rates {
    let of = |resource, rate| if rate == 0 { 0 } else { of(resource, rate) };
    Rates {
        limit: of(Resource::Limit(0), rates.limit),
        limit_ops: of(Resource::Limit(1), rates.limit_ops),
        reservation: of(Resource::Reservation(0), rates.reservation),
        reservation_ops: of(Resource::Reservation(1), rates.reservation_ops),
        ..rates
    }
}

impl State {
    /// Reads what this server uses, and divides its limits anew.
    fn exchange(&mut self, now: Nanos) -> Vec<ClassUsage> {
        let used = self.tree.read_usage(now);
        let weights = self.tree.busy_weights(now.saturating_sub(BUSY));
        let mut report = Vec::new();
        for (node, usage) in used {
            let Some(name) = self.sharing.names.get(&node) else { continue };
            let weight_milli = weights[Tree::place(node)].max(1000);
            let is_idle = usage.is_nothing() && !self.tree.has_work(node);
            let rates = match is_idle {
                true => self.sharing.first_rates(name.rates),
                false => self.sharing.part(name, weight_milli, now),
            };
            if !is_idle && report.len() < REPORT_MAX {
                report.push(said(name, usage, (weight_milli, self.tree.has_work(node))));
            }
            self.tree.set_rates(node, &rates);
        }
        report
    }
}

fn said(name: &NodeName, usage: Usage, (weight_milli, is_waiting): (u64, bool)) -> ClassUsage {
    let Usage { per_s, is_held_up } = usage;
    let (rule, value) = (name.rule.clone(), name.value.clone());
    ClassUsage { rule, value, weight_milli, per_s, is_held_up, is_waiting }
}

impl QosGate {
    /// One of `servers` servers that keep limits and reservations together. Before any rules are set.
    pub fn share_among(&self, servers: usize) {
        let peers = (1..servers).map(|_| SharingServer::default()).collect();
        self.gate.lock().sharing.peers = peers;
    }

    /// What this server uses of what others have a part in, and has used since the last call. Its own parts
    /// are as others want theirs from now on. None: there is nothing to share.
    pub fn exchange(&self) -> Option<Vec<ClassUsage>> {
        let mut state = self.gate.lock();
        if state.sharing.peers.is_empty() || !state.rules.has_rates() {
            return None;
        }
        Some(state.exchange(nanos()))
    }

    /// Another server has said what it uses. `peer`: its number among the others, from 0 on.
    pub fn heard(&self, peer: usize, usage: Vec<ClassUsage>) {
        let (mut state, now) = (self.gate.lock(), nanos());
        let Some(peer) = state.sharing.peers.get_mut(peer) else { return };
        (peer.heard_at, peer.said_at) = (Some(now), now);
        let keyed = usage.into_iter().take(REPORT_MAX);
        peer.usage = keyed.map(|one| ((one.rule.clone(), one.value.clone()), one)).collect();
    }

    /// Another server has answered.
    pub fn is_there(&self, peer: usize) {
        let (mut state, now) = (self.gate.lock(), nanos());
        if let Some(peer) = state.sharing.peers.get_mut(peer) {
            peer.is_there(now);
        }
    }
}
