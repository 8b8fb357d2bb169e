//! The metrics of a server.

use dray_cluster::EtcdMembership;
use dray_layers::aggregate::AggregateCounts;
use dray_layers::metrics::PrometheusText;
use dray_rpc::server::{LeaseStatus, Membership, OutsideStatus, RecoveryStatus, RefusedStatus};

use crate::metrics_http::MetricKind::{self, Counter, Gauge};
use crate::metrics_http::{head, sample};
use crate::serve::qos;
use crate::status::report::ServerReport;

/// All of them.
pub fn text(report: &ServerReport) -> String {
    let status = report.status();
    let mut calls = PrometheusText::new("dray");
    for export in &report.exports {
        let labels = format!("export=\"{}\"", export.name);
        export.metrics.snapshot().prometheus(&labels, &mut calls);
    }
    let mut text = calls.finish();
    hangs(report, &mut text);
    held_back(report, &mut text);
    mapped_twice(&status.mapped_twice, &mut text);
    leases(&status.leases, &mut text);
    outside(&status.outside, &mut text);
    aggregates(report, &mut text);
    slices(report, &mut text);
    audits(report, &mut text);
    qos::metrics(&report.exports, &mut text);
    recovery(&status.recovery, &mut text);
    refused(&status.refused, &mut text);
    let operations = status.operations.len() + status.operations_left_out;
    let away = status.clients.iter().filter(|client| client.away.is_some()).count();
    let files: usize = status.clients.iter().map(|client| client.files).sum();
    for (name, help, value) in [
        ("dray_clients", "Clients with a session.", status.clients.len()),
        ("dray_clients_away", "Clients that have a session and no connection.", away),
        ("dray_open_files", "Files open at clients.", files),
        ("dray_operations_in_flight", "Operations under way.", operations),
        ("dray_buffer_used_bytes", "Buffers in use.", status.buffer_used_bytes),
        ("dray_buffer_limit_bytes", "Buffers that may be in use.", status.buffer_limit_bytes),
    ] {
        head(&mut text, name, Gauge, help);
        sample(&mut text, name, "", value);
    }
    text
}

/// How long each export's file system has not answered, and how many calls wait for it.
fn hangs(report: &ServerReport, text: &mut String) {
    let all: Vec<_> = report.exports.iter().map(|one| (&one.name, one.hang())).collect();
    for (name, help) in [
        ("dray_hang_seconds", "Time for which the file system below has not answered, or 0."),
        ("dray_hung_calls", "Calls that wait for a file system below that does not answer."),
    ] {
        head(text, name, Gauge, help);
        for (export, hang) in &all {
            let value = match hang {
                Some(hang) if name == "dray_hung_calls" => hang.calls as u64,
                Some(hang) => hang.since.as_secs(),
                None => 0,
            };
            sample(text, name, &format!("export=\"{export}\""), value);
        }
    }
}

/// What clients could not have, so that there is some for others.
fn refused(status: &RefusedStatus, text: &mut String) {
    let name = "dray_refused_total";
    head(text, name, Counter, "Requests refused because the client or its address had its share.");
    for (what, count) in [
        ("files", status.files),
        ("locks", status.locks),
        ("clients", status.clients),
        ("connections", status.connections),
    ] {
        sample(text, name, &format!("what=\"{what}\""), count);
    }
}

/// Since when each export has not been served because of what is at its place.
fn held_back(report: &ServerReport, text: &mut String) {
    let name = "dray_held_back_seconds";
    let help = "Time for which an export's directory has been on another file system, or 0.";
    head(text, name, Gauge, help);
    for export in &report.exports {
        let held = export.starting().filter(|starting| starting.held.is_some());
        // From the first moment on it is not 0.
        let seconds = held.map_or(0, |held| held.since.as_secs().max(1));
        sample(text, name, &format!("export=\"{}\"", export.name), seconds);
    }
}

/// What read-ahead and merged writes have done for the exports that have them.
fn aggregates(report: &ServerReport, text: &mut String) {
    let all: Vec<_> = report
        .exports
        .iter()
        .filter_map(|export| Some((&export.name, export.aggregate_counts()?)))
        .collect();
    for (index, (name, _)) in AggregateCounts::default().named().enumerate() {
        let is_held = name.ends_with("held_bytes") || name.starts_with("pending");
        let (kind, end) = if is_held { (Gauge, "") } else { (Counter, "_total") };
        let name = format!("dray_aggregate_{name}{end}");
        if !all.is_empty() {
            head(text, &name, kind, "Read-ahead and merged writes (see OPERATIONS).");
        }
        for (export, counts) in &all {
            let value = counts.named().nth(index).map_or(0, |(_, value)| value);
            sample(text, &name, &format!("export=\"{export}\""), value);
        }
    }
}

/// The audits of the exports that have one.
fn audits(report: &ServerReport, text: &mut String) {
    let all: Vec<_> = report
        .exports
        .iter()
        .filter_map(|export| Some((&export.name, export.audit_status()?)))
        .collect();
    if all.is_empty() {
        return;
    }
    type Value = fn(&dray_layers::audit::AuditStatus) -> u64;
    let values: [(&str, &str, _, Value); 7] = [
        ("records_total", "Records written into the log.", Counter, |one| one.records),
        ("bytes_total", "Bytes written into the log.", Counter, |one| one.bytes),
        ("dropped_total", "Records that were dropped for want of room.", Counter, |one| {
            one.dropped
        }),
        ("held_total", "Calls that waited for room in the log.", Counter, |one| one.held),
        ("log_bytes", "Size of the log.", Gauge, |one| one.log_bytes),
        ("lag_records", "Records that the slowest consumer has not seen.", Gauge, |one| one.lag),
        ("blocked", "1 while new changes wait for room in the log.", Gauge, |one| {
            one.blocked.into()
        }),
    ];
    for (name, help, kind, value) in values {
        let name = format!("dray_audit_{name}");
        head(text, &name, kind, help);
        for (export, status) in &all {
            sample(text, &name, &format!("export=\"{export}\""), value(status));
        }
    }
}

