//! Reads definitions, and says what is wrong with one.

use std::fmt;

use serde::Deserialize;

use super::cluster::{ClusterOptions, FAILOVER_SERVERS_MAX};
use super::definition::{Definition, HashKind, Layout};

/// Servers of one projection at most.
pub const SERVERS_MAX: usize = 256;
/// Bounds of a stripe, bytes.
const STRIPE_MIN_BYTES: u64 = 4 << 10;
const STRIPE_MAX_BYTES: u64 = 1 << 30;
const STRIPE_DEFAULT_BYTES: u64 = 1 << 20;
/// Longest name of a projection, bytes: that of an export.
const NAME_MAX_BYTES: usize = 64;
/// dray's port where none is given.
const DEFAULT_PORT: &str = "7440";

/// What is wrong with a definition, and how to mend it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DefinitionError {
    /// Which projection; none: the file as a whole.
    pub projection: Option<String>,
    /// For people.
    pub what: String,
}

impl fmt::Display for DefinitionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.projection {
            Some(name) => write!(f, "projection `{name}`: {}", self.what),
            None => f.write_str(&self.what),
        }
    }
}

impl std::error::Error for DefinitionError {}

/// A table `[projection.NAME]` as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenProjection {
    layout: String,
    servers: Vec<String>,
    path: String,
    width: Option<toml::Value>,
    stripe: Option<WrittenSize>,
    data_hash: Option<String>,
    meta_hash: Option<String>,
    #[serde(default)]
    spread_creates: bool,
    #[serde(default)]
    atomic: bool,
    failover: Option<bool>,
    #[serde(default)]
    leases: bool,
    #[serde(default)]
    export: toml::Table,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum WrittenSize {
    Bytes(u64),
    Text(String),
}

/// Reads a file of `[projection.NAME]` tables, and of `[cluster]` if they have failover. A text that was
/// made for clients says that there is failover, and has no `[cluster]`. Errors: all that is wrong, each
/// with what to do.
pub fn parse_definitions(text: &str) -> Result<Vec<Definition>, Vec<DefinitionError>> {
    let whole = |what: String| vec![DefinitionError { projection: None, what }];
    let file: toml::Table = text.parse().map_err(|error: toml::de::Error| {
        whole(format!("this is no TOML: {}", error.to_string().trim_end()))
    })?;
    let known = |key: &str| matches!(key, "projection" | "cluster");
    if let Some(key) = file.keys().find(|key| !known(key)) {
        let what = format!("unknown table `{key}`: projections stand in [projection.NAME]");
        return Err(whole(what));
    }
    let projections = match file.get("projection") {
        Some(toml::Value::Table(projections)) if !projections.is_empty() => projections,
        _ => return Err(whole("there is no [projection.NAME] in it: add one".to_owned())),
    };
    let (mut definitions, mut errors) = (Vec::new(), Vec::new());
    let cluster = file.get("cluster").map(ClusterOptions::read).transpose();
    let cluster = cluster.unwrap_or_else(|all| {
        let of_table =
            |what| DefinitionError { projection: None, what: format!("[cluster]: {what}") };
        errors.extend(all.into_iter().map(of_table));
        None
    });
    for (name, value) in projections {
        match read_projection(name, value, cluster.as_ref()) {
            Ok(definition) => definitions.push(definition),
            Err(all) => errors.extend(
                all.into_iter()
                    .map(|what| DefinitionError { projection: Some(name.clone()), what }),
            ),
        }
    }
    if errors.is_empty() { Ok(definitions) } else { Err(errors) }
}

