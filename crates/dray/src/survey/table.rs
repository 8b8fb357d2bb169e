//! The table that a survey prints.

use std::fmt::Write;

use serde_json::Value;

/// Makes a table with one line for each measurement.
pub fn render(rows: &[Value]) -> String {
    let mut out = format!(
        "{:<9} {:<6} {:>7} {:>7} {:>8} {:>7} {:>9} {:>9} {:>9}\n",
        "CUT", "OP", "THREADS", "BLOCK", "PER S", "MIB/S", "P50 US", "P99 US", "CPU US/OP"
    );
    for row in rows {
        let number = |key: &str| row[key].as_f64().unwrap_or(0.0);
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "{:<9} {:<6} {:>7} {:>7} {:>8.0} {:>7.0} {:>9.1} {:>9.1} {:>9.1}",
            row["cut"].as_str().unwrap_or_default(),
            row["op"].as_str().unwrap_or_default(),
            number("threads"),
            row["directories"].as_str().map_or_else(|| block(number("block_bytes")), dirs),
            number("per_s"),
            number("mib_per_s"),
            number("p50_us"),
            number("p99_us"),
            number("cpu_us_per_op"),
        );
    }
    out
}

fn dirs(which: &str) -> String {
    format!("{which} dir")
}

fn block(bytes: f64) -> String {
    match bytes {
        0.0 => "-".to_owned(),
        b if b >= 1_048_576.0 => format!("{} MiB", b / 1_048_576.0),
        b if b >= 1024.0 => format!("{} KiB", b / 1024.0),
        b => format!("{b} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn rows_line_up() {
        let row = json!({ "cut": "null", "op": "read", "threads": 2, "block_bytes": 65_536 });
        let text = render(&[row, json!({})]);
        let widths: Vec<usize> = text.lines().map(str::len).collect();
        assert!(widths.iter().all(|width| *width == widths[0] && *width < 80), "{text}");
        assert!(text.contains("64 KiB"));
    }
}
