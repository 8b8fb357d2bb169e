//! Odd arguments: a mount answers as a directory of the file system below does beside it, but for what
//! docs/SEMANTICS.md says.

use std::ffi::CString;
use std::fmt::Debug;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, symlink};
use std::path::Path;

use crate::common;
use crate::common::Rig;

const MODES: [&str; 3] =
    ["consistency=strict,transport=classic", "consistency=strict", "consistency=close-to-open"];

/// What was asked and answered, one after the other.
#[derive(Default)]
struct AnswerLog(Vec<String>);

impl AnswerLog {
    fn note<T: Debug>(&mut self, what: impl Debug, answer: io::Result<T>) {
        let answer = match answer {
            Ok(answer) => format!("{answer:?}"),
            Err(error) => format!("{:?}", dray_core::Errno::from(error)),
        };
        self.0.push(format!("{what:?}: {answer}"));
    }
}

/// Does the same in a directory of the file system below and in a mount, and compares.
fn alike(ask: impl Fn(&Path, &mut AnswerLog)) {
    if common::skipped() {
        return;
    }
    for options in MODES {
        let (rig, at) = Rig::mounted(options);
        let bare = rig.path("bare");
        fs::create_dir(&bare).unwrap();
        let (mut expected, mut log) = (AnswerLog::default(), AnswerLog::default());
        ask(&bare, &mut expected);
        ask(&at, &mut log);
        let others: Vec<_> = expected.0.iter().zip(&log.0).filter(|(a, b)| a != b).collect();
        assert!(others.is_empty(), "{options}: expected and log: {others:#?}");
        assert_eq!(expected.0.len(), log.0.len());
    }
}

