//! The arguments of `dray cache`.

use std::path::PathBuf;

use clap::{Subcommand, ValueHint};

use super::examples;

/// What to do with the cache of a mount.
#[derive(Debug, Subcommand)]
pub enum CacheCommand {
    /// Fetch files of a mount, whole, into its cache
    Attach(CacheFiles),
    /// Drop files of a mount from its cache
    Detach(CacheFiles),
    /// Say how much of each file is there
    State(CacheFiles),
    /// Keep files that are in the cache from eviction
    Pin(CacheFiles),
    /// Let files be evicted again
    Unpin(CacheFiles),
    /// List what is in a cache
    List(CacheDir),
    /// Say how much there is in a cache
    Stats(CacheDir),
    /// Drop everything from a cache that no program has open
    Clear(CacheDir),
}

/// Files of a mount with `cache=DIR`.
#[derive(Debug, clap::Args)]
#[command(after_help = examples::CACHE)]
pub struct CacheFiles {
    /// Files, by their paths in the mount
    #[arg(value_name = "PATH", required = true, value_hint = ValueHint::AnyPath)]
    pub paths: Vec<PathBuf>,
    /// Also all files below directories
    #[arg(short, long)]
    pub recursive: bool,
    /// As JSON, a line for each file; no progress is shown
    #[arg(long)]
    pub json: bool,
}

/// A cache, whether it is used now or not.
#[derive(Debug, clap::Args)]
#[command(after_help = examples::CACHE)]
pub struct CacheDir {
    /// The directory, as in the mount option `cache=DIR`
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub dir: PathBuf,
    /// As JSON, a line for each file
    #[arg(long)]
    pub json: bool,
}
