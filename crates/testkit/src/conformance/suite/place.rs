//! Where a directed test works, and short forms of what it does there.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dray_core::{
    Buf, BufMut, Context, CreateHow, Entry, Errno, FileId, FileSystem, Make, NameBuf, NodeId,
    OpenFile, OpenHow, Pid, RemoveKind, RequestId, Result, Write,
};

use crate::step::identity;

static REQUESTS: AtomicU64 = AtomicU64::new(1);

/// A directory of the test's own, open to all.
pub(super) struct TestDirectory {
    clients: Vec<Arc<dyn FileSystem>>,
    /// The directory.
    pub(super) dir: FileId,
}

pub(super) fn name(text: &str) -> NameBuf {
    NameBuf::new(text.as_bytes()).expect("a test's name is a name")
}

/// A caller of node 1: 0 is root, 1 and 2 are users who share group 3000.
pub(super) fn user(who: u8) -> Context {
    let request = RequestId(REQUESTS.fetch_add(1, Ordering::Relaxed));
    Context::new(NodeId(1), request, identity(who), Pid(1000 + u32::from(who)))
}

/// The error number of a failure; a success is none.
pub(super) fn errno<T>(result: Result<T>) -> Option<Errno> {
    result.err().map(|error| error.errno())
}

impl TestDirectory {
    pub(super) async fn new(clients: &[Arc<dyn FileSystem>], test: &str) -> TestDirectory {
        let fs = &clients[0];
        let cx = user(0);
        let what = Make::Directory { mode: 0o777 };
        let name = name(&test.replace("::", "-"));
        let made = fs.make(&cx, fs.info().root, &name, what).await;
        let dir = made.unwrap_or_else(|error| panic!("no place for {test}: {error:?}")).id;
        TestDirectory { clients: clients.to_vec(), dir }
    }

    /// The `number`th client; they are gone through in turn.
    pub(super) fn client(&self, number: usize) -> &Arc<dyn FileSystem> {
        &self.clients[number % self.clients.len()]
    }

    pub(super) fn fs(&self) -> &Arc<dyn FileSystem> {
        self.client(0)
    }

    /// Makes a file as root, mode 0666, and opens it for reading and writing.
    pub(super) async fn file(&self, text: &str) -> (Entry, Arc<dyn OpenFile>) {
        let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o666, exclusive: true };
        self.fs().create(&user(0), self.dir, &name(text), how).await.expect("a new file")
    }

    pub(super) async fn mkdir(&self, text: &str) -> FileId {
        self.mkdir_in(self.dir, text).await
    }

    pub(super) async fn mkdir_in(&self, dir: FileId, text: &str) -> FileId {
        let what = Make::Directory { mode: 0o777 };
        self.fs().make(&user(0), dir, &name(text), what).await.expect("a new directory").id
    }

    pub(super) async fn lookup(&self, text: &str) -> Result<Entry> {
        self.client(1).lookup(&user(0), self.dir, &name(text)).await
    }

    pub(super) async fn remove(&self, text: &str, kind: RemoveKind) -> Result<()> {
        self.fs().remove(&user(0), self.dir, &name(text), kind).await
    }
}

pub(super) async fn read(file: &Arc<dyn OpenFile>, at: u64, len: usize) -> Vec<u8> {
    let buf = file.read(&user(0), at, BufMut::heap(len)).await.expect("a read");
    buf.filled().to_vec()
}

pub(super) async fn write(file: &Arc<dyn OpenFile>, at: u64, bytes: &[u8]) {
    let count = file.write(&user(0), Write::at(at), Buf::from(bytes)).await.expect("a write");
    assert_eq!(count, bytes.len(), "a write with room is whole");
}

pub(super) async fn close(file: Arc<dyn OpenFile>) {
    file.close(&user(0)).await.expect("a close");
}
