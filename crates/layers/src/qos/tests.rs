//! The scheduler against what it promises, with a clock of its own.

use std::collections::BTreeMap;

use super::Nanos;
use super::tree::{CALL_COST_BYTES, Cost, NodeIndex, Rates, Tree, WaiterNumber};

pub(super) const MS: Nanos = 1_000_000;
pub(super) const SECOND: Nanos = 1_000_000_000;
/// How often a model looks for a call.
const LOOK: Nanos = MS / 20;
pub(super) const MIB: u64 = 1 << 20;

/// Clients that always want more, each with calls under way, and a file system below of one rate.
pub(super) struct ScheduleModel {
    pub(super) tree: Tree,
    pub(super) now: Nanos,
    /// What the file system does, bytes a second; 0: only the limits say.
    rate: u64,
    /// When it has done what it has.
    busy_until: Nanos,
    pub(super) clients: Vec<LoadingClient>,
    /// By ticket: the client.
    tickets: BTreeMap<WaiterNumber, usize>,
    next_ticket: WaiterNumber,
}

pub(super) struct LoadingClient {
    leaf: NodeIndex,
    pub(super) call: Cost,
    depth: usize,
    pub(super) is_idle: bool,
    waiting: usize,
    pub(super) done_bytes: u64,
    done_calls: u64,
}

impl ScheduleModel {
    pub(super) fn new(root: Rates, rate: u64) -> ScheduleModel {
        ScheduleModel {
            tree: Tree::new(root),
            now: SECOND,
            rate,
            busy_until: SECOND,
            clients: Vec::new(),
            tickets: BTreeMap::new(),
            next_ticket: 0,
        }
    }

    pub(super) fn client(
        &mut self,
        parent: NodeIndex,
        rates: Rates,
        bytes: u64,
        depth: usize,
    ) -> usize {
        let leaf = self.tree.add(parent, rates, self.now);
        self.clients.push(LoadingClient {
            leaf,
            call: Cost { bytes },
            depth,
            is_idle: false,
            waiting: 0,
            done_bytes: 0,
            done_calls: 0,
        });
        self.clients.len() - 1
    }

    fn ask(&mut self) {
        for (index, client) in self.clients.iter_mut().enumerate() {
            while !client.is_idle && client.waiting < client.depth {
                client.waiting += 1;
                self.next_ticket += 1;
                self.tickets.insert(self.next_ticket, index);
                self.tree.wait(self.now, client.leaf, self.next_ticket, client.call);
            }
        }
    }

    pub(super) fn run(&mut self, time: Nanos) {
        let end = self.now + time;
        while self.now < end {
            self.ask();
            let has_room = self.busy_until <= self.now;
            match self.tree.next(self.now, |_| has_room) {
                Some(ticket) => self.done(ticket),
                None => self.now += LOOK,
            }
        }
        self.ask();
    }

    fn done(&mut self, ticket: WaiterNumber) {
        let client = &mut self.clients[self.tickets.remove(&ticket).unwrap()];
        client.waiting -= 1;
        client.done_bytes += client.call.bytes;
        client.done_calls += 1;
        if let Some(lasts) = (client.call.weighed(CALL_COST_BYTES) * SECOND).checked_div(self.rate)
        {
            // It has been idle at most since the look before.
            self.busy_until = self.busy_until.max(self.now - LOOK) + lasts;
        }
    }

    /// Bytes that each does in `time`.
    pub(super) fn rates(&mut self, time: Nanos) -> Vec<f64> {
        let before: Vec<u64> = self.clients.iter().map(|client| client.done_bytes).collect();
        self.run(time);
        let seconds = time as f64 / SECOND as f64;
        let done = self.clients.iter().zip(before);
        done.map(|(client, before)| (client.done_bytes - before) as f64 / seconds).collect()
    }
}

fn weight(weight_milli: u32) -> Rates {
    Rates { weight_milli, ..Rates::default() }
}

fn near(is: f64, should: f64, part: f64) -> bool {
    (is - should).abs() <= should * part
}

// proves: P190
#[test]
fn classes_share_by_their_weights_in_each_second() {
    for sizes in [[MIB, MIB, MIB], [MIB, 128 << 10, 256 << 10]] {
        let mut model = ScheduleModel::new(Rates::default(), 400 * MIB);
        for (milli, bytes) in [1000, 2000, 5000].into_iter().zip(sizes) {
            model.client(NodeIndex::ROOT, weight(milli), bytes, 16);
        }
        model.run(SECOND / 10);
        for _ in 0..3 {
            let before: Vec<u64> = model.clients.iter().map(|one| one.done_calls).collect();
            model.run(SECOND);
            let cost = |(one, before): (&LoadingClient, u64)| {
                ((one.done_calls - before) * one.call.weighed(CALL_COST_BYTES)) as f64
            };
            let costs: Vec<f64> = model.clients.iter().zip(before).map(cost).collect();
            let all: f64 = costs.iter().sum();
            for (is, part) in costs.iter().zip([0.125, 0.25, 0.625]) {
                assert!(near(*is, all * part, 0.05), "{costs:?}");
            }
        }
    }
}

