//! Split reads, on two connections, see the file as it was at one time.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use crate::common::{client_options, connect, memory, serve_simulated, simulate};
use dray_core::{
    Buf, BufMut, Context, CreateHow, Errno, FileSystem, Fut, Name, Op, OpenFile, OpenHow, Write,
};
use dray_fabric::sim::Network;
use dray_fabric::{Connect, Connection, Peer, Sink, Unfinished};
use dray_layers::Observed;
use dray_layers::faults::{Fault, Faults, When};
use dray_layers::metrics::Metrics;
use dray_rpc::client::{ClientOptions, RemoteFs};
use dray_rpc::server::{Export, MemoryJournal, Sabotage, Server, ServerOptions};
use dray_rt::Scope;

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };
const LEN: usize = 20_000;
/// The delay that a fault causes for the read that it hits.
const HELD_UP: Duration = Duration::from_millis(50);

/// Two mounts of a server at which reads have these faults.
struct Site {
    reader: Arc<dyn OpenFile>,
    mount: RemoteFs,
    writer: Arc<dyn OpenFile>,
    server: Server,
    /// The metrics of the server's file system.
    metrics: Arc<Metrics>,
    _scope: Scope,
}

impl Site {
    async fn new(faults: Vec<Fault>, sabotage: Option<Sabotage>) -> Site {
        Site::over(|network| network.connector("server"), faults, sabotage).await
    }

    /// The reader connects with what `connector` answers.
    async fn over(
        connector: impl FnOnce(&Network) -> Arc<dyn Connect>,
        faults: Vec<Fault>,
        sabotage: Option<Sabotage>,
    ) -> Site {
        let fs = Observed::new(Arc::new(memory()), Arc::new(Faults::new(faults)));
        let metrics = Arc::new(Metrics::new());
        let fs = Observed::new(Arc::new(fs), metrics.clone());
        let export = Export::new("data", Arc::new(fs), Vec::new());
        let options = ServerOptions { sabotage, ..ServerOptions::default() };
        let server = Server::new(options, vec![export], Arc::new(MemoryJournal::default()));
        let (network, scope) = (Network::new(), Scope::new());
        serve_simulated(&network, "server", &server, &scope);
        let options = ClientOptions { split_min_bytes: 1024, ..client_options() };
        let mount = connect(connector(&network), options.clone()).await.unwrap();
        mount.session().attach_another();
        while mount.session().status().channels.iter().any(|channel| !channel.up) {
            dray_rt::sleep(Duration::from_millis(1)).await;
        }
        let (cx, name) = (Context::system(), Name::new(b"f").unwrap());
        let (entry, reader) = mount.create(&cx, mount.info().root, name, NEW).await.unwrap();
        let other = connect(network.connector("server"), options).await.unwrap();
        let writer = other.open(&cx, entry.id, OpenHow::READ_WRITE).await.unwrap();
        writer.write(&cx, Write::at(0), Buf::from(vec![b'a'; LEN])).await.unwrap();
        Site { reader, mount, writer, server, metrics, _scope: scope }
    }

    fn calls(&self) -> u64 {
        self.mount.session().status().channels.iter().map(|channel| channel.calls).sum()
    }

    /// Reads up to `len` bytes. Answers them and how many calls it took.
    async fn read(&self, at: u64, len: usize) -> Result<(Vec<u8>, u64), Errno> {
        let before = self.calls();
        let into = BufMut::heap(len);
        let read = self.reader.read(&Context::system(), at, into).await;
        let read = read.map_err(|(error, into)| {
            assert_eq!(into.capacity(), len, "the whole buffer comes back");
            error.errno()
        })?;
        assert_eq!(read.capacity(), len);
        Ok((read.filled().to_vec(), self.calls() - before))
    }

    /// Reads while the other mount writes, which begins so much later.
    async fn read_over_a_write(&self, later: Duration) -> (Vec<u8>, u64) {
        let writing = async {
            dray_rt::sleep(later).await;
            self.writer.write(&Context::system(), Write::at(0), Buf::from(vec![b'b'; LEN])).await
        };
        let (mut reading, mut writing) = (Box::pin(self.read(0, LEN)), Box::pin(writing));
        let (mut read, mut written) = (None, false);
        std::future::poll_fn(|task| {
            if !written && let std::task::Poll::Ready(count) = writing.as_mut().poll(task) {
                assert_eq!(count.unwrap(), LEN);
                written = true;
            }
            if read.is_none()
                && let std::task::Poll::Ready(got) = reading.as_mut().poll(task)
            {
                read = Some(got.unwrap());
            }
            if written && read.is_some() {
                std::task::Poll::Ready(())
            } else {
                std::task::Poll::Pending
            }
        })
        .await;
        read.unwrap()
    }
}

