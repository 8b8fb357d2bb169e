//! The scheduler against a model that shares nothing with it: a fluid. Each class has the rate of it
//! that mClock gives in the end (Gulati, Merchant, Varman, OSDI 2010, section 3). That is its part by weight,
//! but no less than its reservation and no more than its limit.

use super::tests::{MIB, MS, SECOND, ScheduleModel};
use super::tree::{CALL_COST_BYTES, NodeIndex, Rates};

/// What the file system does, bytes of cost a second.
const RATE: u64 = 400 * MIB;

struct Random(u64);

impl Random {
    fn below(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % below
    }
}

/// A class of the fluid.
#[derive(Clone, Copy, Debug)]
struct FluidClass {
    rates: Rates,
    call_bytes: u64,
}

impl FluidClass {
    /// Cost for the weights, by data.
    fn cost(&self) -> f64 {
        (self.call_bytes + CALL_COST_BYTES) as f64 / self.call_bytes as f64
    }

    /// Bytes a second, where weight 1 has `level` of cost.
    fn bytes_at(&self, level: f64) -> f64 {
        let Rates { weight_milli, reservation, limit, .. } = self.rates;
        let most = if limit == 0 { f64::INFINITY } else { limit as f64 };
        let by_weight = f64::from(weight_milli) / 1000.0 * level / self.cost();
        by_weight.max(reservation as f64).min(most)
    }
}

/// Bytes a second of each of them, all of which want more.
fn fluid(classes: &[FluidClass], rate: f64) -> Vec<f64> {
    let used = |level: f64| classes.iter().map(|one| one.bytes_at(level) * one.cost()).sum::<f64>();
    let (mut low, mut high) = (0.0, 1e15);
    for _ in 0..200 {
        let middle = (low + high) / 2.0;
        if used(middle) < rate { low = middle } else { high = middle }
    }
    classes.iter().map(|one| one.bytes_at(low)).collect()
}

fn some_classes(random: &mut Random) -> Vec<FluidClass> {
    let count = 2 + random.below(6);
    let one = |random: &mut Random| {
        let reservation = random.below(3).saturating_sub(1) * (5 + random.below(20)) * MIB;
        let limit = match random.below(3) {
            0 => reservation + (10 + random.below(100)) * MIB,
            _ => 0,
        };
        let weight_milli = 200 + random.below(5000) as u32;
        let rates = Rates { weight_milli, reservation, limit, ..Rates::default() };
        FluidClass { rates, call_bytes: (64 << 10) << random.below(5) }
    };
    (0..count).map(|_| one(random)).collect()
}

#[test]
fn classes_that_want_more_have_the_rates_of_the_fluid() {
    let mut random = Random(11);
    for round in 0..30 {
        let classes = some_classes(&mut random);
        let mut model = ScheduleModel::new(Rates::default(), RATE);
        for one in &classes {
            let depth = 8 + random.below(20) as usize;
            model.client(NodeIndex::ROOT, one.rates, one.call_bytes, depth);
        }
        model.run(SECOND / 2);
        let rates = model.rates(2 * SECOND);
        for ((is, should), class) in rates.iter().zip(fluid(&classes, RATE as f64)).zip(&classes) {
            // One call more or less is within any measure.
            let most = 0.05 * should + class.call_bytes as f64;
            assert!((is - should).abs() <= most, "{round}: {is} and not {should}: {classes:#?}");
        }
    }
}

/// What a class has done, at each step.
struct History {
    bytes: Vec<u64>,
    /// The class had calls that waited all the time since the step before.
    wanted: Vec<bool>,
}

const STEP: u64 = 20 * MS;

/// Classes that begin and end as chance has it. `check` sees the history of each.
fn run_randomly(seed: u64, check: impl Fn(&FluidClass, &History)) {
    let mut random = Random(seed);
    let classes = some_classes(&mut random);
    let mut model = ScheduleModel::new(Rates::default(), RATE);
    for one in &classes {
        model.client(NodeIndex::ROOT, one.rates, one.call_bytes, 16);
    }
    let new = || History { bytes: vec![0], wanted: vec![false] };
    let mut histories: Vec<History> = classes.iter().map(|_| new()).collect();
    for _ in 0..200 {
        let index = random.below(classes.len() as u64) as usize;
        model.clients[index].is_idle ^= random.below(4) == 0;
        model.run(STEP);
        for (client, history) in model.clients.iter().zip(&mut histories) {
            history.bytes.push(client.done_bytes);
            history.wanted.push(!client.is_idle);
        }
    }
    classes.iter().zip(&histories).for_each(|(class, history)| check(class, history));
}

#[test]
fn no_window_of_time_passes_a_limit_while_callers_come_and_go() {
    for seed in 1..12 {
        run_randomly(seed, |class, history| {
            let Rates { limit, burst, .. } = class.rates;
            if limit == 0 {
                return;
            }
            for (from, begun) in history.bytes.iter().enumerate() {
                for (to, ended) in history.bytes.iter().enumerate().skip(from + 1) {
                    let time = (to - from) as u64 * STEP + burst;
                    let most = limit as f64 * time as f64 / SECOND as f64 + class.call_bytes as f64;
                    let done = (ended - begun) as f64;
                    assert!(done <= most, "{seed}: {done} and not {most}: {class:#?}");
                }
            }
        });
    }
}

#[test]
fn a_class_that_wants_more_has_its_reservation_while_callers_come_and_go() {
    for seed in 21..32 {
        run_randomly(seed, |class, history| {
            let reservation = class.rates.reservation;
            let mut from = 0;
            for (to, wanted) in history.wanted.iter().enumerate() {
                if !wanted {
                    from = to;
                }
                let done = (history.bytes[to] - history.bytes[from]) as f64;
                let time = (to - from) as u64 * STEP;
                // It has a tenth of a second to begin, and calls of others are under way.
                let least = reservation as f64 * time.saturating_sub(SECOND / 10) as f64;
                let least = 0.95 * least / SECOND as f64 - class.call_bytes as f64;
                assert!(done >= least, "{seed}: {done} and not {least}: {class:#?}");
            }
        });
    }
}
