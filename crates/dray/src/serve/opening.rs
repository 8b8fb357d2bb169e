//! Opens the exports, each on a thread of its own. A file system that hangs when the server starts
//! delays its own export and no other.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dray_backends::backend::{Backend, BackendResources, DescriptorStore, FoundBackend, Squash};
use dray_core::{CallAdmission, FileSystem, FsUuid};
use dray_layers::aggregate::{Aggregate, PendingEra};
use dray_layers::faults::Fault;
use dray_layers::{ObservedExport, observe_export_by_project};
use dray_rpc::server::{Export, ExportLost, PageCacheId, Server, StateLoss};
use dray_rt::{DriverKind, Executor};

use crate::error::{ErrorContext, Failure};
use crate::serve::aggregation::{PendingFile, aggregate};
use crate::serve::descriptor_store::DescriptorStoreClient;
use crate::serve::descriptors::Descriptors;
use crate::serve::export::ExportPlan;
use crate::serve::export_state::{DeathNotice, ExportState, HoldReason};
use crate::serve::fs_identities::IdentityNote;
use crate::serve::left_behind;
use crate::serve::observers;
use crate::serve::own_disk::{self, DiskLock};
use crate::serve::slices::ProjectionSlices;
use crate::serve::state::{ExportIdentity, StateDir};

/// The start waits so long for exports. What is wrong with one that answers within that time
/// ends the start; the others are served without those that do not answer.
const START_MAX: Duration = Duration::from_secs(1);

/// How often is looked whether a former server has gone.
const FORMER_LOOK: Duration = Duration::from_millis(100);

/// An export that could not be opened later than that is tried again after this time.
const AGAIN: Duration = Duration::from_secs(5);

/// How often an export that is held back looks whether what it waits for is there.
const HELD_AGAIN: Duration = Duration::from_millis(500);

/// Calls that are still in what an export was on are reported when they have lasted so long.
const FORMER_MAX: Duration = Duration::from_secs(5);

/// The state directory, until the server gives it up at its end: no thread that hangs keeps it.
pub type SharedState = Arc<Mutex<Option<StateDir>>>;

/// One export to open.
pub struct ExportOpener {
    pub plan: ExportPlan,
    pub faults: Vec<Fault>,
    pub exported: Arc<ExportState>,
    pub state: SharedState,
    pub descriptor_store: Option<Arc<DescriptorStoreClient>>,
    pub descriptors: Descriptors,
    pub server: Server,
    /// The slices of the projection that the export is, if it has any.
    pub slices: Option<Arc<ProjectionSlices>>,
    pub loss: StateLoss,
    /// The start of the machine.
    pub boot: u128,
    /// Held while the export is open, where a projection has a disk of this server's own.
    pub own_disk: Mutex<Option<DiskLock>>,
}

/// Opens all of them. Errors: what is wrong with one whose file system has answered. Those
/// that have not are opened when they do, whenever that is.
pub fn open_all(openings: &[Arc<ExportOpener>]) -> Result<(), Failure> {
    let mut late: Vec<Arc<ExportState>> = Vec::new();
    let (report, outcomes) = channel();
    for opening in openings {
        late.push(opening.exported.clone());
        let (opening, report) = (opening.clone(), report.clone());
        std::thread::Builder::new()
            .name("dray-open".into())
            .spawn(move || opening.run(&report))
            .doing(|| "cannot start a thread that opens an export".into())?;
    }
    drop(report);
    wait_for_all(&outcomes)?;
    late.retain(|exported| exported.starting().is_some_and(|one| one.trouble.is_none()));
    for exported in late {
        log::error!(
            "export `{}` is not open yet: {}; it opens by itself, and clients wait; other exports \
             are served",
            exported.name,
            exported.why_late()
        );
    }
    Ok(())
}

fn wait_for_all(outcomes: &Receiver<Result<(), Failure>>) -> Result<(), Failure> {
    let deadline = dray_rt::now() + START_MAX;
    loop {
        match outcomes.recv_timeout(deadline - dray_rt::now()) {
            Ok(outcome) => outcome?,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return Ok(()),
        }
    }
}

