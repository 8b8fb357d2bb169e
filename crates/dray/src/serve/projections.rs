//! Projections of which this server is a part: each one is an export, and its clients get the definition.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dray_fabric::Address;
use dray_layers::placement::{Definition, DefinitionError, Layout, parse_definitions};
use dray_rpc::server::ExportDefinition;

use crate::error::Failure;
use crate::serve::aggregation::AggregationPlan;
use crate::serve::config;
use crate::serve::export::ExportPlan;

/// A projection, as one of its servers has it.
#[derive(Debug)]
pub struct ServedProjection {
    pub definition: Definition,
    /// Which of its servers this one is, counted from 0.
    pub position: usize,
}

impl ServedProjection {
    /// What clients are given.
    pub fn for_clients(&self) -> ExportDefinition {
        ExportDefinition {
            fingerprint: self.definition.fingerprint(),
            text: self.definition.canonical(),
        }
    }

    /// Whether a client asks several servers for one file, so that all must give it the same id.
    pub fn shares_ids(&self) -> bool {
        match self.definition.layout {
            Layout::Cluster | Layout::ClusterStripe => true,
            Layout::File | Layout::Stripe | Layout::LoadBalance => false,
        }
    }

    /// Whether each server has a disk of its own.
    pub fn has_own_disks(&self) -> bool {
        !self.definition.layout.is_shared()
    }

    /// Whether this server has the names of a projection over servers with their own disks.
    pub fn is_home(&self) -> bool {
        self.has_own_disks() && self.position == 0
    }
}

/// The names of a server among those of a projection.
#[derive(Clone, Copy)]
pub struct ServerNames<'a> {
    /// As the administrator says.
    pub named: Option<&'a str>,
    /// Where it listens, which counts where nothing is said.
    pub listen: &'a [Address],
}

/// The projections in `file`. Errors: all that is wrong in it.
pub fn definitions_in(file: &Path) -> Result<Vec<Definition>, Failure> {
    let text = config::read_text(file, "projections")?;
    let definitions = parse_definitions(&text).map_err(|errors| {
        let line = |error: &DefinitionError| format!("{}: {error}", file.display());
        Failure::usage(errors.iter().map(line).collect::<Vec<_>>().join("\n"))
    })?;
    // As in a text for clients, who need no more.
    if let Some(lost) = definitions.iter().find(|one| one.failover && one.cluster.is_none()) {
        return Err(Failure::usage(format!(
            "{}: projection `{}`: failover needs a table [cluster] with etcd = [\"http://HOST\"]",
            file.display(),
            lost.name
        )));
    }
    Ok(definitions)
}

/// What is wrong with the names of the servers: those that have no address here.
pub fn unresolved_servers(file: &Path, definition: &Definition) -> Vec<String> {
    let resolve = |server: &String| {
        let Ok(Address::Tcp { host, port }) = server.parse() else { return None };
        let error = (host.as_str(), port).to_socket_addrs().err()?;
        Some(format!(
            "{}: projection `{}`: server {server}: the name has no address here ({error}): mend it \
             here, or in DNS or /etc/hosts",
            file.display(),
            definition.name
        ))
    };
    definition.servers.iter().filter_map(resolve).collect()
}

/// Servers that have an address of one before them in the definition: one server under two names. Servers
/// without an address here are left out. A server that serves does not ask this. Behind a router that
/// translates addresses, two servers of a sound projection can look like one.
pub fn servers_named_twice(file: &Path, definition: &Definition) -> Vec<String> {
    let addresses = |server: &String| match server.parse() {
        Ok(Address::Tcp { host, port }) => {
            (host.as_str(), port).to_socket_addrs().map(Iterator::collect).unwrap_or_default()
        }
        _ => Vec::new(),
    };
    let mut known: Vec<(&String, Vec<SocketAddr>)> = Vec::with_capacity(definition.servers.len());
    let mut twice = Vec::new();
    for server in &definition.servers {
        let own = addresses(server);
        let has_own =
            |(_, all): &&(&String, Vec<SocketAddr>)| all.iter().any(|one| own.contains(one));
        if let Some((first, shared)) = known.iter().find(has_own) {
            let address = shared.iter().find(|one| own.contains(one)).map(ToString::to_string);
            twice.push(format!(
                "{}: projection `{}`: {first} and {server} are one server, {}: leave one of them out, or \
                 mend DNS or /etc/hosts",
                file.display(),
                definition.name,
                address.unwrap_or_default()
            ));
        }
        known.push((server, own));
    }
    twice
}