fn read_projection(
    name: &str,
    value: &toml::Value,
    cluster: Option<&ClusterOptions>,
) -> Result<Definition, Vec<String>> {
    let written: WrittenProjection = value
        .clone()
        .try_into()
        .map_err(|error: toml::de::Error| vec![error.to_string().trim_end().replace('\n', " ")])?;
    let mut errors = Vec::new();
    let mut note = |what: String| errors.push(what);
    if let Err(what) = check_name(name) {
        note(what);
    }
    let layout = one_of("layout", &written.layout, &Layout::NAMES, &mut note);
    let mut hash = |key: &str, value: &Option<String>| match value {
        Some(value) => one_of(key, value, &HashKind::NAMES, &mut note),
        None => Some(HashKind::Rendezvous),
    };
    let (data_hash, meta_hash) =
        (hash("data_hash", &written.data_hash), hash("meta_hash", &written.meta_hash));
    let servers = check_servers(&written.servers, &mut note);
    if !written.path.starts_with('/') || written.path.split('/').any(|part| part == "..") {
        note(format!("path `{}`: an absolute path without `..` is needed", written.path));
    }
    let width = check_width(written.width.as_ref(), layout, written.servers.len(), &mut note);
    let stripe_bytes = check_stripe(written.stripe.as_ref(), &mut note);
    let failover = written.failover.unwrap_or(cluster.is_some());
    if let Some(layout) = layout.filter(|_| failover) {
        check_failover(layout, servers.len(), &mut note);
    }
    if let Some(layout) = layout.filter(|_| written.leases) {
        let one_hash = data_hash == meta_hash && !written.spread_creates;
        check_leases(layout, one_hash, &mut note);
    }
    match (layout, data_hash, meta_hash) {
        (Some(layout), Some(data_hash), Some(meta_hash)) if errors.is_empty() => Ok(Definition {
            name: name.to_owned(),
            layout,
            servers,
            path: written.path,
            width,
            stripe_bytes,
            data_hash,
            meta_hash,
            spread_creates: written.spread_creates,
            atomic: written.atomic,
            failover,
            leases: written.leases,
            export: written.export,
            cluster: cluster.filter(|_| failover).cloned(),
        }),
        _ => Err(errors),
    }
}

/// `one_hash`: each directory's names are at the server of its attributes.
fn check_leases(layout: Layout, one_hash: bool, note: &mut impl FnMut(String)) {
    match layout {
        Layout::Cluster => {}
        Layout::LoadBalance => note(
            "leases: what nobody changes through dray needs none: leave them out, and mount with \
             consistency=immutable"
                .to_owned(),
        ),
        Layout::ClusterStripe | Layout::File | Layout::Stripe => note(format!(
            "leases: the layout {layout} has the data of one file at several servers: leave them out, or say \
             layout = \"cluster\""
        )),
    }
    if !one_hash {
        note(
            "leases: a directory's names and attributes have to be at one server: say the same for data_hash and \
             meta_hash, and leave spread_creates out"
                .to_owned(),
        );
    }
}

/// As names of exports are.
fn check_name(name: &str) -> Result<(), String> {
    let sound = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let begins = !name.starts_with(['.', '-']);
    match name.len() {
        1..=NAME_MAX_BYTES if name.chars().all(sound) && begins => Ok(()),
        _ => Err(format!(
            "the name takes 1 to {NAME_MAX_BYTES} letters, digits, `.`, `_` and `-`, and begins with \
             none of the last but `_`"
        )),
    }
}

