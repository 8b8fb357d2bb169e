//! What a change has to ask back, and of whom. It asks some sessions at a time, so that a file that is leased to
//! thousands keeps neither the table nor the thread from others.

use std::sync::Arc;

use dray_core::{FileId, LeaseKinds, NameBuf, RecallItem};
use dray_rt::{Instant, now};

use super::file_leases::FileLeases;
use super::holder::{LeaseHolder, RecallNumber};
use super::table::{FileRests, Lease, LeaseTable, note, rest_of};

/// Leases of one file that are looked at before others have their turn.
pub(super) const ASKED_AT_ONCE: usize = 64;

/// What a change breaks of one file. A name: that one alone.
pub(super) struct FileBreaks<'a> {
    pub(super) id: FileId,
    pub(super) kinds: LeaseKinds,
    pub(super) name: Option<&'a [u8]>,
}

impl FileBreaks<'_> {
    /// As a recall says it.
    pub(super) fn item(&self) -> RecallItem {
        let name = self.name.and_then(|name| NameBuf::new(name).ok());
        RecallItem { id: self.id, kinds: self.kinds, name }
    }
}

/// Leases of one file that have not been looked at yet. What is being changed is not leased anew meanwhile. They are
/// looked at from the last to the first: one that takes the place of a removed lease has been looked at.
pub(super) struct UnaskedLeases {
    what: RecallItem,
    /// The place behind the last one of them.
    before: usize,
    /// The recall has been noted for the file's rest.
    noted: bool,
    /// The changer is asked, too.
    of_all: bool,
}

/// Recalls that a change has to send, and what it has to wait for besides.
#[derive(Default)]
pub(super) struct Recalls {
    pub(super) to_send: Vec<(Arc<LeaseHolder>, RecallNumber, Vec<RecallItem>)>,
    /// Recalls of other changes that ask the same back.
    pub(super) others: Vec<(Arc<LeaseHolder>, RecallNumber)>,
    /// Leases of epochs that have ended. Their clients may believe them still.
    pub(super) ended: Vec<Arc<LeaseHolder>>,
    /// The directories whose names are asked back.
    pub(super) directories: Vec<FileId>,
    /// Until when clients may believe that cannot be asked.
    pub(super) quiet_until: Option<Instant>,
    /// What is left of files that many have leased.
    pub(super) unasked: Vec<UnaskedLeases>,
}

impl Recalls {
    pub(super) fn is_empty(&self) -> bool {
        let nobody = self.to_send.is_empty() && self.others.is_empty() && self.ended.is_empty();
        nobody && self.quiet_until.is_none() && self.unasked.is_empty()
    }

    /// Asks a session for something more. A few hundred are to be sent at most: some of each file that a change breaks.
    pub(super) fn add(&mut self, who: &Arc<LeaseHolder>, item: RecallItem) -> RecallNumber {
        match self.to_send.iter_mut().find(|(other, ..)| Arc::ptr_eq(other, who)) {
            Some((_, number, items)) => {
                items.push(item);
                *number
            }
            None => {
                let number = who.begin_recall();
                self.to_send.push((who.clone(), number, vec![item]));
                number
            }
        }
    }
}

impl LeaseTable {
    /// Adds what others than `changer` have of what a change breaks, and has marked.
    pub(super) fn collect(
        &self,
        changer: Option<&Arc<LeaseHolder>>,
        broken: &FileBreaks<'_>,
        recalls: &mut Recalls,
    ) {
        // What clients have kept from a server before us they have written before any call is carried out.
        if broken.kinds != LeaseKinds::WRITE {
            self.collect_former(changer, broken, recalls);
        }
        self.collect_held(changer, broken, recalls);
    }

    /// The same without those to whom a server before us may have leased anything.
    pub(super) fn collect_held(
        &self,
        changer: Option<&Arc<LeaseHolder>>,
        broken: &FileBreaks<'_>,
        recalls: &mut Recalls,
    ) {
        let (mut shard, place) = self.shard(broken.id);
        let (leases, rests) = shard.leases_and_rests(broken.id, place);
        let Some(leases) = leases else { return };
        if broken.kinds == LeaseKinds::WRITE && leases.writer().is_none() {
            return;
        }
        let (what, before, of_all) = (broken.item(), leases.len(), changer.is_none());
        let all = UnaskedLeases { what, before, noted: false, of_all };
        let left = ask_some(changer, all, (leases, rests), recalls);
        recalls.unasked.extend(left);
    }

    /// Goes on with files that many have leased.
    pub(super) fn collect_more(&self, changer: Option<&Arc<LeaseHolder>>, recalls: &mut Recalls) {
        for unasked in std::mem::take(&mut recalls.unasked) {
            let (mut shard, place) = self.shard(unasked.what.id);
            let (leases, rests) = shard.leases_and_rests(unasked.what.id, place);
            let Some(leases) = leases else { continue };
            let left = ask_some(changer, unasked, (leases, rests), recalls);
            recalls.unasked.extend(left);
        }
    }
}

