//! Frames that come in: heads found in what the socket has, data landed where they belong.

use std::io;
use std::task::{Context, Poll};

use dray_core::BufMut;
use dray_rt::{Interest, Source};

use super::landing::Landing;
use super::socket::{read2, set_low_water};
use super::tick_limit::TickLimit;
use crate::sockets::frame::{PREFIX_BYTES, Prefix};
use crate::{Peer, Sink};

/// Bytes read ahead of knowing what they are.
const SCRATCH_BYTES: usize = 64 << 10;
/// The same while large data is expected: what lies behind a head should land in its
/// own memory and not be copied there.
const SCRATCH_BULK_BYTES: usize = 512;
/// Data from this size on counts as large.
const BULK_BYTES: usize = 32 << 10;
/// While at least this much of a frame's data is missing the kernel wakes us only when a good part
/// of it is there. Otherwise it would wake us at every few segments.
const PATIENT_FROM_BYTES: usize = 128 << 10;
/// How much that part is at most.
const PATIENT_FOR_BYTES: usize = 256 << 10;
/// Frames that are copied before it is tried again whether data come in large pieces.
const SMALL_PIECES_FOR: u64 = 1000;
/// System calls made before other tasks run.
const READS_PER_ROUND: usize = 64;

/// Takes frames off the stream.
#[derive(Default)]
pub(super) struct Receiver {
    /// The beginning of a frame that has not arrived whole. Empty while idle, so that
    /// an idle connection costs no buffer.
    rest: Vec<u8>,
    /// Whole frames may be in there, for the next tick.
    paused: bool,
    state: State,
    bulk: bool,
    /// The socket's low-water mark, bytes.
    low_water_bytes: usize,
    /// Data may stay in pages from this frame on.
    in_pages_from: u64,
    /// Frames and bytes received so far.
    pub(super) frames: u64,
    pub(super) bytes: u64,
}

#[derive(Default)]
enum State {
    #[default]
    Head,
    /// The head is there; memory for the data, or for the head where there are none, is awaited.
    Place { head: Vec<u8>, data_bytes: usize },
    /// Data are landing.
    Data { head: Vec<u8>, data_bytes: usize, into: Landing },
}

thread_local! {
    /// One scratch buffer a thread, not one a connection.
    static SCRATCH: std::cell::RefCell<Vec<u8>> = const { std::cell::RefCell::new(Vec::new()) };
}

impl Receiver {
    /// Nothing yet. What comes by a Unix socket comes in pieces as small as that socket's buffer.
    /// To move each of them takes more calls than to read them.
    pub(super) fn new(peer: Peer) -> Receiver {
        let in_pages_from = if matches!(peer, Peer::Ip(_)) { 0 } else { u64::MAX };
        Receiver { in_pages_from, ..Receiver::default() }
    }

    pub(super) fn poll(
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
        let limit = &mut TickLimit::default();
        for _ in 0..READS_PER_ROUND {
            if self.poll_placed(cx, sink, limit)?.is_pending() {
                return Poll::Pending;
            }
            if std::mem::take(&mut self.paused) {
                self.take(cx, sink, &[], limit)?;
                if self.paused {
                    break;
                }
                continue;
            }
            self.adjust_low_water(source);
            let most = if self.bulk { SCRATCH_BULK_BYTES } else { SCRATCH_BYTES };
            let scratch = &mut scratch[..most];
            let drained;
            let read = match &mut self.state {
                State::Data { head, data_bytes, into } => {
                    into.let_go_unless(|| sink.is_awaited(head), *data_bytes);
                    let missing = *data_bytes - into.len();
                    let read = into.poll_read(cx, source, missing, scratch)?;
                    let Poll::Ready(read) = read else { return Poll::Pending };
                    self.bytes += read.bytes as u64;
                    if into.in_small_pieces {
                        self.in_pages_from = self.frames + SMALL_PIECES_FOR;
                    }
                    drained = read.drained;
                    if read.bytes == 0 {
                        return Poll::Ready(Err(end_of_stream()));
                    }
                    read.behind
                }
                _ => {
                    let read = source.poll_io(cx, Interest::Read, |fd| read2(fd, &mut [], scratch));
                    let Poll::Ready(read) = read? else { return Poll::Pending };
                    drained = read < scratch.len();
                    if read == 0 {
                        return Poll::Ready(Err(end_of_stream()));
                    }
                    self.bytes += read as u64;
                    read
                }
            };
            self.take(cx, sink, &scratch[..read], limit)?;
            if drained {
                let waits = source.poll_drained(cx).is_pending();
                if waits && !self.paused && !matches!(self.state, State::Place { .. }) {
                    self.adjust_low_water(source);
                    return Poll::Pending; // nearly always, without a look at the clock
                }
            }
            if self.paused || !drained && limit.is_over() {
                break;
            }
        }
        cx.waker().wake_by_ref(); // more may be there: after other tasks have run
        Poll::Pending
    }

