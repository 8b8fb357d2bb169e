//! Leases of an export that is forwarded: what servers above have leased to it is leased on, and nothing else
//! (ADR 0061).
//!
//! What is recalled from above is recalled here first. Before a client with leases is answered, what is leased from
//! above has to hold for as long as that client believes after the answer. So nobody here believes what the servers
//! above do not wait for any more, whatever is cut off.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use dray_core::{DirPage, LeaseKinds, Recall, RecallDone, RecallItem, Ttl, UpperLeases};
use dray_rt::sync::Notify;
use dray_rt::{sleep, timeout};

use super::change::LeaseWaits;
use super::marks::Part;
use super::recalls::{FileBreaks, Recalls};
use super::table::LeaseTable;
use crate::server::options::ServerOptions;
use crate::server::reply::Reply;
use crate::server::sabotage::Sabotage;

/// Between two calls to servers above that do not help, and between two looks whether an answer is still wanted.
const AGAIN_TIME: Duration = Duration::from_millis(50);
const LOOK_TIME: Duration = Duration::from_secs(1);

/// The leases that servers above give to the server itself.
pub(crate) struct LeasesFromAbove {
    upper: Arc<dyn UpperLeases>,
    /// Recalls from above are heard.
    listens: AtomicBool,
    renewing: AtomicBool,
    renewed: Notify,
    acknowledges_at_once: bool,
    grants_anything: bool,
    answers_without_contact: bool,
    survives_the_end: bool,
    forgets_former: bool,
}

/// A recall from above while it is passed on. It is acknowledged at its end, and not if its task goes.
struct PassedOn(Option<RecallDone>);

impl PassedOn {
    fn acknowledge(mut self) {
        drop(self.0.take());
    }
}

impl Drop for PassedOn {
    fn drop(&mut self) {
        if let Some(done) = self.0.take() {
            done.forget(); // those above wait until the leases of this server have ended
        }
    }
}

/// The next renewal may begin, however this one ended.
struct Renewal(Arc<LeaseTable>);

impl Drop for Renewal {
    fn drop(&mut self) {
        if let Some(above) = self.0.above() {
            above.renewing.store(false, Ordering::SeqCst);
            above.renewed.notify_waiters();
        }
    }
}

impl LeasesFromAbove {
    pub(super) fn new(upper: Arc<dyn UpperLeases>, options: &ServerOptions) -> LeasesFromAbove {
        let broken = options.broken();
        LeasesFromAbove {
            upper,
            listens: AtomicBool::new(false),
            renewing: AtomicBool::new(false),
            renewed: Notify::new(),
            acknowledges_at_once: broken.is(Sabotage::UpperRecalls),
            grants_anything: broken.is(Sabotage::UpperGrants),
            answers_without_contact: broken.is(Sabotage::UpperContact),
            survives_the_end: broken.is(Sabotage::UpperEnd),
            forgets_former: broken.is(Sabotage::UpperRestart),
        }
    }

    /// How long clients here believe: half as long as this server does. So a client that does not answer a recall
    /// believes nothing more before those above lose patience with this server.
    pub(super) fn term(upper: &dyn UpperLeases, options: &ServerOptions) -> Duration {
        match upper.term() {
            Duration::ZERO => options.lease_term / 2,
            above => options.lease_term.min(above) / 2,
        }
    }
}

impl LeaseTable {
    /// The table of an export that is forwarded.
    pub(crate) fn with_upper(
        self,
        upper: Option<Arc<dyn UpperLeases>>,
        options: &ServerOptions,
    ) -> LeaseTable {
        let Some(upper) = upper else { return self };
        let term = LeasesFromAbove::term(&*upper, options);
        self.leased_from(LeasesFromAbove::new(upper, options), term)
    }

    /// Whether something may be leased on now.
    fn leases_on(&self, above: &LeasesFromAbove) -> bool {
        above.listens.load(Ordering::SeqCst) && above.upper.term() >= 2 * self.term()
    }

    /// Whether a part of an answer may be leased of which the file system says `said`.
    pub(super) fn may_lease_on(&self, said: Option<Ttl>) -> bool {
        self.above().is_none_or(|above| {
            let is_leased = said.is_some_and(|said| said != Ttl::ZERO);
            above.grants_anything || is_leased && self.leases_on(above)
        })
    }

