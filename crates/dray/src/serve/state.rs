//! The state directory of a server: the identities of its exports, for the next start.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dray_core::FsUuid;
use serde::{Deserialize, Serialize};

use crate::error::{ErrorContext, Failure};
use crate::paths::make_private;
use crate::serve::fs_identities::FsIdentities;
use crate::serve::left_behind;

const VERSION: u32 = 1;
const FILE_NAME: &str = "exports.toml";

/// A server's state directory, held against a second server.
pub struct StateDir {
    dir: PathBuf,
    exports: Arc<ExportRegistry>,
    fs_identities: Arc<FsIdentities>,
}

/// The identities of the exports, kept in a file.
pub struct ExportRegistry {
    dir: PathBuf,
    /// As long as anybody may write to the file.
    _lock: File,
    known: Mutex<Vec<KnownExport>>,
    /// How many of them are in the file.
    written: Mutex<usize>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Content {
    version: u32,
    #[serde(default)]
    export: Vec<KnownExport>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct KnownExport {
    /// The directory; bytes that are not printable are escaped.
    dir: String,
    uuid: String,
    /// Signs file ids, so that clients cannot make up those of other files.
    key: String,
}

/// The identity of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportIdentity {
    /// Makes its file ids unique.
    pub uuid: FsUuid,
    /// Signs them.
    pub key: u128,
}

impl ExportIdentity {
    /// Of an export that is another one after each start of the server.
    pub fn random() -> ExportIdentity {
        let (mut uuid, mut key) = ([0; 16], [0; 16]);
        dray_rt::random_bytes(&mut uuid);
        dray_rt::random_bytes(&mut key);
        ExportIdentity { uuid: FsUuid(u128::from_le_bytes(uuid)), key: u128::from_le_bytes(key) }
    }
}

impl StateDir {
    /// Takes possession of `dir`, making it if need be. Errors: another server has it, or
    /// it cannot be read.
    pub fn open(dir: &Path) -> Result<StateDir, Failure> {
        StateDir::try_open(dir)?.ok_or_else(|| {
            let shown = dir.display();
            Failure::new(format!(
                "another dray server uses the state directory {shown}: stop it, or give this one a \
                 directory of its own with --state"
            ))
        })
    }

    /// The same; none if another server has it.
    pub fn try_open(dir: &Path) -> Result<Option<StateDir>, Failure> {
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
            return match std::io::Error::last_os_error() {
                error if error.kind() == ErrorKind::WouldBlock => Ok(None),
                error => Err(Failure::new(format!(
                    "cannot lock the state directory {shown} (flock): {error}; put it on a local \
                     disk with --state"
                ))),
            };
        }
        let content = read(&dir.join(FILE_NAME))?;
        left_behind::forget_ended(dir);
        let exports = ExportRegistry {
            dir: dir.to_owned(),
            _lock: lock,
            written: Mutex::new(content.export.len()),
            known: Mutex::new(content.export),
        };
        let fs_identities = Arc::new(FsIdentities::read(dir)?);
        Ok(Some(StateDir { dir: dir.to_owned(), exports: Arc::new(exports), fs_identities }))
    }

    /// Where it is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Whether it is below `dir`, a path without links.
    pub fn lies_in(&self, dir: &Path) -> bool {
        fs::canonicalize(&self.dir).is_ok_and(|own| own.starts_with(dir))
    }

    /// The identities of its exports.
    pub fn exports(&self) -> Arc<ExportRegistry> {
        self.exports.clone()
    }

    /// What file systems they were made on.
    pub fn fs_identities(&self) -> Arc<FsIdentities> {
        self.fs_identities.clone()
    }
}

/// A directory as it is written there.
pub fn escaped(dir: &Path) -> String {
    dir.as_os_str().as_bytes().escape_ascii().to_string()
}

/// Directories whose exports a state directory knows, escaped as it writes them; none of what is no
/// state directory, or cannot be read.
pub fn known_dirs(state: &Path) -> Vec<String> {
    let content = read(&state.join(FILE_NAME)).unwrap_or_default();
    content.export.into_iter().map(|known| known.dir).collect()
}

