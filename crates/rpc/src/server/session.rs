//! A session: the server's knowledge of one mount.

mod abandoned;
mod connections;
mod locks;
mod release;
mod under_way;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::Waker;

use dray_core::{
    Cancel, ClientAddress, Context, Error, FileId, HolderId, IdMap, NodeId, OpenFile, Origin,
    Reservation, Taker,
};
use dray_fabric::{Connection, PoolShare};
use dray_rt::{ExecutorHandle, Instant};

use crate::server::as_server;
use crate::server::connection_limits::SessionPlace;
use crate::server::exactly_once::slots::ReplaySlots;
use crate::server::export::Export;
use crate::server::journal::{SessionRecord, SlotLog};
use crate::server::leases::{LeaseHolder, LeaseTable};
use crate::server::log_throttle::LogThrottle;
use crate::server::options::ServerOptions;
use crate::server::recovery::group_sync::Failures;
use crate::server::refusals::no_room_for_a_file;
use crate::server::status::jobs::Questions;
use crate::server::watchers::PendingNotifications;
use crate::wire::{
    FEATURE_CHANGED_FILES, FEATURE_CHANGES, FEATURE_JOBS, FEATURE_LEASES, FEATURE_LEASES_ON,
    FEATURE_LOCK_LEASES, FEATURE_STAMPS, FEATURE_TICKETS, FEATURE_WRITE_LEASES, Ticket,
};

pub(crate) use under_way::{SlottedChange, UnslottedCall};

/// Files that the end of a session closes before it lets other tasks run.
const CLOSED_AT_ONCE: usize = 64;

/// Open files that are looked at, one after the other, for the sake of one message.
const LOOKED_AMONG_MAX: usize = 1024;

/// An open file.
struct Opened {
    file: Arc<dyn OpenFile>,
    /// The access that the file was opened for, bits of [`Ticket::READ`] and [`Ticket::WRITE`].
    access: u8,
    /// The file's place among those of the export.
    _place: Reservation,
    /// Before or after others of the export: see [`Mappings`](super::mappings::Mappings).
    order: u64,
}

/// A mount: its open files, its replay slots, its connections.
pub(crate) struct ServerSession {
    pub(crate) id: u64,
    pub(crate) secret: [u8; 16],
    pub(crate) node: NodeId,
    pub(crate) host: String,
    pub(crate) export: Arc<Export>,
    pub(crate) slots: ReplaySlots,
    /// The session's part of the server's memory for data.
    pub(crate) buffers: PoolShare,
    pub(crate) calls: AtomicU64,
    pub(crate) read_bytes: AtomicU64,
    pub(crate) written_bytes: AtomicU64,
    ended: AtomicBool,
    /// Changes that are being carried out, and whether there are to be others.
    carried: AtomicU64,
    /// Features of the protocol that its client knows.
    features: AtomicU64,
    /// The session's place among those of its address; unknown until the session has come back.
    session_place: Mutex<Option<SessionPlace>>,
    /// The address of the client, as long as it is known.
    address: AtomicU64,
    /// The stamp of its last change; [`ServerSession::CHANGED_BEFORE`]: one by an earlier process.
    changed_at: AtomicU64,
    pub(crate) failed_closes: LogThrottle,
    pub(crate) forged_seals: LogThrottle,
    /// The last stamp that was reported to its client as durable.
    durable_reported: AtomicU64,
    /// Failed syncs of everything that were reported to its client, and the request whose answer
    /// reported the last one.
    reported_failures: Mutex<(Failures, u64)>,
    /// For batch jobs, when this server is looked at.
    pub(crate) questions: Questions,
    /// Changes by others to what it has open.
    pub(crate) pending_notifications: PendingNotifications,
    /// The leases of the session. None: its client has never asked for any, or the export gives none.
    lease_holder: OnceLock<Arc<LeaseHolder>>,
    /// The notes in the journal that it has locks.
    lock_notes: locks::LockNotes,
    files: Mutex<IdMap<u64, Opened>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    connections: BTreeMap<u64, Arc<dyn Connection>>,
    /// Since when there has been none.
    alone_since: Option<Instant>,
    /// The time when the client connected in this server epoch.
    came_back: Option<Instant>,
    /// The executor that served the last one: what may wait for the export's file system
    /// is done there, where it holds up nobody else's export.
    home: Option<ExecutorHandle>,
    /// Calls that wait for something that may never come, by where they began.
    waits: BTreeMap<Origin, Arc<Cancel>>,
    /// Calls in no slot that change something, under way by connection.
    unslotted: BTreeMap<u64, u32>,
    /// Calls in slots that open a file, under way by the number that it will have.
    opening: BTreeMap<u64, u32>,
    /// Owners of fcntl locks: unlike those of flock they do not end with the file.
    owners: locks::Owners,
    /// Open files through which flock locks were taken.
    flocks: BTreeSet<u64>,
    /// Files on whose fcntl locks the client decides.
    lock_leases: BTreeSet<FileId>,
    /// The client may reclaim locks of an earlier server epoch.
    reclaim_pending: bool,
    /// Wakers of calls that wait for calls of connections that are gone.
    waiting: Vec<Waker>,
}

