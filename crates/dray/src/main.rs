//! The command: the only place that reads arguments and configuration and puts stacks
//! together out of the other crates.
//!
//! This crate must not do what a crate below it does: it serves no file, knows no wire
//! and no kernel protocol.

mod args;
mod config;
mod control;
mod daemonize;
mod demo;
mod descriptors;
mod endpoint;
mod error;
mod evict;
mod export;
mod exported;
mod hang;
mod interrupt;
mod journal;
mod keeper;
mod keeper_process;
mod logger;
mod manual;
mod metrics_http;
mod mount;
mod mount_daemon;
mod mount_metrics;
mod mount_options;
mod mount_table;
mod nearest;
mod notify_systemd;
mod opening;
mod output;
mod paths;
mod report;
mod sandbox;
mod serve;
mod server_metrics;
mod signals;
mod state;
mod status;
mod status_table;
mod supervisor;
mod survey;
mod umount;
mod upgrade;
mod workers;

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Args, Command};
use crate::error::Failure;

fn main() -> ExitCode {
    let args = match args::helper_args() {
        Some(helper) => helper,
        None => Args::parse(),
    };
    // A server tells whoever started it that it serves, and what; other commands only what
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
        Command::KeepFiles { state } => keeper_process::run(&state),
        Command::Umount(args) => umount::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Evict(args) => evict::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Survey(args) => survey::run(&args),
        Command::Completions { shell } => manual::completions(shell),
        Command::Man { dir } => manual::man(&dir),
        Command::Upgrade(args) => upgrade::run(&args),
        Command::MountSupervisor(args) => supervisor::run(args),
        Command::MountDaemon(args) => mount_daemon::run(args),
        Command::WakeMount { mountpoint } => mount_daemon::wake(&mountpoint),
    }
}
