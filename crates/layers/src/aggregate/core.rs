//! What all files of an export have in common.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use dray_core::{Class, FileSystem};
use dray_core::{Context, Counted, Errno, Error, FileId, IdMap, Result, Shares};

use super::figures::AggregateFigures;
use super::file_state::AggregatedFileState;
use super::late_errors::LateErrors;
use super::store::{PendingEra, PendingStore};
use super::{AGE_MAX, BLOCK_BYTES};

/// What the layer does for an export.
#[derive(Clone, Debug, Default)]
pub struct AggregateOptions {
    /// Memory for data that are read ahead, bytes; 0: nothing is.
    pub read_ahead_bytes: usize,
    /// Where pending data lie; none: writes are not merged.
    pub pending: Option<PendingOptions>,
    /// Set before a call fails because the file system below has gone. Pending data are then left to
    /// the next opening of the export.
    pub lost: Arc<AtomicBool>,
}

/// Where pending data lie.
#[derive(Clone, Debug)]
pub struct PendingOptions {
    /// A file in the export's state directory.
    pub path: PathBuf,
    /// How much may be pending, bytes.
    pub bytes: usize,
    /// When and where they are valid.
    pub era: PendingEra,
}

/// How often old data are looked for, while there are any.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// The state of an export.
pub(super) struct AggregateCore {
    pub(super) inner: Arc<dyn FileSystem>,
    pub(super) figures: Arc<AggregateFigures>,
    pub(super) store: Option<Arc<PendingStore>>,
    /// Windows of read-ahead, and pending blocks: no client can have all.
    pub(super) windows: Arc<Shares>,
    pub(super) blocks: Arc<Shares>,
    lost: Arc<AtomicBool>,
    stopped: AtomicBool,
    files: Mutex<IdMap<FileId, Weak<AggregatedFileState>>>,
    /// Files that hold data. Few do, and these are looked through.
    active: Mutex<IdMap<FileId, Arc<AggregatedFileState>>>,
    /// Files with pending blocks: while there are none, most calls need not look.
    pub(super) pending_files: AtomicUsize,
    /// Late writes that have failed since everything was synced.
    failed: Mutex<Option<Errno>>,
    /// Errors from before this start, for those who open the files again.
    inherited: Mutex<IdMap<FileId, Errno>>,
    readers: AtomicU64,
    tended: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl AggregateCore {
    /// Errors: those of the file for pending data.
    pub(super) fn new(
        inner: Arc<dyn FileSystem>,
        options: AggregateOptions,
        inherited: IdMap<FileId, Errno>,
    ) -> io::Result<Arc<AggregateCore>> {
        let slots = options.pending.as_ref().map_or(0, |pending| pending.bytes / BLOCK_BYTES);
        let store = options
            .pending
            .map(|pending| PendingStore::create(&pending.path, slots, pending.era))
            .transpose()?;
        Ok(Arc::new(AggregateCore {
            inner,
            figures: Arc::default(),
            store,
            windows: Arc::new(Shares::new(options.read_ahead_bytes / BLOCK_BYTES)),
            blocks: Arc::new(Shares::new(slots)),
            lost: options.lost,
            stopped: AtomicBool::new(false),
            files: Mutex::default(),
            active: Mutex::default(),
            pending_files: AtomicUsize::new(0),
            failed: Mutex::default(),
            inherited: Mutex::new(inherited),
            readers: AtomicU64::new(1),
            tended: AtomicBool::new(false),
        }))
    }

    pub(super) fn reads_ahead(&self) -> bool {
        self.windows.limit() > 0 && !self.stopped.load(Ordering::SeqCst)
    }

    /// Whether what serves the export has gone.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::SeqCst)
    }

    /// Whether writes may be merged. What could not be written is the next opening's, and so are its
    /// slots.
    pub(super) fn merges(&self) -> bool {
        self.store.is_some() && !self.is_lost() && !self.stopped.load(Ordering::SeqCst)
    }

