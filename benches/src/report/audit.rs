//! What an audit costs, beside what it may cost.

use crate::report::Measures;
use crate::report::table::{figure, figure_or_dash, markdown};

struct AuditGoal {
    arm: &'static str,
    metric: &'static str,
    unit: &'static str,
    bound: f64,
    /// The bound is the least; else it is the most.
    is_least: bool,
}

const fn at_least(metric: &'static str, unit: &'static str, bound: f64) -> AuditGoal {
    AuditGoal { arm: "log", metric, unit, bound, is_least: true }
}

const fn at_most(
    arm: &'static str,
    metric: &'static str,
    unit: &'static str,
    bound: f64,
) -> AuditGoal {
    AuditGoal { arm, metric, unit, bound, is_least: false }
}

const GOALS: [AuditGoal; 5] = [
    at_most("audited", "audit_create_cost", "share", 0.03),
    at_most("audited", "audit_create_write_close_cost", "share", 0.03),
    at_least("audit_records_per_s", "1/s of CPU", 500_000.0),
    at_least("audit_verify_gb_per_s", "GB/s", 1.0),
    at_most("log", "audit_bytes_per_record", "bytes", 64.0),
];

/// The rows of docs/PERFORMANCE.md: medians of the run.
pub fn table(measures: &Measures) -> String {
    let head = ["metric", "unit", "value", "goal", "met"].map(str::to_owned).to_vec();
    let row = |goal: &AuditGoal| {
        let value = measures.median(goal.arm, goal.metric);
        let sign = if goal.is_least { ">=" } else { "<=" };
        let met = match value {
            None => "-",
            Some(value) if (value >= goal.bound) == goal.is_least || value == goal.bound => "yes",
            Some(_) => "NO",
        };
        vec![
            goal.metric.to_owned(),
            goal.unit.to_owned(),
            figure_or_dash(value),
            format!("{sign} {}", figure(goal.bound)),
            met.to_owned(),
        ]
    };
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(GOALS.iter().map(row)).collect();
    markdown(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::Measure;

    #[test]
    fn figures_stand_beside_their_goals() {
        let one = |arm: &str, metric: &str, value| Measure {
            bench: "audit".into(),
            arm: arm.into(),
            metric: metric.into(),
            value,
            unit: String::new(),
            round: 0,
        };
        let text = table(&Measures::new(vec![
            one("audited", "audit_create_cost", 0.02),
            one("log", "audit_records_per_s", 400_000.0),
            one("log", "audit_bytes_per_record", 29.0),
        ]));
        let row = |metric: &str| text.lines().find(|line| line.contains(metric)).unwrap();
        assert!(row("audit_create_cost").ends_with("| yes |"), "{text}");
        assert!(row("audit_records_per_s").ends_with("| NO  |"), "{text}");
        assert!(row("audit_bytes_per_record").ends_with("| yes |"), "{text}");
        assert!(row("audit_verify_gb_per_s").contains("| -  "), "{text}");
    }
}
