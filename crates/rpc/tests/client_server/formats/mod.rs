//! The messages and files that versions of dray leave to each other, as bytes that never change.
//! Bytes that were written once are read as they were meant. Bytes written now are those written
//! then.
//!
//! Something new gets a line of its own (the tests say which). A line that does not hold any more
//! is another version: of the protocol, or of a file, see `docs/OPERATIONS.md`, "Versions of
//! formats". The lines of the former one stay, for it is still to be read.

mod intents;
mod journal;
mod messages;
mod written;