fn one_of<T: Copy>(
    key: &str,
    value: &str,
    names: &[(&'static str, T)],
    note: &mut impl FnMut(String),
) -> Option<T> {
    let found = names.iter().find(|(name, _)| *name == value).map(|(_, one)| *one);
    if found.is_none() {
        let known: Vec<&str> = names.iter().map(|(name, _)| *name).collect();
        note(format!("{key} `{value}` is unknown: it is one of {}", known.join(", ")));
    }
    found
}

fn check_servers(written: &[String], note: &mut impl FnMut(String)) -> Vec<String> {
    let mut servers: Vec<String> = Vec::with_capacity(written.len());
    for server in written {
        match normal_server(server) {
            Ok(server) if servers.contains(&server) => {
                note(format!("the server {server} is there twice: leave one of them out"));
            }
            Ok(server) => servers.push(server),
            Err(what) => note(what),
        }
    }
    match written.len() {
        0 => note("servers is empty: name at least one, as in [\"tcp://io1\"]".to_owned()),
        1..=SERVERS_MAX => {}
        many => note(format!("{many} servers: a projection has at most {SERVERS_MAX}")),
    }
    servers
}

/// The one way in which a server's address is written: with its port. Errors: it is no address.
pub(super) fn normal_server(server: &str) -> Result<String, String> {
    let wrong =
        || format!("server `{server}`: it is written tcp://HOST, tcp://HOST:PORT or unix:///PATH");
    if let Some(path) = server.strip_prefix("unix://") {
        return if path.starts_with('/') { Ok(server.to_owned()) } else { Err(wrong()) };
    }
    let host = server.strip_prefix("tcp://").ok_or_else(wrong)?;
    let host = host.strip_suffix('/').unwrap_or(host);
    let bare_v6 = host.matches(':').count() > 1 && !host.starts_with('[');
    let known =
        |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':' | '[' | ']');
    if host.is_empty() || bare_v6 || !host.chars().all(known) {
        return Err(wrong());
    }
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !port.contains(']') => (name, port),
        _ => (host, DEFAULT_PORT),
    };
    let closed = name.starts_with('[') == name.ends_with(']');
    if name.is_empty() || !closed || !port.parse::<u16>().is_ok_and(|port| port != 0) {
        return Err(wrong());
    }
    Ok(format!("tcp://{}:{}", name.to_ascii_lowercase(), port.trim_start_matches('0')))
}

/// `servers`: how many there are.
fn check_width(
    written: Option<&toml::Value>,
    layout: Option<Layout>,
    servers: usize,
    note: &mut impl FnMut(String),
) -> usize {
    let Some(written) = written else {
        return layout.filter(|layout| layout.is_striped()).map_or(1, |_| servers);
    };
    let number = written.as_integer().and_then(|width| usize::try_from(width).ok());
    match number {
        Some(width) if (1..=servers.max(1)).contains(&width) => width,
        _ => {
            note(format!(
                "width {written}: it is a number of servers, from 1 to {}",
                servers.max(1)
            ));
            1
        }
    }
}

fn check_failover(layout: Layout, servers: usize, note: &mut impl FnMut(String)) {
    match layout {
        Layout::Cluster | Layout::ClusterStripe => {}
        Layout::File | Layout::Stripe | Layout::LoadBalance => note(format!(
            "failover is for layouts over a shared file system, cluster and cluster-stripe: this is \
             {layout}; say failover = false in it, or take [cluster] out"
        )),
    }
    match servers {
        0..2 => {
            note("failover needs at least two servers: add one, or say failover = false".to_owned())
        }
        2..=FAILOVER_SERVERS_MAX => {}
        many => {
            note(format!("{many} servers: with failover there are at most {FAILOVER_SERVERS_MAX}"))
        }
    }
}

fn check_stripe(written: Option<&WrittenSize>, note: &mut impl FnMut(String)) -> u64 {
    let bytes = match written {
        None => return STRIPE_DEFAULT_BYTES,
        Some(WrittenSize::Bytes(bytes)) => Some(*bytes),
        Some(WrittenSize::Text(text)) => size_of(text),
    };
    match bytes {
        Some(bytes)
            if bytes.is_power_of_two()
                && (STRIPE_MIN_BYTES..=STRIPE_MAX_BYTES).contains(&bytes) =>
        {
            bytes
        }
        _ => {
            note("stripe: a power of two from 4K to 1G is needed, as in \"1M\"".to_owned());
            STRIPE_DEFAULT_BYTES
        }
    }
}

