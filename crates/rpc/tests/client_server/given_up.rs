//! Locks and open files of callers that give up while a running server cannot be reached: they are
//! released once it can be.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{client_options, connect, memory, serve_simulated, simulate};
use dray_backends::memory::MemoryFs;
use dray_core::{
    Cancel, Context, CreateHow, FileSystem, Lock, LockFamily, LockKind, LockOwner, LockRange, Name,
    Op, OpenFile, OpenHow, Pid,
};
use dray_fabric::sim::{Network, Weather};
use dray_layers::Observed;
use dray_layers::faults::{Fault, Faults, When};
use dray_rpc::client::{ClientOptions, RemoteFs};
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions};
use dray_rt::{Scope, sleep};

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };
const LIMIT: Duration = Duration::from_secs(2);

fn lock_of(family: LockFamily, kind: LockKind, owner: u64) -> Lock {
    Lock { family, kind, range: LockRange::ALL, owner: LockOwner::own(owner), pid: Pid(1) }
}

fn open_files(server: &Server) -> u64 {
    server.status().clients.iter().map(|client| client.files as u64).sum()
}

fn posix(kind: LockKind, owner: u64) -> Lock {
    lock_of(LockFamily::Posix, kind, owner)
}

/// A client of a server that can be cut off, and a file that it has open.
struct Site {
    network: Network,
    server: Server,
    below: MemoryFs,
    fs: RemoteFs,
    file: Arc<dyn OpenFile>,
    /// Ends the server.
    _scope: Scope,
}

impl Site {
    async fn new(timeout: Option<Duration>) -> Site {
        Site::slow(timeout, Vec::new()).await
    }

    /// A mount of a server that `faults` delay.
    async fn slow(timeout: Option<Duration>, faults: Vec<Fault>) -> Site {
        let (network, below, scope) = (Network::new(), memory(), Scope::new());
        let fs = Observed::new(Arc::new(below.clone()), Arc::new(Faults::new(faults)));
        let export = Export::new("data", Arc::new(fs), Vec::new());
        let journal = Arc::new(MemoryJournal::default());
        let server = Server::new(ServerOptions::default(), vec![export], journal);
        serve_simulated(&network, "s", &server, &scope);
        let options = ClientOptions { timeout, ..client_options() };
        let fs = connect(network.connector("s"), options).await.unwrap();
        let name = Name::new(b"f").unwrap();
        let (_, file) = fs.create(&Context::system(), fs.info().root, name, NEW).await.unwrap();
        Site { network, server, below, fs, file, _scope: scope }
    }

    /// Connections break with what is under way, and no new ones are made. The server keeps
    /// running.
    fn cut_off(&self) {
        self.network.set_weather(Weather { break_one_in: Some(1), ..Weather::default() });
        self.network.partition("s", true);
    }

    /// Well within the lease.
    async fn back(&self) {
        self.network.set_weather(Weather::default());
        self.network.partition("s", false);
        sleep(Duration::from_secs(3)).await;
    }
}

/// A caller that is killed after a moment.
fn killed_soon() -> Context {
    let cancel = Arc::new(Cancel::default());
    let set = cancel.clone();
    dray_rt::spawn(async move {
        sleep(Duration::from_millis(100)).await;
        set.set();
    });
    Context { cancel: Some(cancel), ..Context::system() }
}

/// The file stays open: somebody else has it, too.
// proves: P70
#[test]
fn locks_of_a_caller_killed_at_a_close_are_released() {
    simulate(1, async {
        let (site, cx) = (Site::new(None).await, Context::system());
        site.file.lock(&cx, posix(LockKind::Exclusive, 1), false).await.unwrap();
        site.cut_off();
        site.file.flush(&killed_soon(), LockOwner::own(1)).await.unwrap_err();
        assert_eq!(site.below.locks().len(), 1);
        site.back().await;
        assert!(site.below.locks().is_empty());
    });
}

/// Here it was the last that had the file.
// proves: P70
#[test]
fn locks_of_a_caller_killed_at_the_last_close_are_released() {
    simulate(2, async {
        let (site, cx) = (Site::new(None).await, Context::system());
        site.file.lock(&cx, posix(LockKind::Exclusive, 1), false).await.unwrap();
        site.cut_off();
        site.file.flush(&killed_soon(), LockOwner::own(1)).await.unwrap_err();
        let file = site.file.clone();
        dray_rt::spawn(async move { _ = file.close(&Context::system()).await });
        sleep(Duration::from_millis(100)).await;
        site.back().await;
        assert!(site.below.locks().is_empty());
        assert_eq!(open_files(&site.server), 0);
    });
}

