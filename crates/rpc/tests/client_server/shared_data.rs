//! Data that a client within the process writes are shared with its server, and count as its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::{client_options, connect, run, serve_within};
use dray_backends::null::NullFs;
use dray_core::{
    Buf, Context, CreateHow, FileSystem, FsUuid, Memory, Name, Op, OpenFile, OpenHow, Write,
};
use dray_fabric::BufferPool;
use dray_layers::Observed;
use dray_layers::faults::{Fault, Faults, When};
use dray_rpc::client::RemoteFs;
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions};

const MIB: usize = 1 << 20;
const DELAY: Duration = Duration::from_millis(100);

/// Memory that reports when its last reference is dropped.
struct Lent {
    content: Vec<u8>,
    in_use: Arc<AtomicBool>,
}

impl Memory for Lent {}

impl Drop for Lent {
    fn drop(&mut self) {
        self.in_use.store(false, Ordering::SeqCst);
    }
}

fn lent(bytes: usize) -> (Buf, Arc<AtomicBool>) {
    let in_use = Arc::new(AtomicBool::new(true));
    let owner = Arc::new(Lent { content: vec![7; bytes], in_use: in_use.clone() });
    let start = std::ptr::NonNull::from(&owner.content[..]).cast();
    // SAFETY: the owner keeps the vector, which is neither moved nor written to.
    (unsafe { Buf::over(start, bytes, owner) }, in_use)
}

/// A server of nothing in this process, whose writes take a while, and a file of it.
async fn served() -> (Server, RemoteFs, Arc<dyn OpenFile>) {
    let slow = Fault { op: Some(Op::Write), when: When::Always, delay: DELAY, error: None };
    let fs = NullFs::new(FsUuid(1), 1 << 40);
    let fs = Observed::new(fs, Arc::new(Faults::new(vec![slow])));
    let options = ServerOptions { pool: BufferPool::new(8 * MIB, 0), ..Default::default() };
    let export = Export::new("data", Arc::new(fs), Vec::new());
    let server = Server::new(options, vec![export], Arc::new(MemoryJournal::default()));
    let fs = connect(serve_within(server.clone()), client_options()).await.unwrap();
    let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o600, exclusive: false };
    let (cx, root, name) = (Context::system(), fs.info().root, Name::new(b"file").unwrap());
    let (_, file) = fs.create(&cx, root, name, how).await.unwrap();
    (server, fs, file)
}

#[test]
fn what_is_written_is_not_copied_and_counts_until_it_is_done() {
    run(async {
        let (server, _fs, file) = served().await;
        let (data, in_use) = lent(MIB);
        let copied_before = dray_core::copied_bytes();
        let write = dray_rt::spawn_join(async move {
            file.write(&Context::system(), Write::at(0), data).await.map(|count| (count, file))
        });
        dray_rt::sleep(DELAY / 2).await;
        assert_eq!(server.status().buffer_used_bytes, MIB, "it is not the session's");
        let (count, _file) = write.await.unwrap().unwrap();
        assert_eq!((count, in_use.load(Ordering::SeqCst)), (MIB, false));
        assert_eq!(server.status().buffer_used_bytes, 0);
        assert!(dray_core::copied_bytes() - copied_before < MIB as u64, "it was copied");
    });
}

/// More than the session's share waits at the client.
#[test]
fn writes_at_once_take_the_sessions_share_and_no_more() {
    const WRITES: u64 = 16;
    run(async {
        let (server, _fs, file) = served().await;
        let (data, _) = lent(MIB); // nothing is copied beside the other test
        let write = |number: u64| {
            let (file, data) = (file.clone(), data.clone());
            dray_rt::spawn_join(async move {
                let at = Write::at(number * MIB as u64);
                file.write(&Context::system(), at, data).await.unwrap()
            })
        };
        let writes: Vec<_> = (0..WRITES).map(write).collect();
        dray_rt::sleep(DELAY / 2).await;
        assert_eq!(server.status().buffer_used_bytes, 4 * MIB, "half, since it is alone");
        for write in writes {
            assert_eq!(write.await.unwrap(), MIB);
        }
        assert_eq!(server.status().buffer_used_bytes, 0);
    });
}
