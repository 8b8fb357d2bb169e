//! Figures from a run: bars as SVG, made by hand, and the README's table.

mod bars;

use std::fs;
use std::path::Path;

use crate::args::Args;
use crate::measure::read_all;
use crate::plot::bars::{Bar, Group, chart};
use crate::report::{Measures, PEER_ROWS, TARGETS, table};
use crate::{Outcome, told};

/// Between these lines of the README the table is written.
const MARKERS: (&str, &str) = ("<!-- bench: begin -->", "<!-- bench: end -->");

/// `plot --serial FILE --peers FILE --figures DIR --readme FILE`. A file of a benchmark
/// that never ran is left out.
pub fn run(args: &Args) -> Outcome {
    let figures = Path::new(args.need("figures")?);
    fs::create_dir_all(figures).map_err(told("figures"))?;
    let mut block = String::new();
    if let Some(measures) = measures(args.need("serial")?)? {
        save(&figures.join("serial.svg"), &serial_chart(&measures))?;
        block.push_str(&serial_table(&measures));
    }
    if let Some(measures) = measures(args.need("peers")?)? {
        save(&figures.join("peers.svg"), &peers_chart(&measures))?;
        block.push_str(&format!("\n{}", peers_table(&measures)));
    }
    if block.is_empty() {
        return Err("there is no run to show: script/bench serial first".to_owned());
    }
    write_block(Path::new(args.need("readme")?), &block)
}

fn measures(path: &str) -> Outcome<Option<Measures>> {
    match Path::new(path).exists() {
        true => read_all(path).map(|all| Some(Measures::new(all))),
        false => Ok(None),
    }
}

fn save(path: &Path, text: &str) -> Outcome {
    fs::write(path, text).map_err(told(&path.display().to_string()))
}

/// Replaces what is between the markers; a README without them is left alone.
fn write_block(readme: &Path, block: &str) -> Outcome {
    let Ok(text) = fs::read_to_string(readme) else { return Ok(()) };
    match with_block(&text, block) {
        Some(text) => save(readme, &text),
        None => Ok(()),
    }
}

fn with_block(text: &str, block: &str) -> Option<String> {
    let (before, rest) = text.split_once(MARKERS.0)?;
    let (_, after) = rest.split_once(MARKERS.1)?;
    Some(format!("{before}{}\n{block}{}{after}", MARKERS.0, MARKERS.1))
}

const TRANSPORTS: [&str; 2] = ["classic", "uring"];

fn serial_chart(measures: &Measures) -> String {
    let rows = [
        ("read, one stream", "stream_read.mib_per_s"),
        ("write, one stream", "stream_write.mib_per_s"),
        ("read, four streams", "stream_read_j4.mib_per_s"),
        ("write, four streams", "stream_write_j4.mib_per_s"),
    ];
    let groups: Vec<Group> = rows
        .iter()
        .map(|(title, metric)| Group {
            title: (*title).to_owned(),
            bars: ["native", "tcp", "uring", "classic"]
                .iter()
                .filter_map(|arm| {
                    Some(Bar { arm: (*arm).to_owned(), value: measures.median(arm, metric)? })
                })
                .collect(),
        })
        .collect();
    chart("1 MiB requests, O_DIRECT, one machine of two cores", "MiB/s", &groups)
}

fn peers_chart(measures: &Measures) -> String {
    let arms = measures.arms();
    let groups: Vec<Group> = PEER_ROWS
        .iter()
        .filter(|row| !row.less_is_better)
        .map(|row| {
            let native = measures.median("native", row.raw).unwrap_or(1.0);
            let mounted = arms.iter().filter(|arm| **arm != "native");
            let bars = mounted.filter_map(|arm| {
                let value = measures.median(arm, row.raw)? / native;
                Some(Bar { arm: (*arm).to_owned(), value: value * 100.0 })
            });
            let title = row.title.split(',').next().unwrap_or(row.title);
            Group { title: row_title(title, row.name), bars: bars.collect() }
        })
        .collect();
    chart("against peers, all storing on the same tmpfs", "% of native tmpfs", &groups)
}

fn row_title(title: &str, name: &str) -> String {
    match name {
        "rand4k_t4" => "random 4 KiB read ×4".to_owned(),
        _ => title.to_owned(),
    }
}

fn serial_table(measures: &Measures) -> String {
    let arms: Vec<&str> =
        TRANSPORTS.into_iter().filter(|arm| measures.arms().contains(arm)).collect();
    let mut rows = vec![vec!["metric".to_owned()]];
    rows[0].extend(arms.iter().map(|arm| (*arm).to_owned()));
    rows[0].extend(["target".to_owned(), "unit".to_owned()]);
    for (metric, unit, target) in TARGETS {
        let mut row = vec![metric.to_owned()];
        row.extend(arms.iter().map(|arm| table::figure_or_dash(measures.median(arm, metric))));
        row.extend([target.text(), unit.to_owned()]);
        rows.push(row);
    }
    table::markdown(&rows)
}

fn peers_table(measures: &Measures) -> String {
    let arms = measures.arms();
    // The derived lines come first and name dray: native is put in front for reading.
    let mut columns: Vec<&str> = vec!["native"];
    columns.extend(arms.iter().filter(|arm| **arm != "native"));
    let mut rows = vec![vec!["median".to_owned()]];
    rows[0].extend(columns.iter().map(|arm| (*arm).to_owned()));
    for row in &PEER_ROWS {
        let mut cells = vec![row.title.to_owned()];
        let value = |arm: &&str| measures.median(arm, row.raw).map(|value| value * row.scale);
        cells.extend(columns.iter().map(|arm| table::figure_or_dash(value(arm))));
        rows.push(cells);
    }
    table::markdown(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_between_the_markers_changes() {
        let text = format!("a\n{}\nold\n{}\nb\n", MARKERS.0, MARKERS.1);
        let new = with_block(&text, "new\n").unwrap();
        assert_eq!(new, format!("a\n{}\nnew\n{}\nb\n", MARKERS.0, MARKERS.1));
        assert_eq!(with_block(&new, "new\n").unwrap(), new);
        assert_eq!(with_block("no markers", "new"), None);
    }
}
