//! Paths of the files and sockets of a running dray.

use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use dray_core::fnv1a;

use crate::error::{ErrorContext, Failure};

const RUN_DIR: &str = "DRAY_RUN_DIR";
const STATE_DIR: &str = "DRAY_STATE_DIR";

/// Whether this is the super-user.
pub fn is_root() -> bool {
    effective_uid() == 0
}

pub fn effective_uid() -> u32 {
    // SAFETY: takes no memory and cannot fail.
    unsafe { libc::geteuid() }
}

/// Directory of the control sockets: `$DRAY_RUN_DIR`, else /run/dray for root, else
/// `$XDG_RUNTIME_DIR`/dray or /tmp/dray-UID.
pub fn run_dir() -> PathBuf {
    if let Some(dir) = std::env::var_os(RUN_DIR) {
        return absolute(dir);
    }
    if is_root() {
        return "/run/dray".into();
    }
    users_run_dir(std::env::var_os("XDG_RUNTIME_DIR"), effective_uid())
}

/// The run directory of an ordinary user. A relative or empty `$XDG_RUNTIME_DIR` is none (XDG Base
/// Directory Specification): it would be another one in each directory.
fn users_run_dir(runtime: Option<OsString>, uid: u32) -> PathBuf {
    let runtime = runtime.map(PathBuf::from).filter(|dir| dir.is_absolute());
    runtime.map_or_else(|| format!("/tmp/dray-{uid}").into(), |dir| dir.join("dray"))
}

/// Processes of a mount work elsewhere than where they were started.
fn absolute(dir: OsString) -> PathBuf {
    std::path::absolute(&dir).unwrap_or_else(|_| dir.into())
}

/// Makes it, where it is not there. Errors say which directory the user has to correct.
pub fn make_run_dir() -> Result<(), Failure> {
    make_private(&run_dir()).map_err(|failure| {
        let said = if is_run_dir_given() || is_root() { "" } else { ", else $XDG_RUNTIME_DIR" };
        Failure::new(format!("run directory (${RUN_DIR}{said}): {}", failure.message))
    })
}

/// Whether the caller says which run directory is meant.
pub fn is_run_dir_given() -> bool {
    std::env::var_os(RUN_DIR).is_some()
}

/// Where [`run_dir`] may be for processes of `user`, begun by whatever kind of session.
pub fn run_dirs(user: u32) -> Vec<PathBuf> {
    if user == effective_uid() && (user == 0 || is_run_dir_given()) {
        return vec![run_dir()];
    }
    let usual = [format!("/run/user/{user}/dray"), format!("/tmp/dray-{user}")];
    let own = (user == effective_uid()).then(run_dir);
    let mut dirs: Vec<PathBuf> = own.into_iter().chain(usual.map(PathBuf::from)).collect();
    dirs.dedup();
    dirs
}

/// Makes `dir` and those above it, for our eyes only. An existing one must be ours, since
/// what is in it is believed.
pub fn make_private(dir: &Path) -> Result<(), Failure> {
    let shown = dir.display();
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(|error| {
        match error.kind() {
            ErrorKind::AlreadyExists => Failure::new(format!(
                "{shown} is not a directory: remove it or choose another place"
            )),
            _ => Failure::new(format!("cannot make {shown}: {error}")),
        }
    })?;
    let meta = fs::symlink_metadata(dir).doing(|| format!("cannot look at {shown}"))?;
    match complaint(&shown.to_string(), meta.file_type(), meta.uid(), meta.mode()) {
        Some(complaint) => Err(Failure::new(complaint)),
        None => Ok(()),
    }
}

/// What keeps a directory from being ours alone. No message says to remove one: it may hold what
/// clients rely on.
fn complaint(shown: &str, kind: fs::FileType, owner: u32, mode: u32) -> Option<String> {
    let us = effective_uid();
    if kind.is_symlink() {
        Some(format!("{shown} is a symbolic link: name the directory that it leads to"))
    } else if owner != us {
        Some(format!(
            "{shown} belongs to user {owner}, and this is user {us}: run it as its owner, chown it \
             if you trust what is in it, or choose another place"
        ))
    } else if mode & 0o022 != 0 {
        let mode = mode & 0o7777;
        Some(format!(
            "others may write to {shown} (its mode is {mode:o}): chmod 700 it, or choose another \
             place"
        ))
    } else {
        None
    }
}

/// Where state directories are that no `--state` names: `$DRAY_STATE_DIR`, else /var/lib/dray for
/// root, else `$XDG_STATE_HOME`/dray.
pub fn state_dir() -> PathBuf {
    if let Some(dir) = std::env::var_os(STATE_DIR) {
        return absolute(dir);
    }
    if is_root() {
        return "/var/lib/dray".into();
    }
    let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".local/state"));
    let base = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).or_else(home);
    base.unwrap_or_else(|| "/tmp".into()).join("dray")
}

/// A short name for a path, the same in every process: FNV-1a of its bytes.
pub fn short_name(path: &Path) -> String {
    format!("{:016x}", fnv1a(path.as_os_str().as_bytes()))
}

/// A short name for the mount that was made at `at`, the same in every process. Where it has been
/// moved since, another one may be made at that place: then the kernel's number of the connection
/// tells them apart. Versions that did not know that went without.
pub fn mount_name(at: &Path, connection: Option<u32>) -> String {
    match connection {
        Some(number) => format!("{}-{number}", short_name(at)),
        None => short_name(at),
    }
}

/// Allows as many open files as the system's hard limit does; answers how many that are.
pub fn raise_file_limit() -> usize {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the struct outlives both calls. Where it fails the limit stays as it was,
    // which costs nothing but room.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
            libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
        }
    }
    usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX)
}

/// Lets this process have files of any size, as far as it may. The memory of a mount counts as one
/// (memfd_create(2)), and no process of a mount writes any other.
pub fn lift_size_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let none = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the structs outlive the calls. Where they fail the limit stays as it was, and what does not
    // fit says so.
    unsafe {
        if libc::setrlimit(libc::RLIMIT_FSIZE, &none) != 0
            && libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) == 0
        {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_FSIZE, &limit);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With an empty one sockets were put below wherever `dray mount` was called.
    #[test]
    fn a_runtime_directory_that_is_none_is_not_used() {
        for (runtime, expected) in [
            (None, "/tmp/dray-7"),
            (Some(""), "/tmp/dray-7"),
            (Some("run"), "/tmp/dray-7"),
            (Some("/run/user/7"), "/run/user/7/dray"),
        ] {
            assert_eq!(users_run_dir(runtime.map(OsString::from), 7), Path::new(expected));
        }
    }
}
