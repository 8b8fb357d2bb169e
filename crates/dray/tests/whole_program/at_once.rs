//! Two mounts of one export that want the same bytes at the same time.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, IntoRawFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common;
use crate::common::hangs::in_time;
use crate::common::{Rig, two_mounts};

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

const MIB: usize = 1 << 20;
/// By then a thread that asks for a lock waits for it.
const WAITS_BY: Duration = Duration::from_millis(300);

/// Memory that begins at a page, so that it is one request of every kernel's.
struct Pages(Vec<u8>);

impl Pages {
    fn filled(with: u8) -> Pages {
        Pages(vec![with; MIB + 4096])
    }

    fn bytes(&mut self) -> &mut [u8] {
        let before = self.0.as_ptr().align_offset(4096);
        &mut self.0[before..][..MIB]
    }
}

/// No write mixes with another, and no read sees a part of one.
// proves: P17
#[test]
fn calls_of_1_mib_of_two_mounts_are_atomic() {
    const ROUNDS: u8 = 25;
    common::on_transports(|transport| {
        let (_rig, one, other) = two_mounts(transport);
        fs::write(one.join("file"), vec![0; MIB]).unwrap();
        let is_whole = |seen: &[u8]| seen.iter().all(|byte| *byte == seen[0]);
        let all_read = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writers = [(&one, 0), (&other, 100)].map(|(mount, from)| {
                let file = open(&mount.join("file"));
                scope.spawn(move || {
                    for round in from + 1..=from + ROUNDS {
                        file.write_all_at(Pages::filled(round).bytes(), 0).unwrap();
                    }
                })
            });
            for mount in [&one, &other] {
                let (file, all_read) = (open(&mount.join("file")), &all_read);
                scope.spawn(move || {
                    while !all_read.load(Ordering::Relaxed) {
                        let mut seen = Pages::filled(0);
                        file.read_exact_at(seen.bytes(), 0).unwrap();
                        assert!(is_whole(seen.bytes()), "{transport}: a part of a write");
                    }
                });
            }
            let written = writers.map(|writer| writer.join());
            all_read.store(true, Ordering::Relaxed);
            written.into_iter().for_each(|written| written.unwrap());
        });
        assert!(is_whole(&fs::read(one.join("file")).unwrap()), "{transport}: two writes in one");
    });
}

