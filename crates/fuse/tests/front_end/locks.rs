//! Locks, signals and requests that wait, through a real mount on both transports.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::common::pushing::QueuePusher;
use crate::common::{TestMount, mounted};
use dray_fuse::{Consistency, Transport};

fn on_both(test: impl Fn(&TestMount)) {
    for transport in [Transport::Classic, Transport::Uring] {
        if let Some(mount) = mounted(transport, Consistency::Strict) {
            fs::write(mount.path("file"), b"data").unwrap();
            test(&mount);
        }
    }
}

/// Longest wait for anything here.
const LONG: Duration = Duration::from_secs(60);

fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !check() {
        assert!(begin.elapsed() < LONG, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn open(mount: &TestMount) -> File {
    OpenOptions::new().read(true).write(true).open(mount.path("file")).unwrap()
}

fn flock(file: &File, how: i32) -> io::Result<()> {
    // SAFETY: no memory is passed.
    match unsafe { libc::flock(file.as_raw_fd(), how) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Waits for a flock in a thread of its own, and gives it back once it is had.
fn wait_for_lock(mount: &TestMount) -> (JoinHandle<io::Result<()>>, libc::pthread_t) {
    wait_for_lock_on(open(mount))
}

fn wait_for_lock_on(file: File) -> (JoinHandle<io::Result<()>>, libc::pthread_t) {
    let (send, receive) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        // SAFETY: no memory is passed.
        send.send(unsafe { libc::pthread_self() }).unwrap();
        flock(&file, libc::LOCK_EX)?;
        flock(&file, libc::LOCK_UN)
    });
    (thread, receive.recv().unwrap())
}

fn waiting(mount: &TestMount) -> usize {
    let in_flight = mount.reporter.stats().in_flight;
    in_flight.iter().filter(|flight| flight.op == "setlkw").count()
}

extern "C" fn ignore(_: libc::c_int) {}

/// Has SIGUSR1 interrupt system calls, and do nothing else.
fn catch_signal() {
    // SAFETY: the handler does nothing; the struct outlives the call.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = ignore as *const () as usize;
        libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut());
    }
}

// proves: P54
#[test]
fn a_lock_waits_for_the_one_before_it() {
    on_both(|mount| {
        let holder = open(mount);
        flock(&holder, libc::LOCK_EX).unwrap();
        let other = open(mount);
        let refused = flock(&other, libc::LOCK_EX | libc::LOCK_NB).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EAGAIN));
        let (waiter, _) = wait_for_lock(mount);
        eventually("the request waits", || waiting(mount) == 1);
        flock(&holder, libc::LOCK_UN).unwrap();
        waiter.join().unwrap().unwrap();
        assert_eq!(mount.locks.count(), 0);
    });
}

// proves: P59
#[test]
fn closing_releases_a_flock() {
    on_both(|mount| {
        let holder = open(mount);
        flock(&holder, libc::LOCK_EX).unwrap();
        assert_eq!(mount.locks.count(), 1);
        drop(holder);
        eventually("the lock is released", || mount.locks.count() == 0);
    });
}

/// The kernel has the same name for both, where the second is at the address of the first. The
/// close of that, which the kernel does not wait for, took the lock of this one away.
// proves: P59
#[test]
fn a_flock_belongs_to_its_open_file_and_not_to_the_next_one() {
    on_both(|mount| {
        let mut owners = std::collections::BTreeSet::new();
        for round in 1..=200 {
            let holder = open(mount);
            flock(&holder, libc::LOCK_EX).unwrap();
            owners.extend(mount.locks.owners());
            drop(holder);
            eventually("the lock is released", || mount.locks.count() == 0);
            assert_eq!(owners.len(), round, "one was called as another before it");
        }
    });
}

// proves: P54
#[test]
fn a_signal_ends_the_wait_for_a_lock() {
    catch_signal();
    on_both(|mount| {
        let holder = open(mount);
        flock(&holder, libc::LOCK_EX).unwrap();
        let (waiter, thread) = wait_for_lock(mount);
        eventually("the request waits", || waiting(mount) == 1);
        // SAFETY: the thread has not been joined.
        unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
        let result = waiter.join().unwrap();
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EINTR));
        // The waiter hears of the end before the request is put away.
        eventually("the request is over", || waiting(mount) == 0);
        assert_eq!(mount.locks.count(), 1);
    });
}

/// An unlock failed with EINTR, although flock(2) waits for nothing there. The lock was given back
/// later. If its owner had taken the lock again by then, another process could take it, too.
// proves: P54
#[test]
fn a_signal_does_not_disturb_who_gives_a_lock_back() {
    catch_signal();
    on_both(|mount| {
        let holder = open(mount);
        flock(&holder, libc::LOCK_EX).unwrap();
        mount.locks.unlocks_held.store(true, Ordering::SeqCst);
        let (send, receive) = std::sync::mpsc::channel();
        let unlocking = std::thread::spawn(move || {
            // SAFETY: no memory is passed.
            send.send(unsafe { libc::pthread_self() }).unwrap();
            flock(&holder, libc::LOCK_UN)
        });
        let thread = receive.recv().unwrap();
        eventually("the request is under way", || waiting(mount) == 1);
        // SAFETY: the thread has not been joined.
        unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
        std::thread::sleep(Duration::from_millis(300)); // for the request to be ended in, if it is
        mount.locks.unlocks_held.store(false, Ordering::SeqCst);
        unlocking.join().unwrap().unwrap();
        assert_eq!(mount.locks.count(), 0);
    });
}