fn checked(result: impl Into<i64>) -> io::Result<i64> {
    let result = result.into();
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn c_path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

fn open(path: &Path, flags: i32) -> io::Result<File> {
    let access = flags & libc::O_ACCMODE;
    let mut how = OpenOptions::new();
    how.read(access != libc::O_WRONLY).write(access != libc::O_RDONLY);
    how.custom_flags(flags & !libc::O_ACCMODE).mode(0o644).open(path)
}

fn size(file: &File) -> io::Result<u64> {
    Ok(file.metadata()?.len())
}

/// Ends of what a file may be, of what a number may be, and of pages.
const PLACES: [i64; 9] =
    [-1, i64::MIN, i64::MAX, i64::MAX - 1, i64::MAX - 4095, i64::MAX - 8191, 0, 10, 4096];

fn pwrite(fd: RawFd, data: &[u8], at: i64) -> io::Result<i64> {
    // SAFETY: the data outlive the call.
    checked(unsafe { libc::pwrite(fd, data.as_ptr().cast(), data.len(), at) } as i64)
}

fn pread(fd: RawFd, count: usize, at: i64) -> io::Result<Vec<u8>> {
    let mut into = vec![0; count];
    // SAFETY: there is room for what is read.
    let read = checked(unsafe { libc::pread(fd, into.as_mut_ptr().cast(), count, at) } as i64)?;
    into.truncate(read as usize);
    Ok(into)
}

// proves: P3
#[test]
fn reads_writes_and_sizes_at_odd_places() {
    alike(|dir, log| {
        fs::write(dir.join("f"), "0123456789").unwrap();
        let file = open(&dir.join("f"), libc::O_RDWR).unwrap();
        let fd = file.as_raw_fd();
        for at in PLACES {
            log.note(("read", at), pread(fd, 4, at));
            log.note(("read nothing", at), pread(fd, 0, at));
            log.note(("write nothing", at), pwrite(fd, b"", at));
            log.note(("write", at), pwrite(fd, b"text", at));
            log.note("size", size(&file));
            file.set_len(10).unwrap();
            // SAFETY: numbers only.
            log.note(("cut", at), checked(unsafe { libc::ftruncate(fd, at) }));
            log.note("size", size(&file));
            file.set_len(10).unwrap();
            for whence in [libc::SEEK_DATA, libc::SEEK_HOLE] {
                // SAFETY: numbers only.
                let found = checked(unsafe { libc::lseek(fd, at, whence) });
                log.note(("seek", whence, at), found);
            }
        }
        for flags in [libc::O_RDONLY, libc::O_WRONLY, libc::O_PATH, libc::O_RDONLY | libc::O_SYNC] {
            let other = open(&dir.join("f"), flags).unwrap();
            let fd = other.as_raw_fd();
            log.note(("read", flags), pread(fd, 4, 0));
            log.note(("write", flags), pwrite(fd, b"text", 0));
            log.note(("cut", flags), other.set_len(10));
            log.note(("sync", flags), other.sync_all());
            log.note(("size", flags), size(&other));
            log.note(("times", flags), other.set_modified(std::time::UNIX_EPOCH));
            log.note(("lock", flags), other.try_lock().map_err(io::Error::from));
        }
        let dir_file = File::open(dir).unwrap();
        let fd = dir_file.as_raw_fd();
        log.note("read a directory", pread(fd, 4, 0));
        log.note("write a directory", pwrite(fd, b"x", 0));
        log.note("cut a directory", dir_file.set_len(0));
        log.note("sync a directory", dir_file.sync_all());
    });
}

// proves: P3
#[test]
fn space_and_copies_at_odd_places() {
    const FLAGS: [i32; 5] = [
        0,
        libc::FALLOC_FL_KEEP_SIZE,
        libc::FALLOC_FL_PUNCH_HOLE,
        libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
        0x1000,
    ];
    alike(|dir, log| {
        fs::write(dir.join("f"), vec![7; 10_000]).unwrap();
        fs::write(dir.join("g"), "to").unwrap();
        let file = open(&dir.join("f"), libc::O_RDWR).unwrap();
        let fd = file.as_raw_fd();
        for (flags, at, len) in FLAGS.into_iter().flat_map(|flags| {
            let lens = [0, 1, 5000, -1, i64::MAX];
            PLACES.into_iter().flat_map(move |at| lens.map(|len| (flags, at, len)))
        }) {
            let huge = at.checked_add(len).is_some_and(|end| end > 1 << 30);
            if huge && at >= 0 && len > 0 && flags & libc::FALLOC_FL_PUNCH_HOLE == 0 {
                continue; // how much there may be differs from file system to file system
            }
            // SAFETY: numbers only.
            let done = checked(unsafe { libc::fallocate(fd, flags, at, len) });
            log.note(("allocate", flags, at, len), done);
            log.note("size", size(&file));
            log.note("content", pread(fd, 20, 0));
            file.set_len(10_000).unwrap();
        }
        file.write_all_at(&[7; 10_000], 0).unwrap();
        let other = open(&dir.join("g"), libc::O_RDWR).unwrap();
        for (from, to, count) in [
            (0, 0, 0),
            (0, 0, 100),
            (9_990, 0, 100),
            (10_000, 0, 100),
            (20_000, 0, 100),
            (0, 5_000, usize::MAX),
            (0, i64::MAX - 5, 10),
            (i64::MAX, 0, 10),
            (-1, 0, 10),
            (0, -1, 10),
        ] {
            log.note(("copy", from, to, count), copy((&file, from), (&other, to), count));
            log.note("size", size(&other));
            other.set_len(2).unwrap();
        }
        log.note("copy within", copy((&file, 0), (&file, 5_000), 100));
        log.note("copy onto itself", copy((&file, 0), (&file, 50), 100));
        log.note("copy past the end", copy((&file, 9_990), (&file, 9_999), 100));
        let read_only = open(&dir.join("g"), libc::O_RDONLY).unwrap();
        log.note("copy to what is read only", copy((&file, 0), (&read_only, 0), 10));
        let appending = OpenOptions::new().append(true).open(dir.join("g")).unwrap();
        log.note("copy to what is appended to", copy((&file, 0), (&appending, 0), 10));
    });
}

fn copy(from: (&File, i64), to: (&File, i64), count: usize) -> io::Result<i64> {
    let (mut at, mut to_at) = (from.1, to.1);
    let (from, to) = (from.0.as_raw_fd(), to.0.as_raw_fd());
    // SAFETY: both offsets outlive the call.
    checked(unsafe { libc::copy_file_range(from, &mut at, to, &mut to_at, count, 0) } as i64)
}

// proves: P3
#[test]
fn times_of_all_ages() {
    const SECONDS: [i64; 9] =
        [0, -1, 1 << 31, -(1 << 31) - 1, 1 << 34, 1 << 40, -(1 << 40), i64::MAX, i64::MIN];
    alike(|dir, log| {
        let path = dir.join("f");
        fs::write(&path, "").unwrap();
        let set = |times: [(i64, i64); 2]| {
            let times = times.map(|(tv_sec, tv_nsec)| libc::timespec { tv_sec, tv_nsec });
            let path = c_path(&path);
            // SAFETY: path and times outlive the call.
            checked(unsafe { libc::utimensat(libc::AT_FDCWD, path.as_ptr(), times.as_ptr(), 0) })
        };
        let seen = || fs::metadata(&path).map(|m| (m.atime(), m.mtime(), m.mtime_nsec()));
        for second in SECONDS {
            log.note(("times", second), set([(second, 5), (second, 999_999_999)]));
            log.note("seen", seen());
            log.note("one alone", set([(0, libc::UTIME_OMIT), (second, 0)]));
            log.note("seen", seen());
        }
        for nsec in [-1, 1_000_000_000, libc::UTIME_OMIT] {
            log.note(("parts", nsec), set([(1, nsec), (2, nsec)]));
            log.note("seen", seen());
        }
        log.note("now and as it is", set([(1, libc::UTIME_NOW), (2, libc::UTIME_OMIT)]));
        log.note("seen", fs::metadata(&path).map(|meta| meta.mtime()));
    });
}

fn rename2(from: &Path, to: &Path, flags: u32) -> io::Result<i64> {
    let (from, to, at) = (c_path(from), c_path(to), libc::AT_FDCWD);
    // SAFETY: both paths outlive the call.
    checked(unsafe { libc::renameat2(at, from.as_ptr(), at, to.as_ptr(), flags) })
}

// proves: P3
#[test]
fn names_that_do_not_fit() {
    const EXCHANGE: u32 = libc::RENAME_EXCHANGE;
    alike(|dir, log| {
        let at = |name: &str| dir.join(name);
        fs::create_dir_all(at("d/in")).unwrap();
        fs::create_dir(at("empty")).unwrap();
        ["f", "g", "d/x"].iter().for_each(|name| fs::write(at(name), name).unwrap());
        symlink("f", at("link")).unwrap();
        symlink("nowhere", at("dangling")).unwrap();
        symlink("circle", at("circle")).unwrap();
        let all = ["f", "d", "empty", "link", "dangling", "circle", "none", "d/in", "d/none/x"];
        for name in all {
            for flags in [libc::O_NOFOLLOW, libc::O_DIRECTORY, libc::O_PATH, libc::O_EXCL] {
                log.note((name, flags), open(&at(name), flags).map(drop));
            }
            let create = libc::O_CREAT | libc::O_RDWR;
            log.note(("anew", name), open(&at(name), create | libc::O_EXCL).map(drop));
            let _ = fs::remove_file(at("none"));
            log.note(("slash", name), fs::metadata(at(&format!("{name}/"))).map(drop));
            log.note(("dot", name), fs::remove_dir(at(&format!("{name}/."))));
            log.note(("link to", name), fs::hard_link(at("f"), at(name)));
            let _ = fs::remove_file(at("none"));
            log.note(("target", name), fs::read_link(at(name)));
            log.note(("cut", name), {
                let path = c_path(&at(name));
                // SAFETY: the path outlives the call.
                checked(unsafe { libc::truncate(path.as_ptr(), -1) })
            });
        }
        for (from, to) in [
            ("f", "d"),
            ("d", "d/in"),
            ("d/in", "d"),
            ("f", "none"),
            ("none", "f"),
            ("d", "d"),
            ("f", "g"),
            ("link", "empty"),
            ("d", "empty"),
        ] {
            log.note(("exchange", from, to), rename2(&at(from), &at(to), EXCHANGE));
            log.note(("and back", from, to), rename2(&at(from), &at(to), EXCHANGE));
            log.note(
                ("keep", from, to),
                rename2(&at(from), &at(to), libc::RENAME_NOREPLACE).map(|_| {
                    fs::rename(at(to), at(from)).unwrap();
                }),
            );
            log.note(("both", from, to), rename2(&at(from), &at(to), 3));
            log.note(("no flag", from, to), rename2(&at(from), &at(to), 64));
        }
        for (from, to) in [("f", "d"), ("d", "f"), ("d", "d/in/y"), ("empty", "d"), ("d/.", "z")] {
            log.note(("rename", from, to), fs::rename(at(from), at(to)));
        }
        for (len, made) in [(255, true), (256, false)] {
            let name = "x".repeat(len);
            log.note(("name", len), fs::write(at(&name), ""));
            log.note(("name", len), fs::rename(at("g"), at(&name)));
            log.note(("name", len), fs::remove_file(at(&name)));
            log.note(("name", len), fs::create_dir(at(&name)));
            assert_eq!(at(&name).exists(), made);
        }
        for len in [0, 4095, 4096] {
            log.note(("target", len), symlink("y".repeat(len), at("long")));
            let _ = fs::remove_file(at("long"));
        }
    });
}

// proves: P3
#[test]
fn attributes_of_all_names_and_sizes() {
    alike(|dir, log| {
        let path = dir.join("f");
        fs::write(&path, "").unwrap();
        let path = c_path(&path);
        let set = |name: &str, len: usize, flags: i32| {
            let (name, value) = (CString::new(name).unwrap(), vec![b'v'; len]);
            // SAFETY: the strings and the value outlive the call.
            let set = unsafe {
                let value = value.as_ptr().cast();
                libc::setxattr(path.as_ptr(), name.as_ptr(), value, len, flags)
            };
            checked(set)
        };
        let get = |name: &str, room: usize| {
            let (name, mut value) = (CString::new(name).unwrap(), vec![0u8; room]);
            // SAFETY: there is room for what is read.
            let got = unsafe {
                let value = value.as_mut_ptr().cast();
                libc::getxattr(path.as_ptr(), name.as_ptr(), value, room)
            };
            checked(got as i64)
        };
        let long = format!("user.{}", "n".repeat(251));
        for name in ["user.a", "user.", "user", "no.a", "trusted.a", "", &long, &long[..255]] {
            for (len, flags) in [(0, 0), (1, 0), (1, libc::XATTR_CREATE), (2, libc::XATTR_REPLACE)]
            {
                log.note((name, len, flags), set(name, len, flags));
            }
            for room in [0, 1, 2, 100] {
                log.note((name, room), get(name, room));
            }
            let of = CString::new(name).unwrap();
            for _ in 0..2 {
                // SAFETY: both strings outlive the call.
                let removed = unsafe { libc::removexattr(path.as_ptr(), of.as_ptr()) };
                log.note(("remove", name), checked(removed));
            }
        }
        log.note("too large", set("user.a", 65_537, 0));
        log.note("no such flag", set("user.a", 1, 8));
    });
}

// proves: P3
#[test]
fn locks_of_odd_ranges() {
    const ENDS: [(i64, i64); 12] = [
        (0, 0),
        (-1, 5),
        (10, -5),
        (5, -10),
        (i64::MAX, 1),
        (i64::MAX, 2),
        (i64::MAX, 0),
        (i64::MAX - 1, i64::MAX),
        (0, i64::MAX),
        (0, -1),
        (90, 0),
        (7, 1),
    ];
    alike(|dir, log| {
        fs::write(dir.join("f"), vec![0; 100]).unwrap();
        let [file, other] = [0, 1].map(|_| open(&dir.join("f"), libc::O_RDWR).unwrap());
        let lock = |file: &File, command, kind: i32, whence: i32, (start, len): (i64, i64)| {
            let mut lock = libc::flock {
                l_type: kind as i16,
                l_whence: whence as i16,
                l_start: start,
                l_len: len,
                l_pid: 0,
            };
            // SAFETY: the lock outlives the call.
            checked(unsafe { libc::fcntl(file.as_raw_fd(), command, &mut lock) })?;
            Ok((lock.l_type, lock.l_whence, lock.l_start, lock.l_len))
        };
        for whence in [libc::SEEK_SET, libc::SEEK_END, 9] {
            for ends in ENDS {
                let set = |kind| lock(&file, libc::F_OFD_SETLK, kind, whence, ends).map(drop);
                log.note(("lock", whence, ends), set(libc::F_WRLCK));
                for seen in [(0, 0), (0, 10), (50, 10), (95, 1), (i64::MAX, 1)] {
                    let ask = |kind| lock(&other, libc::F_OFD_GETLK, kind, 0, seen);
                    log.note(("first in the way", seen), ask(libc::F_RDLCK));
                    let try_it = lock(&other, libc::F_OFD_SETLK, libc::F_RDLCK, 0, seen);
                    log.note(("try", seen), try_it.map(drop));
                    lock(&other, libc::F_OFD_SETLK, libc::F_UNLCK, 0, (0, 0)).unwrap();
                }
                lock(&file, libc::F_OFD_SETLK, libc::F_UNLCK, 0, (3, 2)).unwrap();
                let ask = lock(&other, libc::F_OFD_GETLK, libc::F_WRLCK, 0, (4, 0));
                log.note("behind a gap", ask);
                lock(&file, libc::F_OFD_SETLK, libc::F_UNLCK, 0, (0, 0)).unwrap();
            }
        }
    });
}
