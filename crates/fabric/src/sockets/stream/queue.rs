//! Frames that go out: those that wait, and how many of them one system call takes.

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::task::Waker;

use dray_core::Buf;

use super::socket::{send_parts, slice};
use crate::NOTICES_MAX;
use crate::sockets::frame::Prefix;

/// Frames that wait for the end of a tick; with one more all go.
const BATCH_FRAMES: usize = 32;
/// Bytes that wait for the end of a tick; with one more all go.
pub(super) const BATCH_BYTES: usize = 48 << 10;
/// Memory of heads kept for the next ones: pieces, and bytes of each.
const SPARE_HEADS: usize = 16;
const SPARE_HEAD_BYTES: usize = 1024;

#[derive(Default)]
pub(super) struct Out {
    pub(super) queue: VecDeque<Pending>,
    /// Of these, notices.
    pub(super) notices: usize,
    /// Frames that went through the queue, and bytes of theirs.
    pub(super) sent_frames: u64,
    pub(super) sent_bytes: u64,
    pub(super) queued_bytes: usize,
    pub(super) closed: bool,
    /// The socket takes no more for now; the runner goes on when it does.
    pub(super) full: bool,
    /// The runner is at work, and flushes before it rests.
    pub(super) running: bool,
    /// The task in `run`, to be woken when something waits for the socket.
    pub(super) runner: Option<Waker>,
    /// Memory of heads that have gone.
    spare: Vec<Vec<u8>>,
}

/// A frame, or the rest of one that the socket has not taken yet.
pub(super) struct Pending {
    head: Vec<u8>,
    head_done: usize,
    data: Option<Buf>,
    data_done: usize,
    is_notice: bool,
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
    pub(super) fn push(&mut self, prefix: Prefix, head: &[u8], data: Option<Buf>) {
        let mut whole = self.spare.pop().unwrap_or_default();
        whole.clear();
        whole.extend_from_slice(&prefix.encode());
        whole.extend_from_slice(head);
        whole.resize(prefix.body_at(), 0);
        let pending = Pending { head: whole, head_done: 0, data, data_done: 0, is_notice: false };
        self.queued_bytes += pending.left_bytes();
        self.queue.push_back(pending);
    }

    /// As [`Out::push`]; false if too many wait already.
    pub(super) fn push_notice(&mut self, prefix: Prefix, head: &[u8]) -> bool {
        if self.notices >= NOTICES_MAX {
            return false;
        }
        self.push(prefix, head, None);
        self.notices += 1;
        self.queue.back_mut().expect("just pushed").is_notice = true;
        true
    }

    /// Holds `data` no longer.
    pub(super) fn let_go(&mut self, data: &Buf) {
        for frame in &mut self.queue {
            let same = |held: &&Buf| std::ptr::eq(held.as_ptr(), data.as_ptr());
            if let Some(held) = frame.data.as_ref().filter(same) {
                frame.data = Some(Buf::from(&held[frame.data_done..]));
                frame.data_done = 0;
            }
        }
    }

    /// Whether what is queued may wait for the end of a tick.
    pub(super) fn may_wait(&self) -> bool {
        self.queue.len() <= BATCH_FRAMES && self.queued_bytes <= BATCH_BYTES
    }

    /// Hands the socket as much as it takes in one call; bytes taken.
    pub(super) fn write(&self, fd: RawFd) -> io::Result<usize> {
        match self.queue.len() {
            1 => self.write_frames::<1, 2>(fd), // nearly always: a small list
            _ => self.write_frames::<BATCH_FRAMES, { 2 * BATCH_FRAMES }>(fd),
        }
    }

    /// As [`Out::write`], the parts of `FRAMES` frames at most, twice as many.
    fn write_frames<const FRAMES: usize, const PARTS: usize>(
        &self,
        fd: RawFd,
    ) -> io::Result<usize> {
        let mut parts = [slice(&[]); PARTS];
        let mut used = 0;
        for frame in self.queue.iter().take(FRAMES) {
            for part in frame.parts().into_iter().filter(|part| !part.is_empty()) {
                parts[used] = slice(part);
                used += 1;
            }
        }
        send_parts(fd, &mut parts[..used])
    }

    /// The socket has taken that many bytes.
    pub(super) fn wrote(&mut self, mut bytes: usize) {
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
            self.notices -= usize::from(gone.is_notice);
            if self.spare.len() < SPARE_HEADS && gone.head.capacity() <= SPARE_HEAD_BYTES {
                self.spare.push(gone.head);
            }
        }
    }

    /// Hands the socket what it takes now.
    pub(super) fn flush(&mut self, fd: RawFd) -> io::Result<()> {
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