/// The exports of the projections in `file` that this server is a part of. Errors: anything is wrong
/// in it, or the server is in none of them.
pub fn exports_of(file: &Path, names: ServerNames<'_>) -> Result<Vec<ExportPlan>, Failure> {
    let shown = file.display();
    let definitions = definitions_in(file)?;
    let mut exports = Vec::new();
    for definition in &definitions {
        let name = &definition.name;
        let of = |what: String| Failure::usage(format!("{shown}: projection `{name}`: {what}"));
        let Some(position) = names.position_in(definition).map_err(of)? else { continue };
        exports.push(export_of(definition, position).map_err(of)?);
    }
    if exports.is_empty() {
        return Err(Failure::usage(format!("{shown}: {}", names.are_in_none())));
    }
    Ok(exports)
}

impl ServerNames<'_> {
    fn position_in(&self, definition: &Definition) -> Result<Option<usize>, String> {
        if let Some(name) = self.named {
            return Ok(definition.position(name));
        }
        let mut found: Vec<usize> = self
            .listen
            .iter()
            .filter_map(|address| definition.position(&address.to_string()))
            .collect();
        found.dedup();
        match found[..] {
            [] => Ok(None),
            [position] => Ok(Some(position)),
            _ => Err(
                "this server listens at the addresses of several of its servers: say which one it \
                      is, with --server NAME or server = \"NAME\""
                    .to_owned(),
            ),
        }
    }

    fn are_in_none(&self) -> String {
        match self.named {
            Some(name) => format!("`{name}` is among the servers of none of its projections"),
            None => {
                let listen: Vec<String> = self.listen.iter().map(ToString::to_string).collect();
                format!(
                    "no projection has a server {}, where this one listens: say which of the servers \
                     it is, with --server NAME or server = \"NAME\"",
                    listen.join(" or ")
                )
            }
        }
    }
}

/// Memory for data read ahead at a server with blocks of files, where the definition says nothing.
const STRIPED_READ_AHEAD: &str = "64M";

fn export_of(definition: &Definition, position: usize) -> Result<ExportPlan, String> {
    let (name, dir) = (&definition.name, directory_of(definition, position));
    let mut options = definition.export.clone();
    if definition.layout == Layout::LoadBalance {
        // Each client sees what its own server has, and nothing keeps the servers' copies equal.
        options.insert("read_only".into(), true.into());
    }
    if definition.layout == Layout::Stripe {
        // Where a block of another server follows, the kernel's own read-ahead stops.
        options.entry("read_ahead").or_insert_with(|| STRIPED_READ_AHEAD.into());
    }
    if options.contains_key("leases") {
        return Err(
            "leases belongs into [projection.NAME], since clients have to know it".to_owned()
        );
    }
    if options.get("write_leases").and_then(toml::Value::as_bool) == Some(true) {
        return Err(
            "write_leases: the servers of a projection lease no writes; leave it out".to_owned()
        );
    }
    if definition.leases {
        options.insert("leases".into(), true.into());
    }
    let mut plan = config::projected_export(name, &dir, &options)?;
    if !definition.layout.is_shared() && !plan.backend.has_directory() {
        let backend = plan.backend.name();
        return Err(format!(
            "the layout {} takes a directory at each server, and the backend {backend} has none",
            definition.layout
        ));
    }
    if definition.failover && plan.aggregation != AggregationPlan::default() {
        return Err("read_ahead and merge_writes keep data at one server, where the server that takes over \
                    does not find them: leave them out, or say failover = false"
            .to_owned());
    }
    let projection = ServedProjection { definition: definition.clone(), position };
    let bytes = projection.for_clients().text.len();
    if bytes > ExportDefinition::TEXT_MAX_BYTES {
        let most = ExportDefinition::TEXT_MAX_BYTES;
        return Err(format!("it has {bytes} bytes, and at most {most}: use shorter names"));
    }
    plan.projection = Some(Arc::new(projection));
    Ok(plan)
}

/// What a path of servers with their own disks has in place of the number of the server, from 1 on.
/// Several of them may be on one machine.
const SERVER_NUMBER: &str = "%n";

