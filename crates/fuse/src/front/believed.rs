//! Opening files under names that the kernel believes.
//!
//! Under `close-to-open` the kernel opens a file whose name it has believed in for a while, and tells
//! us of the file alone. Others may have given the name to another file meanwhile, or have removed it:
//! who opens a file wants the one that is there. So the server is told by which name the kernel has
//! come to the file, and answers ESTALE if the name leads elsewhere by now. The kernel tries that once
//! more then, and looks up each name of the path (`do_filp_open` in fs/namei.c, LOOKUP_REVAL). So it
//! does where the kernel may have come by one of several names.
//!
//! At the second time no name is asked for: what was looked up within the call is opened, though others
//! may have replaced that, too. And whoever opens by a descriptor (/proc/self/fd, `.` of a directory)
//! names nothing, comes back to the same file, and gets it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dray_core::{Context, Errno, Error, FileId, OpenFile, OpenHow, Pid, Result};
use dray_rt::{Instant, now};

use crate::front::Worker;
use crate::proto::abi::ROOT_NODE;

/// How long it is remembered who was sent back to look names up: the kernel comes again at once.
const AGAIN_WITHIN: Duration = Duration::from_secs(1);
/// Threads remembered; of more the oldest are forgotten.
const REMEMBERED_MAX: usize = 1024;
/// How long a predecessor's callers may come again.
const INHERITED: Duration = Duration::from_secs(10);

/// A thread and the file that it opens: what it was sent back from, or has found since.
type Opener = (Pid, FileId);

/// Who was sent back to look names up.
pub(crate) struct SentBack {
    /// There may be some.
    any: AtomicBool,
    list: Mutex<VecDeque<(Opener, Instant)>>,
    /// Until then a predecessor may have sent back others, and nobody knows the names of the files
    /// that it knew.
    inherits_until: Option<Instant>,
}

impl SentBack {
    /// Nobody, but for whom a predecessor does not tell of.
    pub(crate) fn new(adopted: bool) -> SentBack {
        let inherits_until = adopted.then(|| now() + INHERITED);
        SentBack { any: AtomicBool::new(false), list: Mutex::default(), inherits_until }
    }

    fn note(&self, opener: Opener) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.retain(|((thread, _), _)| *thread != opener.0);
        let surplus = (list.len() + 1).saturating_sub(REMEMBERED_MAX);
        list.drain(..surplus);
        list.push_back((opener, now() + AGAIN_WITHIN));
        self.any.store(true, Ordering::Release);
    }

    /// A thread has looked a name up.
    pub(super) fn finds(&self, thread: Pid, found: Option<FileId>) {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = list.iter().position(|((one, _), _)| *one == thread) {
            match found {
                Some(id) => list[at].0.1 = id,
                None => _ = list.remove(at),
            }
        }
    }

    /// A thread opens something. Whether it was sent back just before, and comes to this; if to
    /// something else, that it was sent back is over.
    pub(super) fn comes(&self, opener: Opener) -> bool {
        if !self.any.load(Ordering::Acquire) {
            return false;
        }
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let now = now();
        let again = list.iter().any(|(one, until)| *one == opener && *until > now);
        list.retain(|((thread, _), until)| *thread != opener.0 && *until > now);
        self.any.store(!list.is_empty(), Ordering::Release);
        again
    }

    fn inherits(&self) -> bool {
        self.inherits_until.is_some_and(|until| now() < until)
    }
}

impl Worker {
    /// Opens a file to which the kernel has come by a name that it may only believe in. Of callers
    /// that cannot be seen it cannot be told who comes again: they are not sent back.
    pub(super) async fn open_believed(
        &self,
        cx: &Context,
        (node, id): (u64, FileId),
        how: OpenHow,
    ) -> Result<Arc<dyn OpenFile>> {
        let (nodes, sent_back) = (&self.shared.nodes, &self.shared.sent_back);
        let opener = (cx.pid, id);
        let named = self.shared.options.believes_names() && node != ROOT_NODE;
        if !named || cx.pid == Pid(0) || sent_back.comes(opener) {
            return self.fs.open(cx, id, how).await;
        }
        let opened = match nodes.only_name(node) {
            Some((dir, name)) => self.fs.open_named(cx, (dir, &name), id, how).await,
            None if sent_back.inherits() => self.fs.open(cx, id, how).await,
            None => Err(Error::new(Errno::ESTALE).because("it may have been any of its names")),
        };
        if opened.as_ref().is_err_and(|error| error.errno() == Errno::ESTALE) {
            sent_back.note(opener);
        }
        opened
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_sent_back_is_let_through_once_and_soon() {
        dray_rt::Executor::new(dray_rt::DriverKind::Simulated { seed: 1 }).unwrap().block_on(
            async {
                let list = SentBack::new(false);
                let file = |ino| FileId { ino, generation: 1 };
                assert!(!list.comes((Pid(1), file(7))));
                list.note((Pid(1), file(7)));
                assert!(!list.comes((Pid(2), file(7))));
                assert!(list.comes((Pid(1), file(7))) && !list.comes((Pid(1), file(7))));
                // Whoever found another file by its name comes to the first one by a name again.
                list.note((Pid(1), file(7)));
                assert!(!list.comes((Pid(1), file(8))) && !list.comes((Pid(1), file(7))));
                // What it found is what it comes to now, or nothing.
                list.note((Pid(1), file(7)));
                list.finds(Pid(2), None);
                list.finds(Pid(1), Some(file(9)));
                assert!(list.comes((Pid(1), file(9))));
                list.note((Pid(1), file(7)));
                list.finds(Pid(1), None);
                assert!(!list.comes((Pid(1), file(7))));
                list.note((Pid(1), file(7)));
                dray_rt::sleep(AGAIN_WITHIN).await;
                assert!(!list.comes((Pid(1), file(7))));
                (0..=REMEMBERED_MAX as u32).for_each(|thread| list.note((Pid(thread), file(7))));
                assert!(!list.comes((Pid(0), file(7))) && list.comes((Pid(1), file(7))));
                assert!(list.list.lock().unwrap().len() < REMEMBERED_MAX);
            },
        );
    }
}
