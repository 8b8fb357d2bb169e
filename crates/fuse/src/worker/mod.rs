//! The threads that serve a mount.

pub(crate) mod caller;
pub(crate) mod cpus;
pub(crate) mod crew;
pub(crate) mod drop_requests;
pub(crate) mod flight;
pub(crate) mod identity;
pub(crate) mod invalidator;
pub(crate) mod jobs;
pub(crate) mod lock_owners;
pub(crate) mod recalls;
pub(crate) mod shared;
pub(crate) mod versions;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;

use dray_core::{
    FileId, FileSystem, Fut, Pid, Result as FsResult, SessionControl, Stack, TellJobs,
};
use dray_rt::sync::watch;
use dray_rt::{ExecutorHandle, Ring};

use crate::front::Worker;
use crate::mount::agree::{MountAgreement, agree, open};
use crate::mount::choice::NoRing;
use crate::mount::device::{clone_device, set_nonblocking};
use crate::mount::session::KernelSession;
use crate::notify::Notifier;
use crate::options::{Options, Transport};
use crate::state::State;
use crate::state::passthrough::PassthroughStats;
use crate::transport::classic;
use crate::transport::queues::Queues;
use crate::worker::crew::Job;
use crate::worker::flight::InFlight;
use crate::worker::invalidator::drop_soon;
use crate::worker::jobs::JobTable;
use crate::worker::recalls::recalled;
use crate::worker::shared::MountShared;

/// Makes what worker `index` serves. Called on that worker's executor, so that a
/// connection made by it belongs to that thread.
pub type PerThread =
    Arc<dyn Fn(usize, &ExecutorHandle) -> Fut<'static, FsResult<Stack>> + Send + Sync>;

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
pub struct ServedMount {
    reporter: Reporter,
    threads: Vec<JoinHandle<io::Result<()>>>,
    start: Arc<Start>,
}

/// What goes on in a mount.
#[derive(Clone, Debug)]
pub struct Stats {
    /// The transport in use.
    pub transport: Transport,
    /// Why it is the classic one, where a ring was wanted or would do.
    pub no_ring: Option<NoRing>,
    /// What was agreed on with the kernel.
    pub session: KernelSession,
    /// Worker threads.
    pub workers: usize,
    /// Files and directories that the kernel knows.
    pub nodes: usize,
    /// Files and directories that are open.
    pub handles: usize,
    /// Files that the kernel reads by itself.
    pub passthrough: PassthroughStats,
    /// Requests taken up so far, by operation.
    pub counts: Vec<(&'static str, u64)>,
    /// Requests taken up so far, by worker.
    pub taken: Vec<u64>,
    /// Bytes that the kernel read and wrote, as far as they were asked of the mount.
    pub bytes: (u64, u64),
    /// Requests under way, oldest first.
    pub in_flight: Vec<InFlight>,
}

impl ServedMount {
    /// Agrees with the kernel and starts the workers. Errors: those of the agreement, of
    /// the system calls that set up threads, and of `per_thread`.
    pub fn start(
        per_thread: PerThread,
        device: Device,
        options: Options,
    ) -> io::Result<ServedMount> {
        set_nonblocking(device.fd.as_fd())?;
        let Device { fd, clones, state } = device;
        let fd = Arc::new(fd);
        let adopted = state.initialised();
        let MountAgreement { mut session, crew, queues, mut no_ring } =
            agree(&fd, &state, &options)?;
        let descriptors = descriptors(&fd, &clones, crew.cpus.len())?;
        let start = Arc::new(Start {
            fd,
            options,
            session,
            adopted,
            cpus: crew.cpus.clone(),
            carrier: watch::channel(queues.is_none().then_some(Transport::Classic)).0,
            queues,
            ended: watch::channel(false).0,
            shared: Mutex::new(None),
            state,
        });
        let (ready, started) = mpsc::channel();
        let threads = crew.start(jobs(&start, &per_thread, descriptors, ready));
        for _ in 0..threads.len() {
            started.recv().map_err(|_| io::Error::from_raw_os_error(libc::EIO))??;
        }
        let transport = match &start.queues {
            Some(queues) => match open(queues, &start.state)? {
                None => Transport::Uring,
                refused => {
                    (no_ring, session) = (refused, session.without_ring(&start.state));
                    Transport::Classic
                }
            },
            None => Transport::Classic,
        };
        start.carrier.send_replace(Some(transport));
        let shared = start.shared().clone().ok_or(io::ErrorKind::Other)?;
        let workers = threads.len();
        let reporter = Reporter { shared, session, transport, no_ring, workers };
        Ok(ServedMount { reporter, threads, start })
    }

