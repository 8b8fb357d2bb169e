//! A session that says when others have changed files, as a server does.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use dray_core::{
    Attr, FileId, FindJobs, Fut, HearChanges, HearRecalls, LockOwner, NodeId, OpenFile, OpenHow,
    Recall, RecallDone, RecallItem, RequestId, SessionControl,
};

/// The callbacks for changes and for recalls, if they are set, and what is leased.
#[derive(Clone, Default)]
pub struct NotifyingSession(
    Arc<Mutex<Option<HearChanges>>>,
    Arc<Mutex<Option<HearRecalls>>>,
    Arc<Mutex<HashMap<FileId, Attr>>>,
);

impl NotifyingSession {
    /// Another client has changed this file.
    pub fn changed(&self, id: FileId) {
        let hear = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        hear.as_ref().expect("the front end hears of changes")(vec![id]);
    }

    fn leases(&self) -> MutexGuard<'_, HashMap<FileId, Attr>> {
        self.2.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The server leases these attributes.
    pub fn lease(&self, id: FileId, attr: Attr) {
        self.leases().insert(id, attr);
    }

    /// The server recalls these leases. Waits until they are given up, and says how long that took.
    pub fn recall(&self, items: Vec<RecallItem>) -> Duration {
        self.leases().retain(|id, _| !items.iter().any(|item| item.id == *id));
        self.end(Recall::Items(items))
    }

    /// All leases of the session have ended.
    pub fn recall_all(&self) -> Duration {
        self.leases().clear();
        self.end(Recall::All)
    }

    fn end(&self, recall: Recall) -> Duration {
        let hear = self.1.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let hear = hear.expect("the front end hears of recalls");
        let (tell, ended) = mpsc::channel();
        let begin = Instant::now();
        std::thread::spawn(move || {
            let mut executor = dray_rt::Executor::new(dray_rt::DriverKind::Epoll).unwrap();
            executor.block_on(async move {
                let (sender, receiver) = dray_rt::sync::oneshot::channel();
                let done = RecallDone::new(move || _ = sender.send(()));
                hear(recall, done);
                let _ = receiver.await;
            });
            let _ = tell.send(());
        });
        ended.recv_timeout(Duration::from_secs(30)).expect("a recall ends");
        begin.elapsed()
    }
}

impl SessionControl for NotifyingSession {
    fn node(&self) -> NodeId {
        NodeId(0)
    }
    fn attach(&self, _: FileId, _: OpenHow, _: RequestId) -> Option<Arc<dyn OpenFile>> {
        None
    }
    fn attached(&self) {}

    fn release_inherited(&self) {}
    fn lock_owners(&self) -> Option<Vec<(FileId, LockOwner)>> {
        None
    }
    fn owes_error(&self, _: FileId) -> bool {
        false
    }
    fn mapped(&self, _: FileId) {}
    fn hear_changes_by(&self, hear: HearChanges) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(hear);
    }
    fn hear_recalls_by(&self, hear: HearRecalls) {
        *self.1.lock().unwrap_or_else(PoisonError::into_inner) = Some(hear);
    }
    fn leased_attributes(&self, id: FileId) -> Option<Attr> {
        self.leases().get(&id).copied()
    }
    fn find_jobs_by(&self, _: FindJobs) {}
    fn finish(&self) -> Fut<'_, ()> {
        Box::pin(async {})
    }

    fn goodbye(&self) {}
}