    /// From now on all calls are passed on.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
    }

    /// No server serves the file system any more. What is pending is the next opening's. Files and
    /// their state refer to each other until then.
    pub(super) fn end(&self) {
        self.stop();
        let active = std::mem::take(&mut *lock(&self.active));
        drop(active);
    }

    pub(super) fn next_reader(&self) -> u64 {
        self.readers.fetch_add(1, Ordering::Relaxed)
    }

    /// The state of a file that is being opened.
    pub(super) fn state(self: &Arc<Self>, id: FileId) -> Arc<AggregatedFileState> {
        let mut files = lock(&self.files);
        if let Some(state) = files.get(&id).and_then(Weak::upgrade) {
            return state;
        }
        let mut errors = LateErrors::default();
        if let Some(errno) = lock(&self.inherited).remove(&id) {
            errors.note(errno);
        }
        let state = AggregatedFileState::new(self, id, errors);
        files.insert(id, Arc::downgrade(&state));
        state
    }

    /// The state of a file that somebody has open.
    pub(super) fn known(&self, id: FileId) -> Option<Arc<AggregatedFileState>> {
        lock(&self.files).get(&id).and_then(Weak::upgrade)
    }

    /// The same if some of its data may be pending.
    pub(super) fn with_pending(&self, id: FileId) -> Option<Arc<AggregatedFileState>> {
        if self.pending_files.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.known(id).filter(|state| state.has_pending())
    }

    /// A state of this file has ended; another one may have begun.
    pub(super) fn ended(&self, id: FileId) {
        let mut files = lock(&self.files);
        if files.get(&id).is_some_and(|state| state.strong_count() == 0) {
            files.remove(&id);
        }
    }

    /// A file holds data from now on, until they are old.
    pub(super) fn activate(self: &Arc<Self>, state: &Arc<AggregatedFileState>) {
        let mut active = lock(&self.active);
        if self.stopped.load(Ordering::SeqCst) {
            return; // it ends: see `end`
        }
        active.entry(state.id).or_insert_with(|| state.clone());
        let tended = self.tended.swap(true, Ordering::SeqCst);
        drop(active);
        if !tended {
            dray_rt::spawn(tend(Tending(Arc::downgrade(self))));
        }
    }

    /// Whether old data are looked for. The executor that did that may have ended.
    pub(super) fn is_tended(&self) -> bool {
        self.tended.load(Ordering::Relaxed)
    }

    fn all_active(&self) -> Vec<Arc<AggregatedFileState>> {
        lock(&self.active).values().cloned().collect()
    }

    /// A late write has failed.
    pub(super) fn failed(&self, errno: Errno) {
        *lock(&self.failed) = Some(errno);
    }

    /// Whether any file holds data.
    pub(super) fn holds_data(&self) -> bool {
        !lock(&self.active).is_empty()
    }

    /// Writes all that is pending. Errors are for the next sync.
    pub(super) async fn settle_quietly(&self) {
        for state in self.all_active() {
            state.settle_all().await;
        }
    }

    /// The same. Errors: that of a late write since the last call.
    pub(super) async fn settle(&self) -> Result<()> {
        self.settle_quietly().await;
        let failed = lock(&self.failed).take();
        failed.map_or(Ok(()), |errno| {
            Err(Error::new(errno).because("an earlier write failed when it was carried out"))
        })
    }

    /// One look at what is old; false: nothing is left.
    async fn tend_once(&self) -> bool {
        for state in self.all_active() {
            state.settle_older(AGE_MAX).await;
            state.forget_older(AGE_MAX);
        }
        let mut active = lock(&self.active);
        active.retain(|_, state| state.holds_data());
        if active.is_empty() {
            self.tended.store(false, Ordering::SeqCst); // under the lock: see `activate`
        }
        !active.is_empty()
    }
}

/// The context of a call that the layer makes later, for the caller of `cx`: nobody can interrupt it.
pub(super) fn later(cx: &Context) -> Context {
    Context {
        cancel: None,
        patience: None,
        class: Class::Background,
        counted: Counted::Nothing,
        steps: None,
        ..cx.clone()
    }
}

/// The task that looks after old data. Its executor may end before it does; then another one begins.
struct Tending(Weak<AggregateCore>);

impl Drop for Tending {
    fn drop(&mut self) {
        if let Some(core) = self.0.upgrade() {
            core.tended.store(false, Ordering::SeqCst);
        }
    }
}

async fn tend(mut tending: Tending) {
    loop {
        dray_rt::sleep(LOOK_EVERY).await;
        let Some(core) = tending.0.upgrade() else { return };
        if !core.tend_once().await {
            tending.0 = Weak::new(); // it may be tended by another task already
            return;
        }
    }
}
