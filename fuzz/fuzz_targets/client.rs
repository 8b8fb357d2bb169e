//! Whatever a server answers that shook hands well: calls end, with whatever. The client
//! neither dies nor waits for ever.
#![no_main]

use std::sync::Arc;
use std::time::Duration;

use dray_core::{
    Buf, BufMut, Context, CreateHow, FileSystem, Name, OpenHow, RenameHow, Write, XattrSet,
};
use dray_fabric::sim::{Network, SimConnection};
use dray_fabric::{Connection, Sink};
use dray_fuzz::{Cutter, memory, simulated};
use dray_rpc::client::{ClientOptions, ClientSession, RemoteFs, LeaseWish, SessionMemory};
use dray_rpc::wire::{Challenge, Kind, ReplyHead, Welcome};
use libfuzzer_sys::fuzz_target;

/// Calls end within this time at the latest.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Where the flags of a reply begin; their second byte is of later versions.
const FLAGS_AT: usize = 2;

fuzz_target!(|bytes: &[u8]| {
    let bytes = bytes.to_vec();
    simulated(async move {
        let network = Network::new();
        let mut incoming = network.listen("server");
        dray_rt::spawn(async move {
            let mut answers = Answers { bytes, at: 0, said: 0 };
            while let Some(connection) = incoming.recv().await {
                answers.said = 0;
                let mut serving = Serving { connection: Arc::new(connection), answers };
                let connection = serving.connection.clone();
                connection.run(&mut serving).await;
                answers = serving.answers;
            }
        });
        let connector = network.connector_from("client", "server");
        let options = ClientOptions {
            export: "data".into(),
            key: None,
            timeout: Some(TIMEOUT),
            host: "fuzz".into(),
            replay_bytes: 1 << 16,
            split_min_bytes: 4096,
            caches: false,
            counts_on_one_user: false,
            leases: LeaseWish::No,
            lease_share: None,
            definition: 0,
            group: None,
            aside: None,
            write_back: None,
        };
        let connected = ClientSession::connect(connector, options, SessionMemory::heap());
        let connected = dray_rt::timeout(TIMEOUT * 20, connected).await;
        if let Ok(session) = connected.expect("connecting takes for ever") {
            let ended = dray_rt::timeout(TIMEOUT * 100, work(RemoteFs::new(session))).await;
            ended.expect("a call takes for ever");
        }
    });
});

async fn work(fs: RemoteFs) {
    let (cx, root) = (Context::system(), fs.info().root);
    let [one, two] = [b"one", b"two"].map(|name| Name::new(name).expect("a name"));
    let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o600, exclusive: true };
    let _ = fs.lookup(&cx, root, one).await; // any answer will do, here and below
    let _ = fs.rename(&cx, (root, one), (root, two), RenameHow::Replace).await;
    let _ = fs.setxattr(&cx, root, b"user.x", b"value", XattrSet::Any).await;
    let _ = fs.getxattr(&cx, root, b"user.x").await;
    let _ = fs.put(&cx, root, one, 0o600, Buf::from(&b"data"[..])).await;
    let opened = fs.open(&cx, root, OpenHow::READ_WRITE).await;
    let made = fs.create(&cx, root, one, how).await.map(|(_, file)| file);
    for file in [opened, made].into_iter().flatten() {
        if let Ok(read) = file.read(&cx, 0, BufMut::heap(4096)).await {
            assert!(read.len() <= 4096);
        }
        let _ = file.readdir(&cx, 0, 4096, true).await;
        let _ = file.write(&cx, Write::at(0), Buf::from(&b"data"[..])).await;
        let _ = file.sync(&cx, false).await;
        let _ = file.close(&cx).await;
    }
    let _ = fs.statfs(&cx).await;
    fs.session().goodbye();
}

/// What is said next, over all connections.
struct Answers {
    bytes: Vec<u8>,
    at: usize,
    said: u32,
}

impl Answers {
    fn byte(&mut self) -> u8 {
        self.at += 1;
        self.bytes.get(self.at - 1).copied().unwrap_or(0)
    }

    fn piece(&mut self) -> Vec<u8> {
        let len = usize::from(self.byte());
        let mut rest = Cutter(self.bytes.get(self.at..).unwrap_or_default());
        let piece = rest.take(len).to_vec();
        self.at += piece.len();
        piece
    }
}

struct Serving {
    connection: Arc<SimConnection>,
    answers: Answers,
}

impl Sink for Serving {
    fn poll_place(
        &mut self,
        _: &mut std::task::Context<'_>,
        _: &[u8],
        data_bytes: usize,
    ) -> std::task::Poll<std::io::Result<BufMut>> {
        std::task::Poll::Ready(Ok(BufMut::heap(data_bytes)))
    }

    fn frame(&mut self, head: &[u8], _: Option<BufMut>) -> std::io::Result<()> {
        self.answers.said += 1;
        let (answer, data) = match self.answers.said {
            1 => (challenge(), None),
            2 => (welcome(&mut self.answers), None),
            _ if head.first() != Some(&(Kind::Call as u8)) || head.len() < 8 => return Ok(()),
            _ => answer(head, &mut self.answers),
        };
        let _ = self.connection.send(&answer, data); // too large for a frame: nothing is said
        Ok(())
    }
}

fn challenge() -> Vec<u8> {
    Challenge { version: 1, features: u64::MAX, nonce: [1; 32], proof: [0; 32] }.message()
}

fn welcome(answers: &mut Answers) -> Vec<u8> {
    let how = answers.byte();
    let welcome = Welcome {
        session: u64::from(how & 3) + 1,
        secret: [0; 16],
        resumed: how & 4 != 0,
        connection: 1,
        instance: u64::from(how >> 4 & 3),
        boot: u128::from(how >> 6),
        calls_max: u32::from(answers.byte()),
        slots: u32::from(answers.byte()),
        lease_ms: 0,
        info: memory().info().clone(),
        lease_term_ms: u32::from(how),
        lease_epoch: u32::from(how >> 5),
    };
    welcome.message()
}

/// To the call that was made, mostly.
fn answer(call: &[u8], answers: &mut Answers) -> (Vec<u8>, Option<Buf>) {
    let how = answers.byte();
    if how & 31 == 31 {
        return (answers.piece(), None);
    }
    let tag = u32::from_le_bytes([call[4], call[5], call[6], call[7]]);
    let errno = if how & 1 != 0 { u16::from(answers.byte()) } else { 0 };
    let flags = if how & 2 != 0 { answers.byte() } else { 0 };
    let mut message = Vec::new();
    ReplyHead { errno, ..ReplyHead::success(tag) }.put_message(&mut message);
    message[FLAGS_AT] = flags; // of stamps and tickets that need not be there, too
    message.extend_from_slice(&answers.piece());
    let data = (how & 4 != 0).then(|| Buf::from(&answers.piece()[..]));
    (message, data.filter(|data| !data.is_empty()))
}
