//! A mount of a file system in memory that is always taken down again.

#![allow(dead_code)] // each test binary uses a part

pub mod dropping;
pub mod file_handle;
pub mod locking;
pub mod pushing;
pub mod session;

use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_core::{Buf, Context, FileId, FileSystem, Name, OpenHow, Stack, Write};
use dray_fuse::{
    Consistency, Device, MountOptions, Notifier, Options, PerThread, Reporter, ServedMount,
    Transport, TransportWish, mount, unmount,
};

use dropping::DroppingHost;
use locking::{LockingFs, Table};
use session::NotifyingSession;

const ENABLE_URING: &str = "/sys/module/fuse/parameters/enable_uring";

/// FUSE over io_uring switched on, and back to what it was in the end. One test at a
/// time, since the switch is the machine's.
struct Switch {
    before: Option<String>,
    _alone: MutexGuard<'static, ()>,
}

static ALONE: Mutex<()> = Mutex::new(());

impl Switch {
    fn on() -> Option<Switch> {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let before = fs::read_to_string(ENABLE_URING).ok()?;
        let on = before.trim() == "Y";
        if !on {
            fs::write(ENABLE_URING, "Y").ok()?;
        }
        Some(Switch { before: (!on).then_some(before), _alone: alone })
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _ = fs::write(ENABLE_URING, before);
        }
    }
}

pub struct TestMount {
    pub at: PathBuf,
    pub fs: MemoryFs,
    pub locks: Arc<Table>,
    pub session: NotifyingSession,
    pub reporter: Reporter,
    pub notifier: Notifier,
    served: Option<JoinHandle<std::io::Result<()>>>,
    /// Dropped when the test has ended.
    _ends: mpsc::Sender<()>,
    _switch: Option<Switch>,
}

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// Mounts; none, with the reason printed, where this machine cannot.
pub fn mounted(transport: Transport, consistency: Consistency) -> Option<TestMount> {
    mounted_with_spares(transport, consistency, 4)
}

/// The same with so many spare entries in its ring, of whose queues each begins with two.
pub fn mounted_with_spares(
    transport: Transport,
    consistency: Consistency,
    ring_spares_max: usize,
) -> Option<TestMount> {
    mounted_with(transport, Options { consistency, ring_spares_max, ..Options::default() })
}

/// The same with these options, but for what all tests have alike.
pub fn mounted_with(transport: Transport, options: Options) -> Option<TestMount> {
    mounted_around(transport, options, |stack| stack)
}

/// The same with what `wrap` puts around the file system.
pub fn mounted_around(
    transport: Transport,
    options: Options,
    wrap: impl FnOnce(Stack) -> Stack,
) -> Option<TestMount> {
    // SAFETY: no memory is passed.
    if unsafe { libc::geteuid() } != 0 || !Path::new("/dev/fuse").exists() {
        eprintln!("skipped: mounting needs root and /dev/fuse");
        return None;
    }
    let switch = match transport {
        Transport::Uring => {
            let switch = Switch::on();
            if switch.is_none() {
                eprintln!("skipped: this kernel has no FUSE over io_uring");
                return None;
            }
            switch
        }
        Transport::Classic => None,
    };
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let at = std::env::temp_dir().join(format!("dray-fuse-{}-{number}", std::process::id()));
    fs::create_dir(&at).unwrap();
    let wish = match transport {
        Transport::Classic => TransportWish::Classic,
        Transport::Uring => TransportWish::Uring,
    };
    let host = Arc::new(DroppingHost);
    let options = Options { transport: wish, ring_depth: 2, host, ..options };
    let mount_options = MountOptions {
        default_permissions: options.kernel_checks_permissions(),
        allow_other: true,
        ..MountOptions::default()
    };
    let memory = MemoryFs::new(MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() });
    let locks = Arc::new(Table::default());
    let session = NotifyingSession::default();
    let served = LockingFs { inner: memory.clone(), table: locks.clone() };
    let stack = wrap(Stack { fs: Arc::new(served), session: Arc::new(session.clone()) });
    let per_thread: PerThread = Arc::new(move |_, _| {
        let stack = stack.clone();
        Box::pin(async move { Ok(stack) })
    });
    let device = Device::new(mount(&at, &mount_options).unwrap()).unwrap();
    let mounted = ServedMount::start(per_thread, device, options).unwrap();
    assert_eq!(mounted.stats().transport, transport);
    Some(TestMount {
        fs: memory,
        locks,
        session,
        reporter: mounted.reporter(),
        notifier: mounted.notifier(),
        served: Some(std::thread::spawn(move || mounted.wait())),
        _ends: abort_in_time(&at),
        at,
        _switch: switch,
    })
}

