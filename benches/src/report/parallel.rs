//! The figures of `script/bench parallel`: ratios within a round, each with its goal.

use crate::measure::Measure;
use crate::report::Measures;
use crate::report::table::{figure, figure_or_dash, markdown};

/// A figure, what it is made of, and what it should be.
struct Row {
    metric: &'static str,
    /// Arm and metric that is divided, and by which; none: the metric as it was measured.
    ratio: Option<[(&'static str, &'static str); 2]>,
    goal: Goal,
}

enum Goal {
    Least(f64),
    Most(f64),
    /// No goal of its own: this figure stands beside a figure with a goal.
    None,
}

const fn least(
    metric: &'static str,
    over: (&'static str, &'static str),
    under: (&'static str, &'static str),
    goal: f64,
) -> Row {
    Row { metric, ratio: Some([over, under]), goal: Goal::Least(goal) }
}

const WRITE_512K: &str = "file_write_512k.mib_per_s";
const READ_512K: &str = "file_read_512k.mib_per_s";
const WRITE_2K: &str = "file_write_2k.mib_per_s";
const READ_2K: &str = "file_read_2k.mib_per_s";
const WRITE_1M: &str = "file_write_1m.mib_per_s";
const READ_1M: &str = "file_read_1m.mib_per_s";
const READ_128K: &str = "file_read_128k.mib_per_s";
const READ_4K: &str = "file_read_4k.mib_per_s";
const WRITE_128K: &str = "file_write_128k.mib_per_s";
const WRITE_4K: &str = "file_write_4k.mib_per_s";

/// The rows of the issue and of the seed's figures 8 to 11. Requests of 4 KiB are those of a mount with leases. Beside
/// them are those of a mount without leases, with merged writes. Leases and merged writes exclude each other.
const ROWS: [Row; 27] = [
    least("single_vs_server_128k", ("merged", READ_128K), ("disk", READ_128K), 0.95),
    least("single_vs_server_4k", ("leased", READ_4K), ("disk", READ_4K), 0.75),
    Row {
        metric: "single_vs_server_unleased_4k",
        ratio: Some([("merged", READ_4K), ("disk", READ_4K)]),
        goal: Goal::None,
    },
    least("single_vs_server_write_128k", ("merged", WRITE_128K), ("disk", WRITE_128K), 0.95),
    least("single_vs_server_write_4k", ("leased", WRITE_4K), ("disk", WRITE_4K), 0.75),
    Row {
        metric: "single_vs_server_merged_write_4k",
        ratio: Some([("merged", WRITE_4K), ("disk", WRITE_4K)]),
        goal: Goal::None,
    },
    least("stripe2_write_ratio_512k", ("stripe2", WRITE_512K), ("stripe1", WRITE_512K), 1.9),
    least("stripe2_read_ratio_512k", ("stripe2", READ_512K), ("stripe1", READ_512K), 1.9),
    least("stripe2_write_ratio_2k", ("stripe2", WRITE_2K), ("stripe1", WRITE_2K), 0.95),
    least("stripe2_read_ratio_2k", ("stripe2", READ_2K), ("stripe1", READ_2K), 0.95),
    least("stripe4_write_ratio_1m", ("stripe4", WRITE_1M), ("stripe1", WRITE_1M), 3.7),
    least("stripe4_read_ratio_1m", ("stripe4", READ_1M), ("stripe1", READ_1M), 3.7),
    least("flat_20", ("clients20", "read.mib_per_s"), ("clients4", "read.mib_per_s"), 0.95),
    Row {
        metric: "open512_ratio",
        ratio: Some([("opens3", "open.secs"), ("opens1", "open.secs")]),
        goal: Goal::Most(1.2),
    },
    Row { metric: "placement_cpu_us", ratio: None, goal: Goal::Most(1.0) },
    Row { metric: "placement_read_cpu_us", ratio: None, goal: Goal::None },
    Row { metric: "placement_stat_cpu_us", ratio: None, goal: Goal::None },
    Row { metric: "placement_open_cpu_us", ratio: None, goal: Goal::None },
    Row { metric: "placement_unlink_cpu_us", ratio: None, goal: Goal::None },
    Row { metric: "placement_two_servers_read_cpu_us", ratio: None, goal: Goal::None },
    Row { metric: "placement_two_servers_stat_cpu_us", ratio: None, goal: Goal::None },
    Row { metric: "placement_two_servers_open_cpu_us", ratio: None, goal: Goal::None },
    Row { metric: "placement_two_servers_unlink_cpu_us", ratio: None, goal: Goal::None },
    // System calls of the server that no request concerns. One a second by itself would be 0.0001.
    Row { metric: "placement_other_server_calls", ratio: None, goal: Goal::Most(0.01) },
    Row { metric: "failover_s", ratio: None, goal: Goal::Most(5.0) },
    Row { metric: "slow_backing_read_gain", ratio: None, goal: Goal::Least(5.0) },
    Row { metric: "slow_backing_write_gain", ratio: None, goal: Goal::Least(5.0) },
];

