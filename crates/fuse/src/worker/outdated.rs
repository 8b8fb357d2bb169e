//! What the kernel has cached and other clients have changed. What they tell of is only advice: at an
//! open it is looked at anyway. Whoever is granted a lock waits until it is dropped.
//!
//! Dropped by another process. The kernel waits for pages that are being read, and has those written
//! back that were stored into through a mapping; both take a daemon. One that waited for them itself
//! could not be reaped when it is killed or gives way to another, and without that nobody comes who
//! would answer: the mount would stand still for ever.

use std::collections::BTreeSet;
use std::future::{Future, poll_fn};
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Poll;
use std::time::Duration;

use dray_core::{Context, FileId};
use dray_rt::sync::watch;
use dray_rt::{Instant, now, sleep, timeout};

use crate::notify::inval_inode;
use crate::worker::shared::Shared;

/// Nodes told at once: pipes take as many bytes whole or not at all (`PIPE_BUF`).
const NODES_MAX: usize = 512;
/// Bytes of a node's number, and of a number of nodes.
const NUMBER_BYTES: usize = 8;
/// Nodes that may wait for the process to be started; more are left to their next open. (Then what
/// its pipe has room for may wait: 8,192.)
const WAITING_MAX: usize = 1024;
/// How long it is not tried again where there is no process to be had.
const PAUSE: Duration = Duration::from_secs(10);
/// After this a node is told again for which there was no room.
const RETRY: Duration = Duration::from_millis(1);
/// How long one who was signalled waits on.
const SIGNALLED_MAX: Duration = Duration::from_secs(1);

/// A process that drops what it is told of.
pub struct Dropper {
    /// Where it reads nodes.
    pub nodes: PipeWriter,
    /// Where it tells how many it has dropped.
    pub dropped: PipeReader,
}

/// Who is told of nodes whose pages and attributes are to be dropped.
pub(crate) struct Outdated {
    told: Mutex<Told>,
    /// How many of those told are dropped, or will not be: who dropped them has gone.
    dropped: watch::Sender<u64>,
}

#[derive(Default)]
struct Told {
    process: Process,
    /// Nodes told so far, to this process and to those before it.
    count: u64,
    /// Processes started so far.
    lives: u64,
}

#[derive(Default)]
enum Process {
    /// None is needed so far.
    #[default]
    Unasked,
    /// It is being started, for these nodes.
    Starting(BTreeSet<u64>),
    /// It reads nodes at the other end.
    Runs(PipeWriter),
    /// There was none to be had.
    Refused(Instant),
}

/// When a node is dropped.
#[derive(Debug, PartialEq, Eq)]
enum Asked {
    /// Once as many have been dropped.
    Behind(u64),
    /// It has to be told again later.
    Later,
    /// The process has to be started, and the node told again.
    Start,
    /// There is nobody to drop it.
    Never,
}

impl Default for Outdated {
    fn default() -> Outdated {
        Outdated { told: Mutex::default(), dropped: watch::channel(0).0 }
    }
}

