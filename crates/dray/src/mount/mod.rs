//! `dray mount`.

mod config_file;
mod connection;
pub(crate) mod daemon;
pub(crate) mod flusher;
pub(crate) mod foreign_options;
pub(crate) mod metrics;
mod mount_point;
pub(crate) mod mount_table;
pub(crate) mod option_names;
pub(crate) mod option_values;
pub(crate) mod options;
mod remount;
pub(crate) mod supervisor;
pub(crate) mod umount;
pub(crate) mod upgrade;

use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dray_cache::{CacheOptions, LocalCache, MountFacts};
use dray_client::{
    ClientConnection, ClientMemory, ConnectError, ConnectOptions, LeaseWish, Target,
};
use dray_core::{Context, Errno, FileType, Pid, RequestId};
use dray_fuse::{
    Consistency, Device, MountFlags, MountOptions, Options as FuseOptions, PerThread, Reporter,
    ServedMount, WORKERS_MAX,
};
use dray_layers::metrics::Metrics;
use dray_rt::sync::{oneshot, watch};
use dray_rt::{DriverKind, Executor};

use crate::args::MountArgs;
use crate::control::{self, ProcessKind};
use crate::daemonize::{self, ReadinessPipe};
use crate::endpoint::{self, Responder};
use crate::error::{ErrorContext, Failure, StartErrorContext};
use crate::mount::connection::{DaemonHost, NotifyFn, ServerConnection, SupervisorRequests};
use crate::mount::mount_table::MountInfo;
use crate::mount::options::MountPlan;
use crate::mount::supervisor::{Launch, MountMemory, MountSettings};
use crate::run_file::RunFile;
use crate::status::report::MountReport;
use crate::{key, metrics_http, paths, signals};

/// A server that does not answer a new mount within this time is not there.
const CONNECT_MAX: Duration = Duration::from_secs(15);
/// Between two attempts to reach a server that is not there yet (`retry=`).
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// Between two attempts to serve metrics where another process listens.
const METRICS_PAUSE: Duration = Duration::from_secs(5);

/// Mounts, and has the mount served until it ends.
pub fn run(args: MountArgs) -> Result<(), Failure> {
    let helper = args.helper;
    let result = run_mount(args);
    if helper { result.map_err(Failure::for_mount_helper) } else { result }
}

fn run_mount(mut args: MountArgs) -> Result<(), Failure> {
    args.options = config_file::expand(&args.options)?;
    let mut plan = MountPlan::parse(&args.options)?;
    if plan.remount {
        return remount::remount(&args, plan);
    }
    // Said to the mount's processes, too: they go on with it, whatever is there later.
    if plan.auth.is_none() && key::is_there() {
        args.options.push(format!("auth={}", key::default_auth()));
        plan = MountPlan::parse(&args.options)?;
    }
    let at = mount_point::check(&args.mountpoint)?;
    if args.fake {
        return Ok(());
    }
    if let Some(address) = &plan.metrics {
        drop(metrics_http::listen(address)?); // what is wrong is said before anything is mounted
    }
    let (place, source) = (at.clone(), args.target.text.clone());
    let clean_up = move |reached| mount_point::take_away(&place, &source, reached);
    // From here on we may be the child, whose exit code the parent passes on.
    let waiting = match args.foreground {
        true => daemonize::watch(clean_up)?,
        false => daemonize::fork(clean_up)?,
    };
    paths::lift_size_limit();
    let descriptors = paths::raise_file_limit();
    if descriptors < supervisor::DESCRIPTORS_MIN {
        return Err(Failure::new(format!(
            "cannot mount: this process may have {descriptors} descriptors (`ulimit -Hn`, \
             LimitNOFILE), and a mount takes up to {}",
            supervisor::DESCRIPTORS_MIN
        )));
    }
    if let Some(limit) = dray_fuse::request_time_max() {
        log::warn!(
            "the kernel ends this mount if the server does not answer, or a lock is waited for, for longer \
             than {} s (sysctl fs.fuse.max_request_timeout; 0: never)",
            limit.as_secs()
        );
    }
    let known = MountInfo { at, connection: None };
    let mount = Mount { target: args.target.target, known, plan };
    mount.start(&args.target.text, args.options, args.foreground, waiting)
}

