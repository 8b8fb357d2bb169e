//! The connections of a session, and since when it has none.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use dray_fabric::Connection;
use dray_rt::{ExecutorHandle, Instant};

use super::ServerSession;
use crate::wire::Proof;

/// Connections that one mount may have. A mount makes fewer. Where its network breaks again and
/// again, the connections that the mount has given up are noticed late.
const CONNECTIONS_MAX: usize = 16;

impl ServerSession {
    /// Takes a connection; the oldest goes where there are too many. A connection that comes behind
    /// the end of the session is closed.
    pub(crate) fn connected(&self, number: u64, connection: Arc<dyn Connection>) {
        let mut state = self.state();
        if self.ended.load(Ordering::SeqCst) {
            drop(state);
            return connection.close();
        }
        state.connections.insert(number, connection);
        state.alone_since = None;
        state.came_back.get_or_insert_with(dray_rt::now);
        state.home = Some(ExecutorHandle::current());
        let many = state.connections.len() > CONNECTIONS_MAX;
        let oldest = if many { state.connections.pop_first() } else { None };
        drop(state);
        self.export.is_served_here();
        if let Some((_, oldest)) = oldest {
            oldest.close();
        }
    }

    /// The executor that serves this session. If the session has had no connection in this server
    /// epoch, it is that of its export, none before the export's first connection.
    pub(crate) fn home(&self) -> Option<ExecutorHandle> {
        let own = self.state().home.clone();
        own.or_else(|| self.export.home())
    }

    pub(crate) fn disconnected(&self, number: u64) {
        let mut state = self.state();
        state.connections.remove(&number);
        if state.connections.is_empty() {
            state.alone_since.get_or_insert_with(dray_rt::now);
        }
    }

    /// Ends a connection of this session that a new one replaces.
    pub(crate) fn replace(&self, number: u64) {
        let mut state = self.state();
        let replaced = match number {
            Proof::REPLACES_ALL => std::mem::take(&mut state.connections),
            _ => state.connections.remove_entry(&number).into_iter().collect(),
        };
        drop(state);
        replaced.values().for_each(|connection| connection.close());
    }

    /// Whether it is one of this session's connections, and has not been replaced.
    pub(crate) fn has_connection(&self, number: u64) -> bool {
        self.state().connections.contains_key(&number)
    }

    pub(crate) fn connections(&self) -> Vec<Arc<dyn Connection>> {
        self.state().connections.values().cloned().collect()
    }

    pub(crate) fn numbered_connections(&self) -> Vec<(u64, Arc<dyn Connection>)> {
        let state = self.state();
        state.connections.iter().map(|(number, one)| (*number, one.clone())).collect()
    }

    /// The session begins as after the start of the server: its client has not come back yet.
    pub(crate) fn begins_alone(&self) {
        self.state().alone_since = Some(dray_rt::now());
    }

    pub(crate) fn alone_since(&self) -> Option<Instant> {
        self.state().alone_since
    }
}
