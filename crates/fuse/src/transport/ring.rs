//! Requests that come and go through io_uring.
//!
//! Each possible CPU has a queue in the kernel, and each queue a number of entries here: a block of
//! headers and a payload. The kernel puts a request into an idle entry. The answer is put into the
//! same entry and committed, which also asks for the next request. One task serves one entry, for
//! ever.
//!
//! The entries outlive the daemon. The end of a thread takes its idle entries out of the queue (see
//! the exit guard in `dray_rt`). So requests wait for a successor. What the dead daemon had read
//! lies in the [`Area`], and the successor answers it from its own rings. Then it registers the
//! idle entries anew. Requests that wait in a queue are not given to entries that are registered,
//! only to entries that become free. Somebody has to ask for something on each CPU
//! ([`crate::wake_queues`]), also when entries are added later.
//!
//! FORGET and INTERRUPT come on /dev/fuse, where a reader stays. A lock request may block for long.
//! As many entries are added to its queue as such requests are under way, so that the request which
//! ends the wait finds one. Any request does while the server is away: a queue that stands still
//! gets more entries, too, so that others can end.

use std::os::fd::{AsRawFd, RawFd};
#[cfg(test)]
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use dray_core::{Buf, BufMut, Memory};
use dray_rt::sync::Notify;
use dray_rt::{Completion, Ring, RingToken, poll_once_then_spawn};
use io_uring::squeue::Entry128;
use io_uring::{opcode, types};

use crate::front::Worker;
use crate::mount::entry_reclaim;
use crate::proto::Head;
use crate::proto::abi::op;
use crate::proto::reply::header;
use crate::proto::wire::Small;
use crate::transport::area::{Area, AreaEntry, OVERWRITTEN_MAX, PAYLOAD_BYTES};
use crate::transport::payloads::{PayloadUse, ReclaimPart};
use crate::transport::queues::Queues;
use crate::transport::{KernelAnswer, KernelMessage};

/// Commands of the ring: take this memory; here is the answer, the next request please.
const REGISTER: u32 = 1;
const COMMIT_AND_FETCH: u32 = 2;
/// Result of a commit of a request that the kernel does not know (any more).
const NOT_FOUND: i32 = -libc::ENOENT;
/// Offsets in the block of headers: the arguments, and what is said about the entry.
const ARGS_AT: usize = 128;
const LOCK_KIND_AT: usize = 32;
const COMMIT_ID_AT: usize = 256 + 8;
const PAYLOAD_SIZE_AT: usize = 256 + 16;

/// One entry of a ring: its memory, and what the kernel last said about it.
pub(crate) struct RingEntry {
    cpu: u16,
    slot: AreaEntry,
    device: RawFd,
    mail: Mutex<Mail>,
    used: PayloadUse,
    /// Keeps the memory in place.
    area: Arc<Area>,
}

// SAFETY: the memory of the slot belongs to the kernel between a commit and its
// completion, and to the entry's task and its leases otherwise.
unsafe impl Send for RingEntry {}
// SAFETY: as above; what several threads touch is behind the mutex.
unsafe impl Sync for RingEntry {}

#[derive(Default)]
struct Mail {
    result: Option<i32>,
    /// The payload is lent out.
    lent: bool,
    waker: Option<Waker>,
}

/// Keeps an entry from being committed as long as somebody uses its payload.
struct Lease(Arc<RingEntry>);

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

impl Completion for RingEntry {
    fn complete(&self, _token: RingToken, result: i32) {
        let mut mail = self.mail();
        mail.result = Some(result);
        let waker = mail.waker.take();
        drop(mail);
        waker.into_iter().for_each(Waker::wake);
    }
}

impl RingEntry {
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

    /// How far a predecessor had come with the entry, if there was one. A request that was
    /// not answered is as the kernel left it.
    fn found(&self) -> EntryContent {
        let request = self.word(COMMIT_ID_AT);
        if request == 0 {
            return EntryContent::Idle;
        }
        if self.slot.is_answered(request) {
            return EntryContent::Answered;
        }
        self.slot.restore(request);
        // The kernel writes the head last.
        match Head::decode(self.slot.headers()) {
            Some(head) if head.unique == request => EntryContent::Request,
            _ => EntryContent::Idle,
        }
    }

    /// Goes on where a predecessor stopped. True if there is a request to be served; else
    /// the entry is in its queue.
    async fn begin(&self, queues: &Queues, ring: &Ring, token: RingToken) -> bool {
        match self.found() {
            EntryContent::Request => {
                queues.taken(self.cpu);
                return true;
            }
            EntryContent::Answered => {
                self.slot.touch(self.payload_len());
                self.commit(ring, token);
                passed(ring).await;
                let mut mail = self.mail();
                if mail.result != Some(NOT_FOUND) {
                    queues.taken(self.cpu);
                    return false;
                }
                mail.result = None; // the kernel had that answer: the entry was idle
            }
            EntryContent::Idle => {}
        }
        queues.wait_open().await;
        self.register(ring, token);
        passed(ring).await;
        match self.mail().result {
            Some(error @ ..0) => queues.refused(self.cpu, error),
            _ => queues.taken(self.cpu),
        }
        false
    }

