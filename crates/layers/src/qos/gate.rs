//! Asks the scheduler for a server, and keeps the calls that wait.
//!
//! While nobody waits, a call of a class without limits takes no lock: it counts itself among those
//! below, and goes on. Any other call takes the lock of the export's scheduler once, and its end
//! takes it once more.

use std::cell::Cell;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::task::Waker;
use std::time::Duration;

use dray_core::{
    CallAdmission, Context, Error, FileId, Grant, GrantedAdmit, Identity, ObservedCall, Op, Peer,
};
use dray_rt::{Instant, Tick, now, sleep_until, spawn};

use super::bucket::Nanos;
use super::identity_cache;
use super::projects::ProjectTable;
use super::report::{self, ClassReport, QosReport, SAMPLE_MIN, Sample};
use super::rules::{Caller, RuleSet};
use super::sharing::Sharing;
use super::state::{QosClass, State, WaitingCall, carry_counts};
use super::tree::{Cost, Rates, Tree, WaiterNumber};
use super::waiting::Waiting;
use super::window::Window;

/// Calls with up to so much data count as one each below; larger ones by their data.
const SMALL_MAX_BYTES: u64 = 64 << 10;
/// Small calls that may be under way below at a time.
const SMALL_CALLS_MAX: u64 = 256;
/// Calls take no lock again once nobody has waited for so long.
const QUIET: Nanos = 10_000_000;
/// A timer that is so late has gone with its thread.
const TIMER_LATE: Nanos = 50_000_000;

/// The shares of one export. Cheap to clone.
#[derive(Clone)]
pub struct QosGate {
    pub(super) gate: Arc<Gate>,
    /// Another admission, which is asked first.
    first: Option<Arc<dyn CallAdmission>>,
}

pub(super) struct Gate {
    number: u64,
    is_on: AtomicBool,
    by_op: AtomicBool,
    projects: Arc<ProjectTable>,
    /// Counts the sets of rules, and removals of classes.
    generation: AtomicU64,
    /// Calls wait, or did a moment ago.
    is_congested: AtomicBool,
    below: CallsBelow,
    window_bytes: AtomicU64,
    state: Mutex<State>,
}

/// Calls below at a time. They have cache lines of their own: all threads change them with each call, and only
/// read what stands beside.
#[repr(align(64))]
struct CallsBelow {
    /// KiB of large ones.
    large_kib: AtomicU64,
    small: AtomicU64,
}

/// Kinds of grants, in the bits of its number. The highest is of a small call. A large one has its KiB in the
/// lowest 23, and the microsecond of its beginning above.
const SMALL: u64 = 1 << 63;
const KIB_BITS: u32 = 23;
const KIB_MASK: u64 = (1 << KIB_BITS) - 1;
const MICROS_MASK: u64 = (1 << (63 - KIB_BITS)) - 1;

fn is_small(cost: Cost) -> bool {
    cost.bytes <= SMALL_MAX_BYTES
}

fn kib(cost: Cost) -> u64 {
    cost.bytes.div_ceil(1024).min(KIB_MASK)
}

fn micros(at: Nanos) -> u64 {
    (at / 1000) & MICROS_MASK
}

/// The data that a call is charged for.
fn cost_of(call: &ObservedCall<'_>) -> Cost {
    Cost { bytes: if call.op.facts().moves_data { call.bytes } else { 0 } }
}

/// The address of a client, as rules have it.
fn node_of(cx: &Context) -> String {
    match cx.via.map(|via| via.peer) {
        Some(Peer::Ip(address)) => IpAddr::to_canonical(&address.ip()).to_string(),
        Some(Peer::Local | Peer::User(..)) | None => "local".to_owned(),
    }
}

pub(super) fn nanos() -> Nanos {
    now().as_nanos()
}

