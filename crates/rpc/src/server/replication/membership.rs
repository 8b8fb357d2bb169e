//! Who is there, and who serves which slice: what all servers have to agree on.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use dray_core::Fut;

use super::lease::ServingLease;

/// A server, by its place in the definition of the projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerNumber(pub u16);

/// What a server writes through: the memory of one kernel for one mounted file system. What was written
/// and not synced is there. It outlives the server's process, and does not outlive its machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageCacheId(pub u64);

impl PageCacheId {
    /// Nothing is only in the memory of a machine: all that was written is on media.
    pub const SYNCED: PageCacheId = PageCacheId(0);

    /// That of the kernel of `boot_id` for the file system on device `device` (`st_dev` of stat(2)).
    /// Never [`PageCacheId::SYNCED`].
    pub fn of(boot_id: u128, device: u64) -> PageCacheId {
        let words = [boot_id as u64, (boot_id >> 64) as u64, device];
        // FNV-1a, by words: it need only differ.
        let hash = words.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, word| {
            (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3)
        });
        PageCacheId(hash.max(1))
    }
}

/// What all servers know of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SliceState {
    /// Who serves it.
    pub primary: ServerNumber,
    /// Greater with each server process that begins to serve it.
    pub epoch: u64,
    /// The backup has everything that clients rely on, and may take over.
    pub in_step: bool,
    /// The number of times that changes which were not synced may have been lost. To clients it is what
    /// tells one start of the server's machine from another.
    pub loss: u64,
    /// Clients have not sent everything again that the last of these losses may have undone.
    pub recovering: bool,
    /// Where that is which was written and perhaps not synced.
    pub page_cache: PageCacheId,
}

/// Which version of a slice's state was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Revision(pub u64);

/// A change of a slice's state: made as a whole, or not at all.
#[derive(Clone, Copy, Debug)]
pub struct SliceChange {
    /// The change is made if this is the state's revision; none: if there is no state.
    pub seen: Option<Revision>,
    /// And if this server is no member at that moment.
    pub gone: Option<ServerNumber>,
    /// The new state.
    pub next: SliceState,
}

/// The servers that are there, as one server sees them. Each call may fail at any time; a change whose
/// call failed may have been made.
pub trait Membership: Send + Sync + 'static {
    /// Who asks.
    fn me(&self) -> ServerNumber;

    /// Until when this server may answer.
    fn lease(&self) -> Arc<ServingLease>;

    /// Whether a server was a member when this one heard of it last.
    fn is_member(&self, server: ServerNumber) -> bool;

    /// The servers that were members when this one heard of them last.
    fn members(&self) -> BTreeSet<ServerNumber>;

    /// Whether a server is to serve nothing, as this one heard last: an administrator drains it. No slice
    /// is handed over to it.
    fn is_drained(&self, server: ServerNumber) -> bool;

    /// An administrator has all servers serve nothing for a while. Each time that one asks for that has a
    /// revision of its own. None: they serve.
    fn quiesced(&self) -> Option<Revision>;

    /// The state of a slice; none: nobody has served it so far. It is at least as new as what this server
    /// has changed before, and as every state reported to it before. What this server asked for before, with no
    /// outcome reported, is not carried out later.
    fn slice<'a>(&'a self, name: &'a str) -> Fut<'a, io::Result<Option<(SliceState, Revision)>>>;

    /// Changes the state of a slice. False: it is another one than was seen, or a server is there that
    /// should be gone.
    fn change<'a>(&'a self, name: &'a str, change: SliceChange) -> Fut<'a, io::Result<bool>>;
}