/// `512K`, `1M`, `1G` or bytes.
fn size_of(text: &str) -> Option<u64> {
    let shift = match text.as_bytes().last()? {
        b'K' | b'k' => 10,
        b'M' | b'm' => 20,
        b'G' | b'g' => 30,
        _ => return text.parse().ok(),
    };
    let number: u64 = text[..text.len() - 1].trim().parse().ok()?;
    number.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
        [projection.scratch]
        layout = "cluster-stripe"
        servers = ["tcp://io1", "tcp://IO2:7441", "unix:///run/dray/io3.sock", "tcp://[fd00::3]"]
        path = "/lustre/scratch"
        width = 2
        stripe = "512K"
        data_hash = "fnv-1a"
        export = { squash = "none" }
    "#;

    fn errors(text: &str) -> String {
        let errors = parse_definitions(text).unwrap_err();
        errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn a_definition_and_its_canonical_text_say_the_same() {
        let all = parse_definitions(GOOD).unwrap();
        let [one] = &all[..] else { panic!("{all:?}") };
        assert_eq!(one.servers[0], "tcp://io1:7440");
        assert_eq!(one.servers[1], "tcp://io2:7441");
        assert_eq!(one.servers[3], "tcp://[fd00::3]:7440");
        assert_eq!((one.width, one.stripe_bytes), (2, 512 << 10));
        assert_eq!((one.data_hash, one.meta_hash), (HashKind::Fnv1a, HashKind::Rendezvous));
        assert_eq!(one.position("tcp://io2:7441"), Some(1));
        assert_eq!(one.position("tcp://io9"), None);
        let again = parse_definitions(&one.canonical()).unwrap().remove(0);
        assert_eq!(again.canonical(), one.canonical());
        assert_eq!(again.fingerprint(), one.fingerprint());
        // What the servers alone use does not make another projection.
        assert!(again.export.is_empty() && !one.export.is_empty());
        let moved = Definition { path: "/other".into(), ..one.clone() };
        assert_ne!(moved.fingerprint(), one.fingerprint());
        assert_eq!(moved.fs_uuid(), one.fs_uuid());
    }

    #[test]
    fn what_is_wrong_is_said_with_what_to_do() {
        let with = |from: &str, to: &str| {
            assert!(GOOD.contains(from));
            errors(&GOOD.replace(from, to))
        };
        for (from, to, hint) in [
            ("\"cluster-stripe\"", "\"clustre\"", "one of cluster, cluster-stripe"),
            ("\"tcp://io1\"", "\"tcp://io2:7441\"", "twice"),
            ("\"tcp://io1\"", "\"io1\"", "tcp://HOST"),
            ("\"tcp://io1\"", "\"tcp://fd00::1\"", "tcp://HOST"),
            ("\"tcp://io1\"", "\"tcp://io1:0\"", "tcp://HOST"),
            ("width = 2", "width = 5", "from 1 to 4"),
            ("width = 2", "width = 0", "from 1 to 4"),
            ("width = 2", "width = -2", "width -2: it is a number of servers, from 1 to 4"),
            ("width = 2", "width = \"two\"", "width \"two\": it is a number of servers"),
            ("width = 2", "atomic = 7", "`atomic`"),
            ("\"512K\"", "\"500K\"", "power of two"),
            ("\"512K\"", "2048", "power of two"),
            ("\"512K\"", "\"99999999999G\"", "power of two"),
            ("\"fnv-1a\"", "\"md5\"", "rendezvous, jenkins"),
            ("\"/lustre/scratch\"", "\"scratch\"", "absolute"),
            ("\"/lustre/scratch\"", "\"/lustre/../etc\"", "without `..`"),
            ("projection.scratch", "projection.\"a/b\"", "letters, digits"),
            ("width = 2", "widht = 2", "widht"),
            ("path = \"/lustre/scratch\"", "", "path"),
        ] {
            let error = with(from, to);
            assert!(error.contains(hint), "{to}: {error}");
        }
        assert!(errors("").contains("[projection.NAME]"));
        assert!(errors("[projection]").contains("[projection.NAME]"));
        assert!(errors("[projektion.x]").contains("projektion"));
        assert!(errors("[projection.x").contains("no TOML"));
        let empty = "[projection.x]\nlayout = \"nine\"\nservers = []\npath = \"x\"";
        let all = errors(empty);
        assert!(all.contains("empty") && all.contains("absolute") && all.contains("nine"), "{all}");
    }

    const CLUSTER: &str = "[cluster]\netcd = ['http://etcd1:2379']\n";

    #[test]
    fn clients_learn_whether_there_is_failover_and_not_how() {
        let plain = parse_definitions(GOOD).unwrap().remove(0);
        let one = parse_definitions(&format!("{CLUSTER}{GOOD}")).unwrap().remove(0);
        assert!(one.failover && one.cluster.is_some() && !plain.failover);
        assert_ne!(one.fingerprint(), plain.fingerprint(), "clients have to know");
        let moved = CLUSTER.replace("etcd1", "etcd2");
        let moved = parse_definitions(&format!("{moved}{GOOD}")).unwrap().remove(0);
        assert_eq!(moved.fingerprint(), one.fingerprint());
        let client = parse_definitions(&one.canonical()).unwrap().remove(0);
        assert!(client.failover && client.cluster.is_none());
        assert_eq!(client.canonical(), one.canonical());
        let without = GOOD.replace("width = 2", "width = 2\nfailover = false");
        let without = parse_definitions(&format!("{CLUSTER}{without}")).unwrap().remove(0);
        assert_eq!(without.canonical(), plain.canonical());
        assert!(without.cluster.is_none());
    }

    #[test]
    fn failover_is_refused_where_there_can_be_none() {
        for layout in ["file", "stripe", "loadbalance"] {
            let text = format!("{CLUSTER}{}", GOOD.replace("cluster-stripe", layout));
            let said = errors(&text.replace("width = 2", ""));
            assert!(said.contains("layouts over a shared file system"), "{said}");
        }
        let servers = |count: usize| {
            let servers: Vec<String> = (0..count).map(|one| format!("'tcp://io{one}'")).collect();
            let layout = "layout = 'cluster'\npath = '/x'";
            let text =
                format!("{CLUSTER}[projection.x]\n{layout}\nservers = [{}]", servers.join(","));
            parse_definitions(&text).map_err(|errors| errors[0].to_string())
        };
        assert!(servers(1).unwrap_err().contains("at least two servers"));
        assert!(servers(FAILOVER_SERVERS_MAX).is_ok());
        assert!(servers(FAILOVER_SERVERS_MAX + 1).unwrap_err().contains("at most 16"));
        let said = errors(&format!("[cluster]\netcd = []\n{}", GOOD.replace("512K", "5K")));
        assert!(
            said.contains("[cluster]: etcd is empty") && said.contains("power of two"),
            "{said}"
        );
    }

    // proves: P274
    #[test]
    fn only_what_can_lease_may_say_that_it_does() {
        let with = |layout: &str, more: &str| {
            let text = format!(
                "[projection.x]\nlayout = '{layout}'\nservers = ['tcp://a', 'tcp://b']\npath = '/'\n\
                 leases = true\n{more}"
            );
            let read = parse_definitions(&text);
            read.map(|mut all| all.remove(0)).map_err(|all| format!("{:?}", all[0]))
        };
        let one = with("cluster", "").unwrap();
        let plain = Definition { leases: false, ..one.clone() };
        assert!(one.leases && one.fingerprint() != plain.fingerprint());
        assert!(!plain.canonical().contains("leases"), "it has the fingerprint of before");
        assert!(parse_definitions(&one.canonical()).unwrap()[0].leases);
        assert!(with("cluster", "failover = true").unwrap().leases);
        for (layout, more, hint) in [
            ("cluster-stripe", "", "several servers"),
            ("file", "", "several servers"),
            ("stripe", "", "several servers"),
            ("loadbalance", "", "immutable"),
            ("cluster", "spread_creates = true", "meta_hash"),
            ("cluster", "meta_hash = 'jenkins'", "meta_hash"),
            ("cluster-stripe", "failover = true", "several servers"),
        ] {
            let said = with(layout, more).unwrap_err();
            assert!(said.contains(hint), "{layout} {more}: {said}");
        }
    }
}
