//! What is left on the local disk of a mount that keeps writes: data that are in no file.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::mount::aside_dir;
use crate::mount::options::dirty_dir;
use crate::status::report::MountReport;

/// Bytes of a block, as stat(2) counts them.
const BLOCK_BYTES: u64 = 512;

/// What somebody has to look after.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeftOver {
    /// Dirty data in logs of mounts that are gone, of this cache, bytes.
    pub log_bytes: u64,
    /// Files that were kept aside for this mount, and are there still.
    pub aside_files: u64,
    /// What they take on the disk, bytes.
    pub aside_bytes: u64,
}

impl LeftOver {
    /// None if the mount keeps no writes. What cannot be read counts as nothing, with a line in the log.
    pub fn of(report: &MountReport) -> Option<LeftOver> {
        let sessions = report.sessions();
        let mut kept = sessions.iter().filter_map(|session| session.kept_writes);
        let first = kept.next()?;
        let logs = report.cache.as_ref().filter(|_| first.disk_errors.is_some());
        let logs = logs.map(|cache| dirty_dir(cache.dir()));
        let log_bytes = logs.map_or(Ok(0), |dir| dray_client::left_dirty_bytes(&dir));
        let (aside_files, aside_bytes) = or_warn(files_aside(&aside_dir(&report.known.at)));
        Some(LeftOver { log_bytes: or_warn(log_bytes), aside_files, aside_bytes })
    }
}

fn or_warn<T: Default>(found: io::Result<T>) -> T {
    found.unwrap_or_else(|error| {
        log::warn!("what is left over on the local disk is not known: {error}");
        T::default()
    })
}

/// How many there are, and bytes.
fn files_aside(dir: &Path) -> io::Result<(u64, u64)> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((0, 0)),
        entries => entries?,
    };
    let (mut files, mut bytes) = (0, 0);
    for entry in entries {
        let entry = entry?;
        if entry.path().extension().is_some_and(|ending| ending == "data") {
            files += 1;
            bytes += entry.metadata()?.blocks() * BLOCK_BYTES;
        }
    }
    Ok((files, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_aside_are_counted_without_their_texts() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(files_aside(&dir.path().join("none")).unwrap(), (0, 0));
        for name in ["7-1.data", "7-1.txt", "9-2.data"] {
            fs::write(dir.path().join(name), vec![1; 5000]).unwrap();
        }
        let (files, bytes) = files_aside(dir.path()).unwrap();
        assert!(files == 2 && bytes >= 10_000, "{files} files, {bytes} bytes");
    }
}
