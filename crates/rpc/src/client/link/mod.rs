//! The state that all channels of a session share: the server's identity, and all that is held
//! there.

mod addresses;
pub(crate) mod changes;
mod connecting;
mod handshake;
pub(crate) mod jobs;
mod lock_leases;
pub(crate) mod outage;
mod recalls;
mod reestablish;
mod release;
mod server_identity;
mod silent_server;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use dray_core::{Context, Errno, Error, FsInfo, LockOwner, NodeId, Origin, RequestId, Result};
use dray_fabric::Connect;
use dray_rt::sync::{Notify, watch};
use dray_rt::{ExecutorHandle, timeout};

use self::addresses::ServerAddresses;
use self::changes::ChangeListener;
use self::jobs::JobFinder;
use self::reestablish::ReestablishQueue;
use self::server_identity::ServerIdentity;
pub(crate) use self::server_identity::SessionState;
use crate::client::channel::{ChangeNotes, Channel};
use crate::client::durability::{MappedSegments, SegmentSource, UnsyncedLog};
use crate::client::holdings::closes::CloseMemory;
use crate::client::holdings::files::OpenFiles;
use crate::client::holdings::locks::HeldLocks;
use crate::client::kept_writes::KeptWrites;
use crate::client::leases::LeasedAnswers;
use crate::client::link::outage::Outage;
use crate::client::memory::SessionMemory;
use crate::client::open_ahead::OpenAhead;
use crate::client::session::ClientOptions;
use crate::client::slots::{ClientSlots, ReplaySlot, SlotPurpose};
use crate::wire::NotifyHead;

/// Marks numbers of our own; those of front ends do not reach this far.
const OWN_NUMBER: u64 = 1 << 63;
/// Above what one process counts of them stands which process of this client it is.
const PROCESS_SHIFT: u32 = 40;

/// Why a server ends a session for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ServerEnd {
    /// The server's administrator does not want this mount any more.
    Evicted,
    /// The server has another definition of the projection than the one that this mount places by.
    Redefined,
}

/// The state that all channels of a session share about its server.
pub(crate) struct Link {
    pub(crate) options: ClientOptions,
    pub(crate) addresses: ServerAddresses,
    pub(crate) slots: Arc<ClientSlots>,
    memory: Arc<SessionMemory>,
    pub(crate) held: Arc<HeldLocks>,
    pub(crate) closing: Arc<CloseMemory>,
    pub(crate) files: OpenFiles,
    pub(crate) open_ahead: OpenAhead,
    /// The session's first channel, which lasts as long as the session.
    first: OnceLock<Weak<Channel>>,
    /// The instance of the server where our locks have been reclaimed.
    reclaimed: AtomicU64,
    /// The files that processes before us had open for other clients are released.
    released: AtomicBool,
    /// The instance of the server that has got what was kept of writes.
    written_back: AtomicU64,
    /// The instance of the server where everything is reestablished.
    returned: AtomicU64,
    pub(crate) unsynced: UnsyncedLog,
    /// The replay that was begun last: the epoch of the server that it is for, and its channel.
    replaying: Mutex<(SessionState, Weak<Channel>)>,
    reestablishing: Mutex<ReestablishQueue>,
    requests: AtomicU64,
    /// Numbers that this process gives to files are not less, and those of processes before it are.
    first_handle: u64,
    /// Finds the batch jobs of callers.
    jobs: JobFinder,
    /// Notified when other clients change open files.
    changes: ChangeListener,
    pub(crate) leases: LeasedAnswers,
    pub(crate) kept: KeptWrites,
    pub(crate) node: NodeId,
    server: Mutex<ServerIdentity>,
    /// The session has been ended by us, or its beginning given up: it is not to be begun anew.
    pub(crate) leaving: AtomicBool,
    /// The session has been ended by the server, for good.
    ended: OnceLock<ServerEnd>,
    outage: Outage,
    /// A server has welcomed this process.
    met: watch::Sender<bool>,
    /// Wakes connections that wait for their next try, when another one was welcomed.
    reached: Notify,
    /// Counts the reasons to ask an idle session's server whether it is there.
    alarms: watch::Sender<u64>,
    home: ExecutorHandle,
}

