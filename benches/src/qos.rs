//! What a decision about shares of bandwidth costs: a call is admitted at once, and ends.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use dray_core::{
    CallAdmission, Context, FileId, Identity, NodeId, ObservedCall, Op, Pid, RequestId, Uid,
};
use dray_layers::qos::rules::Amount;
use dray_layers::qos::{Pattern, QosGate, QosRule, RuleKey, RuleSet};

use crate::CommandResult;
use crate::args::BenchArgs;
use crate::measure::Printer;

const DECISIONS: u32 = 1_000_000;

/// `qos-decisions`: nanoseconds of a decision, by the number of threads that make them.
pub fn run(args: &BenchArgs) -> CommandResult {
    let printer = Printer::new(args)?;
    let free = QosRule { name: "users".into(), each: Some(RuleKey::User), ..QosRule::default() };
    let limited = QosRule {
        name: "limited".into(),
        matches: BTreeMap::from([(RuleKey::User, vec![Pattern::Ids(0, u32::MAX)])]),
        limit: Some(Amount::Units(1 << 50)),
        ..QosRule::default()
    };
    for (name, rules) in [("off", vec![]), ("free", vec![free]), ("limited", vec![limited])] {
        let gate = QosGate::new();
        gate.set_rules(RuleSet::new(&rules).map_err(|error| error.to_string())?);
        let admission = gate.admission(None);
        for threads in [1, 2, 4] {
            let nanos = decisions(&admission, threads);
            printer.put(&format!("qos_decision_{name}.threads_{threads}"), nanos, "ns");
        }
    }
    Ok(())
}

fn decisions(admission: &Arc<dyn CallAdmission>, threads: u32) -> f64 {
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for uid in 0..threads {
            scope.spawn(move || {
                let who = Arc::new(Identity { uid: Uid(1000 + uid), ..Identity::default() });
                let cx = Context::new(NodeId(1), RequestId(0), who, Pid(1));
                let mut call = ObservedCall::new(Op::Read, FileId { ino: 1, generation: 1 });
                call.bytes = 4096;
                for _ in 0..DECISIONS {
                    if let Some(grant) = admission.admit_at_once(&cx, &call) {
                        admission.ended(grant);
                    }
                }
            });
        }
    });
    begun.elapsed().as_nanos() as f64 / f64::from(DECISIONS)
}
