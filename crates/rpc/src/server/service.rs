//! The server: exports and sessions.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::{Context, Errno, NodeId};
use dray_fabric::{Connection, Peer};
use dray_rt::sync::oneshot;
use dray_rt::{Handle, random_bytes, random_u64, sleep, timeout};

use crate::server::admission::Door;
use crate::server::ahead::Ahead;
use crate::server::connection::{self, Admission};
use crate::server::export::Export;
use crate::server::exports::Exports;
use crate::server::journal::{Journal, SessionRecord};
use crate::server::options::{Loss, ServerOptions};
use crate::server::recovery::life::Life;
use crate::server::sabotage::Sabotage;
use crate::server::session::Session;
use crate::server::stalls::{LOOK_TIME, Stalled, Stalls};
use crate::server::status::paths::{Subject, Whereabouts};
use crate::server::status::{Running, ServerStatus};
use crate::server::tickets::Tickets;
use crate::wire::{Hello, NotifyHead, Refused, Ticket, Wire};

/// Serves exports to everybody who connects. Cheap to clone.
#[derive(Clone)]
pub struct Server {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) options: ServerOptions,
    pub(crate) instance: u64,
    pub(crate) ahead: Ahead,
    journal: Arc<dyn Journal>,
    pub(crate) exports: Exports,
    pub(super) sessions: Mutex<BTreeMap<u64, Arc<Session>>>,
    life: Life,
    pub(crate) door: Arc<Door>,
    pub(super) running: Mutex<BTreeMap<u64, Running>>,
    pub(super) next_running: AtomicU64,
    pub(crate) repeated: AtomicU64,
    whereabouts: Whereabouts,
    next_connection: AtomicU64,
}