impl ServerSession {
    pub(crate) fn new(
        record: SessionRecord,
        export: Arc<Export>,
        options: &ServerOptions,
        log: Arc<dyn SlotLog>,
    ) -> ServerSession {
        ServerSession {
            id: record.id,
            secret: record.secret,
            node: NodeId(record.node),
            host: record.host,
            buffers: export.pool.share(),
            reported_failures: Mutex::new((export.group_sync.failures(), 0)),
            export,
            slots: ReplaySlots::new(log, options.broken()),
            calls: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
            written_bytes: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            carried: AtomicU64::new(0),
            features: AtomicU64::new(0),
            session_place: Mutex::default(),
            address: AtomicU64::new(0),
            changed_at: AtomicU64::new(0),
            failed_closes: LogThrottle::default(),
            forged_seals: LogThrottle::default(),
            durable_reported: AtomicU64::new(0),
            questions: Questions::default(),
            pending_notifications: PendingNotifications::default(),
            lease_holder: OnceLock::new(),
            lock_notes: locks::LockNotes::default(),
            files: Mutex::default(),
            state: Mutex::default(),
        }
    }

    /// Whether the client knows of stamps.
    pub(crate) fn stamps(&self) -> bool {
        self.features.load(Ordering::Relaxed) & FEATURE_STAMPS != 0
    }

    /// Whether the client knows of tickets.
    pub(crate) fn tickets(&self) -> bool {
        self.features.load(Ordering::Relaxed) & FEATURE_TICKETS != 0
    }

    /// Whether the client can be asked for the jobs of its callers.
    pub(crate) fn knows_jobs(&self) -> bool {
        self.features.load(Ordering::Relaxed) & FEATURE_JOBS != 0
    }

    /// Whether the client may keep what it writes under write leases.
    pub(crate) fn keeps_writes(&self) -> bool {
        let wanted = FEATURE_LEASES | FEATURE_WRITE_LEASES;
        self.features.load(Ordering::Relaxed) & wanted == wanted
    }

    /// Whether the client may decide on locks of files by itself.
    pub(crate) fn keeps_locks(&self) -> bool {
        let wanted = FEATURE_LEASES | FEATURE_LOCK_LEASES;
        self.features.load(Ordering::Relaxed) & wanted == wanted
    }

    /// Whether the client leases on to others what is leased to it.
    pub(crate) fn leases_on(&self) -> bool {
        let wanted = FEATURE_LEASES | FEATURE_LEASES_ON;
        self.features.load(Ordering::Relaxed) & wanted == wanted
    }

    /// The session as a holder of leases. None: it has none.
    pub(crate) fn lease_holder(&self) -> Option<&Arc<LeaseHolder>> {
        self.lease_holder.get()
    }

    /// The session becomes a holder of leases, if its client and its export want that.
    pub(crate) fn may_hold_leases(self: &Arc<Self>) -> Option<&Arc<LeaseHolder>> {
        if self.features.load(Ordering::Relaxed) & FEATURE_LEASES == 0 {
            if let Some(assumed) = self.lease_holder() {
                assumed.end(true); // it had none
            }
            self.slots.set_leases(false);
            return None;
        }
        // First: a server that follows has to know it of each client that has one.
        self.slots.set_leases(self.export.lease_table.is_some());
        self.assume_leases()
    }

    /// The session may have leases, for all that is known. None: the export gives none.
    pub(crate) fn assume_leases(self: &Arc<Self>) -> Option<&Arc<LeaseHolder>> {
        let table = self.export.lease_table.as_ref()?;
        let holder = || Arc::new(LeaseHolder::new(table, Arc::downgrade(self), &self.host));
        Some(self.lease_holder.get_or_init(holder))
    }

    /// The leases of an export that is forwarded, if the client may believe any of them.
    pub(crate) fn believes_from_above(&self) -> Option<&Arc<LeaseTable>> {
        let table = self.export.lease_table.as_ref().filter(|table| table.above().is_some())?;
        self.lease_holder().filter(|holder| holder.holds_any()).map(|_| table)
    }

