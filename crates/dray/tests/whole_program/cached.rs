//! The cache on a local disk without leases, and files that the kernel reads from it by itself.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::common::daemons::{daemon, signal, wait_for_daemon};
use crate::common::disks::SmallDisk;
use crate::common::{self, Rig, on_transports, wait_for};
use serde_json::Value;

const FILE_BYTES: usize = 3_000_000;

fn cache_of(rig: &Rig, at: &Path) -> Value {
    let status = rig.demand(&["status", at.to_str().unwrap(), "--json"]);
    serde_json::from_str::<Value>(&status).unwrap()["cache"].clone()
}

fn files(rig: &Rig, at: &Path) -> Value {
    cache_of(rig, at)["passthrough"]["files"].clone()
}

fn reads(rig: &Rig, at: &Path) -> Value {
    let status = rig.demand(&["status", at.to_str().unwrap(), "--json"]);
    serde_json::from_str::<Value>(&status).unwrap()["ops"]["read"].clone()
}

/// A server, a mount without a cache, and a file of `byte`.
fn begin(transport: &str) -> (Rig, PathBuf) {
    let (mut rig, plain) = {
        let mut rig = Rig::new();
        rig.serve(&[]);
        let plain = rig.mount("plain", transport);
        (rig, plain)
    };
    write(&mut rig, &plain, b'a');
    (rig, plain)
}

fn write(_: &mut Rig, plain: &Path, byte: u8) {
    fs::write(plain.join("file"), vec![byte; FILE_BYTES]).unwrap();
    let_times_pass();
}

/// Until the times of what was changed are past for the server, so that the next opening says so. Under `immutable` the
/// opening after that asks no more, and the file is kept after a minute.
fn let_times_pass() {
    std::thread::sleep(std::time::Duration::from_millis(200));
}

/// Mounts with the cache, as a configuration file has it, and fetches the file.
fn mount_and_fetch(rig: &mut Rig, name: &str, options: &str) -> PathBuf {
    let (config, cache) = (rig.path("mount.toml"), rig.path("cache"));
    let text = format!("[cache]\ndir = {cache:?}\nsize = \"64M\"\nrules = [\"path=/file\"]\n");
    fs::write(&config, text).unwrap();
    let at = rig.mount(name, &format!("config={},{options}", config.display()));
    fetch(rig, &at.join("file"));
    at
}

/// A file that was changed a moment ago is not kept yet.
fn fetch(rig: &Rig, path: &Path) {
    let args = ["cache", "attach", path.to_str().unwrap()];
    wait_for("the file is in the cache", || {
        let output = rig.run(&args);
        output.status.success() && output.stdout == b"1 of 1 files are in the cache, whole\n"
    });
}

// proves: P267
// proves: P270
#[test]
fn the_kernel_reads_a_file_of_the_cache_until_it_is_closed() {
    if common::skipped() {
        return;
    }
    on_transports(|transport| {
        let (mut rig, _plain) = begin(transport);
        let at = mount_and_fetch(&mut rig, "cached", &format!("consistency=immutable,{transport}"));
        let status = cache_of(&rig, &at);
        assert_eq!(status["limit_bytes"], 64 << 20);
        if status["passthrough"]["agreed"] != true || !status["passthrough"]["refused"].is_null() {
            eprintln!("skipped: {status}");
            return;
        }
        let before = reads(&rig, &at);
        let file = File::open(at.join("file")).unwrap();
        let mut content = vec![0; FILE_BYTES + 1];
        assert_eq!(file.read_at(&mut content, 0).unwrap(), FILE_BYTES);
        assert!(content[..FILE_BYTES].iter().all(|byte| *byte == b'a'));
        assert_eq!((reads(&rig, &at), files(&rig, &at)), (before, 1.into()));
        drop(file);
        wait_for("the copy is given back", || files(&rig, &at) == 0);
        // A program in it is executed.
        fs::copy("/bin/true", rig.path("export/true")).unwrap();
        fs::set_permissions(rig.path("export/true"), fs::Permissions::from_mode(0o755)).unwrap();
        let_times_pass();
        rig.umount(&at);
        let options =
            format!("consistency=immutable,cache={},{transport}", rig.path("cache").display());
        let at = rig.mount("cached", &options);
        let program = at.join("true");
        fetch(&rig, &program);
        let opens = cache_of(&rig, &at)["passthrough"]["opens"].as_u64();
        assert!(std::process::Command::new(&program).status().unwrap().success());
        assert!(cache_of(&rig, &at)["passthrough"]["opens"].as_u64() > opens);
        rig.umount(&at);
    });
}

