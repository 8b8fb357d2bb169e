//! One connection to one member of etcd: keeps the lease, and hears what happens.

use std::convert::Infallible;
use std::fmt;

use dray_rt::Instant;
use etcd_client::{
    Client, Error, EventType, GetOptions, LeaseKeepAliveStream, LeaseKeeper, WatchOptions,
};
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::join::{self, JoinRefusal, Joined};
use crate::shared::{ClusterShared, JoinPhase};
use crate::view::EtcdEntry;

/// Why a connection is given up.
#[derive(Debug)]
pub(crate) enum MembershipLoss {
    /// The connection does not work, or etcd behind it.
    Connection(String),
    /// The lease is over.
    Lease,
    /// This server cannot be a member now.
    Waits(String),
    /// Nor later, unless somebody does something.
    Refused(JoinRefusal),
}

impl MembershipLoss {
    pub(crate) fn because(why: impl fmt::Display) -> MembershipLoss {
        MembershipLoss::Connection(why.to_string())
    }
}

impl From<Error> for MembershipLoss {
    fn from(error: Error) -> MembershipLoss {
        match error {
            // In words, not as a structure with all headers.
            Error::GRpcStatus(status) => MembershipLoss::because(status.message()),
            other => MembershipLoss::because(other),
        }
    }
}

/// Limits a call to the time that a member of etcd has for it.
async fn in_time<T>(
    shared: &ClusterShared,
    call: impl Future<Output = Result<T, MembershipLoss>>,
) -> Result<T, MembershipLoss> {
    let late = |_| MembershipLoss::because("no answer in time");
    timeout(shared.call_max(), call).await.map_err(late)?
}

/// Keeps the lease, or begins one, and hears what happens, until one of that fails.
pub(crate) async fn serve(
    shared: &ClusterShared,
    url: &str,
    client: Client,
) -> Result<Infallible, MembershipLoss> {
    let (keeper, answers) = match shared.lease_id() {
        Some(id) => in_time(shared, keeper_of(shared, &client, id)).await?,
        None => begin(shared, &client).await?,
    };
    log::info!("projection {}: in touch with etcd at {url}", shared.options.projection);
    shared.change_view(|view| (view.etcd, view.trouble) = (Some(url.to_owned()), None));
    shared.client.send_replace(Some(client.clone()));
    shared.phase.send_if_modified(|phase| {
        let first = !matches!(phase, JoinPhase::Joined);
        if first {
            *phase = JoinPhase::Joined;
        }
        first
    });
    tokio::select! {
        lost = keep_alive(shared, keeper, answers) => lost,
        lost = hear(shared, &client) => lost,
    }
}

/// Becomes a member by a new lease.
async fn begin(
    shared: &ClusterShared,
    client: &Client,
) -> Result<(LeaseKeeper, LeaseKeepAliveStream), MembershipLoss> {
    let asked_s = i64::try_from(shared.options.ttl.as_secs()).unwrap_or(i64::MAX);
    let granting = async { Ok(client.lease_client().grant(asked_s, None).await?) };
    let granted = in_time(shared, granting).await?;
    if granted.ttl() < asked_s {
        return Err(MembershipLoss::because(format!(
            "etcd grants a lease of {} s only",
            granted.ttl()
        )));
    }
    if granted.ttl() > asked_s {
        log::warn!(
            "projection {}: etcd grants no lease below {} s, so a dead server is replaced later: its \
             election timeout is too long",
            shared.options.projection,
            granted.ttl()
        );
    }
    match in_time(shared, join::join(shared, client, granted.id())).await? {
        Joined::Member => shared.set_lease_id(Some(granted.id())),
        Joined::Later(what) => {
            let _ = client.lease_client().revoke(granted.id()).await; // it ends by itself
            return Err(MembershipLoss::Waits(what));
        }
        Joined::Never(why) => {
            let _ = client.lease_client().revoke(granted.id()).await;
            return Err(MembershipLoss::Refused(why));
        }
    }
    // Who is there has to be known before this server acts as a member.
    in_time(shared, load(shared, client)).await?;
    let keeper = in_time(shared, keeper_of(shared, client, granted.id())).await?;
    Ok(keeper)
}

