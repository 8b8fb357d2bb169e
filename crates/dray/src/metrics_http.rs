//! Metrics of a server or a mount, by HTTP/1.0: `/metrics` in the text format of Prometheus
//! (version 0.0.4), and `/healthz`.

use std::fmt::{Display, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::endpoint::{self, Responder};
use crate::error::Failure;

/// Makes the text of the metrics.
pub type MetricsSource = Arc<dyn Fn() -> String + Send + Sync>;

/// Whether `address` has the form `ADDR:PORT`. Errors: for people.
pub fn check_address(address: &str) -> Result<(), String> {
    let sound = address.rsplit_once(':').is_some_and(|(host, port)| {
        let v6 = host.starts_with('[') && host.ends_with(']');
        port.parse::<u16>().is_ok() && !host.is_empty() && (v6 || !host.contains([':', '/']))
    });
    match sound {
        true => Ok(()),
        false => {
            let examples = "as in 127.0.0.1:9100 or [::1]:9100";
            Err(format!("`{address}` is not ADDR:PORT, {examples}"))
        }
    }
}

/// Listens at `ADDR:PORT`; answers where, too, since port 0 lets the system choose.
pub fn listen(address: &str) -> Result<(OwnedFd, String), Failure> {
    check_address(address).map_err(|what| Failure::usage(format!("metrics: {what}")))?;
    endpoint::listen_tcp(address).map_err(|error| {
        let advice = match error.raw_os_error() {
            Some(libc::EADDRINUSE) => "another program listens there (`ss -ltnp` says which)",
            Some(libc::EADDRNOTAVAIL) => "this machine has no such address",
            Some(libc::EACCES) => "ports below 1024 are root's",
            _ => "choose another address",
        };
        Failure::new(format!("cannot serve metrics at {address}: {error}; {advice}"))
    })
}

/// Answers requests at `socket`, as a task of this thread's executor that never ends.
pub async fn serve(socket: OwnedFd, text: MetricsSource) {
    let answer: Responder = Arc::new(move |request| {
        let reply = answer(&request, &*text);
        Box::pin(async move { reply })
    });
    if let Err(error) = endpoint::serve(socket, "\r\n\r\n", answer).await {
        log::error!("the metrics endpoint failed: {error}; metrics are no longer served");
    }
}

/// The answer to one HTTP request.
fn answer(request: &str, text: &dyn Fn() -> String) -> Vec<u8> {
    let mut words = request.lines().next().unwrap_or_default().split_whitespace();
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let path = path.split('?').next().unwrap_or_default();
    let (status, body) = match (method, path) {
        ("GET" | "HEAD", "/metrics") => ("200 OK", text()),
        ("GET" | "HEAD", "/healthz") => ("200 OK", "ok\n".to_owned()),
        ("GET" | "HEAD", _) => ("404 Not Found", "there are /metrics and /healthz\n".to_owned()),
        _ => ("405 Method Not Allowed", "only GET\n".to_owned()),
    };
    let shown = if method == "HEAD" { "" } else { body.as_str() };
    format!(
        "HTTP/1.0 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{shown}",
        body.len()
    )
    .into_bytes()
}

/// What a metric counts.
#[derive(Clone, Copy)]
pub enum MetricKind {
    /// The value goes up and down.
    Gauge,
    /// The value goes up only.
    Counter,
}

/// Adds the head of a metric.
pub fn head(text: &mut String, name: &str, kind: MetricKind, help: &str) {
    let kind = match kind {
        MetricKind::Gauge => "gauge",
        MetricKind::Counter => "counter",
    };
    // Writing to a string cannot fail.
    let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
}

/// Adds a sample; `labels` as in `export="home"`, or nothing.
pub fn sample(text: &mut String, name: &str, labels: &str, value: impl Display) {
    // Writing to a string cannot fail.
    let _ = match labels {
        "" => writeln!(text, "{name} {value}"),
        labels => writeln!(text, "{name}{{{labels}}} {value}"),
    };
}

/// The value of a label, in which the format wants three characters escaped.
pub fn label_value(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_answered() {
        let reply =
            |request: &str| String::from_utf8(answer(request, &|| "text\n".to_owned())).unwrap();
        let whole = reply("GET /metrics?x HTTP/1.1\r\n\r\n");
        assert!(whole.starts_with("HTTP/1.0 200") && whole.ends_with("\r\n\r\ntext\n"), "{whole}");
        assert!(
            reply("HEAD /metrics HTTP/1.1\r\n\r\n")
                .ends_with("Length: 5\r\nConnection: close\r\n\r\n")
        );
        assert!(reply("GET /x HTTP/1.1\r\n\r\n").starts_with("HTTP/1.0 404"));
        assert!(reply("POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.0 405"));
        assert!(reply("").starts_with("HTTP/1.0 405"));
    }

    #[test]
    fn addresses_are_checked() {
        for sound in ["127.0.0.1:9100", "[::1]:0", "node1:7441"] {
            check_address(sound).unwrap();
        }
        for wrong in ["9100", ":9100", "127.0.0.1", "tcp://127.0.0.1:9100", "::1:9100", "a:70000"] {
            assert!(check_address(wrong).unwrap_err().contains("ADDR:PORT"), "{wrong}");
        }
    }

    #[test]
    fn label_values_cannot_end_themselves() {
        assert_eq!(label_value("a\"} 1\n\\"), "a\\\"} 1\\n\\\\");
    }
}
