//! How a cache behaves.

use std::path::PathBuf;

use crate::rules::CacheRules;

/// A cache of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheOptions {
    /// The directory in which it lies; several mounts may share it.
    pub dir: PathBuf,
    /// Most bytes that all entries take.
    pub size_bytes: u64,
    /// Which files are kept.
    pub rules: CacheRules,
}
