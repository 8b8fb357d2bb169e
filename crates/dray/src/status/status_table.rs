//! The status as a table.

use std::path::PathBuf;

use serde_json::Value;

use super::columns::{ColumnLimits, ShortenedColumn, table};
use super::failover_table;
use crate::output::plain;
use crate::unresponsive;

/// Operations shown of each process; the rest is counted.
const OPERATIONS_SHOWN: usize = 20;
/// Clients shown of each server, the busiest first; the rest is counted.
const CLIENTS_SHOWN: usize = 50;

/// All reports as text, tables for lines of `room` letters.
pub fn render(reports: &[(PathBuf, Value)], room: Option<usize>) -> String {
    if reports.is_empty() {
        return "no server and no mount of yours is running on this machine\n".to_owned();
    }
    let mut out = String::new();
    for (_, report) in reports {
        if !out.is_empty() {
            out.push('\n');
        }
        match report["kind"].as_str() {
            Some("server") => server(report, room, &mut out),
            Some("mount") => mount(report, room, &mut out),
            _ => {
                let (whose, why) = (unresponsive::whose(report), text(&report["error"]));
                line(&mut out, &format!("NO ANSWER from {whose}: {why}"));
            }
        }
    }
    out
}

pub(super) fn line(out: &mut String, text: &str) {
    out.push_str(&plain(text.trim_end()));
    out.push('\n');
}

pub(super) fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => "-".to_owned(),
        other => other.to_string(),
    }
}

pub(super) fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

/// An audit, in words.
fn audit_text(audit: &Value) -> String {
    let (records, log) = (&audit["records"], size(&audit["log_bytes"]));
    let mut said = format!("audit: {records} records, log {log}");
    if audit["consumers"] != 0 {
        said += &format!(", slowest of {} consumers {} behind", audit["consumers"], audit["lag"]);
    }
    if audit["dropped"] != 0 {
        said += &format!(", {} DROPPED", audit["dropped"]);
    }
    match audit["trouble"].as_str() {
        Some("") | None if audit["blocked"] == true => said += ", FULL: new changes wait",
        Some("") | None => {}
        Some(why) => said += &format!(", CANNOT BE WRITTEN: {why}"),
    }
    said
}

/// What an export with leases notices of changes beside dray, in words.
fn outside_text(outside: &Value) -> String {
    let (changes, missed) = (&outside["changes"], outside["missed"].as_u64().unwrap_or(0));
    let mut said = match outside["why_not"].as_str() {
        Some(why) => return format!("changes beside dray are not noticed: {why}"),
        None => format!("{changes} changes beside dray noticed"),
    };
    if missed > 0 {
        said += &format!(", MISSED some {missed} times");
    }
    said
}

/// The leases of an export or of a client, in words.
fn leases_text(leases: &Value) -> String {
    let mut said = format!("{} leases held, {} recalled", leases["held"], leases["recalls"]);
    for (count, what) in [
        ("expired", "not answered in time"),
        ("fences", "clients fenced"),
        ("written", "of files that one client may keep data of"),
        ("locks", "on locks"),
    ] {
        if leases[count].as_u64() > Some(0) {
            said += &format!(", {} {what}", leases[count]);
        }
    }
    said
}

