//! `dray-bench`: the tool behind `script/bench`. See the crate's documentation.

mod commands;

use dray_bench::alloc::CountingAllocator;
use dray_bench::args::BenchArgs;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const USAGE: &str = "usage: dray-bench COMMAND ...
  load      one or more workloads on a directory or an NFS export
  fill      makes the files and names that workloads use
  at-home   makes a directory whose files stay on one server of a projection
  tcp       the raw TCP denominators
  null-mount     serves the null file system through FUSE: FUSE's part of every operation
  idle      wake-ups and resident memory of processes
  many      many clients of one server: at rest, coming, contending, restarting, leaving
  sessions  resident memory that idle connections cost a server
  lock-waiters   requests for locks that wait and are given up all at once
  hoard     connections that have the server remember as much as it lets them
  counters  allocations, bytes, system calls and round trips of single calls
  aggregate      read-ahead and merged writes over a file system that is slow for each call
  audit     records into the log of an audit, and its verification
  batch     what a file costs that the client library puts in a batch
  qos-decisions  what a decision about shares of bandwidth costs
  inetd     gives each connection on a port to a new process
  report    medians, ratios and targets of a run, as JSON lines and as a table
  plot      figures and the tables of the pages from a run
Each is explained where it is defined; script/bench calls them.";

/// `open` keeps every file open: the soft limit on descriptors is raised to the hard one.
fn allow_many_files() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is ours to be read and written.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
        }
    }
}

fn main() {
    allow_many_files();
    let mut args = std::env::args().skip(1);
    let command = args.next().unwrap_or_default();
    let outcome = BenchArgs::new(args).and_then(|args| commands::run(&command, &args));
    match outcome {
        Ok(()) => {}
        Err(error) if error.is_empty() => {
            eprintln!("{USAGE}");
            std::process::exit(2);
        }
        Err(error) => {
            eprintln!("dray-bench {command}: {error}");
            std::process::exit(1);
        }
    }
}
