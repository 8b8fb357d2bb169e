//! The classes of an export, and the calls that wait in them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::task::Waker;

use dray_core::{Class as Urgency, Grant, Identity, Op};

use super::bucket::Nanos;
use super::gate::nanos;
use super::report::{ClassCounts, Sample};
use super::rules::{Caller, RuleSet};
use super::sharing::Sharing;
use super::tree::{Cost, NodeIndex, Rates, Tree, WaiterNumber};
use super::window::Window;

/// Classes of one export; callers beyond share one class for each rule.
const CLASSES_MAX: usize = 65_536;
/// The class of those callers.
const OTHERS: &str = "(others)";
/// A class that had no call for so long makes room for another one.
const IDLE: Nanos = 10_000_000_000;
/// How long nobody looks for idle classes again.
const LOOK_AGAIN: Nanos = 1_000_000_000;
/// The mark that distinguishes background calls of a class from its other calls.
const BACKGROUND: &str = " (background)";
/// The weight of such calls is that of the others by this.
const BACKGROUND_PART: u32 = 100;

/// A class, for those who look it up.
pub(super) struct QosClass {
    pub(super) rule: String,
    pub(super) value: String,
    pub(super) within: String,
    pub(super) rates: Rates,
    pub(super) node: NodeIndex,
    /// Neither a limit nor a reservation on the way to the root.
    pub(super) is_free: bool,
    /// The class's node is not its own any more: the rules have changed, or it made room for another class. Said and asked
    /// under the lock of the state.
    pub(super) is_gone: AtomicBool,
    pub(super) done: Counters,
}

/// What a class has had. On cache lines of their own: all threads change them, and only read what stands beside.
#[derive(Default)]
#[repr(align(64))]
pub(super) struct Counters {
    pub(super) calls: AtomicU64,
    pub(super) bytes: AtomicU64,
    pub(super) waits: AtomicU64,
    pub(super) wait: AtomicU64,
}

impl QosClass {
    pub(super) fn begun(&self, cost: Cost) {
        self.done.calls.fetch_add(1, Relaxed);
        self.done.bytes.fetch_add(cost.bytes, Relaxed);
    }
}

pub(super) struct State {
    pub(super) rules: RuleSet,
    pub(super) tree: Tree,
    pub(super) sharing: Sharing,
    /// The nodes of rules that others are within.
    pub(super) inner: HashMap<usize, NodeIndex>,
    pub(super) classes: HashMap<(Option<usize>, String), Arc<QosClass>>,
    pub(super) waiting: Vec<Option<WaitingCall>>,
    pub(super) free: Vec<WaiterNumber>,
    pub(super) arrivals: u64,
    pub(super) window: Window,
    /// When the timer wakes.
    pub(super) timer: Option<Nanos>,
    /// Since when nobody waits.
    pub(super) quiet_since: Nanos,
    /// When idle classes were looked for last.
    pub(super) looked_for_idle: Nanos,
    pub(super) samples: [Sample; 2],
}

/// A call that waits, or has been let go and does not know it yet.
pub(super) struct WaitingCall {
    pub(super) who: Arc<Identity>,
    pub(super) node: String,
    pub(super) project: u32,
    pub(super) op: Op,
    pub(super) urgency: Urgency,
    pub(super) cost: Cost,
    pub(super) class: Arc<QosClass>,
    /// The order of arrival.
    pub(super) number: u64,
    pub(super) since: Nanos,
    pub(super) waker: Option<Waker>,
    pub(super) grant: Option<Grant>,
}

impl State {
    pub(super) fn classify(
        &mut self,
        caller: &Caller<'_>,
        urgency: Urgency,
        generation: &AtomicU64,
    ) -> Arc<QosClass> {
        let (rule, mut value) = match self.rules.classify(caller) {
            Some((rule, value)) => (Some(rule), value),
            None => (None, String::new()),
        };
        if urgency == Urgency::Background {
            value.push_str(BACKGROUND);
        }
        if let Some(class) = self.classes.get(&(rule, value.clone())) {
            return class.clone();
        }
        if self.classes.len() >= CLASSES_MAX {
            self.forget_idle(generation);
        }
        if self.classes.len() >= CLASSES_MAX {
            value = OTHERS.to_owned();
        }
        let key = (rule, value);
        match self.classes.get(&key) {
            Some(class) => class.clone(),
            None => self.new_class(key, urgency),
        }
    }

    pub(super) fn new_class(
        &mut self,
        key: (Option<usize>, String),
        urgency: Urgency,
    ) -> Arc<QosClass> {
        let compiled = key.0.map(|index| &self.rules.rules()[index]);
        let rule = compiled.map_or(String::new(), |compiled| compiled.rule.name.clone());
        let is_inner = key.0.is_some_and(|index| self.is_inner(index));
        let mut rates = compiled.map_or(Rates::default(), |compiled| compiled.rates);
        let parent = match key.0 {
            Some(index) if is_inner => self.inner_node(index),
            Some(index) => {
                self.rules.rules()[index].parent.map_or(NodeIndex::ROOT, |up| self.inner_node(up))
            }
            None => NodeIndex::ROOT,
        };
        let within = match (is_inner, key.0) {
            (true, _) => rule.clone(),
            (false, Some(index)) => {
                self.rules.rules()[index].rule.within.clone().unwrap_or_default()
            }
            (false, None) => String::new(),
        };
        if is_inner {
            rates = Rates::default(); // those of the rule are its node's
        }
        if urgency == Urgency::Background {
            rates.weight_milli = (rates.weight_milli / BACKGROUND_PART).max(1);
            (rates.reservation, rates.reservation_ops) = (0, 0);
        }
        let mut all_free = rates.is_free() && self.rules.root().is_free();
        let mut above = key.0;
        while let Some(index) = above {
            let compiled = &self.rules.rules()[index];
            all_free &= compiled.rates.is_free();
            above = compiled.parent;
        }
        let node = self.add_node(parent, (&rule, &key.1), rates);
        let class = Arc::new(QosClass {
            rule,
            value: key.1.clone(),
            within,
            rates,
            node,
            is_free: all_free,
            is_gone: AtomicBool::new(false),
            done: Counters::default(),
        });
        self.classes.insert(key, class.clone());
        class
    }