    /// Part of a frame is here, and the rest is the other end's to send. This is false while this
    /// end has no memory for the rest.
    pub(super) fn is_within_a_frame(&self) -> bool {
        match self.state {
            State::Head => !self.rest.is_empty() && !self.paused,
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

    /// Uses up `fresh`, in which at most the beginning of a frame is left over; or, where that
    /// takes longer than `limit`, some of it.
    fn take(
        &mut self,
        cx: &mut Context<'_>,
        sink: &mut dyn Sink,
        fresh: &[u8],
        limit: &mut TickLimit,
    ) -> io::Result<()> {
        self.deliver_if_whole(sink)?;
        let joined;
        let mut bytes = fresh;
        if !self.rest.is_empty() {
            self.rest.extend_from_slice(fresh);
            joined = std::mem::take(&mut self.rest);
            bytes = &joined;
        }
        let mut first = true;
        while matches!(self.state, State::Head) {
            let Some((prefix, head)) = first_head(bytes)? else { break };
            if !std::mem::take(&mut first) && limit.is_over() {
                self.paused = true;
                break;
            }
            bytes = &bytes[prefix.body_at()..];
            self.bulk = prefix.data_bytes >= BULK_BYTES;
            self.frames += 1;
            if prefix.data_bytes == 0 {
                match sink.poll_head(cx, head) {
                    Poll::Ready(beside) => sink.frame(head, beside?)?,
                    Poll::Pending => {
                        self.state = State::Place { head: head.to_vec(), data_bytes: 0 };
                    }
                }
                continue;
            }
            match sink.poll_place(cx, head, prefix.data_bytes) {
                Poll::Ready(into) => {
                    let here = bytes.len().min(prefix.data_bytes);
                    let (data, rest) = bytes.split_at(here);
                    bytes = rest;
                    let mut into = into?;
                    if here == prefix.data_bytes {
                        into.put(data);
                        sink.frame(head, Some(into))?;
                    } else {
                        let into = self.landing(sink, head, (into, prefix.data_bytes), data);
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
    fn poll_placed(
        &mut self,
        cx: &mut Context<'_>,
        sink: &mut dyn Sink,
        limit: &mut TickLimit,
    ) -> Poll<io::Result<()>> {
        while let State::Place { head, data_bytes } = &mut self.state {
            if *data_bytes == 0 {
                let Poll::Ready(beside) = sink.poll_head(cx, head) else { return Poll::Pending };
                let (head, rest) = (std::mem::take(head), std::mem::take(&mut self.rest));
                self.state = State::Head;
                sink.frame(&head, beside?)?;
                self.take(cx, sink, &rest, limit)?;
                continue;
            }
            let Poll::Ready(into) = sink.poll_place(cx, head, *data_bytes) else {
                return Poll::Pending;
            };
            let (head, data_bytes) = (std::mem::take(head), *data_bytes);
            // What had been read behind the head comes first.
            let rest = std::mem::take(&mut self.rest);
            let here = rest.len().min(data_bytes);
            let into = self.landing(sink, &head, (into?, data_bytes), &rest[..here]);
            self.state = State::Data { head, data_bytes, into };
            self.deliver_if_whole(sink)?;
            self.take(cx, sink, &rest[here..], limit)?;
        }
        Poll::Ready(Ok(()))
    }

    /// Where data go of which `data` is here.
    fn landing(
        &self,
        sink: &dyn Sink,
        head: &[u8],
        (into, data_bytes): (BufMut, usize),
        data: &[u8],
    ) -> Landing {
        let stays = self.frames >= self.in_pages_from && sink.is_for_a_file(head);
        let mut into = Landing::new(into, data_bytes, stays);
        into.put(data);
        into
    }

    fn deliver_if_whole(&mut self, sink: &mut dyn Sink) -> io::Result<()> {
        match std::mem::take(&mut self.state) {
            State::Data { head, data_bytes, into } if into.len() == data_bytes => {
                sink.frame(&head, Some(into.into_buffer()))
            }
            state => {
                self.state = state;
                Ok(())
            }
        }
    }
}

/// The sizes and head of the first frame in `bytes`, if all in front of its data is there.
fn first_head(bytes: &[u8]) -> io::Result<Option<(Prefix, &[u8])>> {
    let Some(prefix) = bytes.first_chunk::<PREFIX_BYTES>() else { return Ok(None) };
    let prefix = Prefix::decode(prefix)?;
    let front = bytes.get(PREFIX_BYTES..prefix.body_at());
    Ok(front.map(|front| (prefix, &front[..prefix.head_bytes])))
}

fn end_of_stream() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the other end closed the connection")
}
