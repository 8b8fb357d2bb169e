//! The invalidator: it has the kernel drop what other clients have changed. Their notifications are
//! only advice, since each open compares versions anyway. A caller that is granted a lock waits until
//! the cached pages are dropped.
//!
//! Dropped by another process. The kernel waits for pages that are being read, and has those
//! written back that were stored into through a mapping; both take a daemon. One that waited for
//! them itself could not be reaped when it is killed or gives way to another. Without that nobody
//! comes who would answer. The mount would stand still for ever.

use std::collections::BTreeSet;
use std::future::{Future, poll_fn};
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Poll;
use std::time::Duration;

use dray_core::{Context, FileId, Name};
use dray_rt::sync::watch;
use dray_rt::{Instant, now, sleep, timeout};

use crate::front::passthrough::{follow_now, follow_soon};
use crate::notify::{expire_entry, inval_inode};
use crate::worker::drop_requests::{DropRequest, DropRequests, NUMBER_BYTES};
use crate::worker::shared::MountShared;

/// Nodes sent at once: pipes take as many bytes whole or not at all (`PIPE_BUF`).
const NODES_MAX: usize = 512;
/// Nodes that may wait for the process to be started; more are left to their next open. (Then what
/// its pipe has room for may wait: 8,192.)
const WAITING_MAX: usize = 1024;
/// How long it is not tried again where there is no process to be had.
const PAUSE: Duration = Duration::from_secs(10);
/// After this a node for which there was no room is sent again.
const RETRY: Duration = Duration::from_millis(1);
/// How long one who was signalled waits on.
const SIGNALLED_MAX: Duration = Duration::from_secs(1);

/// A process that drops the nodes and names it receives.
pub struct InvalidatorProcess {
    /// Where it reads them.
    pub nodes: PipeWriter,
    /// Where it tells how many it has dropped.
    pub dropped: PipeReader,
}

/// Sends nodes whose pages and attributes are to be dropped to a process that drops them.
pub(crate) struct Invalidator {
    progress: Mutex<Progress>,
    /// How many of what was sent are dropped, or never will be because their process has ended.
    dropped: watch::Sender<u64>,
}

#[derive(Default)]
struct Progress {
    process: Process,
    /// Nodes and names sent so far, to this process and to those before it.
    count: u64,
    /// Processes started so far.
    processes: u64,
}

#[derive(Default)]
enum Process {
    /// None is needed so far.
    #[default]
    NotStarted,
    /// The process is being started, for these nodes.
    Starting(BTreeSet<u64>),
    /// The process reads nodes at the other end.
    Runs(PipeWriter),
    /// There was none to be had.
    Refused(Instant),
}

/// When a node is dropped.
#[derive(Debug, PartialEq, Eq)]
enum DropStatus {
    /// Once as many have been dropped.
    Behind(u64),
    /// The node has to be sent again later.
    Later,
    /// The process has to be started, and the node sent again.
    Start,
    /// There is nobody to drop it.
    Never,
}

impl Default for Invalidator {
    fn default() -> Invalidator {
        Invalidator { progress: Mutex::default(), dropped: watch::channel(0).0 }
    }
}

impl Invalidator {
    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if the process has to be started.
    fn add(&self, nodes: BTreeSet<u64>) -> bool {
        let mut progress = self.lock();
        let Progress { process, count, .. } = &mut *progress;
        match process {
            Process::Starting(waiting) => {
                waiting.extend(nodes.into_iter().take(WAITING_MAX.saturating_sub(waiting.len())));
                return false;
            }
            Process::Refused(since) if since.elapsed() < PAUSE => return false,
            Process::Runs(pipe) if tell(pipe, count, &nodes).is_ok() => return false,
            Process::NotStarted | Process::Runs(_) | Process::Refused(_) => {}
        }
        self.begin(&mut progress, nodes.into_iter().take(WAITING_MAX).collect());
        true
    }

    /// As [`Invalidator::add`], for somebody who waits for it.
    fn ask(&self, request: DropRequest<'_>) -> DropStatus {
        let mut progress = self.lock();
        let Progress { process, count, .. } = &mut *progress;
        match process {
            Process::Starting(_) => return DropStatus::Later,
            Process::Refused(since) if since.elapsed() < PAUSE => return DropStatus::Never,
            Process::Runs(pipe) => match ask(pipe, count, request) {
                Ok(false) => return DropStatus::Later,
                Ok(true) => return DropStatus::Behind(*count),
                Err(_) => {}
            },
            Process::NotStarted | Process::Refused(_) => {}
        }
        self.begin(&mut progress, BTreeSet::new());
        DropStatus::Start
    }

