//! The threads that serve a mount.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;

use dray_core::{FileSystem, Fut, Result};
use dray_rt::sync::watch;
use dray_rt::{DriverKind, Executor, Handle, Ring};

use crate::cpus;
use crate::device::{clone_device, set_nonblocking};
use crate::flight::InFlight;
use crate::front::Worker;
use crate::notify::Notifier;
use crate::options::{Options, Transport, WORKERS_MAX};
use crate::proto::abi::init::OVER_IO_URING;
use crate::session::Session;
use crate::shared::Shared;
use crate::state::State;
use crate::transport::classic;
use crate::transport::ring::{Queues, possible_cpus};

/// Makes the file system of worker `index`. Called on that worker's executor, so that a
/// connection made by it belongs to that thread.
pub type PerThread =
    Arc<dyn Fn(usize, &Handle) -> Fut<'static, Result<Arc<dyn FileSystem>>> + Send + Sync>;

/// The kernel's end of a mount, and what a supervisor keeps for it.
pub struct Device {
    /// The descriptor of /dev/fuse that was mounted.
    pub fd: OwnedFd,
    /// Further descriptors of the same connection; made as needed if there are none. If
    /// there is one for each worker, `fd` itself is read for INIT only. To survive the
    /// daemon's death all of them must be held by somebody else, too.
    pub clones: Vec<OwnedFd>,
    /// What outlives the process.
    pub state: State,
}

impl Device {
    /// A new mount without a supervisor. Errors: those of memfd_create(2).
    pub fn new(fd: OwnedFd) -> io::Result<Device> {
        Ok(Device { fd, clones: Vec::new(), state: State::create()? })
    }
}

/// A mount that is being served.
pub struct Mounted {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<io::Result<()>>>,
    start: Arc<Start>,
}

/// What goes on in a mount.
#[derive(Clone, Debug)]
pub struct Stats {
    /// The transport in use.
    pub transport: Transport,
    /// What was agreed on with the kernel.
    pub session: Session,
    /// Worker threads.
    pub workers: usize,
    /// Files and directories that the kernel knows.
    pub nodes: usize,
    /// Files and directories that are open.
    pub handles: usize,
    /// Requests taken up so far, by operation.
    pub counts: Vec<(&'static str, u64)>,
    /// Requests under way, oldest first.
    pub in_flight: Vec<InFlight>,
}

impl Mounted {
    /// Agrees with the kernel and starts the workers. Errors: those of the agreement, of
    /// the system calls that set up threads, and of `per_thread`.
    pub fn start(
        per_thread: PerThread,
        device: Device,
        mut options: Options,
    ) -> io::Result<Mounted> {
        set_nonblocking(device.fd.as_fd())?;
        let adopted = device.state.initialised();
        if Executor::new(DriverKind::Uring).is_err() {
            options.transport = Transport::Classic; // io_uring is switched off here
        }
        let pinned = worker_cpus(&options);
        let session = Session::agree(device.fd.as_fd(), &device.state, &options)?;
        let descriptors = descriptors(&device, pinned.len())?;
        let fd = Arc::new(device.fd);
        let queues = queues(session, adopted, &fd, &device.state, &options)?;
        let workers = pinned.len();
        let start = Arc::new(Start {
            fd,
            state: device.state,
            options,
            session,
            adopted,
            pinned,
            queues,
            ended: watch::channel(false).0,
            shared: Mutex::new(None),
        });
        let mut threads = Vec::new();
        let (ready, started) = mpsc::channel();
        for (index, descriptor) in descriptors.into_iter().enumerate() {
            let (start, per_thread, ready) = (start.clone(), per_thread.clone(), ready.clone());
            let name = format!("dray-fuse-{index}");
            let body = move || work(index, &start, &per_thread, descriptor, &ready);
            threads.push(std::thread::Builder::new().name(name).spawn(body)?);
        }
        drop(ready);
        for _ in 0..workers {
            started.recv().map_err(|_| io::Error::from_raw_os_error(libc::EIO))??;
        }
        if let Some(queues) = &start.queues {
            queues.open();
        }
        let shared = start.shared().clone().ok_or(io::ErrorKind::Other)?;
        Ok(Mounted { shared, threads, start })
    }

