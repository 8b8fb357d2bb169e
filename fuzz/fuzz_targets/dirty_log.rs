//! Whatever lies in a log of dirty data: its reader ends, and finds what was written.
#![no_main]

use dray_rpc::client::{read_any_log, read_written_log};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    read_any_log(bytes);
    read_written_log(bytes);
});
