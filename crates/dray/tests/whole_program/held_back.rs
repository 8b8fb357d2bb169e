//! An export is served from the file system that it was made on, or not at all. File handles of one
//! are valid on another of the same type. Clients would be shown the server's own tree.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::common;
use crate::common::disks::{Disk, Places, detach, unmount};
use crate::common::exposition::{metrics, value};
use crate::common::hangs::{export_of, in_time, use_mount};
use crate::common::ports::free_port;
use crate::common::{Rig, wait_for};

const KINDS: [&str; 3] = ["ext4", "xfs", "btrfs"];

/// A server's own disk, with another one that is exported as `disk`, and one that takes its place.
struct Stand {
    places: Places,
    right: Disk,
    wrong: Disk,
    rig: Rig,
}

impl Stand {
    fn new(kind: &'static str) -> Option<Stand> {
        let rig = Rig::new();
        let places = Places::new(kind, &rig.path("."))?;
        let (right, wrong) = (Disk::new(kind)?, Disk::new(kind)?);
        right.mount(&places.at);
        fs::write(places.at.join("file"), "the right one").unwrap();
        Some(Stand { places, right, wrong, rig })
    }

    fn serve(&mut self) {
        self.serve_exports(&[&format!("disk={}", self.places.at.display())]);
    }

    fn serve_exports(&mut self, exports: &[&str]) {
        let exports: Vec<String> =
            exports.iter().map(|export| format!("{export},squash=none")).collect();
        let words: Vec<&str> = exports.iter().flat_map(|export| ["--export", export]).collect();
        let log = self.rig.path("log");
        self.rig.serve_logging(&log, &words);
    }

    fn is_held_back(&self) -> bool {
        !export_of(&self.rig, "disk")["starting"]["held_back"].is_null()
    }

    fn wait_until_held_back(&self) {
        wait_for("the export to be held back", || self.is_held_back());
    }

    fn wait_until_open(&self) {
        wait_for("the export to be open", || export_of(&self.rig, "disk")["starting"].is_null());
    }

    fn log(&self) -> String {
        fs::read_to_string(self.rig.path("log")).unwrap()
    }
}

impl Drop for Stand {
    fn drop(&mut self) {
        detach(&self.places.at);
    }
}

fn on_each(test: impl Fn(Stand)) {
    if common::skipped() {
        return;
    }
    for kind in KINDS {
        if let Some(stand) = Stand::new(kind) {
            test(stand);
        }
    }
}

/// An existing mount showed the server's own tree, and wrote into it.
// proves: P113
#[test]
fn a_mount_shows_nothing_of_what_is_there_instead_after_a_restart() {
    on_each(|mut stand| {
        stand.serve();
        let at = stand.rig.mount_export("disk", "mount", "");
        let mut open = File::open(at.join("file")).unwrap();
        stand.rig.end_server(libc::SIGKILL);
        unmount(&stand.places.at);
        stand.serve();
        stand.wait_until_held_back();
        let looks = stand.rig.start("cat $AT/secret || exec cat $AT/file", &at);
        let writes = stand.rig.start("exec mkdir $AT/made", &at);
        let well = stand.rig.mount("well", "");
        in_time("another export", move || use_mount(&well));
        let target = stand.rig.target().replace("export=data", "export=disk");
        let new = stand.rig.path("new");
        fs::create_dir(&new).unwrap();
        let refused = stand.rig.run(&["mount", &target, new.to_str().unwrap()]);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && said.contains("`disk` is not open yet"), "{said}");
        stand.wrong.mount(&stand.places.at);
        wait_for("the other disk to be seen", || {
            stand.log().matches("export `disk` is held back").count() == 2
        });
        assert!(stand.is_held_back() && !looks.is_over() && !writes.is_over());
        for dir in [&stand.places.own, &stand.places.at] {
            assert!(!dir.join("made").exists());
        }
        unmount(&stand.places.at);
        assert_eq!(fs::read_dir(&stand.places.at).unwrap().count(), 0);
        stand.right.mount(&stand.places.at);
        stand.wait_until_open();
        assert!(stand.rig.end_of(looks).success() && stand.rig.end_of(writes).success());
        assert!(stand.places.at.join("made").is_dir() && !at.join("secret").exists());
        let mut text = String::new();
        open.read_to_string(&mut text).unwrap();
        assert_eq!(text, "the right one");
    });
}

