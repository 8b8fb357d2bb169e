//! The server: exports and sessions.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::Context;
use dray_fabric::{BufferPool, Connection, Listener, Peer};
use dray_rt::{Pool, random_u64, sleep, timeout};

use crate::server::connection::{self, Admission};
use crate::server::connection_limits::{ConnectionLimits, HandshakeFault};
use crate::server::export::Export;
use crate::server::exports::Exports;
use crate::server::journal::Journal;
use crate::server::log_throttle::LogThrottle;
use crate::server::open_ahead::OpenAheadTable;
use crate::server::options::{ServerOptions, StateLoss};
use crate::server::recovery::epoch::ServerEpoch;
use crate::server::sabotage::Sabotage;
use crate::server::session::ServerSession;
use crate::server::stalls::{LOOK_TIME, Stalled, Stalls};
use crate::server::status::jobs::{self, Jobs};
use crate::server::status::paths::{PathFinder, Subject};
use crate::server::status::{RunningCall, ServerStatus};
use crate::server::tickets::Tickets;
use crate::server::withdrawal::ExportLost;
use crate::wire::NotifyHead;

/// Serves exports to everybody who connects. Cheap to clone.
#[derive(Clone)]
pub struct Server {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) options: ServerOptions,
    pub(crate) instance: u64,
    pub(crate) open_ahead: OpenAheadTable,
    pub(super) journal: Arc<dyn Journal>,
    /// Threads that wait for the journal's media.
    pub(super) noting: Pool,
    pub(super) unkept_sessions: LogThrottle,
    pub(crate) exports: Exports,
    pub(super) sessions: Mutex<BTreeMap<u64, Arc<ServerSession>>>,
    pub(super) epoch: ServerEpoch,
    pub(crate) limits: Arc<ConnectionLimits>,
    pub(super) running: Mutex<BTreeMap<u64, RunningCall>>,
    pub(super) next_running: AtomicU64,
    pub(crate) repeated: AtomicU64,
    /// Sessions that have ended, and are still in the journal.
    pub(super) parting: AtomicUsize,
    whereabouts: PathFinder,
    next_connection: AtomicU64,
}

/// Sessions that are noted at a time, each of which takes two syncs: as many at once cost a disk
/// hardly more than one.
const NOTING_THREADS_MAX: usize = 8;
/// Sessions that wait to be noted at most; further ones wait for a place.
const NOTING_QUEUE_MAX: usize = 1024;

/// How long evicting waits for its note, and for files to be given back.
const GIVE_BACK_MAX: Duration = Duration::from_secs(2);

/// The most clients with expired leases that one check names in the log.
const EXPIRED_LOGGED_MAX: usize = 20;

/// How often one looks whether sessions that ended are out of the journal.
const PARTING_PAUSE: Duration = Duration::from_millis(10);

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How often one looks whether clients have asked again for what was answered before a loss.
const REPETITIONS_PAUSE: Duration = Duration::from_millis(50);

impl Server {
    /// A server of these exports. It does nothing until it is given connections; where
    /// `journal` may hold sessions of a server before it, [`Server::restore`] comes first.
    pub fn new(options: ServerOptions, exports: Vec<Export>, journal: Arc<dyn Journal>) -> Server {
        let names: Vec<String> = exports.iter().map(|export| export.name.clone()).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let server = Server::awaiting(options, &names, journal);
        for export in exports {
            let export = server.inner.belongs(export);
            server.inner.exports.insert(export);
        }
        server
    }

    /// A server of exports that are opened one by one, each when its file system answers
    /// ([`Server::open`]). Clients of one that is not open yet get an answer to try again.
    pub fn awaiting(options: ServerOptions, names: &[&str], journal: Arc<dyn Journal>) -> Server {
        let exports = Exports::new(names.iter().copied(), &options.pool);
        let inner = Inner {
            limits: Arc::new(ConnectionLimits::new(options.connections_max, options.sessions_max)),
            options,
            instance: random_u64(),
            open_ahead: OpenAheadTable::new(),
            epoch: ServerEpoch::begin(journal.clone()),
            journal,
            unkept_sessions: LogThrottle::default(),
            noting: Pool::new("dray-note", NOTING_THREADS_MAX, NOTING_QUEUE_MAX),
            exports,
            sessions: Mutex::default(),
            running: Mutex::default(),
            next_running: AtomicU64::new(0),
            repeated: AtomicU64::new(0),
            parting: AtomicUsize::new(0),
            whereabouts: PathFinder::default(),
            next_connection: AtomicU64::new(random_u64() >> 1 | 1),
        };
        Server { inner: Arc::new(inner) }
    }

