//! The hashes of the mapping. They are part of its specification (docs/PLACEMENT.md) and never change.

use dray_core::fnv1a;

use super::definition::HashKind;

/// The finalizer of SplitMix64 (Steele, Lea and Flood 2014, Fig. 17): each bit of the result depends on each
/// bit of `number`.
pub(super) const fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

/// Bob Jenkins's one-at-a-time hash (Dr. Dobb's Journal, September 1997).
fn jenkins(bytes: &[u8]) -> u32 {
    let hash = bytes.iter().fold(0_u32, |hash, byte| {
        let hash = hash.wrapping_add(u32::from(*byte));
        let hash = hash.wrapping_add(hash << 10);
        hash ^ (hash >> 6)
    });
    let hash = hash.wrapping_add(hash << 3);
    let hash = hash ^ (hash >> 11);
    hash.wrapping_add(hash << 15)
}

/// The key of an inode number.
pub(super) fn key_of(kind: HashKind, ino: u64) -> u64 {
    match kind {
        HashKind::Rendezvous => mix(ino),
        HashKind::Jenkins => mix(u64::from(jenkins(&ino.to_le_bytes()))),
        HashKind::Fnv1a => mix(fnv1a(&ino.to_le_bytes())),
        HashKind::Modulo => ino,
    }
}

/// The key of a server, by its name in the definition.
pub(super) fn server_key(name: &str) -> u64 {
    mix(fnv1a(name.as_bytes()))
}

/// How much a server is wanted for a key: the greatest score has it.
pub(super) const fn score(server_key: u64, key: u64) -> u64 {
    mix(server_key ^ key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hashes_are_those_of_their_publications() {
        // The first output of SplitMix64 from seed 0, and published values of the others.
        assert_eq!(mix(0x9e37_79b9_7f4a_7c15), 0xe220_a839_7b1d_cdaf);
        assert_eq!(jenkins(b"a"), 0xca2e_9442);
        assert_eq!(jenkins(b"The quick brown fox jumps over the lazy dog"), 0x519e_91f5);
        assert_eq!(fnv1a(b"a"), 0xaf63_dc4c_8601_ec8c);
    }
}
