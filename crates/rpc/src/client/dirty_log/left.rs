//! Logs of sessions that are over, and a summary of all logs for people.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dray_core::NodeId;

use super::disk::{LocalLogDisk, LogDir, LogDisk, LogLock};
use super::scan::{FoundFile, FoundLog, scan};
use super::segments::is_supervised;

/// A log that nobody goes on with, and that is this process's as long as it lives.
pub(crate) struct LeftLog {
    pub(crate) dir: LogDir,
    pub(crate) found: FoundLog,
    _lock: LogLock,
}

impl LeftLog {
    /// Removes it. Errors: those of the disk.
    pub(crate) fn remove(&self) -> io::Result<()> {
        self.dir.disk.remove_dir(&self.dir.path)
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
pub(crate) fn left_logs(dir: &LogDir, own: NodeId) -> io::Result<Vec<LeftLog>> {
    let mut logs = Vec::new();
    for (node, dir) in log_dirs(dir)? {
        if node == own.0 || is_supervised(&dir) {
            continue;
        }
        match take(&dir) {
            Ok(log) => logs.extend(log),
            Err(error) => log::error!("{}: {error}", dir.path.display()),
        }
    }
    Ok(logs)
}

fn take(dir: &LogDir) -> io::Result<Option<LeftLog>> {
    let Some(held) = dir.lock()? else { return Ok(None) };
    // What was there before it was locked may be gone.
    let found = scan(dir)?;
    Ok(Some(LeftLog { dir: dir.clone(), found, _lock: held }))
}

/// All logs below `dir` on the disk of the machine. Errors: those of the disk.
pub fn dirty_log_summaries(dir: &Path) -> io::Result<Vec<DirtyLogSummary>> {
    dirty_log_summaries_on(&(Arc::new(LocalLogDisk) as Arc<dyn LogDisk>), dir)
}

/// The same on any disk.
pub fn dirty_log_summaries_on(
    disk: &Arc<dyn LogDisk>,
    dir: &Path,
) -> io::Result<Vec<DirtyLogSummary>> {
    let summary = |dir: LogDir| {
        let found = scan(&dir)?;
        let is_in_use = is_supervised(&dir) || dir.lock()?.is_none();
        Ok(DirtyLogSummary {
            is_in_use,
            export: found.identity.map(|identity| identity.export).unwrap_or_default(),
            files: found.files.len() as u64,
            bytes: found.files.iter().map(FoundFile::bytes).sum(),
            dir: dir.path,
        })
    };
    let dir = LogDir { disk: disk.clone(), path: dir.to_owned() };
    log_dirs(&dir)?.into_iter().map(|(_, dir)| summary(dir)).collect()
}

/// Bytes of dirty data in the logs below `dir` that no mount goes on with, on the disk of the machine. No log is locked for
/// that: a mount that begins meanwhile takes them. Errors: those of the disk.
pub fn left_dirty_bytes(dir: &Path) -> io::Result<u64> {
    let dir = LogDir { disk: Arc::new(LocalLogDisk), path: dir.to_owned() };
    let mut bytes = 0;
    for (_, log) in log_dirs(&dir)? {
        if !is_supervised(&log) {
            bytes += scan(&log)?.files.iter().map(FoundFile::bytes).sum::<u64>();
        }
    }
    Ok(bytes)
}

/// The logs, with the numbers of their clients. None of a directory that is not there.
fn log_dirs(dir: &LogDir) -> io::Result<Vec<(u64, LogDir)>> {
    let mut dirs = Vec::new();
    for name in dir.names()? {
        let node = name.to_str().and_then(|name| u64::from_str_radix(name, 16).ok());
        dirs.extend(node.map(|node| (node, dir.below(&name))));
    }
    Ok(dirs)
}
