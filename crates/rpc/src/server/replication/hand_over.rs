//! A slice goes from the server that serves it to the other one, which is in step, without a loss.
//!
//! To clients it is as if the server process had been killed and started again: what was under way is
//! asked for once more. But all of it has left the file system before, and its notes are at the other
//! server. Nothing is only in the memory of this machine.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::{Errno, Error};
use dray_rt::sync::{Notify, oneshot};
use dray_rt::{sleep, timeout};

use super::membership::{PageCacheId, SliceChange, SliceState};
use super::slice::{Leading, SliceServer};
use crate::server::as_server;
use crate::server::service::lock;
use crate::server::status::RunningCall;
use crate::wire::OpRow;

/// A call that has been under way for so long hangs. Waits for locks do not: they end with the serving.
const HANGS_AFTER: Duration = Duration::from_secs(2);
/// Longest time in which calls that are under way have to end.
const CALLS_END_MAX: Duration = Duration::from_secs(5);
/// Longest time that the last sync may take.
const LAST_SYNC_MAX: Duration = Duration::from_secs(5);
/// Between looks whether calls have ended.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Why a slice was not handed over.
#[derive(Clone, Debug)]
pub enum HandOverRefusal {
    /// This server does not serve it, or not any more.
    NotServed,
    /// The other server does not have everything that clients rely on, or is not there.
    NotInStep,
    /// Clients still send again what a loss may have undone.
    Recovering,
    /// A call hangs in the file system below. The slice is served on here.
    CallHangs,
    /// What was written cannot be brought to media. The slice is served on here.
    SyncFailed(Error),
    /// The membership does not answer, or changed meanwhile. The server of the slice goes on.
    MembershipChanged,
}

impl fmt::Display for HandOverRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HandOverRefusal::NotServed => f.write_str("it is not served here"),
            HandOverRefusal::NotInStep => f.write_str("the other server is not in step with it"),
            HandOverRefusal::Recovering => {
                f.write_str("clients still send again what a server took with it")
            }
            HandOverRefusal::CallHangs => f.write_str("a call hangs in the file system below"),
            HandOverRefusal::SyncFailed(error) => {
                write!(f, "what was written cannot be synced: {error}")
            }
            HandOverRefusal::MembershipChanged => {
                f.write_str("the membership does not answer, or has changed meanwhile")
            }
        }
    }
}

/// Callers that wait for a slice to be handed over.
#[derive(Default)]
pub(super) struct HandOverRequests {
    waiting: Mutex<Vec<oneshot::Sender<Result<(), HandOverRefusal>>>>,
    news: Notify,
}

impl HandOverRequests {
    fn lock(&self) -> MutexGuard<'_, Vec<oneshot::Sender<Result<(), HandOverRefusal>>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn asked(&self) {
        while self.lock().is_empty() {
            self.news.notified().await;
        }
    }

    fn answer_all(&self, outcome: &Result<(), HandOverRefusal>) {
        let waiting = std::mem::take(&mut *self.lock());
        for caller in waiting {
            let _ = caller.send(outcome.clone()); // it may have gone
        }
    }

    /// This server has stopped to serve the slice.
    pub(super) fn fail_all(&self) {
        self.answer_all(&Err(HandOverRefusal::NotServed));
    }
}

/// How far a slice has been handed over.
enum Progress {
    /// The other server is the primary.
    Done,
    /// This server still serves it.
    Refused(HandOverRefusal),
    /// This server has stopped to serve it, and has to begin anew.
    Failed(HandOverRefusal),
}

impl SliceServer {
    /// Hands the slice over to the other server, which serves it from then on. Clients notice a pause.
    /// It may be called from any executor. Errors: nothing has changed, or this server begins to serve
    /// it anew.
    pub async fn hand_over(&self) -> Result<(), HandOverRefusal> {
        if !self.is_primary() {
            return Err(HandOverRefusal::NotServed);
        }
        let (caller, outcome) = oneshot::channel();
        self.hand_overs.lock().push(caller);
        self.hand_overs.news.notify_one();
        if !self.is_primary() {
            self.hand_overs.fail_all(); // it stopped just before
        }
        outcome.await.unwrap_or(Err(HandOverRefusal::NotServed))
    }

