//! The session as front ends see it.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use dray_core::{
    Attr, Context, Errno, FileId, FindJobs, Fut, HearChanges, HearRecalls, HoldLeases, HoldNumber,
    LockOwner, Name, NodeId, Op, OpenFile, OpenHow, RequestId, Result, SessionControl, Stack,
};
use dray_rt::sleep;

use crate::client::fs::RemoteFs;
use crate::client::session::ClientSession;
use crate::wire::Call;

/// Until a server that has as many holds as it may is asked again, and how often it is asked.
const HOLD_AGAIN_TIME: Duration = Duration::from_millis(20);
const HOLD_TRIES: usize = 500;

impl RemoteFs {
    /// A file system over this session, and the session under it, for a front end.
    pub fn stack(session: Arc<ClientSession>) -> Stack {
        let remote = Arc::new(RemoteFs::new(session));
        Stack { fs: remote.clone(), session: remote }
    }
}

impl SessionControl for RemoteFs {
    fn node(&self) -> NodeId {
        self.session.node()
    }

    fn attach(
        &self,
        id: FileId,
        how: OpenHow,
        RequestId(request): RequestId,
    ) -> Option<Arc<dyn OpenFile>> {
        let handle = self.session.link.files.aliases.number_of(request);
        Some(Arc::new(self.file(id, handle, how, (None, None)).inherited()))
    }

    fn attached(&self) {
        self.session.link.files.complete();
    }

    fn release_inherited(&self) {
        self.session.release_inherited();
    }

    fn lock_owners(&self) -> Option<Vec<(FileId, LockOwner)>> {
        self.session.link.held.owners()
    }

    fn owes_error(&self, id: FileId) -> bool {
        let link = &self.session.link;
        link.unsynced.may_report_loss(id)
            || link.server().writes_late && link.unsynced.has_changes_of(id)
            || link.kept.owes(id)
    }

    fn mapped(&self, id: FileId) {
        let channels = self.session.channels.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(channel) = channels.first() {
            channel.tell_mapped(id);
        }
    }

    fn hear_changes_by(&self, hear: HearChanges) {
        self.session.link.hear_changes_by(hear);
    }

    fn hear_recalls_by(&self, hear: HearRecalls) {
        let link = &self.session.link;
        // On an executor, as all that comes later.
        if let Some(tell) = link.leases.hear_recalls_by(hear) {
            link.spawn_home(async move { tell() });
        }
    }

    fn leased_attributes(&self, id: FileId) -> Option<Attr> {
        self.session.link.leases.leased_attributes(id)
    }

    fn find_jobs_by(&self, find: FindJobs) {
        self.session.link.find_jobs_by(find);
    }

    fn finish(&self) -> Fut<'_, ()> {
        Box::pin(self.session.finish())
    }

    fn goodbye(&self) {
        self.session.goodbye();
    }
}

impl HoldLeases for RemoteFs {
    fn hold<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: Option<&'a Name>,
    ) -> Fut<'a, Result<HoldNumber>> {
        Box::pin(async move {
            self.must_have(cx, Op::Hold).await?;
            let number = self.session.link.own_handle();
            let name = name.map(Name::as_bytes);
            for _ in 1..HOLD_TRIES {
                match self.ask::<()>(cx, Call::Hold { number, id, name }).await {
                    Err(error) if error.errno() == Errno::EAGAIN => sleep(HOLD_AGAIN_TIME).await,
                    outcome => return outcome.map(|()| HoldNumber(number)),
                }
            }
            self.ask::<()>(cx, Call::Hold { number, id, name }).await?;
            Ok(HoldNumber(number))
        })
    }

    fn leased(&self, id: FileId) -> Option<Attr> {
        self.session.link.leases.getattr(id)
    }

    fn release<'a>(
        &'a self,
        cx: &'a Context,
        HoldNumber(number): HoldNumber,
    ) -> Fut<'a, Result<bool>> {
        Box::pin(async move {
            let lasted: u64 = self.ask(cx, Call::Release { number }).await?;
            Ok(lasted != 0)
        })
    }
}
