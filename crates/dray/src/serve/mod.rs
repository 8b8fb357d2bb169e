//! `dray serve`.

mod aggregation;
pub(crate) mod audit;
mod audit_port;
mod audit_sinks;
mod backend_options;
pub(crate) mod config;
pub(crate) mod descriptor_store;
pub(crate) mod descriptor_store_process;
pub(crate) mod descriptors;
pub(crate) mod export;
pub(crate) mod export_monitor;
pub(crate) mod export_state;
mod forward;
pub(crate) mod fs_identities;
pub(crate) mod hang;
mod held_back;
pub(crate) mod journal;
pub(crate) mod left_behind;
mod limits;
pub(crate) mod metrics;
pub(crate) mod mounts;
mod observers;
pub(crate) mod opening;
pub(crate) mod own_disk;
mod plan;
pub(crate) mod projections;
pub(crate) mod qos;
pub(crate) mod slices;
pub(crate) mod state;
mod state_place;
pub(crate) mod workers;

use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dray_fabric::{Address, Listener, Listening, listen};
use dray_rpc::server::{Server, ServerOptions, StateLoss};
use dray_rt::{DriverKind, Executor, ExecutorHandle, Scope, timeout};

use crate::args::ServeArgs;
use crate::control::{self, ProcessKind};
use crate::endpoint::{self, Responder};
use crate::error::{ErrorContext, Failure};
use crate::notify_systemd::notify;
use crate::run_file::RunFile;
use crate::serve::descriptor_store::DescriptorStoreClient;
use crate::serve::descriptors::Descriptors;
use crate::serve::export::ExportPlan;
use crate::serve::export_state::ExportState;
use crate::serve::journal::{Boot, ServerJournal};
use crate::serve::opening::{ExportOpener, SharedState};
use crate::serve::plan::ServePlan;
use crate::serve::qos::{QosControl, RuleBook, ShareExchanges, book_exports};
use crate::serve::slices::SlicesByProjection;
use crate::serve::workers::{StuckThreads, Workers};
use crate::signals::{self, EndSignals};
use crate::status::report::ServerReport;
use crate::{metrics_http, paths};

pub use crate::serve::plan::parse_auth;

/// How long no connection is accepted after one could not be.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);
/// That none can be is said this often.
const COMPLAIN_EVERY: Duration = Duration::from_secs(60);

/// How long threads may take to end. One that a file system does not let go is left
/// behind: nothing else of the server may wait for it.
const END_MAX: Duration = Duration::from_secs(5);

/// How long a server that ends works for clients that have just left it, so that the next one
/// has no grace period for them.
const PARTED_MAX: Duration = Duration::from_secs(5);

/// How long a server that ends waits for each log of an audit to be written.
const AUDIT_END_MAX: Duration = Duration::from_secs(2);

/// A server and what serves with it.
struct Serving {
    plan: ServePlan,
    state_dir: PathBuf,
    server: Server,
    exports: Vec<Arc<ExportState>>,
    slices: SlicesByProjection,
    qos: Arc<QosControl>,
    workers: Arc<Workers>,
    state: SharedState,
    descriptor_store: Option<Arc<DescriptorStoreClient>>,
}

