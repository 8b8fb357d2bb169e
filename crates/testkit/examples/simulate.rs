//! Long runs of the simulator, for `script/simulate`.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use dray_core::Op;
use dray_rpc::server::Sabotage;
use dray_testkit::simulator::{self, FaultCounts, PairKind, PowerKind, RunFailure, WorkloadKind};

/// Lists are of what there is: one that was kept by hand had left a kind out.
fn usage() -> String {
    let list = |names: Vec<String>| wrapped(&names.join(", "));
    let names = |kinds: &[WorkloadKind]| kinds.iter().map(name).collect::<Vec<_>>();
    let kinds = [names(&WorkloadKind::ALL), names(&BESIDE), vec![LEAVING.into()]];
    let with_power = PowerKind::ALL.iter().map(name).collect();
    let of_operations = ["reply-cache[/OP]", "intents[/OP]", "forgotten/OP"];
    let sabotages = of_operations.into_iter().chain(SABOTAGES.iter().map(|(name, _)| *name));
    format!(
        "simulate [--seeds A..B] [--minutes N] [--work KIND] [--power] [--cut] [--pair WHERE [--servers N]]
         [--failover] [--break WHAT] [--log]

--seeds A..B   runs these seeds; default 0..2000
--minutes N    runs seeds from A on until so many minutes are over
--work KIND    all seeds with this kind of work; default all in turn:
               {}
               with --power:
               {}
--power        the server's machine loses power
--cut          the server dies all the time; with --work, leaving excepted
--pair WHERE   two servers take over from each other, and die all the time; with --work; they are
               on one machine (onemachine), on one each (twomachines), or machines are lost with their
               servers (twomachineslost)
--servers N    with --pair: 2 servers of one slice, or 3 of three slices; default 2
--failover     seeds go round all of these, with each kind of work that they leave as it was
--break WHAT   breaks a promise of the server: some seed must fail, of the work or the losses
               of power that need it:
               {}
               OP is make, create, rename, write, ...
--log          prints what clients and servers log",
        list(kinds.concat()),
        list(with_power),
        list(sabotages.map(String::from).collect()),
    )
}

/// In lines that fit behind the options.
fn wrapped(text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("one at least");
        match line.len() + 1 + word.len() {
            0..75 if !line.is_empty() => *line += &format!(" {word}"),
            _ if line.is_empty() => line.push_str(word),
            _ => lines.push(word.into()),
        }
    }
    lines.join("\n               ")
}

/// Kinds that seeds do not choose from.
const BESIDE: [WorkloadKind; 5] = [
    WorkloadKind::Interleaved,
    WorkloadKind::Leased,
    WorkloadKind::Locked,
    WorkloadKind::Kept,
    WorkloadKind::WrittenBack,
];

/// A client leaves, and the power is lost: a kind of run of its own.
const LEAVING: &str = "leaving";

#[derive(Clone)]
struct Wanted {
    seeds: std::ops::Range<u64>,
    time: Option<Duration>,
    sabotage: Option<Sabotage>,
    work: Option<String>,
    power: bool,
    cut: bool,
    pair: Option<PairKind>,
    servers: usize,
    failover: bool,
    log: bool,
}

const SABOTAGES: [(&str, Sabotage); 43] = [
    ("fence", Sabotage::ConnectionFence),
    ("locks", Sabotage::Locks),
    ("closes", Sabotage::Closes),
    ("buffers", Sabotage::ReadBuffers),
    ("goodbyes", Sabotage::Goodbyes),
    ("boot", Sabotage::PowerLossNotice),
    ("reclaim", Sabotage::Reclaim),
    ("cut-short-grants", Sabotage::CutShortGrants),
    ("open-ahead", Sabotage::OpenAhead),
    ("split-reads", Sabotage::SplitReads),
    ("reads", Sabotage::RangeLocks),
    ("held-files", Sabotage::HeldFiles),
    ("replay", Sabotage::Replay),
    ("replay-order", Sabotage::ReplayOrder),
    ("replay-gate", Sabotage::ReplayGate),
    ("replay-durable-stamps", Sabotage::ReplayDurableStamps),
    ("last-sync", Sabotage::LastSync),
    ("notifications", Sabotage::Notifications),
    ("evictions", Sabotage::Evictions),
    ("named", Sabotage::OpenByName),
    ("shipping", Sabotage::Shipping),
    ("serving-lease", Sabotage::ServingLease),
    ("epochs", Sabotage::Epochs),
    ("in-step", Sabotage::InStep),
    ("copy", Sabotage::Copy),
    ("answered-data", Sabotage::AnsweredData),
    ("awaited-stamps", Sabotage::AwaitedStamps),
    ("repeated-recovery", Sabotage::RepeatedRecovery),
    ("lease-recalls", Sabotage::LeaseRecalls),
    ("lease-listings", Sabotage::LeaseListings),
    ("lease-changed-files", Sabotage::LeaseChangedFiles),
    ("lease-marks", Sabotage::LeaseMarks),
    ("lease-fences", Sabotage::LeaseFences),
    ("lease-restart", Sabotage::LeaseRestart),
    ("lease-notes", Sabotage::LeaseNotes),
    ("lease-room", Sabotage::LeaseRoom),
    ("lock-lease-recalls", Sabotage::LockLeaseRecalls),
    ("recall-ends", Sabotage::RecallEnds),
    ("second-writer", Sabotage::SecondWriter),
    ("write-lease-recalls", Sabotage::WriteLeaseRecalls),
    ("write-lease-restart", Sabotage::WriteLeaseRestart),
    ("dirty-over-newer", Sabotage::DirtyOverNewer),
    ("local-syncs", Sabotage::LocalSyncs),
];

