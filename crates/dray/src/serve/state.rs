//! What a server keeps for its next start: who its exports are.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use dray_core::FsUuid;
use serde::{Deserialize, Serialize};

use crate::error::{Doing, Failure};
use crate::paths::make_private;
use crate::serve::left_behind;

const VERSION: u32 = 1;
const FILE_NAME: &str = "exports.toml";

/// A server's state directory, held against a second server.
pub struct StateDir {
    dir: PathBuf,
    _lock: File,
    content: Content,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Content {
    version: u32,
    #[serde(default)]
    export: Vec<Known>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Known {
    /// The directory; bytes that are not printable are escaped.
    dir: String,
    uuid: String,
    /// Signs file ids, so that clients cannot make up those of other files.
    key: String,
}

/// Who an export is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportIdentity {
    /// Makes its file ids unique.
    pub uuid: FsUuid,
    /// Signs them.
    pub key: u128,
}

impl StateDir {
    /// Takes possession of `dir`, making it if need be. Errors: another server has it, or
    /// it cannot be read.
    pub fn open(dir: &Path) -> Result<StateDir, Failure> {
        make_private(dir).map_err(|failure| {
            Failure::new(format!("state directory (--state): {}", failure.message))
        })?;
        let shown = dir.display();
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(dir.join("lock"))
            .doing(|| format!("cannot open the lock in {shown}"))?;
        // SAFETY: no memory is passed; the descriptor is open.
        if unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
            return Err(Failure::new(match std::io::Error::last_os_error() {
                error if error.kind() == ErrorKind::WouldBlock => format!(
                    "another dray server uses the state directory {shown}: stop it, or give this \
                     one a directory of its own with --state"
                ),
                error => format!(
                    "cannot lock the state directory {shown} (flock): {error}; put it on a local \
                     disk with --state"
                ),
            }));
        }
        let content = read(&dir.join(FILE_NAME))?;
        left_behind::tidy(dir);
        Ok(StateDir { dir: dir.to_owned(), _lock: lock, content })
    }

    /// Where it is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Whether it is below `dir`, a path without links.
    pub fn lies_in(&self, dir: &Path) -> bool {
        fs::canonicalize(&self.dir).is_ok_and(|own| own.starts_with(dir))
    }

    /// The identity of the export of `dir`, new if it was never exported; it is the same
    /// under every name, so that renaming an export does not turn files into others.
    pub fn identity(&mut self, dir: &Path) -> Result<ExportIdentity, Failure> {
        let dir = dir.as_os_str().as_bytes().escape_ascii().to_string();
        if let Some(known) = self.content.export.iter().find(|known| known.dir == dir) {
            let broken = || {
                Failure::new(format!(
                    "{}: the entry of {dir} is broken; restore the file, or remove the entry, \
                     after which clients must mount anew",
                    self.dir.join(FILE_NAME).display()
                ))
            };
            let uuid = parse_hex(&known.uuid).ok_or_else(broken)?;
            let key = parse_hex(&known.key).ok_or_else(broken)?;
            return Ok(ExportIdentity { uuid: FsUuid(uuid), key });
        }
        let (mut uuid, mut key) = ([0; 16], [0; 16]);
        dray_rt::random_bytes(&mut uuid);
        dray_rt::random_bytes(&mut key);
        let identity = ExportIdentity {
            uuid: FsUuid(u128::from_le_bytes(uuid)),
            key: u128::from_le_bytes(key),
        };
        let key = format!("{:032x}", identity.key);
        self.content.export.push(Known { dir, uuid: identity.uuid.to_string(), key });
        self.write()?;
        Ok(identity)
    }

    /// Replaces the file in one step, so that a crash leaves the old or the new one.
    fn write(&mut self) -> Result<(), Failure> {
        self.content.version = VERSION;
        let (path, new) = (self.dir.join(FILE_NAME), self.dir.join("exports.toml.new"));
        let doing = || format!("cannot write {}", path.display());
        let text = toml::to_string(&self.content).doing(doing)?;
        let mut options = OpenOptions::new();
        options.create(true).truncate(true).write(true).mode(0o600);
        let mut file = options.open(&new).doing(doing)?;
        file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).doing(doing)?;
        fs::rename(&new, &path).doing(doing)?;
        File::open(&self.dir).and_then(|dir| dir.sync_all()).doing(doing)
    }
}

fn read(path: &Path) -> Result<Content, Failure> {
    let shown = path.display();
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Content::default()),
        Err(error) => return Err(Failure::new(format!("cannot read {shown}: {error}"))),
    };
    let content: Content = toml::from_str(&text)
        .doing(|| format!("{shown} is broken; restore it, or remove it and mount clients anew"))?;
    if content.version > VERSION {
        return Err(Failure::new(format!(
            "{shown} was written by a newer dray (version {} of the format): use that one",
            content.version
        )));
    }
    Ok(content)
}

/// 32 hexadecimal digits, with or without hyphens.
fn parse_hex(text: &str) -> Option<u128> {
    let digits: String = text.chars().filter(|c| *c != '-').collect();
    if digits.len() == 32 { u128::from_str_radix(&digits, 16).ok() } else { None }
}

/// Changes with every start of the machine; 0 where the kernel does not tell.
pub fn boot_id() -> u128 {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    parse_hex(text.trim()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_outlive_the_server() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("state");
        let mut state = StateDir::open(&dir).unwrap();
        let first = state.identity(Path::new("/srv/a")).unwrap();
        let second = state.identity(Path::new("/srv/b")).unwrap();
        assert_ne!(first, second);
        assert!(StateDir::open(&dir).err().unwrap().message.contains("another dray server"));
        drop(state);
        let mut state = StateDir::open(&dir).unwrap();
        assert_eq!(state.identity(Path::new("/srv/b")).unwrap(), second);
        assert_eq!(state.identity(Path::new("/srv/a")).unwrap(), first);
    }

    #[test]
    fn a_state_in_an_exported_directory_is_noticed() {
        let parent = tempfile::tempdir().unwrap();
        let exported = fs::canonicalize(parent.path()).unwrap();
        let state = StateDir::open(&exported.join("below/state")).unwrap();
        assert!(state.lies_in(&exported) && state.lies_in(Path::new("/")));
        assert!(!state.lies_in(&exported.join("bel")) && !state.lies_in(&exported.join("other")));
    }

    #[test]
    fn a_newer_or_broken_state_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        for text in ["version = 99\n", "version = [", "version = 1\n[[export]]\ndir = 3\n"] {
            fs::write(parent.path().join(FILE_NAME), text).unwrap();
            assert!(StateDir::open(parent.path()).is_err(), "{text}");
        }
    }

    #[test]
    fn the_machine_has_a_boot_id() {
        assert_ne!(boot_id(), 0);
        assert_eq!(boot_id(), boot_id());
    }
}
