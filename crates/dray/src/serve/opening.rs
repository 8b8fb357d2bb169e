//! Opens the exports, each on a thread of its own: a file system that hangs when the server
//! starts keeps its own export waiting, and nobody else.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dray_backends::posix::{Keeper, PosixFs, PosixOptions};
use dray_core::FileSystem;
use dray_layers::Observed;
use dray_layers::faults::{Fault, Faults};
use dray_rpc::server::{Export, Loss, Server};
use dray_rt::{DriverKind, Executor};

use crate::error::{Doing, Failure};
use crate::paths;
use crate::serve::descriptors::Descriptors;
use crate::serve::export::ExportPlan;
use crate::serve::exported::Exported;
use crate::serve::keeper::KeeperClient;
use crate::serve::left_behind;
use crate::serve::state::{ExportIdentity, StateDir};

/// The start waits so long for exports. What is wrong with one that answers within that time
/// ends the start; the others are served without those that do not answer.
const START_MAX: Duration = Duration::from_secs(1);

/// How often is looked whether a former server has gone.
const FORMER_LOOK: Duration = Duration::from_millis(100);

/// An export that could not be opened later than that is tried again after this time.
const AGAIN: Duration = Duration::from_secs(5);

/// The state directory, until the server gives it up at its end: no thread that hangs keeps it.
pub type SharedState = Arc<Mutex<Option<StateDir>>>;

/// One export to open.
pub struct Opening {
    pub plan: ExportPlan,
    pub faults: Vec<Fault>,
    pub exported: Arc<Exported>,
    pub state: SharedState,
    pub keeper: Option<Arc<KeeperClient>>,
    pub descriptors: Descriptors,
    pub server: Server,
    pub loss: Loss,
}

