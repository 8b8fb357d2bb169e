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
/// Holds the number of the last recovery: a random one, 16 hexadecimal digits.
const RECOVERY: &str = "recovery";
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
    /// The state of the machine's memory, as clients know it. It is another one after each start that
    /// finds the machine lost. Two of these can follow one loss: the first may have ended its recovery
    /// without a note of that. Then clients have done new work since, and send that again, too.
    pub memory_state: u128,
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
        let recovery = state.join(RECOVERY);
        let number = match machine_lost {
            true => {
                let number = dray_rt::random_u64();
                write_synced(&recovery, &format!("{number:016x}\n"))?;
                number
            }
            false => last_recovery(&recovery)?,
        };
        let boot = Boot { path, now, memory_state: boot ^ u128::from(number), machine_lost };
        if last.is_none() {
            boot.note()?;
        }
        Ok(boot)
    }

    /// Nobody comes back any more with what the machine lost. Before, a server that is
    /// started anew has to ask for it anew.
    pub fn note(&self) -> Result<(), Failure> {
        write_synced(&self.path, &self.now)
    }
}

/// The number of the last recovery; 0: there was none.
fn last_recovery(path: &Path) -> Result<u64, Failure> {
    match std::fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        // What makes no sense is another number: clients take that for a loss, and report it.
        read => {
            let read = read.doing(|| format!("cannot read {}", path.display()))?;
            Ok(u64::from_str_radix(read.trim(), 16).unwrap_or(0))
        }
    }
}

/// Writes what has to outlive the machine.
fn write_synced(path: &Path, text: &str) -> Result<(), Failure> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        match path.parent() {
            Some(dir) => File::open(dir)?.sync_all(),
            None => Ok(()),
        }
    };
    let written = posix::as_server(write).map_err(|error| io::Error::from(error.errno()));
    written.and_then(|written| written).map_err(|error| cannot_write(path, &error))
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

    /// A server ended after a recovery and before it could note that. To clients the next one had lost
    /// nothing more. They sent again what was older than the loss, and it stood over what they had
    /// written since.
    // proves: P102
    #[test]
    fn each_start_that_finds_the_machine_lost_is_a_further_loss_to_clients() {
        let state = tempfile::tempdir().unwrap();
        let begin = |boot| Boot::begin(state.path(), boot).unwrap();
        let first = begin(1);
        assert_eq!((first.memory_state, begin(1).memory_state), (1, 1));
        let (one, two) = (begin(2), begin(2));
        assert!(one.memory_state != first.memory_state && two.memory_state != one.memory_state);
        two.note().unwrap();
        assert_eq!(begin(2).memory_state, two.memory_state, "nothing was lost since");
        assert_ne!(begin(3).memory_state, two.memory_state);
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
