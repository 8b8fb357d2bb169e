//! What the kernel has cached and other clients have changed. Only advice: at an open it is looked
//! at anyway.
//!
//! Dropped by another process. The kernel waits for pages that are being read, and has those written
//! back that were stored into through a mapping; both take a daemon. One that waited for them itself
//! could not be reaped when it is killed or gives way to another, and without that nobody comes who
//! would answer: the mount would stand still for ever.

use std::collections::BTreeSet;
use std::io::{self, PipeWriter, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::FileId;
use dray_rt::{Instant, now};

use crate::notify::inval_inode;
use crate::worker::shared::Shared;

/// Nodes told at once: pipes take as many bytes whole or not at all (`PIPE_BUF`).
const NODES_MAX: usize = 512;
/// Bytes of a node's number.
const NODE_BYTES: usize = 8;
/// Nodes that may wait for the process to be started; more are left to their next open. (Then what
/// its pipe has room for may wait: 8,192.)
const WAITING_MAX: usize = 1024;
/// How long it is not tried again where there is no process to be had.
const PAUSE: Duration = Duration::from_secs(10);

/// Who is told of nodes whose pages and attributes are to be dropped.
#[derive(Default)]
pub(crate) struct Outdated(Mutex<Dropper>);

#[derive(Default)]
enum Dropper {
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

impl Outdated {
    fn lock(&self) -> MutexGuard<'_, Dropper> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if the process has to be started.
    fn add(&self, nodes: BTreeSet<u64>) -> bool {
        let mut dropper = self.lock();
        match &mut *dropper {
            Dropper::Starting(waiting) => {
                waiting.extend(nodes.into_iter().take(WAITING_MAX.saturating_sub(waiting.len())));
                return false;
            }
            Dropper::Refused(since) if since.elapsed() < PAUSE => return false,
            Dropper::Runs(pipe) if tell(pipe, &nodes).is_ok() => return false,
            Dropper::Unasked | Dropper::Runs(_) | Dropper::Refused(_) => {}
        }
        *dropper = Dropper::Starting(nodes.into_iter().take(WAITING_MAX).collect());
        true
    }

    /// It has been started, or why not.
    fn started(&self, pipe: io::Result<PipeWriter>) {
        let mut dropper = self.lock();
        let told = pipe.and_then(|pipe| {
            never_wait(pipe.as_fd())?;
            if let Dropper::Starting(waiting) = &*dropper {
                tell(&pipe, waiting)?;
            }
            Ok(pipe)
        });
        *dropper = told.map_or_else(|_| Dropper::Refused(now()), Dropper::Runs);
    }
}

/// Errors: nobody reads them any more.
fn tell(mut pipe: &PipeWriter, nodes: &BTreeSet<u64>) -> io::Result<()> {
    let bytes: Vec<u8> = nodes.iter().flat_map(|node| node.to_ne_bytes()).collect();
    for some in bytes.chunks(NODES_MAX * NODE_BYTES) {
        match pipe.write(some) {
            // Full: it waits for something, and the rest is left to the next open.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            written => _ = written?,
        }
    }
    Ok(())
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
    let nodes: BTreeSet<u64> = files.iter().filter_map(|file| shared.nodes.find(*file)).collect();
    if nodes.is_empty() || !shared.outdated.add(nodes) {
        return;
    }
    // Not by a worker: the program may lie in this very mount.
    let ours = shared.clone();
    let start = move || {
        ours.outdated.started(ours.options.host.start_dropping(ours.device.as_fd()));
    };
    if let Err(error) = std::thread::Builder::new().name("dray-outdated".into()).spawn(start) {
        shared.outdated.started(Err(error));
    }
}

/// Has the kernel behind `device` drop what it has cached of the nodes that are read from `nodes`, as
/// [`Host::start_dropping`](crate::Host::start_dropping) writes them there, until these end.
///
/// For a process that has nothing else to do and is no daemon: it waits as any application does.
/// Errors: those of reading `nodes`.
pub fn drop_outdated(device: BorrowedFd<'_>, mut nodes: impl Read) -> io::Result<()> {
    let mut bytes = [0; NODES_MAX * NODE_BYTES];
    loop {
        let read = match nodes.read(&mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            read => read?,
        };
        if read == 0 {
            return Ok(());
        }
        let (some, _) = bytes[..read].as_chunks::<NODE_BYTES>();
        let some: BTreeSet<u64> = some.iter().map(|node| u64::from_ne_bytes(*node)).collect();
        // Attributes first, for which pages are not waited for: with them a read looks again at all.
        for data in [None, Some((0, 0))] {
            for &node in &some {
                let _ = inval_inode(device, node, data); // else they run out
            }
        }
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
        assert_eq!(read(&reader).len() % NODES_MAX, 0);
        drop(reader);
        assert!(outdated.add(nodes(1..2)), "another one is started");
    }

    #[test]
    fn where_there_is_no_process_to_be_had_it_is_not_tried_all_the_time() {
        let outdated = Outdated::default();
        assert!(outdated.add(nodes(1..2)));
        outdated.started(Err(io::ErrorKind::Unsupported.into()));
        assert!(!outdated.add(nodes(1..2)));
    }
}
