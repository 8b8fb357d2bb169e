//! The slices of projections with failover that this server can serve. Of some it is the home, and others it
//! takes over when another server dies.
//!
//! All slices of a projection are served from one opened file system. They begin when that has been
//! opened, since who cannot serve is no member. docs/adr/0042-failover.md has the reasons.

pub(crate) mod administration;
mod removed;
mod running;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_cluster::{EtcdMembership, EtcdOptions};
use dray_layers::placement::ClusterOptions;
use dray_rpc::server::{Export, MemoryJournal, PageCacheId, Server, ServerNumber, ServerOptions};
use dray_rt::{DriverKind, Executor, timeout};

use crate::error::{ErrorContext, Failure};
use crate::serve::plan::ServePlan;
use crate::serve::projections::ServedProjection;
pub use removed::ServedSince;
use running::RunningSlices;
pub use running::ServedSlice;
pub(in crate::serve) use running::way_to;

/// The start waits so long for the others to say whether this server may be one of them.
const JOIN_MAX: Duration = Duration::from_millis(700);
/// In the state directory: what the slices of each projection have there.
const STATE_NAME: &str = "slices";

/// The slices of each projection that has any, by the projection's name.
pub type SlicesByProjection = BTreeMap<String, Arc<ProjectionSlices>>;

/// Makes the export with this name: what all of them share is in it.
pub type ExportMaker = Box<dyn Fn(&str) -> Export + Send + Sync>;

/// The projection of which an export is a slice, by their names; none: it is no slice.
pub fn projection_of(export: &str) -> Option<&str> {
    export.split_once('/').map(|(projection, _)| projection)
}

/// A slice, by its two servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SlicePair {
    home: usize,
    successor: usize,
}

impl SlicePair {
    /// The slices that server `me` of `servers` can serve.
    fn all_of(me: usize, servers: usize) -> impl Iterator<Item = SlicePair> {
        let others = (0..servers).filter(move |other| *other != me);
        others.flat_map(move |other| {
            [SlicePair { home: me, successor: other }, SlicePair { home: other, successor: me }]
        })
    }

    fn short_name(self) -> String {
        format!("{}.{}", self.home, self.successor)
    }

    fn other(self, me: usize) -> usize {
        if self.home == me { self.successor } else { self.home }
    }
}

/// The slices of one projection at this server.
pub struct ProjectionSlices {
    projection: Arc<ServedProjection>,
    cluster: ClusterOptions,
    options: ServerOptions,
    /// Of other servers that bring notes, where there is no key.
    allow: Vec<dray_rpc::server::Allow>,
    state: PathBuf,
    /// Of the machine.
    boot: u128,
    /// Tells clients to come again.
    starting: Server,
    running: Mutex<Option<Arc<RunningSlices>>>,
}

/// The slices of all projections of this plan. `options`: of the server, with `state` as its state directory.
pub fn of_plan(
    plan: &ServePlan,
    options: &ServerOptions,
    (server, state): (&Server, &Path),
) -> SlicesByProjection {
    let slices = |export: &crate::serve::export::ExportPlan| {
        let projection = export.projection.as_ref()?;
        let cluster = projection.definition.cluster.clone()?;
        let pool = server.pool_of(&export.name).unwrap_or_else(|| options.pool.clone());
        let options = ServerOptions { pool, ..options.clone() };
        let starting = awaiting(projection, &options);
        let slices = ProjectionSlices {
            projection: projection.clone(),
            cluster,
            options,
            allow: export.allow.clone(),
            state: state.to_owned(),
            boot: plan.boot,
            starting,
            running: Mutex::default(),
        };
        Some((export.name.clone(), Arc::new(slices)))
    };
    plan.exports.iter().filter_map(slices).collect()
}

fn awaiting(projection: &ServedProjection, options: &ServerOptions) -> Server {
    let name = &projection.definition.name;
    let pairs = SlicePair::all_of(projection.position, projection.definition.servers.len());
    let names: Vec<String> = pairs.map(|pair| format!("{name}/{}", pair.short_name())).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    // It lends nothing, and a pool can be divided once.
    let pool = dray_fabric::BufferPool::new(0, 0);
    let options = ServerOptions { pool, ..options.clone() };
    Server::awaiting(options, &names, Arc::new(MemoryJournal::default()))
}

