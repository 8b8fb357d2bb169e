//! An established connection, and who gets what arrives on it: what every provider keeps to.

use std::io;
use std::task::{Context, Poll};
use std::time::Duration;

use dray_core::{Buf, BufMut, Fut, Gid};

use crate::Peer;

/// Longest head: a path, a name and an attribute value of 64 KiB fit.
pub const HEAD_MAX_BYTES: usize = 80 << 10;
/// Most data in one frame: the largest read or write, and a page of directory entries.
pub const DATA_MAX_BYTES: usize = dray_core::IO_MAX_BYTES;
/// Longest head that a server looks at before it decides who serves its connection
/// ([`Incoming::first_head`](crate::Incoming::first_head)).
pub const FIRST_HEAD_MAX_BYTES: usize = 4 << 10;

/// Frames are handled for so long before other tasks run, and before what was answered goes out. One end may ask for a hundred
/// large reads at once, each of which is work for longer. It may also ask for many small changes at once, and waits for
/// answers before it asks for more. So it gets the first ones while the last ones are carried out.
pub(crate) const TICK_MAX: Duration = Duration::from_micros(250);

/// Checks the bounds of a frame to be sent. Errors: `EMSGSIZE`.
pub(crate) fn check_bounds(head: &[u8], data_bytes: usize) -> io::Result<()> {
    match head.is_empty() || head.len() > HEAD_MAX_BYTES || data_bytes > DATA_MAX_BYTES {
        true => Err(io::Error::from_raw_os_error(libc::EMSGSIZE)),
        false => Ok(()),
    }
}

/// Gets what arrives on a connection.
pub trait Sink: Send {
    /// Memory for the `data_bytes` bytes that follow this head, with at least that much room. While
    /// it is pending nothing more is read from the connection, which is how a sender is slowed
    /// down. `cx` is woken when there is memory. An error ends the connection.
    fn poll_place(
        &mut self,
        cx: &mut Context<'_>,
        head: &[u8],
        data_bytes: usize,
    ) -> Poll<io::Result<BufMut>>;

    /// Whether a frame of this head alone may come in now, and what goes with it. That is memory
    /// that it is counted by, as an empty buffer. While it is pending nothing more is read from the
    /// connection, as above.
    fn poll_head(&mut self, cx: &mut Context<'_>, head: &[u8]) -> Poll<io::Result<Option<BufMut>>> {
        let _ = (cx, head);
        Poll::Ready(Ok(None))
    }

    /// Whether somebody waits for the data behind this head, for which [`Sink::poll_place`] gave
    /// memory. Else that memory is let go, and what comes of them goes nowhere. It is asked while
    /// they come; who gives up what is awaited wakes what `cx` was there.
    fn is_awaited(&self, head: &[u8]) -> bool {
        let _ = head;
        true
    }

    /// Whether the data behind this head are for a file of this machine. Where there are many they
    /// may stay in pages of the kernel then ([`dray_core::Pages`]).
    fn is_for_a_file(&self, head: &[u8]) -> bool {
        let _ = head;
        false
    }

    /// A whole frame is there whose data are in memory of this process, which both ends may have
    /// from now on. A sink that has to have them elsewhere copies them. While it is pending nothing
    /// more is received, as above; an error ends the connection.
    fn poll_shared(
        &mut self,
        cx: &mut Context<'_>,
        head: &[u8],
        data: &Buf,
    ) -> Poll<io::Result<()>> {
        self.poll_place(cx, head, data.len()).map(|into| {
            let mut into = into?;
            into.put(data);
            self.frame(head, Some(into))
        })
    }

    /// A whole frame is there, with its data or what [`Sink::poll_head`] gave. An error ends the
    /// connection.
    fn frame(&mut self, head: &[u8], data: Option<BufMut>) -> io::Result<()>;
}

/// Notices that wait for the other end of a connection, which need not read.
pub const NOTICES_MAX: usize = 16;

/// An established connection, which keeps frames whole and in order.
pub trait Connection: Send + Sync + 'static {
    /// Sends a frame: at the end of the event loop's tick if the other end keeps up. Otherwise it
    /// is queued, and `data` is held until it has gone. Errors: the connection is closed, or a
    /// bound on head or data was passed.
    fn send(&self, head: &[u8], data: Option<Buf>) -> io::Result<()>;

    /// As [`Connection::send`], for what answers nothing. It is not counted as queued, and there
    /// are [`NOTICES_MAX`] of them at most that wait for the other end. Errors: as above;
    /// `WouldBlock` if there are as many: it was not sent.
    fn notify(&self, head: &[u8]) -> io::Result<()>;

    /// Does not wait for the end of the tick with what was sent: for a sender whose executor
    /// may have no further tick. A network without ticks has nothing to do.
    fn flush(&self) {}

    /// The sender of `data` needs its memory for something else: what is queued of it is copied.
    /// Costs nothing once all of it has gone. A network that holds no memory of others for
    /// long has nothing to do.
    fn let_go(&self, data: &Buf) {
        let _ = data;
    }

    /// Receives until the connection ends and says why; then nothing is queued any more. To be
    /// called once, by a task of the executor that the connection was made on.
    fn run<'a>(&'a self, sink: &'a mut dyn Sink) -> Fut<'a, io::Error>;

    /// Ends the connection; `run` returns. Frames still queued are lost.
    fn close(&self);

    /// Frames accepted by [`Connection::send`] of which the network has not taken the whole yet.
    fn queued_frames(&self) -> usize;

    /// How far the frames have got that are on their way. One that is where it was some time
    /// ago is one whose other end has stopped reading, or writing.
    fn unfinished(&self) -> Unfinished;

    /// The other end, for people and for allow-lists.
    fn peer(&self) -> Peer;

    /// Supplementary groups of a [`Peer::User`]. None where they are not known.
    fn peer_groups(&self) -> Vec<Gid> {
        Vec::new()
    }
}

/// The frames of a connection that are neither here nor there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unfinished {
    /// The one that is being received.
    pub incoming: Option<Progress>,
    /// The one that is being sent, in front of those that wait.
    pub outgoing: Option<Progress>,
}

/// Where a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The frame's number on the connection, in this direction.
    pub frame: u64,
    /// Bytes that this direction has carried in all.
    pub bytes: u64,
}
