//! Hash maps whose keys are numbers: inode numbers, handles, ids of requests.
//!
//! The standard library's hasher (SipHash-1-3) reads any key as a string of bytes. It takes 60 to
//! 100 instructions for a number of 64 bits. An operation on a name looks up a dozen numbers at
//! each end.
//!
//! Here a number is multiplied by a secret, and the upper and lower half of the product are
//! combined ("folded multiplication", as in wyhash). The secret is drawn when the process begins
//! and never leaves it. So a client that chooses its numbers does not know which of them collide.
//! That is no cryptographic promise. A map that unauthenticated peers can fill without limit must
//! not use this hash.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::LazyLock;

/// FNV-1a of some bytes, of 64 bits. It is the same in every process, so it can be stored. A peer
/// that chooses the bytes can make two of the same hash.
pub fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// A map from ids.
pub type IdMap<K, V> = HashMap<K, V, IdHash>;

/// Makes the hashers of this process.
#[derive(Clone, Copy, Debug)]
pub struct IdHash {
    start: u64,
    secret: u64,
}

impl Default for IdHash {
    fn default() -> IdHash {
        static SECRETS: LazyLock<IdHash> = LazyLock::new(|| {
            // The standard library's keys are random, and its hashes of them, too.
            let random = RandomState::new();
            IdHash { start: random.hash_one(0u8), secret: random.hash_one(1u8) | 1 }
        });
        *SECRETS
    }
}

impl BuildHasher for IdHash {
    type Hasher = IdHasher;

    fn build_hasher(&self) -> IdHasher {
        IdHasher { state: self.start, secret: self.secret }
    }
}

/// The hash of one key.
#[derive(Clone, Copy, Debug)]
pub struct IdHasher {
    state: u64,
    secret: u64,
}

impl Hasher for IdHasher {
    fn write_u64(&mut self, number: u64) {
        let product = u128::from(self.state ^ number) * u128::from(self.secret);
        self.state = product as u64 ^ (product >> 64) as u64;
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(number.into());
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }

    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.write_u64(u64::from_le_bytes(word));
        }
        self.write_u64(bytes.len() as u64);
    }

    fn finish(&self) -> u64 {
        let mut last = *self;
        last.write_u64(self.secret);
        last.state
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::FileId;

    /// Sockets and state of mounts are named by it, over versions.
    #[test]
    fn bytes_have_the_hash_that_is_published_for_them() {
        assert_eq!(fnv1a(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
    }

    /// Inode numbers and handles differ in a few bits only, and fill a table as evenly as random
    /// numbers. This holds for the low bits, which choose the place. It holds for the seven upper
    /// bits, too, which hashbrown compares.
    #[test]
    fn numbers_in_a_row_are_scattered() {
        let hash = IdHash::default();
        for stride in [1u64, 2, 64, 4096, 1 << 32, 1 << 56] {
            let hashes: Vec<u64> = (0..256).map(|at| hash.hash_one(at * stride)).collect();
            for part in [|hash: &u64| hash & 0xfff, |hash: &u64| hash >> 52] {
                let different = hashes.iter().map(part).collect::<HashSet<_>>().len();
                // Of 256 random ones in 4096 places 248 are expected, with a deviation of 3.
                assert!(different > 200, "stride {stride}: {different} of 256");
            }
        }
    }

    #[test]
    fn both_numbers_of_an_id_count() {
        let hash = IdHash::default();
        let id = |ino, generation| hash.hash_one(FileId { ino, generation });
        assert_ne!(id(1, 2), id(2, 1));
        assert_ne!(id(1, 2), id(1, 3));
        assert_eq!(id(1, 2), IdHash::default().hash_one(FileId { ino: 1, generation: 2 }));
        assert_ne!(hash.hash_one([1u8, 0].as_slice()), hash.hash_one([1u8].as_slice()));
    }
}
