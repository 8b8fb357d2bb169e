//! What a client keeps beyond its process: the memory of each of its sessions, and the definition of the
//! projection that it uses.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use dray_core::NodeId;
use dray_rpc::client::SessionMemory;

/// Where the definition lies in the file: behind the memory of all sessions that a client can have
/// ([`SERVERS_MAX`](dray_layers::placement::SERVERS_MAX)), each of which takes 2.1 GiB of addresses. Only
/// pages in use take memory.
const DEFINITION_AT: u64 = 1 << 44;
/// The longest definition, bytes.
const DEFINITION_MAX_BYTES: usize = 64 << 10;

/// Memory of a client's sessions.
pub enum ClientMemory {
    /// It ends with the process.
    Heap,
    /// A file of memory that a supervisor holds. A process that follows this one finds there what this
    /// one had.
    Held(OwnedFd),
}

impl ClientMemory {
    /// The memory of the session with the server of this index. Errors: see
    /// [`SessionMemory::from_fd_at`].
    pub fn session(&self, index: usize) -> io::Result<SessionMemory> {
        match self {
            ClientMemory::Heap => Ok(SessionMemory::heap()),
            ClientMemory::Held(fd) => SessionMemory::from_fd_at(fd.try_clone()?, index),
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
        let ClientMemory::Held(fd) = self else { return Ok(None) };
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
        let ClientMemory::Held(fd) = self else { return Ok(()) };
        if text.len() > DEFINITION_MAX_BYTES {
            return Err(invalid("the definition has more than 64 KiB"));
        }
        let file = File::from(fd.try_clone()?);
        let len = text.len() as u64;
        // The length last: a process that dies in between leaves no half of a definition.
        file.write_all_at(text.as_bytes(), DEFINITION_AT + 8)?;
        file.write_all_at(&len.to_le_bytes(), DEFINITION_AT)
    }
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
