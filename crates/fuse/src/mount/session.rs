//! INIT: what the kernel offers and what is taken of it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use dray_core::IO_MAX_BYTES;

use crate::mount::device::write_answer;
use crate::mount::pages::pages_of;
use crate::options::{Consistency, Options};
use crate::proto::abi::{self, init, op};
use crate::proto::reply::header;
use crate::proto::wire::Small;
use crate::proto::{Head, InitArgs};
use crate::state::{State, header as words};

/// How long the kernel may take to send INIT, which it does when it mounts.
const INIT_TIME: Duration = Duration::from_secs(10);
/// Requests that nobody waits for (read-ahead, releases) under way at a time, and how
/// many of them count as congestion. Fewer than the entries that a ring has for requests that
/// wait, so that those that somebody waits for find some.
const BACKGROUND_MAX: u16 = 64;
const CONGESTED: u16 = 48;
/// Copies that the kernel reads lie on a file system that is stacked on no other one. So a stacked one, such as
/// overlayfs, may lie on the mount.
const STACK_DEPTH: u32 = 1;
/// What was read from the device for INIT must not be larger.
const INIT_MAX_BYTES: usize = 8192 + IO_MAX_BYTES;

/// Where the administrator says how long a request may take, seconds, before the kernel ends the
/// mount (0: for ever). The first file is for a mount that says nothing itself, the second for any
/// (Linux 6.15).
const REQUEST_LIMITS: [&str; 2] =
    ["/proc/sys/fs/fuse/default_request_timeout", "/proc/sys/fs/fuse/max_request_timeout"];
/// The longest that a mount can ask for, seconds: about 18 hours.
const REQUEST_MAX_S: u16 = u16::MAX;

fn request_limits() -> [u64; 2] {
    let seconds = |path| std::fs::read_to_string(path).ok()?.trim().parse().ok();
    REQUEST_LIMITS.map(|path| seconds(path).unwrap_or(0))
}

/// How long a request may take before the kernel ends the mount, whatever that asks for; none: for
/// ever. A server that is away and a lock that is waited for take that long.
pub fn request_time_max() -> Option<Duration> {
    let [_, limit] = request_limits();
    (limit > 0).then(|| Duration::from_secs(limit))
}

/// What is asked for, seconds: nothing where nobody has set a limit.
fn request_time_s([default, max]: [u64; 2]) -> u16 {
    if default == 0 && max == 0 { 0 } else { REQUEST_MAX_S }
}

/// What was agreed on with the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelSession {
    /// Minor version of the protocol.
    pub minor: u32,
    /// Flags taken.
    pub flags: u64,
}

impl KernelSession {
    /// Whether `flag` was agreed on.
    pub fn has(&self, flag: u64) -> bool {
        self.flags & flag != 0
    }

    /// Names of the flags taken.
    pub fn flag_names(&self) -> Vec<&'static str> {
        let taken = init::NAMES.iter().filter(|(flag, _)| self.has(*flag));
        taken.map(|(_, name)| *name).collect()
    }

    /// As a predecessor agreed on it; none if the mount is new.
    pub(crate) fn adopted(state: &State) -> Option<KernelSession> {
        let flags = state.region.load(words::INIT_FLAGS);
        let minor = state.region.load(words::INIT_MINOR) as u32;
        state.initialised().then_some(KernelSession { minor, flags })
    }

    /// The same without a ring, which the kernel has refused. For successors, too.
    pub(crate) fn without_ring(self, state: &State) -> KernelSession {
        let session = KernelSession { flags: self.flags & !init::OVER_IO_URING, ..self };
        state.region.store(words::INIT_FLAGS, session.flags);
        session
    }
}

/// What the kernel offers for a new mount, and waits to have answered.
pub(crate) struct Offer {
    unique: u64,
    args: InitArgs,
}

impl Offer {
    /// Waits for it. Errors: `ETIMEDOUT` if the kernel says nothing, `EPROTONOSUPPORT` if it
    /// is too old, `EPROTO` if it makes no sense; those of read(2).
    pub(crate) fn read(device: BorrowedFd<'_>) -> io::Result<Offer> {
        let (unique, args) = read_init(device)?;
        if args.major != abi::MAJOR || args.minor < abi::MINOR_OLDEST {
            return Err(io::Error::from_raw_os_error(libc::EPROTONOSUPPORT));
        }
        Ok(Offer { unique, args })
    }

    /// Whether there may be a ring.
    pub(crate) fn has_ring(&self) -> bool {
        self.args.flags & init::OVER_IO_URING != 0
    }

    /// Answers, with a ring or without, and keeps that for successors. Errors: those of
    /// write(2).
    pub(crate) fn answer(
        &self,
        device: BorrowedFd<'_>,
        state: &State,
        options: &Options,
        ring: bool,
    ) -> io::Result<KernelSession> {
        let offered = self.args.flags;
        let ring = if ring { init::OVER_IO_URING } else { 0 };
        let request_s = request_time_s(request_limits());
        let limited = if request_s > 0 { init::REQUEST_TIMEOUT } else { 0 };
        let flags = (wanted(options) | ring | limited | init::INIT_EXT) & offered;
        let session = KernelSession { minor: self.args.minor.min(abi::MINOR), flags };
        let body = answer(&session, &self.args, (options.io_max_bytes, request_s));
        write_answer(device.as_fd(), &header(self.unique, 0, 64), body.as_slice())?;
        // A death between the two leaves a mount whose successor waits for INIT in vain
        // and gives up: nobody has used it yet.
        state.region.store(words::INIT_MINOR, u64::from(session.minor));
        if session.has(init::PASSTHROUGH) {
            state.mark_passthrough();
        }
        state.region.store(words::INIT_FLAGS, session.flags);
        Ok(session)
    }
}