fn server(report: &Value, room: Option<usize>, out: &mut String) {
    let listen: Vec<String> = list(&report["listen"]).iter().map(text).collect();
    let (pid, up) = (&report["pid"], age(&report["uptime_s"]));
    line(out, &format!("SERVER {}  pid {pid}, up {up}", listen.join(" ")));
    let used = size(&report["buffers"]["used_bytes"]);
    line(out, &format!("  buffers {used} of {}", size(&report["buffers"]["limit_bytes"])));
    rates(report, out);
    let rows = list(&report["exports"]).iter().map(|export| {
        let mode = if export["read_only"] == true { "ro" } else { "rw" };
        let state = state_of(export);
        let (name, below, dir) = (&export["name"], &export["below"], &export["dir"]);
        vec![text(name), text(below), mode.to_owned(), state, text(dir)]
    });
    let give = ColumnLimits {
        cut: Some(ShortenedColumn::Beginning("DIRECTORY")),
        ..ColumnLimits::default()
    };
    table(out, room, &["EXPORT", "BELOW", "MODE", "STATE", "DIRECTORY"], rows, give);
    for export in list(&report["exports"]) {
        if let projection @ Value::Object(_) = &export["projection"] {
            line(
                out,
                &format!(
                    "  {} is a projection, layout {}, definition {}: this is {}, server {} of {}",
                    text(&export["name"]),
                    text(&projection["layout"]),
                    text(&projection["fingerprint"]),
                    text(&projection["server"]),
                    projection["number"],
                    projection["servers"],
                ),
            );
        }
        if let failover @ Value::Object(_) = &export["failover"] {
            failover_table::show(failover, room, out);
        }
        if let Some(away) = export["servers_away"].as_str() {
            line(out, &format!("  {}: {away}", text(&export["name"])));
        }
        if let counts @ Value::Object(_) = &export["aggregate"] {
            line(
                out,
                &format!(
                    "  {}: {} reads ({}) from read-ahead, {} writes merged into {}; {} pending",
                    text(&export["name"]),
                    counts["read_hits"],
                    size(&counts["read_hit_bytes"]),
                    counts["writes_merged"],
                    counts["late_requests"],
                    size(&counts["pending_bytes"]),
                ),
            );
        }
        if let audit @ Value::Object(_) = &export["audit"] {
            line(out, &format!("  {}: {}", text(&export["name"]), audit_text(audit)));
        }
        if let leases @ Value::Object(_) = &export["leases"] {
            line(out, &format!("  {}: {}", text(&export["name"]), leases_text(leases)));
        }
        if let outside @ Value::Object(_) = &export["outside"] {
            line(out, &format!("  {}: {}", text(&export["name"]), outside_text(outside)));
        }
        let starting = &export["starting"];
        if let (false, Some(why)) = (starting["held_back"].is_null(), starting["error"].as_str()) {
            line(out, &format!("  {why}"));
        }
    }
    clients(report, room, out);
    operations(report, "host", room, out);
}

fn clients(report: &Value, room: Option<usize>, out: &mut String) {
    let mut all: Vec<&Value> = list(&report["clients"]).iter().collect();
    let busy = |client: &Value| client["rates"]["calls_per_s"].as_f64().unwrap_or(0.0);
    all.sort_by(|left, right| busy(right).total_cmp(&busy(left)));
    let rows = all.iter().take(CLIENTS_SHOWN).map(|client| {
        let away = match &client["away_s"] {
            Value::Null => "here".to_owned(),
            since => format!("away {}", age(since)),
        };
        let mut row: Vec<String> =
            ["host", "session", "peer", "export"].map(|key| text(&client[key])).into();
        row.extend([
            away,
            text(&client["open_files"]),
            text(&client["calls"]),
            text(&client["rates"]["calls_per_s"]),
            size(&client["read_bytes"]),
            size(&client["written_bytes"]),
        ]);
        row
    });
    let heads = [
        "CLIENT", "SESSION", "FROM", "EXPORT", "STATE", "FILES", "CALLS", "CALLS/S", "READ",
        "WRITTEN",
    ];
    // A client is evicted by its host or its session.
    let give = ColumnLimits {
        spare: &["FROM", "FILES", "CALLS", "EXPORT"],
        cut: Some(ShortenedColumn::End("CLIENT")),
    };
    table(out, room, &heads, rows, give);
    for client in all.iter().take(CLIENTS_SHOWN) {
        if let files @ 1.. = client["leases"]["written"].as_u64().unwrap_or(0) {
            let [host, session, export] =
                ["host", "session", "export"].map(|key| text(&client[key]));
            let said =
                format!("  {host} (session {session}) may keep data of {files} files of {export}");
            line(out, &said);
        }
    }
    if all.len() > CLIENTS_SHOWN {
        line(out, &format!("  and {} more clients (--json shows all)", all.len() - CLIENTS_SHOWN));
    }
}

/// Whether an export can be used, and since when not.
fn state_of(export: &Value) -> String {
    let (starting, hang) = (&export["starting"], &export["hang"]);
    match (starting["since_s"].is_null(), hang["since_s"].is_null()) {
        (true, true) if export["moved"] == true => "DIRECTORY MOVED".to_owned(),
        (true, true) if export["gone"] == true => "DIRECTORY GONE".to_owned(),
        (true, true) => match export["mapped_twice"].as_u64() {
            Some(files @ 1..) => format!("answers; MAPPED TWICE: {files} files"),
            _ => "answers".to_owned(),
        },
        (true, false) => format!("HANGS {}, {} calls", age(&hang["since_s"]), text(&hang["calls"])),
        (false, false) => format!("STARTING, HANGS {}", age(&hang["since_s"])),
        (false, true) if !starting["held_back"].is_null() => {
            format!("HELD BACK {}", age(&starting["since_s"]))
        }
        (false, true) => match starting["error"].as_str() {
            Some(error) => format!("STARTING {}: {error}", age(&starting["since_s"])),
            None => format!("STARTING {}", age(&starting["since_s"])),
        },
    }
}

