//! A provider at work: somebody who listens, and the way to them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use dray_fabric::sim::Network;
use dray_fabric::{
    Address, Connect, ConnectFrom, Connection, Incoming, Listener, Listening, PoolShare, connector,
    listen_first, local,
};
use dray_rt::sync::oneshot;
use dray_rt::{DriverKind, Executor, ExecutorHandle, spawn};

use crate::sink::Log;

/// Whatever takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Tcp,
    Unix,
    Local,
    Sim,
}

/// Which provider, and on which executors.
pub struct Rig {
    kind: Kind,
    driver: DriverKind,
    apart: bool,
}

impl Rig {
    fn new(kind: Kind) -> Rig {
        Rig { kind, driver: DriverKind::Epoll, apart: false }
    }

    pub fn tcp() -> Rig {
        Rig::new(Kind::Tcp)
    }

    pub fn unix() -> Rig {
        Rig::new(Kind::Unix)
    }

    pub fn local() -> Rig {
        Rig::new(Kind::Local)
    }

    pub fn sim() -> Rig {
        Rig::new(Kind::Sim).simulated()
    }

    /// The accepted ends are served by another thread.
    pub fn apart(self) -> Rig {
        Rig { apart: true, ..self }
    }

    pub fn simulated(self) -> Rig {
        Rig { driver: DriverKind::Simulated { seed: 7 }, ..self }
    }

    pub fn run<F: Future<Output = ()>>(self, test: impl FnOnce(Provider) -> F) {
        let mut executor = Executor::new(self.driver).unwrap();
        executor.block_on(async { test(Provider::begin(&self).await).await });
    }
}

/// What a test works with.
pub struct Provider {
    kind: Kind,
    is_simulated: bool,
    pub listener: Option<Box<dyn Listener>>,
    pub connector: Arc<dyn Connect>,
    far: Far,
    _directory: Option<Directory>,
}

impl Provider {
    async fn begin(rig: &Rig) -> Provider {
        let directory = (rig.kind == Kind::Unix).then(Directory::new);
        let (listener, connector): (Box<dyn Listener>, Arc<dyn Connect>) = match rig.kind {
            Kind::Tcp => at(Address::Tcp { host: "127.0.0.1".into(), port: 0 }).await,
            Kind::Unix => at(Address::Unix(directory.as_ref().unwrap().0.join("socket"))).await,
            Kind::Local => {
                let (listener, connector) = local::listen();
                (Box::new(listener), Arc::new(connector))
            }
            Kind::Sim => {
                let network = Network::new();
                (Box::new(network.listen("server")), network.connector("server"))
            }
        };
        Provider {
            kind: rig.kind,
            is_simulated: rig.driver != DriverKind::Epoll,
            listener: Some(listener),
            connector,
            far: if rig.apart { Far::start() } else { Far::here() },
            _directory: directory,
        }
    }

    /// Frames on a simulated network come by themselves. The network has no end that stops reading,
    /// and holds memory for as long as they are on their way.
    pub fn can_stall(&self) -> bool {
        self.kind != Kind::Sim
    }

    pub fn is_tcp(&self) -> bool {
        self.kind == Kind::Tcp
    }

    /// Time passes only where nothing else happens, and there is one thread.
    pub fn is_simulated(&self) -> bool {
        self.is_simulated
    }

    pub async fn accept(&self) -> Box<dyn Incoming> {
        let listener = self.listener.as_ref().expect("it listens");
        patiently(listener.accept()).await.unwrap()
    }

    /// Starts a task where accepted connections are served.
    pub fn spawn_far(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.far.handle.spawn(task);
    }

    /// Both ends of a connection; the second belongs where accepted ones are served.
    pub async fn pair(&self) -> (Arc<dyn Connection>, Arc<dyn Connection>) {
        let near = patiently(self.connector.connect()).await.unwrap();
        let incoming = self.accept().await;
        let (sender, receiver) = oneshot::channel();
        self.spawn_far(async move { drop(sender.send(incoming.establish().unwrap())) });
        (near, receiver.await.unwrap())
    }

    /// The same, with both ends receiving, the second into memory of this share if there is one.
    pub async fn running(&self, memory: Option<PoolShare>) -> [(Arc<dyn Connection>, Log); 2] {
        let (near, far) = self.pair().await;
        let logs = [Log::default(), Log::default()];
        spawn(logs[0].clone().run(near.clone(), None));
        self.spawn_far(logs[1].clone().run(far.clone(), memory));
        let [near_log, far_log] = logs;
        [(near, near_log), (far, far_log)]
    }
}

async fn at(address: Address) -> (Box<dyn Listener>, Arc<dyn Connect>) {
    let Listening { address, listener } = listen_first(&address).await.unwrap();
    (listener, connector(&address, ConnectFrom::Any))
}

/// An executor for the accepted ends.
struct Far {
    handle: ExecutorHandle,
    /// Ends its thread when it is dropped.
    _thread: Option<oneshot::Sender<()>>,
}

impl Far {
    fn here() -> Far {
        Far { handle: ExecutorHandle::current(), _thread: None }
    }

    fn start() -> Far {
        let (end, ended) = oneshot::channel::<()>();
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut executor = Executor::new(DriverKind::Epoll).unwrap();
            sender.send(executor.handle()).unwrap();
            let _ = executor.block_on(ended); // dropped or not, it is over
        });
        Far { handle: receiver.recv().unwrap(), _thread: Some(end) }
    }
}

/// A fresh one, removed in the end.
struct Directory(PathBuf);

impl Directory {
    fn new() -> Directory {
        let name = format!("dray-providers-{:x}", dray_rt::random_u64());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Directory(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0); // a test that fails says more
    }
}

/// What it comes to, if it does so in time.
pub async fn patiently<T>(work: impl Future<Output = T>) -> T {
    dray_rt::timeout(PATIENCE, work).await.expect("it hangs")
}

/// Waits until it is so.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let waiting = async {
        while !holds() {
            dray_rt::sleep(Duration::from_millis(1)).await;
        }
    };
    dray_rt::timeout(PATIENCE, waiting).await.unwrap_or_else(|_| panic!("it never is: {what}"));
}

/// Time in which what should not happen would have happened.
pub async fn a_while() {
    dray_rt::sleep(Duration::from_millis(20)).await;
}
