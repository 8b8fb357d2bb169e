//! What each class had, and what it was entitled to.

use std::collections::HashMap;

use super::bucket::Nanos;
use super::tree::Rates;

/// Shortest time over which rates are taken.
pub const SAMPLE_MIN: Nanos = 200_000_000;

/// What a class has had so far.
#[derive(Clone, Debug, Default)]
pub struct ClassCounts {
    /// Calls that began.
    pub calls: u64,
    /// The bytes of these calls.
    pub bytes: u64,
    /// Calls that waited first.
    pub waits: u64,
    /// How long, in all.
    pub wait: Nanos,
    /// Calls that wait now.
    pub waiting: u64,
}

/// One class in a report.
#[derive(Clone, Debug)]
pub struct ClassReport {
    /// The rule; empty: calls that no rule is about.
    pub rule: String,
    /// The class among those of the rule; empty: it has one.
    pub value: String,
    /// The rule that it is within; empty: none.
    pub within: String,
    /// What it gets by its rule.
    pub rates: Rates,
    /// So far.
    pub counts: ClassCounts,
    /// Bytes a second of late.
    pub bytes_per_s: f64,
    /// Calls a second of late.
    pub calls_per_s: f64,
    /// Mean wait of the calls that waited of late, seconds.
    pub wait_s: f64,
    /// The class's part of all that the export did of late.
    pub share: f64,
    /// The part that it was entitled to, beside the classes that wanted something.
    pub entitled: f64,
}

/// All classes of an export.
#[derive(Clone, Debug, Default)]
pub struct QosReport {
    /// Whether there are rules.
    pub is_on: bool,
    /// Bytes that may be under way below at a time.
    pub window_bytes: u64,
    /// Bytes that are.
    pub in_service_bytes: u64,
    /// The figures of each class.
    pub classes: Vec<ClassReport>,
}

/// Counts at a moment, to take rates from.
#[derive(Debug, Default)]
pub struct Sample {
    /// When.
    pub at: Nanos,
    /// By rule and value.
    pub counts: HashMap<(String, String), ClassCounts>,
}

/// Puts rates and shares into `classes`, since `before`. Cost of a call and of bytes as the weights
/// have it: `cost`.
pub fn rate(
    classes: &mut [ClassReport],
    before: &Sample,
    now: Nanos,
    cost: impl Fn(u64, u64) -> f64,
) {
    let seconds = (now.saturating_sub(before.at) as f64 / 1e9).max(1e-3);
    let mut used = Vec::new();
    for class in classes.iter_mut() {
        let key = (class.rule.clone(), class.value.clone());
        let old = before.counts.get(&key).cloned().unwrap_or_default();
        let of = |now: u64, old: u64| now.saturating_sub(old);
        let calls = of(class.counts.calls, old.calls);
        let bytes = of(class.counts.bytes, old.bytes);
        let waits = of(class.counts.waits, old.waits);
        class.bytes_per_s = bytes as f64 / seconds;
        class.calls_per_s = calls as f64 / seconds;
        class.wait_s = of(class.counts.wait, old.wait) as f64 / 1e9 / waits.max(1) as f64;
        let wants_more = waits > 0 || class.counts.waiting > 0;
        used.push((cost(calls, bytes) / seconds, wants_more));
    }
    let all: f64 = used.iter().map(|(cost, _)| cost).sum();
    if all <= 0.0 {
        return;
    }
    let entitled = fair_shares(classes, &used, all);
    for ((class, (cost, _)), entitled) in classes.iter_mut().zip(&used).zip(entitled) {
        class.share = cost / all;
        class.entitled = entitled / all;
    }
}

/// What each of them was entitled to of `all`, level by level. Those that wanted less have what
/// they used. The others divide the rest by their weights.
fn fair_shares(classes: &[ClassReport], used: &[(f64, bool)], all: f64) -> Vec<f64> {
    // Classes within one rule stand for one class of that among the others.
    let mut tops: Vec<(String, f64, f64, bool, Vec<usize>)> = Vec::new();
    for (index, class) in classes.iter().enumerate() {
        let (cost, wants) = used[index];
        let weight = f64::from(class.rates.weight_milli);
        let place = tops.iter().position(|top| !class.within.is_empty() && top.0 == class.within);
        match place {
            Some(place) => {
                let top = &mut tops[place];
                (top.2, top.3) = (top.2 + cost, top.3 || wants);
                top.4.push(index);
            }
            None => tops.push((class.within.clone(), weight, cost, wants, vec![index])),
        }
    }
    for top in tops.iter_mut().filter(|top| !top.0.is_empty()) {
        let parent = classes.iter().find(|class| class.rule == top.0);
        top.1 = parent.map_or(1000.0, |parent| f64::from(parent.rates.weight_milli));
    }
    let wants: Vec<_> = tops.iter().map(|top| (top.1, top.2, top.3)).collect();
    let mut entitled = vec![0.0; classes.len()];
    for (top, share) in tops.iter().zip(divide(&wants, all)) {
        let within: Vec<_> = top
            .4
            .iter()
            .map(|index| {
                let (cost, wants) = used[*index];
                (f64::from(classes[*index].rates.weight_milli), cost, wants)
            })
            .collect();
        for (index, part) in top.4.iter().zip(divide(&within, share)) {
            entitled[*index] = part;
        }
    }
    entitled
}

/// Divides `all` among those with a weight, what they used, and whether they wanted more.
fn divide(wants: &[(f64, f64, bool)], all: f64) -> Vec<f64> {
    let mut shares: Vec<Option<f64>> = vec![None; wants.len()];
    loop {
        let open = || wants.iter().enumerate().filter(|(index, _)| shares[*index].is_none());
        let weights: f64 = open().map(|(_, (weight, ..))| weight).sum();
        let rest = all - shares.iter().flatten().sum::<f64>();
        let fair = |weight: f64| rest.max(0.0) * weight / weights.max(f64::MIN_POSITIVE);
        let satisfied: Vec<_> = open()
            .filter(|(_, (weight, used, more))| !more && *used <= fair(*weight))
            .map(|(index, (_, used, _))| (index, *used))
            .collect();
        if satisfied.is_empty() {
            let done = shares.iter().zip(wants).map(|(share, want)| share.unwrap_or(fair(want.0)));
            return done.collect();
        }
        satisfied.into_iter().for_each(|(index, used)| shares[index] = Some(used));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_wants_less_has_that_and_the_others_divide_the_rest() {
        let shares = divide(&[(1.0, 10.0, false), (1.0, 30.0, true), (2.0, 60.0, true)], 100.0);
        assert_eq!(shares, [10.0, 30.0, 60.0]);
    }
}
