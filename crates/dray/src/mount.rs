//! `dray mount`.

use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use dray_client::{
    ConnectError, Options as ClientOptions, RemoteFs, Session, SessionMemory, Target,
};
use dray_core::{Context, Errno, Error, FileId, FileSystem, Fut, OpenFile, OpenHow, RequestId};
use dray_fuse::{
    Consistency, Device, Host, MountOptions, Mounted, Options as FuseOptions, PerThread, Reporter,
    WORKERS_MAX,
};
use dray_rt::sync::{oneshot, watch};
use dray_rt::{DriverKind, Executor};

use crate::args::MountArgs;
use crate::control::{self, Kind};
use crate::daemonize::{self, Waiting};
use crate::endpoint::{self, Answer, SocketFile};
use crate::error::{Doing, Failure};
use crate::mount_options::MountPlan;
use crate::mount_table;
use crate::paths;
use crate::report::MountReport;
use crate::supervisor::{Launch, MountWords};

/// A server that does not answer a new mount within this time is not there.
const CONNECT_MAX: Duration = Duration::from_secs(15);
/// Between two attempts of a daemon that follows another one.
const CONNECT_PAUSE: Duration = Duration::from_millis(300);

/// Mounts, and has the mount served until it ends.
pub fn run(args: MountArgs) -> Result<(), Failure> {
    let helper = args.helper;
    let result = run_mount(args);
    if helper { result.map_err(Failure::for_mount_helper) } else { result }
}

fn run_mount(args: MountArgs) -> Result<(), Failure> {
    let plan = MountPlan::parse(&args.options)?;
    let at = check_mountpoint(&args.mountpoint)?;
    if args.fake {
        return Ok(());
    }
    // From here on we may be the child, whose exit code the parent passes on.
    let waiting = if args.foreground { Waiting::nobody() } else { daemonize::fork()? };
    paths::raise_file_limit();
    let mount = Mount { target: args.target, at, plan };
    mount.start(args.options, args.foreground, waiting)
}

/// The mount point, absolute; a directory that is not one of our mounts already.
fn check_mountpoint(path: &Path) -> Result<PathBuf, Failure> {
    let shown = path.display();
    let at = paths::absolute(path).doing(|| format!("cannot mount on {shown}"))?;
    if mount_table::find(&at).is_some() {
        return Err(Failure::new(format!(
            "{shown} has a dray mount already: `dray umount {shown}` first, or choose another \
             directory"
        )));
    }
    let at = std::fs::canonicalize(&at).doing(|| format!("cannot mount on {shown}"))?;
    match at.is_dir() {
        true => Ok(at),
        false => Err(Failure::new(format!("cannot mount on {shown}: it is not a directory"))),
    }
}

/// What is to be mounted where, and how.
pub struct Mount {
    pub target: Target,
    pub at: PathBuf,
    pub plan: MountPlan,
}

/// A mount that is being served.
pub struct Running {
    mount: Mount,
    mounted: Mounted,
    session: Arc<Session>,
}

impl Mount {
    /// Connects, mounts, and turns into the supervisor, which has the mount served.
    fn start(
        self,
        options: Vec<String>,
        foreground: bool,
        waiting: Waiting,
    ) -> Result<(), Failure> {
        let read_only = self.try_server()?;
        let device = self.attach(read_only)?;
        let at = self.at.clone();
        self.supervise(device, options, foreground, waiting).inspect_err(|_| {
            let _ = dray_fuse::unmount(&at, true); // the failure that counts is the first
        })
    }

    fn supervise(
        self,
        device: OwnedFd,
        options: Vec<String>,
        foreground: bool,
        waiting: Waiting,
    ) -> Result<(), Failure> {
        let entry = mount_table::find(&self.at);
        let entry = entry.ok_or_else(|| Failure::new("the mount is gone already"))?;
        let workers = match self.plan.workers {
            0 => std::thread::available_parallelism().map_or(1, usize::from).min(WORKERS_MAX),
            workers => workers,
        };
        let words = MountWords { target: self.target, at: self.at, options, workers, foreground };
        Launch { device, connection: entry.connection, words }.exec(waiting).map(drop)
    }

    fn client_options(&self) -> ClientOptions {
        ClientOptions {
            key: self.plan.key.clone(),
            timeout: self.plan.timeout,
            replay_bytes: self.plan.replay_bytes,
        }
    }