/// What serves an export, before the layers are around it.
struct Below {
    backend: Arc<dyn Backend>,
    /// To what its pending data have to belong.
    era: PendingEra,
    /// Set when it has died.
    lost: Arc<AtomicBool>,
}

/// What an export is made of, whatever it is called.
pub(super) struct ExportStack {
    fs: Arc<dyn FileSystem>,
    admission: Option<Arc<dyn CallAdmission>>,
    lost: Arc<AtomicBool>,
}

/// Why an export is not opened now.
pub(super) struct OpenFailure {
    failure: Failure,
    /// Something else has to be at its place first.
    held: Option<Box<HoldReason>>,
}

impl From<Failure> for OpenFailure {
    fn from(failure: Failure) -> OpenFailure {
        OpenFailure { failure, held: None }
    }
}

impl OpenFailure {
    pub(super) fn hold(message: String, held: HoldReason) -> OpenFailure {
        OpenFailure { failure: Failure::new(message), held: Some(Box::new(held)) }
    }
}

impl ExportOpener {
    /// To its good end, or until the process ends.
    fn run(self: &Arc<Self>, report: &Sender<Result<(), Failure>>) {
        let lasted = self.open_at_last(self.loss, Some(report));
        if lasted > START_MAX {
            log::warn!("export `{}` is open after {} s", self.exported.name, lasted.as_secs());
        }
    }

    /// Tries until the export is open, and answers how long that took.
    fn open_at_last(
        self: &Arc<Self>,
        loss: StateLoss,
        report: Option<&Sender<Result<(), Failure>>>,
    ) -> Duration {
        // The start may have gone on without this outcome.
        let say = |outcome| report.map(|report| report.send(outcome));
        loop {
            let OpenFailure { failure, held } = match self.open(loss) {
                Ok(()) => {
                    let lasted = self.exported.opened();
                    let _ = say(Ok(()));
                    return lasted;
                }
                Err(hindrance) => hindrance,
            };
            self.exported.opening_ended();
            let is_held = held.is_some();
            let new = self.exported.failed(&failure.message, held.map(|held| *held));
            let late = self.exported.starting().is_some_and(|one| one.since > START_MAX);
            match is_held {
                true if new => log::error!("{}", failure.message),
                false if new && (late || report.is_none()) => {
                    log::error!("{}; trying again until it works", failure.message);
                }
                _ => {}
            }
            // One that is held back keeps no other export from being served.
            let _ = say(if is_held { Ok(()) } else { Err(failure) });
            std::thread::sleep(if is_held { HELD_AGAIN } else { AGAIN });
        }
    }

    fn open(self: &Arc<Self>, loss: StateLoss) -> Result<(), OpenFailure> {
        let mut executor =
            Executor::new(DriverKind::Epoll).doing(|| "cannot start an executor".into())?;
        let below = self.below()?;
        self.wait_for_former()?;
        let backend = below.backend.clone();
        let stack = self.stack(below, &mut executor)?;
        let mut export = self.export(&self.plan.name, &stack);
        let Some(slices) = &self.slices else {
            export.upper_leases = backend.upper_leases();
            self.watch_outside(&*backend, &export);
            let opened = executor.block_on(self.server.open(export, loss));
            return opened.map_err(|ExportLost| self.died());
        };
        let opener = self.clone();
        let maker = move |slice: &str| {
            // Before the clients of another server open their files here.
            if let Err(error) = backend.find_removed() {
                log::error!("slice {slice}: files that were removed while open are lost: {error}");
            }
            opener.export(slice, &stack)
        };
        let page_cache = self.page_cache()?;
        slices.begin((Box::new(maker), page_cache))?;
        // Sessions are those of the slices: nothing of this one is taken up again.
        export.definition_only = true;
        let opened = executor.block_on(self.server.open(export, StateLoss::Nothing));
        opened.map_err(|ExportLost| {
            slices.end();
            self.died()
        })
    }

