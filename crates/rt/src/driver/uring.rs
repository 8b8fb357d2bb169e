//! The driver over io_uring: readiness of descriptors by multishot POLL_ADD, and room
//! for foreign commands (those of FUSE over io_uring), all behind one system call.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use io_uring::squeue::Entry128;
use io_uring::{IoUring, cqueue, opcode, types};

use crate::driver::alarm::Alarm;
use crate::driver::{Kick, drain_event};
use crate::executor::{ExecutorHandle, ExecutorShared};
use crate::source::Readiness;
use crate::time::Instant;

const RING_ENTRIES: u32 = 256;

/// Two upper bits of a completion's user data say whose it is; registry ids use 62 bits.
const OWNER_SHIFT: u32 = 62;
const OWNER_SOURCE: u64 = 0;
const OWNER_FOREIGN: u64 = 1;
const OWNER_KICK: u64 = 2;
const OWNER_NOBODY: u64 = 3;
/// The id of the alarm, beside the owner `OWNER_KICK`.
const ALARM: u64 = 1;

/// Receives the results of commands that it put on the ring.
pub trait Completion: Send + Sync {
    /// A command of `token` ended with `result` (negative: an error number).
    fn complete(&self, token: RingToken, result: i32);
}

/// Names a [`Completion`] registered with a [`Ring`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RingToken(u64);

/// Access to the io_uring of an executor, from any thread. The memory that commands
/// point to belongs to the caller that pushed them until they complete.
#[derive(Clone)]
pub struct Ring {
    shared: Arc<ExecutorShared>,
}

impl Ring {
    /// The ring under `handle`'s executor; none if it has another driver.
    pub fn of(handle: &ExecutorHandle) -> Option<Ring> {
        let has_ring = handle.shared.registry.inbox().is_some();
        has_ring.then(|| Ring { shared: handle.shared.clone() })
    }

    /// Registers who gets the results of commands.
    pub fn attach(&self, completion: Arc<dyn Completion>) -> RingToken {
        let mut inbox = self.inbox();
        inbox.attached.push(completion);
        inbox.attached_ever += 1;
        RingToken(inbox.attached_ever - 1)
    }

    /// Puts a command on the ring; it is submitted with the next wait.
    ///
    /// # Safety
    /// Everything that `command` points to stays valid until its completion.
    pub unsafe fn push(&self, token: RingToken, command: Entry128) {
        let command = command.user_data(OWNER_FOREIGN << OWNER_SHIFT | token.0);
        self.inbox().commands.push(command);
        self.shared.kick_if_parked();
    }

    fn inbox(&self) -> MutexGuard<'_, RingInbox> {
        self.shared.registry.inbox().expect("checked when the Ring was made")
    }
}

/// The work that other code wants put on the ring, until the executor's thread does it.
#[derive(Default)]
pub(crate) struct RingInbox {
    commands: Vec<Entry128>,
    attached: Vec<Arc<dyn Completion>>,
    attached_ever: u64,
}

pub(crate) fn lock(inbox: &Mutex<RingInbox>) -> MutexGuard<'_, RingInbox> {
    inbox.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RingInbox {
    pub(crate) fn watch(&mut self, id: u64, fd: RawFd) {
        let bits = libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP;
        let poll = opcode::PollAdd::new(types::Fd(fd), bits as u32).multi(true).build();
        self.commands.push(Entry128::from(poll).user_data(OWNER_SOURCE << OWNER_SHIFT | id));
    }

    pub(crate) fn unwatch(&mut self, id: u64) {
        // POLL_REMOVE leaves a poll alone that has an event to report (EALREADY, io_poll_remove
        // in io_uring/poll.c); a cancellation does not.
        let which = types::CancelBuilder::user_data(OWNER_SOURCE << OWNER_SHIFT | id).all();
        let cancel = opcode::AsyncCancel2::new(which).build();
        self.commands.push(Entry128::from(cancel).user_data(OWNER_NOBODY << OWNER_SHIFT));
    }

    /// Takes all commands; answers how many watches are behind the last cancellation.
    #[cfg(test)]
    pub(super) fn watches_begun_last(&mut self) -> usize {
        let commands = self.commands.drain(..).rev();
        commands.take_while(|one| one.get_user_data() >> OWNER_SHIFT == OWNER_SOURCE).count()
    }
}

