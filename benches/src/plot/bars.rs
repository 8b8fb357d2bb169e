//! Grouped bars as SVG, readable on light and dark pages.

use std::fmt::Write;

use crate::report::table::figure;

/// One bar.
pub struct ChartBar {
    /// The arm that the bar belongs to. The arm decides the colour.
    pub arm: String,
    /// How long, in the chart's unit.
    pub value: f64,
}

/// Bars that are compared with each other; each group has a scale of its own.
pub struct Group {
    /// What is compared.
    pub title: String,
    /// In the order drawn.
    pub bars: Vec<ChartBar>,
}

const WIDTH: usize = 760;
const LABEL_WIDTH: usize = 250;
const VALUE_WIDTH: usize = 80;
const BAR_HEIGHT: usize = 14;
const GROUP_GAP: usize = 12;
const TOP: usize = 44;

/// Colours of arms; others get a grey.
const COLOURS: [(&str, &str); 8] = [
    ("dray", "#d9822b"),
    ("uring", "#d9822b"),
    ("classic", "#e8b070"),
    ("native", "#8a9ba8"),
    ("tcp", "#5c7080"),
    ("moosefs", "#6a8caf"),
    ("glusterfs", "#7fa37f"),
    ("sshfs", "#a082b0"),
];

fn colour(arm: &str) -> &'static str {
    COLOURS.iter().find(|(known, _)| *known == arm).map_or("#9aa0a6", |(_, colour)| colour)
}

pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// A chart of horizontal bars. The longest bar of each group fills the width.
pub fn chart(title: &str, unit: &str, groups: &[Group]) -> String {
    let mut body = String::new();
    let mut y = TOP;
    for group in groups.iter().filter(|group| !group.bars.is_empty()) {
        let most = group.bars.iter().map(|bar| bar.value).fold(f64::MIN_POSITIVE, f64::max);
        text(&mut body, (8, y + BAR_HEIGHT - 3), "t", &group.title);
        for bar in &group.bars {
            let room = (WIDTH - LABEL_WIDTH - VALUE_WIDTH) as f64;
            let length = (bar.value / most * room).max(1.0);
            text(&mut body, (LABEL_WIDTH - 70, y + BAR_HEIGHT - 3), "s", &bar.arm);
            let _ = writeln!(
                body,
                r#"<rect x="{LABEL_WIDTH}" y="{y}" width="{length:.1}" height="{}" fill="{}"/>"#,
                BAR_HEIGHT - 2,
                colour(&bar.arm)
            ); // a String takes all
            let end = LABEL_WIDTH + length as usize + 6;
            text(&mut body, (end, y + BAR_HEIGHT - 3), "s", &figure(bar.value));
            y += BAR_HEIGHT;
        }
        y += GROUP_GAP;
    }
    let mut head = String::new();
    text(&mut head, (8, 22), "h", &format!("{title} ({unit})"));
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{y}\" \
         viewBox=\"0 0 {WIDTH} {y}\" font-family=\"sans-serif\">\n\
         <style>text{{fill:#57606a}} .h{{font-size:15px;font-weight:bold}} \
         .t{{font-size:12px}} .s{{font-size:11px}} \
         @media (prefers-color-scheme: dark){{text{{fill:#adbac7}}}}</style>\n{head}{body}</svg>\n"
    )
}

fn text(out: &mut String, (x, y): (usize, usize), class: &str, text: &str) {
    let text = escaped(text);
    let _ = writeln!(out, r#"<text x="{x}" y="{y}" class="{class}">{text}</text>"#); // as above
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_bar_fills_the_width_and_text_is_escaped() {
        let bar = |arm: &str, value| ChartBar { arm: arm.into(), value };
        let bars = vec![bar("native", 200.0), bar("uring", 100.0)];
        let svg = chart("a < b", "MiB/s", &[Group { title: "read & write".into(), bars }]);
        assert!(svg.contains("a &lt; b") && svg.contains("read &amp; write"), "{svg}");
        assert!(svg.contains("width=\"430.0\"") && svg.contains("width=\"215.0\""), "{svg}");
    }
}
