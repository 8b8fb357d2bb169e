//! Randomness: the kernel's, or the seed's inside a simulation.

use crate::executor::current;

/// Fills `into` with random bytes fit for keys; with predictable ones inside a simulation.
pub fn random_bytes(into: &mut [u8]) {
    if let Some(shared) = current().filter(|shared| shared.simulated()) {
        for chunk in into.chunks_mut(8) {
            let bytes = shared.simulated_random().to_le_bytes();
            chunk.copy_from_slice(&bytes[..chunk.len()]);
        }
        return;
    }
    let mut done = 0;
    while done < into.len() {
        let rest = &mut into[done..];
        // SAFETY: the kernel writes at most rest.len() bytes to `rest`.
        let count = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
        assert!(
            count > 0 || std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted,
            "getrandom(2) is part of every kernel that we run on"
        );
        done += count.max(0) as usize;
    }
}

/// A random number, from where [`random_bytes`] has it.
pub fn random_u64() -> u64 {
    let mut bytes = [0; 8];
    random_bytes(&mut bytes);
    u64::from_le_bytes(bytes)
}

/// SplitMix64 (Steele, Lea, Flood 2014): a whole generator in one word of state, for the
/// simulator's choices.
pub(crate) struct SplitMix64(pub(crate) u64);

impl SplitMix64 {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}
