//! The drivers that an executor waits in.

mod alarm;
pub(crate) mod epoll;
pub(crate) mod sim;
pub(crate) mod uring;

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::executor::ExecutorShared;
use crate::source::SourceState;
use crate::time::Instant;

pub(crate) enum Driver {
    Epoll(epoll::Epoll),
    Uring(Box<uring::Uring>),
    Sim(sim::Sim),
}

impl Driver {
    /// Waits for events, the first timer being due at `next`, or only looks for them if tasks
    /// are `ready`. Tells sources, completions and timers. False if nothing can ever happen.
    pub(crate) fn park(
        &mut self,
        shared: &ExecutorShared,
        next: Option<Instant>,
        ready: bool,
    ) -> bool {
        match self {
            Driver::Epoll(epoll) => epoll.park(shared, next, ready),
            Driver::Uring(uring) => uring.park(shared, next, ready),
            Driver::Sim(sim) => sim.park(shared, next, ready),
        }
    }

    pub(crate) fn registry(&self) -> Registry {
        let kind = match self {
            Driver::Epoll(epoll) => RegistryKind::Epoll(epoll.fd()),
            Driver::Uring(_) => RegistryKind::Uring(Mutex::default()),
            Driver::Sim(_) => RegistryKind::None,
        };
        Registry { kind, slots: Mutex::default() }
    }
}

/// Ends an executor's wait from another thread.
pub(crate) enum Kick {
    Event(Arc<OwnedFd>),
    Nobody,
}

impl Kick {
    pub(crate) fn new() -> io::Result<(Kick, Arc<OwnedFd>)> {
        // SAFETY: no memory is passed.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just made, owned by nobody else.
        let fd = Arc::new(unsafe { OwnedFd::from_raw_fd(fd) });
        Ok((Kick::Event(fd.clone()), fd))
    }

    pub(crate) fn kick(&self) {
        if let Kick::Event(fd) = self {
            let one = 1u64.to_ne_bytes();
            // SAFETY: eight bytes are read from `one`. A full counter (EAGAIN) has
            // kicked already.
            unsafe { libc::write(fd.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        }
    }
}

/// Reads an eventfd empty.
pub(crate) fn drain_event(fd: RawFd) {
    let mut count = [0u8; 8];
    // SAFETY: eight bytes are written to `count`.
    unsafe { libc::read(fd, count.as_mut_ptr().cast(), count.len()) };
}

/// The sources of an executor by id.
pub(crate) struct Registry {
    kind: RegistryKind,
    slots: Mutex<Slots>,
}

pub(crate) enum RegistryKind {
    Epoll(Arc<OwnedFd>),
    Uring(Mutex<uring::RingInbox>),
    None,
}

#[derive(Default)]
struct Slots {
    used: Vec<Slot>,
    free: Vec<u32>,
}

#[derive(Default)]
struct Slot {
    generation: u32,
    fd: RawFd,
    state: Option<Arc<SourceState>>,
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, fd: RawFd, state: Arc<SourceState>, shared: bool) -> io::Result<u64> {
        let id = {
            let mut slots = self.lock();
            let index = slots.free.pop().unwrap_or(slots.used.len() as u32);
            if index as usize == slots.used.len() {
                slots.used.push(Slot::default());
            }
            let slot = &mut slots.used[index as usize];
            slot.state = Some(state);
            slot.fd = fd;
            u64::from(slot.generation) << 32 | u64::from(index)
        };
        let added = match &self.kind {
            RegistryKind::Epoll(epoll) => epoll::add(epoll, fd, id, shared),
            RegistryKind::Uring(inbox) => {
                uring::lock(inbox).watch(id, fd);
                Ok(())
            }
            RegistryKind::None => panic!("a simulation has no file descriptors"),
        };
        added.map(|()| id).inspect_err(|_| self.forget(id))
    }

    /// Whether shared descriptors are reported again as long as there is something to be read.
    pub(crate) fn says_again(&self) -> bool {
        matches!(self.kind, RegistryKind::Epoll(_))
    }

    /// Forgets it first: a watch that begins anew meanwhile is taken back, too, or does not begin.
    pub(crate) fn remove(&self, id: u64, fd: RawFd) {
        self.forget(id);
        self.unwatch(id, fd);
    }

    /// Ends the watch of `id` for now.
    pub(crate) fn unwatch(&self, id: u64, fd: RawFd) {
        match &self.kind {
            RegistryKind::Epoll(epoll) => epoll::remove(epoll, fd),
            RegistryKind::Uring(inbox) => uring::lock(inbox).unwatch(id),
            RegistryKind::None => {}
        }
    }

    /// Begins it again. Readiness that is there already counts as an event.
    pub(crate) fn watch_again(&self, id: u64, fd: RawFd, shared: bool) -> io::Result<()> {
        match &self.kind {
            RegistryKind::Epoll(epoll) => epoll::add(epoll, fd, id, shared),
            RegistryKind::Uring(inbox) => {
                uring::lock(inbox).watch(id, fd);
                Ok(())
            }
            RegistryKind::None => Ok(()),
        }
    }

    /// Watches the descriptor of `id` anew, after its watch ended by itself.
    pub(crate) fn rewatch(&self, id: u64) {
        let slots = self.lock(); // until the watch has begun: `remove` takes it back behind that
        if let Some(slot) = slots.used.get(id as u32 as usize)
            && slot.generation == (id >> 32) as u32
            && let Some(mut inbox) = self.inbox()
        {
            inbox.watch(id, slot.fd);
        }
    }

    pub(crate) fn get(&self, id: u64) -> Option<Arc<SourceState>> {
        let slots = self.lock();
        let slot = slots.used.get(id as u32 as usize)?;
        if slot.generation != (id >> 32) as u32 { None } else { slot.state.clone() }
    }

    pub(crate) fn inbox(&self) -> Option<MutexGuard<'_, uring::RingInbox>> {
        match &self.kind {
            RegistryKind::Uring(inbox) => Some(uring::lock(inbox)),
            _ => None,
        }
    }

    fn forget(&self, id: u64) {
        let mut slots = self.lock();
        if let Some(slot) = slots.used.get_mut(id as u32 as usize) {
            slot.generation = slot.generation.wrapping_add(1) & 0x3fff_ffff;
            slot.state = None;
            slots.free.push(id as u32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The watch held the file for as long as the executor lasted: nobody took it back.
    #[test]
    fn what_is_removed_while_its_watch_begins_anew_is_not_watched() {
        let kind = RegistryKind::Uring(Mutex::default());
        let registry = Registry { kind, slots: Mutex::default() };
        for round in 0..500 {
            let id = registry.add(0, Arc::default(), false).unwrap();
            let held_up = registry.inbox();
            std::thread::scope(|scope| {
                scope.spawn(|| registry.rewatch(id));
                scope.spawn(|| registry.remove(id, 0));
                if round % 2 == 0 {
                    std::thread::yield_now();
                }
                drop(held_up);
            });
            registry.rewatch(id); // too late
            let mut inbox = registry.inbox().unwrap();
            assert_eq!(inbox.watches_begun_last(), 0, "round {round}");
        }
    }
}