    /// Leases end with changes beside dray, as far as what is below tells of these.
    fn watch_outside(&self, backend: &dyn Backend, export: &Export) {
        if !export.may_lease() {
            return;
        }
        if let Err(why) = backend.watch_outside(export.on_outside_changes()) {
            log::warn!(
                "export `{}`: changes beside dray are not noticed: {why}; clients with leases may not see them",
                self.plan.name
            );
        }
    }

    /// Where writes are kept that are not synced.
    fn page_cache(&self) -> Result<PageCacheId, Failure> {
        let dir = self.exported.path();
        let metadata = std::fs::metadata(&dir).doing(|| self.cannot())?;
        Ok(PageCacheId::of(self.boot, metadata.dev()))
    }

    /// Takes the export away from its clients, as if the server had died, and opens it again once
    /// it may be. That is at once, if what it was made on is still there.
    pub fn withdraw(self: &Arc<Self>) -> Result<(), Failure> {
        let opening = self.clone();
        let name = "dray-open".into();
        let thread = std::thread::Builder::new().name(name).spawn(move || opening.open_anew());
        thread.doing(|| format!("cannot start a thread that opens `{}` anew", self.plan.name))?;
        Ok(())
    }

    fn open_anew(self: &Arc<Self>) {
        if !self.exported.closed() {
            return; // another one is at it
        }
        let name = &self.plan.name;
        if let Some(slices) = &self.slices {
            slices.end(); // other servers serve them meanwhile
        }
        let Some(withdrawn) = self.server.withdraw(name, self.loss) else { return };
        let begun = dray_rt::now();
        while withdrawn.is_in_use() {
            if begun.elapsed() > FORMER_MAX {
                let why = format!(
                    "export `{name}` is opened again when the calls in its former file system have \
                     ended; clients wait; other exports are served"
                );
                if self.exported.failed(&why, None) {
                    log::error!("{why}");
                }
            }
            std::thread::sleep(FORMER_LOOK);
        }
        self.give_up_own_disk();
        let lasted = self.open_at_last(withdrawn.loss, None);
        let dir = self.exported.dir();
        log::warn!("export `{name}` is served again from {dir} after {} s", lasted.as_secs());
    }

    /// Waits until no former server is in the file system with a change that it may still make.
    fn wait_for_former(&self) -> Result<(), Failure> {
        let name = &self.plan.name;
        let mut reported = false;
        loop {
            let dir = self.with_state(|state| state.dir().to_owned())?;
            let Some(former) = left_behind::of(&dir, name) else { return Ok(()) };
            if !std::mem::replace(&mut reported, true) {
                let why = format!(
                    "export `{name}` is opened when the former server (process {former}) has ended: \
                     it may still change files there"
                );
                log::error!("{why}; clients wait; other exports are served");
                self.exported.failed(&why, None);
            }
            std::thread::sleep(FORMER_LOOK);
        }
    }

    /// Opens what serves the export.
    fn below(&self) -> Result<Below, OpenFailure> {
        let plan = &self.plan;
        let found = self.find()?;
        let dir = found.dir().to_owned();
        let identity = self.identity_to_clients(&*found)?;
        self.prepare_own_disk(&*found)?;
        let lost = Arc::new(AtomicBool::new(false));
        let exported = Arc::downgrade(&self.exported);
        let on_death = DeathNotice { lost: lost.clone(), exported };
        let shared_ids = plan.projection.as_ref().is_some_and(|projection| projection.shares_ids());
        let resources = BackendResources {
            uuid: identity.uuid,
            id_key: identity.key,
            shared_ids,
            state_file: self.state_file()?,
            descriptor_store: self
                .descriptor_store
                .clone()
                .map(|descriptor_store| descriptor_store as Arc<dyn DescriptorStore>),
            keeps_removed: plan
                .projection
                .as_ref()
                .is_some_and(|projection| projection.definition.failover),
            open_descriptors_max: self.descriptors.files_of_each,
            inode_cache_max: self.descriptors.inodes_of_each,
            on_death: Arc::new(on_death),
        };
        let backend = found
            .open(resources)
            .map_err(|error| Failure::new(format!("{}: {error}", self.cannot())))?;
        for caveat in backend.caveats() {
            log::warn!("export `{}`: {caveat}", plan.name);
        }
        if shared_ids {
            self.check_shared_ids(&*backend, &identity)?;
        }
        self.exported.answered(&dir, backend.clone());
        let era = PendingEra { boot: self.boot, uuid: identity.uuid };
        Ok(Below { backend, era, lost })
    }