/// What is to be mounted where, and how.
pub struct Mount {
    pub target: Target,
    pub known: MountInfo,
    pub plan: MountPlan,
}

/// What an export is like that is about to be mounted.
#[derive(Clone, Copy)]
struct Offered {
    /// The export takes no changes.
    read_only: bool,
    /// All callers are the same user at the export (`squash=all`).
    one_user: bool,
    /// The export grants leases.
    leases: bool,
}

/// A mount that is being served.
pub struct RunningMount {
    mount: Mount,
    mounted: ServedMount,
    session: ClientConnection,
    cache: Option<Arc<LocalCache>>,
    calls: Option<Arc<Metrics>>,
    reporter: Arc<Reporter>,
}

impl Mount {
    /// Connects, mounts, and becomes the supervisor, which has the mount served.
    fn start(
        mut self,
        source: &str,
        mut options: Vec<String>,
        foreground: bool,
        waiting: ReadinessPipe,
    ) -> Result<(), Failure> {
        if let Some(options) = self.plan.cache_options() {
            let dir = options.dir.display().to_string();
            LocalCache::open(options).map_err(|error| {
                Failure::new(format!("the cache {dir} cannot be used: {}", cache_trouble(&error)))
            })?;
        }
        let offered = self.try_server()?;
        self.plan.settle_leases(offered.leases);
        // Said to the mount's processes, too: whether the kernel checks callers is settled by it for as long as the
        // mount lasts. One without leases is as before there were any.
        if self.plan.takes_leases() {
            options.push("leases=yes".to_owned());
        }
        // Before anything is mounted: what there is no room for leaves nothing behind.
        let memory = MountMemory::create(self.plan.key.as_ref())?;
        // What is mounted is not left without its daemon: from here on signals are the supervisor's.
        signals::hold();
        if !foreground {
            daemonize::outlive_parent();
        }
        let device = self.attach(source, offered, &waiting)?;
        if !foreground {
            daemonize::leave_session();
        }
        let at = self.known.at.clone();
        self.supervise((device, memory), options, foreground, waiting).inspect_err(|_| {
            let _ = dray_fuse::unmount(&at, true); // the failure that counts is the first
        })
    }

    fn supervise(
        self,
        (device, memory): (OwnedFd, MountMemory),
        options: Vec<String>,
        foreground: bool,
        waiting: ReadinessPipe,
    ) -> Result<(), Failure> {
        let entry = mount_table::find(&self.known.at);
        let entry = entry.ok_or_else(|| Failure::new("the mount has been unmounted already"))?;
        waiting.mounted(entry.connection);
        let workers = match self.plan.workers {
            0 => std::thread::available_parallelism().map_or(1, usize::from).min(WORKERS_MAX),
            workers => workers,
        };
        let (target, at) = (self.target, self.known.at);
        let words = MountSettings { target, at, options, workers, foreground };
        let launch = Launch { device, connection: entry.connection, memory, words };
        launch.exec(waiting).map(drop)
    }

    /// Whether the kernel believes earlier answers.
    fn believes(&self) -> bool {
        self.plan.takes_leases() || self.plan.consistency != Consistency::Strict
    }

    /// Whether the kernel checks permissions in the mount that is there. What the server says may be
    /// something else by now.
    fn kernel_checks(&self) -> bool {
        self.known.connection.is_none() || self.known.place().is_none_or(|place| place.checks)
    }

    fn client_options(&self) -> ConnectOptions {
        ConnectOptions {
            key: self.plan.key.clone(),
            timeout: self.plan.timeout,
            replay_bytes: self.plan.replay_bytes,
            caches: self.plan.consistency == Consistency::CloseToOpen,
            counts_on_one_user: self.believes() && !self.kernel_checks(),
            leases: lease_wish(self.plan.takes_leases(), self.plan.keeps_writes()),
            definition: 0,
            group: None,
            lease_share: None,
            aside: self.plan.keeps_writes().then(|| aside_dir(&self.known.at)),
            // The daemon was started by its supervisor.
            write_back: self.plan.write_back(std::os::unix::process::parent_id()).map(Box::new),
        }
    }

