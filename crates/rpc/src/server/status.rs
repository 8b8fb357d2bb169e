//! What a server is doing, for `dray status`.

use std::time::Duration;

use dray_core::{Context, Op};
use dray_rt::Instant;

use crate::server::tally::RecoveryStatus;

/// A server's exports, clients and calls under way.
#[derive(Clone, Debug, Default)]
pub struct ServerStatus {
    /// Names of the exports, and what is below each.
    pub exports: Vec<(String, String)>,
    /// Everybody who has a session.
    pub clients: Vec<ClientStatus>,
    /// Calls that are being carried out.
    pub operations: Vec<OperationStatus>,
    /// Buffers lent, bytes.
    pub buffer_used_bytes: usize,
    /// Buffers that may be lent, bytes.
    pub buffer_limit_bytes: usize,
    /// What a loss of the machine's power cost.
    pub recovery: RecoveryStatus,
}

/// One session.
#[derive(Clone, Debug)]
pub struct ClientStatus {
    /// Number to evict it by.
    pub session: u64,
    /// Host name that it gave.
    pub host: String,
    /// Address that it comes from.
    pub peer: String,
    /// Export that it uses.
    pub export: String,
    /// Connections now.
    pub connections: usize,
    /// Open files.
    pub files: usize,
    /// Calls carried out.
    pub calls: u64,
    /// Bytes that it read.
    pub read_bytes: u64,
    /// Bytes that it wrote.
    pub written_bytes: u64,
    /// How long it has had no connection.
    pub away: Option<Duration>,
}

/// A call under way.
#[derive(Clone, Debug)]
pub struct OperationStatus {
    /// Which operation.
    pub op: Op,
    /// Session that it belongs to.
    pub session: u64,
    /// Files that it is about, from the export's root on. Where the path is not known, or the
    /// file system did not tell it in time, the file's id.
    pub paths: Vec<String>,
    /// Caller.
    pub uid: u32,
    /// Caller's job, if known.
    pub job: String,
    /// How long it has been under way.
    pub age: Duration,
}

/// A call under way, as it is kept.
pub(crate) struct Running {
    pub(crate) op: Op,
    pub(crate) session: u64,
    pub(crate) cx: Context,
    pub(crate) since: Instant,
    pub(crate) body: Vec<u8>,
}
