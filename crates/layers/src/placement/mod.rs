//! Placement: a projection over several servers, by a fixed mapping.
//!
//! [`Definition`] is what an administrator writes and all servers share. [`Placement`] is the mapping that
//! follows from it: which server has which file, name or block. docs/PLACEMENT.md specifies it, since data
//! on disks depend on it. [`PlacedFs`] is the file system over the servers, and [`placed_stack`] the same
//! for a front end.

mod definition;
mod file;
mod fs;
mod hash;
mod learning;
mod mapping;
mod parse;
mod places;
mod session;

pub use definition::{Definition, HashKind, Layout};
pub use fs::PlacedFs;
pub use mapping::{Placement, ServerIndex};
pub use parse::{DefinitionError, SERVERS_MAX, parse_definitions};
pub use session::placed_stack;
