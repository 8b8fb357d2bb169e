//! `dray serve`.

pub(crate) mod config;
pub(crate) mod descriptors;
pub(crate) mod export;
pub(crate) mod exported;
pub(crate) mod hang;
pub(crate) mod journal;
pub(crate) mod keeper;
pub(crate) mod keeper_process;
pub(crate) mod left_behind;
pub(crate) mod metrics;
pub(crate) mod opening;
pub(crate) mod state;
pub(crate) mod tidy;
pub(crate) mod workers;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dray_fabric::{Address, BufferPool, Listener};
use dray_rpc::auth::Key;
use dray_rpc::server::{Loss, Server, ServerOptions};
use dray_rt::{DriverKind, Executor, Handle, Scope, timeout};

use crate::args::ServeArgs;
use crate::control::{self, Kind};
use crate::endpoint::{self, Answer};
use crate::error::{Doing, Failure};
use crate::named::Named;
use crate::notify_systemd::notify;
use crate::serve::config::Config;
use crate::serve::descriptors::Descriptors;
use crate::serve::export::ExportPlan;
use crate::serve::exported::Exported;
use crate::serve::journal::{Boot, ServerJournal};
use crate::serve::keeper::KeeperClient;
use crate::serve::opening::{Opening, SharedState};
use crate::serve::state::{StateDir, boot_id};
use crate::serve::workers::{Stuck, Workers};
use crate::signals::{self, Ending};
use crate::status::report::ServerReport;
use crate::{metrics_http, paths};

/// Where a server listens that was not told: this machine alone can get there.
const DEFAULT_LISTEN: &str = "127.0.0.1";

/// How long no connection is accepted after one could not be.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);
/// That none can be is said this often.
const COMPLAIN_EVERY: Duration = Duration::from_secs(60);

/// Most threads that serve connections.
const THREADS_MAX: usize = 1024;

/// How long threads may take to end. One that a file system does not let go is left
/// behind: nothing else of the server may wait for it.
const END_MAX: Duration = Duration::from_secs(5);

/// How long a server that ends works for clients that have just left it, so that the next one
/// has no grace period for them.
const PARTED_MAX: Duration = Duration::from_secs(5);

/// Everything that a server is told.
struct ServePlan {
    config: Config,
    exports: Vec<ExportPlan>,
    listen: Vec<Address>,
    auth: String,
    metrics: Option<String>,
    state: PathBuf,
    threads: usize,
    /// Of the machine.
    boot: u128,
}

/// Serves until a signal asks for an end.
pub fn run(args: ServeArgs) -> Result<(), Failure> {
    let plan = plan(args)?;
    let mut options = server_options(&plan)?;
    warn_of_openness(&plan);
    warn_of_sharing(&plan.exports);
    let limit = paths::raise_file_limit();
    descriptors::warn_of_few(limit);
    let descriptors = Descriptors::divide(limit, plan.exports.len());
    options.connections_max = descriptors.connections.min(options.connections_max);
    signals::hold();
    let state = StateDir::open(&plan.state).map_err(|failure| match paths::is_root() {
        true => failure,
        false => Failure::new(format!("{}; `dray serve` must be started by root", failure.message)),
    })?;
    let state = Arc::new(Mutex::new(Some(state)));
    let keeper = start_keeper(&plan.state);
    // Nobody knows then who is to be waited for.
    let sessions_lost = !ServerJournal::is_there(&plan.state);
    let journal = ServerJournal::open(&plan.state)?;
    let boot = Boot::begin(&plan.state, options.boot)?;
    let loss = match boot.machine_lost {
        true if sessions_lost => Loss::SessionsToo,
        true => Loss::Unsynced,
        false => Loss::Nothing,
    };
    let names: Vec<&str> = plan.exports.iter().map(|export| export.name.as_str()).collect();
    let server = Server::awaiting(options, &names, Arc::new(journal));
    let exports: Vec<_> = plan.exports.iter().map(|plan| Arc::new(Exported::new(plan))).collect();
    opening::open_all(openings(&plan, &exports, &server, (&state, &keeper, descriptors), loss)?)?;
    let workers = Arc::new(Workers::new(&names, plan.threads));
    let mut executor =
        Executor::new(DriverKind::Epoll).doing(|| "cannot start the executor".into())?;
    let scope = Scope::new();
    let result = executor.block_on(async {
        let recovering = server.clone();
        scope.spawn_on(&Handle::current(), async move {
            recovering.recovered().await;
            if let Err(failure) = boot.note() {
                log::error!("{}; the next start waits for clients again", failure.message);
            }
        });
        let report = ServerReport {
            server: server.clone(),
            exports: exports.clone(),
            listen: plan.listen.iter().map(ToString::to_string).collect(),
            state: plan.state.display().to_string(),
            threads: workers.each(),
            since: dray_rt::now(),
        };
        if let Some(keeper) = keeper.clone() {
            let awaiting = server.clone();
            scope.spawn_on(&Handle::current(), async move {
                awaiting.opened().await;
                // By then every client has come back, or has been given up.
                dray_rt::sleep(awaiting.lease() * 2).await;
                keeper.release_inherited();
            });
        }
        let result = serve(&plan, report, &workers, &scope).await;
        notify("STOPPING=1");
        result
    });
    scope.kill(); // listeners close, and remove their sockets
    let stuck = workers.end(END_MAX);
    for (export, threads) in &stuck {
        log::error!(
            "export `{export}`: its file system does not let go of {threads} threads; the process \
             is gone when it does, and a new server serves the other exports meanwhile"
        );
    }
    leave_behind(&plan.state, &exports, &stuck);
    result?;
    server.disconnect();
    keeper.iter().for_each(|keeper| keeper.leave());
    // Whatever else there is belongs to the next server, or could hang as well: only what
    // others wait for is given back.
    drop(state.lock().unwrap_or_else(PoisonError::into_inner).take());
    std::process::exit(0)
}

