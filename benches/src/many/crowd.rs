//! Many clients in one process: sessions on a few threads, which all do the same work at the same time.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dray_core::{Context, Fut, OpenFile};
use dray_rpc::client::{ClientOptions, ClientSession, LeaseWish, RemoteFs, SessionMemory};
use dray_rt::sync::mpsc;
use dray_rt::{DriverKind, Executor, Join, random_u64, sleep, spawn, spawn_join};

use crate::many::link::LoopbackLink;
use crate::many::server::EXPORT;
use crate::many::{ManyClientsPlan, spread::Spread};
use crate::{CommandResult, context};

/// Clients that share an address: fewer than a server takes from one.
const CLIENTS_EACH: usize = 50;
/// A client that was refused tries again after up to this time.
const AGAIN: Duration = Duration::from_millis(300);
/// A client that has not been let in by then has failed.
const CONNECT_MAX: Duration = Duration::from_secs(120);

/// One client.
pub struct GroupMember {
    /// The number of the client.
    pub number: usize,
    /// The session of the client.
    pub fs: RemoteFs,
    link: Arc<LoopbackLink>,
    files: Mutex<Vec<Arc<dyn OpenFile>>>,
}

impl GroupMember {
    /// Files that it has open; its own comes first.
    pub fn files(&self) -> Vec<Arc<dyn OpenFile>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Keeps a file open.
    pub fn keep(&self, file: Arc<dyn OpenFile>) {
        self.files.lock().unwrap_or_else(PoisonError::into_inner).push(file);
    }

