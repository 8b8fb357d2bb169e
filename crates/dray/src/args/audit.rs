//! The arguments of `dray audit`.

use std::path::PathBuf;

use clap::{Subcommand, ValueHint};

use super::examples;

/// Read the audit of an export: who changed, opened, closed what, and who was refused.
///
/// A server keeps it where `audit` is set for an export (dray-serve(1)). Consumers have names and
/// bookmarks, and keep what they have not seen from being removed. docs/AUDIT.md says what is
/// recorded, and what survives what.
#[derive(Debug, clap::Args)]
#[command(after_help = examples::AUDIT)]
pub struct AuditArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: AuditCommand,
}

/// What to do with an audit.
#[derive(Debug, Subcommand)]
pub enum AuditCommand {
    /// Add a consumer, or change what one wants
    Register(RegisterArgs),
    /// Remove a consumer: it keeps no records any more
    Deregister(ConsumerArgs),
    /// Show the consumers
    List(LogArgs),
    /// Print records as they come
    Follow(FollowArgs),
    /// Move a consumer's bookmark: what is before it may be removed
    Clear(ClearArgs),
    /// Print the records of the whole log that fit
    Search(SearchArgs),
    /// Check that no record was changed, cut, exchanged or removed
    Verify(VerifyArgs),
    /// Show the size of the log, and how far its consumers are
    Stat(LogArgs),
}

/// Which log.
#[derive(Clone, Debug, clap::Args)]
pub struct LogArgs {
    /// Name of an export of this machine, or a target such as dray://io1,io2/home: the log of each
    /// of these servers
    #[arg(value_name = "EXPORT")]
    pub export: String,
    /// For a target: none or psk:FILE [default: psk:/etc/dray/key if you can read that]
    #[arg(long, value_name = "none|psk:FILE")]
    pub auth: Option<String>,
    /// State directory of the server, where several of this machine have such an export
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub state: Option<PathBuf>,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// Which consumer of which log.
#[derive(Debug, clap::Args)]
pub struct ConsumerArgs {
    /// Which log.
    #[command(flatten)]
    pub log: LogArgs,
    /// Name of the consumer
    #[arg(value_name = "NAME")]
    pub name: String,
}

/// Which records. Denied accesses are of any kind.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct FilterArgs {
    /// Kinds: all, change, denied, or names such as create, unlink, rename, open, close
    #[arg(long, value_name = "KIND,...", value_delimiter = ',')]
    pub kinds: Vec<String>,
    /// A user, by name or number
    #[arg(long, value_name = "USER")]
    pub user: Option<String>,
    /// A batch job
    #[arg(long, value_name = "JOB")]
    pub job: Option<String>,
    /// A path from the root of the export on, and all beneath it
    #[arg(long, value_name = "PATH")]
    pub path: Option<String>,
}

/// Of `register`.
#[derive(Debug, clap::Args)]
pub struct RegisterArgs {
    /// Which consumer.
    #[command(flatten)]
    pub consumer: ConsumerArgs,
    /// What it wants.
    #[command(flatten)]
    pub filter: FilterArgs,
    /// Begin with the oldest record that is there [default: with the next one]
    #[arg(long)]
    pub oldest: bool,
    /// Without a move of its bookmark for so long it keeps no records: seconds, or 12h, 7d
    #[arg(long, value_name = "TIME")]
    pub idle_max: Option<String>,
}

/// Of `follow`.
#[derive(Debug, clap::Args)]
pub struct FollowArgs {
    /// Which log.
    #[command(flatten)]
    pub log: LogArgs,
    /// The consumer whose filter and bookmark count; the bookmark moves behind what was printed
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// The record to begin with [default: the bookmark; without a name the next record]
    #[arg(long, value_name = "INDEX")]
    pub from: Option<u64>,
    /// End when there are no more records
    #[arg(long)]
    pub once: bool,
    /// What is wanted, without a name.
    #[command(flatten)]
    pub filter: FilterArgs,
}

/// Of `clear`.
#[derive(Debug, clap::Args)]
pub struct ClearArgs {
    /// Which consumer.
    #[command(flatten)]
    pub consumer: ConsumerArgs,
    /// The last record that is done with [default: the last one there is]
    #[arg(long, value_name = "INDEX")]
    pub to: Option<u64>,
}

/// Of `search`.
#[derive(Debug, clap::Args)]
pub struct SearchArgs {
    /// Which log.
    #[command(flatten)]
    pub log: LogArgs,
    /// Which records.
    #[command(flatten)]
    pub filter: FilterArgs,
    /// From this time on: 2026-11-27, 2026-11-27T19:30:00 (UTC), seconds since 1970, or 2h for
    /// two hours ago
    #[arg(long, value_name = "TIME")]
    pub since: Option<String>,
    /// Before this time
    #[arg(long, value_name = "TIME")]
    pub until: Option<String>,
    /// Denied accesses only
    #[arg(long)]
    pub denied: bool,
}

/// Of `verify`.
#[derive(Debug, clap::Args)]
pub struct VerifyArgs {
    /// Name of an export of this machine
    #[arg(value_name = "EXPORT")]
    pub export: String,
    /// Taken for a better message: a key belongs to a target, and no target is verified.
    #[arg(long, hide = true)]
    pub auth: Option<String>,
    /// State directory of the server, where several of this machine have such an export
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub state: Option<PathBuf>,
    /// As JSON
    #[arg(long)]
    pub json: bool,
    /// A hash that an earlier `verify` has shown, INDEX:HASH: the log must have it still
    #[arg(long, value_name = "INDEX:HASH")]
    pub anchor: Option<String>,
}
