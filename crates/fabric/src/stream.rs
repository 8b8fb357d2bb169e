//! Connections over a byte stream: TCP and Unix sockets.
//!
//! One task, the runner, reads and flushes; anybody may send. What is sent on the runner's
//! thread goes out at the end of its executor's turn, together with whatever else was sent
//! in that turn: one system call and one wake-up of the other end for all of it. What other
//! threads send, and what is large, goes out at once.

use std::collections::VecDeque;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use dray_core::{Buf, BufMut, Fut};
use dray_rt::{Interest, Source};

use crate::frame::{PREFIX_BYTES, Prefix};
use crate::{Connection, Peer, Progress, Sink, Unfinished};

/// Bytes read ahead of knowing what they are.
const SCRATCH_BYTES: usize = 64 << 10;
/// The same while large data is expected: what lies behind a head should land in its
/// own memory and not be copied there.
const SCRATCH_BULK_BYTES: usize = 512;
/// Data from this size on counts as large.
const BULK_BYTES: usize = 32 << 10;
/// While at least this much of a frame's data is missing the kernel is asked to wake us
/// only when a good part of it is there, instead of at every few segments.
const PATIENT_FROM_BYTES: usize = 128 << 10;
/// How much that part is at most.
const PATIENT_FOR_BYTES: usize = 256 << 10;
/// Frames that wait for the end of a turn; with one more all go.
const BATCH_FRAMES: usize = 32;
/// Bytes that wait for the end of a turn; with one more all go.
const BATCH_BYTES: usize = 48 << 10;
/// Memory of heads kept for the next ones: pieces, and bytes of each.
const SPARE_HEADS: usize = 16;
const SPARE_HEAD_BYTES: usize = 1024;
/// Frames handled before other tasks get their turn.
const FRAMES_PER_TURN: usize = 64;

/// A connected stream socket that carries frames.
pub struct StreamConnection {
    source: Source,
    peer: Peer,
    out: Mutex<Out>,
    /// Length of `out.queue`, to be read without the lock.
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

#[derive(Default)]
struct Out {
    queue: VecDeque<Pending>,
    /// Frames that went through the queue, and bytes of theirs.
    sent_frames: u64,
    sent_bytes: u64,
    queued_bytes: usize,
    closed: bool,
    /// The socket takes no more for now; the runner goes on when it does.
    full: bool,
    /// The runner is at work, and flushes before it rests.
    running: bool,
    /// The task in `run`, to be told that something waits for the socket.
    runner: Option<Waker>,
    /// Memory of heads that have gone.
    spare: Vec<Vec<u8>>,
}

/// A frame, or the rest of one that the socket has not taken yet.
struct Pending {
    head: Vec<u8>,
    head_done: usize,
    data: Option<Buf>,
    data_done: usize,
}

impl Pending {
    fn parts(&self) -> [&[u8]; 2] {
        let data = self.data.as_deref().unwrap_or_default();
        [&self.head[self.head_done..], &data[self.data_done..]]
    }

    fn advance(&mut self, bytes: usize) {
        let head = bytes.min(self.head.len() - self.head_done);
        self.head_done += head;
        self.data_done += bytes - head;
    }

    fn left_bytes(&self) -> usize {
        self.parts().iter().map(|part| part.len()).sum()
    }
}

impl Out {
    fn push(&mut self, prefix: &[u8], head: &[u8], data: Option<Buf>) {
        let mut whole = self.spare.pop().unwrap_or_default();
        whole.clear();
        whole.extend_from_slice(prefix);
        whole.extend_from_slice(head);
        let pending = Pending { head: whole, head_done: 0, data, data_done: 0 };
        self.queued_bytes += pending.left_bytes();
        self.queue.push_back(pending);
    }

    /// Whether what is queued may wait for the end of a turn.
    fn may_wait(&self) -> bool {
        self.queue.len() <= BATCH_FRAMES && self.queued_bytes <= BATCH_BYTES
    }

