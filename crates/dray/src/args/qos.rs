//! The arguments of `dray qos`.

use std::path::PathBuf;

use clap::Subcommand;

use super::examples;

/// What to do with shares of bandwidth.
#[derive(Debug, Subcommand)]
pub enum QosCommand {
    Set(QosSetArgs),
    Remove(QosRemoveArgs),
    Show(QosShowArgs),
    Top(QosTopArgs),
}

/// Make a rule, or another one of a rule that is there. It counts at once.
///
/// The other servers of a projection follow. Exit code 3 says that one of them is away, which follows when it is
/// back. Exit code 1 says that one of them refuses.
///
/// KEY is one of those of [qos.rule.NAME] in the configuration. These are match.job, match.user,
/// match.group, match.project, match.node, match.op, match.export, within, each, weight, reservation,
/// reservation_ops, limit, limit_ops, burst, background and in_service. A list has commas.
#[derive(Debug, clap::Args)]
#[command(after_help = examples::QOS_SET)]
pub struct QosSetArgs {
    /// Name of the rule
    #[arg(value_name = "NAME")]
    pub name: String,
    /// What it matches and gives
    #[arg(value_name = "KEY=VALUE", required = true)]
    pub settings: Vec<String>,
    /// The next start of the server has it, too
    #[arg(long)]
    pub keep: bool,
    /// State directory of the server, where several run on this machine
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
}

/// Remove a rule. It counts no longer at once, at the other servers of a projection too.
#[derive(Debug, clap::Args)]
pub struct QosRemoveArgs {
    /// Name of the rule
    #[arg(value_name = "NAME")]
    pub name: String,
    /// The next start of the server does not have it, either
    #[arg(long)]
    pub keep: bool,
    /// State directory of the server, where several run on this machine
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
}

/// Show the rules and classes of each export, at all servers of a projection. Exit code 3: one of them is away.
#[derive(Debug, clap::Args)]
pub struct QosShowArgs {
    /// As JSON, a line for each server
    #[arg(long)]
    pub json: bool,
    /// State directory of the server, where several run on this machine
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
}

/// Show what each class has, again each second.
#[derive(Debug, clap::Args)]
pub struct QosTopArgs {
    /// As JSON, a line for each server and second
    #[arg(long)]
    pub json: bool,
    /// End after so many; 0: never
    #[arg(long, value_name = "N", default_value = "0")]
    pub count: u64,
    /// State directory of the server, where several run on this machine
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
}
