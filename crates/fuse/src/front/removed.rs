//! Names in directories that others have removed, for the processes that still work there.
//!
//! The server answers ESTALE for such a directory, and the kernel looks the path up again. This
//! serves a path best, since somebody may have made another directory of that name. But a process
//! that has the directory itself, as its working directory or by a descriptor, comes back to it.
//! Linux would have said ENOENT at once. So at the second time within a call that is what is
//! answered.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use dray_core::{Errno, Error, FileId, Pid};
use dray_rt::{Instant, now};

use crate::front::Worker;
use crate::proto::{NameOperation, OpenOperation, Operation, Request};
use crate::worker::caller::{CallingSyscall, call_of};

/// How long it is remembered that a thread found a directory gone: the kernel comes back at once.
const AGAIN_WITHIN: Duration = Duration::from_secs(1);
/// Threads and directories remembered; of more the oldest are forgotten.
const REMEMBERED_MAX: usize = 256;

/// System calls that make a name. They look the name up before they make it. They do not look the
/// path up again if that finds the directory gone (`filename_create` in fs/namei.c).
const MAKING: [i64; 9] = [
    libc::SYS_mkdir,
    libc::SYS_mkdirat,
    libc::SYS_mknod,
    libc::SYS_mknodat,
    libc::SYS_symlink,
    libc::SYS_symlinkat,
    libc::SYS_link,
    libc::SYS_linkat,
    libc::SYS_bind,
];

/// The threads that have found a directory gone, with the directory.
#[derive(Default)]
pub(crate) struct RemovedDirectories(Mutex<VecDeque<((Pid, FileId), Instant)>>);

impl RemovedDirectories {
    /// A thread has found a directory gone. Whether it had just found so before.
    fn again(&self, who: (Pid, FileId)) -> bool {
        let mut found = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = now();
        found.retain(|(_, until)| *until > now);
        let again = found.iter().any(|(one, _)| *one == who);
        if !again {
            let surplus = (found.len() + 1).saturating_sub(REMEMBERED_MAX);
            found.drain(..surplus);
            found.push_back((who, now + AGAIN_WITHIN));
        }
        again
    }
}

impl Worker {
    /// What is answered where `request` has failed with `error`.
    pub(super) fn answer_to(&self, request: &Request<'_>, error: Error) -> Error {
        let (pid, node) = (request.head.pid, request.head.node);
        let name_use = NameUse::of(&request.op);
        if error.errno() != Errno::ESTALE || name_use == NameUse::None || pid == Pid(0) {
            return error;
        }
        if name_use == NameUse::LooksUp
            && matches!(call_of(pid), CallingSyscall::Waits(call) if MAKING.contains(&call.number))
        {
            // What it makes next finds the directory gone, and has the path looked up again.
            return Errno::ENOENT.into();
        }
        // By its id: numbers of nodes are used again.
        let again = self.id(node).is_ok_and(|dir| self.shared.removed.again((pid, dir)));
        if again { Errno::ENOENT.into() } else { error }
    }
}

/// How an operation uses names in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NameUse {
    /// The operation is about no name.
    None,
    /// The operation looks a name up.
    LooksUp,
    /// The operation changes names, or makes a file there.
    Changes,
}

impl NameUse {
    /// The use by `op`. (A file that is to have a further name and has lost its last is ENOENT on Linux, too.)
    fn of(op: &Operation<'_>) -> NameUse {
        match op {
            Operation::Names(operation) => match operation {
                NameOperation::Readlink => NameUse::None,
                NameOperation::Lookup { .. } => NameUse::LooksUp,
                NameOperation::Symlink { .. }
                | NameOperation::Mknod { .. }
                | NameOperation::Mkdir { .. }
                | NameOperation::Unlink { .. }
                | NameOperation::Rmdir { .. }
                | NameOperation::Rename { .. }
                | NameOperation::Link { .. } => NameUse::Changes,
            },
            Operation::Opens(operation) => match operation {
                OpenOperation::Create { .. } | OpenOperation::Tmpfile { .. } => NameUse::Changes,
                OpenOperation::Open { .. } | OpenOperation::Opendir { .. } => NameUse::None,
            },
            Operation::LookupSelf
            | Operation::LookupParent
            | Operation::Attributes(_)
            | Operation::Xattrs(_)
            | Operation::Files(_)
            | Operation::Session(_)
            | Operation::Read { .. }
            | Operation::Write(_)
            | Operation::Flush { .. }
            | Operation::Release { .. }
            | Operation::Releasedir { .. }
            | Operation::Readdir { .. }
            | Operation::Getlk(_)
            | Operation::Setlk { .. }
            | Operation::Statfs
            | Operation::Ioctl { .. } => NameUse::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_remembered_for_a_moment_who_found_what() {
        dray_rt::Executor::new(dray_rt::DriverKind::Simulated { seed: 1 }).unwrap().block_on(
            async {
                let removed = RemovedDirectories::default();
                let dir = |ino| FileId { ino, generation: 1 };
                let who = (Pid(1), dir(7));
                assert!(!removed.again(who) && removed.again(who) && removed.again(who));
                assert!(!removed.again((Pid(2), dir(7))) && !removed.again((Pid(1), dir(8))));
                dray_rt::sleep(AGAIN_WITHIN).await;
                assert!(!removed.again(who));
                (0..REMEMBERED_MAX as u64).for_each(|ino| _ = removed.again((Pid(3), dir(ino))));
                assert!(!removed.again(who), "the oldest was forgotten");
                assert_eq!(removed.0.lock().unwrap().len(), REMEMBERED_MAX);
            },
        );
    }
}
