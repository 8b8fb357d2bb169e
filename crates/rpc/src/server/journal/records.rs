//! Small files beside the journal: what a server keeps for its next epoch.
//!
//! Each begins with a line that names it and the version of its layout. It is replaced in one
//! step and synced, so that a crash leaves the old one or the new one.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::server::journal::PersistentRecord;

/// Longest file read, bytes.
const BYTES_MAX: u64 = 1 << 20;

impl PersistentRecord {
    /// As an administrator knows it: the name of the file.
    pub(crate) fn name(self) -> &'static str {
        name_of(self).0
    }
}

/// Name of the file, and its first line.
fn name_of(what: PersistentRecord) -> (&'static str, &'static str) {
    match what {
        PersistentRecord::TicketKey => ("tickets", "dray tickets 1\n"),
        PersistentRecord::Evicted => ("evicted", "dray evicted 1\n"),
        PersistentRecord::StampsBound => ("stamps", "dray stamps 1\n"),
    }
}

/// The content of the file; none if there is no file. Errors: it cannot be read, or is another
/// version's or no such file (`InvalidData`).
pub(crate) fn read(dir: &Path, what: PersistentRecord) -> io::Result<Option<Vec<u8>>> {
    let (name, first) = name_of(what);
    let file = match File::open(dir.join(name)) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::new();
    file.take(BYTES_MAX).read_to_end(&mut bytes)?;
    match bytes.strip_prefix(first.as_bytes()) {
        Some(rest) => Ok(Some(rest.to_vec())),
        None => Err(io::Error::new(
            ErrorKind::InvalidData,
            format!("{} is damaged or of a newer dray", dir.join(name).display()),
        )),
    }
}

/// Replaces the file. Errors: those of writing it.
pub(crate) fn write(dir: &Path, what: PersistentRecord, bytes: &[u8]) -> io::Result<()> {
    let (name, first) = name_of(what);
    let (path, new) = (dir.join(name), dir.join(format!("{name}.new")));
    let mut options = OpenOptions::new();
    let mut file = options.create(true).truncate(true).write(true).mode(0o600).open(&new)?;
    file.write_all(first.as_bytes())?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&new, &path)?;
    File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_there_and_nothing_else_is_taken_for_it() {
        let dir = tempfile::tempdir().unwrap();
        for what in
            [PersistentRecord::TicketKey, PersistentRecord::Evicted, PersistentRecord::StampsBound]
        {
            assert_eq!(read(dir.path(), what).unwrap(), None);
            write(dir.path(), what, b"old, and longer").unwrap();
            write(dir.path(), what, b"new").unwrap();
            assert_eq!(read(dir.path(), what).unwrap().unwrap(), b"new");
            let (name, _) = name_of(what);
            for wrong in ["", "dray", "dray tickets 2\nabc", "dray evicted 9\n"] {
                fs::write(dir.path().join(name), wrong).unwrap();
                assert!(read(dir.path(), what).is_err(), "{wrong}");
            }
        }
    }
}