/// Keeps this thread, and those that it starts, on one CPU, and so in one queue of a ring.
fn stay_on_one_cpu() {
    // SAFETY: an all-zero set is an empty one; the index is that of a running CPU.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(libc::sched_getcpu() as usize, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
    }
}

// proves: P58
#[test]
fn more_waiting_locks_than_entries_leave_room_for_the_unlock() {
    on_both(|mount| {
        stay_on_one_cpu();
        let holder = open(mount);
        flock(&holder, libc::LOCK_EX).unwrap();
        // What comes before a spare entry is there waits in the queue behind the locks.
        let pushing = QueuePusher::new(&mount.at);
        // Depth 2 and 4 spares: as many as there are spares may wait in a queue.
        let waiters: Vec<_> = (0..4).map(|_| wait_for_lock(mount)).collect();
        eventually("all wait", || waiting(mount) == 4);
        assert_eq!(fs::read(mount.path("file")).unwrap(), b"data");
        flock(&holder, libc::LOCK_UN).unwrap();
        for (waiter, _) in waiters {
            waiter.join().unwrap().unwrap();
        }
        drop(pushing);
    });
}

// proves: P58
#[test]
fn beyond_the_spare_entries_a_lock_is_refused() {
    let Some(mount) = mounted(Transport::Uring, Consistency::Strict) else { return };
    stay_on_one_cpu();
    fs::write(mount.path("file"), b"data").unwrap();
    let holder = open(&mount);
    flock(&holder, libc::LOCK_EX).unwrap();
    let pushing = QueuePusher::new(&mount.at);
    let waiters: Vec<_> = (0..4).map(|_| wait_for_lock(&mount)).collect();
    eventually("all wait", || waiting(&mount) == 4);
    let refused = flock(&open(&mount), libc::LOCK_EX).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::ENOLCK));
    drop(holder);
    for (waiter, _) in waiters {
        waiter.join().unwrap().unwrap();
    }
    drop(pushing);
}

/// Runs `body` in a child, which may make system calls only; its exit status.
fn in_child(body: impl FnOnce() -> i32) -> libc::pid_t {
    // SAFETY: the child makes system calls only, and never returns.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::_exit(body());
        }
        child
    }
}

fn exit_status(child: libc::pid_t) -> i32 {
    let mut status = 0;
    // SAFETY: the kernel writes to `status`, which outlives the call.
    unsafe { libc::waitpid(child, &mut status, 0) };
    status
}

fn c_path(path: &Path) -> std::ffi::CString {
    std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap()
}

fn fcntl_lock(fd: i32, command: i32, kind: i32) -> i32 {
    // SAFETY: the struct outlives the call.
    unsafe {
        let mut lock: libc::flock = std::mem::zeroed();
        lock.l_type = kind as i16;
        let result = libc::fcntl(fd, command, &mut lock);
        if result < 0 { -*libc::__errno_location() } else { i32::from(lock.l_type) }
    }
}

// proves: P59
#[test]
fn a_process_s_locks_end_with_its_first_close() {
    on_both(|mount| {
        let path = c_path(&mount.path("file"));
        let unlocked = open(mount);
        drop(unlocked);
        assert_eq!(mount.locks.flushes.load(Ordering::SeqCst), 0, "no lock, no round trip");
        let (ready, mut ready_pipe) = pipe();
        let (mut go_on, wait) = pipe();
        let child = in_child(|| {
            // SAFETY: C strings and one-byte buffers that outlive the calls.
            unsafe {
                let fd = libc::open(path.as_ptr(), libc::O_RDWR);
                let other = libc::open(path.as_ptr(), libc::O_RDONLY);
                let locked = fcntl_lock(fd, libc::F_SETLK, libc::F_WRLCK);
                libc::write(ready.as_raw_fd(), [1u8].as_ptr().cast(), 1);
                libc::read(wait.as_raw_fd(), [0u8].as_mut_ptr().cast(), 1);
                libc::close(other); // another descriptor of the same file
                libc::write(ready.as_raw_fd(), [1u8].as_ptr().cast(), 1);
                libc::read(wait.as_raw_fd(), [0u8].as_mut_ptr().cast(), 1);
                i32::from(locked != libc::F_WRLCK)
            }
        });
        io::Read::read_exact(&mut ready_pipe, &mut [0]).unwrap();
        let file = open(mount);
        let fd = file.as_raw_fd();
        assert_eq!(fcntl_lock(fd, libc::F_SETLK, libc::F_RDLCK), -libc::EAGAIN);
        assert_eq!(fcntl_lock(fd, libc::F_GETLK, libc::F_RDLCK), libc::F_WRLCK);
        io::Write::write_all(&mut go_on, &[1]).unwrap();
        io::Read::read_exact(&mut ready_pipe, &mut [0]).unwrap();
        assert_eq!(fcntl_lock(fd, libc::F_SETLK, libc::F_RDLCK), libc::F_RDLCK);
        io::Write::write_all(&mut go_on, &[1]).unwrap();
        assert_eq!(exit_status(child), 0);
        assert_eq!(mount.locks.count(), 1);
        drop(file);
        assert_eq!(mount.locks.count(), 0, "closing waits for the release");
    });
}