pub(crate) struct Uring {
    ring: IoUring<Entry128, cqueue::Entry>,
    kick: Arc<OwnedFd>,
    kick_armed: bool,
    alarm: Alarm,
    alarm_armed: bool,
    /// Watched and never used, see [`Uring::arm_exit_guard`].
    exit_guard: IoUring,
    exit_guard_armed: bool,
    /// By token.
    foreign: Vec<Arc<dyn Completion>>,
    /// Swapped with the inbox's list, so that neither is allocated anew.
    commands: Vec<Entry128>,
    done: Vec<(u64, i32, u32)>,
}

impl Uring {
    pub(crate) fn new() -> io::Result<(Uring, Kick)> {
        let ring = IoUring::<Entry128, cqueue::Entry>::builder()
            .setup_coop_taskrun()
            .setup_cqsize(RING_ENTRIES * 4)
            .build(RING_ENTRIES)?;
        let (kick, event) = Kick::new()?;
        let uring = Uring {
            ring,
            kick: event,
            kick_armed: false,
            alarm: Alarm::new()?,
            alarm_armed: false,
            exit_guard: IoUring::new(1)?,
            exit_guard_armed: false,
            foreign: Vec::new(),
            commands: Vec::new(),
            done: Vec::new(),
        };
        Ok((uring, kick))
    }

    pub(crate) fn park(
        &mut self,
        shared: &ExecutorShared,
        next: Option<Instant>,
        ready: bool,
    ) -> bool {
        self.take_inbox(shared);
        self.arm_own();
        self.arm_exit_guard();
        self.alarm.set(next);
        self.submit_and_wait(usize::from(!ready));
        shared.unpark();
        self.take_completions(shared);
        true
    }

    /// Without a system call where there is nothing to submit and something has completed:
    /// completions are posted whenever this thread leaves the kernel (`COOP_TASKRUN`). A server
    /// on this CPU has often answered when the call that sent the question returns.
    fn submit_and_wait(&mut self, want: usize) {
        if self.ring.submission().is_empty() && !self.ring.completion().is_empty() {
            return;
        }
        if let Err(error) = self.ring.submit_and_wait(want) {
            let passing = [libc::ETIME, libc::EINTR, libc::EBUSY, libc::EAGAIN];
            let passing = error.raw_os_error().is_some_and(|raw| passing.contains(&raw));
            assert!(passing, "io_uring_enter(2) of our own ring failed: {error}");
        }
    }

    fn take_inbox(&mut self, shared: &ExecutorShared) {
        {
            let mut inbox = shared.registry.inbox().expect("this executor's driver is io_uring");
            std::mem::swap(&mut self.commands, &mut inbox.commands);
            self.foreign.append(&mut inbox.attached);
        }
        let mut commands = std::mem::take(&mut self.commands);
        for command in commands.drain(..) {
            self.submit_one(&command);
        }
        self.commands = commands;
    }

    fn submit_one(&mut self, command: &Entry128) {
        // SAFETY: the caller that pushed the command vouched for what it points to.
        while unsafe { self.ring.submission().push(command) }.is_err() {
            let _ = self.ring.submit(); // full: the next push shows whether it helped
        }
    }

    /// Watches the kick and the alarm.
    fn arm_own(&mut self) {
        if !std::mem::replace(&mut self.kick_armed, true) {
            self.watch_own(self.kick.as_raw_fd(), 0);
        }
        if !std::mem::replace(&mut self.alarm_armed, true) {
            self.watch_own(self.alarm.fd(), ALARM);
        }
    }

    fn watch_own(&mut self, fd: RawFd, which: u64) {
        let poll = opcode::PollAdd::new(types::Fd(fd), libc::POLLIN as u32).multi(true).build();
        self.submit_one(&Entry128::from(poll).user_data(OWNER_KICK << OWNER_SHIFT | which));
    }

