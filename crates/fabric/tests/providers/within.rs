//! What connections within this process promise beyond the suite.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use dray_core::{Buf, BufMut, Memory, Pages, Take};
use dray_fabric::{Connect, Connection, Listener, Sink, local};
use dray_rt::{DriverKind, Executor, spawn};

use crate::lent::lent;
use crate::rig::until;
use crate::sink::Log;

/// Both ends of a connection.
async fn pair() -> (Arc<dyn Connection>, Arc<dyn Connection>) {
    let (listener, connector) = local::listen();
    let near = connector.connect().await.unwrap();
    (near, listener.accept().await.unwrap().establish().unwrap())
}

#[test]
fn data_are_handed_over_by_reference() {
    Executor::new(DriverKind::Epoll).unwrap().block_on(async {
        let (near, far) = pair().await;
        let log = Log::default();
        spawn(log.clone().run(far, None));
        let (data, in_use) = lent(vec![7; 1 << 20]);
        let start = data.as_ptr();
        let copied_before = dray_core::copied_bytes();
        near.send(b"head", Some(data)).unwrap();
        until("it is there", || log.count() == 1).await;
        let received = log.lock().frames.pop().unwrap().1.unwrap();
        assert_eq!((received.as_ptr(), received.len()), (start, 1 << 20));
        assert!(dray_core::copied_bytes() - copied_before < 1 << 20, "they were copied");
        assert!(in_use.load(Ordering::SeqCst));
        drop(received);
        assert!(!in_use.load(Ordering::SeqCst));
    });
}

/// Else a front end whose server hangs would fill the memory with connections.
#[test]
fn connections_that_wait_are_bounded() {
    Executor::new(DriverKind::Epoll).unwrap().block_on(async {
        let (listener, connector) = local::listen();
        let mut waiting = Vec::new();
        let refused = loop {
            match connector.connect().await {
                Ok(connection) => waiting.push(connection),
                Err(error) => break error.kind(),
            }
            assert!(waiting.len() < 10_000);
        };
        assert_eq!(refused, std::io::ErrorKind::ConnectionRefused);
        let accepted = listener.accept().await.unwrap();
        connector.connect().await.unwrap();
        drop(accepted);
    });
}

/// As with sockets, whose buffers outlive their sender; but the memory is the sender's again.
#[test]
fn what_was_sent_before_the_end_arrives_as_far_as_it_is_little() {
    Executor::new(DriverKind::Epoll).unwrap().block_on(async {
        let (near, far) = pair().await;
        let (data, in_use) = lent(vec![7; 100_000]);
        for number in 0..5u8 {
            near.send(&[number], Some(data.clone())).unwrap();
        }
        drop(data);
        near.close();
        assert!(!in_use.load(Ordering::SeqCst));
        let log = Log::default();
        log.clone().run(far, None).await;
        assert_eq!(log.heads(), [[0], [1]], "256 KiB at most");
        let whole = |frame: &(Vec<u8>, Option<Buf>)| frame.1.as_deref() == Some(&[7; 100_000][..]);
        assert!(log.lock().frames.iter().all(whole));
    });
}

/// Has its sender ask for the memory of what it looks at, and takes it later.
struct Recalling {
    near: Arc<dyn Connection>,
    recalled: bool,
    taken: Option<Buf>,
}

impl Sink for Recalling {
    fn poll_place(
        &mut self,
        _: &mut Context<'_>,
        _: &[u8],
        bytes: usize,
    ) -> Poll<io::Result<BufMut>> {
        Poll::Ready(Ok(BufMut::heap(bytes)))
    }

    fn poll_shared(&mut self, cx: &mut Context<'_>, _: &[u8], data: &Buf) -> Poll<io::Result<()>> {
        if !std::mem::replace(&mut self.recalled, true) {
            self.near.let_go(data);
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.taken = Some(data.clone());
        Poll::Ready(Err(io::ErrorKind::Other.into()))
    }

    fn frame(&mut self, _: &[u8], _: Option<BufMut>) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn what_a_receiver_looks_at_is_let_go_as_well() {
    Executor::new(DriverKind::Epoll).unwrap().block_on(async {
        let (near, far) = pair().await;
        let (data, in_use) = lent(vec![7; 1000]);
        near.send(b"head", Some(data)).unwrap();
        let mut sink = Recalling { near, recalled: false, taken: None };
        far.run(&mut sink).await;
        assert_eq!(sink.taken.as_deref(), Some(&[7; 1000][..]));
        assert!(!in_use.load(Ordering::SeqCst), "it is shared all the same");
    });
}

/// Content that is taken once.
struct InPages {
    fetched: AtomicBool,
    memory: Vec<u8>,
}

impl Memory for InPages {
    fn pages(&self) -> Option<&dyn Pages> {
        Some(self)
    }
}

impl Pages for InPages {
    fn take(&self, _: usize, _: Take<'_>) -> Option<io::Result<usize>> {
        panic!("a sender that sends it again would find nothing");
    }

    fn fetch(&self) {
        self.fetched.store(true, Ordering::SeqCst);
    }
}

#[test]
fn what_lies_in_pages_is_in_memory_when_it_is_sent() {
    Executor::new(DriverKind::Epoll).unwrap().block_on(async {
        let (near, _far) = pair().await;
        let pages = InPages { fetched: AtomicBool::new(false), memory: vec![7; 16] };
        let pages = Arc::new(pages);
        let start = std::ptr::NonNull::from(&pages.memory[..]).cast();
        // SAFETY: the owner keeps the vector, which is neither moved nor written to.
        let data = unsafe { Buf::over(start, 16, pages.clone()) };
        near.send(b"head", Some(data)).unwrap();
        assert!(pages.fetched.load(Ordering::SeqCst));
    });
}
