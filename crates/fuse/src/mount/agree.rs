//! What a mount begins with: the agreement with the kernel, and the threads and the memory
//! that come with the transport.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use dray_rt::DriverKind;

use crate::mount::choice::{self, MachineLimits, NoRing};
use crate::mount::session::{KernelSession, Offer};
use crate::options::{Options, TransportWish, WORKERS_MAX};
use crate::proto::abi::init::OVER_IO_URING;
use crate::state::State;
use crate::transport::queues::{Queues, possible_cpus};
use crate::worker::cpus;
use crate::worker::crew::Crew;

/// What the first things to be known decide.
pub(crate) struct MountAgreement {
    pub(crate) session: KernelSession,
    pub(crate) crew: Crew,
    /// The ring's queues, if it is to be used.
    pub(crate) queues: Option<Arc<Queues>>,
    /// Why there is no ring.
    pub(crate) no_ring: Option<NoRing>,
}

/// Agrees with the kernel on a new mount, or goes on as a predecessor did. A ring is agreed
/// on only once everything is there that it needs on our side. Errors: those of the
/// agreement, of making threads, and for a successor those of what its ring needs.
pub(crate) fn agree(
    fd: &Arc<OwnedFd>,
    state: &State,
    options: &Options,
) -> io::Result<MountAgreement> {
    if let Some(session) = KernelSession::adopted(state) {
        return go_on(session, fd, state, options);
    }
    let offer = Offer::read(fd.as_fd())?;
    let depth = ring_depth(options.transport, offer.has_ring(), options);
    let ring = depth.and_then(|size| prepare(fd, state, size, options, false).map_err(Some));
    let session = offer.answer(fd.as_fd(), state, options, ring.is_ok())?;
    match ring {
        Ok((crew, queues)) => {
            Ok(MountAgreement { session, crew, queues: Some(queues), no_ring: None })
        }
        Err(no_ring) => {
            no_ring.into_iter().for_each(|why| why.note(state));
            Ok(MountAgreement { session, crew: classic_crew(options)?, queues: None, no_ring })
        }
    }
}

/// With the transport of a predecessor: the kernel does not change it.
fn go_on(
    session: KernelSession,
    fd: &Arc<OwnedFd>,
    state: &State,
    options: &Options,
) -> io::Result<MountAgreement> {
    let no_ring = NoRing::noted(state);
    if !session.has(OVER_IO_URING) {
        return Ok(MountAgreement { session, crew: classic_crew(options)?, queues: None, no_ring });
    }
    // With one entry a queue the ring works, however little memory there is by now.
    let size = ring_depth(TransportWish::Uring, true, options);
    let size = size.unwrap_or((possible_cpus()?, 1));
    let (crew, queues) = prepare(fd, state, size, options, true)?;
    Ok(MountAgreement { session, crew, queues: Some(queues), no_ring })
}

/// How many queues a ring has, and how many entries each; or why there is to be none.
fn ring_depth(
    wish: TransportWish,
    offered: bool,
    options: &Options,
) -> Result<(usize, usize), Option<NoRing>> {
    let cpus = possible_cpus();
    let machine = MachineLimits {
        offered,
        release: choice::release(),
        cpus: cpus.as_ref().map_or(0, |cpus| *cpus),
        memory_bytes: choice::memory_bytes(),
    };
    let depth = choice::depth(wish, &machine, options.ring_depth)?;
    Ok((cpus.map_err(|_| Some(NoRing::UnknownCpus))?, depth))
}

/// Threads with an io_uring each and the memory of the queues.
fn prepare(
    fd: &Arc<OwnedFd>,
    state: &State,
    (cpus, depth): (usize, usize),
    options: &Options,
    adopted: bool,
) -> Result<(Crew, Arc<Queues>), NoRing> {
    let raw = |error: io::Error| error.raw_os_error().unwrap_or(libc::EIO);
    let mut allowed = cpus::allowed();
    allowed.truncate(match options.workers {
        0 => WORKERS_MAX,
        workers => workers, // more than there are CPUs are of no use
    });
    let crew = Crew::assemble(DriverKind::Uring, allowed, true)
        .map_err(|error| NoRing::NoIoUring(raw(error)))?;
    let size = (cpus, depth, options.ring_spares_max);
    let queues = Queues::new(fd.clone(), state, size, adopted)
        .map_err(|error| NoRing::NoMemory(raw(error)))?;
    Ok((crew, Arc::new(queues)))
}

/// Threads for /dev/fuse: pinned only where each CPU has its own, so that none is busy while
/// another's is not. Errors: those of [`Crew::assemble`].
fn classic_crew(options: &Options) -> io::Result<Crew> {
    let allowed = cpus::allowed();
    let cpus: Vec<usize> = match options.workers {
        0 => allowed.iter().copied().take(WORKERS_MAX).collect(),
        workers => allowed.iter().copied().cycle().take(workers).collect(),
    };
    let pin = cpus == allowed;
    Crew::assemble(DriverKind::Epoll, cpus, pin)
}

