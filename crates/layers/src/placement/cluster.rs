//! `[cluster]` in a file of projections: where their servers agree on who serves what.

use std::time::Duration;

use serde::Deserialize;

/// Servers of a projection with failover at most: each pair of them is a slice in both directions.
pub const FAILOVER_SERVERS_MAX: usize = 16;
/// Addresses of etcd at most. A cluster of etcd rarely has more than five members.
const ETCD_MAX: usize = 16;
/// etcd's port where none is given.
const ETCD_PORT: &str = "2379";
/// Bounds of a lease, seconds. etcd makes none shorter than 1.5 times its election timeout, rounded up,
/// which is 2 s by default.
const TTL_MIN_S: u64 = 2;
const TTL_MAX_S: u64 = 60;

/// How servers of projections with failover find each other. Clients do not get this.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterOptions {
    /// Members of one etcd: `http://HOST:PORT`.
    pub etcd: Vec<String>,
    /// A server that etcd has not heard of for so long is gone.
    pub ttl: Duration,
}

/// The table as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenCluster {
    etcd: Vec<String>,
    ttl: Option<u64>,
}

impl ClusterOptions {
    /// Errors: all that is wrong with the table.
    pub(super) fn read(value: &toml::Value) -> Result<ClusterOptions, Vec<String>> {
        let written: WrittenCluster = value
            .clone()
            .try_into()
            .map_err(|error: toml::de::Error| vec![error.message().to_owned()])?;
        let mut errors = Vec::new();
        let mut etcd: Vec<String> = Vec::new();
        for url in &written.etcd {
            match normal_url(url) {
                Ok(url) if etcd.contains(&url) => {
                    errors.push(format!("etcd has {url} twice: leave one of them out"));
                }
                Ok(url) => etcd.push(url),
                Err(what) => errors.push(what),
            }
        }
        match written.etcd.len() {
            0 => errors.push(
                "etcd is empty: name the members of an etcd, as in [\"http://etcd1:2379\"], or take \
                 the table out"
                    .to_owned(),
            ),
            1..=ETCD_MAX => {}
            many => errors.push(format!("etcd has {many} addresses, and at most {ETCD_MAX}")),
        }
        let ttl_s = written.ttl.unwrap_or(TTL_MIN_S);
        if !(TTL_MIN_S..=TTL_MAX_S).contains(&ttl_s) {
            errors.push(format!("ttl {ttl_s}: seconds, from {TTL_MIN_S} to {TTL_MAX_S}"));
        }
        let ttl = Duration::from_secs(ttl_s);
        if errors.is_empty() { Ok(ClusterOptions { etcd, ttl }) } else { Err(errors) }
    }
}

/// The one way in which an address of etcd is written: with its port, and without a slash in the end.
fn normal_url(url: &str) -> Result<String, String> {
    if url.starts_with("https://") {
        return Err(format!(
            "etcd `{url}`: dray speaks to etcd without TLS: write http://, on a network that only \
             servers can reach"
        ));
    }
    let wrong = || format!("etcd `{url}`: it is written http://HOST or http://HOST:PORT");
    let host = url.strip_prefix("http://").ok_or_else(wrong)?;
    let host = host.strip_suffix('/').unwrap_or(host);
    let tcp = match host.rsplit_once(':') {
        Some((_, port)) if !port.contains(']') => format!("tcp://{host}"),
        _ => format!("tcp://{host}:{ETCD_PORT}"),
    };
    let normal = super::parse::normal_server(&tcp).map_err(|_| wrong())?;
    Ok(normal.replacen("tcp://", "http://", 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<ClusterOptions, String> {
        let table: toml::Table = text.parse().unwrap();
        ClusterOptions::read(&table["cluster"]).map_err(|errors| errors.join("\n"))
    }

    #[test]
    fn addresses_of_etcd_have_one_form() {
        let written = "[cluster]\netcd = ['http://Etcd1', 'http://10.0.0.2:2380/', 'http://[fd00::3]']\nttl = 5";
        let options = read(written).unwrap();
        let etcd = ["http://etcd1:2379", "http://10.0.0.2:2380", "http://[fd00::3]:2379"];
        assert_eq!(
            (options.etcd, options.ttl),
            (etcd.map(String::from).into(), Duration::from_secs(5))
        );
        assert_eq!(read("[cluster]\netcd = ['http://a']").unwrap().ttl, Duration::from_secs(2));
    }

    #[test]
    fn what_is_wrong_is_said_with_what_to_do() {
        for (text, hint) in [
            ("cluster = 7", "expected"),
            ("[cluster]", "etcd"),
            ("[cluster]\netcd = []", "take the table out"),
            ("[cluster]\netcd = ['etcd1:2379']", "http://HOST"),
            ("[cluster]\netcd = ['http://']", "http://HOST"),
            ("[cluster]\netcd = ['http://a/v3']", "http://HOST"),
            ("[cluster]\netcd = ['http://a:0']", "http://HOST"),
            ("[cluster]\netcd = ['http://a:99999']", "http://HOST"),
            ("[cluster]\netcd = ['http://fd00::3']", "http://HOST"),
            ("[cluster]\netcd = ['https://a']", "without TLS"),
            ("[cluster]\netcd = ['http://a', 'http://A:2379']", "twice"),
            ("[cluster]\netcd = ['http://a']\nttl = 1", "from 2 to 60"),
            ("[cluster]\netcd = ['http://a']\nttl = -1", "expected"),
            ("[cluster]\netcd = ['http://a']\ntls = true", "tls"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(hint), "{text}: {error}");
        }
    }
}
