//! The state of an export: being opened, held back, or open.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Poll, Waker};
use std::time::Duration;

use dray_backends::backend::{Backend, FsIdentity, Hang, OnDeath};
use dray_core::FsUuid;
use dray_layers::aggregate::{Aggregate, AggregateCounts};
use dray_layers::audit::{Audit, AuditStatus};
use dray_layers::metrics::Metrics;
use dray_layers::qos::QosGate;
use dray_rt::Instant;

use crate::serve::export::ExportPlan;
use crate::serve::projections::ServedProjection;

/// A file system that has not answered a call for this long is said to hang.
const HANG_AFTER: Duration = Duration::from_secs(5);

/// An export, for the status and for the thread that opens it.
pub struct ExportState {
    pub name: String,
    pub read_only: bool,
    pub metrics: Arc<Metrics>,
    /// Shares of bandwidth.
    pub qos: QosGate,
    /// The projection that it is this server's part of.
    pub projection: Option<Arc<ServedProjection>>,
    /// The directory, as it was named.
    named: PathBuf,
    state: Mutex<State>,
}

impl std::fmt::Debug for ExportState {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("ExportState").field("name", &self.name).finish_non_exhaustive()
    }
}

struct State {
    /// The same without links, known once its file system has answered.
    dir: Option<PathBuf>,
    fs: Option<Arc<dyn Backend>>,
    /// What served it before it was withdrawn, as long as calls are in there.
    former: Option<Weak<dyn Backend>>,
    /// Read-ahead and merged writes, if they are on.
    aggregate: Option<Weak<Aggregate>>,
    /// The export's audit, if it has one.
    audit: Option<Weak<Audit>>,
    /// What it is to clients.
    uuid: Option<FsUuid>,
    /// Since when it has been starting, or open.
    begun: Instant,
    open: bool,
    /// What was last seen at its place.
    directory: DirectoryState,
    /// Why it could not be opened when that was last tried.
    trouble: Option<String>,
    held: Option<HoldReason>,
    /// What may be served though the export was made on something else.
    accepted: Option<FsIdentity>,
    /// Something has happened that may concern its place.
    stirred: bool,
    waiting: Option<Waker>,
}

/// What has become of the directory itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DirectoryState {
    #[default]
    There,
    /// The directory has been removed.
    Gone,
    /// The directory was moved on its file system, and perhaps another one put in its place.
    Elsewhere,
}

/// Why an export must not be served from what is at its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HoldReason {
    /// What is waited for, for people.
    pub expected: String,
    /// What is there instead, for people.
    pub found: String,
    /// The same, if it could be served by an administrator's word.
    pub acceptable: Option<FsIdentity>,
}

/// The opening of an export that is not open.
pub struct StartState {
    /// How long it has lasted.
    pub since: Duration,
    /// What went wrong at the last try, if anything did: it is tried again.
    pub trouble: Option<String>,
    /// Why the export is held back until something else is at its place.
    pub held: Option<HoldReason>,
}