/// Lets requests come through the ring. Answers why not, if the kernel goes on with
/// /dev/fuse. Errors: the kernel refuses a successor what its predecessor had.
pub(crate) fn open(queues: &Queues, state: &State) -> io::Result<Option<NoRing>> {
    let used = Queues::was_filled(state);
    match queues.open() {
        Ok(()) => Ok(None),
        Err(error) if used => Err(error),
        Err(error) => {
            let why = NoRing::Refused(error.raw_os_error().unwrap_or(libc::EIO));
            why.note(state);
            Ok(Some(why))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::fs;
    use std::os::unix::ffi::OsStrExt;
    use std::path::Path;
    use std::sync::atomic::Ordering;
    use std::sync::{Mutex, PoisonError, mpsc};
    use std::time::Duration;

    use dray_backends::memory::{MemoryFs, MemoryOptions};

    use crate::transport::ring::refusing;
    use crate::{Device, MountOptions, NoRing, Options, ServedMount, Transport, mount, unmount};

    /// The kernel's refusal is for all mounts of this process.
    static ALONE: Mutex<()> = Mutex::new(());
    const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";

    fn alone() -> std::sync::MutexGuard<'static, ()> {
        ALONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// FUSE over io_uring switched on, and off again in the end if it was.
    struct Ring {
        was_off: bool,
    }

    impl Ring {
        /// None where it cannot be had. To be called [`alone`].
        fn on() -> Option<Ring> {
            // SAFETY: no memory is passed.
            let root = unsafe { libc::geteuid() } == 0;
            let was_off = fs::read_to_string(SWITCH).ok()?.trim() != "Y";
            (root && (!was_off || fs::write(SWITCH, "Y").is_ok())).then_some(Ring { was_off })
        }
    }

    impl Drop for Ring {
        fn drop(&mut self) {
            if self.was_off {
                let _ = fs::write(SWITCH, "N");
            }
        }
    }

    fn served(at: &Path) -> ServedMount {
        let memory = MemoryFs::new(MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() });
        let device = Device::new(mount(at, &MountOptions::default()).unwrap()).unwrap();
        ServedMount::start_with(std::sync::Arc::new(memory), device, Options::default()).unwrap()
    }

    /// Ends the mount if its user hangs, so that the test fails and ends.
    fn abort_in_time(at: &Path) -> mpsc::Sender<()> {
        let (ends, ended) = mpsc::channel();
        let at = CString::new(at.as_os_str().as_bytes()).unwrap();
        std::thread::spawn(move || {
            let time = Duration::from_secs(150);
            if ended.recv_timeout(time) == Err(mpsc::RecvTimeoutError::Timeout) {
                // SAFETY: a C string that outlives the call.
                unsafe { libc::umount2(at.as_ptr(), libc::MNT_FORCE | libc::MNT_DETACH) };
            }
        });
        ends
    }

    /// With all other queues filled already, so that the kernel is half way to the ring.
    // proves: P100
    #[test]
    fn a_queue_that_the_kernel_refuses_leaves_a_classic_mount_that_works() {
        let _alone = alone();
        let Some(_ring) = Ring::on() else {
            return eprintln!("skipped: needs root and FUSE over io_uring");
        };
        let at = std::env::temp_dir().join(format!("dray-fuse-refused-{}", std::process::id()));
        fs::create_dir(&at).unwrap();
        refusing::QUEUE.store(0, Ordering::Relaxed);
        let mounted = served(&at);
        refusing::QUEUE.store(u32::MAX, Ordering::Relaxed);
        let _ends = abort_in_time(&at);
        let stats = mounted.stats();
        let content = vec![7u8; 3 << 20];
        let results: Vec<_> = (0..8)
            .map(|number| {
                let (path, content) = (at.join(format!("file{number}")), content.clone());
                std::thread::spawn(move || {
                    fs::write(&path, &content)?;
                    fs::read(&path).map(|read| read == content)
                })
            })
            .map(|thread| thread.join().unwrap())
            .collect();
        let successor = NoRing::noted(&mounted.state());
        unmount(&at, false).unwrap();
        mounted.wait().unwrap();
        fs::remove_dir(&at).unwrap();
        assert_eq!(stats.transport, Transport::Classic);
        assert_eq!(stats.no_ring, Some(NoRing::Refused(libc::EINVAL)));
        assert_eq!(successor, stats.no_ring);
        assert!(!stats.session.flag_names().contains(&"over_io_uring"));
        assert!(results.into_iter().all(|results| results.unwrap()));
    }

    #[test]
    fn a_ring_is_chosen_where_it_is_offered() {
        let _alone = alone();
        let ring = Ring::on().filter(|_| crate::mount::choice::release() >= (6, 18));
        if ring.is_none() {
            return eprintln!("skipped: needs root, and FUSE over io_uring of 6.18 or newer");
        }
        let at = std::env::temp_dir().join(format!("dray-fuse-chosen-{}", std::process::id()));
        fs::create_dir(&at).unwrap();
        let mounted = served(&at);
        let _ends = abort_in_time(&at);
        let stats = mounted.stats();
        let written = fs::write(at.join("file"), "through the ring");
        unmount(&at, false).unwrap();
        mounted.wait().unwrap();
        fs::remove_dir(&at).unwrap();
        written.unwrap();
        assert_eq!((stats.transport, stats.no_ring), (Transport::Uring, None));
    }
}
