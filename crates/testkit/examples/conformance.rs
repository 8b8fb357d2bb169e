//! Runs the conformance suite in an empty directory of a mount: `conformance DIR [TEST...]`. The tests named here
//! are left out. Needs root. Fails at the first promise that is not kept, and names it.
//!
//! The backend that reaches the directory keeps advisory locks itself. So tests of locks would say nothing of the
//! mount, and are left out.

use std::path::PathBuf;
use std::process::ExitCode;

use dray_backends::posix::{self, PosixFs, PosixOptions, Squash};
use dray_core::{FileSystem, FsUuid};
use dray_testkit::conformance::{OptionalFeatures, suite_without};
use dray_testkit::fixture::block_on;

fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(1);
    let Some(dir) = args.next().map(PathBuf::from) else {
        eprintln!("conformance DIR [TEST...]");
        return ExitCode::from(2);
    };
    let left_out: Vec<String> = args.map(|name| name.to_string_lossy().into_owned()).collect();
    let left_out: Vec<&str> = left_out.iter().map(String::as_str).collect();
    let options = PosixOptions { squash: Squash::None, ..PosixOptions::default() };
    let fs = match PosixFs::open(&dir, FsUuid(7), options) {
        Ok(fs) => fs,
        Err(error) => {
            eprintln!("{}: {error}", dir.display());
            return ExitCode::FAILURE;
        }
    };
    let offers = OptionalFeatures { locks: false, ..OptionalFeatures::ALL };
    let fs: std::sync::Arc<dyn FileSystem> = fs;
    block_on(suite_without(&[fs.clone(), fs], offers, &left_out));
    match posix::release() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("this thread stays somebody else: {error}");
            ExitCode::FAILURE
        }
    }
}
