//! What two real mounts of one export owe each other, beyond the generated sequences.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use crate::common;
use crate::common::load::lock;
use crate::common::{Rig, two_mounts};
use dray_testkit::fixture::Ext4;

/// No program of this mount has the file open, so it is not notified of changes by others.
// proves: P5
#[test]
fn under_close_to_open_what_others_do_to_names_is_seen_when_these_run_out() {
    if common::skipped() {
        return;
    }
    let (_rig, one, other) = two_mounts("consistency=close-to-open"); // and attr_timeout as it is
    ["removed", "renamed", "changed", "replaced"].iter().for_each(|name| {
        fs::write(other.join(name), "old").unwrap();
        assert_eq!(fs::read(one.join(name)).unwrap(), b"old");
    });
    assert!(!one.join("made").exists() && !one.join("there").exists());
    fs::remove_file(other.join("removed")).unwrap();
    fs::rename(other.join("renamed"), other.join("there")).unwrap();
    fs::write(other.join("made"), "new").unwrap();
    fs::rename(other.join("made"), other.join("replaced")).unwrap();
    fs::write(other.join("made"), "made").unwrap();
    fs::write(other.join("changed"), "and longer").unwrap();
    fs::set_permissions(other.join("changed"), fs::Permissions::from_mode(0o600)).unwrap();
    let seen = |name: &str| fs::metadata(one.join(name)).ok();
    common::wait_for("a removal", || seen("removed").is_none());
    common::wait_for("a renaming", || seen("renamed").is_none() && seen("there").is_some());
    common::wait_for("a new file", || seen("made").is_some_and(|meta| meta.len() == 4));
    common::wait_for("a mode and a size", || {
        seen("changed").is_some_and(|meta| (meta.len(), meta.mode() & 0o777) == (10, 0o600))
    });
    assert_eq!(fs::read(one.join("changed")).unwrap(), b"and longer");
    common::wait_for("another file", || fs::read(one.join("replaced")).unwrap() == b"new");
}

/// Through the page cache the kernel would cut appends where it takes a page to end.
// proves: P19
#[test]
fn appends_of_a_mount_that_caches_do_not_mix_with_others() {
    if common::skipped() {
        return;
    }
    let (mut rig, strict, _) = two_mounts("");
    let cached = rig.mount("cached", "consistency=close-to-open");
    for access in ["append alone", "reading, too"] {
        let path = cached.join(access);
        let open = |path: &Path| {
            let read = access == "reading, too";
            File::options().read(read).append(true).create(true).open(path).unwrap()
        };
        let files = [(open(&path), b'c'), (open(&strict.join(access)), b's')];
        std::thread::scope(|scope| {
            for (file, letter) in &files {
                let mut file: &File = file;
                let record = [&[*letter; 100][..], b"\n"].concat();
                scope.spawn(move || (0..400).for_each(|_| file.write_all(&record).unwrap()));
            }
        });
        for path in [path, strict.join(access)] {
            let log = std::fs::read(path).unwrap();
            assert_eq!(log.len(), 2 * 400 * 101);
            let whole = |record: &[u8]| record[..100].iter().all(|byte| *byte == record[0]);
            assert!(log.chunks(101).all(|record| whole(record) && record[100] == b'\n'));
        }
    }
}

/// Pages of a file, shared with the file.
struct Mapping {
    start: *mut u8,
}

/// Two pages: a change of the one is not to be mistaken for one of the other.
const MAPPED_BYTES: usize = 8192;