/// The second lock was forgotten with the answer to the close, and stayed with the file after the
/// last close.
// proves: P59
#[test]
fn a_lock_taken_while_a_close_is_answered_ends_with_the_next_close() {
    on_both(|mount| {
        let [first, second, third] = std::array::from_fn(|_| open(mount));
        let lock = |file: &File| fcntl_lock(file.as_raw_fd(), libc::F_SETLK, libc::F_WRLCK);
        assert_eq!(lock(&first), libc::F_WRLCK);
        mount.locks.flushes_held.store(true, Ordering::SeqCst);
        let closing = std::thread::spawn(move || drop(first));
        eventually("the close has released the lock", || mount.locks.count() == 0);
        assert_eq!(lock(&second), libc::F_WRLCK);
        mount.locks.flushes_held.store(false, Ordering::SeqCst);
        closing.join().unwrap();
        assert_eq!(mount.locks.count(), 1);
        drop(third);
        assert_eq!(mount.locks.count(), 0, "closing any descriptor releases it");
    });
}

/// A pipe: what to write to, what to read from.
fn pipe() -> (File, File) {
    let (read, write) = io::pipe().unwrap();
    (File::from(std::os::fd::OwnedFd::from(write)), File::from(std::os::fd::OwnedFd::from(read)))
}

// proves: P66
#[test]
fn only_a_deadly_signal_ends_a_stalled_read() {
    on_both(|mount| {
        let path = c_path(&mount.path("file"));
        mount.locks.stalled.store(true, Ordering::SeqCst);
        let child = in_child(|| {
            // SAFETY: a C string and a buffer that outlive the calls; the handler does
            // nothing.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = ignore as *const () as usize;
                libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut());
                let fd = libc::open(path.as_ptr(), libc::O_RDONLY);
                let mut byte = [0u8];
                libc::read(fd, byte.as_mut_ptr().cast(), 1) as i32
            }
        });
        let reading = || mount.reporter.stats().in_flight.iter().any(|f| f.op == "read");
        eventually("the read is under way", reading);
        // SAFETY: the child has not been waited for.
        unsafe { libc::kill(child, libc::SIGUSR1) };
        eventually("the signal is ready_pipe", || mount.count("interrupt") >= 1 || reading());
        std::thread::sleep(Duration::from_millis(300));
        assert!(reading(), "a harmless signal ended the read");
        // SAFETY: the child has not been waited for.
        unsafe { libc::kill(child, libc::SIGKILL) };
        let status = exit_status(child);
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL);
        eventually("the read has ended", || !reading());
        mount.locks.stalled.store(false, Ordering::SeqCst);
    });
}

/// Reads the beginning of `file` in a thread of its own.
fn read_beside(file: &File) -> JoinHandle<io::Result<()>> {
    let file = file.try_clone().unwrap();
    std::thread::spawn(move || file.read_exact_at(&mut [0; 100], 0))
}

/// The kernel drops no page that is being read before it is there.
// proves: P55
#[test]
fn a_lock_waits_for_pages_to_be_dropped_but_not_after_a_signal() {
    catch_signal();
    for transport in [Transport::Classic, Transport::Uring] {
        let Some(mount) = mounted(transport, Consistency::CloseToOpen) else { continue };
        fs::write(mount.path("file"), [b'.'; 8192]).unwrap();
        let (file, locked) = (open(&mount), open(&mount));
        let reading = || mount.reporter.stats().in_flight.iter().any(|f| f.op == "read");
        for signalled in [false, true] {
            // SAFETY: no memory is passed. What is read must not be there yet.
            unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
            mount.locks.stalled.store(true, Ordering::SeqCst);
            let reader = read_beside(&file);
            eventually("the read is under way", reading);
            let (waiter, thread) = wait_for_lock_on(locked.try_clone().unwrap());
            eventually("the request waits", || waiting(&mount) == 1 && mount.locks.count() == 1);
            std::thread::sleep(Duration::from_millis(200));
            assert_eq!(waiting(&mount), 1, "the page is not there");
            if signalled {
                // SAFETY: the thread has not been joined.
                unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
                waiter.join().unwrap().unwrap();
                assert!(reading());
                mount.locks.stalled.store(false, Ordering::SeqCst);
            } else {
                mount.locks.stalled.store(false, Ordering::SeqCst);
                waiter.join().unwrap().unwrap();
            }
            reader.join().unwrap().unwrap();
        }
    }
}