/// The disk of the cache is full of what may not go.
// proves: P410
// proves: P411
#[test]
fn files_that_a_full_disk_does_not_take_are_named_and_can_be_read() {
    if common::skipped() {
        return;
    }
    let (mut rig, plain) = begin("transport=classic");
    for (name, len_bytes) in [("a", 1 << 20), ("b", 1 << 20), ("c", 5 << 20), ("d", 1000)] {
        fs::write(plain.join(name), vec![b'x'; len_bytes]).unwrap();
    }
    let_times_pass();
    let Some(disk) = SmallDisk::mount(rig.path("disk"), "4M") else { return };
    let options =
        format!("consistency=close-to-open,cache={}", disk.path().join("cache").display());
    let at = rig.mount("cached", &format!("{options},transport=classic"));
    // The second one takes the place of the first.
    let file = at.join("file");
    fetch(&rig, &at.join("a"));
    fetch(&rig, &at.join("b"));
    fetch(&rig, &file);
    assert_eq!(cache_of(&rig, &at)["errors"], 0);
    assert!(cache_of(&rig, &at)["evicted_bytes"].as_u64() > Some(0));
    rig.demand(&["cache", "pin", file.to_str().unwrap()]);
    let paths = ["c", "d", "a", "file"].map(|name| at.join(name).display().to_string());
    let words: Vec<&str> =
        ["cache", "attach", "--json"].into_iter().chain(paths.iter().map(String::as_str)).collect();
    let output = rig.run(&words);
    assert_eq!(output.status.code(), Some(1));
    let said: Vec<Value> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(said.len(), 4, "{said:?}");
    let why = |file: &Value| file["error"].as_str().unwrap_or_default().to_owned();
    assert!(said.iter().any(|file| why(file).contains("No space left on device")), "{said:?}");
    assert_eq!(fs::read(&paths[0]).unwrap().len(), 5 << 20);
    assert!(cache_of(&rig, &at)["errors"].as_u64() > Some(0));
    rig.end_of_mount(&at);
}

// proves: P413
// proves: P414
#[test]
fn what_does_nothing_is_said_once_and_what_is_no_cache_is_refused() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let cache = rig.path("cache");
    let options = format!("cache={},transport=classic", cache.display());
    let (at, said) = rig.mount_saying("cached", &options);
    assert_eq!(said.matches("`cache` does nothing").count(), 1, "{said}");
    assert_eq!(said.matches("warn").count(), 1, "{said}");
    fs::write(at.join("file"), "data").unwrap();
    assert_eq!(fs::read(at.join("file")).unwrap(), b"data");
    rig.end_of_mount(&at);
    rig.demand(&["cache", "stats", "--dir", cache.to_str().unwrap()]);
    for command in ["clear", "list", "stats"] {
        let refused = rig.run(&["cache", command, "--dir", rig.path("export").to_str().unwrap()]);
        assert_eq!((refused.status.code(), refused.stdout), (Some(1), Vec::new()), "{command}");
    }
    assert_eq!(fs::read(rig.path("export/file")).unwrap(), b"data");
}

// proves: P268
#[test]
fn open_files_follow_others_and_outlive_the_daemon() {
    if common::skipped() {
        return;
    }
    on_transports(|transport| {
        let (mut rig, plain) = begin(transport);
        let at = mount_and_fetch(
            &mut rig,
            "cached",
            &format!("consistency=close-to-open,ro,{transport}"),
        );
        let file = File::open(at.join("file")).unwrap();
        if files(&rig, &at) != 1 {
            eprintln!("skipped: {}", cache_of(&rig, &at));
            return;
        }
        let first = |file: &File| {
            let mut byte = [0];
            file.read_exact_at(&mut byte, FILE_BYTES as u64 - 1).unwrap();
            byte[0]
        };
        assert_eq!(first(&file), b'a');
        write(&mut rig, &plain, b'b');
        let next = File::open(at.join("file")).unwrap();
        assert_eq!(first(&next), b'b', "an open sees what was closed before");
        wait_for("the open file follows", || first(&file) == b'b');
        // A daemon that knows nothing of it goes on.
        drop(next);
        let before = daemon(&at).unwrap();
        signal(before, libc::SIGKILL);
        assert_eq!(first(&file), b'b', "no daemon is needed");
        wait_for("another daemon", || daemon(&at).is_some_and(|now| now != before));
        wait_for_daemon(&at);
        write(&mut rig, &plain, b'c');
        assert_eq!(first(&File::open(at.join("file")).unwrap()), b'c');
        fetch(&rig, &at.join("file"));
        let again = File::open(at.join("file")).unwrap();
        assert_eq!((first(&again), files(&rig, &at)), (b'c', 1.into()));
        drop((file, again));
        rig.umount(&at);
    });
}