    /// Opens an export that is awaited, or was withdrawn: takes over its sessions as
    /// [`Server::restore`] does, and then lets clients in. It calls the file system, which may
    /// hang, and the caller with it. Errors: it was lost meanwhile, and can be opened once more.
    pub async fn open(&self, export: Export, loss: StateLoss) -> Result<(), ExportLost> {
        let export = self.inner.belongs(export);
        self.inner.restore(&export, loss).await?;
        self.inner.exports.insert(export);
        Ok(())
    }

    /// Takes over the sessions of the last server epoch. Changes that were under way are settled.
    /// Clients that held locks have one lease to reclaim them. `loss`: how much of what was not
    /// synced is gone.
    pub async fn restore(&self, loss: StateLoss) {
        for export in self.inner.exports.opened() {
            // The watcher of a lost export reports it, and opens it again.
            let _ = self.inner.restore(&export, loss).await;
        }
    }

    /// Waits until all exports are open.
    pub async fn opened(&self) {
        if let Some(last) = self.inner.exports.count().checked_sub(1) {
            self.inner.exports.next_opened(last).await;
        }
    }

    /// Waits until what a loss of power may have undone has been made again as far as it
    /// can be, in all exports. Until then the machine has to count as lost at the next start,
    /// too.
    pub async fn recovered(&self) {
        loop {
            for index in 0..self.inner.exports.count() {
                let export = self.inner.exports.next_opened(index).await;
                let _ = export.recovery.wait(&Context::system()).await; // nobody cancels it
                while !export.replayed.awaited().is_empty() && !export.is_lost() {
                    sleep(REPETITIONS_PAUSE).await;
                }
                export.replayed.clear();
            }
            // An export that was withdrawn meanwhile begins its recovery anew.
            let open = self.inner.exports.opened();
            let all = open.len() == self.inner.exports.count();
            if all && !open.iter().any(|export| export.recovery.running()) {
                return;
            }
        }
    }

    /// Lets a connection of `peer` in, or not: then it is to be closed. To be asked as soon as
    /// it has been accepted, since from then on it takes a descriptor.
    pub fn admit(&self, peer: Peer) -> Option<Admission> {
        connection::admit(&self.inner, peer)
    }

    /// Whether a connection of `peer` that is no client's is worth a line for people: the first
    /// in a minute is.
    pub fn complains(&self, peer: Peer) -> bool {
        self.inner.limits.complains(peer, HandshakeFault::Greeting)
    }

    /// Serves the connections of `listener` on the executor of the calling task: for a server of
    /// one thread. Ends with the first connection that cannot be accepted, and says why.
    pub async fn serve_all(&self, listener: Box<dyn Listener>) -> io::Error {
        loop {
            let incoming = match listener.accept().await {
                Ok(incoming) => incoming,
                Err(error) => return error,
            };
            let Some(admission) = self.admit(incoming.peer()) else { continue }; // it is closed
            match incoming.establish() {
                Ok(connection) => {
                    let server = self.clone();
                    dray_rt::spawn(
                        async move { server.serve_admitted(connection, admission).await },
                    );
                }
                Err(error) => return error,
            }
        }
    }

    /// Serves a connection that was let in until it ends; a task of the executor that the
    /// connection was made on.
    pub async fn serve_admitted(&self, connection: Arc<dyn Connection>, admission: Admission) {
        connection::serve(self.inner.clone(), connection, admission).await;
    }

    /// Lets a connection in and serves it until it ends; a task of the executor that the
    /// connection was made on.
    pub async fn serve(&self, connection: Arc<dyn Connection>) {
        match self.admit(connection.peer()) {
            Some(admission) => self.serve_admitted(connection, admission).await,
            None => connection.close(),
        }
    }

    /// Ends sessions whose clients have been away for longer than the lease, and connections whose
    /// clients stopped in the middle. Ends the wait for changes that no client repeats. Runs for
    /// ever, asleep nearly always: to be started as one task.
    pub async fn expire_leases(&self) {
        let mut stalls = Stalls::default();
        let mut looked = dray_rt::now();
        loop {
            sleep((self.inner.options.lease / 4).min(LOOK_TIME)).await;
            if looked.elapsed() >= LOOK_TIME {
                looked = dray_rt::now();
                self.end_stalled(&mut stalls);
                let newest = self.inner.exports.opened();
                let newest = newest.iter().map(|export| export.ranges.stamps.newest());
                let newest = newest.max().unwrap_or(0);
                self.note(move |inner| inner.epoch.stamps_given(newest)).await;
            }
            self.give_up_unasked();
            let expired = self.inner.expired();
            let more = expired.len().saturating_sub(EXPIRED_LOGGED_MAX);
            for (index, session) in expired.into_iter().enumerate() {
                if index < EXPIRED_LOGGED_MAX {
                    log::warn!(
                        "client {} (session {:x}) has been away for longer than its lease: \
                         its locks and open files are given back",
                        session.host,
                        session.id
                    );
                }
                // The end is not awaited: the session's file system may hang, and others need not
                // wait for it.
                drop(self.inner.end(session));
            }
            if more > 0 {
                log::warn!("and so have {more} more clients");
            }
        }
    }