impl QosGate {
    /// Of an export without rules.
    pub fn new() -> QosGate {
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        let window = Window::new(None);
        let gate = Gate {
            number: NUMBERS.fetch_add(1, SeqCst),
            is_on: AtomicBool::new(false),
            by_op: AtomicBool::new(false),
            projects: Arc::default(),
            generation: AtomicU64::new(0),
            is_congested: AtomicBool::new(false),
            below: CallsBelow { large_kib: AtomicU64::new(0), small: AtomicU64::new(0) },
            window_bytes: AtomicU64::new(window.bytes()),
            state: Mutex::new(State {
                rules: RuleSet::default(),
                tree: Tree::new(Rates::default()),
                sharing: Sharing::default(),
                inner: HashMap::new(),
                classes: HashMap::new(),
                waiting: Vec::new(),
                free: Vec::new(),
                arrivals: 0,
                window,
                timer: None,
                quiet_since: 0,
                looked_for_idle: 0,
                samples: Default::default(),
            }),
        };
        QosGate { gate: Arc::new(gate), first: None }
    }

    /// The same, for a server to ask: `first` is asked before.
    pub fn admission(&self, first: Option<Arc<dyn CallAdmission>>) -> Arc<dyn CallAdmission> {
        Arc::new(QosGate { gate: self.gate.clone(), first })
    }

    /// The projects of files, for what opens them to fill in.
    pub fn projects(&self) -> Arc<ProjectTable> {
        self.gate.projects.clone()
    }

    /// Takes other rules. Calls that wait are sorted anew, and go on as these have it.
    pub fn set_rules(&self, rules: RuleSet) {
        self.gate.set_rules(rules);
    }

    /// What each class had. Rates are of the last fifth of a second, or of the time since the last report.
    pub fn report(&self) -> QosReport {
        self.gate.report()
    }
}

impl Default for QosGate {
    fn default() -> QosGate {
        QosGate::new()
    }
}

impl Gate {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The project that a call is about; 0 where none counts.
    fn project_of(&self, call: &ObservedCall<'_>) -> u32 {
        if self.projects.is_on() { self.projects.get(call.id) } else { 0 }
    }

    fn class_of(&self, cx: &Context, op: Op, project: u32) -> Arc<QosClass> {
        let of = (self.number, self.generation.load(SeqCst));
        let known_by = (self.by_op.load(SeqCst).then_some(op), project);
        identity_cache::class_of(of, cx, known_by, || {
            let node = node_of(cx);
            let mut state = self.lock();
            state.classify(&caller(&cx.who, (&node, project), op), cx.class, &self.generation)
        })
    }

    fn has_room(&self, cost: Cost) -> bool {
        match is_small(cost) {
            true => self.below.small.load(SeqCst) < SMALL_CALLS_MAX,
            false => {
                let (busy, wanted) = (self.below.large_kib.load(SeqCst), kib(cost));
                busy == 0 || (busy + wanted) << 10 <= self.window_bytes.load(SeqCst)
            }
        }
    }

    /// Counts a call among those below.
    fn occupy(&self, cost: Cost, now: Nanos) -> Grant {
        if is_small(cost) {
            self.below.small.fetch_add(1, SeqCst);
            return Grant(SMALL);
        }
        let kib = kib(cost);
        self.below.large_kib.fetch_add(kib, SeqCst);
        Grant(micros(now) << KIB_BITS | kib)
    }

    /// Lets a call begin if it need not wait.
    fn pass(&self, class: &QosClass, cost: Cost) -> Option<Grant> {
        if class.is_free && !self.is_congested.load(SeqCst) && self.has_room(cost) {
            let now = if is_small(cost) { 0 } else { nanos() };
            class.begun(cost);
            return Some(self.occupy(cost, now));
        }
        let mut state = self.lock();
        if class.is_gone.load(Relaxed) {
            return None; // it was looked up before the rules changed
        }
        let now = nanos();
        let room = self.has_room(cost);
        let small = is_small(cost) && room;
        if !state.tree.pass(now, class.node, cost, (room, small)) {
            return None;
        }
        self.calm(&mut state, now);
        drop(state);
        class.begun(cost);
        Some(self.occupy(cost, now))
    }

    /// Calls may do without the lock again, if nobody waits.
    fn calm(&self, state: &mut State, now: Nanos) {
        if state.tree.waiting() == 0 && now.saturating_sub(state.quiet_since) > QUIET {
            self.is_congested.store(false, SeqCst);
        }
    }