    /// Whether the client takes attributes of changed files from answers.
    pub(crate) fn takes_changed_files(&self) -> bool {
        self.features.load(Ordering::Relaxed) & FEATURE_CHANGED_FILES != 0
    }

    fn hears_of_changes(&self) -> bool {
        self.features.load(Ordering::Relaxed) & FEATURE_CHANGES != 0
    }

    /// A stamp below those of this server epoch.
    pub(crate) const CHANGED_BEFORE: u64 = 1;

    /// Notes the stamp of a change that it made.
    pub(crate) fn changed(&self, stamp: u64) {
        self.changed_at.fetch_max(stamp, Ordering::Relaxed);
    }

    /// The stamp of its last change; 0: it made none.
    pub(crate) fn changed_at(&self) -> u64 {
        self.changed_at.load(Ordering::Relaxed)
    }

    /// Whether its client may keep a change that was not reported to it as durable. A client that
    /// rests is not woken for what others have synced. A client that has not heard of a sync that
    /// failed asks for one itself.
    pub(crate) fn waits_for_stable(&self) -> bool {
        let heard = self.reported_failures().0 == self.export.group_sync.failures();
        self.stamps() && heard && self.changed_at() > self.durable_reported.load(Ordering::Relaxed)
    }

    fn reported_failures(&self) -> MutexGuard<'_, (Failures, u64)> {
        self.reported_failures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The error of a sync of everything that its client has not heard of, to be reported in the
    /// answer to `request`. A repeated request gets the error again. An earlier version's client
    /// has no number for it, and hears it once.
    pub(crate) fn sync_failure(&self, request: u64) -> Option<Error> {
        let mut reported = self.reported_failures();
        let (failures, asked) = *reported;
        let again = request != 0 && asked == request;
        let since = if again { Failures::default() } else { failures };
        let (failures, error) = self.export.group_sync.failed_since(since)?;
        *reported = (failures, request);
        Some(error)
    }

    /// Notes that its client was notified of the durable stamp `stamp`.
    pub(crate) fn note_durable_reported(&self, stamp: u64) {
        self.durable_reported.fetch_max(stamp, Ordering::Relaxed);
    }

    fn session_place(&self) -> MutexGuard<'_, Option<SessionPlace>> {
        self.session_place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn has_session_place(&self) -> bool {
        self.session_place().is_some()
    }

    pub(crate) fn set_session_place(&self, session_place: SessionPlace) {
        self.address.store(session_place.address().0, Ordering::Relaxed);
        *self.session_place() = Some(session_place);
    }

    pub(crate) fn address(&self) -> ClientAddress {
        ClientAddress(self.address.load(Ordering::Relaxed))
    }

    /// The session as a taker of counted things. With `reclaims`, the session had them before.
    pub(crate) fn taker(&self, reclaims: bool) -> Taker {
        Taker { holder: self.id, address: self.address(), reclaims }
    }

    /// A place for one more open file, to be had before the file is opened: opening can change the
    /// file, or make it. Errors: `ENFILE`.
    pub(crate) fn place_for_file(&self, reclaims: bool) -> dray_core::Result<Reservation> {
        self.export.files.take(self.taker(reclaims)).map_err(no_room_for_a_file)
    }

    /// The features that the client last said that it knows.
    pub(crate) fn set_features(&self, features: u64) {
        self.features.store(features, Ordering::Relaxed);
    }

