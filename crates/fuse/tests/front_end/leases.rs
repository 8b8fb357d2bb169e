//! Names and attributes that are believed under leases, and recalls of them.

use std::fs;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use crate::common::{TestMount, mounted_with};
use dray_core::{FileId, LeaseKinds, NameBuf, RecallItem, Ttl, Validity};
use dray_fuse::{Options, Transport};

/// As a server says that leases all it says.
const LEASED: Validity =
    Validity { name: Some(Ttl::FOREVER), attributes: Some(Ttl::FOREVER), pages: None };
/// Less than the kernel believes a name, with room for a slow machine.
const SOON: Duration = Duration::from_millis(700);

/// Runs `test` on mounts whose kernel can be notified that a name's time is over.
fn on_both(test: impl Fn(&TestMount)) {
    for transport in [Transport::Classic, Transport::Uring] {
        let options = Options { leases: true, ..Options::default() };
        let Some(mount) = mounted_with(transport, options) else { continue };
        if !mount.reporter.stats().session.flag_names().contains(&"has_expire_only") {
            eprintln!("skipped: the kernel believes no names that could be recalled");
            continue;
        }
        mount.fs.set_validity(mount.fs_root(), LEASED).unwrap();
        mount.fs.set_absence(Some(Ttl::FOREVER)).unwrap();
        fs::metadata(&mount.at).unwrap(); // the kernel wants that of the root for each path
        test(&mount);
    }
}

fn make(mount: &TestMount, name: &str) -> FileId {
    let id = mount.made_behind_the_kernel_s_back(name, b"content");
    mount.fs.set_validity(id, LEASED).unwrap();
    id
}

/// Requests for names and for attributes while `run` runs.
fn asked_in(mount: &TestMount, run: impl FnOnce()) -> (u64, u64) {
    let now = || (mount.count("lookup"), mount.count("getattr") + mount.count("statx"));
    let before = now();
    run();
    let after = now();
    (after.0 - before.0, after.1 - before.1)
}

fn stat(mount: &TestMount, name: &str) -> Option<u64> {
    fs::metadata(mount.path(name)).ok().map(|file| file.len())
}

fn attributes_of(id: FileId) -> RecallItem {
    RecallItem { id, kinds: LeaseKinds::ATTRIBUTES, name: None }
}

fn name_of(dir: FileId, name: &str) -> RecallItem {
    let name = NameBuf::new(name.as_bytes()).unwrap();
    RecallItem { id: dir, kinds: LeaseKinds::NAMES, name: Some(name) }
}

#[test]
fn what_is_leased_is_asked_for_once_until_it_is_recalled() {
    on_both(|mount| {
        let id = make(mount, "file");
        stat(mount, "file");
        let again = || (0..5).for_each(|_| assert_eq!(stat(mount, "file"), Some(7)));
        let (names, attributes) = asked_in(mount, again);
        // The time of birth comes with no lookup: the kernel asks for it once.
        assert!(names == 0 && attributes <= 1, "{names} {attributes}");
        mount.behind_the_kernel_s_back("file", b"longer content");
        assert!(mount.session.recall(vec![attributes_of(id)]) < SOON);
        let (names, attributes) = asked_in(mount, || assert_eq!(stat(mount, "file"), Some(14)));
        assert_eq!((names, attributes > 0), (0, true), "the name stays");
        // A time that has just begun to count would be there again.
        assert!(mount.session.recall(vec![name_of(mount.fs_root(), "file")]) < SOON);
        assert_eq!(asked_in(mount, || assert_eq!(stat(mount, "file"), Some(14))).0, 1);
    });
}

#[test]
fn a_name_that_is_absent_is_recalled_as_others_are() {
    on_both(|mount| {
        let miss = || (0..5).for_each(|_| assert_eq!(stat(mount, "new"), None));
        assert_eq!(asked_in(mount, miss).0, 1);
        assert!(mount.session.recall(vec![name_of(mount.fs_root(), "new")]) < SOON);
        make(mount, "new");
        assert_eq!(stat(mount, "new"), Some(7));
    });
}

/// A recall of all names of a directory waits until the kernel believes none of them.
#[test]
fn all_names_of_a_directory_are_recalled() {
    on_both(|mount| {
        for name in ["a", "b"] {
            make(mount, name);
            stat(mount, name);
        }
        let all = RecallItem { id: mount.fs_root(), kinds: LeaseKinds::NAMES, name: None };
        mount.session.recall(vec![all.clone()]);
        let look = || ["a", "b"].iter().for_each(|name| assert_eq!(stat(mount, name), Some(7)));
        assert_eq!(asked_in(mount, look).0, 2);
        thread::sleep(Duration::from_millis(1500));
        assert!(mount.session.recall(vec![all]) < SOON, "the kernel believes none");
    });
}

/// A program removes a name, and holds the lock of the directory meanwhile. The server does not answer
/// it before this mount has given up another name of the directory: each would wait for the other.
// proves: P221
#[test]
fn a_recall_does_not_wait_for_what_waits_for_the_server() {
    on_both(|mount| {
        for name in ["removed", "other"] {
            make(mount, name);
            stat(mount, name);
        }
        mount.locks.removals_held.store(true, Ordering::SeqCst);
        let path = mount.path("removed");
        let removes = thread::spawn(move || fs::remove_file(path).unwrap());
        while mount.count("unlink") == 0 {
            thread::sleep(Duration::from_millis(5));
        }
        let took = mount.session.recall(vec![name_of(mount.fs_root(), "other")]);
        assert!(took < Duration::from_secs(5), "{took:?}");
        mount.locks.removals_held.store(false, Ordering::SeqCst);
        removes.join().unwrap();
        assert_eq!(asked_in(mount, || assert_eq!(stat(mount, "other"), Some(7))).0, 1);
    });
}

/// While a name is recalled again and again nobody sees what was there before.
#[test]
fn nobody_sees_what_was_recalled() {
    on_both(|mount| {
        let id = make(mount, "file");
        let stop = std::sync::atomic::AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !stop.load(Ordering::SeqCst) {
                        stat(mount, "file");
                    }
                });
            }
            for size in 8..60usize {
                // As a server does: nothing is leased while it changes.
                mount.fs.set_validity(id, Validity::UNSAID).unwrap();
                mount.session.recall(vec![attributes_of(id)]);
                mount.behind_the_kernel_s_back("file", &vec![b'x'; size]);
                assert_eq!(stat(mount, "file"), Some(size as u64));
                mount.fs.set_validity(id, LEASED).unwrap();
            }
            stop.store(true, Ordering::SeqCst);
        });
    });
}
