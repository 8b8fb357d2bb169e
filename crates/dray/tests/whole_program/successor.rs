//! What a daemon takes over from one that died while the server was away, too: the mount's
//! limit for waiting, and the locks of applications.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::daemons::{signal, supervisor, wait_for_daemon};
use crate::common::hangs::in_time;
use crate::common::{Rig, on_transports, wait_for};

/// Ends the daemon; another one follows.
fn kill_daemon(at: &Path) {
    let old = wait_for_daemon(at);
    signal(old, libc::SIGKILL);
    wait_for("the next daemon", || wait_for_daemon(at) != old);
}

// proves: P64
#[test]
fn the_limit_holds_when_the_daemon_dies_while_the_server_is_away() {
    on_transports(limit_holds_over_the_daemons_death);
}

fn limit_holds_over_the_daemons_death(transport: &str) {
    let mut rig = Rig::new();
    rig.serve(&[]);
    let brief = rig.mount("brief", &format!("{transport},timeout=4"));
    let patient = rig.mount("patient", transport);
    let file = File::create(brief.join("f")).unwrap();
    file.write_all_at(b"before", 0).unwrap();
    ["a", "b"].iter().for_each(|dir| fs::create_dir(patient.join(dir)).unwrap());
    let begin = Instant::now(); // the limit counts from when the server went
    rig.end_server(libc::SIGKILL);

    let (send, receiver) = std::sync::mpsc::channel();
    let writer = file.try_clone().unwrap();
    let dir = brief.join("dir");
    let work: [Box<dyn FnOnce() -> io::Result<()> + Send>; 2] = [
        Box::new(move || fs::create_dir(dir)),
        Box::new(move || writer.write_all_at(b"after!", 0)),
    ];
    for work in work {
        let send = send.clone();
        std::thread::spawn(move || send.send(work()));
    }
    // Of directories of their own: the kernel lets nobody out who waits for one that another
    // process is just changing.
    let waits = rig.start("mkdir $AT/a/waits", &patient);
    let killed = rig.start("exec mkdir $AT/b/killed", &patient);
    std::thread::sleep(Duration::from_millis(500));
    [&brief, &patient].iter().for_each(|at| kill_daemon(at));
    for _ in 0..2 {
        let outcome =
            receiver.recv_timeout(Duration::from_secs(60)).expect("it waits beyond its limit");
        assert_eq!(outcome.unwrap_err().raw_os_error(), Some(libc::EHOSTDOWN));
    }
    assert!(begin.elapsed() > Duration::from_secs(3), "{:?}", begin.elapsed());
    let at = brief.join("new");
    let error = in_time("a new call", move || fs::create_dir(at).unwrap_err());
    assert_eq!(error.raw_os_error(), Some(libc::EHOSTDOWN));
    killed.signal(libc::SIGKILL);
    rig.end_of(killed);
    assert!(!waits.is_over());

    rig.serve(&[]);
    assert!(rig.end_of(waits).success());
    assert!(patient.join("a/waits").is_dir());
    assert!(!patient.join("b/killed").exists());
    wait_for("the mount to work again", || fs::create_dir(brief.join("back")).is_ok());
    // Each connection of the mount is made anew by itself.
    wait_for("all of it to work again", || file.write_all_at(b"back", 0).is_ok());
    wait_for("what was written", || {
        fs::read(brief.join("f")).is_ok_and(|content| content.starts_with(b"back"))
    });
    drop(file);
    rig.umount(&brief);
    rig.umount(&patient);
}

/// Each successor ended at once, and after some of them the mount: programs went on in the directory
/// below.
// proves: P99
#[test]
fn a_key_whose_file_is_gone_is_known_to_the_next_daemon() {
    on_transports(|transport| {
        let mut rig = Rig::new();
        let [key, servers] = ["key", "servers_key"].map(|name| rig.path(name));
        let make = |content: &str| {
            for path in [&key, &servers] {
                fs::write(path, content).unwrap();
                fs::set_permissions(path, PermissionsExt::from_mode(0o600)).unwrap();
            }
        };
        make("known to both sides");
        let auth = format!("psk:{}", servers.display());
        rig.serve(&["--auth", &auth]);
        let at = rig.mount("mount", &format!("{transport},auth=psk:{}", key.display()));
        let place = at.to_str().unwrap().to_owned();
        let file = File::create_new(at.join("file")).unwrap();
        file.write_all_at(b"before", 0).unwrap();
        fs::remove_file(&key).unwrap();
        // More of them than may fail.
        for _ in 0..5 {
            kill_daemon(&at);
            assert_eq!(fs::read(at.join("file")).unwrap(), b"before");
        }
        rig.demand(&["upgrade", &place]);

        // Both have another one: who is upgraded takes it up, and so does who comes after that.
        rig.end_server(libc::SIGTERM);
        make("another one of both");
        rig.serve(&["--auth", &auth]);
        rig.demand(&["upgrade", &place]);
        assert_eq!(fs::read(at.join("file")).unwrap(), b"before");
        fs::remove_file(&key).unwrap();
        kill_daemon(&at);
        let mut content = [0; 6];
        file.read_exact_at(&mut content, 0).unwrap();
        assert_eq!(&content, b"before");
        drop(file);
        rig.end_of_mount(&at);
    });
}