impl ExportRegistry {
    /// Takes over who the exports of these directories are from another state directory, which its
    /// server goes on to use. Only exports that are not known here are taken over. Errors: it
    /// cannot be written.
    pub fn take_over(&self, other: &Path, dirs: &[String]) -> Result<(), Failure> {
        let mut written = lock(&self.written);
        let mut all = lock(&self.known).clone();
        for known in read(&other.join(FILE_NAME))?.export {
            let ours = dirs.contains(&known.dir) && !all.iter().any(|one| one.dir == known.dir);
            if ours {
                all.push(known);
            }
        }
        self.write(all.clone())?;
        *written = all.len();
        *lock(&self.known) = all; // nobody else has it yet
        Ok(())
    }

    /// The identity of the export of `dir`, new if it was never exported. It is the same under
    /// every name, so that renaming an export does not turn files into others. Exports that are
    /// opened at once are written at once. Errors: it cannot be written, and must not be used.
    pub fn identity(&self, dir: &Path) -> Result<ExportIdentity, Failure> {
        let dir = escaped(dir);
        let (known, count) = {
            let mut all = lock(&self.known);
            let index = all.iter().position(|known| known.dir == dir).unwrap_or_else(|| {
                all.push(KnownExport::new(dir));
                all.len() - 1
            });
            (all[index].clone(), index + 1)
        };
        let identity = known.identity().ok_or_else(|| {
            Failure::new(format!(
                "{}: the entry of {} is broken; restore the file, or remove the entry, after which \
                 clients must mount anew",
                self.dir.join(FILE_NAME).display(),
                known.dir
            ))
        })?;
        let mut written = lock(&self.written);
        if *written < count {
            let all = lock(&self.known).clone();
            let count = all.len();
            self.write(all)?;
            *written = count;
        }
        Ok(identity)
    }

    /// Gives the export of `dir` another identity: what clients know of it means nothing any more.
    /// Errors: as [`ExportRegistry::identity`]; then it has the former one.
    pub fn renew(&self, dir: &Path) -> Result<(), Failure> {
        let dir = escaped(dir);
        let mut written = lock(&self.written);
        let mut all = lock(&self.known).clone();
        let Some(index) = all.iter().position(|known| known.dir == dir) else { return Ok(()) };
        let renewed = KnownExport::new(dir);
        all[index] = renewed.clone();
        let count = all.len();
        self.write(all)?;
        *written = count;
        lock(&self.known)[index] = renewed; // others may have come behind it
        Ok(())
    }

    /// Replaces the file in one step, so that a crash leaves the old or the new one.
    fn write(&self, export: Vec<KnownExport>) -> Result<(), Failure> {
        let (path, new) = (self.dir.join(FILE_NAME), self.dir.join("exports.toml.new"));
        let broken = |error: io::Error| cannot_write(&path, &error);
        let text = toml::to_string(&Content { version: VERSION, export })
            .doing(|| format!("cannot write {}", path.display()))?;
        let mut options = OpenOptions::new();
        options.create(true).truncate(true).write(true).mode(0o600);
        let mut file = options.open(&new).map_err(broken)?;
        file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(broken)?;
        fs::rename(&new, &path).map_err(broken)?;
        File::open(&self.dir).and_then(|dir| dir.sync_all()).map_err(broken)
    }
}

/// Of a file of the state directory.
pub fn cannot_write(path: &Path, error: &io::Error) -> Failure {
    let advice = match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            "; make room there, or move the state directory and name it with --state"
        }
        _ => "",
    };
    Failure::new(format!("cannot write {}: {error}{advice}", path.display()))
}

impl KnownExport {
    fn new(dir: String) -> KnownExport {
        let ExportIdentity { uuid, key } = ExportIdentity::random();
        KnownExport { dir, uuid: uuid.to_string(), key: format!("{key:032x}") }
    }

    fn identity(&self) -> Option<ExportIdentity> {
        let (uuid, key) = (parse_hex(&self.uuid)?, parse_hex(&self.key)?);
        Some(ExportIdentity { uuid: FsUuid(uuid), key })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
        let state = StateDir::open(&dir).unwrap();
        let identity =
            |state: &StateDir, dir: &str| state.exports().identity(Path::new(dir)).unwrap();
        let (first, second) = (identity(&state, "/srv/a"), identity(&state, "/srv/b"));
        assert_ne!(first, second);
        assert!(StateDir::open(&dir).err().unwrap().message.contains("another dray server"));
        drop(state);
        let state = StateDir::open(&dir).unwrap();
        assert_eq!((identity(&state, "/srv/b"), identity(&state, "/srv/a")), (second, first));
    }