    /// Says hello to the server and goodbye, so that what is wrong is known before anything
    /// is mounted. Answers whether the export is read only.
    fn try_server(&self) -> Result<bool, Failure> {
        let mut executor = new_executor()?;
        executor.block_on(async {
            let options = self.client_options();
            let memory = SessionMemory::heap();
            let session =
                dray_client::connect_timeout(&self.target, &options, CONNECT_MAX, memory).await?;
            session.goodbye();
            Ok(session.info().read_only)
        })
    }

    /// Mounts: from here on the kernel sends requests.
    fn attach(&self, read_only: bool) -> Result<OwnedFd, Failure> {
        let options = MountOptions {
            source: self.target.to_string(),
            default_permissions: self.plan.consistency != Consistency::Strict,
            allow_other: self.plan.allow_other.unwrap_or(paths::is_root()),
            read_only: self.plan.read_only || read_only,
            no_suid: self.plan.no_suid,
            no_dev: self.plan.no_dev,
            no_exec: self.plan.no_exec,
        };
        let what = || format!("cannot mount on {}", self.at.display());
        dray_fuse::mount(&self.at, &options).doing(what)
    }

    /// Serves the mount behind `device`. `memory` makes the memory of the session, once for
    /// each attempt to connect; `wait` is what to do between two attempts, none to try once;
    /// `push` has the queues of a ring pushed by somebody else.
    pub fn serve(
        self,
        device: Device,
        memory: NewMemory,
        wait: Option<Notice>,
        push: Notice,
    ) -> Result<Running, Failure> {
        let (tell, told) = watch::channel(None);
        let what = || "cannot use the memory of the session".to_owned();
        let host = Arc::new(Attached { session: told.clone(), push });
        let options = FuseOptions {
            node: memory().doing(what)?.node(),
            workers: device.clones.len(),
            host,
            ..self.fuse_options()
        };
        let connection = Arc::new(Connection {
            target: self.target.clone(),
            options: self.client_options(),
            memory,
            wait,
            tell,
            told: told.clone(),
        });
        let per_thread: PerThread = Arc::new(move |index, _| {
            let connection = connection.clone();
            Box::pin(async move { connection.for_worker(index).await })
        });
        let mounted = Mounted::start(per_thread, device, options)
            .doing(|| format!("cannot serve the mount on {}", self.at.display()))?;
        let session = told.borrow().clone().flatten();
        let session = session.ok_or_else(|| Failure::new("the server went away"))?;
        Ok(Running { mount: self, mounted, session })
    }

    fn fuse_options(&self) -> FuseOptions {
        FuseOptions {
            consistency: self.plan.consistency,
            transport: self.plan.transport,
            attr_validity: self.plan.attr_validity,
            entry_validity: self.plan.attr_validity,
            workers: self.plan.workers,
            job_ids: self.plan.job_ids,
            patience: self.plan.timeout,
            ..FuseOptions::default()
        }
    }
}

/// Makes memory for a session, or finds that of a process before us.
pub type NewMemory = Box<dyn Fn() -> io::Result<SessionMemory> + Send + Sync>;

/// The session, once it is there; none in it if it could not be had.
type ToldSession = watch::Receiver<Option<Option<Arc<Session>>>>;

/// Makes the session on the first worker's thread; the others join it.
struct Connection {
    target: Target,
    options: ClientOptions,
    memory: NewMemory,
    /// Called before each further attempt to connect; none: there is one attempt.
    wait: Option<Notice>,
    /// None until it has been tried.
    tell: watch::Sender<Option<Option<Arc<Session>>>>,
    told: ToldSession,
}

/// Says something to somebody else.
pub type Notice = Box<dyn Fn() + Send + Sync>;

/// A daemon's surroundings: its supervisor, and a server at which files are still open that
/// a daemon before it opened.
struct Attached {
    session: ToldSession,
    push: Notice,
}

