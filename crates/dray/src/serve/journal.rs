//! Where `dray serve` keeps its sessions: the journal's files in the state directory.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dray_backends::posix;
use dray_core::Fut;
use dray_rpc::server::{FileJournal, Journal, PersistentRecord, SessionRecord, SlotLog};

use crate::error::{ErrorContext, Failure};
use crate::serve::state::cannot_write;

/// Holds the boot id of the machine under the last server.
const BOOT: &str = "boot";
/// Holds a file for each session.
const SESSIONS: &str = "sessions";

/// A journal whose files belong to the server, whichever caller its threads act for at the moment.
pub struct ServerJournal(FileJournal);

impl ServerJournal {
    /// Whether a server has kept its sessions in this state directory.
    pub fn is_there(state: &Path) -> bool {
        state.join(SESSIONS).is_dir()
    }

    /// In the state directory `state`.
    pub fn open(state: &Path) -> Result<ServerJournal, Failure> {
        let dir = state.join(SESSIONS);
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

    fn kept(&self, what: PersistentRecord) -> io::Result<Option<Vec<u8>>> {
        posix::as_server(|| self.0.kept(what)).map_err(|error| io::Error::from(error.errno()))?
    }

    fn keep(&self, what: PersistentRecord, bytes: &[u8]) -> io::Result<()> {
        posix::as_server(|| self.0.keep(what, bytes))
            .map_err(|error| io::Error::from(error.errno()))?
    }

    fn settled(&self) -> Option<Fut<'_, bool>> {
        self.0.settled()
    }
}

/// Knows whether the machine went down since the last server ran here.
pub struct Boot {
    path: PathBuf,
    now: String,
    /// Whether the machine went down since: what was not synced may be lost.
    pub machine_lost: bool,
}

impl Boot {
    /// Looks which start of the machine the last server saw; this is `boot`.
    pub fn begin(state: &Path, boot: u128) -> Result<Boot, Failure> {
        let path = state.join(BOOT);
        let now = format!("{boot:032x}\n");
        // What cannot be read, or makes no sense, is no sign that nothing was lost.
        let last = match std::fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            read => Some(read.doing(|| format!("cannot read {}", path.display()))?),
        };
        let machine_lost = last.as_ref().is_some_and(|last| last != now.as_bytes());
        let boot = Boot { path, now, machine_lost };
        if last.is_none() {
            boot.note()?;
        }
        Ok(boot)
    }

    /// Nobody comes back any more with what the machine lost. Before, a server that is
    /// started anew has to ask for it anew.
    pub fn note(&self) -> Result<(), Failure> {
        let write = || {
            let mut file = File::create(&self.path)?;
            file.write_all(self.now.as_bytes())?;
            file.sync_all()?; // it has to outlive the machine
            match self.path.parent() {
                Some(dir) => File::open(dir)?.sync_all(),
                None => Ok(()),
            }
        };
        let written = posix::as_server(write).map_err(|error| io::Error::from(error.errno()));
        written.and_then(|written| written).map_err(|error| cannot_write(&self.path, &error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_counts_as_lost_until_that_is_settled() {
        let state = tempfile::tempdir().unwrap();
        let begin = |boot| Boot::begin(state.path(), boot).unwrap();
        assert!(!begin(1).machine_lost, "the first server ever");
        assert!(!begin(1).machine_lost);
        assert!(begin(2).machine_lost);
        let second = begin(2);
        assert!(second.machine_lost, "the one before it died before it was settled");
        second.note().unwrap();
        assert!(!begin(2).machine_lost);
    }

    /// An unreadable note counted as that of the first server ever: nobody was waited for.
    #[test]
    fn a_note_that_cannot_be_read_is_no_sign_that_nothing_was_lost() {
        let state = tempfile::tempdir().unwrap();
        let boot = |boot| Boot::begin(state.path(), boot);
        boot(1).unwrap();
        std::fs::write(state.path().join(BOOT), b"\xff").unwrap();
        assert!(boot(1).unwrap().machine_lost);
        std::fs::remove_file(state.path().join(BOOT)).unwrap();
        std::fs::create_dir(state.path().join(BOOT)).unwrap();
        let error = boot(1).err().unwrap().message;
        assert!(error.starts_with("cannot read ") && error.contains("/boot: "), "{error}");
    }
}
