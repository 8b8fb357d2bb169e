//! Servers whose state directory is not as it should be, or on a disk that fails them: the real
//! command, real mounts. Needs root.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::Path;

use crate::common;
use crate::common::{Rig, wait_for};

/// btrfs writes each page to a new place, and has none for it once it is full. The next change
/// ended the server by SIGBUS, and each server after it.
// proves: P134
#[test]
fn a_full_btrfs_under_the_state_ends_no_server() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let (image, state) = (rig.path("image"), rig.path("state"));
    File::create(&image).unwrap().set_len(128 << 20).unwrap();
    let made = std::process::Command::new("mkfs.btrfs").arg("-q").arg(&image).output();
    if !made.is_ok_and(|made| made.status.success()) {
        return eprintln!("left out: no mkfs.btrfs");
    }
    fs::create_dir_all(&state).unwrap();
    let disk = Disk { image: image.to_str().unwrap(), at: &state };
    let mut mount = std::process::Command::new("mount");
    if !mount.args(["-o", "loop", disk.image]).arg(disk.at).output().unwrap().status.success() {
        return eprintln!("left out: no btrfs here");
    }
    rig.serve(&[]);
    let at = rig.mount("mount", "timeout=30");
    let make = |round: usize| {
        for number in 0..100 {
            fs::create_dir(at.join(format!("dir{round}-{number}"))).unwrap();
        }
        output_of("sync", &["-f", disk.at.to_str().unwrap()]);
    };
    make(0);
    for number in 0..10 {
        let path = state.join(format!("filler{number}"));
        let mut filler = File::create(path).unwrap();
        for bytes in [1 << 20, 4096] {
            while filler.write_all(&vec![number; bytes]).is_ok() {}
        }
        output_of("sync", &["-f", disk.at.to_str().unwrap()]);
    }
    (1..5).for_each(make);
    rig.umount(&at);
    assert!(rig.end_server(libc::SIGTERM).success());
    disk.unmount();
}

/// The message for a state directory with another owner or mode said to remove it.
#[test]
fn faults_of_a_state_directory_are_reported_without_advice_to_remove_it() {
    if common::skipped() {
        return;
    }
    let rig = Rig::new();
    let [open, other, link] = ["open", "other", "link"].map(|name| rig.path(name));
    [&open, &other].into_iter().for_each(|dir| fs::create_dir(dir).unwrap());
    fs::set_permissions(&open, fs::Permissions::from_mode(0o775)).unwrap();
    chown(&other, Some(1234), None).unwrap();
    symlink(rig.path("state"), &link).unwrap();
    for (state, words) in [
        (&open, "(its mode is 775): chmod 700"),
        (&other, "belongs to user 1234, and this is user 0: run it as its owner, chown it"),
        (&link, "is a symbolic link: name the directory"),
    ] {
        let serve = ["serve", "--export", "a=/tmp", "--listen", "tcp://127.0.0.1:0", "--state"];
        let output = rig.run(&[&serve[..], &[state.to_str().unwrap()]].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(words) && !said.contains("remove"), "{said}");
    }
    // Of which directory it was said was left open.
    let (export, state) = (format!("a={}", rig.path("export").display()), rig.path("state"));
    let mut serve = rig.command(&["serve", "--export", &export, "--listen", "tcp://127.0.0.1:0"]);
    let serve = serve.arg("--state").arg(state).env("DRAY_RUN_DIR", &open).output().unwrap();
    let said = String::from_utf8_lossy(&serve.stderr);
    assert!(said.contains("dray: run directory ($DRAY_RUN_DIR): others may write"), "{said}");
}

