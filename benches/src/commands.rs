//! The commands: arguments in, lines of measures out.

use std::path::{Path, PathBuf};
use std::time::Duration;

use dray_bench::args::BenchArgs;
use dray_bench::at_home::AtHome;
use dray_bench::field::StatusFields;
use dray_bench::load::{Daemons, RunLength, RunSample};
use dray_bench::measure::Printer;
use dray_bench::syscalls::SyscallCounter;
use dray_bench::target::FileLocation;
use dray_bench::tcp::Mode;
use dray_bench::workload::{self, Run};
use dray_bench::{
    CommandResult, aggregate, audit, batch, context, counters, hoard, idle, inetd, layers,
    lock_waiters, many, null_mount, plot, qos, relay, report, sessions, tcp,
};
use dray_layers::placement::ServerIndex;

/// Runs one command. An empty error asks for the usage.
pub fn run(command: &str, args: &BenchArgs) -> CommandResult {
    match command {
        "load" => load(args),
        "fill" => fill(args),
        "at-home" => at_home(args),
        "tcp" => raw_tcp(args),
        "tcp-serve" => tcp::serve(tcp::Setup {
            pin_cpu: args.get("pin").and_then(|cpu| cpu.parse().ok()),
            congestion: args.get("congestion"),
        }),
        "relay-serve" => relay::serve(args.need("file")?, args.number("pin", 0)?),
        "null-mount" => null_mount::serve(
            Path::new(args.need("at")?),
            args.need("transport")?,
            args.get("relay"),
        ),
        "idle" => idle_cost(args),
        "sessions" => idle_sessions(args),
        "many" => many::run(args),
        "hoard" => hoard(args),
        "lock-waiters" => lock_waiters(args),
        "counters" => count(args),
        "inetd" => inetd::run(args.number("port", 0)?, args.plain()),
        "aggregate" => aggregate::run(args),
        "audit" => audit::run(args),
        "batch" => batch::run(args),
        "qos-decisions" => qos::run(args),
        "report" => report::run(args),
        "plot" => plot::run(args),
        _ => Err(String::new()),
    }
}

/// Rates and CPU time of a run. GB are 10^9 bytes, MiB 2^20.
fn put_sample(printer: &Printer, name: &str, sample: &RunSample) {
    let (wall, ops) = (sample.wall.as_secs_f64().max(1e-9), sample.ops.max(1) as f64);
    let us = |time: Duration| time.as_secs_f64() * 1e6 / ops;
    printer.put(&format!("{name}.per_s"), sample.ops as f64 / wall, "1/s");
    printer.put(&format!("{name}.cpu_us"), us(sample.cpu()), "us");
    printer.put(&format!("{name}.cpu_app_us"), us(sample.app_cpu), "us");
    printer.put(&format!("{name}.cpu_client_us"), us(sample.client_cpu), "us");
    printer.put(&format!("{name}.cpu_server_us"), us(sample.server_cpu), "us");
    printer.put(&format!("{name}.cpu_kernel_threads_us"), us(sample.kernel_cpu), "us");
    printer.put(&format!("{name}.cpu_machine_us"), us(sample.machine_cpu), "us");
    if sample.bytes > 0 {
        let bytes = sample.bytes as f64;
        let ms_per_gb = sample.cpu().as_secs_f64() * 1e3 / (bytes / 1e9);
        printer.put(&format!("{name}.mib_per_s"), bytes / wall / f64::from(1 << 20), "MiB/s");
        printer.put(&format!("{name}.cpu_ms_per_gb"), ms_per_gb, "ms/GB");
    }
}

fn place(args: &BenchArgs) -> CommandResult<FileLocation> {
    match (args.get("dir"), args.get("nfs")) {
        (Some(dir), None) => Ok(FileLocation::Directory(PathBuf::from(dir))),
        (None, Some(url)) => Ok(FileLocation::Nfs(url.to_owned())),
        _ => Err("one of --dir and --nfs is needed".to_owned()),
    }
}

fn file_bytes(args: &BenchArgs) -> CommandResult<u64> {
    Ok(args.number::<u64>("file-mib", 256)?.saturating_mul(1 << 20))
}

/// `load --dir DIR|--nfs URL [--secs S | --count N] [--names N] [--file-mib M]
/// [--client PIDS] [--server PIDS] [--status COMMAND --fields NAME=PATH,...]
/// [--projections FILE --store DIR] WORKLOAD[:JOBS]...`
///
/// With `--projections` the files stay on one server of the projection: `--store` is DIR as the servers have it.
///
/// With `--count` the counters are read and not the clocks: round trips and whatever else
/// `--status` tells, and system calls of the daemons.
fn load(args: &BenchArgs) -> CommandResult {
    let (printer, place, file_bytes) = (Printer::new(args)?, place(args)?, file_bytes(args)?);
    let daemons = Daemons { client: args.pids("client")?, server: args.pids("server")? };
    let until = RunLength::Time(Duration::from_secs_f64(args.number("secs", 2.0)?));
    let names = args.number("names", 4000)?;
    let at_home = files_at_home(args)?;
    for spec in args.plain() {
        let (name, jobs) = spec.split_once(':').unwrap_or((spec, "1"));
        let jobs = jobs.parse().map_err(|_| format!("{spec}: no number of jobs"))?;
        let (daemons, at_home) = (&daemons, at_home.as_ref());
        let run = Run { place: &place, jobs, until, file_bytes, names, daemons, at_home };
        let label = if jobs == 1 { name.to_owned() } else { format!("{name}_j{jobs}") };
        match args.get("count") {
            Some(_) => count_load(args, &printer, run, name).map_err(context(&label))?,
            None => put_sample(&printer, &label, &run.workload(name).map_err(context(&label))?),
        }
    }
    Ok(())
}

