//! The leases of one file. A few are looked through. Of many, an index says where each session's lease is.
//! So it costs the same to find, add or remove one, however many sessions have the file leased.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use dray_core::{IdMap, LeaseKinds};

use super::holder::LeaseHolder;
use super::table::Lease;

/// So many are looked through.
const FEW: usize = 16;

/// The leases of one file: at most one of each session.
pub(super) enum FileLeases {
    Few(Vec<Lease>),
    Many(Box<IndexedLeases>),
}

/// Leases, and where each session's is among them.
pub(super) struct IndexedLeases {
    leases: Vec<Lease>,
    places: IdMap<HolderKey, u32>,
}

/// Tells sessions apart that have leases: the address of what the lease keeps of its session.
#[derive(Clone, Copy, Eq)]
struct HolderKey(usize);

impl HolderKey {
    fn of(who: &Arc<LeaseHolder>) -> HolderKey {
        HolderKey(Arc::as_ptr(who).addr())
    }
}

// Like the comparison, which tests count.
impl Hash for HolderKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl PartialEq for HolderKey {
    fn eq(&self, other: &HolderKey) -> bool {
        #[cfg(test)]
        tests::COMPARED.with(|compared| compared.set(compared.get() + 1));
        self.0 == other.0
    }
}

impl FileLeases {
    /// One lease. Most files are leased to one session.
    pub(super) fn one(lease: Lease) -> FileLeases {
        FileLeases::Few(vec![lease])
    }

    fn all(&self) -> &Vec<Lease> {
        match self {
            FileLeases::Few(leases) => leases,
            FileLeases::Many(many) => &many.leases,
        }
    }

    fn all_mut(&mut self) -> &mut Vec<Lease> {
        match self {
            FileLeases::Few(leases) => leases,
            FileLeases::Many(many) => &mut many.leases,
        }
    }

