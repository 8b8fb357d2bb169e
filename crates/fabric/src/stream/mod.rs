//! Connections over a byte stream: TCP and Unix sockets.
//!
//! One task, the runner, reads and flushes; anybody may send. What is sent on the runner's
//! thread goes out at the end of its executor's turn, together with whatever else was sent
//! in that turn: one system call and one wake-up of the other end for all of it. What other
//! threads send, and what is large, goes out at once.

mod landing;
mod queue;
mod receive;
mod socket;

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use dray_core::{Buf, Fut};
use dray_rt::{Interest, Source};

use crate::frame::Prefix;
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

    /// What waits for the other end counts as queued, not what waits for the turn's end.
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
                    self.close(); // senders have their memory back, whoever holds us
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
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use dray_core::BufMut;
    use dray_rt::{DriverKind, Executor, spawn, yield_now};

    use super::queue::BATCH_BYTES;
    use super::*;
    use crate::NOTICES_MAX;
    use crate::frame::HEAD_MAX_BYTES;

    /// Refuses whatever comes, with a last word.
    struct Refusing(Arc<StreamConnection>);

    impl Sink for Refusing {
        fn poll_place(
            &mut self,
            _: &mut Context<'_>,
            _: &[u8],
            bytes: usize,
        ) -> Poll<io::Result<BufMut>> {
            Poll::Ready(Ok(BufMut::heap(bytes)))
        }

        fn frame(&mut self, _: &[u8], _: Option<BufMut>) -> io::Result<()> {
            self.0.send(b"refused", None)?;
            Err(io::ErrorKind::PermissionDenied.into())
        }
    }

    fn pair() -> (Arc<StreamConnection>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.set_nonblocking(true).unwrap();
        (Arc::new(StreamConnection::new(ours.into(), Peer::Local).unwrap()), theirs)
    }

    fn arrived(socket: &mut UnixStream) -> Vec<u8> {
        let mut bytes = vec![0; 4 * HEAD_MAX_BYTES + (1 << 20)];
        let count = socket.read(&mut bytes).unwrap_or(0);
        bytes.truncate(count);
        bytes
    }

    fn frame(head: &[u8]) -> Vec<u8> {
        [&Prefix { head_bytes: head.len(), data_bytes: 0 }.encode()[..], head].concat()
    }

    fn run(connection: &Arc<StreamConnection>) {
        let connection = connection.clone();
        spawn(async move {
            let mut sink = Refusing(connection.clone());
            connection.run(&mut sink).await;
        });
    }

    #[test]
    fn what_is_sent_in_one_turn_goes_out_together_and_in_order() {
        Executor::new(DriverKind::Epoll).unwrap().block_on(async {
            let (connection, mut theirs) = pair();
            connection.send(b"before the runner", None).unwrap();
            assert_eq!(arrived(&mut theirs), frame(b"before the runner"));
            run(&connection);
            yield_now().await;
            connection.send(b"one", None).unwrap();
            connection.send(b"two", None).unwrap();
            assert_eq!(arrived(&mut theirs), b"", "not before the end of the turn");
            yield_now().await;
            assert_eq!(arrived(&mut theirs), [frame(b"one"), frame(b"two")].concat());
        });
    }

    #[test]
    fn what_is_large_or_comes_from_elsewhere_waits_for_nothing() {
        Executor::new(DriverKind::Epoll).unwrap().block_on(async {
            let (connection, mut theirs) = pair();
            run(&connection);
            yield_now().await;
            connection.send(b"waits", None).unwrap();
            connection.send(b"does not", Some(Buf::from(vec![7; BATCH_BYTES]))).unwrap();
            let came = arrived(&mut theirs);
            assert!(came.starts_with(&frame(b"waits")) && came.len() > BATCH_BYTES);
            let other = connection.clone();
            std::thread::spawn(move || other.send(b"elsewhere", None).unwrap()).join().unwrap();
            assert_eq!(arrived(&mut theirs), frame(b"elsewhere"));
            connection.send(b"flushed", None).unwrap();
            connection.flush();
            assert_eq!(arrived(&mut theirs), frame(b"flushed"));
        });
    }

    #[test]
    fn a_last_word_is_heard_before_the_end() {
        Executor::new(DriverKind::Epoll).unwrap().block_on(async {
            let (connection, mut theirs) = pair();
            run(&connection);
            std::io::Write::write_all(&mut theirs, &frame(b"hello")).unwrap();
            while !connection.out().closed {
                dray_rt::sleep(std::time::Duration::from_millis(1)).await;
            }
            assert_eq!(arrived(&mut theirs), frame(b"refused"));
        });
    }

    /// Takes its time for each frame.
    struct Slow(Arc<Mutex<Vec<&'static str>>>);

    impl Sink for Slow {
        fn poll_place(
            &mut self,
            _: &mut Context<'_>,
            _: &[u8],
            bytes: usize,
        ) -> Poll<io::Result<BufMut>> {
            Poll::Ready(Ok(BufMut::heap(bytes)))
        }

        fn frame(&mut self, _: &[u8], _: Option<BufMut>) -> io::Result<()> {
            std::thread::sleep(std::time::Duration::from_millis(2));
            self.0.lock().unwrap().push("frame");
            Ok(())
        }
    }

    /// Whatever had arrived of one connection was worked off before anybody else had a turn.
    #[test]
    fn one_connection_leaves_others_their_turn() {
        const FRAMES: usize = 20;
        Executor::new(DriverKind::Epoll).unwrap().block_on(async {
            let (connection, mut theirs) = pair();
            let events = Arc::new(Mutex::new(Vec::new()));
            let mut sink = Slow(events.clone());
            std::io::Write::write_all(&mut theirs, &frame(b"work").repeat(FRAMES)).unwrap();
            let runner = connection.clone();
            spawn(async move { drop(runner.run(&mut sink).await) });
            let handled = || events.lock().unwrap().iter().filter(|it| **it == "frame").count();
            while handled() < FRAMES {
                yield_now().await;
                events.lock().unwrap().push("other");
            }
            let events = events.lock().unwrap();
            let longest = events.split(|event| *event == "other").map(<[_]>::len).max();
            assert!(longest <= Some(2), "{events:?}");
            drop(theirs);
        });
    }

    /// Memory that tells when nobody has it any more.
    struct Lent(Arc<std::sync::atomic::AtomicBool>);

    impl dray_core::Memory for Lent {}

    impl Drop for Lent {
        fn drop(&mut self) {
            self.0.store(false, Ordering::SeqCst);
        }
    }

    fn lent(bytes: &'static mut [u8]) -> (Buf, Arc<std::sync::atomic::AtomicBool>) {
        let in_use = Arc::new(std::sync::atomic::AtomicBool::new(true));
        let start = std::ptr::NonNull::from(&mut *bytes).cast();
        // SAFETY: the memory lasts for ever, and nobody writes to it.
        (unsafe { Buf::over(start, bytes.len(), Arc::new(Lent(in_use.clone()))) }, in_use)
    }

    /// Of a process that was killed while the other end does not read: what it wrote would
    /// keep it from ending.
    #[test]
    fn what_a_sender_needs_again_is_copied_and_arrives_whole() {
        Executor::new(DriverKind::Epoll).unwrap().block_on(async {
            let (connection, mut theirs) = pair();
            run(&connection);
            yield_now().await;
            const BYTES: usize = 1 << 20;
            let content: Vec<u8> = (0..BYTES as u32).map(|n| (n * 7) as u8).collect();
            let (data, in_use) = lent(content.clone().leak());
            connection.send(b"head", Some(data.clone())).unwrap();
            assert!(connection.queued_frames() > 0, "the socket took all of it");
            let mut came = arrived(&mut theirs); // a part
            yield_now().await;
            connection.let_go(&data);
            drop(data);
            assert!(!in_use.load(Ordering::SeqCst));
            let prefix = Prefix { head_bytes: 4, data_bytes: BYTES };
            while came.len() < prefix.encode().len() + prefix.body_at() + BYTES {
                let more = arrived(&mut theirs);
                if more.is_empty() && connection.queued_frames() == 0 {
                    break;
                }
                came.extend(more);
                dray_rt::sleep(std::time::Duration::from_millis(1)).await;
            }
            assert!(came.ends_with(&content));
        });
    }

    /// Receives into memory of a caller who may give up meanwhile.
    struct GivenUp {
        into: Option<BufMut>,
        awaited: Arc<AtomicBool>,
        runner: Arc<Mutex<Option<Waker>>>,
        /// Bytes of data of each frame.
        came: Arc<Mutex<Vec<usize>>>,
    }

    impl Sink for GivenUp {
        fn poll_place(
            &mut self,
            cx: &mut Context<'_>,
            _: &[u8],
            bytes: usize,
        ) -> Poll<io::Result<BufMut>> {
            *self.runner.lock().unwrap() = Some(cx.waker().clone());
            Poll::Ready(Ok(self.into.take().unwrap_or_else(|| BufMut::heap(bytes))))
        }

        fn is_awaited(&self, _: &[u8]) -> bool {
            self.awaited.load(Ordering::SeqCst)
        }

        fn frame(&mut self, _: &[u8], data: Option<BufMut>) -> io::Result<()> {
            self.came.lock().unwrap().push(data.map_or(0, |data| data.len()));
            Ok(())
        }
    }

    /// Of a process that was killed while the other end has stopped in the middle of its answer: the
    /// memory for that kept it from ending.
    #[test]
    fn what_nobody_waits_for_any_more_goes_nowhere() {
        Executor::new(DriverKind::Epoll).unwrap().block_on(async {
            const BYTES: usize = 100_000;
            let (connection, mut theirs) = pair();
            let in_use = Arc::new(AtomicBool::new(true));
            let memory = std::ptr::NonNull::from(vec![0u8; BYTES].leak()).cast();
            // SAFETY: the memory lasts for ever, and nobody else uses it.
            let into = unsafe { BufMut::over(memory, BYTES, Arc::new(Lent(in_use.clone()))) };
            let (awaited, runner) = (Arc::new(AtomicBool::new(true)), Arc::default());
            let came = Arc::new(Mutex::new(Vec::new()));
            let mut sink = GivenUp {
                into: Some(into),
                awaited: awaited.clone(),
                runner: Arc::clone(&runner),
                came: came.clone(),
            };
            let running = connection.clone();
            spawn(async move { drop(running.run(&mut sink).await) });
            let prefix = Prefix { head_bytes: 4, data_bytes: BYTES };
            let mut frame = [&prefix.encode()[..], b"head"].concat();
            frame.resize(prefix.body_at() + BYTES, 7);
            let (begin, rest) = frame.split_at(BYTES / 2);
            std::io::Write::write_all(&mut theirs, begin).unwrap();
            while runner.lock().unwrap().is_none() {
                dray_rt::sleep(std::time::Duration::from_millis(1)).await;
            }
            yield_now().await;
            assert!(in_use.load(Ordering::SeqCst), "somebody waits for it");
            awaited.store(false, Ordering::SeqCst);
            runner.lock().unwrap().take().unwrap().wake();
            yield_now().await;
            assert!(!in_use.load(Ordering::SeqCst));
            std::io::Write::write_all(&mut theirs, rest).unwrap();
            std::io::Write::write_all(&mut theirs, &self::frame(b"next")).unwrap();
            while came.lock().unwrap().len() < 2 {
                dray_rt::sleep(std::time::Duration::from_millis(1)).await;
            }
            assert_eq!(*came.lock().unwrap(), [BYTES, 0]);
        });
    }

    /// A front end answers a write once nobody has its data any more.
    #[test]
    fn a_broken_connection_holds_nothing_that_was_sent_on_it() {
        Executor::new(DriverKind::Epoll).unwrap().block_on(async {
            let (connection, theirs) = pair();
            let mut sink = Refusing(connection.clone());
            let (data, in_use) = lent(vec![7; 1 << 20].leak());
            connection.send(b"head", Some(data)).unwrap();
            assert!(in_use.load(Ordering::SeqCst));
            drop(theirs);
            connection.run(&mut sink).await;
            assert!(!in_use.load(Ordering::SeqCst));
        });
    }

    /// Who did not read what it was told had the sender keep all of it.
    #[test]
    fn notices_that_wait_are_bounded_and_do_not_count_as_queued() {
        Executor::new(DriverKind::Epoll).unwrap().block_on(async {
            let (connection, mut theirs) = pair();
            run(&connection);
            yield_now().await;
            connection.send(b"head", Some(Buf::from(vec![7; 1 << 20]))).unwrap();
            assert_eq!(connection.queued_frames(), 1);
            for _ in 0..NOTICES_MAX {
                connection.notify(b"notice").unwrap();
            }
            let refused = connection.notify(b"notice").unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
            connection.send(b"last", None).unwrap();
            assert_eq!(connection.queued_frames(), 2);
            let mut came = Vec::new();
            while !came.ends_with(b"last") {
                came.extend(arrived(&mut theirs));
                dray_rt::sleep(std::time::Duration::from_millis(1)).await;
            }
            connection.notify(b"notice").unwrap();
        });
    }

    /// A slow reader gets everything, once it reads.
    #[test]
    fn what_the_socket_does_not_take_goes_when_it_does() {
        Executor::new(DriverKind::Epoll).unwrap().block_on(async {
            let (connection, mut theirs) = pair();
            run(&connection);
            yield_now().await;
            let mut expected = Vec::new();
            for number in 0u32..40 {
                let data = vec![number as u8; 60_000];
                let head = number.to_le_bytes();
                connection.send(&head, Some(Buf::from(data.clone()))).unwrap();
                let prefix = Prefix { head_bytes: 4, data_bytes: data.len() };
                let mut front = [&prefix.encode()[..], &head].concat();
                front.resize(prefix.body_at(), 0);
                expected.extend([front, data].concat());
            }
            assert!(connection.queued_frames() > 0, "the socket took all of it");
            let mut came = Vec::new();
            while came.len() < expected.len() {
                came.extend(arrived(&mut theirs));
                dray_rt::sleep(std::time::Duration::from_millis(1)).await;
            }
            assert!(came == expected);
            assert_eq!(connection.queued_frames(), 0);
        });
    }
}