impl Outdated {
    fn lock(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if the process has to be started.
    fn add(&self, nodes: BTreeSet<u64>) -> bool {
        let mut told = self.lock();
        let Told { process, count, .. } = &mut *told;
        match process {
            Process::Starting(waiting) => {
                waiting.extend(nodes.into_iter().take(WAITING_MAX.saturating_sub(waiting.len())));
                return false;
            }
            Process::Refused(since) if since.elapsed() < PAUSE => return false,
            Process::Runs(pipe) if tell(pipe, count, &nodes).is_ok() => return false,
            Process::Unasked | Process::Runs(_) | Process::Refused(_) => {}
        }
        self.begin(&mut told, nodes.into_iter().take(WAITING_MAX).collect());
        true
    }

    /// As [`Outdated::add`], for somebody who waits for it.
    fn ask(&self, node: u64) -> Asked {
        let mut told = self.lock();
        let Told { process, count, .. } = &mut *told;
        match process {
            Process::Starting(_) => return Asked::Later,
            Process::Refused(since) if since.elapsed() < PAUSE => return Asked::Never,
            Process::Runs(pipe) => match tell(pipe, count, &BTreeSet::from([node])) {
                Ok(0) => return Asked::Later,
                Ok(_) => return Asked::Behind(*count),
                Err(_) => {}
            },
            Process::Unasked | Process::Refused(_) => {}
        }
        self.begin(&mut told, BTreeSet::new());
        Asked::Start
    }

    fn begin(&self, told: &mut Told, waiting: BTreeSet<u64>) {
        told.process = Process::Starting(waiting);
        told.lives += 1;
        self.dropped.send_replace(told.count); // of the one before nobody hears any more
    }

    /// It has been started, or why not. Returns which one it is, and how many nodes were told before it.
    fn started(&self, pipe: io::Result<PipeWriter>) -> (u64, u64) {
        let mut told = self.lock();
        let which = (told.lives, told.count);
        let waiting = match std::mem::take(&mut told.process) {
            Process::Starting(waiting) => waiting,
            _ => BTreeSet::new(),
        };
        let runs = pipe.and_then(|pipe| {
            never_wait(pipe.as_fd())?;
            tell(&pipe, &mut told.count, &waiting)?;
            Ok(Process::Runs(pipe))
        });
        told.process = runs.unwrap_or_else(|_| Process::Refused(now()));
        which
    }

    /// As many have been dropped in all; no more than were told, whatever the process says.
    fn note_dropped(&self, count: u64) {
        let count = count.min(self.lock().count);
        self.dropped.send_if_modified(|dropped| {
            let more = count > *dropped;
            *dropped = count.max(*dropped);
            more
        });
    }

    /// The process has ended. Nobody waits for what it had not dropped.
    fn ended(&self, life: u64) {
        let mut told = self.lock();
        if told.lives == life && matches!(told.process, Process::Runs(_)) {
            told.process = Process::Unasked;
            self.dropped.send_replace(told.count);
        }
    }
}

/// Returns how many of `nodes` there was room for, and adds them to `count`. Errors: nobody reads them
/// any more.
fn tell(mut pipe: &PipeWriter, count: &mut u64, nodes: &BTreeSet<u64>) -> io::Result<usize> {
    let bytes: Vec<u8> = nodes.iter().flat_map(|node| node.to_ne_bytes()).collect();
    let mut told = 0;
    for some in bytes.chunks(NODES_MAX * NUMBER_BYTES) {
        match pipe.write(some) {
            // Full: it waits for something.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            written => told += written? / NUMBER_BYTES,
        }
    }
    *count += told as u64;
    Ok(told)
}

fn never_wait(pipe: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: no memory is passed.
    match unsafe { libc::fcntl(pipe.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Has the kernel forget what it knows of `files`, soon.
pub(crate) fn drop_soon(shared: &Arc<Shared>, files: &[FileId]) {
    files.iter().for_each(|file| shared.changes.note(*file));
    let nodes: BTreeSet<u64> = files.iter().filter_map(|file| shared.nodes.find(*file)).collect();
    nodes.iter().for_each(|node| shared.versions.changed_by_others(*node));
    if !nodes.is_empty() && shared.outdated.add(nodes) {
        start(shared);
    }
}

/// Has the kernel forget what it knows of `node`, a file that the caller has open, before this
/// returns. Where nothing drops its pages, or the caller is signalled and they cannot be had
/// within a second, reading looks whether the file has changed.
pub(crate) async fn drop_now(shared: &Arc<Shared>, cx: &Context, node: u64) {
    if let Ok(file) = shared.nodes.id(node) {
        shared.changes.note(file);
    }
    // Waits for nothing in a file that is open. If it fails, the attributes run out by themselves.
    let _ = inval_inode(shared.device.as_fd(), node, None);
    let mut dropping = pin!(dropped(shared, node));
    let cancelled = poll_fn(|task| match dropping.as_mut().poll(task) {
        Poll::Ready(()) => Poll::Ready(false),
        Poll::Pending => cx.poll_cancelled(task).map(|_| true),
    });
    if cancelled.await {
        let _ = timeout(SIGNALLED_MAX, dropping).await;
    }
}

async fn dropped(shared: &Arc<Shared>, node: u64) {
    let mut dropped = shared.outdated.dropped.subscribe();
    loop {
        match shared.outdated.ask(node) {
            Asked::Behind(count) => {
                let _ = dropped.wait_for(|dropped| *dropped >= count).await; // the sender is there
                return;
            }
            Asked::Never => return,
            Asked::Start => start(shared),
            Asked::Later => {}
        }
        sleep(RETRY).await;
    }
}

/// Starts the process, and hears of it until it ends. Not by a worker: the program may lie in this very
/// mount.
fn start(shared: &Arc<Shared>) {
    let ours = shared.clone();
    let run = move || {
        let dropper = ours.options.host.start_dropping(ours.device.as_fd());
        let (nodes, dropped) = match dropper {
            Ok(Dropper { nodes, dropped }) => (Ok(nodes), Some(dropped)),
            Err(error) => (Err(error), None),
        };
        let (life, before) = ours.outdated.started(nodes);
        let outdated = Arc::downgrade(&ours.outdated);
        drop(ours); // the process ends with the mount, and not the mount with the process
        if let Some(dropped) = dropped {
            hear(&outdated, (life, before), dropped);
        }
    };
    if let Err(error) = std::thread::Builder::new().name("dray-outdated".into()).spawn(run) {
        shared.outdated.started(Err(error));
    }
}

fn hear(outdated: &Weak<Outdated>, (life, before): (u64, u64), mut dropped: impl Read) {
    let mut bytes = [0; NUMBER_BYTES];
    while dropped.read_exact(&mut bytes).is_ok() {
        let Some(outdated) = outdated.upgrade() else { return };
        outdated.note_dropped(before.saturating_add(u64::from_ne_bytes(bytes)));
    }
    if let Some(outdated) = outdated.upgrade() {
        outdated.ended(life);
    }
}

/// Has the kernel behind `device` drop what it has cached of the nodes that are read from `nodes`, as
/// [`Host::start_dropping`](crate::Host::start_dropping) writes them there, until these end; how many
/// it has dropped so far is written to `dropped`.
///
/// For a process that has nothing else to do and is no daemon: it waits as any application does.
/// Errors: those of reading `nodes` and of writing to `dropped`.
pub fn drop_outdated(
    device: BorrowedFd<'_>,
    mut nodes: impl Read,
    mut dropped: impl Write,
) -> io::Result<()> {
    let mut bytes = [0; NODES_MAX * NUMBER_BYTES];
    let mut count: u64 = 0;
    loop {
        let read = match nodes.read(&mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            read => read?,
        };
        if read == 0 {
            return Ok(());
        }
        let (some, _) = bytes[..read].as_chunks::<NUMBER_BYTES>();
        count += some.len() as u64;
        let some: BTreeSet<u64> = some.iter().map(|node| u64::from_ne_bytes(*node)).collect();
        // Attributes first, for which pages are not waited for: with them a read looks again at all.
        for data in [None, Some((0, 0))] {
            for &node in &some {
                let _ = inval_inode(device, node, data); // else they run out
            }
        }
        dropped.write_all(&count.to_ne_bytes())?;
    }
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

    fn dropped(outdated: &Outdated) -> u64 {
        *outdated.dropped.borrow()
    }

    #[test]
    fn what_waits_for_the_process_is_bounded_and_told_once_it_is_there() {
        let outdated = Outdated::default();
        assert!(outdated.add(nodes(1..3)) && !outdated.add(nodes(2..5)), "it is started once");
        assert!(!outdated.add(nodes(5..100_000)));
        let (reader, writer) = io::pipe().unwrap();
        outdated.started(Ok(writer));
        assert!(!outdated.add(nodes(7..8)));
        let expected: Vec<u64> = (1..=WAITING_MAX as u64).chain([7]).collect();
        assert_eq!(read(&reader), expected);
        // Nobody is waited for, and what is told is whole.
        (0..100).for_each(|_| assert!(!outdated.add(nodes(1..NODES_MAX as u64 + 1))));
        assert_eq!(outdated.ask(7), Asked::Later, "there is no room");
        assert_eq!(read(&reader).len() % NODES_MAX, 0);
        drop(reader);
        assert!(outdated.add(nodes(1..2)), "another one is started");
    }

    #[test]
    fn who_waits_is_told_when_its_node_has_been_dropped() {
        let outdated = Arc::new(Outdated::default());
        assert_eq!(outdated.ask(1), Asked::Start);
        assert_eq!(outdated.ask(2), Asked::Later);
        assert!(!outdated.add(nodes(1..3)));
        let (reader, writer) = io::pipe().unwrap();
        let which = outdated.started(Ok(writer));
        assert_eq!(outdated.ask(3), Asked::Behind(3));
        assert_eq!(read(&reader), [1, 2, 3]);
        assert_eq!(dropped(&outdated), 0);
        let answers = [2u64, 3].map(u64::to_ne_bytes).concat();
        let weak = Arc::downgrade(&outdated);
        outdated.note_dropped(2);
        assert_eq!(dropped(&outdated), 2);
        outdated.note_dropped(u64::MAX); // an error message, say
        assert_eq!(dropped(&outdated), 3);
        // It has gone: nobody waits for what it had not dropped.
        assert_eq!(outdated.ask(4), Asked::Behind(4));
        hear(&weak, which, &answers[..]);
        assert_eq!(dropped(&outdated), 4);
        assert_eq!(outdated.ask(5), Asked::Start);
        // What the next one is told is counted on, and the end of the last is no end of it.
        let (reader, writer) = io::pipe().unwrap();
        let (life, before) = outdated.started(Ok(writer));
        assert_eq!((outdated.ask(5), before), (Asked::Behind(5), 4));
        outdated.ended(which.0);
        assert_eq!(dropped(&outdated), 4);
        drop(reader);
        assert_eq!(outdated.ask(6), Asked::Start, "it has gone unheard");
        assert_eq!(dropped(&outdated), 5);
        outdated.ended(life);
        assert_eq!(outdated.ask(6), Asked::Later);
    }

    #[test]
    fn where_there_is_no_process_to_be_had_it_is_not_tried_all_the_time() {
        let outdated = Outdated::default();
        assert!(outdated.add(nodes(1..2)));
        outdated.started(Err(io::ErrorKind::Unsupported.into()));
        assert!(!outdated.add(nodes(1..2)));
        assert_eq!(outdated.ask(1), Asked::Never);
    }
}