/// The arms with placement: projections of one server, and of two servers with files that stay on one of them.
const PLACED_ARMS: [&str; 2] = ["placed", "pair"];
/// The arm that counts what the other one of the two servers does.
const OTHER_SERVER_ARM: &str = "pair_other";

/// Loads of which it is measured what placement adds, and how many requests the kernel makes for each of their
/// operations together. One metric for each of [`PLACED_ARMS`].
struct PlacedLoads {
    metrics: [&'static str; 2],
    loads: &'static [&'static str],
    requests: f64,
}

const PLACED: [PlacedLoads; 4] = [
    PlacedLoads {
        metrics: ["placement_read_cpu_us", "placement_two_servers_read_cpu_us"],
        loads: &["rand4k"],
        requests: 1.0,
    },
    // LOOKUP and GETATTR: the time of birth is asked for.
    PlacedLoads {
        metrics: ["placement_stat_cpu_us", "placement_two_servers_stat_cpu_us"],
        loads: &["stat_cold"],
        requests: 2.0,
    },
    // LOOKUP, OPEN, FLUSH, RELEASE.
    PlacedLoads {
        metrics: ["placement_open_cpu_us", "placement_two_servers_open_cpu_us"],
        loads: &["open_close"],
        requests: 4.0,
    },
    // LOOKUP, CREATE, FLUSH, RELEASE, and then LOOKUP, UNLINK.
    PlacedLoads {
        metrics: ["placement_unlink_cpu_us", "placement_two_servers_unlink_cpu_us"],
        loads: &["create", "unlink"],
        requests: 6.0,
    },
];

impl PlacedLoads {
    /// CPU time of client, servers and program that placement adds to a request, us. The median over the rounds
    /// that this arm and the one without placement have.
    fn added(&self, measures: &Measures, arm: &str) -> Option<f64> {
        let operation = |arm: &str, round: u32| -> Option<f64> {
            let loads = self.loads.iter();
            loads.map(|load| measures.in_round(arm, &format!("{load}.cpu_us"), round)).sum()
        };
        let rounds = measures.rounds(arm, &format!("{}.cpu_us", self.loads[0])).into_iter();
        let added = rounds.filter_map(|(round, _)| {
            Some((operation(arm, round)? - operation("serial", round)?) / self.requests)
        });
        crate::measure::median(added.collect())
    }
}

/// Metrics of what placement adds, each with its value.
fn added_by_placement(measures: &Measures) -> impl Iterator<Item = (&'static str, f64)> {
    let each = PLACED.iter().flat_map(|loads| {
        let arms = loads.metrics.into_iter().zip(PLACED_ARMS);
        arms.map(move |(metric, arm)| (metric, loads, arm))
    });
    each.filter_map(|(metric, loads, arm)| Some((metric, loads.added(measures, arm)?)))
}

impl Row {
    fn value(&self, measures: &Measures) -> Option<f64> {
        match self.ratio {
            Some([over, under]) => measures.ratio(over, under),
            None if self.metric == "placement_cpu_us" => placement_cpu_us(measures),
            None if self.metric == "placement_other_server_calls" => other_server_calls(measures),
            None if self.metric.starts_with("placement_") => {
                let mut added = added_by_placement(measures);
                added.find_map(|(metric, value)| (metric == self.metric).then_some(value))
            }
            None => measures.arms().iter().find_map(|arm| measures.median(arm, self.metric)),
        }
    }

    /// Which arms are divided.
    fn arms(&self) -> String {
        self.ratio
            .map_or_else(|| "-".to_owned(), |[(over, _), (under, _)]| format!("{over} / {under}"))
    }

    fn verdict(&self, value: f64) -> (String, &'static str) {
        let (sign, goal, good) = match self.goal {
            Goal::Least(goal) => (">=", goal, value >= goal),
            Goal::Most(goal) => ("<=", goal, value <= goal),
            Goal::None => return ("-".to_owned(), "-"),
        };
        (format!("{sign} {}", figure(goal)), if good { "yes" } else { "NO" })
    }
}

/// CPU time that placement adds to a request that stays on one server, us. A request is one of the kernel to the
/// mount. Of the kinds that were measured the one counts to which placement adds most, with one server or two.
fn placement_cpu_us(measures: &Measures) -> Option<f64> {
    added_by_placement(measures).map(|(_, value)| value).reduce(f64::max)
}

/// System calls of the server that has none of the files, for each operation of the load with the most.
fn other_server_calls(measures: &Measures) -> Option<f64> {
    let loads = PLACED.iter().flat_map(|loads| loads.loads);
    let calls = loads.filter_map(|load| {
        measures.median(OTHER_SERVER_ARM, &format!("{load}.server_system_calls"))
    });
    calls.reduce(f64::max)
}