/// Longest that a test may keep a mount.
const TEST_TIME: Duration = Duration::from_secs(150);

/// Aborts a mount whose test hangs, so that the test fails and nothing is left behind.
pub fn abort_in_time(at: &Path) -> mpsc::Sender<()> {
    let (ends, ended) = mpsc::channel();
    let at = CString::new(at.as_os_str().as_bytes()).unwrap();
    std::thread::spawn(move || {
        if ended.recv_timeout(TEST_TIME) == Err(mpsc::RecvTimeoutError::Timeout) {
            eprintln!("aborting {at:?}: its test takes too long");
            // SAFETY: a C string that outlives the call.
            unsafe { libc::umount2(at.as_ptr(), libc::MNT_FORCE | libc::MNT_DETACH) };
        }
    });
    ends
}

impl TestMount {
    pub fn path(&self, name: &str) -> PathBuf {
        self.at.join(name)
    }

    pub fn fs_root(&self) -> FileId {
        self.fs.info().root
    }

    /// Makes a file as another client would.
    pub fn made_behind_the_kernel_s_back(&self, name: &str, data: &[u8]) -> FileId {
        let (fs, name, data) = (self.fs.clone(), name.to_owned(), Buf::from(data));
        let mut executor = dray_rt::Executor::new(dray_rt::DriverKind::Epoll).unwrap();
        executor.block_on(async move {
            let (cx, root) = (Context::system(), fs.info().root);
            let name = Name::new(name.as_bytes()).unwrap();
            fs.put(&cx, root, name, 0o666, data).await.unwrap();
            fs.lookup(&cx, root, name).await.unwrap().id
        })
    }

    /// Changes a file as another client would.
    pub fn behind_the_kernel_s_back(&self, name: &str, data: &[u8]) {
        let (fs, name, data) = (self.fs.clone(), name.to_owned(), Buf::from(data));
        let mut executor = dray_rt::Executor::new(dray_rt::DriverKind::Epoll).unwrap();
        executor.block_on(async move {
            let (cx, root) = (Context::system(), fs.info().root);
            let entry = fs.lookup(&cx, root, Name::new(name.as_bytes()).unwrap()).await.unwrap();
            let file = fs.open(&cx, entry.id, OpenHow::READ_WRITE).await.unwrap();
            file.write(&cx, Write::at(0), data).await.unwrap();
            file.close(&cx).await.unwrap();
        });
    }

    /// Requests of this kind so far.
    pub fn count(&self, op: &str) -> u64 {
        let counts = self.reporter.stats().counts;
        counts.iter().find(|(name, _)| *name == op).map_or(0, |(_, count)| *count)
    }
}

impl Drop for TestMount {
    fn drop(&mut self) {
        // A child of another test may have inherited descriptors of this mount.
        let unmounted = (0..3000).any(|_| {
            let done = unmount(&self.at, false).is_ok();
            if !done {
                std::thread::sleep(Duration::from_millis(20));
            }
            done
        });
        if !unmounted {
            let _ = unmount(&self.at, true);
        }
        let served = self.served.take().map(JoinHandle::join);
        let _ = fs::remove_dir(&self.at);
        if !std::thread::panicking() {
            assert!(unmounted, "the mount was still in use");
            assert!(matches!(served, Some(Ok(Ok(())))), "a worker failed: {served:?}");
        }
    }
}