    /// Lets go all who may begin. The wakers are for after the lock.
    fn dispatch(self: &Arc<Self>, state: &mut State, now: Nanos) -> Vec<Waker> {
        let (mut woken, is_full) = (Vec::new(), Cell::new(false));
        let fits = |cost| {
            is_full.set(!self.has_room(cost));
            !is_full.get()
        };
        while let Some(ticket) = state.tree.next(now, fits) {
            let Some(call) = &mut state.waiting[ticket as usize] else { continue };
            self.let_go(call, now);
            woken.extend(call.waker.take());
        }
        if state.tree.waiting() == 0 {
            state.quiet_since = now;
            return woken;
        }
        if is_full.get() {
            state.window.is_full();
        }
        if let Some(at) = state.tree.next_event() {
            self.set_timer(state, now, at);
        }
        woken
    }

    fn let_go(&self, call: &mut WaitingCall, now: Nanos) {
        call.class.begun(call.cost);
        call.class.done.waits.fetch_add(1, Relaxed);
        call.class.done.wait.fetch_add(now.saturating_sub(call.since), Relaxed);
        call.grant = Some(self.occupy(call.cost, now));
    }

    /// Looks again at `at`, when a limit lets somebody go on.
    fn set_timer(self: &Arc<Self>, state: &mut State, now: Nanos, at: Nanos) {
        let is_set = state.timer.is_some_and(|set| set <= at && now < set + TIMER_LATE);
        if is_set || Tick::here().is_none() {
            return;
        }
        state.timer = Some(at);
        let gate = self.clone();
        spawn(async move {
            sleep_until(Instant::from_nanos(at)).await;
            let mut state = gate.lock();
            if state.timer == Some(at) {
                state.timer = None;
            }
            let woken = gate.dispatch(&mut state, nanos());
            drop(state);
            woken.into_iter().for_each(Waker::wake);
        });
    }

    fn ended(self: &Arc<Self>, Grant(grant): Grant) {
        let large = (grant & SMALL == 0).then_some(grant & KIB_MASK);
        match large {
            None => self.below.small.fetch_sub(1, SeqCst),
            Some(kib) => self.below.large_kib.fetch_sub(kib, SeqCst),
        };
        let is_congested = self.is_congested.load(SeqCst);
        if !is_congested && large.is_none() {
            return; // nearly always
        }
        let mut state = match is_congested {
            true => self.lock(),
            // Only to learn how long calls take when nobody waits.
            false => match self.state.try_lock() {
                Ok(state) => state,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return,
            },
        };
        let now = nanos();
        if let Some(kib) = large {
            let lasted = micros(now).wrapping_sub(grant >> KIB_BITS) & MICROS_MASK;
            state.window.ended(now, kib << 10, lasted * 1000);
            self.window_bytes.store(state.window.bytes(), SeqCst);
        }
        let woken = match is_congested {
            true => self.dispatch(&mut state, now),
            false => Vec::new(),
        };
        drop(state);
        woken.into_iter().for_each(Waker::wake);
    }

    /// A call gives up its wait, or its grant.
    pub(super) fn give_up(self: &Arc<Self>, ticket: WaiterNumber) {
        let mut state = self.lock();
        let Some(call) = state.remove(ticket) else { return };
        let now = nanos();
        match call.grant {
            Some(grant) => {
                drop(state);
                return self.ended(grant);
            }
            None => {
                state.tree.give_up(now, call.class.node, ticket);
            }
        }
        let woken = self.dispatch(&mut state, now);
        drop(state);
        woken.into_iter().for_each(Waker::wake);
    }

