//! Requests that come and go through io_uring.
//!
//! Each possible CPU has a queue in the kernel, and each queue a number of entries here:
//! a block of headers and a payload. The kernel puts a request into an idle entry; the
//! answer is put into the same entry and committed, which also asks for the next request.
//! One task serves one entry, for ever.
//!
//! FORGET and INTERRUPT come on /dev/fuse, where a reader stays. A lock request may block
//! for long: as many entries are added to its queue as such requests are under way, so
//! that the request which ends the wait finds one.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use dray_core::{Buf, BufMut, Memory};
use dray_rt::{Completion, Ring, RingToken, spawn};
use io_uring::squeue::Entry128;
use io_uring::{opcode, types};

use crate::front::Worker;
use crate::proto::Head;
use crate::proto::abi::op;
use crate::proto::reply::header;
use crate::transport::area::{Area, HEADERS_BYTES, PAYLOAD_BYTES, Slot};
use crate::transport::{Answer, Message};

/// Commands of the ring: take this memory; here is the answer, the next request please.
const REGISTER: u32 = 1;
const COMMIT_AND_FETCH: u32 = 2;
/// Offsets in the block of headers: the arguments, and what is said about the entry.
const ARGS_AT: usize = 128;
const LOCK_KIND_AT: usize = 32;
const COMMIT_ID_AT: usize = 256 + 8;
const PAYLOAD_SIZE_AT: usize = 256 + 16;

/// What the entries of a mount have in common.
pub(crate) struct Queues {
    area: Arc<Area>,
    device: Arc<OwnedFd>,
    depth: usize,
    queues: Vec<Queue>,
}

/// Entries of one CPU's queue, and how many of them hold requests that may block.
#[derive(Default)]
struct Queue {
    entries: AtomicUsize,
    blocking: AtomicUsize,
}

impl Queues {
    /// Queues for `cpus` possible CPUs of `depth` entries each, and `spares_max` in all
    /// for requests that block.
    pub(crate) fn new(
        device: Arc<OwnedFd>,
        cpus: usize,
        depth: usize,
        spares_max: usize,
    ) -> io::Result<Queues> {
        let depth = depth.max(1);
        Ok(Queues {
            area: Arc::new(Area::new(cpus * depth + spares_max)?),
            device,
            depth,
            queues: (0..cpus).map(|_| Queue::default()).collect(),
        })
    }

    /// Number of queues: one for each possible CPU.
    pub(crate) fn cpus(&self) -> usize {
        self.queues.len()
    }

    /// Starts serving the queues with these numbers on this thread's executor.
    pub(crate) fn serve(self: &Arc<Queues>, worker: &Arc<Worker>, ring: &Ring, cpus: &[u16]) {
        for &cpu in cpus {
            for _ in 0..self.depth {
                self.add_entry(worker, ring, cpu);
            }
        }
    }

    /// Adds an entry to a queue; false when the memory for entries is used up.
    fn add_entry(self: &Arc<Queues>, worker: &Arc<Worker>, ring: &Ring, cpu: u16) -> bool {
        let Some(slot) = self.area.take() else { return false };
        self.queues[usize::from(cpu)].entries.fetch_add(1, Ordering::AcqRel);
        let entry = Arc::new(Entry {
            cpu,
            slot,
            device: self.device.as_raw_fd(),
            mail: Mutex::default(),
            _area: self.area.clone(),
        });
        let token = ring.attach(entry.clone());
        spawn(serve_entry(self.clone(), worker.clone(), ring.clone(), entry, token));
        true
    }

    /// A request that may block begins: makes sure that as many entries as without it
    /// are left. False if that cannot be had.
    fn begin_blocking(self: &Arc<Queues>, worker: &Arc<Worker>, ring: &Ring, cpu: u16) -> bool {
        let queue = &self.queues[usize::from(cpu)];
        let blocking = queue.blocking.fetch_add(1, Ordering::AcqRel) + 1;
        if queue.entries.load(Ordering::Acquire) >= self.depth + blocking
            || self.add_entry(worker, ring, cpu)
        {
            return true;
        }
        self.end_blocking(cpu);
        false
    }

    fn end_blocking(&self, cpu: u16) {
        self.queues[usize::from(cpu)].blocking.fetch_sub(1, Ordering::AcqRel);
    }
}

