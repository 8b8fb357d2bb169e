//! Listings that the kernel keeps under leases, at real mounts.

use std::ffi::{CStr, CString};
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;

use crate::common::{self, Rig, on_transports};
use crate::leases::{tree, two_mounts};

/// Requests that others on the machine cause, which look at mount points.
const OTHERS: u64 = 8;

/// The requests of the kernel so far but opens and closes of directories. Without a pause, in which a listing
/// grows old.
fn asked(rig: &Rig, at: &Path) -> u64 {
    let status = rig.demand(&["status", at.to_str().unwrap(), "--json", "--interval", "0"]);
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    let ops = status["ops"].as_object().unwrap();
    let not_counted = ["opendir", "releasedir", "forget", "batch_forget"];
    let counts = ops.iter().filter(|(op, _)| !not_counted.contains(&op.as_str()));
    counts.map(|(_, count)| count.as_u64().unwrap()).sum()
}

/// Attributes and ACLs of 400 files in 20 directories cost nothing but opens of directories, a moment after
/// somebody has looked at them.
// proves: P350
#[test]
fn a_long_listing_that_follows_another_one_asks_for_opens_of_directories_alone() {
    if common::skipped() {
        return;
    }
    on_transports(|transport| {
        let (rig, one, _other) = two_mounts(transport);
        tree(&one);
        let list = || {
            let output = Command::new("ls").arg("-lR").arg(&one).output().unwrap();
            assert!(output.status.success(), "{output:?}");
            assert_eq!(String::from_utf8(output.stdout).unwrap().matches("file").count(), 400);
        };
        let mut least = u64::MAX;
        // On a busy machine listings may be further apart.
        for _ in 0..50 {
            (0..2).for_each(|_| list());
            let before = asked(&rig, &one);
            list();
            least = least.min(asked(&rig, &one) - before);
            if least <= OTHERS {
                return;
            }
        }
        panic!("{least} requests for 21 directories");
    });
}

/// A copy of a tree asks three times whether each file is there, and makes it then. Another mount makes the file that
/// this kernel believes to be absent.
// proves: P352
#[test]
fn absent_names_of_a_new_directory_are_asked_for_once_and_seen_when_others_make_them() {
    if common::skipped() {
        return;
    }
    on_transports(|transport| {
        let (rig, one, other) = two_mounts(transport);
        let dir = one.join("new");
        fs::create_dir(&dir).unwrap();
        let absent = |name: &str| fs::metadata(dir.join(name)).is_err();
        assert!((0..3).all(|_| absent("first")));
        // Nothing was made here, and no name is leased.
        fs::create_dir(one.join("bare")).unwrap();
        assert!((0..3).all(|_| fs::metadata(one.join("bare/file")).is_err()));
        File::create(other.join("bare/file")).unwrap();
        assert!(fs::metadata(one.join("bare/file")).is_ok());
        let before = asked(&rig, &one);
        for file in 0..100 {
            let name = format!("file{file}");
            assert!((0..3).all(|_| absent(&name)));
            File::create(dir.join(&name)).unwrap();
        }
        let asked = asked(&rig, &one) - before;
        // LOOKUP, CREATE, FLUSH, RELEASE, and GETATTR of the directory. There were three LOOKUPs more.
        assert!(asked <= 6 * 100, "{asked} requests for 100 files");
        for round in 0..3 {
            let name = format!("other{round}");
            assert!((0..3).all(|_| absent(&name)));
            File::create(other.join("new").join(&name)).unwrap();
            assert!(!absent(&name), "{round}");
            assert_eq!(listed(&dir).len(), 101 + round);
        }
    });
}

/// A directory that stays open.
struct Stream(*mut libc::DIR);

impl Stream {
    fn open(dir: &Path) -> Stream {
        let path = CString::new(dir.as_os_str().as_bytes()).unwrap();
        // SAFETY: a C string that outlives the call.
        let stream = Stream(unsafe { libc::opendir(path.as_ptr()) });
        assert!(!stream.0.is_null());
        stream
    }

    /// The names that are there now.
    fn names(&mut self) -> Vec<String> {
        // SAFETY: the stream is open; each entry is read before the next call.
        let next = || unsafe {
            let entry = libc::readdir(self.0);
            (!entry.is_null())
                .then(|| CStr::from_ptr((*entry).d_name.as_ptr()).to_str().unwrap().to_owned())
        };
        // SAFETY: as above.
        unsafe { libc::rewinddir(self.0) };
        sorted(std::iter::from_fn(next).filter(|name| !name.starts_with('.')).collect())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: it is closed once.
        unsafe { libc::closedir(self.0) };
    }
}

fn sorted(mut names: Vec<String>) -> Vec<String> {
    names.sort();
    names
}

fn listed(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
    sorted(names.map(|name| name.into_string().unwrap()).collect())
}

/// Both mounts list a directory, and one of them changes it, in turn. After each change the directory gets its
/// former times back, as archivers do: the kernel cannot see the change from them.
// proves: P351
#[test]
fn each_change_is_in_the_next_listing_of_both_mounts() {
    if common::skipped() {
        return;
    }
    on_transports(|transport| {
        let (_rig, one, other) = two_mounts(transport);
        for round in 0..12 {
            let dir = format!("dir{round}");
            fs::create_dir(one.join(&dir)).unwrap();
            (0..5).for_each(|file| {
                _ = File::create(one.join(&dir).join(format!("f{file}"))).unwrap()
            });
            let [here, there] = [&one, &other].map(|at| at.join(&dir));
            let (changes, looks) = if round % 2 == 0 { (&here, &there) } else { (&there, &here) };
            let times = fs::metadata(changes).unwrap().modified().unwrap();
            let (mut stays, mut mine) = (Stream::open(looks), Stream::open(changes));
            let mut expected = listed(looks);
            assert_eq!(expected.len(), 5);
            for _ in 0..2 {
                assert_eq!((&stays.names(), &listed(looks)), (&expected, &expected));
                assert_eq!((&mine.names(), &listed(changes)), (&expected, &expected));
            }
            // One change: behind four within a second the names of a directory are not leased.
            match round / 2 % 3 {
                0 => {
                    drop(File::create(changes.join("new")).unwrap());
                    expected.push("new".into());
                }
                1 => {
                    fs::rename(changes.join("f1"), changes.join("moved")).unwrap();
                    expected[1] = "moved".into();
                }
                _ => {
                    fs::remove_file(changes.join("f3")).unwrap();
                    expected.remove(3);
                }
            }
            expected.sort();
            File::open(changes).unwrap().set_modified(times).unwrap();
            assert_eq!(stays.names(), expected, "{round}: through what was open");
            assert_eq!(listed(looks), expected, "{round}");
            assert_eq!(mine.names(), expected, "{round}: here, through what was open");
            assert_eq!(listed(changes), expected, "{round}: here");
        }
    });
}
