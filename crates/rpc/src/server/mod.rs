//! The server end: sessions that outlive connections, calls carried out once.

mod ahead;
mod connection;
mod door;
mod execute;
mod export;
mod exports;
mod grace;
mod identities;
mod intent;
mod journal;
mod journal_file;
mod keepsakes;
mod life;
mod options;
mod order;
mod recovery;
mod redone;
mod reply;
mod returning;
mod sabotage;
mod service;
mod session;
mod slots;
mod stable;
mod stalls;
mod stamps;
mod status;
mod tally;
mod tickets;
mod whereabouts;

pub use connection::{Admission, wanted_export};
pub use export::{Allow, Export};
pub use journal::{
    ANSWER_MAX_BYTES, INTENT_MAX_BYTES, Journal, Keepsake, MemoryJournal, SessionRecord, SlotLog,
    SlotRecord,
};
pub use journal_file::FileJournal;
pub use options::{Loss, ServerOptions};
pub use sabotage::Sabotage;
pub use service::Server;
pub use status::{ClientStatus, OperationStatus, ServerStatus};
pub use tally::RecoveryStatus;
