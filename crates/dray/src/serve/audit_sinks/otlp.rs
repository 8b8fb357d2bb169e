//! OpenTelemetry logs over HTTP, in the JSON encoding (OTLP 1, opentelemetry-proto logs/v1).

use std::io;

use dray_layers::audit::AuditRecord;
use serde_json::{Value, json};

use super::Sink;
use super::http::{Url, post};
use crate::audit::render::json_of;

/// `SEVERITY_NUMBER_INFO` and `SEVERITY_NUMBER_WARN`.
const INFO: u32 = 9;
const WARN: u32 = 13;

pub struct OtlpSink {
    url: Url,
    export: String,
}

impl OtlpSink {
    pub fn new(url: Url, export: String) -> OtlpSink {
        OtlpSink { url, export }
    }

    fn body(&self, records: &[AuditRecord]) -> Value {
        let logs: Vec<Value> = records.iter().map(log_record).collect();
        let resource = [("service.name", json!("dray")), ("dray.export", json!(self.export))];
        let resource: Vec<Value> =
            resource.iter().map(|(key, value)| attribute(key, value)).collect();
        json!({ "resourceLogs": [{
            "resource": { "attributes": resource },
            "scopeLogs": [{ "scope": { "name": "dray.audit" }, "logRecords": logs }],
        }] })
    }
}

fn log_record(record: &AuditRecord) -> Value {
    let Value::Object(fields) = json_of(record, None) else { return Value::Null };
    let (number, text) = if record.is_denied() { (WARN, "WARN") } else { (INFO, "INFO") };
    let path = fields.get("path").and_then(Value::as_str).unwrap_or_default();
    json!({
        "timeUnixNano": (record.time_us * 1000).to_string(),
        "severityNumber": number,
        "severityText": text,
        "body": { "stringValue": format!("{} {path}", record.kind) },
        "attributes": fields
            .iter()
            .map(|(key, value)| attribute(&format!("dray.audit.{key}"), value))
            .collect::<Vec<_>>(),
    })
}

/// Whole numbers are texts in the JSON of protocol buffers.
fn attribute(key: &str, value: &Value) -> Value {
    fn any(value: &Value) -> Value {
        match value {
            Value::Bool(value) => json!({ "boolValue": value }),
            Value::Number(number) => json!({ "intValue": number.to_string() }),
            Value::Array(all) => {
                json!({ "arrayValue": { "values": all.iter().map(any).collect::<Vec<_>>() } })
            }
            Value::String(text) => json!({ "stringValue": text }),
            Value::Null | Value::Object(_) => json!({ "stringValue": value.to_string() }),
        }
    }
    json!({ "key": key, "value": any(value) })
}

impl Sink for OtlpSink {
    fn send(&mut self, records: &[AuditRecord]) -> io::Result<()> {
        let answer = post(&self.url, &self.body(records).to_string())?;
        // A collector may refuse some records for good.
        if answer.contains("rejectedLogRecords") && !answer.contains("\"rejectedLogRecords\":\"0\"")
        {
            log::warn!("audit of export `{}`: the collector has refused records", self.export);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_layers::audit::AuditKind;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    // proves: P183
    #[test]
    fn a_collector_gets_records_and_one_that_refuses_gets_them_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1/logs", listener.local_addr().unwrap());
        let server = std::thread::spawn(move || {
            ["503 Busy", "200 OK"].map(|answer| {
                let (mut stream, _) = listener.accept().unwrap();
                let (mut got, mut chunk) = (String::new(), [0; 4096]);
                while !got.ends_with("}]}]}") {
                    let count = stream.read(&mut chunk).unwrap();
                    got.push_str(std::str::from_utf8(&chunk[..count]).unwrap());
                }
                write!(stream, "HTTP/1.1 {answer}\r\nContent-Length: 2\r\n\r\n{{}}").unwrap();
                got
            })
        });
        let mut sink = OtlpSink::new(url.parse().unwrap(), "home".into());
        let record = AuditRecord { index: 7, ..AuditRecord::new(AuditKind::Start, 5) };
        let records = [record];
        assert!(sink.send(&records).unwrap_err().to_string().contains("503"));
        sink.send(&records).unwrap();
        let got = server.join().unwrap();
        assert!(got[1].starts_with("POST /v1/logs HTTP/1.1\r\n") && got[0] == got[1]);
        let body: Value = serde_json::from_str(&got[1][got[1].find('{').unwrap()..]).unwrap();
        let log = &body["resourceLogs"][0]["scopeLogs"][0]["logRecords"][0];
        assert_eq!((&log["timeUnixNano"], &log["severityNumber"]), (&json!("5000"), &json!(9)));
    }
}