/// One entry: its memory, and what the kernel last said about it.
pub(crate) struct Entry {
    cpu: u16,
    slot: Slot,
    device: RawFd,
    mail: Mutex<Mail>,
    /// Keeps the memory in place.
    _area: Arc<Area>,
}

// SAFETY: the memory of the slot belongs to the kernel between a commit and its
// completion, and to the entry's task and its leases otherwise.
unsafe impl Send for Entry {}
// SAFETY: as above; what several threads touch is behind the mutex.
unsafe impl Sync for Entry {}

#[derive(Default)]
struct Mail {
    result: Option<i32>,
    /// The payload is lent out.
    lent: bool,
    waker: Option<Waker>,
}

/// Keeps an entry from being committed as long as somebody uses its payload.
struct Lease(Arc<Entry>);

impl Memory for Lease {}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut mail = self.0.mail();
        mail.lent = false;
        let waker = mail.waker.take();
        drop(mail);
        waker.into_iter().for_each(Waker::wake);
    }
}

impl Completion for Entry {
    fn complete(&self, _token: RingToken, result: i32) {
        let mut mail = self.mail();
        mail.result = Some(result);
        let waker = mail.waker.take();
        drop(mail);
        waker.into_iter().for_each(Waker::wake);
    }
}

impl Entry {
    fn mail(&self) -> MutexGuard<'_, Mail> {
        self.mail.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `look` finds what it looks for.
    async fn until<T>(&self, mut look: impl FnMut(&mut Mail) -> Option<T>) -> T {
        std::future::poll_fn(|cx| {
            let mut mail = self.mail();
            match look(&mut mail) {
                Some(found) => Poll::Ready(found),
                None => {
                    mail.waker = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }

    /// The block of headers.
    fn headers(&self) -> &[u8] {
        // SAFETY: the page is mapped, and the kernel does not write it while the entry
        // is ours.
        unsafe { std::slice::from_raw_parts(self.slot.page.as_ptr(), HEADERS_BYTES) }
    }

    fn put(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= HEADERS_BYTES);
        // SAFETY: within the block of headers, of which this task is the only user, and
        // to which no reference is alive here.
        unsafe {
            let target = self.slot.page.as_ptr().add(at);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len());
        }
    }

    fn word(&self, at: usize) -> u64 {
        self.headers()[at..].first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes))
    }

    fn payload_len(&self) -> usize {
        (self.word(PAYLOAD_SIZE_AT) as u32 as usize).min(PAYLOAD_BYTES)
    }

    /// Whether the lock request in it gives a lock back, which never blocks.
    fn unlocks(&self) -> bool {
        self.word(ARGS_AT + LOCK_KIND_AT) as u32 == libc::F_UNLCK as u32
    }

    fn register(&self, ring: &Ring, token: RingToken) {
        let mut command = self.command(REGISTER, 0);
        let sqe = (&raw mut command).cast::<u8>();
        // SAFETY: a submission is 128 bytes with the address at 16 and the length at 24,
        // for which this command has no setter; the two iovecs are in the entry's page.
        unsafe {
            sqe.add(16).cast::<u64>().write_unaligned(self.slot.vectors);
            sqe.add(24).cast::<u32>().write_unaligned(2);
            ring.push(token, command);
        }
    }

    fn command(&self, command: u32, commit_id: u64) -> Entry128 {
        let mut body = [0; 80];
        body[8..16].copy_from_slice(&commit_id.to_ne_bytes());
        body[16..18].copy_from_slice(&self.cpu.to_ne_bytes());
        opcode::UringCmd80::new(types::Fd(self.device), command).cmd(body).build()
    }

