//! The server end: sessions that outlive connections, calls carried out once.

mod as_server;
mod call_admission;
mod connection;
mod connection_limits;
mod counted;
mod exactly_once;
mod execute;
mod export;
mod exports;
mod forwarding;
mod identities;
mod journal;
mod leases;
mod log_throttle;
mod mappings;
mod open_ahead;
mod options;
mod ranges;
mod recovery;
mod refusals;
mod replication;
mod reply;
mod sabotage;
mod service;
mod session;
mod sessions;
mod stalls;
mod status;
mod tickets;
mod watchers;
mod withdrawal;

pub use connection::{
    Admission, AuditExport, AuditPort, AuditReader, ReplicaPort, ReplicaTerms, wanted_audit,
    wanted_export, wanted_slice,
};
pub use export::{Allow, Export, ExportDefinition};
pub use forwarding::ForwardingNodes;
pub use journal::file::FileJournal;
pub use journal::{
    ANSWER_MAX_BYTES, INTENT_MAX_BYTES, Journal, MemoryJournal, PersistentRecord, SessionRecord,
    SlotLog, SlotRecord,
};
pub use leases::{LeaseStatus, OutsideStatus};
pub use options::{ServerOptions, StateLoss};
pub use recovery::tally::RecoveryStatus;
pub use replication::{
    BatchTaker, HandOverRefusal, JournalReplica, Membership, MemoryRegistry, PageCacheId,
    RegistryMember, ReplicaLink, ReplicaRefusal, Revision, ServerNumber, ServingLease, SliceChange,
    SliceOptions, SliceServer, SliceState, WireLink,
};
#[cfg(feature = "sabotage")]
pub use sabotage::Sabotage;
pub use service::Server;
pub use status::{ClientStatus, OperationStatus, RefusedStatus, ServerStatus};
pub use withdrawal::{ExportLost, WithdrawnExport};
