//! Logs of sessions that are over, and a summary of all logs for people.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use dray_core::NodeId;

use super::scan::{FoundFile, FoundLog, scan};
use super::segments::{is_supervised, lock};

/// A log that nobody goes on with, and that is this process's as long as it lives.
pub(crate) struct LeftLog {
    pub(crate) dir: PathBuf,
    pub(crate) found: FoundLog,
    _lock: File,
}

impl LeftLog {
    /// Removes it. Errors: those of the disk.
    pub(crate) fn remove(&self) -> io::Result<()> {
        fs::remove_dir_all(&self.dir)
    }
}

/// What a log has, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirtyLogSummary {
    /// Where it lies.
    pub dir: PathBuf,
    /// The export that its files are of.
    pub export: String,
    /// Files with data that the server does not have.
    pub files: u64,
    /// Bytes of that.
    pub bytes: u64,
    /// A mount has it.
    pub is_in_use: bool,
}

/// The logs below `dir` of other clients than `own` whose processes have all ended. One that cannot be read is left,
/// with a line in the log of the program. Errors: those of the disk.
pub(crate) fn left_logs(dir: &Path, own: NodeId) -> io::Result<Vec<LeftLog>> {
    let mut logs = Vec::new();
    for (node, dir) in log_dirs(dir)? {
        if node == own.0 || is_supervised(&dir) {
            continue;
        }
        match take(&dir) {
            Ok(log) => logs.extend(log),
            Err(error) => log::error!("{}: {error}", dir.display()),
        }
    }
    Ok(logs)
}

fn take(dir: &Path) -> io::Result<Option<LeftLog>> {
    let Some(held) = lock(dir)? else { return Ok(None) };
    // What was there before it was locked may be gone.
    let found = scan(dir)?;
    Ok(Some(LeftLog { dir: dir.to_owned(), found, _lock: held }))
}

/// All logs below `dir`. Errors: those of the disk.
pub fn dirty_log_summaries(dir: &Path) -> io::Result<Vec<DirtyLogSummary>> {
    let summary = |dir: PathBuf| {
        let found = scan(&dir)?;
        let is_in_use = is_supervised(&dir) || lock(&dir)?.is_none();
        Ok(DirtyLogSummary {
            is_in_use,
            export: found.identity.map(|identity| identity.export).unwrap_or_default(),
            files: found.files.len() as u64,
            bytes: found.files.iter().map(FoundFile::bytes).sum(),
            dir,
        })
    };
    log_dirs(dir)?.into_iter().map(|(_, dir)| summary(dir)).collect()
}

/// The logs, with the numbers of their clients. None of a directory that is not there.
fn log_dirs(dir: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut dirs = Vec::new();
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let node = name.to_str().and_then(|name| u64::from_str_radix(name, 16).ok());
        dirs.extend(node.map(|node| (node, entry.path())));
    }
    Ok(dirs)
}