/// Opens all of them. Errors: what is wrong with one whose file system has answered. Those
/// that have not are opened when they do, whenever that is.
pub fn open_all(openings: Vec<Opening>) -> Result<(), Failure> {
    let mut late: Vec<Arc<Exported>> = Vec::new();
    let (tell, told) = channel();
    for opening in openings {
        late.push(opening.exported.clone());
        let tell = tell.clone();
        std::thread::Builder::new()
            .name("dray-open".into())
            .spawn(move || opening.run(&tell))
            .doing(|| "cannot start a thread that opens an export".into())?;
    }
    drop(tell);
    wait_for_all(&told)?;
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

fn wait_for_all(told: &Receiver<Result<(), Failure>>) -> Result<(), Failure> {
    let deadline = dray_rt::now() + START_MAX;
    loop {
        match told.recv_timeout(deadline - dray_rt::now()) {
            Ok(outcome) => outcome?,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return Ok(()),
        }
    }
}

impl Opening {
    /// To its good end, or until the process ends.
    fn run(mut self, tell: &Sender<Result<(), Failure>>) {
        loop {
            let failure = match self.open() {
                Ok(()) => {
                    let lasted = self.exported.opened();
                    if lasted > START_MAX {
                        let name = &self.exported.name;
                        log::warn!("export `{name}` is open after {} s", lasted.as_secs());
                    }
                    let _ = tell.send(Ok(())); // the start may not have waited
                    return;
                }
                Err(failure) => failure,
            };
            let new = self.exported.failed(&failure.message);
            if new && self.exported.starting().is_some_and(|one| one.since > START_MAX) {
                log::error!("{}; trying again until it works", failure.message);
            }
            let _ = tell.send(Err(failure)); // as above
            std::thread::sleep(AGAIN);
        }
    }

    fn open(&mut self) -> Result<(), Failure> {
        let mut executor =
            Executor::new(DriverKind::Epoll).doing(|| "cannot start an executor".into())?;
        let export = self.below()?;
        self.wait_for_former()?;
        executor.block_on(self.server.open(export, self.loss));
        Ok(())
    }

    /// Waits until no former server is in the file system with a change that it may still make.
    fn wait_for_former(&self) -> Result<(), Failure> {
        let name = &self.plan.name;
        let mut told = false;
        loop {
            let dir = {
                let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
                let state = state.as_ref().ok_or_else(|| Failure::new("the server is ending"))?;
                state.dir().to_owned()
            };
            let Some(former) = left_behind::of(&dir, name) else { return Ok(()) };
            if !std::mem::replace(&mut told, true) {
                let why = format!(
                    "export `{name}` is opened once its file system has let go of the former \
                     server (process {former}), whose last changes come first"
                );
                log::error!("{why}; clients wait; other exports are served");
                self.exported.failed(&why);
            }
            std::thread::sleep(FORMER_LOOK);
        }
    }

    /// Puts the export's stack together: metrics over faults, if there are any, over a
    /// directory.
    fn below(&mut self) -> Result<Export, Failure> {
        let plan = &self.plan;
        let what = || format!("cannot export {} as `{}`", plan.dir.display(), plan.name);
        let dir = std::fs::canonicalize(&plan.dir).map_err(|error| {
            let advice = match error.kind() {
                std::io::ErrorKind::NotFound => "; make it first, or correct the path",
                _ => "",
            };
            Failure::new(format!("{}: {error}{advice}", what()))
        })?;
        if !dir.is_dir() {
            return Err(Failure::new(format!(
                "{}: it is not a directory; name the directory that it is in",
                what()
            )));
        }
        let identity = self.identity(&dir)?;
        let defaults = PosixOptions::default();
        let options = PosixOptions {
            read_only: plan.read_only,
            squash: plan.squash,
            inline: plan.inline,
            direct: plan.direct,
            id_key: Some(identity.key),
            threads_max: if plan.threads == 0 { defaults.threads_max } else { plan.threads },
            path_table_file: Some(self.path_table_file()?),
            keeper: self.keeper.clone().map(|keeper| keeper as Arc<dyn Keeper>),
            open_descriptors_max: self.descriptors.files_of_each,
            inode_cache_max: self.descriptors.inodes_of_each,
            ..defaults
        };
        let posix = PosixFs::open(&dir, identity.uuid, options).map_err(|error| {
            let root = if paths::is_root() { "" } else { "; `dray serve` must be started by root" };
            Failure::new(format!("{}: {error}{root}", what()))
        })?;
        for caveat in posix.caveats() {
            log::warn!("export `{}`: {caveat}", plan.name);
        }
        self.exported.answered(&dir, posix.clone());
        let mut fs: Arc<dyn FileSystem> = posix;
        if !self.faults.is_empty() {
            log::warn!("export `{}` fails on purpose: `faults` is on", plan.name);
            fs = Arc::new(Observed::new(fs, Arc::new(Faults::new(self.faults.clone()))));
        }
        let fs = Arc::new(Observed::new(fs, self.exported.metrics.clone()));
        let mut export = Export::new(&plan.name, fs, plan.allow.clone());
        export.insecure = plan.insecure;
        Ok(export)
    }

    /// Where ids of files are noted, if the file system below has none that last.
    fn path_table_file(&self) -> Result<PathBuf, Failure> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let state = state.as_ref().ok_or_else(|| Failure::new("the server is ending"))?;
        Ok(state.dir().join(format!("paths-{}", self.plan.name)))
    }

    fn identity(&self, dir: &Path) -> Result<ExportIdentity, Failure> {
        let exports = {
            let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let state = state.as_ref().ok_or_else(|| Failure::new("the server is ending"))?;
            self.warn_of_state_within(state, dir);
            state.exports()
        };
        exports.identity(dir)
    }

    fn warn_of_state_within(&self, state: &StateDir, dir: &Path) {
        if state.lies_in(dir) {
            log::warn!(
                "export `{}` holds this server's state directory: whoever is root at a client and \
                 not squashed can read its secrets there; keep it elsewhere with --state",
                self.plan.name
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_ends_with_what_is_wrong_and_not_with_what_is_late() {
        let (tell, told) = channel();
        let late = tell.clone();
        tell.send(Ok(())).unwrap();
        tell.send(Err(Failure::new("no directory"))).unwrap();
        assert_eq!(wait_for_all(&told).unwrap_err().message, "no directory");
        wait_for_all(&told).unwrap();
        drop((tell, late));
        wait_for_all(&told).unwrap();
    }
}