/// What is counted around a run, in this order.
struct Counts {
    fields: Vec<Option<f64>>,
    client_calls: Option<u64>,
    server_calls: Option<u64>,
}

/// Runs the workload with n and with 2n operations. What the second cost more is the cost of n
/// operations, without preparation or idle noise that both have.
fn count_load(args: &BenchArgs, printer: &Printer, run: Run, name: &str) -> CommandResult {
    let count: u64 = args.number("count", 200)?;
    let fields =
        StatusFields::new(args.get("status").unwrap_or(""), args.get("fields").unwrap_or(""));
    let listing = name.starts_with("readdir");
    let once = |count: u64| -> CommandResult<Counts> {
        workload::prepare_names(run.place, name, count, run.at_home)?;
        count_once(&Run { until: RunLength::Count(count), names: count, ..run }, name, &fields)
    };
    // A listing is one operation; the empty run before it takes off what status costs.
    let (less, more) = (once(if listing { 0 } else { count })?, once(count * 2)?);
    let ops = if listing { 1.0 } else { count as f64 };
    // A call that only the first run happened to make is no cost below nothing.
    let each = |less: Option<f64>, more: Option<f64>| Some(((more? - less?) / ops).max(0.0));
    for ((field, _), (less, more)) in fields.paths.iter().zip(less.fields.iter().zip(&more.fields))
    {
        if let Some(value) = each(*less, *more) {
            printer.put(&format!("{name}.{field}"), value, "1/op");
        }
    }
    let calls = [
        ("client_system_calls", less.client_calls, more.client_calls),
        ("server_system_calls", less.server_calls, more.server_calls),
    ];
    for (label, less, more) in calls {
        if let Some(value) = each(less.map(|n| n as f64), more.map(|n| n as f64)) {
            printer.put(&format!("{name}.{label}"), value, "1/op");
        }
    }
    Ok(())
}

/// Time for releases and other late calls to arrive.
const SETTLE_TIME: Duration = Duration::from_millis(200);

fn count_once(run: &Run, name: &str, fields: &StatusFields) -> CommandResult<Counts> {
    let read = || {
        // A mount that does not say how it is leaves gaps in the table, and no more.
        fields.read().unwrap_or_else(|error| {
            eprintln!("dray-bench: {error}");
            vec![None; fields.paths.len()]
        })
    };
    std::thread::sleep(SETTLE_TIME);
    let before = read();
    let client = SyscallCounter::start(&run.daemons.client);
    let server = SyscallCounter::start(&run.daemons.server);
    if run.names > 0 {
        run.workload(name)?;
    }
    std::thread::sleep(SETTLE_TIME);
    let (client_calls, server_calls) =
        (client.and_then(SyscallCounter::stop), server.and_then(SyscallCounter::stop));
    let after = read();
    let fields = before.iter().zip(&after).map(|(before, after)| Some((*after)? - (*before)?));
    Ok(Counts { fields: fields.collect(), client_calls, server_calls })
}

/// Where the files of a run stay on one server; none: they may be anywhere.
fn files_at_home(args: &BenchArgs) -> CommandResult<Option<AtHome>> {
    let Some(projections) = args.get("projections") else { return Ok(None) };
    AtHome::new(Path::new(projections), Path::new(args.need("store")?)).map(Some)
}

/// `at-home --projections FILE --store DIR`
///
/// Makes the directory, which has names and attributes at the server of the names beside it. Prints the number of that
/// server, from 0 on.
fn at_home(args: &BenchArgs) -> CommandResult {
    let (projections, dir) = (args.need("projections")?, args.need("store")?);
    let ServerIndex(server) = AtHome::make(Path::new(projections), Path::new(dir))?;
    println!("{server}");
    Ok(())
}

/// `fill --dir DIR|--nfs URL [--jobs N] [--file-mib M] [--with-names yes] [--projections FILE --store DIR]`
fn fill(args: &BenchArgs) -> CommandResult {
    let place = place(args)?;
    let at_home = files_at_home(args)?;
    workload::fill(&place, args.number("jobs", 4)?, file_bytes(args)?, at_home.as_ref())?;
    match (&place, args.get("with-names")) {
        (FileLocation::Directory(dir), Some(_)) => workload::fill_names(dir),
        _ => Ok(()),
    }
}

