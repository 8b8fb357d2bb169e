//! The layout of the memory of a session: where each word is.
//!
//! ```text
//! word 0     magic and version           word 4  the client's node
//! word 1     session, 0 before the first word 5  slots
//! word 2, 3  its secret                  word 6  instance of the server
//!                                        word 7  boot of its machine, folded to one word
//! word 8+2n  slot n: sequence << 32 | of a session that is over << 1 | in use
//! word 9+2n  the request that it is, or was last, in use for
//! behind the slots: handles that were closed and that the server may have open; 0: none
//! behind those, ten words each: locks held; the first word is 0, or kind and family, or 3: a
//! file whose locks may be leased, and the open file through which they are
//! behind those: places for tickets that were ever used; behind it, three words each: tickets
//! of open files; the first word is 0, or the number of the open file
//! behind those: numbers of files that a lookup may have opened, and nobody used so far; 0: none
//! behind those: places for names that were ever used; behind it, two words each: the request
//! by which an open file is known, or 0, and its number where that is another
//! behind those: 0, or 1 and whether the export is read only; its root, two words; its identity,
//! two words
//! behind those: how many processes have had it; the boot of the client's machine, two words
//! behind those, a word for each slot: the node of its request, 0: the client's own
//! behind those: the instance of the server where all locks are reclaimed, and the one where all
//! open files are reopened; 0: memory of an earlier release
//! ```
//! Each word is stored in one piece, a slot's request last and a lock's first word last. So a
//! successor finds the truth, whatever instruction the process died at. Memory of an earlier
//! release ends before the tickets, and is made longer.

use crate::wire::CallHead;

/// "dray ses" and the version of the layout, 2: 1 had neither closes nor locks.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"drayse\0\x02");
/// Bits of the version in the first word, the upper ones.
pub(super) const VERSION_BITS: u32 = 8;
pub(super) const SESSION: usize = 1;
pub(super) const SECRET: usize = 2;
pub(super) const NODE: usize = 4;
pub(super) const SLOTS: usize = 5;
pub(super) const INSTANCE: usize = 6;
pub(super) const BOOT: usize = 7;
pub(super) const FIRST_SLOT: usize = 8;
/// Slots that there is room for; a server that grants more sees this many used.
pub(crate) const SLOTS_MAX: usize = 1020;
pub(super) const FIRST_CLOSE: usize = FIRST_SLOT + 2 * SLOTS_MAX;
/// One-way closes that can be kept.
pub(crate) const CLOSES_MAX: usize = CallHead::ONE_WAY_MAX;
pub(super) const FIRST_LOCK: usize = FIRST_CLOSE + CLOSES_MAX;
pub(super) const LOCK_WORDS: usize = 10;
/// Locks that there is room for; a successor does not know of further ones.
pub(crate) const LOCKS_MAX: usize = 1024;
pub(super) const TICKETS_END: usize = FIRST_LOCK + LOCK_WORDS * LOCKS_MAX;
pub(super) const FIRST_TICKET: usize = TICKETS_END + 1;
pub(super) const TICKET_WORDS: usize = 3;
/// Tickets that there is room for: as many open files as a server gives one session. Pages
/// that no ticket was in are never touched.
pub(super) const TICKETS_MAX: usize = 1 << 20;
pub(super) const FIRST_OPEN_AHEAD: usize = FIRST_TICKET + TICKET_WORDS * TICKETS_MAX;
/// Files that lookups may have opened at once.
pub(crate) const OPEN_AHEAD_MAX: usize = 64;
pub(super) const ALIASES_END: usize = FIRST_OPEN_AHEAD + OPEN_AHEAD_MAX;
pub(super) const FIRST_ALIAS: usize = ALIASES_END + 1;
pub(super) const ALIASES_MAX: usize = TICKETS_MAX;
pub(super) const EXPORT: usize = FIRST_ALIAS + 2 * ALIASES_MAX;
pub(super) const EXPORT_KNOWN: u64 = 1;
pub(super) const EXPORT_READ_ONLY: u64 = 2;
pub(super) const PROCESSES: usize = EXPORT + 5;
pub(super) const OWN_BOOT: usize = PROCESSES + 1;
pub(super) const FIRST_NODE: usize = OWN_BOOT + 2;
pub(super) const RECLAIMED: usize = FIRST_NODE + SLOTS_MAX;
pub(super) const REOPENED: usize = RECLAIMED + 1;
pub(super) const WORDS: usize = REOPENED + 1;
/// No instance of a server has this number: they are drawn at random.
pub(super) const NO_INSTANCE: u64 = u64::MAX;
pub(super) const BYTES: usize = WORDS * 8;
/// From the memory of one session to the next in one file: whole pages, of 64 KiB at most.
pub(super) const STRIDE_BYTES: usize = BYTES.next_multiple_of(64 << 10);
/// The size of the memory of an earlier release.
pub(super) const OLD_BYTES: usize = TICKETS_END * 8;
/// Memory that nobody takes over has no tickets.
pub(super) const HEAP_WORDS: usize = FIRST_TICKET;
