//! The context of a request: its caller and its cancellation. It is the immutable first argument of
//! every operation.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::Duration;

use crate::steps::Steps;
use crate::{
    ClientAddress, Errno, Error, FileId, Gid, HolderId, NodeId, Origin, Pid, RequestId, Result,
    Taker, Uid, Via,
};

/// The credentials of a caller and the job it belongs to. Shared by all
/// requests of the same process, so that it is built and sent once.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Identity {
    /// File system user id.
    pub uid: Uid,
    /// File system group id.
    pub gid: Gid,
    /// Supplementary groups, sorted, without duplicates.
    pub groups: Box<[Gid]>,
    /// Batch job, as the site names it (`SLURM_JOB_ID` and the like); may be empty.
    pub job: Box<str>,
}

/// Variables of the environment that batch systems set to the number of the job: Slurm (and what
/// follows its older name), PBS, LSF, Flux, Fujitsu's PJM, OAR, Cobalt, Grid Engine.
const JOB_VARIABLES: [&str; 9] = [
    "SLURM_JOB_ID",
    "SLURM_JOBID",
    "PBS_JOBID",
    "LSB_JOBID",
    "FLUX_JOB_ID",
    "PJM_JOBID",
    "OAR_JOB_ID",
    "COBALT_JOBID",
    "JOB_ID",
];
/// Longest job id taken over, bytes.
const JOB_MAX_BYTES: usize = 64;

impl Identity {
    /// The batch job of a process in whose environment `find` finds variables. Empty if there is
    /// none, or the variable has no number of a job.
    pub fn job_in(find: impl Fn(&str) -> Option<String>) -> Box<str> {
        let sound = |value: &String| !value.is_empty() && value.len() <= JOB_MAX_BYTES;
        let job = JOB_VARIABLES.iter().find_map(|name| find(name).filter(sound));
        job.unwrap_or_default().into()
    }

    /// The super-user without a job. All its users share it.
    pub fn system() -> Arc<Identity> {
        static SYSTEM: LazyLock<Arc<Identity>> = LazyLock::new(Arc::default);
        SYSTEM.clone()
    }

    /// Whether this is the super-user, for whom permissions are not checked.
    pub fn is_root(&self) -> bool {
        self.uid == Uid(0)
    }

    /// Whether the caller is a member of `gid`.
    pub fn in_group(&self, gid: Gid) -> bool {
        self.gid == gid || self.groups.binary_search(&gid).is_ok()
    }
}

/// How much a request may wait for others, for queues and bandwidth shares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Class {
    /// A process waits for it.
    #[default]
    Foreground,
    /// Read-ahead, write-behind, drains.
    Background,
}

/// The part of a request that is counted among those of clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Counted {
    /// The request counts with its number, its duration and its bytes.
    #[default]
    Whole,
    /// The request counts if it succeeds. One that fails will be made again, and counts then.
    IfDone,
    /// Only the bytes count: this is the rest of a request that was counted with its first part.
    Bytes,
    /// Nothing counts: no client asked for the request.
    Nothing,
}

/// Everything about a request but its arguments.
///
/// Immutable: a layer that wants to change something clones it. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Context {
    /// The node and the request that it began with, through any number of servers between.
    pub origin: Origin,
    /// The holder of the things that a call takes here: at a server the session that the call came
    /// by.
    pub holder: HolderId,
    /// Credentials and job.
    pub who: Arc<Identity>,
    /// The thread that asks, as numbered on its node. For people and for locks only.
    pub pid: Pid,
    /// File mode creation mask of the caller, permission bits.
    pub umask: u32,
    /// Time that the caller is prepared to wait in all; none: for ever.
    pub patience: Option<Duration>,
    /// Set when the caller has been asked to give up.
    pub cancel: Option<Arc<Cancel>>,
    /// Scheduling class.
    pub class: Class,
    /// The server asks for itself: what limits clients (squashing, read-only exports of
    /// rights checked before) does not apply. Never set for what came from a client.
    pub internal: bool,
    /// The address of the client, from whose share counted resources are taken.
    pub address: ClientAddress,
    /// The session and the connection that brought it; none: no connection did.
    pub via: Option<Via>,
    /// The client asks for things that it had before its server started anew. A share that has
    /// become smaller meanwhile does not keep them from the client.
    pub reclaims: bool,
    /// How metrics count this request.
    pub counted: Counted,
    /// The file whose name a removal or a rename takes away, for observers: the answer does not name it. None:
    /// nobody has looked at the name before the change, or this is another call.
    pub taken_name: Option<FileId>,
    /// A file that a lookup finds is not opened next at the server that is asked, whatever the caller does with it.
    pub only_looks: bool,
    /// The guards that the steps of a request keep until the last step has ended. None: the request
    /// has one step.
    pub steps: Option<Steps>,
    /// What the right to carry the request out depends on. None: it has that right for good.
    pub fence: Option<Arc<dyn Fence>>,
}

