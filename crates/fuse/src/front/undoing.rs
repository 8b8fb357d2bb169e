//! Keeps the kernel from undoing failed writes, by which it would cut off what other clients wrote.
//!
//! A write of aio(7) or io_uring(7), and one past the cache of a mount that has one, is taken by the
//! kernel to make the file longer if it goes beyond the size that this kernel last heard of. If such
//! a write fails, or is done in part only, the kernel cuts the file to that size (`fuse_direct_IO` in
//! fs/fuse/file.c), whatever others have written behind it. The cut looks like ftruncate(2), but
//! comes from a thread that is in another system call.

use std::sync::atomic::Ordering;
use std::time::Duration;

use dray_core::Context;
use dray_rt::sleep;

use crate::front::Worker;
use crate::proto::SetattrArgs;
use crate::proto::abi::fattr;
use crate::worker::caller::{Call, call_of};

/// How often it is looked in which call a thread waits that has not begun to wait, and the time
/// between two looks.
const LOOKS_MAX: usize = 1000;
const LOOK_TIME: Duration = Duration::from_millis(1);

/// ftruncate(2) on x86-64; ftruncate(2) and ftruncate64(2) of its programs of 32 bits.
const FTRUNCATE: [i64; 3] = [libc::SYS_ftruncate, 93, 194];

impl Worker {
    /// A write failed, or is done in part. To be called before it is answered.
    pub(super) fn note_failed_write(&self) {
        self.shared.writes_fail.store(true, Ordering::Release);
    }

    /// Whether the kernel undoes a failed write by this. No, where it is not to be seen what the
    /// caller does.
    pub(super) async fn undoes_a_write(&self, cx: &Context, args: &SetattrArgs) -> bool {
        const BESIDE: u32 = fattr::FH | fattr::LOCKOWNER | fattr::KILL_SUIDGID;
        let cuts_open_file = args.valid & fattr::FH != 0 && args.valid & !BESIDE == fattr::SIZE;
        if !cuts_open_file || !self.shared.writes_fail.load(Ordering::Acquire) {
            return false;
        }
        for _ in 0..LOOKS_MAX {
            match call_of(cx.pid) {
                Call::Waits(number) => return !FTRUNCATE.contains(&number),
                Call::Unseen => return false,
                Call::Runs => sleep(LOOK_TIME).await,
            }
        }
        false
    }
}
