//! How a server behaves.

use std::sync::Arc;
use std::time::Duration;

use dray_fabric::BufferPool;

use crate::auth::Key;
use crate::server::forwarding::ForwardingNodes;
use crate::server::sabotage::BrokenPromises;
#[cfg(feature = "sabotage")]
use crate::server::sabotage::Sabotage;
use crate::wire::HOLD_TIME;

/// The state that the server's machine has lost since the last server epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateLoss {
    /// Nothing: the process ended, the machine did not.
    Nothing,
    /// What was written and not synced. Names, attributes and answers are as they were. The server
    /// that had the unsynced data is gone, and the file system is not on its machine.
    Written,
    /// The changes that were not synced; the journal knows all sessions.
    Unsynced,
    /// The journal's sessions, too: anybody may have kept changes, or held locks.
    SessionsToo,
}

/// How a server behaves.
#[derive(Clone)]
pub struct ServerOptions {
    /// Clients must prove that they know it.
    pub key: Option<Key>,
    /// How long a session outlives its last connection.
    pub lease: Duration,
    /// How long a client believes what is leased to it after its last call. A change waits for a
    /// client that does not answer a tenth longer.
    pub lease_term: Duration,
    /// Files that are leased to one session at most. It gives back the oldest for others.
    pub session_leases_max: usize,
    /// How long a hold of what another server changes lasts at most.
    pub hold_time: Duration,
    /// Replay slots a session; as many changes of one mount can be under way at once.
    pub slots: u32,
    /// Calls that may be under way on one connection.
    pub calls_max: u32,
    /// Sessions at once.
    pub sessions_max: usize,
    /// Sessions at once of clients at one address; those of this machine, by Unix sockets,
    /// count as one.
    pub sessions_of_one_max: usize,
    /// Files that clients may have open in one export.
    pub open_files_max: usize,
    /// Owners of fcntl locks of one export, one for each open file that it has locks through.
    pub lock_owners_max: usize,
    /// Connections at once; each takes a descriptor.
    pub connections_max: usize,
    /// Memory for data on its way.
    pub pool: BufferPool,
    /// Changes with every start of the machine.
    pub boot: u128,
    /// The nodes by which other servers know this one, if it is their client.
    pub forwarding: Arc<ForwardingNodes>,
    /// The promise that a test breaks in the server on purpose.
    #[cfg(feature = "sabotage")]
    pub sabotage: Option<Sabotage>,
}

impl Default for ServerOptions {
    /// 64 slots and 128 calls a connection, 16,384 sessions, 1,024 of them of one address, and
    /// 65,536 connections. A session outlives its last
    /// connection by 60 s, and what is leased is believed for 5 s. 256 MiB of buffers. 1,048,576 open files, and
    /// owners of locks, of an export.
    fn default() -> ServerOptions {
        ServerOptions {
            key: None,
            lease: Duration::from_secs(60),
            lease_term: Duration::from_secs(5),
            session_leases_max: 65_536,
            hold_time: HOLD_TIME,
            slots: 64,
            calls_max: 128,
            sessions_max: 16_384,
            sessions_of_one_max: 1024,
            open_files_max: 1 << 20,
            lock_owners_max: 1 << 20,
            connections_max: 65_536,
            pool: BufferPool::new(256 << 20, 64 << 20),
            boot: 0,
            forwarding: Arc::default(),
            #[cfg(feature = "sabotage")]
            sabotage: None,
        }
    }
}

impl ServerOptions {
    /// The promise that a test breaks in this server. Without the feature `sabotage` there is none,
    /// as the compiler can see.
    pub(crate) fn broken(&self) -> BrokenPromises {
        BrokenPromises {
            #[cfg(feature = "sabotage")]
            what: self.sabotage,
        }
    }
}
