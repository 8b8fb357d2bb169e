//! Records as JSON and as text.

use std::fmt::Write;

use dray_layers::audit::{AuditPeer, AuditRecord, Text};
use serde_json::{Map, Value, json};

use crate::audit::time;
use crate::output::{json_line, plain};

/// What a record comes from, and its name: an export, or a server.
pub type RecordOrigin<'a> = Option<(&'static str, &'a str)>;

/// How records are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Json,
    Text,
}

impl Format {
    /// Appends a line. `origin`: where it comes from, where there may be several such places.
    pub fn line(self, record: &AuditRecord, origin: RecordOrigin<'_>, out: &mut String) {
        match self {
            Format::Json => out.push_str(&json_line(&json_of(record, origin))),
            Format::Text => text_of(record, origin, out),
        }
    }
}

fn lossy(text: &Text) -> String {
    String::from_utf8_lossy(text).into_owned()
}

/// A text; what is no UTF-8 comes in hexadecimal digits, too.
fn put_text(object: &mut Map<String, Value>, key: &str, text: Option<&Text>) {
    let Some(text) = text else { return };
    if std::str::from_utf8(text).is_err() {
        let hex: String = text.iter().map(|byte| format!("{byte:02x}")).collect();
        object.insert(format!("{key}_hex"), json!(hex));
    }
    object.insert(key.to_owned(), json!(lossy(text)));
}

/// All that is known of a record.
pub fn json_of(record: &AuditRecord, origin: RecordOrigin<'_>) -> Value {
    let mut object = Map::new();
    let mut put = |key: &str, value: Value| {
        if !value.is_null() {
            object.insert(key.to_owned(), value);
        }
    };
    put("index", json!(record.index));
    put("time", json!(time::shown(record.time_us)));
    put("kind", json!(record.kind.name()));
    put("result", json!(record.error.map_or("ok", |error| error.name())));
    if let Some((what, name)) = origin {
        put(what, json!(name));
    }
    put("id", json!(record.id.map(|id| id.to_string())));
    put("parent", json!(record.parent.map(|id| id.to_string())));
    put("to_parent", json!(record.to_parent.map(|id| id.to_string())));
    put("open_flags", json!(record.open_flags));
    if record.is_denied() {
        put("denied", json!(true));
    }
    if record.repeated {
        put("repeated", json!(true));
    }
    if record.bytes > 0 {
        put("bytes", json!(record.bytes));
    }
    if let Some(totals) = record.totals {
        put("read_bytes", json!(totals.read_bytes));
        put("reads", json!(totals.reads));
        put("written_bytes", json!(totals.written_bytes));
        put("writes", json!(totals.writes));
    }
    if let Some(set) = record.set {
        put("set_mode", json!(set.mode.map(|mode| format!("{mode:04o}"))));
        put("set_uid", json!(set.uid));
        put("set_gid", json!(set.gid));
        put("set_size", json!(set.size));
    }
    match &record.gap {
        Some(gap) => {
            put("missing", json!(gap.records));
            put("why", json!(gap.why));
        }
        None if record.client.peer != AuditPeer::None || record.id.is_some() => {
            put_caller(record, &mut put);
        }
        None => {}
    }
    put_text(&mut object, "path", record.path.as_ref());
    put_text(&mut object, "to_path", record.to_path.as_ref());
    put_text(&mut object, "name", record.name.as_ref());
    put_text(&mut object, "to_name", record.to_name.as_ref());
    put_text(&mut object, "xattr", record.xattr.as_ref());
    Value::Object(object)
}

fn put_caller(record: &AuditRecord, put: &mut impl FnMut(&str, Value)) {
    let (user, client) = (&record.user, &record.client);
    put("uid", json!(user.uid));
    put("gid", json!(user.gid));
    if !user.groups.is_empty() {
        put("groups", json!(user.groups));
    }
    if user.groups_left_out > 0 {
        put("groups_left_out", json!(user.groups_left_out));
    }
    if !user.job.is_empty() {
        put("job", json!(user.job));
    }
    put("node", json!(format!("{:016x}", client.node.0)));
    put("session", json!(format!("{:x}", client.session.0)));
    put("client", json!(client_name(client.peer)));
}

fn client_name(peer: AuditPeer) -> Option<String> {
    match peer {
        AuditPeer::None => None,
        AuditPeer::Local => Some("local".to_owned()),
        AuditPeer::Ip(address) => Some(address.to_string()),
    }
}

fn text_of(record: &AuditRecord, origin: RecordOrigin<'_>, out: &mut String) {
    let result = record.error.map_or("ok", |error| error.name());
    let time = time::shown(record.time_us);
    // Writing to a string cannot fail.
    let _ = write!(out, "{} {time} {:<11} {result:<6}", record.index, record.kind.name());
    let mut word = |text: &str| {
        out.push(' ');
        out.push_str(&plain(text));
    };
    origin.iter().for_each(|(what, name)| word(&format!("{what}={name}")));
    if let Some(gap) = &record.gap {
        word(&format!("missing={} {}", gap.records, gap.why));
        out.push('\n');
        return;
    }
    if record.id.is_some() || record.parent.is_some() {
        word(&format!("uid={}", record.user.uid));
        if !record.user.job.is_empty() {
            word(&format!("job={}", record.user.job));
        }
        client_name(record.client.peer).iter().for_each(|name| word(&format!("client={name}")));
        match (&record.path, &record.name, record.id) {
            (Some(path), _, _) => word(&lossy(path)),
            (None, Some(name), _) => word(&format!(".../{}", lossy(name))),
            (None, None, Some(id)) => word(&format!("file {id}")),
            (None, None, None) => {}
        }
    }
    if let Some(to) = record.to_path.as_ref().or(record.to_name.as_ref()) {
        word(&format!("-> {}", lossy(to)));
    }
    record.xattr.iter().for_each(|xattr| word(&format!("xattr={}", lossy(xattr))));
    if let Some(totals) = record.totals {
        word(&format!("read={}/{}", totals.read_bytes, totals.reads));
        word(&format!("written={}/{}", totals.written_bytes, totals.writes));
    }
    if record.repeated {
        word("repeated");
    }
    out.push('\n');
}
