//! Fetches metrics, and holds them against the text format of Prometheus (version 0.0.4).

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;

/// The whole answer to a GET.
pub fn get(address: &str, path: &str) -> String {
    let mut socket = TcpStream::connect(address).unwrap();
    socket.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).unwrap();
    let mut reply = String::new();
    socket.read_to_string(&mut reply).unwrap();
    reply
}

/// The metrics at `address`, checked.
pub fn metrics(address: &str) -> String {
    let reply = get(address, "/metrics");
    let (head, text) = reply.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.0 200 OK"), "{head}");
    assert!(head.contains("text/plain; version=0.0.4"), "{head}");
    check(text);
    text.to_owned()
}

/// The value of the first sample whose line begins so.
pub fn value(text: &str, begin: &str) -> f64 {
    let line = text.lines().find(|line| line.starts_with(begin));
    let line = line.unwrap_or_else(|| panic!("no {begin} in\n{text}"));
    line.rsplit_once(' ').unwrap().1.parse().unwrap()
}

/// Every sample belongs to the head before it. Every metric has one head. No sample comes twice.
/// Every value is a number, counters and they alone are called so.
pub fn check(text: &str) {
    let (mut current, mut heads, mut samples) = ("", BTreeSet::new(), BTreeSet::new());
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            assert!(rest.split_once(' ').is_some_and(|(_, help)| help.ends_with('.')), "{line}");
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(["gauge", "counter", "histogram"].contains(&kind), "{line}");
            assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
            assert!(heads.insert(name), "{name} has two heads");
            current = name;
        } else {
            let (series, value) = line.rsplit_once(' ').unwrap();
            let name = series.split('{').next().unwrap();
            let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
            assert!(name == current || base == Some(current), "{line} stands below {current}");
            assert!(value.parse::<f64>().is_ok(), "{line}");
            assert!(samples.insert(series), "{series} comes twice");
        }
    }
    assert!(!heads.is_empty() && text.ends_with('\n'));
}