impl Link {
    pub(crate) fn new(
        connector: Arc<dyn Connect>,
        options: ClientOptions,
        memory: SessionMemory,
    ) -> Link {
        let memory = Arc::new(memory);
        let (node, process) = (memory.node(), memory.begin_process());
        let first_handle = OWN_NUMBER | ((process << PROCESS_SHIFT) & !OWN_NUMBER);
        let (mut server, replay_bytes) = (ServerIdentity::default(), options.replay_bytes);
        let inherited = memory.session().is_some();
        let leases = LeasedAnswers::new(options.leases, inherited, options.lease_share.clone());
        let dirty = options.write_back.as_ref();
        let kept = KeptWrites::new(options.leases, leases.clone(), &memory, dirty);
        // Registered memory would come in here.
        let kept_data: Box<dyn SegmentSource> = match &options.group {
            Some(group) => Box::new(group.segments()),
            None => Box::new(MappedSegments::default()),
        };
        let (reclaimed, reopened) = memory.reestablished();
        if let Some((session, secret, _)) = memory.session() {
            let boot = memory.boot();
            server = ServerIdentity { session, secret, instance: reopened, boot, ..server };
        }
        Link {
            options,
            addresses: ServerAddresses::new(connector),
            slots: Arc::new(ClientSlots::new(memory.clone())),
            closing: Arc::new(CloseMemory::new(memory.clone())),
            held: Arc::new(HeldLocks::new(memory.clone())),
            files: OpenFiles::new(memory.clone(), inherited),
            open_ahead: OpenAhead::new(memory.clone()),
            memory,
            first: OnceLock::new(),
            reclaimed: AtomicU64::new(reclaimed),
            released: AtomicBool::new(false),
            returned: AtomicU64::new(reopened),
            unsynced: UnsyncedLog::new(replay_bytes, kept_data, inherited),
            replaying: Mutex::default(),
            reestablishing: Mutex::default(),
            requests: AtomicU64::new(1),
            first_handle,
            jobs: JobFinder::default(),
            changes: ChangeListener::default(),
            leases,
            kept,
            written_back: AtomicU64::new(reopened),
            node,
            server: Mutex::new(server),
            leaving: AtomicBool::new(false),
            ended: OnceLock::new(),
            outage: Outage::default(),
            met: watch::channel(false).0,
            reached: Notify::new(),
            alarms: watch::channel(0).0,
            home: ExecutorHandle::current(),
        }
    }

    pub(crate) fn server(&self) -> MutexGuard<'_, ServerIdentity> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether connections are to be made: neither we nor the server have ended the session.
    pub(crate) fn is_wanted(&self) -> bool {
        !self.leaving.load(Ordering::Relaxed) && self.ended.get().is_none()
    }

    /// Why the last try to connect failed; none if one has gone well since.
    pub(crate) fn trouble(&self) -> Option<String> {
        self.outage.why()
    }

    /// Why the server has ended the session for good, if it has.
    pub(crate) fn end_by_server(&self) -> Option<ServerEnd> {
        self.ended.get().copied()
    }

    /// The server has ended the session. It is not begun anew by itself: programs would go on as
    /// if their locks and open files were still theirs.
    fn note_end(&self, why: ServerEnd) {
        if self.ended.set(why).is_err() {
            return;
        }
        self.options.group.iter().for_each(|group| group.end_all(why));
        self.leases.end();
        let target = self.addresses.target();
        match why {
            ServerEnd::Evicted => log::error!(
                "{target}: the server's administrator evicted this mount: locks and open files are \
                 gone, and every call fails with ESHUTDOWN; unmount, and mount again"
            ),
            ServerEnd::Redefined => log::error!(
                "{target}: the definition of projection {} has changed: unmount, and mount again; \
                 until then every call fails with ESHUTDOWN",
                self.options.export
            ),
        }
    }

    /// Another session of the mount has been ended by its server. The server of this one gives everything
    /// back, too.
    pub(crate) fn end_with_others(&self, why: ServerEnd) {
        if self.ended.set(why).is_err() {
            return;
        }
        self.leases.end();
        if let Some(channel) = self.first.get().and_then(Weak::upgrade) {
            channel.notify(NotifyHead::GOODBYE, 0); // without a connection the lease ends it
            channel.end_by_server(why);
        }
    }

    /// The number of a request at the node where it began; 0 if it began nowhere.
    pub(crate) fn request_of(&self, cx: &Context) -> u64 {
        if cx.origin.node == NodeId::OWN { 0 } else { cx.origin.request.0 }
    }

    /// The identity by which a request is recognized if another process repeats it. The node is
    /// [`NodeId::OWN`] if that is this client. The number is 0 if the request is not recognized.
    pub(crate) fn origin_of(&self, cx: &Context) -> Origin {
        let node = if cx.origin.node == self.node { NodeId::OWN } else { cx.origin.node };
        Origin { node, request: RequestId(self.request_of(cx)) }
    }

    /// The number of a request of this client's own front end, else 0.
    pub(crate) fn own_request_of(&self, cx: &Context) -> u64 {
        if cx.origin.node == self.node { cx.origin.request.0 } else { 0 }
    }

    /// The owner of a lock as it is noted: [`NodeId::OWN`] stands for this client's node.
    pub(crate) fn owner_of(&self, cx: &Context, owner: LockOwner) -> LockOwner {
        let LockOwner { node, number } = owner.of_node(cx.origin.node);
        LockOwner { node: if node == self.node { NodeId::OWN } else { node }, number }
    }

