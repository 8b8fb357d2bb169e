//! Calls of other threads: each slice has a task that carries out its calls one after the other.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use dray_rpc::server::{Revision, ServerNumber, SliceChange, SliceState};
use etcd_client::{
    Client, Compare, CompareOp, Error, GetResponse, KeyValue, PutOptions, Txn, TxnOp, TxnOpResponse,
};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::control::{CallKind, ControlReply, Order};
use crate::records::{self, DrainRecord, QuiesceRecord, QuietRecord, SliceRecord};
use crate::shared::ClusterShared;

/// Calls of one slice that may wait. A server has a few under way.
const CALLS_MAX: usize = 64;

/// A call that waits, and where its outcome goes.
type Waiting<T> = (T, ReplySender);
pub(crate) type ReplySender = oneshot::Sender<io::Result<ControlReply>>;

enum SliceCall {
    Look,
    Change(SliceChange),
}

/// Carries out calls until nobody makes any more, or until this server leaves: who wants to know.
pub(crate) async fn take_orders(
    shared: &Arc<ClusterShared>,
    mut orders: mpsc::Receiver<Order>,
) -> Option<ReplySender> {
    let mut slices: HashMap<String, mpsc::Sender<Waiting<SliceCall>>> = HashMap::new();
    let mut of_slice = |name: String, call, reply| {
        let queue = slices.entry(name.clone()).or_insert_with(|| {
            let (queue, calls) = mpsc::channel(CALLS_MAX);
            tokio::spawn(Slice::new(shared.clone(), name).run(calls));
            queue
        });
        if let Err(mpsc::error::TrySendError::Full((_, reply))) = queue.try_send((call, reply)) {
            let _ = reply.send(Err(io::ErrorKind::WouldBlock.into()));
        }
    };
    while let Some(Order { kind, reply }) = orders.recv().await {
        match kind {
            CallKind::Slice(name) => of_slice(name, SliceCall::Look, reply),
            CallKind::Change(name, change) => of_slice(name, SliceCall::Change(change), reply),
            CallKind::Drain(server, drained) => {
                tokio::spawn(answer(reply, drain(shared.clone(), server, drained)));
            }
            CallKind::Quiesce(quiesced) => {
                tokio::spawn(answer(reply, quiesce(shared.clone(), quiesced)));
            }
            CallKind::Quiet(asked) => {
                tokio::spawn(answer(reply, quiet(shared.clone(), asked)));
            }
            CallKind::Leave => return Some(reply),
        }
    }
    None
}

async fn answer(reply: ReplySender, call: impl Future<Output = io::Result<()>>) {
    let _ = reply.send(call.await.map(|()| ControlReply::Done)); // the caller may have gone
}

/// What an error of etcd is to our callers.
pub(crate) fn failed(error: Error) -> io::Error {
    match error {
        Error::GRpcStatus(status) => io::Error::other(status.message().to_owned()),
        other => io::Error::other(other.to_string()),
    }
}