/// The figures with goals, and the tables: these, and the rates of each size of request.
pub fn report(measures: &Measures) -> (Vec<Measure>, String) {
    let result = |row: &Row| {
        let (bench, arm, metric) = ("parallel".into(), "result".into(), row.metric.into());
        let value = row.value(measures)?;
        Some(Measure { bench, arm, metric, value, unit: "1".into(), round: 0 })
    };
    (ROWS.iter().filter_map(result).collect(), tables(measures))
}

/// The goals with what was measured, and the rates by size of request.
pub fn tables(measures: &Measures) -> String {
    let mut rows = vec![["metric", "arms", "value", "goal", "met"].map(str::to_owned).to_vec()];
    for row in &ROWS {
        // A file that was kept has results, and medians of the rounds in place of the rounds.
        let kept = measures.median("result", row.metric);
        let Some(value) = kept.or_else(|| row.value(measures)) else { continue };
        let (goal, met) = row.verdict(value);
        rows.push(vec![row.metric.to_owned(), row.arms(), figure(value), goal, met.to_owned()]);
    }
    format!("{}\n{}", markdown(&rows), rates(measures))
}

/// MiB/s by size of request: the seed's figures 8, 9 and 11.
fn rates(measures: &Measures) -> String {
    let arms: Vec<&str> = measures
        .arms()
        .into_iter()
        .filter(|arm| {
            ["disk", "client", "merged", "leased", "stripe1", "stripe2", "stripe4"].contains(arm)
        })
        .collect();
    let mut rows = vec![vec!["MiB/s".to_owned()]];
    rows[0].extend(arms.iter().map(|arm| (*arm).to_owned()));
    let mut seen: Vec<String> = Vec::new();
    for measure in measures.medians() {
        if !measure.metric.starts_with("file_") || !measure.metric.ends_with(".mib_per_s") {
            continue;
        }
        if seen.contains(&measure.metric) {
            continue;
        }
        let mut row = vec![measure.metric.trim_end_matches(".mib_per_s").replace('_', " ")];
        row.extend(arms.iter().map(|arm| figure_or_dash(measures.median(arm, &measure.metric))));
        rows.push(row);
        seen.push(measure.metric);
    }
    if rows.len() > 1 { markdown(&rows) } else { String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(arm: &str, metric: &str, round: u32, value: f64) -> Measure {
        let (bench, unit) = ("parallel".into(), "MiB/s".into());
        Measure { bench, arm: arm.into(), metric: metric.into(), value, unit, round }
    }

    #[test]
    fn ratios_are_taken_within_a_round_and_have_verdicts() {
        let measures = Measures::new(vec![
            line("disk", READ_4K, 0, 100.0),
            line("leased", READ_4K, 0, 80.0),
            line("merged", READ_4K, 0, 50.0),
            line("disk", READ_4K, 1, 10.0),
            line("leased", READ_4K, 1, 7.0),
            line("merged", READ_4K, 1, 6.0),
            line("serial", "rand4k.cpu_us", 0, 30.0),
            line("placed", "rand4k.cpu_us", 0, 30.5),
            line("serial", "create.cpu_us", 0, 130.0),
            line("serial", "unlink.cpu_us", 0, 100.0),
            line("placed", "create.cpu_us", 0, 131.0),
            line("placed", "unlink.cpu_us", 0, 103.5),
            line("placed", "open_close.cpu_us", 0, 100.0),
            line("pair", "rand4k.cpu_us", 0, 30.9),
            line("pair_other", "rand4k.server_system_calls", 0, 0.001),
            line("pair_other", "unlink.server_system_calls", 0, 0.002),
        ]);
        let (lines, table) = report(&measures);
        let of = |name: &str| lines.iter().find(|line| line.metric == name).map(|one| one.value);
        assert_eq!(of("single_vs_server_4k"), Some(0.75));
        assert_eq!(of("single_vs_server_unleased_4k"), Some(0.55));
        assert_eq!(of("placement_read_cpu_us"), Some(0.5));
        assert_eq!(of("placement_unlink_cpu_us"), Some(0.75));
        assert_eq!(of("placement_open_cpu_us"), None, "it was not measured without placement");
        assert_eq!(of("placement_two_servers_read_cpu_us").map(|us| us.round()), Some(1.0));
        assert_eq!(of("placement_cpu_us"), of("placement_two_servers_read_cpu_us"), "the worse");
        assert_eq!(of("placement_other_server_calls"), Some(0.002), "the most");
        assert_eq!(of("flat_20"), None);
        assert!(table.contains("yes") && !table.contains("NO"));
        assert!(table.contains("leased / disk"), "{table}");
    }
}