    /// Hands the socket as much as it takes in one call; bytes taken.
    fn write(&self, fd: RawFd) -> io::Result<usize> {
        let mut parts = [slice(&[]); 2 * BATCH_FRAMES];
        let mut used = 0;
        let frames = self.queue.iter().take(BATCH_FRAMES);
        for part in frames.flat_map(Pending::parts).filter(|part| !part.is_empty()) {
            parts[used] = slice(part);
            used += 1;
        }
        send_parts(fd, &mut parts[..used])
    }

    /// The socket has taken that many bytes.
    fn wrote(&mut self, mut bytes: usize) {
        self.queued_bytes -= bytes;
        self.sent_bytes += bytes as u64;
        while let Some(first) = self.queue.front_mut() {
            let left = first.left_bytes();
            if bytes < left {
                first.advance(bytes);
                return;
            }
            bytes -= left;
            let gone = self.queue.pop_front().expect("looked at above");
            self.sent_frames += 1;
            if self.spare.len() < SPARE_HEADS && gone.head.capacity() <= SPARE_HEAD_BYTES {
                self.spare.push(gone.head);
            }
        }
    }

    /// Hands the socket what it takes now.
    fn flush(&mut self, fd: RawFd) -> io::Result<()> {
        while !self.queue.is_empty() && !self.full {
            match self.write(fd) {
                Ok(written) => self.wrote(written),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.full = true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
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
        let backlog = if out.full { out.queue.len() } else { 0 };
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

    fn try_send(&self, head: &[u8], data: Option<Buf>) -> io::Result<()> {
        let prefix = Prefix::of(head, data.as_deref().map_or(0, <[u8]>::len))?.encode();
        let mut out = self.out();
        if out.closed {
            return Err(closed());
        }
        out.push(&prefix, head, data);
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
        self.try_send(head, data)
    }

    fn run<'a>(&'a self, sink: &'a mut dyn Sink) -> Fut<'a, io::Error> {
        let mut receiver = Receiver::default();
        Box::pin(std::future::poll_fn(move |cx| {
            if let Poll::Ready(Err(error)) = self.poll_flush(cx, true) {
                return Poll::Ready(error);
            }
            let ended = receiver.poll(cx, &self.source, sink);
            self.incoming.note(&receiver);
            if let Poll::Ready(error) = ended {
                self.close();
                return Poll::Ready(error);
            }
            match self.poll_flush(cx, false) {
                Poll::Ready(Err(error)) => Poll::Ready(error),
                _ => Poll::Pending,
            }
        }))
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

/// Takes frames off the stream.
#[derive(Default)]
struct Receiver {
    /// The beginning of a frame that has not arrived whole. Empty while idle, so that
    /// an idle connection costs no buffer.
    rest: Vec<u8>,
    state: State,
    bulk: bool,
    /// The socket's low-water mark, bytes.
    low_water_bytes: usize,
    /// Frames and bytes received so far.
    frames: u64,
    bytes: u64,
}

#[derive(Default)]
enum State {
    #[default]
    Head,
    /// The head is there; memory for the data is awaited.
    Place { head: Vec<u8>, data_bytes: usize },
    /// Data are landing.
    Data { head: Vec<u8>, data_bytes: usize, into: BufMut },
}

thread_local! {
    /// One a thread, not one a connection.
    static SCRATCH: std::cell::RefCell<Vec<u8>> = const { std::cell::RefCell::new(Vec::new()) };
}

impl Receiver {
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        source: &Source,
        sink: &mut dyn Sink,
    ) -> Poll<io::Error> {
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.resize(SCRATCH_BYTES, 0);
            match self.poll_frames(cx, source, sink, scratch) {
                Poll::Ready(Ok(never)) => match never {},
                Poll::Ready(Err(error)) => Poll::Ready(error),
                Poll::Pending => Poll::Pending,
            }
        })
    }

    fn poll_frames(
        &mut self,
        cx: &mut Context<'_>,
        source: &Source,
        sink: &mut dyn Sink,
        scratch: &mut [u8],
    ) -> Poll<io::Result<std::convert::Infallible>> {
        for _ in 0..FRAMES_PER_TURN {
            if self.poll_placed(cx, sink)?.is_pending() {
                return Poll::Pending;
            }
            self.adjust_low_water(source);
            let limit = if self.bulk { SCRATCH_BULK_BYTES } else { SCRATCH_BYTES };
            let scratch = &mut scratch[..limit];
            let read = match &mut self.state {
                State::Data { data_bytes, into, .. } => {
                    let missing = *data_bytes - into.len();
                    let target = &mut into.spare()[..missing];
                    let read = source.poll_io(cx, Interest::Read, |fd| read2(fd, target, scratch));
                    let Poll::Ready(read) = read? else { return Poll::Pending };
                    // SAFETY: the kernel has filled that much of it.
                    unsafe { into.advance(read.min(missing)) };
                    self.bytes += read as u64;
                    if read < missing + scratch.len() {
                        source.drained();
                    }
                    if read == 0 {
                        return Poll::Ready(Err(end_of_stream()));
                    }
                    read.saturating_sub(missing)
                }
                _ => {
                    let read = source.poll_io(cx, Interest::Read, |fd| read2(fd, &mut [], scratch));
                    let Poll::Ready(read) = read? else { return Poll::Pending };
                    if read < scratch.len() {
                        source.drained();
                    }
                    if read == 0 {
                        return Poll::Ready(Err(end_of_stream()));
                    }
                    self.bytes += read as u64;
                    read
                }
            };
            self.take(cx, sink, &scratch[..read])?;
        }
        cx.waker().wake_by_ref(); // more may be there: after the others' turn
        Poll::Pending
    }

    /// Some of a frame is here, and the rest is the other end's to send. Not so while it is
    /// we who have no memory for it.
    fn is_within_a_frame(&self) -> bool {
        match self.state {
            State::Head => !self.rest.is_empty(),
            State::Place { .. } => false,
            State::Data { .. } => true,
        }
    }

    fn adjust_low_water(&mut self, source: &Source) {
        let wanted = match &self.state {
            State::Data { data_bytes, into, .. } => match data_bytes - into.len() {
                missing if missing >= PATIENT_FROM_BYTES => missing.min(PATIENT_FOR_BYTES),
                _ => 1,
            },
            _ => 1,
        };
        if wanted != self.low_water_bytes.max(1) {
            set_low_water(source, wanted);
            self.low_water_bytes = wanted;
        }
    }

    /// Uses up `fresh`, in which at most the beginning of a frame is left over.
    fn take(&mut self, cx: &mut Context<'_>, sink: &mut dyn Sink, fresh: &[u8]) -> io::Result<()> {
        self.deliver_if_whole(sink)?;
        let joined;
        let mut bytes = fresh;
        if !self.rest.is_empty() {
            self.rest.extend_from_slice(fresh);
            joined = std::mem::take(&mut self.rest);
            bytes = &joined;
        }
        while matches!(self.state, State::Head) {
            let Some((prefix, head)) = first_head(bytes)? else { break };
            let head_end = PREFIX_BYTES + prefix.head_bytes;
            bytes = &bytes[head_end..];
            self.bulk = prefix.data_bytes >= BULK_BYTES;
            self.frames += 1;
            if prefix.data_bytes == 0 {
                sink.frame(head, None)?;
                continue;
            }
            match sink.poll_place(cx, head, prefix.data_bytes) {
                Poll::Ready(into) => {
                    let mut into = into?;
                    let here = bytes.len().min(prefix.data_bytes);
                    into.put(&bytes[..here]);
                    bytes = &bytes[here..];
                    if here == prefix.data_bytes {
                        sink.frame(head, Some(into))?;
                    } else {
                        let head = head.to_vec();
                        self.state = State::Data { head, data_bytes: prefix.data_bytes, into };
                    }
                }
                Poll::Pending => {
                    let head = head.to_vec();
                    self.state = State::Place { head, data_bytes: prefix.data_bytes };
                }
            }
        }
        self.rest = bytes.to_vec(); // no allocation when nothing is left
        Ok(())
    }

    /// Goes on where memory was missing. Pending: it still is.
    fn poll_placed(&mut self, cx: &mut Context<'_>, sink: &mut dyn Sink) -> Poll<io::Result<()>> {
        while let State::Place { head, data_bytes } = &mut self.state {
            let Poll::Ready(into) = sink.poll_place(cx, head, *data_bytes) else {
                return Poll::Pending;
            };
            let (head, data_bytes) = (std::mem::take(head), *data_bytes);
            self.state = State::Data { head, data_bytes, into: into? };
            // What had been read behind the head comes first.
            let rest = std::mem::take(&mut self.rest);
            if let State::Data { into, .. } = &mut self.state {
                let here = rest.len().min(data_bytes);
                into.put(&rest[..here]);
                self.deliver_if_whole(sink)?;
                self.take(cx, sink, &rest[here..])?;
            }
        }
        Poll::Ready(Ok(()))
    }

    fn deliver_if_whole(&mut self, sink: &mut dyn Sink) -> io::Result<()> {
        match std::mem::take(&mut self.state) {
            State::Data { head, data_bytes, into } if into.len() == data_bytes => {
                sink.frame(&head, Some(into))
            }
            state => {
                self.state = state;
                Ok(())
            }
        }
    }
}

/// The sizes and head of the first frame in `bytes`, if its head is whole.
fn first_head(bytes: &[u8]) -> io::Result<Option<(Prefix, &[u8])>> {
    let Some(prefix) = bytes.first_chunk::<PREFIX_BYTES>() else { return Ok(None) };
    let prefix = Prefix::decode(prefix)?;
    Ok(bytes.get(PREFIX_BYTES..PREFIX_BYTES + prefix.head_bytes).map(|head| (prefix, head)))
}

fn end_of_stream() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the other end closed the connection")
}

/// Sets from how many bytes on the socket counts as readable.
fn set_low_water(source: &Source, bytes: usize) {
    let value = bytes as libc::c_int;
    // SAFETY: the option's value is read from `value` during the call. A socket that does
    // not know the option (Unix) is readable from the first byte on, which is right too.
    unsafe {
        libc::setsockopt(
            source.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVLOWAT,
            (&raw const value).cast(),
            std::mem::size_of_val(&value) as libc::socklen_t,
        )
    };
}

fn slice(bytes: &[u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_ptr() as *mut _, iov_len: bytes.len() }
}

fn send_parts(fd: RawFd, parts: &mut [libc::iovec]) -> io::Result<usize> {
    // SAFETY: an all-zero msghdr is a valid, empty one.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len();
    // SAFETY: the parts describe slices that outlive the call, and are only read.
    let sent = unsafe { libc::sendmsg(fd, &message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Reads into `target` and, behind it, into `scratch`.
fn read2(fd: RawFd, target: &mut [MaybeUninit<u8>], scratch: &mut [u8]) -> io::Result<usize> {
    let parts = [
        libc::iovec { iov_base: target.as_mut_ptr().cast(), iov_len: target.len() },
        libc::iovec { iov_base: scratch.as_mut_ptr().cast(), iov_len: scratch.len() },
    ];
    let parts = if target.is_empty() { &parts[1..] } else { &parts[..] };
    // SAFETY: the parts describe exclusive slices that outlive the call.
    let read = unsafe { libc::readv(fd, parts.as_ptr(), parts.len() as i32) };
    usize::try_from(read).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use dray_rt::{DriverKind, Executor, spawn, yield_now};

    use super::*;
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
                let prefix = Prefix { head_bytes: 4, data_bytes: data.len() }.encode();
                expected.extend([&prefix[..], &head, &data].concat());
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
