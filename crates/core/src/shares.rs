//! Shares of counted resources, such that no client can take all of a resource.
//!
//! A client may take one more only while it has fewer than are left. So one client alone gets half,
//! and `n` greedy clients get one part of `n + 1` each. The next client gets half of what is left.
//! This is the rule of dynamic thresholds with alpha 1 (Choudhury and Hahne, IEEE/ACM Transactions
//! on Networking 6(2), 1998).
//!
//! One machine can be any number of clients. So all clients of one address together have at most
//! three times what is left (alpha 3), which is three quarters. The memory for data is shared by
//! the same rule (`dray_fabric::PoolShare`).

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{ClientAddress, IdMap};

/// All clients of one address may have so many for each that is left.
const ADDRESS_PART: usize = 3;
/// A share held before may be had again as long as one in so many stays free.
const RECLAIMS_LEAVE_PART: usize = 8;

/// A limited resource, and what each client has of it.
pub struct Shares {
    limit: usize,
    state: Mutex<State>,
    /// As in the state, to be read without the mutex.
    used: AtomicUsize,
}

#[derive(Default)]
struct State {
    used: usize,
    /// By client. Clients that have nothing are not in it.
    holders: IdMap<u64, Holder>,
    /// The number that all clients of one address hold together, as above.
    addresses: IdMap<u64, usize>,
}

struct Holder {
    /// The address from which the holder took its first share.
    address: ClientAddress,
    held: usize,
}

/// The client that asks for one more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taker {
    /// A number that is this client's alone.
    pub holder: u64,
    /// The address that the taker comes from.
    pub address: ClientAddress,
    /// The taker had, before the server started anew, what it asks for.
    pub reclaims: bool,
}

/// Why the client cannot have one more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shortage {
    /// All are taken.
    None,
    /// The taker has its share of what is left.
    Share,
    /// The clients of its address have their share of what is left.
    AddressShare,
}

