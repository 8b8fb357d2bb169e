//! The threads that serve connections: each export has its own, one executor each, at
//! home on its CPU.
//!
//! Calls to local file systems are made by the thread that reads the connection, so a file system
//! that hangs stops its thread. All connections of that thread stop with it. They are all of the
//! same export (docs/adr/0011-hanging-file-systems.md). Threads start with the first connection
//! that needs them.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_fabric::Incoming;
use dray_rpc::server::{Admission, AuditPort, Server, wanted_audit, wanted_export, wanted_slice};
use dray_rt::sync::oneshot;
use dray_rt::{CpuSet, DriverKind, Executor, ExecutorHandle, Scope};

use crate::serve::qos::ShareExchanges;
use crate::serve::slices::{self, SlicesByProjection};

/// Threads of all exports together. Where there are more exports each has one.
const THREADS_MAX: usize = 1024;

/// A client that says nothing for this long is not waited for.
const GREETING_MAX: Duration = Duration::from_secs(10);

/// A server's threads.
pub struct Workers {
    exports: BTreeMap<String, Group>,
    slices: SlicesByProjection,
    exchanges: Arc<ShareExchanges>,
    /// For each projection with slices the thread on which notes of other servers arrive. It waits for
    /// the disk of the state directory, and for no file system of an export.
    ports: BTreeMap<String, Group>,
    /// Where readers of audits are served, on the thread that accepts: logs are read on others.
    audits: Option<Arc<AuditPort>>,
    /// CPUs that this process may use, in order.
    cpus: Vec<usize>,
    /// Threads of one export.
    each: usize,
}

/// The threads of one export.
struct Group {
    workers: Vec<Mutex<Option<Worker>>>,
    next: AtomicUsize,
}

impl Group {
    fn of(threads: usize) -> Group {
        let workers = (0..threads).map(|_| Mutex::default()).collect();
        Group { workers, next: AtomicUsize::new(0) }
    }
}

#[derive(Clone)]
struct Place {
    handle: ExecutorHandle,
    /// Of everything that runs there; ended by the thread itself, since nobody else can
    /// end a task that hangs.
    scope: Scope,
}

impl Place {
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.scope.spawn_on(&self.handle, task);
    }
}

struct Worker {
    place: Place,
    stop: oneshot::Sender<()>,
    /// Says so when the thread has ended.
    ended: Receiver<()>,
}