    fn place(&self, who: &Arc<LeaseHolder>) -> Option<usize> {
        let key = HolderKey::of(who);
        match self {
            FileLeases::Few(leases) => {
                leases.iter().position(|lease| HolderKey::of(&lease.who) == key)
            }
            FileLeases::Many(many) => many.places.get(&key).map(|place| *place as usize),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.all().len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Lease> {
        self.all().iter()
    }

    /// The lease at a place: the last one takes the place of one that is removed.
    pub(super) fn at(&mut self, place: usize) -> Option<&mut Lease> {
        self.all_mut().get_mut(place)
    }

    /// The lease of a session.
    pub(super) fn of(&mut self, who: &Arc<LeaseHolder>) -> Option<&mut Lease> {
        let place = self.place(who)?;
        self.at(place)
    }

    /// Who may keep what it writes to the file. Nobody else has any lease of it then.
    pub(super) fn writer(&self) -> Option<&Lease> {
        match &self.all()[..] {
            [lease] if lease.kinds.contains(LeaseKinds::WRITE) => Some(lease),
            _ => None,
        }
    }

    /// Adds the lease of a session that has none.
    pub(super) fn add(&mut self, lease: Lease) {
        let key = HolderKey::of(&lease.who);
        if let FileLeases::Few(leases) = self
            && leases.len() >= FEW
        {
            let leases = std::mem::take(leases);
            let places = (0..).zip(&leases).map(|(at, one)| (HolderKey::of(&one.who), at));
            let places = places.collect();
            *self = FileLeases::Many(Box::new(IndexedLeases { leases, places }));
        }
        if let FileLeases::Many(many) = self {
            many.places.insert(key, many.leases.len() as u32); // a table has fewer than 2^32 leases
        }
        self.all_mut().push(lease);
    }

    /// Takes the lease of a session out.
    pub(super) fn remove(&mut self, who: &Arc<LeaseHolder>) -> Option<Lease> {
        let place = self.place(who)?;
        let gone = self.all_mut().swap_remove(place);
        if let FileLeases::Many(many) = self {
            many.places.remove(&HolderKey::of(who));
            if let Some(moved) = many.leases.get(place) {
                many.places.insert(HolderKey::of(&moved.who), place as u32);
            }
        }
        self.give_back_memory();
        Some(gone)
    }

    /// What is left takes as much memory for each lease as ever.
    fn give_back_memory(&mut self) {
        let len = self.len();
        if let FileLeases::Many(many) = self
            && len <= FEW / 2
        {
            *self = FileLeases::Few(std::mem::take(&mut many.leases));
        }
        if len * 4 <= self.all().capacity() {
            self.all_mut().shrink_to(len * 2);
            if let FileLeases::Many(many) = self {
                many.places.shrink_to(len * 2);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Weak;

    use dray_core::FileId;
    use dray_rt::{DriverKind, Executor};

    use super::*;
    use crate::server::leases::LeaseTable;
    use crate::server::leases::marks::Part;
    use crate::server::options::ServerOptions;

    thread_local! {
        pub(super) static COMPARED: Cell<u64> = const { Cell::new(0) };
    }

    fn simulate(test: impl FnOnce(&Arc<LeaseTable>)) {
        let table = Arc::new(LeaseTable::new(&ServerOptions::default(), true));
        let driver = DriverKind::Simulated { seed: 1 };
        Executor::new(driver).unwrap().block_on(async { test(&table) });
    }

    fn holders(table: &Arc<LeaseTable>, count: usize) -> Vec<Arc<LeaseHolder>> {
        let holder = |_| Arc::new(LeaseHolder::new(table, Weak::new(), "host"));
        (0..count).map(holder).collect()
    }

    /// Comparisons of sessions, for each of `count`.
    fn compared(count: usize, work: impl FnOnce()) -> f64 {
        let before = COMPARED.get();
        work();
        (COMPARED.get() - before) as f64 / count as f64
    }

    // proves: P337
    #[test]
    fn a_lease_costs_the_same_however_many_others_there_are_of_the_file() {
        const DIR: FileId = FileId { ino: 1, generation: 0 };
        let cost = |count: usize| {
            let mut cost = [0.0; 3];
            simulate(|table| {
                let (holders, kinds) = (holders(table, count), LeaseKinds::ATTRIBUTES);
                let lease = || {
                    for who in &holders {
                        assert!(table.lease(who, table.since(who), &[], Part::Attributes(DIR)));
                    }
                };
                let give_back = || {
                    let give_back = |who| table.take_back(who, (DIR, kinds), 1, 0);
                    holders.iter().for_each(give_back);
                };
                cost = [compared(count, lease), compared(count, lease), compared(count, give_back)];
                assert_eq!(table.status().held, 0);
            });
            cost
        };
        let of_ten = cost(10);
        for count in [100, 1000, 10_000] {
            for (cost, of_ten) in cost(count).into_iter().zip(of_ten) {
                assert!(cost <= 2.0 * of_ten + 1.0, "{cost} comparisons each of {count}");
            }
        }
    }

    #[test]
    fn each_session_has_its_own_lease_while_others_come_and_go() {
        simulate(|table| {
            let holders = holders(table, 100);
            let lease = |at: usize| Lease::new(&holders[at], 1, LeaseKinds::NAMES);
            let mut leases = FileLeases::one(lease(0));
            let mut there = vec![0];
            for step in 1..2000_usize {
                let at = step * 7919 % 100;
                // They come in the first half, mostly, and go in the second.
                let comes = (step / 10).is_multiple_of(2) || step < 700;
                if there.contains(&at) && !comes {
                    there.retain(|one| *one != at);
                    assert!(Arc::ptr_eq(&leases.remove(&holders[at]).unwrap().who, &holders[at]));
                } else if comes && !there.contains(&at) {
                    there.push(at);
                    leases.add(lease(at));
                }
                assert_eq!(leases.len(), there.len());
                for (at, who) in holders.iter().enumerate() {
                    let found = leases.of(who).is_some_and(|lease| Arc::ptr_eq(&lease.who, who));
                    assert_eq!(found, there.contains(&at), "step {step}");
                }
                let room = leases.all().capacity();
                assert!(room <= (4 * there.len()).max(FEW), "{room} for {}", there.len());
            }
            assert!(leases.remove(&Arc::new(LeaseHolder::new(table, Weak::new(), "b"))).is_none());
        });
    }
}
