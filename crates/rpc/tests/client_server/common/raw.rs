//! The wire by hand: what no client or server of ours would send.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use dray_core::{NodeId, Op, Pid, RequestId};
use dray_rpc::wire::{
    Auth, Call, CallHead, Challenge, Hello, Kind, NO_SLOT, Proof, ReplyHead, VERSION_MAX,
    VERSION_MIN, Welcome, Wire,
};

/// A peer that does not answer within this time has hung.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A frame as it travels.
pub fn frame(head: &[u8], data: &[u8]) -> Vec<u8> {
    let mut bytes = b"dray".to_vec();
    for len in [head.len(), data.len(), 0] {
        bytes.extend_from_slice(&(len as u32).to_le_bytes());
    }
    bytes.extend_from_slice(head);
    if !data.is_empty() {
        bytes.resize(bytes.len().next_multiple_of(64), 0);
        bytes.extend_from_slice(data);
    }
    bytes
}

/// The next frame.
pub fn read_frame(from: &mut impl Read) -> io::Result<(Vec<u8>, Vec<u8>)> {
    let mut prefix = [0; 16];
    from.read_exact(&mut prefix)?;
    let word = |at: usize| u32::from_le_bytes(prefix[at..at + 4].try_into().unwrap()) as usize;
    let (mut head, mut data) = (vec![0; word(4)], vec![0; word(8)]);
    from.read_exact(&mut head)?;
    if !data.is_empty() {
        let behind_head = 16 + head.len();
        from.read_exact(&mut [0; 64][..behind_head.next_multiple_of(64) - behind_head])?;
    }
    from.read_exact(&mut data)?;
    Ok((head, data))
}

/// A hello of this version without a key.
pub fn hello(export: &str) -> Hello {
    Hello {
        version_min: VERSION_MIN,
        version_max: VERSION_MAX,
        features: 0,
        auth: Auth::None,
        nonce: [7; 32],
        export: export.into(),
        node: NodeId(99),
        host: "peer".into(),
        software: String::new(),
    }
}

pub const NO_PROOF: Proof =
    Proof { proof: [0; 32], session: 0, session_proof: [0; 32], replaces: 0, definition: 0 };

/// A connection that has not said anything.
pub fn unauthenticated(socket: &Path) -> UnixStream {
    let stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// A connection with a session of its own and identity 0 defined as root.
pub fn handshake(socket: &Path) -> io::Result<(UnixStream, Welcome)> {
    handshake_as(socket, &hello("data"), &NO_PROOF)
}

/// The same by a hello and a proof of its own.
pub fn handshake_as(
    socket: &Path,
    hello: &Hello,
    proof: &Proof,
) -> io::Result<(UnixStream, Welcome)> {
    let mut stream = unauthenticated(socket);
    stream.write_all(&frame(&hello.message(), b""))?;
    let malformed = |error| io::Error::other(format!("{error:?}"));
    Challenge::from_message(&read_frame(&mut stream)?.0).map_err(malformed)?;
    stream.write_all(&frame(&proof.message(), b""))?;
    let welcome = Welcome::from_message(&read_frame(&mut stream)?.0).map_err(malformed)?;
    stream.write_all(&frame(&identity(0), b""))?;
    Ok((stream, welcome))
}

/// Defines identity `index` as root.
pub fn identity(index: u32) -> Vec<u8> {
    identity_of(index, &dray_core::Identity::default())
}

/// Defines identity `index`.
pub fn identity_of(index: u32, who: &dray_core::Identity) -> Vec<u8> {
    let mut message = Vec::new();
    Kind::Identity.put(&mut message);
    index.put(&mut message);
    who.put(&mut message);
    message
}

/// The head of a call in no slot.
pub fn head(op: Op, tag: u32) -> CallHead {
    CallHead {
        op,
        flags: 0,
        tag,
        slot: NO_SLOT,
        sequence: 0,
        identity: 0,
        pid: Pid(1),
        umask: 0,
        request: RequestId(u64::from(tag) + 1),
    }
}

/// A whole call message.
pub fn message(head: &CallHead, call: &Call<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    head.put_message(&mut out);
    call.put(&mut out);
    out
}

/// Makes a call and waits for its answer.
pub fn ask(stream: &mut UnixStream, head: &CallHead, call: &Call<'_>) -> io::Result<ReplyHead> {
    let reply = ask_whole(stream, head, call)?;
    ReplyHead::get_message(&mut dray_rpc::wire::Input(&reply)).map_err(io::Error::from)
}

/// The same; answers the whole message.
pub fn ask_whole(stream: &mut UnixStream, head: &CallHead, call: &Call<'_>) -> io::Result<Vec<u8>> {
    stream.write_all(&frame(&message(head, call), b""))?;
    Ok(read_frame(stream)?.0)
}

/// Numbers by chance, the same for the same seed (xorshift, Marsaglia 2003).
pub struct Chance(u64);

impl Chance {
    pub fn new(seed: u64) -> Chance {
        Chance(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// A number of the kind that code gets wrong.
    pub fn edge(&mut self) -> u64 {
        let edges =
            [0, 1, 2, 4095, 4096, 1 << 20, u64::MAX, u64::MAX - 1, 1 << 63, i64::MAX as u64];
        match self.below(3) {
            0 => self.next(),
            1 => self.below(64) as u64,
            _ => edges[self.below(edges.len())],
        }
    }

    pub fn bytes(&mut self, max: usize) -> Vec<u8> {
        (0..self.below(max + 1)).map(|_| self.next() as u8).collect()
    }
}
