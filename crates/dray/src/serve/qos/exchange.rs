//! The servers of a projection tell each other what classes use of the limits that they keep together. Each
//! connects to each other one, as servers of a slice do, and proves the projection's key.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dray_fabric::Incoming;
use dray_layers::qos::{ClassUsage, QosGate};
use dray_rpc::server::{
    Admission, BatchTaker, ReplicaLink, ReplicaPort, ReplicaRefusal, ReplicaTerms, ServerOptions,
    WireLink,
};
use dray_rpc::wire::{Input, UsageEntry, get_usage, put_usage};
use dray_rt::sync::Notify;
use dray_rt::{sleep, timeout};

use crate::error::Failure;
use crate::serve::export::ExportPlan;
use crate::serve::export_state::ExportState;
use crate::serve::slices::way_to;

/// From one time that a server says what it uses to the next.
const PERIOD: Duration = Duration::from_millis(100);
/// A server with nothing to say says so once in so many periods.
const QUIET_PERIODS: u64 = 10;
/// A server that takes no batch within this time is not there.
const ANSWER_MAX: Duration = Duration::from_secs(1);
/// All batches are of one epoch: each one stands for itself.
const EPOCH: u64 = 0;

/// The exchanges of all projections of a server.
#[derive(Default)]
pub struct ShareExchanges {
    all: Vec<Arc<ShareExchange>>,
    /// By the name with which another server greets: where its usage arrives.
    arrivals: BTreeMap<String, Arrival>,
}

/// The exchange of one projection.
struct ShareExchange {
    projection: String,
    gate: QosGate,
    others: Vec<Arc<OtherShare>>,
    rules_changed: Notify,
}

/// The way to one of the other servers.
struct OtherShare {
    /// Among the others.
    number: usize,
    server: String,
    link: WireLink,
    is_busy: AtomicBool,
    /// That it is not there has been said.
    is_missed: AtomicBool,
}

/// Where the usage of one of the other servers arrives.
struct Arrival {
    port: ReplicaPort,
    taker: UsageTaker,
}

struct UsageTaker {
    number: usize,
    gate: QosGate,
    /// The number of the last batch. One that comes late says what is over.
    last: Mutex<u64>,
}

/// The name of the way from one server of a projection to another one. No slice has such a name.
fn way_name(projection: &str, from: usize, to: usize) -> String {
    format!("{projection}/shares.{from}.{to}")
}

impl ShareExchanges {
    /// The exchanges of these exports. Errors: an address of a server is none.
    pub fn new(
        plans: &[ExportPlan],
        exports: &[Arc<ExportState>],
        options: &ServerOptions,
    ) -> Result<ShareExchanges, Failure> {
        let mut exchanges = ShareExchanges::default();
        for (plan, export) in plans.iter().zip(exports) {
            exchanges.add(plan, &export.qos, options)?;
        }
        Ok(exchanges)
    }

    fn add(
        &mut self,
        plan: &ExportPlan,
        gate: &QosGate,
        options: &ServerOptions,
    ) -> Result<(), Failure> {
        let Some(projection) = &plan.projection else { return Ok(()) };
        let (definition, me) = (&projection.definition, projection.position);
        let name = &definition.name;
        gate.share_among(definition.servers.len());
        let terms = ReplicaTerms {
            key: options.key.clone(),
            allow: plan.allow.clone(),
            definition: definition.fingerprint(),
        };
        let mut others = Vec::new();
        let servers = definition.servers.iter().enumerate().filter(|(place, _)| *place != me);
        for (number, (place, server)) in servers.enumerate() {
            let way = way_to(server, options)?;
            let link = WireLink::new(&way_name(name, me, place), way, terms.clone());
            let (is_busy, is_missed) = (AtomicBool::new(false), AtomicBool::new(false));
            let server = server.clone();
            others.push(Arc::new(OtherShare { number, server, link, is_busy, is_missed }));
            let from = way_name(name, place, me);
            let taker = UsageTaker { number, gate: gate.clone(), last: Mutex::new(0) };
            let arrival = Arrival { port: ReplicaPort::new(&from, terms.clone()), taker };
            self.arrivals.insert(from, arrival);
        }
        let (projection, gate) = (name.clone(), gate.clone());
        let rules_changed = Notify::new();
        self.all.push(Arc::new(ShareExchange { projection, gate, others, rules_changed }));
        Ok(())
    }

    /// Exchanges usage for ever; a task of the calling executor for each projection.
    pub fn spawn(&self, scope: &dray_rt::Scope) {
        let here = dray_rt::ExecutorHandle::current();
        for exchange in &self.all {
            let exchange = exchange.clone();
            scope.spawn_on(&here, async move { exchange.run().await });
        }
    }