impl Mapping {
    fn new(file: &File) -> Mapping {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel finds room for the mapping.
        let start = unsafe {
            let (none, fd) = (std::ptr::null_mut(), file.as_raw_fd());
            libc::mmap(none, MAPPED_BYTES, access, libc::MAP_SHARED, fd, 0)
        };
        assert_ne!(start, libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
        Mapping { start: start.cast() }
    }

    fn get(&self, at: usize) -> u8 {
        assert!(at < MAPPED_BYTES);
        // SAFETY: within the mapping; volatile, since others change it.
        unsafe { self.start.add(at).read_volatile() }
    }

    fn set(&self, at: usize, byte: u8) {
        assert!(at < MAPPED_BYTES);
        // SAFETY: as above.
        unsafe { self.start.add(at).write_volatile(byte) }
    }

    fn sync(&self) {
        // SAFETY: the whole mapping.
        let done = unsafe { libc::msync(self.start.cast(), MAPPED_BYTES, libc::MS_SYNC) };
        assert_eq!(done, 0, "msync: {}", std::io::Error::last_os_error());
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: nothing points into it any more.
        unsafe { libc::munmap(self.start.cast(), MAPPED_BYTES) };
    }
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// What one mount stores in a mapping the other finds at its next open once it was synced, and once
/// the file was closed. It finds that in mappings that it had before, too.
fn shared_mappings_meet(options: &str) {
    let (rig, one, other) = two_mounts(options);
    fs::write(one.join("mapped"), vec![b'.'; MAPPED_BYTES]).unwrap();
    let (here, there) = (open(&one.join("mapped")), open(&other.join("mapped")));
    let (ours, theirs) = (Mapping::new(&here), Mapping::new(&there));
    assert_eq!((ours.get(100), theirs.get(100), theirs.get(5000)), (b'.', b'.', b'.'));
    ours.set(100, b's');
    ours.sync();
    let below = File::open(rig.path("export/mapped")).unwrap();
    let mut byte = [0];
    below.read_exact_at(&mut byte, 100).unwrap();
    assert_eq!(byte, *b"s", "msync has brought it to the server");
    let again = open(&other.join("mapped"));
    assert_eq!(Mapping::new(&again).get(100), b's', "after msync and open");
    assert_eq!(theirs.get(100), b's', "the old mapping after an open");
    ours.set(5000, b'c');
    drop((ours, here)); // munmap, close
    let again = open(&other.join("mapped"));
    assert_eq!(Mapping::new(&again).get(5000), b'c', "after close and open");
    // The other way round; and no store of the one is undone by a page of the other.
    theirs.set(101, b't');
    theirs.sync();
    drop((theirs, there, again));
    let mut all = [0; 102];
    open(&one.join("mapped")).read_exact_at(&mut all, 0).unwrap();
    assert_eq!(&all[100..], b"st");
}

// proves: P10
#[test]
fn shared_mappings_of_two_mounts_meet_at_msync_close_and_open() {
    if !common::skipped() {
        shared_mappings_meet("consistency=strict");
        shared_mappings_meet("consistency=close-to-open");
    }
}

/// The change was seen at the next open, or when attributes ran out: for pages of a mapping never.
// proves: P8
#[test]
fn what_others_change_is_soon_seen_in_files_that_are_open_and_cached() {
    if common::skipped() {
        return;
    }
    let (_rig, one, other) = two_mounts("consistency=close-to-open,attr_timeout=3600");
    fs::write(one.join("file"), vec![b'.'; MAPPED_BYTES]).unwrap();
    let here = open(&one.join("file"));
    let mapping = Mapping::new(&here);
    assert_eq!((mapping.get(100), here.metadata().unwrap().len()), (b'.', MAPPED_BYTES as u64));
    let there = open(&other.join("file"));
    there.write_all_at(b"data", 100).unwrap();
    common::wait_for("data in a mapping", || mapping.get(100) == b'd');
    there.write_all_at(b"more", MAPPED_BYTES as u64).unwrap();
    let size = || here.metadata().unwrap().len();
    common::wait_for("a size", || size() == MAPPED_BYTES as u64 + 4);
    let mut end = [0; 4];
    here.read_exact_at(&mut end, MAPPED_BYTES as u64).unwrap();
    assert_eq!(end, *b"more");
    fs::set_permissions(other.join("file"), fs::Permissions::from_mode(0o640)).unwrap();
    let mode = || here.metadata().unwrap().permissions().mode() & 0o777;
    common::wait_for("a mode", || mode() == 0o640);
}

/// Pages were only dropped when the server had notified the mount of a change, up to 10 ms and more
/// after it. Of two programs that counted under a lock one overwrote the other's number.
// proves: P55
#[test]
fn who_is_granted_a_lock_reads_what_was_written_under_the_one_before() {
    if common::skipped() {
        return;
    }
    let (_rig, one, other) = two_mounts("consistency=close-to-open,attr_timeout=3600");
    let take = |file: &File, by_flock: bool, kind: i32| match (by_flock, kind) {
        (true, libc::F_UNLCK) => file.unlock(),
        (true, _) => file.lock(),
        (false, _) => lock(file, kind, libc::F_OFD_SETLKW),
    };
    for by_flock in [true, false] {
        fs::write(one.join("count"), [b'.'; MAPPED_BYTES]).unwrap();
        let count_up = |mount: &Path| {
            let file = open(&mount.join("count"));
            let mapping = Mapping::new(&file);
            for _ in 0..COUNTED_EACH {
                take(&file, by_flock, libc::F_WRLCK).unwrap();
                let mut text = [0; 4];
                file.read_exact_at(&mut text, 4).unwrap();
                assert_eq!(mapping.get(7), text[3], "mapped and read");
                let count = u32::from_ne_bytes(text) + 1;
                file.write_all_at(&count.to_ne_bytes(), 4).unwrap();
                take(&file, by_flock, libc::F_UNLCK).unwrap();
            }
        };
        open(&one.join("count")).write_all_at(&[0; 4], 4).unwrap();
        std::thread::scope(|scope| {
            for mount in [&one, &other, &one, &other] {
                scope.spawn(|| count_up(mount));
            }
        });
        let all = fs::read(one.join("count")).unwrap();
        assert_eq!(all[4..8], (4 * COUNTED_EACH).to_ne_bytes(), "by flock: {by_flock}");
    }
}

const COUNTED_EACH: u32 = 100;

/// The second change left the file with the times and the size of the first.
// proves: P7
#[test]
fn what_one_mount_writes_another_reads_however_coarse_times_are() {
    if common::skipped() {
        return;
    }
    let (mut rig, seconds) = (Rig::new(), Ext4::of_seconds(16 << 20).unwrap());
    rig.serve(&["--export", &format!("seconds={},squash=none", seconds.path().display())]);
    let [one, other] = ["one", "other"].map(|name| {
        rig.mount_export("seconds", name, "consistency=close-to-open,attr_timeout=3600")
    });
    fs::write(one.join("file"), "0000").unwrap();
    for number in 1000..1100 {
        let text = number.to_string();
        let writer = open(&one.join("file"));
        writer.write_all_at(text.as_bytes(), 0).unwrap();
        drop(writer);
        assert_eq!(fs::read_to_string(other.join("file")).unwrap(), text);
        std::thread::sleep(Duration::from_millis(30));
    }
}

/// Entries that are read ahead of a program are passed to the kernel a while later.
// proves: P7
#[test]
fn a_listing_under_way_brings_back_no_former_size() {
    const NAMES: usize = 2400;
    if common::skipped() {
        return;
    }
    common::on_transports(|transport| {
        let options = format!("consistency=close-to-open,attr_timeout=60,{transport}");
        let (rig, at, _other) = two_mounts(&options);
        let [here, dir] = [rig.path("export/dir"), at.join("dir")];
        fs::create_dir(&here).unwrap();
        let write = |bytes: usize| {
            (0..NAMES).for_each(|name| {
                fs::write(here.join(name.to_string()), vec![b'x'; bytes]).unwrap();
            });
        };
        let read = || {
            let whole = |name: &usize| fs::read(dir.join(name.to_string())).unwrap().len() == 1000;
            (0..NAMES).filter(whole).count()
        };
        write(10);
        let mut listing = fs::read_dir(&dir).unwrap();
        listing.next().unwrap().unwrap();
        write(1000);
        assert_eq!(read(), NAMES);
        assert_eq!(listing.count(), NAMES - 1);
        assert_eq!(read(), NAMES);
    });
}

/// A copy is limited by the size that the client's kernel last heard of, in the kernel's own code,
/// before any file system is asked. Asking for the size, as cp(1) does, is enough.
// proves: P24
#[test]
fn a_copy_is_whole_once_the_size_was_asked_for() {
    if common::skipped() {
        return;
    }
    let (_rig, one, other) = two_mounts("consistency=strict");
    fs::write(one.join("from"), "short").unwrap();
    let from = File::open(other.join("from")).unwrap();
    let to = File::create(other.join("to")).unwrap();
    let longer = vec![7; 100_000];
    fs::write(one.join("from"), &longer).unwrap();
    assert_eq!(from.metadata().unwrap().len(), 100_000);
    let (mut at, mut to_at) = (0, 0);
    // SAFETY: both offsets outlive the call.
    let copied = unsafe {
        let (from, to) = (from.as_raw_fd(), to.as_raw_fd());
        libc::copy_file_range(from, &mut at, to, &mut to_at, longer.len(), 0)
    };
    assert_eq!(copied, 100_000, "{}", std::io::Error::last_os_error());
    assert!(fs::read(one.join("to")).unwrap() == longer);
}