    /// Ends when this server must not go on as it is.
    pub(super) async fn hand_over_when_asked(&self, leading: &Leading) {
        loop {
            self.hand_overs.asked().await;
            let name = &self.slice.name;
            let (outcome, over) = match self.try_hand_over(leading).await {
                Progress::Done => (Ok(()), true),
                Progress::Refused(why) => (Err(why), false),
                Progress::Failed(why) => (Err(why), true),
            };
            match &outcome {
                Ok(()) => log::info!("slice {name}: handed over"),
                Err(why) => log::warn!("slice {name}: not handed over: {why}"),
            }
            self.hand_overs.answer_all(&outcome);
            if over {
                return;
            }
        }
    }

    async fn try_hand_over(&self, leading: &Leading) -> Progress {
        if let Err(why) = self.may_hand_over(leading).await {
            return Progress::Refused(why);
        }
        // So that little is left for the second one, during which nobody is served.
        if let Err(error) = self.sync(leading).await {
            return Progress::Refused(HandOverRefusal::SyncFailed(error));
        }
        self.stop_serving(leading);
        if timeout(CALLS_END_MAX, self.calls_ended()).await.is_err() {
            return Progress::Failed(HandOverRefusal::CallHangs);
        }
        match timeout(LAST_SYNC_MAX, self.sync(leading)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Progress::Failed(HandOverRefusal::SyncFailed(error)),
            Err(_) => return Progress::Failed(HandOverRefusal::CallHangs),
        }
        // Nothing is noted any more: what has arrived now is all.
        if !leading.stream.settled().await {
            return Progress::Failed(HandOverRefusal::NotServed);
        }
        match self.give_away(leading).await {
            Ok(()) => Progress::Done,
            Err(why) => Progress::Failed(why),
        }
    }

    async fn may_hand_over(&self, leading: &Leading) -> Result<(), HandOverRefusal> {
        // Once the slice is not served here, it cannot be again before such a call has ended.
        let hangs = |call: &RunningCall| {
            !OpRow::of(call.op).can_be_cancelled && call.since.elapsed() >= HANGS_AFTER
        };
        if lock(&leading.server.inner.running).values().any(hangs) {
            return Err(HandOverRefusal::CallHangs);
        }
        let other_is_there = self.slice.membership.is_member(self.slice.other);
        match self.state_as_primary(leading).await?.0 {
            SliceState { in_step: false, .. } => Err(HandOverRefusal::NotInStep),
            _ if !other_is_there => Err(HandOverRefusal::NotInStep),
            SliceState { recovering: true, .. } => Err(HandOverRefusal::Recovering),
            _ => Ok(()),
        }
    }

    async fn state_as_primary(
        &self,
        leading: &Leading,
    ) -> Result<(SliceState, super::Revision), HandOverRefusal> {
        let seen = self.slice.membership.slice(&self.slice.name).await;
        let (me, epoch) = (self.slice.membership.me(), leading.state.epoch);
        match seen {
            Ok(Some((state, revision))) if state.primary == me && state.epoch == epoch => {
                Ok((state, revision))
            }
            Ok(_) => Err(HandOverRefusal::NotServed),
            Err(_) => Err(HandOverRefusal::MembershipChanged),
        }
    }

    /// Brings everything to media that was written through this machine. In a task of its own, since
    /// this one may be given up half way.
    pub(super) async fn sync(&self, leading: &Leading) -> dray_core::Result<()> {
        let fs = leading.fs.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(fs) = fs else { return Ok(()) }; // nothing was served
        let sync = dray_rt::spawn_join(async move { fs.sync_all(&as_server::of_nobody()).await });
        let died = || Error::new(Errno::EIO).because("the task that syncs has died");
        sync.await.unwrap_or_else(|_| Err(died()))
    }

    pub(super) async fn calls_ended(&self) {
        while self.is_withdrawn_in_use() {
            sleep(LOOK_EVERY).await;
        }
    }

    /// Makes the other server the primary. It stays in step with this one, which has its journal as
    /// long as the other one has not begun to serve.
    async fn give_away(&self, leading: &Leading) -> Result<(), HandOverRefusal> {
        let (seen, revision) = self.state_as_primary(leading).await?;
        if !seen.in_step || seen.recovering {
            return Err(HandOverRefusal::NotInStep);
        }
        let next = SliceState {
            primary: self.slice.other,
            epoch: seen.epoch + 1,
            page_cache: PageCacheId::SYNCED,
            ..seen
        };
        let change = SliceChange { seen: Some(revision), gone: None, next };
        match self.slice.membership.change(&self.slice.name, change).await {
            Ok(true) => Ok(()),
            Ok(false) | Err(_) => Err(HandOverRefusal::MembershipChanged),
        }
    }
}
