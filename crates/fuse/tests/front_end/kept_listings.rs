//! Listings that the kernel keeps under leases, and that it never shows what was changed.
//!
//! Each change by others leaves the directory's time of change as it was, as one within the same tick of a coarse
//! clock does. So the kernel cannot see it from attributes.

use std::ffi::{CStr, CString};
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use crate::adoption::Held;
use crate::common::dropping::DroppingHost;
use crate::common::session::NotifyingSession;
use crate::common::{TestMount, abort_in_time, mounted_with};
use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_core::{
    Attr, Context, FileId, FileSystem, LeaseKinds, Name, RecallItem, RenameHow, SetAttr, Stack,
    TimeSet, Timestamp, Ttl, Validity,
};
use dray_fuse::{
    Device, MountOptions, Options, PerThread, ServedMount, State, Transport, TransportWish,
    clone_device, mount, unmount,
};

const LEASED: Validity =
    Validity { name: Some(Ttl::FOREVER), attributes: Some(Ttl::FOREVER), pages: None };
/// More than the kernel asks for at once.
const NAMES: usize = 300;
/// A recall waits for 200 ms for what is dropped, and for 20 ms for answers on their way.
const SOON: Duration = Duration::from_secs(1);
/// A listing that is older is made anew.
const OLD: Duration = Duration::from_millis(600);

fn on_both(test: impl Fn(&TestMount)) {
    for transport in [Transport::Classic, Transport::Uring] {
        let options = Options { leases: true, ..Options::default() };
        let Some(mount) = mounted_with(transport, options) else { continue };
        if !mount.reporter.stats().session.flag_names().contains(&"has_expire_only") {
            eprintln!("skipped: the kernel believes no names that could be recalled");
            continue;
        }
        lease(&mount);
        test(&mount);
    }
}

/// Has the directory of all these tests leased. Its time of change is always the same here.
fn lease(mount: &TestMount) {
    let attr = age(&mount.fs);
    mount.fs.set_validity(mount.fs_root(), LEASED).unwrap();
    mount.session.lease(mount.fs_root(), attr);
}

fn age(fs: &MemoryFs) -> Attr {
    let (fs, root) = (fs.clone(), fs.info().root);
    let mut executor = dray_rt::Executor::new(dray_rt::DriverKind::Epoll).unwrap();
    executor.block_on(async move {
        let mtime = Some(TimeSet::At(Timestamp { sec: 1000, nsec: 5 }));
        let set = SetAttr { mtime, ..SetAttr::default() };
        fs.setattr(&Context::system(), root, set).await.unwrap()
    })
}

fn make(mount: &TestMount, name: &str) -> FileId {
    let id = mount.made_behind_the_kernel_s_back(name, b"content");
    mount.fs.set_validity(id, LEASED).unwrap();
    id
}

/// What a server does before another client changes a name, where it has leased the attributes of the directory
/// alone. With a name the kernel would count a change of the directory (`fuse_reverse_inval_entry`).
fn recall(mount: &TestMount) {
    let id = mount.fs_root();
    mount.fs.set_validity(id, Validity::UNSAID).unwrap();
    let item = RecallItem { id, kinds: LeaseKinds::ATTRIBUTES, name: None };
    let took = mount.session.recall(vec![item]);
    assert!(took < SOON, "{took:?}");
}

/// Another client makes a file, and leaves the directory's time as it was.
fn change(mount: &TestMount, name: &str) {
    make(mount, name);
    age(&mount.fs);
}

/// A directory that is open, for one listing after the other.
struct Stream(*mut libc::DIR);

// SAFETY: the C library locks the stream with each call.
unsafe impl Send for Stream {}

impl Stream {
    fn open(dir: &Path) -> Stream {
        let path = CString::new(dir.as_os_str().as_bytes()).unwrap();
        // SAFETY: a C string that outlives the call.
        let stream = Stream(unsafe { libc::opendir(path.as_ptr()) });
        assert!(!stream.0.is_null());
        stream
    }

    fn next(&mut self) -> Option<String> {
        // SAFETY: the stream is open; the entry is read before the next call.
        unsafe {
            let entry = libc::readdir(self.0);
            (!entry.is_null())
                .then(|| CStr::from_ptr((*entry).d_name.as_ptr()).to_str().unwrap().to_owned())
        }
    }

    fn rest(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.next()).filter(|name| !name.starts_with('.')).collect()
    }

    /// From the beginning.
    fn all(&mut self) -> Vec<String> {
        // SAFETY: the stream is open.
        unsafe { libc::rewinddir(self.0) };
        self.rest()
    }

    fn has(&mut self, name: &str) -> bool {
        self.all().iter().any(|other| other == name)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: it is closed once.
        unsafe { libc::closedir(self.0) };
    }
}

fn requests(mount: &TestMount, ops: &[&str]) -> u64 {
    ops.iter().map(|op| mount.count(op)).sum()
}

const LISTS: &[&str] = &["readdir", "readdirplus"];
const ALL_BUT_OPENS: &[&str] =
    &["readdir", "readdirplus", "lookup", "getattr", "statx", "getxattr", "listxattr"];

