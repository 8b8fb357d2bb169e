//! The recovery window after a start, in which clients of the last server epoch return and reopen
//! their files.
//!
//! A file that loses its name in this time may be one of theirs. The server cannot know:
//! so it keeps open whatever is removed, until everybody has come back or is given up.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

use dray_core::{Context, Entry, FileId, FileSystem, FileType, OpenFile, OpenHow};
use dray_rt::Instant;

use crate::server::as_server;
use crate::server::log_throttle::LogThrottle;

/// Files kept at most; the removal of another one waits until everybody is back.
const KEPT_MAX: usize = 4096;
/// The window ends so many leases after the start at the latest. Otherwise one client that never
/// says that it is back could keep all others from removing files.
const WAIT_LEASES_MAX: u32 = 10;

/// The sessions that are expected to return to an export, and the files held for them.
#[derive(Default)]
pub(crate) struct RecoveryWindow {
    anybody: AtomicBool,
    state: Mutex<State>,
    crowded: LogThrottle,
    unkept: LogThrottle,
}

#[derive(Default)]
struct State {
    awaited: BTreeSet<u64>,
    kept: BTreeMap<FileId, Arc<dyn OpenFile>>,
    /// No removal waits any longer.
    until: Option<Instant>,
    waiting: Vec<Waker>,
}

impl RecoveryWindow {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This session may have files open, and its lease is `lease`.
    pub(crate) fn awaits(&self, session: u64, lease: Duration) {
        let mut state = self.lock();
        state.awaited.insert(session);
        state.until = state.until.max(Some(dray_rt::now() + lease * WAIT_LEASES_MAX));
        drop(state);
        self.anybody.store(true, Ordering::SeqCst);
    }

    /// `session` has opened its files again, or is over.
    pub(crate) fn returned(&self, session: u64) {
        let mut state = self.lock();
        if !state.awaited.remove(&session) || !state.awaited.is_empty() {
            return;
        }
        self.anybody.store(false, Ordering::SeqCst);
        let State { kept, waiting, .. } = std::mem::take(&mut *state);
        drop(state);
        drop(kept); // there is no caller for the result of the close
        waiting.into_iter().for_each(Waker::wake);
    }

    /// The files that are kept.
    pub(crate) fn kept(&self) -> Vec<Arc<dyn OpenFile>> {
        self.lock().kept.values().cloned().collect()
    }

