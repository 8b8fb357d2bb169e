//! Whatever a client that was let in sends: calls that are sound to their last byte, and
//! anything else. The server neither dies nor keeps anything.
#![no_main]

use std::sync::Arc;
use std::time::Duration;

use dray_core::{Buf, FileId, FileSystem, Identity, Op, Pid, RequestId};
use dray_fabric::BufferPool;
use dray_fabric::sim::Network;
use dray_fuzz::{Cutter, Ignore, Raw, hello, memory, simulated};
use dray_rpc::server::{Export, StateLoss, MemoryJournal, Server, ServerOptions};
use dray_rpc::wire::{CallHead, Kind, NO_SLOT, Proof, Wire};
use libfuzzer_sys::fuzz_target;

const POOL_BYTES: usize = 16 << 20;
/// Longer than any lease or grace.
const LONG: Duration = Duration::from_secs(600);

fuzz_target!(|bytes: &[u8]| simulated(serve(bytes.to_vec())));

async fn serve(bytes: Vec<u8>) {
    let mut input = Cutter(&bytes);
    let (network, fs) = (Network::new(), memory());
    let root = fs.info().root;
    let pool = BufferPool::new(POOL_BYTES, 0);
    let options = ServerOptions { pool: pool.clone(), ..ServerOptions::default() };
    let export = Export::new("data", Arc::new(fs), Vec::new());
    let server = Server::new(options, vec![export], Arc::new(MemoryJournal::default()));
    // After a loss of power there are more messages that mean something.
    server.restore(if input.byte() % 4 == 0 { StateLoss::SessionsToo } else { StateLoss::Nothing }).await;
    let mut incoming = network.listen("server");
    let serving = server.clone();
    dray_rt::spawn(async move {
        while let Some(connection) = incoming.recv().await {
            let server = serving.clone();
            dray_rt::spawn(async move { server.serve(Arc::new(connection)).await });
        }
    });
    let leases = server.clone();
    dray_rt::spawn(async move { leases.expire_leases().await });
    let raw = Raw::connect(&network, "server").await;
    let receiver = raw.connection.clone();
    dray_rt::spawn(async move { drop(receiver.run(&mut Ignore).await) });
    let no_proof = Proof { proof: [0; 32], session: 0, session_proof: [0; 32], replaces: 0, definition: 0 };
    if input.byte() % 8 != 0 {
        raw.say(&hello().message(), None).await;
        raw.say(&no_proof.message(), None).await;
        let mut message = Vec::new();
        (Kind::Identity, (0u32, Identity::default())).put(&mut message);
        raw.say(&message, None).await;
    }
    while !input.0.is_empty() {
        let (head, data) = message(&mut input, root);
        raw.say(&head, data).await;
    }
    dray_rt::sleep(Duration::from_secs(1)).await;
    let _ = server.status();
    raw.connection.close();
    dray_rt::sleep(LONG).await;
    assert!(server.status().clients.is_empty(), "its session outlives it");
    assert_eq!(pool.stats().used_bytes, 0, "it holds buffers");
}

/// A call with a sound head on the root or an open file, or bytes as they are.
fn message(input: &mut Cutter<'_>, root: FileId) -> (Vec<u8>, Option<Buf>) {
    let how = input.byte();
    let mut message = Vec::new();
    if how % 8 != 0 {
        let op = Op::ALL[usize::from(input.byte()) % Op::COUNT];
        let (slot, sequence) = match how & 8 {
            0 => (NO_SLOT, 0),
            _ => (u32::from(input.byte() % 4), u32::from(input.byte())),
        };
        let head = CallHead {
            op,
            flags: u16::from(how >> 6),
            tag: u32::from(how),
            slot,
            sequence,
            identity: 0,
            pid: Pid(1),
            umask: 0,
            request: RequestId(u64::from(how)),
        };
        head.put_message(&mut message);
        match how >> 4 & 3 {
            0 => {}
            1 => root.put(&mut message),
            2 => u64::from(input.byte() % 4).put(&mut message),
            _ => (root, (input.byte() % 4, b'f')).put(&mut message),
        }
    }
    message.extend_from_slice(input.piece());
    let data = (how % 8 == 2).then(|| Buf::from(input.piece()));
    (message, data.filter(|data| !data.is_empty()))
}
