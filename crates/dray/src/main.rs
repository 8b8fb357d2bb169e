//! The command: the only place that reads arguments and configuration and puts stacks
//! together out of the other crates.
//!
//! This crate must not do what a crate below it does: it serves no file, knows no wire
//! and no kernel protocol.

mod accept;
mod args;
mod at_once;
mod audit;
mod cache;
mod completions;
mod control;
mod daemonize;
mod demo;
mod drain;
mod endpoint;
mod error;
mod evict;
mod flock;
mod interrupt;
mod key;
mod logger;
mod manual;
mod metrics_http;
mod mount;
mod notify_systemd;
mod output;
mod paths;
mod policy;
mod projection;
mod qos;
mod quiesce;
mod run_file;
mod sandbox;
mod serve;
mod signals;
mod status;
mod suggestions;
mod survey;
mod target_disks;
mod unresponsive;

use std::process::ExitCode;

use crate::args::Command;
use crate::error::Failure;

fn main() -> ExitCode {
    signals::ignore_what_others_cause();
    let args = args::helper_args().unwrap_or_else(args::own_args);
    // A server tells its starter that it serves, and what; other commands only what
    // went wrong.
    let serves = matches!(args.command, Command::Serve(_));
    logger::start(args.verbose.max(u8::from(serves)), args.quiet);
    match run(args.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if !failure.message.is_empty() {
                output::complain(&failure.message);
            }
            ExitCode::from(failure.code)
        }
    }
}

fn run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Serve(args) => serve::run(args),
        Command::Mount(args) => mount::run(args),
        Command::KeepFiles { state } => serve::descriptor_store_process::run(&state),
        Command::Key(args) => key::run(&args),
        Command::Projection { command } => projection::run(&command),
        Command::Reassemble(args) => target_disks::reassemble(&args),
        Command::Fsck(args) => target_disks::check(&args),
        Command::Umount(args) => mount::umount::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Evict(args) => evict::run(&args),
        Command::Drain(args) => drain::run(&args),
        Command::Quiesce(args) => quiesce::run(&args),
        Command::Cache { command } => cache::run(&command),
        Command::Accept(args) => accept::run(&args),
        Command::Audit(args) => audit::run(&args),
        Command::Policy(args) => policy::run(&args),
        Command::Qos { command } => qos::run(&command),
        Command::Demo(args) => demo::run(&args),
        Command::Survey(args) => survey::run(&args),
        Command::Completions { shell } => manual::completions(shell),
        Command::Man { dir } => manual::man(&dir),
        Command::Upgrade(args) => mount::upgrade::run(&args),
        Command::MountSupervisor(args) => mount::supervisor::run(args),
        Command::MountDaemon(args) => mount::daemon::run(args),
        Command::WakeMount { mountpoint } => mount::daemon::wake(&mountpoint),
        Command::ReclaimEntries { mountpoint } => mount::daemon::reclaim_entries(&mountpoint),
        Command::Invalidate => mount::daemon::invalidate(),
    }
}
