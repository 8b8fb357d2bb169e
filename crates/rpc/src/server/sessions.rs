//! The sessions of a server: how they begin, are gone on with, and end.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use dray_core::{Errno, NodeId};
use dray_fabric::Peer;
use dray_rt::sync::oneshot;
use dray_rt::{ExecutorHandle, random_bytes, random_u64};

use crate::server::as_server;
use crate::server::export::Export;
use crate::server::exports::not_open;
use crate::server::journal::{Journal, SessionRecord};
use crate::server::sabotage::Sabotage;
use crate::server::service::{Inner, lock};
use crate::server::session::ServerSession;
use crate::wire::{Hello, NotifyHead, Refused, Ticket, Wire};

/// A session that has ended, and is still in the journal.
struct Parting(Arc<Inner>);

impl Parting {
    fn of(inner: &Arc<Inner>) -> Parting {
        inner.parting.fetch_add(1, Ordering::SeqCst);
        Parting(inner.clone())
    }
}

impl Drop for Parting {
    fn drop(&mut self) {
        self.0.parting.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Inner {
    /// The session that a client wants to go on with, if its proof is `right` for the
    /// secret. Errors: it was evicted.
    pub(crate) fn resume(
        &self,
        id: u64,
        export: &Arc<Export>,
        right: impl FnOnce(&[u8; 16]) -> bool,
    ) -> Result<Option<Arc<ServerSession>>, Refused> {
        let forgets = self.options.broken().is(Sabotage::Evictions);
        if self.epoch.is_evicted(id) && !forgets {
            return Err(refused(
                Errno::ESHUTDOWN,
                "this client was evicted by the server's administrator: unmount, and mount again",
            ));
        }
        let known = lock(&self.sessions).get(&id).cloned();
        let its_own = |session: &Arc<ServerSession>| {
            Arc::ptr_eq(&session.export, export) && right(&session.secret)
        };
        Ok(known.filter(its_own))
    }

    /// A session of an earlier epoch has returned from `peer`: it counts among those of that
    /// address, however many there are.
    pub(crate) fn count_session(&self, session: &ServerSession, peer: Peer) {
        if !session.has_session_place() {
            session.set_session_place(self.limits.count_session(peer));
        }
    }

    /// Begins a session, which is noted on media by a thread for that. Errors: there are too many,
    /// or it cannot be noted.
    pub(crate) async fn new_session(
        &self,
        node: NodeId,
        (host, peer): (&str, Peer),
        export: Arc<Export>,
    ) -> Result<Arc<ServerSession>, Refused> {
        let known = lock(&self.sessions).len();
        if known >= self.options.sessions_max {
            return Err(self.full());
        }
        let most = self.options.sessions_of_one_max;
        let session_place = self.limits.settle(peer, (most, known));
        let session_place = session_place.map_err(|count| too_many_of_one(peer, (count, most)))?;
        let mut secret = [0; 16];
        random_bytes(&mut secret);
        let id = random_u64() | 1; // 0 is none
        let (export_name, host) = (export.name.clone(), printable(host));
        let record = SessionRecord { id, secret, node: node.0, export: export_name, host };
        let slots = self.options.slots;
        let noted = record.clone();
        let log = self.on_media(move |journal| journal.create(&noted, slots)).await;
        let log = log.and_then(|log| log).map_err(|error| {
            let host = &record.host;
            self.unkept_sessions.say(|more| {
                log::error!("cannot keep a session of {host} in the state directory: {error}{more}")
            });
            let what = format!(
                "the server cannot note a new session in its state directory: {error}; make room \
                 there, or look at its disk"
            );
            refused(Errno::ENOSPC, what)
        })?;
        if let Some(settled) = self.journal.settled()
            && !settled.await
        {
            return Err(not_open(&export.name));
        }
        let session = Arc::new(ServerSession::new(record, export, &self.options, log));
        session.set_session_place(session_place);
        if self.enter(&session) {
            return Ok(session);
        }
        // Other sessions were noted meanwhile.
        let _ = self.on_media(move |journal| journal.remove(id)).await; // it expires, if it stays
        Err(self.full())
    }

    /// Whether there is a place for it.
    fn enter(&self, session: &Arc<ServerSession>) -> bool {
        let mut sessions = lock(&self.sessions);
        let free = sessions.len() < self.options.sessions_max;
        if free {
            sessions.insert(session.id, session.clone());
        }
        free
    }

    fn full(&self) -> Refused {
        let most = self.options.sessions_max;
        refused(Errno::EAGAIN, format!("the server has {most} clients, as many as it may have"))
    }

    /// Makes a call that waits for media on a thread for that: the serving threads have others to
    /// serve. Errors: there is no thread.
    async fn on_media<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn Journal) -> T + Send + 'static,
    ) -> io::Result<T> {
        let journal = self.journal.clone();
        self.noting.run(move || work(&*journal)).await.map_err(io::Error::other)
    }

