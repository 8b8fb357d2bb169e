//! The least cost of an operation: the sum of the parts that dray stands on, each measured alone in the
//! same run. Goals are ratios to that sum, so that they hold on any machine.

use crate::measure::median;
use crate::report::Measures;
use crate::report::table::{figure_or_dash, markdown};

/// The parts of one load.
pub struct LoadParts {
    /// For people.
    title: &'static str,
    /// The load, on a mount and on the bare tmpfs.
    name: &'static str,
    /// The load of the raw connection that one round trip is.
    tcp: &'static str,
    /// How many round trips the load makes.
    round_trips: f64,
    /// The load that makes the same requests of FUSE on a mount of the null file system.
    fuse: &'static str,
    /// The null file system makes up 1 MiB of zeros for it, which is no part of FUSE.
    makes_zeros: bool,
}

const PING_PONG: &str = "pingpong_same_cpu";

/// A read of 1 MiB.
pub const READ: LoadParts = stream("read 1 MiB", "stream_read", true);
/// A write of 1 MiB.
pub const WRITE: LoadParts = stream("write 1 MiB", "stream_write", false);
/// A read of 4 KiB, one at a time.
pub const SMALL_READ: LoadParts = small("read 4 KiB", "rand4k", 1.0, "rand4k");
/// LOOKUP, CREATE, FLUSH, RELEASE; the last two without a round trip. The null file system has every name,
/// so that an open stands for the create.
pub const CREATE: LoadParts = small("create, close", "create", 2.0, "open_close");
/// LOOKUP, OPEN, FLUSH, RELEASE; the lookup opens.
pub const OPEN_CLOSE: LoadParts = small("open, close", "open_close", 1.0, "open_close");
/// LOOKUP and UNLINK; of the null file system a stat, which is two requests, too.
pub const UNLINK: LoadParts = small("unlink", "unlink", 2.0, "stat_cold");

const LOADS: [&LoadParts; 6] = [&READ, &WRITE, &SMALL_READ, &CREATE, &OPEN_CLOSE, &UNLINK];

const fn stream(title: &'static str, name: &'static str, makes_zeros: bool) -> LoadParts {
    LoadParts { title, name, tcp: name, round_trips: 1.0, fuse: name, makes_zeros }
}

const fn small(
    title: &'static str,
    name: &'static str,
    round_trips: f64,
    fuse: &'static str,
) -> LoadParts {
    LoadParts { title, name, tcp: PING_PONG, round_trips, fuse, makes_zeros: false }
}

/// CPU time of one operation, us.
fn cost(load: &str) -> String {
    format!("{load}.cpu_us")
}

impl LoadParts {
    fn tcp(&self, cpu: &dyn Fn(&str, &str) -> Option<f64>) -> Option<f64> {
        Some(self.round_trips * cpu("tcp", self.tcp)?)
    }

    fn fuse(&self, arm: &str, cpu: &dyn Fn(&str, &str) -> Option<f64>) -> Option<f64> {
        let all = cpu(&format!("null.{arm}"), self.fuse)?;
        let zeros = if self.makes_zeros { cpu("native", "zeros")? } else { 0.0 };
        Some((all - zeros).max(0.0))
    }

    fn sum(&self, arm: &str, cpu: &dyn Fn(&str, &str) -> Option<f64>) -> Option<f64> {
        Some(self.tcp(cpu)? + cpu("native", self.name)? + self.fuse(arm, cpu)?)
    }
}

/// CPU of `load` on the mount `arm` as a ratio to the sum of its parts. It is the median over
/// rounds of the ratio within a round.
pub fn over_sum(measures: &Measures, arm: &str, load: &LoadParts) -> Option<f64> {
    ratio_to_sum(measures, arm, arm, load)
}

/// The same of a relay over the transport `arm` (`crate::relay`). It does these parts in one request and nothing
/// else. So it shows what the sum leaves out, such as caches that are cold after another part.
pub fn relay_over_sum(measures: &Measures, arm: &str, load: &LoadParts) -> Option<f64> {
    ratio_to_sum(measures, &format!("relay.{arm}"), arm, load)
}

