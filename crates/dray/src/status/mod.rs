//! `dray status`: asks the control sockets and shows what they say.

mod columns;
mod failover_table;
pub(crate) mod left_over;
pub(crate) mod report;
mod servers;
pub(crate) mod status_table;

use std::collections::HashMap;
use std::net::{IpAddr, ToSocketAddrs, UdpSocket};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dray_client::Target;
use dray_fabric::Address;
use serde_json::{Value, json};

use crate::args::StatusArgs;
use crate::control::{self, ProcessKind};
use crate::error::Failure;
use crate::mount::mount_table::{self, MountEntry};
use crate::mount::supervisor::Supervisors;
use crate::{output, paths, unresponsive};

/// Longest time over which rates are taken, seconds.
const INTERVAL_MAX: f64 = 3600.0;

/// Asks and shows.
pub fn run(args: &StatusArgs) -> Result<(), Failure> {
    if !(0.0..=INTERVAL_MAX).contains(&args.interval) {
        return Err(Failure::usage("the interval is a number of seconds up to 3600"));
    }
    let before = collect(args.target.as_deref())?;
    let begin = Instant::now();
    let mut reports = before.clone();
    if args.interval > 0.0 && !before.is_empty() {
        std::thread::sleep(Duration::from_secs_f64(args.interval));
        reports = again(&before);
        add_rates(&before, &mut reports, begin.elapsed());
    }
    match args.json {
        true => reports.iter().try_for_each(|(_, report)| output::print_json(report)),
        false => output::print(status_table::render(&reports, columns::terminal())),
    }
}

/// Reports by the socket that they came from.
type Reports = Vec<(PathBuf, Value)>;

/// The same once more. Who said nothing before is not waited for a second time.
fn again(before: &Reports) -> Reports {
    let is_stuck = |report: &Value| report["kind"].as_str() == Some("stuck");
    let (stuck, others): (Reports, Reports) =
        before.iter().cloned().partition(|(_, report)| is_stuck(report));
    let sockets = others.into_iter().map(|(socket, _)| socket).collect();
    let answers = control::ask_all(sockets, "status").into_iter().filter_map(report_of);
    let mut all: Reports = answers.chain(stuck).collect();
    all.sort_by_key(|(socket, _)| before.iter().position(|(one, _)| one == socket));
    all
}

fn collect(target: Option<&Path>) -> Result<Reports, Failure> {
    let Some(target) = target else { return Ok(everything()) };
    if let Some(text) = target.to_str().filter(|text| text.contains("://")) {
        return of_url(text);
    }
    // A mount is found without looking at it, or at what is in it: it may not answer.
    let followed = mount_table::follow(target).ok();
    if let Some(mount) = followed.as_ref().and_then(|followed| followed.mount.as_ref()) {
        return of_mount(mount);
    }
    if std::fs::symlink_metadata(target).is_ok_and(|meta| meta.file_type().is_socket()) {
        return of_socket(target);
    }
    of_export(target).or_else(|failure| {
        let is_there = |mount: &MountEntry| followed.as_ref().is_some_and(|at| at.path == mount.at);
        let covered = mount_table::list().into_iter().find(is_there);
        covered.map_or(Err(failure), |mount| of_mount(&mount))
    })
}

/// Where else it is mounted its daemon knows nothing of.
fn of_mount(mount: &MountEntry) -> Result<Reports, Failure> {
    if mount.user != paths::effective_uid() && !paths::is_root() {
        return Err(Failure::new(format!(
            "{} answers only root and user {}, who mounted it",
            mount.at.display(),
            mount.user
        )));
    }
    let supervisors = Supervisors::look();
    if let Some(socket) = control::socket_of(mount, &supervisors) {
        match control::ask(&socket, "status") {
            Ok(report) => return Ok(vec![(socket, report)]),
            Err(error) if unresponsive::is_dead(&error) => {}
            Err(error) => return Err(no_answer(&socket, &error)),
        }
    }
    // The first place of the mount is no more.
    let mut reports = everything();
    let is_its = |report: &Value| report["connection"] == mount.connection;
    reports.retain(|(_, report)| report["kind"] == "mount" && is_its(report));
    match reports.is_empty() {
        false => Ok(reports),
        true => {
            let (at, why) = (mount.at.display(), unserved(mount, &supervisors));
            let message = format!("no answer from the mount on {at}: {why}");
            Err(Failure::new(message).nobody_answered())
        }
    }
}

