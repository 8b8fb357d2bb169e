//! Listings: whole, from anywhere, and what they tell the kernel besides names, where it believes that for
//! a while.

use std::ffi::{CStr, CString};
use std::fs::{self, File, OpenOptions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::common::{TestMount, mounted};
use dray_fuse::{Consistency, Transport};

/// More than the kernel asks for at once, and less than the front end reads ahead.
const NAMES: usize = 400;

fn on_both(test: impl Fn(&TestMount)) {
    on_both_under(Consistency::CloseToOpen, test);
}

fn on_both_under(consistency: Consistency, test: impl Fn(&TestMount)) {
    for transport in [Transport::Classic, Transport::Uring] {
        if let Some(mount) = mounted(transport, consistency) {
            test(&mount);
        }
    }
}

fn c_path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

fn listed(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

/// A directory being listed.
struct Stream(*mut libc::DIR);

impl Stream {
    /// Opens it and reads the first names.
    fn begin(dir: &Path) -> Stream {
        let path = c_path(dir);
        // SAFETY: a C string that outlives the call.
        let mut stream = Stream(unsafe { libc::opendir(path.as_ptr()) });
        assert!(!stream.0.is_null() && stream.next().is_some());
        stream
    }
}

impl Iterator for Stream {
    type Item = CString;

    fn next(&mut self) -> Option<CString> {
        // SAFETY: the stream is open; the entry is read before the next call.
        unsafe {
            let entry = libc::readdir(self.0);
            (!entry.is_null()).then(|| CStr::from_ptr((*entry).d_name.as_ptr()).to_owned())
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: it is closed once.
        unsafe { libc::closedir(self.0) };
    }
}

/// A directory with many entries, each made by `make`, and that which is listed last.
fn many(mount: &TestMount, make: impl Fn(&Path)) -> (PathBuf, PathBuf) {
    let dir = mount.path("dir");
    fs::create_dir(&dir).unwrap();
    (0..NAMES).for_each(|index| make(&dir.join(format!("name-{index:03}"))));
    let last = fs::read_dir(&dir).unwrap().last().unwrap().unwrap().path();
    (dir, last)
}

/// By what the kernel believes: statx(2), which the standard library uses, asks for more than that.
fn stat(path: &Path) -> Option<libc::stat> {
    let path = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: an all-zero stat is valid; string and stat outlive the call.
    unsafe {
        let mut stat = std::mem::zeroed();
        (libc::stat(path.as_ptr(), &mut stat) == 0).then_some(stat)
    }
}

fn make_file(path: &Path) {
    File::create(path).unwrap();
}

// proves: P9
#[test]
fn a_name_that_was_removed_during_a_listing_is_gone() {
    on_both(|mount| {
        let (dir, last) = many(mount, make_file);
        let mut stream = Stream::begin(&dir);
        fs::remove_file(&last).unwrap();
        assert!(stream.by_ref().count() >= NAMES - 1);
        assert!(stat(&last).is_none(), "the kernel got it again");
    });
}

// proves: P9
#[test]
fn a_directory_that_was_renamed_during_a_listing_has_its_new_name_alone() {
    on_both(|mount| {
        let (dir, last) = many(mount, |path| fs::create_dir(path).unwrap());
        let moved = mount.path("moved");
        let mut stream = Stream::begin(&dir);
        fs::rename(&last, &moved).unwrap();
        assert!(stream.by_ref().count() >= NAMES - 1);
        assert!(stat(&last).is_none() && stat(&moved).is_some());
    });
}

// proves: P9
#[test]
fn what_was_written_during_a_listing_is_there() {
    on_both(|mount| {
        let (dir, last) = many(mount, make_file);
        let mut stream = Stream::begin(&dir);
        let file = OpenOptions::new().read(true).write(true).open(&last).unwrap();
        file.write_all_at(&[7; 100], 0).unwrap();
        assert!(stream.by_ref().count() >= NAMES - 1);
        assert_eq!(stat(&last).map(|stat| stat.st_size), Some(100));
        assert_eq!(file.read_at(&mut [0; 200], 0).unwrap(), 100);
    });
}

// proves: P37
#[test]
fn large_directories_are_listed_whole_and_from_anywhere() {
    on_both_under(Consistency::Strict, |mount| {
        let dir = mount.path("dir");
        fs::create_dir(&dir).unwrap();
        let count = 5_000;
        for index in 0..count {
            File::create(dir.join(format!("name-{index:05}"))).unwrap();
        }
        let names = listed(&dir);
        assert_eq!(names.len(), count);
        assert!((0..count).all(|index| names[index] == format!("name-{index:05}")));
        seekdir_resumes(&dir);
        let before = mount.count("readdir");
        assert!(before > 0);
    });
}

// proves: P37
#[test]
fn who_goes_back_in_a_listing_sees_the_directory_as_it_is_now() {
    on_both_under(Consistency::Strict, |mount| {
        for count in [20, 3_000] {
            let dir = mount.path(&format!("dir-{count}"));
            fs::create_dir(&dir).unwrap();
            for index in 0..count {
                File::create(dir.join(format!("name-{index:05}"))).unwrap();
            }
            names_removed_ahead_of_a_position_are_gone(&dir);
        }
    });
}

fn names_removed_ahead_of_a_position_are_gone(dir: &Path) {
    let path = c_path(dir);
    // SAFETY: the stream is closed once; entries are read before the next call on it.
    unsafe {
        let stream = libc::opendir(path.as_ptr());
        assert!(!stream.is_null());
        let name = || {
            let entry = libc::readdir(stream);
            (!entry.is_null())
                .then(|| std::ffi::CStr::from_ptr((*entry).d_name.as_ptr()).to_owned())
        };
        let rest = || std::iter::from_fn(name).collect::<Vec<_>>();
        let kept: Vec<_> = std::iter::from_fn(name).take(10).collect();
        let at = libc::telldir(stream);
        let removed: Vec<_> = std::iter::from_fn(name).take(8).collect();
        assert_eq!((kept.len(), removed.len()), (10, 8));
        for name in &removed {
            fs::remove_file(dir.join(name.to_str().unwrap())).unwrap();
        }
        libc::seekdir(stream, at);
        let seen = rest();
        assert!(!seen.is_empty() && !seen.iter().any(|name| removed.contains(name)));
        libc::closedir(stream);
    }
}

fn seekdir_resumes(dir: &Path) {
    let path = c_path(dir);
    // SAFETY: the stream is closed once; entries are read before the next call on it.
    unsafe {
        let stream = libc::opendir(path.as_ptr());
        assert!(!stream.is_null());
        let name = || {
            let entry = libc::readdir(stream);
            assert!(!entry.is_null());
            std::ffi::CStr::from_ptr((*entry).d_name.as_ptr()).to_owned()
        };
        assert_eq!((name().as_c_str(), name().as_c_str()), (c".", c".."));
        let mut seen = Vec::new();
        for _ in 0..2000 {
            let at = libc::telldir(stream);
            seen.push((at, name()));
        }
        for (at, expected) in seen.iter().step_by(397).rev() {
            libc::seekdir(stream, *at);
            assert_eq!(name(), *expected);
        }
        libc::rewinddir(stream);
        assert_eq!(name().as_c_str(), c".");
        libc::closedir(stream);
    }
}
