//! The servers of a projection tell each other what classes use of the limits that they keep together, and which
//! rules were changed. Each connects to each other one, as servers of a slice do, and proves the projection's key.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dray_core::Fut;
use dray_fabric::Incoming;
use dray_layers::qos::{ClassUsage, QosGate};
use dray_rpc::server::{
    Admission, BatchTaker, ReplicaLink, ReplicaPort, ReplicaRefusal, ReplicaTerms, ServerOptions,
    WireLink,
};
use dray_rpc::wire::{Input, Malformed, UsageEntry, get_usage, put_usage};
use dray_rt::sync::Notify;
use dray_rt::{join_all, sleep, timeout};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::live::RuleChange;
use super::questions::{ChangesAnswer, ShareQuestion, TakenAnswer, answer, part_of};
use super::rulebook::RuleBook;
use crate::error::Failure;
use crate::serve::export::ExportPlan;
use crate::serve::slices::way_to;

/// From one time that a server says what it uses to the next.
const PERIOD: Duration = Duration::from_millis(100);
/// A server with nothing to say says so once in so many periods.
const QUIET_PERIODS: u64 = 10;
/// A server that takes no batch within this time is not there.
const ANSWER_MAX: Duration = Duration::from_secs(1);
/// How often a server that owes rules to another one, or has not heard them from it, tries again.
const RULES_AGAIN: Duration = Duration::from_secs(1);
/// Batches of usage are of one epoch, and questions of another one: each batch stands for itself.
const USAGE: u64 = 0;
const QUESTION: u64 = 1;

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
    /// The number of its export in the book.
    export: usize,
    book: Arc<RuleBook>,
    gate: QosGate,
    others: Vec<Arc<OtherShare>>,
    rules_changed: Notify,
}

/// What one of the other servers says to a question.
pub enum OtherAnswer<T> {
    Said(T),
    /// Why nothing is heard of that server.
    Away(String),
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
    questions: AtomicU64,
    /// The version of the rules that it has taken; 0: none.
    taken: AtomicU64,
    /// This server has asked for the rules of the other one since it began.
    is_heard: AtomicBool,
    /// One of both servers may owe rules to the other one.
    owes: Notify,
}

/// Where the usage of one of the other servers arrives.
struct Arrival {
    port: ReplicaPort,
    taker: UsageTaker,
}

struct UsageTaker {
    number: usize,
    exchange: Arc<ShareExchange>,
    /// The number of the last batch. One that comes late says what is over.
    last: Mutex<u64>,
}

/// The name of the way from one server of a projection to another one. No slice has such a name.
fn way_name(projection: &str, from: usize, to: usize) -> String {
    format!("{projection}/shares.{from}.{to}")
}

impl ShareExchanges {
    /// The exchanges of these exports, which are those of the book. Errors: an address of a server is none.
    pub fn new(
        plans: &[ExportPlan],
        book: &Arc<RuleBook>,
        options: &ServerOptions,
    ) -> Result<ShareExchanges, Failure> {
        let mut exchanges = ShareExchanges::default();
        for (number, plan) in plans.iter().enumerate() {
            exchanges.add(plan, (number, book), options)?;
        }
        Ok(exchanges)
    }

    fn add(
        &mut self,
        plan: &ExportPlan,
        (export, book): (usize, &Arc<RuleBook>),
        options: &ServerOptions,
    ) -> Result<(), Failure> {
        let Some(projection) = &plan.projection else { return Ok(()) };
        let gate = &book.exports()[export].gate;
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
            others.push(Arc::new(OtherShare {
                number,
                server: server.clone(),
                link,
                is_busy: AtomicBool::new(false),
                is_missed: AtomicBool::new(false),
                questions: AtomicU64::new(0),
                taken: AtomicU64::new(0),
                is_heard: AtomicBool::new(false),
                owes: Notify::new(),
            }));
        }
        let exchange = Arc::new(ShareExchange {
            projection: name.clone(),
            export,
            book: book.clone(),
            gate: gate.clone(),
            others,
            rules_changed: Notify::new(),
        });
        let places = (0..definition.servers.len()).filter(|place| *place != me);
        for (number, place) in places.enumerate() {
            let from = way_name(name, place, me);
            let taker = UsageTaker { number, exchange: exchange.clone(), last: Mutex::new(0) };
            let arrival = Arrival { port: ReplicaPort::new(&from, terms.clone()), taker };
            self.arrivals.insert(from, arrival);
        }
        self.all.push(exchange);
        Ok(())
    }

    /// Exchanges usage for ever; a task of the calling executor for each projection.
    pub fn spawn(&self, scope: &dray_rt::Scope) {
        let here = dray_rt::ExecutorHandle::current();
        for exchange in &self.all {
            for other in &exchange.others {
                let (exchange, other) = (exchange.clone(), other.clone());
                scope.spawn_on(&here, async move { exchange.keep_rules(&other).await });
            }
            let exchange = exchange.clone();
            scope.spawn_on(&here, async move { exchange.run().await });
        }
    }

    fn of_export(&self, export: usize) -> Option<&Arc<ShareExchange>> {
        self.all.iter().find(|one| one.export == export)
    }

    /// Has the other servers take the rules of an export, all at the same time. By server: the rules that do not
    /// count there, and why. One that is away takes them when it is back.
    pub async fn pass_rules_on(
        &self,
        export: usize,
    ) -> Vec<(String, OtherAnswer<Map<String, Value>>)> {
        let Some(exchange) = self.of_export(export) else { return Vec::new() };
        let pass_on = |other: &Arc<OtherShare>| -> Fut<'static, _> {
            let (exchange, other) = (exchange.clone(), other.clone());
            Box::pin(async move {
                let answer = exchange.pass_on(&other).await;
                other.owes.notify_one(); // tries again, if that has failed
                (other.server.clone(), answer)
            })
        };
        join_all(exchange.others.iter().map(pass_on).collect()).await
    }

    /// What the other servers show of an export.
    pub async fn ask_for_shown(
        &self,
        export: usize,
    ) -> Vec<(String, OtherAnswer<Map<String, Value>>)> {
        let Some(exchange) = self.of_export(export) else { return Vec::new() };
        let ask = |other: &Arc<OtherShare>| -> Fut<'static, _> {
            let other = other.clone();
            Box::pin(async move { (other.server.clone(), other.ask(&ShareQuestion::Show).await) })
        };
        join_all(exchange.others.iter().map(ask).collect()).await
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
    fn take(&self, epoch: u64, number: u64, batch: &[u8]) -> Result<Vec<u8>, ReplicaRefusal> {
        match epoch {
            USAGE => self.take_usage(number, batch).map(|()| Vec::new()),
            QUESTION => {
                let ShareExchange { book, export, .. } = &*self.exchange;
                let before = book.version(*export);
                let answer = answer(book, *export, batch);
                if book.version(*export) != before {
                    self.exchange.have_changed();
                }
                Ok(answer.map_err(|_| Malformed("no question that this server knows"))?)
            }
            _ => Err(Malformed("a batch that is neither usage nor a question").into()),
        }
    }
}

