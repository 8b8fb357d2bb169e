//! Failures and delays on purpose, to see what becomes of them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dray_core::{Admit, Context, Errno, Error, ObservedCall, Op};
use dray_rt::{random_u64, sleep};

use crate::observe::{Observer, Outcome};

/// Which of the calls are hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// All.
    Always,
    /// By chance one in this many; 0 is taken for 1.
    OneIn(u64),
    /// The call with this number alone, counted from 1.
    Nth(u64),
}

/// One thing that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// With which operation; none: with all.
    pub op: Option<Op>,
    /// How often.
    pub when: When,
    /// How long the call is held up.
    pub delay: Duration,
    /// The error that it gets then; none: it is carried out.
    pub error: Option<Errno>,
}

/// An observer that makes calls fail, by a plan.
pub struct Faults {
    plan: Vec<(Fault, AtomicU64)>,
    hits: AtomicU64,
}

impl Faults {
    /// By this plan. Where several faults hit one call their delays add up, and the first
    /// error counts.
    pub fn new(plan: Vec<Fault>) -> Faults {
        let plan = plan.into_iter().map(|fault| (fault, AtomicU64::new(0))).collect();
        Faults { plan, hits: AtomicU64::new(0) }
    }

    /// Calls that were hit so far.
    pub fn hits(&self) -> u64 {
        self.hits.load(Ordering::Relaxed)
    }
}

fn strikes(fault: &Fault, calls: &AtomicU64, op: Op) -> bool {
    if fault.op.is_some_and(|only| only != op) {
        return false;
    }
    let number = calls.fetch_add(1, Ordering::Relaxed) + 1;
    match fault.when {
        When::Always => true,
        When::OneIn(every) => random_u64().is_multiple_of(every.max(1)),
        When::Nth(nth) => number == nth,
    }
}

impl Observer for Faults {
    fn admits(&self) -> bool {
        !self.plan.is_empty()
    }

    fn admit<'a>(&'a self, _: &'a Context, call: &'a ObservedCall<'a>) -> Admit<'a> {
        let (mut delay, mut error, mut hit) = (Duration::ZERO, None, false);
        for (fault, calls) in &self.plan {
            if strikes(fault, calls, call.op) {
                hit = true;
                delay += fault.delay;
                error = error.or(fault.error);
            }
        }
        if hit {
            self.hits.fetch_add(1, Ordering::Relaxed);
        }
        let error = error.map(|errno| Error::new(errno).because("a fault on purpose"));
        match (delay.is_zero(), error) {
            (true, None) => Admit::Now,
            (true, Some(error)) => Admit::Refuse(error),
            (false, error) => Admit::After(Box::pin(async move {
                sleep(delay).await;
                error.map_or(Ok(()), Err)
            })),
        }
    }

    fn done(&self, _: &Context, _: &ObservedCall<'_>, _: Outcome<'_>, _: Duration) {}
}