/// Why no process answers for an existing mount.
fn unserved(mount: &MountEntry, supervisors: &Supervisors) -> String {
    match supervisors.process_of(mount) {
        Some(pid) => format!(
            "its daemon has ended, and its supervisor (process {pid}) starts another one; or the daemon \
             cannot be asked, since it could not write to its run directory; the log says why"
        ),
        None => format!(
            "its daemon and supervisor have died, or are in another container; `dray umount --lazy {}` takes it \
             out of the tree",
            mount.at.display()
        ),
    }
}

/// What a target is, or where a server listens, with or without a scheme of ours.
fn of_url(text: &str) -> Result<Reports, Failure> {
    if let Ok(target) = text.parse::<Target>() {
        return of_target(&target);
    }
    let host = text.strip_prefix("dray://").map_or(text.to_owned(), |host| format!("tcp://{host}"));
    let address: Address = host.parse().map_err(Failure::usage)?;
    wanted(
        |report| listens_at(report, &address),
        |_| {
            let message = format!(
                "no server of this machine listens at {address}; ask `dray status` on its machine"
            );
            Failure::new(message).nobody_answered()
        },
    )
}

/// The wanted reports of all that there are; else an error that says that `none` of them is. The
/// error also says who gave no answer, since it may be one of the wanted.
fn wanted(
    is_wanted: impl Fn(&Value) -> bool,
    none: impl FnOnce(&Reports) -> Failure,
) -> Result<Reports, Failure> {
    let (found, others): (Reports, Reports) =
        everything().into_iter().partition(|(_, report)| is_wanted(report));
    if !found.is_empty() {
        return Ok(found);
    }
    let failure = none(&others);
    Err(Failure { message: failure.message + &unless_silent(&others), ..failure })
}

/// What to add where nothing was found and some of `reports` are of those that gave no answer.
fn unless_silent(reports: &Reports) -> String {
    let silent: Vec<_> = reports.iter().filter(|(_, report)| report["kind"] == "stuck").collect();
    let [(_, first), others @ ..] = &silent[..] else { return String::new() };
    let whose = unresponsive::whose(first);
    match others {
        [] => {
            let why = first["error"].as_str().unwrap_or_default();
            format!("; unless it is the one that does not answer, {whose}: {why}")
        }
        others => format!(
            "; unless it is one that does not answer, as {whose} ({} more): `dray status` names them \
             and says why",
            others.len()
        ),
    }
}

/// The mounts of a target, and its server if that is on this machine.
fn of_target(target: &Target) -> Result<Reports, Failure> {
    let shown = target.to_string();
    let mounts = |report: &Value| {
        let mounted = report["target"].as_str().and_then(|text| text.parse::<Target>().ok());
        mounted.is_some_and(|mounted| {
            mounted.export == target.export
                && reaches(&mounted.address.to_string(), &target.address)
        })
    };
    let serves = |report: &Value| {
        has_export(report, |export| export["name"] == *target.export)
            && listens_at(report, &target.address)
    };
    wanted(
        |report| mounts(report) || serves(report),
        |all| {
            let failure = Failure::new(format!(
                "{shown} is neither mounted nor served on this machine; ask `dray status` on the \
                 server's machine"
            ));
            match all.iter().any(|(_, report)| listens_at(report, &target.address)) {
                true => failure,
                false => failure.nobody_answered(),
            }
        },
    )
}

fn listens_at(report: &Value, address: &Address) -> bool {
    strings(&report["listen"]).any(|listen| reaches(listen, address))
}

