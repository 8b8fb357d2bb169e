//! The handle of the control thread.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use dray_core::Fut;
use dray_rpc::server::{Membership, Revision, ServerNumber, ServingLease, SliceChange, SliceState};
use tokio::sync::{mpsc, oneshot};

use crate::control::{self, CallKind, ControlReply, Order};
use crate::join::JoinRefusal;
use crate::shared::{ClusterShared, JoinPhase};
use crate::view::ClusterView;

/// Calls that may wait for the control thread.
const ORDERS_MAX: usize = 1024;

/// What a membership needs to know.
#[derive(Clone, Debug)]
pub struct EtcdOptions {
    /// Members of one etcd, `http://HOST:PORT` each. Not empty.
    pub etcd: Vec<String>,
    /// How long a server that is not heard of counts as there; whole seconds.
    pub ttl: Duration,
    /// The projection.
    pub projection: String,
    /// The fingerprint of its definition, which all its servers must have.
    pub fingerprint: u64,
    /// The definition as clients get it, for administrators.
    pub definition: String,
    /// Which of its servers this one is.
    pub me: ServerNumber,
    /// The address of this server in the definition.
    pub server: String,
    /// Names the state directory that this process has locked, among all machines. A process that comes
    /// with the same one takes the place of the one before at once, since that is dead.
    pub holder: String,
}

/// The servers of a projection, as etcd has them. The server is a member until this is dropped, and for
/// the rest of its lease.
pub struct EtcdMembership {
    shared: Arc<ClusterShared>,
    orders: mpsc::Sender<Order>,
}

impl EtcdMembership {
    /// Starts the control thread, which becomes a member as soon as etcd can be reached. Errors: there
    /// can be no more threads.
    pub fn start(options: EtcdOptions) -> io::Result<EtcdMembership> {
        assert!(!options.etcd.is_empty(), "a definition is checked before it is used");
        let shared = Arc::new(ClusterShared::new(options));
        let (orders, received) = mpsc::channel(ORDERS_MAX);
        control::start(shared.clone(), received)?;
        Ok(EtcdMembership { shared, orders })
    }

    /// Waits until this server is a member, and has heard who else is. Errors: it cannot be one, and this
    /// will not change by itself.
    pub async fn joined(&self) -> Result<(), JoinRefusal> {
        let mut phase = self.shared.phase.subscribe();
        loop {
            match &*phase.borrow_and_update() {
                JoinPhase::Joining => {}
                JoinPhase::Joined => return Ok(()),
                JoinPhase::Refused(why) => return Err(why.clone()),
                JoinPhase::Left => return Err(JoinRefusal::has_left()),
            }
            if phase.changed().await.is_err() {
                return Err(JoinRefusal::has_left());
            }
        }
    }

    /// The name of the projection.
    pub fn projection(&self) -> &str {
        &self.shared.options.projection
    }

    /// What has been heard.
    pub fn view(&self) -> ClusterView {
        self.shared.view().clone()
    }

    /// Waits until something has been heard that was not known at the last call with the same `seen`,
    /// which begins with 0.
    pub async fn news(&self, seen: &mut u64) {
        let mut news = self.shared.news.subscribe();
        // The sender is our own.
        let _ = news.wait_for(|news| *news != *seen).await.map(|news| *seen = *news);
    }

    /// Has a server serve nothing, or something again. It ends with the lease of that server. Errors: the
    /// server is not there, or etcd is out of reach; it may be done all the same.
    pub async fn set_drained(&self, server: ServerNumber, drained: bool) -> io::Result<()> {
        self.order(CallKind::Drain(server, drained)).await.and_then(ControlReply::done)
    }

    /// Has new calls wait at all servers, or go on. Errors: as for [`EtcdMembership::set_drained`].
    pub async fn set_quiesced(&self, quiesced: bool) -> io::Result<()> {
        self.order(CallKind::Quiesce(quiesced)).await.and_then(ControlReply::done)
    }

    /// At this server no call is under way, as was asked for by the mark of that revision. Others hear it as
    /// long as this server is there. Errors: etcd is out of reach; it may be done all the same.
    pub async fn note_quiet(&self, asked: Revision) -> io::Result<()> {
        self.order(CallKind::Quiet(asked)).await.and_then(ControlReply::done)
    }

    /// Ends the lease here and in etcd, so that others need not wait for its end. This server must serve
    /// nothing any more. Errors: etcd did not hear of it; the lease ends by itself.
    pub async fn leave(&self) -> io::Result<()> {
        self.order(CallKind::Leave).await.and_then(ControlReply::done)
    }

    async fn order(&self, kind: CallKind) -> io::Result<ControlReply> {
        let (reply, answer) = oneshot::channel();
        let busy = |_| io::Error::from(io::ErrorKind::WouldBlock);
        self.orders.try_send(Order { kind, reply }).map_err(busy)?;
        answer.await.unwrap_or_else(|_| Err(io::ErrorKind::NotConnected.into()))
    }
}

impl Membership for EtcdMembership {
    fn me(&self) -> ServerNumber {
        self.shared.options.me
    }

    fn lease(&self) -> Arc<ServingLease> {
        self.shared.lease.clone()
    }

    fn is_member(&self, server: ServerNumber) -> bool {
        self.shared.view().members.contains_key(&server)
    }

    fn members(&self) -> BTreeSet<ServerNumber> {
        self.shared.view().members.keys().copied().collect()
    }

    fn is_drained(&self, server: ServerNumber) -> bool {
        self.shared.view().drained.contains(&server)
    }

    fn quiesced(&self) -> Option<Revision> {
        self.shared.view().quiesced.as_ref().map(|(_, revision)| *revision)
    }

    fn slice<'a>(&'a self, name: &'a str) -> Fut<'a, io::Result<Option<(SliceState, Revision)>>> {
        Box::pin(async move { self.order(CallKind::Slice(name.to_owned())).await?.slice() })
    }

    fn change<'a>(&'a self, name: &'a str, change: SliceChange) -> Fut<'a, io::Result<bool>> {
        Box::pin(async move { self.order(CallKind::Change(name.to_owned(), change)).await?.made() })
    }
}
