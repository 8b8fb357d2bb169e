//! Tables in Markdown, padded, so that they read well in a terminal too.

/// Rows of cells; the first row is the head.
pub fn markdown(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max()
    };
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0).max(3)).collect();
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        for (column, width) in widths.iter().enumerate() {
            let cell = row.get(column).map_or("", String::as_str);
            let pad = " ".repeat(width - cell.chars().count());
            text.push_str(&format!("| {cell}{pad} "));
        }
        text.push_str("|\n");
        if index == 0 {
            for width in &widths {
                text.push_str(&format!("|{}", "-".repeat(width + 2)));
            }
            text.push_str("|\n");
        }
    }
    text
}

/// A figure as people like to read it: three significant digits, thousands as such.
pub fn figure(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        small if small < 0.095 => format!("{value:.3}"),
        small if small < 9.95 => format!("{value:.2}"),
        middle if middle < 99.5 => format!("{value:.1}"),
        large if large < 9_999.5 => format!("{value:.0}"),
        _ => format!("{:.1} k", value / 1000.0),
    }
}

/// A figure that may be missing.
pub fn figure_or_dash(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), figure)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [vec!["metric".to_owned(), "a".into()], vec!["x".into(), "1.00".into()]];
        assert_eq!(markdown(&rows), "| metric | a    |\n|--------|------|\n| x      | 1.00 |\n");
    }

    #[test]
    fn figures_have_three_digits() {
        let figures = [0.0, 0.0123, 0.5, 31.04, 450.4, 90_000.0].map(figure);
        assert_eq!(figures, ["0", "0.012", "0.50", "31.0", "450", "90.0 k"]);
    }
}
