//! The objects that the mount holds at the server: open files, their tickets, locks, and closes
//! that are not confirmed. The client asks for all of it again when a server has lost its state.

pub(crate) mod aliases;
pub(crate) mod closes;
pub(crate) mod files;
pub(crate) mod lock_leases;
pub(crate) mod locks;
mod ranges;
pub(crate) mod tickets;