/// As `ls -l` does: names, attributes and ACLs.
fn list_long(mount: &TestMount) {
    let names = Stream::open(&mount.at).rest();
    assert_eq!(names.len(), NAMES);
    for name in names {
        let path = CString::new(mount.path(&name).as_os_str().as_bytes()).unwrap();
        // SAFETY: an all-zero stat is valid; strings and memory outlive the calls.
        unsafe {
            let mut stat = std::mem::zeroed();
            assert_eq!(libc::lstat(path.as_ptr(), &mut stat), 0);
            let acl = c"system.posix_acl_access";
            libc::lgetxattr(path.as_ptr(), acl.as_ptr(), std::ptr::null_mut(), 0);
        }
    }
}

// proves: P350
#[test]
fn a_listing_that_follows_at_once_asks_for_an_open_and_a_close_alone() {
    on_both(|mount| {
        (0..NAMES).for_each(|index| _ = make(mount, &format!("file{index}")));
        lease(mount);
        let asked = || {
            let before = requests(mount, ALL_BUT_OPENS);
            list_long(mount);
            requests(mount, ALL_BUT_OPENS) - before
        };
        // On a busy machine two listings may be further apart.
        let spared = (0..100).any(|_| {
            (0..2).for_each(|_| _ = asked()); // the time of the last access is asked for once more
            asked() == 0
        });
        assert!(spared, "each listing asks for something");
        thread::sleep(OLD);
        let (lists, lookups) = (requests(mount, LISTS), mount.count("lookup"));
        let begin = Instant::now();
        list_long(mount);
        assert!(requests(mount, LISTS) > lists, "an older one is made anew");
        if begin.elapsed() < Duration::from_millis(300) {
            assert_eq!(mount.count("lookup"), lookups, "that has renewed the names");
        }
    });
}

// proves: P351
#[test]
fn what_others_make_is_in_the_next_listing_also_through_what_was_open_before() {
    on_both(|mount| {
        (0..20).for_each(|index| _ = make(mount, &format!("file{index}")));
        lease(mount);
        let (mut whole, mut part) = (Stream::open(&mount.at), Stream::open(&mount.at));
        part.next().unwrap();
        for round in 0..24 {
            let name = &format!("new{round}");
            assert!(!whole.has(name) && !Stream::open(&mount.at).has(name));
            if round % 3 == 2 {
                part.all();
            }
            recall(mount);
            if round % 2 == 1 {
                // Somebody lists between the recall and the change.
                assert!(!whole.has(name) && !Stream::open(&mount.at).has(name));
            }
            if round % 4 == 1 {
                part.next();
            }
            change(mount, name);
            if round % 5 > 0 {
                lease(mount);
            }
            assert!(whole.has(name), "{round}: through what was open");
            assert!(Stream::open(&mount.at).has(name), "{round}");
            assert!(part.has(name), "{round}: through what was open, and not at its end");
            lease(mount);
        }
    });
}

/// A listing under way has the old names, and hands them to the kernel after the change.
// proves: P351
#[test]
fn a_listing_under_way_leaves_no_old_names() {
    on_both(|mount| {
        (0..20).for_each(|index| _ = make(mount, &format!("file{index}")));
        for (round, recalled_first) in [false, true, false, true].into_iter().enumerate() {
            lease(mount);
            mount.notifier.inval_inode(mount.fs_root(), Some((0, 0))).unwrap(); // so that the kernel asks
            let name = &format!("new{round}");
            let mut stream = Stream::open(&mount.at);
            let held = &mount.locks.listings_late;
            if recalled_first {
                recall(mount);
            }
            held.store(true, Ordering::SeqCst);
            thread::scope(|scope| {
                let before = requests(mount, LISTS);
                let stream = &mut stream;
                let lister = scope.spawn(move || stream.rest());
                while requests(mount, LISTS) == before {
                    thread::sleep(Duration::from_millis(1));
                }
                thread::sleep(Duration::from_millis(30)); // the names are there
                if !recalled_first {
                    recall(mount);
                }
                change(mount, name);
                if round > 1 {
                    // The kernel has valid attributes when it hears the old names.
                    lease(mount);
                    fs::metadata(&mount.at).unwrap();
                }
                held.store(false, Ordering::SeqCst);
                assert!(lister.join().unwrap().len() >= 20);
            });
            assert!(stream.has(name), "{round}: through what was open");
            assert!(Stream::open(&mount.at).has(name) && stream.has(name), "{round}");
        }
    });
}

#[test]
fn own_changes_are_in_the_next_listing() {
    on_both(|mount| {
        (0..20).for_each(|index| _ = make(mount, &format!("file{index}")));
        lease(mount);
        let mut stream = Stream::open(&mount.at);
        for round in 0..20 {
            let (name, moved) = (&format!("own{round}"), &format!("moved{round}"));
            assert!(!stream.has(name));
            File::create(mount.path(name)).unwrap();
            lease(mount);
            assert!(stream.has(name) && Stream::open(&mount.at).has(name));
            fs::rename(mount.path(name), mount.path(moved)).unwrap();
            lease(mount);
            assert!(Stream::open(&mount.at).has(moved) && !stream.has(name) && stream.has(moved));
            fs::remove_file(mount.path(moved)).unwrap();
            lease(mount);
            assert!(!stream.has(moved) && !Stream::open(&mount.at).has(moved));
        }
    });
}

