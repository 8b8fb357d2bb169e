//! A membership in memory: for simulations, where it outlives the simulated servers.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::Fut;
use dray_rt::{Instant, random_u64, sleep};

use super::lease::{KEEP_ALIVE_EVERY, LEASE, ServingLease};
use super::membership::{Membership, Revision, ServerNumber, SliceChange, SliceState};

/// Longest time of a call on its way.
const WAY_MAX: Duration = Duration::from_millis(1);

/// What the servers of a simulation agree on. Cheap to clone.
#[derive(Clone, Default)]
pub struct MemoryRegistry(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// When the lease of each ends.
    members: BTreeMap<ServerNumber, Instant>,
    slices: BTreeMap<String, (SliceState, Revision)>,
    /// How often the primary of each slice became another one.
    moves: BTreeMap<String, u64>,
    revision: u64,
}

impl State {
    fn is_member(&self, server: ServerNumber) -> bool {
        self.members.get(&server).is_some_and(|until| dray_rt::now() < *until)
    }
}

impl MemoryRegistry {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state of a slice, as nobody but a test can see it at once.
    pub fn peek(&self, slice: &str) -> Option<SliceState> {
        self.lock().slices.get(slice).map(|(state, _)| *state)
    }

    /// How often the primary of a slice became another one.
    pub fn moves(&self, slice: &str) -> u64 {
        self.lock().moves.get(slice).copied().unwrap_or(0)
    }

    /// What `server` sees of it. It becomes a member by [`RegistryMember::keep_alive`].
    pub fn member(&self, server: ServerNumber) -> RegistryMember {
        RegistryMember { registry: self.clone(), me: server, lease: Arc::default() }
    }

    /// A call, there and back.
    async fn call<T>(&self, work: impl FnOnce(&mut State) -> T) -> io::Result<T> {
        sleep(WAY_MAX.mul_f64(random_u64() as f64 / u64::MAX as f64)).await;
        let done = work(&mut self.lock());
        sleep(WAY_MAX.mul_f64(random_u64() as f64 / u64::MAX as f64)).await;
        Ok(done)
    }
}

/// One server's view of a [`MemoryRegistry`].
pub struct RegistryMember {
    registry: MemoryRegistry,
    me: ServerNumber,
    lease: Arc<ServingLease>,
}

impl RegistryMember {
    /// Stays a member for as long as this runs, and for the rest of the lease.
    pub async fn keep_alive(&self) {
        loop {
            let sent = dray_rt::now();
            let renew = |state: &mut State| state.members.insert(self.me, dray_rt::now() + LEASE);
            if self.registry.call(renew).await.is_ok() {
                self.lease.prolong(sent);
            }
            sleep(KEEP_ALIVE_EVERY).await;
        }
    }
}

impl Membership for RegistryMember {
    fn me(&self) -> ServerNumber {
        self.me
    }

    fn lease(&self) -> Arc<ServingLease> {
        self.lease.clone()
    }

    fn is_member(&self, server: ServerNumber) -> bool {
        self.registry.lock().is_member(server)
    }

    fn is_drained(&self, _: ServerNumber) -> bool {
        false
    }

    fn slice<'a>(&'a self, name: &'a str) -> Fut<'a, io::Result<Option<(SliceState, Revision)>>> {
        Box::pin(self.registry.call(|state| state.slices.get(name).copied()))
    }

    fn change<'a>(&'a self, name: &'a str, change: SliceChange) -> Fut<'a, io::Result<bool>> {
        let SliceChange { seen, gone, next } = change;
        Box::pin(self.registry.call(move |state| {
            let before = state.slices.get(name).copied();
            let now = before.map(|(_, revision)| revision);
            if now != seen || gone.is_some_and(|gone| state.is_member(gone)) {
                return false;
            }
            state.revision += 1;
            let revision = Revision(state.revision);
            state.slices.insert(name.to_owned(), (next, revision));
            if before.is_some_and(|(before, _)| before.primary != next.primary) {
                *state.moves.entry(name.to_owned()).or_default() += 1;
            }
            true
        }))
    }
}
