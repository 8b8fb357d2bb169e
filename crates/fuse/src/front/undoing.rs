//! Keeps the kernel from undoing failed writes, by which it would cut off what other clients wrote.
//!
//! A write of aio(7) or io_uring(7), and one past the cache of a mount that has one, can make the
//! file longer. The kernel takes it to do so if it goes beyond the size that this kernel last heard
//! of. If such a write fails, or is done in part only, the kernel cuts the file to that size
//! (`fuse_direct_IO` in fs/fuse/file.c). It does so whatever others have written behind it. The cut
//! looks like ftruncate(2), but comes from the thread that wrote, soon, and in another system call.
//!
//! It may be one that was meant all the same: io_uring(7) can cut files, too, and its threads are in no
//! call that tells. So it is refused by an error, once, which the kernel does not look at when it undoes.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use dray_core::{Context, Pid};
use dray_rt::{Instant, now};

use crate::front::Worker;
use crate::proto::SetattrArgs;
use crate::proto::abi::fattr;
use crate::worker::caller::call_that_waits;

/// ftruncate(2) on x86-64; ftruncate(2) and ftruncate64(2) of its programs of 32 bits.
const FTRUNCATE: [i64; 3] = [libc::SYS_ftruncate, 93, 194];

/// How long after the last answer to a write of the same thread to the same file the kernel may
/// come with its undoing. It does so at once, when that thread has a CPU.
const UNDONE_WITHIN: Duration = Duration::from_secs(10);
/// Writes that may be undone; of more the oldest are forgotten.
const FAILED_MAX: usize = 1024;

/// Writes that failed and that the kernel may undo.
pub(crate) struct FailedWrites {
    /// There may be some.
    any: AtomicBool,
    list: Mutex<List>,
}

/// A thread and the node that it wrote to.
type Writer = (Pid, u64);

struct List {
    failed: VecDeque<(Writer, Instant)>,
    /// A predecessor may have left any until then; those who were refused for it.
    inherited: Option<(Instant, Vec<Writer>)>,
}

impl FailedWrites {
    /// None, but for what a predecessor does not tell of.
    pub(crate) fn new(adopted: bool) -> FailedWrites {
        let inherited = adopted.then(|| (now() + UNDONE_WITHIN, Vec::new()));
        let list = List { failed: VecDeque::new(), inherited };
        FailedWrites { any: AtomicBool::new(adopted), list: Mutex::new(list) }
    }

    fn with_list<T>(&self, look: impl FnOnce(&mut List) -> T) -> T {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let now = now();
        list.failed.retain(|(_, until)| *until > now);
        list.inherited.take_if(|(until, _)| *until <= now);
        let outcome = look(&mut list);
        let any = !list.failed.is_empty() || list.inherited.is_some();
        self.any.store(any, Ordering::Release);
        outcome
    }

    /// A write is about to be answered. The parts of one call are answered one by one.
    pub(crate) fn answered(&self, writer: Writer, failed: bool) {
        if !failed && !self.any.load(Ordering::Acquire) {
            return;
        }
        self.with_list(|list| {
            let before = list.failed.len();
            list.failed.retain(|(one, _)| *one != writer);
            if failed || list.failed.len() < before {
                let surplus = (list.failed.len() + 1).saturating_sub(FAILED_MAX);
                list.failed.drain(..surplus);
                list.failed.push_back((writer, now() + UNDONE_WITHIN));
            }
        });
    }

    /// Whether one of `writer` may be undone now; not a second time.
    fn take(&self, writer: Writer) -> bool {
        self.any.load(Ordering::Acquire)
            && self.with_list(|list| {
                let before = list.failed.len();
                list.failed.retain(|(one, _)| *one != writer);
                let inherits = list.inherited.as_mut().is_some_and(|(_, refused)| {
                    let new = refused.len() < FAILED_MAX && !refused.contains(&writer);
                    refused.extend(new.then_some(writer));
                    new
                });
                inherits || list.failed.len() < before
            })
    }
}

impl Worker {
    /// Whether the kernel undoes a failed write by this, as far as is known. No, where it is not
    /// to be seen what the caller does.
    pub(super) async fn undoes_a_write(&self, cx: &Context, node: u64, args: &SetattrArgs) -> bool {
        const BESIDE: u32 = fattr::FH | fattr::LOCKOWNER | fattr::KILL_SUIDGID;
        let cuts_open_file = args.valid & fattr::FH != 0 && args.valid & !BESIDE == fattr::SIZE;
        if !cuts_open_file || !self.shared.failed_writes.take((cx.pid, node)) {
            return false;
        }
        call_that_waits(cx.pid).await.is_some_and(|call| !FTRUNCATE.contains(&call.number))
    }
}

#[cfg(test)]
mod tests {
    use dray_rt::sleep;

    use super::*;

    // proves: P20
    #[test]
    fn a_failed_write_is_undone_once_by_who_made_it_and_soon() {
        dray_rt::Executor::new(dray_rt::DriverKind::Simulated { seed: 1 }).unwrap().block_on(
            async {
                let writes = FailedWrites::new(false);
                let writer = (Pid(1), 7);
                writes.answered(writer, false);
                assert!(!writes.take(writer));
                writes.answered(writer, true);
                assert!(!writes.take((Pid(2), 7)) && !writes.take((Pid(1), 8)));
                assert!(writes.take(writer) && !writes.take(writer));
                writes.answered(writer, true);
                // Other parts of the same call are answered later.
                sleep(UNDONE_WITHIN / 2).await;
                writes.answered(writer, false);
                sleep(UNDONE_WITHIN / 2).await;
                assert!(writes.take(writer));
                writes.answered(writer, true);
                sleep(UNDONE_WITHIN).await;
                assert!(!writes.take(writer) && !writes.any.load(Ordering::Acquire));
            },
        );
    }

    // proves: P20
    #[test]
    fn what_a_predecessor_left_is_expected_for_a_while_once_of_each() {
        dray_rt::Executor::new(dray_rt::DriverKind::Simulated { seed: 1 }).unwrap().block_on(
            async {
                let writes = FailedWrites::new(true);
                assert!(writes.take((Pid(1), 7)) && !writes.take((Pid(1), 7)));
                sleep(UNDONE_WITHIN).await;
                assert!(!writes.take((Pid(2), 7)) && !writes.any.load(Ordering::Acquire));
            },
        );
    }

    #[test]
    fn failed_writes_are_bounded() {
        let writes = FailedWrites::new(false);
        (0..=FAILED_MAX as u64).for_each(|node| writes.answered((Pid(1), node), true));
        assert_eq!(writes.with_list(|list| list.failed.len()), FAILED_MAX);
        assert!(!writes.take((Pid(1), 0)) && writes.take((Pid(1), FAILED_MAX as u64)));
    }
}