/// `tcp [--secs S] [--congestion NAME]`: streams both ways, and ping-pong with and without a CPU shared.
fn raw_tcp(args: &BenchArgs) -> CommandResult {
    let printer = Printer::new(args)?;
    let time = Duration::from_secs_f64(args.number("secs", 2.0)?);
    let runs = [
        ("stream_write", Mode::StreamWrite, false),
        ("stream_read", Mode::StreamRead, false),
        ("pingpong", Mode::PingPong, false),
        ("pingpong_same_cpu", Mode::PingPong, true),
    ];
    for (name, mode, share_cpu) in runs {
        let setup =
            tcp::Setup { pin_cpu: share_cpu.then_some(0), congestion: args.get("congestion") };
        put_sample(&printer, name, &tcp::run(mode, time, setup)?);
    }
    Ok(())
}

/// `idle [--secs S] [--client PIDS] [--server PIDS]`; of 0 s, memory alone.
fn idle_cost(args: &BenchArgs) -> CommandResult {
    let printer = Printer::new(args)?;
    let time = Duration::from_secs_f64(args.number("secs", 10.0)?);
    let client = args.pids("client")?;
    if !time.is_zero() {
        let wakeups = idle::wakeups(&client, time);
        printer.put("idle_wakeups_10s", wakeups as f64 * 10.0 / time.as_secs_f64(), "1/10s");
    }
    printer.put("idle_rss_mib", idle::resident_kib(&client) as f64 / 1024.0, "MiB");
    let server = args.pids("server")?;
    if !server.is_empty() {
        printer.put("server_rss_mib", idle::resident_kib(&server) as f64 / 1024.0, "MiB");
    }
    Ok(())
}

/// `sessions --address tcp://HOST:PORT --export NAME --server PIDS [--count N]`
fn idle_sessions(args: &BenchArgs) -> CommandResult {
    let printer = Printer::new(args)?;
    let address = args.need("address")?.parse().map_err(context("--address"))?;
    let (count, server) = (args.number("count", 200)?, args.pids("server")?);
    let kib = sessions::kib_per_session(&address, args.need("export")?, count, &server)?;
    printer.put("server_kib_per_idle_conn", kib, "KiB");
    Ok(())
}

/// `lock-waiters --address tcp://HOST:PORT --export NAME --file NAME [--count N] [--rounds N]`: the
/// time in which the last of N waiting requests learned that it was given up, of the slowest round.
fn lock_waiters(args: &BenchArgs) -> CommandResult {
    let address = args.need("address")?.parse().map_err(context("--address"))?;
    let how_many = (args.number("count", 5000)?, args.number("rounds", 1)?);
    let (export, file) = (args.need("export")?, args.need("file")?);
    let slowest = lock_waiters::give_up(&address, export, file, how_many)?;
    println!("{} waiters were answered within {:.3} s", how_many.0, slowest.as_secs_f64());
    Ok(())
}

/// `hoard --socket PATH --export NAME --server PIDS [--count N]`: resident memory of the server before
/// and with N connections that name as many callers as they can.
fn hoard(args: &BenchArgs) -> CommandResult {
    let (socket, export) = (args.need("socket")?, args.need("export")?);
    let (count, server) = (args.number("count", 1000)?, args.pids("server")?);
    let hoard = hoard::hoard(std::path::Path::new(socket), export, count, &server)?;
    let (before, with) = hoard.resident_kib;
    println!("{} connections took {} MiB", hoard.connections, with.saturating_sub(before) >> 10);
    Ok(())
}

/// `counters [--dir DIR]`: single calls over a Unix socket, and five boxed layers.
fn count(args: &BenchArgs) -> CommandResult {
    let printer = Printer { bench: "counters".into(), arm: "socket".into(), round: 0 };
    let five = layers::five(1_000_000);
    printer.put("five_layers.time_ns", five.time.as_nanos() as f64, "ns");
    printer.put("five_layers.allocations", five.allocations, "1/op");
    let dir = args.get("dir").map_or_else(std::env::temp_dir, PathBuf::from);
    for cost in counters::all(Path::new(&dir))? {
        let op = cost.op;
        let mut figures = vec![
            ("client_allocations", cost.client_allocations, "1/op"),
            ("server_allocations", cost.server_allocations, "1/op"),
            ("client_allocated_bytes", cost.client_allocated_bytes, "B/op"),
            ("server_allocated_bytes", cost.server_allocated_bytes, "B/op"),
            ("copied_bytes", cost.copied_bytes, "B/op"),
            ("round_trips", cost.round_trips, "1/op"),
        ];
        if let Some((client, server)) = cost.system_calls {
            figures.push(("client_system_calls", client, "1/op"));
            figures.push(("server_system_calls", server, "1/op"));
        }
        for (figure, value, unit) in figures {
            printer.put(&format!("{op}.{figure}"), value, unit);
        }
    }
    Ok(())
}