    /// Says hello to the server and goodbye, so that what is wrong is known before anything
    /// is mounted. One that cannot be reached is tried again for as long as `retry` says.
    fn try_server(&self) -> Result<Offered, Failure> {
        let mut executor =
            Executor::new(DriverKind::Epoll).doing(|| "cannot start the executor".into())?;
        executor.block_on(async {
            let (begin, mut reported) = (dray_rt::now(), false);
            loop {
                let error = match self.greet().await {
                    Ok(offered) => return Ok(offered),
                    Err(error) => error,
                };
                // Not there, or full for the moment.
                let may_pass = matches!(
                    error,
                    ConnectError::Unreachable { .. }
                        | ConnectError::Refused { errno: Errno::EAGAIN, .. }
                );
                let left = self.plan.retry.saturating_sub(begin.elapsed());
                if !may_pass || left.is_zero() {
                    return Err(error.into());
                }
                if !std::mem::replace(&mut reported, true) {
                    let seconds = self.plan.retry.as_secs();
                    log::warn!("{error}; trying again for {seconds} s");
                }
                dray_rt::sleep(left.min(RETRY_PAUSE)).await;
            }
        })
    }

    async fn greet(&self) -> Result<Offered, ConnectError> {
        let leases = lease_wish(self.plan.asks_for_leases(), self.plan.keeps_writes());
        let options = ConnectOptions { leases, ..self.client_options() };
        let memory = ClientMemory::Heap;
        let session =
            ClientConnection::connect(&self.target, &options, &memory, CONNECT_MAX).await?;
        let checked = self.check_root(&session).await;
        let leases = self.plan.asks_for_leases() && session.has_leases();
        if self.plan.counts_on_leases() && !leases {
            let cache = match self.plan.cache {
                Some(_) => "`cache` does nothing, and ",
                None => "",
            };
            log::warn!(
                "{}: nothing is leased there, so {cache}each name and all attributes are asked for each time; let the \
                 export have `leases` (of a projection, its definition)",
                self.target
            );
        }
        if self.plan.keeps_writes() && leases && !session.has_write_leases() {
            log::warn!(
                "{}: no writes are leased there, so `{}` does nothing, and each write goes to the server; let the export \
                 have `write_leases` (not possible for projections and exports that are forwarded)",
                self.target,
                self.plan.keeping_option()
            );
        }
        session.goodbye();
        let (read_only, one_user) = (session.info().read_only, session.one_user());
        checked.map(|()| Offered { read_only, one_user, leases })
    }

    /// Checks that the object to mount is a directory. The kernel takes nothing else for the root
    /// of a mount, and fails every call on it. A server that cannot say now may be able to later.
    async fn check_root(&self, session: &ClientConnection) -> Result<(), ConnectError> {
        let (fs, root) = (session.stack().fs, session.info().root);
        let cx = Context::new(
            session.session().node(),
            RequestId(0),
            dray_client::own_identity(),
            Pid(std::process::id()),
        );
        match dray_rt::timeout(CONNECT_MAX, fs.getattr(&cx, root)).await {
            Ok(Ok(attr)) if attr.file_type() != FileType::Directory => {
                Err(ConnectError::Protocol(format!(
                    "{}: the server says that the export is no directory, which cannot be mounted; it \
                 is broken, or no dray server",
                    self.target
                )))
            }
            // Every call of such a mount would say so, and nothing why.
            Ok(Err(error)) if error.errno() == Errno::ESTALE => Err(ConnectError::Refused {
                errno: Errno::ESTALE,
                message: format!(
                    "{}: the directory of the export is gone: it was removed at the server, or \
                     another one is in its place; put the right one there, and restart `dray serve`",
                    self.target
                ),
            }),
            _ => Ok(()),
        }
    }

    /// Mounts: from here on the kernel sends requests. Errors: those of mount(2), or somebody else
    /// has mounted there meanwhile.
    fn attach(
        &self,
        source: &str,
        offered: Offered,
        waiting: &ReadinessPipe,
    ) -> Result<OwnedFd, Failure> {
        let flags = self.plan.flags();
        let options = MountOptions {
            source: source.to_owned(),
            // What is cached was looked up by one user, where all are one.
            default_permissions: self.believes() && !offered.one_user,
            allow_other: self.plan.allow_other.unwrap_or(paths::is_root()),
            flags: MountFlags { read_only: flags.read_only || offered.read_only, ..flags },
            read_max_bytes: self.plan.io_bytes as usize,
        };
        let at = &self.known.at;
        let what = || format!("cannot mount on {}", at.display());
        let _lock = mount_point::lock_for_mounting(at)?;
        waiting.mounting();
        dray_fuse::mount(at, &options).doing(what)
    }

