//! Paths of files that calls under way are about, for people who look at a server.
//!
//! The file system below may hang, which is when people look: it is asked on a thread of its
//! own, and what it does not tell soon is shown by its id.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use dray_core::{FileId, FileSystem};

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

    /// What stands for it where its path is not known.
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
pub(crate) struct Whereabouts {
    asking: Arc<AtomicBool>,
}

impl Whereabouts {
    /// What to show for each file.
    pub(crate) fn find(&self, files: Vec<Subject>) -> Vec<String> {
        let mut shown: Vec<String> = files.iter().map(Subject::by_id).collect();
        // Whoever asked before still waits: this file system hangs.
        if files.is_empty() || self.asking.swap(true, Ordering::SeqCst) {
            return shown;
        }
        let (tell, told) = mpsc::channel();
        let asking = self.asking.clone();
        let thread = std::thread::Builder::new().name("dray-paths".into());
        let started = thread.spawn(move || {
            for (index, file) in files.iter().enumerate().take(PATHS_MAX) {
                if tell.send((index, file.path())).is_err() {
                    break; // nobody waits any more
                }
            }
            drop(files);
            asking.store(false, Ordering::SeqCst);
        });
        if started.is_err() {
            self.asking.store(false, Ordering::SeqCst);
        }
        let until = Instant::now() + PATIENCE;
        while let Ok((index, path)) =
            told.recv_timeout(until.saturating_duration_since(Instant::now()))
        {
            if let Some(path) = path {
                shown[index] = path;
            }
        }
        shown
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_backends::memory::{MemoryFs, MemoryOptions};

    #[test]
    fn a_file_without_a_known_path_is_shown_by_its_id_and_its_name() {
        let fs: Arc<dyn FileSystem> = Arc::new(MemoryFs::new(MemoryOptions::default()));
        let id = fs.info().root;
        let file = |name: Option<&[u8]>| Subject::new(fs.clone(), id, name.map(<[u8]>::to_vec));
        let shown = Whereabouts::default().find(vec![file(None), file(Some(b"a"))]);
        assert_eq!(shown, [id.to_string(), format!("{id}/a")]);
    }
}
