//! Write-back to a local disk at real mounts. Nothing is lost by the death of a daemon, a machine, a server or a disk. A mount
//! that ends well leaves nothing behind.

use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

use crate::common;
use crate::common::daemons::{daemon, has_ended, signal, supervisor, wait_for_daemon};
use crate::common::disks::{SmallDisk, detach};
use crate::common::{Rig, on_transports, wait_for};
use crate::write_leases::{below, close, kept, serve, serve_with, status};
use serde_json::Value;

fn options(rig: &Rig, transport: &str) -> String {
    let cache = rig.path("cache");
    // Nothing is sent for its age within a test.
    format!("{transport},cache={},cache_write=back,cache_dirty_age=3600", cache.display())
}

fn begin(transport: &str) -> (Rig, PathBuf) {
    let mut rig = Rig::new();
    serve(&mut rig);
    let options = options(&rig, transport);
    let at = rig.mount("back", &options);
    (rig, at)
}

/// Writes a new file, syncs and closes it. Nothing of that is at the server.
fn write(rig: &Rig, at: &Path, name: &str, data: &[u8]) {
    let mut file = new_file(&at.join(name));
    file.write_all(data).unwrap();
    file.sync_all().unwrap();
    close(file).unwrap();
    assert_eq!(below(rig, name), "", "{name}");
}

/// As a program makes one that is not there for sure: only then a sync asks the server for nothing.
fn new_file(path: &Path) -> File {
    File::create_new(path).unwrap()
}

fn stats(rig: &Rig) -> Value {
    let cache = rig.path("cache");
    let stats = rig.demand(&["cache", "stats", "--json", "--dir", cache.to_str().unwrap()]);
    serde_json::from_str(&stats).unwrap()
}

fn asked(rig: &Rig, at: &Path) -> u64 {
    status(rig, at)["server"]["calls"].as_u64().unwrap()
}

// proves: P314, P315, P317, P318
#[test]
fn a_mount_answers_by_the_local_disk_and_leaves_nothing_there() {
    if common::skipped() {
        return;
    }
    on_transports(|transport| {
        let (mut rig, one) = begin(transport);
        let other = rig.mount("other", transport);
        let text = "data".repeat(100_000);
        write(&rig, &one, "file", text.as_bytes());
        assert_eq!((kept(&rig, &one, "bytes"), kept(&rig, &one, "disk_errors")), (400_000, 0));
        assert_eq!(stats(&rig)["dirty_bytes"], 400_000);
        assert_eq!(stats(&rig)["left_bytes"], 0);
        let server = rig.path("socket");
        let server = rig.demand(&["status", server.to_str().unwrap(), "--json"]);
        let server: Value = serde_json::from_str(&server).unwrap();
        assert!(server.to_string().contains("\"written\":1"), "the server knows it: {server}");
        assert_eq!(fs::read_to_string(other.join("file")).unwrap(), text);
        assert_eq!((kept(&rig, &one, "bytes"), kept(&rig, &one, "lost")), (0, 0));
        // Syncs of one file after the other cost nothing.
        let mut file = new_file(&one.join("log"));
        file.write_all(b"begin").unwrap();
        file.sync_all().unwrap();
        let before = asked(&rig, &one);
        for _ in 0..50 {
            file.write_all(b"line").unwrap();
            file.sync_data().unwrap();
        }
        assert!(asked(&rig, &one) - before < 10);
        file.rewind().unwrap();
        close(file).unwrap();
        write(&rig, &one, "last", b"end");
        rig.end_of_mount(&one);
        assert_eq!((below(&rig, "last"), below(&rig, "log").len()), ("end".into(), 205));
        assert_eq!(fs::read_dir(rig.path("cache/dirty")).unwrap().count(), 0);
    });
}