impl ProjectionSlices {
    fn lock(&self) -> MutexGuard<'_, Option<Arc<RunningSlices>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn running(&self) -> Option<Arc<RunningSlices>> {
        self.lock().clone()
    }

    fn name(&self) -> &str {
        &self.projection.definition.name
    }

    /// A slice by the name of its export, once it has begun.
    pub fn served(&self, export: &str) -> Option<Arc<ServedSlice>> {
        self.running()?.slice(export)
    }

    /// What clients of a slice are to be given to. None: it is no slice of this server.
    pub fn server_of(&self, export: &str) -> Option<Server> {
        let (_, short) = export.split_once('/')?;
        let (me, servers) = (self.projection.position, self.projection.definition.servers.len());
        SlicePair::all_of(me, servers).find(|pair| pair.short_name() == short)?;
        let served = self.served(export);
        Some(served.map_or_else(|| self.starting.clone(), |served| served.slice.server()))
    }

    /// The servers of the slices that are served here.
    pub fn servers(&self) -> Vec<Server> {
        let Some(running) = self.running() else { return Vec::new() };
        let served = running.slices().filter(|served| served.slice.is_primary());
        served.map(|served| served.slice.server()).collect()
    }

    /// All slices that this server can serve, once they have begun.
    pub fn slices(&self) -> Vec<Arc<ServedSlice>> {
        self.running().map_or_else(Vec::new, |running| running.slices().cloned().collect())
    }

    /// Where the servers agree on who serves what, once the slices have begun.
    pub fn membership(&self) -> Option<Arc<EtcdMembership>> {
        Some(self.running()?.membership.clone())
    }

    /// Begins to serve them, from what `maker` makes. Errors: the state directory cannot be used, or the
    /// other servers refuse this one.
    pub fn begin(&self, (maker, page_cache): (ExportMaker, PageCacheId)) -> Result<(), Failure> {
        let membership = self.join()?;
        let running = RunningSlices::begin(self, membership, (maker, page_cache))?;
        *self.lock() = Some(running);
        Ok(())
    }

    /// Becomes a member, now or when etcd can be reached.
    fn join(&self) -> Result<Arc<EtcdMembership>, Failure> {
        let definition = &self.projection.definition;
        let name = self.name();
        let options = EtcdOptions {
            etcd: self.cluster.etcd.clone(),
            ttl: self.cluster.ttl,
            projection: name.to_owned(),
            fingerprint: definition.fingerprint(),
            definition: definition.canonical(),
            me: ServerNumber(self.projection.position as u16),
            server: definition.servers[self.projection.position].clone(),
            holder: holder(&self.state),
        };
        let doing = || format!("cannot start the thread that speaks to etcd for `{name}`");
        let membership = Arc::new(EtcdMembership::start(options).doing(doing)?);
        let mut executor =
            Executor::new(DriverKind::Epoll).doing(|| "cannot start an executor".into())?;
        match executor.block_on(timeout(JOIN_MAX, membership.joined())) {
            Ok(Ok(())) => Ok(membership),
            Ok(Err(refusal)) => Err(Failure::new(refusal.to_string())),
            Err(_) => {
                log::error!(
                    "projection `{name}`: etcd does not answer: this server serves nothing of it until it \
                     does; clients wait, or go to other servers"
                );
                Ok(membership)
            }
        }
    }

    /// Serves them no more, and lets other servers have them at once. Waits until what was under way is
    /// answered by nobody.
    pub fn end(&self) {
        let Some(running) = self.lock().take() else { return };
        running.end();
    }

    /// The same at the end of the process: hands over what can be, so that nothing is lost.
    pub async fn leave(&self) {
        let Some(running) = self.running() else { return };
        running.leave().await;
    }
}

/// Names a state directory among all machines.
fn holder(state: &Path) -> String {
    let machine = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let state = std::fs::canonicalize(state).unwrap_or_else(|_| state.to_owned());
    format!("{}:{}", machine.trim(), state.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_of_three_can_serve_four_slices() {
        let names: Vec<String> = SlicePair::all_of(1, 3).map(SlicePair::short_name).collect();
        assert_eq!(names, ["1.0", "0.1", "1.2", "2.1"]);
        assert!(SlicePair::all_of(1, 3).all(|pair| pair.other(1) != 1));
        assert_eq!(projection_of("scratch/1.2"), Some("scratch"));
        assert_eq!(projection_of("scratch"), None);
    }
}
