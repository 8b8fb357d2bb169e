//! A file system below hangs: an ext4 that is frozen, as fsfreeze(8) does it. Everything
//! that writes to it stands still in the kernel until it is thawed.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::common;
use crate::common::hangs::{hang_of, in_time, report_of, use_mount, waits_for_a_lock};
use crate::common::{Rig, on_transports, wait_for};
use dray_testkit::fixture::Ext4;

/// `_IOWR('X', 119, int)` and `_IOWR('X', 120, int)` of linux/fs.h.
const FIFREEZE: libc::c_ulong = 0xc004_5877;
const FITHAW: libc::c_ulong = 0xc004_5878;

/// A file system that stands still until this is dropped.
struct Frozen(File);

impl Frozen {
    fn new(at: &Path) -> Frozen {
        let root = File::open(at).unwrap();
        // SAFETY: the argument is not used.
        let result = unsafe { libc::ioctl(root.as_raw_fd(), FIFREEZE, 0) };
        assert_eq!(result, 0, "FIFREEZE: {}", std::io::Error::last_os_error());
        Frozen(root)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { libc::ioctl(self.0.as_raw_fd(), FITHAW, 0) };
    }
}

struct Ice {
    rig: Rig,
    ext4: Ext4,
    /// Of an export on a healthy file system.
    well: PathBuf,
    /// Of the export on the file system that will hang.
    ice: PathBuf,
}

impl Ice {
    fn new(transport: &str) -> Ice {
        let (mut rig, ext4) = (Rig::new(), Ext4::new(64 << 20, "").unwrap());
        Ice::serve(&mut rig, &ext4);
        let well = rig.mount("well", transport);
        let ice = rig.mount_export("ice", "ice", transport);
        fs::write(ice.join("log"), "before\n").unwrap();
        // Of its own: the kernel lets nobody out who waits for a directory that another
        // process is just changing.
        fs::create_dir(ice.join("own")).unwrap();
        Ice { rig, ext4, well, ice }
    }

    /// With one thread: whatever of two exports could meet on a thread does.
    fn serve(rig: &mut Rig, ext4: &Ext4) {
        let export = format!("ice={},squash=none", ext4.path().display());
        rig.serve(&["--threads", "1", "--export", &export]);
    }
}

// proves: P109
#[test]
fn a_file_system_that_hangs_blocks_its_own_export_alone() {
    on_transports(hang_blocks_its_own_export_alone);
}

fn hang_blocks_its_own_export_alone(transport: &str) {
    let Ice { rig, ext4, well, ice } = &mut Ice::new(transport);
    let frozen = Frozen::new(ext4.path());
    let mut writers: Vec<_> = ["echo appended >>$AT/log", "echo new >$AT/new", "mkdir $AT/dir"]
        .iter()
        .map(|script| rig.start(script, ice))
        .collect();
    let killed = rig.start("echo killed >$AT/own/killed", ice);
    // On connections that nobody reads just now, too.
    for number in 0..8 {
        writers.push(rig.start(&format!("echo {number} >$AT/more{number}"), ice));
    }
    let at = well.clone();
    in_time("the other export", move || use_mount(&at));
    let twin = rig.mount("twin", transport);
    in_time("a new mount of the other export", move || use_mount(&twin));

    wait_for("the hang to be noticed", || hang_of(rig, "ice")["calls"].as_u64() > Some(0));
    assert!(hang_of(rig, "ice")["since_s"].as_f64() >= Some(5.0));
    assert!(hang_of(rig, "data").is_null());
    let at = well.clone();
    in_time("the other export", move || use_mount(&at));
    assert!(!writers.iter().any(|writer| writer.is_over()));

    killed.signal(libc::SIGKILL);
    rig.end_of(killed);

    drop(frozen);
    for writer in writers {
        assert!(rig.end_of(writer).success());
    }
    assert_eq!(fs::read_to_string(ice.join("log")).unwrap(), "before\nappended\n");
    assert_eq!(fs::read_to_string(ice.join("new")).unwrap(), "new\n");
    assert!(ice.join("dir").is_dir());
    for number in 0..8 {
        let content = fs::read_to_string(ice.join(format!("more{number}"))).unwrap();
        assert_eq!(content, format!("{number}\n"));
    }
    wait_for("the end of the hang to be noticed", || hang_of(rig, "ice").is_null());
    use_mount(ice);
}

/// A write, a new directory, a file that is cut: each kept the thread that served all clients.
// proves: P110
#[test]
fn who_looks_at_an_export_does_not_wait_for_its_changes() {
    on_transports(looks_while_changes_wait);
}

