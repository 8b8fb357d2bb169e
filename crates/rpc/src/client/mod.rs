//! The client end: a `FileSystem` that sends its operations to a server.
//!
//! A [`ClientSession`] is what the server knows of a mount; it outlives connections. Each thread
//! that works for the mount attaches a channel of its own, with one connection, so that a call
//! crosses no thread. Calls under way are kept until they are answered, and are sent again after a
//! reconnection. The server's replay slots make that harmless.

mod adaptive_choice;
mod audit;
mod channel;
mod connect_error;
mod control;
mod dirty_log;
mod durability;
mod failed_sync;
mod file;
mod fs;
mod holdings;
mod kept_writes;
mod leased_directory;
mod leases;
mod link;
mod locking;
mod memory;
mod open_ahead;
mod replay;
mod session;
mod session_group;
mod slots;
mod split_read;
mod sync_scheduler;
mod upper_leases;

pub use audit::{AuditError, AuditLink};
pub use channel::ChannelStats;
pub use connect_error::ConnectError;
pub use dirty_log::{
    DirtyLogSummary, LocalLogDisk, LogDisk, LogFile, LogLock, WriteBackOptions,
    dirty_log_summaries, dirty_log_summaries_on, left_dirty_bytes, read_any_log, read_written_log,
};
pub use durability::{LossEvent, UnsyncedStatus};
pub use fs::RemoteFs;
pub use kept_writes::{KeptWritesStatus, LeftBehind};
pub use leases::{LeaseGroup, LeaseMemoryStatus, LeaseShare, LeaseWish};
pub use memory::SessionMemory;
pub use open_ahead::OpenAheadStats;
pub use session::{ClientOptions, ClientSession, SessionStatus};
pub use session_group::SessionGroup;
