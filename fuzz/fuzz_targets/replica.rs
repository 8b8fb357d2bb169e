//! Whatever another server of a slice sends as notes of its journal: they are taken or refused, and the
//! next copy is taken.
#![no_main]

use std::sync::Arc;

use dray_fuzz::Cutter;
use dray_rpc::server::{JournalReplica, MemoryJournal};
use libfuzzer_sys::fuzz_target;

/// A copy of a journal without sessions.
const COPY: [u8; 1] = [0];

fuzz_target!(|bytes: &[u8]| {
    let replica = JournalReplica::new(Arc::new(MemoryJournal::default()));
    let mut input = Cutter(bytes);
    while !input.0.is_empty() {
        let (epoch, number) = (u64::from(input.byte() % 4), u64::from(input.byte() % 8));
        let begins = input.byte() % 4 == 0;
        let notes = input.piece();
        let batch = if begins { [&COPY[..], notes].concat() } else { notes.to_vec() };
        let _ = replica.take(epoch, number, &batch);
    }
    replica.take(u64::MAX, 0, &COPY).expect("a copy of a new primary");
});
