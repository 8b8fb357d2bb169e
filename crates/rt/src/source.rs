//! Readiness of file descriptors.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::executor::{Shared, current};

/// Which readiness is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Something can be read, or the other end has closed.
    Read,
    /// Something can be written.
    Write,
}

/// A non-blocking file descriptor whose readiness wakes tasks of the executor that it
/// was made on. One task at a time may wait for each direction.
pub struct Source {
    fd: OwnedFd,
    id: u64,
    state: Arc<SourceState>,
    shared: Arc<Shared>,
}

#[derive(Default)]
pub(crate) struct SourceState {
    directions: Mutex<[Direction; 2]>,
}

struct Direction {
    /// Nothing has shown yet that a try would be in vain.
    ready: bool,
    /// Counts events, so that one that comes between a vain try and its being noted
    /// is not lost.
    events: u64,
    waker: Option<Waker>,
}

impl Default for Direction {
    fn default() -> Direction {
        Direction { ready: true, events: 0, waker: None }
    }
}

impl SourceState {
    fn lock(&self) -> MutexGuard<'_, [Direction; 2]> {
        self.directions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The driver saw an event.
    pub(crate) fn event(&self, read: bool, write: bool) {
        let mut wakers = [None, None];
        let mut directions = self.lock();
        for (index, seen) in [read, write].into_iter().enumerate() {
            if seen {
                directions[index].ready = true;
                directions[index].events += 1;
                wakers[index] = directions[index].waker.take();
            }
        }
        drop(directions);
        wakers.into_iter().flatten().for_each(Waker::wake);
    }
}

impl Source {
    /// Registers `fd`, which must be in non-blocking mode, with this thread's executor.
    /// Errors: those of epoll_ctl(2).
    ///
    /// # Panics
    /// Outside of an executor, and in a simulation, which has no descriptors.
    pub fn new(fd: OwnedFd) -> io::Result<Source> {
        let shared = current().expect("descriptors are for tasks of an executor");
        let state = Arc::new(SourceState::default());
        let id = shared.registry.add(fd.as_raw_fd(), state.clone())?;
        shared.kick_if_parked();
        Ok(Source { fd, id, state, shared })
    }

    /// Tries `call` until it is something else than `EAGAIN`, waiting for readiness
    /// between the tries.
    pub fn poll_io<T>(
        &self,
        cx: &mut Context<'_>,
        interest: Interest,
        mut call: impl FnMut(RawFd) -> io::Result<T>,
    ) -> Poll<io::Result<T>> {
        let index = interest as usize;
        loop {
            let events = {
                let mut directions = self.state.lock();
                let direction = &mut directions[index];
                if !direction.ready {
                    match &mut direction.waker {
                        Some(waker) => waker.clone_from(cx.waker()),
                        none => *none = Some(cx.waker().clone()),
                    }
                    return Poll::Pending;
                }
                direction.events
            };
            match call(self.fd.as_raw_fd()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.vain_since(index, events);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return Poll::Ready(result),
            }
        }
    }

    /// Waits and tries as [`Source::poll_io`] does.
    pub async fn io<T>(
        &self,
        interest: Interest,
        mut call: impl FnMut(RawFd) -> io::Result<T>,
    ) -> io::Result<T> {
        std::future::poll_fn(|cx| self.poll_io(cx, interest, &mut call)).await
    }

    /// The last read came back short: there is nothing more until the next event. Spares
    /// the read that would only say `EAGAIN`.
    pub fn drained(&self) {
        // An event that came after the read is the only thing that must not be lost, and
        // the driver reports it on this same thread, later.
        self.state.lock()[Interest::Read as usize].ready = false;
    }

    fn vain_since(&self, index: usize, events: u64) {
        let mut directions = self.state.lock();
        if directions[index].events == events {
            directions[index].ready = false;
        }
    }
}

impl AsFd for Source {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        self.shared.registry.remove(self.id, self.fd.as_raw_fd());
        self.shared.kick_if_parked();
    }
}