fn looks_while_changes_wait(transport: &str) {
    let Ice { rig, ext4, ice, .. } = &mut Ice::new(transport);
    let other = rig.mount_export("ice", "other", transport);
    // A reader of the file that is just appended to waits for that, since a read is of all of an
    // append or of nothing.
    fs::write(other.join("calm"), "calm\n").unwrap();
    let frozen = Frozen::new(ext4.path());
    let writers: Vec<_> = ["mkdir $AT/dir", "echo new >$AT/new", "echo appended >>$AT/log"]
        .iter()
        .chain(&["rmdir $AT/own", "chmod 600 $AT/log"])
        .map(|script| rig.start(script, ice))
        .collect();
    in_time("the other client", move || {
        for _ in 0..20 {
            assert_eq!(fs::read_to_string(other.join("calm")).unwrap(), "calm\n");
            assert!(fs::metadata(other.join("log")).unwrap().is_file());
            assert!(fs::metadata(other.join("none")).is_err());
            assert!(fs::read_dir(&other).unwrap().count() >= 2);
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    drop(frozen);
    for writer in writers {
        assert!(rig.end_of(writer).success());
    }
}

// proves: P111
#[test]
fn a_server_ends_and_another_serves_while_a_file_system_hangs() {
    if common::skipped() {
        return;
    }
    let Ice { rig, ext4, well, ice } = &mut Ice::new("transport=classic");
    let frozen = Frozen::new(ext4.path());
    let writer = rig.start("echo appended >>$AT/log", ice);
    fs::write(well.join("f"), "kept").unwrap();
    wait_for("the hang to be noticed", || !hang_of(rig, "ice").is_null());
    let old = rig.signal_server(libc::SIGTERM);
    wait_for("the socket to go", || !rig.path("socket").exists());
    let lock = rig.path("state/lock");
    wait_for("the state directory to be free", || {
        Command::new("flock").arg("-n").arg(&lock).arg("true").status().unwrap().success()
    });
    Ice::serve(rig, ext4);
    let at = well.clone();
    let read = in_time("the other export", move || {
        use_mount(&at);
        fs::read_to_string(at.join("f")).unwrap()
    });
    assert_eq!(read, "kept");
    drop(frozen);
    assert!(rig.end_of(writer).success());
    assert_eq!(fs::read_to_string(ice.join("log")).unwrap(), "before\nappended\n");
    assert!(rig.end_of(old).success());
}

/// The kernel makes it when the file system goes on, though its server has ended. Only then can the
/// next one tell whether it was made.
// proves: P111
#[test]
fn a_change_that_its_server_left_behind_is_made_once() {
    if common::skipped() {
        return;
    }
    let Ice { rig, ext4, well, ice } = &mut Ice::new("transport=classic");
    let frozen = Frozen::new(ext4.path());
    let maker = rig.start("exec mkdir $AT/made", ice);
    wait_for("the hang to be noticed", || !hang_of(rig, "ice").is_null());
    let old = rig.signal_server(libc::SIGTERM);
    wait_for("the socket to go", || !rig.path("socket").exists());
    let lock = rig.path("state/lock");
    wait_for("the state directory to be free", || {
        Command::new("flock").arg("-n").arg(&lock).arg("true").status().unwrap().success()
    });
    Ice::serve(rig, ext4);
    let at = well.clone();
    in_time("the other export", move || use_mount(&at));
    assert!(!maker.is_over());
    drop(frozen);
    assert!(rig.end_of(maker).success(), "it was made twice");
    assert!(ice.join("made").is_dir());
    assert!(rig.end_of(old).success());
}

// proves: P109
#[test]
fn a_waiting_lock_is_given_up_while_the_server_cannot_hear_of_it() {
    on_transports(waiting_lock_is_given_up);
}

fn waiting_lock_is_given_up(transport: &str) {
    let Ice { rig, ext4, ice, .. } = &mut Ice::new(transport);
    let holder = rig.start("exec 9<$AT/log; flock 9; echo >$AT/held; exec sleep 1000", ice);
    wait_for("the lock to be held", || ice.join("held").exists());
    let waiter = rig.start("exec 9<$AT/log; exec flock 9", ice);
    wait_for("the lock to be waited for", || waits_for_a_lock(waiter));
    let frozen = Frozen::new(ext4.path());
    let writers: Vec<_> =
        (0..8).map(|number| rig.start(&format!("echo >$AT/w{number}"), ice)).collect();
    std::thread::sleep(Duration::from_millis(500));
    waiter.signal(libc::SIGKILL);
    rig.end_of(waiter);
    drop(frozen);
    for writer in writers {
        assert!(rig.end_of(writer).success());
    }
    holder.signal(libc::SIGKILL);
    rig.end_of(holder);
    let next = rig.start("exec 9<$AT/log; flock -n 9", ice);
    assert!(rig.end_of(next).success(), "nobody holds the lock");
}

// proves: P109
#[test]
fn calls_have_their_limit_and_clients_can_be_evicted_while_a_file_system_hangs() {
    on_transports(limits_hold_and_clients_are_evicted);
}

fn limits_hold_and_clients_are_evicted(transport: &str) {
    let Ice { rig, ext4, well, ice } = &mut Ice::new(transport);
    let brief = rig.mount_export("ice", "brief", &format!("{transport},timeout=5"));
    let frozen = Frozen::new(ext4.path());
    let writer = rig.start("echo new >$AT/new", ice);
    let at = brief.join("own/brief");
    let error = in_time("a mount with a limit", move || fs::write(at, "x").unwrap_err());
    assert_eq!(error.raw_os_error(), Some(libc::EHOSTDOWN));
    let report = report_of(rig);
    let clients = report["clients"].as_array().unwrap();
    for client in clients.iter().filter(|client| client["export"] == "ice") {
        rig.demand(&["evict", client["session"].as_str().unwrap()]);
    }
    let at = well.clone();
    in_time("the other export", move || use_mount(&at));
    assert!(!rig.end_of(writer).success(), "an evicted mount fails its calls");
    drop(frozen);
    // The mount's connection was ended when nothing had come by it for so long. Until the mount has
    // another one it cannot hear of the eviction.
    wait_for("the mount to hear that it was evicted", || {
        let error = fs::write(brief.join("own/after"), "").unwrap_err();
        assert!(matches!(error.raw_os_error(), Some(libc::ESHUTDOWN | libc::EHOSTDOWN)), "{error}");
        error.raw_os_error() == Some(libc::ESHUTDOWN)
    });
    let anew = rig.mount_export("ice", "anew", transport);
    fs::write(anew.join("own/after"), "thawed").unwrap();
}