/// Who is there, and what this server serves, of projections with failover.
fn slices(report: &ServerReport, text: &mut String) {
    let all: Vec<_> = report
        .slices
        .iter()
        .filter_map(|(name, slices)| Some((name, slices, slices.membership()?)))
        .collect();
    if all.is_empty() {
        return;
    }
    let mut samples = |name: &str, help, value: &dyn Fn(&EtcdMembership) -> u64| {
        head(text, name, Gauge, help);
        for (projection, _, membership) in &all {
            sample(text, name, &format!("projection=\"{projection}\""), value(membership));
        }
    };
    samples(
        "dray_cluster_may_answer",
        "0: etcd has not heard of this server for too long.",
        &|one| u64::from(one.lease().holds()),
    );
    samples("dray_cluster_members", "Servers of the projection that are there.", &|one| {
        one.view().members.len() as u64
    });
    samples("dray_cluster_slices_alone", "Slices here without a backup in step.", &|one| {
        let view = one.view();
        let ours = view.slices.values().filter(|(state, _)| state.primary == one.me());
        ours.filter(|(state, _)| !state.in_step).count() as u64
    });
    let name = "dray_slice_served";
    head(text, name, Gauge, "1: this server serves the slice.");
    for served in all.iter().flat_map(|(_, slices, _)| slices.slices()) {
        let (slice, value) = (served.slice.name(), u64::from(served.slice.is_primary()));
        sample(text, name, &format!("slice=\"{slice}\""), value);
    }
}

/// How often two clients did not see each other's stores into mappings of one file.
fn mapped_twice(exports: &[(String, u64)], text: &mut String) {
    let name = "dray_mapped_twice_total";
    head(text, name, Counter, "Files that two clients stored into by shared mappings.");
    for (export, files) in exports {
        sample(text, name, &format!("export=\"{export}\""), *files);
    }
}

/// Leases of the exports that give any, and what became of recalls.
fn leases(exports: &[(String, LeaseStatus)], text: &mut String) {
    if exports.is_empty() {
        return;
    }
    type Value = fn(&LeaseStatus) -> u64;
    let values: [(&str, &str, MetricKind, Value); 7] = [
        ("leases", "Files leased to clients.", Gauge, |leases| leases.held as u64),
        (
            "write_leases",
            "Files of which a client may have data that are not here.",
            Gauge,
            |leases| leases.written as u64,
        ),
        ("lock_leases", "Files on whose locks a client decides.", Gauge, |leases| {
            leases.locks as u64
        }),
        ("lease_recalls_total", "Recalls sent to clients.", Counter, |leases| leases.recalls),
        ("lease_recalls_acknowledged_total", "Recalls that clients answered.", Counter, |leases| {
            leases.acknowledged
        }),
        (
            "lease_recalls_expired_total",
            "Recalls that ended with the leases of their client.",
            Counter,
            |leases| leases.expired,
        ),
        (
            "lease_fences_total",
            "Times that a client did not answer, and lost its leases and connections.",
            Counter,
            |leases| leases.fences,
        ),
    ];
    for (name, help, kind, value) in values {
        let name = format!("dray_{name}");
        head(text, &name, kind, help);
        for (export, leases) in exports {
            sample(text, &name, &format!("export=\"{export}\""), value(leases));
        }
    }
}

/// Changes outside dray, of exports that lease anything.
fn outside(exports: &[(String, OutsideStatus)], text: &mut String) {
    if exports.is_empty() {
        return;
    }
    type Value = fn(&OutsideStatus) -> u64;
    let values: [(&str, &str, Value); 2] = [
        ("changes", "Changes beside dray of files that were leased.", |outside| outside.changes),
        (
            "missed",
            "Times that changes beside dray were missed, and all leases recalled.",
            |outside| outside.missed,
        ),
    ];
    for (name, help, value) in values {
        let name = format!("dray_outside_{name}_total");
        head(text, &name, Counter, help);
        for (export, outside) in exports {
            sample(text, &name, &format!("export=\"{export}\""), value(outside));
        }
    }
}

/// What became of what was not on media when the machine lost power.
fn recovery(status: &RecoveryStatus, text: &mut String) {
    let running = u64::from(status.running);
    for (name, help, kind, value) in [
        ("running", "1 while new work waits for what clients send again.", Gauge, running),
        ("redone_changes_total", "Changes made again.", Counter, status.redone_changes),
        ("redone_bytes_total", "Data written again.", Counter, status.redone_bytes),
        ("losses_total", "Losses that clients reported to applications.", Counter, status.losses),
        ("lost_bytes_total", "Data lost, as far as counted.", Counter, status.lost_bytes),
        (
            "clients_missing_total",
            "Clients that did not return to send the data that they had kept.",
            Counter,
            status.clients_missing,
        ),
    ] {
        let name = format!("dray_recovery_{name}");
        head(text, &name, kind, help);
        sample(text, &name, "", value);
    }
}