    /// Waits until servers above have answered lately enough. A client that is answered then believes nothing for longer
    /// than what is leased from above holds. `is_wanted`: somebody waits for the answer.
    pub(crate) async fn contact_above(self: &Arc<Self>, is_wanted: impl Fn() -> bool) {
        let Some(above) = self.above() else { return };
        let holds = || !self.leases_on(above) || above.upper.rest() >= self.wait();
        while !holds() && is_wanted() && !above.answers_without_contact {
            let renewed = above.renewed.notified();
            if !above.renewing.swap(true, Ordering::SeqCst) {
                let renewal = Renewal(self.clone());
                dray_rt::spawn(async move { renewal.make().await });
            }
            let _ = timeout(LOOK_TIME, renewed).await; // then it is looked again
        }
    }

    /// From now on what is recalled from above is recalled here first. To be said when those are known to whom a
    /// server before this one may have leased anything.
    pub(crate) fn listen_above(self: &Arc<Self>) {
        let Some(above) = self.above() else { return };
        let table: Weak<LeaseTable> = Arc::downgrade(self);
        above.upper.pass_recalls_to(Arc::new(move |recall, done| {
            let Some(table) = table.upgrade() else { return done.forget() };
            match recall {
                Recall::Items(items) => table.recalled_above(&items, done),
                Recall::All => table.all_ended_above(),
            }
        }));
        above.listens.store(true, Ordering::SeqCst);
    }

    /// Servers above recall something. Clients that have it are asked first.
    fn recalled_above(self: &Arc<Self>, items: &[RecallItem], done: RecallDone) {
        let Some(above) = self.above() else { return };
        let (mut recalls, done) = (Recalls::default(), PassedOn(Some(done)));
        for RecallItem { id, kinds, name } in items {
            let (id, kinds) = (*id, kinds.without(LeaseKinds::WRITE));
            let name = name.as_ref().map(|name| name.as_bytes());
            let names = name.map_or(Part::Names(id), |name| Part::Name(id, name));
            let parts =
                [(LeaseKinds::ATTRIBUTES, Part::Attributes(id)), (LeaseKinds::NAMES, names)];
            for (_, part) in parts.into_iter().filter(|(kind, _)| kinds.contains(*kind)) {
                let row = self.marks.row(part);
                self.marks.mark(row);
                self.marks.unmark(&[row]);
            }
            let broken = FileBreaks { id, kinds, name };
            match above.forgets_former {
                true => self.collect_held(None, &broken, &mut recalls),
                false => self.collect(None, &broken, &mut recalls),
            }
        }
        let waits = LeaseWaits::send(self, None, recalls).filter(|_| !above.acknowledges_at_once);
        match waits {
            None => done.acknowledge(),
            Some(waits) => dray_rt::spawn(async move {
                waits.wait().await;
                done.acknowledge();
            }),
        }
    }

    /// All that was leased from above has ended, and so has all that was leased on. A contact with servers above says
    /// nothing of former leases from now on.
    fn all_ended_above(&self) {
        if self.above().is_some_and(|above| above.survives_the_end) {
            return;
        }
        self.marks.all_changed();
        // At once: the session's next call would count as a contact.
        self.holders_at_once().iter().for_each(|who| who.lose_all());
    }
}

impl Renewal {
    async fn make(self) {
        let Some(above) = self.0.above() else { return };
        above.upper.renew().await;
        if above.upper.rest() < self.0.wait() {
            sleep(AGAIN_TIME).await;
        }
    }
}

/// How long an answer may be believed, as servers above have leased it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SaidAbove {
    pub(crate) name: Option<Ttl>,
    pub(crate) attributes: Option<Ttl>,
    pub(crate) absence: Option<Ttl>,
}

impl SaidAbove {
    /// Takes it out of a reply, which then says nothing of the kind: it is remembered so, and goes so to clients
    /// without leases.
    pub(crate) fn take(reply: &mut Reply) -> SaidAbove {
        let absence = reply.take_absence();
        let validity = reply.attr_mut().map(|attr| {
            let said = attr.validity;
            (attr.validity.name, attr.validity.attributes) = (None, None);
            said
        });
        let validity = validity.unwrap_or_default();
        SaidAbove { name: validity.name, attributes: validity.attributes, absence }
    }

    /// The same of the entries of a page, for nobody.
    pub(crate) fn drop_of_page(page: &mut DirPage) {
        for index in 0..page.len() {
            let attr = page.get(index).and_then(|(_, entry)| entry.attr);
            if let Some(mut attr) = attr {
                (attr.validity.name, attr.validity.attributes) = (None, None);
                page.set_attr(index, Some(attr));
            }
        }
    }
}
