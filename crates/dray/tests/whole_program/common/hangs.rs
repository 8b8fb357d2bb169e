//! File systems that hang: what must not hang with them, and what the server says.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use serde_json::Value;

use super::{Pid, Rig, wait_for};

/// What does not hang takes at most this long, on a busy machine and a busy disk too.
const PATIENCE: Duration = Duration::from_secs(180);

/// Does `work` on a thread that may be left behind.
pub fn in_time<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || send.send(work()));
    receive.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("{what} hangs, too"))
}

/// Uses a mount as applications do.
pub fn use_mount(at: &Path) {
    for number in 0..50 {
        let (dir, data) = (at.join(format!("d{number}")), vec![number; 100_000]);
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("f"), &data).unwrap();
        if number % 10 == 0 {
            File::open(dir.join("f")).unwrap().sync_all().unwrap(); // the disk may be others'
        }
        assert_eq!(fs::read(dir.join("f")).unwrap(), data);
        // The kernel tells a program below of a close without waiting for it. A program that hears
        // of the removal first keeps the file under another name for that long.
        wait_for("what was just closed to go", || match fs::remove_dir_all(&dir) {
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => false,
            gone => gone.map(|()| true).unwrap(),
        });
    }
}

/// Whether flock(1) waits for a lock.
pub fn waits_for_a_lock(pid: Pid) -> bool {
    let name = fs::read_to_string(format!("/proc/{}/comm", pid.0)).unwrap_or_default();
    let call = fs::read_to_string(format!("/proc/{}/syscall", pid.0)).unwrap_or_default();
    name.trim() == "flock" && call.starts_with(&format!("{} ", libc::SYS_flock))
}

/// What the server says of itself.
pub fn report_of(rig: &Rig) -> Value {
    let socket = rig.path("socket");
    let text = rig.demand(&["status", "--json", "--interval", "0", socket.to_str().unwrap()]);
    serde_json::from_str(text.lines().next().unwrap()).unwrap()
}

/// What the only server of the rig's says of itself, wherever it listens.
pub fn report_of_server(rig: &Rig) -> Value {
    let text = rig.demand(&["status", "--json", "--interval", "0"]);
    let reports = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    reports.into_iter().find(|report| report["kind"] == "server").unwrap()
}

/// What it says of an export.
pub fn export_of(rig: &Rig, export: &str) -> Value {
    let report = report_of(rig);
    let exports = report["exports"].as_array().unwrap();
    exports.iter().find(|one| one["name"] == export).unwrap().clone()
}

/// What it says of an export that hangs.
pub fn hang_of(rig: &Rig, export: &str) -> Value {
    export_of(rig, export)["hang"].clone()
}