/// Whether who listens at `listen` is who is meant by `address`, also by another of its names.
/// Any name of this machine is taken for it if the port is the same and all addresses are
/// listened at.
fn reaches(listen: &str, address: &Address) -> bool {
    let Ok(listen) = listen.parse::<Address>() else { return false };
    let (Address::Tcp { host, port }, Address::Tcp { host: other, port: wanted }) =
        (&listen, address)
    else {
        return listen == *address;
    };
    let addresses = |host: &str| -> Vec<IpAddr> {
        let found = (host, *port).to_socket_addrs();
        found.into_iter().flatten().map(|one| one.ip().to_canonical()).collect()
    };
    let everywhere = || matches!(host.as_str(), "0.0.0.0" | "::");
    let same = || {
        let of_listener = addresses(host);
        addresses(other).iter().any(|one| of_listener.contains(one))
    };
    port == wanted && (host == other || everywhere() || same())
}

/// The server that clients reach by this socket, or the process that it controls.
fn of_socket(socket: &Path) -> Result<Reports, Failure> {
    let address = std::fs::canonicalize(socket).unwrap_or(socket.to_owned());
    let address = format!("unix://{}", address.display());
    let mut servers = everything();
    servers.retain(|(_, report)| strings(&report["listen"]).any(|one| one == address));
    if !servers.is_empty() {
        return Ok(servers);
    }
    ask_one(socket).map(|report| vec![(socket.to_owned(), report)])
}

/// The servers of an export, given by its name, its directory or the server's state directory.
fn of_export(target: &Path) -> Result<Reports, Failure> {
    let name = target.to_string_lossy();
    let dir = std::fs::canonicalize(target).ok();
    let dir = dir.as_deref().map(Path::to_string_lossy);
    let is_dir = |value: &Value| dir.is_some() && value.as_str() == dir.as_deref();
    let is_export = |export: &Value| is_dir(&export["dir"]) || export["name"] == *name;
    wanted(
        |report| is_dir(&report["state"]) || has_export(report, is_export),
        |_| {
            Failure::new(format!(
                "{name} is neither a mount nor an export of a dray on this machine (or it belongs \
                 to another user); `dray status` shows what there is"
            ))
        },
    )
}

fn has_export(report: &Value, wanted: impl Fn(&Value) -> bool) -> bool {
    exports(report).any(wanted)
}

fn exports(report: &Value) -> impl Iterator<Item = &Value> {
    report["exports"].as_array().into_iter().flatten()
}

/// The server's process and the directory behind a target, if both are on this machine and
/// the server answers this user.
pub fn served_here(target: &Target) -> Option<(u32, PathBuf)> {
    let is_here = match &target.address {
        Address::Unix(_) => true,
        Address::Tcp { host, port } => is_of_this_machine(host, *port),
    };
    everything().into_iter().filter(|_| is_here).find_map(|(_, report)| {
        strings(&report["listen"]).find(|listen| reaches(listen, &target.address))?;
        let export = exports(&report).find(|export| export["name"] == *target.export)?;
        let pid = u32::try_from(report["pid"].as_u64()?).ok()?;
        // Of a name that is no text the report does not tell.
        Some((pid, PathBuf::from(export["dir"].as_str()?))).filter(|(_, dir)| dir.is_dir())
    })
}

/// Whether a host is this one: only its own addresses can be listened at.
fn is_of_this_machine(host: &str, port: u16) -> bool {
    let addresses = (host, port).to_socket_addrs();
    addresses.into_iter().flatten().any(|one| UdpSocket::bind((one.ip(), 0)).is_ok())
}

fn strings(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str)
}

fn everything() -> Reports {
    let mut sockets: Vec<PathBuf> = ProcessKind::Server.all();
    let mounts = mounts_elsewhere();
    let found = mounts.iter().filter_map(|(_, socket)| socket.clone());
    for socket in ProcessKind::Mount.all().into_iter().chain(found) {
        if !sockets.contains(&socket) {
            sockets.push(socket);
        }
    }
    let asked = control::ask_all(sockets, "status").into_iter();
    let mut reports: Reports = asked.filter_map(report_of).collect();
    let answers = |mount: &MountEntry, at: &Option<PathBuf>| {
        reports.iter().any(|(socket, report)| {
            at.as_ref() == Some(socket) || report["connection"] == mount.connection
        })
    };
    let dead: Vec<MountEntry> = mounts
        .into_iter()
        .filter(|(mount, socket)| !answers(mount, socket))
        .map(|(mount, _)| mount)
        .collect();
    if !dead.is_empty() {
        let supervisors = Supervisors::look();
        reports.extend(dead.into_iter().map(|mount| {
            let report = json!({
                "kind": "stuck",
                "mountpoint": mount.at.display().to_string(),
                "connection": mount.connection,
                "error": unserved(&mount, &supervisors),
            });
            (mount.at, report)
        }));
    }
    reports
}

