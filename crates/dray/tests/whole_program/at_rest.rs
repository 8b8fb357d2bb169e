//! What a mount has taken while much was asked of it, it gives back when it rests.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use crate::common::daemons::daemon;
use crate::common::{Pid, Rig, on_transports, wait_for};

const WRITERS: usize = 40;
const MIB: usize = 1 << 20;
/// What a mount at rest has at most: the payloads that are kept (4 MiB), tables and heap.
const REST_KIB_MAX: u64 = 12 << 10;
/// What requests that stand still take at least.
const STANDING_KIB_MIN: u64 = 20 << 10;
/// A minute, for a machine that is busy with others' work.
const LOOKS_MAX: usize = 3000;
const LOOK_TIME: Duration = Duration::from_millis(20);

/// Memory of the daemon of a mount that is no file's, KiB.
fn own_memory_kib(at: &Path) -> u64 {
    let pid = daemon(at).expect("it serves the mount");
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let of = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        line.split_ascii_whitespace().next().unwrap().parse::<u64>().unwrap()
    };
    of("RssAnon:") + of("RssShmem:")
}

fn content(writer: usize) -> Vec<u8> {
    vec![writer as u8 + 1; MIB]
}

/// Requests of 1 MiB that stand still, each in a buffer of its own, until the server goes on.
fn write_while_the_server_stands_still(server: Pid, at: &Path, files: &[File]) {
    server.signal(libc::SIGSTOP);
    let in_memory = std::thread::scope(|scope| {
        for (writer, file) in files.iter().enumerate() {
            scope.spawn(move || file.write_all_at(&content(writer), 0).unwrap());
        }
        let in_memory = (0..LOOKS_MAX).any(|_| {
            std::thread::sleep(LOOK_TIME);
            own_memory_kib(at) > STANDING_KIB_MIN
        });
        server.signal(libc::SIGCONT); // whatever was seen, or the writers would never end
        in_memory
    });
    assert!(in_memory, "what stands still takes memory");
}

// proves: P133
#[test]
fn memory_of_large_requests_is_given_back_after_an_outage() {
    on_transports(|transport| {
        let (rig, at) = Rig::mounted(&format!("{transport},replay=0"));
        let open = |writer| {
            let path = at.join(format!("file{writer}"));
            OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)
        };
        let files: Vec<File> = (0..WRITERS).map(|writer| open(writer).unwrap()).collect();
        let server = rig.server();
        for _ in 0..2 {
            write_while_the_server_stands_still(server, &at, &files);
            wait_for("the mount to give its memory back", || own_memory_kib(&at) < REST_KIB_MAX);
        }
        for (writer, file) in files.iter().enumerate() {
            let mut found = vec![0; MIB];
            file.read_exact_at(&mut found, 0).unwrap();
            assert!(found == content(writer), "{transport}: file {writer} has other content");
        }
    });
}