    /// Serves the mount behind `device`. `memory` makes the memory of the session, once for each
    /// attempt to connect. `wait` is what to do between two attempts, none to try once.
    /// `replaceable`: another program goes on if this one cannot. `wishes` are for what others have
    /// to do.
    pub fn serve(
        self,
        device: Device,
        memory: ClientMemory,
        wait: Option<NotifyFn>,
        replaceable: bool,
        wishes: SupervisorRequests,
    ) -> Result<RunningMount, Failure> {
        let (session_sender, session_receiver) = watch::channel(None);
        // A mount without metrics does not pay for them.
        let calls = self.plan.metrics.as_ref().map(|_| Arc::new(Metrics::new()));
        let cache = self.plan.cache_options().and_then(open_cache);
        let host = Arc::new(DaemonHost::new(wishes));
        let options = FuseOptions { workers: device.clones.len(), host, ..self.fuse_options() };
        let connection = Arc::new(ServerConnection {
            target: self.target.clone(),
            options: self.client_options(),
            memory,
            wait,
            replaceable,
            cache: cache.clone(),
            leases: self.plan.takes_leases(),
            calls: calls.clone(),
            session_sender,
            session_receiver: session_receiver.clone(),
            failed: Mutex::default(),
        });
        let ours = connection.clone();
        let per_thread: PerThread = Arc::new(move |index, _| {
            let connection = ours.clone();
            Box::pin(async move { connection.for_worker(index).await })
        });
        let mounted = ServedMount::start(per_thread, device, options)
            .beginning(|| format!("cannot serve the mount on {}", self.known.at.display()))
            // Whatever a worker without a session has answered, the server's reason is what counts.
            .map_err(|failure| connection.failure().map_or(failure, Failure::from))?;
        let session = session_receiver.borrow().clone().flatten();
        let session = session.ok_or_else(|| Failure::new("the server went away"))?;
        let reporter = Arc::new(mounted.reporter());
        if let Some(cache) = &cache {
            cache.knows(facts(&reporter));
        }
        Ok(RunningMount { mount: self, mounted, session, calls, cache, reporter })
    }

    fn fuse_options(&self) -> FuseOptions {
        FuseOptions {
            consistency: self.plan.consistency,
            kernel_checks: self.kernel_checks(),
            leases: self.plan.takes_leases(),
            shared_mmap: self.plan.shared_mmap,
            passthrough: self.plan.passes_through(),
            transport: self.plan.transport,
            attr_validity: self.plan.attr_validity,
            entry_validity: self.plan.attr_validity,
            workers: self.plan.workers,
            io_max_bytes: self.plan.io_bytes as usize,
            patience: self.plan.timeout,
            ..FuseOptions::default()
        }
    }
}

fn lease_wish(wanted: bool, keeps_writes: bool) -> LeaseWish {
    match wanted {
        // The kernel checks every caller, or all callers are one user.
        true => LeaseWish::Yes { callers_are_checked: true, keeps_writes },
        false => LeaseWish::No,
    }
}

/// Where that is which was written at this mount under a write lease, and could be written to its file no more.
pub(crate) fn aside_dir(at: &Path) -> PathBuf {
    let mut name = String::new();
    for byte in at.as_os_str().as_bytes().iter().skip(1) {
        match byte {
            b'/' => name.push('-'),
            byte if byte.is_ascii_alphanumeric() => name.push(char::from(*byte)),
            byte => name += &format!("%{byte:02x}"),
        }
    }
    paths::state_dir().join("aside").join(name)
}

/// A mount goes on without its cache if that cannot be used.
fn open_cache(options: CacheOptions) -> Option<Arc<LocalCache>> {
    let dir = options.dir.clone();
    let opened = LocalCache::open(options);
    opened
        .inspect_err(|error| {
            log::error!(
                "the cache {} cannot be used: {}; reads go to the server",
                dir.display(),
                cache_trouble(error)
            );
        })
        .ok()
}

