//! A look at the first frame of a connection before it is decided who serves it.

use std::io;
use std::os::fd::{AsFd, RawFd};

use dray_rt::{Interest, Source};

use crate::FIRST_HEAD_MAX_BYTES;
use crate::sockets::frame::{PREFIX_BYTES, Prefix};

/// The head of the first frame that arrives on `socket`, which stays there to be read.
/// Waits for it on this thread's executor. Errors: `EPROTO` where no frame begins,
/// `EMSGSIZE` for one longer than 4 KiB, `UnexpectedEof` at the end of the stream, and
/// those of recv(2).
pub(crate) async fn peek_head(socket: &impl AsFd) -> io::Result<Vec<u8>> {
    // Of a descriptor of its own, since the socket will belong to another executor.
    let source = Source::new(socket.as_fd().try_clone_to_owned()?)?;
    let mut bytes = [0; PREFIX_BYTES + FIRST_HEAD_MAX_BYTES];
    source.io(Interest::Read, |fd| look(fd, &mut bytes)).await
}

fn look(fd: RawFd, bytes: &mut [u8]) -> io::Result<Vec<u8>> {
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: the kernel writes at most bytes.len() bytes to it.
    let got = unsafe { libc::recv(fd, bytes.as_mut_ptr().cast(), bytes.len(), flags) };
    let got = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
    if got == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let bytes = &bytes[..got];
    let Some(prefix) = bytes.first_chunk::<PREFIX_BYTES>() else { return Err(incomplete(fd)) };
    let head_bytes = Prefix::decode(prefix)?.head_bytes;
    if head_bytes > FIRST_HEAD_MAX_BYTES {
        return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
    }
    match bytes.get(PREFIX_BYTES..PREFIX_BYTES + head_bytes) {
        Some(head) => Ok(head.to_vec()),
        None => Err(incomplete(fd)),
    }
}

/// Of what has come, there is more to come, or nothing any more: what lies there hides the end.
fn incomplete(fd: RawFd) -> io::Error {
    let mut state = libc::pollfd { fd, events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: one pollfd, which outlives the call.
    let ended = unsafe { libc::poll(&mut state, 1, 0) } == 1;
    if ended { io::ErrorKind::UnexpectedEof.into() } else { io::ErrorKind::WouldBlock.into() }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;

    fn peek(socket: &UnixStream) -> io::Result<Vec<u8>> {
        let mut executor = dray_rt::Executor::new(dray_rt::DriverKind::Epoll).unwrap();
        executor.block_on(peek_head(socket))
    }

    fn frame(head: &[u8]) -> Vec<u8> {
        [&Prefix::of(head, 0).unwrap().encode()[..], head].concat()
    }

    #[test]
    fn a_frame_is_seen_when_it_is_whole_and_stays() {
        let (mut near, mut far) = UnixStream::pair().unwrap();
        let bytes = frame(b"hello");
        let sent = bytes.clone();
        let sender = std::thread::spawn(move || {
            for byte in sent {
                far.write_all(&[byte]).unwrap();
                std::thread::sleep(Duration::from_millis(1));
            }
            far
        });
        assert_eq!(peek(&near).unwrap(), b"hello");
        let mut read = vec![0; bytes.len()];
        near.read_exact(&mut read).unwrap();
        assert_eq!(read, bytes);
        drop(sender.join().unwrap());
        assert_eq!(peek(&near).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    /// A connection that had ended kept its place for ten seconds.
    #[test]
    fn the_end_is_seen_behind_half_a_greeting() {
        for (bytes, pause_ms) in [(1, 0), (4, 20), (9, 0), (12, 20)] {
            let (near, mut far) = UnixStream::pair().unwrap();
            let sender = std::thread::spawn(move || {
                far.write_all(&frame(b"hello")[..bytes]).unwrap();
                std::thread::sleep(Duration::from_millis(pause_ms));
            });
            assert_eq!(peek(&near).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
            sender.join().unwrap();
        }
    }

    #[test]
    fn what_is_no_greeting_is_not_waited_for() {
        for bytes in [vec![b'x'; 40], frame(&vec![0; FIRST_HEAD_MAX_BYTES + 1])[..20].to_vec()] {
            let (near, mut far) = UnixStream::pair().unwrap();
            far.write_all(&bytes).unwrap();
            assert!(peek(&near).is_err());
        }
    }
}