// proves: P191
#[test]
fn a_reservation_is_met_whatever_others_weigh() {
    let mut model = ScheduleModel::new(Rates::default(), 200 * MIB);
    let reserved = Rates { reservation: 100 * MIB, ..weight(10) };
    let one = model.client(NodeIndex::ROOT, reserved, 256 << 10, 16);
    for _ in 0..20 {
        model.client(NodeIndex::ROOT, weight(100_000), MIB, 16);
    }
    model.run(SECOND / 10);
    let rates = model.rates(SECOND);
    assert!(rates[one] >= 97.0 * MIB as f64, "{}", rates[one]);
}

// proves: P192
#[test]
fn no_limit_is_passed_beyond_its_burst() {
    let limit = Rates { limit: 50 * MIB, ..Rates::default() };
    let ops = Rates { limit_ops: 500, ..Rates::default() };
    let mut model = ScheduleModel::new(Rates::default(), 0);
    let bytes = model.client(NodeIndex::ROOT, limit, MIB, 64);
    let calls = model.client(NodeIndex::ROOT, ops, 0, 64);
    for window in [SECOND, SECOND / 10, SECOND / 2] {
        let before = model.clients[calls].done_calls;
        let rates = model.rates(window);
        let seconds = window as f64 / SECOND as f64;
        let most = (50.0 * seconds + 5.0 + 1.0) * MIB as f64;
        assert!(rates[bytes] * seconds <= most, "{rates:?}");
        let done = (model.clients[calls].done_calls - before) as f64;
        assert!(done <= 500.0 * seconds + 51.0, "{done}");
    }
    // Both have their limit, too: it is not only kept.
    let before = model.clients[calls].done_calls;
    let rates = model.rates(SECOND);
    assert!(near(rates[bytes], 50.0 * MIB as f64, 0.05), "{rates:?}");
    assert!(model.clients[calls].done_calls - before >= 475);
}

// proves: P193
#[test]
fn an_idle_share_is_lent_and_taken_back_within_a_tenth_of_a_second() {
    let mut model = ScheduleModel::new(Rates::default(), 400 * MIB);
    let one = model.client(NodeIndex::ROOT, weight(1000), MIB, 16);
    let other = model.client(NodeIndex::ROOT, weight(3000), MIB, 16);
    model.clients[other].is_idle = true;
    model.run(SECOND);
    let alone = model.rates(SECOND)[one];
    assert!(alone >= 0.95 * 388.0 * MIB as f64, "it has all: {alone}");
    model.clients[other].is_idle = false;
    let back = model.rates(SECOND / 10);
    assert!(near(back[other], 0.75 * alone, 0.10), "{back:?}");
}

#[test]
fn levels_share_among_themselves_and_limits_above_hold() {
    let mut model = ScheduleModel::new(Rates { limit: 300 * MIB, ..Rates::default() }, 0);
    let now = model.now;
    let team = model.tree.add(NodeIndex::ROOT, weight(2000), now);
    let capped = Rates { limit: 60 * MIB, ..weight(1000) };
    let small = model.tree.add(NodeIndex::ROOT, capped, now);
    let a = model.client(team, weight(1000), MIB, 8);
    let b = model.client(team, weight(3000), MIB, 8);
    let c = model.client(small, weight(1000), MIB, 8);
    model.run(SECOND);
    let rates = model.rates(2 * SECOND);
    let mib = |index: usize| rates[index] / MIB as f64;
    assert!(near(mib(a), 60.0, 0.05) && near(mib(b), 180.0, 0.05), "{rates:?}");
    assert!(near(mib(c), 60.0, 0.05), "{rates:?}");
}

// proves: P194
#[test]
fn a_thousand_equal_classes_have_equal_shares_and_none_starves() {
    let mut model = ScheduleModel::new(Rates::default(), 2000 * MIB);
    for index in 0..1000 {
        // However much each asks for at a time.
        model.client(NodeIndex::ROOT, weight(1000), 256 << 10, 1 + index % 30);
    }
    let rates = model.rates(SECOND);
    let (sum, squares) = rates.iter().fold((0.0, 0.0), |(s, q), x| (s + x, q + x * x));
    let jain = sum * sum / (squares * rates.len() as f64);
    assert!(jain >= 0.95, "{jain}");
    assert!(rates.iter().all(|rate| *rate > 0.0));
}