/// The mounts of this user, or for root those of everybody, and where they answer, whatever run
/// directories they were given. A name of one asks for what is in it.
fn mounts_elsewhere() -> Vec<(MountEntry, Option<PathBuf>)> {
    if paths::is_run_dir_given() {
        return Vec::new();
    }
    let mut mounts = mount_table::list();
    mounts.retain(|mount| paths::is_root() || mount.user == paths::effective_uid());
    mounts.sort_by_key(|mount| mount.connection); // once each, in however many places it is
    mounts.dedup_by_key(|mount| mount.connection);
    match mounts.is_empty() {
        true => Vec::new(),
        false => mounts.clone().into_iter().zip(control::sockets_of(mounts)).collect(),
    }
}

/// What the process behind a socket has answered; none if it is dead.
fn report_of((socket, answer): (PathBuf, std::io::Result<Value>)) -> Option<(PathBuf, Value)> {
    let report = match answer {
        Ok(report) => report,
        Err(error) if unresponsive::is_dead(&error) => return None,
        Err(error) => unresponsive::report(&socket, &error),
    };
    Some((socket, report))
}

fn ask_one(socket: &Path) -> Result<Value, Failure> {
    control::ask(socket, "status").map_err(|error| no_answer(socket, &error))
}

fn no_answer(socket: &Path, error: &std::io::Error) -> Failure {
    let said = unresponsive::sentence(socket, error);
    let why = "the process behind it may be dead, stuck, or another user's";
    Failure::new(format!("{said}; {why}")).nobody_answered()
}

/// Adds what happened in a second, on average, since `before`.
fn add_rates(before: &Reports, reports: &mut Reports, elapsed: Duration) {
    let seconds = elapsed.as_secs_f64().max(1e-3);
    for (socket, report) in reports {
        let old = before.iter().find(|(known, _)| known == socket).map(|(_, report)| report);
        let Some(old) = old.filter(|old| old["pid"] == report["pid"]) else { continue };
        let (now, then) = (totals(report), totals(old));
        let rate = |index: usize| {
            let difference: f64 = now[index] - then[index];
            (difference.max(0.0) / seconds * 10.0).round() / 10.0
        };
        report["rates"] = json!({
            "operations_per_s": rate(0),
            "read_bytes_per_s": rate(1),
            "written_bytes_per_s": rate(2),
        });
        add_client_rates(old, report, seconds);
    }
}

/// The same for each client of a server, so that it shows who keeps it busy.
fn add_client_rates(old: &Value, report: &mut Value, seconds: f64) {
    // There may be thousands: each is found at once.
    let known = |client: &Value| client["session"].as_str().map(str::to_owned);
    let old = old["clients"].as_array().into_iter().flatten();
    let old: HashMap<_, _> = old.filter_map(|client| Some((known(client)?, client))).collect();
    // An index would add the key to the report of a mount, which has no clients.
    let clients = report.get_mut("clients").and_then(Value::as_array_mut);
    for client in clients.into_iter().flatten() {
        let Some(before) = known(client).and_then(|session| old.get(&session)) else { continue };
        let rate = |key: &str| {
            let count = |of: &Value| of[key].as_f64().unwrap_or(0.0);
            ((count(client) - count(before)).max(0.0) / seconds * 10.0).round() / 10.0
        };
        client["rates"] = json!({
            "calls_per_s": rate("calls"),
            "read_bytes_per_s": rate("read_bytes"),
            "written_bytes_per_s": rate("written_bytes"),
        });
    }
}

