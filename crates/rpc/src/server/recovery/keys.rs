//! The keys of tickets. The current key seals tickets, and tickets of the key before are still
//! believed.
//!
//! A ticket says what was true once, so it must end some time. A key is replaced at the first start
//! after a day, and believed until it is replaced again. Clients that are there when a server
//! starts open their files again, and then get tickets of the new key. So no ticket of a file that
//! stays open runs out (docs/adr/0021-ends-of-state.md).

use std::time::Duration;

use dray_rt::{random_bytes, wall_clock};

use crate::server::journal::{Journal, PersistentRecord};
use crate::wire::{Input, Wire};

/// A key that is older at the start of a server is replaced.
const AGE_MAX: Duration = Duration::from_secs(24 * 3600);

/// The keys of one server epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TicketKeys {
    pub(crate) current: [u8; 32],
    pub(crate) previous: Option<[u8; 32]>,
    /// The time when the current key was made, seconds by the wall clock.
    made_s: u64,
}

impl TicketKeys {
    /// For the epoch that begins now. Keys that cannot be kept are made anew in the next epoch.
    pub(crate) fn begin(journal: &dyn Journal) -> TicketKeys {
        let kept = journal.kept(PersistentRecord::TicketKey).unwrap_or_else(|error| {
            log::error!("the key of tickets cannot be read, and begins anew: {error}");
            None
        });
        let former = kept.as_deref().and_then(TicketKeys::from_bytes);
        let now_s = wall_clock().as_secs();
        // A key from the future says that a clock is wrong or the file is garbage: else it might
        // never end.
        let fresh = |keys: &TicketKeys| now_s.abs_diff(keys.made_s) < AGE_MAX.as_secs();
        if let Some(keys) = former.filter(fresh) {
            return keys;
        }
        let mut current = [0; 32];
        random_bytes(&mut current);
        let previous = former.map(|keys| keys.current);
        let keys = TicketKeys { current, previous, made_s: now_s };
        match journal.keep(PersistentRecord::TicketKey, &keys.to_bytes()) {
            Ok(()) => keys,
            Err(error) => {
                log::error!("cannot keep the key of tickets: {error}");
                keys.unless_kept(former)
            }
        }
    }

    /// A key that could not be kept would be believed by nobody later: the former keys go on.
    fn unless_kept(self, former: Option<TicketKeys>) -> TicketKeys {
        former.unwrap_or_else(|| {
            log::error!("after a restart clients open files again with the rights of their users");
            self
        })
    }

    /// The key comes first, which is all that earlier releases wrote, and read.
    fn to_bytes(self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.current.put(&mut bytes);
        self.made_s.put(&mut bytes);
        self.previous.into_iter().for_each(|key| key.put(&mut bytes));
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<TicketKeys> {
        let mut input = Input(bytes);
        let current = input.get().ok()?;
        // A key that an earlier release made is of an unknown age.
        let made_s = input.get().unwrap_or(0);
        Some(TicketKeys { current, made_s, previous: input.get().ok() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::journal::MemoryJournal;
    use dray_rt::{DriverKind, Executor, sleep};

    const HOUR: Duration = Duration::from_secs(3600);

    // proves: P123
    #[test]
    fn a_key_is_replaced_at_the_first_start_after_a_day_and_believed_until_the_next() {
        let journal = MemoryJournal::default();
        Executor::new(DriverKind::Simulated { seed: 1 }).unwrap().block_on(async {
            let first = TicketKeys::begin(&journal);
            assert_eq!(first.previous, None);
            for _ in 0..23 {
                sleep(HOUR).await;
                assert_eq!(TicketKeys::begin(&journal), first);
            }
            sleep(2 * HOUR).await;
            let second = TicketKeys::begin(&journal);
            assert_eq!(second.previous, Some(first.current));
            assert_ne!(second.current, first.current);
            assert_eq!(TicketKeys::begin(&journal), second);
            sleep(100 * HOUR).await; // one that ran for long
            let third = TicketKeys::begin(&journal);
            assert_eq!(third.previous, Some(second.current));
        });
    }

    #[test]
    fn a_key_from_the_future_is_replaced() {
        let journal = MemoryJournal::default();
        Executor::new(DriverKind::Simulated { seed: 1 }).unwrap().block_on(async {
            let keys = TicketKeys { current: [7; 32], previous: None, made_s: u64::MAX };
            journal.keep(PersistentRecord::TicketKey, &keys.to_bytes()).unwrap();
            assert_eq!(TicketKeys::begin(&journal).previous, Some([7; 32]));
        });
    }

    #[test]
    fn the_key_of_an_earlier_release_is_believed_once_more() {
        let journal = MemoryJournal::default();
        journal.keep(PersistentRecord::TicketKey, &[7; 32]).unwrap();
        Executor::new(DriverKind::Simulated { seed: 1 }).unwrap().block_on(async {
            let keys = TicketKeys::begin(&journal);
            assert_eq!(keys.previous, Some([7; 32]));
            let kept = journal.kept(PersistentRecord::TicketKey).unwrap().unwrap();
            assert_eq!(kept[..32], keys.current, "where an earlier release looks for it");
        });
    }
}
