//! The arguments of commands by which administrators look at servers and direct them.

use std::path::PathBuf;

use super::{examples, parse_number};

/// Show what servers and mounts of this machine are doing.
///
/// Exports, clients, operations in flight, rates over a short while, buffers in use. Root sees
/// the servers and mounts of everybody, others see their own mounts.
#[derive(Debug, clap::Args)]
#[command(after_help = examples::STATUS)]
pub struct StatusArgs {
    /// A path in a mount, an exported directory, an export's name, dray://HOST/NAME, or where a server
    /// listens (tcp://ADDRESS:PORT, a socket) [default: all of this machine]
    #[arg(value_name = "TARGET")]
    pub target: Option<PathBuf>,
    /// One JSON object a line for each server and mount
    #[arg(long)]
    pub json: bool,
    /// Time over which rates are taken, seconds; 0: no rates
    #[arg(long, value_name = "SECONDS", default_value = "0.5", value_parser = parse_number)]
    #[arg(allow_negative_numbers = true)]
    pub interval: f64,
}

/// End a client's session: its locks and open files are given back at once.
///
/// The client is notified. Its mount fails every call until it is unmounted and mounted again. To keep
/// it out, change allow= or the key.
#[derive(Debug, clap::Args)]
#[command(after_help = examples::EVICT)]
pub struct EvictArgs {
    /// Session number or host name, as `dray status` shows them
    #[arg(value_name = "CLIENT")]
    pub client: String,
    /// State directory of the server, where several run on this machine
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
}

/// Move everything away from a server of a projection with failover.
///
/// The other servers take its share over, without an error for anybody, and it gets nothing back. The
/// command returns when the server serves nothing any more: now it can be stopped. The drain ends when
/// the server is started again, or with --undo. It is refused while some part has no other server that
/// could take it over.
#[derive(Debug, clap::Args)]
#[command(after_help = examples::DRAIN)]
pub struct DrainArgs {
    /// The server, as `dray status` shows it; left out: the one of this machine
    #[arg(value_name = "SERVER")]
    pub server: Option<String>,
    /// Let the server have its share again
    #[arg(long)]
    pub undo: bool,
    /// State directory of the server to ask, where several run on this machine
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
}

/// Have all servers of a projection with failover hold new calls, as for a snapshot.
///
/// The command returns when no call is under way at any of its servers, and what was written is on media.
/// Clients wait, without an error where their mounts have no timeout=, until --undo. Ctrl-C stops the
/// waiting alone.
#[derive(Debug, clap::Args)]
#[command(after_help = examples::QUIESCE)]
pub struct QuiesceArgs {
    /// Name of the projection
    #[arg(value_name = "PROJECTION")]
    pub projection: String,
    /// Let calls go on
    #[arg(long)]
    pub undo: bool,
    /// State directory of the server to ask, where several run on this machine
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
}

/// Serve an export from what is at its directory now.
///
/// A server holds an export back while another file system is there than the one of the export. Its log
/// and `dray status` say so. If that one has been replaced for good,
/// this lets the export begin anew on what is there. Its clients have to mount anew.
#[derive(Debug, clap::Args)]
#[command(after_help = examples::ACCEPT)]
pub struct AcceptArgs {
    /// Name of the export
    #[arg(value_name = "EXPORT")]
    pub export: String,
    /// State directory of the server, where several run on this machine
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
}
