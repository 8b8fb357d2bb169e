//! Lines over named points as SVG, readable on light and dark pages.

use std::fmt::Write;

use super::bars::escaped;
use crate::report::table::figure;

/// One line of a chart.
pub struct Series {
    /// The name of the line in the legend.
    pub name: String,
    /// A value for each point of the chart; none: nothing was measured there.
    pub values: Vec<Option<f64>>,
    /// Figures that somebody else has published are drawn dashed.
    pub published: bool,
}

/// A chart of lines over the same points.
pub struct LineChart<'a> {
    pub title: &'a str,
    /// What the values count.
    pub unit: &'a str,
    /// The names of the points, from left to right, equally far apart.
    pub points: &'a [&'a str],
    pub series: Vec<Series>,
}

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 320.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 200.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 36.0;
/// Lines across the chart.
const STEPS: u32 = 4;

const COLOURS: [&str; 6] = ["#d9822b", "#5c7080", "#6a8caf", "#7fa37f", "#a082b0", "#8a9ba8"];

impl LineChart<'_> {
    /// The chart. Its lowest value is 0.
    pub fn svg(&self) -> String {
        let most = self.top_value();
        let mut body = String::new();
        self.draw_scale(&mut body, most);
        for (index, series) in self.series.iter().enumerate() {
            self.draw_series(&mut body, most, (index, series));
        }
        let title = escaped(&format!("{} ({})", self.title, self.unit));
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
             viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\">\n\
             <style>text{{fill:#57606a}} .h{{font-size:15px;font-weight:bold}} .s{{font-size:11px}} \
             line{{stroke:#8c959f;stroke-width:.5}} \
             @media (prefers-color-scheme: dark){{text{{fill:#adbac7}}}}</style>\n\
             <text x=\"8\" y=\"22\" class=\"h\">{title}</text>\n{body}</svg>\n"
        )
    }

    /// The greatest value, rounded up to what divides well.
    fn top_value(&self) -> f64 {
        let values = self.series.iter().flat_map(|series| series.values.iter().flatten());
        let most = values.copied().fold(f64::MIN_POSITIVE, f64::max);
        let magnitude = 10f64.powf(most.log10().floor());
        let rounded = [1.0, 1.2, 1.6, 2.0, 2.4, 3.2, 4.0, 6.0, 8.0, 10.0];
        rounded.iter().map(|one| one * magnitude).find(|top| *top >= most).unwrap_or(most)
    }

    fn x(&self, point: usize) -> f64 {
        let gaps = self.points.len().saturating_sub(1).max(1);
        LEFT + (WIDTH - LEFT - RIGHT) * point as f64 / gaps as f64
    }

    fn draw_scale(&self, body: &mut String, most: f64) {
        for step in 0..=STEPS {
            let value = most * f64::from(step) / f64::from(STEPS);
            let (y, end) = (y(value, most), WIDTH - RIGHT);
            let _ = writeln!(
                body,
                r#"<line x1="{LEFT}" y1="{y:.1}" x2="{end}" y2="{y:.1}"/><text x="8" y="{:.1}" class="s">{}</text>"#,
                y + 4.0,
                figure(value)
            ); // a String takes all
        }
        for (point, name) in self.points.iter().enumerate() {
            let (x, y) = (self.x(point) - 10.0, HEIGHT - BOTTOM + 18.0);
            let _ =
                writeln!(body, r#"<text x="{x:.1}" y="{y}" class="s">{}</text>"#, escaped(name)); // as above
        }
    }

    fn draw_series(&self, body: &mut String, most: f64, (index, series): (usize, &Series)) {
        let colour = COLOURS[index % COLOURS.len()];
        let dashes = if series.published { r#" stroke-dasharray="5 4""# } else { "" };
        let at = |(point, value): (usize, &Option<f64>)| {
            value.map(|value| format!("{:.1},{:.1}", self.x(point), y(value, most)))
        };
        let points: Vec<String> = series.values.iter().enumerate().filter_map(at).collect();
        let _ = writeln!(
            body,
            r#"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>"#,
            points.join(" ")
        ); // as above
        let (x, y) = (WIDTH - RIGHT + 16.0, TOP + 18.0 * index as f64);
        let _ = writeln!(
            body,
            r#"<path d="M{x} {y} h22" stroke="{colour}" stroke-width="2"{dashes}/><text x="{}" y="{}" class="s">{}</text>"#,
            x + 28.0,
            y + 4.0,
            escaped(&series.name)
        ); // as above
    }
}

fn y(value: f64, most: f64) -> f64 {
    HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / most
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_go_from_the_bottom_to_the_top_and_leave_out_what_is_missing() {
        let series = |name: &str, values: &[Option<f64>], published| Series {
            name: name.into(),
            values: values.to_vec(),
            published,
        };
        let chart = LineChart {
            title: "a < b",
            unit: "x",
            points: &["4k", "8k", "16k"],
            series: vec![
                series("ours", &[Some(0.0), None, Some(10.0)], false),
                series("theirs", &[None, Some(5.0), None], true),
            ],
        };
        let svg = chart.svg();
        assert!(svg.contains("a &lt; b") && svg.contains("stroke-dasharray"), "{svg}");
        assert!(svg.contains(r#"points="60.0,284.0 560.0,44.0""#), "{svg}");
        assert!(svg.contains(r#"points="310.0,164.0""#), "{svg}");
    }
}
