//! What an audit costs by itself: records into a log, and a log verified. No mount is made.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dray_core::{
    CallDetail, Context, FileId, Identity, Name, NodeId, ObservedCall, Op, OpenHow, OpenTotals,
    Peer, Pid, RequestId, SessionId, Uid, Via,
};
use dray_layers::audit::{Audit, AuditOptions, FullPolicy, KindSet, verify};
use dray_layers::{Observer, Outcome};

use crate::args::BenchArgs;
use crate::measure::Measure;
use crate::{CommandResult, context, cpu};

/// How long the log may take to write all.
const WRITE_MAX: Duration = Duration::from_secs(60);

/// `audit --dir DIRECTORY [--records N] [--rounds N]`
///
/// Prints bytes of a record on disk, the time that a record takes in its call, and the rate of
/// verification. Records by second are of CPU time: of the calls and of the thread that writes.
pub fn run(args: &BenchArgs) -> CommandResult {
    let dir = PathBuf::from(args.need("dir")?).join("audit");
    let records = args.number::<u64>("records", 2_000_000)?.clamp(1000, 1 << 32);
    for round in 0..args.number::<u32>("rounds", 3)?.clamp(1, 100) {
        one_round(&dir, records, round)?;
        std::fs::remove_dir_all(&dir).map_err(context("remove the log"))?;
    }
    Ok(())
}

fn one_round(dir: &std::path::Path, records: u64, round: u32) -> CommandResult {
    let options = AuditOptions {
        export: "bench".to_owned(),
        dir: dir.to_owned(),
        kinds: KindSet::all(),
        full: FullPolicy::Block,
        spill: None,
        max_bytes: 64 << 30,
        segment_bytes: 64 << 20,
    };
    let find = |id: FileId| Some(format!("/projects/p{}/run", id.ino).into_bytes());
    let audit = Audit::open(options, Box::new(find)).map_err(context("open a log"))?;
    let (begun, cpu_before) = (Instant::now(), cpu::of_this_process());
    let mut in_calls = Duration::ZERO;
    for pair in 0..records / 2 {
        if pair % 1000 == 0 {
            // Where calls would be held: the rate is that of the whole.
            while audit.is_pressed() {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        let call = Instant::now();
        file(&audit, pair);
        in_calls += call.elapsed();
    }
    if !audit.finish(WRITE_MAX) {
        return Err("the log was not written in time".to_owned());
    }
    let cpu = (cpu::of_this_process() - cpu_before).as_secs_f64().max(1e-9);
    let status = audit.status();
    put("audit_records_per_s", status.records as f64 / cpu, "1/s of CPU", round);
    put(
        "audit_records_per_s.wall",
        status.records as f64 / begun.elapsed().as_secs_f64(),
        "1/s",
        round,
    );
    put("audit_call_us", in_calls.as_secs_f64() * 1e6 / records as f64, "us", round);
    put("audit_bytes_per_record", status.bytes as f64 / status.records as f64, "bytes", round);
    let begun = Instant::now();
    let found = verify(&[dir.to_owned()], None, |_| {}).map_err(context("verify"))?;
    if !found.problems.is_empty() || found.records != status.records {
        return Err(format!("the log is wrong: {:?}", found.problems));
    }
    let rate = found.bytes as f64 / 1e9 / begun.elapsed().as_secs_f64().max(1e-9);
    put("audit_verify_gb_per_s", rate, "GB/s", round);
    Ok(())
}

/// A file that is made in one of some directories, and closed.
fn file(audit: &Audit, number: u64) {
    let peer = Peer::Ip(([10, 0, 0, (number % 16) as u8], 1000).into());
    let who = Identity { uid: Uid(1000), job: "4711".into(), ..Identity::default() };
    thread_local! {
        static WHO: std::cell::RefCell<Option<Arc<Identity>>> = const { std::cell::RefCell::new(None) };
    }
    let who = WHO.with_borrow_mut(|known| known.get_or_insert_with(|| Arc::new(who)).clone());
    let node = NodeId(0x1234_5678_9abc_def0 + number % 16);
    let cx = Context::new(node, RequestId(number), who, Pid(1));
    let cx = Context { via: Some(Via { session: SessionId(number % 16), peer }), ..cx };
    let (name, id) =
        (format!("file-{number:08}.dat"), FileId { ino: 1 << 20 | number, generation: 77 });
    let Ok(name) = Name::new(name.as_bytes()) else { return };
    let dir = FileId { ino: number / 100 % 50, generation: 1 };
    let open = Some(OpenHow::READ_WRITE);
    let create = ObservedCall { name: Some(name), open, ..ObservedCall::new(Op::Create, dir) };
    audit.done(&cx, &create, Outcome::about(id), Duration::ZERO);
    let totals = OpenTotals::default();
    totals.count(Op::Write, 3901, true);
    let close = ObservedCall::new(Op::Close, id).with(CallDetail::Closed(&totals));
    audit.done(&cx, &close, Outcome::default(), Duration::ZERO);
}

fn put(metric: &str, value: f64, unit: &str, round: u32) {
    let (arm, metric, unit) = ("log".to_owned(), metric.to_owned(), unit.to_owned());
    let measure = Measure { bench: "audit".to_owned(), arm, metric, value, unit, round };
    println!("{}", measure.line());
}