    /// Does what waits for media on a thread for that, so that nobody else has to.
    async fn note(&self, work: impl FnOnce(&Inner) + Send + 'static) {
        let inner = self.inner.clone();
        if let Err(error) = self.inner.noting.run(move || work(&inner)).await {
            log::error!("nothing can be noted for the next server: {error}");
        }
    }

    fn give_up_unasked(&self) {
        let sessions: Vec<_> = lock(&self.inner.sessions).values().cloned().collect();
        for session in sessions {
            let given_up = session.give_up_unasked(self.inner.options.lease);
            if given_up > 0 {
                log::warn!(
                    "client {} (session {:x}) has not asked again for {given_up} changes that the \
                     last server's death cut short: others wait for them no longer, and nobody \
                     knows whether they were made",
                    session.host,
                    session.id
                );
            }
        }
    }

    fn end_stalled(&self, stalls: &mut Stalls) {
        let sessions: Vec<_> = lock(&self.inner.sessions).values().cloned().collect();
        let connections = sessions.iter().flat_map(|session| session.numbered_connections());
        for (connection, way) in stalls.look(connections) {
            let what = match way {
                Stalled::Reading => "does not read its answers",
                Stalled::Writing => "stopped in the middle of a message",
            };
            log::warn!("the client at {} {what}: its connection is ended", connection.peer());
        }
    }

    /// Ends a session now. Its client is notified, and fails every call from then on. An
    /// unreachable client learns of it when it returns to this server. Its locks and files are
    /// given back when this returns, or, where their file system hangs, once it goes on. False if
    /// there is no such session.
    pub async fn evict(&self, session: u64) -> bool {
        let Some(session) = lock(&self.inner.sessions).get(&session).cloned() else { return false };
        let id = session.id;
        self.inner.epoch.evict(id);
        let noted = self.note(|inner| inner.epoch.note_evicted());
        if timeout(GIVE_BACK_MAX, noted).await.is_err() {
            log::error!(
                "the disk of the state directory does not answer: an eviction is noted when it does"
            );
        }
        let mut message = Vec::new();
        NotifyHead { what: NotifyHead::EVICTED, flags: 0, tag: 0 }.put_message(&mut message);
        for connection in session.connections() {
            let _ = connection.send(&message, None); // it may be why it is evicted
        }
        log::warn!("client {} (session {:x}) was evicted", session.host, session.id);
        let host = session.host.clone();
        if timeout(GIVE_BACK_MAX, self.inner.end(session)).await.is_err() {
            log::warn!("client {host} (session {id:x}): its files are given back when they can be");
        }
        true
    }

    /// Tells all clients that a server of the projection is gone. One message each is enough, and none is waited for.
    pub(crate) fn notify_server_gone(&self) {
        let mut message = Vec::new();
        NotifyHead { what: NotifyHead::SERVER_GONE, flags: 0, tag: 0 }.put_message(&mut message);
        let sessions: Vec<_> = lock(&self.inner.sessions).values().cloned().collect();
        for connection in sessions.iter().filter_map(|one| one.connections().into_iter().next()) {
            let _ = connection.notify(&message); // who does not read finds out later
        }
    }

    /// Closes all connections: clients connect to the next server. Waits for nothing.
    pub fn disconnect(&self) {
        let sessions: Vec<_> = lock(&self.inner.sessions).values().cloned().collect();
        let connections = sessions.iter().flat_map(|session| session.connections());
        connections.for_each(|connection| connection.close());
    }

    /// Waits until the sessions that have ended are out of the journal, and their last changes are
    /// on media. So the server that follows waits for none of them.
    pub async fn parted(&self) {
        // The messages of clients before they were gone have been read by then, too.
        sleep(PARTING_PAUSE).await;
        while self.inner.parting.load(Ordering::SeqCst) > 0 {
            sleep(PARTING_PAUSE).await;
        }
    }

    /// The part of the memory for data that is an export's; none where no such export is awaited. The
    /// slices of a projection share that of the projection.
    pub fn pool_of(&self, export: &str) -> Option<BufferPool> {
        self.inner.exports.pool(export)
    }