/// Asks for, waits for or looks at a lock of `bytes`; what the kernel says of it.
fn fcntl_lock(
    file: &File,
    command: i32,
    kind: i32,
    bytes: std::ops::Range<i64>,
) -> io::Result<libc::flock> {
    // SAFETY: an all-zero flock is valid, and outlives the call.
    unsafe {
        let mut lock: libc::flock = std::mem::zeroed();
        lock.l_type = kind as _;
        (lock.l_start, lock.l_len) = (bytes.start, bytes.end - bytes.start);
        match libc::fcntl(file.as_raw_fd(), command, &mut lock) {
            0 => Ok(lock),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// The commands of one kind of lock.
struct Commands {
    set: i32,
    wait: i32,
    get: i32,
}

const OF_PROCESSES: Commands =
    Commands { set: libc::F_SETLK, wait: libc::F_SETLKW, get: libc::F_GETLK };
const OF_OPEN_FILES: Commands =
    Commands { set: libc::F_OFD_SETLK, wait: libc::F_OFD_SETLKW, get: libc::F_OFD_GETLK };

/// To the server a process with two mounts is two owners.
fn two_locked_files(rig: &(Rig, PathBuf, PathBuf), commands: &Commands) -> [File; 2] {
    let (_, one, other) = rig;
    fs::write(one.join("file"), "text").unwrap();
    let [here, there] = [one, other].map(|mount| open(&mount.join("file")));
    fcntl_lock(&here, commands.set, libc::F_WRLCK, 10..20).unwrap();
    fcntl_lock(&there, commands.set, libc::F_WRLCK, 20..30).unwrap();
    [here, there]
}

fn errno<T>(result: io::Result<T>) -> Option<i32> {
    result.err()?.raw_os_error()
}

// proves: P53
#[test]
fn fcntl_locks_of_two_mounts_exclude_each_other_and_are_reported() {
    common::on_transports(|transport| {
        let mounts = two_mounts(transport);
        for commands in [OF_PROCESSES, OF_OPEN_FILES] {
            let [here, there] = two_locked_files(&mounts, &commands);
            let refused = fcntl_lock(&there, commands.set, libc::F_RDLCK, 19..20);
            assert_eq!(errno(refused), Some(libc::EAGAIN));
            let conflict = |file: &File, kind| {
                let conflict = fcntl_lock(file, commands.get, kind, 0..100).unwrap();
                (i32::from(conflict.l_type), conflict.l_start, conflict.l_len)
            };
            assert_eq!(conflict(&there, libc::F_RDLCK), (libc::F_WRLCK, 10, 10));
            assert_eq!(conflict(&here, libc::F_RDLCK), (libc::F_WRLCK, 20, 10));
            fcntl_lock(&there, commands.set, libc::F_RDLCK, 20..30).unwrap();
            assert_eq!(conflict(&here, libc::F_RDLCK), (libc::F_UNLCK, 0, 100), "{transport}");
            assert_eq!(conflict(&here, libc::F_WRLCK), (libc::F_RDLCK, 20, 10));
            std::thread::scope(|scope| {
                let waiter =
                    scope.spawn(|| fcntl_lock(&there, commands.wait, libc::F_WRLCK, 10..11));
                fcntl_lock(&here, commands.set, libc::F_UNLCK, 10..20).unwrap();
                waiter.join().unwrap().unwrap();
            });
            let refused = fcntl_lock(&here, commands.set, libc::F_RDLCK, 10..11);
            assert_eq!(errno(refused), Some(libc::EAGAIN));
        }
    });
}

/// Each waits for what the other has, through a mount of its own.
// proves: P56
#[test]
fn one_of_two_mounts_in_a_circle_of_fcntl_locks_is_refused() {
    common::on_transports(|transport| {
        let mounts = two_mounts(transport);
        let [here, there] = two_locked_files(&mounts, &OF_PROCESSES);
        let ask = |file: &File, wanted, own| {
            let asked = errno(fcntl_lock(file, libc::F_SETLKW, libc::F_WRLCK, wanted));
            fcntl_lock(file, libc::F_SETLK, libc::F_UNLCK, own).unwrap();
            asked
        };
        let asked = in_time("the circle", move || {
            let mut asked = std::thread::scope(|scope| {
                let other = scope.spawn(|| ask(&there, 10..11, 20..30));
                [ask(&here, 20..21, 10..20), other.join().unwrap()]
            });
            asked.sort();
            asked
        });
        assert_eq!(asked, [None, Some(libc::EDEADLK)], "{transport}");
    });
}

/// Two threads wait for each other, and a third one helps: Linux looks for no circles of such locks.
// proves: P56
#[test]
fn a_circle_of_locks_of_open_files_is_waited_for() {
    common::on_transports(|transport| {
        let mounts = two_mounts(transport);
        let [here, there] = two_locked_files(&mounts, &OF_OPEN_FILES);
        let give_back =
            |file: &File, own| fcntl_lock(file, libc::F_OFD_SETLK, libc::F_UNLCK, own).unwrap();
        in_time("the circle", move || {
            std::thread::scope(|scope| {
                let ask =
                    |file, wanted| fcntl_lock(file, libc::F_OFD_SETLKW, libc::F_WRLCK, wanted);
                let both = [(&here, 20..21), (&there, 10..11)]
                    .map(|(file, wanted)| scope.spawn(move || ask(file, wanted)));
                std::thread::sleep(WAITS_BY);
                assert!(both.iter().all(|one| !one.is_finished()));
                give_back(&here, 10..20);
                give_back(&there, 20..30);
                for one in both {
                    one.join().unwrap().unwrap();
                }
            });
        });
    });
}

/// The close that was to give the lock back came before it was had. A program that has inherited the
/// open file keeps it open.
// proves: P59
#[test]
fn a_lock_that_is_had_when_its_descriptor_is_closed_already_is_given_back() {
    common::on_transports(|transport| {
        let mounts = two_mounts(transport);
        let path = mounts.1.join("file");
        fs::write(&path, "text").unwrap();
        let (holder, other) = (open(&path), open(&mounts.2.join("file")));
        let set = |kind| fcntl_lock(&holder, libc::F_OFD_SETLK, kind, 0..10).unwrap();
        for closed in [true, false] {
            set(libc::F_WRLCK);
            let file = open(&path);
            let mut sharer = Command::new("sleep");
            let mut sharer = sharer.arg("60").stdin(file.try_clone().unwrap()).spawn().unwrap();
            let descriptor = file.into_raw_fd();
            let waiter = std::thread::spawn(move || {
                let mut lock = whole_file();
                // SAFETY: the lock outlives the call.
                match unsafe { libc::fcntl(descriptor, libc::F_SETLKW, &mut lock) } {
                    0 => None,
                    _ => io::Error::last_os_error().raw_os_error(),
                }
            });
            std::thread::sleep(WAITS_BY);
            // Another descriptor of the file. Its close gives back only the locks that are held by
            // then.
            let twin = if closed { descriptor } else { open(&path).into_raw_fd() };
            // SAFETY: nobody else uses it, but for the call that is about to find it closed.
            unsafe { libc::close(twin) };
            set(libc::F_UNLCK);
            let expected = closed.then_some(libc::EBADF);
            assert_eq!(waiter.join().unwrap(), expected, "{transport}");
            let seen = fcntl_lock(&other, libc::F_OFD_GETLK, libc::F_WRLCK, 0..10).unwrap();
            let kind = if closed { libc::F_UNLCK } else { libc::F_WRLCK };
            assert_eq!(i32::from(seen.l_type), kind, "{transport}, closed: {closed}");
            if !closed {
                // SAFETY: as above.
                unsafe { libc::close(descriptor) };
            }
            sharer.kill().unwrap();
            sharer.wait().unwrap();
        }
    });
}

fn whole_file() -> libc::flock {
    // SAFETY: an all-zero flock is valid.
    let lock: libc::flock = unsafe { std::mem::zeroed() };
    libc::flock { l_type: libc::F_WRLCK as _, ..lock }
}
