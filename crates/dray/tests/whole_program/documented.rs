//! What docs/OPERATIONS.md says of fields, metrics and log messages, held against what the command
//! prints, or can print.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::common;
use crate::common::exposition::metrics;
use crate::common::ports::free_port;
use crate::common::{Rig, wait_for};
use serde_json::Value;

const PAGE: &str = include_str!("../../../../docs/OPERATIONS.md");

/// What stands in backquotes, taken apart at everything that no name has.
fn documented() -> BTreeSet<&'static str> {
    let quoted = PAGE.split('`').skip(1).step_by(2);
    quoted.flat_map(|words| words.split(|c: char| !c.is_alphanumeric() && c != '_')).collect()
}

/// Names of fields; below `ops` and `errors` they are those of operations and errors.
fn fields(value: &Value, into: &mut BTreeSet<String>) {
    match value {
        Value::Array(list) => list.iter().for_each(|one| fields(one, into)),
        Value::Object(object) => object.iter().for_each(|(name, value)| {
            into.insert(name.clone());
            match (name.as_str(), value) {
                ("ops", Value::Object(ops)) => ops.values().for_each(|op| fields(op, into)),
                ("errors", _) => {}
                _ => fields(value, into),
            }
        }),
        _ => {}
    }
}

#[track_caller]
fn all_documented(names: impl IntoIterator<Item = String>) {
    let documented = documented();
    let missing: Vec<_> =
        names.into_iter().filter(|name| !documented.contains(name.as_str())).collect();
    assert!(missing.is_empty(), "docs/OPERATIONS.md says nothing of {missing:?}");
}

fn reports(rig: &Rig, args: &[&str]) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for line in rig.demand(args).lines() {
        fields(&serde_json::from_str(line).unwrap(), &mut names);
    }
    names
}

#[test]
fn every_field_and_every_metric_is_explained() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let (server, mount) =
        (format!("127.0.0.1:{}", free_port()), format!("127.0.0.1:{}", free_port()));
    rig.serve(&["--metrics", &server]);
    let at = rig.mount("mount", &format!("metrics={mount}"));
    // With operations of every export, and one under way: a lock that is waited for.
    fs::write(at.join("file"), "content").unwrap();
    let script = "exec 9>>$AT/file; flock 9; exec flock $AT/file true";
    let waiting = rig.start(script, &at);
    let status = ["status", "--json"];
    wait_for("server and mount to show the lock", || {
        let waits = |line: &str| {
            let report: Value = serde_json::from_str(line).unwrap();
            report["operations"].as_array().is_some_and(|operations| !operations.is_empty())
        };
        rig.demand(&status).lines().all(waits)
    });
    let names = reports(&rig, &status);
    assert!(names.len() > 60, "{names:?}");
    all_documented(names);
    waiting.signal(libc::SIGKILL);
    rig.end_of(waiting);
    let survey = ["survey", &rig.target(), "--seconds", "0.01", "--threads", "1", "--block", "4K"];
    all_documented(reports(&rig, &[&survey[..], &["--json"]].concat()));
    let texts = metrics(&server) + &metrics(&mount);
    let heads = texts.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    all_documented(heads.map(|head| head.split(' ').next().unwrap().to_owned()));
    rig.umount(&at);
}

/// All sources below `dir`, with strings that go over several lines in one.
fn sources(dir: &Path, into: &mut String) {
    for entry in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            sources(&entry, into);
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&entry).unwrap();
            let mut parts = text.split("\\\n");
            into.push_str(parts.next().unwrap());
            parts.for_each(|part| into.push_str(part.trim_start()));
        }
    }
}

/// The messages of the tables in "Logs".
fn messages() -> Vec<&'static str> {
    let (_, logs) = PAGE.split_once("\n## Logs\n").unwrap();
    let (logs, _) = logs.split_once("\n## ").unwrap();
    let rows = logs.lines().filter_map(|line| line.strip_prefix("| `"));
    rows.flat_map(|row| row.split(" | ").next().unwrap().split('`').step_by(2)).collect()
}

/// What of a message does not depend on what it is about.
fn fixed_words(message: &str) -> Vec<String> {
    let stands_for_something = |word: &str| {
        let word = word.trim_matches(|c: char| !c.is_alphanumeric());
        word.split('-').any(|part| !part.chars().any(char::is_lowercase))
    };
    let mut parts = vec![String::new()];
    for word in message.split([' ', '/']) {
        if stands_for_something(word) {
            parts.push(String::new());
            continue;
        }
        let part = parts.last_mut().unwrap();
        *part += &format!("{}{word}", if part.is_empty() { "" } else { " " });
        if word.ends_with([':', ';', ')']) {
            parts.push(String::new());
        }
    }
    let bare = parts.into_iter().map(|part| part.trim_matches([':', ';', '.', ',']).to_owned());
    bare.filter(|part| part.len() > 3).collect()
}

/// A reader who looks for a line of the log in the tables looks for its words.
#[test]
fn every_message_of_the_tables_is_in_the_sources() {
    let mut all = String::new();
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    for entry in fs::read_dir(crates).unwrap() {
        sources(&entry.unwrap().path().join("src"), &mut all);
    }
    let all = all.replace('`', "");
    let messages = messages();
    assert!(messages.len() > 90, "{messages:?}");
    let is_missing = |words: &String| !all.contains(words.as_str());
    let missing: Vec<_> = messages
        .iter()
        .flat_map(|message| fixed_words(message).into_iter().map(move |words| (words, message)))
        .filter(|(words, _)| is_missing(words))
        .collect();
    assert!(missing.is_empty(), "{missing:#?}");
}
