//! What is shown of shares: in JSON, and as metrics.

use std::sync::Arc;

use dray_layers::qos::{ClassReport, QosReport};
use serde_json::{Value, json};

use crate::metrics_http::MetricKind::{Counter, Gauge};
use crate::metrics_http::{head, label_value, sample};
use crate::serve::export_state::ExportState;

/// Classes of an export that are shown; those that have done most.
const SHOWN_MAX: usize = 1000;

/// Of an export; null if it has no rules.
pub fn shown(report: &QosReport) -> Value {
    if !report.is_on {
        return Value::Null;
    }
    let classes = busiest(report);
    json!({
        "window_bytes": report.window_bytes,
        "in_service_bytes": report.in_service_bytes,
        "classes": classes.iter().map(|class| class_shown(class)).collect::<Vec<_>>(),
        "classes_left_out": report.classes.len() - classes.len(),
    })
}

fn busiest(report: &QosReport) -> Vec<&ClassReport> {
    let mut classes: Vec<_> = report.classes.iter().collect();
    if classes.len() > SHOWN_MAX {
        classes.sort_by_key(|class| std::cmp::Reverse((class.counts.bytes, class.counts.calls)));
        classes.truncate(SHOWN_MAX);
    }
    classes
}

fn class_shown(class: &ClassReport) -> Value {
    let round = |number: f64, to: f64| (number * to).round() / to;
    json!({
        "rule": class.rule,
        "class": class.value,
        "within": class.within,
        "weight": f64::from(class.rates.weight_milli) / 1000.0,
        "reservation": class.rates.reservation,
        "reservation_ops": class.rates.reservation_ops,
        "limit": class.rates.limit,
        "limit_ops": class.rates.limit_ops,
        "calls": class.counts.calls,
        "bytes": class.counts.bytes,
        "waits": class.counts.waits,
        "wait_total_s": round(class.counts.wait as f64 / 1e9, 1e6),
        "waiting": class.counts.waiting,
        "bytes_per_s": class.bytes_per_s.round(),
        "calls_per_s": round(class.calls_per_s, 10.0),
        "wait_s": round(class.wait_s, 1e6),
        "share": round(class.share, 1e4),
        "entitled": round(class.entitled, 1e4),
    })
}

type Value64 = fn(&ClassReport) -> f64;

/// By class, for Prometheus.
pub fn metrics(exports: &[Arc<ExportState>], text: &mut String) {
    let reports: Vec<_> = exports.iter().map(|one| (&one.name, one.qos.report())).collect();
    if reports.iter().all(|(_, report)| !report.is_on) {
        return;
    }
    let all: [(&str, &str, _, Value64); 7] = [
        ("bytes_total", "Data of calls that began.", Counter, |class| class.counts.bytes as f64),
        ("calls_total", "Calls that began.", Counter, |class| class.counts.calls as f64),
        ("waits_total", "Calls that waited first.", Counter, |class| class.counts.waits as f64),
        ("wait_seconds_total", "How long they waited.", Counter, |class| {
            class.counts.wait as f64 / 1e9
        }),
        ("waiting", "Calls that wait.", Gauge, |class| class.counts.waiting as f64),
        ("share", "Part of what the export did of late.", Gauge, |class| class.share),
        ("entitled", "Part that the class was entitled to.", Gauge, |class| class.entitled),
    ];
    for (name, help, kind, value) in all {
        let name = format!("dray_qos_{name}");
        head(text, &name, kind, help);
        for (export, report) in &reports {
            for class in busiest(report) {
                let (rule, of) = (&class.rule, label_value(&class.value));
                let labels = format!("export=\"{export}\",rule=\"{rule}\",class=\"{of}\"");
                sample(text, &name, &labels, value(class));
            }
        }
    }
}
