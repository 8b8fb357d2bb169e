//! The driver that works everywhere: epoll(7), edge-triggered but for what several read from.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use crate::driver::Kick;
use crate::driver::alarm::Alarm;
use crate::executor::ExecutorShared;
use crate::source::Readiness;
use crate::time::Instant;

const EVENTS_PER_WAIT: usize = 256;
/// Bytes of the kernel's set of signals. It does not look at them where there is no set.
const SIGSET_BYTES: usize = 8;
/// No registry id is as large as these: its upper half has 30 bits.
const KICK_ID: u64 = u64::MAX;
const ALARM_ID: u64 = u64::MAX - 1;

pub(crate) struct Epoll {
    fd: Arc<OwnedFd>,
    _kick: Arc<OwnedFd>,
    alarm: Alarm,
    events: Vec<libc::epoll_event>,
}

impl Epoll {
    pub(crate) fn new() -> io::Result<(Epoll, Kick)> {
        // SAFETY: no memory is passed.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just made, owned by nobody else.
        let fd = Arc::new(unsafe { OwnedFd::from_raw_fd(fd) });
        let (kick, event) = Kick::new()?;
        add_bits(&fd, event.as_raw_fd(), KICK_ID, libc::EPOLLIN | libc::EPOLLET)?;
        let alarm = Alarm::new()?;
        add(&fd, alarm.fd(), ALARM_ID, false)?;
        let events = vec![libc::epoll_event { events: 0, u64: 0 }; EVENTS_PER_WAIT];
        Ok((Epoll { fd, _kick: event, alarm, events }, kick))
    }

    pub(crate) fn fd(&self) -> Arc<OwnedFd> {
        self.fd.clone()
    }

    pub(crate) fn park(
        &mut self,
        shared: &ExecutorShared,
        next: Option<Instant>,
        ready: bool,
    ) -> bool {
        self.alarm.set(next);
        let wait_ms = if ready { 0 } else { -1 };
        // Around the C library, whose function is a place where a thread can be cancelled. None of ours is, and
        // to be ready for it costs two atomic operations.
        // SAFETY: the kernel writes at most events.len() events.
        let count = unsafe {
            let no_signals = std::ptr::null::<libc::sigset_t>();
            libc::syscall(
                libc::SYS_epoll_pwait,
                self.fd.as_raw_fd(),
                self.events.as_mut_ptr(),
                self.events.len(),
                wait_ms,
                no_signals,
                SIGSET_BYTES,
            )
        };
        shared.unpark();
        for event in &self.events[..count.max(0) as usize] {
            let (bits, id) = (event.events as i32, event.u64);
            if id == KICK_ID {
                // It is not read: each kick is an event of its own, and a read would be one more.
            } else if id == ALARM_ID {
                self.alarm.went_off();
                shared.wake_due_timers();
            } else if let Some(source) = shared.registry.get(id) {
                let gone = bits & (libc::EPOLLHUP | libc::EPOLLERR) != 0;
                let read = bits & (libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLPRI) != 0;
                source.event(Readiness {
                    read: read || gone,
                    write: bits & libc::EPOLLOUT != 0 || gone,
                    ended: gone || bits & libc::EPOLLRDHUP != 0,
                });
            }
        }
        true
    }
}

pub(crate) fn add(epoll: &OwnedFd, fd: RawFd, id: u64, shared: bool) -> io::Result<()> {
    let bits = match shared {
        // With both directions or RDHUP the kernel refuses EPOLLEXCLUSIVE. Level-triggered,
        // see `Source::ask_again`.
        true => libc::EPOLLIN | libc::EPOLLEXCLUSIVE,
        false => libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET,
    };
    add_bits(epoll, fd, id, bits)
}

fn add_bits(epoll: &OwnedFd, fd: RawFd, id: u64, bits: i32) -> io::Result<()> {
    let mut event = libc::epoll_event { events: bits as u32, u64: id };
    // SAFETY: `event` is read during the call only.
    match unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &mut event) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

pub(crate) fn remove(epoll: &OwnedFd, fd: RawFd) {
    // SAFETY: no memory is passed. It fails only if the descriptor is gone already.
    unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut()) };
}