/// Serves until a signal asks for an end.
pub fn run(args: ServeArgs) -> Result<(), Failure> {
    if args.config.as_deref().is_some_and(is_closed) {
        check_root()?;
    }
    let plan = plan::plan(args)?; // what is wrong with that is so for root, too
    check_root()?;
    let mut options = plan::server_options(&plan)?;
    plan::warn_of_openness(&plan);
    limits::begin();
    let limit = paths::raise_file_limit();
    descriptors::warn_of_few(limit);
    let descriptors = Descriptors::divide(limit, plan.exports.len());
    options.connections_max = descriptors.connections.min(options.connections_max);
    signals::hold();
    let state = state_place::open(plan.state.as_deref(), &plan.exports)?;
    let state_dir = state.dir().to_owned();
    let state = Arc::new(Mutex::new(Some(state)));
    let descriptor_store = start_descriptor_store(&state_dir);
    let slice_options = options.clone();
    let key = options.key.clone();
    let (journal, boot, loss) = former_server(&state_dir, plan.boot)?;
    let names: Vec<&str> = plan.exports.iter().map(|export| export.name.as_str()).collect();
    let options = ServerOptions { boot: boot.memory_state, ..options };
    let server = Server::awaiting(options, &names, Arc::new(journal));
    forward::nodes().are_of(&server);
    let exports: Vec<_> =
        plan.exports.iter().map(|plan| Arc::new(ExportState::new(plan))).collect();
    let slices = slices::of_plan(&plan, &slice_options, (&server, &state_dir));
    let book = RuleBook::new(&plan.config.qos, &state_dir, book_exports(&plan.exports, &exports))?;
    let book = Arc::new(book);
    let exchanges = Arc::new(ShareExchanges::new(&plan.exports, &book, &slice_options)?);
    let qos = QosControl::start(book, exchanges.clone())?;
    let openings = openings(
        &plan,
        &exports,
        (&server, &slices),
        (&state, &descriptor_store, descriptors),
        (loss, plan.boot),
    )?;
    opening::open_all(&openings)?;
    let sinks = plan.config.sinks().map_err(Failure::usage)?;
    let audited = |name: &str| {
        let export = plan.exports.iter().find(|export| export.name == name);
        export.is_some_and(|export| export.audit.kinds.is_some())
    };
    audit_sinks::start(&sinks, &exports, audited, &state_dir)?;
    plan::warn_of_sharing(&exports); // whose directories are known without links now
    let audits = audit_port::of_exports(&plan.exports, &exports, key, &state_dir);
    let workers = Workers::new(&names, plan.threads).with_slices(slices.clone());
    let workers = workers.with_exchanges(exchanges.clone()).with_audits(audits);
    let workers = Arc::new(workers);
    let serving =
        Serving { plan, state_dir, server, exports, slices, qos, workers, state, descriptor_store };
    let mut executor =
        Executor::new(DriverKind::Epoll).doing(|| "cannot start the executor".into())?;
    let scope = Scope::new();
    let result = executor.block_on(async {
        serving.spawn_followers_of_recovery(boot, &scope);
        exchanges.spawn(&scope);
        for opening in openings {
            scope.spawn_on(&ExecutorHandle::current(), export_monitor::run(opening));
        }
        mounts::watch(serving.exports.clone());
        let result = serve(&serving.plan, serving.report(), &serving.workers, &scope).await;
        notify("STOPPING=1");
        for slices in serving.slices.values() {
            slices.leave().await;
        }
        result
    });
    scope.kill(); // listeners close, and remove their sockets
    serving.end(result)
}

impl Serving {
    /// What is to be done once all clients of the server before us have returned.
    fn spawn_followers_of_recovery(&self, boot: Boot, scope: &Scope) {
        let server = self.server.clone();
        scope.spawn_on(&ExecutorHandle::current(), async move {
            server.recovered().await;
            if let Err(failure) = boot.note() {
                log::error!("{}; the next start waits for clients again", failure.message);
            }
        });
        let Some(descriptor_store) = self.descriptor_store.clone() else { return };
        let (server, exports) = (self.server.clone(), self.exports.clone());
        scope.spawn_on(&ExecutorHandle::current(), async move {
            server.opened().await;
            // Who sees to an open export lets go what is of that.
            let known: Vec<_> = exports.iter().filter_map(|export| export.uuid()).collect();
            descriptor_store.release_inherited(|fs| !known.contains(&fs));
        });
    }

    fn report(&self) -> ServerReport {
        ServerReport {
            server: self.server.clone(),
            exports: self.exports.clone(),
            slices: self.slices.clone(),
            qos: self.qos.clone(),
            listen: self.plan.listen.iter().map(ToString::to_string).collect(),
            state: self.state_dir.clone(),
            threads: self.workers.each(),
            since: dray_rt::now(),
        }
    }

    /// Ends the process, whatever still hangs, unless serving had failed.
    fn end(self, result: Result<(), Failure>) -> Result<(), Failure> {
        let stuck = self.workers.end(END_MAX);
        for (export, threads) in &stuck {
            log::error!(
                "export `{export}`: {threads} threads are stuck in its file system; the process is \
                 gone when they return; a new server serves the other exports meanwhile"
            );
        }
        leave_behind(&self.state_dir, &self.exports, &stuck);
        result?;
        let deserted = self.is_deserted();
        self.server.disconnect();
        if let Some(descriptor_store) = &self.descriptor_store {
            if deserted {
                descriptor_store.release_inherited(|_| true);
            }
            descriptor_store.leave();
        }
        // Whatever else there is belongs to the next server, or could hang as well: only what
        // others wait for is given back.
        drop(self.state.lock().unwrap_or_else(PoisonError::into_inner).take());
        std::process::exit(0)
    }
}

impl Serving {
    /// Whether no client may come back to the next server.
    fn is_deserted(&self) -> bool {
        // The clients of slices may come back from other servers.
        let all_known =
            self.slices.is_empty() && self.exports.iter().all(|export| export.starting().is_none());
        all_known && self.server.status().clients.is_empty()
    }
}

