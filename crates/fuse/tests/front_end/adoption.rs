//! A successor takes over a classic mount: nothing that applications asked for is lost.

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::common;
use crate::common::locking::{LockingFs, Table};
use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_fuse::{
    Device, MountOptions, Options, ServedMount, State, TransportWish, clone_device, mount, unmount,
};

/// What a supervisor holds.
pub(crate) struct Held {
    pub(crate) fd: OwnedFd,
    pub(crate) clones: Vec<OwnedFd>,
    pub(crate) state: OwnedFd,
}

impl Held {
    pub(crate) fn device(&self, state: State) -> Device {
        let copy = |fd: &OwnedFd| fd.try_clone().unwrap();
        Device { fd: copy(&self.fd), clones: self.clones.iter().map(copy).collect(), state }
    }

    pub(crate) fn adopt(&self) -> Device {
        self.device(State::adopt(self.state.try_clone().unwrap()).unwrap())
    }
}

fn read_in_flight(mounted: &ServedMount) -> bool {
    mounted.stats().in_flight.iter().any(|flight| flight.op == "read")
}

/// Longest wait for anything here.
const LONG: Duration = Duration::from_secs(60);

fn until(check: impl Fn() -> bool) {
    let begin = Instant::now();
    while !check() {
        assert!(begin.elapsed() < LONG, "it never came to it");
        std::thread::sleep(Duration::from_millis(5));
    }
}

// proves: P93
#[test]
fn a_successor_serves_open_files_and_what_was_under_way() {
    // SAFETY: no memory is passed.
    if unsafe { libc::geteuid() } != 0 || !Path::new("/dev/fuse").exists() {
        eprintln!("skipped: mounting needs root and /dev/fuse");
        return;
    }
    let at = std::env::temp_dir().join(format!("dray-fuse-adopt-{}", std::process::id()));
    fs::create_dir(&at).unwrap();
    let fd = mount(&at, &MountOptions::default()).unwrap();
    let _ends = common::abort_in_time(&at);
    let state = State::create().unwrap();
    let held = Held {
        clones: vec![clone_device(fd.as_fd()).unwrap()],
        fd,
        state: state.fd().try_clone_to_owned().unwrap(),
    };
    let memory = MemoryFs::new(MemoryOptions::default());
    let table = Arc::new(Table::default());
    let transport = TransportWish::Classic; // a ring ends with its process alone
    let options = Options { transport, workers: 2, ..Options::default() };
    let serve = |device: Device| {
        let fs = LockingFs { inner: memory.clone(), table: table.clone() };
        ServedMount::start_with(Arc::new(fs), device, options.clone()).unwrap()
    };
    let first = serve(held.device(state));
    fs::write(at.join("file"), b"contents").unwrap();
    let open = OpenOptions::new().read(true).write(true).open(at.join("file")).unwrap();
    table.stalled.store(true, Ordering::SeqCst);
    let mut reader = File::open(at.join("file")).unwrap();
    let reading = std::thread::spawn(move || {
        let mut text = String::new();
        reader.read_to_string(&mut text).map(|_| text)
    });
    until(|| read_in_flight(&first));
    first.stop().unwrap();
    table.stalled.store(false, Ordering::SeqCst);

    let second = serve(held.adopt());
    second.notifier().resend().unwrap();
    assert_eq!(reading.join().unwrap().unwrap(), "contents");
    open.write_all_at(b"C", 0).unwrap();
    assert_eq!(open.metadata().unwrap().len(), 8);
    drop(open);
    assert_eq!(fs::read(at.join("file")).unwrap(), b"Contents");
    until(|| second.stats().handles == 0);

    unmount(&at, false).unwrap();
    second.wait().unwrap();
    fs::remove_dir(&at).unwrap();
}

/// The others went on, and what the one had read was never answered: only a successor can do
/// that, which nobody starts while somebody serves.
// proves: P93
#[test]
fn a_worker_that_fails_ends_the_daemon() {
    // SAFETY: no memory is passed.
    if unsafe { libc::geteuid() } != 0 || !Path::new("/dev/fuse").exists() {
        eprintln!("skipped: mounting needs root and /dev/fuse");
        return;
    }
    let at = std::env::temp_dir().join(format!("dray-fuse-fails-{}", std::process::id()));
    fs::create_dir(&at).unwrap();
    let mut device = Device::new(mount(&at, &MountOptions::default()).unwrap()).unwrap();
    // Nothing that can be waited for.
    device.clones = vec![File::open("/dev/null").unwrap().into()];
    let options = Options { workers: 2, transport: TransportWish::Classic, ..Options::default() };
    let memory = Arc::new(MemoryFs::new(MemoryOptions::default()));
    let mounted = ServedMount::start_with(memory, device, options).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(mounted.wait().is_err()));
    let failed = receiver.recv_timeout(LONG);
    unmount(&at, true).unwrap();
    fs::remove_dir(&at).unwrap();
    assert_eq!(failed, Ok(true));
}