// proves: P311
#[test]
fn what_is_dirty_outlives_the_daemon_and_the_server() {
    if common::skipped() {
        return;
    }
    on_transports(|transport| {
        let (mut rig, at) = begin(transport);
        for round in 0..3 {
            let (closed, open) = (format!("closed{round}"), format!("open{round}"));
            write(&rig, &at, &closed, b"data");
            let mut file = new_file(&at.join(&open));
            file.write_all(b"one ").unwrap();
            let before = wait_for_daemon(&at);
            signal(before, libc::SIGKILL);
            if round > 0 {
                rig.end_server(libc::SIGKILL);
                serve(&mut rig);
            }
            file.write_all(b"two").unwrap();
            wait_for("the file to be at the server", || below(&rig, &closed) == "data");
            let mut text = String::new();
            File::open(at.join(&open)).unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(text, "one two", "round {round}");
            close(file).unwrap();
            wait_for("another daemon", || daemon(&at).is_some_and(|it| it != before));
            assert_eq!(kept(&rig, &at, "lost"), 0);
        }
    });
}

/// All processes of the mount die at once, as with their machine.
fn kill_all(at: &Path) {
    let processes = [supervisor(at), wait_for_daemon(at)];
    // The supervisor would start another one.
    processes.iter().for_each(|process| signal(*process, libc::SIGKILL));
    wait_for("their end", || processes.iter().all(|process| has_ended(*process)));
    detach(at);
}

// proves: P313, P318, P342
#[test]
fn the_next_mount_writes_what_was_dirty_when_the_machine_died() {
    if common::skipped() {
        return;
    }
    let (mut rig, at) = begin("transport=classic");
    let other = rig.mount("other", "transport=classic");
    write(&rig, &at, "file", b"data");
    write(&rig, &at, "changed", b"mine");
    kill_all(&at);
    assert_eq!(stats(&rig)["left_bytes"], 8);
    let cache = rig.path("cache");
    let listed = rig.demand(&["cache", "list", "--dir", cache.to_str().unwrap()]);
    assert!(listed.contains("8 bytes of 2 files of data"), "{listed}");
    fs::write(other.join("changed"), "theirs").unwrap();
    let options = options(&rig, "transport=classic");
    let again = rig.mount("again", &options);
    assert_eq!((below(&rig, "file"), below(&rig, "changed")), ("data".into(), "theirs".into()));
    let aside = PathBuf::from(status(&rig, &again)["aside_dir"].as_str().unwrap());
    let files = fs::read_dir(aside).unwrap().map(|file| file.unwrap().path());
    let data = files.filter(|path| path.extension().is_some_and(|ending| ending == "data"));
    assert_eq!(data.map(|path| fs::read(path).unwrap()).collect::<Vec<_>>(), [b"mine"]);
    assert_eq!(stats(&rig)["dirty_bytes"], 0);
    let left = &status(&rig, &again)["left_over"];
    assert_eq!((&left["log_bytes"], &left["aside_files"]), (&0.into(), &1.into()));
    assert!(left["aside_bytes"].as_u64().unwrap() > 0);
    let said = rig.demand(&["status", again.to_str().unwrap()]);
    assert!(
        said.contains("left over: 0 B in logs of mounts that are gone, 1 files aside"),
        "{said}"
    );
}

// proves: P341
#[test]
fn a_mount_of_an_export_that_leases_no_writes_says_so() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    serve_with(&mut rig, "leases");
    let options = options(&rig, "transport=classic");
    let (at, said) = rig.mount_saying("back", &options);
    assert!(said.contains("`cache_write=back` does nothing"), "{said}");
    assert!(said.contains("let the export have `write_leases`"), "{said}");
    fs::write(at.join("file"), "data").unwrap();
    assert_eq!(below(&rig, "file"), "data");
}

/// The disk of the cache is full, and then gone.
// proves: P316
#[test]
fn a_disk_that_is_full_or_gone_hurts_no_program() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    serve(&mut rig);
    let Some(disk) = SmallDisk::mount(rig.path("disk"), "2M") else { return };
    let cache = disk.path().join("cache");
    let options = format!("cache={},cache_write=back,transport=classic", cache.display());
    let at = rig.mount("back", &options);
    let data = vec![b'x'; 4 << 20];
    let mut file = new_file(&at.join("file"));
    file.write_all(&data).unwrap();
    file.sync_all().unwrap();
    close(file).unwrap();
    assert!(kept(&rig, &at, "disk_errors") > 0);
    assert_eq!(below(&rig, "file").len(), data.len());
    fs::remove_dir_all(&cache).unwrap();
    fs::write(at.join("other"), "data").unwrap();
    rig.end_of_mount(&at);
    assert_eq!(below(&rig, "other"), "data");
}