/// Says so to an ordinary user, before anything that would come of it: a directory that cannot be
/// made, a key that cannot be read.
fn check_root() -> Result<(), Failure> {
    match paths::is_root() {
        true => Ok(()),
        false => Err(Failure::new(
            "`dray serve` must be started by root, since it carries out calls in the names of their \
             callers: call it as root, for instance by sudo",
        )),
    }
}

/// Whether there is a configuration that this user may not read, as the one that is installed.
fn is_closed(config: &Path) -> bool {
    std::fs::File::open(config).is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
}

/// What the server before us has left: its sessions, its start of the machine, and what a loss of
/// power has undone of its work.
fn former_server(state: &Path, boot: u128) -> Result<(ServerJournal, Boot, StateLoss), Failure> {
    // Nobody knows then who is to be waited for.
    let sessions_lost = !ServerJournal::is_there(state);
    let journal = ServerJournal::open(state)?;
    let boot = Boot::begin(state, boot)?;
    let loss = match boot.machine_lost {
        true if sessions_lost => StateLoss::SessionsToo,
        true => StateLoss::Unsynced,
        false => StateLoss::Nothing,
    };
    Ok((journal, boot, loss))
}

/// Tells the next server for which exports it has to wait until we are gone.
fn leave_behind(state: &Path, exports: &[Arc<ExportState>], stuck: &StuckThreads) {
    let is_held =
        |export: &&Arc<ExportState>| stuck.contains_key(&export.name) || export.has_calls();
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
    exports: &[Arc<ExportState>],
    (server, slices): (&Server, &SlicesByProjection),
    (state, descriptor_store, descriptors): (
        &SharedState,
        &Option<Arc<DescriptorStoreClient>>,
        Descriptors,
    ),
    (loss, boot): (StateLoss, u128),
) -> Result<Vec<Arc<ExportOpener>>, Failure> {
    let opening = |(plan_of, exported): (&ExportPlan, &Arc<ExportState>)| {
        Ok(Arc::new(ExportOpener {
            plan: plan_of.clone(),
            faults: plan.config.faults_of(&plan_of.name).map_err(Failure::usage)?,
            exported: exported.clone(),
            state: state.clone(),
            descriptor_store: descriptor_store.clone(),
            descriptors,
            server: server.clone(),
            slices: slices.get(&plan_of.name).cloned(),
            loss,
            boot,
            own_disk: Mutex::default(),
        }))
    };
    plan.exports.iter().zip(exports).map(opening).collect()
}

