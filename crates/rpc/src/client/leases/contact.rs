//! Until when leases may be believed: a term after the sending of the last call that was answered.
//! The server counts from the arrival of that call, and longer. So it is never the first of the two
//! to stop waiting (Gray and Cheriton, "Leases", SOSP 1989, section 3).

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dray_rt::{Instant, now_with_sleeps};

/// The last contact with the server, and the term of its leases. Both in nanoseconds.
#[derive(Default)]
pub(super) struct Contact {
    last: AtomicU64,
    /// 0: the server leases nothing.
    term: AtomicU64,
}

impl Contact {
    /// The server's term of leases; zero if it leases nothing.
    pub(super) fn set_term(&self, term: Duration) {
        let nanos = u64::try_from(term.as_nanos()).unwrap_or(u64::MAX);
        self.term.store(nanos, Ordering::Relaxed);
    }

    pub(super) fn term(&self) -> Duration {
        Duration::from_nanos(self.term.load(Ordering::Relaxed))
    }

    /// Whether the server leases anything.
    pub(super) fn has_term(&self) -> bool {
        self.term.load(Ordering::Relaxed) != 0
    }

    /// A call was answered that was sent at `sent`.
    pub(super) fn answered(&self, sent: Instant) {
        if self.last.load(Ordering::Relaxed) < sent.as_nanos() {
            // Two threads may overwrite each other: the term then ends a moment too early.
            self.last.store(sent.as_nanos(), Ordering::Relaxed);
        }
    }

    /// How long leases may be believed from now on; zero if not at all.
    pub(super) fn rest(&self) -> Duration {
        let [last, term] = [&self.last, &self.term].map(|one| one.load(Ordering::Relaxed));
        let end = last.saturating_add(term);
        Duration::from_nanos(end.saturating_sub(now_with_sleeps().as_nanos()))
    }
}

#[cfg(test)]
mod tests {
    use dray_rt::{DriverKind, Executor, sleep};

    use super::*;

    #[test]
    fn leases_end_a_term_after_the_sending_of_the_last_call_that_was_answered() {
        Executor::new(DriverKind::Simulated { seed: 1 }).unwrap().block_on(async {
            let (contact, second) = (Contact::default(), Duration::from_secs(1));
            assert!(!contact.has_term() && contact.rest().is_zero());
            contact.set_term(5 * second);
            sleep(10 * second).await;
            assert!(contact.rest().is_zero(), "nothing was answered");
            let sent = now_with_sleeps();
            sleep(second).await;
            contact.answered(sent);
            assert_eq!(contact.rest(), 4 * second);
            contact.answered(Instant::from_nanos(sent.as_nanos() - 1));
            assert_eq!(contact.rest(), 4 * second, "an earlier call makes it no shorter");
            sleep(4 * second).await;
            assert!(contact.rest().is_zero());
            contact.answered(now_with_sleeps());
            assert_eq!(contact.rest(), 5 * second, "the next contact makes them valid again");
        });
    }
}
