//! The thread that speaks to etcd.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use dray_rpc::server::{Revision, ServerNumber, SliceChange, SliceState};
use etcd_client::{Client, ConnectOptions};
use tokio::runtime::Builder;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};

use crate::calls;
use crate::connection::{self, MembershipLoss};
use crate::shared::{ClusterShared, JoinPhase};

/// Threads for the names of etcd's members, which the resolver of libc looks up.
const RESOLVERS_MAX: usize = 2;
/// After all members of etcd have been tried, or a server has to wait.
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(200);
/// The lease is given back within this time, or ends by itself.
const LEAVE_MAX: Duration = Duration::from_secs(1);

/// A call of another thread.
pub(crate) struct Order {
    pub(crate) kind: CallKind,
    pub(crate) reply: oneshot::Sender<io::Result<ControlReply>>,
}

pub(crate) enum CallKind {
    Slice(String),
    Change(String, SliceChange),
    Drain(ServerNumber, bool),
    Quiesce(bool),
    Quiet(Revision),
    Leave,
}

pub(crate) enum ControlReply {
    Slice(Option<(SliceState, Revision)>),
    Made(bool),
    Done,
}

fn another_reply() -> io::Error {
    io::Error::other("the reply to another call")
}

impl ControlReply {
    pub(crate) fn slice(self) -> io::Result<Option<(SliceState, Revision)>> {
        match self {
            ControlReply::Slice(state) => Ok(state),
            ControlReply::Made(_) | ControlReply::Done => Err(another_reply()),
        }
    }

    pub(crate) fn made(self) -> io::Result<bool> {
        match self {
            ControlReply::Made(made) => Ok(made),
            ControlReply::Slice(_) | ControlReply::Done => Err(another_reply()),
        }
    }

    pub(crate) fn done(self) -> io::Result<()> {
        match self {
            ControlReply::Done => Ok(()),
            ControlReply::Slice(_) | ControlReply::Made(_) => Err(another_reply()),
        }
    }
}

/// Starts the thread, which ends when nobody can send orders any more.
pub(crate) fn start(shared: Arc<ClusterShared>, orders: mpsc::Receiver<Order>) -> io::Result<()> {
    let mut builder = Builder::new_current_thread();
    let runtime = builder
        .enable_all()
        .max_blocking_threads(RESOLVERS_MAX)
        .thread_name("dray-etcd-name")
        .build()?;
    let run = move || {
        runtime.block_on(run(&shared, orders));
        shared.phase.send_replace(JoinPhase::Left);
        // A name that is being looked up is not waited for.
        runtime.shutdown_background();
    };
    std::thread::Builder::new().name("dray-etcd".into()).spawn(run).map(drop)
}

async fn run(shared: &Arc<ClusterShared>, orders: mpsc::Receiver<Order>) {
    let left = tokio::select! {
        never = stay_member(shared) => match never {},
        left = calls::take_orders(shared, orders) => left,
    };
    let Some(reply) = left else { return }; // as a process that dies
    shared.lease.give_up();
    let done = timeout(LEAVE_MAX, give_lease_back(shared)).await;
    let done = done.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
    let _ = reply.send(done.map(|()| ControlReply::Done)); // the caller may have gone
}

async fn give_lease_back(shared: &ClusterShared) -> io::Result<()> {
    let Some(lease) = shared.lease_id() else { return Ok(()) };
    let client = shared.client.borrow().clone().ok_or(io::ErrorKind::NotConnected)?;
    client.lease_client().revoke(lease).await.map_err(calls::failed).map(drop)
}

/// Goes from member to member of etcd, each time that one fails.
async fn stay_member(shared: &ClusterShared) -> Infallible {
    let etcd = &shared.options.etcd;
    let mut failures = 0;
    for url in etcd.iter().cycle() {
        let lost = match connect(url).await {
            Ok(client) => {
                let Err(lost) = connection::serve(shared, url, client).await;
                lost
            }
            Err(lost) => lost,
        };
        failures = if shared.client.send_replace(None).is_some() { 1 } else { failures + 1 };
        note(shared, url, &lost);
        match lost {
            MembershipLoss::Lease => shared.set_lease_id(None),
            MembershipLoss::Connection(_) if failures % etcd.len() != 0 => {}
            MembershipLoss::Connection(_)
            | MembershipLoss::Waits(_)
            | MembershipLoss::Refused(_) => sleep(TRY_AGAIN_AFTER).await,
        }
    }
    unreachable!("the list of etcd's members is not empty")
}

/// Says why there is no connection: once for each time that one is lost, and for each other reason.
fn note(shared: &ClusterShared, url: &str, lost: &MembershipLoss) {
    let projection = &shared.options.projection;
    let (trouble, is_news) = match lost {
        MembershipLoss::Lease => ("the lease of this server has ended".to_owned(), true),
        MembershipLoss::Connection(why) => (format!("{url}: {why}"), false),
        MembershipLoss::Waits(what) => (format!("waiting for {what}"), true),
        MembershipLoss::Refused(why) => (why.to_string(), true),
    };
    let before = shared.view().trouble.clone();
    if before.is_none() || is_news && before.as_ref() != Some(&trouble) {
        log::warn!(
            "projection {projection}: not in touch with etcd, so that its share waits: {trouble}"
        );
    }
    shared.change_view(|view| (view.etcd, view.trouble) = (None, Some(trouble)));
    if let MembershipLoss::Refused(why) = lost {
        shared.phase.send_if_modified(|phase| {
            let first = matches!(phase, JoinPhase::Joining);
            if first {
                *phase = JoinPhase::Refused(why.clone());
            }
            first
        });
    }
}

async fn connect(url: &str) -> Result<Client, MembershipLoss> {
    // A member that has lost the others says so instead of waiting for them.
    let options = ConnectOptions::new().with_require_leader(true);
    Ok(Client::connect([url], Some(options)).await?)
}