    /// Ends a session, on the executor that serves it. The answer comes when everything
    /// has been given back; it need not be waited for.
    pub(crate) fn end(self: &Arc<Inner>, session: Arc<ServerSession>) -> oneshot::Receiver<()> {
        lock(&self.sessions).remove(&session.id);
        session.cut_off();
        if let Some(holder) = session.lease_holder() {
            holder.end(false);
        }
        let (done, ended) = oneshot::channel();
        let (inner, home) = (self.clone(), session.home());
        let parting = Parting::of(self);
        home.unwrap_or_else(ExecutorHandle::current).spawn(async move {
            session.end().await;
            session.export.grace.finish(session.id);
            session.export.kept_writes.finish(session.id);
            session.export.recovery_window.returned(session.id);
            session.export.recovery.done(session.id);
            let _ = done.send(()); // nobody has to wait for it
            inner.sync_last(&session).await;
            let id = session.id;
            // With the last user the file's blocks are given back, which takes its time, too.
            let forget = move |journal: &dyn Journal| {
                journal.remove(id);
                drop(session);
            };
            if let Err(error) = inner.on_media(forget).await {
                log::error!("session {id:x}: its file stays until the next start: {error}");
            }
            drop(parting);
        });
        ended
    }

    /// Brings the last changes of a client to media, once the client is gone: it keeps nothing any
    /// more. Until then its session stays in the journal. If the machine loses power meanwhile, the
    /// session counts as one that has not returned, and the status reports that.
    async fn sync_last(&self, session: &ServerSession) {
        let export = &session.export;
        let skipped = self.options.broken().is(Sabotage::LastSync);
        if session.changed_at() <= export.group_sync.durable_stamp() || skipped {
            return;
        }
        let cx = as_server::of_nobody();
        // Changes that clients have not sent again yet are not on media, whatever their stamp.
        let _ = export.recovery.wait(&cx).await; // nobody cancels it
        match export.sync_all(&cx).await {
            Ok(stamp) => {
                let ticket = export.tickets.on_media(None, stamp);
                self.notify_durable(export, stamp, ticket);
            }
            Err(error) => log::error!(
                "client {} (session {:x}) is gone, and what it wrote last cannot be synced: {error}",
                session.host,
                session.id
            ),
        }
    }

    /// Notifies clients of `export` that everything up to `stamp` is on media: those that have
    /// changed something since their last notification. The other clients keep no changes, and are
    /// not woken.
    pub(crate) fn notify_durable(&self, export: &Arc<Export>, stamp: u64, ticket: Ticket) {
        if !export.group_sync.is_news(stamp) {
            return;
        }
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
            if connection.notify(&message).is_ok() {
                session.note_durable_reported(stamp); // who is away, or does not read, hears of the next
            }
        }
    }

    /// The sessions whose clients have been away for longer than a lease.
    pub(super) fn expired(&self) -> Vec<Arc<ServerSession>> {
        let sessions = lock(&self.sessions);
        let late = |session: &&Arc<ServerSession>| {
            session.alone_since().is_some_and(|since| since.elapsed() >= self.options.lease)
        };
        sessions.values().filter(late).cloned().collect()
    }
}

/// The name that a client gives itself, so that it can be shown. It has bounded length, and nothing
/// that a log or a terminal takes for more than text.
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

fn too_many_of_one(peer: Peer, (count, most): (usize, usize)) -> Refused {
    let machine = machine_of(peer);
    let (why, key) = match count >= most {
        true => {
            let why = format!("{machine} has {count} mounts, all that it may");
            (why, "clients_of_one_address_max")
        }
        false => {
            let why =
                format!("{machine} has {count} mounts, its share of what the server has left");
            (why, "clients_max")
        }
    };
    refused(Errno::EAGAIN, format!("{why}: unmount some, or raise `{key}` at the server"))
}

/// The name of a peer's machine. Peers with the same name count as one machine.
fn machine_of(peer: Peer) -> String {
    match peer {
        Peer::Ip(address) => address.ip().to_canonical().to_string(),
        Peer::Local | Peer::User(..) => "this machine".to_owned(),
    }
}

