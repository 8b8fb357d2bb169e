//! What was kept and cannot be written any more goes to files beside: the data, and a text that says what they are.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use dray_core::{Error, FileId, Identity};
use dray_rt::random_u64;

use super::extents::KeptExtents;
use crate::client::dirty_log::sync_above;

/// Files in the directory, each with its text. What is lost beyond them is lost.
const FILES_MAX: usize = 1000;

/// Data that cannot be written where they belong.
pub(super) struct LostWrites<'a> {
    pub(super) id: FileId,
    pub(super) who: &'a Identity,
    pub(super) extents: &'a KeptExtents,
    pub(super) why: &'a Error,
}

/// Keeps them in `dir`, and says so in the log. None: they could not be kept.
pub(super) fn keep(dir: Option<&Path>, lost: &LostWrites<'_>) -> Option<PathBuf> {
    let LostWrites { id, who, extents, why } = lost;
    let (bytes, uid) = (extents.bytes(), who.uid.0);
    let what = format!(
        "file {id} (inode {}): {bytes} bytes that user {uid} wrote were not written to it: {why}",
        id.ino
    );
    let kept = dir.map(|dir| write(dir, lost));
    match kept {
        Some(Ok(path)) => {
            log::error!("{what}; they are in {}", path.display());
            Some(path)
        }
        Some(Err(error)) => {
            log::error!("{what}; they are lost, since they could not be kept aside: {error}");
            None
        }
        None => {
            log::error!("{what}; they are lost");
            None
        }
    }
}

fn write(dir: &Path, LostWrites { id, who, extents, why }: &LostWrites<'_>) -> io::Result<PathBuf> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    if fs::read_dir(dir)?.count() >= 2 * FILES_MAX {
        return Err(io::Error::other(format!("{} is full", dir.display())));
    }
    let name = format!("{}-{:016x}", id.ino, random_u64());
    let path = dir.join(format!("{name}.data"));
    let data = create(&path)?;
    let mut text = format!(
        "What was written to the file with inode {} is in {name}.data, each piece at its place.\n\
         It was not written to the file: {why}\n\
         user {}, group {}\n",
        id.ino, who.uid.0, who.gid.0
    );
    for (at, piece) in extents.iter() {
        data.write_all_at(piece, at)?;
        text += &format!("piece at {at}: {} bytes\n", piece.len());
    }
    data.sync_all()?;
    let mut about = create(&dir.join(format!("{name}.txt")))?;
    about.write_all(text.as_bytes())?;
    about.sync_all()?;
    let sync = |dir: &Path| File::open(dir)?.sync_all();
    sync(dir)?;
    sync_above(dir, sync)?; // it may be new
    Ok(path)
}

fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_core::Errno;

    // proves: P259
    #[test]
    fn lost_data_are_in_a_file_beside_with_a_text_that_says_where_each_piece_belongs() {
        let dir = std::env::temp_dir().join(format!("dray-aside-{}", std::process::id()));
        let mut extents = KeptExtents::default();
        extents.write(3, b"data");
        extents.write(10, b"more");
        let (why, id) = (Error::new(Errno::EREMCHG), FileId { ino: 7, generation: 1 });
        let who = Identity::system();
        let lost = LostWrites { id, who: &who, extents: &extents, why: &why };
        let kept = keep(Some(&dir), &lost).map(|path| {
            let text = fs::read_to_string(path.with_extension("txt")).unwrap();
            (fs::read(&path).unwrap(), text)
        });
        fs::remove_dir_all(&dir).unwrap();
        let (data, text) = kept.unwrap();
        assert_eq!(data, b"\0\0\0data\0\0\0more");
        assert!(text.contains("inode 7") && text.contains("piece at 10: 4 bytes"), "{text}");
        assert_eq!(keep(None, &lost), None);
    }
}
