//! The metrics of `script/bench many`, side by side for each number of clients.

use crate::measure::Measure;
use crate::report::Measures;
use crate::report::table::{figure, figure_or_dash, markdown};

/// The results. What so many sessions get together of the server's disk is a ratio to what 4 get in the same
/// run. Beside it stand the fairness of the shares, the memory of one session at rest, and figures of leases.
fn results(measures: &Measures) -> Vec<Measure> {
    let rate = |count: usize| format!("together_by{count}_mib_per_s");
    let of = |count: usize, metric: &str| measures.median(&format!("n{count}"), metric);
    let flat = |count: usize| {
        let arms = [10_000, 4000, 2000, 1000].into_iter().filter(|arm| *arm >= count);
        let ratio = |arm: usize| Some(of(arm, &rate(count))? / of(arm, &rate(4))?);
        arms.filter_map(ratio).next()
    };
    let rows = [
        ("flat_1000", flat(1000), "ratio"),
        ("flat_10000", flat(10_000), "ratio"),
        ("jain_10000", of(10_000, "together_by10000_jain"), "ratio"),
        ("kib_per_client_10000", of(10_000, "idle_server_kib_per_client"), "KiB"),
        ("bytes_per_lease_10000", of(10_000, "lease_server_bytes"), "B"),
        ("leased_wakeups_10s_10000", of(10_000, "leased_server_wakeups_10s"), "1/10s"),
        ("recall_all_ms_10000", of(10_000, "recall_all_ms"), "ms"),
    ];
    let line = |(metric, value, unit): (&str, Option<f64>, &str)| {
        let (bench, arm, metric) = ("many".into(), "result".into(), metric.into());
        Some(Measure { bench, arm, metric, value: value?, unit: unit.into(), round: 0 })
    };
    rows.into_iter().filter_map(line).collect()
}

/// The results, and the table.
pub fn report(measures: &Measures) -> (Vec<Measure>, String) {
    let arms = measures.arms();
    let medians = measures.medians();
    let mut head = vec!["metric".to_owned(), "unit".to_owned()];
    head.extend(arms.iter().map(|arm| arm.to_string()));
    let mut rows = vec![head];
    let mut seen: Vec<&str> = Vec::new();
    for measure in &medians {
        if seen.contains(&&measure.metric[..]) {
            continue;
        }
        seen.push(&measure.metric);
        let mut row = vec![measure.metric.clone(), measure.unit.clone()];
        row.extend(arms.iter().map(|arm| match measures.median(arm, &measure.metric) {
            Some(value) if measure.unit == "1" => figure(value.round()),
            value => figure_or_dash(value),
        }));
        rows.push(row);
    }
    let results = results(measures);
    for result in &results {
        let mut row = vec![result.metric.clone(), result.unit.clone()];
        row.extend(arms.iter().map(|_| String::new()));
        row.push(figure(result.value));
        rows.push(row);
    }
    if !results.is_empty() {
        rows[0].push("result".to_owned());
    }
    (results, markdown(&rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_of_clients_has_its_column() {
        let line = |arm: &str, metric: &str, value| Measure {
            bench: "many".into(),
            arm: arm.into(),
            metric: metric.into(),
            value,
            unit: "us".into(),
            round: 0,
        };
        let measures = Measures::new(vec![
            line("n500", "a", 1.0),
            line("n1000", "a", 2.0),
            line("n1000", "b", 3.0),
        ]);
        let (lines, table) = report(&measures);
        assert!(lines.is_empty());
        let rows: Vec<Vec<&str>> =
            table.lines().map(|line| line.split('|').map(str::trim).collect()).collect();
        assert_eq!(rows[0], ["", "metric", "unit", "n500", "n1000", ""]);
        assert_eq!(rows[2], ["", "a", "us", "1.00", "2.00", ""]);
        assert_eq!(rows[3], ["", "b", "us", "-", "3.00", ""]);
    }
}
