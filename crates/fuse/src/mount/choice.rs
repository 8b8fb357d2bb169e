//! Which transport a mount uses: a ring where it can be had, else /dev/fuse, and why.

use std::fmt;
use std::io;

use crate::options::TransportWish;
use crate::state::{State, header};
use crate::transport::PAYLOAD_BYTES;

/// Most memory of the payloads of all entries that wait for requests. It is taken from the
/// machine as requests fill it, and kept.
const PAYLOADS_MAX_BYTES: u64 = 256 << 20;
/// At most this part of the memory that this process may use.
const MEMORY_SHARE: u64 = 16;
/// Releases of Linux whose rings have outlived their daemons in our tests begin here.
const TESTED_FROM: (u32, u32) = (6, 18);

/// Why a mount that might use a ring does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRing {
    /// The kernel does not offer it in INIT.
    NotOffered,
    /// The kernel offers rings, but those of its release were never tested; not taken unless asked
    /// for.
    NotTested,
    /// io_uring_setup(2) failed with this error.
    NoIoUring(i32),
    /// So many CPUs have no room for their queues in the memory that they may take.
    TooManyCpus(u32),
    /// The CPUs cannot be counted, which needs /sys.
    UnknownCpus,
    /// The memory of the queues cannot be mapped; this error.
    NoMemory(i32),
    /// The kernel refused the entries of a queue with this error.
    Refused(i32),
}

impl fmt::Display for NoRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let error = |raw: &i32| io::Error::from_raw_os_error(*raw);
        match self {
            NoRing::NotOffered => f.write_str(
                "the kernel does not offer FUSE over io_uring (6.14 or newer, with Y in \
                 /sys/module/fuse/parameters/enable_uring)",
            ),
            NoRing::NotTested => f.write_str(
                "rings of kernels before 6.18 were tested little (transport=uring takes them)",
            ),
            NoRing::NoIoUring(raw) => write!(
                f,
                "io_uring cannot be used: {} (kernel.io_uring_disabled, memlock, a container's filter)",
                error(raw)
            ),
            NoRing::TooManyCpus(cpus) => {
                write!(f, "the queues of {cpus} CPUs would take too much of the memory")
            }
            NoRing::UnknownCpus => f.write_str("/sys/devices/system/cpu/possible cannot be read"),
            NoRing::NoMemory(raw) => {
                write!(f, "the memory of the queues cannot be mapped: {}", error(raw))
            }
            NoRing::Refused(raw) => write!(f, "the kernel refused a queue: {}", error(raw)),
        }
    }
}

impl From<NoRing> for io::Error {
    fn from(why: NoRing) -> io::Error {
        match why {
            NoRing::NoIoUring(raw) | NoRing::NoMemory(raw) | NoRing::Refused(raw) => {
                io::Error::from_raw_os_error(raw)
            }
            _ => io::Error::other(why.to_string()),
        }
    }
}

impl NoRing {
    /// As a word of [`State`], which is never 0.
    fn word(self) -> u64 {
        let (code, detail) = match self {
            NoRing::NotOffered => (1, 0),
            NoRing::NotTested => (2, 0),
            NoRing::NoIoUring(raw) => (3, raw as u32),
            NoRing::TooManyCpus(cpus) => (4, cpus),
            NoRing::NoMemory(raw) => (5, raw as u32),
            NoRing::Refused(raw) => (6, raw as u32),
            NoRing::UnknownCpus => (7, 0),
        };
        code << 32 | u64::from(detail)
    }

    /// What a daemon before this one noted.
    pub(crate) fn noted(state: &State) -> Option<NoRing> {
        let word = state.region.load(header::NO_RING);
        let detail = word as u32;
        Some(match word >> 32 {
            1 => NoRing::NotOffered,
            2 => NoRing::NotTested,
            3 => NoRing::NoIoUring(detail as i32),
            4 => NoRing::TooManyCpus(detail),
            5 => NoRing::NoMemory(detail as i32),
            6 => NoRing::Refused(detail as i32),
            7 => NoRing::UnknownCpus,
            _ => return None,
        })
    }

    pub(crate) fn note(self, state: &State) {
        state.region.store(header::NO_RING, self.word());
    }
}

/// What this machine has, as far as it matters for rings.
pub(crate) struct MachineLimits {
    /// The kernel offers it.
    pub(crate) offered: bool,
    /// Release of Linux.
    pub(crate) release: (u32, u32),
    /// CPUs that can ever be there: as many queues.
    pub(crate) cpus: usize,
    /// Bytes that this process may use.
    pub(crate) memory_bytes: u64,
}

