//! A journal on slow media holds up those who are noted in it, and nobody else.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crate::common::{client_options, connect, memory, run, serve_sockets};
use dray_core::{Context, FileSystem};
use dray_fabric::{Address, Sockets};
use dray_rpc::client::ClientOptions;
use dray_rpc::server::{
    Export, Journal, MemoryJournal, PersistentRecord, Server, ServerOptions, SessionRecord, SlotLog,
};
use dray_rt::{spawn_join, timeout};

/// Ends a wait that would be one for ever, and with it the test.
const LIMIT: Duration = Duration::from_secs(60);

/// A journal with media that a test can halt.
#[derive(Default)]
struct Slow {
    inner: MemoryJournal,
    stands: Mutex<bool>,
    goes_on: Condvar,
    /// Some task waits for the journal.
    waits: AtomicBool,
    /// The wait ended at its limit: the task that should have continued was blocked.
    in_vain: AtomicBool,
}

impl Slow {
    fn stand_still(&self, stands: bool) {
        *self.stands.lock().unwrap() = stands;
        self.goes_on.notify_all();
    }

    fn wait(&self) {
        self.waits.store(true, Ordering::SeqCst);
        let stands = self.stands.lock().unwrap();
        let waited = self.goes_on.wait_timeout_while(stands, LIMIT, |stands| *stands).unwrap();
        self.in_vain.fetch_or(waited.1.timed_out(), Ordering::SeqCst);
    }
}

impl Journal for Slow {
    fn create(&self, session: &SessionRecord, slots: u32) -> io::Result<Arc<dyn SlotLog>> {
        self.wait();
        self.inner.create(session, slots)
    }
    fn remove(&self, session: u64) {
        self.wait();
        self.inner.remove(session);
    }
    fn load(&self) -> Vec<(SessionRecord, Arc<dyn SlotLog>)> {
        self.inner.load()
    }
    fn kept(&self, what: PersistentRecord) -> io::Result<Option<Vec<u8>>> {
        self.inner.kept(what)
    }
    fn keep(&self, what: PersistentRecord, bytes: &[u8]) -> io::Result<()> {
        self.wait();
        self.inner.keep(what, bytes)
    }
    fn settled(&self) -> Option<dray_core::Fut<'_, bool>> {
        self.inner.settled()
    }
}

/// A new mount held up all clients of its thread for the time of two syncs of the server's disk. So
/// did an unmount and an eviction.
// proves: P78
#[test]
fn a_session_being_noted_blocks_no_other_session() {
    let dir = tempfile::tempdir().unwrap();
    let socket: PathBuf = dir.path().join("socket");
    run(async {
        let journal = Arc::new(Slow::default());
        let export = Export::new("data", Arc::new(memory()), Vec::new());
        let server = Server::new(ServerOptions::default(), vec![export], journal.clone());
        let address = serve_sockets(&Address::Unix(socket), server.clone()).await;
        let mount = move |host: &str| {
            let options = ClientOptions { host: host.into(), ..client_options() };
            connect(Arc::new(Sockets(address.clone())), options)
        };
        let (cx, first, second) =
            (Context::system(), mount("first").await.unwrap(), mount("second").await.unwrap());
        let root = first.info().root;
        let clients = server.status().clients;
        let evicted = clients.iter().find(|client| client.host == "second").unwrap().session;

        journal.stand_still(true);
        journal.waits.store(false, Ordering::SeqCst);
        let third = spawn_join({
            let mount = mount.clone();
            async move {
                loop {
                    // A handshake has its limit; on a machine that stands still, too.
                    if let Ok(third) = mount("third").await {
                        return third;
                    }
                }
            }
        });
        let eviction = spawn_join({
            let server = server.clone();
            async move { server.evict(evicted).await }
        });
        while !journal.waits.load(Ordering::SeqCst) {
            dray_rt::sleep(Duration::from_millis(1)).await;
        }
        for _ in 0..10 {
            let others = timeout(LIMIT / 2, first.getattr(&cx, root)).await;
            others.expect("it is held up").unwrap();
        }
        assert!(timeout(LIMIT / 2, eviction).await.expect("it is held up").unwrap());
        assert_eq!(server.status().clients.len(), 1);
        journal.stand_still(false);
        let third = third.await.unwrap();
        third.getattr(&cx, root).await.unwrap();
        assert!(!journal.in_vain.load(Ordering::SeqCst));
        drop((first, second));
    });
}