/// Tells the next server for which exports it has to wait until we are gone.
fn leave_behind(state: &Path, exports: &[Arc<Exported>], stuck: &Stuck) {
    let is_held = |export: &&Arc<Exported>| stuck.contains_key(&export.name) || export.has_calls();
    for export in exports.iter().filter(is_held) {
        if let Err(error) = left_behind::note(state, &export.name) {
            log::error!(
                "cannot note that export `{}` has calls under way ({error}): a change that is made \
                 later than the next server starts may fail as if somebody else had made it",
                export.name
            );
        }
    }
}

/// What is to be opened, checked as far as that takes no file system.
fn openings(
    plan: &ServePlan,
    exports: &[Arc<Exported>],
    server: &Server,
    (state, keeper, descriptors): (&SharedState, &Option<Arc<KeeperClient>>, Descriptors),
    loss: Loss,
) -> Result<Vec<Opening>, Failure> {
    let opening = |(plan_of, exported): (&ExportPlan, &Arc<Exported>)| {
        Ok(Opening {
            plan: plan_of.clone(),
            faults: plan.config.faults_of(&plan_of.name).map_err(Failure::usage)?,
            exported: exported.clone(),
            state: state.clone(),
            keeper: keeper.clone(),
            descriptors,
            server: server.clone(),
            loss,
        })
    };
    plan.exports.iter().zip(exports).map(opening).collect()
}

fn plan(args: ServeArgs) -> Result<ServePlan, Failure> {
    let config = match &args.config {
        Some(path) => Config::read(path)?,
        None => Config::default(),
    };
    let mut exports = config.exports().map_err(Failure::usage)?;
    exports.extend(args.export);
    if exports.is_empty() {
        return Err(Failure::usage(
            "nothing to serve: name a directory with --export NAME=DIR, or a file with --config",
        ));
    }
    for (index, export) in exports.iter().enumerate() {
        if exports[..index].iter().any(|other| other.name == export.name) {
            return Err(Failure::usage(format!("two exports are called `{}`", export.name)));
        }
    }
    let mut listen = args.listen;
    if listen.is_empty() {
        listen = config.addresses().map_err(Failure::usage)?;
    }
    if listen.is_empty() {
        listen.push(Address::tcp(DEFAULT_LISTEN));
    }
    let threads = args.threads.or(config.threads).unwrap_or(0);
    if threads > THREADS_MAX {
        return Err(Failure::usage(format!("{threads} threads are more than {THREADS_MAX}")));
    }
    Ok(ServePlan {
        exports,
        auth: args.auth.or(config.auth.clone()).unwrap_or_else(|| "none".into()),
        metrics: args.metrics.or(config.metrics.clone()),
        state: args.state.or(config.state.clone()).unwrap_or_else(|| default_state(&listen[0])),
        listen,
        threads,
        boot: args.boot_id.unwrap_or_else(boot_id),
        config,
    })
}

/// Servers of one machine differ by where they listen, and so do their states.
fn default_state(listen: &Address) -> PathBuf {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' };
    paths::state_dir().join(listen.to_string().chars().map(plain).collect::<String>())
}