/// What the rules of a cache can go by.
fn facts(reporter: &Arc<Reporter>) -> MountFacts {
    let (of_paths, of_jobs) = (Arc::downgrade(reporter), Arc::downgrade(reporter));
    MountFacts {
        find_path: Box::new(move |id| of_paths.upgrade()?.path(id)),
        find_jobs: Box::new(move |callers, tell| match of_jobs.upgrade() {
            Some(reporter) => reporter.find_jobs(&callers, tell),
            None => tell(Vec::new()),
        }),
    }
}

/// What is wrong with the directory of a cache, and what helps.
fn cache_trouble(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "the directory must belong to the user of the mount and be closed to others (chmod 700)"
                .into()
        }
        _ => error.to_string(),
    }
}

/// Answers `dray status` until the answer is dropped.
fn listen_for_control(mount: &Mount, report: Arc<MountReport>) -> Result<RunFile, Failure> {
    let (socket, file) = ProcessKind::Mount.listen(&mount.known.name())?;
    let answer: Responder = Arc::new(move |question| {
        let report = report.clone();
        Box::pin(async move {
            let reply = match control::parse(&question) {
                ("status", _) => report.json(),
                (word, _) => control::refusal(&format!("unknown question `{word}`")),
            };
            reply.to_string().into_bytes()
        })
    });
    dray_rt::spawn(async move {
        if let Err(error) = endpoint::serve(socket, "\n", answer).await {
            log::error!(
                "the control socket failed: {error}; `dray status` gets no answer from this mount"
            );
        }
    });
    Ok(file)
}

/// Serves metrics at `address`. Where another process listens it is tried again: a mount goes on
/// without, and a daemon before this one may not have ended.
async fn serve_metrics(address: String, report: Arc<MountReport>, calls: Arc<Metrics>) {
    let text: metrics_http::MetricsSource = Arc::new(move || metrics::text(&report, &calls));
    let mut reported = false;
    loop {
        match metrics_http::listen(&address) {
            Ok((socket, at)) => {
                log::info!("metrics at http://{at}/metrics");
                return metrics_http::serve(socket, text).await;
            }
            Err(failure) if !std::mem::replace(&mut reported, true) => {
                log::warn!("{}; trying again", failure.message);
            }
            Err(_) => {}
        }
        dray_rt::sleep(METRICS_PAUSE).await;
    }
}

impl RunningMount {
    fn report(&self) -> Arc<MountReport> {
        Arc::new(MountReport {
            known: self.mount.known.clone(),
            target: self.mount.target.to_string(),
            consistency: self.mount.plan.consistency,
            cache: self.cache.clone(),
            timeout: self.mount.plan.timeout,
            session: self.session.clone(),
            reporter: Reporter::clone(&self.reporter),
            since: dray_rt::now(),
        })
    }

    /// What goes on.
    pub fn reporter(&self) -> Reporter {
        Reporter::clone(&self.reporter)
    }

    /// Serves until it is unmounted. `beside` runs on the executor that waits, from when `dray status`
    /// is answered. While it is `supervised` another process goes on where this one fails.
    pub fn wait(
        self,
        supervised: &AtomicBool,
        beside: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), Failure> {
        let report = self.report();
        let RunningMount { mount, mounted, session, calls, cache: _, reporter: _reporter } = self;
        let (end, ended) = oneshot::channel();
        let waiter = std::thread::Builder::new().name("dray-wait".into()).spawn(move || {
            let _ = end.send(mounted.wait()); // we wait for it until the end
        });
        waiter.beginning(|| "cannot start a thread".into())?;
        let executor = Executor::new(DriverKind::Epoll);
        let mut executor = executor.beginning(|| "cannot start the executor".into())?;
        let result = executor.block_on(async {
            // A mount whose status cannot be asked for is still a mount.
            let control = listen_for_control(&mount, report.clone());
            let _control = control.inspect_err(|failure| log::warn!("{}", failure.message));
            if let (Some(address), Some(calls)) = (mount.plan.metrics.clone(), calls) {
                dray_rt::spawn(serve_metrics(address, report, calls));
            }
            dray_rt::spawn(beside);
            let ended = ended.await.map_err(|_| Failure::new("a thread of the mount died"))?;
            ended.doing(|| format!("the mount on {} ended", mount.known.at.display()))
        });
        if result.is_ok() || !supervised.load(Ordering::Relaxed) {
            session.goodbye();
        }
        result
    }
}
