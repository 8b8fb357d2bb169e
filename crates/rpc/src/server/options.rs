//! How a server behaves.

use std::time::Duration;

use dray_fabric::BufferPool;

use crate::auth::Key;

/// A protection left out on purpose: tests prove with it that they would notice. Nothing
/// but a test sets it.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// A change that comes again is carried out again.
    ReplyCache,
    /// What was under way when the process died counts as not applied.
    Intents,
    /// A connection goes on being read when its client has come back on another.
    Fence,
    /// Locks that are claimed again are said to be had, and are not.
    Reclaim,
    /// What the death of the process cut short is not kept for whoever asked for it.
    Turns,
    /// Files that are removed while clients come back are not kept for them.
    Custody,
    /// Changes sent again after a loss of power are said to be made, and are not.
    Redo,
    /// They are made in the order of their arrival.
    RedoOrder,
    /// New work does not wait for them.
    RedoGate,
    /// What somebody has synced since is not looked at.
    RedoFloor,
    /// Halves of reads are said to be of one version, whatever has been written in between.
    Halves,
    /// What a client changed last is not synced when it leaves.
    LastSync,
    /// What takes rights away does not wait for files that were opened at their lookup.
    Ahead,
}

/// What the server's machine has lost since the server's last life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Nothing: the process ended, the machine did not.
    Nothing,
    /// What was not synced; the journal knows all sessions.
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
    /// Replay slots a session; as many changes of one mount can be under way at once.
    pub slots: u32,
    /// Calls that may be under way on one connection.
    pub calls_max: u32,
    /// Sessions at once.
    pub sessions_max: usize,
    /// Sessions at once of clients at one address; those of this machine, by Unix sockets,
    /// count as one.
    pub sessions_of_one_max: usize,
    /// Connections at once; each takes a descriptor.
    pub connections_max: usize,
    /// Memory for data on its way.
    pub pool: BufferPool,
    /// Changes with every start of the machine.
    pub boot: u128,
    #[doc(hidden)]
    pub sabotage: Option<Sabotage>,
}

impl Default for ServerOptions {
    /// 64 slots and 128 calls a connection, 16,384 sessions, 1,024 of them of one address,
    /// 65,536 connections, a lease of 60 s, 256 MiB of buffers.
    fn default() -> ServerOptions {
        ServerOptions {
            key: None,
            lease: Duration::from_secs(60),
            slots: 64,
            calls_max: 128,
            sessions_max: 16_384,
            sessions_of_one_max: 1024,
            connections_max: 65_536,
            pool: BufferPool::new(256 << 20, 64 << 20),
            boot: 0,
            sabotage: None,
        }
    }
}