/// The descriptor store, which keeps deleted files over our death. Without it they end with us,
/// which is no reason not to serve.
fn start_descriptor_store(state: &Path) -> Option<Arc<DescriptorStoreClient>> {
    match DescriptorStoreClient::start(state) {
        Ok(descriptor_store) => Some(Arc::new(descriptor_store)),
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
    let ending = EndSignals::new().doing(|| "cannot wait for signals".into())?;
    let handle = ExecutorHandle::current();
    let mut listening = Vec::new();
    paths::make_run_dir()?; // a socket may be meant to be in it
    // Every address of IPv6 means every one of IPv4, too, but for those that are listened at.
    let mut wanted = plan.listen.clone();
    wanted.sort_by_key(|address| address.to_string().starts_with("tcp://[::]:"));
    for (index, address) in wanted.iter().enumerate() {
        let ours = &wanted[..index];
        let bound = listen(address).await;
        let bound = bound.map_err(|error| listen_problem(address, ours, &error))?;
        for (one, error) in bound.left_out {
            log::warn!("{address} is {one}, too, but the server cannot listen there: {error}");
        }
        listening.extend(bound.listening);
    }
    report.listen = listening.iter().map(|one| one.address.to_string()).collect();
    let (server, report) = (report.server.clone(), Arc::new(report));
    let control = listen_for_control(&report, scope)?;
    listen_for_metrics(plan, &report, scope)?;
    let watched = report.clone();
    scope.spawn_on(&handle, async move { hang::watch(&watched).await });
    let leases = server.clone();
    scope.spawn_on(&handle, async move { leases.expire_leases().await });
    let names: Vec<&str> = plan.exports.iter().map(|export| export.name.as_str()).collect();
    let names = names.join(", ");
    for one in listening {
        let Listening { address, listener } = one;
        log::info!("serving {names} at {address}");
        scope.spawn_on(&handle, accept((listener, address), server.clone(), workers.clone()));
    }
    notify(&format!("READY=1\nSTATUS=serving {names} at {}", report.listen.join(", ")));
    let signal = ending.wait().await.doing(|| "cannot wait for signals".into())?;
    log::info!("signal {signal}: ending; clients wait for the next server");
    if timeout(PARTED_MAX, server.parted()).await.is_err() {
        log::warn!(
            "the next server waits for clients that have left: their last writes are not on media yet"
        );
    }
    settle_pending(&report.exports).await;
    for audit in report.exports.iter().filter_map(|export| export.audit()) {
        audit.finish(AUDIT_END_MAX); // what is left then is for the next server
    }
    drop(control);
    Ok(())
}

/// Has merged writes written: a machine that is turned off next keeps nothing of them.
async fn settle_pending(exports: &[Arc<ExportState>]) {
    for export in exports {
        let Some(layer) = export.aggregate() else { continue };
        if timeout(PARTED_MAX, layer.stop_merging()).await.is_err() {
            log::warn!(
                "export `{}`: its file system does not take pending data in time; the next server writes \
                 them, if the machine does not lose power before",
                export.name
            );
        }
    }
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

/// Has the threads of exports serve the clients that connect to `listener`; `place`: where that is, for people.
async fn accept(
    (listener, place): (Box<dyn Listener>, impl Display),
    server: Server,
    workers: Arc<Workers>,
) {
    let mut complained: Option<dray_rt::Instant> = None;
    loop {
        match listener.accept().await {
            Ok(incoming) => {
                let Some(admission) = server.admit(incoming.peer()) else { continue }; // it is closed
                let _ = incoming.notice_loss(server.lease()); // else it takes longer
                let (workers, server) = (workers.clone(), server.clone());
                dray_rt::spawn(async move { workers.serve(&server, incoming, admission).await });
            }
            Err(error) => {
                // Out of descriptors or memory: what there is goes on, and later is better.
                if complained.is_none_or(|last| last.elapsed() >= COMPLAIN_EVERY) {
                    complained = Some(dray_rt::now());
                    log::error!("cannot accept a connection on {place}: {error}");
                }
                dray_rt::sleep(ACCEPT_AGAIN).await;
            }
        }
    }
}

fn listen_for_control(report: &Arc<ServerReport>, scope: &Scope) -> Result<RunFile, Failure> {
    let shown = report.state.display();
    let state = std::fs::canonicalize(&report.state).doing(|| format!("cannot look at {shown}"))?;
    ProcessKind::Server.remove_all_dead();
    let (socket, file) = ProcessKind::Server.listen(&paths::short_name(&state))?;
    let report = report.clone();
    let answer: Responder = Arc::new(move |question| {
        let report = report.clone();
        Box::pin(async move { answer_control(&question, &report).await.to_string().into_bytes() })
    });
    scope.spawn_on(&ExecutorHandle::current(), async move {
        if let Err(error) = endpoint::serve(socket, "\n", answer).await {
            log::error!(
                "the control socket failed: {error}; `dray status` gets no answer from this server"
            );
        }
    });
    Ok(file)
}

async fn answer_control(question: &str, report: &ServerReport) -> serde_json::Value {
    match control::parse(question) {
        ("status", _) => report.json().await,
        ("evict", who) => {
            let evict = |session| {
                let servers = report.servers();
                dray_rt::spawn_join(async move { evict(&servers, session).await })
            };
            // All at once: each may have to wait for a file system that hangs.
            let evictions: Vec<_> = report.sessions_of(who).into_iter().map(evict).collect();
            let mut evicted = 0;
            for eviction in evictions {
                evicted += usize::from(eviction.await == Ok(true));
            }
            serde_json::json!({ "evicted": evicted })
        }
        ("qos", question) => report.qos.answer(question).await,
        ("accept", name) => match report.exports.iter().find(|export| export.name == name) {
            None => serde_json::json!({ "unknown": true }),
            Some(export) => match export.accept() {
                Ok(identity) => serde_json::json!({ "accepted": identity.to_string() }),
                Err(why) => control::refusal(&why),
            },
        },
        (word @ ("drain" | "undrain" | "drained"), who) => {
            slices::administration::answer(&report.slices, word, who).await
        }
        (word @ ("quiesce" | "resume" | "quiet"), projection) => {
            slices::administration::answer_quiesce(&report.slices, word, projection).await
        }
        (word, _) => control::refusal(&format!("unknown question `{word}`")),
    }
}

/// Ends a session at whichever of the servers has it.
async fn evict(servers: &[Server], session: u64) -> bool {
    for server in servers {
        if server.evict(session).await {
            return true;
        }
    }
    false
}

fn listen_for_metrics(
    plan: &ServePlan,
    report: &Arc<ServerReport>,
    scope: &Scope,
) -> Result<(), Failure> {
    let Some(address) = &plan.metrics else { return Ok(()) };
    let (socket, address) = metrics_http::listen(address)?;
    let report = report.clone();
    let text: metrics_http::MetricsSource = Arc::new(move || metrics::text(&report));
    scope.spawn_on(&ExecutorHandle::current(), metrics_http::serve(socket, text));
    log::info!("metrics at http://{address}/metrics");
    Ok(())
}
