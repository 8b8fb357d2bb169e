//! Signals that ask for an end, for commands that clean up. Such a command checks from time to time
//! whether a signal came.

use std::io;
use std::sync::atomic::{AtomicI32, Ordering};

use crate::error::{ErrorContext, Failure};
use crate::{output, signals};

/// The first signal that came; 0: none.
static CAME: AtomicI32 = AtomicI32::new(0);

/// Takes note of signals from here on; to be called before any thread is started. A second
/// one ends the process at once, whatever it leaves behind: something may hang.
pub fn watch() -> Result<(), Failure> {
    signals::hold();
    let thread = std::thread::Builder::new().name("dray-signals".into()).spawn(|| {
        loop {
            let signal = signals::next();
            if CAME.swap(signal, Ordering::SeqCst) != 0 {
                // SAFETY: ends the process; nothing is run after it.
                unsafe { libc::_exit(128 + signal) };
            }
            output::complain(
                "cleaning up; a second signal ends this command at once, without that",
            );
        }
    });
    thread.map(drop).doing(|| "cannot start a thread".into())
}

/// Whether an end was asked for.
pub fn came() -> bool {
    CAME.load(Ordering::Relaxed) != 0
}

/// An error if an end was asked for.
pub fn check() -> Result<(), Failure> {
    match CAME.load(Ordering::SeqCst) {
        0 => Ok(()),
        signal => Err(Failure::interrupted(signal)),
    }
}

/// The same amid input and output.
pub fn check_io() -> io::Result<()> {
    if came() { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
}
