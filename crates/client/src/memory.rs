//! What a client keeps beyond its process: the memory of each of its sessions, and the definition of the
//! projection that it uses.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use dray_core::NodeId;
use dray_layers::placement::SERVERS_MAX;
use dray_rpc::client::SessionMemory;
use dray_rt::random_u64;

/// Where the definition lies in the file. It is behind the memory of all sessions that a client can
/// have ([`ClientMemory::SESSIONS_MAX`]), each of which takes 2.1 GiB of
/// addresses. Only pages in use take memory.
const DEFINITION_AT: u64 = 1 << 44;
/// The longest definition, bytes.
const DEFINITION_MAX_BYTES: usize = 64 << 10;
/// As many bytes are read of a file with a definition, so that one that is too long is noticed.
const DEFINITION_MAX: u64 = DEFINITION_MAX_BYTES as u64 + 1;

/// Memory of a client's sessions.
pub enum ClientMemory {
    /// It ends with the process.
    Heap,
    /// The same, of a client whose node is known.
    HeapOf(NodeId),
    /// A file of memory that a supervisor holds. A process that follows this one finds there what this
    /// one had.
    Held(OwnedFd),
    /// Files of a server that is a client of other servers.
    Files(ClientFiles),
}

/// The files of a server that is a client of other servers. They outlive its process, and not the start of
/// its machine.
pub struct ClientFiles {
    /// The memory of all sessions. It is locked as long as this is there.
    sessions: OwnedFd,
    /// The definition has a file of its own: the other place for it is beyond the end of files of many
    /// file systems.
    definition: PathBuf,
}

impl ClientFiles {
    fn definition(&self) -> io::Result<Option<String>> {
        let file = match File::open(&self.definition) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut text = String::new();
        let len = io::Read::read_to_string(&mut io::Read::take(file, DEFINITION_MAX), &mut text)?;
        match len <= DEFINITION_MAX_BYTES {
            true => Ok(Some(text)),
            false => Err(invalid("the kept definition is too long")),
        }
    }

    /// Replaces the file in one step: a process that dies in between leaves no half of a definition.
    fn keep_definition(&self, text: &str) -> io::Result<()> {
        let new = self.definition.with_extension("definition-new");
        let mut options = File::options();
        options.create(true).truncate(true).write(true).mode(0o600);
        options.open(&new)?.write_all(text.as_bytes())?;
        fs::rename(&new, &self.definition)
    }
}

impl ClientMemory {
    /// Sessions that there is room for.
    pub(crate) const SESSIONS_MAX: usize = SERVERS_MAX;

    /// The memory of a server that is a client of other servers: `path` for its sessions, and beside it a file
    /// with the ending `definition`. `boot`: of this machine. Errors: see [`SessionMemory::open_file`].
    pub fn open_files(path: &Path, boot: u128) -> io::Result<ClientMemory> {
        let first = SessionMemory::open_file(path, boot)?;
        if !first.has_node() {
            first.set_node(NodeId::of_server(random_u64()));
        }
        let sessions = first.fd().ok_or_else(|| invalid("it is no file"))?.try_clone_to_owned()?;
        let definition = beside(path);
        Ok(ClientMemory::Files(ClientFiles { sessions, definition }))
    }

    /// The memory of the session with the server of this index. Errors: see
    /// [`SessionMemory::from_fd_at`].
    pub fn session(&self, index: usize) -> io::Result<SessionMemory> {
        match self {
            ClientMemory::Heap => Ok(SessionMemory::heap()),
            ClientMemory::HeapOf(node) => {
                let memory = SessionMemory::heap();
                memory.set_node(*node);
                Ok(memory)
            }
            ClientMemory::Held(fd) => SessionMemory::from_fd_at(fd.try_clone()?, index),
            ClientMemory::Files(files) => {
                SessionMemory::from_file_at(files.sessions.try_clone()?, index)
            }
        }
    }

    /// The same, of the node that all sessions of this client have.
    pub(crate) fn session_of(&self, index: usize, node: NodeId) -> io::Result<SessionMemory> {
        let memory = self.session(index)?;
        memory.set_node(node);
        Ok(memory)
    }