/// What is called so, of an operation or as a whole.
fn sabotage(text: &str) -> Option<Sabotage> {
    let (name, op) = match text.split_once('/') {
        Some((name, op)) => (name, Some(*Op::ALL.iter().find(|known| known.name() == op)?)),
        None => (text, None),
    };
    match (name, op) {
        ("reply-cache", op) => Some(Sabotage::ReplyCache(op)),
        ("intents", op) => Some(Sabotage::Intents(op)),
        ("forgotten", Some(op)) => Some(Sabotage::DroppedChanges(op)),
        (name, None) => SABOTAGES.iter().find(|(known, _)| *known == name).map(|(_, what)| *what),
        _ => None,
    }
}

/// What a kind is called: its name in lower case.
fn name(kind: &impl std::fmt::Debug) -> String {
    format!("{kind:?}").to_lowercase()
}

/// The kind that is called so.
fn kind<K: std::fmt::Debug + Copy>(kinds: &[K], name: &str) -> Option<K> {
    kinds.iter().copied().find(|kind| self::name(kind) == name)
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Option<Wanted> {
    let mut wanted = Wanted {
        seeds: 0..2000,
        time: None,
        sabotage: None,
        work: None,
        power: false,
        cut: false,
        pair: None,
        servers: 2,
        failover: false,
        log: false,
    };
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--power" => wanted.power = true,
            "--cut" => wanted.cut = true,
            "--pair" => wanted.pair = Some(kind(&PairKind::ALL, &arguments.next()?)?),
            "--servers" => wanted.servers = arguments.next()?.parse().ok()?,
            "--failover" => wanted.failover = true,
            "--log" => wanted.log = true,
            "--work" => wanted.work = Some(arguments.next()?),
            "--seeds" => {
                let value = arguments.next()?;
                let (from, to) = value.split_once("..")?;
                wanted.seeds = from.parse().ok()?..to.parse().ok()?;
            }
            "--minutes" => {
                let minutes: u64 = arguments.next()?.parse().ok()?;
                wanted.time = Some(Duration::from_secs(60 * minutes));
                wanted.seeds.end = u64::MAX;
            }
            "--break" => {
                wanted.sabotage = Some(sabotage(&arguments.next()?)?);
            }
            _ => return None,
        }
    }
    let known = wanted.work.as_deref().is_none_or(|work| match wanted.power {
        true => kind(&PowerKind::ALL, work).is_some(),
        false => work_kind(work).is_some() || work == LEAVING && !wanted.cut,
    });
    let special = wanted.cut || wanted.pair.is_some();
    if wanted.failover && (special || wanted.power || wanted.work.is_some()) {
        return None;
    }
    let servers = wanted.servers == 2 || wanted.servers == 3 && wanted.pair.is_some();
    (known && servers && (!special || !wanted.power && wanted.work.is_some())).then_some(wanted)
}

fn work_kind(name: &str) -> Option<WorkloadKind> {
    kind(&WorkloadKind::ALL, name).or_else(|| kind(&BESIDE, name))
}

/// The run that a seed stands for, and the seed that it has among its like.
fn of_seed(wanted: &Wanted, seed: u64) -> (Wanted, u64) {
    if !wanted.failover {
        return (wanted.clone(), seed);
    }
    let pairs =
        PairKind::ALL.into_iter().flat_map(|pair| pair.kinds().map(move |work| (pair, work)));
    let all: Vec<_> =
        pairs.flat_map(|(pair, work)| [2, 3].map(|servers| (pair, servers, name(&work)))).collect();
    let count = all.len() as u64;
    let (pair, servers, work) = all[(seed % count) as usize].clone();
    let (pair, work) = (Some(pair), Some(work));
    (Wanted { pair, servers, work, failover: false, ..wanted.clone() }, seed / count)
}

