//! Upgrades of a mount: another program takes over from its daemon, or does not come up.

use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Stdio;

use crate::common::daemons::{daemon, signal, supervisor};
use crate::common::load::{KeptFiles, check_load, load};
use crate::common::{Rig, on_transports, processes, wait_for};
use dray_rpc::wire::Refused;

// proves: P97
#[test]
fn an_upgrade_is_a_pause_and_a_broken_one_no_harm() {
    on_transports(upgrade);
}

/// Killed once, an upgraded mount was back at the program that it had begun with. So was one that
/// was to be upgraded once more, to what does not come up. Five such tries within a minute ended
/// it.
// proves: P97
#[test]
fn what_was_upgraded_stays_so_over_a_death_and_a_broken_upgrade() {
    on_transports(|options| {
        let mut rig = Rig::new();
        rig.serve(&[]);
        let (program, ours) = (rig.path("dray"), Path::new(env!("CARGO_BIN_EXE_dray")));
        rig.copy_program(ours, &program);
        let at = rig.mount_with(&program, "mount", options);
        let place = at.to_str().unwrap().to_owned();
        let replaced = |with: &Path| {
            fs::remove_file(&program).unwrap();
            rig.copy_program(with, &program);
            fs::metadata(&program).unwrap().ino()
        };
        let runs = |pid: i32| fs::metadata(format!("/proc/{pid}/exe")).map_or(0, |meta| meta.ino());
        let upgraded = replaced(ours);
        rig.demand(&["upgrade", &place]);
        assert_eq!(runs(daemon(&at).unwrap()), upgraded);
        // What is installed afterwards is nobody's yet.
        replaced(Path::new("/bin/false"));
        let killed = || {
            let before = daemon(&at).unwrap();
            signal(before, libc::SIGKILL);
            wait_for("the next daemon", || daemon(&at).is_some_and(|next| next != before));
            fs::write(at.join("file"), "served").unwrap();
            assert_eq!(runs(daemon(&at).unwrap()), upgraded);
        };
        killed();
        // More often than daemons may fail.
        for _ in 0..8 {
            let refused = rig.run(&["upgrade", &place]);
            assert!(!refused.status.success(), "another program than the installed one serves");
            assert_eq!(runs(daemon(&at).unwrap()), upgraded);
        }
        killed();
        // A program that crashes is given up for the one that the mount began with.
        let before = daemon(&at).unwrap();
        signal(before, libc::SIGABRT);
        wait_for("the next daemon", || daemon(&at).is_some_and(|next| next != before));
        fs::write(at.join("file"), "served").unwrap();
        let supervisor = supervisor(&at);
        assert_eq!(runs(daemon(&at).unwrap()), runs(supervisor));
        rig.end_of_mount(&at);
    });
}

/// Takes connections and refuses all of them, as a server of a version too far away.
fn refuses(socket: &Path) -> UnixListener {
    let _ = fs::remove_file(socket); // a server that ended in good order has done so
    let listener = UnixListener::bind(socket).unwrap();
    let theirs = listener.try_clone().unwrap();
    let message = "bring both to neighbouring releases".to_owned();
    let errno = libc::EPROTONOSUPPORT as u16;
    let refusal = Refused { errno, message, definition: String::new() }.refusal();
    std::thread::spawn(move || {
        for mut client in theirs.incoming().map_while(Result::ok) {
            let _ = client.read(&mut [0; 1024]); // its hello, or it has gone
            let lengths = [refusal.len() as u32, 0, 0].map(u32::to_le_bytes).concat();
            let _ = client.write_all(&[&b"dray"[..], &lengths, &refusal].concat());
        }
    });
    listener
}