impl ExportState {
    /// The state of an export that is about to be opened.
    pub fn new(plan: &ExportPlan) -> ExportState {
        ExportState {
            name: plan.name.clone(),
            read_only: plan.read_only,
            metrics: Arc::new(Metrics::new()),
            qos: QosGate::new(),
            projection: plan.projection.clone(),
            named: plan.dir.clone(),
            state: Mutex::new(State {
                dir: None,
                fs: None,
                former: None,
                aggregate: None,
                audit: None,
                uuid: None,
                begun: dray_rt::now(),
                open: false,
                directory: DirectoryState::There,
                trouble: None,
                held: None,
                accepted: None,
                stirred: false,
                waiting: None,
            }),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The export's directory, for people.
    pub fn dir(&self) -> String {
        self.path().display().to_string()
    }

    /// The same for comparing. One that has not answered yet goes by the name that it was given.
    pub fn path(&self) -> PathBuf {
        self.state().dir.clone().unwrap_or_else(|| self.named.clone())
    }

    /// The export could not be opened; `held`: because of what is at its place. True if that is not what was
    /// said before.
    pub fn failed(&self, why: &str, held: Option<HoldReason>) -> bool {
        let mut state = self.state();
        let new = state.trouble.as_deref() != Some(why);
        state.trouble = Some(why.to_owned());
        state.held = held;
        new
    }

    /// The file system of the export has answered: `dir` is its directory without links.
    pub fn answered(&self, dir: &Path, fs: Arc<dyn Backend>) {
        let mut state = self.state();
        (state.trouble, state.held, state.accepted) = (None, None, None);
        state.dir = Some(dir.to_owned());
        state.uuid = Some(fs.info().uuid);
        state.fs = Some(fs);
    }

    /// What it is to clients; none before its file system has answered once.
    pub fn uuid(&self) -> Option<FsUuid> {
        self.state().uuid
    }

    /// How long it has been open; none: it is not.
    pub fn open_for(&self) -> Option<Duration> {
        let state = self.state();
        state.open.then(|| state.begun.elapsed())
    }

    /// Clients can have it from now on. Answers how long that took.
    pub fn opened(&self) -> Duration {
        let mut state = self.state();
        state.open = true;
        let lasted = state.begun.elapsed();
        state.begun = dray_rt::now();
        drop(state);
        self.stir(); // what happened meanwhile nobody has looked at
        lasted
    }

    /// What serves it must not be used any more. False: it is not open.
    pub fn closed(&self) -> bool {
        let mut state = self.state();
        if !std::mem::replace(&mut state.open, false) {
            return false;
        }
        state.begun = dray_rt::now();
        state.directory = DirectoryState::There;
        let fs = state.fs.take();
        state.former = fs.as_ref().map(Arc::downgrade);
        drop(state);
        fs.iter().for_each(|fs| fs.leave());
        drop(fs); // perhaps the last: descriptors are closed, which may take a while
        true
    }

    /// The opening has ended before the export was open.
    pub fn opening_ended(&self) {
        let fs = self.state().fs.take();
        drop(fs); // as above
    }

    /// How far the opening has come, if the export is not open yet.
    pub fn starting(&self) -> Option<StartState> {
        let state = self.state();
        (!state.open).then(|| StartState {
            since: state.begun.elapsed(),
            trouble: state.trouble.clone(),
            held: state.held.clone(),
        })
    }

    /// Lets it be served from what is at its place, though it was made on something else. Errors:
    /// why it cannot be, in words.
    pub fn accept(&self) -> Result<FsIdentity, String> {
        let mut state = self.state();
        let name = &self.name;
        let Some(held) = &state.held else {
            return Err(format!("export `{name}` is not held back: there is nothing to accept"));
        };
        let Some(identity) = held.acceptable.clone() else {
            let (expected, found) = (&held.expected, &held.found);
            return Err(format!(
                "export `{name}` waits for {expected}, and found {found}, which cannot be served"
            ));
        };
        state.accepted = Some(identity.clone());
        Ok(identity)
    }

    /// Whether it may be served from this, though it was made on something else.
    pub fn accepts(&self, identity: &FsIdentity) -> bool {
        self.state().accepted.as_ref() == Some(identity)
    }

    /// Why it takes long to open it, in words.
    pub fn why_late(&self) -> String {
        match self.fs() {
            None => format!("the file system below {} does not answer", self.dir()),
            Some(_) => {
                "the state of its clients from before the restart is being restored".to_owned()
            }
        }
    }

    /// What serves it, once its file system has answered.
    pub fn fs(&self) -> Option<Arc<dyn Backend>> {
        self.state().fs.clone()
    }

    /// The export is served with this layer, or without one.
    pub fn aggregates(&self, layer: Option<&Arc<Aggregate>>) {
        self.state().aggregate = layer.map(Arc::downgrade);
    }

    /// The export's read-ahead and merged writes; none: they are off, or the export is not open.
    pub fn aggregate(&self) -> Option<Arc<Aggregate>> {
        self.state().aggregate.as_ref().and_then(Weak::upgrade)
    }

    /// What these have done.
    pub fn aggregate_counts(&self) -> Option<AggregateCounts> {
        Some(self.aggregate()?.figures().counts())
    }

    /// The export is served with this audit, or without one.
    pub fn is_audited(&self, audit: Option<&Arc<Audit>>) {
        self.state().audit = audit.map(Arc::downgrade);
    }

    /// The export's audit; none: it is off, or the export is not open.
    pub fn audit(&self) -> Option<Arc<Audit>> {
        self.state().audit.as_ref().and_then(Weak::upgrade)
    }

    /// Figures of the audit.
    pub fn audit_status(&self) -> Option<AuditStatus> {
        Some(self.audit()?.status())
    }

    /// What has become of the directory itself, as is looked for now and then. False if that was known.
    pub fn directory_is(&self, now: DirectoryState) -> bool {
        std::mem::replace(&mut self.state().directory, now) != now
    }

    /// As was last seen.
    pub fn directory_state(&self) -> DirectoryState {
        self.state().directory
    }

    /// Wakes the waiting thread, which checks the place of the export.
    pub fn stir(&self) {
        let waiting = {
            let mut state = self.state();
            state.stirred = true;
            state.waiting.take()
        };
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Waits until something has happened since the last time. For one that waits.
    pub async fn stirred(&self) {
        std::future::poll_fn(|task| {
            let mut state = self.state();
            if std::mem::take(&mut state.stirred) {
                return Poll::Ready(());
            }
            state.waiting = Some(task.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Whether any call to the file system below is under way, or to the one before.
    pub fn has_calls(&self) -> bool {
        let (fs, former) = {
            let state = self.state();
            (state.fs.clone(), state.former.as_ref().and_then(Weak::upgrade))
        };
        let all = fs.into_iter().chain(former);
        all.into_iter().any(|fs| fs.hang(Duration::ZERO).is_some())
    }

    /// Which servers below are away, in words, if it is forwarded to some.
    pub fn servers_away(&self) -> Option<String> {
        self.fs().and_then(|fs| fs.servers_away())
    }

    /// Why changes outside dray are not noticed, in words; none: they are.
    pub fn outside_unnoticed(&self) -> Option<String> {
        match self.fs() {
            Some(fs) => fs.outside_unnoticed(),
            None => Some("the export is not open".to_owned()),
        }
    }

    /// What is known of the file system below, if it hangs.
    pub fn hang(&self) -> Option<Hang> {
        match (self.fs(), self.starting()) {
            (Some(fs), _) => fs.hang(HANG_AFTER),
            (None, Some(StartState { since, trouble: None, .. })) => {
                (since >= HANG_AFTER).then_some(Hang { calls: 1, since })
            }
            (None, _) => None,
        }
    }
}

/// Tells that the file system of one opening of an export has died.
#[derive(Debug)]
pub struct DeathNotice {
    /// Shared with what the server has of that opening.
    pub lost: Arc<AtomicBool>,
    pub exported: Weak<ExportState>,
}

impl OnDeath for DeathNotice {
    fn died(&self) {
        self.lost.store(true, Ordering::SeqCst);
        if let Some(exported) = self.exported.upgrade() {
            exported.stir();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_backends::memory::{MemoryFs, MemoryOptions};

    /// That was said also where taking up again what clients had took its time.
    #[test]
    fn a_file_system_is_not_said_to_be_silent_when_it_has_answered() {
        let fs = Arc::new(MemoryFs::new(MemoryOptions::default()));
        let one = ExportState::new(&ExportPlan::new("a", "/srv/a".into()).unwrap());
        assert!(one.why_late().ends_with("does not answer"));
        one.answered(Path::new("/srv/a"), fs);
        assert!(one.why_late().contains("is being restored"));
    }

    #[test]
    fn an_export_is_starting_until_it_is_open_and_says_what_is_in_its_way() {
        let one = ExportState::new(&ExportPlan::new("a", "/srv/a".into()).unwrap());
        assert_eq!(one.dir(), "/srv/a");
        assert!(one.hang().is_none(), "it has only begun");
        assert!(one.starting().unwrap().trouble.is_none());
        assert!(one.failed("no", None) && !one.failed("no", None));
        assert!(one.failed("not so either", None));
        assert_eq!(one.starting().unwrap().trouble.as_deref(), Some("not so either"));
        assert!(!one.closed(), "it has not been open");
        one.opened();
        assert!(one.starting().is_none());
        assert!(one.closed() && one.starting().is_some());
    }

    #[test]
    fn what_is_accepted_is_what_was_shown() {
        let one = ExportState::new(&ExportPlan::new("a", "/srv/a".into()).unwrap());
        assert!(one.accept().unwrap_err().contains("not held back"));
        let identity = |uuid: &str| FsIdentity {
            kind: "ext4".into(),
            uuid: Some(uuid.into()),
            source: "/dev/sda1".into(),
            at: "/srv".into(),
            directory: None,
            in_memory: false,
        };
        let held = |acceptable| {
            let (expected, found) = ("ext4 aa".to_owned(), "ext4 bb".to_owned());
            Some(HoldReason { expected, found, acceptable })
        };
        one.failed("it is another one", held(Some(identity("bb"))));
        assert_eq!(one.accept().unwrap(), identity("bb"));
        assert!(one.accepts(&identity("bb")) && !one.accepts(&identity("cc")));
        one.failed("nothing is there", held(None));
        assert!(one.accept().unwrap_err().contains("cannot be served"));
    }
}
