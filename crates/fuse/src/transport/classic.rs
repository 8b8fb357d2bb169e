//! Requests read from /dev/fuse and answers written to it.
//!
//! A worker reads into a large buffer, since it cannot know what comes. Small requests
//! are copied out of it; a WRITE keeps the buffer until its data have been passed on.

use std::future::Future;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use dray_core::Buf;
use dray_rt::sync::watch;
use dray_rt::{Interest, Source, poll_once_then_spawn};

use crate::front::Worker;
use crate::mount::device::write_answer;
use crate::proto::abi::op;
use crate::proto::reply::header;
use crate::transport::buffers::{Buffer, Buffers, tend};
use crate::transport::near_caller::NearCaller;
use crate::transport::{KernelAnswer, KernelMessage};

/// Requests up to this size are copied out of the read buffer.
const SMALL_BYTES: usize = 1024;
/// Beside a ring: how long nobody looks for what comes after a FORGET. A process that unlinks
/// causes one each time. To take up each by itself would cost it a wake-up of a thread on perhaps
/// another CPU. An INTERRUPT may come that much late.
const FORGETS_PAUSE: Duration = Duration::from_millis(10);
/// Requests read in a row before other tasks run.
const READS_PER_ROUND: u64 = 16;

/// Requests that came one at a time, in a row, before the next is expected to do so, too.
const ALONE_AFTER: u64 = 8;

/// Where the answer to a request goes.
pub(crate) struct Replier {
    device: Arc<Source>,
    unique: u64,
}

impl Replier {
    /// Answers. Only a connection that has ended refuses an answer of ours, and the
    /// reader learns of that by itself.
    pub(crate) fn send(self, answer: Result<KernelAnswer, i32>) {
        let (error, body) = match &answer {
            Ok(KernelAnswer::Nothing) => return,
            Ok(answer) => (0, answer.bytes()),
            Err(error) => (*error, &[][..]),
        };
        let header = header(self.unique, error, body.len());
        let device = self.device.as_fd();
        let refused = write_answer(device, &header, body).err();
        if refused.is_some_and(|refused| refused.raw_os_error() == Some(libc::EINVAL)) {
            // The kernel found the answer malformed; without any answer it would wait.
            let header = crate::proto::reply::header(self.unique, -libc::EIO, 0);
            let _ = write_answer(device, &header, &[]);
        }
    }
}

/// Reads and serves requests until the mount ends, or until `stop` is set. `crew`: the CPUs of all workers. None: requests
/// of applications come through a ring; here only what the kernel keeps for this way. Errors:
/// those of read(2) that mean something else than the end of the mount, and those of epoll_ctl(2).
pub(crate) async fn run(
    worker: Arc<Worker>,
    device: OwnedFd,
    crew: Option<&[usize]>,
    mut stop: watch::Receiver<bool>,
) -> io::Result<()> {
    let device = Arc::new(Source::new_shared(device)?);
    let beside_ring = crew.is_none();
    let mut near = crew.map(NearCaller::new);
    let buffers = Arc::new(if beside_ring { Buffers::small() } else { Buffers::default() });
    let mut buffer = buffers.take();
    let (mut reads, mut writes) = (0u64, false);
    let mut in_a_row = 0u64;
    let stop_signal = stop.clone();
    let mut stopped = pin!(async move {
        let _ = stop.wait_for(|stop| *stop).await; // or the sender is gone
    });
    let mut alone = true;
    loop {
        // One request at a time for a while: whether there is another is a question for the wait
        // that comes anyway. Where several processes ask, reading on shows it sooner.
        in_a_row = if alone { in_a_row + 1 } else { 0 };
        if in_a_row > ALONE_AFTER {
            device.ask_again();
        }
        let len = match next_request(&device, &mut buffer, writes, stopped.as_mut()).await? {
            Came::Request(len) => len,
            Came::Withdrawn => continue,
            Came::End => return Ok(()),
        };
        writes = len > SMALL_BYTES;
        let message = if writes {
            std::mem::replace(&mut buffer, buffers.take()).into_message()
        } else {
            Buf::from(buffer.message())
        };
        let forgets = beside_ring && is_forget(&message);
        let elsewhere = near.as_mut().is_some_and(|near| near.is_elsewhere(&message, alone));
        serve(&worker, &device, message, &buffers);
        alone = Arc::strong_count(&device) <= 2; // each request under way refers to it
        reads += 1;
        if buffers.are_untended() {
            dray_rt::spawn(tend(Arc::downgrade(&buffers)));
        }
        if forgets {
            // The kernel passes on INTERRUPTs before these.
            device.rest(dray_rt::sleep(FORGETS_PAUSE)).await?;
        } else if elsewhere {
            device.rest(std::future::ready(())).await?; // the kernel puts it behind the others
        }
        if reads.is_multiple_of(READS_PER_ROUND) {
            dray_rt::yield_now().await;
            if *stop_signal.borrow() {
                return Ok(());
            }
        }
    }
}

fn is_forget(message: &[u8]) -> bool {
    let opcode = crate::proto::Head::decode(message).map(|head| head.opcode);
    matches!(opcode, Some(op::FORGET | op::BATCH_FORGET))
}

/// Serves one request.
fn serve(worker: &Arc<Worker>, device: &Arc<Source>, message: Buf, buffers: &Arc<Buffers>) {
    let Some(head) = crate::proto::Head::decode(&message) else { return };
    let message = KernelMessage::Classic(message, buffers.clone());
    let replier = Replier { device: device.clone(), unique: head.unique };
    let worker = worker.clone();
    poll_once_then_spawn(async move {
        let mut answer = Err(-libc::EIO);
        worker.serve(&message, &mut answer).await;
        replier.send(answer);
    });
}

/// What came of waiting for a request.
enum Came {
    /// A request of so many bytes.
    Request(usize),
    /// A request that was withdrawn before it could be read.
    Withdrawn,
    /// The mount has ended, or was to be left.
    End,
}

/// Waits for the next request, of which `writes` guesses that it is a large WRITE, or until
/// `stopped` is ready and no request is there. Errors: those of read(2) that tell of neither.
async fn next_request(
    device: &Source,
    buffer: &mut Buffer,
    writes: bool,
    mut stopped: Pin<&mut impl Future<Output = ()>>,
) -> io::Result<Came> {
    let read = std::future::poll_fn(|cx| {
        let request = device.poll_io(cx, Interest::Read, |fd| {
            if writes {
                buffer.warm(); // the last one may have come back since
            }
            buffer.read(fd)
        });
        match request {
            Poll::Ready(request) => Poll::Ready(Some(request)),
            Poll::Pending => stopped.as_mut().poll(cx).map(|_| None),
        }
    });
    match read.await {
        None | Some(Ok(0)) => Ok(Came::End),
        Some(Ok(len)) => Ok(Came::Request(len)),
        Some(Err(error)) => match error.raw_os_error() {
            Some(libc::ENOENT | libc::EINTR) => Ok(Came::Withdrawn),
            // Unmounted; aborted.
            Some(libc::ENODEV | libc::ECONNABORTED) => Ok(Came::End),
            _ => Err(error),
        },
    }
}
