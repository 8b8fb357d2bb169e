//! Write leases at real mounts: what they save, that nothing is seen late, and that nothing is lost by deaths.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::IntoRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common;
use crate::common::daemons::{daemon, signal, supervisor, wait_for_daemon};
use crate::common::{Pid, Rig, on_transports, wait_for};
use serde_json::Value;

/// Round trips of others on the machine, which look at mount points.
const ASKING: u64 = 4;

pub fn serve(rig: &mut Rig) {
    serve_with(rig, "leases,write_leases");
}

/// The export with these options.
pub fn serve_with(rig: &mut Rig, options: &str) {
    let export = format!("data={},squash=none,{options}", rig.path("export").display());
    let listen = format!("unix://{}", rig.path("socket").display());
    let args = ["serve", "--export", &export, "--listen", &listen, "--state"];
    let mut command = rig.command(&args);
    command.arg(rig.path("state")).env("NOTIFY_SOCKET", rig.path("ready"));
    rig.start_server(&command, None);
}

fn two_mounts(transport: &str) -> (Rig, PathBuf, PathBuf) {
    let mut rig = Rig::new();
    serve(&mut rig);
    let options = format!("leases=yes,write_leases=yes,{transport}");
    let [one, other] = ["one", "other"].map(|name| rig.mount(name, &options));
    (rig, one, other)
}

pub fn status(rig: &Rig, at: &Path) -> Value {
    let status = rig.demand(&["status", at.to_str().unwrap(), "--json"]);
    serde_json::from_str(&status).unwrap()
}

pub fn kept(rig: &Rig, at: &Path, what: &str) -> u64 {
    status(rig, at)["server"]["kept_writes"][what].as_u64().unwrap()
}

/// What the server's disk has of the file.
pub fn below(rig: &Rig, name: &str) -> String {
    fs::read_to_string(rig.path("export").join(name)).unwrap()
}

