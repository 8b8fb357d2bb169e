//! One measured figure, and the lines that figures are kept in.

use crate::CommandResult;
use crate::args::BenchArgs;
use crate::json::{Value, quoted};

/// One figure of one arm in one round.
#[derive(Clone, Debug, PartialEq)]
pub struct Measure {
    /// Which benchmark: `serial`, `peers`, `counters`.
    pub bench: String,
    /// What was measured: `tcp`, `native`, `classic`, `uring`, a peer's name.
    pub arm: String,
    /// Name of the metric.
    pub metric: String,
    /// The figure.
    pub value: f64,
    /// The unit of the value.
    pub unit: String,
    /// Round or pass, from 0.
    pub round: u32,
}

impl Measure {
    /// As one line of JSON.
    pub fn line(&self) -> String {
        format!(
            r#"{{"bench":{},"arm":{},"metric":{},"value":{},"unit":{},"round":{}}}"#,
            quoted(&self.bench),
            quoted(&self.arm),
            quoted(&self.metric),
            rounded(self.value),
            quoted(&self.unit),
            self.round
        )
    }

    /// From a line of JSON.
    pub fn parse(line: &str) -> Option<Measure> {
        let value = Value::parse(line)?;
        let text = |key| value.get(key).and_then(Value::text).map(str::to_owned);
        Some(Measure {
            bench: text("bench")?,
            arm: text("arm")?,
            metric: text("metric")?,
            value: value.get("value")?.number()?,
            unit: text("unit")?,
            round: value.get("round").and_then(Value::number).unwrap_or(0.0) as u32,
        })
    }
}

/// Prints measures, each as a line: those of one command, that is of one arm in one round.
pub struct Printer {
    /// As in [`Measure`].
    pub bench: String,
    /// As in [`Measure`].
    pub arm: String,
    /// As in [`Measure`].
    pub round: u32,
}

impl Printer {
    /// As `--bench`, `--arm` and `--round` say. Errors: a round that is no number.
    pub fn new(args: &BenchArgs) -> CommandResult<Printer> {
        let text = |name, default: &str| args.get(name).unwrap_or(default).to_owned();
        let round = args.number("round", 0)?;
        Ok(Printer { bench: text("bench", "serial"), arm: text("arm", "native"), round })
    }

    /// Prints one figure.
    pub fn put(&self, metric: &str, value: f64, unit: &str) {
        let measure = Measure {
            bench: self.bench.clone(),
            arm: self.arm.clone(),
            metric: metric.to_owned(),
            value,
            unit: unit.to_owned(),
            round: self.round,
        };
        println!("{}", measure.line());
    }
}

/// All measures in a file of such lines; a line that is none is an error.
pub fn read_all(path: &str) -> CommandResult<Vec<Measure>> {
    let text = std::fs::read_to_string(path).map_err(crate::context(path))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(index, line)| {
            Measure::parse(line).ok_or_else(|| format!("{path}:{}: no measure", index + 1))
        })
        .collect()
}

/// The median of `values`; none of nothing.
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

/// With four significant digits, which is more than any of these figures deserves.
pub fn rounded(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return 0.0;
    }
    let scale = 10f64.powi(3 - value.abs().log10().floor() as i32);
    let rounded = (value * scale).round() / scale;
    if rounded.is_finite() { rounded } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_back_as_they_were() {
        let measure = Measure {
            bench: "serial".into(),
            arm: "uring".into(),
            metric: "rand4k_cpu_us".into(),
            value: 28.25,
            unit: "us".into(),
            round: 2,
        };
        assert_eq!(Measure::parse(&measure.line()), Some(measure));
    }

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(vec![]), None);
    }

    #[test]
    fn rounding_keeps_four_digits() {
        assert_eq!(
            [rounded(123_456.0), rounded(0.012_345), rounded(7.0)],
            [123_500.0, 0.01235, 7.0]
        );
    }
}