/// What a mount remembers under leases, and what its cache on the local disk has done.
fn leases_and_cache(report: &Value, out: &mut String) {
    let leases = &report["server"]["leases"];
    if leases.is_object() {
        let said = format!(
            "  leases: {} names and the attributes of {} files remembered, {} calls spared, {} recalled",
            leases["names"], leases["attributes"], leases["hits"], leases["recalled"],
        );
        line(out, &said);
    }
    let kept = &report["server"]["kept_writes"];
    if kept.is_object() {
        let said = format!(
            "  writes: {} kept in all, {} now; of {} files something was lost, {} of that is kept aside",
            kept["writes"],
            size(&kept["bytes"]),
            kept["lost"],
            kept["aside"],
        );
        line(out, &said);
        if kept["disk_errors"].as_u64().is_some_and(|errors| errors > 0) {
            let what = "  writes: the local disk failed";
            line(
                out,
                &format!("{what} {} times, and they went to the server", kept["disk_errors"]),
            );
        }
    }
    let left = &report["left_over"];
    if ["log_bytes", "aside_files"].iter().any(|what| left[what].as_u64() > Some(0)) {
        let said = format!(
            "  left over: {} in logs of mounts that are gone, {} files aside ({})",
            size(&left["log_bytes"]),
            left["aside_files"],
            size(&left["aside_bytes"]),
        );
        line(out, &said);
    }
    let cache = &report["cache"];
    if let Some(dir) = cache["dir"].as_str() {
        let (hits, stored) = (size(&cache["hit_bytes"]), size(&cache["stored_bytes"]));
        let said = format!(
            "  cache {dir}: {} reads ({hits}) from it, {} fetched ({stored} stored), {} without a lease, {} errors",
            cache["hits"], cache["misses"], cache["unleased"], cache["errors"],
        );
        line(out, &said);
        passthrough(&cache["passthrough"], out);
    }
}

/// Files of the cache that the kernel reads by itself.
fn passthrough(report: &Value, out: &mut String) {
    if report["agreed"] != true {
        return;
    }
    line(
        out,
        &format!(
            "  read by the kernel itself: {} files now, {} opens",
            report["files"], report["opens"]
        ),
    );
    if let Some(why) = report["refused"].as_str() {
        line(out, &format!("  the kernel refuses to: {why}"));
    }
}

fn mount(report: &Value, room: Option<usize>, out: &mut String) {
    let (at, pid) = (text(&report["mountpoint"]), &report["pid"]);
    let up = age(&report["uptime_s"]);
    line(out, &format!("MOUNT {at}  of {}, pid {pid}, up {up}", text(&report["target"])));
    line(
        out,
        &format!(
            "  {}, transport {}, {} workers, {} files known, {} open",
            text(&report["consistency"]),
            text(&report["transport"]),
            report["workers"],
            report["known_files"],
            report["open_files"],
        ),
    );
    if let Some(why) = report["transport_reason"].as_str() {
        line(out, &format!("  no ring: {why}"));
    }
    leases_and_cache(report, out);
    if let (Some(false), Some(_)) =
        (report["flusher"].as_bool(), report["memory_limit_bytes"].as_u64())
    {
        let limit = size(&report["memory_limit_bytes"]);
        line(
            out,
            &format!(
                "  MAY HANG: its memory has a limit of {limit}, and it is no flusher: programs in"
            ),
        );
        line(
            out,
            "  the same memory control group must not store into mappings here; see OPERATIONS.md,",
        );
        line(out, "  \"Limits on memory\"");
    }
    let projection = &report["projection"];
    if projection.is_null() {
        session(&report["server"], out);
    } else {
        line(
            out,
            &format!(
                "  projection {}: layout {}, definition {}",
                text(&projection["name"]),
                text(&projection["layout"]),
                text(&projection["definition"]),
            ),
        );
        list(&projection["servers"]).iter().for_each(|one| session(one, out));
    }
    rates(report, out);
    operations(report, "pid", room, out);
}