/// Closes it as a program does that looks at the outcome.
pub fn close(file: File) -> std::io::Result<()> {
    // SAFETY: the descriptor is the file's, and closed once.
    match unsafe { libc::close(file.into_raw_fd()) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// However many writes there are, they travel with the close.
// proves: P256, P283
#[test]
fn a_new_file_of_small_writes_costs_two_round_trips() {
    if common::skipped() {
        return;
    }
    on_transports(|transport| {
        let (rig, one, other) = two_mounts(transport);
        let asked = |at: &Path| status(&rig, at)["server"]["calls"].as_u64().unwrap();
        let write = |dir: &str| {
            fs::create_dir(one.join(dir)).unwrap();
            let before = asked(&one);
            for number in 0..50 {
                let mut file = File::create(one.join(format!("{dir}/f{number}"))).unwrap();
                (0..10).for_each(|_| file.write_all(b"piece ").unwrap());
            }
            asked(&one) - before
        };
        // On a busy machine a second passes within a file, and what is kept is sent before its close.
        let tries: Vec<u64> = ["a", "b", "c", "d"].iter().map(|dir| write(dir)).collect();
        let least = tries.iter().min().unwrap();
        assert!(*least <= 2 * 50 + ASKING, "{tries:?} round trips for 50 files of ten writes each");
        eprintln!("{transport}: {tries:?} round trips for 50 files of ten writes each");
        for number in 0..50 {
            assert_eq!(fs::read(other.join(format!("a/f{number}"))).unwrap(), b"piece ".repeat(10));
        }
        assert_eq!((kept(&rig, &one, "writes"), kept(&rig, &one, "bytes")), (2000, 0));
    });
}

/// Every way to look at a file at the other mount, and at the mount that writes.
// proves: P257, P283
#[test]
fn what_is_kept_is_seen_everywhere() {
    if common::skipped() {
        return;
    }
    on_transports(|transport| {
        let (rig, one, other) = two_mounts(transport);
        let mut was_kept = false;
        for way in 0..6 {
            let name = format!("file{way}");
            let mut file = File::create_new(one.join(&name)).unwrap();
            file.write_all(b"kept").unwrap();
            was_kept |= below(&rig, &name).is_empty();
            let at = if way % 2 == 0 { &other } else { &one };
            let found = match way / 2 {
                0 => fs::metadata(at.join(&name)).unwrap().len(),
                1 => fs::read(at.join(&name)).unwrap().len() as u64,
                _ => {
                    let mut found = fs::read_dir(at).unwrap().map(Result::unwrap);
                    let entry = found.find(|entry| entry.file_name() == name.as_str());
                    entry.unwrap().metadata().unwrap().len()
                }
            };
            assert_eq!(found, 4, "way {way}");
            file.write_all(b" more").unwrap();
            file.sync_all().unwrap();
            assert_eq!(below(&rig, &name), "kept more");
            close(file).unwrap();
        }
        assert!(was_kept, "nothing was kept at all");
        assert_eq!((kept(&rig, &one, "late"), kept(&rig, &one, "lost")), (0, 0));
    });
}

/// The daemon dies with what it has kept, and then the server.
// proves: P260, P281
#[test]
fn what_is_kept_outlives_the_daemon_and_the_server() {
    if common::skipped() {
        return;
    }
    on_transports(|transport| {
        let (mut rig, one, other) = two_mounts(transport);
        for round in 0..5 {
            let name = format!("file{round}");
            let mut file = File::create_new(one.join(&name)).unwrap();
            (0..20).for_each(|_| file.write_all(b"piece ").unwrap());
            let before = wait_for_daemon(&one);
            if round != 1 {
                signal(before, libc::SIGKILL);
            }
            if round > 0 {
                rig.end_server(libc::SIGKILL);
                serve(&mut rig);
            }
            assert_eq!(fs::read(other.join(&name)).unwrap(), b"piece ".repeat(20), "round {round}");
            file.write_all(b"end").unwrap();
            close(file).unwrap();
            assert_eq!(below(&rig, &name), "piece ".repeat(20) + "end", "round {round}");
            wait_for("another daemon", || {
                round == 1 || daemon(&one).is_some_and(|it| it != before)
            });
        }
    });
}

/// A program that writes what comes from a pipe to a file, and answers at its end whether the close went well. Of a
/// file of this process any process that is started meanwhile has a descriptor for a moment, and hears of the loss.
fn start_writer(rig: &mut Rig, at: &Path, name: &str) -> (Pid, File) {
    let pipe = rig.path(&format!("pipe-{name}"));
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let script = format!(
        "exec dd of=$AT/{name} bs=64 seek=3 oflag=seek_bytes conv=notrunc < {} 2> /dev/null",
        pipe.display()
    );
    let writer = rig.start(&script, at);
    (writer, File::options().write(true).open(pipe).unwrap())
}

/// Has a program write to a new file at the mount, and stops the mount's processes before anything of that is sent.
fn stop_with_something_kept(rig: &mut Rig, at: &Path) -> (String, Pid, File, [i32; 2]) {
    for number in 0..20 {
        let name = format!("file{number}");
        let before = kept(rig, at, "writes");
        let (writer, mut pipe) = start_writer(rig, at, &name);
        let processes = [supervisor(at), wait_for_daemon(at)];
        pipe.write_all(b"mine").unwrap();
        wait_for("the write", || kept(rig, at, "writes") > before);
        processes.iter().for_each(|process| signal(*process, libc::SIGSTOP));
        if below(rig, &name).is_empty() {
            return (name, writer, pipe, processes);
        }
        // The machine is so busy that a second was over.
        processes.iter().for_each(|process| signal(*process, libc::SIGCONT));
        drop(pipe);
        rig.end_of(writer);
    }
    panic!("nothing is kept for long enough");
}

/// The client is held up for longer than its lease, and others change the file meanwhile.
// proves: P259, P282
#[test]
fn data_of_a_client_that_was_cut_off_are_kept_aside() {
    if common::skipped() {
        return;
    }
    let (mut rig, one, other) = two_mounts("transport=classic");
    let (name, writer, pipe, processes) = stop_with_something_kept(&mut rig, &one);
    let before = Instant::now();
    fs::write(other.join(&name), "theirs").unwrap();
    assert!(before.elapsed() < Duration::from_secs(30));
    processes.iter().for_each(|process| signal(*process, libc::SIGCONT));
    drop(pipe);
    let closed = rig.end_of(writer);
    assert!(!closed.success(), "the program heard nothing of it");
    assert_eq!(below(&rig, &name), "theirs");
    assert_eq!((kept(&rig, &one, "lost"), kept(&rig, &one, "aside")), (1, 1));
    let dir = PathBuf::from(status(&rig, &one)["aside_dir"].as_str().unwrap());
    let files = fs::read_dir(&dir).unwrap().map(|file| file.unwrap().path());
    let data = files.filter(|path| path.extension().is_some_and(|ending| ending == "data"));
    let data: Vec<_> = data.map(|path| fs::read(path).unwrap()).collect();
    assert_eq!(data, [b"\0\0\0mine"]);
}
