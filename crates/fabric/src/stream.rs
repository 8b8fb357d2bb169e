//! Connections over a byte stream: TCP and Unix sockets.
//!
//! One task reads and flushes; anybody may send. A send writes to the socket at once,
//! on the sender's thread, so that a request costs no switch of tasks on its way out.

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
    closed: bool,
    /// The task in `run`, to be told that something waits for the socket.
    runner: Option<Waker>,
}

/// The rest of a frame that the socket has not taken yet.
struct Pending {
    head: Vec<u8>,
    head_done: usize,
    data: Option<Buf>,
    data_done: usize,
}

impl Pending {
    fn parts(&self) -> (&[u8], &[u8]) {
        let data = self.data.as_deref().unwrap_or_default();
        (&self.head[self.head_done..], &data[self.data_done..])
    }

    fn advance(&mut self, bytes: usize) {
        let head = bytes.min(self.head.len() - self.head_done);
        self.head_done += head;
        self.data_done += bytes - head;
    }

    fn left_bytes(&self) -> usize {
        let (head, data) = self.parts();
        head.len() + data.len()
    }
}

impl StreamConnection {
    /// Takes over a connected socket in non-blocking mode, on this thread's executor.
    pub fn new(socket: OwnedFd, peer: Peer) -> io::Result<StreamConnection> {
        let (source, out, incoming) = (Source::new(socket)?, Mutex::default(), Incoming::default());
        Ok(StreamConnection { source, peer, out, queued: AtomicUsize::new(0), incoming })
    }

    fn out(&self) -> MutexGuard<'_, Out> {
        self.out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes what is queued; ready when nothing is left.
    fn poll_flush(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut out = self.out();
        if out.closed {
            return Poll::Ready(Err(closed()));
        }
        match &mut out.runner {
            Some(runner) => runner.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        while let Some(first) = out.queue.front() {
            let (head, data) = first.parts();
            let written = self.source.poll_io(cx, Interest::Write, |fd| write2(fd, [head, data]));
            let Poll::Ready(written) = written? else { return Poll::Pending };
            out.sent_bytes += written as u64;
            let first = out.queue.front_mut().expect("looked at above");
            first.advance(written);
            if first.left_bytes() == 0 {
                out.queue.pop_front();
                out.sent_frames += 1;
                self.queued.store(out.queue.len(), Ordering::Relaxed);
            }
        }
        Poll::Ready(Ok(()))
    }

    fn try_send(&self, head: &[u8], data: Option<Buf>) -> io::Result<()> {
        let prefix = Prefix::of(head, data.as_deref().map_or(0, <[u8]>::len))?.encode();
        let bytes = data.as_deref().unwrap_or_default();
        let total = PREFIX_BYTES + head.len() + bytes.len();
        let mut out = self.out();
        if out.closed {
            return Err(closed());
        }
        let mut written = 0;
        if out.queue.is_empty() {
            written = match write2_prefixed(self.source.as_fd().as_raw_fd(), &prefix, head, bytes) {
                Ok(written) => written,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
                Err(error) => return Err(error),
            };
        }
        if written == total {
            return Ok(());
        }
        let mut pending =
            Pending { head: [&prefix[..], head].concat(), head_done: 0, data, data_done: 0 };
        pending.advance(written);
        out.queue.push_back(pending);
        self.queued.store(out.queue.len(), Ordering::Relaxed);
        // The runner waits for the socket; it has to look at the queue to want to write.
        let runner = out.runner.take();
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
            if let Poll::Ready(Err(error)) = self.poll_flush(cx) {
                return Poll::Ready(error);
            }
            let ended = receiver.poll(cx, &self.source, sink);
            self.incoming.note(&receiver);
            if ended.is_ready() {
                self.close();
            }
            ended
        }))
    }

    fn close(&self) {
        let mut out = self.out();
        out.closed = true;
        out.queue.clear();
        self.queued.store(0, Ordering::Relaxed);
        let runner = out.runner.take();
        drop(out);
        // SAFETY: no memory is passed; the descriptor is ours and open.
        unsafe { libc::shutdown(self.source.as_fd().as_raw_fd(), libc::SHUT_RDWR) };
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
        Unfinished {
            incoming: partly.then_some(incoming),
            outgoing: (!out.queue.is_empty()).then_some(outgoing),
        }
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

fn write2(fd: RawFd, parts: [&[u8]; 2]) -> io::Result<usize> {
    send_parts(fd, &mut parts.map(slice))
}

fn write2_prefixed(fd: RawFd, prefix: &[u8], head: &[u8], data: &[u8]) -> io::Result<usize> {
    send_parts(fd, &mut [slice(prefix), slice(head), slice(data)])
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
