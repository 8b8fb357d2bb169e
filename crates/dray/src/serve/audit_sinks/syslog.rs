//! Syslog as RFC 5424 has it, over a Unix socket, UDP (RFC 5426) or TCP with counted octets (RFC 6587).

use std::io::{self, Write};
use std::net::{TcpStream, ToSocketAddrs, UdpSocket};
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::str::FromStr;

use dray_layers::audit::AuditRecord;

use super::{PATIENCE, Sink};
use crate::audit::render::json_of;
use crate::audit::time;
use crate::output::json_line;

/// "log audit" (RFC 5424, table 1).
const FACILITY: u32 = 13;
const WARNING: u32 = 4;
const INFORMATIONAL: u32 = 6;

/// Where syslog listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SyslogAddress {
    Unix(PathBuf),
    Udp(String),
    Tcp(String),
}

impl FromStr for SyslogAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<SyslogAddress, String> {
        let wrong = || {
            format!("a syslog is unix:///PATH, udp://HOST:PORT or tcp://HOST:PORT, not `{text}`")
        };
        let (kind, place) = text.split_once("://").ok_or_else(wrong)?;
        let has_port = place.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        match kind {
            "unix" if place.starts_with('/') => Ok(SyslogAddress::Unix(place.into())),
            "udp" if has_port => Ok(SyslogAddress::Udp(place.to_owned())),
            "tcp" if has_port => Ok(SyslogAddress::Tcp(place.to_owned())),
            _ => Err(wrong()),
        }
    }
}

enum Stream {
    Unix(UnixDatagram),
    Udp(UdpSocket),
    Tcp(TcpStream),
}

pub struct SyslogSink {
    stream: Stream,
    host: String,
    export: String,
}

impl SyslogSink {
    /// Reaches it. Errors: it is away.
    pub fn connect(address: &SyslogAddress, export: String) -> io::Result<SyslogSink> {
        let stream = match address {
            SyslogAddress::Unix(path) => {
                let socket = UnixDatagram::unbound()?;
                socket.connect(path)?;
                socket.set_write_timeout(Some(PATIENCE))?;
                Stream::Unix(socket)
            }
            SyslogAddress::Udp(place) => {
                let to = first_of(place)?;
                let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
                let socket = UdpSocket::bind(any)?;
                socket.connect(to)?;
                Stream::Udp(socket)
            }
            SyslogAddress::Tcp(place) => {
                let stream = TcpStream::connect_timeout(&first_of(place)?, PATIENCE)?;
                stream.set_write_timeout(Some(PATIENCE))?;
                Stream::Tcp(stream)
            }
        };
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let host = host.trim().replace(|letter: char| !letter.is_ascii_graphic(), "-");
        Ok(SyslogSink { stream, host, export })
    }

    fn message(&self, record: &AuditRecord) -> String {
        let severity = if record.is_denied() { WARNING } else { INFORMATIONAL };
        let (time, host) =
            (time::shown(record.time_us), if self.host.is_empty() { "-" } else { &self.host });
        let pid = std::process::id();
        let body = json_line(&json_of(record, Some(("export", &self.export))));
        let priority = FACILITY * 8 + severity;
        format!("<{priority}>1 {time} {host} dray {pid} audit - {}", body.trim_end())
    }
}

pub(super) fn first_of(place: &str) -> io::Result<std::net::SocketAddr> {
    place.to_socket_addrs()?.next().ok_or_else(|| io::ErrorKind::NotFound.into())
}

impl Sink for SyslogSink {
    fn send(&mut self, records: &[AuditRecord]) -> io::Result<()> {
        for record in records {
            let message = self.message(record);
            match &mut self.stream {
                Stream::Unix(socket) => {
                    socket.send(message.as_bytes())?;
                }
                Stream::Udp(socket) => {
                    socket.send(message.as_bytes())?;
                }
                Stream::Tcp(stream) => {
                    stream.write_all(format!("{} {message}", message.len()).as_bytes())?;
                }
            }
        }
        match &self.stream {
            Stream::Tcp(stream) => is_open(stream),
            Stream::Unix(_) | Stream::Udp(_) => Ok(()),
        }
    }
}

/// Whether the other end has not closed. Syslog has no answers: what was in flight then is sent again.
fn is_open(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    let peeked = stream.peek(&mut [0]);
    stream.set_nonblocking(false)?;
    match peeked {
        Ok(0) => Err(io::ErrorKind::ConnectionReset.into()),
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_layers::audit::AuditKind;
    use std::io::Read;
    use std::net::TcpListener;

    fn record() -> AuditRecord {
        AuditRecord { index: 7, ..AuditRecord::new(AuditKind::Start, 1_709_208_000_000_123) }
    }

    fn check(message: &str) {
        let head = "<110>1 2024-02-29T12:00:00.000123Z ";
        assert!(message.starts_with(head) && message.contains(" audit - {"), "{message}");
        let body = &message[message.find('{').unwrap()..];
        assert_eq!(serde_json::from_str::<serde_json::Value>(body).unwrap()["index"], 7);
    }

    // proves: P183
    #[test]
    fn messages_arrive_by_each_way() {
        let dir = tempfile::tempdir().unwrap();
        let mut buffer = [0; 4096];
        let path = dir.path().join("log");
        let unix = UnixDatagram::bind(&path).unwrap();
        let to = |address: &str| SyslogSink::connect(&address.parse().unwrap(), "home".into());
        to(&format!("unix://{}", path.display())).unwrap().send(&[record()]).unwrap();
        let len_bytes = unix.recv(&mut buffer).unwrap();
        check(std::str::from_utf8(&buffer[..len_bytes]).unwrap());
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        let place = udp.local_addr().unwrap();
        to(&format!("udp://{place}")).unwrap().send(&[record()]).unwrap();
        let len_bytes = udp.recv(&mut buffer).unwrap();
        check(std::str::from_utf8(&buffer[..len_bytes]).unwrap());
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sink = to(&format!("tcp://{}", tcp.local_addr().unwrap())).unwrap();
        let (mut stream, _) = tcp.accept().unwrap();
        sink.send(&[record(), record()]).unwrap();
        let mut sent = String::new();
        drop(sink);
        stream.read_to_string(&mut sent).unwrap();
        let (count, rest) = sent.split_once(' ').unwrap();
        let (first, second) = rest.split_at(count.parse().unwrap());
        check(first);
        check(second.split_once(' ').unwrap().1);
    }

    #[test]
    fn an_end_that_is_away_is_an_error() {
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let to = |address: &str| SyslogSink::connect(&address.parse().unwrap(), "home".into());
        assert!(to(&format!("tcp://{closed}")).is_err());
        assert!(to("unix:///nowhere/at/all").is_err());
    }
}
