//! A front end within the process of its server: its session makes no system calls.

use std::sync::Arc;

use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_bench::syscalls_here::{ThreadCounter, own_mounts, thread_id};
use dray_core::{BufMut, Context, CreateHow, FileSystem, Name, OpenFile, OpenHow, Write};
use dray_fabric::local;
use dray_rpc::client::{ClientOptions, ClientSession, LeaseWish, RemoteFs, SessionMemory};
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions};
use dray_rt::{DriverKind, Executor};

/// Rounds that are counted.
const ROUNDS: u64 = 1_000;

/// A client of a server, on one executor.
async fn client() -> RemoteFs {
    let fs =
        Arc::new(MemoryFs::new(MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() }));
    let journal = Arc::new(MemoryJournal::default());
    let export = Export::new("data", fs, Vec::new());
    let server = Server::new(ServerOptions::default(), vec![export], journal);
    let (listener, connector) = local::listen();
    dray_rt::spawn(async move { drop(server.serve_all(Box::new(listener)).await) });
    let options = ClientOptions {
        export: "data".into(),
        key: None,
        timeout: None,
        host: "within".into(),
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
    let session = ClientSession::connect(Arc::new(connector), options, SessionMemory::heap()).await;
    RemoteFs::new(session.unwrap())
}

/// A write, a look and a read.
async fn round(fs: &RemoteFs, file: &dyn OpenFile, cx: &Context) {
    let data = vec![7; 4096];
    assert_eq!(file.write(cx, Write::at(0), data.into()).await.unwrap(), 4096);
    assert_eq!(fs.getattr(cx, file.id()).await.unwrap().size, 4096);
    let read = file.read(cx, 0, BufMut::heap(4096)).await;
    assert_eq!(read.unwrap_or_else(|(error, _)| panic!("{error}")).len(), 4096);
}

#[test]
fn a_session_within_the_process_makes_no_system_calls() {
    own_mounts(); // by which system calls are counted, where nobody has mounted it
    let Some(mut calls) = ThreadCounter::new(thread_id()) else {
        return eprintln!("skipped: system calls cannot be counted here");
    };
    let counted = async move {
        let (fs, cx) = (client().await, Context::system());
        let (open, mode) = (OpenHow::READ_WRITE, 0o644);
        let how = CreateHow { open, mode, exclusive: true };
        let name = Name::new(b"file").unwrap();
        let (_, file) = fs.create(&cx, fs.info().root, name, how).await.unwrap();
        for _ in 0..ROUNDS / 10 {
            round(&fs, &*file, &cx).await;
        }
        let before = calls.count();
        for _ in 0..ROUNDS {
            round(&fs, &*file, &cx).await;
        }
        calls.count() - before
    };
    // A task, as a front end is: for so many tasks the executor looks once for events.
    let mut executor = Executor::new(DriverKind::Epoll).unwrap();
    let made = executor.block_on(async { dray_rt::spawn_join(counted).await.expect("it ends") });
    assert!(made < ROUNDS / 2, "{made} system calls in {ROUNDS} rounds of three calls");
}
