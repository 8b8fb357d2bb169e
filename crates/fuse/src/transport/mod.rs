//! How requests come and answers go.

mod area;
mod buffers;
pub(crate) mod classic;
mod near_caller;
mod payloads;
pub(crate) mod queues;
pub(crate) mod ring;

pub(crate) use area::PAYLOAD_BYTES;

use std::sync::Arc;

use dray_core::{Buf, BufMut, Errno, Result};

use crate::proto::wire::Small;
use crate::proto::{Request, decode_classic, decode_ring};
use crate::transport::buffers::Buffers;

/// Answers from this size on are worth a buffer of their own kind.
const LARGE_BYTES: usize = 64 << 10;

/// A request where it arrived.
pub(crate) enum KernelMessage {
    /// One contiguous message of /dev/fuse, and where memory for its answer comes from.
    Classic(Buf, Arc<Buffers>),
    /// In the memory of a ring entry.
    Ring(ring::RingRequest),
}

impl KernelMessage {
    pub(crate) fn decode(&self) -> Result<Request<'_>> {
        match self {
            KernelMessage::Classic(bytes, _) => decode_classic(bytes),
            KernelMessage::Ring(arrived) => {
                decode_ring(arrived.head(), arrived.args(), arrived.payload())
            }
        }
    }

    /// The data of a WRITE of `size` bytes, where they arrived.
    pub(crate) fn data(&self, size: usize) -> Buf {
        match self {
            // The decoder has checked that the data are the last `size` bytes.
            KernelMessage::Classic(bytes, _) => bytes.slice(bytes.len() - size..bytes.len()),
            KernelMessage::Ring(arrived) => arrived.data(size),
        }
    }

    /// A buffer of `size` bytes for data that will be the answer.
    pub(crate) fn read_buffer(&self, size: usize) -> BufMut {
        match self {
            KernelMessage::Classic(_, buffers) if size >= LARGE_BYTES => {
                buffers.take().into_answer(size)
            }
            KernelMessage::Classic(..) => BufMut::heap(size),
            KernelMessage::Ring(arrived) => arrived.read_buffer(size),
        }
    }
}

/// What a request is answered. Most answers are small ones, which is why they are kept in
/// place and not boxed.
#[allow(clippy::large_enum_variant)]
pub(crate) enum KernelAnswer {
    /// Nothing but that it went well.
    Empty,
    /// Fixed-size fields.
    Small(Small),
    /// A list or a value.
    Bytes(Vec<u8>),
    /// Data read, in the buffer made for them.
    Data(BufMut),
    /// The kernel wants no answer.
    Nothing,
}

impl KernelAnswer {
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            KernelAnswer::Empty | KernelAnswer::Nothing => &[],
            KernelAnswer::Small(small) => small.as_slice(),
            KernelAnswer::Bytes(bytes) => bytes,
            KernelAnswer::Data(data) => data.filled(),
        }
    }
}

/// The number for the kernel: it takes those below 512, and remembers for ever that an operation
/// answered `ENOSYS` is not there at all. Only the front end itself may say that.
pub(crate) fn kernel_error(errno: Errno) -> i32 {
    match errno {
        Errno::ENOSYS => -libc::EOPNOTSUPP,
        errno if errno.raw() >= 512 => -libc::EIO,
        errno => -errno.raw(),
    }
}