thread_local! {
    /// This thread serves connections until the process ends.
    static SERVES: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread serves connections of clients: its executor lasts as long as the process.
pub fn is_serving_thread() -> bool {
    SERVES.get()
}

/// Threads that did not end in time, by export.
pub type StuckThreads = BTreeMap<String, usize>;

impl Workers {
    /// Prepares `count` threads for each of `exports`; 0: one for each CPU. As many as CPUs
    /// are pinned to one each.
    pub fn new(exports: &[&str], count: usize) -> Workers {
        let cpus = allowed_cpus();
        let count = if count == 0 { cpus.len() } else { count };
        let each = count.min(THREADS_MAX / exports.len().max(1)).max(1);
        let exports = exports.iter().map(|name| ((*name).to_owned(), Group::of(each))).collect();
        let (slices, ports) = (BTreeMap::new(), BTreeMap::new());
        let exchanges = Arc::default();
        Workers { exports, slices, exchanges, ports, audits: None, cpus, each }
    }

    /// With these slices of exports among them.
    pub fn with_slices(self, slices: SlicesByProjection) -> Workers {
        let ports = slices.keys().map(|name| (name.clone(), Group::of(1))).collect();
        Workers { slices, ports, ..self }
    }

    /// With the audits of its exports for readers on other machines.
    pub fn with_audits(self, port: AuditPort) -> Workers {
        Workers { audits: Some(Arc::new(port)), ..self }
    }

    /// With what other servers say of limits that are kept together.
    pub fn with_exchanges(self, exchanges: Arc<ShareExchanges>) -> Workers {
        Workers { exchanges, ..self }
    }

    /// Threads that one export may have.
    pub fn each(&self) -> usize {
        self.each
    }

    /// Serves a connection that was let in, on a thread of the export that its client greets with.
    /// A client that names no export of this server is refused here. A task of the calling
    /// executor.
    pub async fn serve(&self, server: &Server, incoming: Box<dyn Incoming>, admission: Admission) {
        let peer = incoming.peer();
        let greeting = dray_rt::timeout(GREETING_MAX, incoming.first_head()).await;
        let what = match greeting {
            Ok(Ok(head)) => return self.serve_greeted(server, incoming, admission, &head).await,
            // A probe of the port, as monitoring makes it.
            Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return log::debug!("{peer} connected and closed the connection");
            }
            Ok(Err(error)) => format!("{peer} does not send the greeting of a client: {error}"),
            Err(_) => format!("{peer} connected and sent nothing"),
        };
        match server.complains(peer) {
            true => log::warn!("{what}"),
            false => log::debug!("{what}"),
        }
    }

    async fn serve_greeted(
        &self,
        server: &Server,
        incoming: Box<dyn Incoming>,
        admission: Admission,
        head: &[u8],
    ) {
        let peer = incoming.peer();
        if let Some(slice) = wanted_slice(head) {
            let other = self.exchanges.serve(&slice, incoming, admission).await;
            let Some((incoming, admission)) = other else { return };
            return self.serve_notes(&slice, incoming, admission);
        }
        if let Some(port) = self.audits.clone().filter(|_| wanted_audit(head).is_some()) {
            return match incoming.establish() {
                Ok(connection) => port.serve(connection, admission).await,
                Err(error) => log::error!("cannot serve a connection of {peer}: {error}"),
            };
        }
        let wanted = wanted_export(head);
        let slice = wanted.as_ref().and_then(|name| self.slice(name));
        let export = wanted.as_deref().map(|name| slices::projection_of(name).unwrap_or(name));
        let group = export.and_then(|name| self.exports.get(name));
        let index = group.map(|group| (group, self.index(group, &*incoming)));
        let server = slice.unwrap_or_else(|| server.clone());
        let serve = async move {
            match incoming.establish() {
                Ok(connection) => server.serve_admitted(connection, admission).await,
                Err(error) => log::error!("cannot serve a connection of {peer}: {error}"),
            }
        };
        let Some((group, index)) = index else { return serve.await };
        match self.place(group, index) {
            Ok(place) => place.spawn(serve),
            Err(error) => log::error!("cannot start a thread for {peer}: {error}"),
        }
    }

    /// What serves an export, if that is a slice that this server can serve.
    fn slice(&self, name: &str) -> Option<Server> {
        self.slices.get(slices::projection_of(name)?)?.server_of(name)
    }

    /// Takes the notes of another server.
    fn serve_notes(&self, slice: &str, incoming: Box<dyn Incoming>, admission: Admission) {
        let peer = incoming.peer();
        let projection = slices::projection_of(slice);
        let found =
            projection.and_then(|name| Some((self.slices.get(name)?, self.ports.get(name)?)));
        let Some((slices, group)) = found else {
            return log::warn!(
                "{peer} brings notes of `{slice}`, which is no slice of this server"
            );
        };
        let Some(served) = slices.served(slice) else {
            return log::debug!("{peer} brings notes of `{slice}`, which is not open yet");
        };
        let serve = async move {
            match incoming.establish() {
                Ok(connection) => served.take_notes(connection, admission).await,
                Err(error) => log::error!("cannot serve a connection of {peer}: {error}"),
            }
        };
        match self.place(group, 0) {
            Ok(place) => place.spawn(serve),
            Err(error) => log::error!("cannot start a thread for {peer}: {error}"),
        }
    }

    /// The worker at the connection's home, which spares wake-ups across CPUs, else the next one.
    fn index(&self, group: &Group, incoming: &dyn Incoming) -> usize {
        let index = match incoming.home_cpu() {
            Some(cpu) => self.cpus.iter().position(|known| *known == cpu).unwrap_or(cpu),
            None => group.next.fetch_add(1, Ordering::Relaxed),
        };
        index % self.each
    }

    /// Where a worker's tasks are started; the worker too, if need be.
    fn place(&self, group: &Group, index: usize) -> io::Result<Place> {
        let mut started = lock(&group.workers[index]);
        if let Some(worker) = &*started {
            return Ok(worker.place.clone());
        }
        let is_pinned = self.each == self.cpus.len() && group.workers.len() == self.each;
        let home = is_pinned.then(|| self.cpus[index]);
        let worker = Worker::start(index, home)?;
        let place = worker.place.clone();
        *started = Some(worker);
        Ok(place)
    }

    /// Ends all threads. One that a file system does not let go has `patience`, and is
    /// then left behind.
    pub fn end(&self, patience: Duration) -> StuckThreads {
        let ending: Vec<_> = self
            .exports
            .iter()
            .chain(&self.ports)
            .flat_map(|(name, group)| group.workers.iter().map(move |worker| (name, worker)))
            .filter_map(|(name, worker)| Some((name, lock(worker).take()?)))
            .map(|(name, worker)| {
                let _ = worker.stop.send(()); // or it has ended by itself
                (name, worker.ended)
            })
            .collect();
        let deadline = dray_rt::now() + patience;
        let mut stuck = StuckThreads::new();
        for (name, ended) in ending {
            let left = deadline - dray_rt::now();
            if ended.recv_timeout(left) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                *stuck.entry(name.clone()).or_default() += 1;
            }
        }
        stuck
    }
}