fn held_up(nth: u64) -> Vec<Fault> {
    vec![Fault { op: Some(Op::Read), when: When::Nth(nth), delay: HELD_UP, error: None }]
}

fn is_uniform(bytes: &[u8]) -> bool {
    bytes.len() == LEN && bytes.iter().all(|byte| *byte == bytes[0])
}

// proves: P17
#[test]
fn a_change_between_the_parts_of_a_split_read_repeats_the_read() {
    for nth in [1, 2] {
        simulate(nth, async {
            let site = Site::new(held_up(nth), None).await;
            // Half of the reading is held up meanwhile.
            let (bytes, calls) = site.read_over_a_write(HELD_UP / 2).await;
            assert!(is_uniform(&bytes) && bytes[0] == b'b', "half of one, half of the other");
            assert_eq!(calls, 3, "two parts, and the whole");
            assert_eq!(site.read(0, LEN).await.unwrap().1, 2, "nobody writes");
        });
    }
}

/// Whether any read during a write is torn: the network delivers the write before, after and
/// between the parts of the read.
fn some_read_is_torn(sabotage: Option<Sabotage>) -> bool {
    (0..200).any(|seed| {
        simulate(seed, async {
            let site = Site::new(Vec::new(), sabotage).await;
            let (bytes, calls) = site.read_over_a_write(Duration::ZERO).await;
            assert!(calls == 2 || sabotage.is_none());
            !is_uniform(&bytes)
        })
    })
}

#[test]
fn an_unprotected_split_read_sees_half_of_a_write() {
    assert!(some_read_is_torn(Some(Sabotage::SplitReads)));
    assert!(!some_read_is_torn(None));
}

#[test]
fn a_split_read_counts_as_one_read() {
    simulate(4, async {
        let site = Site::new(Vec::new(), None).await;
        let calls_counted = || {
            let clients = site.server.status().clients;
            clients.iter().map(|client| client.calls).sum::<u64>()
        };
        for number in 1..=10 {
            let before = calls_counted();
            assert_eq!(site.read(0, LEN).await.unwrap().1, 2, "two parts");
            assert_eq!(calls_counted() - before, 1);
            let counted = site.metrics.snapshot();
            let read = counted.ops.iter().find(|one| one.op == Op::Read).unwrap();
            assert_eq!((read.count, read.bytes), (number, number * LEN as u64));
        }
    });
}

#[test]
fn the_parts_of_a_split_read_join_wherever_the_file_ends() {
    simulate(3, async {
        let site = Site::new(Vec::new(), None).await;
        let content: Vec<u8> = (0..LEN).map(|at| (at / 7) as u8).collect();
        let cx = Context::system();
        site.writer.write(&cx, Write::at(0), Buf::from(content.clone())).await.unwrap();
        let ends = [0, 1, 5000, LEN - 8193, LEN - 8192, LEN - 4097, LEN - 1, LEN, LEN + 9];
        for (at, len) in ends.into_iter().flat_map(|at| [1024, 8191, 8192, 30_000].map(|l| (at, l)))
        {
            let (bytes, calls) = site.read(at as u64, len).await.unwrap();
            let right = &content[at.min(LEN)..(at + len).min(LEN)];
            assert!(bytes == right, "{len} bytes from {at}");
            assert!(calls <= 2, "{calls} calls");
        }
        assert_eq!(site.read(u64::MAX - 100, 1024).await.unwrap().0, b"");
        assert_eq!(site.read(0, 1023).await.unwrap().1, 1, "too small to be split");
    });
}

/// The bytes in the buffer were taken for the first half, or made the mount panic.
#[test]
fn what_is_read_comes_behind_what_is_in_the_buffer() {
    simulate(5, async {
        for (nth, room) in [(0, 100), (0, LEN), (1, LEN), (2, LEN)] {
            let error = Some(Errno::EIO);
            let when = When::Nth(nth); // the 0th is none
            let fault = Fault { op: Some(Op::Read), when, delay: Duration::ZERO, error };
            let site = Site::new(vec![fault], None).await;
            let mut into = BufMut::heap(room + 3);
            into.put(b"xyz");
            let read = site.reader.read(&Context::system(), 0, into).await;
            let read = read.map_err(|(error, _)| error).unwrap();
            assert_eq!((read.capacity(), read.len()), (room + 3, room + 3), "{nth} {room}");
            assert_eq!(&read.filled()[..3], b"xyz");
            assert!(read.filled()[3..].iter().all(|byte| *byte == b'a'), "{nth} {room}");
        }
    });
}