    /// Each new one was written by itself, one after the other: a thousand exports took half a
    /// minute to open.
    #[test]
    fn exports_that_are_opened_at_once_are_all_written() {
        let parent = tempfile::tempdir().unwrap();
        let state = StateDir::open(parent.path()).unwrap();
        let dir = |number: usize| PathBuf::from(format!("/srv/{number}"));
        let identities: Vec<_> = std::thread::scope(|scope| {
            let one = |number| {
                let exports = state.exports();
                scope.spawn(move || exports.identity(&dir(number)).unwrap())
            };
            let all: Vec<_> = (0..50).map(one).collect();
            all.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        drop(state);
        let exports = StateDir::open(parent.path()).unwrap().exports();
        let again = |number| exports.identity(&dir(number)).unwrap();
        assert_eq!((0..50).map(again).collect::<Vec<_>>(), identities);
    }

    /// The second try found it in memory and went on; the next server gave that directory another
    /// identity, and all files turned stale.
    #[test]
    fn an_identity_that_could_not_be_written_is_not_used() {
        let parent = tempfile::tempdir().unwrap();
        let exports = StateDir::open(parent.path()).unwrap().exports();
        let barrier = parent.path().join("exports.toml.new");
        fs::create_dir(&barrier).unwrap();
        let identity = || exports.identity(Path::new("/srv/a"));
        for _ in 0..2 {
            assert!(identity().unwrap_err().message.contains("cannot write"));
        }
        fs::remove_dir(&barrier).unwrap();
        let written = identity().unwrap();
        drop(exports);
        let next = StateDir::open(parent.path()).unwrap();
        assert_eq!(next.exports().identity(Path::new("/srv/a")).unwrap(), written);
    }

    #[test]
    fn an_identity_that_is_renewed_is_another_one_from_then_on() {
        let parent = tempfile::tempdir().unwrap();
        let exports = StateDir::open(parent.path()).unwrap().exports();
        let identity = |dir: &str| exports.identity(Path::new(dir)).unwrap();
        let (a, b) = (identity("/srv/a"), identity("/srv/b"));
        exports.renew(Path::new("/srv/a")).unwrap();
        let (renewed, added) = (identity("/srv/a"), identity("/srv/c"));
        assert!(renewed.uuid != a.uuid && renewed.key != a.key && identity("/srv/b") == b);
        drop(exports);
        let exports = StateDir::open(parent.path()).unwrap().exports();
        let identity = |dir: &str| exports.identity(Path::new(dir)).unwrap();
        assert_eq!(["/srv/a", "/srv/b", "/srv/c"].map(identity), [renewed, b, added]);
    }

    #[test]
    fn a_state_in_an_exported_directory_is_noticed() {
        let parent = tempfile::tempdir().unwrap();
        let exported = fs::canonicalize(parent.path()).unwrap();
        let state = StateDir::open(&exported.join("below/state")).unwrap();
        assert!(state.lies_in(&exported) && state.lies_in(Path::new("/")));
        assert!(!state.lies_in(&exported.join("bel")) && !state.lies_in(&exported.join("other")));
    }

    /// As version 1 wrote it, and any later one reads it.
    // proves: P137
    #[test]
    fn identities_are_what_they_were() {
        const THEN: &str = "version = 1\n\n[[export]]\ndir = \"/srv/a\"\n\
            uuid = \"01020304-0506-0708-090a-0b0c0d0e0f10\"\n\
            key = \"00000000000000000000000000000007\"\n";
        let parent = tempfile::tempdir().unwrap();
        fs::write(parent.path().join(FILE_NAME), THEN).unwrap();
        let exports = StateDir::open(parent.path()).unwrap().exports();
        let uuid = FsUuid(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10);
        let identity = exports.identity(Path::new("/srv/a")).unwrap();
        assert_eq!(identity, ExportIdentity { uuid, key: 7 });
        let known = KnownExport {
            dir: "/srv/a".into(),
            uuid: uuid.to_string(),
            key: format!("{:032x}", 7),
        };
        exports.write(vec![known]).unwrap();
        assert_eq!(fs::read_to_string(parent.path().join(FILE_NAME)).unwrap(), THEN);
    }

    // proves: P138
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
