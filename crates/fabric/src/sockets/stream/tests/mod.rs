//! What is sent, when and in which order; what is received, and which connection is served next.

mod memory;

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use dray_core::BufMut;
use dray_rt::{DriverKind, Executor, spawn, yield_now};

use super::queue::BATCH_BYTES;
use super::*;
use crate::{HEAD_MAX_BYTES, NOTICES_MAX};

/// Refuses whatever comes, with a last word.
struct Refusing(Arc<StreamConnection>);

impl Sink for Refusing {
    fn poll_place(
        &mut self,
        _: &mut Context<'_>,
        _: &[u8],
        bytes: usize,
    ) -> Poll<io::Result<BufMut>> {
        Poll::Ready(Ok(BufMut::heap(bytes)))
    }

    fn frame(&mut self, _: &[u8], _: Option<BufMut>) -> io::Result<()> {
        self.0.send(b"refused", None)?;
        Err(io::ErrorKind::PermissionDenied.into())
    }
}

fn pair() -> (Arc<StreamConnection>, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    theirs.set_nonblocking(true).unwrap();
    (Arc::new(StreamConnection::new(ours.into(), Peer::Local).unwrap()), theirs)
}

fn arrived(socket: &mut UnixStream) -> Vec<u8> {
    let mut bytes = vec![0; 4 * HEAD_MAX_BYTES + (1 << 20)];
    let count = socket.read(&mut bytes).unwrap_or(0);
    bytes.truncate(count);
    bytes
}

fn frame(head: &[u8]) -> Vec<u8> {
    [&Prefix { head_bytes: head.len(), data_bytes: 0 }.encode()[..], head].concat()
}

fn run(connection: &Arc<StreamConnection>) {
    let connection = connection.clone();
    spawn(async move {
        let mut sink = Refusing(connection.clone());
        connection.run(&mut sink).await;
    });
}

#[test]
fn what_is_sent_in_one_tick_goes_out_together_and_in_order() {
    Executor::new(DriverKind::Epoll).unwrap().block_on(async {
        let (connection, mut theirs) = pair();
        connection.send(b"before the runner", None).unwrap();
        assert_eq!(arrived(&mut theirs), frame(b"before the runner"));
        run(&connection);
        yield_now().await;
        connection.send(b"one", None).unwrap();
        connection.send(b"two", None).unwrap();
        assert_eq!(arrived(&mut theirs), b"", "not before the end of the tick");
        yield_now().await;
        assert_eq!(arrived(&mut theirs), [frame(b"one"), frame(b"two")].concat());
    });
}

#[test]
fn what_is_large_or_comes_from_elsewhere_waits_for_nothing() {
    Executor::new(DriverKind::Epoll).unwrap().block_on(async {
        let (connection, mut theirs) = pair();
        run(&connection);
        yield_now().await;
        connection.send(b"waits", None).unwrap();
        connection.send(b"does not", Some(Buf::from(vec![7; BATCH_BYTES]))).unwrap();
        let came = arrived(&mut theirs);
        assert!(came.starts_with(&frame(b"waits")) && came.len() > BATCH_BYTES);
        let other = connection.clone();
        std::thread::spawn(move || other.send(b"elsewhere", None).unwrap()).join().unwrap();
        assert_eq!(arrived(&mut theirs), frame(b"elsewhere"));
        connection.send(b"flushed", None).unwrap();
        connection.flush();
        assert_eq!(arrived(&mut theirs), frame(b"flushed"));
    });
}