#[test]
fn a_failed_part_of_a_split_read_repeats_the_whole_read() {
    for nth in [1, 2] {
        simulate(nth, async {
            let error = Some(Errno::EIO);
            let fault = |when| Fault { op: Some(Op::Read), when, delay: Duration::ZERO, error };
            let site = Site::new(vec![fault(When::Nth(nth))], None).await;
            let (bytes, calls) = site.read(0, LEN).await.unwrap();
            assert!(is_uniform(&bytes));
            assert_eq!(calls, 3);
            let site = Site::new(vec![fault(When::Always)], None).await;
            assert_eq!(site.read(0, LEN).await, Err(Errno::EIO));
        });
    }
}

/// Connects as `network` does. The first connection that a large piece of data comes on
/// breaks when it has come, and is made anew.
struct Breaking {
    network: Arc<dyn Connect>,
    to_break: Arc<AtomicBool>,
}

impl Connect for Breaking {
    fn connect(&self) -> Fut<'_, io::Result<Arc<dyn Connection>>> {
        Box::pin(async {
            let (inner, to_break) = (self.network.connect().await?, self.to_break.clone());
            Ok(Arc::new(BreakingConnection { inner, to_break }) as Arc<dyn Connection>)
        })
    }
    fn target(&self) -> String {
        self.network.target()
    }
}

struct BreakingConnection {
    inner: Arc<dyn Connection>,
    to_break: Arc<AtomicBool>,
}

impl Connection for BreakingConnection {
    fn send(&self, head: &[u8], data: Option<Buf>) -> io::Result<()> {
        self.inner.send(head, data)
    }
    fn notify(&self, head: &[u8]) -> io::Result<()> {
        self.inner.notify(head)
    }
    fn run<'a>(&'a self, sink: &'a mut dyn Sink) -> Fut<'a, io::Error> {
        Box::pin(async move {
            let mut sink = BreakingSink { inner: sink, to_break: &self.to_break };
            self.inner.run(&mut sink).await
        })
    }
    fn close(&self) {
        self.inner.close();
    }
    fn queued_frames(&self) -> usize {
        self.inner.queued_frames()
    }
    fn unfinished(&self) -> Unfinished {
        self.inner.unfinished()
    }
    fn peer(&self) -> Peer {
        self.inner.peer()
    }
}

struct BreakingSink<'a> {
    inner: &'a mut dyn Sink,
    to_break: &'a AtomicBool,
}

impl Sink for BreakingSink<'_> {
    fn poll_place(
        &mut self,
        cx: &mut TaskContext<'_>,
        head: &[u8],
        data_bytes: usize,
    ) -> Poll<io::Result<BufMut>> {
        self.inner.poll_place(cx, head, data_bytes)
    }
    fn frame(&mut self, head: &[u8], data: Option<BufMut>) -> io::Result<()> {
        match data.is_some() && self.to_break.swap(false, Ordering::Relaxed) {
            true => Err(io::ErrorKind::ConnectionReset.into()),
            false => self.inner.frame(head, data),
        }
    }
}

/// The data of the half had begun to come, so that its part of the buffer had gone with the
/// connection. The other part found nothing to be put to, which ended the process.
// proves: P17
#[test]
fn a_connection_that_breaks_within_a_split_read_does_no_harm() {
    for seed in 0..4 {
        simulate(seed, async {
            let to_break = Arc::new(AtomicBool::new(false));
            let breaking = |network: &Network| {
                let (network, to_break) = (network.connector("server"), to_break.clone());
                Arc::new(Breaking { network, to_break }) as Arc<dyn Connect>
            };
            let site = Site::over(breaking, Vec::new(), None).await;
            to_break.store(true, Ordering::Relaxed);
            let read = site.reader.read(&Context::system(), 0, BufMut::heap(LEN)).await;
            let read = read.map_err(|(error, _)| error).unwrap();
            assert!(!to_break.load(Ordering::Relaxed), "the test needs a half with data");
            assert!(is_uniform(read.filled()));
        });
    }
}
