//! Handles of files (name_to_handle_at(2)), over both transports: what the kernel has forgotten is found
//! by them, and nothing is taken for another file.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use crate::common::file_handle::{FileHandle, drop_inodes};
use crate::common::{TestMount, mounted};
use dray_fuse::{Consistency, Transport};

/// Longest wait for the kernel to forget: others' programs may walk the mount, too.
const LONG: Duration = Duration::from_secs(60);

fn on_all(test: impl Fn(&TestMount)) {
    for transport in [Transport::Classic, Transport::Uring] {
        for consistency in [Consistency::Strict, Consistency::CloseToOpen] {
            if let Some(mount) = mounted(transport, consistency) {
                test(&mount);
            }
        }
    }
}

/// Has the kernel forget all but the root.
fn all_forgotten(mount: &TestMount) {
    let begin = Instant::now();
    loop {
        drop_inodes();
        // What it has forgotten it tells when it has nothing better to do.
        let until = Instant::now() + Duration::from_millis(200);
        while Instant::now() < until {
            if mount.reporter.stats().nodes == 1 {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(begin.elapsed() < LONG, "the kernel forgets nothing");
    }
}

fn errno<T>(result: io::Result<T>) -> i32 {
    result.err().and_then(|error| error.raw_os_error()).unwrap_or(0)
}

// proves: P39
#[test]
fn a_handle_leads_to_its_file_after_the_kernel_has_forgotten_it() {
    on_all(|mount| {
        let (file, dir) = (mount.path("file"), mount.path("a/b/c"));
        fs::create_dir_all(&dir).unwrap();
        for (path, said) in [(&file, "in the root"), (&dir.join("deep"), "deep")] {
            fs::write(path, said).unwrap();
        }
        let deep = dir.join("deep");
        let all = [&file, &dir, &deep, &mount.at];
        let handles = all.map(|path| FileHandle::of(path).unwrap());
        let numbers = all.map(|path| fs::metadata(path).unwrap().ino());
        // An open file is never forgotten: tests beside this one make the kernel drop inodes, too.
        let mut held = Some(fs::File::open(&file).unwrap());
        for round in 0..3 {
            if round > 0 {
                held = None;
                all_forgotten(mount);
            }
            let lookups = mount.count("lookup");
            assert_eq!(handles[0].read(&mount.at).unwrap(), "in the root");
            assert_eq!(mount.count("lookup") > lookups, held.is_none());
            // To find its place the kernel goes up by "..", and down by the listings.
            assert_eq!(handles[1].path(&mount.at).unwrap(), dir);
            assert_eq!(handles[2].read(&mount.at).unwrap(), "deep");
            assert_eq!(handles[3].path(&mount.at).unwrap(), mount.at);
            for (handle, number) in handles.iter().zip(numbers) {
                let open = handle.open(&mount.at, libc::O_PATH).unwrap();
                assert_eq!(open.metadata().unwrap().ino(), number);
            }
            if round == 1 {
                all_forgotten(mount);
            }
            let again = all.map(|path| FileHandle::of(path).unwrap());
            assert_eq!(again, handles, "by its name a file has the same handle");
        }
        handles[0].open(&mount.at, libc::O_WRONLY | libc::O_TRUNC).unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"");
    });
}

// proves: P39
#[test]
fn a_handle_of_what_is_gone_leads_to_nothing() {
    on_all(|mount| {
        let paths = ["one", "two", "three"].map(|name| mount.path(name));
        paths.iter().for_each(|path| fs::write(path, "gone").unwrap());
        let handles = paths.each_ref().map(|path| FileHandle::of(path).unwrap());
        fs::remove_file(&paths[0]).unwrap();
        fs::rename(&paths[2], &paths[1]).unwrap();
        for forgotten in [false, true] {
            if forgotten {
                all_forgotten(mount);
            }
            for number in 0..100 {
                fs::write(mount.path(&format!("new{forgotten}{number}")), "new").unwrap();
            }
            assert_eq!(errno(handles[0].read(&mount.at)), libc::ESTALE);
            assert_eq!(errno(handles[1].read(&mount.at)), libc::ESTALE);
            assert_eq!(handles[2].read(&mount.at).unwrap(), "gone");
        }
    });
}

/// Both begin to number their files alike.
// proves: P39
#[test]
fn a_handle_of_another_mount_leads_to_nothing() {
    on_all(|mount| {
        fs::write(mount.path("file"), "here").unwrap();
        let handle = FileHandle::of(&mount.path("file")).unwrap();
        let Some(other) = mounted(Transport::Classic, Consistency::Strict) else { return };
        for name in ["file", "and", "more"] {
            fs::write(other.path(name), "there").unwrap();
        }
        assert_eq!(errno(handle.read(&other.at)), libc::ESTALE);
        assert_eq!(handle.read(&mount.at).unwrap(), "here");
    });
}
