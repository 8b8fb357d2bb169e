//! Errors as a user sees them: a sentence that says what happened, to what, and what to do next; and an
//! exit code.

use std::fmt::Display;
use std::io;

/// Wrong arguments or configuration: what the command line says, or a configuration or key file that
/// it names, cannot be used as it is. Nothing has been tried.
pub const EXIT_USAGE: u8 = 2;
/// The command could not do what it was asked for.
pub const EXIT_FAILED: u8 = 1;
/// No server answered.
pub const EXIT_UNREACHABLE: u8 = 3;
/// The server refused.
pub const EXIT_REFUSED: u8 = 4;
/// Of a mount's daemon: it could not begin, since the machine is short of something that may come
/// back. No number of another meaning here or in a shell; supervisors of earlier versions take it for
/// any failure.
pub const EXIT_SHORT: u8 = 76;
/// mount(8)'s codes for wrong arguments and for a failed mount.
const MOUNT_EXIT_USAGE: u8 = 1;
const MOUNT_EXIT_FAILED: u8 = 32;

/// Ends the command.
#[derive(Debug)]
pub struct Failure {
    /// Exit code.
    pub code: u8,
    /// For the user.
    pub message: String,
}

impl Failure {
    /// The failure of a command that could not do what it was asked for.
    pub fn new(message: impl Display) -> Failure {
        Failure { code: EXIT_FAILED, message: message.to_string() }
    }

    /// The reader of what we print has gone: there is nothing to report, and nothing failed.
    pub fn unheard() -> Failure {
        Failure { code: 0, message: String::new() }
    }

    /// A signal asked for an end: what shells say of a process that it ended.
    pub fn interrupted(signal: i32) -> Failure {
        let code = u8::try_from(128 + signal).unwrap_or(EXIT_FAILED);
        Failure {
            code,
            message: format!("ended by signal {signal}; everything that was started is removed"),
        }
    }

    /// Arguments or configuration are wrong.
    pub fn usage(message: impl Display) -> Failure {
        Failure { code: EXIT_USAGE, message: message.to_string() }
    }
}

impl Failure {
    /// With the exit code that says so of whom was asked.
    pub fn nobody_answered(self) -> Failure {
        Failure { code: EXIT_UNREACHABLE, ..self }
    }

    /// With the exit code that mount(8) expects of its helpers.
    pub fn for_mount_helper(self) -> Failure {
        let code = if self.code == EXIT_USAGE { MOUNT_EXIT_USAGE } else { MOUNT_EXIT_FAILED };
        Failure { code, ..self }
    }
}

impl From<dray_client::ConnectError> for Failure {
    fn from(error: dray_client::ConnectError) -> Failure {
        let code = match error {
            dray_client::ConnectError::Unreachable { .. } => EXIT_UNREACHABLE,
            _ => EXIT_REFUSED,
        };
        Failure { code, message: error.to_string() }
    }
}

/// Whether the machine is short of processes, threads, memory or descriptors, which may pass.
pub fn is_shortage(error: &io::Error) -> bool {
    let passing = [libc::EAGAIN, libc::ENOMEM, libc::EMFILE, libc::ENFILE];
    error.raw_os_error().is_some_and(|raw| passing.contains(&raw))
}

/// The same as [`ErrorContext`] for what a daemon begins with: a shortage has an exit code of its own.
pub trait StartErrorContext<T> {
    /// With the sentence `what`, to which the system's own words are added.
    fn beginning(self, what: impl FnOnce() -> String) -> Result<T, Failure>;
}

impl<T> StartErrorContext<T> for io::Result<T> {
    fn beginning(self, what: impl FnOnce() -> String) -> Result<T, Failure> {
        self.map_err(|error| {
            let code = if is_shortage(&error) { EXIT_SHORT } else { EXIT_FAILED };
            Failure { code, message: format!("{}: {error}", what()) }
        })
    }
}

/// Says what was being done when a system call failed.
pub trait ErrorContext<T> {
    /// With the sentence `what`, to which the system's own words are added.
    fn doing(self, what: impl FnOnce() -> String) -> Result<T, Failure>;
}

impl<T, E: Display> ErrorContext<T> for Result<T, E> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T, Failure> {
        self.map_err(|error| Failure::new(format!("{}: {error}", what())))
    }
}
