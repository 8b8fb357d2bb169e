//! What the control thread and the callers of a membership share.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_rpc::server::ServingLease;
use etcd_client::Client;
use tokio::sync::watch;

use crate::join::JoinRefusal;
use crate::keys::Keys;
use crate::membership::EtcdOptions;
use crate::view::ClusterView;

/// How far this server has come.
#[derive(Clone, Debug)]
pub(crate) enum JoinPhase {
    /// The server has not been a member so far.
    Joining,
    /// The server has been one. Its lease says whether it is one now.
    Joined,
    /// The server cannot be one.
    Refused(JoinRefusal),
    /// The server has left, or the control thread has ended.
    Left,
}

/// What both sides have.
pub(crate) struct ClusterShared {
    pub(crate) options: EtcdOptions,
    pub(crate) keys: Keys,
    pub(crate) lease: Arc<ServingLease>,
    pub(crate) phase: watch::Sender<JoinPhase>,
    /// The connection that calls go by, while there is one.
    pub(crate) client: watch::Sender<Option<Client>>,
    /// 0: none.
    lease_id: AtomicI64,
    view: Mutex<ClusterView>,
    /// Counts changes of the view.
    pub(crate) news: watch::Sender<u64>,
}

impl ClusterShared {
    pub(crate) fn new(options: EtcdOptions) -> ClusterShared {
        ClusterShared {
            keys: Keys::of(&options.projection),
            lease: Arc::new(ServingLease::within(options.ttl)),
            phase: watch::Sender::new(JoinPhase::Joining),
            client: watch::Sender::new(None),
            lease_id: AtomicI64::new(0),
            view: Mutex::default(),
            news: watch::Sender::new(0),
            options,
        }
    }

    /// The lease in etcd that this server is a member by.
    pub(crate) fn lease_id(&self) -> Option<i64> {
        Some(self.lease_id.load(Ordering::SeqCst)).filter(|id| *id != 0)
    }

    pub(crate) fn set_lease_id(&self, id: Option<i64>) {
        self.lease_id.store(id.unwrap_or(0), Ordering::SeqCst);
    }

    pub(crate) fn view(&self) -> MutexGuard<'_, ClusterView> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the view, and tells those who wait for news.
    pub(crate) fn change_view(&self, change: impl FnOnce(&mut ClusterView)) {
        change(&mut self.view());
        self.news.send_modify(|news| *news += 1);
    }

    /// How often this server says that it is there.
    pub(crate) fn keep_alive_every(&self) -> Duration {
        self.options.ttl / 4
    }

    /// Longest time of a call to etcd. A member that takes longer for a keepalive is given up, early
    /// enough for another one to be asked before the lease ends.
    pub(crate) fn call_max(&self) -> Duration {
        self.options.ttl / 4
    }
}