    /// Serves the same file system object, which has no session, on every worker. Errors: those of [`ServedMount::start`].
    pub fn start_with(
        fs: Arc<dyn FileSystem>,
        device: Device,
        options: Options,
    ) -> io::Result<ServedMount> {
        let per_thread: PerThread = Arc::new(move |_, _| {
            let stack = Stack::alone(fs.clone());
            Box::pin(async move { Ok(stack) })
        });
        ServedMount::start(per_thread, device, options)
    }

    /// For messages to the kernel.
    pub fn notifier(&self) -> Notifier {
        let shared = self.reporter.shared.clone();
        Notifier { device: shared.device.clone(), shared }
    }

    #[cfg(test)]
    pub(crate) fn state(&self) -> State {
        self.start.state.clone()
    }

    /// What goes on, for people.
    pub fn stats(&self) -> Stats {
        self.reporter.stats()
    }

    /// Tells what goes on, from any thread, as long as it is wanted.
    pub fn reporter(&self) -> Reporter {
        self.reporter.clone()
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
    shared: Arc<MountShared>,
    session: KernelSession,
    transport: Transport,
    no_ring: Option<NoRing>,
    workers: usize,
}

impl Reporter {
    /// What goes on now.
    pub fn stats(&self) -> Stats {
        Stats {
            transport: self.transport,
            no_ring: self.no_ring,
            session: self.session,
            workers: self.workers,
            nodes: self.shared.nodes.count(),
            handles: self.shared.handles.count(),
            passthrough: self.shared.passthrough.stats(),
            counts: self.shared.flights.counts(),
            taken: self.shared.flights.taken(),
            bytes: self.shared.flights.bytes(),
            in_flight: self.in_flight(),
        }
    }

    /// Where a file was last seen, from the root on and beginning with a slash. None: the kernel does not know
    /// it now, or only a daemon before this one does.
    pub fn path(&self, id: FileId) -> Option<Vec<u8>> {
        self.shared.nodes.find(id).and_then(|node| self.shared.nodes.path(node))
    }

    /// Hands the batch jobs of those of `callers` who have requests under way to `tell`, later and on another
    /// thread.
    pub fn find_jobs(&self, callers: &[Pid], tell: TellJobs) {
        self.shared.find_jobs(callers, tell);
    }

    /// The batch jobs of those who have requests under way, as far as they are known soon.
    pub fn jobs(&self) -> JobTable {
        let callers = self.shared.flights.callers();
        self.shared.jobs.find_soon(callers.into_iter().collect())
    }

    fn in_flight(&self) -> Vec<InFlight> {
        let mut list = self.shared.flights.list();
        for flight in &mut list {
            flight.path = self.shared.nodes.path(flight.node);
        }
        list
    }
}

/// What every worker needs to begin.
struct Start {
    fd: Arc<OwnedFd>,
    state: State,
    options: Options,
    session: KernelSession,
    adopted: bool,
    /// The CPU of each worker.
    cpus: Vec<usize>,
    /// The ring's queues, if it is to be used.
    queues: Option<Arc<Queues>>,
    /// What carries the requests, once that is known.
    carrier: watch::Sender<Option<Transport>>,
    /// The mount has ended.
    ended: watch::Sender<bool>,
    shared: Mutex<Option<Arc<MountShared>>>,
}

impl Start {
    fn shared(&self) -> std::sync::MutexGuard<'_, Option<Arc<MountShared>>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the workers share, made by the first that knows the root.
    fn share(&self, stack: &Stack) -> Arc<MountShared> {
        let mut shared = self.shared();
        let make = || {
            let shared = Arc::new(MountShared::new(
                self.options.clone(),
                self.session,
                self.fd.clone(),
                &self.state,
                self.adopted,
                stack,
                self.cpus.len(),
            ));
            answer_session(&shared);
            shared
        };
        shared.get_or_insert_with(make).clone()
    }

