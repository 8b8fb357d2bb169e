//! The identity of the file system that each export was made on, in a file beside the exports' identities.
//!
//! File handles of one file system are valid on another one of the same type. So an export is not served
//! from whatever file system is at its path.
//!
//! The notes have a file of their own. Earlier versions write `exports.toml` anew without fields that
//! they do not know. Where there is no note, the file system that is there is accepted.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dray_backends::backend::FsIdentity;
use serde::{Deserialize, Serialize};

use crate::error::{ErrorContext, Failure};
use crate::serve::state::{cannot_write, escaped};

const VERSION: u32 = 1;
const FILE_NAME: &str = "origins.toml";

/// The notes of a server.
pub struct FsIdentities {
    dir: PathBuf,
    noted: Mutex<Vec<Note>>,
}

/// What an export was made on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentityNote {
    pub identity: FsIdentity,
    /// The start of the machine in which that was seen last.
    pub boot: u128,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Content {
    version: u32,
    #[serde(default)]
    export: Vec<Note>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Note {
    /// The directory without links, as in `exports.toml`.
    dir: String,
    /// As it was named, likewise: without its file system it may have no other name.
    named: String,
    kind: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    uuid: Option<String>,
    source: String,
    at: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    directory: Option<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    in_memory: bool,
    boot: String,
}

/// The directory of an export.
#[derive(Clone, Copy)]
pub enum ExportDirectory<'a> {
    /// Without links. A link that leads elsewhere by now is no matter: that is another export.
    Dir(&'a Path),
    /// As it was named: there is no such directory now.
    Named(&'a Path),
}

impl ExportDirectory<'_> {
    fn find(self, notes: &[Note]) -> Option<usize> {
        match self {
            ExportDirectory::Dir(dir) => notes.iter().position(|note| note.dir == escaped(dir)),
            ExportDirectory::Named(named) => {
                notes.iter().position(|note| note.named == whole(named))
            }
        }
    }
}

fn whole(named: &Path) -> String {
    escaped(std::path::absolute(named).as_deref().unwrap_or(named))
}

impl FsIdentities {
    /// The identities that are kept in `dir`. Errors: they cannot be read, or are of a newer
    /// version.
    pub fn read(dir: &Path) -> Result<FsIdentities, Failure> {
        let path = dir.join(FILE_NAME);
        let shown = path.display();
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => String::from("version = 1"),
            Err(error) => return Err(Failure::new(format!("cannot read {shown}: {error}"))),
        };
        let content: Content = toml::from_str(&text).doing(|| {
            format!("{shown} is broken; restore it, or remove it once every export is mounted")
        })?;
        if content.version > VERSION {
            let version = content.version;
            return Err(Failure::new(format!(
                "{shown} was written by a newer dray (version {version} of the format): use that one"
            )));
        }
        Ok(FsIdentities { dir: dir.to_owned(), noted: Mutex::new(content.export) })
    }

    fn notes(&self) -> MutexGuard<'_, Vec<Note>> {
        self.noted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What an export was made on; none: nobody knows.
    pub fn of(&self, directory: ExportDirectory<'_>) -> Option<IdentityNote> {
        let notes = self.notes();
        let note = notes.get(directory.find(&notes)?)?;
        let identity = FsIdentity {
            kind: note.kind.clone(),
            uuid: note.uuid.clone(),
            source: note.source.clone(),
            at: note.at.clone(),
            directory: note.directory.clone(),
            in_memory: note.in_memory,
        };
        Some(IdentityNote { identity, boot: u128::from_str_radix(&note.boot, 16).unwrap_or(0) })
    }

    /// Notes what the export of `dir`, which was `named` so, is made on. Errors: it cannot be written.
    pub fn note(&self, dir: &Path, named: &Path, noted: &IdentityNote) -> Result<(), Failure> {
        let FsIdentity { kind, uuid, source, at, directory, in_memory } = noted.identity.clone();
        let boot = format!("{:032x}", noted.boot);
        let (dir, named) = (escaped(dir), whole(named));
        let note = Note { dir, named, kind, uuid, source, at, directory, in_memory, boot };
        let mut notes = self.notes();
        let mut all = notes.clone();
        // The name led to them once.
        let others = all.iter_mut().filter(|one| one.named == note.named && one.dir != note.dir);
        others.for_each(|one| one.named = one.dir.clone());
        match all.iter_mut().find(|one| one.dir == note.dir) {
            Some(known) => *known = note,
            None => all.push(note),
        }
        if *notes == all {
            return Ok(());
        }
        self.write(&all)?;
        *notes = all;
        Ok(())
    }

    /// Replaces the file in one step, so that a crash leaves the old or the new one.
    fn write(&self, notes: &[Note]) -> Result<(), Failure> {
        let (path, new) = (self.dir.join(FILE_NAME), self.dir.join("origins.toml.new"));
        let broken = |error: io::Error| cannot_write(&path, &error);
        let text = toml::to_string(&Content { version: VERSION, export: notes.to_vec() })
            .doing(|| format!("cannot write {}", path.display()))?;
        let mut options = OpenOptions::new();
        options.create(true).truncate(true).write(true).mode(0o600);
        let mut file = options.open(&new).map_err(broken)?;
        file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(broken)?;
        fs::rename(&new, &path).map_err(broken)?;
        File::open(&self.dir).and_then(|dir| dir.sync_all()).map_err(broken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noted(uuid: &str) -> IdentityNote {
        let identity = FsIdentity {
            kind: "ext4".into(),
            uuid: Some(uuid.into()),
            source: "/dev/sda1".into(),
            at: "/srv".into(),
            directory: Some("1:0200000000000000".into()),
            in_memory: false,
        };
        IdentityNote { identity, boot: 7 }
    }

    #[test]
    fn what_an_export_was_made_on_is_found_by_either_name() {
        let state = tempfile::tempdir().unwrap();
        let fs_identities = FsIdentities::read(state.path()).unwrap();
        let (dir, link) = (Path::new("/srv/disk/home"), Path::new("/srv/link"));
        assert!(fs_identities.of(ExportDirectory::Dir(dir)).is_none());
        fs_identities.note(dir, link, &noted("aa")).unwrap();
        drop(fs_identities);
        let fs_identities = FsIdentities::read(state.path()).unwrap();
        for directory in [ExportDirectory::Dir(dir), ExportDirectory::Named(link)] {
            assert_eq!(fs_identities.of(directory), Some(noted("aa")));
        }
        assert!(fs_identities.of(ExportDirectory::Named(dir)).is_none());
        // A link that leads elsewhere now is another export.
        let other = Path::new("/srv/other");
        assert!(fs_identities.of(ExportDirectory::Dir(other)).is_none());
        fs_identities.note(other, link, &noted("bb")).unwrap();
        assert_eq!(fs_identities.of(ExportDirectory::Named(link)), Some(noted("bb")));
        assert_eq!(fs_identities.of(ExportDirectory::Dir(dir)), Some(noted("aa")));
    }

    /// As version 1 wrote it, and any later one reads it.
    #[test]
    fn notes_are_what_they_were() {
        const THEN: &str = "version = 1\n\n[[export]]\ndir = \"/srv/a\"\nnamed = \"/srv/a\"\n\
            kind = \"ext4\"\nuuid = \"aa\"\nsource = \"/dev/sda1\"\nat = \"/srv\"\n\
            directory = \"1:0200000000000000\"\nboot = \"00000000000000000000000000000007\"\n";
        let state = tempfile::tempdir().unwrap();
        let (file, dir) = (state.path().join(FILE_NAME), Path::new("/srv/a"));
        fs::write(&file, THEN).unwrap();
        let fs_identities = FsIdentities::read(state.path()).unwrap();
        assert_eq!(fs_identities.of(ExportDirectory::Dir(dir)), Some(noted("aa")));
        fs::remove_file(&file).unwrap();
        let fs_identities = FsIdentities::read(state.path()).unwrap();
        fs_identities.note(dir, dir, &noted("aa")).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), THEN);
        for text in ["version = 99\n", "version = [", "version = 1\n[[export]]\ndir = 3\n"] {
            fs::write(&file, text).unwrap();
            assert!(FsIdentities::read(state.path()).is_err(), "{text}");
        }
    }
}