    fn begin(&self, progress: &mut Progress, waiting: BTreeSet<u64>) {
        progress.process = Process::Starting(waiting);
        progress.processes += 1;
        self.dropped.send_replace(progress.count); // of the one before nobody hears any more
    }

    /// The process has been started, or the error says why not. Returns the number of the process,
    /// and how many nodes were sent before it.
    fn started(&self, pipe: io::Result<PipeWriter>) -> (u64, u64) {
        let mut progress = self.lock();
        let which = (progress.processes, progress.count);
        let waiting = match std::mem::take(&mut progress.process) {
            Process::Starting(waiting) => waiting,
            _ => BTreeSet::new(),
        };
        let runs = pipe.and_then(|pipe| {
            never_wait(pipe.as_fd())?;
            tell(&pipe, &mut progress.count, &waiting)?;
            Ok(Process::Runs(pipe))
        });
        progress.process = runs.unwrap_or_else(|_| Process::Refused(now()));
        which
    }

    /// As many have been dropped in all; no more than were sent, whatever the process says.
    fn note_dropped(&self, count: u64) {
        let count = count.min(self.lock().count);
        self.dropped.send_if_modified(|dropped| {
            let more = count > *dropped;
            *dropped = count.max(*dropped);
            more
        });
    }

    /// The process has ended. Nobody waits for what it had not dropped.
    fn ended(&self, number: u64) {
        let mut progress = self.lock();
        if progress.processes == number && matches!(progress.process, Process::Runs(_)) {
            progress.process = Process::NotStarted;
            self.dropped.send_replace(progress.count);
        }
    }
}

/// Returns how many of `nodes` there was room for, and adds them to `count`. Errors: nobody reads them
/// any more.
fn tell(mut pipe: &PipeWriter, count: &mut u64, nodes: &BTreeSet<u64>) -> io::Result<usize> {
    let bytes: Vec<u8> = nodes.iter().flat_map(|node| node.to_ne_bytes()).collect();
    let mut sent = 0;
    for some in bytes.chunks(NODES_MAX * NUMBER_BYTES) {
        match pipe.write(some) {
            // Full: it waits for something.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            written => sent += written? / NUMBER_BYTES,
        }
    }
    *count += sent as u64;
    Ok(sent)
}

/// As [`tell`], for one request. False: there was no room.
fn ask(mut pipe: &PipeWriter, count: &mut u64, request: DropRequest<'_>) -> io::Result<bool> {
    let mut bytes = Vec::new();
    request.put(&mut bytes);
    match pipe.write(&bytes) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
        written => _ = written?, // whole: it is shorter than a pipe takes at once
    }
    *count += 1;
    Ok(true)
}