/// The right to change something, which another server may get ("fencing" of a deposed primary).
pub trait Fence: fmt::Debug + Send + Sync {
    /// Whether the right holds now. A call that waits before a change asks again after the wait.
    fn holds(&self) -> bool;
}

/// Requests have smaller numbers than this bit. The bits from it on tell the parts of a request
/// apart; the last one is that of numbers that a client gives by itself.
const PART_SHIFT: u32 = 48;
/// Parts of one request have smaller numbers.
const PARTS_MAX: usize = 1 << 14;

impl Context {
    /// A context for the process `pid` with these credentials on this node.
    pub fn new(node: NodeId, request: RequestId, who: Arc<Identity>, pid: Pid) -> Context {
        Context {
            origin: Origin { node, request },
            holder: HolderId(node.0),
            who,
            pid,
            umask: 0,
            patience: None,
            cancel: None,
            class: Class::Foreground,
            internal: false,
            address: ClientAddress::default(),
            via: None,
            reclaims: false,
            counted: Counted::Whole,
            taken_name: None,
            only_looks: false,
            steps: None,
            fence: None,
        }
    }

    /// The same for one of the calls that one request makes, with its number from 0 on. A client
    /// process that follows one that died in between knows each of them again.
    ///
    /// # Panics
    /// If the number is 16,384 or more.
    pub fn part(&self, number: usize) -> Context {
        assert!(number < PARTS_MAX, "a request has so many parts at most");
        let Origin { node, request: RequestId(request) } = self.origin;
        let part = if request == 0 { 0 } else { (number as u64) << PART_SHIFT };
        Context { origin: Origin { node, request: RequestId(request | part) }, ..self.clone() }
    }

    /// The same for a call that is not known again by its request.
    pub fn without_request(&self) -> Context {
        let origin = Origin { request: RequestId(0), ..self.origin };
        Context { origin, ..self.clone() }
    }

    /// The same for a lookup at a server where what it finds is not opened next.
    pub fn only_looking(&self) -> Context {
        Context { only_looks: true, ..self.clone() }
    }

    /// The same for a removal or a rename that takes a name away from this file.
    pub fn taking_name_of(&self, file: FileId) -> Context {
        Context { taken_name: Some(file), ..self.clone() }
    }

    /// The same for the steps of one request. Their guards go with the last context that has them.
    /// No step may wait for what another request keeps in that way.
    pub fn in_steps(&self) -> Context {
        Context { steps: Some(Steps::begin()), ..self.clone() }
    }

    /// Keeps `guard` until the last step of the request has ended. Without steps it is dropped now.
    pub fn keep(&self, guard: impl Any + Send) {
        if let Some(steps) = &self.steps {
            steps.keep(guard);
        }
    }

    /// The super-user of no particular node: for a server's own work and for tests.
    pub fn system() -> Context {
        let cx = Context::new(NodeId(0), RequestId(0), Identity::system(), Pid(0));
        Context { internal: true, ..cx }
    }

    /// The same for a call of `node` that no request of it is behind.
    pub fn on_behalf_of(self, node: NodeId) -> Context {
        Context { origin: Origin { node, request: RequestId(0) }, ..self }
    }

    /// The client as a taker of shared resources.
    pub fn taker(&self) -> Taker {
        Taker { holder: self.holder.0, address: self.address, reclaims: self.reclaims }
    }

    /// The same for a call that a server makes by itself, on the way to what was asked of it.
    pub fn uncounted(&self) -> Context {
        Context { counted: Counted::Nothing, ..self.clone() }
    }

    /// The same for a call that the server tries ahead of a client's own, which follows if this one fails.
    pub fn counted_if_done(&self) -> Context {
        let counted = match self.counted {
            Counted::Whole => Counted::IfDone,
            other @ (Counted::IfDone | Counted::Bytes | Counted::Nothing) => other,
        };
        Context { counted, ..self.clone() }
    }

    /// `EINTR` once the caller has been asked to give up.
    pub fn check(&self) -> Result<()> {
        match &self.cancel {
            Some(cancel) if cancel.is_set() => Err(self.cancelled()),
            _ => Ok(()),
        }
    }

