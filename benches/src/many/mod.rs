//! Many clients of one server: what each costs at rest, what happens when they come, contend,
//! lose their server and leave, all at once.
//!
//! All of them are sessions of one process, each from an address of loopback that few share. The
//! server is a process that is watched, killed and started again. Latencies are those of a machine
//! on which everybody shares the same CPUs. So the figures to compare are the server's CPU time for
//! each operation, memory, descriptors, context switches and failures.

mod contention;
mod crowd;
mod leased;
mod link;
mod others;
mod restarts;
mod server;
mod spread;
mod together;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use dray_rpc::auth::Key;

use crate::args::BenchArgs;
use crate::measure::Printer;
use crate::{CommandResult, context};
use crowd::{ClientGroup, GroupReport};
use server::{ResourceUsage, ServerProcess};
use spread::Spread;

/// Threads that the clients share.
const THREADS: usize = 2;

/// What is to be run.
#[derive(Clone, Debug)]
pub struct ManyClientsPlan {
    /// The binary.
    pub dray: String,
    /// Directory that is exported.
    pub store: PathBuf,
    /// Directory for everything else.
    pub work: PathBuf,
    /// Where the server listens.
    pub address: SocketAddr,
    /// How long clients may be away.
    pub lease: Duration,
    /// Rest before idle clients are looked at, and how long.
    pub idle: Duration,
    /// The file of the key; none: no key is asked for.
    pub key: Option<String>,
    /// The export has leases, and its clients take them.
    pub leases: bool,
}

impl ManyClientsPlan {
    /// `dray`, out of sight of other servers of this machine.
    fn command(&self) -> Command {
        let mut command = Command::new(&self.dray);
        command.env("DRAY_RUN_DIR", self.work.join("run"));
        command
    }

    fn key(&self) -> Option<Key> {
        Key::from_file(Path::new(self.key.as_ref()?)).ok()
    }
}

/// `many --dray FILE --store DIR --work DIR [--port P] [--count N] [--lease S] [--idle S]
/// [--key FILE] [PHASE]...`: the phases with N clients. Where `leases` is one of them, the others are with leases, too.
/// By default all but `leases`.
pub fn run(args: &BenchArgs) -> CommandResult {
    let plan = ManyClientsPlan {
        dray: args.need("dray")?.to_owned(),
        store: args.need("store")?.into(),
        work: args.need("work")?.into(),
        address: ([127, 0, 0, 1], args.number("port", 17_470)?).into(),
        lease: Duration::from_secs(args.number("lease", 15)?),
        idle: Duration::from_secs(args.number("idle", 10)?),
        key: args.get("key").map(str::to_owned),
        leases: args.plain().iter().any(|one| one == LEASES),
    };
    let count: usize = args.number("count", 500)?;
    let server = ServerProcess::start(&plan)?;
    let mut bench = Many {
        says: Printer {
            bench: "many".into(),
            arm: format!("n{count}"),
            round: args.number("round", 0)?,
        },
        fresh: server.look(),
        server,
        crowd: ClientGroup::new(&plan, THREADS, 0)?,
        plan,
    };
    let by_default = |phase: &str| args.plain().is_empty() && phase != LEASES;
    let wanted = |phase: &str| by_default(phase) || args.plain().iter().any(|one| one == phase);
    bench.connect(count)?;
    for (name, phase) in PHASES {
        if wanted(name) {
            eprintln!("== {name}, {count} clients");
            phase(&mut bench)?;
        }
    }
    Ok(())
}

type Phase = fn(&mut Many) -> CommandResult;

/// The phase that needs leases.
const LEASES: &str = "leases";

const PHASES: [(&str, Phase); 12] = [
    ("idle", Many::idle),
    ("contention", Many::contention),
    ("together", Many::together),
    (LEASES, Many::leases),
    ("hold", Many::hold),
    ("status", Many::status),
    ("rogues", Many::rogues),
    ("restart", Many::restart),
    ("half", Many::restart_without_half),
    ("leave", Many::leave),
    ("power", Many::power),
    ("vanish", Many::vanish),
];

impl Printer {
    fn spread_ms(&self, metric: &str, spread: &Spread) {
        for (name, part) in [("p50", 0.5), ("p99", 0.99), ("max", 1.0)] {
            self.put(&format!("{metric}_{name}_ms"), spread.part(part) * 1e3, "ms");
        }
    }

    /// What went wrong, which is a figure, too.
    fn failures(&self, metric: &str, reports: &GroupReport) {
        self.put(&format!("{metric}_failures"), reports.failed() as f64, "1");
        for (what, count) in reports.failures().into_iter().take(5) {
            eprintln!("   {metric}: {count} times: {what}");
        }
    }

    /// What the server took for it.
    fn server(&self, metric: &str, (before, after): (ResourceUsage, ResourceUsage), ops: usize) {
        let each = |value: f64| value / ops.max(1) as f64;
        let cpu = after.cpu.saturating_sub(before.cpu).as_secs_f64();
        let switches = after.switches.saturating_sub(before.switches) as f64;
        self.put(&format!("{metric}_server_cpu_us"), each(cpu * 1e6), "us/op");
        self.put(&format!("{metric}_server_switches"), each(switches), "1/op");
    }
}

/// A server and its many clients.
struct Many {
    plan: ManyClientsPlan,
    says: Printer,
    server: ServerProcess,
    /// Of the server before there was anybody.
    fresh: ResourceUsage,
    crowd: ClientGroup,
}

impl Many {
    /// The clients come, all at once.
    fn connect(&mut self, count: usize) -> CommandResult {
        let before = self.server.look();
        let connected = self.crowd.connect(count);
        let after = self.server.look();
        let let_in = self.clients()?;
        self.says.put("connected", let_in as f64, "1");
        self.says.spread_ms("connect", &connected.whole());
        self.says.failures("connect", &connected);
        self.says.server("connect", (before, after), count);
        if let_in < count {
            return Err(format!("{let_in} of {count} clients were let in"));
        }
        Ok(())
    }

    /// Sessions at the server, by its status.
    fn clients(&self) -> CommandResult<usize> {
        let (text, _) = self.ask_status(&["--json", "--interval", "0"])?;
        Ok(text.matches("\"open_files\":").count())
    }

    /// What the server says of itself, and how long that took, seconds.
    fn ask_status(&self, options: &[&str]) -> CommandResult<(String, f64)> {
        let begin = std::time::Instant::now();
        let target = format!("tcp://{}", self.plan.address);
        let mut ask = self.plan.command();
        ask.args(["status", &target]).args(options);
        let output = ask.output().map_err(context("dray status"))?;
        if !output.status.success() {
            return Err(format!("dray status: {}", String::from_utf8_lossy(&output.stderr)));
        }
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        Ok((text, begin.elapsed().as_secs_f64()))
    }
}
