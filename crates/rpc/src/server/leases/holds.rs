//! Holds: another server of the projection is about to change what is leased here (ADR 0056).
//!
//! The client that changes it says so before. What it names is marked and recalled, as for a change of this server.
//! It is not leased until the client says that the change is over. A client that dies says nothing more, so a hold
//! ends by itself. By then its change has been carried out, or never will be.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::{Errno, IdMap, Result};
use dray_rt::{Instant, now};

use super::change::LeaseChange;

/// Holds of one session. Each multiple change of a client has three at most.
const OF_SESSION_MAX: usize = 1024;
/// Holds of an export: 4 MB.
const MAX: usize = 16_384;
/// What has ended by itself is looked for so often.
const SWEEP_TIME: Duration = Duration::from_secs(1);

/// The holds of an export.
#[derive(Default)]
pub(crate) struct LeaseHolds(Mutex<State>);

#[derive(Default)]
struct State {
    sessions: IdMap<u64, HashMap<u64, Held>>,
    count: usize,
    swept: Option<Instant>,
}

struct Held {
    /// Keeps the marks.
    _change: Box<LeaseChange>,
    until: Instant,
}

impl LeaseHolds {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps what a hold of the session has marked, for `time` at most. Errors: `EAGAIN` if there are as many as
    /// there may be.
    pub(crate) fn keep(
        &self,
        (session, number): (u64, u64),
        change: Box<LeaseChange>,
        time: Duration,
    ) -> Result<()> {
        let now = now();
        let mut state = self.state();
        let ended = state.sweep(now);
        let held = Held { _change: change, until: now + time };
        let (count, of_session) = (state.count, state.sessions.entry(session).or_default());
        let is_new = !of_session.contains_key(&number);
        let too_many = is_new && (count >= MAX || of_session.len() >= OF_SESSION_MAX);
        let before = if too_many { Some(held) } else { of_session.insert(number, held) };
        state.count += usize::from(is_new && !too_many);
        drop(state);
        drop((ended, before)); // marks are taken away without the lock
        if too_many { Err(Errno::EAGAIN.into()) } else { Ok(()) }
    }

    /// Ends a hold. Whether it has lasted until now.
    pub(crate) fn release(&self, session: u64, number: u64) -> bool {
        let mut state = self.state();
        let Some(of_session) = state.sessions.get_mut(&session) else { return false };
        let held = of_session.remove(&number);
        if of_session.is_empty() {
            state.sessions.remove(&session);
        }
        state.count -= usize::from(held.is_some());
        drop(state);
        held.is_some_and(|held| now() < held.until)
    }

    /// How many there are.
    #[cfg(test)]
    fn count(&self) -> usize {
        self.state().count
    }
}

impl State {
    /// Takes out what has ended by itself, at times.
    fn sweep(&mut self, now: Instant) -> Vec<Held> {
        if self.swept.is_some_and(|swept| now < swept + SWEEP_TIME) {
            return Vec::new();
        }
        self.swept = Some(now);
        let mut ended = Vec::new();
        self.sessions.retain(|_, of_session| {
            ended.extend(of_session.extract_if(|_, held| held.until <= now).map(|(_, held)| held));
            !of_session.is_empty()
        });
        self.count -= ended.len();
        ended
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Weak};

    use dray_core::FileId;
    use dray_rt::{DriverKind, Executor, sleep};

    use super::*;
    use crate::server::leases::marks::Part;
    use crate::server::leases::{LeaseHolder, LeaseTable};
    use crate::server::options::ServerOptions;

    const TIME: Duration = Duration::from_secs(30);

    struct Site {
        table: Arc<LeaseTable>,
        holder: Arc<LeaseHolder>,
        holds: LeaseHolds,
    }

    impl Site {
        fn id(ino: u64) -> FileId {
            FileId { ino, generation: 0 }
        }

        fn leases(&self, ino: u64) -> bool {
            let since = self.table.since(&self.holder);
            self.table.lease(&self.holder, since, &[], Part::Attributes(Site::id(ino)))
        }

        fn hold(&self, session: u64, number: u64, ino: u64) -> Result<()> {
            let mut change = LeaseChange::new(&self.table, None);
            change.attributes(Site::id(ino));
            self.holds.keep((session, number), change, TIME)
        }
    }

    fn simulate<F: Future<Output = ()>>(test: impl FnOnce(Site) -> F) {
        Executor::new(DriverKind::Simulated { seed: 1 }).unwrap().block_on(async {
            let table = Arc::new(LeaseTable::new(&ServerOptions::default(), false));
            let holder = Arc::new(LeaseHolder::new(&table, Weak::new(), "host"));
            test(Site { table, holder, holds: LeaseHolds::default() }).await;
        });
    }

    #[test]
    fn what_is_held_is_not_leased_until_the_hold_is_over() {
        simulate(|site| async move {
            site.hold(7, 1, 1).unwrap();
            assert!(!site.leases(1) && site.leases(2));
            assert!(!site.holds.release(8, 1) && !site.holds.release(7, 2) && !site.leases(1));
            assert!(site.holds.release(7, 1) && !site.holds.release(7, 1));
            assert!(site.leases(1));
        });
    }

    /// The second of two is of a change that was asked for again.
    #[test]
    fn a_hold_of_the_same_number_takes_the_place_of_the_first() {
        simulate(|site| async move {
            site.hold(7, 1, 1).unwrap();
            site.hold(7, 1, 1).unwrap();
            assert_eq!(site.holds.count(), 1);
            assert!(site.holds.release(7, 1) && site.leases(1));
        });
    }

    #[test]
    fn a_hold_of_a_client_that_has_died_ends_by_itself() {
        simulate(|site| async move {
            site.hold(7, 1, 1).unwrap();
            site.hold(7, 2, 2).unwrap();
            sleep(TIME).await;
            assert!(!site.holds.release(7, 2), "the change may have come too late for it");
            site.hold(8, 1, 3).unwrap();
            assert_eq!(site.holds.count(), 1);
            assert!(site.leases(1) && site.leases(2) && !site.leases(3));
        });
    }

    // proves: P273
    #[test]
    fn a_server_that_had_clients_leases_nothing_while_holds_of_before_may_count() {
        simulate(|site| async move {
            let options = ServerOptions::default();
            let table = Arc::new(LeaseTable::new(&options, false).of_several_servers(Some(TIME)));
            let holder = Arc::new(LeaseHolder::new(&table, Weak::new(), "host"));
            let site = Site { table, holder, ..site };
            assert!(site.leases(1), "it had no clients");
            site.table.had_clients(); // who had no leases may have had something held
            sleep(TIME - Duration::from_millis(1)).await;
            assert!(!site.leases(1) && !site.leases(2));
            sleep(Duration::from_millis(1)).await;
            assert!(site.leases(1) && site.leases(2));
        });
    }

    #[test]
    fn a_session_has_so_many_holds_and_no_more() {
        simulate(|site| async move {
            for number in 0..OF_SESSION_MAX as u64 {
                site.hold(7, number, 1).unwrap();
            }
            assert_eq!(site.hold(7, 1 << 20, 9).unwrap_err().errno(), Errno::EAGAIN);
            assert!(site.leases(9), "what is refused marks nothing");
            site.hold(7, 0, 1).unwrap();
            site.hold(8, 0, 1).unwrap();
            for number in 0..OF_SESSION_MAX as u64 {
                assert!(site.holds.release(7, number));
            }
            assert!(site.hold(7, 1 << 20, 9).is_ok() && site.holds.count() == 2);
        });
    }
}
