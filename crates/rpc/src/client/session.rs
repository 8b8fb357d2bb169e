//! A mount as the server knows it: its channels, its options and its status.

use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use dray_core::{Context, Errno, Error, FsInfo, NodeId, Op, Result};
use dray_fabric::Connect;

use crate::auth::Key;
use crate::client::adaptive_choice::AdaptiveChoice;
use crate::client::channel::{Channel, ChannelStats};
use crate::client::connect_error::ConnectError;
use crate::client::dirty_log::WriteBackOptions;
use crate::client::durability::UnsyncedStatus;
use crate::client::kept_writes::KeptWritesStatus;
use crate::client::leases::{LeaseMemoryStatus, LeaseShare, LeaseWish};
use crate::client::link::{Link, ServerEnd};
use crate::client::memory::SessionMemory;
use crate::client::open_ahead::OpenAheadStats;
use crate::client::session_group::SessionGroup;
use crate::client::slots::{ReplaySlot, SlotPurpose};
use crate::wire::NotifyHead;

/// Connections that one mount makes to one server at most; further threads share.
pub(crate) const CHANNELS_MAX: usize = 4;

/// How long the end of a mount waits for a server that is to take what was kept.
const FINISH_MAX: Duration = Duration::from_secs(60);

/// How a client behaves.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// The export wanted.
    pub export: String,
    /// The key, if the server wants one.
    pub key: Option<Key>,
    /// How long a call waits for a server that is away before it fails with `EHOSTDOWN`;
    /// none: for ever.
    pub timeout: Option<Duration>,
    /// Name of this host, for the server's status.
    pub host: String,
    /// Written data that are not known to be on media are kept up to this size. They are sent again
    /// if the server's machine loses power.
    pub replay_bytes: u64,
    /// Reads of this size and larger ones may be split over two connections;
    /// [`ClientOptions::SPLIT_MIN_BYTES`] is a good choice.
    pub split_min_bytes: u32,
    /// Data and attributes of open files are cached: the server notifies the client of changes by
    /// others ([`SessionControl::hear_changes_by`](dray_core::SessionControl::hear_changes_by)).
    pub caches: bool,
    /// The front end does not distinguish callers, since all are one user at the server. The client
    /// does not go on with a server at which they are not.
    pub counts_on_one_user: bool,
    /// Whether the session wants leases.
    pub leases: LeaseWish,
    /// The sessions of the mount with servers that lease parts of the same files.
    pub lease_share: Option<LeaseShare>,
    /// Fingerprint of the definition of the projection by which the front end places files. With 0
    /// the front end knows of none, and is refused with the definition where there is one.
    pub definition: u64,
    /// Where the mount has a session for each slice of a projection: all of them.
    pub group: Option<Arc<SessionGroup>>,
    /// A directory for what was written under a write lease, and can be written to its file no more. None: that is
    /// lost, and the log says so.
    pub aside: Option<PathBuf>,
    /// A log on a local disk for what is kept under write leases. None: it is kept in memory, and sent with the close.
    pub write_back: Option<WriteBackOptions>,
}

impl ClientOptions {
    /// Smaller reads are better in one piece: to wake a second thread costs more than it brings.
    pub const SPLIT_MIN_BYTES: u32 = 512 << 10;
}

/// A session with one server, shared by all threads of a mount.
pub struct ClientSession {
    pub(crate) link: Arc<Link>,
    /// A number that is unique among the sessions of this process, past ones included.
    number: u64,
    info: FsInfo,
    pub(super) channels: RwLock<Vec<Arc<Channel>>>,
    /// The choice for large reads.
    pub(crate) read_choice: AdaptiveChoice,
    beginning: Beginning,
}

/// When a session makes its first connection.
enum Beginning {
    /// Before its first call.
    First,
    /// With its first call. True once there was one.
    WithUse(AtomicBool),
}