// proves: P70
#[test]
fn what_fails_by_the_limit_is_given_back_all_the_same() {
    simulate(3, async {
        let (site, cx) = (Site::new(Some(LIMIT)).await, Context::system());
        for family in [LockFamily::Posix, LockFamily::Flock] {
            site.file.lock(&cx, lock_of(family, LockKind::Exclusive, 1), false).await.unwrap();
            site.cut_off();
            site.file.lock(&cx, lock_of(family, LockKind::Unlock, 1), false).await.unwrap_err();
            assert_eq!(site.below.locks().len(), 1, "{family:?}");
            site.back().await;
            assert!(site.below.locks().is_empty(), "{family:?}");
        }
        // The last close, with a lock and long after the limit.
        site.file
            .lock(&cx, lock_of(LockFamily::Flock, LockKind::Exclusive, 1), false)
            .await
            .unwrap();
        site.cut_off();
        sleep(2 * LIMIT).await;
        _ = site.file.close(&cx).await;
        site.back().await;
        assert!(site.below.locks().is_empty());
        assert_eq!(open_files(&site.server), 0);
    });
}

/// The server granted it, and its answer was lost.
// proves: P70
#[test]
fn a_try_for_a_lock_that_was_given_up_leaves_none() {
    simulate(4, async {
        let site = Site::new(None).await;
        site.network.set_weather(Weather {
            break_one_in: Some(1),
            deliver_then_break_one_in: Some(1),
            ..Weather::default()
        });
        let (file, cx) = (site.file.clone(), killed_soon());
        let trying = dray_rt::spawn_join(async move {
            file.lock(&cx, posix(LockKind::Exclusive, 1), false).await
        });
        sleep(Duration::from_micros(1)).await; // it is on its way, and is the last that arrives
        site.network.set_weather(Weather { break_one_in: Some(1), ..Weather::default() });
        while site.below.locks().is_empty() {
            sleep(Duration::from_micros(100)).await;
        }
        site.cut_off();
        trying.await.unwrap().unwrap_err();
        site.back().await;
        assert!(site.below.locks().is_empty());
    });
}

/// The kernel names owners by addresses, which are used again. A lock that is asked for through
/// any open file of this mount comes after what is to be given back.
// proves: P70
#[test]
fn what_is_given_back_is_not_taken_from_the_next_owner_of_that_name() {
    for seed in 10..40 {
        simulate(seed, async {
            let (site, cx) = (Site::new(None).await, Context::system());
            site.file.lock(&cx, posix(LockKind::Exclusive, 1), false).await.unwrap();
            let other = site.fs.open(&cx, site.file.id(), OpenHow::READ_WRITE).await.unwrap();
            site.cut_off();
            site.file.flush(&killed_soon(), LockOwner::own(1)).await.unwrap_err();
            let locking = dray_rt::spawn_join(async move {
                let asked = posix(LockKind::Exclusive, 1);
                other.lock(&Context::system(), asked, false).await.map(|()| other)
            });
            site.back().await;
            let _other = locking.await.unwrap().unwrap();
            assert_eq!(site.below.locks().len(), 1, "{seed}");
        });
    }
}

/// The call of this number about locks takes the server its time.
fn slow_lock(number: u64) -> Vec<Fault> {
    let (op, when, delay) = (Some(Op::Lock), When::Nth(number), Duration::from_secs(5));
    vec![Fault { op, when, delay, error: None }]
}

/// The lock was given back before the server had granted it, and then nobody gave it back.
// proves: P61
#[test]
fn a_try_for_a_lock_that_the_server_comes_to_late_leaves_none() {
    for family in [LockFamily::Posix, LockFamily::Flock] {
        simulate(50, async {
            let site = Site::slow(None, slow_lock(1)).await;
            let asked = lock_of(family, LockKind::Exclusive, 1);
            site.file.lock(&killed_soon(), asked, false).await.unwrap_err();
            assert!(site.below.locks().is_empty());
            sleep(Duration::from_secs(10)).await;
            assert!(site.below.locks().is_empty(), "{family:?}");
        });
    }
}

/// An unlock that the server came to late took away what its owner had locked after it.
// proves: P61
#[test]
fn what_is_locked_after_an_unlock_that_was_given_up_is_held() {
    simulate(51, async {
        let (site, cx) = (Site::slow(None, slow_lock(2)).await, Context::system());
        site.file.lock(&cx, posix(LockKind::Exclusive, 1), false).await.unwrap();
        site.file.lock(&killed_soon(), posix(LockKind::Unlock, 1), false).await.unwrap_err();
        site.file.lock(&cx, posix(LockKind::Exclusive, 1), false).await.unwrap();
        sleep(Duration::from_secs(10)).await;
        assert_eq!(site.below.locks().len(), 1);
    });
}
