//! What versions of dray say to each other and leave to each other, as bytes that never change:
//! what was written once is read as it was meant, and what is written now was written then.
//!
//! Something new gets a line of its own (the tests say which). A line that does not hold any more is
//! another version: of the protocol, or of a file, see `docs/OPERATIONS.md`, "Versions of formats".
//! The lines of the former one stay, for it is still to be read.

#[path = "../common/mod.rs"]
mod common;
mod intents;
mod journal;
mod messages;
mod written;