/// How long evicting waits for files to be given back.
const GIVE_BACK_MAX: Duration = Duration::from_secs(2);

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

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
    /// ([`Server::open`]). Clients of one that is not open yet are told to come again.
    pub fn awaiting(options: ServerOptions, names: &[&str], journal: Arc<dyn Journal>) -> Server {
        let exports = Exports::new(names.iter().copied(), &options.pool);
        let inner = Inner {
            door: Arc::new(Door::new(options.connections_max)),
            options,
            instance: random_u64(),
            ahead: Ahead::new(),
            life: Life::begin(journal.clone()),
            journal,
            exports,
            sessions: Mutex::default(),
            running: Mutex::default(),
            next_running: AtomicU64::new(0),
            repeated: AtomicU64::new(0),
            whereabouts: Whereabouts::default(),
            next_connection: AtomicU64::new(random_u64() >> 1 | 1),
        };
        Server { inner: Arc::new(inner) }
    }

    /// Opens an export that is awaited: takes over its sessions as [`Server::restore`] does,
    /// and then lets clients in. It calls the file system, which may hang: whoever waits for
    /// this may.
    pub async fn open(&self, export: Export, loss: Loss) {
        let export = self.inner.belongs(export);
        self.inner.restore(&export, loss).await;
        self.inner.exports.insert(export);
    }

    /// Takes over the sessions of the server's last life: changes that were under way are
    /// settled, and who held locks gets the time of a lease to claim them again.
    /// `loss`: how much of what was not synced is gone.
    pub async fn restore(&self, loss: Loss) {
        for export in self.inner.exports.opened() {
            self.inner.restore(&export, loss).await;
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
        for index in 0..self.inner.exports.count() {
            let export = self.inner.exports.next_opened(index).await;
            let _ = export.recovery.wait(&Context::system()).await; // nobody cancels it
            export.redone.clear();
        }
    }

    /// Lets a connection of `peer` in, or not: then it is to be closed. To be asked as soon as
    /// it has been accepted, since from then on it takes a descriptor.
    pub fn admit(&self, peer: Peer) -> Option<Admission> {
        connection::admit(&self.inner, peer)
    }

    /// Whether something about connections of `peer` is worth a line for people: the first
    /// thing in a minute is.
    pub fn complains(&self, peer: Peer) -> bool {
        self.inner.door.complains(peer)
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

    /// Ends sessions whose clients have been away for longer than the lease, and connections
    /// whose clients stopped in the middle. Runs for ever, asleep nearly always: to be
    /// started as one task.
    pub async fn expire_leases(&self) {
        let mut stalls = Stalls::default();
        let mut looked = dray_rt::now();
        loop {
            sleep((self.inner.options.lease / 4).min(LOOK_TIME)).await;
            if looked.elapsed() >= LOOK_TIME {
                looked = dray_rt::now();
                self.end_stalled(&mut stalls);
                let newest = self.inner.exports.opened();
                let newest = newest.iter().map(|export| export.stamps.newest());
                self.inner.life.stamps_given(newest.max().unwrap_or(0));
            }
            for session in self.inner.expired() {
                log::warn!(
                    "client {} (session {:x}) has been away for longer than its lease: \
                     its locks and open files are given back",
                    session.host,
                    session.id
                );
                // Not awaited: its file system may hang, and others' need not wait for it.
                drop(self.inner.end(session));
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

    /// Ends a session now. Its client is told, and fails every call from then on; one that
    /// cannot be told now learns it when it comes back to this server. Its locks and files are
    /// given back when this returns, or, where their file system hangs, once it goes on. False
    /// if there is no such session.
    pub async fn evict(&self, session: u64) -> bool {
        let Some(session) = lock(&self.inner.sessions).get(&session).cloned() else { return false };
        self.inner.life.evict(session.id);
        let mut message = Vec::new();
        NotifyHead { what: NotifyHead::EVICTED, flags: 0, tag: 0 }.put_message(&mut message);
        for connection in session.connections() {
            let _ = connection.send(&message, None); // it may be why it is evicted
        }
        log::warn!("client {} (session {:x}) was evicted", session.host, session.id);
        let (host, id) = (session.host.clone(), session.id);
        if timeout(GIVE_BACK_MAX, self.inner.end(session)).await.is_err() {
            log::warn!("client {host} (session {id:x}): its files are given back when they can be");
        }
        true
    }

    /// Closes all connections: clients turn to the next server. Waits for nothing.
    pub fn disconnect(&self) {
        let sessions: Vec<_> = lock(&self.inner.sessions).values().cloned().collect();
        let connections = sessions.iter().flat_map(|session| session.connections());
        connections.for_each(|connection| connection.close());
    }

    /// How long sessions outlive their last connection.
    pub fn lease(&self) -> Duration {
        self.inner.options.lease
    }

    /// What it is doing. Files of calls under way are shown by their ids.
    pub fn status(&self) -> ServerStatus {
        self.inner.status(|files| files.iter().map(Subject::by_id).collect())
    }

    /// As [`Server::status`], with the paths of those files, as far as file systems tell them
    /// soon.
    pub fn status_with_paths(&self) -> ServerStatus {
        self.inner.status(|files| self.inner.whereabouts.find(files))
    }
}

impl Inner {
    /// An export with what it has of this server: memory, counting of stamps, seal.
    fn belongs(&self, export: Export) -> Arc<Export> {
        let pool = self.exports.pool(&export.name).expect("one of those awaited");
        let tickets = Tickets::new(&self.life.ticket_keys, export.fs.info().uuid);
        export.stamps.begin_above(self.life.stamps_before());
        self.life.stamps_given(export.stamps.newest());
        Arc::new(Export { pool, tickets, ..export })
    }

    async fn restore(&self, export: &Arc<Export>, loss: Loss) {
        let (options, lost) = (&self.options, loss != Loss::Nothing);
        let (mut awaited, mut restored) = (BTreeSet::new(), Vec::new());
        for (record, log) in self.exports.former(&export.name, &*self.journal) {
            let session = Session::new(record, export.clone(), options, log);
            session.slots.restore(export, session.node, lost).await;
            session.changed(Session::CHANGED_BEFORE); // perhaps
            if options.sabotage != Some(Sabotage::Custody) {
                export.returning.awaits(session.id);
            }
            if lost || session.slots.had_locks() {
                session.awaits_claims();
                awaited.insert(session.id);
            }
            let session = Arc::new(session);
            restored.push(session.clone());
            lock(&self.sessions).insert(session.id, session);
        }
        // Only now can their clients come back: the file system took its time for each.
        restored.iter().for_each(|session| session.begins_alone());
        let (anybody, lease) = (loss == Loss::SessionsToo, options.lease);
        if lost {
            export.recovery.begin(awaited.clone(), anybody, lease);
        }
        export.grace.begin(awaited, anybody, lease);
    }

    pub(crate) fn new_connection(&self) -> u64 {
        self.next_connection.fetch_add(1, Ordering::Relaxed)
    }

    /// The session that a client wants to go on with, if its proof is `right` for the
    /// secret. Errors: it was evicted.
    pub(crate) fn resume(
        &self,
        id: u64,
        export: &Arc<Export>,
        right: impl FnOnce(&[u8; 16]) -> bool,
    ) -> Result<Option<Arc<Session>>, Refused> {
        if self.life.is_evicted(id) {
            return Err(refused(
                Errno::ESHUTDOWN,
                "this client was evicted by the server's administrator: unmount, and mount again",
            ));
        }
        let known = lock(&self.sessions).get(&id).cloned();
        let its_own =
            |session: &Arc<Session>| Arc::ptr_eq(&session.export, export) && right(&session.secret);
        Ok(known.filter(its_own))
    }

    /// A session of an earlier life has come back from `peer`: it counts among those of that
    /// address, however many there are.
    pub(crate) fn resides(&self, session: &Session, peer: Peer) {
        if !session.has_resident()
            && let Some(resident) = self.door.settle(peer, usize::MAX)
        {
            session.set_resident(resident);
        }
    }

    pub(crate) fn new_session(
        &self,
        node: NodeId,
        (host, peer): (&str, Peer),
        export: Arc<Export>,
    ) -> Result<Arc<Session>, Refused> {
        let resident = self.door.settle(peer, self.options.sessions_of_one_max);
        let resident = resident.ok_or_else(|| {
            let (max, machine) = (self.options.sessions_of_one_max, machine_of(peer));
            let what = "unmount some, or raise `clients_of_one_address_max` at the server";
            refused(Errno::EAGAIN, format!("{machine} has {max} mounts, all that it may: {what}"))
        })?;
        let mut secret = [0; 16];
        random_bytes(&mut secret);
        let id = random_u64() | 1; // 0 is none
        if lock(&self.sessions).len() >= self.options.sessions_max {
            return Err(refused(
                Errno::EAGAIN,
                format!(
                    "the server has {} clients, as many as it may have",
                    self.options.sessions_max
                ),
            ));
        }
        let (export_name, host) = (export.name.clone(), printable(host));
        let record = SessionRecord { id, secret, node: node.0, export: export_name, host };
        let slots = self.options.slots;
        let log = self.journal.create(&record, slots).map_err(|error| {
            log::error!("cannot keep a session of {}: {error}", record.host);
            refused(Errno::ENOSPC, format!("the server cannot note a new session: {error}"))
        })?;
        let session = Arc::new(Session::new(record, export, &self.options, log));
        session.set_resident(resident);
        lock(&self.sessions).insert(id, session.clone());
        Ok(session)
    }

    /// Ends a session, on the executor that serves it. The answer comes when everything
    /// has been given back; it need not be waited for.
    pub(crate) fn end(self: &Arc<Inner>, session: Arc<Session>) -> oneshot::Receiver<()> {
        lock(&self.sessions).remove(&session.id);
        session.cut_off();
        let (done, ended) = oneshot::channel();
        let (inner, home) = (self.clone(), session.home());
        home.unwrap_or_else(Handle::current).spawn(async move {
            session.end().await;
            session.export.grace.reclaimed(session.id);
            session.export.returning.returned(session.id);
            session.export.recovery.done(session.id);
            let _ = done.send(()); // nobody has to wait for it
            inner.sync_last(&session).await;
            inner.journal.remove(session.id);
        });
        ended
    }

    /// Has what a client changed last brought to media, once it is gone: it keeps nothing any
    /// more. Until then its session stays in the journal: should the machine lose power
    /// meanwhile, it counts as one that has not come back, and that is told.
    async fn sync_last(&self, session: &Session) {
        let export = &session.export;
        let skipped = self.options.sabotage == Some(Sabotage::LastSync);
        if session.changed_at() <= export.stable.floor() || skipped {
            return;
        }
        let cx = Context::system();
        // What clients have not sent again yet is not on media, whatever its stamp.
        let _ = export.recovery.wait(&cx).await; // nobody cancels it
        let synced = export.stable.sync_all(&cx, &*export.fs, &export.stamps);
        match synced.await {
            Ok(stamp) => {
                let ticket = export.tickets.on_media(None, stamp);
                self.tell_stable(export, stamp, ticket);
            }
            Err(error) => log::error!(
                "client {} (session {:x}) is gone, and what it wrote last cannot be synced: {error}",
                session.host,
                session.id
            ),
        }
    }

    /// Tells the clients of `export` that everything up to `stamp` is on media: those that have
    /// changed something since they were told last. Who has not keeps nothing that it could
    /// forget, and sleeps on.
    pub(crate) fn tell_stable(&self, export: &Arc<Export>, stamp: u64, ticket: Ticket) {
        let mut message = Vec::new();
        NotifyHead { what: NotifyHead::STABLE, flags: 0, tag: 0 }.put_message(&mut message);
        stamp.put(&mut message);
        ticket.put(&mut message); // to others it is of a later version: they skip it
        let concerned: Vec<_> = lock(&self.sessions)
            .values()
            .filter(|session| session.waits_for_stable() && Arc::ptr_eq(&session.export, export))
            .filter_map(|session| {
                Some((session.clone(), session.connections().into_iter().next()?))
            })
            .collect();
        for (session, connection) in concerned {
            if connection.send(&message, None).is_ok() {
                session.told_stable(stamp); // who is away hears of the next
            }
        }
    }

    fn expired(&self) -> Vec<Arc<Session>> {
        let sessions = lock(&self.sessions);
        let late = |session: &&Arc<Session>| {
            session.alone_since().is_some_and(|since| since.elapsed() >= self.options.lease)
        };
        sessions.values().filter(late).cloned().collect()
    }
}

/// What a client calls itself, so that it can be shown: of bounded length, and without
/// anything that a log or a terminal takes for more than text.
fn printable(host: &str) -> String {
    let mut shown = String::new();
    for letter in host.chars() {
        if shown.len() + letter.len_utf8() > Hello::HOST_MAX_BYTES {
            break;
        }
        shown.push(if letter.is_control() || letter.is_whitespace() { '?' } else { letter });
    }
    shown
}

fn machine_of(peer: Peer) -> String {
    match peer {
        Peer::Ip(address) => address.ip().to_canonical().to_string(),
        Peer::Local => "this machine".to_owned(),
    }
}

pub(crate) fn refused(errno: Errno, message: impl Into<String>) -> Refused {
    Refused { errno: errno.raw() as u16, message: message.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    use dray_backends::memory::{MemoryFs, MemoryOptions};
    use dray_core::{FileId, FileSystem, Op};
    use dray_fabric::sim::Network;
    use dray_layers::Observed;
    use dray_layers::faults::{Fault, Faults, When};
    use dray_rt::{DriverKind, Executor};

    use crate::server::journal::MemoryJournal;

    /// The first sessions that were taken over ended, before their clients could come back, while
    /// the file system answered for the last.
    #[test]
    fn leases_begin_when_an_export_is_open() {
        let driver = DriverKind::Simulated { seed: 1 };
        Executor::new(driver).unwrap().block_on(async {
            let fs = MemoryFs::new(MemoryOptions::default());
            let mut intent = Vec::new();
            (fs.info().root, (&b"name"[..], None::<FileId>)).put(&mut intent);
            let slow = Fault {
                op: Some(Op::Lookup),
                when: When::Always,
                delay: ServerOptions::default().lease / 2,
                error: None,
            };
            let fs = Observed::new(Arc::new(fs), Arc::new(Faults::new(vec![slow])));
            let journal = Arc::new(MemoryJournal::default());
            for id in 1..=4 {
                let (export, host) = ("data".to_owned(), "host".to_owned());
                let record = SessionRecord { id, secret: [0; 16], node: id, export, host };
                journal.create(&record, 1).unwrap().begin(0, 1, Op::Make, &intent);
            }
            let server = Server::awaiting(ServerOptions::default(), &["data"], journal);
            let leases = server.clone();
            dray_rt::spawn(async move { leases.expire_leases().await });
            server.open(Export::new("data", Arc::new(fs), Vec::new()), Loss::Nothing).await;
            assert_eq!(server.status().clients.len(), 4);
            sleep(server.lease() * 2).await;
            assert_eq!(server.status().clients.len(), 0);
        });
    }

    /// What was kept for a client that does not come back is closed where a file system that
    /// hangs holds up its own export alone, not by the thread that accepts for all of them.
    #[test]
    fn a_session_that_never_came_back_ends_on_a_thread_of_its_export() {
        let export = Export::new("data", Arc::new(MemoryFs::new(MemoryOptions::default())), vec![]);
        let journal = Arc::new(MemoryJournal::default());
        let server = Server::new(ServerOptions::default(), vec![export], journal);
        let export = server.inner.exports.get("data").unwrap();
        let session = || {
            let (node, host) = (NodeId(1), ("host", Peer::Local));
            server.inner.new_session(node, host, export.clone()).unwrap()
        };
        let (here, away) = (session(), session());
        let mut network = Executor::new(DriverKind::Simulated { seed: 1 }).unwrap();
        let connection = network.block_on(async {
            let network = Network::new();
            let _incoming = network.listen("s");
            network.connector("s").connect().await.unwrap()
        });
        let (inside, is_inside) = channel();
        let (thaw, frozen) = channel::<()>();
        let thread = std::thread::spawn(move || {
            Executor::new(DriverKind::Epoll).unwrap().block_on(async {
                here.connected(1, connection);
                inside.send(()).unwrap();
                frozen.recv().unwrap(); // its file system hangs
                dray_rt::sleep(Duration::from_millis(500)).await;
            });
        });
        is_inside.recv().unwrap();
        Executor::new(DriverKind::Epoll).unwrap().block_on(async {
            let mut ended = server.inner.end(away);
            let soon = timeout(Duration::from_millis(50), &mut ended).await;
            assert!(soon.is_err(), "it was ended by a thread that serves others");
            thaw.send(()).unwrap();
            timeout(Duration::from_secs(10), ended).await.unwrap().unwrap();
        });
        thread.join().unwrap();
    }
}
