//! Metrics and health for whoever watches over a server, by HTTP/1.0.

use std::fmt::Write;

use dray_layers::metrics::PrometheusText;
use dray_rpc::server::RecoveryStatus;

use crate::hang;
use crate::report::ServerReport;

/// The answer to one HTTP request.
pub fn answer(request: &str, report: &ServerReport) -> Vec<u8> {
    let mut words = request.lines().next().unwrap_or_default().split_whitespace();
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let path = path.split('?').next().unwrap_or_default();
    let (status, body) = match (method, path) {
        ("GET" | "HEAD", "/metrics") => ("200 OK", text(report)),
        ("GET" | "HEAD", "/healthz") => ("200 OK", "ok\n".to_owned()),
        ("GET" | "HEAD", _) => ("404 Not Found", "there are /metrics and /healthz\n".to_owned()),
        _ => ("405 Method Not Allowed", "only GET\n".to_owned()),
    };
    let shown = if method == "HEAD" { "" } else { body.as_str() };
    format!(
        "HTTP/1.0 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{shown}",
        body.len()
    )
    .into_bytes()
}

/// How long each export's file system has not answered, and how many calls wait for it.
fn hangs(report: &ServerReport, text: &mut String) {
    let all: Vec<_> = report.exports.iter().map(|one| (&one.name, hang::of(one))).collect();
    for (name, help) in [
        ("dray_hang_seconds", "Time since when the file system below has not answered, or 0."),
        ("dray_hung_calls", "Calls that wait for a file system below that does not answer."),
    ] {
        // Writing to a string cannot fail.
        let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} gauge\n");
        for (export, hang) in &all {
            let value = match hang {
                Some(hang) if name == "dray_hung_calls" => hang.calls as u64,
                Some(hang) => hang.since.as_secs(),
                None => 0,
            };
            let _ = writeln!(text, "{name}{{export=\"{export}\"}} {value}");
        }
    }
}

/// What became of what was not on media when the machine lost power.
fn recovery(status: &RecoveryStatus, text: &mut String) {
    let running = u64::from(status.running);
    for (name, help, kind, value) in [
        ("running", "1 while new work waits for what clients send again.", "gauge", running),
        ("redone_changes_total", "Changes made again.", "counter", status.redone_changes),
        ("redone_bytes_total", "Data written again.", "counter", status.redone_bytes),
        ("losses_total", "Losses that clients told their users of.", "counter", status.losses),
        ("lost_bytes_total", "Data lost, as far as counted.", "counter", status.lost_bytes),
        (
            "clients_missing_total",
            "Clients that did not come back with what they had kept.",
            "counter",
            status.clients_missing,
        ),
    ] {
        let name = format!("dray_recovery_{name}");
        // Writing to a string cannot fail.
        let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}\n");
    }
}

fn text(report: &ServerReport) -> String {
    let status = report.server.status();
    let mut text = PrometheusText::default();
    for export in &report.exports {
        let labels = format!("export=\"{}\"", export.name);
        export.metrics.snapshot().prometheus(&labels, &mut text);
    }
    let mut text = text.finish();
    hangs(report, &mut text);
    recovery(&status.recovery, &mut text);
    let away = status.clients.iter().filter(|client| client.away.is_some()).count();
    let files: usize = status.clients.iter().map(|client| client.files).sum();
    for (name, help, value) in [
        ("dray_clients", "Clients with a session.", status.clients.len()),
        ("dray_clients_away", "Clients that have a session and no connection.", away),
        ("dray_open_files", "Files open at clients.", files),
        ("dray_operations_in_flight", "Operations under way.", status.operations.len()),
        ("dray_buffer_used_bytes", "Buffers in use.", status.buffer_used_bytes),
        ("dray_buffer_limit_bytes", "Buffers that may be in use.", status.buffer_limit_bytes),
    ] {
        // Writing to a string cannot fail.
        let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}\n");
    }
    text
}
