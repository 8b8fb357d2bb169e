//! `serial --against`: what each load costs with this binary and with another one.

use super::Measures;
use super::table::{figure_or_dash, markdown};
use crate::measure::Measure;

/// The arm of the other binary is called as this one's, with this behind it.
pub const OTHER: &str = ".other";
/// What an operation may cost more than with the other binary, as a ratio.
pub const MOST: f64 = 1.05;

const COST: &str = ".cpu_us";
const RATE: &str = ".per_s";

/// One row for each transport and load: CPU time of an operation (application, daemons and the
/// kernel's threads) with both binaries, their ratio and that of the rates, medians over rounds.
pub fn report(measures: &Measures) -> (Vec<Measure>, String) {
    let head = ["transport", "load", "CPU us", "other's", "ratio", "rate"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let mut lines = Vec::new();
    for arm in measures.arms().into_iter().filter(|arm| !arm.ends_with(OTHER)) {
        let other = format!("{arm}{OTHER}");
        for load in loads(measures, arm) {
            let (cost, rate) = (format!("{load}{COST}"), format!("{load}{RATE}"));
            let ratio_of = |metric: &str| measures.ratio((arm, metric), (&other, metric));
            let Some(ratio) = ratio_of(&cost) else { continue };
            let mark = if ratio > MOST { " *" } else { "" };
            rows.push(vec![
                arm.to_owned(),
                load.clone(),
                figure_or_dash(measures.median(arm, &cost)),
                figure_or_dash(measures.median(&other, &cost)),
                format!("{ratio:.3}{mark}"),
                ratio_of(&rate).map_or_else(|| "-".to_owned(), |rate| format!("{rate:.3}")),
            ]);
            lines.push(line(arm, &format!("{load}.cpu_ratio"), ratio));
        }
    }
    let table = markdown(&rows);
    (lines, format!("{table}\n* more than {MOST} times what the other binary takes\n"))
}

fn line(arm: &str, metric: &str, value: f64) -> Measure {
    Measure {
        bench: "against".into(),
        arm: arm.into(),
        metric: metric.into(),
        value,
        unit: "ratio".into(),
        round: 0,
    }
}

/// Loads of an arm, in the order of their first lines.
fn loads(measures: &Measures, arm: &str) -> Vec<String> {
    let mut loads: Vec<String> = Vec::new();
    for measure in measures.0.iter().filter(|measure| measure.arm == arm) {
        if let Some(load) = measure.metric.strip_suffix(COST)
            && !loads.iter().any(|known| known == load)
        {
            loads.push(load.to_owned());
        }
    }
    loads
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(arm: &str, round: u32, value: f64) -> Measure {
        Measure { round, unit: "us".into(), ..line(arm, "create.cpu_us", value) }
    }

    #[test]
    fn a_twentieth_more_is_allowed() {
        let measures = Measures::new(vec![
            cost("uring", 0, 10.5),
            cost("uring.other", 0, 10.0),
            cost("classic", 0, 10.6),
            cost("classic.other", 0, 10.0),
        ]);
        let (_, table) = report(&measures);
        assert!(table.contains("1.050   |") && table.contains("1.060 *"), "{table}");
    }

    #[test]
    fn an_operation_that_costs_more_is_marked() {
        let measures = Measures::new(vec![
            cost("uring", 0, 11.0),
            cost("uring.other", 0, 10.0),
            cost("classic", 0, 10.0),
            cost("classic.other", 0, 10.0),
        ]);
        let (lines, table) = report(&measures);
        assert_eq!(lines.iter().map(|line| line.value).collect::<Vec<_>>(), [1.1, 1.0]);
        assert_eq!(table.matches(" *").count(), 1, "{table}");
        assert!(table.contains("1.100 *"), "{table}");
    }
}
