//! Signals. A task can wait for those that ask for an end. Others are blocked, so that they end nothing.

use std::ffi::CStr;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use dray_rt::{Interest, Source};

const ENDING: [i32; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// Signals that the kernel sends for something that a client, an application or a reader of ours
/// does, or that we do in its name. By default they end or stop a process (signal(7)). The system
/// call says it too, as an error:
///
/// - SIGPIPE: the reader has closed its end;
/// - SIGXFSZ: a write, a truncation or an allocation reaches beyond `RLIMIT_FSIZE`;
/// - SIGXCPU: more time was used than the soft limit `RLIMIT_CPU` has, or `RLIMIT_RTTIME`;
/// - SIGTTOU: something is logged to a terminal that others have in the foreground (`stty tostop`).
const IGNORED: [i32; 4] = [libc::SIGPIPE, libc::SIGXFSZ, libc::SIGXCPU, libc::SIGTTOU];

/// None of these ends this process from here on, nor one that it starts; to be called before
/// anything else.
pub fn ignore_what_others_cause() {
    for signal in IGNORED {
        // SAFETY: these may be ignored, and no memory is passed.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// The set of signals that end us.
fn ending() -> libc::sigset_t {
    // SAFETY: an all-zero set is valid memory for sigemptyset, which sets it up; the signal
    // numbers are valid.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        for signal in ENDING {
            libc::sigaddset(&mut set, signal);
        }
        set
    }
}

/// Keeps SIGTERM, SIGINT and SIGHUP for [`EndSignals`]; to be called before any thread is started, since
/// threads inherit it.
pub fn hold() {
    let set = ending();
    // SAFETY: the set is initialised; the old one is not wanted.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) };
}

/// As before [`hold`], for a process that was started by one that holds them.
pub fn let_go() {
    let set = ending();
    // SAFETY: the set is initialised; the old one is not wanted.
    unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut()) };
}

/// Waits for a signal that [`hold`] keeps, on a thread that does nothing else.
pub fn next() -> i32 {
    let (set, mut signal) = (ending(), 0);
    // SAFETY: the set is initialised, and the number outlives the call, which fails for an
    // invalid set only.
    unsafe { libc::sigwait(&set, &mut signal) };
    signal
}

/// How ps(1) and the like call this process: /proc/self/exe says nothing.
pub fn name_process(name: &CStr) {
    // SAFETY: the name is a C string, of which the kernel takes the first 15 bytes.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
}

/// Waits for a signal that asks for an end.
pub struct EndSignals(Source);

impl EndSignals {
    /// On this thread's executor. Errors: those of signalfd(2).
    pub fn new() -> io::Result<EndSignals> {
        let set = ending();
        // SAFETY: the set is initialised and outlives the call.
        let fd = unsafe { libc::signalfd(-1, &set, libc::SFD_NONBLOCK | libc::SFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just made, owned by nobody else.
        Ok(EndSignals(Source::new(unsafe { OwnedFd::from_raw_fd(fd) })?))
    }

    /// The next such signal.
    pub async fn wait(&self) -> io::Result<i32> {
        let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
        self.0
            .io(Interest::Read, |fd| {
                // SAFETY: the kernel writes at most info.len() bytes to it.
                match unsafe { libc::read(fd, info.as_mut_ptr().cast(), info.len()) } {
                    0.. => Ok(()),
                    _ => Err(io::Error::last_os_error()),
                }
            })
            .await?;
        Ok(i32::from_ne_bytes([info[0], info[1], info[2], info[3]]))
    }
}
