//! Why a client has no session with a server, in words that help.

use std::fmt;
use std::io;

use dray_core::Errno;

/// Why a mount could not be made.
#[derive(Debug)]
pub enum ConnectError {
    /// No connection could be made.
    Unreachable {
        /// Where to.
        target: String,
        /// The error of the system.
        error: io::Error,
    },
    /// The server said no, and why.
    Refused {
        /// Error number.
        errno: Errno,
        /// For people.
        message: String,
    },
    /// The export is a projection, and the client does not place by its definition
    /// ([`ClientOptions::definition`](super::ClientOptions::definition)).
    Definition {
        /// The definition to place by, in its canonical form.
        text: String,
    },
    /// The other end is no dray server, or does not know the key.
    Protocol(String),
}

impl ConnectError {
    /// Whether there is no use in trying again. There is none if we were evicted, or if the server
    /// has another definition of the projection. If another version may replace this client
    /// (`replaceable`), there is none either with a server that does not speak as the client does.
    pub fn is_hopeless(&self, replaceable: bool) -> bool {
        match self {
            ConnectError::Unreachable { .. } => false,
            ConnectError::Refused { errno: Errno::ESHUTDOWN | Errno::EREMCHG, .. }
            | ConnectError::Definition { .. } => true,
            ConnectError::Refused { errno, .. } => {
                replaceable && errno.raw() == libc::EPROTONOSUPPORT
            }
            ConnectError::Protocol(_) => replaceable,
        }
    }

    /// A server is there and does not take us: for want of something else than room or time.
    pub fn is_lasting(&self) -> bool {
        match self {
            ConnectError::Unreachable { .. } => false,
            ConnectError::Refused { errno, .. } => *errno != Errno::EAGAIN,
            ConnectError::Definition { .. } | ConnectError::Protocol(_) => true,
        }
    }
}

/// Advice about a peer that takes a connection and ends it.
const HUNG_UP: &str = "is it a dray server, and has it room for one more client (see its log)?";

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConnectError::Unreachable { target, error } => {
                let hung_up = error.kind() == io::ErrorKind::UnexpectedEof;
                let advice = match error.raw_os_error() {
                    None if hung_up => HUNG_UP,
                    None => "is the name right?",
                    Some(libc::ETIMEDOUT | libc::EHOSTUNREACH | libc::ENETUNREACH) => {
                        "is that machine up, and does every firewall let the port through?"
                    }
                    // The other end sent something else than a greeting.
                    Some(libc::EPROTO) => {
                        "what answers there is no dray server, or one of another kind of \
                         version: is the port right?"
                    }
                    Some(libc::ENOTCONN) => {
                        return write!(
                            f,
                            "cannot connect to {target}: it took the connection and said nothing; \
                             is that a dray server, and is it alive?"
                        );
                    }
                    Some(libc::ECONNRESET | libc::EPIPE) => HUNG_UP,
                    Some(libc::EACCES) => {
                        "a server's socket is for its owner alone, root; others use its TCP port"
                    }
                    Some(_) => "is `dray serve` running there?",
                };
                write!(f, "cannot connect to {target}: {error}; {advice}")
            }
            ConnectError::Refused { message, .. } => f.write_str(message),
            ConnectError::Definition { .. } => f.write_str(
                "the server has another definition of this projection than the one that files were to \
                 be placed by: unmount, and mount again",
            ),
            ConnectError::Protocol(message) => f.write_str(message),
        }
    }
}

impl std::error::Error for ConnectError {}