/// For `dray status`.
#[derive(Clone, Debug)]
pub struct SessionStatus {
    /// Where the server is.
    pub target: String,
    /// The session's export at the server.
    pub export: String,
    /// Our number there.
    pub session: u64,
    /// Times that the server had forgotten this session.
    pub lost: u64,
    /// The server's administrator has ended it: it does not come back.
    pub evicted: bool,
    /// The servers have another definition of the projection now: it does not come back.
    pub redefined: bool,
    /// Why the last try to connect failed; none if one has gone well since.
    pub trouble: Option<String>,
    /// The connections of the session.
    pub channels: Vec<ChannelStats>,
    /// The changes that may not be on media at the server.
    pub unsynced: UnsyncedStatus,
    /// Files opened at their lookup.
    pub open_ahead: OpenAheadStats,
    /// Answers that the server leases; none if the session wants no leases.
    pub leases: Option<LeaseMemoryStatus>,
    /// Writes that the session keeps; none if it wants no write leases.
    pub kept_writes: Option<KeptWritesStatus>,
}

thread_local! {
    /// The channel of this thread, for the session of this number.
    static HERE: RefCell<Vec<(u64, Arc<Channel>)>> = const { RefCell::new(Vec::new()) };
}

impl ClientSession {
    /// Connects for the first time. It is done once the server has welcomed us; from then on lost
    /// connections are made anew for ever. If `memory` is that of a process that died, its session
    /// goes on; call [`SessionControl::attached`](dray_core::SessionControl::attached) then.
    pub async fn connect(
        connector: Arc<dyn Connect>,
        options: ClientOptions,
        memory: SessionMemory,
    ) -> std::result::Result<Arc<ClientSession>, ConnectError> {
        let link = Arc::new(Link::new(connector, options, memory));
        let channel = link.new_channel();
        channel.inherit();
        link.close_inherited(&channel);
        let info = link.start(channel.clone()).await?;
        let session = ClientSession::new(link, info, Beginning::First);
        session.adopt(channel);
        session.link.unsynced.sync_inherited();
        Ok(session)
    }

    /// A session that begins with its first call, with a server that may be away then. Calls wait for it
    /// as they do in any outage. Another server has said what its export is.
    ///
    /// # Panics
    /// Outside of an executor.
    pub fn begin_with_use(
        connector: Arc<dyn Connect>,
        options: ClientOptions,
        memory: SessionMemory,
        info: FsInfo,
    ) -> Arc<ClientSession> {
        let link = Arc::new(Link::new(connector, options, memory));
        ClientSession::new(link, info, Beginning::WithUse(AtomicBool::new(false)))
    }

    fn new(link: Arc<Link>, info: FsInfo, beginning: Beginning) -> Arc<ClientSession> {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let (channels, read_choice) = (RwLock::default(), AdaptiveChoice::default());
        let session =
            Arc::new(ClientSession { link, number, info, channels, read_choice, beginning });
        if let Some(group) = &session.link.options.group {
            group.join(&session.link);
        }
        session.schedule_syncs();
        session.link.kept.inherit(&session);
        session
    }

    /// Goes on with the session of a process before us, noted in `memory`, whether its server can
    /// be reached or not. Calls wait for the server as they do in any outage. It is tried for
    /// `patience` first, so that a server that is there is known. Errors: those of that try that
    /// are hopeless ([`ConnectError::is_hopeless`]). None if `memory` does not say enough:
    /// [`ClientSession::connect`] then.
    pub async fn take_over(
        connector: Arc<dyn Connect>,
        options: ClientOptions,
        memory: SessionMemory,
        patience: Duration,
        replaceable: bool,
    ) -> Option<std::result::Result<Arc<ClientSession>, ConnectError>> {
        let link = Arc::new(Link::new(connector, options, memory));
        let info = link.inherited_export()?;
        let hopeless = |error: &ConnectError| error.is_hopeless(replaceable);
        Some(ClientSession::go_on(link, info, patience, hopeless).await)
    }

    /// Begins a session with a server that may be away, of whose export another server has said
    /// what it is. It is tried for `patience` first. If the server is away, calls wait for it as
    /// they do in any outage. Errors: the server is there and refuses.
    pub async fn begin(
        connector: Arc<dyn Connect>,
        options: ClientOptions,
        memory: SessionMemory,
        info: FsInfo,
        patience: Duration,
    ) -> std::result::Result<Arc<ClientSession>, ConnectError> {
        let link = Arc::new(Link::new(connector, options, memory));
        ClientSession::go_on(link, info, patience, ConnectError::is_lasting).await
    }