fn server_options(plan: &ServePlan) -> Result<ServerOptions, Failure> {
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
        pool,
        ..defaults
    })
}

/// `none` or `psk:FILE`.
pub fn parse_auth(text: &str) -> Result<Option<Key>, Failure> {
    match text.split_once(':') {
        None if text == "none" => Ok(None),
        Some(("psk", file)) if !file.is_empty() => {
            Key::from_file(Path::new(file)).map(Some).map_err(Failure::usage)
        }
        _ => Err(Failure::usage(format!(
            "auth is none or psk:FILE, FILE holding the key, not `{text}`"
        ))),
    }
}

/// Says so where anybody on the network can be any user here.
fn warn_of_openness(plan: &ServePlan) {
    let far = |address: &&Address| match address {
        Address::Tcp { host, .. } => {
            host != "localhost"
                && !host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
        }
        Address::Unix(_) => false,
    };
    let Some(address) = plan.listen.iter().find(far) else { return };
    for export in plan.exports.iter().filter(|export| export.allow.is_empty()) {
        if plan.auth == "none" {
            log::warn!(
                "everybody who gets to {address} can use export `{}` as any user: restrict it \
                 with allow=ADDRESS/BITS or --auth psk:FILE",
                export.name
            );
        }
    }
}

/// Says so where files can be had through two exports.
fn warn_of_sharing(exports: &[ExportPlan]) {
    for (index, one) in exports.iter().enumerate() {
        let shares = |other: &&ExportPlan| {
            one.dir.starts_with(&other.dir) || other.dir.starts_with(&one.dir)
        };
        for other in exports[..index].iter().filter(shares) {
            log::warn!(
                "exports `{}` and `{}` have files in common: locks taken through one do not hold in \
                 the other; let clients that change the same files use one of them",
                other.name,
                one.name
            );
        }
    }
}

/// Who keeps deleted files over our death. Without him they end with us, which is no
/// reason not to serve.
fn start_keeper(state: &Path) -> Option<Arc<KeeperClient>> {
    match KeeperClient::start(state) {
        Ok(keeper) => Some(Arc::new(keeper)),
        Err(failure) => {
            log::error!(
                "{}; files deleted while open are lost if the server dies",
                failure.message
            );
            None
        }
    }
}

async fn serve(
    plan: &ServePlan,
    mut report: ServerReport,
    workers: &Arc<Workers>,
    scope: &Scope,
) -> Result<(), Failure> {
    let ending = Ending::new().doing(|| "cannot wait for signals".into())?;
    let handle = Handle::current();
    let mut listeners = Vec::new();
    // Every address of IPv6 means every one of IPv4, too, but for those that are listened at.
    let mut wanted = plan.listen.clone();
    wanted.sort_by_key(|address| address.to_string().starts_with("tcp://[::]:"));
    for (index, address) in wanted.iter().enumerate() {
        let ours = &wanted[..index];
        let bound = Listener::bind_all(address).await;
        let bound = bound.map_err(|error| listen_problem(address, ours, &error))?;
        for (one, error) in bound.left_out {
            log::warn!("{address} is {one}, too, which is not listened at: {error}");
        }
        listeners.extend(bound.listeners);
    }
    report.listen = listeners.iter().map(|listener| listener.address().to_string()).collect();
    let (server, report) = (report.server.clone(), Arc::new(report));
    let control = listen_for_control(plan, &report, scope)?;
    listen_for_metrics(plan, &report, scope)?;
    let watched = report.clone();
    scope.spawn_on(&handle, async move { hang::watch(&watched).await });
    for export in &report.exports {
        scope.spawn_on(&handle, tidy::keep(export.clone()));
    }
    let leases = server.clone();
    scope.spawn_on(&handle, async move { leases.expire_leases().await });
    let names: Vec<&str> = plan.exports.iter().map(|export| export.name.as_str()).collect();
    let names = names.join(", ");
    for listener in listeners {
        log::info!("serving {names} at {}", listener.address());
        scope.spawn_on(&handle, accept(listener, server.clone(), workers.clone()));
    }
    notify(&format!("READY=1\nSTATUS=serving {names} at {}", report.listen.join(", ")));
    let signal = ending.wait().await.doing(|| "cannot wait for signals".into())?;
    log::info!("signal {signal}: ending; clients wait for the next server");
    if timeout(PARTED_MAX, server.parted()).await.is_err() {
        log::warn!(
            "clients that are gone are waited for by the next server: what they wrote last \
                    is not on media yet"
        );
    }
    drop(control);
    Ok(())
}