    /// `EAGAIN` once another server may have the right to carry the request out. To be asked by the thread that
    /// calls the file system below, right before it does: it may have waited, or been stopped, for long.
    pub fn check_fence(fence: Option<&Arc<dyn Fence>>) -> Result<()> {
        match fence {
            Some(fence) if !fence.holds() => {
                Err(Error::retry(Errno::EAGAIN).because("another server may serve the file by now"))
            }
            _ => Ok(()),
        }
    }

    /// As [`Context::check`], for a caller that waits. It is ready with the error once the caller
    /// has given up, and wakes `task` then.
    pub fn poll_cancelled(&self, task: &mut TaskContext<'_>) -> Poll<Error> {
        match &self.cancel {
            Some(cancel) if cancel.poll_set(task) => Poll::Ready(self.cancelled()),
            _ => Poll::Pending,
        }
    }

    /// The error of an operation that ends because its caller gave up.
    pub fn cancelled(&self) -> Error {
        Error::retry(Errno::EINTR).because("the caller was interrupted")
    }
}

/// A flag that asks an operation to end early. Futures are never dropped to
/// cancel them, because that cannot stop a NIC; they look at this instead.
#[derive(Debug, Default)]
pub struct Cancel {
    set: AtomicBool,
    waiting: std::sync::Mutex<Vec<Waker>>,
}

impl Cancel {
    /// Sets the flag and wakes the tasks that wait for it. Setting it twice is harmless.
    pub fn set(&self) {
        self.set.store(true, Ordering::SeqCst);
        let waiting = std::mem::take(&mut *self.lock());
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Whether [`Cancel::set`] was called.
    pub fn is_set(&self) -> bool {
        self.set.load(Ordering::SeqCst)
    }

    /// Registers the task to be woken when the flag is set; true if it is set already.
    pub fn poll_set(&self, cx: &mut TaskContext<'_>) -> bool {
        if self.is_set() {
            return true;
        }
        let mut waiting = self.lock();
        if !waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
            waiting.push(cx.waker().clone());
        }
        drop(waiting);
        self.is_set() // set between the first look and the registration
    }

    /// Resets the flag for another operation, if nothing else refers to it. Keeps its memory.
    pub fn reset(&mut self) {
        *self.set.get_mut() = false;
        let waiting = self.waiting.get_mut();
        waiting.unwrap_or_else(|poisoned| poisoned.into_inner()).clear();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Waker>> {
        self.waiting.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_named_by_what_its_batch_system_sets() {
        let job = |variables: &[(&str, &str)]| {
            let of = |name: &str| variables.iter().find(|(other, _)| *other == name);
            Identity::job_in(|name| of(name).map(|(_, value)| (*value).to_owned()))
        };
        for name in JOB_VARIABLES {
            assert_eq!(&*job(&[("HOME", "/"), (name, "77")]), "77");
        }
        assert_eq!(&*job(&[("JOB_ID", "5"), ("PBS_JOBID", "7.host")]), "7.host");
        let long = "x".repeat(JOB_MAX_BYTES + 1);
        assert_eq!(&*job(&[("SLURM_JOB_ID", &long), ("PBS_JOBID", ""), ("JOB_ID", "5")]), "5");
        assert_eq!(&*job(&[]), "");
    }

    #[test]
    fn a_cancelled_context_says_so() {
        let mut cx = Context::system();
        assert!(cx.check().is_ok());
        let cancel = Arc::new(Cancel::default());
        cx.cancel = Some(cancel.clone());
        assert!(cx.check().is_ok());
        cancel.set();
        assert_eq!(cx.check().unwrap_err().errno(), Errno::EINTR);
    }

    #[test]
    fn a_flag_that_is_used_again_wakes_nobody_of_before() {
        struct Woken(AtomicBool);
        impl std::task::Wake for Woken {
            fn wake(self: Arc<Self>) {
                self.0.store(true, Ordering::SeqCst);
            }
        }
        let before = Arc::new(Woken(AtomicBool::new(false)));
        let mut cancel = Cancel::default();
        assert!(!cancel.poll_set(&mut TaskContext::from_waker(&before.clone().into())));
        cancel.reset();
        assert_eq!(Arc::strong_count(&before), 1);
        cancel.set();
        assert!(!before.0.load(Ordering::SeqCst));
        cancel.reset();
        assert!(!cancel.is_set());
    }
}
