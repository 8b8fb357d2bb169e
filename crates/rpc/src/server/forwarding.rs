//! What a server that forwards is to the others.
//!
//! It detects servers that would serve their own files to themselves, and passes the question for batch jobs on.
//!
//! A server can be a client of other servers. Its sessions there have nodes of a kind of their own
//! ([`NodeId::of_server`]), one for each export. An export that is greeted by its own node would
//! forward its calls to itself. In a longer ring no server is greeted by itself: each waits until
//! the export of the next one is open. So a server notes the nodes of servers that wait for an
//! export of its own. Before it opens that export it greets the servers below in the names of these
//! nodes, too.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use dray_core::{Errno, NodeId, Pid, TellJobs};

use crate::server::service::{Inner, Server};
use crate::server::sessions::refused;
use crate::wire::Refused;

/// Servers that wait for one export and are remembered; the last ones stay.
const WAITING_MAX: usize = 16;
/// Exports for which servers wait and are remembered.
const EXPORTS_MAX: usize = 1024;

/// The nodes by which other servers know this server, and the servers that wait for its exports.
#[derive(Default)]
pub struct ForwardingNodes {
    state: Mutex<State>,
    /// Has the exports that are forwarded.
    server: OnceLock<Weak<Inner>>,
}

#[derive(Debug, Default)]
struct State {
    /// The forwarded export of each node.
    own: BTreeMap<NodeId, String>,
    /// The nodes of servers that wait, for each export.
    waiting: BTreeMap<String, VecDeque<NodeId>>,
}

impl ForwardingNodes {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Other servers know this server by `node` where it forwards calls to `export`.
    pub fn add(&self, node: NodeId, export: &str) {
        self.lock().own.insert(node, export.to_owned());
    }

    /// `server` has the exports that are forwarded; the first one stays.
    pub fn are_of(&self, server: &Server) {
        let _ = self.server.set(Arc::downgrade(&server.inner)); // as it says
    }

    /// Asks the clients of the forwarded `export` for the batch jobs of these callers, and hands on what they answer in
    /// time. It does not wait, and is called on an executor.
    pub fn find_jobs(&self, export: &str, callers: Vec<Pid>, tell: TellJobs) {
        let Some(server) = self.server.get().and_then(Weak::upgrade) else {
            return tell(Vec::new());
        };
        let export = export.to_owned();
        dray_rt::spawn(async move { tell(server.jobs_of_forwarded(&export, &callers).await) });
    }

    /// The servers that were refused since `export` is not open, the last `WAITING_MAX` of them.
    pub fn waiting_for(&self, export: &str) -> Vec<NodeId> {
        self.lock().waiting.get(export).into_iter().flatten().copied().collect()
    }

    /// Errors: the client is this server, which forwards calls to `export` there.
    pub(crate) fn check(&self, export: &str, node: NodeId) -> Result<(), Refused> {
        if !node.is_of_server() || self.lock().own.get(&node).is_none_or(|own| own != export) {
            return Ok(());
        }
        let why = format!(
            "export `{export}` would be served from itself: the servers that it is forwarded to lead \
             back to it; give one of them a directory in place of a dray:// target"
        );
        Err(refused(Errno::ELOOP, why))
    }

    /// A client was refused since `export` is not open. Mounts are not noted.
    pub(crate) fn note_waiting(&self, export: &str, node: NodeId) {
        if !node.is_of_server() {
            return;
        }
        let mut state = self.lock();
        if state.waiting.len() >= EXPORTS_MAX && !state.waiting.contains_key(export) {
            return;
        }
        let nodes = state.waiting.entry(export.to_owned()).or_default();
        if nodes.contains(&node) {
            return;
        }
        if nodes.len() >= WAITING_MAX {
            nodes.pop_front();
        }
        nodes.push_back(node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_knows_itself_and_a_bounded_number_of_servers_that_wait() {
        let nodes = ForwardingNodes::default();
        let (own, other) = (NodeId::of_server(10), NodeId::of_server(100));
        nodes.add(own, "x");
        assert_eq!(nodes.check("x", own).unwrap_err().errno, Errno::ELOOP.raw() as u16);
        assert!(nodes.check("y", own).is_ok(), "another export of this server");
        assert!(nodes.check("x", other).is_ok() && nodes.check("x", NodeId(11)).is_ok());
        nodes.note_waiting("x", NodeId(11)); // a mount
        assert!(nodes.waiting_for("x").is_empty());
        for number in 0..=WAITING_MAX as u64 {
            nodes.note_waiting("x", NodeId::of_server(number * 4));
            nodes.note_waiting("x", NodeId::of_server(number * 4));
        }
        let waiting = nodes.waiting_for("x");
        assert_eq!(waiting.len(), WAITING_MAX);
        assert_eq!(waiting.last(), Some(&NodeId::of_server(WAITING_MAX as u64 * 4)));
        assert!(nodes.waiting_for("y").is_empty());
    }
}
