//! Readiness of file descriptors.

use std::future::Future;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::executor::{ExecutorShared, current, is_current};

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
    shared: Arc<ExecutorShared>,
    /// The driver says again what is there still.
    level: bool,
}

/// The state of a descriptor, as the driver saw it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Readiness {
    pub(crate) read: bool,
    pub(crate) write: bool,
    /// The other end has closed, at least its half. Said once only, possibly together with
    /// the last data.
    pub(crate) ended: bool,
}

#[derive(Default)]
pub(crate) struct SourceState {
    directions: Mutex<[Direction; 2]>,
}

struct Direction {
    /// Nothing has shown yet that a try would be in vain.
    ready: bool,
    /// The end of the stream has been announced: a read never has to wait again.
    ended: bool,
    /// Counts events, so that one that comes between a vain try and its being noted
    /// is not lost.
    events: u64,
    waker: Option<Waker>,
}

impl Default for Direction {
    fn default() -> Direction {
        Direction { ready: true, ended: false, events: 0, waker: None }
    }
}

impl Direction {
    /// The task is woken by the next event.
    fn wait(&mut self, cx: &mut Context<'_>) {
        match &mut self.waker {
            Some(waker) => waker.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
    }
}

impl SourceState {
    fn lock(&self) -> MutexGuard<'_, [Direction; 2]> {
        self.directions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The driver saw an event.
    pub(crate) fn event(&self, seen: Readiness) {
        let mut wakers = [None, None];
        let mut directions = self.lock();
        directions[Interest::Read as usize].ended |= seen.ended;
        for (index, seen) in [seen.read, seen.write].into_iter().enumerate() {
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
        Source::register(fd, false)
    }

    /// As [`Source::new`], for reading only, of something that several executors read from. Where
    /// the driver can, an event wakes one executor that waits and not all of them
    /// (`EPOLLEXCLUSIVE`).
    pub fn new_shared(fd: OwnedFd) -> io::Result<Source> {
        Source::register(fd, true)
    }

    fn register(fd: OwnedFd, exclusive: bool) -> io::Result<Source> {
        let shared = current().expect("descriptors are for tasks of an executor");
        let state = Arc::new(SourceState::default());
        let id = shared.registry.add(fd.as_raw_fd(), state.clone(), exclusive)?;
        shared.kick_if_parked();
        let level = exclusive && shared.registry.says_again();
        Ok(Source { fd, id, state, shared, level })
    }

    /// Whether the calling task runs on the executor that this was made on.
    pub fn is_here(&self) -> bool {
        is_current(&self.shared)
    }

    /// Looks for nothing until `pause` is over, then waits for events again. For what announces
    /// much that can wait: while nobody looks, announcing it costs the other side no wake-up.
    /// Errors: those of epoll_ctl(2), after which no event comes any more.
    pub async fn rest(&self, pause: impl Future<Output = ()>) -> io::Result<()> {
        self.shared.registry.unwatch(self.id, self.fd.as_raw_fd());
        pause.await;
        self.shared.registry.watch_again(self.id, self.fd.as_raw_fd(), true)?;
        self.shared.kick_if_parked();
        Ok(())
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
                    direction.wait(cx);
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

    /// The last read came back short: there is nothing more until the next event, for which the task waits.
    /// Spares the read that would only say `EAGAIN`. Ready: the end of the stream is to be read.
    pub fn poll_drained(&self, cx: &mut Context<'_>) -> Poll<()> {
        // An event that came after the read must not be lost: the driver reports it on this same
        // thread, later. And the end of the stream: it may have come before the read, with the
        // data, and is not reported again.
        let direction = &mut self.state.lock()[Interest::Read as usize];
        direction.ready = direction.ended;
        if direction.ready {
            return Poll::Ready(());
        }
        direction.wait(cx);
        Poll::Pending
    }

    /// Has the driver ask again for a source made by [`Source::new_shared`]. The driver is to say
    /// whether there is more to be read, where it reports what was there before, too (epoll(7),
    /// level-triggered). Spares the read that would only say `EAGAIN`. Elsewhere the next read
    /// shows it.
    pub fn ask_again(&self) {
        if self.level {
            self.state.lock()[Interest::Read as usize].ready = false;
        }
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

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;
    use crate::{DriverKind, Executor};

    /// On each driver that this kernel has.
    fn on_each_driver<F: Future<Output = ()>>(test: impl Fn(DriverKind) -> F) {
        for driver in [DriverKind::Epoll, DriverKind::Uring] {
            if let Ok(mut executor) = Executor::new(driver) {
                executor.block_on(test(driver));
            }
        }
    }

    /// A connection: what reads at this end, its source, and the other end.
    fn connection(source: fn(OwnedFd) -> io::Result<Source>) -> (UnixStream, Source, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let reader = ours.try_clone().unwrap();
        (reader, source(ours.into()).unwrap(), theirs)
    }

    /// A server's last answer and its death arrive as one event. The read that takes the answer
    /// comes back short, but the end must still be seen.
    #[test]
    fn an_end_that_comes_with_the_last_data_is_seen() {
        on_each_driver(|_| async move {
            let (mut reader, source, mut theirs) = connection(Source::new);
            let mut room = [0; 16];
            let first = std::future::poll_fn(|cx| {
                let first = source.poll_io(cx, Interest::Read, |_| reader.read(&mut room));
                assert!(first.is_pending());
                Poll::Ready(())
            });
            first.await;
            theirs.write_all(b"last").unwrap();
            drop(theirs);
            let read = source.io(Interest::Read, |_| reader.read(&mut room)).await.unwrap();
            assert_eq!(&room[..read], b"last");
            let _ = source.poll_drained(&mut Context::from_waker(Waker::noop()));
            let end = source.io(Interest::Read, |_| reader.read(&mut room));
            let end = crate::timeout(std::time::Duration::from_secs(60), end).await;
            assert_eq!(end.expect("the end was not seen").unwrap(), 0);
        });
    }

    /// Of a shared descriptor the rest is announced again: nothing is read in vain to learn
    /// whether there is one, and it is not lost.
    #[test]
    fn remaining_readiness_is_reported_again_to_a_caller() {
        on_each_driver(|driver| async move {
            let (mut reader, source, mut theirs) = connection(Source::new_shared);
            theirs.write_all(b"abc").unwrap();
            let tries = Cell::new(0);
            for letter in b"abc" {
                source.ask_again();
                let mut room = [0; 1];
                let read = source.io(Interest::Read, |_| {
                    tries.set(tries.get() + 1);
                    reader.read(&mut room)
                });
                let read = crate::timeout(Duration::from_secs(30), read).await;
                assert_eq!((read.expect("the rest was lost").unwrap(), room[0]), (1, *letter));
            }
            source.ask_again();
            let mut nothing = std::pin::pin!(source.io(Interest::Read, |_| {
                tries.set(tries.get() + 1);
                reader.read(&mut [0; 1])
            }));
            let mut task = Context::from_waker(Waker::noop());
            assert!(nothing.as_mut().poll(&mut task).is_pending());
            if driver == DriverKind::Epoll {
                assert_eq!(tries.get(), 3, "reads in vain");
            }
        });
    }

    #[test]
    fn who_rests_hears_afterwards_of_what_came_meanwhile() {
        on_each_driver(|_| async move {
            let (mut reader, source, mut theirs) = connection(Source::new_shared);
            let mut room = [0; 16];
            for _ in 0..3 {
                theirs.write_all(b"one").unwrap();
                let one = source.io(Interest::Read, |_| reader.read(&mut room)).await;
                assert_eq!(one.unwrap(), 3);
                let _ = source.poll_drained(&mut Context::from_waker(Waker::noop()));
                let mut resting =
                    std::pin::pin!(source.rest(crate::sleep(Duration::from_millis(20))));
                let mut task = Context::from_waker(Waker::noop());
                assert!(resting.as_mut().poll(&mut task).is_pending());
                crate::sleep(Duration::from_millis(2)).await;
                theirs.write_all(b"another").unwrap();
                crate::sleep(Duration::from_millis(2)).await;
                let meanwhile = std::future::poll_fn(|cx| {
                    let read = source.poll_io(cx, Interest::Read, |_| reader.read(&mut room));
                    Poll::Ready(read.is_ready())
                });
                assert!(!meanwhile.await, "it was notified while it rested");
                resting.await.unwrap();
                let waits = source.io(Interest::Read, |_| reader.read(&mut room));
                let read = crate::timeout(Duration::from_secs(60), waits).await;
                assert_eq!(read.expect("it was not notified").unwrap(), 7);
                let _ = source.poll_drained(&mut Context::from_waker(Waker::noop()));
            }
        });
    }
}