impl UsageTaker {
    fn take_usage(&self, number: u64, batch: &[u8]) -> Result<(), ReplicaRefusal> {
        let usage = get_usage(&mut Input(batch))?;
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut *last, number) != number {
            self.exchange.gate.heard(self.number, usage.into_iter().map(usage_of).collect());
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
            let answer = timeout(ANSWER_MAX, other.link.ship(USAGE, number, batch)).await;
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

impl ShareExchange {
    /// Rules have changed, which limits depend on, and which other servers may not know.
    fn have_changed(&self) {
        self.rules_changed.notify_one();
        self.others.iter().for_each(|other| other.owes.notify_one());
    }

    /// Hears the rules of another server once, and has that one take those of this server whenever they change.
    async fn keep_rules(&self, other: &OtherShare) {
        loop {
            let is_heard = other.is_heard.load(Ordering::SeqCst) || self.hear(other).await;
            let owes = other.taken.load(Ordering::SeqCst) != self.book.version(self.export);
            let is_done =
                is_heard && (!owes || matches!(self.pass_on(other).await, OtherAnswer::Said(_)));
            match is_done {
                true => other.owes.notified().await,
                false => sleep(RULES_AGAIN).await,
            }
        }
    }

    /// Takes what the other server knows of rules. Whether it has said all.
    async fn hear(&self, other: &OtherShare) -> bool {
        let mut from = 0;
        loop {
            let answer: OtherAnswer<ChangesAnswer> =
                other.ask(&ShareQuestion::ChangesFrom(from)).await;
            let OtherAnswer::Said(ChangesAnswer { changes, more }) = answer else { return false };
            from += changes.len();
            let before = self.book.version(self.export);
            self.book.take(self.export, changes);
            if self.book.version(self.export) != before {
                self.have_changed();
            }
            if !more {
                other.is_heard.store(true, Ordering::SeqCst);
                return true;
            }
        }
    }

    async fn pass_on(&self, other: &OtherShare) -> OtherAnswer<Map<String, Value>> {
        let (version, changes) = self.book.changes(self.export);
        let (mut refused, mut rest): (_, &[RuleChange]) = (Map::new(), &changes);
        while !rest.is_empty() {
            let part = part_of(rest);
            rest = &rest[part.len()..];
            let question = ShareQuestion::Take(part.to_vec());
            match other.ask::<TakenAnswer>(&question).await {
                OtherAnswer::Said(taken) => refused.extend(taken.refused),
                OtherAnswer::Away(why) => return OtherAnswer::Away(why),
            }
        }
        other.taken.store(version, Ordering::SeqCst);
        OtherAnswer::Said(refused)
    }
}

impl OtherShare {
    /// Asks it, once more if the connection has just ended.
    async fn ask<T: DeserializeOwned>(&self, question: &ShareQuestion) -> OtherAnswer<T> {
        let Ok(text) = serde_json::to_vec(question) else {
            return OtherAnswer::Away("the question cannot be written".to_owned());
        };
        let mut why = String::new();
        for _ in 0..2 {
            let number = self.questions.fetch_add(1, Ordering::SeqCst);
            let asked = self.link.ask(QUESTION, number, text.clone());
            match timeout(ANSWER_MAX, asked).await {
                Ok(Ok(answer)) => {
                    return match serde_json::from_slice(&answer) {
                        Ok(answer) => OtherAnswer::Said(answer),
                        Err(_) => OtherAnswer::Away("its answer makes no sense".to_owned()),
                    };
                }
                Ok(Err(ReplicaRefusal::Io(error))) => why = error.to_string(),
                Ok(Err(error)) => return OtherAnswer::Away(error.to_string()),
                Err(_) => return OtherAnswer::Away("it does not answer".to_owned()),
            }
        }
        OtherAnswer::Away(why)
    }

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