    fn files(&self) -> MutexGuard<'_, IdMap<u64, Opened>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn file(&self, handle: u64) -> Option<Arc<dyn OpenFile>> {
        self.files().get(&handle).map(|opened| opened.file.clone())
    }

    /// The ticket that its client shows to a later server epoch to reopen the file.
    pub(crate) fn ticket_of(&self, handle: u64) -> Option<Ticket> {
        let files = self.files();
        let Opened { file, access, .. } = files.get(&handle)?;
        Some(self.export.tickets.opened(self.node, file.id(), *access))
    }

    pub(crate) fn has_file(&self, handle: u64) -> bool {
        self.files().contains_key(&handle)
    }

    /// The time when the session opened this file, the first if it has it open several times. None
    /// if it has not, or if it has so many files open that a search among them would delay other
    /// calls.
    pub(crate) fn first_open(&self, file: FileId) -> Option<u64> {
        let files = self.files();
        if files.len() > LOOKED_AMONG_MAX {
            return None;
        }
        let of_file = files.values().filter(|opened| opened.file.id() == file);
        of_file.map(|opened| opened.order).min()
    }

    /// Files that are open now.
    pub(crate) fn files_open(&self) -> usize {
        self.files().len()
    }

    /// Keeps an open file; gives it back if the session is over. A file that is kept already under
    /// a number in use stays if it is the same, since locks may have been taken through it. Another
    /// file goes.
    pub(crate) fn keep_file(
        &self,
        handle: u64,
        file: Arc<dyn OpenFile>,
        (access, place): (u8, Reservation),
    ) -> Result<(), Arc<dyn OpenFile>> {
        let mut files = self.files();
        if self.ended.load(Ordering::SeqCst) {
            return Err(file);
        }
        let id = file.id();
        let same = files.get(&handle).is_some_and(|kept| kept.file.id() == id);
        let order = self.export.mappings.next_order();
        let opened = Opened { file, access, _place: place, order };
        if same {
            drop(files);
            return Ok(()); // outside of the lock: to drop it may close a descriptor
        }
        let surplus = files.insert(handle, opened);
        if self.hears_of_changes() {
            self.export.watchers.opened(id, self.id); // before anybody can close it
        }
        drop(files);
        surplus.into_iter().for_each(|surplus| self.watches_no_more(&*surplus.file));
        Ok(())
    }

    pub(crate) fn take_file(&self, handle: u64) -> Option<Arc<dyn OpenFile>> {
        let file = self.files().remove(&handle)?.file;
        self.watches_no_more(&*file);
        Some(file)
    }

    fn watches_no_more(&self, file: &dyn OpenFile) {
        if !self.export.watchers.is_empty() {
            self.export.watchers.closed(file.id(), self.id);
        }
    }

    pub(crate) fn wait_begins(&self, origin: Origin, cancel: Arc<Cancel>) {
        self.state().waits.insert(origin, cancel);
    }

    pub(crate) fn wait_ends(&self, origin: Origin) {
        self.state().waits.remove(&origin);
    }

    /// The holder of the session's locks. Not its client: the client could have begun anew. A lock
    /// that it has by now must not end with what is still given back of this session.
    pub(crate) fn holder(&self) -> HolderId {
        HolderId(self.id)
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    /// The client sends nothing any more: waits are cancelled, connections closed.
    pub(crate) fn cut_off(&self) {
        self.suspend();
        self.slots.end();
    }

    /// The same, and what the journal has of it stays as it is.
    pub(crate) fn suspend(&self) {
        self.ended.store(true, Ordering::SeqCst);
        self.carries_no_more();
        let (waits, connections) = {
            let mut state = self.state();
            (std::mem::take(&mut state.waits), std::mem::take(&mut state.connections))
        };
        drop(self.session_place().take());
        waits.values().for_each(|cancel| cancel.set());
        connections.values().for_each(|connection| connection.close());
    }

    /// The session as the journal of an earlier epoch has it, for the next opening of its export.
    pub(crate) fn for_the_next_opening(&self) -> (SessionRecord, Arc<dyn SlotLog>) {
        let record = SessionRecord {
            id: self.id,
            secret: self.secret,
            node: self.node.0,
            export: self.export.name.clone(),
            host: self.host.clone(),
        };
        (record, self.slots.log())
    }

    /// Gives everything back after [`ServerSession::cut_off`]: files are closed and with them
    /// their locks. Waits for changes that the file system below has been given.
    pub(crate) async fn end(&self) {
        self.carried_out().await;
        let files: BTreeMap<_, _> = std::mem::take(&mut *self.files()).into_iter().collect();
        let cx = Context { holder: self.holder(), ..as_server::of_nobody() };
        for (number, (handle, Opened { file, .. })) in files.into_iter().enumerate() {
            if number > 0 && number.is_multiple_of(CLOSED_AT_ONCE) {
                dray_rt::yield_now().await; // others are served by this thread, too
            }
            self.watches_no_more(&*file);
            let _ = self.close_file(&cx, handle, &*file).await; // there is no caller to report to
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use dray_backends::memory::{MemoryFs, MemoryOptions};
    use dray_core::{CreateHow, Errno, FileSystem, Name, Op, OpenHow};
    use dray_fabric::sim::Network;
    use dray_layers::Observed;
    use dray_layers::faults::{Fault, Faults, When};

    use crate::server::journal::{Journal, MemoryJournal};

    /// A thread had read calls of a connection that broke, and had not come to them. It made them
    /// when the client had gone on elsewhere: an unlock took the next lock.
    // proves: P62
    #[test]
    fn what_came_by_a_connection_that_was_replaced_is_not_begun() {
        let driver = dray_rt::DriverKind::Simulated { seed: 1 };
        dray_rt::Executor::new(driver).unwrap().block_on(async {
            let fs = Arc::new(MemoryFs::new(MemoryOptions::default()));
            let export = Arc::new(Export::new("data", fs, Vec::new()));
            let record = SessionRecord {
                id: 1,
                secret: [0; 16],
                node: 1,
                export: "data".into(),
                host: "host".into(),
            };
            let log = MemoryJournal::default().create(&record, 1).unwrap();
            let session = ServerSession::new(record, export, &ServerOptions::default(), log);
            let network = Network::new();
            let _incoming = network.listen("s");
            for number in [7, 8] {
                let connection = network.connector("s").connect().await.unwrap();
                session.connected(number, connection);
            }
            let begun = session.unslotted(7, None).await;
            assert!(begun.is_some());
            session.replace(7);
            let mut next = std::pin::pin!(session.unslotted(8, None));
            let mut task = std::task::Context::from_waker(Waker::noop());
            assert!(next.as_mut().poll(&mut task).is_pending(), "the first is under way");
            drop(begun);
            assert!(next.await.is_some());
            assert!(session.unslotted(7, None).await.is_none());
            assert!(session.slotted(7, Some(5)).is_none());
            assert!(session.slotted(8, Some(5)).is_some());
        });
    }

    /// A client that had hundreds of thousands of files open and went kept the thread that serves
    /// others until all of them were closed.
    #[test]
    fn the_end_of_a_session_with_many_files_lets_other_tasks_run() {
        let driver = dray_rt::DriverKind::Simulated { seed: 1 };
        dray_rt::Executor::new(driver).unwrap().block_on(async {
            let fs = Arc::new(MemoryFs::new(MemoryOptions::default()));
            let export = Export::new("data", fs.clone(), Vec::new());
            let export = Arc::new(export.within(&ServerOptions::default()));
            let record = SessionRecord {
                id: 1,
                secret: [0; 16],
                node: 1,
                export: "data".into(),
                host: "host".into(),
            };
            let log = MemoryJournal::default().create(&record, 1).unwrap();
            let session = ServerSession::new(record, export, &ServerOptions::default(), log);
            let (cx, name) = (Context::system(), Name::new(b"f").unwrap());
            let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o600, exclusive: true };
            let (entry, file) = fs.create(&cx, fs.info().root, name, how).await.unwrap();
            let place = || session.place_for_file(false).unwrap();
            assert!(session.keep_file(0, file, (Ticket::READ, place())).is_ok());
            for handle in 1..2 * CLOSED_AT_ONCE as u64 + 1 {
                let file = fs.open(&cx, entry.id, OpenHow::READ).await.unwrap();
                assert!(session.keep_file(handle, file, (Ticket::READ, place())).is_ok());
            }
            session.cut_off();
            let mut task = std::task::Context::from_waker(Waker::noop());
            let mut ending = std::pin::pin!(session.end());
            let ticks =
                std::iter::from_fn(|| ending.as_mut().poll(&mut task).is_pending().then_some(()));
            assert_eq!(ticks.count(), 2);
        });
    }

    /// The answer was lost with its connection, and the client repeated the sync. It succeeded,
    /// since the kernel reports an error once.
    // proves: P105
    #[test]
    fn a_failed_sync_is_reported_until_its_answer_is_acknowledged() {
        let driver = dray_rt::DriverKind::Simulated { seed: 1 };
        dray_rt::Executor::new(driver).unwrap().block_on(async {
            let fault = Fault {
                op: Some(Op::SyncAll),
                when: When::Nth(1),
                delay: std::time::Duration::ZERO,
                error: Some(Errno::EIO),
            };
            let memory = Arc::new(MemoryFs::new(MemoryOptions::default()));
            let fs = Arc::new(Observed::new(memory, Arc::new(Faults::new(vec![fault]))));
            let export = Arc::new(Export::new("data", fs, Vec::new()));
            let session = |id| {
                let record = SessionRecord {
                    id,
                    secret: [0; 16],
                    node: id,
                    export: "data".into(),
                    host: "host".into(),
                };
                let log = MemoryJournal::default().create(&record, 1).unwrap();
                ServerSession::new(record, export.clone(), &ServerOptions::default(), log)
            };
            let (one, other) = (session(1), session(2));
            let cx = Context::system();
            let sync = async || export.sync_all(&cx).await.is_ok();
            assert!(!sync().await && one.sync_failure(5).is_some());
            assert!(sync().await && one.sync_failure(5).is_some(), "asked again");
            assert!(one.sync_failure(6).is_none() && one.sync_failure(7).is_none());
            assert!(other.sync_failure(5).is_some(), "who asked for another one hears it, too");
            assert!(other.sync_failure(6).is_none());
            assert!(session(3).sync_failure(5).is_none(), "it has nothing from before that");
        });
    }
}