    /// There are other rules.
    pub fn rules_changed(&self) {
        self.all.iter().for_each(|one| one.rules_changed.notify_one());
    }

    /// Serves the connection of another server that greets with this name. The connection and its admission
    /// come back if the name is of something else.
    pub async fn serve(
        &self,
        name: &str,
        incoming: Box<dyn Incoming>,
        admission: Admission,
    ) -> Option<(Box<dyn Incoming>, Admission)> {
        let Some(Arrival { port, taker }) = self.arrivals.get(name) else {
            return Some((incoming, admission));
        };
        let peer = incoming.peer();
        match incoming.establish() {
            Ok(connection) => port.serve(taker, connection, admission).await,
            Err(error) => log::error!("cannot serve a connection of {peer}: {error}"),
        }
        None
    }
}

impl BatchTaker for UsageTaker {
    fn take(&self, _: u64, number: u64, batch: &[u8]) -> Result<(), ReplicaRefusal> {
        let usage = get_usage(&mut Input(batch))?;
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut *last, number) != number {
            self.gate.heard(self.number, usage.into_iter().map(usage_of).collect());
        }
        Ok(())
    }
}

impl ShareExchange {
    async fn run(&self) {
        let (mut number, mut quiet) = (0, 0);
        loop {
            let Some(usage) = self.gate.exchange() else {
                self.rules_changed.notified().await;
                continue;
            };
            number += 1;
            quiet = if usage.is_empty() { quiet + 1 } else { 0 };
            if quiet <= 1 || quiet % QUIET_PERIODS == 0 {
                let entries: Vec<UsageEntry> = usage.into_iter().map(entry_of).collect();
                let mut batch = Vec::new();
                put_usage(&entries, &mut batch);
                self.others.iter().for_each(|other| self.say(other, number, &batch));
            }
            sleep(PERIOD).await;
        }
    }

    /// Says it to one of the others, unless that one still owes the answer to the last time.
    fn say(&self, other: &Arc<OtherShare>, number: u64, batch: &[u8]) {
        if other.is_busy.swap(true, Ordering::SeqCst) {
            return;
        }
        let (other, batch) = (other.clone(), batch.to_vec());
        let (gate, projection) = (self.gate.clone(), self.projection.clone());
        dray_rt::spawn(async move {
            let answer = timeout(ANSWER_MAX, other.link.ship(EPOCH, number, batch)).await;
            let error = match answer {
                Ok(Ok(())) => None,
                Ok(Err(ReplicaRefusal::Io(error))) => Some(error.to_string()),
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some("it does not answer".to_owned()),
            };
            if error.is_none() {
                gate.is_there(other.number);
            }
            other.note(&projection, error);
            other.is_busy.store(false, Ordering::SeqCst);
        });
    }
}

impl OtherShare {
    /// Says once that it is away, and that it is back.
    fn note(&self, projection: &str, error: Option<String>) {
        let was_missed = self.is_missed.swap(error.is_some(), Ordering::SeqCst);
        let server = &self.server;
        match (error, was_missed) {
            (Some(error), false) => log::warn!(
                "projection `{projection}`: {server} does not hear what this server uses of limits ({error}): \
                 it keeps its part of them"
            ),
            (None, true) => {
                log::info!("projection `{projection}`: {server} hears this server again")
            }
            (Some(_), true) | (None, false) => {}
        }
    }
}

fn entry_of(usage: ClassUsage) -> UsageEntry {
    let flag = |is_set, flag| if is_set { flag } else { 0 };
    UsageEntry {
        rule: usage.rule,
        value: usage.value,
        weight_milli: usage.weight_milli,
        bytes_per_s: usage.per_s[0],
        calls_per_s: usage.per_s[1],
        flags: flag(usage.is_held_up[0], UsageEntry::HELD_BYTES)
            | flag(usage.is_held_up[1], UsageEntry::HELD_CALLS)
            | flag(usage.is_waiting, UsageEntry::WAITING),
    }
}

fn usage_of(entry: UsageEntry) -> ClassUsage {
    let is_set = |flag| entry.flags & flag != 0;
    ClassUsage {
        weight_milli: entry.weight_milli,
        per_s: [entry.bytes_per_s, entry.calls_per_s],
        is_held_up: [is_set(UsageEntry::HELD_BYTES), is_set(UsageEntry::HELD_CALLS)],
        is_waiting: is_set(UsageEntry::WAITING),
        rule: entry.rule,
        value: entry.value,
    }
}