/// The process's own fcntl lock on the whole file.
fn lock(file: &File, kind: i32) -> io::Result<()> {
    // SAFETY: an all-zero flock is valid, and outlives the call.
    let done = unsafe {
        let mut lock: libc::flock = std::mem::zeroed();
        lock.l_type = kind as _;
        libc::fcntl(file.as_raw_fd(), libc::F_SETLK, &mut lock)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn flock(file: &File, operation: i32) -> io::Result<()> {
    // SAFETY: no memory is passed; the descriptor is open.
    match unsafe { libc::flock(file.as_raw_fd(), operation) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

const ALONE_NOW: i32 = libc::LOCK_EX | libc::LOCK_NB;

fn is_locked(outcome: io::Result<()>) -> bool {
    outcome.is_err_and(|error| error.raw_os_error() == Some(libc::EAGAIN))
}

/// Two mounts of one process: to the server they are two owners.
struct Locked {
    /// What the first mount holds, and the second wants; closed while there is a server.
    held: [File; 2],
    wanted: [File; 2],
    one: std::path::PathBuf,
    rig: Rig,
}

impl Locked {
    fn new(transport: &str, serve: &[&str]) -> Locked {
        let mut rig = Rig::new();
        rig.serve(serve);
        let one = rig.mount("one", transport);
        let two = rig.mount("two", transport);
        let held = ["flock", "fcntl"].map(|name| File::create(one.join(name)).unwrap());
        let wanted = ["flock", "fcntl"].map(|name| File::create(two.join(name)).unwrap());
        flock(&held[0], libc::LOCK_EX).unwrap();
        lock(&held[1], libc::F_WRLCK).unwrap();
        let locked = Locked { held, wanted, one, rig };
        locked.exclude();
        locked
    }

    /// No other mount gets the locks.
    fn exclude(&self) {
        assert!(is_locked(flock(&self.wanted[0], ALONE_NOW)));
        assert!(is_locked(lock(&self.wanted[1], libc::F_WRLCK)));
    }
}

// proves: P95
#[test]
fn locks_outlive_server_and_daemon_together() {
    on_transports(|transport| {
        for server_first in [true, false] {
            let mut locked = Locked::new(transport, &[]);
            let old = wait_for_daemon(&locked.one);
            if server_first {
                locked.rig.end_server(libc::SIGKILL);
                signal(old, libc::SIGKILL);
            } else {
                signal(old, libc::SIGKILL);
                locked.rig.end_server(libc::SIGKILL);
            }
            wait_for("the next daemon", || wait_for_daemon(&locked.one) != old);
            locked.rig.serve(&[]);
            locked.exclude();
            // The holder of the locks has them, and can give them back.
            locked.held.iter().for_each(|file| assert_eq!(file.write_at(b"mine", 0).unwrap(), 4));
            flock(&locked.held[0], libc::LOCK_UN).unwrap();
            lock(&locked.held[1], libc::F_UNLCK).unwrap();
            flock(&locked.wanted[0], libc::LOCK_EX).unwrap();
            lock(&locked.wanted[1], libc::F_WRLCK).unwrap();
        }
    });
}

/// A process that is stopped until this is dropped.
struct Stopped(i32);

impl Stopped {
    fn new(pid: i32) -> Stopped {
        signal(pid, libc::SIGSTOP);
        Stopped(pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        signal(self.0, libc::SIGCONT);
    }
}

/// The lease has ended before there was a daemon again, and somebody else had the locks since.
// proves: P95
#[test]
fn who_lost_a_lock_while_server_and_daemon_were_dead_learns_it() {
    on_transports(|transport| {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("config.toml");
        fs::write(&config, "lease_s = 3\n").unwrap();
        let serve = ["--config", config.to_str().unwrap()];
        let mut locked = Locked::new(transport, &serve);
        let supervisor = Stopped::new(supervisor(&locked.one));
        let old = wait_for_daemon(&locked.one);
        signal(old, libc::SIGKILL);
        let begin = Instant::now();
        locked.rig.end_server(libc::SIGKILL);
        locked.rig.serve(&serve);
        flock(&locked.wanted[0], libc::LOCK_EX).unwrap();
        assert!(begin.elapsed() > Duration::from_secs(1), "the lease was not waited for");
        wait_for("the lock", || lock(&locked.wanted[1], libc::F_WRLCK).is_ok());
        drop(supervisor);
        wait_for("the next daemon", || wait_for_daemon(&locked.one) != old);
        for file in &locked.held {
            let error = file.write_at(b"mine?", 0).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EIO));
        }
        // Opened anew it can be used.
        let again = fs::OpenOptions::new().write(true).open(locked.one.join("flock")).unwrap();
        again.write_at(b"anew", 0).unwrap();
        assert!(is_locked(flock(&again, ALONE_NOW)));
    });
}