/// Entries of each CPU's queue, at most `depth_max`; or why there is to be no ring. Their
/// payloads together take at most 256 MiB and a sixteenth of the memory: depth x CPUs x 1 MiB.
/// Answers no reason where no ring is wanted.
pub(crate) fn depth(
    wish: TransportWish,
    machine: &MachineLimits,
    depth_max: usize,
) -> Result<usize, Option<NoRing>> {
    if wish == TransportWish::Classic {
        return Err(None);
    }
    if !machine.offered {
        return Err(Some(NoRing::NotOffered));
    }
    if wish == TransportWish::Auto && machine.release < TESTED_FROM {
        return Err(Some(NoRing::NotTested));
    }
    let room_bytes = PAYLOADS_MAX_BYTES.min(machine.memory_bytes / MEMORY_SHARE);
    let entries = (room_bytes / PAYLOAD_BYTES as u64) as usize;
    match entries / machine.cpus.max(1) {
        0 => Err(Some(NoRing::TooManyCpus(machine.cpus as u32))),
        depth => Ok(depth.min(depth_max.max(1))),
    }
}

/// The first two numbers of the release of Linux; (0, 0) if they cannot be read.
pub(crate) fn release() -> (u32, u32) {
    let text = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = text.split(|letter: char| !letter.is_ascii_digit());
    let mut next = || numbers.next().and_then(|number| number.parse().ok()).unwrap_or(0);
    (next(), next())
}

/// Bytes of memory that this process may use: the machine's, or less if a control group
/// (version 2) sets a limit.
pub(crate) fn memory_bytes() -> u64 {
    // SAFETY: no memory is passed.
    let (pages, page_bytes) =
        unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    let machine = u64::try_from(pages).unwrap_or(0) * u64::try_from(page_bytes).unwrap_or(0);
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let top = std::path::Path::new("/sys/fs/cgroup");
    let group = top.join(own);
    let limits = group.ancestors().take_while(|dir| dir.starts_with(top)).filter_map(|dir| {
        std::fs::read_to_string(dir.join("memory.max")).ok()?.trim().parse().ok()
    });
    limits.fold(machine, u64::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(cpus: usize) -> MachineLimits {
        MachineLimits { offered: true, release: (6, 18), cpus, memory_bytes: 64 << 30 }
    }

    #[test]
    fn auto_takes_a_tested_ring_that_is_offered_and_fits() {
        let auto = TransportWish::Auto;
        assert_eq!(depth(auto, &machine(2), 8), Ok(8));
        assert_eq!(depth(TransportWish::Classic, &machine(2), 8), Err(None));
        let none = MachineLimits { offered: false, ..machine(2) };
        assert_eq!(depth(auto, &none, 8), Err(Some(NoRing::NotOffered)));
        let old = MachineLimits { release: (6, 17), ..machine(2) };
        assert_eq!(depth(auto, &old, 8), Err(Some(NoRing::NotTested)));
        assert_eq!(depth(TransportWish::Uring, &old, 8), Ok(8));
    }

    #[test]
    fn payloads_are_bounded_whatever_the_machine() {
        for memory_bytes in [1 << 30, 8 << 30, 1 << 40] {
            for cpus in 1..1024 {
                let machine = MachineLimits { memory_bytes, ..machine(cpus) };
                match depth(TransportWish::Auto, &machine, 8) {
                    Ok(depth) => {
                        let sum = (depth * cpus * PAYLOAD_BYTES) as u64;
                        assert!(sum <= PAYLOADS_MAX_BYTES && sum <= memory_bytes / 16);
                    }
                    Err(why) => assert_eq!(why, Some(NoRing::TooManyCpus(cpus as u32))),
                }
            }
        }
        assert_eq!(depth(TransportWish::Auto, &machine(256), 8), Ok(1));
        assert!(depth(TransportWish::Uring, &machine(257), 8).is_err());
    }

    #[test]
    fn a_successor_reads_the_reason_that_was_noted() {
        let state = State::create().unwrap();
        assert_eq!(NoRing::noted(&state), None);
        for why in [
            NoRing::NotOffered,
            NoRing::NotTested,
            NoRing::NoIoUring(libc::ENOMEM),
            NoRing::TooManyCpus(4096),
            NoRing::NoMemory(libc::EFBIG),
            NoRing::Refused(libc::EINVAL),
            NoRing::UnknownCpus,
        ] {
            why.note(&state);
            assert_eq!(NoRing::noted(&state), Some(why));
            assert!(!why.to_string().is_empty());
        }
    }

    #[test]
    fn this_machine_has_a_kernel_and_memory() {
        assert!(release() > (2, 0));
        assert!(memory_bytes() > 1 << 20);
    }
}