    pub(super) fn is_inner(&self, index: usize) -> bool {
        self.rules.rules().iter().any(|other| other.parent == Some(index))
    }

    /// The node of a rule that others are within.
    pub(super) fn inner_node(&mut self, index: usize) -> NodeIndex {
        if let Some(node) = self.inner.get(&index) {
            return *node;
        }
        let compiled = &self.rules.rules()[index];
        let (rates, up) = (compiled.rates, compiled.parent);
        let rule = compiled.rule.name.clone();
        let parent = up.map_or(NodeIndex::ROOT, |up| self.inner_node(up));
        let node = self.add_node(parent, (&rule, ""), rates);
        self.inner.insert(index, node);
        node
    }

    /// `rates`: of all servers that share them.
    fn add_node(&mut self, parent: NodeIndex, name: (&str, &str), rates: Rates) -> NodeIndex {
        let node = self.tree.add(parent, self.sharing.first_rates(rates), nanos());
        self.sharing.name(node, name, rates);
        node
    }

    /// A tree for these rules, with nothing in it. Answers the classes of the former one.
    pub(super) fn new_tree(
        &mut self,
        rules: &RuleSet,
    ) -> HashMap<(Option<usize>, String), Arc<QosClass>> {
        let before = std::mem::take(&mut self.classes);
        before.values().for_each(|class| class.is_gone.store(true, Relaxed));
        self.inner.clear();
        self.sharing.forget_all();
        self.tree = Tree::new(self.sharing.first_rates(rules.root()));
        self.sharing.name(NodeIndex::ROOT, ("", ""), rules.root());
        before
    }

    /// Makes room for other classes.
    pub(super) fn forget_idle(&mut self, generation: &AtomicU64) {
        let (now, tree, sharing) = (nanos(), &mut self.tree, &mut self.sharing);
        if now < self.looked_for_idle + LOOK_AGAIN {
            return; // a look takes all classes
        }
        self.looked_for_idle = now;
        self.classes.retain(|_, class| {
            let is_idle = tree.last_used(class.node) + IDLE < now;
            let is_removed = is_idle && tree.remove(class.node);
            if is_removed {
                class.is_gone.store(true, Relaxed);
                sharing.forget(class.node);
            }
            !is_removed
        });
        generation.fetch_add(1, SeqCst);
    }

    /// Puts a call behind those of its class.
    pub(super) fn wait(&mut self, call: WaitingCall) -> WaiterNumber {
        let (node, cost) = (call.class.node, call.cost);
        let ticket = self.free.pop().unwrap_or_else(|| {
            self.waiting.push(None);
            u32::try_from(self.waiting.len() - 1).expect("calls of connections are limited")
        });
        self.waiting[ticket as usize] = Some(call);
        self.tree.wait(nanos(), node, ticket, cost);
        ticket
    }

    pub(super) fn remove(&mut self, ticket: WaiterNumber) -> Option<WaitingCall> {
        let call = self.waiting[ticket as usize].take()?;
        self.free.push(ticket);
        Some(call)
    }

    pub(super) fn counts(&self) -> HashMap<(String, String), ClassCounts> {
        let of = |class: &QosClass| ClassCounts {
            calls: class.done.calls.load(Relaxed),
            bytes: class.done.bytes.load(Relaxed),
            waits: class.done.waits.load(Relaxed),
            wait: class.done.wait.load(Relaxed),
            waiting: self.tree.waiting_in(class.node) as u64,
        };
        let all = self.classes.values();
        all.map(|class| ((class.rule.clone(), class.value.clone()), of(class))).collect()
    }
}

/// Classes that are known by the same names go on counting.
pub(super) fn carry_counts(
    classes: &HashMap<(Option<usize>, String), Arc<QosClass>>,
    before: HashMap<(Option<usize>, String), Arc<QosClass>>,
) {
    let before: HashMap<_, _> = before
        .into_values()
        .map(|class| ((class.rule.clone(), class.value.clone()), class))
        .collect();
    for class in classes.values() {
        let Some(old) = before.get(&(class.rule.clone(), class.value.clone())) else { continue };
        let counts = [
            (&class.done.calls, &old.done.calls),
            (&class.done.bytes, &old.done.bytes),
            (&class.done.waits, &old.done.waits),
            (&class.done.wait, &old.done.wait),
        ];
        for (new, old) in counts {
            new.fetch_add(old.load(Relaxed), Relaxed);
        }
    }
}