    /// Puts the answer into the entry, waits until nobody uses the payload, and commits.
    async fn answer(
        &self,
        ring: &Ring,
        token: RingToken,
        unique: u64,
        answer: Result<Answer, i32>,
    ) {
        let (error, answer) = match answer {
            Ok(answer) => (0, answer),
            Err(error) => (error, Answer::Empty),
        };
        let mut len = answer.bytes().len().min(PAYLOAD_BYTES);
        let here = std::ptr::eq(answer.bytes().as_ptr(), self.slot.payload.as_ptr());
        // What is not in the payload yet gets there when nobody uses that any more; our
        // own buffers over it go first.
        let elsewhere = match answer {
            answer if here => {
                drop(answer);
                None
            }
            Answer::Data(data) => Some(Answer::Bytes(data.filled().to_vec())),
            answer => Some(answer),
        };
        if self.mail().lent {
            self.until(|mail| (!mail.lent).then_some(())).await;
        }
        if let Some(answer) = &elsewhere {
            len = self.fill(answer.bytes());
        }
        self.put(0, &header(unique, error, len));
        self.put(PAYLOAD_SIZE_AT, &(len as u32).to_ne_bytes());
        let commit = self.command(COMMIT_AND_FETCH, self.word(COMMIT_ID_AT));
        // SAFETY: the command points to nothing; the entry's memory stays mapped.
        unsafe { ring.push(token, commit) };
    }

    fn fill(&self, bytes: &[u8]) -> usize {
        let len = bytes.len().min(PAYLOAD_BYTES);
        // SAFETY: the payload is mapped, and nobody else uses it now.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.slot.payload.as_ptr(), len);
        }
        len
    }
}

/// A request that lies in an entry.
pub(crate) struct Arrived {
    entry: Arc<Entry>,
    /// Bytes of the payload that belong to the request.
    payload_len: usize,
}

impl Arrived {
    pub(crate) fn head(&self) -> &[u8] {
        &self.entry.headers()[..ARGS_AT]
    }

    pub(crate) fn args(&self) -> &[u8] {
        &self.entry.headers()[ARGS_AT..2 * ARGS_AT]
    }

    pub(crate) fn payload(&self) -> &[u8] {
        let start = self.entry.slot.payload.as_ptr();
        // SAFETY: the kernel has filled these bytes and leaves them alone until the
        // commit. A request that is answered with data has none of them.
        unsafe { std::slice::from_raw_parts(start, self.payload_len) }
    }

    /// The first `size` bytes of the payload, shared from now on.
    pub(crate) fn data(&self, size: usize) -> Buf {
        let size = size.min(self.payload_len);
        // SAFETY: filled by the kernel, in place while the area lives, and not written
        // before the lease is dropped.
        unsafe { Buf::over(self.entry.slot.payload, size, self.lend()) }
    }

    /// The payload, to be filled with up to `size` bytes.
    pub(crate) fn read_buffer(&self, size: usize) -> BufMut {
        if self.payload_len > 0 || self.entry.mail().lent {
            return BufMut::heap(size); // it is in use
        }
        let size = size.min(PAYLOAD_BYTES);
        // SAFETY: in place while the area lives; the request has no bytes in it, and
        // nobody else uses it before the lease is dropped.
        unsafe { BufMut::over(self.entry.slot.payload, size, self.lend()) }
    }

    fn lend(&self) -> Arc<dyn Memory> {
        self.entry.mail().lent = true;
        Arc::new(Lease(self.entry.clone()))
    }
}

async fn serve_entry(
    queues: Arc<Queues>,
    worker: Arc<Worker>,
    ring: Ring,
    entry: Arc<Entry>,
    token: RingToken,
) {
    entry.register(&ring, token);
    loop {
        if entry.until(|mail| mail.result.take()).await < 0 {
            return; // the connection has ended, or the kernel wants no ring
        }
        let Some(head) = Head::decode(entry.headers()) else { return };
        let blocks = head.opcode == op::SETLKW && !entry.unlocks();
        let answer = if blocks && !queues.begin_blocking(&worker, &ring, entry.cpu) {
            Err(-libc::ENOLCK)
        } else {
            let arrived = Arrived { entry: entry.clone(), payload_len: entry.payload_len() };
            let message = Message::Ring(arrived);
            let answer = worker.serve(&message).await;
            if blocks {
                queues.end_blocking(entry.cpu);
            }
            answer
        };
        entry.answer(&ring, token, head.unique, answer).await;
    }
}

/// CPUs that can ever be there: as many queues as the kernel wants served.
pub(crate) fn possible_cpus() -> io::Result<usize> {
    let list = std::fs::read_to_string("/sys/devices/system/cpu/possible")?;
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(last.parse::<usize>().ok()?.checked_sub(first.parse().ok()?)? + 1)
    };
    let count = list.trim().split(',').map(range).sum::<Option<usize>>();
    count.filter(|count| *count > 0).ok_or_else(|| io::ErrorKind::InvalidData.into())
}
