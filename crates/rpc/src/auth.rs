//! Mutual proof of a shared key.
//!
//! Each end sends HMAC-SHA-256(key, role, client nonce, server nonce, export). The
//! role keeps one end's proof from being sent back to it as the other's. It proves who
//! talks at the start of a connection; it does not encrypt or protect what follows.

use std::fmt;
use std::fs;
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
    /// Who connects.
    Client,
    /// Who accepts.
    Server,
}

/// What both ends of a handshake have seen.
#[derive(Clone, Copy, Debug)]
pub struct Transcript<'a> {
    /// The client's nonce.
    pub client_nonce: &'a [u8; 32],
    /// The server's nonce.
    pub server_nonce: &'a [u8; 32],
    /// The export asked for.
    pub export: &'a str,
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

    /// Reads a key from a file, without the line's end. The file must not be open to
    /// others than its owner.
    pub fn from_file(path: &Path) -> Result<Key, String> {
        let shown = path.display();
        let meta = fs::metadata(path).map_err(|error| format!("key file {shown}: {error}"))?;
        if meta.mode() & 0o077 != 0 {
            return Err(format!("key file {shown} can be read by others: chmod 600 {shown}"));
        }
        if meta.len() > KEY_MAX_BYTES {
            return Err(format!("key file {shown}: longer than {KEY_MAX_BYTES} bytes"));
        }
        let bytes = fs::read(path).map_err(|error| format!("key file {shown}: {error}"))?;
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
        });
        mac.update(seen.client_nonce);
        mac.update(seen.server_nonce);
        mac.update(seen.export.as_bytes());
        mac
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_holds_for_its_role_nonces_export_and_key_only() {
        let key = Key::new(b"0123456789abcdef").unwrap();
        let seen = Transcript { client_nonce: &[1; 32], server_nonce: &[2; 32], export: "home" };
        let proof = key.prove(Role::Client, seen);
        assert!(key.verify(Role::Client, seen, &proof));
        assert!(!key.verify(Role::Server, seen, &proof));
        assert!(!key.verify(Role::Client, Transcript { export: "scratch", ..seen }, &proof));
        assert!(!key.verify(Role::Client, Transcript { server_nonce: &[3; 32], ..seen }, &proof));
        let other = Key::new(b"0123456789abcdeF").unwrap();
        assert!(!other.verify(Role::Client, seen, &proof));
        assert!(Key::new(b"short").is_err());
    }
}