    fn word(&self, at: usize) -> u64 {
        self.slot.headers()[at..].first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes))
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
        // SAFETY: a submission is 128 bytes with the address at 16 and the length at 24, for which
        // this command has no setter. The two iovecs are in the entry's page.
        unsafe {
            sqe.add(16).cast::<u64>().write_unaligned(self.slot.vectors());
            sqe.add(24).cast::<u32>().write_unaligned(areas_announced(self.cpu));
            ring.push(token, command);
        }
    }

    fn command(&self, command: u32, commit_id: u64) -> Entry128 {
        let mut body = [0; 80];
        body[8..16].copy_from_slice(&commit_id.to_ne_bytes());
        body[16..18].copy_from_slice(&self.cpu.to_ne_bytes());
        opcode::UringCmd80::new(types::Fd(self.device), command).cmd(body).build()
    }

    /// Puts the answer into the entry, waits until nobody uses the payload, and commits. Buffers over
    /// the payload are taken out of `answer`.
    async fn answer(
        &self,
        ring: &Ring,
        token: RingToken,
        unique: u64,
        answer: &mut Result<KernelAnswer, i32>,
    ) {
        let (mut error, bytes) = match &*answer {
            Ok(answer) => (0, answer.bytes()),
            Err(error) => (*error, &[][..]),
        };
        let mut len = bytes.len().min(PAYLOAD_BYTES);
        let here = std::ptr::eq(bytes.as_ptr(), self.slot.payload.as_ptr());
        // What is not in the payload yet gets there when nobody uses that any more; our
        // own buffers over it go first.
        if here {
            *answer = Ok(KernelAnswer::Empty);
        } else if let Ok(KernelAnswer::Data(data)) = answer {
            let elsewhere = data.filled().to_vec();
            *answer = Ok(KernelAnswer::Bytes(elsewhere));
        }
        if self.mail().lent {
            self.until(|mail| (!mail.lent).then_some(())).await;
        }
        let overwritten = if here { 0 } else { len.min(self.payload_len()) };
        if overwritten > OVERWRITTEN_MAX {
            (error, len) = (-libc::EIO, 0); // no operation has both so long
            *answer = Err(error);
        }
        let request = self.word(COMMIT_ID_AT);
        self.slot.keep(request, overwritten.min(OVERWRITTEN_MAX));
        if let Ok(answer) = &*answer
            && !here
        {
            len = self.slot.fill(answer.bytes());
        }
        self.used.takes(len);
        self.slot.put(0, &header(unique, error, len));
        self.slot.put(PAYLOAD_SIZE_AT, &(len as u32).to_ne_bytes());
        self.slot.answered(request);
        self.commit(ring, token);
    }

    /// Gives the answer in the entry to the kernel, and asks for the next request.
    fn commit(&self, ring: &Ring, token: RingToken) {
        let commit = self.command(COMMIT_AND_FETCH, self.word(COMMIT_ID_AT));
        // SAFETY: the command points to nothing; the entry's memory stays mapped.
        unsafe { ring.push(token, commit) };
    }
}

/// What a successor finds in an entry.
#[derive(Clone, Copy, PartialEq, Eq)]
enum EntryContent {
    /// Nothing: it was in the kernel's queue, if anywhere.
    Idle,
    /// A request that was not answered.
    Request,
    /// An answer. The kernel may have it already.
    Answered,
}

/// A request that lies in an entry.
pub(crate) struct RingRequest {
    entry: Arc<RingEntry>,
    /// Bytes of the payload that belong to the request.
    payload_len: usize,
}

impl RingRequest {
    pub(crate) fn head(&self) -> &[u8] {
        &self.entry.slot.headers()[..ARGS_AT]
    }

    pub(crate) fn args(&self) -> &[u8] {
        &self.entry.slot.headers()[ARGS_AT..2 * ARGS_AT]
    }

    pub(crate) fn payload(&self) -> &[u8] {
        let start = self.entry.slot.payload.as_ptr();
        // SAFETY: the kernel has filled these bytes and leaves them alone until the
        // commit. A request that is answered with data has none of them.
        unsafe { std::slice::from_raw_parts(start, self.payload_len) }
    }

    /// Whether it is one of the questions that are to hold all entries at once.
    fn asks_to_reclaim(&self, head: &Head) -> bool {
        head.opcode == op::GETXATTR
            && self.payload().strip_suffix(b"\0") == Some(entry_reclaim::ATTRIBUTE)
    }

    /// The first `size` bytes of the payload, shared from now on.
    pub(crate) fn data(&self, size: usize) -> Buf {
        let size = size.min(self.payload_len);
        self.entry.mail().lent = true;
        let lease = Arc::new(Lease(self.entry.clone()));
        // SAFETY: filled by the kernel, in place while the area lives, and not written
        // before the lease is dropped.
        unsafe { Buf::over(self.entry.slot.payload, size, lease) }
    }

