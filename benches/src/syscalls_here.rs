//! System calls of one thread of this process, counted by the kernel's tracepoint.

use std::ffi::CString;
use std::fs::File;
use std::io::Read;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::Path;

/// The first 64 bytes of the kernel's `perf_event_attr`, which is its oldest version.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    kind: u32,
    size_bytes: u32,
    config: u64,
    sample: [u64; 2],
    read_format: u64,
    flags: u64,
    wakeup: [u32; 2],
    address: u64,
}

const KIND_TRACEPOINT: u32 = 2;

/// A running count of one thread's system calls.
pub struct ThreadCounter(File);

impl ThreadCounter {
    /// Counts from now on for the thread `tid`; none where the kernel or its settings do
    /// not allow it (no tracefs, perf_event_paranoid, a container).
    pub fn new(tid: i32) -> Option<ThreadCounter> {
        let roots = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];
        let id = roots.iter().find_map(|root| {
            std::fs::read_to_string(format!("{root}/events/raw_syscalls/sys_enter/id")).ok()
        })?;
        let attributes = Attributes {
            kind: KIND_TRACEPOINT,
            size_bytes: size_of::<Attributes>() as u32,
            config: id.trim().parse().ok()?,
            ..Attributes::default()
        };
        // SAFETY: the structure has the size that it says; the descriptor is new.
        let fd = unsafe {
            let fd = libc::syscall(
                libc::SYS_perf_event_open,
                &raw const attributes,
                tid,
                -1, // any CPU
                -1, // no group
                0,
            );
            (fd >= 0).then(|| OwnedFd::from_raw_fd(fd as i32))?
        };
        Some(ThreadCounter(File::from(fd)))
    }

    /// System calls so far.
    pub fn count(&mut self) -> u64 {
        let mut bytes = [0; 8];
        match self.0.read_exact(&mut bytes) {
            Ok(()) => u64::from_ne_bytes(bytes),
            Err(_) => 0,
        }
    }
}

/// The calling thread's number.
pub fn thread_id() -> i32 {
    // SAFETY: no pointers.
    unsafe { libc::gettid() }
}

/// mount(2); whether it went well.
pub fn mount(kind: &str, at: &Path, flags: libc::c_ulong, data: &str) -> bool {
    let [kind, at, data] = [kind, at.to_str().unwrap(), data].map(|s| CString::new(s).unwrap());
    let (kind, at, data) = (kind.as_ptr(), at.as_ptr(), data.as_ptr());
    // SAFETY: all strings outlive the call.
    unsafe { libc::mount(kind, at, kind, flags, data.cast()) == 0 }
}

/// Gives this thread mounts of its own, which end with it. Among them is the one by which system
/// calls are counted, where nobody has mounted it.
pub fn own_mounts() -> bool {
    // SAFETY: no pointers.
    let own = unsafe { libc::unshare(libc::CLONE_NEWNS) == 0 };
    let private = own && mount("none", Path::new("/"), libc::MS_REC | libc::MS_PRIVATE, "");
    mount("tracefs", Path::new("/sys/kernel/tracing"), 0, "");
    private
}
