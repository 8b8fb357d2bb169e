//! The metrics of a mount (`-o metrics=ADDR:PORT`).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use dray_client::{KeptWritesStatus, SessionStatus, UnsyncedStatus};
use dray_fuse::Stats;
use dray_layers::metrics::{Metrics, PrometheusText};

use crate::metrics_http::MetricKind::{Counter, Gauge};
use crate::metrics_http::{head, label_value, sample};
use crate::status::left_over::LeftOver;
use crate::status::report::MountReport;

/// All of them; `calls` has seen every call that was made for the mount's applications.
pub fn text(report: &MountReport, calls: &Arc<Metrics>) -> String {
    let labels = format!(
        "mountpoint=\"{}\",target=\"{}\"",
        label_value(&report.mountpoint()),
        label_value(&report.target)
    );
    let mut seen = PrometheusText::new("dray_mount");
    calls.snapshot().prometheus(&labels, &mut seen);
    let mut text = seen.finish();
    let stats = report.reporter.stats();
    kernel(&stats, &labels, &mut text);
    server(report, &labels, &mut text);
    kept_writes(&report.sessions(), &labels, &mut text);
    local_cache(report, &labels, &mut text);
    left_over(report, &labels, &mut text);
    unsynced(&report.unsynced(), &labels, &mut text);
    text
}

/// What is kept under write leases, where that is wanted.
fn kept_writes(sessions: &[SessionStatus], labels: &str, text: &mut String) {
    let kept: Vec<_> = sessions.iter().filter_map(|session| session.kept_writes).collect();
    if kept.is_empty() {
        return;
    }
    let sum = |field: fn(&KeptWritesStatus) -> u64| kept.iter().map(field).sum::<u64>();
    for (name, help, kind, value) in [
        ("write_leases", "Files whose writes may be kept.", Gauge, sum(|one| one.files)),
        ("kept_write_bytes", "Bytes that are kept now.", Gauge, sum(|one| one.bytes)),
        (
            "kept_writes_lost_total",
            "Times that something kept was not written to its file.",
            Counter,
            sum(|one| one.lost),
        ),
    ] {
        let name = format!("dray_mount_{name}");
        head(text, &name, kind, help);
        sample(text, &name, labels, value);
    }
    if kept.iter().any(|one| one.disk_errors.is_some()) {
        let name = "dray_mount_kept_write_disk_errors_total";
        head(text, name, Counter, "Errors of the local disk that has what is kept.");
        sample(text, name, labels, sum(|one| one.disk_errors.unwrap_or(0)));
    }
}

/// What the cache on the local disk has done, where the mount has one.
fn local_cache(report: &MountReport, labels: &str, text: &mut String) {
    let Some(cache) = &report.cache else { return };
    let counts = &cache.counts;
    for (name, help, counter) in [
        ("cache_hits_total", "Reads that the local disk answered.", &counts.hits),
        ("cache_hit_bytes_total", "Bytes of these.", &counts.hit_bytes),
        (
            "cache_misses_total",
            "Reads that the server answered, and that are kept.",
            &counts.misses,
        ),
        (
            "cache_stored_bytes_total",
            "Bytes that were written to the local disk.",
            &counts.stored_bytes,
        ),
        (
            "cache_evicted_bytes_total",
            "Bytes that were given up because the local disk was full.",
            &counts.evicted_bytes,
        ),
        (
            "cache_errors_total",
            "Errors of the local disk; reads go to the server then.",
            &counts.errors,
        ),
    ] {
        let name = format!("dray_mount_{name}");
        head(text, &name, Counter, help);
        sample(text, &name, labels, counter.load(Ordering::Relaxed));
    }
}

/// What is in no file, where writes are kept.
fn left_over(report: &MountReport, labels: &str, text: &mut String) {
    let Some(left) = LeftOver::of(report) else { return };
    for (name, help, value) in [
        (
            "left_log_bytes",
            "Dirty data in logs of mounts that are gone; mount their export again.",
            left.log_bytes,
        ),
        ("aside_files", "Files that are kept aside; nothing removes them.", left.aside_files),
        ("aside_bytes", "What these take on the disk.", left.aside_bytes),
    ] {
        let name = format!("dray_mount_{name}");
        head(text, &name, Gauge, help);
        sample(text, &name, labels, value);
    }
}

/// What the kernel asks for.
fn kernel(stats: &Stats, labels: &str, text: &mut String) {
    let name = "dray_mount_requests_total";
    head(text, name, Counter, "Requests of the kernel.");
    for (op, count) in &stats.counts {
        sample(text, name, &format!("{labels},op=\"{op}\""), count);
    }
    let oldest = stats.in_flight.iter().map(|one| one.age).max().unwrap_or(Duration::ZERO);
    let under_way = stats.in_flight.len() as f64;
    for (name, help, value) in [
        ("requests_in_flight", "Requests of the kernel under way.", under_way),
        (
            "oldest_request_seconds",
            "Age of the oldest of them, or 0; a wait for a lock may be long.",
            oldest.as_secs_f64(),
        ),
        ("known_files", "Files that the kernel knows.", stats.nodes as f64),
        ("open_files", "Files that are open.", stats.handles as f64),
    ] {
        let name = format!("dray_mount_{name}");
        head(text, &name, Gauge, help);
        sample(text, &name, labels, value);
    }
}

/// How it stands with the server.
fn server(report: &MountReport, labels: &str, text: &mut String) {
    let sessions = report.sessions();
    let is_up = |session: &SessionStatus| session.channels.iter().any(|channel| channel.up);
    let sum = |count: fn(&dray_client::ChannelStats) -> u64| -> u64 {
        sessions.iter().flat_map(|session| &session.channels).map(count).sum()
    };
    let connected = sessions.iter().all(is_up);
    for (name, help, kind, value) in [
        ("connected", "1 while each server can be reached.", Gauge, u64::from(connected)),
        ("calls_total", "Calls to the server.", Counter, sum(|one| one.calls)),
        (
            "calls_resent_total",
            "Calls sent again over new connections.",
            Counter,
            sum(|one| one.resent),
        ),
        (
            "reconnections_total",
            "Connections made anew.",
            Counter,
            sum(|one| one.connections.saturating_sub(1)),
        ),
        (
            "sessions_lost_total",
            "Times that the server had forgotten this mount, and its locks with it.",
            Counter,
            sessions.iter().map(|session| session.lost).sum(),
        ),
    ] {
        let name = format!("dray_mount_{name}");
        head(text, &name, kind, help);
        sample(text, &name, labels, value);
    }
}

/// What may not be on media at the server, and what was lost with its power.
fn unsynced(status: &UnsyncedStatus, labels: &str, text: &mut String) {
    for (name, help, kind, value) in [
        ("unsynced_kept_bytes", "Data kept until they are on media.", Gauge, status.kept_bytes),
        ("unsynced_limit_bytes", "Data that may be kept (replay=).", Gauge, status.limit_bytes),
        (
            "unsynced_unkept_bytes",
            "Data not on media that did not fit: they would be lost with the server's power.",
            Gauge,
            status.unkept_bytes,
        ),
        (
            "power_losses_total",
            "Times that the server's machine lost data that were not on media.",
            Counter,
            status.power_losses,
        ),
        ("losses_total", "Files and names lost by that; alarm on any.", Counter, status.losses),
        ("lost_bytes_total", "Data lost by that, as far as counted.", Counter, status.lost_bytes),
    ] {
        let name = format!("dray_mount_{name}");
        head(text, &name, kind, help);
        sample(text, &name, labels, value);
    }
}