    /// Puts the export's stack together: observers over what serves it.
    fn stack(&self, below: Below, executor: &mut Executor) -> Result<ExportStack, Failure> {
        let Below { backend, era, lost } = below;
        let fs = self.aggregated(backend, era, &lost, executor)?;
        let observers = observers::of(self, &fs)?;
        let ObservedExport { fs, admission } =
            observe_export_by_project(fs, observers, Some(self.exported.qos.projects()));
        let admission = Some(self.exported.qos.admission(admission));
        Ok(ExportStack { fs, admission, lost })
    }

    /// The export, or a slice of it, over that stack.
    fn export(&self, name: &str, stack: &ExportStack) -> Export {
        let plan = &self.plan;
        let mut export = Export::new(name, stack.fs.clone(), plan.allow.clone());
        export.admission = stack.admission.clone();
        export.insecure = plan.insecure;
        export.leases = plan.leases;
        export.write_leases = plan.write_leases;
        export.lock_leases = plan.lock_leases;
        export.writes_late = plan.aggregation.merge_bytes > 0;
        export.one_user = matches!(plan.squash, Squash::All(..));
        export.squashes = plan.squash != Squash::None;
        export.definition =
            plan.projection.as_ref().map(|projection| Arc::new(projection.for_clients()));
        export.gives_object_ids =
            plan.projection.as_ref().is_some_and(|projection| projection.is_home());
        match self.slices {
            Some(_) => export.over_what_may_be_lost(stack.lost.clone()),
            None => export.that_may_be_lost(stack.lost.clone()),
        }
    }

    /// The file system with read-ahead and merged writes, if they are on.
    fn aggregated(
        &self,
        fs: Arc<dyn FileSystem>,
        era: PendingEra,
        lost: &Arc<AtomicBool>,
        executor: &mut Executor,
    ) -> Result<Arc<dyn FileSystem>, Failure> {
        let export = &self.plan.name;
        let path = self.with_state(|state| state.dir().join(format!("pending-{export}")))?;
        let pending = PendingFile { export, path: &path, era };
        let layer = aggregate(self.plan.aggregation, &pending, &fs, lost, executor)?;
        self.exported.aggregates(layer.as_ref());
        Ok(layer.map_or(fs, |layer: Arc<Aggregate>| layer))
    }

    pub(super) fn cannot(&self) -> String {
        format!("cannot export {} as `{}`", self.plan.dir.display(), self.plan.name)
    }