/// How it stands with one server.
fn session(server: &Value, out: &mut String) {
    let is = |what: &str| server[what] == true;
    // With failover a session begins with the first use of a slice.
    if server["slices"].as_array().is_some_and(Vec::is_empty) {
        return line(out, &format!("  server {}: not used so far", text(&server["address"])));
    }
    let state = match (is("connected"), is("evicted"), is("redefined")) {
        (_, true, _) => "EVICTED by its administrator, unmount and mount again",
        (_, _, true) => "REDEFINED: the projection is another one now, unmount and mount again",
        (true, _, _) => "connected",
        (false, _, _) => "AWAY, trying again",
    };
    let of_session = match text(&server["session"]) {
        id if id.is_empty() => "no session".to_owned(),
        id => format!("session {id}"),
    };
    let share = server["calls_percent"].as_f64();
    line(
        out,
        &format!(
            "  server {}: {state}, {of_session}, {} connections, {} calls{}, {} in flight",
            text(&server["address"]),
            server["connections"],
            server["calls"],
            share.map_or(String::new(), |share| format!(" ({share} % of all)")),
            server["calls_in_flight"],
        ),
    );
    let slices: Vec<&str> = list(&server["slices"]).iter().filter_map(Value::as_str).collect();
    if !slices.is_empty() {
        line(out, &format!("    slices {}", slices.join(" ")));
    }
    if let Some(why) = server["error"].as_str() {
        line(out, &format!("  {why}"));
    }
}

fn rates(report: &Value, out: &mut String) {
    let rates = &report["rates"];
    if rates.is_null() {
        return;
    }
    let (read, written) = (&rates["read_bytes_per_s"], &rates["written_bytes_per_s"]);
    let operations = &rates["operations_per_s"];
    line(
        out,
        &format!("  {operations} operations/s, read {}/s, written {}/s", size(read), size(written)),
    );
}

fn operations(report: &Value, who: &str, room: Option<usize>, out: &mut String) {
    let all = list(&report["operations"]);
    let rows = all.iter().take(OPERATIONS_SHOWN).map(|operation| {
        let mut row = vec![text(&operation["op"]), text(&operation["path"])];
        row.push(text(&operation["uid"]));
        row.push(text(&operation[who]));
        row.push(text(&operation["job"]));
        row.push(age(&operation["age_s"]));
        row
    });
    let give =
        ColumnLimits { cut: Some(ShortenedColumn::Beginning("PATH")), ..ColumnLimits::default() };
    table(out, room, &["OPERATION", "PATH", "UID", &who.to_uppercase(), "JOB", "AGE"], rows, give);
    let left_out = report["operations_left_out"].as_u64().unwrap_or(0) as usize;
    let more = all.len().saturating_sub(OPERATIONS_SHOWN) + left_out;
    if more > 0 {
        line(out, &format!("  and {more} more operations"));
    }
}

fn age(value: &Value) -> String {
    let seconds = value.as_f64().unwrap_or(0.0);
    match seconds {
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.1} h", s / 3600.0),
        s => format!("{:.1} d", s / 86_400.0),
    }
}

