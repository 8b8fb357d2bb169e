//! Leases on locks at real mounts: what they save, and that other mounts find locks of which the server does not know.

use std::fs::File;
use std::io::Error;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use crate::common;
use crate::common::daemons::{daemon, signal, wait_for_daemon};
use crate::common::{Rig, on_transports, wait_for};
use crate::write_leases::status;

/// Round trips of others on the machine, which look at mount points.
const ASKING: u64 = 4;
/// Where sqlite locks its databases.
const PENDING: i64 = 1 << 30;

fn two_mounts(transport: &str) -> (Rig, PathBuf, PathBuf) {
    let mut rig = Rig::new();
    let export = format!("data={},squash=none,leases,lock_leases", rig.path("export").display());
    let listen = format!("unix://{}", rig.path("socket").display());
    let args = ["serve", "--export", &export, "--listen", &listen, "--state"];
    let mut command = rig.command(&args);
    command.arg(rig.path("state")).env("NOTIFY_SOCKET", rig.path("ready"));
    rig.start_server(&command, None);
    let [one, other] = ["one", "other"].map(|name| rig.mount(name, transport));
    (rig, one, other)
}

fn fcntl(file: &File, command: i32, kind: i32, (start, len): (i64, i64)) -> Result<i16, i32> {
    // SAFETY: an all-zero flock is valid.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    (lock.l_type, lock.l_start, lock.l_len) = (kind as i16, start, len);
    // SAFETY: the lock lives through the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &mut lock) } {
        0 => Ok(lock.l_type),
        _ => Err(Error::last_os_error().raw_os_error().unwrap()),
    }
}

fn set(file: &File, kind: i32, range: (i64, i64)) -> Result<(), i32> {
    fcntl(file, libc::F_SETLK, kind, range).map(drop)
}

/// As sqlite locks its database for a select.
fn select(file: &File) {
    set(file, libc::F_RDLCK, (PENDING, 1)).unwrap();
    set(file, libc::F_RDLCK, (PENDING + 2, 510)).unwrap();
    set(file, libc::F_UNLCK, (PENDING, 1)).unwrap();
    let reserved = fcntl(file, libc::F_GETLK, libc::F_WRLCK, (PENDING + 1, 1));
    assert_eq!(reserved, Ok(libc::F_UNLCK as i16));
    set(file, libc::F_UNLCK, (0, 0)).unwrap();
}

fn open(path: &Path) -> File {
    File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

// proves: P335, P336
#[test]
fn locks_of_300_selects_cost_one_round_trip() {
    if common::skipped() {
        return;
    }
    on_transports(|transport| {
        let (rig, one, other) = two_mounts(transport);
        let file = open(&one.join("db"));
        let asked = || status(&rig, &one)["server"]["calls"].as_u64().unwrap();
        let before = asked();
        (0..300).for_each(|_| select(&file));
        let took = asked() - before;
        assert!(took <= 1 + ASKING, "{took} round trips for the locks of 300 selects");
        set(&file, libc::F_WRLCK, (0, 10)).unwrap();
        let theirs = open(&other.join("db"));
        assert_eq!(set(&theirs, libc::F_RDLCK, (5, 1)), Err(libc::EAGAIN));
        set(&theirs, libc::F_RDLCK, (10, 1)).unwrap();
        assert_eq!(set(&file, libc::F_WRLCK, (0, 11)), Err(libc::EAGAIN));
        drop(file);
        set(&theirs, libc::F_WRLCK, (0, 11)).unwrap();
    });
}

/// What was given back before its death is free, and what was not is held, until the file is closed.
// proves: P345
#[test]
fn locks_of_which_the_server_does_not_know_outlive_the_daemon() {
    if common::skipped() {
        return;
    }
    on_transports(|transport| {
        let (_rig, one, other) = two_mounts(transport);
        let file = open(&one.join("db"));
        set(&file, libc::F_WRLCK, (0, 10)).unwrap();
        set(&file, libc::F_WRLCK, (10, 10)).unwrap();
        set(&file, libc::F_UNLCK, (0, 10)).unwrap();
        let before = wait_for_daemon(&one);
        signal(before, libc::SIGKILL);
        wait_for("the next daemon", || daemon(&one).is_some_and(|it| it != before));
        let theirs = open(&other.join("db"));
        assert_eq!(set(&theirs, libc::F_RDLCK, (10, 1)), Err(libc::EAGAIN));
        set(&theirs, libc::F_WRLCK, (0, 10)).unwrap();
        set(&file, libc::F_UNLCK, (10, 10)).unwrap();
        set(&theirs, libc::F_WRLCK, (10, 10)).unwrap();
    });
}
