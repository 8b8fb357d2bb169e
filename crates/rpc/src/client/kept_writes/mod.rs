//! Writes that are answered here and sent on later, of files for which this session has the write lease (ADR 0053).
//!
//! What is kept of a file is sent before anything else is asked of that file. So no answer has to be made up here, and
//! attributes are always the server's. It is sent at the latest after [`KEPT_MAX_TIME`], when it is asked back, and when
//! the file is closed. With a log on a local disk (ADR 0058) it may be more, for longer, and a close does not wait.

mod aside;
mod extents;
mod file;
mod left_behind;
mod local;
mod sending;
mod store;
mod through;
mod unsent;

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::{Context, FileId, IdMap, LeaseKinds, OpenHow, Pid, RecallItem, RequestId, Result};
use dray_rt::Instant;

pub(crate) use self::file::KeptFile;
use self::file::{Keep, KeptBatch};
pub use self::left_behind::LeftBehind;
use self::store::{KeptStore, LogStore};
use crate::client::dirty_log::{DirtyLog, FoundFile, WriteBackOptions};
use crate::client::file::RemoteFile;
use crate::client::leases::{LeaseWish, LeasedAnswers};
use crate::client::memory::{InheritedKept, KeptPlaces, SessionMemory};
use crate::client::session::ClientSession;
use crate::wire::WriteBase;

/// What is kept of one file in memory, bytes.
const FILE_MAX_BYTES: usize = 256 << 10;
/// What is kept in all, bytes.
const SESSION_MAX_BYTES: usize = 16 << 20;
/// Larger writes are sent at once: they gain little.
const WRITE_MAX_BYTES: usize = 64 << 10;
/// What is sent together of what is in a log, bytes.
const BATCH_MAX_BYTES: usize = dray_core::IO_MAX_BYTES;
/// How long anything is kept in memory.
const KEPT_MAX_TIME: Duration = Duration::from_secs(1);
/// Files whose write lease is remembered. Others are written without.
const FILES_MAX: usize = 4096;

/// The kept writes of a session.
pub(crate) struct KeptWrites {
    wanted: bool,
    leases: LeasedAnswers,
    files: Mutex<IdMap<FileId, Arc<KeptFile>>>,
    /// Entries of that.
    count: AtomicUsize,
    sum: Arc<KeptSum>,
    store: Arc<KeptStore>,
    /// Requests whose writes a process before this one had noted. The kernel may make them once more.
    noted: Mutex<HashSet<u64>>,
    has_noted: AtomicBool,
}

/// Sums over all files of a session.
#[derive(Default)]
pub(super) struct KeptSum {
    bytes: AtomicUsize,
    kept: AtomicU64,
    late: AtomicU64,
    lost: AtomicU64,
    aside: AtomicU64,
    /// Batches that are at the server.
    sent: AtomicU64,
}

/// What a session keeps, and has kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeptWritesStatus {
    /// Files that it may keep writes of.
    pub files: u64,
    /// Bytes that are kept now.
    pub bytes: u64,
    /// Writes that were answered here.
    pub writes: u64,
    /// How often something was sent after others may have seen the file without it.
    pub late: u64,
    /// How often something could not be written. The error of a call says so, or the next one does.
    pub lost: u64,
    /// How often that is in a file beside.
    pub aside: u64,
    /// How often the disk of the log has failed. None: there is no log.
    pub disk_errors: Option<u64>,
}

impl KeptWrites {
    pub(crate) fn new(
        wish: LeaseWish,
        leases: LeasedAnswers,
        memory: &SessionMemory,
        dirty: Option<&WriteBackOptions>,
    ) -> KeptWrites {
        let wanted = matches!(wish, LeaseWish::Yes { keeps_writes: true, .. });
        let (files, count) = (Mutex::default(), AtomicUsize::new(0));
        let store = match dirty.filter(|_| wanted) {
            Some(how) => {
                let log = DirtyLog::new(how, memory.node());
                KeptStore::Log(Box::new(LogStore::new(how, log)))
            }
            None if wanted => KeptStore::Places(memory.kept_places()),
            None => KeptStore::Places(KeptPlaces::none()),
        };
        KeptWrites {
            wanted,
            leases,
            files,
            count,
            sum: Arc::default(),
            store: Arc::new(store),
            noted: Mutex::default(),
            has_noted: AtomicBool::new(false),
        }
    }