/// The mount was upgraded, and all callers waited for a server that would not have the new program.
// proves: P97
#[test]
fn a_program_that_the_server_refuses_is_not_upgraded_to() {
    on_transports(|options| {
        let mut rig = Rig::new();
        rig.serve(&[]);
        let at = rig.mount("mount", options);
        fs::write(at.join("file"), "before").unwrap();
        rig.end_server(libc::SIGTERM);
        let refusing = refuses(&rig.path("socket"));
        let refused = rig.run(&["upgrade", at.to_str().unwrap()]);
        assert!(!refused.status.success(), "it serves without a server");
        assert!(String::from_utf8_lossy(&refused.stderr).contains("keeps the former program"));
        // SAFETY: no memory is passed; the descriptor is open.
        unsafe { libc::shutdown(refusing.as_raw_fd(), libc::SHUT_RDWR) };
        fs::remove_file(rig.path("socket")).unwrap();
        rig.serve(&[]);
        assert_eq!(fs::read(at.join("file")).unwrap(), b"before");
        rig.end_of_mount(&at);
    });
}
fn upgrade(options: &str) {
    let mut rig = Rig::new();
    let log = rig.path("log");
    rig.serve_logging(&log, &[]);
    let program = rig.path("dray");
    rig.copy_program(Path::new(env!("CARGO_BIN_EXE_dray")), &program);
    let at = rig.mount_with(&program, "mount", options);
    let kept = KeptFiles::new(&at);
    let load = load(&at);
    let place = at.to_str().unwrap().to_owned();
    for _ in 0..3 {
        let before = daemon(&at).unwrap();
        fs::remove_file(&program).unwrap();
        rig.copy_program(Path::new(env!("CARGO_BIN_EXE_dray")), &program);
        rig.demand(&["upgrade", &place]);
        let after = daemon(&at).unwrap();
        assert_ne!(before, after);
        assert_eq!(fs::read_link(format!("/proc/{after}/exe")).unwrap(), program);
    }
    fs::remove_file(&program).unwrap();
    rig.copy_program(Path::new("/bin/false"), &program);
    let refused = rig.run(&["upgrade", &place]);
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("keeps the former program"));
    let rounds = load.end();
    check_load(&at, &rounds);
    fs::remove_file(&program).unwrap();
    rig.copy_program(Path::new(env!("CARGO_BIN_EXE_dray")), &program);
    rig.demand(&["upgrade", &place]);
    // Under load a daemon may have its queues set going at any time.
    assert!(processes("wake-mount", &at).is_empty(), "it could not be unmounted now");
    kept.check(&at);
    drop(kept);
    rig.end_of_mount(&at);
    // What comes on another connection once more has not failed.
    let said = fs::read_to_string(&log).unwrap();
    assert!(!said.contains("closing a file failed"), "{said}");
}

/// What a supervisor that stands still has been sent, it reads at once when it goes on. It reads
/// that its daemon is ready, and that an upgrade is wanted. The first was taken for the outcome of
/// the second.
// proves: P97
#[test]
fn an_upgrade_is_not_answered_by_the_daemon_before_it() {
    on_transports(|options| {
        let mut rig = Rig::new();
        rig.serve(&[]);
        let program = rig.path("dray");
        rig.copy_program(Path::new(env!("CARGO_BIN_EXE_dray")), &program);
        let at = rig.mount_with(&program, "mount", options);
        let place = at.to_str().unwrap();
        rig.demand(&["upgrade", place]);
        fs::remove_file(&program).unwrap();
        rig.copy_program(Path::new("/bin/false"), &program);
        let (before, supervisor) = (daemon(&at).unwrap(), supervisor(&at));
        signal(before, libc::SIGKILL);
        // Looked for without a pause: what it says is not to be heard before the stop.
        while daemon(&at).is_none_or(|now| now == before) {}
        signal(supervisor, libc::SIGSTOP);
        wait_for("a daemon that listens", || rig.run(&["status", place]).status.success());
        let upgrade = rig.command(&["upgrade", place]).stderr(Stdio::piped()).spawn().unwrap();
        wait_for("the request to upgrade", || is_pending(supervisor, libc::SIGHUP));
        signal(supervisor, libc::SIGCONT);
        let refused = upgrade.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(said.contains("keeps the former program"), "{said}");
        rig.end_of_mount(&at);
    });
}

/// Whether a signal waits to be taken by a process.
fn is_pending(pid: i32, signal: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:")).unwrap();
    u64::from_str_radix(pending.trim(), 16).unwrap() & 1 << (signal - 1) != 0
}
