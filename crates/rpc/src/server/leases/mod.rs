//! Leases: an answer to a client holds until the server asks it back (ADR 0049).
//!
//! An answer that is leased says so by its validity ([`grants`]). The table knows which session has
//! a lease of which file ([`table`], [`file_leases`]). A change marks what it changes ([`marks`]), recalls what
//! others have of it ([`recalls`]), and waits ([`change`]). A session is waited for as long as its client can
//! believe a lease; then its leases have ended ([`holder`]).
//!
//! Who has the only write lease of a file may keep what it writes. Nobody else is shown that file, or
//! changes it, before the lease has come back ([`writers`], ADR 0053).
//!
//! Who has the lease on the fcntl locks of a file decides on them ([`lock_leases`], ADR 0064).
//!
//! An export that is forwarded leases on what servers above have leased to it ([`above`], ADR 0061).
//!
//! Order of locks: a part of the table, and within it the state of a holder.

mod above;
mod change;
mod changed_files;
mod counts;
mod file_leases;
mod grants;
mod holder;
mod holds;
mod lock_leases;
mod marks;
mod outside;
mod recalls;
mod rests;
mod room;
mod table;
mod writers;

pub(crate) use above::SaidAbove;
pub(crate) use change::{LeaseChange, LeaseWaits};
pub(crate) use changed_files::ChangedFiles;
pub use counts::LeaseStatus;
pub(crate) use grants::LeaseGrants;
pub(crate) use holder::LeaseHolder;
pub(crate) use holds::LeaseHolds;
pub(crate) use lock_leases::LockCall;
pub(crate) use outside::OutsideChanges;
pub use outside::OutsideStatus;
pub(crate) use table::{LeaseSince, LeaseTable};
pub(crate) use writers::ShownFiles;
