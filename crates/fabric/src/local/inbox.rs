//! What is on its way to one end of a connection.

use std::collections::VecDeque;
use std::io;
use std::task::Waker;

use dray_core::Buf;

use crate::NOTICES_MAX;

/// Heads whose memory is kept for the next ones: pieces, and bytes of each.
const SPARE_HEADS: usize = 16;
const SPARE_HEAD_BYTES: usize = 1024;
/// Of a connection that its sender ends so much still arrives, bytes: as with sockets, whose
/// buffers in the kernel outlive their sender.
const LAST_WORDS_BYTES: usize = 256 << 10;

/// A frame that has been sent.
pub(super) struct Frame {
    pub(super) head: Vec<u8>,
    pub(super) data: Option<Buf>,
    is_notice: bool,
}

impl Frame {
    fn bytes(&self) -> usize {
        self.head.len() + self.data.as_ref().map_or(0, Buf::len)
    }

    /// Holds nobody's memory but its own.
    fn copy_data(&mut self) {
        self.data = self.data.take().map(|data| Buf::from(&data[..]));
    }
}

/// Frames for one end, in their order.
#[derive(Default)]
pub(super) struct FrameInbox {
    frames: VecDeque<Frame>,
    /// Of these, notices.
    notices: usize,
    /// Frames and bytes that the receiver has taken.
    taken_frames: u64,
    taken_bytes: u64,
    /// The receiver looks at a frame that may come back ([`FrameInbox::give_back`]).
    is_lent: bool,
    /// The sender needs the memory of that frame's data.
    is_recalled: bool,
    /// The sender has ended the connection: what is here is received, and then the end.
    cut: bool,
    /// The receiver has ended it.
    over: bool,
    /// The waker of the task that waits for a frame, or for the end.
    pub(super) waker: Option<Waker>,
    /// Memory of heads that have been received.
    spare: Vec<Vec<u8>>,
}

/// What the receiver finds.
pub(super) enum InboxItem {
    Frame(Frame),
    Nothing,
    /// The receiver has ended the connection itself.
    Over,
    /// The other end has ended the connection.
    Cut,
}

impl FrameInbox {
    /// Puts a frame on its way. Errors: `WouldBlock` for one notice too many, and those of a
    /// connection that has ended.
    pub(super) fn put(
        &mut self,
        head: &[u8],
        data: Option<Buf>,
        is_notice: bool,
    ) -> io::Result<()> {
        if self.cut {
            return Err(io::Error::from_raw_os_error(libc::ENOTCONN));
        }
        if self.over {
            return Err(io::Error::from_raw_os_error(libc::EPIPE));
        }
        if is_notice && self.notices >= NOTICES_MAX {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut memory = self.spare.pop().unwrap_or_default();
        memory.clear();
        memory.extend_from_slice(head);
        self.notices += usize::from(is_notice);
        let data = data.filter(|data| !data.is_empty());
        self.frames.push_back(Frame { head: memory, data, is_notice });
        Ok(())
    }

    /// The next frame, for its receiver to look at: then it is taken or comes back.
    pub(super) fn lend(&mut self) -> InboxItem {
        if self.over {
            return InboxItem::Over;
        }
        match self.frames.pop_front() {
            Some(frame) => {
                self.notices -= usize::from(frame.is_notice);
                self.is_lent = true;
                InboxItem::Frame(frame)
            }
            None if self.cut => InboxItem::Cut,
            None => InboxItem::Nothing,
        }
    }

    /// The receiver has no memory for it now.
    pub(super) fn give_back(&mut self, mut frame: Frame) {
        self.is_lent = false;
        if std::mem::take(&mut self.is_recalled) || self.cut {
            frame.copy_data();
        }
        if !self.over {
            self.notices += usize::from(frame.is_notice);
            self.frames.push_front(frame);
        }
    }

    /// The receiver has it, and needs its head no longer.
    pub(super) fn take(&mut self, frame: Frame, bytes: usize) {
        (self.is_lent, self.is_recalled) = (false, false);
        self.taken_frames += 1;
        self.taken_bytes += bytes as u64;
        if self.spare.len() < SPARE_HEADS && frame.head.capacity() <= SPARE_HEAD_BYTES {
            self.spare.push(frame.head);
        }
    }

    /// The head of the next frame, and whether there will be none.
    pub(super) fn first_head(&self) -> (Option<&[u8]>, bool) {
        (self.frames.front().map(|frame| &frame.head[..]), self.cut || self.over)
    }

    /// The frames' sender needs the memory of `data`: what waits of it is copied.
    pub(super) fn let_go(&mut self, data: &Buf) {
        self.is_recalled |= self.is_lent;
        let same = |held: &Buf| std::ptr::eq(held.as_ptr(), data.as_ptr());
        let held = self.frames.iter_mut().filter(|frame| frame.data.as_ref().is_some_and(same));
        held.for_each(Frame::copy_data);
    }

    /// The frames' sender ends the connection, and has all of its memory back.
    pub(super) fn cut(&mut self) -> Option<Waker> {
        if !self.over {
            self.cut = true;
            let mut bytes = 0;
            let last = self.frames.iter().take_while(|frame| {
                bytes += frame.bytes();
                bytes <= LAST_WORDS_BYTES
            });
            let last = last.count();
            self.frames.truncate(last);
            self.frames.iter_mut().for_each(Frame::copy_data);
            self.notices = self.frames.iter().filter(|frame| frame.is_notice).count();
        }
        self.waker.take()
    }

    /// The frames' receiver ends the connection.
    pub(super) fn end(&mut self) -> Option<Waker> {
        self.over = true;
        self.frames.clear();
        self.notices = 0;
        self.waker.take()
    }

    /// Frames that wait, without notices.
    pub(super) fn queued(&self) -> usize {
        self.frames.len() - self.notices
    }

    /// How far the receiver is, if something waits for it.
    pub(super) fn progress(&self) -> Option<crate::Progress> {
        let progress = crate::Progress { frame: self.taken_frames, bytes: self.taken_bytes };
        (!self.frames.is_empty()).then_some(progress)
    }
}