fn ratio_to_sum(measures: &Measures, of: &str, arm: &str, load: &LoadParts) -> Option<f64> {
    let ratios = measures.rounds(of, &cost(load.name)).into_iter().filter_map(|(round, cpu)| {
        let sum = load.sum(arm, &|arm, name| measures.in_round(arm, &cost(name), round))?;
        (sum > 0.0).then(|| cpu / sum)
    });
    median(ratios.collect())
}

/// The parts, their sum and what dray takes, us of CPU, medians.
pub fn table(measures: &Measures, arms: &[&str]) -> String {
    let cpu = |arm: &str, name: &str| measures.median(arm, &cost(name));
    let mut rows = vec![["CPU, us", "TCP", "tmpfs"].map(str::to_owned).to_vec()];
    for arm in arms {
        rows[0].extend([format!("FUSE, {arm}"), "sum".to_owned(), format!("dray, {arm}")]);
    }
    for load in LOADS {
        let mut row = vec![load.title.to_owned()];
        row.extend([load.tcp(&cpu), cpu("native", load.name)].map(figure_or_dash));
        for arm in arms {
            let cells = [load.fuse(arm, &cpu), load.sum(arm, &cpu), cpu(arm, load.name)];
            row.extend(cells.map(figure_or_dash));
        }
        rows.push(row);
    }
    markdown(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::Measure;

    fn cpu(arm: &str, load: &str, round: u32, value: f64) -> Measure {
        Measure {
            bench: "serial".into(),
            arm: arm.into(),
            metric: cost(load),
            value,
            unit: "us".into(),
            round,
        }
    }

    #[test]
    fn the_sum_is_of_the_same_round() {
        let measures = Measures::new(vec![
            cpu("tcp", PING_PONG, 0, 14.0),
            cpu("native", "rand4k", 0, 1.0),
            cpu("null.uring", "rand4k", 0, 10.0),
            cpu("uring", "rand4k", 0, 30.0),
            // Everything takes twice as long in this round.
            cpu("tcp", PING_PONG, 1, 28.0),
            cpu("native", "rand4k", 1, 2.0),
            cpu("null.uring", "rand4k", 1, 20.0),
            cpu("uring", "rand4k", 1, 60.0),
        ]);
        assert_eq!(over_sum(&measures, "uring", &SMALL_READ), Some(1.2));
        assert_eq!(over_sum(&measures, "classic", &SMALL_READ), None);
    }

    #[test]
    fn a_relay_is_measured_by_the_sum_of_its_transport() {
        let measures = Measures::new(vec![
            cpu("tcp", PING_PONG, 0, 14.0),
            cpu("native", "rand4k", 0, 1.0),
            cpu("null.uring", "rand4k", 0, 10.0),
            cpu("relay.uring", "rand4k", 0, 28.75),
        ]);
        assert_eq!(relay_over_sum(&measures, "uring", &SMALL_READ), Some(1.15));
        assert_eq!(relay_over_sum(&measures, "classic", &SMALL_READ), None);
    }

    #[test]
    fn zeros_that_are_made_up_are_no_part_of_fuse() {
        let measures = Measures::new(vec![
            cpu("tcp", "stream_read", 0, 200.0),
            cpu("native", "stream_read", 0, 100.0),
            cpu("native", "zeros", 0, 50.0),
            cpu("null.uring", "stream_read", 0, 150.0),
            cpu("uring", "stream_read", 0, 600.0),
        ]);
        assert_eq!(over_sum(&measures, "uring", &READ), Some(1.5));
        let table = table(&measures, &["uring"]);
        let row = table.lines().find(|row| row.contains("read 1 MiB")).unwrap();
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        assert_eq!(cells, ["", "read 1 MiB", "200", "100", "100", "400", "600", ""], "{table}");
    }

    #[test]
    fn a_create_is_two_round_trips() {
        let measures = Measures::new(vec![
            cpu("tcp", PING_PONG, 0, 14.0),
            cpu("native", "create", 0, 6.0),
            cpu("null.uring", "open_close", 0, 36.0),
            cpu("uring", "create", 0, 105.0),
        ]);
        assert_eq!(over_sum(&measures, "uring", &CREATE), Some(1.5));
    }
}
