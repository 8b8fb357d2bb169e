//! The slices of a projection with failover, as a table.

use serde_json::Value;

use super::columns::{ColumnLimits, table};
use super::status_table::{line, list, text};

/// Appends who is there, and who serves what.
pub(super) fn show(failover: &Value, room: Option<usize>, out: &mut String) {
    let may_answer = failover["may_answer"] == true;
    let etcd = match (failover["etcd"].as_str(), failover["etcd_error"].as_str()) {
        (Some(url), _) => format!("in touch with etcd at {url}"),
        (None, Some(why)) => format!("NOT IN TOUCH with etcd: {why}"),
        (None, None) => "asking etcd for the first time".to_owned(),
    };
    let answers = if may_answer { "" } else { "; this server ANSWERS NOBODY meanwhile" };
    line(out, &format!("  failover: {etcd}{answers}"));
    if let Some(by) = failover["quiesced"]["by"].as_str() {
        line(out, &format!("    QUIESCED at {by}: clients wait until `dray quiesce --undo`"));
    }
    for member in list(&failover["members"]) {
        let state = match (member["there"] == true, member["drained"] == true) {
            (true, true) => "drained",
            (true, false) => "there",
            (false, _) => "GONE",
        };
        line(out, &format!("    server {}: {state}", text(&member["server"])));
    }
    let rows = list(&failover["slices"]).iter().map(|slice| {
        let backup = match (slice["in_step"] == true, slice["slice_recovering"] == true) {
            (_, true) => "recovering",
            (true, false) => "in step",
            (false, false) => "NOT IN STEP",
        };
        let mut row: Vec<String> = ["slice", "served_by"].map(|key| text(&slice[key])).into();
        row.push(backup.to_owned());
        row.extend(["epoch", "losses"].map(|key| text(&slice[key])));
        row
    });
    let heads = ["SLICE", "SERVED BY", "BACKUP", "EPOCH", "LOSSES"];
    table(out, room, &heads, rows, ColumnLimits::default());
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_an_administrator_has_to_see_stands_out() {
        let failover = json!({
            "etcd": null, "etcd_error": "http://e:2379: no answer in time", "may_answer": false,
            "quiesced": { "by": "tcp://io2:7440", "since": 1, "not_quiet": [] },
            "members": [
                { "server": "tcp://io1:7440", "there": true, "drained": true },
                { "server": "tcp://io2:7440", "there": false, "drained": false },
            ],
            "slices": [
                { "slice": "x/0.1", "served_by": "tcp://io1:7440", "in_step": false, "epoch": 4, "losses": 0 },
                { "slice": "x/1.0", "served_by": "tcp://io1:7440", "in_step": true, "epoch": 9, "losses": 1 },
            ],
        });
        let mut out = String::new();
        show(&failover, Some(80), &mut out);
        for part in [
            "NOT IN TOUCH with etcd: http://e:2379",
            "ANSWERS NOBODY",
            "QUIESCED at tcp://io2:7440",
            "io1:7440: drained",
            "io2:7440: GONE",
            "NOT IN STEP",
            "in step",
            "x/1.0",
        ] {
            assert!(out.contains(part), "{part} is missing in\n{out}");
        }
    }
}
