//! Which worker of the classic transport the kernel wakes for a lone program (ADR 0059).
//!
//! The kernel wakes the first worker in its queue, whichever CPU the request comes from, and wakes that one the
//! next time, too (`EPOLLEXCLUSIVE`). A wake-up of another CPU takes longer than most requests. So a worker that serves
//! a lone program of another worker's CPU goes to the end of the queue.

use crate::proto::Head;
use crate::proto::abi::op;
use crate::worker::{caller, cpus};

/// Requests that came one at a time, in a row, before it is looked from where.
const LOOK_FIRST: u32 = 8;
/// Further ones before the next look, which takes about 10 us.
const LOOK_AGAIN: u32 = 64;

/// Where the requests come from that one worker takes up.
pub(super) struct NearCaller<'a> {
    /// The only CPU of this worker; none if it runs on several.
    own: Option<usize>,
    /// The CPUs of all workers.
    crew: &'a [usize],
    /// Requests until the next look.
    left: u32,
}

impl NearCaller<'_> {
    /// For the calling thread.
    pub(super) fn new(crew: &[usize]) -> NearCaller<'_> {
        let own = match *cpus::allowed() {
            [own] => Some(own),
            _ => None,
        };
        NearCaller { own, crew, left: LOOK_FIRST }
    }

    /// Whether another worker is nearer to the program that has sent `message`. To be asked before that is
    /// answered. `alone`: the one before was answered when it came.
    pub(super) fn is_elsewhere(&mut self, message: &[u8], alone: bool) -> bool {
        self.left = if alone { self.left.saturating_sub(1) } else { self.left.max(LOOK_FIRST) };
        let (0, Some(own)) = (self.left, self.own) else { return false };
        let Some(head) = Head::decode(message).filter(|head| may_be_looked_at(head.opcode)) else {
            return false;
        };
        let cpu = caller::last_cpu(head.pid);
        let elsewhere = cpu.is_some_and(|cpu| cpu != own && self.crew.contains(&cpu));
        self.left = if elsewhere { LOOK_FIRST } else { LOOK_AGAIN };
        elsewhere
    }
}

/// Whether the caller is not within exec(2) while it waits for such an answer. Files are closed there under a lock
/// that the kernel takes to show the CPU.
fn may_be_looked_at(opcode: u32) -> bool {
    matches!(
        opcode,
        op::LOOKUP
            | op::GETATTR
            | op::STATX
            | op::GETXATTR
            | op::OPEN
            | op::OPENDIR
            | op::READDIR
            | op::READDIRPLUS
            | op::CREATE
            | op::UNLINK
    )
}
