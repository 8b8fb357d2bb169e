//! The connection of a mount's daemon to its server: one session, which its workers share.

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dray_cache::{CachedFs, LeasedAttributes, LocalCache, VersionSource};
use dray_client::{ClientConnection, ClientMemory, ConnectError, ConnectOptions, Target};
use dray_core::{Attr, Errno, Error, FileId, SessionControl, Stack};
use dray_fuse::{Host, InvalidatorProcess};
use dray_layers::metrics::Metrics;
use dray_layers::observed_stack;
use dray_rt::sync::watch;

use crate::mount::CONNECT_MAX;
use crate::mount::supervisor::OWN_PROGRAM;

/// A daemon that follows another one serves without a server that does not answer within this time.
/// Calls wait for it, as long as the mount's limit allows.
const TAKE_OVER_MAX: Duration = Duration::from_secs(1);
/// So long a mount waits for what earlier ones have left on the local disk. A daemon that is silent for longer counts as
/// stuck. What is not written then stays there for the next mount.
const LEFT_BEHIND_MAX: Duration = Duration::from_secs(20);
/// Between two attempts of a daemon that follows one that passed on too little.
const CONNECT_PAUSE: Duration = Duration::from_millis(300);

/// The sessions, once they are there; none in it if they could not be had.
pub(super) type SharedConnection = watch::Receiver<Option<Option<ClientConnection>>>;

/// Makes the sessions on the first worker's thread; the others join them.
pub(super) struct ServerConnection {
    pub(super) target: Target,
    pub(super) options: ConnectOptions,
    pub(super) memory: ClientMemory,
    /// Called before each further attempt to connect; none: there is one attempt.
    pub(super) wait: Option<NotifyFn>,
    /// Another program goes on with the mount if this program and the server do not understand each
    /// other.
    pub(super) replaceable: bool,
    /// The cache on a local disk.
    pub(super) cache: Option<Arc<LocalCache>>,
    /// The server leases attributes, and the cache goes by them.
    pub(super) leases: bool,
    /// Sees every call, where metrics are wanted.
    pub(super) calls: Option<Arc<Metrics>>,
    /// None until it has been tried.
    pub(super) session_sender: watch::Sender<Option<Option<ClientConnection>>>,
    pub(super) session_receiver: SharedConnection,
    /// Why there is none.
    pub(super) failed: Mutex<Option<ConnectError>>,
}

/// Notifies another process or thread.
pub type NotifyFn = Box<dyn Fn() + Send + Sync>;

/// What a daemon asks its supervisor for.
pub struct SupervisorRequests {
    /// To have the queues of a ring pushed.
    pub push: NotifyFn,
    /// To have the entries of a ring come together.
    pub reclaim: NotifyFn,
}

/// The processes around a daemon: its supervisor, and one that has the kernel drop pages.
pub(super) struct DaemonHost {
    wishes: SupervisorRequests,
    /// The process that has the kernel drop what others have changed, once there was one.
    dropping: Mutex<Option<Child>>,
}

impl DaemonHost {
    pub(super) fn new(wishes: SupervisorRequests) -> DaemonHost {
        DaemonHost { wishes, dropping: Mutex::default() }
    }
}

impl Host for DaemonHost {
    fn wake_queues(&self) {
        (self.wishes.push)();
    }

    fn reclaim_entries(&self) {
        (self.wishes.reclaim)();
    }

    fn start_invalidator(&self, device: BorrowedFd<'_>) -> io::Result<InvalidatorProcess> {
        let mut dropping = self.dropping.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mut before) = dropping.take() {
            let _ = before.wait(); // it has closed its end of the pipe, so it is about to end
        }
        let ((reader, nodes), (dropped, tells)) = (io::pipe()?, io::pipe()?);
        let mut command = Command::new(OWN_PROGRAM);
        command.arg0("dray").arg("invalidate").current_dir("/");
        command.stdin(reader).stdout(device.try_clone_to_owned()?).stderr(tells);
        *dropping = Some(command.spawn().inspect_err(|error| {
            log::warn!("changes by other clients show at the next open: {error}");
        })?);
        Ok(InvalidatorProcess { nodes, dropped })
    }
}

/// The leases of a session, for the cache.
struct SessionLeases(Arc<dyn SessionControl>);

impl LeasedAttributes for SessionLeases {
    fn leased(&self, id: FileId) -> Option<Attr> {
        self.0.leased_attributes(id)
    }
}

impl ServerConnection {
    pub(super) async fn for_worker(&self, index: usize) -> dray_core::Result<Stack> {
        if index == 0 {
            let session = self.connect().await;
            self.session_sender.send_replace(Some(session));
        }
        let mut receiver = self.session_receiver.clone();
        let known = receiver.wait_for(Option::is_some).await;
        let session = known.ok().and_then(|known| known.clone().flatten());
        let session = session.ok_or(Error::new(Errno::EHOSTUNREACH))?;
        session.attach_here();
        let stack = self.cached(session.stack());
        Ok(match &self.calls {
            Some(calls) => observed_stack(stack, calls),
            None => stack,
        })
    }

    fn cached(&self, stack: Stack) -> Stack {
        let Some(cache) = &self.cache else { return stack };
        if self.leases {
            let leases = Arc::new(SessionLeases(stack.session.clone()));
            let fs = CachedFs::new(stack.fs, VersionSource::Leases(leases), cache.clone());
            return Stack { fs: Arc::new(fs), session: stack.session };
        }
        let fs = CachedFs::new(stack.fs, VersionSource::Openings, cache.clone());
        let session = Arc::new(fs.session(stack.session));
        Stack { fs: Arc::new(fs), session }
    }

    async fn connect(&self) -> Option<ClientConnection> {
        let (target, options) = (&self.target, &self.options);
        let (patience, replaceable) = (TAKE_OVER_MAX, self.replaceable);
        let taken_over =
            ClientConnection::take_over(target, options, &self.memory, patience, replaceable);
        match taken_over.await {
            // Waiting does not help: the supervisor ends such a mount, or starts another program.
            Some(outcome) => outcome.map_err(|error| self.fail(error)).ok(),
            None => self.connect_first().await,
        }
    }

    fn fail(&self, error: ConnectError) {
        *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    }

    /// Why there is no session. It is reported once.
    pub(super) fn failure(&self) -> Option<ConnectError> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    async fn connect_first(&self) -> Option<ClientConnection> {
        let mut reported = false;
        loop {
            let (target, options) = (&self.target, &self.options);
            let tried = ClientConnection::connect(target, options, &self.memory, CONNECT_MAX);
            let error = match tried.await {
                Ok(session) => {
                    write_left_behind(&session).await;
                    return Some(session);
                }
                Err(error) => error,
            };
            // As above.
            let hopeless = error.is_hopeless(self.replaceable);
            let Some(wait) = self.wait.as_ref().filter(|_| !hopeless) else {
                self.fail(error);
                return None;
            };
            if !std::mem::replace(&mut reported, true) {
                log::error!("{}: {error}", self.target);
            }
            wait();
            dray_rt::sleep(CONNECT_PAUSE).await;
        }
    }
}

/// Writes what mounts of before have left on the local disk, before programs see the files.
async fn write_left_behind(connection: &ClientConnection) {
    let writing = connection.session().write_left_behind();
    if dray_rt::timeout(LEFT_BEHIND_MAX, writing).await.is_err() {
        log::error!(
            "what a mount of before has left on the local disk is not written within {} s; the next mount tries again",
            LEFT_BEHIND_MAX.as_secs()
        );
    }
}