#[test]
fn a_last_word_is_heard_before_the_end() {
    Executor::new(DriverKind::Epoll).unwrap().block_on(async {
        let (connection, mut theirs) = pair();
        run(&connection);
        std::io::Write::write_all(&mut theirs, &frame(b"hello")).unwrap();
        while !connection.out().closed {
            dray_rt::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(arrived(&mut theirs), frame(b"refused"));
    });
}

/// Answers each frame after a while, and looks at which of the answers the other end has.
struct Answering {
    connection: Arc<StreamConnection>,
    theirs: UnixStream,
    answered_bytes: usize,
    frames: usize,
}

impl Sink for Answering {
    fn poll_place(
        &mut self,
        _: &mut Context<'_>,
        _: &[u8],
        bytes: usize,
    ) -> Poll<io::Result<BufMut>> {
        Poll::Ready(Ok(BufMut::heap(bytes)))
    }

    fn frame(&mut self, _: &[u8], _: Option<BufMut>) -> io::Result<()> {
        let until = dray_rt::now() + Duration::from_micros(60);
        while dray_rt::now() < until {} // to sleep takes longer
        self.connection.send(b"answer", None)?;
        self.frames -= 1;
        let mut arrived = [0; 64];
        match self.frames {
            0 => self.connection.close(),
            _ => self.answered_bytes += self.theirs.read(&mut arrived).unwrap_or(0),
        }
        Ok(())
    }
}

/// A client that had asked for 32 changes at once got all answers together, 0.6 ms later. The server had nothing to do until
/// the client had asked again.
#[test]
fn the_first_answers_are_there_while_the_last_calls_are_carried_out() {
    const FRAMES: usize = 8;
    Executor::new(DriverKind::Epoll).unwrap().block_on(async {
        let (connection, mut theirs) = pair();
        std::io::Write::write_all(&mut theirs, &frame(b"ask").repeat(FRAMES)).unwrap();
        let sent_by = connection.clone();
        let mut sink = Answering { connection: sent_by, theirs, answered_bytes: 0, frames: FRAMES };
        connection.run(&mut sink).await;
        assert!(sink.answered_bytes > 0);
    });
}

/// Takes its time for each frame.
struct Slow(Arc<Mutex<Vec<&'static str>>>);

impl Sink for Slow {
    fn poll_place(
        &mut self,
        _: &mut Context<'_>,
        _: &[u8],
        bytes: usize,
    ) -> Poll<io::Result<BufMut>> {
        Poll::Ready(Ok(BufMut::heap(bytes)))
    }

    fn frame(&mut self, _: &[u8], _: Option<BufMut>) -> io::Result<()> {
        std::thread::sleep(Duration::from_millis(2));
        self.0.lock().unwrap().push("frame");
        Ok(())
    }
}

/// Whatever had arrived of one connection was worked off before any other connection was served: first all
/// frames, then those with large data.
// proves: P132
#[test]
fn one_connection_leaves_others_their_share() {
    const FRAMES: usize = 20;
    for data_bytes in [0, 64 << 10] {
        longest_run(FRAMES, data_bytes);
    }
}

fn longest_run(frames: usize, data_bytes: usize) {
    let prefix = Prefix { head_bytes: 4, data_bytes };
    let mut one = [&prefix.encode()[..], b"work"].concat();
    one.resize(prefix.body_at() + data_bytes, 0);
    Executor::new(DriverKind::Epoll).unwrap().block_on(async {
        let (connection, mut theirs) = pair();
        let events = Arc::new(Mutex::new(Vec::new()));
        let mut sink = Slow(events.clone());
        theirs.set_nonblocking(false).unwrap();
        let writer = std::thread::spawn(move || {
            std::io::Write::write_all(&mut theirs, &one.repeat(frames)).unwrap();
            theirs
        });
        let runner = connection.clone();
        let ended = events.clone();
        spawn(async move {
            let error = runner.run(&mut sink).await;
            ended.lock().unwrap().push("ended");
            drop(error);
        });
        let count = |what| events.lock().unwrap().iter().filter(|it| **it == what).count();
        while count("frame") < frames {
            assert_eq!(count("ended"), 0);
            yield_now().await;
            let mut events = events.lock().unwrap();
            if events.last() != Some(&"other") {
                events.push("other");
            }
        }
        let events = events.lock().unwrap();
        let longest = events.split(|event| *event == "other").map(<[_]>::len).max();
        assert!(longest <= Some(2), "{data_bytes}: {events:?}");
        drop(writer.join().unwrap());
    });
}

/// A peer that did not read had the sender keep all that it had sent.
// proves: P8
#[test]
fn notices_that_wait_are_bounded_and_do_not_count_as_queued() {
    Executor::new(DriverKind::Epoll).unwrap().block_on(async {
        let (connection, mut theirs) = pair();
        run(&connection);
        yield_now().await;
        connection.send(b"head", Some(Buf::from(vec![7; 1 << 20]))).unwrap();
        assert_eq!(connection.queued_frames(), 1);
        for _ in 0..NOTICES_MAX {
            connection.notify(b"notice").unwrap();
        }
        let refused = connection.notify(b"notice").unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
        connection.send(b"last", None).unwrap();
        assert_eq!(connection.queued_frames(), 2);
        let mut came = Vec::new();
        while !came.ends_with(b"last") {
            came.extend(arrived(&mut theirs));
            dray_rt::sleep(Duration::from_millis(1)).await;
        }
        connection.notify(b"notice").unwrap();
    });
}

/// A slow reader gets everything, once it reads.
#[test]
fn what_the_socket_does_not_take_goes_when_it_does() {
    Executor::new(DriverKind::Epoll).unwrap().block_on(async {
        let (connection, mut theirs) = pair();
        run(&connection);
        yield_now().await;
        let mut expected = Vec::new();
        for number in 0u32..40 {
            let data = vec![number as u8; 60_000];
            let head = number.to_le_bytes();
            connection.send(&head, Some(Buf::from(data.clone()))).unwrap();
            let prefix = Prefix { head_bytes: 4, data_bytes: data.len() };
            let mut front = [&prefix.encode()[..], &head].concat();
            front.resize(prefix.body_at(), 0);
            expected.extend([front, data].concat());
        }
        assert!(connection.queued_frames() > 0, "the socket took all of it");
        let mut came = Vec::new();
        while came.len() < expected.len() {
            came.extend(arrived(&mut theirs));
            dray_rt::sleep(Duration::from_millis(1)).await;
        }
        assert!(came == expected);
        assert_eq!(connection.queued_frames(), 0);
    });
}
