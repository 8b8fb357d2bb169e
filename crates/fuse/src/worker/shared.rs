//! What all workers of a mount share.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dray_core::{FileType, NodeId, Pid, SessionControl, Stack, TellJobs};

use crate::front::cache_mode::CacheMode;
use crate::front::removed::RemovedDirectories;
use crate::front::undoing::FailedWrites;
use crate::mount::session::KernelSession;
use crate::options::Options;
use crate::proto::abi::init;
use crate::state::State;
use crate::state::capabilities::Capabilities;
use crate::state::changes::RecentChanges;
use crate::state::handles::Handles;
use crate::state::kernel_listings::KernelListings;
use crate::state::kernel_pages::KernelPages;
use crate::state::nodes::Nodes;
use crate::state::passthrough::Passthrough;
use crate::state::published::PublishedAnswers;
use crate::state::stale_retries::StaleRetries;
use crate::worker::flight::Flights;
use crate::worker::identity::CallerIdentities;
use crate::worker::invalidator::Invalidator;
use crate::worker::jobs::{BatchJobs, JobTable};
use crate::worker::lock_owners::LockOwners;
use crate::worker::versions::Versions;

pub(crate) struct MountShared {
    pub(crate) options: Options,
    /// How long the kernel may believe what.
    pub(crate) mode: CacheMode,
    pub(crate) session: KernelSession,
    /// The session of the file system below.
    pub(crate) control: Arc<dyn SessionControl>,
    /// This mount, as the server knows it.
    pub(crate) node: NodeId,
    pub(crate) device: Arc<OwnedFd>,
    pub(crate) nodes: Nodes,
    pub(crate) handles: Handles,
    pub(crate) identities: CallerIdentities,
    pub(crate) flights: Flights,
    pub(crate) jobs: BatchJobs,
    pub(crate) invalidator: Arc<Invalidator>,
    pub(crate) lock_owners: LockOwners,
    pub(crate) versions: Versions,
    /// Of files under leases.
    pub(crate) pages: KernelPages,
    pub(crate) listings: KernelListings,
    /// Which files the kernel reads by itself.
    pub(crate) passthrough: Arc<Passthrough>,
    pub(crate) capabilities: Capabilities,
    pub(crate) changes: RecentChanges,
    /// What the kernel was given under leases.
    pub(crate) published: PublishedAnswers,
    /// What the kernel may undo.
    pub(crate) failed_writes: FailedWrites,
    pub(crate) removed: RemovedDirectories,
    pub(crate) stale_retries: StaleRetries,
    /// A task looks after callers.
    pub(crate) looks_after: AtomicBool,
}

impl MountShared {
    pub(crate) fn new(
        options: Options,
        session: KernelSession,
        device: Arc<OwnedFd>,
        state: &State,
        adopted: bool,
        stack: &Stack,
        workers: usize,
    ) -> MountShared {
        let nodes = Nodes::new(state.clone(), stack.fs.info().root);
        let mode = CacheMode::of(&options, session.has(init::HAS_EXPIRE_ONLY));
        if mode.names_may_change() {
            nodes.track_bindings();
        }
        let (published, pages) = (PublishedAnswers::default(), KernelPages::default());
        let listings = KernelListings::new(adopted);
        let handles = Handles::new(state.clone());
        if adopted && mode.is_leased() {
            published.assume_names();
            // What a predecessor knew of them nobody knows.
            let open = handles.ids().into_iter().filter_map(|id| nodes.find(id));
            open.for_each(|node| match nodes.type_of(node) {
                Some(FileType::Directory) => listings.inherited(node),
                _ => _ = pages.opened(node),
            });
        }
        let passthrough = Passthrough::new(device.clone(), session.has(init::PASSTHROUGH));
        if adopted && passthrough.is_agreed() {
            // Which of them read copies, and which, the predecessor knew.
            let open = handles.ids().into_iter().filter_map(|id| nodes.find(id));
            let open = open.filter(|node| nodes.type_of(*node) != Some(FileType::Directory));
            open.collect::<Vec<u64>>().into_iter().for_each(|node| {
                passthrough.inherited(node);
                nodes.divert(node);
            });
        }
        let lock_owners = match adopted {
            true => LockOwners::of_predecessor(&nodes, stack.session.lock_owners()),
            false => LockOwners::default(),
        };
        MountShared {
            identities: CallerIdentities::new(!options.kernel_checks_permissions()),
            options,
            mode,
            session,
            control: stack.session.clone(),
            node: stack.session.node(),
            device,
            nodes,
            handles,
            flights: Flights::new(workers),
            jobs: BatchJobs::default(),
            invalidator: Arc::default(),
            lock_owners,
            versions: Versions::default(),
            pages,
            listings,
            passthrough: Arc::new(passthrough),
            capabilities: Capabilities::default(),
            changes: RecentChanges::default(),
            published,
            failed_writes: FailedWrites::new(adopted),
            removed: RemovedDirectories::default(),
            stale_retries: StaleRetries::new(state.clone(), adopted),
            looks_after: AtomicBool::new(false),
        }
    }

    /// Hands the jobs of those of `callers` who have requests under way to `tell`, later and on
    /// another thread.
    pub(crate) fn find_jobs(&self, callers: &[Pid], tell: TellJobs) {
        let mut known = self.flights.callers();
        known.retain(|caller| callers.contains(caller));
        let then = move |jobs: JobTable| tell(jobs.into_iter().collect());
        self.jobs.find(known.into_iter().collect(), then);
    }
}
