//! A target: a server, or some servers of a projection, and the name of an export there.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use dray_fabric::Address;

/// `dray://HOST[:PORT][,HOST[:PORT]...]/NAME` or `dray+unix:///PATH?export=NAME`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// The server; of a projection, the one that is asked first.
    pub address: Address,
    /// Further servers of the projection, which are asked in this order if those before are away.
    pub others: Vec<Address>,
    /// The export.
    pub export: String,
}

/// Shown with every error, since one example says more than a grammar.
const EXAMPLES: &str = "a target looks like dray://HOST/NAME, dray://HOST:7440/NAME, \
                        dray://[fd00::1]/NAME, dray://HOST1,HOST2/NAME or dray+unix:///run/dray.sock?export=NAME";

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Target, String> {
        let wrong = |what: &str| Err(format!("`{text}`: {what}; {EXAMPLES}"));
        if let Some(rest) = text.strip_prefix("dray+unix://") {
            // The path may hold a `?`, the name of an export does not.
            let Some((path, query)) = rest.rsplit_once('?') else {
                return wrong("it names no export (?export=NAME)");
            };
            let Some(export) = query.strip_prefix("export=") else {
                return wrong("only `export=NAME` can follow the `?`");
            };
            if !path.starts_with('/') || path.len() < 2 {
                return wrong("the socket needs an absolute path, thus three slashes");
            }
            if let Err(what) = check_export(export) {
                return wrong(&what);
            }
            return Ok(Target::at(Address::Unix(PathBuf::from(path)), export.to_owned()));
        }
        let Some(rest) = text.strip_prefix("dray://") else {
            return wrong("it does not begin with dray:// or dray+unix://");
        };
        let Some((hosts, export)) = rest.split_once('/') else {
            return wrong("it names no export (the /NAME behind the host)");
        };
        let mut addresses: Vec<Address> = Vec::new();
        for host in hosts.split(',') {
            let address = match address_of(host) {
                Ok(address) => address,
                Err(what) => return wrong(what),
            };
            if addresses.contains(&address) {
                return wrong("it names a host twice");
            }
            addresses.push(address);
        }
        if addresses.len() > HOSTS_MAX {
            return wrong("it names more than 16 hosts; name fewer");
        }
        let export = export.strip_suffix('/').unwrap_or(export);
        if let Err(what) = check_export(export) {
            return wrong(&what);
        }
        let address = addresses.remove(0);
        Ok(Target { address, others: addresses, export: export.to_owned() })
    }
}

/// Hosts that a target names at most: any server knows all servers of its projection.
const HOSTS_MAX: usize = 16;

/// The address of `HOST[:PORT]`. Errors: what is wrong with it.
fn address_of(host: &str) -> Result<Address, &'static str> {
    if host.is_empty() {
        return Err("it names no host");
    }
    let bare_v6 = host.matches(':').count() > 1 && !host.starts_with('[');
    let address = format!("tcp://{host}").parse().ok().filter(|_| !bare_v6);
    address.ok_or_else(|| host_problem(host))
}

/// What is wrong with `HOST[:PORT]` that is no address.
fn host_problem(host: &str) -> &'static str {
    if host.starts_with('[') && !host.contains(']') {
        return "the bracket of the IPv6 address is not closed";
    }
    if host.matches(':').count() > 1 && !host.starts_with('[') {
        return "an IPv6 address goes in brackets";
    }
    "host or port is malformed (a port is a number up to 65535)"
}

/// Longest name of an export, bytes.
const EXPORT_MAX_BYTES: usize = 64;

/// Names of exports stand in targets, files and commands: letters, digits, `.`, `_`, `-`.
pub(crate) fn check_export(name: &str) -> Result<(), String> {
    if name.is_empty() {
        return Err("the name of the export is empty".to_owned());
    }
    if name.len() > EXPORT_MAX_BYTES {
        return Err(format!("the name of an export has at most {EXPORT_MAX_BYTES} characters"));
    }
    let sound = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if !name.chars().all(sound) || name.starts_with(['.', '-']) {
        return Err(format!(
            "`{name}` cannot name an export: letters, digits, `.`, `_` and `-`, beginning \
             with a letter, a digit or `_`"
        ));
    }
    Ok(())
}

impl Target {
    /// An export at one server.
    pub fn at(address: Address, export: String) -> Target {
        Target { address, others: Vec::new(), export }
    }

    /// Whether it names one server.
    pub fn is_single(&self) -> bool {
        self.others.is_empty()
    }

    /// The same export at each of the servers.
    pub fn each(&self) -> impl Iterator<Item = Target> {
        let addresses = std::iter::once(&self.address).chain(&self.others);
        addresses.map(|address| Target::at(address.clone(), self.export.clone()))
    }

    /// Whether `name` can name an export. Errors: for people.
    pub fn check_export(name: &str) -> Result<(), String> {
        check_export(name)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.address {
            Address::Unix(path) => {
                write!(f, "dray+unix://{}?export={}", path.display(), self.export)?;
                self.others.iter().try_for_each(|other| write!(f, " or {other}"))
            }
            Address::Tcp { .. } => {
                let addresses = std::iter::once(&self.address).chain(&self.others);
                let hosts: Vec<String> = addresses.map(ToString::to_string).collect();
                let hosts = hosts.iter().map(|host| host.strip_prefix("tcp://").unwrap_or(host));
                write!(f, "dray://{}/{}", hosts.collect::<Vec<_>>().join(","), self.export)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_read_and_written_alike() {
        for (text, shown) in [
            ("dray://node1/home", "dray://node1:7440/home"),
            ("dray://node1:99/home/", "dray://node1:99/home"),
            ("dray://[fd00::1]/a.b-c_1", "dray://[fd00::1]:7440/a.b-c_1"),
            ("dray://[::1]:7000/x", "dray://[::1]:7000/x"),
            ("dray://io1,io2:99,[::1]/x", "dray://io1:7440,io2:99,[::1]:7440/x"),
            ("dray+unix:///run/d.sock?export=x", "dray+unix:///run/d.sock?export=x"),
            ("dray+unix:///run/a b?\u{e4}?export=x", "dray+unix:///run/a b?\u{e4}?export=x"),
        ] {
            let target: Target = text.parse().unwrap();
            assert_eq!(target.to_string(), shown);
            assert_eq!(shown.parse::<Target>().unwrap(), target);
        }
    }

    #[test]
    fn errors_say_what_is_missing() {
        for (text, hint) in [
            ("node1/home", "begin with dray://"),
            ("dray://node1", "no export"),
            ("dray://node1/", "empty"),
            ("dray:///home", "no host"),
            ("dray://io1,/home", "no host"),
            ("dray://io1,io2,io1:7440/home", "twice"),
            ("dray://fd00::1/home", "brackets"),
            ("dray://[fd00::1/home", "not closed"),
            ("dray://node1:70000/home", "port"),
            ("dray://node1:x/home", "port"),
            ("dray://node1/a/b", "cannot name"),
            ("dray://node1/-a", "cannot name"),
            ("dray+unix:///run/d.sock", "?export=NAME"),
            ("dray+unix:///run/d.sock?name=x", "only `export=NAME`"),
            ("dray+unix://run/d.sock?export=x", "three slashes"),
            ("dray+unix:///run/d.sock?export=", "empty"),
        ] {
            let error = text.parse::<Target>().unwrap_err();
            assert!(error.contains(hint) && error.contains(text), "{text}: {error}");
        }
    }
}
