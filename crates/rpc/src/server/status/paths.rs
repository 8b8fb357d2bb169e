//! Paths of files that calls under way are about, for people who look at a server.
//!
//! The file system below may hang, which is when administrators request a status. A thread of its
//! own asks it for paths. A file whose path does not come in time is shown by its id.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dray_core::{FileId, FileSystem};
use dray_rt::sync::mpsc;
use dray_rt::{in_simulation, timeout};

/// How long paths are waited for, in all.
const PATIENCE: Duration = Duration::from_millis(300);
/// Paths looked up for one look at the server; further files are shown by their ids.
const PATHS_MAX: usize = 256;

/// A file, and perhaps a name in it.
pub(crate) struct Subject {
    fs: Arc<dyn FileSystem>,
    id: FileId,
    name: Option<Vec<u8>>,
}

impl Subject {
    pub(crate) fn new(fs: Arc<dyn FileSystem>, id: FileId, name: Option<Vec<u8>>) -> Subject {
        Subject { fs, id, name }
    }

    /// The text that stands for a file where its path is not known.
    pub(crate) fn by_id(&self) -> String {
        self.shown(self.id.to_string())
    }

    fn path(&self) -> Option<String> {
        self.fs.path(self.id).map(|path| self.shown(String::from_utf8_lossy(&path).into_owned()))
    }

    /// The name behind what stands for the file.
    fn shown(&self, file: String) -> String {
        match &self.name {
            None => file,
            Some(name) => {
                format!("{}/{}", file.trim_end_matches('/'), String::from_utf8_lossy(name))
            }
        }
    }
}

/// Asks for paths; one thread at most waits for file systems.
#[derive(Default)]
pub(crate) struct PathFinder {
    asking: Arc<AtomicBool>,
}

impl PathFinder {
    /// The text to show for each file.
    pub(crate) async fn find(&self, files: Vec<Subject>) -> Vec<String> {
        // A simulation has no threads, which would make it another one each time.
        if in_simulation() {
            return files.iter().map(|file| file.path().unwrap_or_else(|| file.by_id())).collect();
        }
        let shown = files.iter().map(Subject::by_id).collect();
        self.ask(shown, move |index| files[index].path()).await
    }

    /// The paths that `path` answers in time; the others stay as `shown`.
    async fn ask(
        &self,
        mut shown: Vec<String>,
        path: impl Fn(usize) -> Option<String> + Send + 'static,
    ) -> Vec<String> {
        // An earlier request still waits: this file system hangs.
        if shown.is_empty() || self.asking.swap(true, Ordering::SeqCst) {
            return shown;
        }
        let (tell, mut receiver) = mpsc::channel(PATHS_MAX);
        let (asking, count) = (self.asking.clone(), shown.len().min(PATHS_MAX));
        let thread = std::thread::Builder::new().name("dray-paths".into());
        let started = thread.spawn(move || {
            for index in 0..count {
                if tell.try_send((index, path(index))).is_err() {
                    break; // nobody waits any more
                }
            }
            drop(path);
            asking.store(false, Ordering::SeqCst);
        });
        if started.is_err() {
            self.asking.store(false, Ordering::SeqCst);
        }
        let hear = async {
            while let Some((index, path)) = receiver.recv().await {
                if let Some(path) = path {
                    shown[index] = path;
                }
            }
        };
        let _ = timeout(PATIENCE, hear).await; // the rest is shown as it is
        shown
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_backends::memory::{MemoryFs, MemoryOptions};
    use dray_rt::{DriverKind, Executor};
    use std::task::Poll;

    #[test]
    fn a_file_without_a_known_path_is_shown_by_its_id_and_its_name() {
        let fs: Arc<dyn FileSystem> = Arc::new(MemoryFs::new(MemoryOptions::default()));
        let id = fs.info().root;
        let file = |name: Option<&[u8]>| Subject::new(fs.clone(), id, name.map(<[u8]>::to_vec));
        let whereabouts = PathFinder::default();
        let shown = executor().block_on(whereabouts.find(vec![file(None), file(Some(b"a"))]));
        assert_eq!(shown, [id.to_string(), format!("{id}/a")]);
    }

    /// The thread that accepts connections for all exports stood still for that time.
    // proves: P125
    #[test]
    fn waiting_for_paths_blocks_no_other_call() {
        let (thaw, frozen) = std::sync::mpsc::channel::<()>();
        executor().block_on(async {
            let whereabouts = PathFinder::default();
            let hangs = move |_| {
                let _ = frozen.recv();
                None
            };
            let mut asks = std::pin::pin!(whereabouts.ask(vec!["id".into()], hangs));
            let first = std::future::poll_fn(|task| Poll::Ready(asks.as_mut().poll(task))).await;
            assert!(first.is_pending(), "it waited without letting others go on");
            let second = whereabouts.ask(vec!["other".into()], |_| Some("/path".into())).await;
            assert_eq!(second, ["other"], "one thread at most waits");
            assert_eq!(asks.await, ["id"]);
        });
        thaw.send(()).unwrap();
    }

    fn executor() -> Executor {
        Executor::new(DriverKind::Epoll).unwrap()
    }
}