    /// Does something with the state directory, as long as the server has it.
    pub(super) fn with_state<T>(&self, work: impl FnOnce(&StateDir) -> T) -> Result<T, Failure> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(work(state.as_ref().ok_or_else(|| Failure::new("the server is ending"))?))
    }

    /// Where the backend notes what must outlive the server, such as ids of files.
    fn state_file(&self) -> Result<PathBuf, Failure> {
        self.with_state(|state| state.dir().join(format!("paths-{}", self.plan.name)))
    }

    /// The identity of the export of what was found. It is the same as long as the export is on
    /// what it was made on.
    fn identity(&self, found: &dyn FoundBackend) -> Result<ExportIdentity, OpenFailure> {
        let Some(found_on) = found.identity() else { return Ok(ExportIdentity::random()) };
        let dir = found.dir();
        let (exports, fs_identities) = self.with_state(|state| {
            self.warn_of_state_within(state, dir);
            (state.exports(), state.fs_identities())
        })?;
        self.check_identity(found, (&exports, &fs_identities))?;
        let identity = exports.identity(dir)?;
        let noted = IdentityNote { identity: found_on.clone(), boot: self.boot };
        fs_identities.note(dir, &self.plan.dir, &noted)?;
        Ok(identity)
    }

    /// The same, as clients see it: a projection is one file system at all of its servers.
    fn identity_to_clients(&self, found: &dyn FoundBackend) -> Result<ExportIdentity, OpenFailure> {
        let own = self.identity(found)?;
        let Some(projection) = &self.plan.projection else { return Ok(own) };
        let uuid = projection.definition.fs_uuid();
        let key = match projection.shares_ids() {
            true => found
                .shared_id_key()
                .map_err(|why| Failure::new(format!("{}: {why}", self.cannot())))?
                .unwrap_or_else(|| key_of_all(uuid)),
            false => own.key,
        };
        Ok(ExportIdentity { uuid, key })
    }

    /// Whether other servers find the files of `backend`, and clients can make up no ids. Ids that are learned
    /// lead to nothing but names beneath the directory, and need no secret for that.
    fn check_shared_ids(
        &self,
        backend: &dyn Backend,
        identity: &ExportIdentity,
    ) -> Result<(), Failure> {
        let is_secret = identity.key != key_of_all(identity.uuid);
        match (backend.has_shared_ids(), is_secret, backend.info().learns_ids()) {
            (false, _, _) => Err(self.no_shared_ids()),
            (true, false, false) => Err(Failure::new(format!(
                "{}: the servers of a projection sign ids of files by a secret in an attribute `trusted.*` of \
                 the directory; the file system below has no such attributes",
                self.cannot()
            ))),
            (true, false, true) => {
                log::warn!(
                    "export `{}`: the file system below has no attributes `trusted.*` to keep a secret in: \
                     who has the key of the mounts can reach files by guessed inode numbers, in directories \
                     that are closed to him",
                    self.plan.name
                );
                Ok(())
            }
            (true, true, _) => Ok(()),
        }
    }

    /// Makes ready what a projection over servers with their own disks is served from. Its identity has been
    /// checked before, so that nothing is made where a disk is not mounted.
    fn prepare_own_disk(&self, found: &dyn FoundBackend) -> Result<(), OpenFailure> {
        let Some(projection) = self.plan.projection.as_ref().filter(|one| one.has_own_disks())
        else {
            return Ok(());
        };
        let cannot = |why| Failure::new(format!("{}: {why}", self.cannot()));
        if projection.is_home() {
            found.shared_id_key().map_err(cannot)?; // attributes like those of the stubs can be kept
        }
        self.give_up_own_disk();
        self.wait_for_former()?; // it may still have the lock
        let lock = own_disk::prepare(found.dir(), projection, self.plan.squash).map_err(cannot)?;
        *self.own_disk.lock().unwrap_or_else(PoisonError::into_inner) = Some(lock);
        Ok(())
    }

    /// Lets others have the disk, which may be taken away from the machine.
    fn give_up_own_disk(&self) {
        *self.own_disk.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn no_shared_ids(&self) -> Failure {
        let (cannot, layout) = (self.cannot(), self.plan.projection.as_ref());
        let layout = layout.map(|projection| projection.definition.layout.to_string());
        Failure::new(format!(
            "{cannot}: the layout {} takes a file system whose files all servers know by the same handles or \
             inode numbers; this one is of this machine alone, and other servers would not find its files",
            layout.unwrap_or_default()
        ))
    }

    fn warn_of_state_within(&self, state: &StateDir, dir: &Path) {
        if state.lies_in(dir) {
            log::warn!(
                "export `{}` holds this server's state directory: root at a client that is not \
                 squashed can read its secrets there; keep it elsewhere with --state",
                self.plan.name
            );
        }
    }
}

/// The key of servers that have no place for a secret of their own. All who know the projection know it.
fn key_of_all(uuid: FsUuid) -> u128 {
    uuid.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_ends_with_what_is_wrong_and_not_with_what_is_late() {
        let (report, outcomes) = channel();
        let late = report.clone();
        report.send(Ok(())).unwrap();
        report.send(Err(Failure::new("no directory"))).unwrap();
        assert_eq!(wait_for_all(&outcomes).unwrap_err().message, "no directory");
        wait_for_all(&outcomes).unwrap();
        drop((report, late));
        wait_for_all(&outcomes).unwrap();
    }
}