    /// Tries to connect for `patience`. Then the server is there, or it is tried again until it is.
    /// Errors: those of the first attempt that `ends` says end it.
    async fn go_on(
        link: Arc<Link>,
        info: FsInfo,
        patience: Duration,
        ends: impl Fn(&ConnectError) -> bool,
    ) -> std::result::Result<Arc<ClientSession>, ConnectError> {
        let channel = link.new_channel();
        channel.inherit();
        link.close_inherited(&channel);
        // It has what a process before this one kept before the server is met.
        let session = ClientSession::new(link.clone(), info, Beginning::First);
        let outcome = link.take_over(channel.clone());
        session.adopt(channel);
        let tried = dray_rt::timeout(patience, outcome).await;
        if let Ok(Ok(Err(error))) = tried
            && ends(&error)
        {
            return Err(error);
        }
        session.link.unsynced.sync_inherited();
        Ok(session)
    }

    /// The client's node, by which its requests are known over its processes. Front ends put the
    /// node into the context of every request, together with a number of their own.
    pub fn node(&self) -> NodeId {
        self.link.node
    }

    /// For a client that is a server itself, once its own clients have come back, or cannot any
    /// more. The server closes the files that a process before this one had open for them. It
    /// releases the locks that none of them has taken over. Until then both are kept.
    pub fn release_inherited(&self) {
        let channels = self.channels.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(channel) = channels.first() {
            self.link.release_inherited(channel);
        }
    }

    /// The export, as it was when the session began.
    pub fn info(&self) -> &FsInfo {
        &self.info
    }

    /// Whether all callers are one user at the server, as the server said last.
    pub fn one_user(&self) -> bool {
        self.link.server().one_user
    }

    /// Whether this session wants leases and the server gives them.
    pub fn has_leases(&self) -> bool {
        self.link.leases.are_given()
    }

    /// Whether the server leases writes to this session.
    pub fn has_write_leases(&self) -> bool {
        self.has_leases() && self.link.server().has(Op::WriteBack)
    }

    /// Whether some callers are other users at the server than they say (`squash`), as the server
    /// said last.
    pub fn squashes(&self) -> bool {
        self.link.server().squashes
    }

    /// Gives the calling thread a channel of its own, served by its executor, as long as
    /// there are not too many. A session that begins with its use does so by itself.
    pub fn attach_here(self: &Arc<ClientSession>) {
        match &self.beginning {
            Beginning::First => self.attach_thread(),
            Beginning::WithUse(_) => {}
        }
    }