    /// Makes the kernel cancel this thread's submissions as the first thing when the thread ends,
    /// however it ends. The kernel does so only for a thread that has a request on an io_uring
    /// descriptor under way. In the kernel that is `io_uring_files_cancel` in io_uring/cancel.c,
    /// which `do_exit` calls before the thread counts as exiting. Otherwise requests stay until the
    /// ring is taken down, and whatever is handed to them meanwhile is lost. For FUSE over io_uring
    /// each is a request of an application (docs/adr/0001).
    fn arm_exit_guard(&mut self) {
        if !self.exit_guard_armed {
            let fd = types::Fd(self.exit_guard.as_raw_fd());
            let poll = opcode::PollAdd::new(fd, libc::POLLIN as u32).build();
            self.submit_one(&Entry128::from(poll).user_data(OWNER_NOBODY << OWNER_SHIFT));
            self.exit_guard_armed = true;
        }
    }

    fn take_completions(&mut self, shared: &ExecutorShared) {
        let mut done = std::mem::take(&mut self.done);
        done.extend(
            self.ring.completion().map(|entry| (entry.user_data(), entry.result(), entry.flags())),
        );
        for (user_data, result, flags) in done.drain(..) {
            let id = user_data & ((1 << OWNER_SHIFT) - 1);
            match user_data >> OWNER_SHIFT {
                OWNER_SOURCE => source_event(shared, id, result, flags),
                OWNER_FOREIGN => {
                    if let Some(completion) = self.foreign.get(id as usize) {
                        completion.complete(RingToken(id), result);
                    }
                }
                OWNER_KICK if id == ALARM => {
                    self.alarm.went_off();
                    self.alarm_armed = cqueue::more(flags);
                    shared.wake_due_timers();
                }
                OWNER_KICK => {
                    drain_event(self.kick.as_raw_fd());
                    self.kick_armed = cqueue::more(flags);
                }
                _ => {}
            }
        }
        self.done = done;
    }
}

fn source_event(shared: &ExecutorShared, id: u64, result: i32, flags: u32) {
    if result == -libc::ECANCELED {
        return; // by `unwatch`
    }
    let Some(source) = shared.registry.get(id) else { return };
    // An error of the poll itself leaves it to the next read or write to find out why.
    let bits = if result < 0 { libc::POLLERR as i32 } else { result };
    let gone = bits & i32::from(libc::POLLHUP | libc::POLLERR) != 0;
    let read = bits & i32::from(libc::POLLIN | libc::POLLRDHUP) != 0;
    source.event(Readiness {
        read: read || gone,
        write: bits & i32::from(libc::POLLOUT) != 0 || gone,
        ended: gone || bits & i32::from(libc::POLLRDHUP) != 0,
    });
    // A poll may also end because the kernel had no memory for it. The waiting task has to hear of
    // later events all the same.
    if !cqueue::more(flags) {
        shared.registry.rewatch(id);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::executor::{DriverKind, Executor};

    /// The kernel did not watch the descriptor any more: the task that waited for it did so for
    /// ever.
    #[test]
    fn a_watch_that_ends_with_an_error_begins_anew_unless_it_was_taken_back() {
        let Ok(executor) = Executor::new(DriverKind::Uring) else { return };
        let shared = executor.handle().shared;
        let id = shared.registry.add(0, Arc::default(), false).unwrap();
        let begun = |result: i32, flags: u32| {
            shared.registry.inbox().unwrap().commands.clear();
            source_event(&shared, id, result, flags);
            shared.registry.inbox().unwrap().watches_begun_last()
        };
        const MORE: u32 = 2; // IORING_CQE_F_MORE
        assert_eq!(begun(libc::POLLIN.into(), MORE), 0);
        assert_eq!(begun(libc::POLLIN.into(), 0), 1);
        assert_eq!(begun(-libc::ENOMEM, 0), 1);
        assert_eq!(begun(-libc::ECANCELED, 0), 0);
        shared.registry.remove(id, 0);
        assert_eq!(begun(-libc::ENOMEM, 0), 0);
    }

    /// The kernel would wait for the second one.
    #[test]
    fn where_something_has_completed_the_kernel_is_not_asked() {
        let Ok((mut uring, _kick)) = Uring::new() else { return };
        uring.submit_one(&Entry128::from(opcode::Nop::new().build()));
        uring.submit_and_wait(1);
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            uring.submit_and_wait(2);
            let _ = sender.send(()); // nobody listens once the test has failed
        });
        receiver.recv_timeout(Duration::from_secs(60)).expect("it waits in the kernel");
    }
}
