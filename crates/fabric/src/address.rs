//! Where a server listens.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// `tcp://HOST:PORT` or `unix:///PATH`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// A host by name or number, and a port.
    Tcp {
        /// Name, IPv4 or IPv6 address without brackets.
        host: String,
        /// TCP port.
        port: u16,
    },
    /// A socket in the file system.
    Unix(PathBuf),
}

/// dray's port when none is given.
pub(crate) const DEFAULT_PORT: u16 = 7440;

impl Address {
    /// A TCP address with dray's default port, 7440.
    pub fn tcp(host: &str) -> Address {
        Address::Tcp { host: host.to_owned(), port: DEFAULT_PORT }
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        if let Some(path) = text.strip_prefix("unix://") {
            if !path.starts_with('/') {
                return Err(format!(
                    "`{text}`: a Unix socket needs an absolute path, as in unix:///run/dray.sock"
                ));
            }
            return Ok(Address::Unix(PathBuf::from(path)));
        }
        let rest = text.strip_prefix("tcp://").unwrap_or(text);
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        if !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(format!(
                "`{text}`: a port without an address; for instance tcp://0.0.0.0:{rest}"
            ));
        }
        if !rest.starts_with('[') && rest.matches(':').count() > 1 && !rest.contains("://") {
            return Err(format!(
                "`{text}`: an IPv6 address goes in brackets, as in tcp://[fd00::1]:7440"
            ));
        }
        let (host, port) = split_port(rest).ok_or_else(|| {
            format!(
                "`{text}`: expected tcp://HOST:PORT or unix:///PATH, the port a number up to 65535"
            )
        })?;
        Ok(Address::Tcp { host, port })
    }
}

/// `host`, `host:port`, `[v6]`, `[v6]:port`.
fn split_port(text: &str) -> Option<(String, u16)> {
    let (host, port) = match text.strip_prefix('[') {
        Some(bracketed) => {
            let (host, rest) = bracketed.split_once(']')?;
            (host, if rest.is_empty() { None } else { Some(rest.strip_prefix(':')?) })
        }
        None => match text.rsplit_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let port = match port {
        Some(port) => {
            port.bytes().all(|byte| byte.is_ascii_digit()).then_some(port)?.parse().ok()?
        }
        None => DEFAULT_PORT,
    };
    let sound =
        !host.is_empty() && !host.contains(['/', '@']) && !host.contains(char::is_whitespace);
    sound.then(|| (host.to_owned(), port))
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp { host, port } if host.contains(':') => write!(f, "tcp://[{host}]:{port}"),
            Address::Tcp { host, port } => write!(f, "tcp://{host}:{port}"),
            Address::Unix(path) => write!(f, "unix://{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written_alike() {
        for (text, shown) in [
            ("tcp://node1:7000", "tcp://node1:7000"),
            ("node1", "tcp://node1:7440"),
            ("[::1]", "tcp://[::1]:7440"),
            ("tcp://[fe80::1]:99", "tcp://[fe80::1]:99"),
            ("tcp://node1:7000/", "tcp://node1:7000"),
            ("unix:///run/dray.sock", "unix:///run/dray.sock"),
        ] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), shown);
        }
        let wrong = ["", "tcp://", "host:port", "host:70000", "unix://run", "[::1", "a b", "h/x:1"];
        assert!("7440".parse::<Address>().unwrap_err().contains("tcp://0.0.0.0:7440"));
        for text in
            wrong.iter().chain(&["tcp://::1:7440", "::1", "http://h:1", "me@h", "h:+1", "tcp:///"])
        {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
        assert!("::1".parse::<Address>().unwrap_err().contains("brackets"));
    }
}
