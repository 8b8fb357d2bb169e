//! Where `dray serve` keeps its sessions: the journal's files in the state directory.

use std::io;
use std::path::Path;
use std::sync::Arc;

use dray_backends::posix;
use dray_rpc::server::{FileJournal, Journal, SessionRecord, SlotLog};

use crate::error::{Doing, Failure};
use crate::state::boot_id;

/// Holds the boot id of the machine while a server runs; left over from one that died.
const RUNNING: &str = "running";

/// A journal whose files belong to the server, whoever its threads work for just then.
pub struct ServerJournal(FileJournal);

impl ServerJournal {
    /// In the state directory `state`.
    pub fn open(state: &Path) -> Result<ServerJournal, Failure> {
        let dir = state.join("sessions");
        let journal = FileJournal::open(&dir).doing(|| format!("cannot use {}", dir.display()))?;
        Ok(ServerJournal(journal))
    }
}

impl Journal for ServerJournal {
    fn create(&self, session: &SessionRecord, slots: u32) -> io::Result<Arc<dyn SlotLog>> {
        posix::as_server(|| self.0.create(session, slots))
            .map_err(|error| io::Error::from(error.errno()))?
    }

    fn remove(&self, session: u64) {
        if posix::as_server(|| self.0.remove(session)).is_err() {
            log::error!("session {session:x}: its file stays until the next start");
        }
    }

    fn load(&self) -> Vec<(SessionRecord, Arc<dyn SlotLog>)> {
        self.0.load()
    }
}

/// Notes that a server runs, until it is dropped at an orderly end.
pub struct Running<'a> {
    state: &'a Path,
    /// The machine went down under the last server: what was not synced may be lost.
    pub machine_lost: bool,
}

impl Running<'_> {
    /// Looks how the last server ended, and begins.
    pub fn begin(state: &Path) -> Result<Running<'_>, Failure> {
        let path = state.join(RUNNING);
        let now = format!("{:032x}\n", boot_id());
        let last = std::fs::read_to_string(&path).ok();
        std::fs::write(&path, &now).doing(|| format!("cannot write {}", path.display()))?;
        Ok(Running { state, machine_lost: last.is_some_and(|last| last != now) })
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.state.join(RUNNING)); // at worst a needless grace period
    }
}