    /// The files that it has open, which it is to close.
    pub fn give_up_files(&self) -> Vec<Arc<dyn OpenFile>> {
        std::mem::take(&mut *self.files.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The client dies without a word to the server.
    pub fn die(&self) {
        self.link.die();
    }
}

/// What became of one member's part.
#[derive(Clone, Debug, Default)]
pub struct MemberReport {
    /// How long each step took, seconds.
    pub steps: Vec<f64>,
    /// How long all of it took, seconds.
    pub whole: f64,
    /// What went wrong.
    pub failures: Vec<String>,
}

impl MemberReport {
    /// Times a step of it.
    pub async fn step<T>(&mut self, what: impl Future<Output = dray_core::Result<T>>) -> Option<T> {
        let begin = Instant::now();
        let outcome = what.await;
        self.steps.push(begin.elapsed().as_secs_f64());
        outcome.map_err(|error| self.failures.push(error.to_string())).ok()
    }
}

/// What all members did.
#[derive(Clone, Debug, Default)]
pub struct GroupReport(pub Vec<MemberReport>);

impl GroupReport {
    /// Times of all steps of all members, seconds.
    pub fn steps(&self) -> Spread {
        Spread::new(self.0.iter().flat_map(|report| report.steps.iter().copied()).collect())
    }

    /// How long each member took for all of it, seconds.
    pub fn whole(&self) -> Spread {
        Spread::new(self.0.iter().map(|report| report.whole).collect())
    }

    /// What went wrong, each kind with how often.
    pub fn failures(&self) -> Vec<(String, usize)> {
        let mut kinds: Vec<(String, usize)> = Vec::new();
        for failure in self.0.iter().flat_map(|report| &report.failures) {
            match kinds.iter_mut().find(|(kind, _)| kind == failure) {
                Some((_, count)) => *count += 1,
                None => kinds.push((failure.clone(), 1)),
            }
        }
        kinds
    }

    /// How often anything went wrong.
    pub fn failed(&self) -> usize {
        self.0.iter().map(|report| report.failures.len()).sum()
    }
}

type Work = Arc<dyn Fn(Arc<GroupMember>, MemberReport) -> Fut<'static, MemberReport> + Send + Sync>;

enum Order {
    Connect(Range<usize>, Sender<MemberReport>),
    Run(Range<usize>, Work, Sender<MemberReport>),
}

/// A number of clients.
pub struct ClientGroup {
    stations: Vec<mpsc::UnboundedSender<Order>>,
    /// How many there are.
    pub count: usize,
}

/// Work that is under way.
pub struct GroupWork {
    reports: std::sync::mpsc::Receiver<MemberReport>,
}

impl GroupWork {
    /// Waits for its end.
    pub fn wait(self) -> GroupReport {
        GroupReport(self.reports.iter().collect())
    }
}

impl ClientGroup {
    /// A group without clients; `first` is the number of the first client, so that groups differ.
    pub fn new(plan: &ManyClientsPlan, threads: usize, first: usize) -> CommandResult<ClientGroup> {
        let mut stations = Vec::new();
        for index in 0..threads {
            let (sender, mut orders) = mpsc::unbounded_channel();
            let plan = plan.clone();
            let station = move || {
                let Ok(mut executor) = Executor::new(DriverKind::Epoll) else { return };
                executor.block_on(async {
                    let members = Arc::new(Mutex::new(Vec::new()));
                    while let Some(order) = orders.recv().await {
                        spawn(carry_out(
                            order,
                            plan.clone(),
                            (index, threads, first),
                            members.clone(),
                        ));
                    }
                });
            };
            std::thread::Builder::new()
                .name(format!("crowd-{index}"))
                .spawn(station)
                .map_err(context("a thread of the crowd"))?;
            stations.push(sender);
        }
        Ok(ClientGroup { stations, count: 0 })
    }

    /// `count` more clients connect, all at once; a refused client tries again.
    pub fn connect(&mut self, count: usize) -> GroupReport {
        let range = self.count..self.count + count;
        self.count += count;
        let (sender, reports) = channel();
        for station in &self.stations {
            let _ = station.send(Order::Connect(range.clone(), sender.clone())); // it shows as missing
        }
        drop(sender);
        GroupWork { reports }.wait()
    }

    /// Members `which` begin to do `work`, all at once.
    pub fn begin<F>(
        &self,
        which: Range<usize>,
        work: impl Fn(Arc<GroupMember>, MemberReport) -> F + Send + Sync + 'static,
    ) -> GroupWork
    where
        F: Future<Output = MemberReport> + Send + 'static,
    {
        let work: Work = Arc::new(move |member, report| Box::pin(work(member, report)));
        let (sender, reports) = channel();
        for station in &self.stations {
            let _ = station.send(Order::Run(which.clone(), work.clone(), sender.clone())); // as above
        }
        GroupWork { reports }
    }

    /// All do `work`.
    pub fn all<F>(
        &self,
        work: impl Fn(Arc<GroupMember>, MemberReport) -> F + Send + Sync + 'static,
    ) -> GroupReport
    where
        F: Future<Output = MemberReport> + Send + 'static,
    {
        self.begin(0..self.count, work).wait()
    }
}

async fn carry_out(
    order: Order,
    plan: ManyClientsPlan,
    (index, threads, first): (usize, usize, usize),
    members: Arc<Mutex<Vec<Arc<GroupMember>>>>,
) {
    let lock = || members.lock().unwrap_or_else(PoisonError::into_inner);
    match order {
        Order::Connect(range, sender) => {
            let ours = range.filter(|number| number % threads == index);
            let connect = |number| spawn_join(connect_one(plan.clone(), number, first));
            let connecting: Vec<Join<_>> = ours.map(connect).collect();
            for one in connecting {
                let Ok((member, report)) = one.await else { return };
                lock().extend(member);
                let _ = sender.send(report); // nobody has to wait for it
            }
        }
        Order::Run(range, work, sender) => {
            let ours: Vec<_> =
                lock().iter().filter(|member| range.contains(&member.number)).cloned().collect();
            let begin = Instant::now();
            let run = |member| spawn_join(work(member, MemberReport::default()));
            let running: Vec<Join<_>> = ours
                .into_iter()
                .map(run)
                .map(|work| {
                    spawn_join(async move {
                        let mut report = work.await.unwrap_or_default();
                        report.whole = begin.elapsed().as_secs_f64();
                        report
                    })
                })
                .collect();
            for one in running {
                let Ok(report) = one.await else { return };
                let _ = sender.send(report); // as above
            }
        }
    }
}

async fn connect_one(
    plan: ManyClientsPlan,
    number: usize,
    first: usize,
) -> (Option<Arc<GroupMember>>, MemberReport) {
    let link = Arc::new(LoopbackLink::new(plan.address, first + number, CLIENTS_EACH));
    let (begin, mut report) = (Instant::now(), MemberReport::default());
    while begin.elapsed() < CONNECT_MAX {
        let options = ClientOptions {
            export: EXPORT.to_owned(),
            key: plan.key(),
            timeout: None,
            host: format!("node{:05}", first + number),
            replay_bytes: 1 << 20,
            split_min_bytes: ClientOptions::SPLIT_MIN_BYTES,
            caches: false,
            counts_on_one_user: false,
            leases: match plan.leases {
                true => LeaseWish::Yes { callers_are_checked: true, keeps_writes: false },
                false => LeaseWish::No,
            },
            lease_share: None,
            definition: 0,
            group: None,
            aside: None,
            write_back: None,
        };
        match ClientSession::connect(link.clone(), options, SessionMemory::heap()).await {
            Ok(session) => {
                report.whole = begin.elapsed().as_secs_f64();
                let (fs, files) = (RemoteFs::new(session), Mutex::default());
                return (Some(Arc::new(GroupMember { number, fs, link, files })), report);
            }
            Err(error) => report.failures.push(error.to_string()),
        }
        sleep(AGAIN.mul_f64(random_u64() as f64 / u64::MAX as f64)).await;
    }
    report.whole = begin.elapsed().as_secs_f64();
    (None, report)
}

/// A few clients that do a little all the time, to see what others do to them.
pub struct Bystanders {
    crowd: ClientGroup,
    on: Arc<AtomicBool>,
    running: Option<GroupWork>,
}

/// How often each of them asks.
const PAUSE: Duration = Duration::from_millis(10);

impl Bystanders {
    /// `count` clients.
    pub fn new(plan: &ManyClientsPlan, count: usize) -> CommandResult<Bystanders> {
        let mut crowd = ClientGroup::new(plan, 1, 60_000)?;
        crowd.connect(count);
        Ok(Bystanders { crowd, on: Arc::default(), running: None })
    }

    /// The bystanders begin.
    pub fn begin(&mut self) {
        self.on.store(true, Ordering::SeqCst);
        let on = self.on.clone();
        self.running = Some(self.crowd.begin(0..self.crowd.count, move |member, mut report| {
            let on = on.clone();
            async move {
                let (cx, root) = (Context::system(), dray_core::FileSystem::info(&member.fs).root);
                while on.load(Ordering::SeqCst) {
                    let look = dray_core::FileSystem::getattr(&member.fs, &cx, root);
                    report.step(look).await;
                    sleep(PAUSE).await;
                }
                report
            }
        }));
    }

    /// The bystanders end. Answers what each of their calls took.
    pub fn end(&mut self) -> GroupReport {
        self.on.store(false, Ordering::SeqCst);
        self.running.take().map(GroupWork::wait).unwrap_or_default()
    }
}

impl Drop for Bystanders {
    fn drop(&mut self) {
        self.crowd.all(|member, report| async move {
            member.fs.session().goodbye();
            report
        });
    }
}