    /// Serves the same file system object on every worker.
    pub fn start_with(
        fs: Arc<dyn FileSystem>,
        device: Device,
        options: Options,
    ) -> io::Result<Mounted> {
        let per_thread: PerThread = Arc::new(move |_, _| {
            let fs = fs.clone();
            Box::pin(async move { Ok(fs) })
        });
        Mounted::start(per_thread, device, options)
    }

    /// For messages to the kernel.
    pub fn notifier(&self) -> Notifier {
        Notifier { device: self.shared.device.clone(), shared: self.shared.clone() }
    }

    /// What goes on, for people.
    pub fn stats(&self) -> Stats {
        self.reporter().stats()
    }

    /// Tells what goes on, from any thread, as long as it is wanted.
    pub fn reporter(&self) -> Reporter {
        Reporter { shared: self.shared.clone(), workers: self.threads.len() }
    }

    /// Stops serving without ending the mount: requests that are under way stay
    /// unanswered, and a successor has them sent again ([`Notifier::resend`]). For an
    /// upgrade in place of a classic mount, whose descriptors somebody else holds, too. A
    /// mount over io_uring may lose requests by it: there the process has to end.
    pub fn stop(self) -> io::Result<()> {
        self.start.ended.send_replace(true);
        self.wait()
    }

    /// Waits until the mount has ended. Errors: the first one that ended a worker.
    pub fn wait(self) -> io::Result<()> {
        let mut result = Ok(());
        for thread in self.threads {
            let ended = thread.join().unwrap_or(Err(io::ErrorKind::Other.into()));
            result = result.and(ended);
        }
        result
    }
}

/// Tells what goes on in a mount.
#[derive(Clone)]
pub struct Reporter {
    shared: Arc<Shared>,
    workers: usize,
}

impl Reporter {
    /// What goes on now.
    pub fn stats(&self) -> Stats {
        Stats {
            transport: match self.shared.session.has(OVER_IO_URING) {
                true => Transport::Uring,
                false => Transport::Classic,
            },
            session: self.shared.session,
            workers: self.workers,
            nodes: self.shared.nodes.count(),
            handles: self.shared.handles.count(),
            counts: self.shared.flights.counts(),
            in_flight: self.in_flight(),
        }
    }

    fn in_flight(&self) -> Vec<InFlight> {
        let mut list = self.shared.flights.list();
        for flight in &mut list {
            flight.path = self.shared.nodes.path(flight.node);
            flight.job = self.shared.identities.job_of(flight.pid);
        }
        list
    }
}

/// What every worker needs to begin.
struct Start {
    fd: Arc<OwnedFd>,
    state: State,
    options: Options,
    session: Session,
    adopted: bool,
    /// The CPU of each worker.
    pinned: Vec<usize>,
    /// The ring's queues, if it is in use.
    queues: Option<Arc<Queues>>,
    /// The mount has ended.
    ended: watch::Sender<bool>,
    shared: Mutex<Option<Arc<Shared>>>,
}

impl Start {
    fn shared(&self) -> std::sync::MutexGuard<'_, Option<Arc<Shared>>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes this thread, that of worker `index`, to its CPU; none where it stays free to
    /// run anywhere. Over a ring every worker has its CPU; without one only where each CPU
    /// has its worker, so that none is busy while another's is not.
    fn home_of(&self, index: usize) -> Option<usize> {
        let cpu = self.pinned[index];
        let wanted = self.queues.is_some() || self.pinned == cpus::allowed();
        (wanted && cpus::pin_to(cpu).is_ok()).then_some(cpu)
    }