/// A call by the connection that there is, or that there will be soon. Errors: there is none, or no
/// answer in time.
async fn by_client<T, F>(shared: &ClusterShared, call: impl FnOnce(Client) -> F) -> io::Result<T>
where
    F: Future<Output = Result<T, Error>>,
{
    let mut clients = shared.client.subscribe();
    let whole = async {
        let client = clients.wait_for(Option::is_some).await;
        let client = client.ok().and_then(|client| client.clone());
        let client = client.ok_or(io::ErrorKind::NotConnected)?;
        call(client).await.map_err(failed)
    };
    timeout(2 * shared.call_max(), whole)
        .await
        .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// The mark goes with the lease of the server that is drained.
async fn drain(shared: Arc<ClusterShared>, server: ServerNumber, drained: bool) -> io::Result<()> {
    let (mark, member) = (shared.keys.drained(server), shared.keys.member(server));
    if !drained {
        let delete = |client: Client| async move { client.kv_client().delete(mark, None).await };
        return by_client(&shared, delete).await.map(drop);
    }
    let key = member.clone();
    let get = |client: Client| async move { client.kv_client().get(key, None).await };
    let found = by_client(&shared, get).await?;
    let lease = found.kvs().first().map(KeyValue::lease).ok_or(io::ErrorKind::NotFound)?;
    let record = records::written(DrainRecord { since: dray_rt::wall_clock().as_secs() });
    let put = |client: Client| async move {
        client.kv_client().put(mark, record, Some(PutOptions::new().with_lease(lease))).await
    };
    by_client(&shared, put).await.map(drop)
}

async fn quiesce(shared: Arc<ClusterShared>, quiesced: bool) -> io::Result<()> {
    let key = shared.keys.quiesced();
    if !quiesced {
        return by_client(
            &shared,
            |client| async move { client.kv_client().delete(key, None).await },
        )
        .await
        .map(drop);
    }
    let (by, since) = (shared.options.server.clone(), dray_rt::wall_clock().as_secs());
    let record = records::written(QuiesceRecord { by, since });
    // A mark that is there already stays, with what servers have done for it.
    let absent = Compare::create_revision(&*key, CompareOp::Equal, 0);
    let txn = Txn::new().when([absent]).and_then([TxnOp::put(key, record, None)]);
    by_client(&shared, |client| async move { client.kv_client().txn(txn).await }).await.map(drop)
}

/// Notes that this server has become quiet. The note goes with the lease of this server.
async fn quiet(shared: Arc<ClusterShared>, Revision(quiesced): Revision) -> io::Result<()> {
    let key = shared.keys.quiet(shared.options.me);
    let lease = shared.lease_id().ok_or(io::ErrorKind::NotConnected)?;
    let record = records::written(QuietRecord { quiesced });
    let put = |client: Client| async move {
        client.kv_client().put(key, record, Some(PutOptions::new().with_lease(lease))).await
    };
    by_client(&shared, put).await.map(drop)
}

/// A value of a slice's key.
struct StoredValue {
    value: Vec<u8>,
    revision: Revision,
}

impl StoredValue {
    fn of(answer: &GetResponse) -> Option<StoredValue> {
        let found = answer.kvs().first()?;
        let revision = Revision(found.mod_revision().unsigned_abs());
        Some(StoredValue { value: found.value().to_vec(), revision })
    }

    fn state(&self) -> io::Result<(SliceState, Revision)> {
        Ok((records::read_slice(&self.value)?, self.revision))
    }
}

/// The calls of one slice.
struct Slice {
    shared: Arc<ClusterShared>,
    name: String,
    key: String,
    /// A change of this revision's state was asked for, and nobody knows whether it was made, or will be.
    uncertain: Option<Option<Revision>>,
}

impl Slice {
    fn new(shared: Arc<ClusterShared>, name: String) -> Slice {
        Slice { key: shared.keys.slice(&name), shared, name, uncertain: None }
    }

    async fn run(mut self, mut calls: mpsc::Receiver<Waiting<SliceCall>>) {
        while let Some((call, reply)) = calls.recv().await {
            let _ = reply.send(self.carry_out(call).await); // the caller may have gone
        }
    }

    async fn carry_out(&mut self, call: SliceCall) -> io::Result<ControlReply> {
        self.settle().await?;
        match call {
            SliceCall::Look => self.look().await.map(ControlReply::Slice),
            SliceCall::Change(change) => self.change(change).await.map(ControlReply::Made),
        }
    }

    /// Sees to it that a change whose outcome is unknown is not made from now on. It would be made if the
    /// state still had the revision that the change was asked for. So the state gets another revision.
    async fn settle(&mut self) -> io::Result<()> {
        let Some(asked_for) = self.uncertain else { return Ok(()) };
        let mut found = self.get().await?;
        // A state that was made where there was none is the first one, whenever it is made.
        if let (Some(same), Some(asked_for)) = (&found, asked_for)
            && same.revision == asked_for
        {
            let put = TxnOp::put(&*self.key, &*same.value, None);
            let txn = Txn::new().when([self.is_at(Some(asked_for))]).and_then([put]);
            // A faster server has given it another revision, too.
            by_client(&self.shared, |client| async move { client.kv_client().txn(txn).await })
                .await?;
            found = self.get().await?;
        }
        self.heard(found.and_then(|found| found.state().ok()));
        self.uncertain = None;
        Ok(())
    }

    /// What was heard, as long as this server is a member, which hears everything soon. Changes compare
    /// revisions, so that nothing is decided by what is old.
    async fn look(&self) -> io::Result<Option<(SliceState, Revision)>> {
        if self.shared.lease.holds() {
            let view = self.shared.view();
            if let Some(state) = view.slices.get(&self.name).filter(|_| view.is_whole) {
                return Ok(Some(*state));
            }
        }
        let state = self.get().await?.map(|found| found.state()).transpose()?;
        self.heard(state);
        Ok(state)
    }

    async fn change(&mut self, change: SliceChange) -> io::Result<bool> {
        let SliceChange { seen, gone, next } = change;
        let mut when = vec![self.is_at(seen)];
        let member = gone.map(|server| self.shared.keys.member(server));
        when.extend(member.map(|key| Compare::create_revision(key, CompareOp::Equal, 0)));
        let put = TxnOp::put(&*self.key, records::written(SliceRecord::from(next)), None);
        let look = TxnOp::get(&*self.key, None);
        let txn = Txn::new().when(when).and_then([put]).or_else([look]);
        self.uncertain = Some(seen);
        let answer =
            by_client(&self.shared, |client| async move { client.kv_client().txn(txn).await })
                .await?;
        self.uncertain = None;
        if answer.succeeded() {
            let revision = answer.header().map_or(0, |header| header.revision());
            let revision = Revision(revision.unsigned_abs());
            self.shared.change_view(|view| view.changed(&self.name, next, revision));
            return Ok(true);
        }
        if let Some(TxnOpResponse::Get(found)) = answer.op_responses().first() {
            self.heard(StoredValue::of(found).and_then(|found| found.state().ok()));
        }
        Ok(false)
    }

    fn heard(&self, state: Option<(SliceState, Revision)>) {
        if let Some((state, revision)) = state {
            self.shared.change_view(|view| view.changed(&self.name, state, revision));
        }
    }

    /// The state has this revision; none: there is no state.
    fn is_at(&self, revision: Option<Revision>) -> Compare {
        let revision = revision.map_or(0, |Revision(revision)| revision.cast_signed());
        Compare::mod_revision(&*self.key, CompareOp::Equal, revision)
    }

    /// As it is now.
    async fn get(&self) -> io::Result<Option<StoredValue>> {
        let key = self.key.clone();
        let got =
            by_client(
                &self.shared,
                |client| async move { client.kv_client().get(key, None).await },
            );
        Ok(StoredValue::of(&got.await?))
    }
}
