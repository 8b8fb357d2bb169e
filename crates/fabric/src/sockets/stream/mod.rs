//! Connections over a byte stream: TCP and Unix sockets.
//!
//! One task, the runner, reads and flushes; anybody may send. What is sent on the runner's thread
//! goes out at the end of its event loop's tick, together with all else of that tick. That is one
//! system call and one wake-up of the other end for all of it. What other threads send, and what is
//! large, goes out at once.

mod landing;
mod queue;
mod receive;
mod socket;
mod tick_limit;

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use dray_core::{Buf, Fut, Gid};
use dray_rt::{Interest, Source};

use crate::sockets::frame::Prefix;
use crate::sockets::options::local_peer_groups;
use crate::{Connection, Peer, Progress, Sink, Unfinished};

use queue::Out;
use receive::Receiver;

/// A connected stream socket that carries frames.
pub struct StreamConnection {
    source: Source,
    peer: Peer,
    out: Mutex<Out>,
    /// Length of `out.queue` without notices, to be read without the lock.
    queued: AtomicUsize,
    incoming: Incoming,
}

/// What the task in `run` lets others know of the frame that it is receiving.
#[derive(Default)]
struct Incoming {
    partly: AtomicBool,
    frame: AtomicU64,
    bytes: AtomicU64,
}

impl StreamConnection {
    /// Takes over a connected socket in non-blocking mode, on this thread's executor.
    pub fn new(socket: OwnedFd, peer: Peer) -> io::Result<StreamConnection> {
        let (source, out, incoming) = (Source::new(socket)?, Mutex::default(), Incoming::default());
        Ok(StreamConnection { source, peer, out, queued: AtomicUsize::new(0), incoming })
    }

    #[cfg(test)]
    pub(crate) fn socket(&self) -> &Source {
        &self.source
    }

    fn out(&self) -> MutexGuard<'_, Out> {
        self.out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What waits for the other end counts as queued, not what waits for the tick's end.
    fn note_backlog(&self, out: &Out) {
        let backlog = if out.full { out.queue.len() - out.notices } else { 0 };
        self.queued.store(backlog, Ordering::Relaxed);
    }

    fn fd(&self) -> RawFd {
        self.source.as_fd().as_raw_fd()
    }

    /// Writes what is queued; ready when nothing is left. `running`: the runner goes on, and
    /// calls this again before it rests.
    fn poll_flush(&self, cx: &mut Context<'_>, running: bool) -> Poll<io::Result<()>> {
        let mut out = self.out();
        if out.closed {
            return Poll::Ready(Err(closed()));
        }
        out.running = running;
        match &mut out.runner {
            Some(runner) => runner.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        out.full = false;
        while !out.queue.is_empty() {
            let Poll::Ready(written) = self.source.poll_io(cx, Interest::Write, |fd| out.write(fd))
            else {
                out.full = true;
                self.note_backlog(&out);
                return Poll::Pending;
            };
            out.wrote(written?);
        }
        self.note_backlog(&out);
        Poll::Ready(Ok(()))
    }

    /// Sends what `push` puts into the queue. Errors: those of `push`; the connection is closed.
    fn try_send(&self, push: impl FnOnce(&mut Out) -> io::Result<()>) -> io::Result<()> {
        let mut out = self.out();
        if out.closed {
            return Err(closed());
        }
        push(&mut out)?;
        let waits = out.may_wait() && self.source.is_here();
        if out.full || waits && out.running {
            self.note_backlog(&out);
            return Ok(()); // the runner sees to it
        }
        let runner = match waits {
            true => out.runner.take(),
            false => None,
        };
        if let Some(runner) = runner {
            out.running = true; // queued behind the tasks that are ready now, it flushes them all
            drop(out);
            runner.wake();
            return Ok(());
        }
        let flushed = out.flush(self.fd());
        self.note_backlog(&out);
        flushed?;
        // The runner waits for the socket; it has to look at the queue to want to write.
        let runner = if out.full && !out.running { out.runner.take() } else { None };
        drop(out);
        runner.into_iter().for_each(Waker::wake);
        Ok(())
    }
}

impl Incoming {
    fn note(&self, receiver: &Receiver) {
        self.partly.store(receiver.is_within_a_frame(), Ordering::Relaxed);
        self.frame.store(receiver.frames, Ordering::Relaxed);
        self.bytes.store(receiver.bytes, Ordering::Relaxed);
    }
}

fn closed() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOTCONN)
}

impl Connection for StreamConnection {
    fn send(&self, head: &[u8], data: Option<Buf>) -> io::Result<()> {
        let prefix = Prefix::of(head, data.as_ref().map_or(0, Buf::len))?;
        self.try_send(|out| {
            out.push(prefix, head, data);
            Ok(())
        })
    }

    fn notify(&self, head: &[u8]) -> io::Result<()> {
        let prefix = Prefix::of(head, 0)?;
        self.try_send(|out| match out.push_notice(prefix, head) {
            true => Ok(()),
            false => Err(io::ErrorKind::WouldBlock.into()),
        })
    }

    fn run<'a>(&'a self, sink: &'a mut dyn Sink) -> Fut<'a, io::Error> {
        let mut receiver = Receiver::new(self.peer);
        Box::pin(std::future::poll_fn(move |cx| {
            let flushed = self.poll_flush(cx, true);
            let mut ended = flushed.map(Result::err);
            if !matches!(ended, Poll::Ready(Some(_))) {
                ended = receiver.poll(cx, &self.source, sink).map(Some);
                self.incoming.note(&receiver);
            }
            if !matches!(ended, Poll::Ready(Some(_))) {
                ended = self.poll_flush(cx, false).map(Result::err);
            }
            match ended {
                Poll::Ready(Some(error)) => {
                    self.close(); // senders get their memory back, even if others hold the connection
                    Poll::Ready(error)
                }
                _ => Poll::Pending,
            }
        }))
    }

    fn let_go(&self, data: &Buf) {
        self.out().let_go(data);
    }

    fn flush(&self) {
        let _ = self.out().flush(self.fd()); // a broken connection shows by itself
    }

    fn close(&self) {
        let mut out = self.out();
        if !out.closed {
            let _ = out.flush(self.fd()); // a last word, such as a refusal, may wait
        }
        out.closed = true;
        out.full = false; // nothing waits for the other end
        out.queue.clear();
        out.notices = 0;
        out.queued_bytes = 0;
        self.queued.store(0, Ordering::Relaxed);
        let runner = out.runner.take();
        drop(out);
        // SAFETY: no memory is passed; the descriptor is ours and open.
        unsafe { libc::shutdown(self.fd(), libc::SHUT_RDWR) };
        runner.into_iter().for_each(Waker::wake);
    }

    fn queued_frames(&self) -> usize {
        self.queued.load(Ordering::Relaxed)
    }

    fn unfinished(&self) -> Unfinished {
        let incoming = &self.incoming;
        let partly = incoming.partly.load(Ordering::Relaxed);
        let incoming = Progress {
            frame: incoming.frame.load(Ordering::Relaxed),
            bytes: incoming.bytes.load(Ordering::Relaxed),
        };
        let out = self.out();
        let outgoing = Progress { frame: out.sent_frames, bytes: out.sent_bytes };
        Unfinished { incoming: partly.then_some(incoming), outgoing: out.full.then_some(outgoing) }
    }

    fn peer(&self) -> Peer {
        self.peer
    }

    fn peer_groups(&self) -> Vec<Gid> {
        match self.peer {
            Peer::User(..) => local_peer_groups(&self.source).unwrap_or_default(),
            _ => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests;
