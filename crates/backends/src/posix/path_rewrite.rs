//! Rewrites the log of the path table when it has become long, while the table is in use.
//!
//! A thread of its own takes the entries, a few at a time, and writes them to a file beside the log.
//! Changes still go to the log meanwhile. The thread copies these changes from the log to the end of
//! the new file. Then changes go into both files, and the new file replaces the log. Whenever the
//! process dies, the file with the log's name is complete.
//!
//! An entry that is taken after a change is written twice. The last record of a name counts.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use super::cred;
use super::path_log::{LogIdentity, NextLog};
use super::paths::{STALE_LATER, SharedPathTable};

/// Entries that are handled under the table's lock at once.
pub(super) const ENTRIES_AT_ONCE: usize = 256;

/// Bytes of the log that are copied under the table's lock at the end.
const LAST_BYTES_MAX: u64 = 64 << 10;

/// Bytes that are copied at once while no call waits.
const COPY_BYTES: usize = 1 << 20;

/// Times that the rest of the log is copied before it is given up: it grows faster.
const COPIES_MAX: usize = 1000;

/// Begins to write the log of this table anew, which has been marked as being written.
pub(super) fn start(shared: &Arc<SharedPathTable>) {
    let theirs = shared.clone();
    let work = move || {
        if let Some(cpus) = &theirs.cpus {
            let _ = cpus.pin(); // else it is in the way of the thread that started it
        }
        // The thread was started in the middle of a caller's operation.
        let done = cred::release().map_err(io::Error::other).and_then(|()| rewrite(&theirs));
        ended(&theirs, done);
    };
    if let Err(error) = std::thread::Builder::new().name("dray-paths".to_owned()).spawn(work) {
        ended(shared, Err(error));
    }
}

fn rewrite(shared: &SharedPathTable) -> io::Result<()> {
    let mut rewrite = Rewrite::begin(shared)?;
    while rewrite.take_some(shared)? {}
    rewrite.catch_up(shared)?;
    rewrite.put_in_place()?;
    rewrite.switch(shared)
}

fn ended(shared: &SharedPathTable, done: io::Result<()>) {
    let mut state = shared.lock();
    state.rewriting = false;
    let Err(error) = done else { return };
    if let Some((identity, log)) = &mut state.log {
        log.go_on();
        log::warn!("{}: cannot be written anew: {error}", identity.path.display());
    }
}

/// A rewrite in the making.
struct Rewrite {
    identity: LogIdentity,
    next: NextLog,
    /// Entry that is taken next.
    at: usize,
    /// The log, up to where it has been copied, and its records at the beginning.
    log: File,
    copied_bytes: u64,
    records_before: usize,
}

fn no_log() -> io::Error {
    io::Error::other("the log has been given up")
}

impl Rewrite {
    fn begin(shared: &SharedPathTable) -> io::Result<Rewrite> {
        let (identity, (copied_bytes, records_before)) = {
            let state = shared.lock();
            let (identity, log) = state.log.as_ref().ok_or_else(no_log)?;
            (identity.clone(), log.size())
        };
        let log = File::open(&identity.path)?;
        let next = identity.begin_next()?;
        Ok(Rewrite { identity, next, at: 0, log, copied_bytes, records_before })
    }

    /// Takes some entries; false when there are no more.
    fn take_some(&mut self, shared: &SharedPathTable) -> io::Result<bool> {
        let some = shared.lock().noted_from(self.at, ENTRIES_AT_ONCE);
        let Some((noted, to)) = some else { return Ok(false) };
        self.at = to;
        for (event, place) in &noted {
            self.next.note(*event, place)?;
        }
        Ok(true)
    }

    /// Copies what was noted since the beginning, until changes go into both.
    fn catch_up(&mut self, shared: &SharedPathTable) -> io::Result<()> {
        for _ in 0..COPIES_MAX {
            let len_bytes = shared.lock().log.as_ref().ok_or_else(no_log)?.1.size().0;
            self.copy_to(len_bytes)?;
            self.next.flushed()?;
            let mut state = shared.lock();
            let log = &mut state.log.as_mut().ok_or_else(no_log)?.1;
            let len_bytes = log.size().0;
            if len_bytes - self.copied_bytes <= LAST_BYTES_MAX {
                self.copy_to(len_bytes)?;
                log.write_both(self.next.flushed()?);
                return Ok(());
            }
        }
        Err(io::Error::other("names change faster than they can be noted"))
    }

    fn copy_to(&mut self, len_bytes: u64) -> io::Result<()> {
        let mut buffer = vec![0; COPY_BYTES.min((len_bytes - self.copied_bytes) as usize)];
        while self.copied_bytes < len_bytes {
            let left = (len_bytes - self.copied_bytes).min(COPY_BYTES as u64) as usize;
            let part = &mut buffer[..left];
            self.log.read_exact_at(part, self.copied_bytes)?;
            self.next.add(part)?;
            self.copied_bytes += left as u64;
        }
        Ok(())
    }

    /// Both files say the same from now on: it does not matter which one is found.
    fn put_in_place(&mut self) -> io::Result<()> {
        self.next.flushed()?.sync_data()?;
        fs::rename(self.identity.next_path(), &self.identity.path)
    }

    /// The former file goes, by its last close.
    fn switch(&mut self, shared: &SharedPathTable) -> io::Result<()> {
        let mut state = shared.lock();
        let switched = state.log.as_mut().and_then(|(_, log)| {
            let since = log.size().1.saturating_sub(self.records_before);
            log.switch(self.next.records + since)
        });
        if switched.is_none() {
            state.log = None;
            log::error!("{}: cannot be written; {STALE_LATER}", self.identity.path.display());
        }
        drop(state); // before the file is closed, which may take a while
        match switched {
            Some(_former) => Ok(()),
            None => fs::remove_file(&self.identity.path),
        }
    }
}

#[cfg(test)]
mod tests;
