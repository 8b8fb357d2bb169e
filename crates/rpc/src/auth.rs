//! Mutual proof of a shared key.
//!
//! Each end sends HMAC-SHA-256(key, role, everything said so far, wish). The role keeps a proof of
//! one end from being reflected as that of the other. The messages so far hold a fresh nonce of
//! either end and the versions offered. So neither an old proof nor a hello that was changed on its
//! way is of use. The proof identifies both ends at the start of a connection. It does not encrypt
//! or protect what follows.
//!
//! A client that resumes a session proves in the same way that it may, with the session's secret as
//! the key. A false server that accepts the connection learns nothing that lets it resume the
//! session.

use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use hmac::{Hmac, Mac};
use sha2::Sha256;

/// Shortest key accepted, bytes.
pub const KEY_MIN_BYTES: usize = 16;
/// Longest key file read, bytes.
const KEY_MAX_BYTES: u64 = 4096;

/// A key that client and server share.
#[derive(Clone)]
pub struct Key(Vec<u8>);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)") // never into a log
    }
}

/// Which end makes a proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The end that connects.
    Client,
    /// The end that accepts.
    Server,
    /// The end that resumes a session, with the session's secret as the key.
    Session,
}

/// The parts of a handshake that both ends have seen.
#[derive(Clone, Copy, Debug)]
pub struct Transcript<'a> {
    /// The client's hello, the whole message.
    pub hello: &'a [u8],
    /// Version that the server chose.
    pub version: u16,
    /// Features that the server chose.
    pub features: u64,
    /// The server's nonce.
    pub server_nonce: &'a [u8; 32],
    /// The client's further wishes. They are empty in the server's proof.
    pub wish: &'a [u8],
}

impl Key {
    /// Takes a key. Errors: too short.
    pub fn new(bytes: &[u8]) -> Result<Key, String> {
        if bytes.len() < KEY_MIN_BYTES {
            return Err(format!(
                "a key needs at least {KEY_MIN_BYTES} bytes, this one has {}",
                bytes.len()
            ));
        }
        Ok(Key(bytes.to_vec()))
    }

    /// The key itself, to be handed to another process of the same mount.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The secret of a session, as a key.
    pub fn of_session(secret: &[u8; 16]) -> Key {
        Key(secret.to_vec())
    }

    /// Reads a key from a file, without the line's end. The file must not be open to
    /// others than its owner.
    pub fn from_file(path: &Path) -> Result<Key, String> {
        let shown = path.display();
        let problem = |error| format!("key file {shown}: {error}");
        let file = File::open(path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => format!(
                "key file {shown}: there is none; make one with `dray key {shown}`, or bring that of \
                 the other machines"
            ),
            _ => problem(error),
        })?;
        let meta = file.metadata().map_err(problem)?;
        if meta.is_dir() {
            return Err(format!("key file {shown}: it is a directory; name a file in it"));
        }
        if meta.mode() & 0o077 != 0 {
            return Err(format!("key file {shown} can be read by others: chmod 600 {shown}"));
        }
        // SAFETY: geteuid cannot fail.
        if ![0, unsafe { libc::geteuid() }].contains(&meta.uid()) {
            let owner = meta.uid();
            return Err(format!(
                "key file {shown} belongs to user {owner}, who can read it: chown it to the user \
                 that runs dray"
            ));
        }
        let mut bytes = Vec::new();
        file.take(KEY_MAX_BYTES + 1).read_to_end(&mut bytes).map_err(problem)?;
        if bytes.len() as u64 > KEY_MAX_BYTES {
            return Err(format!("key file {shown}: longer than {KEY_MAX_BYTES} bytes"));
        }
        Key::new(bytes.trim_ascii_end()).map_err(|error| format!("key file {shown}: {error}"))
    }

    /// The proof of `role`.
    pub fn prove(&self, role: Role, seen: Transcript<'_>) -> [u8; 32] {
        self.mac(role, seen).finalize().into_bytes().into()
    }

    /// Checks the proof of `role`, in constant time.
    pub fn verify(&self, role: Role, seen: Transcript<'_>, proof: &[u8; 32]) -> bool {
        self.mac(role, seen).verify_slice(proof).is_ok()
    }

    fn mac(&self, role: Role, seen: Transcript<'_>) -> Hmac<Sha256> {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        mac.update(match role {
            Role::Client => b"dray psk 1 client",
            Role::Server => b"dray psk 1 server",
            Role::Session => b"dray ses 1 client",
        });
        mac.update(&(seen.hello.len() as u64).to_le_bytes());
        mac.update(seen.hello);
        mac.update(&seen.version.to_le_bytes());
        mac.update(&seen.features.to_le_bytes());
        mac.update(seen.server_nonce);
        mac.update(seen.wish);
        mac
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // proves: P117
    #[test]
    fn a_proof_holds_for_its_role_words_nonces_and_key_only() {
        let key = Key::new(b"0123456789abcdef").unwrap();
        let (hello, wish) = (&b"hello"[..], &[7; 16][..]);
        let seen = Transcript { hello, version: 1, features: 0, server_nonce: &[2; 32], wish };
        let proof = key.prove(Role::Client, seen);
        assert!(key.verify(Role::Client, seen, &proof));
        assert!(!key.verify(Role::Server, seen, &proof));
        assert!(!key.verify(Role::Session, seen, &proof));
        for other in [
            Transcript { hello: b"hallo", ..seen },
            Transcript { version: 2, ..seen },
            Transcript { features: 1, ..seen },
            Transcript { server_nonce: &[3; 32], ..seen },
            Transcript { wish: &[8; 16], ..seen },
        ] {
            assert!(!key.verify(Role::Client, other, &proof), "{other:?}");
        }
        let other = Key::new(b"0123456789abcdeF").unwrap();
        assert!(!other.verify(Role::Client, seen, &proof));
        assert!(Key::new(b"short").is_err());
    }

    #[test]
    fn a_key_file_that_others_can_read_is_refused() {
        use std::os::unix::fs::{PermissionsExt, chown};
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        std::fs::write(&path, "0123456789abcdef\n").unwrap();
        let refused = |mode| {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            Key::from_file(&path).err()
        };
        assert!(refused(0o640).unwrap().contains("chmod 600"));
        assert!(refused(0o600).is_none());
        if chown(&path, Some(12_345), None).is_ok() {
            assert!(refused(0o600).unwrap().contains("belongs to user 12345")); // we are root
        }
        let missing = Key::from_file(&dir.path().join("none")).err().unwrap();
        assert!(missing.contains("there is none; make one with `dray key"), "{missing}");
    }
}
