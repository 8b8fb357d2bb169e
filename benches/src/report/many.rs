//! The metrics of `script/bench many`, side by side for each number of clients.

use crate::measure::Measure;
use crate::report::Measures;
use crate::report::table::{figure, figure_or_dash, markdown};

/// No lines beside the medians, and the table.
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
    (Vec::new(), markdown(&rows))
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
