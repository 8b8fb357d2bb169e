//! Ranges of files that were read are kept on a local disk of the client (ADR 0050).
//!
//! [`CachedFs`] stands around a client's file system. A file that is opened for reading is kept under its
//! [`FileVersion`]: its size and times. Reads go to the local disk while the server's lease on the attributes
//! says that the file still has that version. Every change of a file breaks that lease, so a read never
//! sees what was changed before it. Without a lease all reads go to the server.
//!
//! The files of the cache are named by file and version, so versions never mix. What a
//! process that died had not noted in an entry's map is fetched again. A full disk makes the cache give
//! up what was used least lately. Other errors of the local disk reach nobody: the read goes to the server.

mod blocks;
mod changes;
mod copy;
mod entry;
mod eviction;
mod file;
mod fs;
mod jobs;
mod key;
mod map_file;
mod options;
mod room;
mod rules;
mod session;
mod store;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_full_disk;
#[cfg(test)]
mod tests_openings;

pub use blocks::BLOCK_BYTES;
pub use eviction::{CacheUse, clear, is_cache, list, usage};
pub use fs::{CachedFs, LeasedAttributes, VersionSource};
pub use key::{EntryKey, FileVersion};
pub use map_file::EntryMap;
pub use options::CacheOptions;
pub use rules::{CacheRule, CacheRules, parse_size};
pub use session::CachedSession;
pub use store::{CacheCounts, LocalCache, MountFacts};

/// The extended attribute by which programs ask for the state of a file, and pin or drop it. It is answered
/// by the mount, and never reaches a server.
pub const STATE_XATTR: &[u8] = b"user.dray.cache";
