//! The mount by which the benchmark measures FUSE alone.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Ends the mount whatever happens to the test, and with it the process that serves it.
struct Served<'a> {
    at: &'a Path,
    process: Child,
}

impl Drop for Served<'_> {
    fn drop(&mut self) {
        let umount = Command::new("umount").arg("-l").arg(self.at).stderr(Stdio::null()).status();
        drop((umount, self.process.kill())); // either may be done already
        drop(self.process.wait());
    }
}

fn is_mounted(at: &Path) -> bool {
    let table = fs::read_to_string("/proc/self/mounts").unwrap();
    table.contains(&format!("null {} fuse", at.display()))
}

#[test]
fn every_name_is_a_file_of_zeros_and_writes_are_swallowed() {
    // SAFETY: no memory is passed.
    if unsafe { libc::geteuid() } != 0 || !Path::new("/dev/fuse").exists() {
        eprintln!("skipped: mounting needs root and /dev/fuse");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let mut command = Command::new(env!("CARGO_BIN_EXE_dray-bench"));
    let process = command.args(["null-mount", "--transport", "classic", "--at"]).arg(at).spawn();
    let mut served = Served { at, process: process.unwrap() };
    while !is_mounted(at) {
        assert_eq!(served.process.try_wait().unwrap(), None, "it does not mount");
        std::thread::sleep(Duration::from_millis(10));
    }
    let file = File::options().read(true).write(true).open(at.join("bench-data-0")).unwrap();
    assert_eq!(file.write_at(b"something", 4096).unwrap(), 9);
    let mut page = [1; 4096];
    file.read_exact_at(&mut page, 4096).unwrap();
    assert_eq!(page, [0; 4096]);
    drop(file);
    assert!(Command::new("umount").arg(at).status().unwrap().success());
    assert!(served.process.wait().unwrap().success());
}
