//! Merged writes at a real server: it is killed with pending data, its disk is full, it is stopped.

use std::fs::{self, File};
use std::os::fd::IntoRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common;
use crate::common::Rig;
use crate::common::disks::detach;

const CALL: usize = 4096;

/// A server of `dir` that merges writes.
fn serve(rig: &mut Rig, dir: &Path) {
    let export = format!("data={},squash=none,read_ahead=8M,merge_writes=16M", dir.display());
    let listen = format!("unix://{}", rig.path("socket").display());
    let args = ["serve", "--export", &export, "--listen", &listen, "--state"];
    let mut command = rig.command(&args);
    command.arg(rig.path("state")).env("NOTIFY_SOCKET", rig.path("ready"));
    rig.start_server(&command, None);
}

fn mounted(options: &str) -> (Rig, PathBuf) {
    let mut rig = Rig::new();
    let dir = rig.path("export");
    serve(&mut rig, &dir);
    let at = rig.mount("mount", options);
    (rig, at)
}

fn counts(rig: &Rig) -> serde_json::Value {
    let status = rig.demand(&["status", "data", "--json", "--interval", "0"]);
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    status["exports"][0]["aggregate"].clone()
}

fn content(number: usize) -> Vec<u8> {
    (0..CALL).map(|byte| (number * 7 + byte) as u8).collect()
}

/// Writes so many small pieces, of which the server has pending ones when it is killed. On a busy machine
/// they can be written before that; then it is tried again.
fn killed_with_pending_data(rig: &mut Rig, at: &Path, remove: bool) -> (File, usize) {
    let dir = rig.path("export");
    for round in 0..20 {
        let name = format!("f{round}");
        let file =
            File::options().read(true).write(true).create_new(true).open(at.join(&name)).unwrap();
        // Not a whole block, which is written at once.
        let calls = 100;
        for number in 0..calls {
            file.write_all_at(&content(number), (number * CALL) as u64).unwrap();
        }
        let is_pending = fs::metadata(dir.join(&name)).unwrap().len() < (calls * CALL) as u64;
        if remove {
            fs::remove_file(at.join(&name)).unwrap();
        }
        rig.end_server(libc::SIGKILL);
        serve(rig, &dir);
        if is_pending {
            // The next server has written them before it served.
            let now = fs::metadata(dir.join(&name)).map(|now| now.len()).ok();
            assert_eq!(now, (!remove).then_some((calls * CALL) as u64));
            return (file, calls);
        }
    }
    panic!("nothing was ever pending");
}

// proves: P166
#[test]
fn acknowledged_writes_that_are_pending_outlive_the_server() {
    if common::skipped() {
        return;
    }
    for remove in [false, true] {
        let (mut rig, at) = mounted("transport=classic");
        let (file, calls) = killed_with_pending_data(&mut rig, &at, remove);
        for number in 0..calls {
            let mut read = vec![0; CALL];
            file.read_exact_at(&mut read, (number * CALL) as u64).unwrap();
            assert!(read == content(number), "piece {number}, removed: {remove}");
        }
        file.write_all_at(b"more", 0).unwrap();
        file.sync_all().unwrap();
        drop(file);
        rig.umount(&at);
    }
}

/// What close(2) says.
fn fail_close(file: File) -> i32 {
    // SAFETY: the descriptor is ours, and nobody uses it any more.
    let closed = unsafe { libc::close(file.into_raw_fd()) };
    if closed == 0 { 0 } else { std::io::Error::last_os_error().raw_os_error().unwrap_or(0) }
}

// proves: P166
#[test]
fn a_server_that_is_stopped_leaves_nothing_pending() {
    if common::skipped() {
        return;
    }
    let (mut rig, at) = mounted("transport=classic");
    let file = File::create_new(at.join("f")).unwrap();
    for number in 0..50 {
        file.write_all_at(&content(number), (number * CALL) as u64).unwrap();
    }
    assert!(counts(&rig)["writes_merged"].as_u64().unwrap() > 0);
    rig.end_server(libc::SIGTERM);
    let below = fs::read(rig.path("export/f")).unwrap();
    assert_eq!(below.len(), 50 * CALL);
    assert!((0..50).all(|number| below[number * CALL..][..CALL] == content(number)));
    // An export that merges no more is served without the file.
    rig.serve(&[]);
    assert!(!rig.path("state/pending-data").exists());
    drop(file);
    rig.umount(&at);
}

/// A tmpfs of 3 MiB.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mounted(at: &Path) -> SmallDisk {
        fs::create_dir(at).unwrap();
        let mut mount = Command::new("mount");
        let mounted =
            mount.args(["-t", "tmpfs", "-o", "size=3m", "none"]).arg(at).status().unwrap();
        assert!(mounted.success());
        SmallDisk(at.to_owned())
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        detach(&self.0);
    }
}

/// The first error comes late, and the program hears of it: at a later write, or at the sync.
// proves: P168
#[test]
fn a_full_disk_is_reported_to_the_writer() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let disk = SmallDisk::mounted(&rig.path("disk"));
    serve(&mut rig, &disk.0);
    let at = rig.mount("mount", "transport=classic");
    let file = File::create_new(at.join("f")).unwrap();
    let full = |error: std::io::Error| error.raw_os_error() == Some(libc::ENOSPC);
    let writes =
        (0..1280).map(|number| file.write_all_at(&content(number), (number * CALL) as u64));
    let failed = writes.filter_map(Result::err).map(full).collect::<Vec<_>>();
    assert!(failed.iter().all(|is_full| *is_full));
    let synced = file.sync_all();
    assert!(
        synced.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::ENOSPC)),
        "{synced:?}"
    );
    file.sync_all().unwrap();
    assert!(counts(&rig)["late_errors"].as_u64().unwrap() > 0);
    // The close of a descriptor reports it, too. There is room for the first piece, which is not merged.
    file.set_len(file.metadata().unwrap().len() / CALL as u64 * CALL as u64 - 2 * CALL as u64)
        .unwrap();
    let other = File::create_new(at.join("g")).unwrap();
    for number in 0..50 {
        let _ = other.write_all_at(&content(number), (number * CALL) as u64);
    }
    let mut closes = [fail_close(other.try_clone().unwrap()), fail_close(other)];
    closes.sort();
    assert_eq!(closes, [0, libc::ENOSPC]);
    // With space again, all is well.
    file.set_len(0).unwrap();
    for number in 0..200 {
        file.write_all_at(&content(number), (number * CALL) as u64).unwrap();
    }
    file.sync_all().unwrap();
    let below = fs::read(disk.0.join("f")).unwrap();
    assert!((0..200).all(|number| below[number * CALL..][..CALL] == content(number)));
    drop(file);
    rig.umount(&at);
    rig.end_server(libc::SIGTERM);
}