/// What went wrong in the run, if it bore that.
fn run(wanted: &Wanted, seed: u64) -> Result<FaultCounts, RunFailure> {
    let (work, sabotage) = (wanted.work.as_deref(), wanted.sabotage);
    if work == Some(LEAVING) {
        return simulator::run_leaving(seed, sabotage).map(|()| FaultCounts::default());
    }
    let ran = if wanted.power {
        match work.and_then(|work| kind(&PowerKind::ALL, work)) {
            Some(kind) => simulator::run_power_losses_of(kind, seed, sabotage),
            None => simulator::run_power_losses(seed, sabotage),
        }
    } else {
        match work.and_then(work_kind) {
            Some(kind) if let Some(pair) = wanted.pair => {
                simulator::run_failover(wanted.servers, (pair, kind), seed, sabotage)
            }
            Some(kind) if wanted.cut => simulator::run_cut_short(kind, seed, sabotage),
            Some(kind) => simulator::run_of(kind, seed, sabotage),
            None => simulator::run(seed, sabotage),
        }
    };
    ran.map(|report| report.faults)
}

/// So many runs of all kinds must have seen every fault that there is for them.
const ENOUGH_RUNS: u64 = 500;

/// Faults that never were, and should have been: what they would have shown has not been tried.
fn never(wanted: &Wanted, runs: u64, faults: &FaultCounts) -> Vec<&'static str> {
    if runs < ENOUGH_RUNS || wanted.failover || wanted.work.is_some() || wanted.sabotage.is_some() {
        return Vec::new();
    }
    let elsewhere: &[&str] = match wanted.power {
        true => POWER_WITHOUT,
        false => &["losses of power"],
    };
    let missing = |(what, count): &(&'static str, u64)| *count == 0 && !elsewhere.contains(what);
    faults.each().into_iter().filter(missing).map(|(what, _)| what).collect()
}

/// What runs with losses of power leave to the others.
const POWER_WITHOUT: &[&str] = &[
    "partitions",
    "evictions of clients",
    "messages delayed over the end of their connection",
    "messages reordered",
];

/// The options that repeat a run.
fn again(wanted: &Wanted) -> String {
    let mut text = String::new();
    for (given, option) in [(wanted.power, "--power "), (wanted.cut, "--cut ")] {
        text += if given { option } else { "" };
    }
    if let Some(pair) = &wanted.pair {
        text += &format!("--pair {} --servers {} ", name(pair), wanted.servers);
    }
    if let Some(work) = &wanted.work {
        text += &format!("--work {work} ");
    }
    text
}

/// Prints what is logged, with the simulated time.
struct Log;

impl log::Log for Log {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }
    fn log(&self, record: &log::Record<'_>) {
        let at_us = dray_rt::now().as_nanos() / 1000;
        eprintln!("{at_us} us {}: {}", record.target(), record.args());
    }
    fn flush(&self) {}
}

fn main() -> ExitCode {
    let Some(wanted) = parse(std::env::args().skip(1)) else {
        eprintln!("{}", usage());
        return ExitCode::from(2);
    };
    if wanted.log {
        log::set_logger(&Log).expect("nobody else logs here");
        log::set_max_level(log::LevelFilter::Info);
    }
    let begin = Instant::now();
    let (mut runs, mut faults, mut failures) = (0u64, FaultCounts::default(), 0u64);
    let mut undecided = 0u64;
    for seed in wanted.seeds.clone() {
        if wanted.time.is_some_and(|time| begin.elapsed() >= time) {
            break;
        }
        let (one, seed) = of_seed(&wanted, seed);
        let report = std::panic::catch_unwind(|| run(&one, seed));
        runs += 1;
        match report {
            Ok(Ok(more)) => faults += more,
            Ok(Err(failure)) if failure.is_undecided() => {
                undecided += 1;
                eprintln!("seed {seed}: undecided");
            }
            failed => {
                failures += 1;
                let why = match failed {
                    Ok(Err(failure)) => failure.to_string(),
                    _ => format!("seed {seed}: it panicked"),
                };
                let again = again(&one);
                println!("{why}\n  again: script/simulate {again}--seeds {seed}..{}", seed + 1);
            }
        }
        if runs.is_multiple_of(500) {
            eprintln!("{runs} runs, {failures} failed, {} s", begin.elapsed().as_secs());
        }
    }
    for (what, count) in faults.each() {
        println!("{count:>12} {what}");
    }
    println!("{undecided:>12} left undecided: too many orders to look through");
    println!("{runs} runs in {} s, {failures} failed", begin.elapsed().as_secs());
    let never = never(&wanted, runs, &faults);
    if !never.is_empty() {
        println!("never in all of them: {}", never.join(", "));
    }
    if failures == 0 && never.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
