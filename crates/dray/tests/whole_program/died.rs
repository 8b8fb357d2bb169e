//! A FUSE file system below an export dies: its program is killed, and every call to it fails with
//! ENOTCONN until it is mounted again.

use std::fs::{self, File};
use std::io::Read;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use crate::common;
use crate::common::disks::detach;
use crate::common::exposition::{metrics, value};
use crate::common::hangs::{export_of, in_time, use_mount};
use crate::common::ports::free_port;
use crate::common::{Pid, Rig, is_mounted, wait_for};

/// bindfs(1) shows a directory at another place.
struct Bound {
    rig: Rig,
    at: PathBuf,
    program: Pid,
}

impl Bound {
    /// None where there is no bindfs, which is said.
    fn new() -> Option<Bound> {
        if common::skipped() {
            return None;
        }
        if Command::new("bindfs").arg("--version").output().is_err() {
            eprintln!("skipped: bindfs is not there");
            return None;
        }
        let mut rig = Rig::new();
        let at = rig.path("bound");
        for name in ["source", "bound"] {
            fs::create_dir(rig.path(name)).unwrap();
        }
        let program = start(&mut rig);
        Some(Bound { rig, at, program })
    }

    fn serve(&mut self, more: &[&str]) {
        let export = format!("fuse={},squash=none", self.at.display());
        let log = self.rig.path("log");
        self.rig.serve_logging(&log, &[&["--export", &export], more].concat());
    }

    fn die(&mut self) {
        self.program.signal(libc::SIGKILL);
        self.rig.end_of(self.program);
    }

    fn come_back(&mut self) {
        detach(&self.at);
        self.program = start(&mut self.rig);
    }

    fn is_held_back(&self) -> bool {
        !export_of(&self.rig, "fuse")["starting"]["held_back"].is_null()
    }

    fn wait_until_open(&self) {
        wait_for("the export to be open", || export_of(&self.rig, "fuse")["starting"].is_null());
    }
}

fn start(rig: &mut Rig) -> Pid {
    let dir = rig.path(".");
    let program = rig.start("exec bindfs -f $AT/source $AT/bound", &dir);
    wait_for("bindfs", || is_mounted(&rig.path("bound")));
    program
}

impl Drop for Bound {
    fn drop(&mut self) {
        self.program.signal(libc::SIGKILL);
        detach(&self.at);
    }
}

/// Clients had ENOTCONN for ever, and the status said that it answers.
// proves: P114
#[test]
fn clients_of_a_file_system_that_died_go_on_when_it_is_mounted_again() {
    let Some(mut bound) = Bound::new() else { return };
    let address = format!("127.0.0.1:{}", free_port());
    bound.serve(&["--metrics", &address]);
    let at = bound.rig.mount_export("fuse", "mount", "");
    let well = bound.rig.mount("well", "");
    fs::write(at.join("file"), "kept").unwrap();
    fs::create_dir(at.join("own")).unwrap();
    let mut open = File::open(at.join("file")).unwrap();
    // One call is inside the file system when it dies.
    bound.program.signal(libc::SIGSTOP);
    let inside = bound.rig.start("exec mkdir $AT/own/inside", &at);
    std::thread::sleep(Duration::from_millis(300)); // it may get there; if not it comes later
    bound.die();
    let makes = bound.rig.start("exec mkdir $AT/made", &at);
    let reads = bound.rig.start("exec cat $AT/file", &at);
    wait_for("its death to be noticed", || bound.is_held_back());
    in_time("another export", move || use_mount(&well));
    assert!(!inside.is_over() && !makes.is_over() && !reads.is_over());
    let error = export_of(&bound.rig, "fuse")["starting"]["error"].as_str().unwrap().to_owned();
    assert!(error.contains("has died") && error.contains("umount -l"), "{error}");
    assert!(value(&metrics(&address), "dray_held_back_seconds{export=\"fuse\"}") >= 1.0);
    let log = fs::read_to_string(bound.rig.path("log")).unwrap();
    assert!(
        log.contains("export `fuse`: the file system below") && log.contains("has died"),
        "{log}"
    );

    bound.come_back();
    for started in [inside, makes, reads] {
        assert!(bound.rig.end_of(started).success());
    }
    assert!(at.join("made").is_dir() && bound.rig.path("source/own/inside").is_dir());
    let mut text = String::new();
    open.read_to_string(&mut text).unwrap();
    assert_eq!(text, "kept");
    use_mount(&at);
}

// proves: P114
#[test]
fn a_death_is_noticed_at_rest_and_at_the_start_of_a_server() {
    let Some(mut bound) = Bound::new() else { return };
    bound.serve(&[]);
    bound.die();
    wait_for("its death to be noticed", || bound.is_held_back());
    bound.come_back();
    bound.wait_until_open();
    bound.rig.end_server(libc::SIGTERM);
    bound.die();
    bound.serve(&[]); // its other exports are served
    assert!(bound.is_held_back());
    bound.come_back();
    bound.wait_until_open();
    let at = bound.rig.mount_export("fuse", "mount", "");
    use_mount(&at);
}