    /// Takes over what a process before this one had kept, and begins to send it. To be said before the server is
    /// asked anything.
    pub(crate) fn inherit(&self, session: &Arc<ClientSession>) {
        let requests = match &*self.store {
            KeptStore::Places(places) => {
                let (kept, requests) = places.inherited();
                kept.iter().for_each(|kept| self.inherit_file(session, kept));
                requests
            }
            KeptStore::Log(store) => {
                let found = store.log.inherit();
                found.files.iter().for_each(|file| self.inherit_logged(session, file));
                found.requests
            }
        };
        self.has_noted.store(!requests.is_empty(), Ordering::SeqCst);
        *self.noted.lock().unwrap_or_else(PoisonError::into_inner) = requests;
    }

    fn inherit_file(&self, session: &Arc<ClientSession>, kept: &InheritedKept) {
        let InheritedKept { id, handle, how, who, pid, .. } = kept;
        let file = RemoteFile::new(session.clone(), *id, *handle, *how, (None, None));
        let cx = Context::new(session.link.node, RequestId(0), Arc::new(who.clone()), *pid);
        let known = self.entry(*id);
        known.inherits(kept, (file.inherited().shared(), cx));
        session.link.spawn_home(async move { known.settle().await });
    }

    fn inherit_logged(&self, session: &Arc<ClientSession>, found: &FoundFile) {
        let Some(first) = found.writes.first().map(|write| &write.record) else { return };
        let (how, who) = (OpenHow::new(first.flags), Arc::new(first.who.clone()));
        let file = RemoteFile::new(session.clone(), found.id, first.handle, how, (None, None));
        let cx = Context::new(session.link.node, RequestId(0), who, Pid(first.pid));
        let known = self.entry(found.id);
        known.inherits_logged(found, (file.inherited().shared(), cx));
        session.link.spawn_home(async move { known.settle().await });
    }

    /// Whether a process before this one had noted the write of this request, which comes once more.
    pub(crate) fn was_noted(&self, request: u64) -> bool {
        self.has_noted.load(Ordering::Relaxed)
            && self.noted.lock().unwrap_or_else(PoisonError::into_inner).remove(&request)
    }

    /// Whether a close of this file has to be passed on.
    pub(crate) fn owes(&self, id: FileId) -> bool {
        self.find(id).is_some_and(|file| file.owes())
    }

    fn entry(&self, id: FileId) -> Arc<KeptFile> {
        let made = || {
            self.count.fetch_add(1, Ordering::SeqCst);
            let shared = (self.sum.clone(), self.store.clone());
            Arc::new(KeptFile::new(id, self.leases.clone(), shared))
        };
        self.lock().entry(id).or_insert_with(made).clone()
    }

    fn lock(&self) -> MutexGuard<'_, IdMap<FileId, Arc<KeptFile>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// None if the session wants no write leases.
    pub(crate) fn status(&self) -> Option<KeptWritesStatus> {
        let KeptSum { kept, late, lost, aside, .. } = &*self.sum;
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        self.wanted.then(|| KeptWritesStatus {
            files: self.count.load(Ordering::Relaxed) as u64,
            bytes: self.sum.bytes.load(Ordering::Relaxed) as u64,
            writes: count(kept),
            late: count(late),
            lost: count(lost),
            aside: count(aside),
            disk_errors: self.store.log().map(DirtyLog::errors),
        })
    }

    /// To be asked before a call is made whose answer may give a write lease.
    pub(crate) fn asking(&self) -> u64 {
        if self.wanted { self.leases.recalls() } else { 0 }
    }

    /// How a file is opened. A write lease comes with attributes alone, since what is kept is based on them.
    pub(crate) fn opening(&self, how: OpenHow) -> OpenHow {
        OpenHow { with_attr: how.with_attr || (self.wanted && how.writes()), ..how }
    }

