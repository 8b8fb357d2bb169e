//! Whatever lies in a log of an audit: readers end with records or with an error.
#![no_main]

use std::path::PathBuf;
use std::sync::OnceLock;

use dray_layers::audit::{LogReader, decode_anything, verify};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    decode_anything(bytes);
    static PLACE: OnceLock<tempfile::TempDir> = OnceLock::new();
    let dir = PLACE.get_or_init(|| tempfile::tempdir_in("/dev/shm").expect("a directory"));
    let segment = dir.path().join("00000000000000000001.audit");
    std::fs::write(&segment, bytes).expect("room");
    let dirs: Vec<PathBuf> = vec![dir.path().to_owned()];
    let found = verify(&dirs, None, |_| {}).expect("readable files");
    let mut reader = LogReader::new(dirs, 1);
    let mut count = 0;
    while let Ok(true) = reader.advance(&mut |_| count += 1) {}
    assert!(count as u64 <= found.records || !found.problems.is_empty());
});
