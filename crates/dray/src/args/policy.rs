//! The arguments of `dray policy`.

use std::path::PathBuf;

use clap::{Subcommand, ValueHint};

use super::examples;

/// List, count or act on files by age, size, owner, path and last use.
///
/// Rules are [policy.NAME] tables of a file. The audit of the export says which files there are, so
/// no directory is walked (docs/AUDIT.md).
#[derive(Debug, clap::Args)]
#[command(after_help = examples::POLICY)]
pub struct PolicyArgs {
    /// The file with the rules [default: /etc/dray/policy.toml]
    #[arg(long, short, global = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,
    /// What to do.
    #[command(subcommand)]
    pub command: PolicyCommand,
}

/// What to do with policies.
#[derive(Debug, Subcommand)]
pub enum PolicyCommand {
    /// Read the log on, and act on the files that match
    Run(PolicyRunArgs),
    /// Show the policies
    List(PolicyListArgs),
    /// Say whether the rules are right
    Check,
}

/// Of `list`.
#[derive(Debug, clap::Args)]
pub struct PolicyListArgs {
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// Of `run`.
#[derive(Debug, clap::Args)]
pub struct PolicyRunArgs {
    /// Name of the policy
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Print the files that match, and run no command
    #[arg(long)]
    pub dry_run: bool,
    /// Look for files that the log does not know, too: walks the directory
    #[arg(long)]
    pub scan: bool,
    /// As JSON
    #[arg(long)]
    pub json: bool,
    /// Where the log is a target: none or psk:FILE [default: psk:/etc/dray/key if you can read that]
    #[arg(long, value_name = "none|psk:FILE")]
    pub auth: Option<String>,
    /// State directory of the server, where several of this machine have such an export
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub log_state: Option<PathBuf>,
    /// Directory of what policies know of files [default: policy/ in the state directory of servers]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub state: Option<PathBuf>,
}