impl Shares {
    /// Shares `limit` of something.
    pub fn new(limit: usize) -> Shares {
        Shares { limit, state: Mutex::default(), used: AtomicUsize::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether `taker` may take one more. It takes none yet: [`Shares::change`] says later how many
    /// it got, which may be none, or more than one.
    pub fn room(&self, taker: Taker) -> Result<(), Shortage> {
        self.lock().room(self.limit, taker)
    }

    /// Takes one, which is given back when the place is dropped.
    pub fn take(self: &Arc<Shares>, taker: Taker) -> Result<Reservation, Shortage> {
        let state = self.lock();
        state.room(self.limit, taker)?;
        self.note(state, (taker.holder, taker.address), 1);
        Ok(Reservation { shares: self.clone(), holder: taker.holder })
    }

    /// Counts one that `taker` has already, whether there is room or not.
    pub fn hold(self: &Arc<Shares>, taker: Taker) -> Reservation {
        self.change(taker.holder, taker.address, 1);
        Reservation { shares: self.clone(), holder: taker.holder }
    }

    /// `holder` has so many more, or less, than before.
    pub fn change(&self, holder: u64, address: ClientAddress, by: isize) {
        if by != 0 {
            self.note(self.lock(), (holder, address), by);
        }
    }

    fn note(
        &self,
        mut state: MutexGuard<'_, State>,
        (holder, address): (u64, ClientAddress),
        by: isize,
    ) {
        state.change(holder, address, by);
        self.used.store(state.used, Ordering::Relaxed);
    }

    /// The number that all holders have together.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// The number that `holder` has.
    pub fn held(&self, holder: u64) -> usize {
        self.lock().held(holder)
    }

    /// How many there may be.
    pub fn limit(&self) -> usize {
        self.limit
    }
}

impl State {
    fn held(&self, holder: u64) -> usize {
        self.holders.get(&holder).map_or(0, |holder| holder.held)
    }

    fn room(&self, limit: usize, taker: Taker) -> Result<(), Shortage> {
        let (held, free) = (self.held(taker.holder), limit.saturating_sub(self.used));
        // The shares that all had together fitted, in whatever order they come back. Nobody had
        // more than half.
        if taker.reclaims && held < limit / 2 && free > limit / RECLAIMS_LEAVE_PART {
            return Ok(());
        }
        let of_origin = self.addresses.get(&taker.address.0).copied().unwrap_or(0);
        let left_of_origin = ADDRESS_PART.saturating_mul(free).saturating_sub(of_origin);
        match () {
            () if free == 0 => Err(Shortage::None),
            () if held >= free => Err(Shortage::Share),
            // The same rule once more, among those of one address.
            () if held >= left_of_origin => Err(Shortage::AddressShare),
            () => Ok(()),
        }
    }

    fn change(&mut self, holder: u64, address: ClientAddress, by: isize) {
        let one = self.holders.entry(holder).or_insert(Holder { address, held: 0 });
        let (address, before) = (one.address, one.held);
        one.held = before.saturating_add_signed(by);
        let now = one.held;
        if now == 0 {
            self.holders.remove(&holder);
        }
        let of_origin = self.addresses.entry(address.0).or_default();
        *of_origin = (*of_origin + now).saturating_sub(before);
        if *of_origin == 0 {
            self.addresses.remove(&address.0);
        }
        self.used = (self.used + now).saturating_sub(before);
    }
}

/// A unit of a shared resource, until it is dropped.
pub struct Reservation {
    shares: Arc<Shares>,
    holder: u64,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.shares.change(self.holder, ClientAddress::default(), -1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: usize = 1200;

    fn taker(holder: u64, address: u64) -> Taker {
        Taker { holder, address: ClientAddress(address), reclaims: false }
    }

    /// The number that each of `takers` has once all have taken, by turns, all that they can get.
    fn greedy(shares: &Arc<Shares>, takers: &[Taker]) -> (Vec<usize>, Vec<Reservation>) {
        let mut places = Vec::new();
        let mut grew = true;
        while std::mem::take(&mut grew) {
            for place in takers.iter().filter_map(|taker| shares.take(*taker).ok()) {
                places.push(place);
                grew = true;
            }
        }
        (takers.iter().map(|taker| shares.held(taker.holder)).collect(), places)
    }

    #[test]
    fn one_takes_half_and_many_leave_as_much_as_each_has() {
        for (count, each) in [(1, 600), (2, 400), (5, 200)] {
            let shares = Arc::new(Shares::new(LIMIT));
            let takers: Vec<_> = (0..count).map(|number| taker(number, number)).collect();
            let (held, places) = greedy(&shares, &takers);
            assert!(held.iter().all(|held| *held == each), "{count}: {held:?}");
            let refused = shares.room(takers[0]);
            assert_eq!(refused, Err(Shortage::Share));
            let (next, _) = greedy(&shares, &[taker(99, 99)]);
            assert_eq!(next, [each / 2], "the next one");
            drop(places);
            assert!(shares.used() == 0 && shares.lock().addresses.is_empty());
        }
    }

    /// One machine can be a thousand clients.
    // proves: P127
    #[test]
    fn all_clients_of_one_origin_leave_a_quarter() {
        let shares = Arc::new(Shares::new(LIMIT));
        let takers: Vec<_> = (0..1000).map(|number| taker(number, 1)).collect();
        let (_, _places) = greedy(&shares, &takers);
        assert!(shares.used() <= LIMIT / 4 * 3 + 1, "{}", shares.used());
        let (other, _) = greedy(&shares, &[taker(5000, 2)]);
        assert!(other[0] >= LIMIT / 8 - 1, "{other:?}");
    }

    #[test]
    fn a_greedy_client_leaves_something_to_others_of_its_origin() {
        let shares = Arc::new(Shares::new(LIMIT));
        let (held, _places) = greedy(&shares, &[taker(1, 1)]);
        assert_eq!(held, [LIMIT / 2]);
        let (held, _more) = greedy(&shares, &[taker(2, 1)]);
        assert!(held[0] >= LIMIT / 5 - 1, "{held:?}");
    }

    /// After a restart those that had much come back before and behind those that had little.
    #[test]
    fn what_was_had_is_had_again_in_any_order_and_never_all_of_it() {
        let had = [(1, 500), (2, 300), (3, 150)];
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
            let shares = Arc::new(Shares::new(LIMIT));
            let mut places = Vec::new();
            for (holder, count) in order.map(|index| had[index]) {
                let again = Taker { reclaims: true, ..taker(holder, 1) };
                places.extend((0..count).map(|_| shares.take(again).unwrap()));
            }
            let (claimed, _more) =
                greedy(&shares, &[1, 2, 3, 4].map(|who| Taker { reclaims: true, ..taker(who, 1) }));
            assert!(claimed.iter().all(|held| *held <= LIMIT / 2), "{claimed:?}");
            assert!(shares.used() <= LIMIT - LIMIT / 8, "{}", shares.used());
            assert!(shares.take(taker(5, 5)).is_ok());
        }
    }

    #[test]
    fn each_user_gives_back_what_it_took() {
        let shares = Arc::new(Shares::new(10));
        shares.change(1, ClientAddress(7), 3);
        shares.change(1, ClientAddress(8), 1); // it has moved: the first address counts
        assert_eq!((shares.used(), shares.held(1)), (4, 4));
        assert_eq!(shares.lock().addresses.get(&7), Some(&4));
        shares.change(1, ClientAddress(8), -4);
        assert_eq!((shares.used(), shares.lock().holders.len()), (0, 0));
        let full = Arc::new(Shares::new(0));
        assert_eq!(full.room(taker(1, 1)), Err(Shortage::None));
    }
}
