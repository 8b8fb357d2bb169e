//! Whether a thread makes calls of several clients.

use std::cell::Cell;
use std::time::Duration;

use dray_rt::Instant;

/// So long after calls of two clients a thread counts as theirs.
const LASTS: Duration = Duration::from_secs(1);

thread_local! {
    /// The client of the last call; 0 is the server itself.
    static CLIENT: Cell<u64> = const { Cell::new(0) };
    /// When a call of another client came after one of the same client.
    static CHANGED: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Notes that this thread makes a call of `client`. Costs a look at the clock only where it was another one before.
pub(super) fn note(client: u64) {
    let before = CLIENT.get();
    if client == 0 || client == before {
        return;
    }
    CLIENT.set(client);
    if before != 0 {
        CHANGED.set(Some(dray_rt::now()));
    }
}

/// Whether this thread has made calls of several clients within the last second.
pub(super) fn are_several() -> bool {
    CHANGED.get().is_some_and(|changed| changed.elapsed() <= LASTS)
}
