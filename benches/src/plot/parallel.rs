//! The seed's figures 8 to 11, as dray does them, beside what the seed says of its own.
//!
//! The seed: "Cray DVS", Cray User Group 2008, section 4. Its rates belong to its hardware (a server of
//! 160 MB/s), so both are shown as shares of the server's own rate.

use crate::plot::lines::{LineChart, Series};
use crate::report::Measures;

/// The seed's server and what one client gets of it with small and with large blocks, MB/s.
const SEED_SERVER: f64 = 160.0;
const SEED_CLIENT_4K: f64 = 60.0;
const SEED_CLIENT_128K: f64 = 130.0;
/// One of the four clients that share the seed's server gets so much, MB/s.
const SEED_FOUR_CLIENTS: f64 = 40.0;

const SIZES: [&str; 9] = ["4k", "8k", "16k", "32k", "64k", "128k", "256k", "512k", "1m"];
const STRIPE_SIZES: [&str; 6] = ["2k", "8k", "32k", "128k", "512k", "1m"];
const CLIENTS: [&str; 5] = ["4", "8", "12", "16", "20"];

/// Every chart that the run has figures for, with the name of its file.
pub fn charts(measures: &Measures) -> Vec<(&'static str, String)> {
    let charts = [
        ("parallel-single.svg", single(measures)),
        ("parallel-clients.svg", clients(measures)),
        ("parallel-stripe.svg", stripe(measures)),
    ];
    let measured = |chart: &LineChart<'_>| {
        let ours = chart.series.iter().filter(|series| !series.published);
        ours.flat_map(|series| series.values.iter().flatten()).next().is_some()
    };
    let drawn = charts.into_iter().filter(|(_, chart)| measured(chart));
    drawn.map(|(name, chart)| (name, chart.svg())).collect()
}

/// Figures 8 and 9: one client, by the size of a block. The server's own rate is 1.
fn single(measures: &Measures) -> LineChart<'static> {
    let ours = |arm: &'static str, name: &str, kind: &str| Series {
        name: name.to_owned(),
        values: SIZES
            .iter()
            .map(|size| {
                let metric = format!("file_{kind}_{size}.mib_per_s");
                measures.ratio((arm, &metric), ("disk", &metric))
            })
            .collect(),
        published: false,
    };
    let seed = SIZES.iter().map(|size| match *size {
        "4k" => Some(SEED_CLIENT_4K / SEED_SERVER),
        "128k" | "1m" => Some(SEED_CLIENT_128K / SEED_SERVER),
        _ => None, // the text has no figure
    });
    LineChart {
        title: "One client of one server, by block",
        unit: "share of the rate of the server's disk",
        points: &SIZES,
        series: vec![
            ours("client", "read", "read"),
            ours("client", "write", "write"),
            ours("merged", "read, read ahead", "read"),
            ours("merged", "write, merged", "write"),
            Series { name: "the seed".into(), values: seed.collect(), published: true },
        ],
    }
}

/// Figure 10: clients of one server together, as a share of what four of them get.
fn clients(measures: &Measures) -> LineChart<'static> {
    let of = |count: &&str| {
        let arm = format!("clients{count}");
        measures.ratio((&arm, "read.mib_per_s"), ("clients4", "read.mib_per_s"))
    };
    let seed = vec![Some(4.0 * SEED_FOUR_CLIENTS / SEED_SERVER); CLIENTS.len()];
    LineChart {
        title: "Clients of one server together, by their number",
        unit: "share of what four get",
        points: &CLIENTS,
        series: vec![
            Series {
                name: "read".into(),
                values: CLIENTS.iter().map(of).collect(),
                published: false,
            },
            Series { name: "the seed".into(), values: seed, published: true },
        ],
    }
}

/// Figure 11: one file over the disks of two and four servers, as a multiple of one server's rate. The seed
/// says of its own that two servers are clearly faster with large blocks, without figures.
fn stripe(measures: &Measures) -> LineChart<'static> {
    let ours = |arm: &'static str, name: &str, kind: &str| Series {
        name: name.to_owned(),
        values: STRIPE_SIZES
            .iter()
            .map(|size| {
                let metric = format!("file_{kind}_{size}.mib_per_s");
                measures.ratio((arm, &metric), ("stripe1", &metric))
            })
            .collect(),
        published: false,
    };
    LineChart {
        title: "One file over several servers, by block",
        unit: "multiple of one server's rate",
        points: &STRIPE_SIZES,
        series: vec![
            ours("stripe2", "read, 2 servers", "read"),
            ours("stripe2", "write, 2 servers", "write"),
            ours("stripe4", "read, 4 servers", "read"),
            ours("stripe4", "write, 4 servers", "write"),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::Measure;

    #[test]
    fn only_what_was_measured_is_drawn() {
        let line = |arm: &str, value| Measure {
            bench: "parallel".into(),
            arm: arm.into(),
            metric: "file_read_1m.mib_per_s".into(),
            value,
            unit: "MiB/s".into(),
            round: 0,
        };
        let measures = Measures::new(vec![line("stripe1", 50.0), line("stripe4", 200.0)]);
        let drawn = charts(&measures);
        assert_eq!(drawn.len(), 1);
        let (name, svg) = &drawn[0];
        assert_eq!(*name, "parallel-stripe.svg");
        assert!(svg.contains("560.0,44.0") && svg.contains(">4.00<"), "{svg}");
    }
}