    /// How long sessions outlive their last connection.
    pub fn lease(&self) -> Duration {
        self.inner.options.lease
    }

    /// The state of the server and its work. Files of calls under way are shown by their ids.
    pub fn status(&self) -> ServerStatus {
        let look = self.inner.look();
        let ids: Vec<String> = look.subjects.iter().map(Subject::by_id).collect();
        look.with(&ids, &Jobs::new())
    }

    /// As [`Server::status`], with the paths of those files and the jobs of their callers, as far
    /// as file systems and clients answer in time. Other tasks of the executor go on meanwhile.
    pub async fn status_with_paths(&self) -> ServerStatus {
        let mut look = self.inner.look();
        let asked = jobs::ask(&look.callers);
        let paths = self.inner.whereabouts.find(std::mem::take(&mut look.subjects)).await;
        look.with(&paths, &asked.jobs().await)
    }
}

impl Inner {
    /// An export with what it has of this server: memory, counting of stamps, seal.
    fn belongs(&self, export: Export) -> Arc<Export> {
        let pool = self.exports.pool(&export.name).expect("one of those awaited");
        let tickets = Tickets::new(&self.epoch.ticket_keys, export.fs.info().uuid);
        export.ranges.stamps.begin_above(self.epoch.stamps_before());
        // To its clients an export that is opened once more is that of another server.
        let withdrawn = self.exports.newest_before(&export.name);
        let instance = withdrawn.map_or(self.instance, |_| random_u64());
        export.ranges.stamps.begin_above(withdrawn.unwrap_or(0));
        self.epoch.stamps_given(export.ranges.stamps.newest());
        let export = Arc::new(Export { pool, tickets, instance, ..export.within(&self.options) });
        export.outside.are_of(&export);
        export
    }

    async fn restore(&self, export: &Arc<Export>, loss: StateLoss) -> Result<(), ExportLost> {
        let (options, lost) = (&self.options, loss != StateLoss::Nothing);
        let (mut awaited, mut restored) = (BTreeSet::new(), Vec::new());
        let mut former = self.exports.former(&export.name, &*self.journal).into_iter();
        while let Some((record, log)) = former.next() {
            let session = ServerSession::new(record, export.clone(), options, log);
            if !session.slots.restore(export, loss).await {
                self.exports.keep_former(&export.name, former.collect());
                self.exports.keep_former(&export.name, vec![session.for_the_next_opening()]);
                self.suspend_sessions(export);
                return Err(ExportLost);
            }
            session.changed(ServerSession::CHANGED_BEFORE); // perhaps
            if !options.broken().is(Sabotage::HeldFiles) {
                export.recovery_window.awaits(session.id, options.lease);
            }
            if lost || session.slots.had_locks() {
                session.expect_reclaim();
                awaited.insert(session.id);
            }
            let session = Arc::new(session);
            restored.push(session.clone());
            lock(&self.sessions).insert(session.id, session);
        }
        // Now the clients of the sessions can come back: the file system took its time for each.
        restored.iter().for_each(|session| session.begins_alone());
        let (anybody, lease) = (loss == StateLoss::SessionsToo, options.lease);
        if lost {
            export.recovery.begin(awaited.clone(), anybody, lease);
        }
        if !awaited.is_empty() || anybody {
            let count = if anybody { "all".to_owned() } else { awaited.len().to_string() };
            let seconds = lease.as_secs();
            log::info!("waiting up to {seconds} s for {count} clients to reclaim their locks");
        }
        export.grace.begin(awaited, anybody, lease);
        let all = restored.iter().map(|session| session.id).collect();
        let keeps = export.lease_table.as_ref().filter(|table| table.leases_writes());
        if let Some(table) = keeps.filter(|_| !options.broken().is(Sabotage::WriteLeaseRestart)) {
            export.kept_writes.begin(all, anybody, table.wait());
        }
        if let Some(table) = &export.lease_table {
            let anybody = anybody || export.leased_to_anybody;
            if anybody || !restored.is_empty() {
                table.had_clients();
            }
            // What was noted of leases is not on media.
            let lessees = restored.iter().filter(|one| lost || one.slots.may_have_leases());
            let holders = lessees.filter_map(|one| ServerSession::assume_leases(one));
            table.was_leased_to(holders.cloned().collect(), anybody);
            table.listen_above();
        }
        Ok(())
    }

    pub(crate) fn new_connection(&self) -> u64 {
        self.next_connection.fetch_add(1, Ordering::Relaxed)
    }
}
