//! Where the data of a frame land: in memory, or in pages of the kernel.

use std::io;
use std::task::{Context, Poll};

use dray_core::BufMut;
use dray_rt::{Interest, Source};

use super::socket::read2;
use crate::sockets::pages::IncomingPages;

/// Data from this size on are worth a pipe.
const PAGES_FROM_BYTES: usize = 256 << 10;

pub(super) struct Landing {
    memory: BufMut,
    /// As long as they stay in pages; the memory is empty then.
    pages: Option<IncomingPages>,
    /// The pages were too small to stay.
    pub(super) in_small_pieces: bool,
    /// Nobody waits for the data: the memory is our own.
    nowhere: bool,
}

/// What came of one call.
pub(super) struct Read {
    /// Bytes read, 0 at the end of the stream.
    pub(super) bytes: usize,
    /// As many of them as are behind the data, in the scratch memory.
    pub(super) behind: usize,
    /// Nothing more is there, until the socket is reported as ready.
    pub(super) drained: bool,
}

impl Landing {
    /// Nothing yet of `data_bytes` bytes; `memory` is empty. `stays`: they may stay in pages.
    pub(super) fn new(memory: BufMut, data_bytes: usize, stays: bool) -> Landing {
        let pages =
            if stays && data_bytes >= PAGES_FROM_BYTES { IncomingPages::new() } else { None };
        Landing { memory, pages, in_small_pieces: false, nowhere: false }
    }

    /// Bytes here.
    pub(super) fn len(&self) -> usize {
        self.pages.as_ref().map_or(self.memory.len(), IncomingPages::len)
    }

    /// Adds what has been read already, before anything else.
    pub(super) fn put(&mut self, bytes: &[u8]) {
        if let Some(pages) = &mut self.pages
            && pages.put(bytes).is_err()
        {
            self.pages = None;
        }
        if self.pages.is_none() {
            self.memory.put(bytes);
        }
    }

    /// Lets the memory for these `data_bytes` bytes go if nobody waits for them any more.
    pub(super) fn let_go_unless(&mut self, awaited: impl FnOnce() -> bool, data_bytes: usize) {
        if self.nowhere || awaited() {
            return;
        }
        let mut nowhere = BufMut::heap(data_bytes);
        nowhere.put(self.memory.filled());
        (self.memory, self.nowhere) = (nowhere, true);
    }