fn never_wait(pipe: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: no memory is passed.
    match unsafe { libc::fcntl(pipe.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Has the kernel forget what it knows of `files`, soon.
pub(crate) fn drop_soon(shared: &Arc<MountShared>, files: &[FileId]) {
    files.iter().for_each(|file| shared.changes.note(*file));
    files.iter().for_each(|file| follow_soon(shared, *file));
    let nodes: BTreeSet<u64> = files.iter().filter_map(|file| shared.nodes.find(*file)).collect();
    nodes.iter().for_each(|node| shared.versions.changed_by_others(*node));
    drop_nodes_soon(shared, nodes);
}

/// Has the kernel forget what it knows of `node`, a file that the caller has open, before this
/// returns. Where nothing drops its pages, or the caller is signalled and they cannot be had
/// within a second, reading looks whether the file has changed.
pub(crate) async fn drop_now(shared: &Arc<MountShared>, cx: &Context, node: u64) {
    if let Ok(file) = shared.nodes.id(node) {
        shared.changes.note(file);
        follow_now(shared, cx, file).await;
    }
    // Waits for nothing in a file that is open. If it fails, the attributes run out by themselves.
    let _ = inval_inode(shared.device.as_fd(), node, None);
    let mut dropping = pin!(dropped(shared, DropRequest::Node(node)));
    let cancelled = poll_fn(|task| match dropping.as_mut().poll(task) {
        Poll::Ready(_) => Poll::Ready(false),
        Poll::Pending => cx.poll_cancelled(task).map(|_| true),
    });
    if cancelled.await {
        let _ = timeout(SIGNALLED_MAX, dropping).await; // as above
    }
}

/// Has the kernel forget a name in the directory `dir`. False: nothing drops it, and it runs out.
pub(crate) async fn name_dropped(shared: &Arc<MountShared>, dir: u64, name: &Name) -> bool {
    dropped(shared, DropRequest::Name { dir, name }).await
}

/// Has the kernel forget the pages and the attributes of a file. False: there is nobody to drop them.
pub(crate) async fn pages_dropped(shared: &Arc<MountShared>, node: u64) -> bool {
    dropped(shared, DropRequest::Node(node)).await
}

/// The same of several files, soon, if there is anybody to do it.
pub(crate) fn drop_nodes_soon(shared: &Arc<MountShared>, nodes: BTreeSet<u64>) {
    if !nodes.is_empty() && shared.invalidator.add(nodes) {
        start(shared);
    }
}

/// False: there is nobody to drop it.
async fn dropped(shared: &Arc<MountShared>, request: DropRequest<'_>) -> bool {
    let mut dropped = shared.invalidator.dropped.subscribe();
    loop {
        match shared.invalidator.ask(request) {
            DropStatus::Behind(count) => {
                let _ = dropped.wait_for(|dropped| *dropped >= count).await; // the sender is there
                return true;
            }
            DropStatus::Never => return false,
            DropStatus::Start => start(shared),
            DropStatus::Later => {}
        }
        sleep(RETRY).await;
    }
}

/// Starts the process, and hears of it until it ends. Not by a worker: the program may lie in this very
/// mount.
fn start(shared: &Arc<MountShared>) {
    let ours = shared.clone();
    let run = move || {
        let process = ours.options.host.start_invalidator(ours.device.as_fd());
        let (nodes, dropped) = match process {
            Ok(InvalidatorProcess { nodes, dropped }) => (Ok(nodes), Some(dropped)),
            Err(error) => (Err(error), None),
        };
        let (number, before) = ours.invalidator.started(nodes);
        let invalidator = Arc::downgrade(&ours.invalidator);
        drop(ours); // the process ends with the mount, and not the mount with the process
        if let Some(dropped) = dropped {
            hear(&invalidator, (number, before), dropped);
        }
    };
    if let Err(error) = std::thread::Builder::new().name("dray-invalidate".into()).spawn(run) {
        shared.invalidator.started(Err(error));
    }
}

fn hear(invalidator: &Weak<Invalidator>, (number, before): (u64, u64), mut dropped: impl Read) {
    let mut bytes = [0; NUMBER_BYTES];
    while dropped.read_exact(&mut bytes).is_ok() {
        let Some(invalidator) = invalidator.upgrade() else { return };
        invalidator.note_dropped(before.saturating_add(u64::from_ne_bytes(bytes)));
    }
    if let Some(invalidator) = invalidator.upgrade() {
        invalidator.ended(number);
    }
}

/// Has the kernel behind `device` drop its cache of the nodes and names that are read from `requests`, until
/// these end. [`Host::start_invalidator`](crate::Host::start_invalidator) writes them there.
/// How many it has dropped so far is written to `dropped`.
///
/// For a process that has nothing else to do and is no daemon: it waits as any application does.
/// Errors: those of reading `requests` and of writing to `dropped`; `EPROTO`: nobody writes this.
pub fn invalidate_nodes(
    device: BorrowedFd<'_>,
    mut requests: impl Read,
    mut dropped: impl Write,
) -> io::Result<()> {
    let mut pending = DropRequests::default();
    let mut count: u64 = 0;
    while pending.read_from(&mut requests)? {
        let mut nodes = BTreeSet::new();
        while let Some(request) = pending.next()? {
            count += 1;
            match request {
                DropRequest::Node(node) => _ = nodes.insert(node),
                DropRequest::Name { dir, name } => {
                    let _ = expire_entry(device, dir, name); // else it runs out
                }
            }
        }
        // Attributes first, for which pages are not waited for: with them a read looks again at all.
        for data in [None, Some((0, 0))] {
            for &node in &nodes {
                let _ = inval_inode(device, node, data); // else they run out
            }
        }
        dropped.write_all(&count.to_ne_bytes())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(numbers: std::ops::Range<u64>) -> BTreeSet<u64> {
        numbers.collect()
    }

    fn read(mut pipe: impl Read) -> Vec<u64> {
        let mut bytes = vec![0; 1 << 20];
        let read = pipe.read(&mut bytes).unwrap();
        let (numbers, rest) = bytes[..read].as_chunks();
        assert!(rest.is_empty());
        numbers.iter().map(|number| u64::from_ne_bytes(*number)).collect()
    }

    fn dropped(invalidator: &Invalidator) -> u64 {
        *invalidator.dropped.borrow()
    }

    #[test]
    fn what_waits_for_the_process_is_bounded_and_sent_once_it_is_there() {
        let invalidator = Invalidator::default();
        assert!(
            invalidator.add(nodes(1..3)) && !invalidator.add(nodes(2..5)),
            "it is started once"
        );
        assert!(!invalidator.add(nodes(5..100_000)));
        let (reader, writer) = io::pipe().unwrap();
        invalidator.started(Ok(writer));
        assert!(!invalidator.add(nodes(7..8)));
        let expected: Vec<u64> = (1..=WAITING_MAX as u64).chain([7]).collect();
        assert_eq!(read(&reader), expected);
        // No process is waited for, and each node is sent whole.
        (0..100).for_each(|_| assert!(!invalidator.add(nodes(1..NODES_MAX as u64 + 1))));
        assert_eq!(invalidator.ask(DropRequest::Node(7)), DropStatus::Later, "there is no room");
        assert_eq!(read(&reader).len() % NODES_MAX, 0);
        drop(reader);
        assert!(invalidator.add(nodes(1..2)), "another one is started");
    }

    // proves: P55
    #[test]
    fn a_waiter_is_notified_when_its_node_has_been_dropped() {
        let invalidator = Arc::new(Invalidator::default());
        assert_eq!(invalidator.ask(DropRequest::Node(1)), DropStatus::Start);
        assert_eq!(invalidator.ask(DropRequest::Node(2)), DropStatus::Later);
        assert!(!invalidator.add(nodes(1..3)));
        let (reader, writer) = io::pipe().unwrap();
        let which = invalidator.started(Ok(writer));
        assert_eq!(invalidator.ask(DropRequest::Node(3)), DropStatus::Behind(3));
        assert_eq!(read(&reader), [1, 2, 3]);
        assert_eq!(dropped(&invalidator), 0);
        let answers = [2u64, 3].map(u64::to_ne_bytes).concat();
        let weak = Arc::downgrade(&invalidator);
        invalidator.note_dropped(2);
        assert_eq!(dropped(&invalidator), 2);
        invalidator.note_dropped(u64::MAX); // an error message, say
        assert_eq!(dropped(&invalidator), 3);
        // The process has gone: nobody waits for nodes that it had not dropped.
        assert_eq!(invalidator.ask(DropRequest::Node(4)), DropStatus::Behind(4));
        hear(&weak, which, &answers[..]);
        assert_eq!(dropped(&invalidator), 4);
        assert_eq!(invalidator.ask(DropRequest::Node(5)), DropStatus::Start);
        // The nodes sent to the next process are counted on, and the end of the last is no end of it.
        let (reader, writer) = io::pipe().unwrap();
        let (number, before) = invalidator.started(Ok(writer));
        assert_eq!((invalidator.ask(DropRequest::Node(5)), before), (DropStatus::Behind(5), 4));
        invalidator.ended(which.0);
        assert_eq!(dropped(&invalidator), 4);
        drop(reader);
        assert_eq!(invalidator.ask(DropRequest::Node(6)), DropStatus::Start, "it has gone unheard");
        assert_eq!(dropped(&invalidator), 5);
        invalidator.ended(number);
        assert_eq!(invalidator.ask(DropRequest::Node(6)), DropStatus::Later);
    }

    #[test]
    fn where_there_is_no_process_to_be_had_it_is_not_tried_all_the_time() {
        let invalidator = Invalidator::default();
        assert!(invalidator.add(nodes(1..2)));
        invalidator.started(Err(io::ErrorKind::Unsupported.into()));
        assert!(!invalidator.add(nodes(1..2)));
        assert_eq!(invalidator.ask(DropRequest::Node(1)), DropStatus::Never);
    }
}
