//! Shared mappings of two mounts, which do not see each other's stores: SQLite's write-ahead log has its
//! index in one. The real command, real mounts. Needs root.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::Path;

use crate::common;
use crate::common::Rig;

const LEN_BYTES: usize = 4096;

/// The error of mapping so much of a file; 0: none.
fn map_errno(file: &File, protection: i32, flags: i32) -> i32 {
    let (none, fd) = (std::ptr::null_mut(), file.as_raw_fd());
    // SAFETY: no address is asked for, and what is mapped is given back and not looked at.
    unsafe {
        let start = libc::mmap(none, LEN_BYTES, protection, flags, fd, 0);
        if start == libc::MAP_FAILED {
            return std::io::Error::last_os_error().raw_os_error().unwrap();
        }
        libc::munmap(start, LEN_BYTES);
    }
    0
}

/// Both mounts of a rig, with these options.
fn two(options: &str) -> (Rig, std::path::PathBuf, std::path::PathBuf) {
    common::two_mounts(options)
}

// proves: D3
#[test]
fn a_mount_without_shared_mappings_makes_none_that_can_be_stored_into() {
    common::on_transports(|transport| {
        for mode in ["strict", "close-to-open"] {
            for (option, expected) in [("shared_mmap", 0), ("noshared_mmap", libc::ENODEV)] {
                let (mut rig, one, other) =
                    two(&format!("consistency={mode},{transport},{option}"));
                fs::write(one.join("file"), vec![b'x'; LEN_BYTES]).unwrap();
                let created = File::options().read(true).write(true).create_new(true).to_owned();
                let files = [
                    File::options().read(true).write(true).open(one.join("file")).unwrap(),
                    File::options().read(true).write(true).open(other.join("file")).unwrap(),
                    created.open(one.join("new")).unwrap(),
                ];
                for (number, file) in files.iter().enumerate() {
                    file.set_len(LEN_BYTES as u64).unwrap();
                    let both = libc::PROT_READ | libc::PROT_WRITE;
                    let case = format!("{mode}, {option}, file {number}");
                    assert_eq!(map_errno(file, both, libc::MAP_SHARED), expected, "{case}");
                    assert_eq!(map_errno(file, both, libc::MAP_PRIVATE), 0, "{case}");
                }
                drop(files);
                let reader = File::open(one.join("file")).unwrap();
                assert_eq!(map_errno(&reader, libc::PROT_READ, libc::MAP_PRIVATE), 0);
                drop(reader);
                [one, other].iter().for_each(|at| rig.umount(at));
            }
        }
    });
}

/// Stores a byte into a shared mapping of the whole file, and syncs it.
fn store(file: &File, at: usize) {
    let both = libc::PROT_READ | libc::PROT_WRITE;
    let (none, fd) = (std::ptr::null_mut(), file.as_raw_fd());
    // SAFETY: the mapping is as long as the file, and is given back at the end.
    unsafe {
        let start = libc::mmap(none, LEN_BYTES, both, libc::MAP_SHARED, fd, 0);
        assert_ne!(start, libc::MAP_FAILED);
        start.cast::<u8>().add(at).write_volatile(7);
        assert_eq!(libc::msync(start, LEN_BYTES, libc::MS_SYNC), 0);
        libc::munmap(start, LEN_BYTES);
    }
}