impl Host for Attached {
    fn reopen<'a>(
        &'a self,
        cx: &'a Context,
        fs: &'a Arc<dyn FileSystem>,
        id: FileId,
        flags: i32,
        request: RequestId,
    ) -> Fut<'a, dray_core::Result<Arc<dyn OpenFile>>> {
        let how = OpenHow::new(flags);
        let attached = self.attach(id, flags, request);
        Box::pin(async move {
            match attached {
                Some(file) => Ok(file),
                None => fs.open(cx, id, how).await,
            }
        })
    }

    fn attach(&self, id: FileId, flags: i32, request: RequestId) -> Option<Arc<dyn OpenFile>> {
        let session = self.session.borrow().clone().flatten()?;
        Some(RemoteFs::new(session).attach(id, OpenHow::new(flags), request.0))
    }

    fn attached(&self) {
        if let Some(session) = self.session.borrow().clone().flatten() {
            session.attached();
        }
    }

    fn wake_queues(&self) {
        (self.push)();
    }

    fn owes_error(&self, id: FileId) -> bool {
        let told = self.session.borrow();
        told.as_ref().and_then(Option::as_ref).is_some_and(|session| session.owes_error(id))
    }
}

impl Connection {
    async fn for_worker(&self, index: usize) -> dray_core::Result<Arc<dyn FileSystem>> {
        if index == 0 {
            let session = self.connect().await;
            self.tell.send_replace(Some(session));
        }
        let mut told = self.told.clone();
        let known = told.wait_for(Option::is_some).await;
        let session = known.ok().and_then(|known| known.clone().flatten());
        let session = session.ok_or(Error::new(Errno::EHOSTUNREACH))?;
        session.attach_here();
        Ok(Arc::new(RemoteFs::new(session)))
    }

    async fn connect(&self) -> Option<Arc<Session>> {
        let mut told = false;
        loop {
            let memory = (self.memory)().inspect_err(|error| log::error!("{error}")).ok()?;
            let tried =
                dray_client::connect_timeout(&self.target, &self.options, CONNECT_MAX, memory);
            let error = match tried.await {
                Ok(session) => return Some(session),
                Err(error) => error,
            };
            if !std::mem::replace(&mut told, true) {
                log::error!("{}: {error}", self.target);
            }
            // Waiting does not help: the supervisor ends such a mount.
            if matches!(error, ConnectError::Refused { errno: Errno::ESHUTDOWN, .. }) {
                return None;
            }
            let wait = self.wait.as_ref()?;
            wait();
            dray_rt::sleep(CONNECT_PAUSE).await;
        }
    }
}

fn new_executor() -> Result<Executor, Failure> {
    Executor::new(DriverKind::Epoll).doing(|| "cannot start the executor".into())
}

/// Answers `dray status` until the answer is dropped.
fn listen_for_control(
    mount: &Mount,
    session: &Arc<Session>,
    reporter: Reporter,
) -> Result<SocketFile, Failure> {
    let (socket, file) = Kind::Mount.listen(&mount.at)?;
    let report = Arc::new(MountReport {
        mountpoint: mount.at.display().to_string(),
        target: mount.target.to_string(),
        consistency: mount.plan.consistency,
        timeout: mount.plan.timeout,
        session: session.clone(),
        reporter,
        since: dray_rt::now(),
    });
    let answer: Answer = Arc::new(move |question| {
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
            log::error!("the status can no longer be asked for: {error}");
        }
    });
    Ok(file)
}

impl Running {
    /// What goes on.
    pub fn reporter(&self) -> Reporter {
        self.mounted.reporter()
    }

    /// Serves until it is unmounted. `beside` runs on the executor that waits.
    pub fn wait(self, beside: impl Future<Output = ()> + Send + 'static) -> Result<(), Failure> {
        let Running { mount, mounted, session } = self;
        let reporter = mounted.reporter();
        let (end, ended) = oneshot::channel();
        let waiter = std::thread::Builder::new().name("dray-wait".into()).spawn(move || {
            let _ = end.send(mounted.wait()); // we wait for it until the end
        });
        waiter.doing(|| "cannot start a thread".into())?;
        let result = new_executor()?.block_on(async {
            // A mount whose status cannot be asked for is still a mount.
            let control = listen_for_control(&mount, &session, reporter);
            let _control = control.inspect_err(|failure| log::warn!("{}", failure.message));
            dray_rt::spawn(beside);
            let ended = ended.await.map_err(|_| Failure::new("a thread of the mount died"))?;
            ended.doing(|| format!("the mount on {} ended", mount.at.display()))
        });
        if result.is_err() && mount_table::find(&mount.at).is_some() {
            let _ = dray_fuse::unmount(&mount.at, true); // nobody will ever answer there again
        }
        session.goodbye();
        result
    }
}
