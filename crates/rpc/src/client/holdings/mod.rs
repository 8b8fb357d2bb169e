//! What the mount has at the server, to have it again from one that lost its state: open
//! files, their tickets, locks, and closes that were not heard of yet.

pub(crate) mod aliases;
pub(crate) mod closes;
pub(crate) mod files;
pub(crate) mod locks;
mod ranges;
pub(crate) mod tickets;
