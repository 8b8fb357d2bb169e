//! The only way to clocks, randomness, threads, tasks and synchronisation.
//!
//! A small executor for each thread, with three drivers under it. The first is epoll, which works
//! everywhere. The second is io_uring, which also carries the commands of FUSE over io_uring, so
//! that one system call waits for everything. The third is simulated: its clock jumps and its
//! choices come from a seed. Code above cannot tell which one it runs on.
//!
//! This crate must not know about files, wires or FUSE. It imports nothing of ours.

mod cpus;
mod driver;
mod executor;
mod join;
mod pool;
mod random;
mod scope;
mod source;
mod task;
mod task_memory;
mod tick;
mod time;
mod yields;

pub use cpus::CpuSet;
pub use driver::uring::{Completion, Ring, RingToken};
pub use executor::{DriverKind, Executor, ExecutorHandle, in_simulation};
pub use join::join_all;
pub use pool::{NoThread, Pool, Share};
pub use random::{random_bytes, random_u64};
pub use scope::Scope;
pub use source::{Interest, Source};
pub use task::{Aborted, Join, poll_once_then_spawn, spawn, spawn_join};
pub use task_memory::kept_task_bytes;
pub use tick::Tick;
pub use time::{
    Elapsed, Instant, Sleep, coarse_wall_clock, now, now_with_sleeps, sleep, sleep_until, step,
    timeout, wall_clock,
};
pub use yields::{yield_now, yield_to_io};

/// Channels and semaphores that work on any executor.
pub mod sync {
    pub use tokio::sync::{Notify, OnceCell, Semaphore, mpsc, oneshot, watch};
}
