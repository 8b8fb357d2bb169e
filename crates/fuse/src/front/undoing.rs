//! Keeps the kernel from undoing failed writes, by which it would cut off what other clients wrote
//! (`state::failed_writes`).

use std::time::Duration;

use dray_core::{Context, Pid};
use dray_rt::sleep;

use crate::front::Worker;
use crate::proto::abi::fattr;
use crate::proto::{Operation, Request, SetattrArgs};
use crate::worker::caller::{Sleep, sleep_of};

/// How often it is looked whether a caller sleeps already, and the time between two looks.
const LOOKS_MAX: usize = 100;
const LOOK_TIME: Duration = Duration::from_millis(1);

impl Worker {
    /// A write through `fh` up to the offset `end` failed, or is done in part. To be called before
    /// it is answered, while its caller waits: for a plain write(2) it sleeps lightly, and the
    /// kernel undoes nothing; for a write that the kernel would undo it sleeps deeply.
    pub(super) async fn note_failed_write(&self, cx: &Context, fh: u64, end: u64) {
        // Of a write that nobody waits for by itself the kernel tells no signals.
        if cx.pid == Pid(0) || self.shared.flights.is_signalled(cx.request.0) {
            return;
        }
        for _ in 0..LOOKS_MAX {
            match sleep_of(cx.pid) {
                None | Some(Sleep::Light) => return,
                Some(Sleep::Deep) => break,
                Some(Sleep::Awake) => sleep(LOOK_TIME).await,
            }
        }
        // Where it is not to be told nothing is cut off.
        self.shared.failed_writes.note(fh, cx.pid, end);
    }

    /// Whether the kernel undoes a failed write by this.
    pub(super) fn undoes_a_write(&self, cx: &Context, args: &SetattrArgs) -> bool {
        const BESIDE: u32 = fattr::FH | fattr::LOCKOWNER | fattr::KILL_SUIDGID;
        args.valid & !BESIDE == fattr::SIZE
            && args.valid & fattr::FH != 0
            && self.shared.failed_writes.undoes(args.fh, cx.pid, args.size)
    }

    /// Notes what a caller asks for, before it is done. Between a failed write and its undoing there
    /// is nothing but other parts of that write, and what the kernel sends in a thread's name without
    /// having it wait.
    pub(super) fn note_what_follows(&self, request: &Request<'_>) {
        let may_come_between = matches!(
            request.op,
            Operation::Write { .. }
                | Operation::Setattr(_)
                | Operation::Read { .. }
                | Operation::Release { .. }
                | Operation::Releasedir { .. }
        );
        if !may_come_between {
            self.shared.failed_writes.goes_on(request.head.pid);
        }
    }
}