/// Where the server with this position, from 0 on, has its files.
pub fn directory_of(definition: &Definition, position: usize) -> PathBuf {
    match definition.layout.is_shared() {
        true => PathBuf::from(&definition.path),
        false => definition.path.replace(SERVER_NUMBER, &(position + 1).to_string()).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const THREE: &str = "[projection.scratch]\nlayout = 'cluster'\npath = '/srv'\nservers = ['tcp://io1', \
                         'tcp://io2', 'tcp://io3:7000']\n";

    fn exports(
        text: &str,
        named: Option<&str>,
        listen: &[&str],
    ) -> Result<Vec<ExportPlan>, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let listen: Vec<Address> = listen.iter().map(|one| one.parse().unwrap()).collect();
        let outcome = exports_of(file.path(), ServerNames { named, listen: &listen });
        outcome.map_err(|failure| {
            assert_eq!(failure.code, crate::error::EXIT_USAGE);
            failure.message
        })
    }

    #[test]
    fn a_server_finds_itself_by_its_name_or_by_where_it_listens() {
        for (named, listen, position) in [
            (Some("tcp://io1"), "tcp://0.0.0.0", 0),
            (Some("tcp://io2:7440"), "tcp://io1", 1),
            (None, "tcp://io3:7000", 2),
        ] {
            let exports = exports(THREE, named, &[listen]).unwrap();
            let projection = exports[0].projection.as_ref().unwrap();
            assert_eq!((exports[0].name.as_str(), projection.position), ("scratch", position));
            assert_eq!(exports[0].dir, PathBuf::from("/srv"));
        }
        for (named, listen, words) in [
            (Some("tcp://io9"), &["tcp://io1"][..], "`tcp://io9` is among the servers of none"),
            (None, &["tcp://0.0.0.0"], "no projection has a server tcp://0.0.0.0:7440, where"),
            (None, &["tcp://io1", "tcp://io2"], "listens at the addresses of several"),
        ] {
            let said = exports(THREE, named, listen).unwrap_err();
            assert!(said.contains(words), "{said}");
        }
    }

    #[test]
    fn servers_with_their_own_disks_have_their_own_directories() {
        for (layout, dir) in
            [("'file'", "/srv/3"), ("'stripe'", "/srv/3"), ("'cluster'", "/srv/%n")]
        {
            let text = THREE.replace("'cluster'", layout).replace("'/srv'", "'/srv/%n'");
            let exports = exports(&text, None, &["tcp://io3:7000"]).unwrap();
            assert_eq!(exports[0].dir, PathBuf::from(dir), "{layout}");
        }
    }

    #[test]
    fn servers_with_blocks_of_files_read_ahead_unless_configured_otherwise() {
        for (layout, options, bytes) in [
            ("stripe", "", 64 << 20),
            ("stripe", "read_ahead = '0'", 0),
            ("stripe", "read_ahead = '8M'", 8 << 20),
            ("file", "", 0),
            ("cluster", "", 0),
        ] {
            let text = THREE.replace("'cluster'", &format!("'{layout}'"));
            let text = format!("{text}[projection.scratch.export]\n{options}\n");
            let plan = exports(&text, Some("tcp://io1"), &[]).unwrap().remove(0);
            assert_eq!(plan.aggregation.read_ahead_bytes, bytes, "{layout} {options}");
        }
    }

    #[test]
    fn options_of_the_export_stand_in_the_subtable() {
        let with = |options: &str| {
            let text = format!("{THREE}[projection.scratch.export]\n{options}\n");
            exports(&text, Some("tcp://io1"), &[])
        };
        let plan = with("insecure = true\nsquash = 'none'\nmountpoint = true").unwrap().remove(0);
        assert!(plan.insecure && !plan.read_only);
        assert!(format!("{:?}", plan.source).contains("mountpoint: Some(\"/srv\")"));
        for (options, words) in [
            ("squahs = 'none'", "did you mean `squash`?"),
            ("dir = '/other'", "unknown key `dir`"),
            ("squash = 'rot'", "did you mean `root`?"),
            ("read_only = 7", "expected true or false"),
        ] {
            let said = with(options).unwrap_err();
            assert!(said.contains(words), "{options}: {said}");
        }
        // They are the server's affair: clients do not learn them.
        let [plain, other] = ["", "insecure = true"]
            .map(|options| with(options).unwrap()[0].projection.as_ref().unwrap().for_clients());
        assert_eq!(plain, other);
    }

    // proves: P326
    #[test]
    fn what_cannot_be_served_is_refused_in_words() {
        let replaced =
            |from: &str, to: &str| exports(&THREE.replace(from, to), Some("tcp://io1"), &[]);
        for (layout, read_only) in
            [("cluster-stripe", false), ("loadbalance", true), ("stripe", false)]
        {
            let plan = replaced("'cluster'", &format!("'{layout}'")).unwrap().remove(0);
            assert_eq!(plan.read_only, read_only, "{layout}");
        }
        let said = replaced("'cluster'", "'clusters'").unwrap_err();
        assert!(said.contains("projection `scratch`: layout `clusters` is unknown"), "{said}");
        let said = replaced("io2", "io1").unwrap_err();
        assert!(said.contains("is there twice"), "{said}");
        assert!(exports("", None, &[]).unwrap_err().contains("there is no [projection.NAME]"));
        let said = exports(&format!("{THREE}failover = true"), Some("tcp://io1"), &[]).unwrap_err();
        assert!(said.contains("failover needs a table [cluster]"), "{said}");
        let leases = "leases = true\n[projection.scratch.export]\nwrite_leases =";
        let with = |value| exports(&format!("{THREE}{leases} {value}"), Some("tcp://io1"), &[]);
        assert!(with("false").unwrap()[0].leases);
        let said = with("true").unwrap_err();
        assert!(said.contains("a projection lease no writes; leave it out"), "{said}");
    }
}