/// No message warned while programs of two mounts lost each other's stores.
// proves: D3
#[test]
fn a_server_says_that_two_mounts_store_into_mappings_of_one_file() {
    common::on_transports(|transport| {
        for mode in ["strict", "close-to-open"] {
            let mut rig = Rig::new();
            let log = rig.path("log");
            rig.serve_logging(&log, &[]);
            let options = format!("consistency={mode},{transport}");
            let [one, other] = ["one", "other"].map(|name| rig.mount(name, &options));
            let mapped_twice = || {
                let status = rig.demand(&["status", "data", "--json", "--interval", "0"]);
                let status: serde_json::Value =
                    serde_json::from_str(status.lines().next().unwrap()).unwrap();
                status["exports"][0]["mapped_twice"].as_u64().unwrap()
            };
            let open = |at: &Path, name: &str| {
                File::options().read(true).write(true).open(at.join(name)).unwrap()
            };
            // Stores one after the other do not matter, nor do those that one mount makes alone.
            for name in ["in turn", "alone", "shared"] {
                fs::write(one.join(name), vec![b'x'; LEN_BYTES]).unwrap();
            }
            store(&open(&one, "in turn"), 1);
            let alone = [open(&one, "alone"), open(&one, "alone"), open(&other, "alone")];
            alone[..2].iter().for_each(|file| store(file, 1));
            // The server hears of a close a little later.
            common::wait_for("the file to be closed", || {
                let status = rig.demand(&["status", "data", "--json", "--interval", "0"]);
                let status: serde_json::Value =
                    serde_json::from_str(status.lines().next().unwrap()).unwrap();
                let open = |client: &serde_json::Value| client["open_files"].as_u64().unwrap();
                status["clients"].as_array().unwrap().iter().map(open).sum::<u64>() == 3
            });
            store(&open(&other, "in turn"), 2);
            assert_eq!(mapped_twice(), 0);
            let shared = [open(&one, "shared"), open(&other, "shared")];
            shared.iter().for_each(|file| store(file, 3));
            common::wait_for("the server to notice", || mapped_twice() == 1);
            let said = fs::read_to_string(&log).unwrap();
            assert!(said.contains("store into shared mappings of one file"), "{said}");
            let text = rig.demand(&["status", "data", "--interval", "0"]);
            assert!(text.contains("MAPPED TWICE"), "{text}");
            drop((shared, alone));
            // As a database does: each is closed by its own mount, one after the other.
            let shared = [open(&one, "in turn"), open(&other, "in turn")];
            for file in shared {
                store(&file, 4);
                drop(file);
            }
            common::wait_for("the server to notice", || mapped_twice() == 2);
            // It may lose commits, or fail before the second mount has stored anything: then with another one.
            let mut database = 0;
            common::wait_for("the server to notice SQLite", || {
                database += 1;
                let paths = [&one, &other].map(|at| at.join(format!("wal{database}.db")));
                let ended = sqlite(&rig, "wal", &[&paths[0], &paths[1]]);
                eprintln!("{}{}", ended.status, String::from_utf8_lossy(&ended.stderr));
                mapped_twice() > 2
            });
            assert!(mapped_twice() <= 2 + database, "one file of each database counts once");
            [one, other].iter().for_each(|at| rig.umount(at));
        }
    });
}

/// Runs SQLite on the databases, which are one seen by two mounts, with this journal.
fn sqlite(rig: &Rig, journal: &str, databases: &[&Path]) -> std::process::Output {
    let script = r#"
import sqlite3, sys
journal, paths = sys.argv[1], sys.argv[2:]
connect = lambda path: sqlite3.connect(path, timeout=2, isolation_level=None)
all = [connect(path) for path in paths]
for one in all:
    mode = one.execute(f"PRAGMA journal_mode={journal}").fetchone()[0]
    assert mode == journal, mode
all[0].execute("CREATE TABLE entry (number INTEGER)")
for number in range(20):
    one = all[number % len(all)]
    one.execute("BEGIN IMMEDIATE")
    one.execute("INSERT INTO entry VALUES (?)", (number,))
    one.execute("COMMIT")
for one in all:
    one.close()
count = connect(paths[0]).execute("SELECT count(*) FROM entry").fetchone()[0]
sys.exit(0 if count == 20 else 42)
"#;
    let program = rig.path("store.py");
    fs::write(&program, script).unwrap();
    let mut words = vec![program.to_str().unwrap(), journal];
    words.extend(databases.iter().map(|path| path.to_str().unwrap()));
    rig.run_as(0, &["timeout", "60"], "python3", &words)
}

/// Commits were lost without an error, since SQLite's locks hold over both mounts and what it shares by a
/// mapping does not.
// proves: D3
#[test]
fn sqlite_with_a_write_ahead_log_over_two_mounts_is_refused_where_nothing_is_shared() {
    const LOST: i32 = 42;
    if common::skipped() {
        return;
    }
    for mode in ["strict", "close-to-open"] {
        let (mut rig, one, other) = two(&format!("consistency={mode},noshared_mmap"));
        let both = |name: &str| [one.join(name), other.join(name)];
        let [first, second] = both("wal.db");
        let wal = sqlite(&rig, "wal", &[&first, &second]);
        let said = String::from_utf8_lossy(&wal.stderr).into_owned();
        assert!(!wal.status.success() && wal.status.code() != Some(LOST), "{mode}: {said}");
        assert!(said.contains("sqlite3.OperationalError"), "{mode}: {said}");
        for journal in ["delete", "truncate", "persist"] {
            let [first, second] = both(&format!("{journal}.db"));
            let kept = sqlite(&rig, journal, &[&first, &second]);
            let said = String::from_utf8_lossy(&kept.stderr).into_owned();
            assert!(kept.status.success(), "{mode}, {journal}: {said}");
        }
        [one, other].iter().for_each(|at| rig.umount(at));
    }
}
