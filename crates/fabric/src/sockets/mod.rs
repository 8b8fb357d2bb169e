//! Connections by sockets of the kernel: TCP and Unix.

mod connect;
mod file;
pub(crate) mod frame;
mod listen;
mod options;
mod pages;
mod peek;
mod reserved_port;
mod stream;

pub use connect::{ReservedPort, Sockets, connect};
pub use file::somebody_listens;
pub use listen::{Bound, Listener};
pub use options::{incoming_cpu, notice_loss};
pub use peek::peek_head;
pub use stream::StreamConnection;