    /// An answer to a call that was asked for at `asked` gives a write lease, of a file in this state.
    /// `is_new`: the call has made the file.
    pub(crate) fn granted(
        &self,
        asked: u64,
        (id, is_new): (FileId, bool),
        (number, base): (u64, WriteBase),
    ) {
        if !self.wanted {
            return;
        }
        if self.count.load(Ordering::SeqCst) >= FILES_MAX && self.find(id).is_none() {
            return; // the server asks it back, and gets it at once
        }
        let file = self.entry(id);
        file.granted(number, base, is_new);
        // A recall on its way may have overtaken the answer: it did not find the lease.
        if self.leases.recalls() != asked {
            file.lease_ends(None);
        }
    }

    /// The file with this id, if it may have something that is kept.
    pub(crate) fn find(&self, id: FileId) -> Option<Arc<KeptFile>> {
        if self.count.load(Ordering::SeqCst) == 0 {
            return None; // nearly always
        }
        self.lock().get(&id).cloned()
    }

    /// Bytes that are kept.
    pub(super) fn bytes(&self) -> usize {
        self.sum.bytes.load(Ordering::SeqCst)
    }

    /// Whether the session wants write leases, so that it may keep something.
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted
    }

    /// Whether anything is kept.
    pub(crate) fn has_any(&self) -> bool {
        self.sum.bytes.load(Ordering::SeqCst) > 0
    }

    /// Sends what is kept of a file, before something else is asked of it. Its errors are reported to who writes or
    /// closes it.
    pub(crate) async fn settle(&self, id: FileId) {
        if let Some(file) = self.find(id) {
            file.settle().await;
        }
    }

    /// The same before this session changes the file by another call.
    pub(crate) async fn changes_past(&self, id: FileId) {
        if let Some(file) = self.find(id) {
            file.settle().await;
            file.changed_past();
        }
    }

    /// The same before names change: that may change any file.
    pub(crate) async fn names_change(&self) {
        if self.count.load(Ordering::SeqCst) > 0 {
            self.settle_each().await;
            self.lock().values().for_each(|file| file.changed_past());
        }
    }

    /// The same of all files.
    pub(crate) async fn settle_all(&self) {
        if self.has_any() {
            self.settle_each().await;
        }
    }

    /// The same; waits also for what is being sent.
    pub(crate) async fn settle_each(&self) {
        let all: Vec<_> = self.lock().values().cloned().collect();
        for file in all {
            file.settle().await;
        }
    }

    /// A file is closed, or one of its descriptors is. Sends what is kept of it, and gives the lease back with that.
    /// Errors: what was written may be lost.
    pub(crate) async fn close(&self, id: FileId) -> Result<()> {
        let Some(file) = self.find(id) else { return Ok(()) };
        let written = file.write_back(true).await;
        let failure = file.failure();
        self.forget_ended(&file);
        written.and(failure)
    }

    /// Nothing is known of a file any more that has no lease, and of which everything is sent.
    pub(super) fn forget_ended(&self, file: &Arc<KeptFile>) {
        if file.has_ended() {
            let mut files = self.lock();
            let is_known = |known: &Arc<KeptFile>| Arc::ptr_eq(known, file);
            if files.get(&file.id).is_some_and(is_known) && file.has_ended() {
                files.remove(&file.id);
                self.count.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }

    /// These leases are recalled. Answers files that have something to send first.
    pub(crate) fn recalled(&self, items: &[RecallItem]) -> Vec<Arc<KeptFile>> {
        let writes = |item: &&RecallItem| item.kinds.contains(LeaseKinds::WRITE);
        let mut kept = Vec::new();
        for item in items.iter().filter(writes) {
            let Some(file) = self.find(item.id) else { continue };
            file.lease_ends(None);
            kept.push(file); // also what is being sent has to be answered first
        }
        kept
    }

    /// The server has ended all leases of this session, or is another one. The clients of that server do not go on
    /// before what is kept is written, if this comes back before `until`.
    pub(crate) fn all_end(&self, until: Instant) {
        let all: Vec<_> = self.lock().values().cloned().collect();
        all.iter().for_each(|file| file.lease_ends(Some(until)));
        self.settle_all_soon(&all);
    }
}
