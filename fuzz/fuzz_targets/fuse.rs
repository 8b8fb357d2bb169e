//! Whatever the kernel sends: a request, or an error, in both framings.
#![no_main]

use dray_fuse::proto::{decode_classic, decode_ring, forgets};
use libfuzzer_sys::fuzz_target;

/// Bytes of a request's header, and most of an operation's arguments in a ring.
const HEADER_BYTES: usize = 40;
const ARGS_BYTES: usize = 128;

fuzz_target!(|bytes: &[u8]| {
    let _ = decode_classic(bytes);
    let (header, rest) = bytes.split_at(bytes.len().min(HEADER_BYTES));
    let (args, payload) = rest.split_at(rest.len().min(ARGS_BYTES));
    let _ = decode_ring(header, args, payload);
    for (_, count) in forgets(payload) {
        std::hint::black_box(count);
    }
    // A length that agrees with the message lets the fuzzer get to what lies behind it.
    if let Ok(len) = u32::try_from(bytes.len())
        && len >= 4
    {
        let mut whole = bytes.to_vec();
        whole[..4].copy_from_slice(&len.to_ne_bytes());
        let _ = decode_classic(&whole);
    }
});
