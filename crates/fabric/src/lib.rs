//! Moves frames between two ends: buffer pools and the providers `tcp` and `unix`
//! (sockets) and `sim` (a simulated network with faults).
//!
//! A frame is a short head and, behind it, data that lands in memory which the receiver
//! chooses once it has seen the head. This crate knows bytes, not files: what a head
//! says is not its business.

mod address;
mod pool;
pub mod sim;
mod sockets;

use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};

use dray_core::{Buf, BufMut, Fut, Gid, Origin, Uid};

pub use address::Address;
pub use pool::{BufferPool, Charge, PoolShare, PoolStats};
pub use sockets::frame::{DATA_MAX_BYTES, HEAD_MAX_BYTES};
pub use sockets::{
    Bound, Listener, ReservedPort, Sockets, StreamConnection, connect, incoming_cpu, notice_loss,
    peek_head, somebody_listens,
};

/// Gets what arrives on a connection.
pub trait Sink: Send {
    /// Memory for the `data_bytes` bytes that follow this head, with at least that much
    /// room. While it is pending nothing more is read from the connection, which is how
    /// a sender is slowed down; `cx` is woken when there is memory. An error ends the
    /// connection.
    fn poll_place(
        &mut self,
        cx: &mut Context<'_>,
        head: &[u8],
        data_bytes: usize,
    ) -> Poll<io::Result<BufMut>>;

    /// Whether a frame of this head alone may come in now, and what goes with it: memory that it is
    /// counted by, as an empty buffer. While it is pending nothing more is read from the connection,
    /// as above.
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

    /// Whether the data behind this head are for a file of this machine: where there are many
    /// they may stay in pages of the kernel then ([`dray_core::Pages`]).
    fn is_for_a_file(&self, head: &[u8]) -> bool {
        let _ = head;
        false
    }

    /// A whole frame is there, with its data or what [`Sink::poll_head`] gave. An error ends the
    /// connection.
    fn frame(&mut self, head: &[u8], data: Option<BufMut>) -> io::Result<()>;
}

/// Notices that wait for the other end of a connection, which need not read.
pub const NOTICES_MAX: usize = 16;

/// An established connection, which keeps frames whole and in order.
pub trait Connection: Send + Sync + 'static {
    /// Sends a frame: at the end of the executor's turn if the other end keeps up; otherwise
    /// it is queued, and `data` is held until it has gone. Errors: the connection is closed,
    /// or a bound on head or data was passed.
    fn send(&self, head: &[u8], data: Option<Buf>) -> io::Result<()>;

    /// As [`Connection::send`], for what answers nothing: it is not counted as queued, and there are
    /// [`NOTICES_MAX`] of them at most that wait for the other end. Errors: as above; `WouldBlock` if
    /// there are as many: it was not sent.
    fn notify(&self, head: &[u8]) -> io::Result<()>;

    /// Does not wait for the end of the turn with what was sent: for a sender whose executor
    /// may have no further turn. A network without turns has nothing to do.
    fn flush(&self) {}

    /// Whoever sent `data` needs its memory for something else: what is queued of it is copied.
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
    /// Its number on the connection, in this direction.
    pub frame: u64,
    /// Bytes that this direction has carried in all.
    pub bytes: u64,
}

/// Who is at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// A host on the network.
    Ip(std::net::SocketAddr),
    /// A process on this machine, of root's or of the user's that this one is of.
    Local,
    /// A process on this machine, of this user's and group's, who is neither.
    User(Uid, Gid),
}

/// Ports below this one are for processes with CAP_NET_BIND_SERVICE over their network (ip(7);
/// `IPPORT_RESERVED` of netinet/in.h).
pub const RESERVED_PORTS_END: u16 = 1024;

impl Peer {
    /// Whether who is there may be anybody on its machine as far as the kernels of both ends say, and
    /// so may speak for all of its users: it came from a reserved port, or is root here, or is
    /// whoever this process is.
    pub fn is_privileged(&self) -> bool {
        match self {
            Peer::Ip(address) => address.port() < RESERVED_PORTS_END,
            Peer::Local => true,
            Peer::User(..) => false,
        }
    }
}

impl Peer {
    /// Whose share of what is counted it takes of: that of an IPv4 address, of an IPv6 network of
    /// 64 bits, which is what one host can have (RFC 4291, 2.5.4), or of a user of this machine.
    pub fn origin(self) -> Origin {
        /// Addresses that begin so are multicast ones (RFC 4291, 2.7): nobody comes from there.
        const LOCAL: u64 = 0xffff_ffff << 32;
        Origin(match self {
            Peer::Ip(address) => match address.ip().to_canonical() {
                std::net::IpAddr::V4(address) => u32::from(address).into(),
                std::net::IpAddr::V6(address) => (u128::from(address) >> 64) as u64,
            },
            Peer::Local => LOCAL,
            Peer::User(uid, _) => LOCAL | u64::from(uid.0),
        })
    }
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Peer::Ip(address) => address.fmt(f),
            Peer::Local => f.write_str("local"),
            Peer::User(uid, _) => write!(f, "user {} of this machine", uid.0),
        }
    }
}

/// Makes connections to one server: sockets, or a simulated network.
pub trait Connect: Send + Sync + 'static {
    /// Tries once. Errors: those of connect(2) or of the name's resolution.
    fn connect(&self) -> Fut<'_, io::Result<Arc<dyn Connection>>>;

    /// Where it connects to, for people.
    fn target(&self) -> String;
}