/// A new mount wrote into the empty mount point, and after the next start its files were gone.
// proves: P113
#[test]
fn nothing_is_written_into_an_empty_mount_point() {
    on_each(|mut stand| {
        stand.serve();
        stand.rig.end_server(libc::SIGTERM);
        unmount(&stand.places.at);
        stand.serve();
        stand.wait_until_held_back();
        let target = stand.rig.target().replace("export=data", "export=disk");
        let at = stand.rig.moved_to("mount"); // taken away in the end
        fs::create_dir(&at).unwrap();
        let mounting = ["mount", "-o", "retry=60", &target, at.to_str().unwrap()];
        let mounting = stand.rig.start_command(&mounting);
        stand.right.mount(&stand.places.at);
        assert!(stand.rig.end_of(mounting).success());
        fs::write(at.join("new"), "").unwrap();
        assert!(stand.places.at.join("new").exists());
        stand.rig.umount(&at);
    });
}

/// Clients went on in what nobody else saw any more, and saw what had been mounted over it after the
/// next start of the server.
// proves: P114
#[test]
fn an_export_that_loses_its_file_system_waits_for_it() {
    on_each(|mut stand| {
        stand.serve();
        let at = stand.rig.mount_export("disk", "mount", "");
        let open = OpenOptions::new().append(true).open(at.join("file")).unwrap();
        fs::write(at.join("deleted"), "deleted").unwrap();
        let deleted = File::open(at.join("deleted")).unwrap();
        fs::remove_file(at.join("deleted")).unwrap();
        let script = "exec 9<$AT/file; flock 9; echo >$AT/held; exec sleep 1000";
        let holder = stand.rig.start(script, &at);
        wait_for("a lock", || at.join("held").exists());
        let place = stand.places.at.clone();
        for round in 0..3 {
            match round {
                0 => detach(&place),
                1 => {
                    detach(&place);
                    stand.wrong.mount(&place);
                }
                _ => cover(&place),
            }
            stand.wait_until_held_back();
            let makes = stand.rig.start(&format!("exec mkdir $AT/made-{round}"), &at);
            let mut writes = open.try_clone().unwrap();
            let writes = std::thread::spawn(move || writes.write_all(b", more").unwrap());
            std::thread::sleep(Duration::from_millis(300)); // what would be wrong happens at once
            assert!(!makes.is_over() && !writes.is_finished());
            if round > 0 {
                unmount(&place);
            }
            if round < 2 {
                stand.right.mount(&place);
            }
            assert!(stand.rig.end_of(makes).success());
            writes.join().unwrap();
            assert!(place.join(format!("made-{round}")).is_dir());
            let text = fs::read_to_string(place.join("file")).unwrap();
            assert_eq!(text, format!("the right one{}", ", more".repeat(round + 1)));
            let mut text = [0; 7];
            deleted.read_at(&mut text, 0).unwrap();
            assert_eq!(&text, b"deleted");
            let other = stand.rig.start("exec 9<$AT/file; flock -n 9", &at);
            assert!(!stand.rig.end_of(other).success(), "its holder has it still");
        }
        holder.signal(libc::SIGKILL);
        stand.rig.end_of(holder);
    });
}

fn cover(place: &Path) {
    let mount = Command::new("mount").args(["-t", "tmpfs", "none"]).arg(place).status();
    assert!(mount.unwrap().success());
}

