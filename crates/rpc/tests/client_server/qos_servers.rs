//! Servers of a projection that keep limits together, with a clock of the simulation.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use crate::common::simulate;
use dray_core::{
    CallAdmission, Context, FileId, GrantedAdmit, Identity, NodeId, ObservedCall, Op, Pid,
    RequestId, Uid,
};
use dray_layers::qos::rules::Amount;
use dray_layers::qos::{Pattern, QosGate, QosRule, RuleKey, RuleSet};
use dray_rt::{ExecutorHandle, Scope, sleep, spawn};

const MIB: u64 = 1 << 20;
const CALL_BYTES: u64 = 256 << 10;
const PERIOD: Duration = Duration::from_millis(100);
const SECOND: Duration = Duration::from_secs(1);

/// Gates that tell each other ten times a second what they use, but for those that are cut off.
struct Servers {
    gates: Vec<QosGate>,
    /// Ends the exchange.
    exchange: Scope,
    /// Loads begin no further call.
    is_still: Arc<AtomicBool>,
}

impl Servers {
    fn new(count: usize, rules: &[QosRule]) -> Servers {
        let gates: Vec<QosGate> = (0..count).map(|_| QosGate::new()).collect();
        for gate in &gates {
            gate.share_among(count);
            gate.set_rules(RuleSet::new(rules).unwrap());
        }
        let exchange = Scope::new();
        for me in 0..count {
            let gates = gates.clone();
            exchange.spawn_on(&ExecutorHandle::current(), async move {
                // No two at the same time.
                sleep(PERIOD * me as u32 / count as u32).await;
                loop {
                    let usage = gates[me].exchange().expect("there are limits");
                    for (other, gate) in gates.iter().enumerate().filter(|(one, _)| *one != me) {
                        // Its number among the others.
                        gate.heard(me - usize::from(other < me), usage.clone());
                    }
                    sleep(PERIOD).await;
                }
            });
        }
        Servers { gates, exchange, is_still: Arc::default() }
    }

    /// A user with calls at one server, so many at a time; each has `pause` behind it.
    fn load(&self, server: usize, uid: u32, depth: usize, pause: Duration) -> Scope {
        let load = Scope::new();
        for _ in 0..depth {
            let admission = self.gates[server].admission(None);
            let is_still = self.is_still.clone();
            load.spawn_on(&ExecutorHandle::current(), async move {
                let who = Arc::new(Identity { uid: Uid(uid), ..Identity::default() });
                let cx = Context::new(NodeId(1), RequestId(0), who, Pid(1));
                while !is_still.load(SeqCst) {
                    call(&*admission, &cx).await;
                    sleep(pause).await;
                }
            });
        }
        load
    }

    /// MiB that a user does at each server in that time.
    async fn done(&self, rule: &str, time: Duration) -> Vec<f64> {
        let before = self.bytes(rule);
        sleep(time).await;
        let after = self.bytes(rule);
        let done = after.iter().zip(before).map(|(after, before)| after - before);
        done.map(|bytes| bytes as f64 / MIB as f64).collect()
    }

    fn bytes(&self, rule: &str) -> Vec<u64> {
        let of = |gate: &QosGate| {
            let classes = gate.report().classes;
            classes.iter().filter(|class| class.rule == rule).map(|class| class.counts.bytes).sum()
        };
        self.gates.iter().map(of).collect()
    }
}

async fn call(admission: &dyn CallAdmission, cx: &Context) {
    let mut call = ObservedCall::new(Op::Write, FileId { ino: 1, generation: 1 });
    call.bytes = CALL_BYTES;
    let grant = match admission.admit(cx, &call) {
        GrantedAdmit::Now(grant) => grant,
        GrantedAdmit::After(wait) => wait.await.unwrap(),
        GrantedAdmit::Refuse(error) => panic!("{error}"),
    };
    sleep(Duration::from_millis(1)).await;
    admission.ended(grant);
}

fn of_user(uid: u32, limit_mib: u64) -> QosRule {
    QosRule {
        name: format!("user-{uid}"),
        matches: BTreeMap::from([(RuleKey::User, vec![Pattern::Ids(uid, uid)])]),
        limit: (limit_mib > 0).then_some(Amount::Units(limit_mib * MIB)),
        ..QosRule::default()
    }
}

fn assert_near(is: f64, should: f64) {
    assert!((is - should).abs() <= should * 0.05, "{is} and not {should}");
}

