//! Processes that end, or start others, while their mount's server is away. Needs root and
//! /dev/fuse.

use std::fs::{self, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common;
use socket2::{Domain, SockAddr, Socket, Type};

use crate::common::daemons::{daemon, gone, signal};
use crate::common::load::lock;
use crate::common::{Pid, Rig, on_transports, wait_for};

/// Locks `$AT/$1` (fcntl) and says so by a file beside the mount, then does `$2`.
const HOLDER: &str = r#"
import fcntl, os, sys, time
file = open(os.environ["AT"] + "/" + sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
open(sys.argv[2], "w").close()
while not os.path.exists(sys.argv[2] + ".go"):
    time.sleep(0.02)
if sys.argv[3] == "exit":
    os._exit(0) # the kernel closes the file
if sys.argv[3] == "child":
    # It has the file, too, and is the owner of no lock.
    child = os.fork()
    if child == 0:
        os.execvp("true", ["true"])
    os.waitpid(child, 0)
    os.kill(os.getpid(), 9)
if sys.argv[3] == "wait":
    time.sleep(1000)
"#;

struct Holder {
    pid: Pid,
    ready: std::path::PathBuf,
}

impl Holder {
    fn start(rig: &mut Rig, at: &Path, what: &str) -> Holder {
        let (name, ready) = (format!("lock-{what}"), rig.path(&format!("ready-{what}")));
        std::fs::write(rig.path("holder.py"), HOLDER).unwrap();
        let script = format!(
            "exec python3 {} {name} {} {what}",
            rig.path("holder.py").display(),
            ready.display()
        );
        let pid = rig.start(&script, at);
        wait_for("the lock", || ready.exists());
        Holder { pid, ready }
    }

    fn go(&self) {
        std::fs::write(self.ready.with_extension("go"), "").unwrap();
    }
}

/// A server that is away holds a process up. A process that is held up for as long as this, on a
/// busy machine too, is held up for ever.
const END_MAX: Duration = Duration::from_secs(30);

/// Over both transports, with the first daemon and with one that took over.
// proves: P68
#[test]
fn processes_end_while_the_server_is_away_and_leave_no_locks() {
    on_transports(|options| {
        for takes_over in [false, true] {
            let (mut rig, at) = Rig::mounted(options);
            let holders: Vec<Holder> =
                ["exit", "child", "wait"].map(|what| Holder::start(&mut rig, &at, what)).into();
            if takes_over {
                let dead = daemon(&at).unwrap();
                signal(dead, libc::SIGKILL);
                let back = || daemon(&at).is_some_and(|next| next != dead);
                wait_for("the next daemon", || back() && at.join("lock-exit").exists());
            }
            let server = rig.signal_server(libc::SIGSTOP);
            let begin = Instant::now();
            holders.iter().for_each(Holder::go);
            holders[2].pid.signal(libc::SIGTERM);
            for holder in &holders {
                rig.end_of(holder.pid);
            }
            let ended = begin.elapsed();
            server.signal(libc::SIGCONT);
            assert!(ended < END_MAX, "{options} {takes_over}: {ended:?}");
            for what in ["exit", "child", "wait"] {
                let name = format!("lock-{what}");
                let file = OpenOptions::new().write(true).open(at.join(&name)).unwrap();
                lock(&file, libc::F_WRLCK, libc::F_OFD_SETLK)
                    .unwrap_or_else(|error| panic!("{options} {takes_over}: {name}: {error}"));
            }
            server.signal(libc::SIGKILL);
            rig.end_of(server);
        }
    });
}

/// Opens `$AT/$2-N` for each N below `$3`, says so by a file beside the mount, and waits for ever.
const OPENER: &str = r#"
import os, sys, time
files = [os.open("%s/%s-%d" % (os.environ["AT"], sys.argv[2], number), os.O_RDWR | os.O_CREAT)
    for number in range(int(sys.argv[3]))]
open(sys.argv[1], "w").close()
time.sleep(1000)
"#;

/// What a process had open that was killed, or others who waited, took all entries of a ring until
/// the server came back. No other could end. A daemon that had not met the server had nothing
/// closed; with a limit that stayed open as long as the mount.
// proves: P68
#[test]
fn closes_hold_up_nobody_while_the_server_is_away_and_are_made_when_it_is_back() {
    on_transports(|transport| {
        for (limit, takes_over) in [("", false), (",timeout=10", true)] {
            let (mut rig, at) = Rig::mounted(&format!("{transport}{limit}"));
            let what = format!("{transport}{limit} {takes_over}");
            std::fs::write(rig.path("opener.py"), OPENER).unwrap();
            let mut open = |name: &str, files: usize| {
                let (script, ready) = (rig.path("opener.py"), rig.path(name));
                let words = format!("{} {} {name} {files}", script.display(), ready.display());
                let pid = rig.start(&format!("exec python3 {words}"), &at);
                wait_for("the files", || ready.exists());
                pid
            };
            let mut users = vec![open("many", 200)];
            users.extend((0..8).map(|number| open(&format!("few{number}"), 1)));
            let server = rig.signal_server(libc::SIGSTOP);
            if takes_over {
                let dead = daemon(&at).unwrap();
                signal(dead, libc::SIGKILL);
                wait_for("the next daemon", || daemon(&at).is_some_and(|next| next != dead));
            }
            let waiting: Vec<Pid> = (0..40).map(|_| rig.start(r#"exec ls "$AT""#, &at)).collect();
            std::thread::sleep(Duration::from_millis(500)); // they are on their way
            let begin = Instant::now();
            for user in users.into_iter().chain(waiting) {
                user.signal(libc::SIGKILL);
                rig.end_of(user);
            }
            assert!(begin.elapsed() < END_MAX, "{what}");
            let status = |of: &str| -> serde_json::Value {
                let output = rig.run(&["status", of, "--json", "--interval", "0"]).stdout;
                serde_json::from_slice(&output).unwrap_or_default()
            };
            if !limit.is_empty() {
                let operations = || status(at.to_str().unwrap())["operations"].clone();
                wait_for("the limit", || operations() == serde_json::json!([]));
            }
            server.signal(libc::SIGCONT);
            wait_for(&format!("the closes, {what}"), || {
                status("data")["clients"][0]["open_files"] == 0
            });
            server.signal(libc::SIGKILL);
            rig.end_of(server);
        }
    });
}

/// What they write waits for a server that does not read. Over a ring that is memory which the
/// kernel gets back with the answer.
// proves: P67
#[test]
fn writers_are_killed_while_the_server_stands_still() {
    on_transports(|options| {
        let (mut rig, at) = Rig::mounted(options);
        let script = r#"exec dd if=/dev/zero of="$AT/$$" bs=1M count=100000 2>/dev/null"#;
        let writers: Vec<Pid> = (0..6).map(|_| rig.start(script, &at)).collect();
        wait_for("the writers", || std::fs::read_dir(&at).unwrap().count() == writers.len());
        std::thread::sleep(Duration::from_millis(300));
        let server = rig.signal_server(libc::SIGSTOP);
        std::thread::sleep(Duration::from_millis(500)); // all of them wait
        writers.iter().for_each(|writer| writer.signal(libc::SIGKILL));
        let begin = Instant::now();
        while begin.elapsed() < END_MAX && !writers.iter().all(|writer| writer.is_over()) {
            std::thread::sleep(Duration::from_millis(20));
        }
        let over = writers.iter().filter(|writer| writer.is_over()).count();
        server.signal(libc::SIGCONT);
        assert_eq!(over, writers.len(), "{options}");
        for writer in writers {
            rig.end_of(writer);
        }
        server.signal(libc::SIGKILL);
        rig.end_of(server);
    });
}

/// Begins to read `$AT/file` past the page cache in the way `$2`, says so by a file beside the
/// mount, and waits for ever.
const READER: &str = r#"
import ctypes, mmap, os, sys, threading, time
SETUP, SUBMIT = int(sys.argv[3]), int(sys.argv[4])
libc = ctypes.CDLL(None)
class Iocb(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64), ("key", ctypes.c_uint64), ("opcode", ctypes.c_uint32),
        ("fd", ctypes.c_uint32), ("buf", ctypes.c_uint64), ("bytes", ctypes.c_uint64),
        ("at", ctypes.c_uint64), ("rest", ctypes.c_uint64 * 2)]
fd = os.open(os.environ["AT"] + "/file", os.O_RDONLY | os.O_DIRECT)
os.fstat(fd) # what is known need not be asked for
buf = mmap.mmap(-1, 1 << 20)
address = ctypes.addressof(ctypes.c_char.from_buffer(buf))
context = ctypes.c_ulong(0)
if libc.syscall(SETUP, 8, ctypes.byref(context)) != 0:
    sys.exit("io_setup")
def submit():
    one = Iocb(opcode=0, fd=fd, buf=address, bytes=1 << 20) # IOCB_CMD_PREAD
    list = (ctypes.c_void_p * 1)(ctypes.addressof(one))
    if libc.syscall(SUBMIT, context, 1, list) != 1:
        os._exit(1)
    open(sys.argv[1], "a").write(",began")
    time.sleep(1000)
open(sys.argv[1], "w").write("ready")
while not os.path.exists(sys.argv[1] + ".go"):
    time.sleep(0.02)
if sys.argv[2] == "aio":
    submit()
if sys.argv[2] == "thread":
    threading.Thread(target=submit, daemon=True).start()
    time.sleep(1000)
open(sys.argv[1], "a").write(",began")
os.preadv(fd, [buf], 0)
"#;

/// The kernel tells of no signal to those who do not wait themselves for what they asked for. They
/// could not be killed while the server was away (state D).
// proves: P67
#[test]
fn readers_past_the_page_cache_are_killed_while_the_server_is_away() {
    if common::skipped() {
        return;
    }
    // Attributes that have run out are asked for by a call that can be killed.
    let modes = ["strict", "close-to-open,attr_timeout=1000"];
    let transports = ["classic", "uring"];
    for (mode, transport) in modes.iter().flat_map(|mode| transports.map(|one| (mode, one))) {
        let mut rig = Rig::new();
        rig.serve(&[]);
        std::fs::write(rig.path("export/file"), vec![7; 1 << 20]).unwrap();
        std::fs::write(rig.path("reader.py"), READER).unwrap();
        let at = rig.mount("mount", &format!("consistency={mode},transport={transport}"));
        let said = |rig: &Rig, what: &str| rig.path(&format!("said-{what}"));
        let readers = ["aio", "thread", "wait"].map(|what| {
            let script = format!(
                "exec python3 {} {} {what} {} {}",
                rig.path("reader.py").display(),
                said(&rig, what).display(),
                libc::SYS_io_setup,
                libc::SYS_io_submit,
            );
            (what, rig.start(&script, &at))
        });
        let says = |rig: &Rig, what: &str, words: &str| {
            std::fs::read_to_string(said(rig, what)).is_ok_and(|text| text == words)
        };
        wait_for("the readers", || readers.iter().all(|(what, _)| says(&rig, what, "ready")));
        let server = rig.signal_server(libc::SIGSTOP);
        for (what, _) in &readers {
            std::fs::write(said(&rig, what).with_extension("go"), "").unwrap();
        }
        let begun = |(what, _): &(&str, Pid)| says(&rig, what, "ready,began");
        wait_for("what they do", || readers.iter().all(begun));
        // A thread that ends with its process is known to be of it once it was seen.
        std::thread::sleep(Duration::from_secs(3));
        readers.iter().for_each(|(_, reader)| reader.signal(libc::SIGKILL));
        let begin = Instant::now();
        while begin.elapsed() < END_MAX && !readers.iter().all(|(_, reader)| reader.is_over()) {
            std::thread::sleep(Duration::from_millis(20));
        }
        let left: Vec<_> = readers.iter().filter(|(_, reader)| !reader.is_over()).collect();
        server.signal(libc::SIGCONT);
        assert!(left.is_empty(), "{mode} {transport}: {left:?} cannot be killed");
        readers.iter().for_each(|(_, reader)| _ = rig.end_of(*reader));
        server.signal(libc::SIGKILL);
        rig.end_of(server);
    }
}

/// Passes on what clients of `socket` and a server at `behind` say. Of what the server says to each
/// client only the beginning passes, until it `goes_on`.
struct Stalling {
    stalled: AtomicBool,
    goes_on: AtomicBool,
}

impl Stalling {
    const BEGINNING_BYTES: usize = 300_000;

    fn between(socket: &Path, behind: &Path) -> Arc<Stalling> {
        let between = Arc::new(Stalling { stalled: false.into(), goes_on: false.into() });
        let (listener, behind) = (UnixListener::bind(socket).unwrap(), behind.to_owned());
        let passing = between.clone();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (mut client, mut server) =
                    (client.unwrap(), UnixStream::connect(&behind).unwrap());
                let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    to.shutdown(std::net::Shutdown::Both)
                });
                let passing = passing.clone();
                std::thread::spawn(move || passing.answers(&mut server, &mut client));
            }
        });
        between
    }

    fn answers(&self, server: &mut UnixStream, client: &mut UnixStream) -> std::io::Result<()> {
        let (mut passed, mut bytes) = (0, vec![0; 1 << 16]);
        loop {
            let count = server.read(&mut bytes)?;
            if count == 0 {
                return client.shutdown(std::net::Shutdown::Both);
            }
            client.write_all(&bytes[..count])?;
            passed += count;
            while passed > Stalling::BEGINNING_BYTES && !self.goes_on.load(Ordering::SeqCst) {
                self.stalled.store(true, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

/// What had come of the answer lay in the payload of an entry of the ring, which waited for the rest.
// proves: P67
#[test]
fn readers_are_killed_while_the_server_stands_still_in_the_middle_of_its_answer() {
    on_transports(|transport| {
        let mut rig = Rig::new();
        rig.serve(&[]);
        std::fs::write(rig.path("export/file"), vec![7; 1 << 20]).unwrap();
        let (socket, behind) = (rig.path("socket"), rig.path("behind"));
        std::fs::rename(&socket, &behind).unwrap();
        let between = Stalling::between(&socket, &behind);
        let at = rig.mount("mount", transport);
        let script = r#"exec dd if="$AT/file" of=/dev/null bs=1M iflag=direct 2>/dev/null"#;
        let reader = rig.start(script, &at);
        wait_for("a part of the answer", || between.stalled.load(Ordering::SeqCst));
        std::thread::sleep(Duration::from_millis(300)); // it is received
        reader.signal(libc::SIGKILL);
        let begin = Instant::now();
        while begin.elapsed() < END_MAX && !reader.is_over() {
            std::thread::sleep(Duration::from_millis(20));
        }
        let over = reader.is_over();
        between.goes_on.store(true, Ordering::SeqCst);
        assert!(over, "{transport}: it cannot be killed");
        rig.end_of(reader);
        assert!(std::fs::read(at.join("file")).unwrap() == vec![7; 1 << 20], "{transport}");
    });
}

/// In the unseeing mount the daemon cannot see whether a signal kills its receiver. Some seconds
/// after the signal the wait ends, and so does that of a close.
// proves: P69
#[test]
fn callers_that_cannot_be_seen_are_killed_while_the_server_is_away() {
    if common::skipped() {
        return;
    }
    for options in ["transport=classic", "transport=uring"] {
        let mut rig = Rig::new();
        rig.serve(&[]);
        let (at, mounting) = rig.mount_unseeing("mount", options);
        std::fs::write(at.join("file"), "some").unwrap();
        let holder = Holder::start(&mut rig, &at, "wait");
        let server = rig.signal_server(libc::SIGSTOP);
        let reads = rig.start("exec cat $AT/file", &at);
        let asks = || {
            let call = std::fs::read_to_string(format!("/proc/{}/syscall", reads.0));
            let comm = std::fs::read_to_string(format!("/proc/{}/comm", reads.0));
            comm.is_ok_and(|name| name == "cat\n")
                && call.is_ok_and(|call| call.starts_with(&format!("{} ", libc::SYS_openat)))
        };
        wait_for("a reader that waits", asks);
        [holder.pid, reads].iter().for_each(|one| one.signal(libc::SIGTERM));
        let begin = Instant::now();
        let all = [holder.pid, reads];
        while begin.elapsed() < END_MAX && !all.iter().all(|one| one.is_over()) {
            std::thread::sleep(Duration::from_millis(20));
        }
        let left = all.iter().filter(|one| !one.is_over()).count();
        server.signal(libc::SIGCONT);
        assert_eq!(left, 0, "{options}");
        rig.end_of(holder.pid);
        rig.end_of(reads);
        let file = OpenOptions::new().write(true).open(at.join("lock-wait")).unwrap();
        lock(&file, libc::F_WRLCK, libc::F_OFD_SETLK).unwrap();
        drop(file);
        rig.umount(&at);
        server.signal(libc::SIGKILL);
        rig.end_of(server);
        // What served it ends with the last copy of the mount, which a namespace of others may have.
        mounting.signal(libc::SIGKILL);
        rig.end_of(mounting);
    }
}

/// A mount that was taken away by `dray umount` is gone at the server, too, when that ends. Who
/// stops the server next has no grace period for it at the next start.
// proves: P77
#[test]
fn who_has_unmounted_is_gone_at_the_server() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    for options in ["transport=classic", "transport=uring"] {
        // The mount stays where somebody on this machine has made a mount namespace meanwhile, with
        // a copy of each mount in it: then again.
        for tries in 1.. {
            let at = rig.mount("mount", options);
            std::fs::write(at.join("file"), "of a session").unwrap();
            let daemon = daemon(&at).unwrap();
            let unmounted = rig.run(&["umount", at.to_str().unwrap()]);
            let said = String::from_utf8_lossy(&unmounted.stderr);
            assert!(unmounted.status.success(), "{options}: {said}");
            let ended = !std::fs::exists(format!("/proc/{daemon}")).unwrap();
            gone(&at);
            if ended {
                break;
            }
            assert!(said.contains("another mount namespace"), "{options}: it still ends; {said}");
            assert!(tries < 10, "{options}: it ends too late each time; {said}");
        }
    }
    rig.end_server(libc::SIGTERM);
    rig.serve(&[]);
    let status = rig.demand(&["status", "--json", &rig.target()]);
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["kind"], "server", "{status}");
    assert_eq!(status["clients"], serde_json::json!([]), "{status}");
}

/// The descriptor store had the signals of its server blocked: a machine that went down waited
/// until it was killed.
#[test]
fn the_descriptor_store_ends_when_it_is_asked_to() {
    let dir = tempfile::tempdir().unwrap();
    let mut keeper = Command::new(env!("CARGO_BIN_EXE_dray"));
    keeper.arg("keep-files").arg(dir.path());
    // SAFETY: what is called between fork and exec is async-signal-safe (signal-safety(7)).
    unsafe {
        keeper.pre_exec(|| {
            let mut set = std::mem::zeroed();
            libc::sigfillset(&mut set);
            libc::sigprocmask(libc::SIG_SETMASK, &set, std::ptr::null_mut());
            Ok(())
        });
    }
    let mut keeper = keeper.spawn().unwrap();
    wait_for("the descriptor store", || dir.path().join("keeper.sock").exists());
    signal(keeper.id() as i32, libc::SIGTERM);
    assert_eq!(keeper.wait().unwrap().signal(), Some(libc::SIGTERM), "not by itself");
}

/// A server that was killed as it started left a descriptor store that started, too. That one took
/// the socket from the descriptor store of the next server. The one after that did not find the
/// deleted files.
// proves: P89
#[test]
fn of_two_descriptor_stores_of_one_server_the_first_stays_to_be_found() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keeper.sock");
    let start = || {
        let mut keeper = Command::new(env!("CARGO_BIN_EXE_dray"));
        keeper.arg("keep-files").arg(dir.path()).spawn().unwrap()
    };
    let ended = |keeper: &mut Child| keeper.try_wait().unwrap().is_some();
    let mut first = start();
    let server = Socket::new(Domain::UNIX, Type::SEQPACKET, None).unwrap();
    let address = SockAddr::unix(&path).unwrap();
    wait_for("the descriptor store", || server.connect(&address).is_ok());
    let inode = fs::metadata(&path).unwrap().ino();
    let mut second = start();
    wait_for("the end of the second", || ended(&mut second));
    let found = fs::metadata(&path).map(|meta| meta.ino()).ok();
    drop(server);
    wait_for("the end of the first", || ended(&mut first));
    assert_eq!(found, Some(inode), "that of the first");
    assert!(!path.exists(), "it is taken away at its end");
}

/// Where the state directory was replaced behind a server that had ended, its descriptor store took
/// the socket of the next one away. Deleted files that were open then were lost with the next kill
/// of the server.
// proves: P89
#[test]
fn a_descriptor_store_leaves_the_socket_of_the_one_in_the_place_of_its_directory() {
    let dir = tempfile::tempdir().unwrap();
    let (state, path) = (dir.path().join("state"), dir.path().join("state/keeper.sock"));
    let start = || {
        fs::create_dir(&state).unwrap();
        let mut keeper = Command::new(env!("CARGO_BIN_EXE_dray"));
        let keeper = keeper.arg("keep-files").arg(&state).spawn().unwrap();
        let server = Socket::new(Domain::UNIX, Type::SEQPACKET, None).unwrap();
        let address = SockAddr::unix(&path).unwrap();
        wait_for("the descriptor store", || server.connect(&address).is_ok());
        (keeper, server)
    };
    let (mut first, its_server) = start();
    fs::rename(&state, dir.path().join("former")).unwrap();
    let (mut second, server) = start();
    drop(its_server);
    wait_for("the end of the first", || first.try_wait().unwrap().is_some());
    assert!(path.exists(), "that of the second");
    drop(server);
    wait_for("the end of the second", || second.try_wait().unwrap().is_some());
    assert!(!path.exists(), "it is taken away at its end");
}