/// The first keepalive of a connection.
async fn keeper_of(
    shared: &ClusterShared,
    client: &Client,
    lease: i64,
) -> Result<(LeaseKeeper, LeaseKeepAliveStream), MembershipLoss> {
    let sent = dray_rt::now();
    match client.lease_client().keep_alive(lease).await {
        Ok(keeper) => {
            shared.lease.prolong(sent);
            Ok(keeper)
        }
        // So the crate says that etcd does not know it.
        Err(Error::LeaseKeepAliveError(_)) => Err(MembershipLoss::Lease),
        Err(other) => Err(other.into()),
    }
}

/// Says that this server is there, one keepalive at a time. So an answer is never taken for that of a
/// keepalive that was sent later.
async fn keep_alive(
    shared: &ClusterShared,
    mut keeper: LeaseKeeper,
    mut answers: LeaseKeepAliveStream,
) -> Result<Infallible, MembershipLoss> {
    let mut ticks = interval(shared.keep_alive_every());
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await; // the first one is over at once, and has been sent
    loop {
        ticks.tick().await;
        let sent: Instant = dray_rt::now();
        let asked = async {
            keeper.keep_alive().await?;
            Ok(answers.message().await?)
        };
        match in_time(shared, asked).await? {
            Some(answer) if answer.ttl() > 0 => shared.lease.prolong(sent),
            Some(_) => return Err(MembershipLoss::Lease),
            None => return Err(MembershipLoss::because("etcd ended the stream of keepalives")),
        }
    }
}

/// Everything as it is now. Answers its revision.
async fn load(shared: &ClusterShared, client: &Client) -> Result<i64, MembershipLoss> {
    let prefix = Some(GetOptions::new().with_prefix());
    let all = client.kv_client().get(shared.keys.prefix(), prefix).await?;
    let revision = all.header().map_or(0, |header| header.revision());
    shared.change_view(|view| {
        let entries = all.kvs().iter().map(|found| EtcdEntry {
            key: found.key(),
            value: found.value(),
            revision: found.mod_revision().unsigned_abs(),
        });
        view.replace(&shared.keys, entries, revision.unsigned_abs());
    });
    Ok(revision)
}

/// Hears all that happens.
async fn hear(shared: &ClusterShared, client: &Client) -> Result<Infallible, MembershipLoss> {
    let revision = in_time(shared, load(shared, client)).await?;
    let options = WatchOptions::new().with_prefix().with_start_revision(revision + 1);
    let watching =
        async { Ok(client.watch_client().watch(shared.keys.prefix(), Some(options)).await?) };
    let mut stream = in_time(shared, watching).await?;
    let mine = shared.keys.member(shared.options.me);
    loop {
        let Some(heard) = stream.message().await? else {
            return Err(MembershipLoss::because("etcd ended the stream of changes"));
        };
        if heard.canceled() {
            return Err(MembershipLoss::because(format!(
                "etcd ended the watch: {}",
                heard.cancel_reason()
            )));
        }
        let mut is_gone = false;
        shared.change_view(|view| {
            for event in heard.events() {
                let Some(found) = event.kv() else { continue };
                let revision = found.mod_revision().unsigned_abs();
                match event.event_type() {
                    EventType::Put => {
                        let (key, value) = (found.key(), found.value());
                        view.put(&shared.keys, &EtcdEntry { key, value, revision });
                        is_gone &= found.key() != mine.as_bytes();
                    }
                    EventType::Delete => {
                        view.delete(&shared.keys, found.key(), revision);
                        is_gone |= found.key() == mine.as_bytes();
                    }
                }
                view.heard = view.heard.max(revision);
            }
        });
        if is_gone {
            // Others may take over now, whatever the lease says.
            shared.lease.give_up();
            return Err(MembershipLoss::Lease);
        }
    }
}
