//! The plan of a server, from the command line and its configuration.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use dray_fabric::{Address, BufferPool};
use dray_rpc::auth::Key;
use dray_rpc::server::ServerOptions;

use crate::args::ServeArgs;
use crate::error::Failure;
use crate::key;
use crate::mount::mount_table::{self, UnderlyingDirectory};
use crate::serve::config::Config;
use crate::serve::export::{ExportPlan, check_threads};
use crate::serve::export_state::ExportState;
use crate::serve::forward;
use crate::serve::projections::{self, ServerNames};
use crate::serve::state::boot_id;

/// Where a server listens by default: this machine alone can get there.
const DEFAULT_LISTEN: &str = "127.0.0.1";

/// Everything that configures a server.
pub struct ServePlan {
    pub config: Config,
    pub exports: Vec<ExportPlan>,
    pub listen: Vec<Address>,
    pub auth: String,
    pub metrics: Option<String>,
    /// The state directory, if one is named.
    pub state: Option<PathBuf>,
    pub threads: usize,
    /// Of the machine.
    pub boot: u128,
}

/// Of the command line, which has precedence, and the configuration that it names.
pub fn plan(args: ServeArgs) -> Result<ServePlan, Failure> {
    let config = match &args.config {
        Some(path) => Config::read(path)?,
        None => Config::default(),
    };
    let mut exports = config.exports().map_err(Failure::usage)?;
    exports.extend(args.export);
    let mut listen = args.listen;
    if listen.is_empty() {
        listen = config.addresses().map_err(Failure::usage)?;
    }
    if listen.is_empty() {
        listen.push(Address::tcp(DEFAULT_LISTEN));
    }
    let named = args.server.or(config.server.clone());
    match (args.projections.or(config.projections.clone()), &named) {
        (Some(file), named) => {
            let names = ServerNames { named: named.as_deref(), listen: &listen };
            let of_projections = projections::exports_of(&file, names)?;
            must_resolve(&file, &of_projections)?;
            exports.extend(of_projections);
        }
        (None, Some(name)) => {
            return Err(Failure::usage(format!(
                "`{name}` says which server of a projection this is, and no file of projections is \
                 named: add --projections FILE or projections = \"FILE\""
            )));
        }
        (None, None) => {}
    }
    if exports.is_empty() {
        let why = match &args.config {
            Some(path) => format!(
                "{}: nothing to serve: it has no [[export]], and the command line no --export NAME=DIR",
                path.display()
            ),
            None => "nothing to serve: name a directory with --export NAME=DIR, or a file with \
                     --config"
                .to_owned(),
        };
        return Err(Failure::usage(why));
    }
    for (index, export) in exports.iter().enumerate() {
        if exports[..index].iter().any(|other| other.name == export.name) {
            return Err(Failure::usage(format!(
                "two exports are called `{}`: give one of them another name",
                export.name
            )));
        }
    }
    let threads = args.threads.or(config.threads).unwrap_or(0);
    check_threads(threads).map_err(|what| Failure::usage(format!("--{what}")))?;
    Ok(ServePlan {
        exports,
        auth: args.auth.or(config.auth.clone()).unwrap_or_else(key::default_auth),
        metrics: args.metrics.or(config.metrics.clone()),
        state: args.state.or(config.state.clone()),
        listen,
        threads,
        boot: args.boot_id.unwrap_or_else(boot_id),
        config,
    })
}

/// A server whose name has no address is out of reach for clients. So nothing is served before all have one.
fn must_resolve(file: &Path, exports: &[ExportPlan]) -> Result<(), Failure> {
    let projections = exports.iter().filter_map(|export| export.projection.as_deref());
    let unresolved: Vec<String> = projections
        .flat_map(|one| projections::unresolved_servers(file, &one.definition))
        .collect();
    if unresolved.is_empty() { Ok(()) } else { Err(Failure::new(unresolved.join("\n"))) }
}

/// From these arguments of a server.
pub fn server_options(plan: &ServePlan) -> Result<ServerOptions, Failure> {
    let defaults = ServerOptions::default();
    let pool = match plan.config.buffers().map_err(Failure::usage)? {
        Some(mib) => BufferPool::new(mib << 20, mib << 18),
        None => defaults.pool,
    };
    Ok(ServerOptions {
        key: parse_auth(&plan.auth)?,
        lease: plan.config.lease().map_err(Failure::usage)?.unwrap_or(defaults.lease),
        sessions_max: plan.config.clients_max.unwrap_or(defaults.sessions_max),
        sessions_of_one_max: plan
            .config
            .clients_of_one_address_max
            .unwrap_or(defaults.sessions_of_one_max),
        boot: plan.boot,
        forwarding: forward::nodes(),
        pool,
        ..defaults
    })
}

/// `none` or `psk:FILE`.
pub fn parse_auth(text: &str) -> Result<Option<Key>, Failure> {
    let file = key_file(text).map_err(Failure::usage)?;
    file.map(|file| Key::from_file(file).map_err(Failure::usage)).transpose()
}

/// The file of `psk:FILE`; none of `none`.
pub fn key_file(text: &str) -> Result<Option<&Path>, String> {
    match text.split_once(':') {
        None if text == "none" => Ok(None),
        Some(("psk", file)) if !file.is_empty() => Ok(Some(Path::new(file))),
        _ => Err(format!("auth is none or psk:FILE, FILE holding the key, not `{text}`")),
    }
}

/// Says who can be any user here, where no key is asked for. A Unix socket is for root alone.
pub fn warn_of_openness(plan: &ServePlan) {
    if plan.auth != "none" {
        return;
    }
    let by_network = |address: &&Address| matches!(address, Address::Tcp { .. });
    for address in plan.listen.iter().filter(by_network) {
        log::warn!(
            "no key is asked for at {address}: root of each machine that gets there can act as any \
             user; so can any user who may use ports below 1024, as in many containers; \
             `dray key` makes a key, which servers and clients then use"
        );
        for export in plan.exports.iter().filter(|export| export.insecure) {
            log::warn!(
                "export `{}` is insecure: every user of each machine that gets to {address} can act \
                 as any other; leave `insecure` out, or use a key",
                export.name
            );
        }
    }
}

/// Says so where files can be had through two exports, be it by a second mount of their directory.
pub fn warn_of_sharing(exports: &[Arc<ExportState>]) {
    let paths: Vec<PathBuf> = exports.iter().map(|export| export.path()).collect();
    let paths: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
    let below = mount_table::below(&paths);
    for (index, one) in exports.iter().enumerate() {
        let shares = |other: usize| {
            let within = |one: usize, other: usize| paths[one].starts_with(paths[other]);
            let meet =
                |(one, other): (&UnderlyingDirectory, &UnderlyingDirectory)| one.meets(other);
            within(index, other)
                || within(other, index)
                || below[index].as_ref().zip(below[other].as_ref()).is_some_and(meet)
        };
        for other in (0..index).filter(|&other| shares(other)) {
            let other = &exports[other];
            log::warn!(
                "exports `{}` and `{}` have files in common: locks taken through one do not hold in \
                 the other; let clients that change the same files use one of them",
                other.name,
                one.name
            );
        }
    }
}