    async fn carrier(&self) -> Transport {
        let mut carrier = self.carrier.subscribe();
        let known = carrier.wait_for(Option::is_some).await; // the sender is ours
        known.ok().and_then(|known| *known).unwrap_or(Transport::Classic)
    }
}

/// Answers what the server asks of its own accord and does what it says, as long as the mount is there.
/// What the workers share holds the session, so the session must not hold it.
fn answer_session(shared: &Arc<MountShared>) {
    let [caching, leased, asked] = [(), (), ()].map(|()| Arc::downgrade(shared));
    shared.control.hear_changes_by(Box::new(move |files| {
        if let Some(shared) = caching.upgrade() {
            drop_soon(&shared, &files);
        }
    }));
    shared.control.hear_recalls_by(Arc::new(move |recall, done| {
        if let Some(shared) = leased.upgrade() {
            recalled(&shared, recall, done);
        }
    }));
    shared.control.find_jobs_by(Box::new(move |callers, tell| match asked.upgrade() {
        Some(shared) => shared.find_jobs(&callers, tell),
        None => tell(Vec::new()),
    }));
}

fn jobs(
    start: &Arc<Start>,
    per_thread: &PerThread,
    descriptors: Vec<OwnedFd>,
    ready: mpsc::Sender<io::Result<()>>,
) -> Vec<Job> {
    let job = |(index, descriptor)| {
        let (start, per_thread, ready) = (start.clone(), per_thread.clone(), ready.clone());
        let job: Job = Box::new(move |mut executor| {
            let handle = executor.handle();
            let working = work(index, &start, &per_thread, descriptor, &ready, &handle);
            executor.block_on(working)
        });
        job
    };
    descriptors.into_iter().enumerate().map(job).collect()
}

async fn work(
    index: usize,
    start: &Start,
    per_thread: &PerThread,
    descriptor: OwnedFd,
    ready: &mpsc::Sender<io::Result<()>>,
    handle: &ExecutorHandle,
) -> io::Result<()> {
    let stack = match per_thread(index, handle).await {
        Ok(stack) => stack,
        Err(error) => {
            let _ = ready.send(Err(error.errno().into())); // the starting thread waits for it
            return Ok(());
        }
    };
    let shared = start.share(&stack);
    if index == 0 && start.adopted {
        shared.handles.attach(&*shared.control);
    }
    let worker = Arc::new(Worker { index, shared, fs: stack.fs });
    if let Some((queues, ring)) = start.queues.as_ref().zip(Ring::of(handle)) {
        let own = cpus::queues_of(index, &start.cpus, queues.cpus());
        queues.serve(&worker, &ring, &own);
    }
    let _ = ready.send(Ok(()));
    match start.carrier().await {
        Transport::Classic => {
            let stop = start.ended.subscribe();
            let control = worker.shared.control.clone();
            let result = classic::run(worker, descriptor, Some(&start.cpus), stop).await;
            if result.is_err() {
                start.ended.send_replace(true); // what it had read only a successor can answer
            } else if index == 0 {
                finish(start, &*control).await;
            }
            result
        }
        Transport::Uring => serve_beside_ring(index, start, worker, descriptor).await,
    }
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
    let control = worker.shared.control.clone();
    let result = classic::run(worker, descriptor, None, start.ended.subscribe()).await;
    if result.is_ok() {
        finish(start, &*control).await;
    }
    start.ended.send_replace(true);
    result
}

/// The mount has ended, and not only this process: what is kept of its writes goes to the server. The first worker has
/// the session.
async fn finish(start: &Start, control: &dyn SessionControl) {
    let is_stopped = *start.ended.borrow();
    if !is_stopped {
        control.finish().await;
    }
}

/// One descriptor for each worker: the clones if they suffice, else the first one, the
/// clones there are, then new ones.
fn descriptors(fd: &OwnedFd, clones: &[OwnedFd], workers: usize) -> io::Result<Vec<OwnedFd>> {
    let mut descriptors = Vec::with_capacity(workers);
    if clones.len() < workers {
        descriptors.push(fd.try_clone()?);
    }
    for clone in clones.iter().take(workers - descriptors.len()) {
        set_nonblocking(clone.as_fd())?;
        descriptors.push(clone.try_clone()?);
    }
    while descriptors.len() < workers {
        descriptors.push(clone_device(fd.as_fd())?);
    }
    Ok(descriptors)
}
