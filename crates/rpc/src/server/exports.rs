//! The exports of a server, by name. An export whose file system does not answer at the start is
//! awaited, and keeps nobody from the others.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use dray_core::Errno;
use dray_fabric::BufferPool;

use crate::server::export::Export;
use crate::server::journal::{Journal, SessionRecord, SlotLog};
use crate::server::sessions::refused;
use crate::wire::Refused;

/// A session of the last server epoch, and its notes.
pub(crate) type FormerSession = (SessionRecord, Arc<dyn SlotLog>);

/// The exports that are open, and those that are awaited.
pub(crate) struct Exports {
    /// Each export's end of the server's memory for data.
    pools: BTreeMap<String, BufferPool>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    open: BTreeMap<String, Arc<Export>>,
    /// The same in the order of their first opening.
    opened: Vec<Place>,
    /// Sessions of the last server epoch whose exports are not open; none: not read from the
    /// journal yet.
    former: Option<BTreeMap<String, Vec<FormerSession>>>,
    waiting: Vec<Waker>,
}

/// An export that has been opened.
struct Place {
    name: String,
    /// The export; none: it has been withdrawn.
    export: Option<Arc<Export>>,
    /// The greatest stamp that was given when it was withdrawn.
    newest: u64,
}

impl Exports {
    /// None of them is open. The calls of one that hangs hold their buffers as long as that
    /// lasts: each has a part of `pool` to itself. A single one has `pool` as it is: a slice is served
    /// by one server after the other, and a pool can be divided once.
    pub(crate) fn new<'a>(names: impl Iterator<Item = &'a str>, pool: &BufferPool) -> Exports {
        let names: Vec<String> = names.map(str::to_owned).collect();
        let pools = match names.len() {
            1 => vec![pool.clone()],
            count => pool.divide(count),
        };
        Exports { pools: names.into_iter().zip(pools).collect(), state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The export's end of the memory for data; none where no such export is awaited.
    pub(crate) fn pool(&self, name: &str) -> Option<BufferPool> {
        self.pools.get(name).cloned()
    }

    /// Opens an export: from now on clients can have it.
    pub(crate) fn insert(&self, export: Arc<Export>) {
        let mut state = self.lock();
        state.open.insert(export.name.clone(), export.clone());
        match state.opened.iter_mut().find(|place| place.name == export.name) {
            Some(place) => place.export = Some(export),
            None => {
                let name = export.name.clone();
                state.opened.push(Place { name, export: Some(export), newest: 0 });
            }
        }
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Takes an open one away, until it is inserted anew. None: it is not open.
    pub(crate) fn withdraw(&self, name: &str) -> Option<Arc<Export>> {
        let mut state = self.lock();
        let export = state.open.remove(name)?;
        if let Some(place) = state.opened.iter_mut().find(|place| place.name == name) {
            place.newest = export.ranges.stamps.newest();
            place.export = None;
        }
        Some(export)
    }

    /// The greatest stamp that was given before `name` was withdrawn; none: it never was.
    pub(crate) fn newest_before(&self, name: &str) -> Option<u64> {
        let state = self.lock();
        let place = state.opened.iter().find(|place| place.name == name)?;
        Some(place.newest)
    }

    /// Keeps sessions of `name` for its next opening.
    pub(crate) fn keep_former(&self, name: &str, sessions: Vec<FormerSession>) {
        let mut state = self.lock();
        let former = state.former.get_or_insert_default();
        former.entry(name.to_owned()).or_default().extend(sessions);
    }

    /// Errors: there is none, or it is not open.
    pub(crate) fn get(&self, name: &str) -> Result<Arc<Export>, Refused> {
        if let Some(export) = self.lock().open.get(name) {
            return Ok(export.clone());
        }
        if self.pools.contains_key(name) {
            return Err(not_open(name));
        }
        let known: Vec<&str> = self.pools.keys().map(String::as_str).collect();
        let known = known.join(", ");
        Err(refused(Errno::ENOENT, format!("no export is called `{name}`; there are: {known}")))
    }

    /// The exports that are open, in the order of their opening.
    pub(crate) fn opened(&self) -> Vec<Arc<Export>> {
        self.lock().opened.iter().filter_map(|place| place.export.clone()).collect()
    }

    /// How many there are, open or not.
    pub(crate) fn count(&self) -> usize {
        self.pools.len()
    }

    /// Waits until more than `count` exports have been opened, and answers the export that follows
    /// these. A withdrawn export is answered once it is open again.
    pub(crate) async fn next_opened(&self, count: usize) -> Arc<Export> {
        poll_fn(|task| {
            let mut state = self.lock();
            if let Some(export) = state.opened.get(count).and_then(|place| place.export.as_ref()) {
                return Poll::Ready(export.clone());
            }
            state.waiting.push(task.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// The sessions that `name` had in the last server epoch; each is answered once. The sessions
    /// of exports that are no more are forgotten.
    pub(crate) fn former(&self, name: &str, journal: &dyn Journal) -> Vec<FormerSession> {
        let mut state = self.lock();
        let former = state.former.get_or_insert_with(|| self.load(journal));
        former.remove(name).unwrap_or_default()
    }

    fn load(&self, journal: &dyn Journal) -> BTreeMap<String, Vec<FormerSession>> {
        let mut former: BTreeMap<String, Vec<FormerSession>> = BTreeMap::new();
        for (record, log) in journal.load() {
            if self.pools.contains_key(&record.export) {
                former.entry(record.export.clone()).or_default().push((record, log));
            } else {
                log::warn!("client {} used export `{}`, which is gone", record.host, record.export);
                journal.remove(record.id);
            }
        }
        former
    }
}

/// The client of a refused connection is to come again.
pub(crate) fn not_open(name: &str) -> Refused {
    let what = "is not open yet: `dray status` on the server's machine says since when";
    refused(Errno::EAGAIN, format!("export `{name}` {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each server that a slice had had set half of the memory aside for itself: the third one had
    /// none, and reads waited for ever.
    #[test]
    fn servers_of_one_export_that_follow_each_other_have_the_same_memory() {
        const LIMIT_BYTES: usize = 8 << 20;
        let pool = BufferPool::new(LIMIT_BYTES, 0);
        let mut last = None;
        for _ in 0..4 {
            last = Some(Exports::new(["data"].into_iter(), &pool));
        }
        let end = last.and_then(|exports| exports.pool("data")).expect("it is awaited");
        let taken: Vec<_> = std::iter::from_fn(|| end.get(1 << 20)).collect();
        assert_eq!(taken.len(), LIMIT_BYTES >> 20);
    }
}
