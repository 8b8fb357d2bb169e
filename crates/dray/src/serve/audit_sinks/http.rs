//! As much of HTTP/1.1 as a collector on the network needs: one POST, one answer.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::str::FromStr;

use super::PATIENCE;
use super::syslog::first_of;

/// Longest answer that is read, bytes.
const ANSWER_MAX_BYTES: u64 = 64 << 10;

/// `http://HOST[:PORT]/PATH`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url {
    host: String,
    path: String,
}

impl FromStr for Url {
    type Err = String;

    fn from_str(text: &str) -> Result<Url, String> {
        let wrong = || format!("a url is http://HOST[:PORT]/PATH, not `{text}`");
        let rest = text.strip_prefix("http://").ok_or_else(wrong)?;
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        let is_sound = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic());
        if host.is_empty() || !is_sound(rest) {
            return Err(wrong());
        }
        Ok(Url { host: host.to_owned(), path: format!("/{path}") })
    }
}

/// Posts JSON. Errors: nobody answers, or the answer is no success.
pub fn post(url: &Url, body: &str) -> io::Result<String> {
    let Url { host, path } = url;
    let bare = host.rsplit(':').next().is_some_and(|end| end.parse::<u16>().is_ok());
    let place = if bare { host.clone() } else { format!("{host}:80") };
    let mut stream = TcpStream::connect_timeout(&first_of(&place)?, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let len_bytes = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n\
         Content-Length: {len_bytes}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())?;
    let mut answer = Vec::new();
    stream.take(ANSWER_MAX_BYTES).read_to_end(&mut answer)?;
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let status = answer.split(' ').nth(1).and_then(|status| status.parse::<u16>().ok());
    match status {
        Some(200..=299) => Ok(answer),
        Some(status) => Err(io::Error::other(format!("the collector answers {status}"))),
        None => Err(io::Error::other("the collector does not speak HTTP")),
    }
}