/// What dray reports, and what an administrator can do who has replaced a disk for good.
// proves: P116
#[test]
fn another_file_system_is_served_once_somebody_has_said_so() {
    if common::skipped() {
        return;
    }
    let Some(mut stand) = Stand::new("ext4") else { return };
    let address = format!("127.0.0.1:{}", free_port());
    let export = format!("disk={},squash=none", stand.places.at.display());
    let (log, more) = (stand.rig.path("log"), ["--export", &export, "--metrics", &address]);
    stand.rig.serve_logging(&log, &more);
    let sample = "dray_held_back_seconds{export=\"disk\"}";
    assert_eq!(value(&metrics(&address), sample), 0.0);
    let refused = stand.rig.run(&["accept", "disk"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("is not held back"));
    let old = stand.rig.mount_export("disk", "old", "");
    detach(&stand.places.at);
    stand.wrong.mount(&stand.places.at);
    stand.wait_until_held_back();
    wait_for("the log", || stand.log().contains("`dray accept disk`"));
    let held = export_of(&stand.rig, "disk")["starting"]["held_back"].clone();
    let (expected, found) = (held["expected"].as_str().unwrap(), held["found"].as_str().unwrap());
    assert!(expected.starts_with("ext4 ") && found.starts_with("ext4 ") && expected != found);
    assert!(value(&metrics(&address), sample) >= 1.0);
    let shown = stand.rig.demand(&["status", "--interval", "0"]);
    assert!(shown.contains("HELD BACK") && shown.contains("`dray accept disk`"), "{shown}");
    assert!(shown.contains(expected) && shown.contains(found), "{shown}");
    let unknown = stand.rig.run(&["accept", "dusk"]);
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("no export is called `dusk`"));

    let said = stand.rig.demand(&["accept", "disk"]);
    assert!(said.contains(found), "{said}");
    stand.wait_until_open();
    // What it knew is nothing there, though the handle of the root would be valid.
    let error = fs::read_dir(&old).map(|_| ()).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ESTALE));
    let new = stand.rig.mount_export("disk", "new", "");
    fs::write(new.join("made"), "").unwrap();
    assert!(stand.places.at.join("made").exists());
    // The accepted file system is remembered: now the former one is the wrong one.
    stand.rig.umount(&new);
    stand.rig.end_server(libc::SIGTERM);
    stand.serve();
    stand.wait_until_open();
    detach(&stand.places.at);
    stand.right.mount(&stand.places.at);
    stand.wait_until_held_back();
}

// proves: P113
#[test]
fn an_export_that_must_be_a_mount_point_waits_for_one_at_its_first_start() {
    if common::skipped() {
        return;
    }
    let Some(mut stand) = Stand::new("ext4") else { return };
    fs::create_dir(stand.places.at.join("dir")).unwrap();
    unmount(&stand.places.at);
    let place = stand.places.at.clone();
    let itself = format!("disk={},mountpoint", place.display());
    let below = format!("below={0}/dir,mountpoint={0}", place.display());
    stand.serve_exports(&[&itself, &below]);
    let held = |stand: &Stand, name: &str| {
        let starting = export_of(&stand.rig, name)["starting"].clone();
        (!starting.is_null()).then(|| starting["error"].as_str().unwrap_or_default().to_owned())
    };
    for name in ["disk", "below"] {
        let said = || held(&stand, name).unwrap_or_default();
        wait_for("it to be held back", || said().contains("nothing is mounted at"));
    }
    stand.right.mount(&place);
    for name in ["disk", "below"] {
        wait_for("it to be open", || held(&stand, name).is_none());
    }
    let at = stand.rig.mount_export("below", "mount", "");
    fs::write(at.join("file"), "").unwrap();
    assert!(place.join("dir/file").exists());
}

