use std::pin::pin;
use std::sync::Mutex;
use std::task::Waker;

use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_core::{CreateHow, FileId, FileSystem, Make, Name, OpenHow, RemoveKind, Write};
use dray_fabric::sim::Network;

use super::*;
use crate::client::{ClientOptions, ClientSession as Mount, LeaseWish, RemoteFs, SessionMemory};
use crate::server::journal::watched::{Watch, WatchedJournal};
use crate::server::ranges::{RangeTable, Span};
use crate::server::{Export, Server, ServerOptions};

/// The files that the changes are about, and the state of the grant when an answer is noted.
#[derive(Default)]
struct Seen {
    about: Option<(Arc<RangeTable>, FileId)>,
    held: Vec<bool>,
}

impl Watch for Mutex<Seen> {
    fn answers(&self) {
        let mut seen = self.lock().unwrap();
        if let Some((ranges, file)) = seen.about.clone() {
            let mut task = std::task::Context::from_waker(Waker::noop());
            let other = pin!(ranges.change(file, Span::ALL)).poll(&mut task);
            seen.held.push(other.is_pending());
        }
    }
}

async fn mount(network: &Network, server: &Server) -> RemoteFs {
    let (mut incoming, server) = (network.listen("s"), server.clone());
    dray_rt::spawn(async move {
        while let Some(connection) = incoming.recv().await {
            let server = server.clone();
            dray_rt::spawn(async move { server.serve(Arc::new(connection)).await });
        }
    });
    let options = ClientOptions {
        export: "data".into(),
        key: None,
        timeout: None,
        host: "host".into(),
        replay_bytes: 0,
        split_min_bytes: ClientOptions::SPLIT_MIN_BYTES,
        caches: false,
        counts_on_one_user: false,
        leases: LeaseWish::No,
        lease_share: None,
        definition: 0,
        group: None,
        aside: None,
        write_back: None,
    };
    let mounted = Mount::connect(network.connector("s"), options, SessionMemory::heap()).await;
    RemoteFs::new(mounted.unwrap())
}

/// If the server died before the answer is noted, a change of the same file in between could be
/// taken for this one. Or this one could undo it.
// proves: P80
#[test]
fn a_grant_lasts_until_the_answer_is_noted() {
    let driver = dray_rt::DriverKind::Simulated { seed: 1 };
    dray_rt::Executor::new(driver).unwrap().block_on(async {
        let network = Network::new();
        let below = Arc::new(MemoryFs::new(MemoryOptions::default()));
        let journal = Arc::new(WatchedJournal::<Mutex<Seen>>::default());
        let seen = journal.1.clone();
        let export = Export::new("data", below, Vec::new());
        let server = Server::new(ServerOptions::default(), vec![export], journal);
        let fs = mount(&network, &server).await;
        let ranges = server.inner.exports.get("data").ok().unwrap().ranges.clone();
        let watch = |file| seen.lock().unwrap().about = Some((ranges.clone(), file));
        let (cx, root) = (Context::system(), fs.info().root);
        let [file, dir] = [b"f", b"d"].map(|name| Name::new(name).unwrap());
        watch(root);
        let (how, mode) = (OpenHow::READ_WRITE, 0o644);
        let new = CreateHow { open: how, mode, exclusive: true };
        let (entry, open) = fs.create(&cx, root, file, new).await.unwrap();
        fs.make(&cx, root, dir, Make::Directory { mode: 0o755 }).await.unwrap();
        fs.remove(&cx, root, dir, RemoveKind::Directory).await.unwrap();
        watch(entry.id);
        let append = Write { append: true, ..Write::at(0) };
        for how in [append, Write::at(0)] {
            open.write(&cx, how, Buf::from(&b"data"[..])).await.unwrap();
        }
        assert_eq!(seen.lock().unwrap().held, [true; 5]);
    });
}
