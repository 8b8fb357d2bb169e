//! Signals that clients and limits on resources cause, and mounts that end before they serve: the
//! real command, real mounts. Needs root.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Output;

use crate::common;
use crate::common::{Rig, is_mounted, processes, wait_for};

/// A limit on the size of files, and a place behind it.
const LIMIT_BYTES: u64 = 4 << 20;
const BEYOND: u64 = 2 * LIMIT_BYTES;

fn errno<T>(result: io::Result<T>) -> i32 {
    result.err().and_then(|error| error.raw_os_error()).unwrap_or(0)
}

/// What this process ignores, as a mask of signals.
fn ignored(pid: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(line.trim(), 16).unwrap()
}

/// Whether root may do what CAP_SYS_RESOURCE is for; many containers' may not.
fn may_raise_limits() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    u64::from_str_radix(line.trim(), 16).unwrap() & 1 << 24 != 0
}

fn fallocate(file: &File, at: u64, len_bytes: i64) -> io::Result<()> {
    // SAFETY: no memory is passed.
    match unsafe { libc::fallocate(file.as_raw_fd(), 0, at as i64, len_bytes) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// SIGXFSZ killed the server at a client's write, and each one after it at the same write, sent again.
// proves: D5
#[test]
fn a_server_with_a_limit_on_the_size_of_files_refuses_and_lives() {
    common::on_transports(|transport| {
        let mut rig = Rig::new();
        rig.serve_within(&[&format!("--fsize={LIMIT_BYTES}")], &[]);
        let server = rig.server();
        let at = rig.mount("mount", &format!("{transport},timeout=10"));
        for flags in [0, libc::O_DIRECT, libc::O_SYNC, libc::O_APPEND] {
            let mut options = File::options();
            options.read(true).write(true).create(true).custom_flags(flags);
            let file = options.open(at.join(format!("file-{flags}"))).unwrap();
            let data = vec![b'x'; 2 << 20];
            if flags == libc::O_APPEND {
                (&file).write_all(&data).unwrap();
                (&file).write_all(&data).unwrap();
                assert_eq!(errno((&file).write_all(&data)), libc::EFBIG, "flags {flags}");
            } else if flags != libc::O_DIRECT {
                file.write_all_at(&data, 0).unwrap();
                assert_eq!(errno(file.write_at(b"x", BEYOND)), libc::EFBIG, "flags {flags}");
                assert_eq!(errno(file.write_at(&data, BEYOND)), libc::EFBIG, "flags {flags}");
            }
            assert_eq!(errno(file.set_len(BEYOND)), libc::EFBIG, "flags {flags}");
            assert_eq!(errno(fallocate(&file, 0, BEYOND as i64)), libc::EFBIG, "flags {flags}");
        }
        fs::write(at.join("small"), "small").unwrap();
        assert_eq!(fs::read(at.join("small")).unwrap(), b"small");
        assert!(!server.is_over(), "the server goes on");
        rig.umount(&at);
    });
}

/// None of what a client or a limit can have the kernel send ends one of our processes.
#[test]
fn what_clients_can_cause_is_ignored_by_every_process() {
    if common::skipped() {
        return;
    }
    let (mut rig, at) = Rig::mounted("");
    // A deleted file that is open has the server start its descriptor store.
    let open = File::create(at.join("deleted")).unwrap();
    fs::remove_file(at.join("deleted")).unwrap();
    let server = rig.server();
    let mut all = vec![server.0];
    all.extend(processes("mount-supervisor", &at));
    all.extend(processes("mount-daemon", &at));
    all.extend(processes("keep-files", &rig.path("state")));
    assert_eq!(all.len(), 4, "{all:?}");
    let signals = [libc::SIGPIPE, libc::SIGXFSZ, libc::SIGXCPU, libc::SIGTTOU];
    for pid in all {
        let ignored = ignored(pid);
        for signal in signals {
            assert_ne!(ignored & 1 << (signal - 1), 0, "signal {signal}, process {pid}");
            // SAFETY: no memory is passed; the process is the rig's.
            unsafe { libc::kill(pid, signal) };
        }
    }
    fs::write(at.join("file"), "data").unwrap();
    assert!(!server.is_over());
    drop(open);
    rig.umount(&at);
}

/// The time that it may use is what clients have it use; the end of that is SIGKILL.
#[test]
fn no_limit_on_time_ends_a_server() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    match may_raise_limits() {
        true => rig.serve_within(&["--cpu=60"], &[]),
        false => {
            eprintln!("left out: a hard limit, which this machine's root may not raise");
            rig.serve_within(&["--cpu=60:unlimited"], &[]);
        }
    }
    let limits = fs::read_to_string(format!("/proc/{}/limits", rig.server().0)).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max cpu time")).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(words[3..5], ["unlimited", "unlimited"], "{line}");
}

/// `dray mount` to its end behind the words of `limit`.
fn mount_within(rig: &Rig, limit: &[&str], at: &Path, more: &[&str]) -> Output {
    let _ = fs::create_dir(at);
    let target = rig.target();
    let words =
        [limit, &[env!("CARGO_BIN_EXE_dray"), "mount", &target, at.to_str().unwrap()], more];
    let words = words.concat();
    rig.run_as(0, &[], words[0], &words[1..])
}

/// The memory of a mount counts as a file: SIGXFSZ ended `dray mount` right behind mount(2).
#[test]
fn a_limit_on_the_size_of_files_keeps_no_mount_away_or_leaves_nothing() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let limit = format!("--fsize={LIMIT_BYTES}:unlimited");
    let at = rig.moved_to("mount");
    let mounted = mount_within(&rig, &["prlimit", &limit], &at, &[]);
    assert!(mounted.status.success(), "{}", String::from_utf8_lossy(&mounted.stderr));
    let large = File::create(at.join("large")).unwrap();
    large.write_at(b"x", BEYOND).unwrap();
    drop(large);
    rig.umount(&at);
    // A user who may not raise the limit gets a message, and nothing is left.
    let (other, limit) = (rig.moved_to("other"), format!("--fsize={LIMIT_BYTES}"));
    let without = ["prlimit", &limit, "setpriv", "--bounding-set=-sys_resource"];
    let refused = mount_within(&rig, &without, &other, &[]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("ulimit -Hf"), "{said}");
    assert!(!is_mounted(&other));
}