    /// What the workers share, made by the first that knows the root.
    fn share(&self, fs: &Arc<dyn FileSystem>) -> Arc<Shared> {
        let mut shared = self.shared();
        let make = || {
            Arc::new(Shared::new(
                self.options.clone(),
                self.session,
                self.fd.clone(),
                &self.state,
                self.adopted,
                fs.info().root,
                self.pinned.len(),
            ))
        };
        shared.get_or_insert_with(make).clone()
    }
}

fn work(
    index: usize,
    start: &Start,
    per_thread: &PerThread,
    descriptor: OwnedFd,
    ready: &mpsc::Sender<io::Result<()>>,
) -> io::Result<()> {
    let kind = if start.queues.is_some() { DriverKind::Uring } else { DriverKind::Epoll };
    // Before anything is connected: the server serves a connection on the CPU that it was
    // made on.
    let home = start.home_of(index);
    let mut executor = match Executor::new(kind) {
        Ok(executor) => executor,
        Err(error) => {
            let _ = ready.send(Err(error)); // whoever started us waits for it
            return Ok(());
        }
    };
    let handle = executor.handle();
    executor.block_on(async {
        let fs = match per_thread(index, &handle).await {
            Ok(fs) => fs,
            Err(error) => {
                let _ = ready.send(Err(error.errno().into()));
                return Ok(());
            }
        };
        let shared = start.share(&fs);
        let worker = Arc::new(Worker { index, shared, fs });
        let rings = start.queues.as_ref().zip(Ring::of(&handle));
        let Some((queues, ring)) = rings else {
            let _ = ready.send(Ok(()));
            return classic::run(worker, descriptor, home, start.ended.subscribe()).await;
        };
        let own = cpus::queues_of(index, &start.pinned, queues.cpus());
        queues.serve(&worker, &ring, &own);
        let _ = ready.send(Ok(()));
        serve_beside_ring(index, start, worker, descriptor).await
    })
}

/// What does not come through the ring is read by the first worker; the others only wait
/// until it finds that the mount has ended.
async fn serve_beside_ring(
    index: usize,
    start: &Start,
    worker: Arc<Worker>,
    descriptor: OwnedFd,
) -> io::Result<()> {
    if index > 0 {
        let mut ended = start.ended.subscribe();
        let _ = ended.wait_for(|ended| *ended).await; // the sender lives as long as `start`
        return Ok(());
    }
    let result = classic::run(worker, descriptor, None, start.ended.subscribe()).await;
    start.ended.send_replace(true);
    result
}

/// The CPUs that workers are pinned to, where they are.
fn worker_cpus(options: &Options) -> Vec<usize> {
    let mut allowed = cpus::allowed();
    match options.workers {
        0 => allowed.truncate(WORKERS_MAX),
        // More than there are CPUs are of no use to a ring, but may be to a classic mount.
        workers if options.transport == Transport::Uring => allowed.truncate(workers),
        workers => allowed = allowed.iter().copied().cycle().take(workers).collect(),
    }
    allowed
}

/// The ring's queues, if it was agreed on. Errors: those of the area's system calls.
fn queues(
    session: Session,
    adopted: bool,
    fd: &Arc<OwnedFd>,
    state: &State,
    options: &Options,
) -> io::Result<Option<Arc<Queues>>> {
    if !session.has(OVER_IO_URING) {
        return Ok(None);
    }
    let queues = Queues::new(fd.clone(), state, possible_cpus()?, options, adopted)?;
    Ok(Some(Arc::new(queues)))
}

/// One descriptor for each worker: the clones if they suffice, else the first one, the
/// clones there are, then new ones.
fn descriptors(device: &Device, workers: usize) -> io::Result<Vec<OwnedFd>> {
    let mut descriptors = Vec::with_capacity(workers);
    if device.clones.len() < workers {
        descriptors.push(device.fd.try_clone()?);
    }
    for clone in device.clones.iter().take(workers - descriptors.len()) {
        set_nonblocking(clone.as_fd())?;
        descriptors.push(clone.try_clone()?);
    }
    while descriptors.len() < workers {
        descriptors.push(clone_device(device.fd.as_fd())?);
    }
    Ok(descriptors)
}