// proves: P211
#[test]
fn servers_keep_one_limit_together_whichever_of_them_is_asked() {
    simulate(1, async {
        let servers = Servers::new(3, &[of_user(7, 60)]);
        let all: Vec<Scope> =
            (0..3).map(|server| servers.load(server, 7, 16, Duration::ZERO)).collect();
        sleep(SECOND / 2).await;
        for _ in 0..3 {
            let done = servers.done("user-7", SECOND).await;
            assert_near(done.iter().sum(), 60.0);
            done.iter().for_each(|one| assert_near(*one, 20.0));
        }
        // One of them alone has all of it, and at once no more when the others come back. Their last calls
        // are served.
        servers.is_still.store(true, SeqCst);
        sleep(SECOND / 2).await;
        all.iter().for_each(Scope::kill);
        servers.is_still.store(false, SeqCst);
        let _one = servers.load(0, 7, 16, Duration::ZERO);
        sleep(SECOND / 2).await;
        let done = servers.done("user-7", SECOND).await;
        assert_near(done[0], 60.0);
        let _back = servers.load(1, 7, 16, Duration::ZERO);
        sleep(SECOND / 5).await;
        let done = servers.done("user-7", SECOND).await;
        assert_near(done.iter().sum(), 60.0);
        assert_near(done[1], 30.0);
        servers.exchange.kill();
    });
}

/// A server that is asked for little leaves the rest to the other one.
#[test]
fn what_one_server_is_not_asked_for_the_others_have() {
    simulate(2, async {
        let servers = Servers::new(2, &[of_user(7, 60)]);
        let _much = servers.load(0, 7, 16, Duration::ZERO);
        // Some 8 MiB a second, in calls that come irregularly.
        let _little = servers.load(1, 7, 1, Duration::from_millis(30));
        sleep(SECOND).await;
        for _ in 0..3 {
            let done = servers.done("user-7", SECOND).await;
            assert_near(done.iter().sum(), 60.0);
            assert!((7.0..9.0).contains(&done[1]), "{done:?}");
        }
        servers.exchange.kill();
    });
}

/// The limit of the export as a whole goes where its users are.
#[test]
fn a_server_has_as_much_of_the_whole_as_its_users_weigh() {
    simulate(3, async {
        let whole = QosRule {
            name: "whole".to_owned(),
            limit: Some(Amount::Units(80 * MIB)),
            ..QosRule::default()
        };
        let servers = Servers::new(2, &[whole, of_user(1, 0), of_user(2, 0), of_user(3, 0)]);
        let _users: Vec<Scope> = [(0, 1), (0, 2), (0, 3), (1, 1)]
            .map(|(server, uid)| servers.load(server, uid, 16, Duration::ZERO))
            .into();
        sleep(SECOND).await;
        let mut at = [0.0; 2];
        for uid in 1..=3 {
            let before = servers.bytes(&format!("user-{uid}"));
            at.iter_mut().zip(before).for_each(|(at, bytes)| *at -= bytes as f64);
        }
        sleep(SECOND).await;
        for uid in 1..=3 {
            let after = servers.bytes(&format!("user-{uid}"));
            at.iter_mut().zip(after).for_each(|(at, bytes)| *at += bytes as f64);
        }
        assert_near(at.iter().sum::<f64>() / MIB as f64, 80.0);
        assert_near(at[0] / (at[0] + at[1]), 0.75);
        servers.exchange.kill();
    });
}

// proves: P212
#[test]
fn a_server_that_is_cut_off_has_no_more_than_its_part() {
    simulate(4, async {
        let servers = Servers::new(2, &[of_user(7, 60)]);
        let one = servers.load(0, 7, 16, Duration::ZERO);
        let other = servers.load(1, 7, 4, Duration::from_millis(30));
        sleep(SECOND).await;
        servers.exchange.kill();
        // Each goes on deciding, and hears nothing.
        for gate in servers.gates.clone() {
            spawn(async move {
                while gate.exchange().is_some() {
                    sleep(PERIOD).await;
                }
            });
        }
        let before: f64 = servers.done("user-7", SECOND).await.iter().sum();
        assert_near(before, 60.0);
        // After a while the part of each is even, since nobody knows what the other one does.
        other.kill();
        let _other = servers.load(1, 7, 16, Duration::ZERO);
        sleep(10 * SECOND).await;
        let done = servers.done("user-7", SECOND).await;
        done.iter().for_each(|one| assert_near(*one, 30.0));
        one.kill();
        servers.gates.iter().for_each(|gate| gate.set_rules(RuleSet::default()));
    });
}