    /// The payload, to be filled with up to `size` bytes.
    pub(crate) fn read_buffer(&self, size: usize) -> BufMut {
        if self.payload_len > 0 || std::mem::replace(&mut self.entry.mail().lent, true) {
            return BufMut::heap(size); // it is in use
        }
        let size = size.min(PAYLOAD_BYTES);
        self.entry.used.takes(size);
        let lease = Arc::new(Lease(self.entry.clone()));
        // SAFETY: in place while the area lives; the request has no bytes in it, and
        // nobody else uses it before the lease is dropped.
        unsafe { BufMut::over(self.entry.slot.payload, size, lease) }
    }
}

/// Starts serving an entry of the queue of `cpu`.
pub(crate) fn start_entry(
    queues: &Arc<Queues>,
    worker: &Arc<Worker>,
    ring: &Ring,
    (cpu, (slot, used_bytes)): (u16, (AreaEntry, usize)),
    spare: bool,
) {
    let entry = Arc::new(RingEntry {
        cpu,
        slot,
        device: queues.device.as_raw_fd(),
        mail: Mutex::default(),
        used: queues.payloads.of_entry(used_bytes),
        area: queues.area.clone(),
    });
    let token = ring.attach(entry.clone());
    let serving = serve_entry(queues.clone(), worker.clone(), ring.clone(), (entry, token), spare);
    // What was under way goes first, so it is polled now.
    poll_once_then_spawn(serving);
}

async fn serve_entry(
    queues: Arc<Queues>,
    worker: Arc<Worker>,
    ring: Ring,
    (entry, token): (Arc<RingEntry>, RingToken),
    spare: bool,
) {
    let settling = queues.settling();
    let mut arrived = entry.begin(&queues, &ring, token).await;
    drop(settling);
    if spare {
        worker.shared.options.host.wake_queues();
    }
    loop {
        if !std::mem::take(&mut arrived) && entry.until(|mail| mail.result.take()).await < 0 {
            return; // the connection has ended, or the kernel wants no ring
        }
        let Some(head) = Head::decode(entry.slot.headers()) else { return };
        let arrived = RingRequest { entry: entry.clone(), payload_len: entry.payload_len() };
        if arrived.asks_to_reclaim(&head) {
            let mut answer = reclaim_answer(&queues, &entry).await;
            drop(arrived);
            entry.answer(&ring, token, head.unique, &mut answer).await;
            continue;
        }
        entry.used.takes(arrived.payload_len);
        let blocks = head.opcode == op::SETLKW && !entry.unlocks();
        let refused = blocks && !queues.begin_blocking(&worker, &ring, entry.cpu);
        queues.begin_request(&worker, &ring, entry.cpu);
        let mut answer = Err(-libc::ENOLCK);
        if !refused {
            let message = KernelMessage::Ring(arrived);
            worker.serve(&message, &mut answer).await;
            if blocks {
                queues.end_blocking(entry.cpu);
            }
        }
        entry.answer(&ring, token, head.unique, &mut answer).await;
        queues.end_request(entry.cpu);
        queues.tend_payloads(&worker);
    }
}

/// Answers a question for which the entries of a queue come together, when they have done so,
/// and gives the memory of this one back.
async fn reclaim_answer(queues: &Arc<Queues>, entry: &RingEntry) -> Result<KernelAnswer, i32> {
    match queues.reclaim_part(entry.cpu) {
        ReclaimPart::None => Err(-libc::ENODATA),
        ReclaimPart::First(wanted) => {
            Ok(KernelAnswer::Small(Small::new().u32(wanted as u32).u32(0)))
        }
        ReclaimPart::Waits { gives, mut end } => {
            if gives && entry.area.give_back(&entry.slot).is_ok() {
                entry.used.given_back();
            }
            let _ = end.changed().await; // the sender is the queue's
            Err(-libc::ENODATA)
        }
    }
}

/// Waits until the kernel has taken what was put on the ring before, and has said so if it
/// refused it.
async fn passed(ring: &Ring) {
    let passed = Arc::new(Passed(Notify::new()));
    let token = ring.attach(passed.clone());
    // SAFETY: the command points to nothing.
    unsafe { ring.push(token, Entry128::from(opcode::Nop::new().build())) };
    passed.0.notified().await;
}

struct Passed(Notify);

impl Completion for Passed {
    fn complete(&self, _token: RingToken, _result: i32) {
        self.0.notify_one();
    }
}

/// How many memory areas are announced to the kernel.
#[cfg(not(test))]
const fn areas_announced(_cpu: u16) -> u32 {
    2
}

/// The same, and one for an entry that it is to refuse.
#[cfg(test)]
fn areas_announced(cpu: u16) -> u32 {
    if refusing::QUEUE.load(Ordering::Relaxed) == u32::from(cpu) { 1 } else { 2 }
}

/// A queue whose entries the kernel refuses, in tests.
#[cfg(test)]
pub(crate) mod refusing {
    pub(crate) static QUEUE: std::sync::atomic::AtomicU32 =
        std::sync::atomic::AtomicU32::new(u32::MAX);
}
