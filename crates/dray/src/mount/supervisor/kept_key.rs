//! The key of a mount, for daemons that cannot read its file. The file may be gone by then, or just
//! be replaced, or lie where the mount hides it. Without a daemon the mount would be ended, and
//! programs would go on in the directory below it.
//!
//! It lies in memory that the supervisor holds and does not look at. A key that a daemon finds in the
//! file takes the place of what is there, so that a key that was changed stays so.
//!
//! ```text
//! word 0        0, or where the key is: at A or at B
//! at A, at B    its length in bytes, a word; then the key
//! ```

use std::fs::File;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use dray_client::Key;

use crate::at_once;
use crate::error::Failure;
use crate::mount::mount_table::{self, MountEntry, MountInfo};
use crate::serve::parse_auth;

/// Places for a key. The one that is not in use is written to, so that a kill leaves a whole one.
const PLACES: [u64; 2] = [1 << 12, 1 << 14];
/// Longer keys are none: there is room for it behind either place.
const KEY_MAX_BYTES: u64 = 1 << 13;
/// Where the file with the key does not answer within this time, it is gone on without it.
const READ_MAX: Duration = Duration::from_secs(5);

/// A key that outlives the daemons of its mount.
pub struct KeptKey(File);

impl KeptKey {
    /// Memory for `key`, to be held by a supervisor. Errors: those of memfd_create(2) and write(2).
    pub fn create(key: &Key) -> io::Result<OwnedFd> {
        // SAFETY: the name is a C string; the answer is checked and owned by nobody else.
        let fd = unsafe {
            match libc::memfd_create(c"dray-key".as_ptr(), libc::MFD_CLOEXEC) {
                fd @ 0.. => OwnedFd::from_raw_fd(fd),
                _ => return Err(io::Error::last_os_error()),
            }
        };
        let kept = KeptKey(fd.into());
        kept.keep(key)?;
        Ok(kept.0.into())
    }

    /// What [`KeptKey::create`] made.
    pub fn over(memory: OwnedFd) -> KeptKey {
        KeptKey(memory.into())
    }

    fn word(&self, at: u64) -> io::Result<u64> {
        let mut word = [0; 8];
        self.0.read_exact_at(&mut word, at).map(|()| u64::from_le_bytes(word))
    }

    /// The key; none if there is none.
    fn key(&self) -> Option<Key> {
        let at = self.word(0).ok().filter(|at| PLACES.contains(at))?;
        let len_bytes = self.word(at).ok().filter(|len| *len <= KEY_MAX_BYTES)?;
        let mut bytes = vec![0; len_bytes as usize];
        self.0.read_exact_at(&mut bytes, at + 8).ok()?;
        Key::new(&bytes).ok()
    }

    fn keep(&self, key: &Key) -> io::Result<()> {
        if self.key().is_some_and(|kept| kept.bytes() == key.bytes()) {
            return Ok(());
        }
        let used = self.word(0).unwrap_or(0); // there is nothing at first
        let place = if used == PLACES[0] { PLACES[1] } else { PLACES[0] };
        let len_bytes = (key.bytes().len() as u64).to_le_bytes();
        self.0.write_all_at(&[&len_bytes[..], key.bytes()].concat(), place)?;
        self.0.write_all_at(&place.to_le_bytes(), 0)
    }
}

/// The key that the value of `auth=` stands for: that in the file now, else that which was read
/// last. `mount`: our own. Errors: there is neither.
pub fn key_of(
    auth: &str,
    kept: Option<&KeptKey>,
    mount: &MountInfo,
) -> Result<Option<Key>, Failure> {
    let at = mount.at.display();
    let failure = match (read_in_time(auth, mount.connection), kept) {
        (Ok(Some(key)), Some(kept)) => {
            if let Err(error) = kept.keep(&key) {
                log::warn!("{at}: cannot keep the key: {error}");
            }
            return Ok(Some(key));
        }
        (Err(failure), Some(_)) => failure,
        (read, _) => return read,
    };
    let Some(key) = kept.and_then(KeptKey::key) else { return Err(failure) };
    log::warn!(
        "{at}: {}; the mount uses the key that was read last; put the file there again",
        failure.message
    );
    Ok(Some(key))
}

/// A file may lie where nobody answers. In our own mount nobody does before we do.
fn read_in_time(auth: &str, connection: Option<u32>) -> Result<Option<Key>, Failure> {
    let file = auth.split_once(':').map_or("", |(_, file)| file);
    let hides = |around: MountEntry| Some(around.connection) == connection;
    if mount_table::follow(Path::new(file)).is_ok_and(|file| file.mount.is_some_and(hides)) {
        return Err(Failure::usage(format!("key file {file} lies within the mount itself")));
    }
    let read = |auth: String| parse_auth(&auth);
    let mut read = at_once::each(READ_MAX, vec![auth.to_owned()], read);
    let silent =
        || Err(Failure::usage(format!("key file {file}: its file system does not answer")));
    read.pop().flatten().unwrap_or_else(silent)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn bytes_of(kept: &KeptKey) -> Vec<u8> {
        kept.key().unwrap().bytes().to_vec()
    }

    // proves: P99
    #[test]
    fn the_file_s_key_prevails_and_stays_when_the_file_goes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let auth = format!("psk:{}", path.display());
        let longest = vec![7; 4096]; // of a key file
        let kept = KeptKey::over(KeptKey::create(&Key::new(&longest).unwrap()).unwrap());
        let mount = MountInfo { at: dir.path().to_owned(), connection: None };
        let read = || key_of(&auth, Some(&kept), &mount);
        assert_eq!(read().unwrap().unwrap().bytes(), longest, "there is no file");
        for content in ["0123456789abcdef", "another, and longer one"] {
            fs::write(&path, content).unwrap();
            fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
            assert_eq!(read().unwrap().unwrap().bytes(), content.as_bytes());
            assert_eq!(bytes_of(&kept), content.as_bytes());
        }
        for spoil in [&|| fs::write(&path, "").unwrap(), &|| fs::remove_file(&path).unwrap()]
            as [&dyn Fn(); 2]
        {
            spoil();
            assert_eq!(read().unwrap().unwrap().bytes(), b"another, and longer one");
        }
        assert!(key_of(&auth, None, &mount).is_err());
        assert!(key_of("none", Some(&kept), &mount).unwrap().is_none());
    }

    /// A supervisor outlives upgrades of its daemon, and upgrades back.
    #[test]
    fn versions_find_each_other_s_keys() {
        let memory = KeptKey::create(&Key::new(b"0123456789abcdef").unwrap()).unwrap();
        let file = File::from(memory.try_clone().unwrap());
        let mut found = vec![0; (1 << 12) + 24];
        file.read_exact_at(&mut found, 0).unwrap();
        assert_eq!(found[..8], 4096u64.to_le_bytes());
        assert_eq!(found[4096..], [&16u64.to_le_bytes()[..], b"0123456789abcdef"].concat());
        // Whatever else is found is none.
        for torn in [1u64, 1 << 14, u64::MAX] {
            file.write_all_at(&torn.to_le_bytes(), 0).unwrap();
            assert!(KeptKey::over(memory.try_clone().unwrap()).key().is_none());
        }
    }
}