pub(crate) fn refused(errno: Errno, message: impl Into<String>) -> Refused {
    Refused { errno: errno.raw() as u16, message: message.into(), definition: String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::sync::mpsc::{Sender, channel};
    use std::time::Duration;

    use dray_backends::memory::{MemoryFs, MemoryOptions};
    use dray_core::{Fate, FileId, FileSystem, Op};
    use dray_fabric::sim::Network;
    use dray_layers::Observed;
    use dray_layers::faults::{Fault, Faults, When};
    use dray_rt::{DriverKind, Executor, sleep, timeout};

    use crate::server::exactly_once::slots::{Route, Verdict};
    use crate::server::journal::watched::{Watch, WatchedJournal};
    use crate::server::journal::{MemoryJournal, SlotRecord};
    use crate::server::options::{ServerOptions, StateLoss};
    use crate::server::ranges::Span;
    use crate::server::service::Server;

    /// The first sessions that were taken over ended, before their clients could come back, while
    /// the file system answered for the last.
    // proves: P112
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
            server
                .open(Export::new("data", Arc::new(fs), Vec::new()), StateLoss::Nothing)
                .await
                .unwrap();
            assert_eq!(server.status().clients.len(), 4);
            sleep(server.lease() * 2).await;
            assert_eq!(server.status().clients.len(), 0);
        });
    }

    /// A client came back, and neither asked again for a change that was cut short nor said that it
    /// had given up on it. It kept everybody else from that file as long as it stayed.
    // proves: P85
    #[test]
    fn an_abandoned_change_blocks_others_for_one_lease_at_most() {
        Executor::new(DriverKind::Simulated { seed: 1 }).unwrap().block_on(async {
            let fs = MemoryFs::new(MemoryOptions::default());
            let (root, mut intent) = (fs.info().root, Vec::new());
            (false, (root, Span::ALL)).put(&mut intent);
            let (journal, export) = (MemoryJournal::default(), "data".to_owned());
            let record =
                SessionRecord { id: 1, secret: [0; 16], node: 1, export, host: "host".into() };
            journal.create(&record, 1).unwrap().begin(0, 7, Op::Setattr, &intent);
            let (lease, journal) = (ServerOptions::default().lease, Arc::new(journal));
            let server = Server::awaiting(ServerOptions::default(), &["data"], journal.clone());
            let leases = server.clone();
            dray_rt::spawn(async move { leases.expire_leases().await });
            server
                .open(Export::new("data", Arc::new(fs), Vec::new()), StateLoss::Nothing)
                .await
                .unwrap();
            let export = server.inner.exports.get("data").unwrap();
            let session = lock(&server.inner.sessions).get(&1).cloned().unwrap();
            let network = Network::new();
            let _incoming = network.listen("s");
            let connection = network.connector("s").connect().await.unwrap();
            session.connected(1, connection.clone());
            let early = timeout(lease / 2, export.ranges.change(root, Span::ALL)).await;
            assert!(early.is_err(), "the change had not been asked for again");
            let change = timeout(lease, export.ranges.change(root, Span::ALL)).await;
            drop(change.expect("it is waited for as long as its client stays"));
            assert!(lock(&server.inner.sessions).contains_key(&1), "its client is there");
            // A client that repeats its call gets the unknown outcome from this server and the
            // next.
            let route = Route { connection: Arc::downgrade(&connection), tag: 0 };
            let Verdict::Restored(answer) = session.slots.begin(0, 7, &route) else {
                panic!("it is made after others have changed the same");
            };
            let error = answer.error().expect("an unknown outcome");
            assert_eq!((error.errno(), error.fate()), (Errno::EIO, Fate::Unknown));
            let noted = journal.load()[0].1.records();
            assert!(matches!(&noted[0].1, SlotRecord::Answer { sequence: 7, .. }));
        });
    }

    /// Files kept for a client that does not come back are not closed by the thread that accepts
    /// for all exports. So a file system that hangs holds up its own export alone.
    // proves: P109
    #[test]
    fn a_session_that_never_came_back_ends_on_a_thread_of_its_export() {
        let export = Export::new("data", Arc::new(MemoryFs::new(MemoryOptions::default())), vec![]);
        let journal = Arc::new(MemoryJournal::default());
        let server = Server::new(ServerOptions::default(), vec![export], journal);
        let export = server.inner.exports.get("data").unwrap();
        let session = || {
            let (node, host) = (NodeId(1), ("host", Peer::Local));
            server.inner.new_session(node, host, export.clone())
        };
        let mut executor = Executor::new(DriverKind::Epoll).unwrap();
        let (here, away) =
            executor.block_on(async { (session().await.unwrap(), session().await.unwrap()) });
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

    /// Reports the thread of the last user of a log.
    struct LastUser(Mutex<Sender<String>>);

    impl Watch for LastUser {
        fn lets_go(&self) {
            let thread = std::thread::current().name().unwrap_or_default().to_owned();
            let _ = lock(&self.0).send(thread); // the test may be over
        }
    }

    /// The disk gives the blocks of a removed file back when nobody uses it any more, a millisecond
    /// for each. Where two thousand leases ended at once, all others waited four seconds.
    // proves: P132
    #[test]
    fn the_file_of_a_session_that_ended_is_given_back_by_a_thread_for_that() {
        let export = Export::new("data", Arc::new(MemoryFs::new(MemoryOptions::default())), vec![]);
        let (tell, receiver) = channel();
        let journal = Arc::new(WatchedJournal::by(LastUser(Mutex::new(tell))));
        let server = Server::new(ServerOptions::default(), vec![export], journal);
        let export = server.inner.exports.get("data").unwrap();
        Executor::new(DriverKind::Epoll).unwrap().block_on(async {
            let who = ("host", Peer::Local);
            let session = server.inner.new_session(NodeId(1), who, export).await.unwrap();
            server.inner.end(session).await.unwrap();
            server.parted().await;
        });
        assert_eq!(receiver.recv_timeout(Duration::from_secs(60)).as_deref(), Ok("dray-note"));
    }
}