    fn set_rules(self: &Arc<Self>, rules: RuleSet) {
        let mut state = self.lock();
        let now = nanos();
        let mut tickets = state.tree.take_all();
        let number =
            |ticket: &WaiterNumber| state.waiting[*ticket as usize].as_ref().map(|one| one.number);
        tickets.sort_by_key(number);
        let before = state.new_tree(&rules);
        state.window = Window::new(rules.in_service_bytes());
        state.timer = None;
        self.window_bytes.store(state.window.bytes(), SeqCst);
        self.by_op.store(rules.by_op(), SeqCst);
        self.projects.switch(rules.by_project());
        self.is_on.store(rules.is_on(), SeqCst);
        let is_on = rules.is_on();
        state.rules = rules;
        self.generation.fetch_add(1, SeqCst);
        let mut woken = Vec::new();
        for ticket in tickets {
            let Some(mut call) = state.waiting[ticket as usize].take() else { continue };
            let who = call.who.clone();
            let node = call.node.clone();
            let caller = caller(&who, (&node, call.project), call.op);
            call.class = state.classify(&caller, call.urgency, &self.generation);
            if !is_on {
                self.let_go(&mut call, now);
                woken.extend(call.waker.take());
            }
            let (node, cost) = (call.class.node, call.cost);
            state.waiting[ticket as usize] = Some(call);
            if is_on {
                state.tree.wait(now, node, ticket, cost);
            }
        }
        carry_counts(&state.classes, before);
        woken.extend(self.dispatch(&mut state, now));
        drop(state);
        woken.into_iter().for_each(Waker::wake);
    }

    fn report(&self) -> QosReport {
        let mut state = self.lock();
        let now = nanos();
        let counts = state.counts();
        let mut classes: Vec<ClassReport> = state
            .classes
            .values()
            .map(|class| ClassReport {
                rule: class.rule.clone(),
                value: class.value.clone(),
                within: class.within.clone(),
                rates: class.rates,
                counts: counts[&(class.rule.clone(), class.value.clone())].clone(),
                bytes_per_s: 0.0,
                calls_per_s: 0.0,
                wait_s: 0.0,
                share: 0.0,
                entitled: 0.0,
            })
            .collect();
        classes.sort_by(|one, other| (&one.rule, &one.value).cmp(&(&other.rule, &other.value)));
        // The newer sample may be too young to take rates from.
        let is_old = |sample: &Sample| now.saturating_sub(sample.at) >= SAMPLE_MIN;
        if is_old(&state.samples[1]) {
            state.samples.swap(0, 1);
            state.samples[1] = Sample { at: now, counts };
        }
        let call_cost_bytes = state.tree.call_cost_bytes();
        let cost = |calls: u64, bytes: u64| (bytes + calls * call_cost_bytes) as f64;
        report::rate(&mut classes, &state.samples[0], now, cost);
        QosReport {
            is_on: state.rules.is_on(),
            window_bytes: self.window_bytes.load(SeqCst),
            in_service_bytes: self.below.large_kib.load(SeqCst) << 10,
            classes,
        }
    }
}

impl QosGate {
    /// Waits for its turn, unless there is none to wait for.
    fn admit_or_wait(&self, cx: &Context, call: &ObservedCall<'_>) -> GrantedAdmit<'static> {
        let gate = &self.gate;
        if !gate.is_on.load(SeqCst) {
            return GrantedAdmit::Now(Grant::NONE);
        }
        let project = gate.project_of(call);
        let (class, cost) = (gate.class_of(cx, call.op, project), cost_of(call));
        if let Some(grant) = gate.pass(&class, cost) {
            return GrantedAdmit::Now(grant);
        }
        let node = node_of(cx);
        let mut state = gate.lock();
        // From now on calls that end look for those that wait.
        gate.is_congested.store(true, SeqCst);
        // The rules may be others by now.
        let caller = caller(&cx.who, (&node, project), call.op);
        let class = state.classify(&caller, cx.class, &gate.generation);
        state.arrivals += 1;
        let (number, since) = (state.arrivals, nanos());
        let ticket = state.wait(WaitingCall {
            who: cx.who.clone(),
            node,
            project,
            op: call.op,
            urgency: cx.class,
            cost,
            class,
            number,
            since,
            waker: None,
            grant: None,
        });
        let woken = gate.dispatch(&mut state, since);
        drop(state);
        woken.into_iter().for_each(Waker::wake);
        let waiting = Waiting { gate: gate.clone(), ticket: Some(ticket), cx: cx.clone() };
        GrantedAdmit::After(Box::pin(waiting))
    }
}

impl CallAdmission for QosGate {
    fn is_on(&self) -> bool {
        self.first.is_some() || self.gate.is_on.load(SeqCst)
    }

