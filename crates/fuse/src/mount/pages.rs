//! How many pages of a caller's memory one request may have.

use dray_core::IO_MAX_BYTES;

/// Bytes of a page of memory.
const PAGE_BYTES: usize = 4096;
/// Pieces of memory that a call may name (writev(2)) and still be one request. Each of them may begin
/// in the middle of a page.
const PIECES: usize = 16;
/// Pages of one request: those of the largest read or write, wherever its memory begins. Of fewer
/// the kernel makes two requests, between which others come.
pub(crate) const PAGES_MAX: usize = IO_MAX_BYTES / PAGE_BYTES + PIECES;

/// Pages of one request if its data are at most so many bytes.
pub(super) fn pages_of(io_bytes: usize) -> u16 {
    (io_bytes / PAGE_BYTES + PIECES).min(PAGES_MAX) as u16
}

/// What the kernel allows to mounts that are made from now on, pages (Linux 6.13; 256 before, and as
/// long as nobody changes it).
const LIMIT: &str = "/proc/sys/fs/fuse/max_pages_limit";

/// Has the kernel allow [`PAGES_MAX`], if it allows less. This is for all FUSE mounts of the machine;
/// they get what they ask for. Where it cannot be changed it stays.
pub(super) fn raise_limit() {
    let allowed = std::fs::read_to_string(LIMIT).ok().and_then(|text| text.trim().parse().ok());
    if allowed.is_some_and(|allowed: usize| allowed < PAGES_MAX) {
        let _ = std::fs::write(LIMIT, PAGES_MAX.to_string());
    }
}
