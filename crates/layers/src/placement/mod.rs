//! Placement: a projection over several servers, by a fixed mapping.
//!
//! [`Definition`] is what an administrator writes and all servers share. [`Placement`] is the mapping that
//! follows from it: which server has which file, name or block. docs/PLACEMENT.md specifies it, since data
//! on disks depend on it. [`Slices`] says which session that is with failover. [`PlacedFs`] is the file system over servers that share one, and [`placed_stack`]
//! the same for a front end. [`OwnDisksFs`] and [`own_disks_stack`] are those over servers with their own
//! disks.

mod cluster;
mod created;
mod definition;
mod file;
mod fs;
mod guesses;
mod hash;
mod holds;
mod last_lookups;
mod learning;
mod looking;
mod mapping;
mod own_disks;
mod parse;
mod parts;
mod places;
mod servers;
mod session;
mod slices;
mod striped;

pub use cluster::{ClusterOptions, FAILOVER_SERVERS_MAX};
pub use definition::{Definition, HashKind, Layout};
pub use fs::PlacedFs;
pub use mapping::{Placement, ServerIndex};
pub use own_disks::{
    HOME, NAMES_DIR, OBJECTS_DIR, ObjectId, OwnDisksFs, SHARDS, TREE_LINK, WrongTree,
    find_wrong_tree, own_disks_stack, probe_target,
};
pub use parse::{DefinitionError, SERVERS_MAX, parse_definitions};
pub use places::FilePlaces;
pub use session::placed_stack;
pub use slices::{SliceIndex, Slices};