    fn admit_at_once(&self, cx: &Context, call: &ObservedCall<'_>) -> Option<Grant> {
        if let Some(first) = &self.first {
            let granted = first.admit_at_once(cx, call)?;
            assert_eq!(granted, Grant::NONE, "a call has one grant, and that is of the shares");
        }
        if !self.gate.is_on.load(SeqCst) {
            return Some(Grant::NONE);
        }
        let class = self.gate.class_of(cx, call.op, self.gate.project_of(call));
        self.gate.pass(&class, cost_of(call))
    }

    fn admit<'a>(&'a self, cx: &'a Context, call: &'a ObservedCall<'a>) -> GrantedAdmit<'a> {
        let Some(first) = &self.first else { return self.admit_or_wait(cx, call) };
        match first.admit(cx, call) {
            GrantedAdmit::Refuse(error) => GrantedAdmit::Refuse(error),
            GrantedAdmit::Now(_) => self.admit_or_wait(cx, call),
            GrantedAdmit::After(wait) => GrantedAdmit::After(Box::pin(async move {
                wait.await?;
                match self.admit_or_wait(cx, call) {
                    GrantedAdmit::Now(grant) => Ok(grant),
                    GrantedAdmit::After(wait) => wait.await,
                    GrantedAdmit::Refuse(error) => Err(error),
                }
            })),
        }
    }

    fn ended(&self, grant: Grant) {
        if grant != Grant::NONE {
            self.gate.ended(grant);
        }
    }

    fn refused(&self, cx: &Context, call: &ObservedCall<'_>, error: &Error, elapsed: Duration) {
        if let Some(first) = &self.first {
            first.refused(cx, call, error, elapsed);
        }
    }

    fn settled(
        &self,
        cx: &Context,
        call: &ObservedCall<'_>,
        made: Option<FileId>,
        error: Option<&Error>,
    ) {
        if let Some(first) = &self.first {
            first.settled(cx, call, made, error);
        }
    }
}

fn caller<'a>(who: &'a Identity, (node, project): (&'a str, u32), op: Op) -> Caller<'a> {
    Caller { job: &who.job, uid: who.uid, gid: who.gid, groups: &who.groups, project, node, op }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use dray_core::{NodeId, Pid, RequestId, Uid};

    use super::super::rule_keys::{Pattern, RuleKey};
    use super::super::rules::{Amount, QosRule};
    use super::*;

    fn limited(uid: u32) -> QosRule {
        QosRule {
            name: format!("user-{uid}"),
            matches: BTreeMap::from([(RuleKey::User, vec![Pattern::Ids(uid, uid)])]),
            limit: Some(Amount::Units(1 << 20)),
            ..QosRule::default()
        }
    }

    fn of_user(uid: u32) -> Context {
        let who = Arc::new(Identity { uid: Uid(uid), ..Identity::default() });
        Context::new(NodeId(7), RequestId(0), who, Pid(uid))
    }

    /// A rule was removed between the lookup of a call's class and its admission. The class's place was not in the new
    /// tree, and the server ended.
    // proves: P196
    #[test]
    fn a_class_that_was_looked_up_before_the_rules_changed_admits_nothing() {
        let (gate, cost) = (QosGate::new(), Cost { bytes: 4096 });
        let rules: Vec<QosRule> = (0..3).map(limited).collect();
        gate.set_rules(RuleSet::new(&rules).unwrap());
        let class_of = |uid| gate.gate.class_of(&of_user(uid), Op::Read, 0);
        let classes: Vec<_> = (0..3).map(class_of).collect();
        assert!(classes.iter().all(|class| gate.gate.pass(class, cost).is_some()));
        gate.set_rules(RuleSet::new(&rules[..1]).unwrap());
        assert!(classes.iter().all(|class| gate.gate.pass(class, cost).is_none()));
        assert!((0..3).all(|uid| gate.gate.pass(&class_of(uid), cost).is_some()));
    }
}