/// Looks at some leases of a file. Gives what is left of them.
fn ask_some(
    changer: Option<&Arc<LeaseHolder>>,
    mut unasked: UnaskedLeases,
    (leases, mut rests): (&mut FileLeases, FileRests<'_>),
    recalls: &mut Recalls,
) -> Option<UnaskedLeases> {
    let changer = changer.filter(|_| !unasked.of_all);
    let is_other =
        |who: &Arc<LeaseHolder>| changer.is_none_or(|changer| !Arc::ptr_eq(who, changer));
    let before = unasked.before.min(leases.len());
    unasked.before = before.saturating_sub(ASKED_AT_ONCE);
    for place in (unasked.before..before).rev() {
        let Some(lease) = leases.at(place) else { continue };
        if is_other(&lease.who) && !lease.kinds.common(unasked.what.kinds).is_empty() {
            ask(&mut unasked, lease, &mut rests, recalls);
        }
    }
    (unasked.before > 0).then_some(unasked)
}

/// Asks a lease back.
fn ask(
    unasked: &mut UnaskedLeases,
    lease: &mut Lease,
    rests: &mut FileRests<'_>,
    recalls: &mut Recalls,
) {
    if lease.epoch != lease.who.epoch() {
        recalls.ended.push(lease.who.clone());
        return;
    }
    let UnaskedLeases { what: RecallItem { id, kinds, name }, noted, .. } = unasked;
    let kinds = lease.kinds.common(*kinds);
    if !std::mem::replace(noted, true) {
        // What rests is not leased anew, and what is left of it is asked back.
        let rests_now = name.is_some() && rests.of(rest_of(LeaseKinds::NAMES)).rests(now());
        if note(rests, kinds, name.is_some()) || rests_now {
            *name = None; // all names are asked back
        }
        if kinds.contains(LeaseKinds::NAMES) {
            recalls.directories.push(*id);
        }
    }
    let number = RecallNumber { number: lease.recall, epoch: lease.epoch };
    if lease.recalled.contains(kinds) {
        recalls.others.push((lease.who.clone(), number));
        return;
    }
    let number = recalls.add(&lease.who, RecallItem { id: *id, kinds, name: name.clone() });
    if name.is_none() {
        (lease.recalled, lease.recall) = (kinds, number.number);
    }
}

#[cfg(test)]
mod tests {
    use std::pin::{Pin, pin};
    use std::sync::Weak;
    use std::task::Poll;

    use dray_rt::{DriverKind, Executor};

    use super::super::change::LeaseChange;
    use super::super::marks::Part;
    use super::*;
    use crate::server::options::ServerOptions;

    const DIR: FileId = FileId { ino: 1, generation: 0 };

    fn simulate<F: Future<Output = ()>>(test: impl FnOnce(Arc<LeaseTable>) -> F) {
        let driver = DriverKind::Simulated { seed: 1 };
        Executor::new(driver).unwrap().block_on(async {
            test(Arc::new(LeaseTable::new(&ServerOptions::default(), true))).await;
        });
    }

    /// Sessions that have leases of the names and the attributes of the directory.
    fn holders(table: &Arc<LeaseTable>, count: usize) -> Vec<Arc<LeaseHolder>> {
        let holder = |_| {
            let who = Arc::new(LeaseHolder::new(table, Weak::new(), "host"));
            for part in [Part::Attributes(DIR), Part::Name(DIR, b"other")] {
                assert!(table.lease(&who, table.since(&who), &[], part));
            }
            who
        };
        (0..count).map(holder).collect()
    }

    /// Polls it once.
    async fn is_pending(mut future: Pin<&mut impl Future>) -> bool {
        std::future::poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_pending())).await
    }

    // proves: P337
    #[test]
    fn a_change_asks_some_holders_at_a_time_and_each_one_once() {
        const HOLDERS: usize = 10_000;
        simulate(async |table| {
            let holders = holders(&table, HOLDERS);
            let mut change = LeaseChange::new(&table, Some(&holders[7]));
            change.name((DIR, b"name"));
            let mut waits = pin!(change.recall().unwrap().wait());
            let (mut asked, mut turns) = (0, 0);
            while asked < HOLDERS - 1 {
                let before = std::mem::replace(&mut asked, table.status().recalls as usize);
                assert!(asked - before <= 64 && turns < HOLDERS, "{asked}, {before}");
                assert!(is_pending(waits.as_mut()).await);
                turns += 1;
            }
            assert_eq!((asked, holders[7].status().recalls), (HOLDERS - 1, 0));
            holders.iter().for_each(|who| who.acknowledged(1));
            waits.await;
            assert_eq!(table.status().acknowledged, HOLDERS as u64 - 1);
        });
    }

    /// The changer is one of many, and may be looked at late.
    // proves: P333
    #[test]
    fn a_changer_that_leases_on_is_asked_for_what_is_named() {
        for (leases_on, asked) in [(true, 1000), (false, 999)] {
            simulate(async |table| {
                let holders = holders(&table, 1000);
                let change = LeaseChange::new(&table, Some(&holders[7]));
                let mut change = change.by_session_that_leases_on(leases_on);
                change.named(DIR);
                change.recall().unwrap().ask_all().await;
                assert_eq!(table.status().recalls, asked);
                assert_eq!(holders[7].status().recalls, u64::from(leases_on));
            });
        }
    }

    /// The last lease takes the place of one that goes. Else a change would not ask it.
    #[test]
    fn all_that_have_leases_are_asked_while_others_go() {
        simulate(async |table| {
            let holders = holders(&table, 1000);
            let mut change = LeaseChange::new(&table, None);
            change.rights(DIR);
            let mut waits = pin!(change.recall().unwrap().wait());
            let mut gone = 0;
            while gone < 300 {
                for who in &holders[gone..gone + 30] {
                    table.take_back(who, (DIR, LeaseKinds::ALL), 1, 0);
                }
                gone += 30;
                assert!(is_pending(waits.as_mut()).await);
            }
            for _ in 0..holders.len() {
                assert!(is_pending(waits.as_mut()).await);
            }
            let left = &holders[gone..];
            assert!(left.iter().all(|who| who.status().recalls == 1), "all that are left");
            left.iter().for_each(|who| who.acknowledged(1));
            waits.await;
            assert_eq!(table.status().held, 0);
        });
    }
}