/// Makes a key that is handed out once: to the command. The daemon asks in vain for some seconds, in which
/// the mount is there and does not serve.
fn key_for_one(rig: &Rig) -> (std::path::PathBuf, std::path::PathBuf) {
    let (key, once) = (rig.path("key"), rig.path("once"));
    let mut private = File::options();
    let mut file = private.write(true).create_new(true).mode(0o600).open(&key).unwrap();
    file.write_all(b"01234567890123456789012345678901").unwrap();
    let path = std::ffi::CString::new(once.to_str().unwrap()).unwrap();
    // SAFETY: a C string that outlives the call.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
    (key, once)
}

/// Whatever ended the processes of a mount before it served, the mount stayed and answered
/// ENOTCONN.
#[test]
fn a_mount_that_is_killed_before_it_serves_is_taken_away() {
    if common::skipped() {
        return;
    }
    for (killed, foreground) in [
        ("mount-supervisor", false),
        ("mount-daemon", false),
        ("mount-supervisor", true),
        ("mount-daemon", true),
    ] {
        let case = format!("{killed}, foreground: {foreground}");
        let mut rig = Rig::new();
        let (key, once) = key_for_one(&rig);
        rig.serve(&["--auth", &format!("psk:{}", key.display())]);
        let at = rig.moved_to("mount");
        fs::create_dir(&at).unwrap();
        let auth = format!("auth=psk:{}", once.display());
        let target = rig.target();
        let mut words = vec!["mount", &target, at.to_str().unwrap(), "-o", &auth];
        if foreground {
            words.push("--foreground");
        }
        let command = rig.start_command(&words);
        fs::write(&once, fs::read(&key).unwrap()).unwrap(); // waits for the one who reads
        wait_for("the daemon", || !processes("mount-daemon", &at).is_empty());
        assert!(is_mounted(&at), "{case}");
        for pid in processes(killed, &at) {
            // SAFETY: no memory is passed; the process is the rig's.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        let status = rig.end_of(command);
        assert_ne!(common::exit_code(status), 0, "{case}");
        wait_for("the end of the mount", || !is_mounted(&at));
        wait_for("its processes", || {
            ["mount-supervisor", "mount-daemon"].iter().all(|kind| processes(kind, &at).is_empty())
        });
    }
}
