//! A membership in memory: for simulations, where it outlives the simulated servers.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::Fut;
use dray_rt::{Instant, random_u64, sleep};

use super::lease::{KEEP_ALIVE_EVERY, LEASE, MARGIN, ServingLease};
use super::membership::{Membership, Revision, ServerNumber, SliceChange, SliceState};

/// Longest time of a call on its way.
const WAY_MAX: Duration = Duration::from_millis(1);
/// How long a server that is cut off waits for an answer.
const SILENCE: Duration = Duration::from_millis(400);

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
    /// Servers that do not reach it.
    cut_off: BTreeSet<ServerNumber>,
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

    /// Cuts a server off, or lets it reach the membership again.
    pub fn cut_off(&self, server: ServerNumber, is_cut_off: bool) {
        let mut state = self.lock();
        match is_cut_off {
            true => state.cut_off.insert(server),
            false => state.cut_off.remove(&server),
        };
    }

    /// How often the primary of a slice became another one.
    pub fn moves(&self, slice: &str) -> u64 {
        self.lock().moves.get(slice).copied().unwrap_or(0)
    }

    /// What `server` sees of it. It becomes a member by [`RegistryMember::keep_alive`].
    pub fn member(&self, server: ServerNumber) -> RegistryMember {
        let lease = Arc::new(ServingLease::within(LEASE));
        RegistryMember { registry: self.clone(), me: server, lease, clock: 1.0 }
    }

    /// One way of a call. Errors: the server has been cut off.
    async fn way(&self, of: ServerNumber) -> io::Result<()> {
        sleep(WAY_MAX.mul_f64(random_u64() as f64 / u64::MAX as f64)).await;
        if !self.lock().cut_off.contains(&of) {
            return Ok(());
        }
        sleep(SILENCE).await;
        Err(io::Error::from_raw_os_error(libc::ETIMEDOUT))
    }
}

/// One server's view of a [`MemoryRegistry`].
pub struct RegistryMember {
    registry: MemoryRegistry,
    me: ServerNumber,
    lease: Arc<ServingLease>,
    /// What its clock takes for a second, seconds.
    clock: f64,
}

impl RegistryMember {
    /// With a clock that takes this for a second, seconds: from 0.8 to 1.2.
    pub fn with_clock(self, clock: f64) -> RegistryMember {
        let lease = Arc::new(ServingLease::of_length((LEASE - MARGIN).mul_f64(clock)));
        RegistryMember { lease, clock, ..self }
    }

    /// A call, there and back.
    async fn call<T>(&self, work: impl FnOnce(&mut State) -> T) -> io::Result<T> {
        self.registry.way(self.me).await?;
        let done = work(&mut self.registry.lock());
        self.registry.way(self.me).await?; // it has been made all the same
        Ok(done)
    }

    /// Stays a member for as long as this runs, and for the rest of the lease.
    pub async fn keep_alive(&self) {
        loop {
            let sent = dray_rt::now();
            let renew = |state: &mut State| state.members.insert(self.me, dray_rt::now() + LEASE);
            if self.call(renew).await.is_ok() {
                self.lease.prolong(sent);
            }
            sleep(KEEP_ALIVE_EVERY.mul_f64(self.clock)).await;
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
        let state = self.registry.lock();
        // A server that is cut off believes what it heard last.
        state.cut_off.contains(&self.me) || state.is_member(server)
    }

    fn members(&self) -> BTreeSet<ServerNumber> {
        let state = self.registry.lock();
        let is_cut_off = state.cut_off.contains(&self.me);
        let is_member = |server: &ServerNumber| is_cut_off || state.is_member(*server);
        state.members.keys().copied().filter(is_member).collect()
    }

    fn is_drained(&self, _: ServerNumber) -> bool {
        false
    }

    fn quiesced(&self) -> Option<Revision> {
        None
    }

    fn slice<'a>(&'a self, name: &'a str) -> Fut<'a, io::Result<Option<(SliceState, Revision)>>> {
        Box::pin(self.call(|state| state.slices.get(name).copied()))
    }

    fn change<'a>(&'a self, name: &'a str, change: SliceChange) -> Fut<'a, io::Result<bool>> {
        let SliceChange { seen, gone, next } = change;
        Box::pin(self.call(move |state| {
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