/// What became of an address, and what to do. `ours`: where this server listens already.
fn listen_problem(address: &Address, ours: &[Address], error: &io::Error) -> Failure {
    let unix = matches!(address, Address::Unix(_));
    let port =
        |address: &Address| address.to_string().rsplit_once(':').map(|(_, port)| port.to_owned());
    let other =
        ours.iter().find(|other| *other == address || !unix && port(other) == port(address));
    if let (Some(libc::EADDRINUSE), Some(other)) = (error.raw_os_error(), other) {
        return Failure::new(format!(
            "cannot listen on {address}: this server listens on {other} already, which takes that \
             in: leave one of both out"
        ));
    }
    let advice = match (error.raw_os_error(), unix) {
        (Some(libc::EADDRINUSE), false) => {
            "another server listens there (`ss -ltnp` says which): stop it, or choose another port"
        }
        (Some(libc::EADDRINUSE), true) => {
            "another server listens there: stop it, or choose another name"
        }
        (Some(libc::EEXIST), _) => "something that is no socket has that name: choose another one",
        (Some(libc::EADDRNOTAVAIL), _) => {
            "this machine has no such address (`ip address` shows those it has)"
        }
        (Some(libc::EACCES), false) => "ports below 1024 are root's",
        (Some(libc::ENOENT | libc::ENOTDIR), true) => "its directory must exist",
        (Some(libc::ENAMETOOLONG), true) => "sockets have paths of at most 107 bytes",
        (None, false) => "is the name right?",
        _ => "choose another address",
    };
    Failure::new(format!("cannot listen on {address}: {error}; {advice}"))
}

async fn accept(listener: Listener, server: Server, workers: Arc<Workers>) {
    let mut complained: Option<dray_rt::Instant> = None;
    loop {
        match listener.accept().await {
            Ok((socket, peer)) => {
                let Some(admission) = server.admit(peer) else { continue }; // it is closed
                let (workers, server) = (workers.clone(), server.clone());
                dray_rt::spawn(async move {
                    workers.serve(&server, (socket, peer), admission).await;
                });
            }
            Err(error) => {
                // Out of descriptors or memory: what there is goes on, and later is better.
                if complained.is_none_or(|last| last.elapsed() >= COMPLAIN_EVERY) {
                    complained = Some(dray_rt::now());
                    log::error!("cannot accept a connection on {}: {error}", listener.address());
                }
                dray_rt::sleep(ACCEPT_AGAIN).await;
            }
        }
    }
}

fn listen_for_control(
    plan: &ServePlan,
    report: &Arc<ServerReport>,
    scope: &Scope,
) -> Result<Named, Failure> {
    let state = std::fs::canonicalize(&plan.state)
        .doing(|| format!("cannot look at {}", plan.state.display()))?;
    let (socket, file) = Kind::Server.listen(&state)?;
    let report = report.clone();
    let answer: Answer = Arc::new(move |question| {
        let report = report.clone();
        Box::pin(async move { answer_control(&question, &report).await.to_string().into_bytes() })
    });
    scope.spawn_on(&Handle::current(), async move {
        if let Err(error) = endpoint::serve(socket, "\n", answer).await {
            log::error!("the status can no longer be asked for: {error}");
        }
    });
    Ok(file)
}

async fn answer_control(question: &str, report: &ServerReport) -> serde_json::Value {
    match control::parse(question) {
        ("status", _) => report.json().await,
        ("evict", who) => {
            let evict = |session| {
                let server = report.server.clone();
                dray_rt::spawn_join(async move { server.evict(session).await })
            };
            // All at once: each may have to wait for a file system that hangs.
            let evictions: Vec<_> = report.sessions_of(who).into_iter().map(evict).collect();
            let mut evicted = 0;
            for eviction in evictions {
                evicted += usize::from(eviction.await == Ok(true));
            }
            serde_json::json!({ "evicted": evicted })
        }
        (word, _) => control::refusal(&format!("unknown question `{word}`")),
    }
}

fn listen_for_metrics(
    plan: &ServePlan,
    report: &Arc<ServerReport>,
    scope: &Scope,
) -> Result<(), Failure> {
    let Some(address) = &plan.metrics else { return Ok(()) };
    let (socket, address) = metrics_http::listen(address)?;
    let report = report.clone();
    let text: metrics_http::Text = Arc::new(move || metrics::text(&report));
    scope.spawn_on(&Handle::current(), metrics_http::serve(socket, text));
    log::info!("metrics at http://{address}/metrics");
    Ok(())
}