    /// The definition that a process before this one used; none if it used none. Errors: those of
    /// reading, and `InvalidData` for what is no definition.
    pub(crate) fn definition(&self) -> io::Result<Option<String>> {
        let fd = match self {
            ClientMemory::Heap | ClientMemory::HeapOf(_) => return Ok(None),
            ClientMemory::Held(fd) => fd,
            ClientMemory::Files(files) => return files.definition(),
        };
        let file = File::from(fd.try_clone()?);
        if file.metadata()?.len() < DEFINITION_AT {
            return Ok(None);
        }
        let mut len = [0; 8];
        file.read_exact_at(&mut len, DEFINITION_AT)?;
        let len = usize::try_from(u64::from_le_bytes(len)).unwrap_or(usize::MAX);
        if len == 0 {
            return Ok(None); // the process before us died while it wrote it, before it had a session
        }
        if len > DEFINITION_MAX_BYTES {
            return Err(invalid("the kept definition is too long"));
        }
        let mut text = vec![0; len];
        file.read_exact_at(&mut text, DEFINITION_AT + 8)?;
        String::from_utf8(text).map(Some).map_err(|_| invalid("the kept definition is no text"))
    }

    /// Keeps `text` for processes that follow this one. Errors: those of writing, and `InvalidData` for a
    /// text of more than 64 KiB.
    pub(crate) fn keep_definition(&self, text: &str) -> io::Result<()> {
        if text.len() > DEFINITION_MAX_BYTES {
            return Err(invalid("the definition has more than 64 KiB"));
        }
        let fd = match self {
            ClientMemory::Heap | ClientMemory::HeapOf(_) => return Ok(()),
            ClientMemory::Held(fd) => fd,
            ClientMemory::Files(files) => return files.keep_definition(text),
        };
        let file = File::from(fd.try_clone()?);
        let len = text.len() as u64;
        // The length last: a process that dies in between leaves no half of a definition.
        file.write_all_at(text.as_bytes(), DEFINITION_AT + 8)?;
        file.write_all_at(&len.to_le_bytes(), DEFINITION_AT)
    }
}

/// The file of the definition beside the one of the sessions.
fn beside(sessions: &Path) -> PathBuf {
    let mut path = sessions.to_owned().into_os_string();
    path.push(".definition");
    path.into()
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held() -> ClientMemory {
        let memory = SessionMemory::create_memfd().unwrap();
        ClientMemory::Held(memory.fd().unwrap().try_clone_to_owned().unwrap())
    }

    #[test]
    fn files_of_a_server_hold_the_same_for_its_next_process() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("upper-a.b");
        let memory = ClientMemory::open_files(&path, 7).unwrap();
        assert_eq!(memory.definition().unwrap(), None);
        memory.keep_definition("[projection.y]").unwrap();
        let node = memory.session(0).unwrap().node();
        assert!(node.is_of_server());
        assert_eq!(memory.session_of(2, node).unwrap().node(), node);
        assert!(ClientMemory::open_files(&path, 7).is_err(), "this process has it");
        drop(memory);
        let next = ClientMemory::open_files(&path, 7).unwrap();
        assert_eq!(next.session(2).unwrap().node(), node);
        assert_eq!(next.definition().unwrap().as_deref(), Some("[projection.y]"));
        fs::write(beside(&path), "x".repeat(65_537)).unwrap();
        assert!(next.definition().is_err());
        drop(next);
        let other_boot = ClientMemory::open_files(&path, 8).unwrap();
        assert_ne!(other_boot.session(0).unwrap().node(), node);
    }

    #[test]
    fn a_definition_is_kept_for_the_next_process_and_half_of_one_is_none() {
        let memory = held();
        assert_eq!(memory.definition().unwrap(), None);
        let ClientMemory::Held(fd) = &memory else { unreachable!() };
        let file = File::from(fd.try_clone().unwrap());
        file.write_all_at(b"[projection.x]", DEFINITION_AT + 8).unwrap();
        assert_eq!(memory.definition().unwrap(), None);
        memory.keep_definition("[projection.y]").unwrap();
        assert_eq!(memory.definition().unwrap().as_deref(), Some("[projection.y]"));
        assert!(memory.keep_definition(&"x".repeat(DEFINITION_MAX_BYTES + 1)).is_err());
        // The memory of the sessions is elsewhere.
        let node = memory.session(0).unwrap().node();
        assert_eq!(memory.session_of(255, node).unwrap().node(), node);
        assert_eq!(memory.definition().unwrap().as_deref(), Some("[projection.y]"));
    }
}