    /// A replay slot for the request of `cx`. Waits for no longer than a call may, of whose time it
    /// is a part: slots of changes without an answer are not free. Errors: `EINTR` when
    /// cancelled, `EHOSTDOWN`.
    pub(crate) async fn take_slot(&self, cx: &Context, purpose: SlotPurpose) -> Result<ReplaySlot> {
        let taken = self.slots.take(cx, (self.origin_of(cx), purpose));
        let Some(limit) = self.options.timeout else { return taken.await };
        timeout(limit, taken).await.unwrap_or_else(|_| {
            let late = Error::retry(Errno::EHOSTDOWN);
            Err(late.because("the server answered no change within the mount's timeout"))
        })
    }

    /// A number for a file that the request of `cx` opens. A request of our own front end opens one
    /// file, so the request identifies it, also for a later process.
    pub(crate) fn handle_of(&self, cx: &Context) -> u64 {
        match self.own_request_of(cx) {
            0 => self.own_handle(),
            request => self.files.aliases.number_of(request),
        }
    }

    /// A number for a file that we open for ourselves.
    pub(crate) fn own_handle(&self) -> u64 {
        self.requests.fetch_add(1, Ordering::Relaxed) | self.first_handle
    }

    /// Whether the server opens files at their lookup.
    pub(crate) fn opens_ahead(&self) -> bool {
        self.server().opens_ahead
    }

    pub(crate) fn new_channel(&self) -> Arc<Channel> {
        let (rights, leases) = (self.open_ahead.rights().clone(), self.leases.clone());
        let notes = ChangeNotes { rights, leases };
        let session = self.server().session;
        Channel::new(self.options.timeout, self.closing.clone(), notes, session)
    }

    /// A replay with this epoch of the server is to begin on `channel`. A replay with an earlier
    /// epoch is over, on its channel, too, whether its calls are answered or not. False if yet
    /// another epoch has been met.
    pub(crate) fn begin_replay(&self, channel: &Arc<Channel>, session_state: SessionState) -> bool {
        let known = self.server(); // while it is held no other epoch is met
        if known.session_state() != session_state {
            return false;
        }
        let next = (session_state, Arc::downgrade(channel));
        let (_, before) = std::mem::replace(&mut *self.replaying(), next);
        drop(known);
        before.upgrade().into_iter().for_each(|channel| channel.shut());
        true
    }

    /// Ends the replay with another epoch of the server than the present one. Its calls must not be
    /// sent again at this one: nobody would close the files that they open.
    pub(crate) fn end_former_replay(&self) {
        let known = self.server(); // while it is held no other epoch is met
        let (replayed_to, channel) = self.replaying().clone();
        let former = replayed_to != known.session_state();
        drop(known);
        channel.upgrade().filter(|_| former).into_iter().for_each(|channel| channel.shut());
    }

    fn replaying(&self) -> MutexGuard<'_, (SessionState, Weak<Channel>)> {
        self.replaying.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a server has welcomed this process: only then it is known what it can do.
    pub(crate) async fn met(&self) {
        let mut met = self.met.subscribe();
        let _ = met.wait_for(|met| *met).await; // the sender is ours
    }

    /// The export, as a process before us knew it.
    pub(crate) fn inherited_export(&self) -> Option<FsInfo> {
        self.memory.session().and_then(|_| self.memory.export())
    }

    /// Gives up what processes before us had open for other clients: see
    /// [`ClientSession::release_inherited`].
    ///
    /// [`ClientSession::release_inherited`]:
    /// crate::client::session::ClientSession::release_inherited
    pub(crate) fn release_inherited(self: &Arc<Link>, channel: &Arc<Channel>) {
        let range = OWN_NUMBER..self.first_handle;
        if range.is_empty() {
            return; // no process was before this one
        }
        let (link, channel) = (self.clone(), channel.clone());
        match self.held.inherited_lock_leases().is_empty() {
            true => link.release_all(range, &channel),
            // The server ends a lease with its open file, and has to know the locks before.
            false => self.home.spawn(async move {
                link.inherited_lock_leases_back().await;
                link.release_all(range, &channel);
            }),
        }
    }

    fn release_all(&self, range: std::ops::Range<u64>, channel: &Channel) {
        for handle in self.files.forget_within(&range) {
            self.held.closed(handle);
        }
        self.released.store(true, Ordering::SeqCst);
        channel.notify_released((range.start, range.end));
    }

    /// Starts a task that outlives its caller.
    pub(crate) fn spawn_home(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.home.spawn(work);
    }

    /// Whether the running task is on the executor that the session was made on.
    pub(crate) fn is_at_home(&self) -> bool {
        self.home.is_current()
    }
}
