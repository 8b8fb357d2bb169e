//! From the raw lines of a run to medians, ratios and verdicts.

mod against;
mod many;
mod parallel;
mod peers;
mod serial;
mod sums;
pub(crate) mod table;

use std::fs::File;
use std::io::Write;

use crate::args::BenchArgs;
use crate::measure::{Measure, median, read_all};
use crate::{CommandResult, context};

pub use parallel::tables as parallel_tables;
pub use peers::{ROWS as PEER_ROWS, ratio_metric};
pub use serial::{GOALS, Goal, GoalVerdict, value};
pub use sums::table as parts_table;

/// The measures of a run, to be asked for.
pub struct Measures(Vec<Measure>);

impl Measures {
    /// Of these lines.
    pub fn new(measures: Vec<Measure>) -> Measures {
        Measures(measures)
    }

    /// Arms, in the order of their first lines.
    pub fn arms(&self) -> Vec<&str> {
        let mut arms: Vec<&str> = Vec::new();
        for measure in &self.0 {
            if !arms.contains(&&measure.arm[..]) {
                arms.push(&measure.arm);
            }
        }
        arms
    }

    /// One figure a round, by round.
    pub fn rounds(&self, arm: &str, metric: &str) -> Vec<(u32, f64)> {
        let same = self.0.iter().filter(|m| m.arm == arm && m.metric == metric);
        same.map(|measure| (measure.round, measure.value)).collect()
    }

    /// The figure of one round.
    pub fn in_round(&self, arm: &str, metric: &str, round: u32) -> Option<f64> {
        let rounds = self.rounds(arm, metric);
        rounds.into_iter().find_map(|(other, value)| (other == round).then_some(value))
    }

    /// The median over rounds.
    pub fn median(&self, arm: &str, metric: &str) -> Option<f64> {
        median(self.rounds(arm, metric).into_iter().map(|(_, value)| value).collect())
    }

    /// The median over rounds of the ratio within a round.
    pub fn ratio(&self, over: (&str, &str), under: (&str, &str)) -> Option<f64> {
        let ratios = self.rounds(over.0, over.1).into_iter().filter_map(|(round, over)| {
            let under = self.in_round(under.0, under.1, round)?;
            (under > 0.0).then(|| over / under)
        });
        median(ratios.collect())
    }

    /// The median of every metric of every arm, in the order of their first lines.
    pub fn medians(&self) -> Vec<Measure> {
        let mut seen: Vec<(&str, &str)> = Vec::new();
        let mut medians = Vec::new();
        for measure in &self.0 {
            let key = (&measure.arm[..], &measure.metric[..]);
            if !seen.contains(&key) {
                seen.push(key);
                let value = self.median(key.0, key.1).unwrap_or(measure.value);
                medians.push(Measure { value, round: 0, ..measure.clone() });
            }
        }
        medians
    }
}

/// Figures that say whose CPU time it was: kept in the file, too much for the screen.
const DETAILS: [&str; 5] = [
    ".cpu_app_us",
    ".cpu_client_us",
    ".cpu_server_us",
    ".cpu_kernel_threads_us",
    ".cpu_machine_us",
];

/// `report --bench serial|against|peers|many|parallel --raw FILE --out FILE`: the lines go to standard output
/// and into the file, the table to standard output behind them.
pub fn run(args: &BenchArgs) -> CommandResult {
    let measures = Measures::new(read_all(args.need("raw")?)?);
    let (mut lines, table) = match args.need("bench")? {
        "serial" => serial::report(&measures),
        "peers" => peers::report(&measures),
        "many" => many::report(&measures),
        "parallel" => parallel::report(&measures),
        "against" => against::report(&measures),
        other => return Err(format!("no benchmark is called {other}")),
    };
    lines.extend(measures.medians());
    let path = args.need("out")?;
    let mut file = File::create(path).map_err(context(path))?;
    for measure in &lines {
        if !DETAILS.iter().any(|detail| measure.metric.ends_with(detail)) {
            println!("{}", measure.line());
        }
        writeln!(file, "{}", measure.line()).map_err(context(path))?;
    }
    println!("\n{table}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(arm: &str, metric: &str, round: u32, value: f64) -> Measure {
        Measure {
            bench: "serial".into(),
            arm: arm.into(),
            metric: metric.into(),
            value,
            unit: "x".into(),
            round,
        }
    }

    #[test]
    fn ratios_are_taken_within_a_round() {
        let measures = Measures::new(vec![
            line("tcp", "m", 0, 10.0),
            line("a", "m", 0, 5.0),
            line("tcp", "m", 1, 100.0),
            line("a", "m", 1, 50.0),
            line("a", "m", 2, 7.0),
        ]);
        assert_eq!(measures.ratio(("a", "m"), ("tcp", "m")), Some(0.5));
        assert_eq!(measures.median("a", "m"), Some(7.0));
        assert_eq!(measures.ratio(("a", "m"), ("none", "m")), None);
        assert_eq!(measures.arms(), ["tcp", "a"]);
    }
}