impl Worker {
    fn start(index: usize, home: Option<usize>) -> io::Result<Worker> {
        let mut executor = Executor::new(DriverKind::Epoll)?;
        let place = Place { handle: executor.handle(), scope: Scope::new() };
        let scope = place.scope.clone();
        let (stop, stopped) = oneshot::channel();
        let (end, ended): (Sender<()>, _) = channel();
        std::thread::Builder::new().name(format!("dray-serve-{index}")).spawn(move || {
            SERVES.set(true);
            if let Some(cpu) = home {
                let _ = CpuSet::only(cpu).pin(); // else it runs anywhere, which is slower only
            }
            let _ = executor.block_on(stopped); // an error too means that it is over
            scope.kill();
            drop(end);
        })?;
        Ok(Worker { place, stop, ended })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
/// CPUs that this process may run on, at least one.
fn allowed_cpus() -> Vec<usize> {
    let cpus: Vec<usize> = CpuSet::allowed().iter().flat_map(CpuSet::iter).collect();
    if cpus.is_empty() { vec![0] } else { cpus }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(workers: &Workers, export: &str, index: usize) -> Place {
        workers.place(&workers.exports[export], index).unwrap()
    }

    #[test]
    fn threads_start_when_they_are_needed_run_and_end() {
        let workers = Workers::new(&["a", "b"], 3);
        assert_eq!(workers.each(), 3);
        let (send, receive) = channel();
        for (export, index) in [("a", 0), ("a", 2), ("b", 1), ("a", 0)] {
            let send = send.clone();
            start(&workers, export, index).spawn(async move {
                send.send(std::thread::current().id()).unwrap();
            });
        }
        let limit = Duration::from_secs(10);
        let ids: Vec<_> = (0..4).map(|_| receive.recv_timeout(limit).unwrap()).collect();
        let different: std::collections::HashSet<_> = ids.iter().collect();
        assert_eq!(different.len(), 3);
        let started =
            |group: &Group| group.workers.iter().filter(|one| lock(one).is_some()).count();
        assert_eq!(workers.exports.values().map(started).collect::<Vec<_>>(), [2, 1]);
        assert!(workers.end(limit).is_empty());
    }

    // proves: P109
    #[test]
    fn a_thread_that_hangs_stops_its_own_export_alone_and_no_end() {
        let workers = Workers::new(&["hung", "well"], 1);
        let (inside, is_inside) = channel();
        let (thaw, frozen) = channel::<()>();
        start(&workers, "hung", 0).spawn(async move {
            inside.send(()).unwrap();
            let _ = frozen.recv();
        });
        is_inside.recv().unwrap();
        let (send, receive) = channel();
        start(&workers, "well", 0).spawn(async move { send.send(()).unwrap() });
        receive.recv_timeout(Duration::from_secs(10)).unwrap();
        // The one that hangs is waited for first, and takes all the patience there is. The other
        // has that time to end, and a busy machine may need it.
        let stuck = workers.end(Duration::from_secs(3));
        assert_eq!(stuck, StuckThreads::from([("hung".to_owned(), 1)]));
        drop(thaw);
    }

    #[test]
    fn many_exports_share_the_limit() {
        let names: Vec<String> = (0..2000).map(|number| number.to_string()).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        assert_eq!(Workers::new(&names, 64).each(), 1);
        assert_eq!(Workers::new(&names[..100], 64).each(), 10);
    }
}
