//! The keys of the configuration file, and messages about wrong ones with their lines.

use crate::serve::audit_sinks::SINK_KEYS;
use crate::serve::backend_options::is_of_a_backend;
use crate::suggestions::hint;

pub(super) const KEYS: [&str; 16] = [
    "listen",
    "auth",
    "metrics",
    "state",
    "threads",
    "lease_s",
    "buffers_mib",
    "clients_max",
    "clients_of_one_address_max",
    "projections",
    "server",
    "audit",
    "qos",
    "faults",
    "export",
    "fault",
];
pub(super) const EXPORT_KEYS: [&str; 15] = [
    "name",
    "dir",
    "read_only",
    "squash",
    "anonuid",
    "anongid",
    "allow",
    "insecure",
    "leases",
    "write_leases",
    "lock_leases",
    "read_ahead",
    "merge_writes",
    "audit",
    "backend",
];
pub(super) const FAULT_KEYS: [&str; 6] = ["export", "op", "error", "delay_ms", "one_in", "nth"];

/// What is wrong with a file, without the names that types have in Rust.
pub(super) fn in_plain_words(error: toml::de::Error) -> String {
    let words = [
        ("a sequence", "a list in brackets"),
        ("a boolean", "true or false"),
        ("path string", "a path in quotes"),
        ("struct ExportTable", "a table [[export]]"),
        ("struct FaultTable", "a table [[fault]]"),
        ("struct AuditTable", "a table such as { kinds = [\"all\"] }"),
        ("u32", "a whole number from 0 to 4294967295"),
    ];
    let numbers = ["u64", "usize"].map(|kind| (kind, "a whole number from 0 on"));
    let too_large = (" as i128, expected any valid TOML value", ", a number that is too large");
    let said = error.to_string().replace(too_large.0, too_large.1);
    words.iter().chain(&numbers).fold(said, |text, (rust, plain)| {
        text.replace(&format!("expected {rust}"), &format!("expected {plain}"))
    })
}

/// Refuses keys that are not known, naming the one that was probably meant.
/// The table begins behind `head` lines.
pub(super) fn check_keys(
    text: &str,
    head: usize,
    place: &str,
    table: &toml::Table,
    known: &[&str],
) -> Result<(), String> {
    let Some(key) = table.keys().find(|key| !known.contains(&key.as_str())) else {
        return Ok(());
    };
    let hint = match place_of(key) {
        Some(place) => format!("; it belongs {place}"),
        None => hint(key, known.iter().copied()),
    };
    let line = line_of(text, head, key).map_or(String::new(), |line| format!("line {line}: "));
    Err(format!("{line}unknown key `{key}` in {place}{hint}"))
}

/// The same for the sinks of audits.
pub(super) fn check_sinks(text: &str, table: &toml::Table) -> Result<(), String> {
    let Some(audit) = table.get("audit").and_then(toml::Value::as_table) else { return Ok(()) };
    check_keys(text, 0, "[audit]", audit, &["sink"])?;
    let sinks = audit.get("sink").and_then(toml::Value::as_table).into_iter().flatten();
    for (name, sink) in sinks {
        let place = format!("[audit.sink.{name}]");
        let head = head_of(text, &place, 0);
        sink.as_table().map_or(Ok(()), |sink| check_keys(text, head, &place, sink, &SINK_KEYS))?;
    }
    Ok(())
}

/// Where a key is known that stands where it is not. In TOML what follows a table's head is the
/// table's, though it was meant for the whole.
fn place_of(key: &str) -> Option<&'static str> {
    match key {
        key if KEYS.contains(&key) => Some("further up, before the first table in brackets"),
        key if EXPORT_KEYS.contains(&key) || is_of_a_backend(key) => {
            Some("below a line [[export]]")
        }
        key if FAULT_KEYS.contains(&key) => Some("below a line [[fault]]"),
        _ => None,
    }
}

/// The line, counted from 0, of the table of this number that is written as `head`.
pub(super) fn head_of(text: &str, head: &str, number: usize) -> usize {
    let heads = |line: &str| line.replace([' ', '\t'], "").starts_with(head);
    let lines = text.lines().enumerate().filter(|(_, line)| heads(line));
    lines.map(|(index, _)| index).nth(number).unwrap_or(0)
}

/// The first line that assigns to `key`, of those behind `skipped` ones.
pub(super) fn line_of(text: &str, skipped: usize, key: &str) -> Option<usize> {
    let assigns = |line: &str| {
        let line = line.trim_start_matches([' ', '\t', '[', '"']);
        let rest = line.strip_prefix(key)?;
        rest.trim_start_matches('"').trim_start().starts_with(['=', ']', '.']).then_some(())
    };
    let mut lines = text.lines().enumerate().skip(skipped);
    lines.find(|(_, line)| assigns(line).is_some()).map(|(index, _)| index + 1)
}