    /// Takes more off the stream: `missing` bytes, and perhaps what is behind them.
    pub(super) fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        source: &Source,
        missing: usize,
        scratch: &mut [u8],
    ) -> Poll<io::Result<Read>> {
        if let Some(pages) = &mut self.pages {
            let moved = source.poll_io(cx, Interest::Read, |fd| pages.receive(fd, missing));
            match moved {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok((bytes, drained))) => {
                    return Poll::Ready(Ok(Read { bytes, behind: 0, drained }));
                }
                Poll::Ready(Err(_)) => self.leave_pages()?,
            }
        }
        let target = &mut self.memory.spare()[..missing];
        let room = missing + scratch.len();
        let read = source.poll_io(cx, Interest::Read, |fd| read2(fd, target, scratch));
        let Poll::Ready(bytes) = read? else { return Poll::Pending };
        // SAFETY: the kernel has filled that much of it.
        unsafe { self.memory.advance(bytes.min(missing)) };
        let behind = bytes.saturating_sub(missing);
        Poll::Ready(Ok(Read { bytes, behind, drained: bytes < room }))
    }

    fn leave_pages(&mut self) -> io::Result<()> {
        self.in_small_pieces = true;
        self.pages.take().map_or(Ok(()), |pages| pages.fetch_into(&mut self.memory))
    }

    /// All of them.
    pub(super) fn into_buffer(self) -> BufMut {
        match self.pages {
            Some(pages) => pages.into_buffer(self.memory),
            None => self.memory,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use dray_core::Buf;
    use dray_rt::{DriverKind, Executor, spawn, timeout};

    use super::*;
    use crate::sockets::frame::Prefix;
    use crate::sockets::stream::StreamConnection;
    use crate::{Connection, DATA_MAX_BYTES, Peer, Sink};

    /// Keeps what comes, in pages if it can.
    struct Keeping(Arc<Mutex<Vec<Buf>>>);

    impl Sink for Keeping {
        fn poll_place(
            &mut self,
            _: &mut Context<'_>,
            _: &[u8],
            bytes: usize,
        ) -> Poll<io::Result<BufMut>> {
            Poll::Ready(Ok(BufMut::heap(bytes)))
        }

        fn is_for_a_file(&self, _: &[u8]) -> bool {
            true
        }

        fn frame(&mut self, _: &[u8], data: Option<BufMut>) -> io::Result<()> {
            self.0.lock().unwrap().extend(data.map(BufMut::freeze));
            Ok(())
        }
    }

    fn content(seed: u32) -> Vec<u8> {
        (0..DATA_MAX_BYTES as u32).map(|at| ((at * 31 + seed) >> 3) as u8).collect()
    }

    fn frame(content: &[u8]) -> Vec<u8> {
        let prefix = Prefix { head_bytes: 4, data_bytes: content.len() };
        let mut bytes = [&prefix.encode()[..], b"head"].concat();
        bytes.resize(prefix.body_at(), 0);
        bytes.extend_from_slice(content);
        bytes
    }

    /// What arrives as `count` frames of what `send` sends, which does so before it is received
    /// as far as the socket takes it.
    fn received(
        (ours, peer): (OwnedFd, Peer),
        count: usize,
        send: impl FnOnce(&std::sync::mpsc::Sender<()>) + Send + 'static,
    ) -> Vec<Buf> {
        let (begun, begins) = std::sync::mpsc::channel();
        let sender = std::thread::spawn(move || send(&begun));
        begins.recv().unwrap();
        let kept = Arc::new(Mutex::new(Vec::new()));
        Executor::new(DriverKind::Epoll).unwrap().block_on(async {
            let connection = Arc::new(StreamConnection::new(ours, peer).unwrap());
            let (runner, mut sink) = (connection.clone(), Keeping(kept.clone()));
            spawn(async move { drop(runner.run(&mut sink).await) });
            let all = async {
                while kept.lock().unwrap().len() < count {
                    dray_rt::sleep(Duration::from_millis(1)).await;
                }
            };
            timeout(Duration::from_secs(60), all).await.expect("it stalled");
        });
        sender.join().unwrap();
        std::mem::take(&mut *kept.lock().unwrap())
    }

    fn tcp() -> ((OwnedFd, Peer), TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (ours, peer) = listener.accept().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.set_nodelay(true).unwrap();
        ((ours.into(), Peer::Ip(peer)), theirs)
    }

    /// Out of the pages, piece by piece.
    fn taken(data: &Buf) -> Vec<u8> {
        let mut bytes = Vec::new();
        while bytes.len() < data.len() {
            let pages = data.pages().expect("they are not in pages");
            let at = bytes.len();
            let take = pages.take(at, &mut |pipe, left| {
                assert_eq!(left, data.len() - at);
                let pipe = std::fs::File::from(pipe.try_clone_to_owned()?);
                pipe.take(left.min(300_000) as u64).read_to_end(&mut bytes)
            });
            assert!(take.expect("they are in memory").unwrap() > 0);
        }
        bytes
    }

    #[test]
    fn what_is_for_a_file_stays_in_pages_until_somebody_looks_at_it() {
        let (ours, mut theirs) = tcp();
        let small = vec![5; PAGES_FROM_BYTES - 1];
        let sent = [content(1), small.clone(), content(2)];
        let data = received(ours, sent.len(), move |begun| {
            begun.send(()).unwrap();
            sent.iter().for_each(|content| theirs.write_all(&frame(content)).unwrap());
        });
        assert!(taken(&data[0]) == content(1));
        assert!(data[1].pages().is_none() && *data[1] == small[..]);
        assert!(data[2].clone().slice(3..700_000)[..] == content(2)[3..700_000]);
        assert!(*data[2] == content(2)[..]);
        let take = |data: &Buf| data.pages().unwrap().take(0, &mut |_, _| Ok(1)).is_none();
        assert!(take(&data[2]), "what was looked at is in memory");
    }

    /// With a pipe, receiving from a Unix socket took twice as many system calls.
    #[test]
    fn what_comes_by_a_unix_socket_is_copied() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let data = received((ours.into(), Peer::Local), 1, move |begun| {
            begun.send(()).unwrap();
            theirs.write_all(&frame(&content(1))).unwrap();
        });
        assert!(data[0].pages().is_none() && *data[0] == content(1)[..]);
    }

    /// A pipe has room for so many pieces, however small they are. It was full with little in it,
    /// which the system tells as if nothing had come, and nothing was read any more.
    #[test]
    fn what_comes_in_small_pieces_arrives_too() {
        let (ours, mut theirs) = tcp();
        let (other, mut elsewhere) = tcp();
        let data = received(ours, 2, move |begun| {
            let mut other = TcpStream::from(other.0);
            other.set_nonblocking(false).unwrap();
            let (first, second) = (frame(&content(1)), frame(&content(2)));
            for (number, piece) in first.chunks(700).enumerate() {
                theirs.write_all(piece).unwrap();
                // The kernel joins what lies side by side in its pages. This lies between.
                elsewhere.write_all(piece).unwrap();
                other.read_exact(&mut vec![0; piece.len()]).unwrap();
                if number == 300 {
                    begun.send(()).unwrap(); // before anybody waits for room
                }
            }
            theirs.write_all(&second).unwrap();
        });
        assert!(data[0].pages().is_none(), "the pipe took all of it");
        assert!(*data[0] == content(1)[..] && *data[1] == content(2)[..]);
        assert!(data[1].pages().is_none(), "it was tried again at once");
    }
}