#[test]
fn a_small_call_passes_large_ones_unless_its_class_is_ahead() {
    let mut tree = Tree::new(Rates::default());
    let large = tree.add(NodeIndex::ROOT, weight(1000), 0);
    let small = tree.add(NodeIndex::ROOT, weight(1000), 0);
    for ticket in 0..64 {
        tree.wait(0, large, ticket, Cost { bytes: MIB });
    }
    let call = Cost { bytes: 0 };
    let passed = (0..1000).take_while(|_| tree.pass(0, small, call, (true, true))).count();
    assert!((4..100).contains(&passed), "{passed}");
    // Once the others have had theirs, it may again.
    assert_eq!(tree.next(0, |_| true), Some(0));
    assert_eq!(tree.next(0, |_| true), Some(1));
    assert!(tree.pass(0, small, call, (true, true)));
}

/// An export at its limit made each stat of somebody else wait for the next large write.
// proves: P195
#[test]
fn a_small_call_passes_large_ones_that_a_limit_holds_up() {
    let mut tree = Tree::new(Rates { limit: 100 * MIB, ..Rates::default() });
    let large = tree.add(NodeIndex::ROOT, weight(1000), 0);
    let small = tree.add(NodeIndex::ROOT, weight(1000), 0);
    for ticket in 0..64 {
        tree.wait(SECOND, large, ticket, Cost { bytes: MIB });
    }
    while tree.next(SECOND, |_| true).is_some() {}
    assert!(tree.waiting() > 50);
    let call = Cost { bytes: 4096 };
    assert!(tree.pass(SECOND, large, Cost { bytes: 0 }, (true, true)), "it makes a file");
    assert!(tree.pass(SECOND, small, call, (true, true)));
    assert!(!tree.pass(SECOND, small, call, (true, false)));
    // It has been taken from the whole: no more than the burst.
    let more = (0..10_000).take_while(|_| tree.pass(SECOND, small, call, (true, true))).count();
    assert!(more < 3 * 256, "{more}");
}

#[test]
fn a_call_that_gives_up_leaves_nothing_behind() {
    let mut tree = Tree::new(Rates::default());
    let leaf = tree.add(NodeIndex::ROOT, Rates { limit: 1, ..Rates::default() }, 0);
    tree.wait(0, leaf, 1, Cost { bytes: MIB });
    tree.wait(0, leaf, 2, Cost { bytes: MIB });
    assert_eq!(tree.next(0, |_| true), Some(1));
    assert_eq!(tree.next(0, |_| true), None, "the limit holds it up");
    assert!(tree.give_up(0, leaf, 2));
    assert_eq!((tree.waiting(), tree.next_event()), (0, None));
    assert!(!tree.give_up(0, leaf, 2));
    assert!(tree.remove(leaf));
}

/// Any order of calls, of ends and of times: the scheduler finds each call once.
#[test]
fn no_call_is_lost_or_found_twice() {
    let mut random = 7_u64;
    let mut draw = move |below: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % below
    };
    for _ in 0..50 {
        let mut tree = Tree::new(Rates { limit_ops: 1 + draw(10_000), ..Rates::default() });
        let team = tree.add(NodeIndex::ROOT, Rates { limit: 1 + draw(1 << 30), ..weight(500) }, 0);
        let leaves: Vec<NodeIndex> = (0..8)
            .map(|index| {
                let rates = Rates {
                    reservation: draw(3) * (1 << 20),
                    limit_ops: draw(2) * 1000,
                    ..weight(1 + draw(5000) as u32)
                };
                tree.add(if index % 2 == 0 { team } else { NodeIndex::ROOT }, rates, 0)
            })
            .collect();
        let (mut waiting, mut now) = (BTreeMap::new(), 0);
        for ticket in 0..500 {
            let leaf = leaves[draw(8) as usize];
            tree.wait(now, leaf, ticket, Cost { bytes: draw(2 << 20) });
            waiting.insert(ticket, leaf);
            now += draw(2 * MS);
            if draw(3) == 0
                && let Some(found) = tree.next(now, |_| true)
            {
                assert!(waiting.remove(&found).is_some());
            }
            if draw(10) == 0
                && let Some((ticket, leaf)) = waiting.pop_first()
            {
                assert!(tree.give_up(now, leaf, ticket));
            }
        }
        while tree.waiting() > 0 {
            match tree.next(now, |_| true) {
                Some(found) => assert!(waiting.remove(&found).is_some()),
                None => now = tree.next_event().expect("somebody is held up").max(now + 1),
            }
        }
        assert!(waiting.is_empty());
    }
}