/// The server did not start, though it serves others, too.
#[test]
fn a_directory_of_a_file_system_that_is_not_mounted_is_waited_for() {
    if common::skipped() {
        return;
    }
    let Some(mut stand) = Stand::new("ext4") else { return };
    let place = stand.places.at.clone();
    fs::create_dir(place.join("dir")).unwrap();
    let export = format!("disk={}", place.join("dir").display());
    stand.serve_exports(&[&export]);
    let at = stand.rig.mount_export("disk", "mount", "");
    fs::write(at.join("file"), "").unwrap();
    // While the server runs, and at its start.
    for _ in 0..2 {
        detach(&place);
        stand.wait_until_held_back();
        let error = export_of(&stand.rig, "disk")["starting"]["error"].clone();
        assert!(error.as_str().unwrap().contains("is not there"), "{error}");
        stand.right.mount(&place);
        stand.wait_until_open();
        assert!(at.join("file").exists());
        stand.rig.end_server(libc::SIGTERM);
        unmount(&place);
        stand.serve_exports(&[&export]);
        stand.wait_until_held_back();
        stand.right.mount(&place);
        stand.wait_until_open();
        assert!(at.join("file").exists());
    }
    // Of one that has been removed from its file system nobody thinks that it may be mounted.
    stand.rig.end_server(libc::SIGTERM);
    fs::remove_dir_all(place.join("dir")).unwrap();
    let listen = format!("unix://{}", stand.rig.path("other").display());
    let state = stand.rig.path("state").display().to_string();
    let args = ["serve", "--export", &export, "--listen", &listen, "--state", &state];
    let refused = stand.rig.run(&args);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("make it first"), "{said}");
}

/// As where a directory is bound to the place of the export, and once is not.
// proves: P113
#[test]
fn another_directory_of_the_same_file_system_is_not_taken_for_the_former_one() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let (dir, moved) = (rig.path("export"), rig.path("moved"));
    let serve = |rig: &mut Rig| rig.serve_logging(&rig.path("log"), &[]);
    serve(&mut rig);
    let at = rig.mount("mount", "");
    fs::write(at.join("file"), "").unwrap();
    rig.end_server(libc::SIGTERM);
    fs::rename(&dir, &moved).unwrap();
    fs::create_dir(&dir).unwrap();
    serve(&mut rig);
    let starting = |rig: &Rig| export_of(rig, "data")["starting"].clone();
    wait_for("it to be held back", || !starting(&rig)["held_back"].is_null());
    assert!(starting(&rig)["error"].as_str().unwrap().contains("another directory of the same"));
    let bound = Command::new("mount").arg("--bind").arg(&moved).arg(&dir).status();
    assert!(bound.unwrap().success());
    wait_for("it to be open", || starting(&rig).is_null());
    assert!(at.join("file").exists());
    detach(&dir);
    wait_for("it to be held back", || !starting(&rig)["held_back"].is_null());
    fs::remove_dir_all(&moved).unwrap();
    wait_for("a former one that has gone not to be waited for", || starting(&rig).is_null());
}

/// No administrator has to say anything after a change that touches no file.
// proves: P115
#[test]
fn a_file_system_is_known_again_however_it_is_mounted() {
    on_each(|mut stand| {
        let (place, aside) = (stand.places.at.clone(), stand.rig.path("aside"));
        fs::create_dir(&aside).unwrap();
        stand.serve();
        let at = stand.rig.mount_export("disk", "mount", "");
        let reads = |stand: &Stand| {
            stand.wait_until_open();
            assert_eq!(fs::read_to_string(at.join("file")).unwrap(), "the right one");
        };
        // From another device.
        stand.rig.end_server(libc::SIGTERM);
        unmount(&place);
        let other = Command::new("losetup").args(["-f", "--show", "/dev/null"]).output().unwrap();
        stand.right.mount_with(&place, "noatime");
        let device = String::from_utf8_lossy(&other.stdout).trim().to_owned();
        if !device.is_empty() {
            let _ = Command::new("losetup").args(["-d", &device]).status();
        }
        stand.serve();
        reads(&stand);
        // With other options, which is no other mount.
        let remount = Command::new("mount").args(["-o", "remount,nodev"]).arg(&place).status();
        assert!(remount.unwrap().success());
        reads(&stand);
        // Elsewhere, and with that its export, too, which is identified by the same file system.
        stand.rig.end_server(libc::SIGTERM);
        unmount(&place);
        stand.right.mount(&aside);
        let bound = Command::new("mount").arg("--bind").arg(&aside).arg(&place).status();
        assert!(bound.unwrap().success());
        stand.serve();
        reads(&stand);
        detach(&aside);
    });
}