/// Operations, bytes read and bytes written so far.
fn totals(report: &Value) -> [f64; 3] {
    if report["kind"] == "mount" {
        let ops = report["ops"].as_object();
        let sum = ops.into_iter().flatten().filter_map(|(_, count)| count.as_f64()).sum();
        let bytes = |key: &str| report[key].as_f64().unwrap_or(0.0);
        return [sum, bytes("read_bytes"), bytes("written_bytes")];
    }
    let mut totals = [0.0; 3];
    for export in report["exports"].as_array().into_iter().flatten() {
        for (op, counters) in export["ops"].as_object().into_iter().flatten() {
            totals[0] += counters["count"].as_f64().unwrap_or(0.0);
            let bytes = counters["bytes"].as_f64().unwrap_or(0.0);
            match op.as_str() {
                "read" => totals[1] += bytes,
                "write" => totals[2] += bytes,
                _ => {}
            }
        }
    }
    totals
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each was said in full: with thirty dead mounts the hint was thirty times as long.
    #[test]
    fn processes_that_do_not_answer_are_reported_in_one_line() {
        let report = |kind: &str, at: &str| {
            (PathBuf::from(at), json!({ "kind": kind, "socket": at, "error": "no" }))
        };
        let (server, one) = (report("server", "/s"), report("stuck", "/one"));
        assert_eq!(unless_silent(&vec![server.clone()]), "");
        let said = unless_silent(&vec![server, one.clone()]);
        assert_eq!(said, "; unless it is the one that does not answer, /one: no");
        let said = unless_silent(&vec![one, report("stuck", "/two"), report("stuck", "/three")]);
        assert!(said.contains("/one (2 more)") && !said.contains("/two"), "{said}");
    }

    #[test]
    fn a_server_is_known_by_where_it_listens() {
        let address: Address = "tcp://node1:7440".parse().unwrap();
        for (listen, expected) in [
            ("tcp://node1:7440", true),
            ("tcp://0.0.0.0:7440", true),
            ("tcp://[::]:7440", true),
            ("tcp://[::]:7441", false),
            ("tcp://127.0.0.1:7440", false),
            ("unix:///run/x", false),
        ] {
            assert_eq!(reaches(listen, &address), expected, "{listen}");
        }
        // By another of its names, which was not known.
        let near: Address = "tcp://localhost:7440".parse().unwrap();
        assert!(reaches("tcp://127.0.0.1:7440", &near) || reaches("tcp://[::1]:7440", &near));
        assert!(!reaches("tcp://192.0.2.1:7440", &near) && !reaches("tcp://127.0.0.1:7441", &near));
    }

    #[test]
    fn a_host_is_distinguished_from_others() {
        assert!(is_of_this_machine("127.0.0.1", 7440));
        assert!(!is_of_this_machine("192.0.2.1", 7440), "an address of documents");
    }

    #[test]
    fn a_mount_is_not_said_to_have_clients() {
        let socket = PathBuf::from("/x");
        let report = || vec![(socket.clone(), json!({ "kind": "mount", "pid": 1, "ops": {} }))];
        let mut after = report();
        add_rates(&report(), &mut after, Duration::from_secs(1));
        assert_eq!(after[0].1.get("clients"), None);
        assert_eq!(after[0].1["rates"]["operations_per_s"], 0.0);
    }

    #[test]
    fn rates_are_differences_over_time() {
        let report = |reads: u64| {
            json!({ "kind": "server", "pid": 1, "clients": [
                { "session": "a", "calls": reads, "read_bytes": reads * 1000 },
            ], "exports": [{ "name": "a", "ops": {
                "read": { "count": reads, "bytes": reads * 1000 },
                "lookup": { "count": 5, "bytes": 0 },
            }}]})
        };
        let socket = PathBuf::from("/x");
        let before = vec![(socket.clone(), report(10))];
        let mut after = vec![(socket, report(30))];
        add_rates(&before, &mut after, Duration::from_secs(2));
        let rates = &after[0].1["rates"];
        assert_eq!(rates["operations_per_s"], 10.0);
        assert_eq!(rates["read_bytes_per_s"], 10_000.0);
        assert_eq!(after[0].1["clients"][0]["rates"]["calls_per_s"], 10.0);
        assert_eq!(after[0].1["clients"][0]["rates"]["read_bytes_per_s"], 10_000.0);
        after[0].1["pid"] = json!(2);
        after[0].1["rates"] = Value::Null;
        add_rates(&before, &mut after, Duration::from_secs(2));
        assert!(after[0].1["rates"].is_null(), "another process has another history");
    }
}
