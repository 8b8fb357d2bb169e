//! The metrics of `script/bench peers`: dray over each peer, and who is the best of them.

use crate::measure::Measure;
use crate::report::Measures;
use crate::report::table::{figure, figure_or_dash, markdown};

/// One workload as peers are compared by it.
pub struct Row {
    /// In the metric's name: `PEER_NAME_ratio`.
    pub name: &'static str,
    /// Raw metric.
    pub raw: &'static str,
    /// What the raw metric is multiplied by for the table.
    pub scale: f64,
    /// For people.
    pub title: &'static str,
    /// Less is better (the ratio is turned over).
    pub less_is_better: bool,
}

const fn row(name: &'static str, raw: &'static str, scale: f64, title: &'static str) -> Row {
    Row { name, raw, scale, title, less_is_better: false }
}

const fn cost(name: &'static str, raw: &'static str, scale: f64, title: &'static str) -> Row {
    Row { name, raw, scale, title, less_is_better: true }
}

/// GiB in GB, and seconds in milliseconds.
const S_PER_GIB: f64 = 1.073_741_824 / 1000.0;

/// The rows of the comparison.
pub const ROWS: [Row; 12] = [
    row("stream_write", "stream_write.mib_per_s", 1.0, "write 1 MiB direct, MiB/s"),
    row("stream_read", "stream_read.mib_per_s", 1.0, "read 1 MiB direct, MiB/s"),
    row("stream4_write", "stream_write_j4.mib_per_s", 1.0, "4 jobs write, MiB/s"),
    row("stream4_read", "stream_read_j4.mib_per_s", 1.0, "4 jobs read, MiB/s"),
    row("rand4k", "rand4k.per_s", 1e-3, "random 4 KiB read, k/s"),
    row("rand4k_t4", "rand4k_j4.per_s", 1e-3, "random 4 KiB read, 4 jobs, k/s"),
    row("create", "create.per_s", 1e-3, "create, k/s"),
    row("cold_stat", "stat_cold.per_s", 1e-3, "cold stat, k/s"),
    row("open_close", "open_close.per_s", 1e-3, "open+close, k/s"),
    row("unlink", "unlink.per_s", 1e-3, "unlink, k/s"),
    cost("write_cpu", "stream_write.cpu_ms_per_gb", S_PER_GIB, "CPU s per GiB written"),
    cost("read_cpu", "stream_read.cpu_ms_per_gb", S_PER_GIB, "CPU s per GiB read"),
];

/// Peers that are mounted through FUSE; the others have no kernel between.
const FUSE_PEERS: [&str; 3] = ["moosefs", "glusterfs", "sshfs"];
/// What dray is to be ahead by, in all rows but three.
const AHEAD: f64 = 1.6;

/// Name of the metric that compares dray with `peer`.
pub fn ratio_metric(peer: &str, row: &Row) -> String {
    format!("{peer}_{}_ratio", row.name)
}

fn ratio(measures: &Measures, peer: &str, row: &Row) -> Option<f64> {
    match row.less_is_better {
        false => measures.ratio(("dray", row.raw), (peer, row.raw)),
        true => measures.ratio((peer, row.raw), ("dray", row.raw)),
    }
}

/// The ratios as lines, and the table.
pub fn report(measures: &Measures) -> (Vec<Measure>, String) {
    let arms = measures.arms();
    let peers: Vec<&str> =
        arms.iter().copied().filter(|arm| !["native", "dray"].contains(arm)).collect();
    let mut lines = Vec::new();
    for peer in &peers {
        for row in &ROWS {
            lines.extend(ratio(measures, peer, row).map(|value| Measure {
                bench: "peers".to_owned(),
                arm: "dray".to_owned(),
                metric: ratio_metric(peer, row),
                value,
                unit: "ratio".to_owned(),
                round: 0,
            }));
        }
    }
    (lines, table(measures, &arms, &peers))
}

fn table(measures: &Measures, arms: &[&str], peers: &[&str]) -> String {
    let mut rows = vec![vec!["median".to_owned()]];
    rows[0].extend(arms.iter().map(|arm| (*arm).to_owned()));
    rows[0].extend(["dray over best FUSE peer".to_owned(), String::new()]);
    let (mut ahead, mut far, mut judged) = (0, 0, 0);
    for row in &ROWS {
        let mut cells = vec![row.title.to_owned()];
        let value = |arm: &&str| measures.median(arm, row.raw).map(|value| value * row.scale);
        cells.extend(arms.iter().map(|arm| figure_or_dash(value(arm))));
        let fuse = peers.iter().filter(|peer| FUSE_PEERS.contains(peer));
        let best = fuse
            .filter_map(|peer| Some((ratio(measures, peer, row)?, *peer)))
            .min_by(|left, right| left.0.total_cmp(&right.0));
        if let Some((ratio, peer)) = best {
            judged += 1;
            ahead += usize::from(ratio >= 1.0);
            far += usize::from(ratio >= AHEAD);
            cells.push(format!("{} ({peer})", figure(ratio)));
            cells.push(if ratio >= 1.0 { "pass" } else { "MISS" }.to_owned());
        }
        rows.push(cells);
    }
    let mut text = markdown(&rows);
    text.push_str(&format!(
        "\nAhead of the best FUSE-mounted peer in {ahead} of {judged} rows (target: all), by \
         {AHEAD} times or more in {far} (target: all but three).\n"
    ));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn less_cpu_is_better_and_the_best_peer_decides() {
        let line = |arm: &str, metric: &str, value| Measure {
            bench: "peers".into(),
            arm: arm.into(),
            metric: metric.into(),
            value,
            unit: "x".into(),
            round: 0,
        };
        let measures = Measures::new(vec![
            line("dray", "stream_read.cpu_ms_per_gb", 400.0),
            line("sshfs", "stream_read.cpu_ms_per_gb", 1000.0),
            line("moosefs", "stream_read.cpu_ms_per_gb", 2000.0),
            line("ganesha", "stream_read.cpu_ms_per_gb", 200.0),
        ]);
        let (lines, table) = report(&measures);
        let value = |name| lines.iter().find(|line| line.metric == name).unwrap().value;
        assert_eq!(value("sshfs_read_cpu_ratio"), 2.5);
        assert_eq!(value("ganesha_read_cpu_ratio"), 0.5);
        assert!(table.contains("2.50 (sshfs)"), "{table}");
        assert!(table.contains("in 1 of 1 rows"), "{table}");
    }
}