    /// Whether it has made a connection, or is about to.
    pub fn has_begun(&self) -> bool {
        match &self.beginning {
            Beginning::First => true,
            Beginning::WithUse(begun) => begun.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn begins_with_use(&self) -> bool {
        matches!(self.beginning, Beginning::WithUse(_))
    }

    /// Waits until its server has welcomed us. Errors: `EHOSTDOWN`, it has not within `limit`.
    pub(crate) async fn met_within(
        self: &Arc<ClientSession>,
        limit: Option<Duration>,
    ) -> Result<()> {
        match limit {
            None => self.link.met().await,
            Some(limit) => {
                let met = dray_rt::timeout(limit, self.link.met()).await;
                met.map_err(|_| Error::retry(Errno::EHOSTDOWN))?;
            }
        }
        Ok(())
    }

    /// See [`Link::take_slot`]. The server grants slots when the session begins.
    pub(crate) async fn take_slot(
        self: &Arc<ClientSession>,
        cx: &Context,
        purpose: SlotPurpose,
    ) -> Result<ReplaySlot> {
        if self.begins_with_use() {
            self.channel()?;
        }
        self.link.take_slot(cx, purpose).await
    }

    /// The first call of this thread: its first channel. That of the session is made where the session
    /// was, which lasts as long as it does.
    fn begin_here(self: &Arc<ClientSession>, begun: &AtomicBool) {
        if !begun.swap(true, Ordering::Relaxed) {
            if self.link.is_at_home() {
                return self.start_first();
            }
            let session = Arc::downgrade(self);
            self.link.spawn_home(async move {
                session.upgrade().into_iter().for_each(|session| session.start_first());
            });
        }
        self.attach_thread();
    }

    fn start_first(self: &Arc<ClientSession>) {
        let channel = self.link.new_channel();
        channel.inherit();
        self.link.close_inherited(&channel);
        drop(self.link.take_over(channel.clone())); // an outcome is seen by the calls
        self.adopt(channel);
    }

    fn attach_thread(self: &Arc<ClientSession>) {
        let here = self.channel_here().is_some();
        if !here && !self.has_all_channels() {
            self.attach_another();
        }
    }

    /// A channel more for the calling thread, which is not its first choice. In simulations all
    /// threads of a mount are one.
    #[doc(hidden)]
    pub fn attach_another(self: &Arc<ClientSession>) {
        let channel = self.link.new_channel();
        self.link.connect_another(channel.clone());
        self.adopt(channel);
    }

    /// Sends everything that is kept of writes. What is not at the server after a minute stays in the log on the disk,
    /// if there is one. To be called when no program uses the mount any more.
    pub async fn finish(&self) {
        let kept = &self.link.kept;
        let finished = dray_rt::timeout(FINISH_MAX, kept.finish()).await;
        if finished.is_err() || kept.has_any() {
            kept.warn_of_rest(&self.link.addresses.target());
        }
    }

    /// Ends the session: the server gives everything back at once. To be called when the
    /// mount is gone.
    pub fn goodbye(&self) {
        self.link.leaving.store(true, Ordering::Relaxed);
        let channels = self.channels.read().unwrap_or_else(PoisonError::into_inner);
        channels.iter().for_each(|channel| channel.notify(NotifyHead::GOODBYE, 0));
    }

    /// The state of the session and its work.
    pub fn status(&self) -> SessionStatus {
        let channels = self.channels.read().unwrap_or_else(PoisonError::into_inner);
        let known = self.link.server();
        SessionStatus {
            target: self.link.addresses.target(),
            export: self.link.options.export.clone(),
            session: known.session,
            lost: known.lost,
            evicted: self.link.end_by_server() == Some(ServerEnd::Evicted),
            redefined: self.link.end_by_server() == Some(ServerEnd::Redefined),
            trouble: self.link.trouble(),
            channels: channels.iter().map(|channel| channel.stats()).collect(),
            unsynced: self.link.unsynced.status(),
            open_ahead: self.link.open_ahead.stats(),
            leases: self.link.leases.status(),
            kept_writes: self.link.kept.status(),
        }
    }

    /// Sends the closes that wait on any channel. Before a name goes: what was closed must not
    /// keep the space of a file that is removed.
    pub(crate) fn send_closes(&self) {
        let channels = self.channels.read().unwrap_or_else(PoisonError::into_inner);
        channels.iter().for_each(|channel| channel.send_closes());
    }

    /// Closes what lookups have opened and no caller has used.
    pub(crate) fn close_all_ahead(self: &Arc<ClientSession>) {
        let surplus = self.link.open_ahead.give_up();
        surplus.into_iter().for_each(|one| self.link.close_surplus(self, one));
    }

    pub(crate) fn adopt(self: &Arc<ClientSession>, channel: Arc<Channel>) {
        self.channels.write().unwrap_or_else(PoisonError::into_inner).push(channel.clone());
        HERE.with_borrow_mut(|here| {
            here.retain(|(_, channel)| !channel.is_shut()); // sessions that ended elsewhere
            here.push((self.number, channel));
        });
    }

    /// Another thread's channel, if nothing is under way on any.
    pub(crate) fn resting_channel(self: &Arc<ClientSession>) -> Option<Arc<Channel>> {
        let own = self.channel().ok()?;
        let channels = self.channels.read().unwrap_or_else(PoisonError::into_inner);
        let other = channels.iter().find(|channel| !Arc::ptr_eq(channel, &own))?;
        channels.iter().all(|channel| channel.rests()).then(|| other.clone())
    }

    fn channel_here(&self) -> Option<Arc<Channel>> {
        HERE.with_borrow(|here| {
            here.iter().find(|(of, _)| *of == self.number).map(|(_, channel)| channel.clone())
        })
    }

    fn has_all_channels(&self) -> bool {
        self.channels.read().is_ok_and(|channels| channels.len() >= CHANNELS_MAX)
    }

    /// The calling thread's channel, or another thread's if it has none.
    pub(crate) fn channel(self: &Arc<ClientSession>) -> Result<Arc<Channel>> {
        if let Some(channel) = self.channel_here() {
            return Ok(channel);
        }
        if let Beginning::WithUse(begun) = &self.beginning
            && !self.has_all_channels()
        {
            self.begin_here(begun);
            return self.channel_here().ok_or_else(|| Error::retry(Errno::EHOSTDOWN));
        }
        let channels = self.channels.read().unwrap_or_else(PoisonError::into_inner);
        channels.first().cloned().ok_or_else(|| Error::retry(Errno::EHOSTDOWN))
    }
}

impl Drop for ClientSession {
    fn drop(&mut self) {
        // Other threads forget theirs with their next session, or when they end.
        let _ = HERE.try_with(|here| here.borrow_mut().retain(|(of, _)| *of != self.number));
        let channels = self.channels.get_mut().unwrap_or_else(PoisonError::into_inner);
        channels.iter().for_each(|channel| channel.shut());
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io;
    use std::sync::mpsc;

    use dray_core::{FileId, FsUuid, Fut};
    use dray_fabric::Connection;
    use dray_rt::{DriverKind, Executor};

    use super::*;

    struct Nowhere;

    impl Connect for Nowhere {
        fn connect(&self) -> Fut<'_, io::Result<Arc<dyn Connection>>> {
            Box::pin(async { Err(io::ErrorKind::ConnectionRefused.into()) })
        }
        fn target(&self) -> String {
            "nowhere".into()
        }
    }

    /// A session without connections.
    pub(crate) fn session() -> Arc<ClientSession> {
        let options = ClientOptions {
            export: "data".into(),
            key: None,
            timeout: None,
            host: String::new(),
            replay_bytes: 0,
            split_min_bytes: ClientOptions::SPLIT_MIN_BYTES,
            caches: false,
            counts_on_one_user: false,
            leases: LeaseWish::No,
            lease_share: None,
            definition: 0,
            group: None,
            aside: None,
            write_back: None,
        };
        let root = FileId { ino: 1, generation: 1 };
        let info = FsInfo { uuid: FsUuid(1), root, kind: String::new(), read_only: false };
        let link = Link::new(Arc::new(Nowhere), options, SessionMemory::heap());
        ClientSession::new(Arc::new(link), info, Beginning::First)
    }

    /// Sessions were known by their address. The address of a session that has ended is soon
    /// another's. Threads that had worked for the first session took its channel for the second.
    #[test]
    fn a_session_is_not_taken_for_one_before_it() {
        let (give, take) = mpsc::channel::<Arc<ClientSession>>();
        let (tell, receiver) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let mut executor = Executor::new(DriverKind::Simulated { seed: 1 }).unwrap();
            for session in take {
                let works = executor.block_on(async move {
                    session.attach_here();
                    session.channel().is_ok_and(|channel| !channel.is_shut())
                });
                tell.send(works).unwrap();
            }
        });
        Executor::new(DriverKind::Simulated { seed: 2 }).unwrap().block_on(async {
            let first = session();
            let address = Arc::as_ptr(&first);
            give.send(first.clone()).unwrap();
            assert!(receiver.recv().unwrap());
            drop(first);
            let mut others: Vec<_> = (0..100).map(|_| session()).collect();
            let same = others.iter().position(|one| Arc::as_ptr(one) == address);
            give.send(others.swap_remove(same.unwrap_or(0))).unwrap();
            assert!(receiver.recv().unwrap());
        });
        drop(give);
        thread.join().unwrap();
    }
}