fn size(value: &Value) -> String {
    let mut rest = value.as_f64().unwrap_or(0.0);
    for unit in ["B", "KiB", "MiB", "GiB", "TiB"] {
        if rest < 1024.0 {
            let digits = if unit == "B" { 0 } else { 1 };
            return format!("{rest:.digits$} {unit}");
        }
        rest /= 1024.0;
    }
    format!("{rest:.1} PiB")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn sizes_and_ages_are_readable() {
        assert_eq!(size(&json!(512)), "512 B");
        assert_eq!(size(&json!(1_572_864)), "1.5 MiB");
        assert_eq!(age(&json!(0.0254)), "25 ms");
        assert_eq!(age(&json!(7200)), "2.0 h");
        assert_eq!(age(&Value::Null), "0 ms");
    }

    #[test]
    fn a_server_is_shown_and_names_cannot_command_the_terminal() {
        let report = json!({
            "kind": "server", "pid": 7, "uptime_s": 3, "listen": ["tcp://127.0.0.1:7440"],
            "exports": [
                { "name": "home", "below": "ext4", "dir": "/srv", "read_only": true },
                { "name": "disk", "dir": "/d", "hang": { "since_s": 60.0, "calls": 3 } },
                { "name": "new", "dir": "/n", "starting": { "since_s": 4.0 } },
                {
                    "name": "stuck", "dir": "/s", "starting": { "since_s": 9.0 },
                    "hang": { "since_s": 9.0, "calls": 1 },
                },
                { "name": "gone", "dir": "/g", "starting": { "since_s": 9.0, "error": "no dir" } },
                { "name": "held", "dir": "/h", "starting": {
                    "since_s": 8.0, "error": "say `dray accept held`",
                    "held_back": { "expected": "ext4 a", "found": "ext4 b" },
                } },
            ],
            "clients": [{ "host": "node\u{1b}[31m", "session": "ab", "away_s": 4.0 }],
            "operations": [{ "op": "read", "path": "/srv/a", "uid": 5, "age_s": 0.5 }],
            "rates": { "operations_per_s": 2.5, "read_bytes_per_s": 2048.0 },
        });
        let text = render(&[(PathBuf::new(), report)], None);
        for part in [
            "SERVER tcp://127.0.0.1:7440",
            "home",
            "ro",
            "answers",
            "HANGS 60.0 s, 3 calls",
            "STARTING 4.0 s",
            "STARTING, HANGS 9.0 s",
            "STARTING 9.0 s: no dir",
            "HELD BACK 8.0 s",
            "\n  say `dray accept held`\n",
            "away 4.0 s",
            "2.0 KiB/s",
            "/srv/a",
        ] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
        assert!(!text.contains('\u{1b}'));
    }

    #[test]
    fn a_server_without_a_session_so_far_has_none_to_show() {
        let shown = |slices: Value| {
            let mut text = String::new();
            let server =
                json!({ "address": "tcp://io1", "session": "", "slices": slices, "calls": 0 });
            session(&server, &mut text);
            text
        };
        assert_eq!(shown(json!([])), "  server tcp://io1: not used so far\n");
        let away = shown(json!(["x/0.1"]));
        assert!(
            away.contains("AWAY, trying again, no session, ") && away.contains("x/0.1"),
            "{away}"
        );
    }

    #[test]
    fn of_many_clients_the_busiest_are_shown() {
        let client = |number: usize| json!({ "host": format!("node{number}"), "rates": { "calls_per_s": number as f64 } });
        let clients: Vec<Value> = (0..CLIENTS_SHOWN + 7).map(client).collect();
        let text =
            render(&[(PathBuf::new(), json!({ "kind": "server", "clients": clients }))], None);
        let busiest = text.find(&format!("node{}", CLIENTS_SHOWN + 6)).unwrap();
        assert!(busiest < text.find("node7 ").unwrap());
        assert!(!text.contains("node6 ") && text.contains("and 7 more clients"), "{text}");
    }

    #[test]
    fn clients_fit_into_a_terminal_of_eighty_letters() {
        let client = json!({
            "host": "a-node-with-a-long-name.cluster.example.org", "session": "4c9e2f3ab7d81e60",
            "peer": "[fd00:1234:5678::abcd]:49152", "export": "home", "open_files": 1234,
            "calls": 123_456_789, "rates": { "calls_per_s": 10000.5 }, "read_bytes": 1e12,
            "written_bytes": 1e12,
        });
        let report = json!({ "kind": "server", "listen": [], "clients": [client] });
        let text = render(&[(PathBuf::new(), report)], Some(80));
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(
            text.contains("a-node-with-a-l") && text.contains("  4c9e2f3ab7d81e60  "),
            "{text}"
        );
    }

    #[test]
    fn a_mount_without_its_server_says_why() {
        let server = json!({ "connected": false, "error": "HOST: compare the key files" });
        let text =
            render(&[(PathBuf::new(), json!({ "kind": "mount", "server": server }))], Some(80));
        assert!(
            text.contains("AWAY") && text.contains("\n  HOST: compare the key files\n"),
            "{text}"
        );
    }

    #[test]
    fn nothing_at_all_is_said_in_a_sentence() {
        assert!(render(&[], None).starts_with("no server"));
        assert!(!render(&[(PathBuf::new(), json!({}))], None).is_empty());
        assert!(!render(&[(PathBuf::new(), json!({ "kind": "mount" }))], Some(80)).is_empty());
    }
}
