//! Connections that make the server remember as much as it allows: callers with as many groups as possible,
//! and as many such callers as possible.

use std::io::{Error, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use dray_core::{GROUPS_MAX, Gid, Identity, NodeId};
use dray_rpc::wire::{
    Auth, Challenge, Hello, Kind, Proof, VERSION_MAX, VERSION_MIN, Welcome, Wire,
};

use crate::{CommandResult, context, idle};

/// Callers of one connection: as many as it can number.
const CALLERS: u32 = 256;
/// A server that does not answer within this time has stopped reading.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time for the server to take what was sent.
const SETTLE_TIME: Duration = Duration::from_secs(2);

/// What came of it.
pub struct Hoard {
    /// Connections that the server let in.
    pub connections: usize,
    /// Resident memory of the server, KiB, before and with all of them.
    pub resident_kib: (u64, u64),
}

fn frame(head: &[u8]) -> Vec<u8> {
    let mut bytes = b"dray".to_vec();
    for len in [head.len() as u32, 0, 0] {
        bytes.extend_from_slice(&len.to_le_bytes());
    }
    bytes.extend_from_slice(head);
    bytes
}

fn read_frame(stream: &mut UnixStream) -> Result<Vec<u8>, Error> {
    let mut prefix = [0; 16];
    stream.read_exact(&mut prefix)?;
    let len = u32::from_le_bytes([prefix[4], prefix[5], prefix[6], prefix[7]]);
    let mut head = vec![0; len as usize];
    stream.read_exact(&mut head)?;
    Ok(head)
}

/// A session with the server at `socket`, which asks for no key.
fn greet(socket: &Path, export: &str, node: u64) -> Result<UnixStream, Error> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let hello = Hello {
        version_min: VERSION_MIN,
        version_max: VERSION_MAX,
        features: 0,
        auth: Auth::None,
        nonce: [7; 32],
        export: export.into(),
        node: NodeId(node),
        host: "hoard".into(),
        software: String::new(),
    };
    let proof =
        Proof { proof: [0; 32], session: 0, session_proof: [0; 32], replaces: 0, definition: 0 };
    let malformed = |error| Error::other(format!("{error:?}"));
    stream.write_all(&frame(&hello.message()))?;
    Challenge::from_message(&read_frame(&mut stream)?).map_err(malformed)?;
    stream.write_all(&frame(&proof.message()))?;
    Welcome::from_message(&read_frame(&mut stream)?).map_err(malformed)?;
    Ok(stream)
}

/// Names callers until all are named, or the server has had enough.
fn name_callers(stream: &mut UnixStream) {
    for index in 0..CALLERS {
        let groups = (0..GROUPS_MAX as u32).map(|group| Gid(group * CALLERS + index)).collect();
        let mut message = Vec::new();
        Kind::Identity.put(&mut message);
        index.put(&mut message);
        Identity { groups, ..Identity::default() }.put(&mut message);
        if stream.write_all(&frame(&message)).is_err() {
            return; // it was ended, as it may be
        }
    }
}

/// `count` connections to the server at `socket`, whose processes are `server`. Errors: it lets none in.
pub fn hoard(socket: &Path, export: &str, count: u64, server: &[i32]) -> CommandResult<Hoard> {
    let before = idle::resident_kib(server);
    let mut streams = Vec::new();
    for number in 1..=count {
        match greet(socket, export, number) {
            Ok(mut stream) => {
                name_callers(&mut stream);
                streams.push(stream);
            }
            Err(error) if streams.is_empty() => return Err(context("connect")(error)),
            Err(_) => break, // this machine has its share
        }
    }
    std::thread::sleep(SETTLE_TIME);
    let with = idle::resident_kib(server);
    Ok(Hoard { connections: streams.len(), resident_kib: (before, with) })
}
