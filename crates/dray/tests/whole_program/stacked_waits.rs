//! What a mount says of waiting, through a server that forwards: `timeout=`, and signals. Needs root.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::load::lock;
use crate::common::{Rig, exit_code, skipped, wait_for};
use crate::stacked::{Levels, open, status};

/// Of the mount below.
const TIMEOUT: Duration = Duration::from_secs(3);

/// Whether the server at the far end works on a call of this kind.
fn far_waits(levels: &Levels, op: &str) -> bool {
    let status = status(&levels.far);
    let operations = status["operations"].as_array().unwrap();
    operations.iter().any(|one| one["op"] == op)
}

/// Whichever way the server above is away: the one between is there, and does not end the wait.
// proves: P363
#[test]
fn the_time_limit_of_a_mount_holds_over_two_levels() {
    if skipped() {
        return;
    }
    let mut levels = Levels::new("squash=none");
    let options = format!("timeout={}", TIMEOUT.as_secs());
    let below = levels.middle.mount_export("up", "below", &options);
    let above = levels.far.mount("above", "");
    let (file, other) = (open(&below.join("f")), open(&above.join("f")));
    for signal in [libc::SIGSTOP, libc::SIGKILL] {
        match signal {
            libc::SIGSTOP => levels.far.stop_server(),
            _ => drop(levels.far.end_server(signal)),
        }
        let begun = Instant::now();
        let error = lock(&file, libc::F_WRLCK, libc::F_OFD_SETLK).unwrap_err();
        let took = begun.elapsed();
        assert_eq!(error.raw_os_error(), Some(libc::EHOSTDOWN), "after {took:?}");
        assert!(took >= TIMEOUT - Duration::from_millis(500), "only {took:?}");
        let error = fs::create_dir(below.join("never")).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EHOSTDOWN));
        match signal {
            libc::SIGSTOP => levels.far.server().signal(libc::SIGCONT),
            _ => levels.far.serve(&[]),
        }
        wait_for("the mount to work again", || fs::metadata(&below).is_ok());
        fs::write(below.join("after"), "works").unwrap();
        assert_eq!(fs::read(above.join("after")).unwrap(), b"works");
        // Nobody has the lock of the call that failed. Nor does it come later: locks are given up in order.
        wait_for("the lock to be free", || lock(&other, libc::F_WRLCK, libc::F_OFD_SETLK).is_ok());
        lock(&other, libc::F_UNLCK, libc::F_OFD_SETLK).unwrap();
    }
}

/// Waits for a lock, says that a signal has ended the wait, and keeps the file open.
const WAITER: &str = r#"
import fcntl, os, signal, sys
def interrupt(*_): raise InterruptedError
signal.signal(signal.SIGUSR1, interrupt)
file = open(sys.argv[1], "r+b")
try:
    fcntl.lockf(file, fcntl.LOCK_EX)
except InterruptedError:
    os.mkdir(sys.argv[2])
    signal.pause()
sys.exit(3)
"#;

/// Runs the waiter at this file, as job 4711. It makes `said` when it was interrupted.
fn wait_at(rig: &mut Rig, file: &Path, said: &Path) -> crate::common::Pid {
    let program = rig.path("waiter.py");
    fs::write(&program, WAITER).unwrap();
    let (program, file, said) = (program.display(), file.display(), said.display());
    rig.start(&format!("SLURM_JOB_ID=4711 exec python3 {program} {file} {said}"), Path::new("/"))
}

/// Who looks at the far server sees whose call it is: the question goes to the mount at the other level.
// proves: P366
#[test]
fn the_jobs_of_callers_are_shown_at_both_levels() {
    if skipped() {
        return;
    }
    let mut levels = Levels::new("squash=none");
    let (below, above) =
        (levels.middle.mount_export("up", "below", ""), levels.far.mount("above", ""));
    let holder = open(&above.join("f"));
    lock(&holder, libc::F_WRLCK, libc::F_OFD_SETLK).unwrap();
    let said = levels.middle.path("interrupted");
    let waiter = wait_at(&mut levels.middle, &below.join("f"), &said);
    for rig in [&levels.middle, &levels.far] {
        wait_for("the job of the call", || {
            let status = status(rig);
            let operations = status["operations"].as_array().unwrap();
            operations.iter().any(|one| one["op"] == "lock" && one["job"] == "4711")
        });
    }
    waiter.signal(libc::SIGKILL);
    levels.middle.end_of(waiter);
}

/// A signal at the mount ends the wait at the far end, too. Else the lock would go to who does not wait any more.
// proves: P364
#[test]
fn a_signal_ends_a_wait_at_both_levels() {
    if skipped() {
        return;
    }
    let mut levels = Levels::new("squash=none");
    let (below, above) =
        (levels.middle.mount_export("up", "below", ""), levels.far.mount("above", ""));
    let holder = open(&above.join("f"));
    lock(&holder, libc::F_WRLCK, libc::F_OFD_SETLK).unwrap();
    let said = levels.middle.path("interrupted");
    for (signal, lives) in [(libc::SIGUSR1, true), (libc::SIGKILL, false)] {
        let waiter = wait_at(&mut levels.middle, &below.join("f"), &said);
        wait_for("the far server to have the wait", || far_waits(&levels, "lock"));
        waiter.signal(signal);
        wait_for("the end of the wait there", || !far_waits(&levels, "lock"));
        match lives {
            true => wait_for("the caller to hear of the signal", || said.is_dir()),
            false => assert_ne!(exit_code(levels.middle.end_of(waiter)), 3, "it got no lock"),
        }
        // The holder gives it up, and takes it again: no waiter stands before it.
        lock(&holder, libc::F_UNLCK, libc::F_OFD_SETLK).unwrap();
        lock(&holder, libc::F_WRLCK, libc::F_OFD_SETLK).unwrap();
        if lives {
            assert!(!waiter.is_over());
            waiter.signal(libc::SIGKILL);
            levels.middle.end_of(waiter);
        }
    }
}
