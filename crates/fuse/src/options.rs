//! How a mount behaves.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use dray_core::IO_MAX_BYTES;

use crate::worker::invalidator::InvalidatorProcess;

/// What applications on different nodes may rely on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Consistency {
    /// Every system call sees what the calls before it did, on any node: the kernel
    /// caches neither names nor attributes nor data.
    #[default]
    Strict,
    /// An open sees what was written before the last close; names and attributes are
    /// believed for a while.
    CloseToOpen,
    /// Nothing ever changes.
    Immutable,
}

/// Which transport is wanted. Where a ring cannot be had the classic transport is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportWish {
    /// A ring on kernels that it was tested on.
    #[default]
    Auto,
    /// A ring wherever the kernel offers one.
    Uring,
    /// /dev/fuse.
    Classic,
}

/// Which transport carries the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Reads and writes of /dev/fuse: everywhere.
    Classic,
    /// FUSE over io_uring.
    Uring,
}

/// Options of a mount.
#[derive(Clone)]
pub struct Options {
    /// Consistency promised.
    pub consistency: Consistency,
    /// Names and attributes are believed under leases (ADR 0049), where the mode is strict.
    pub leases: bool,
    /// Whether the kernel was asked at the mount to check permissions. Where it was not, it must not
    /// matter who has looked up a name that is believed.
    pub kernel_checks: bool,
    /// Shared mappings that can be stored into are made. Programs of other mounts do not see what is in
    /// them until it is synced.
    pub shared_mmap: bool,
    /// The kernel reads files of which there is a whole copy on a local disk by itself. Only where an open file may go
    /// on with the version that was opened.
    pub passthrough: bool,
    /// Transport wanted.
    pub transport: TransportWish,
    /// How long attributes are believed under close-to-open, unless an answer says it.
    pub attr_validity: Duration,
    /// How long names are believed under close-to-open, unless an answer says it.
    pub entry_validity: Duration,
    /// How long the absence of a name is believed under close-to-open, unless an answer says it.
    pub negative_validity: Duration,
    /// Worker threads; 0: as many as CPUs are allowed, at most [`WORKERS_MAX`].
    pub workers: usize,
    /// The largest read or write of an application that is one request, bytes: a multiple of 4,096, at most
    /// [`IO_MAX_BYTES`]. The kernel makes several requests of a larger one.
    pub io_max_bytes: usize,
    /// Entries that wait for requests in a ring's queue, for each CPU. There are fewer on machines
    /// with many CPUs: the payloads of 1 MiB each take at most 256 MiB and a sixteenth of the
    /// memory.
    pub ring_depth: usize,
    /// Ring entries that may be added for requests that block, in the whole mount. There are at
    /// most 256, or [`wake_queues`](crate::wake_queues) would not reach behind all of them.
    pub ring_spares_max: usize,
    /// Longest wait for the server, for each request; none: for ever.
    pub patience: Option<Duration>,
    /// The processes around the daemon.
    pub host: Arc<dyn Host>,
}

/// Ring entries for requests that block, by default.
pub(crate) const RING_SPARES_MAX: usize = 256;

/// Worker threads by default: each has a connection of its own, and a server
/// has many clients.
pub const WORKERS_MAX: usize = 4;

impl Default for Options {
    fn default() -> Options {
        Options {
            consistency: Consistency::Strict,
            leases: false,
            kernel_checks: true,
            shared_mmap: true,
            passthrough: false,
            transport: TransportWish::Auto,
            attr_validity: Duration::from_secs(1),
            entry_validity: Duration::from_secs(1),
            negative_validity: Duration::ZERO,
            workers: 0,
            io_max_bytes: IO_MAX_BYTES,
            ring_depth: 8,
            ring_spares_max: RING_SPARES_MAX,
            patience: None,
            host: Arc::new(NoHost),
        }
    }
}

impl Options {
    /// Whether the kernel checks permissions. It must where the server no longer sees every component of
    /// a path, unless all callers are one user there.
    pub fn kernel_checks_permissions(&self) -> bool {
        self.believes_names() && self.kernel_checks
    }

    /// Whether the kernel may believe names without asking.
    pub fn believes_names(&self) -> bool {
        self.leases || self.consistency != Consistency::Strict
    }
}

/// What the processes around a mount's daemon do for it. All that concerns files and their server is
/// in [`SessionControl`](dray_core::SessionControl).
pub trait Host: Send + Sync + 'static {
    /// An entry was added to a queue of the ring in which requests may wait, which the kernel does
    /// not give to it. Call [`wake_queues`](crate::wake_queues) then, in another process.
    fn wake_queues(&self);

    /// The mount rests, and the payloads of its ring's entries have taken much memory:
    /// [`reclaim_entries`](crate::reclaim_entries) is to be called, in another process.
    fn reclaim_entries(&self);

    /// Starts another process, which calls [`invalidate_nodes`](crate::invalidate_nodes) with `device` and
    /// the other ends of the pipes that are returned, and ends with that. Errors: it cannot be
    /// started; then what others have changed is seen at the next open, or when attributes run out.
    fn start_invalidator(&self, device: BorrowedFd<'_>) -> io::Result<InvalidatorProcess>;
}

/// A [`Host`] that has no other processes.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoHost;

impl Host for NoHost {
    fn wake_queues(&self) {}

    fn reclaim_entries(&self) {}

    fn start_invalidator(&self, _: BorrowedFd<'_>) -> io::Result<InvalidatorProcess> {
        Err(io::ErrorKind::Unsupported.into())
    }
}