fn wanted(options: &Options) -> u64 {
    let mut flags = init::ASYNC_READ
        | init::ASYNC_DIO
        | init::POSIX_LOCKS
        | init::FLOCK_LOCKS
        | init::ATOMIC_O_TRUNC
        | init::BIG_WRITES
        | init::DONT_MASK
        | init::HAS_IOCTL_DIR
        | init::PARALLEL_DIROPS
        | init::HANDLE_KILLPRIV_V2
        | init::MAX_PAGES
        | init::CREATE_SUPP_GROUP
        | init::DIRECT_IO_ALLOW_MMAP
        | init::EXPORT_SUPPORT
        | init::HAS_RESEND;
    // With attributes believed for no time at all the kernel would look up every name again. So
    // fetching them with the names would be in vain.
    // And without pages that are kept there is nothing to look at them for.
    if options.believes_names() {
        flags |= init::DO_READDIRPLUS | init::AUTO_INVAL_DATA;
    }
    if options.leases {
        flags |= init::HAS_EXPIRE_ONLY;
    }
    // Without it whatever is not cached is not mapped to be shared (`fuse_file_mmap` in fs/fuse/file.c).
    if !options.shared_mmap {
        flags &= !init::DIRECT_IO_ALLOW_MMAP;
    }
    // Where the kernel checks permissions it must know the ACLs; and it checks where it knows them.
    if options.kernel_checks_permissions() {
        flags |= init::POSIX_ACL;
    }
    if options.consistency == Consistency::Immutable {
        flags |= init::CACHE_SYMLINKS;
    }
    if options.passthrough {
        flags |= init::PASSTHROUGH;
    }
    flags
}

fn answer(session: &KernelSession, offer: &InitArgs, (io_bytes, request_s): (usize, u16)) -> Small {
    let pages = if session.has(init::MAX_PAGES) { pages_of(io_bytes) } else { 32 };
    let readahead = offer.readahead_bytes.max(IO_MAX_BYTES as u32);
    Small::new()
        .u32(abi::MAJOR)
        .u32(session.minor)
        .u32(readahead)
        .u32(session.flags as u32)
        .u16(BACKGROUND_MAX)
        .u16(CONGESTED)
        .u32((u32::from(pages) * 4096).min(io_bytes as u32))
        .u32(1) // times are exact to a nanosecond
        .u16(pages)
        .u16(0)
        .u32((session.flags >> 32) as u32)
        .u32(if session.has(init::PASSTHROUGH) { STACK_DEPTH } else { 0 })
        .u16(if session.has(init::REQUEST_TIMEOUT) { request_s } else { 0 })
        .zeros(22)
}

fn read_init(device: BorrowedFd<'_>) -> io::Result<(u64, InitArgs)> {
    let mut buffer = vec![0; INIT_MAX_BYTES];
    wait_readable(device)?;
    // SAFETY: the kernel writes at most buffer.len() bytes to it.
    let count = unsafe { libc::read(device.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len()) };
    if count < 0 {
        return Err(io::Error::last_os_error());
    }
    let message = &buffer[..count as usize];
    let senseless = || io::Error::from_raw_os_error(libc::EPROTO);
    let head = Head::decode(message).ok_or_else(senseless)?;
    if head.opcode != op::INIT {
        return Err(senseless());
    }
    let args = InitArgs::decode(&message[abi::IN_HEADER_BYTES..]).ok_or_else(senseless)?;
    Ok((head.unique, args))
}

fn wait_readable(device: BorrowedFd<'_>) -> io::Result<()> {
    let mut poll = libc::pollfd { fd: device.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd is passed, which outlives the call.
    match unsafe { libc::poll(&mut poll, 1, INIT_TIME.as_millis() as i32) } {
        0 => Err(io::Error::from_raw_os_error(libc::ETIMEDOUT)),
        1.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_has_the_kernel_s_size_and_only_known_flags() {
        let options = Options { consistency: Consistency::CloseToOpen, ..Options::default() };
        let session = KernelSession { minor: 45, flags: wanted(&options) };
        let offer = InitArgs { major: 7, minor: 45, readahead_bytes: 0, flags: u64::MAX };
        assert_eq!(answer(&session, &offer, (IO_MAX_BYTES, 7)).as_slice().len(), 64);
        assert_eq!(
            answer(&session, &offer, (IO_MAX_BYTES, 7)).as_slice()[40..42],
            [0, 0],
            "it is not agreed on"
        );
        assert_eq!(session.flag_names().len(), session.flags.count_ones() as usize);
        assert!(!session.has(init::OVER_IO_URING));
        let smaller = answer(&session, &offer, (128 << 10, 7));
        assert_eq!(smaller.as_slice()[20..24], (128u32 << 10).to_ne_bytes(), "`max_write`");
        assert_eq!(smaller.as_slice()[28..30], (32u16 + 16).to_ne_bytes(), "`max_pages`");
    }

    /// Mounts whose server was away, or whose locks were waited for, for longer than the machine's
    /// limit were ended by the kernel.
    #[test]
    fn a_limit_of_the_machine_is_answered_with_the_longest_there_is() {
        assert_eq!(request_time_s([0, 0]), 0);
        assert_eq!((request_time_s([60, 0]), request_time_s([0, 60])), (u16::MAX, u16::MAX));
        let session = KernelSession { minor: 45, flags: init::REQUEST_TIMEOUT };
        let offer = InitArgs { major: 7, minor: 45, readahead_bytes: 0, flags: u64::MAX };
        // `request_timeout` of `struct fuse_init_out` (linux/fuse.h).
        assert_eq!(
            answer(&session, &offer, (IO_MAX_BYTES, 0x1234)).as_slice()[40..42],
            0x1234u16.to_ne_bytes()
        );
    }
}