    /// The export is withdrawn: nothing is kept any more, and no removal waits.
    pub(crate) fn abandon(&self) {
        let mut state = self.lock();
        self.anybody.store(false, Ordering::SeqCst);
        let State { kept, waiting, .. } = std::mem::take(&mut *state);
        drop(state);
        drop(kept); // as above
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Keeps a file that is about to lose a name.
    pub(crate) async fn keep(&self, fs: &dyn FileSystem, cx: &Context, entry: &Entry) {
        let how = match entry.attr.file_type() {
            FileType::Regular => OpenHow::READ,
            FileType::Directory => OpenHow::new(libc::O_RDONLY | libc::O_DIRECTORY),
            _ => return, // clients open these by themselves
        };
        if !self.anybody.load(Ordering::SeqCst) {
            return;
        }
        if !self.has_room().await {
            return self.crowded.say(|more| {
                log::warn!(
                    "file {} is removed, and is not kept for clients that have not come back: \
                     there are as many as may be{more}",
                    entry.id
                );
            });
        }
        match as_server::open(fs, cx, entry.id, how).await {
            Ok(file) => {
                let mut state = self.lock();
                let spare = match state.awaited.is_empty() {
                    true => Some(file), // all have come back meanwhile
                    false => state.kept.insert(entry.id, file),
                };
                drop(state);
                drop(spare);
            }
            Err(error) => {
                let id = entry.id;
                self.unkept.say(|more| {
                    log::warn!("file {id} is removed, and could not be kept open: {error}{more}");
                });
            }
        }
    }

    /// Waits until another file can be kept, or need not be. False: it has taken too long.
    async fn has_room(&self) -> bool {
        let until = self.lock().until.unwrap_or_else(dray_rt::now);
        let mut timer = std::pin::pin!(dray_rt::sleep_until(until));
        std::future::poll_fn(|task| {
            let mut state = self.lock();
            if state.kept.len() < KEPT_MAX || state.awaited.is_empty() {
                return Poll::Ready(true);
            }
            if timer.as_mut().poll(task).is_ready() {
                return Poll::Ready(false);
            }
            state.waiting.push(task.waker().clone());
            Poll::Pending
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_backends::memory::{MemoryFs, MemoryOptions};
    use dray_core::{CreateHow, Errno, Make, Name, RemoveKind};

    const LEASE: Duration = Duration::from_secs(60);
    const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };

    // proves: P106
    #[test]
    fn so_many_are_kept_and_further_removals_wait() {
        let mut executor =
            dray_rt::Executor::new(dray_rt::DriverKind::Simulated { seed: 2 }).unwrap();
        executor.block_on(async {
            let (fs, cx) = (MemoryFs::new(MemoryOptions::default()), Context::system());
            let window = Arc::new(RecoveryWindow::default());
            window.awaits(1, LEASE);
            let mut last = None;
            for number in 0..=KEPT_MAX {
                let name = format!("f{number}");
                let name = Name::new(name.as_bytes()).unwrap();
                let (entry, file) = fs.create(&cx, fs.info().root, name, NEW).await.unwrap();
                file.close(&cx).await.unwrap();
                if number < KEPT_MAX {
                    window.keep(&fs, &cx, &entry).await;
                }
                last = Some(entry);
            }
            let removal = || {
                let (window, fs) = (window.clone(), fs.clone());
                let entry = last.unwrap();
                dray_rt::spawn_join(async move {
                    window.keep(&fs, &Context::system(), &entry).await;
                })
            };
            let mut waits = removal();
            let soon = dray_rt::timeout(LEASE * WAIT_LEASES_MAX / 2, &mut waits).await;
            assert!(soon.is_err() && window.lock().kept.len() == KEPT_MAX);
            // The client is there, and never says that it is back.
            dray_rt::timeout(LEASE * WAIT_LEASES_MAX, waits).await.unwrap().unwrap();
            assert_eq!(window.lock().kept.len(), KEPT_MAX);
            window.awaits(2, LEASE);
            let waits = removal();
            dray_rt::sleep(Duration::from_secs(1)).await;
            window.returned(1);
            window.returned(2);
            waits.await.unwrap();
        });
    }

    // proves: P89
    #[test]
    fn what_is_removed_is_kept_until_the_last_has_returned() {
        let mut executor =
            dray_rt::Executor::new(dray_rt::DriverKind::Simulated { seed: 1 }).unwrap();
        executor.block_on(async {
            let (fs, cx) = (MemoryFs::new(MemoryOptions::default()), Context::system());
            let (root, name) = (fs.info().root, Name::new(b"f").unwrap());
            let (entry, file) = fs.create(&cx, root, name, NEW).await.unwrap();
            file.close(&cx).await.unwrap();
            let window = RecoveryWindow::default();
            window.awaits(1, LEASE);
            window.awaits(2, LEASE);
            let dir = Name::new(b"d").unwrap();
            let made = fs.make(&cx, root, dir, Make::Directory { mode: 0o755 }).await.unwrap();
            window.keep(&fs, &cx, &entry).await;
            window.keep(&fs, &cx, &made).await;
            fs.remove(&cx, root, name, RemoveKind::File).await.unwrap();
            fs.remove(&cx, root, dir, RemoveKind::Directory).await.unwrap();
            window.returned(1);
            for id in [entry.id, made.id] {
                fs.getattr(&cx, id).await.unwrap();
            }
            window.returned(2);
            for id in [entry.id, made.id] {
                let gone = fs.getattr(&cx, id).await.unwrap_err();
                assert_eq!(gone.errno(), Errno::ESTALE);
            }
        });
    }
}