#[test]
fn positions_hold_in_a_listing_that_the_kernel_keeps() {
    on_both(|mount| {
        (0..NAMES).for_each(|index| _ = make(mount, &format!("file{index}")));
        lease(mount);
        for kept in [false, true, true] {
            let mut stream = Stream::open(&mount.at);
            let mut seen = Vec::new();
            loop {
                // SAFETY: the stream is open.
                let at = unsafe { libc::telldir(stream.0) };
                let Some(name) = stream.next() else { break };
                seen.push((at, name));
            }
            assert_eq!(seen.len(), NAMES + 2, "{kept}");
            for (at, expected) in seen.iter().step_by(37).rev() {
                // SAFETY: the stream is open.
                unsafe { libc::seekdir(stream.0, *at) };
                assert_eq!(stream.next().as_ref(), Some(expected), "{kept}");
            }
            assert_eq!(stream.all().len(), NAMES);
        }
    });
}

/// A recall of all leases, as after the loss of contact.
// proves: P351
#[test]
fn nothing_is_kept_when_all_leases_have_ended() {
    on_both(|mount| {
        (0..20).for_each(|index| _ = make(mount, &format!("file{index}")));
        lease(mount);
        let mut stream = Stream::open(&mount.at);
        for round in 0..6 {
            let name = &format!("new{round}");
            assert!(!stream.has(name));
            // What the kernel was given to believe has ended before.
            mount.notifier.inval_inode(mount.fs_root(), None).unwrap();
            mount.session.recall_all();
            change(mount, name);
            assert!(stream.has(name) && Stream::open(&mount.at).has(name), "{round}");
            lease(mount);
        }
    });
}

/// What the kernel keeps of a directory the daemon before has answered. The directory stays open.
// proves: P351
#[test]
fn a_successor_recalls_what_the_kernel_keeps_since_before() {
    // SAFETY: no memory is passed.
    if unsafe { libc::geteuid() } != 0 || !Path::new("/dev/fuse").exists() {
        eprintln!("skipped: mounting needs root and /dev/fuse");
        return;
    }
    let at = std::env::temp_dir().join(format!("dray-fuse-inherits-{}", std::process::id()));
    fs::create_dir(&at).unwrap();
    let checks = MountOptions { default_permissions: true, ..MountOptions::default() };
    let fd = mount(&at, &checks).unwrap();
    let _ends = abort_in_time(&at);
    let state = State::create().unwrap();
    let clones = vec![clone_device(fd.as_fd()).unwrap()];
    let held = Held { clones, fd, state: state.fd().try_clone_to_owned().unwrap() };
    let memory = MemoryFs::new(MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() });
    let (root, session) = (memory.info().root, NotifyingSession::default());
    let stack = Stack { fs: Arc::new(memory.clone()), session: Arc::new(session.clone()) };
    let serve = |device: Device| {
        let (host, stack) = (Arc::new(DroppingHost), stack.clone());
        let transport = TransportWish::Classic; // a ring ends with its process alone
        let options = Options { transport, workers: 2, leases: true, host, ..Options::default() };
        let per_thread: PerThread = Arc::new(move |_, _| {
            let stack = stack.clone();
            Box::pin(async move { Ok(stack) })
        });
        ServedMount::start(per_thread, device, options).unwrap()
    };
    let lease = |validity| {
        session.lease(root, age(&memory));
        memory.set_validity(root, validity).unwrap();
    };
    let first = serve(held.device(state));
    File::create(at.join("old")).unwrap();
    lease(LEASED);
    let mut stream = Stream::open(&at);
    (0..3).for_each(|_| assert!(stream.has("old") && !stream.has("moved")));
    let kept = first.stats().counts;
    assert!(!stream.has("moved") && first.stats().counts == kept, "the kernel keeps it");
    first.stop().unwrap();

    let second = serve(held.adopt());
    let item = RecallItem { id: root, kinds: LeaseKinds::ATTRIBUTES, name: None };
    assert!(session.recall(vec![item]) < SOON);
    let (fs, names) =
        (memory.clone(), ["old", "moved"].map(|name| Name::new(name.as_bytes()).unwrap()));
    let mut executor = dray_rt::Executor::new(dray_rt::DriverKind::Epoll).unwrap();
    executor.block_on(async move {
        let [from, to] = names.map(|name| (root, name));
        fs.rename(&Context::system(), from, to, RenameHow::Replace).await.unwrap();
    });
    lease(LEASED);
    assert!(stream.has("moved"), "through what was open");
    assert!(Stream::open(&at).has("moved") && !stream.has("old"));
    drop(stream);
    unmount(&at, false).unwrap();
    second.wait().unwrap();
    fs::remove_dir(&at).unwrap();
}