/// Neither the client nor the log said where there was no room, nor what to do.
#[test]
fn a_full_state_directory_is_named_in_the_log() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let (state, log) = (rig.path("state"), rig.path("log"));
    output_of("mount", &["-t", "tmpfs", "-o", "size=256k,mode=700", "x", state.to_str().unwrap()]);
    let disk = Disk { image: "", at: &state };
    rig.serve_logging(&log, &[]);
    let at = rig.mount("mount", "");
    let mut filler = File::create(state.join("filler")).unwrap();
    while filler.write_all(&[7; 4096]).is_ok() {}
    let (target, other) = (rig.target(), rig.path("said"));
    let refused = rig.run(&["mount", &target, other.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(4), "{said}");
    assert!(said.contains("in its state directory: No space left on device"), "{said}");
    assert!(said.contains("make room there"), "{said}");
    let status = rig.demand(&["status", "--json", "--interval", "0", "data"]);
    let session = status.split("\"session\":\"").nth(1).unwrap().split('"').next().unwrap();
    rig.demand(&["evict", session]);
    let said = fs::read_to_string(&log).unwrap();
    for words in ["cannot keep a session of ", "cannot keep `evicted` in the state directory: "] {
        assert!(said.contains(words), "{words}: {said}");
    }
    rig.umount(&at);
    rig.end_server(libc::SIGKILL);
    let serve = ["serve", "--export", "a=/tmp", "--listen", "tcp://127.0.0.1:0", "--state"];
    ["boot", "exports.toml"]
        .map(|name| state.join(name))
        .iter()
        .for_each(|file| fs::remove_file(file).unwrap());
    while filler.write_all(&[7; 4096]).is_ok() {}
    let output = rig.run(&[&serve[..], &[state.to_str().unwrap()]].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("No space left on device") && said.contains("make room"), "{said}");
    drop(filler);
    disk.unmount();
}

/// Runs a program and answers what it printed.
fn output_of(program: &str, args: &[&str]) -> String {
    let output = std::process::Command::new(program).args(args).output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn c_path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

/// An ext2 in a file, so that it can be said where a block of it is; unmounted at the end.
struct Disk<'a> {
    image: &'a str,
    at: &'a Path,
}

impl Disk<'_> {
    fn mount(&self) {
        output_of("mount", &["-o", "loop", self.image, self.at.to_str().unwrap()]);
    }

    fn unmount(&self) {
        let at = c_path(self.at);
        // SAFETY: the path outlives the call.
        wait_for("the state to be let go", || unsafe { libc::umount2(at.as_ptr(), 0) } == 0);
    }

    /// Has blocks of a file, all but the first twelve, be where there is no disk.
    fn damage(&self, path: &str) {
        const BLOCK_BYTES: u64 = 1024;
        let known = output_of("debugfs", &["-R", &format!("stat {path}"), self.image]);
        let (_, rest) = known.split_once("(IND):").unwrap();
        let block: u64 = rest.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap();
        let image = File::options().write(true).open(self.image).unwrap();
        let nowhere = 0x7fff_ffffu32.to_le_bytes().repeat(64);
        std::os::unix::fs::FileExt::write_all_at(&image, &nowhere, block * BLOCK_BYTES).unwrap();
    }
}

impl Drop for Disk<'_> {
    fn drop(&mut self) {
        let at = c_path(self.at);
        // SAFETY: the path outlives the call. What is not mounted stays so.
        unsafe { libc::umount2(at.as_ptr(), libc::MNT_DETACH) };
    }
}

/// Reading it where it was mapped ended the server (SIGBUS), at each start.
#[test]
fn a_session_that_the_disk_cannot_read_is_begun_anew() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let (image, state) = (rig.path("image"), rig.path("state"));
    File::create(&image).unwrap().set_len(32 << 20).unwrap();
    let disk = Disk { image: image.to_str().unwrap(), at: &state };
    output_of("mke2fs", &["-q", "-t", "ext2", "-b", "1024", disk.image]);
    disk.mount();
    rig.serve(&[]);
    let at = rig.mount("mount", "");
    rig.end_server(libc::SIGKILL);
    // Not kept: it would hold the directory open.
    let name = fs::read_dir(state.join("sessions")).unwrap().next().unwrap().unwrap().file_name();
    let session = format!("/sessions/{}", name.to_str().unwrap());
    disk.unmount();
    disk.damage(&session);
    disk.mount();
    rig.serve(&[]);
    fs::create_dir(at.join("dir")).unwrap();
    rig.umount(&at);
    rig.end_server(libc::SIGTERM);
    disk.unmount();
}
