//! Real system calls through a real mount, on both transports.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::{TestMount, mounted};
use dray_fuse::{Consistency, Transport};

fn on_both(consistency: Consistency, test: impl Fn(&TestMount)) {
    for transport in [Transport::Classic, Transport::Uring] {
        if let Some(mount) = mounted(transport, consistency) {
            test(&mount);
        }
    }
}

fn errno<T>(result: io::Result<T>) -> i32 {
    result.err().and_then(|error| error.raw_os_error()).unwrap_or(0)
}

fn c_path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

fn checked(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn listed(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn files_are_made_written_read_and_removed() {
    on_both(Consistency::Strict, |mount| {
        let data: Vec<u8> = (0..3_000_001u32).map(|i| ((i * 7) >> 3) as u8).collect();
        fs::write(mount.path("file"), &data).unwrap();
        assert!(fs::read(mount.path("file")).unwrap() == data);
        let file = OpenOptions::new().read(true).write(true).open(mount.path("file")).unwrap();
        file.write_all_at(b"middle", 1_500_000).unwrap();
        let mut part = [0; 8];
        file.read_exact_at(&mut part, 1_499_999).unwrap();
        assert_eq!(&part[1..7], b"middle");
        assert_eq!(file.read_at(&mut part, 3_000_001).unwrap(), 0);
        file.set_len(10).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 10);
        file.sync_all().unwrap();
        fs::remove_file(mount.path("file")).unwrap();
        // Deleted, and still there for who has it open.
        assert_eq!(file.read_at(&mut part, 0).unwrap(), 8);
        assert_eq!(file.metadata().unwrap().nlink(), 0);
        assert_eq!(errno(File::open(mount.path("file"))), libc::ENOENT);
    });
}

#[test]
fn names_behave() {
    on_both(Consistency::Strict, |mount| {
        fs::create_dir(mount.path("dir")).unwrap();
        fs::write(mount.path("dir/a"), b"a").unwrap();
        fs::rename(mount.path("dir/a"), mount.path("b")).unwrap();
        fs::hard_link(mount.path("b"), mount.path("dir/c")).unwrap();
        assert_eq!(fs::metadata(mount.path("b")).unwrap().nlink(), 2);
        symlink("../b", mount.path("dir/link")).unwrap();
        assert_eq!(fs::read(mount.path("dir/link")).unwrap(), b"a");
        assert_eq!(fs::read_link(mount.path("dir/link")).unwrap(), Path::new("../b"));
        assert_eq!(listed(&mount.path("dir")), ["c", "link"]);
        assert_eq!(errno(fs::remove_dir(mount.path("dir"))), libc::ENOTEMPTY);
        let long = "x".repeat(255);
        fs::write(mount.path(&long), b"").unwrap();
        assert_eq!(errno(fs::write(mount.path(&"x".repeat(256)), b"")), libc::ENAMETOOLONG);
        let rename2 = |from: &str, to: &str, flags| {
            let (from, to) = (c_path(&mount.path(from)), c_path(&mount.path(to)));
            let at = libc::AT_FDCWD;
            // SAFETY: two C strings that outlive the call.
            checked(unsafe { libc::renameat2(at, from.as_ptr(), at, to.as_ptr(), flags).into() })
        };
        assert_eq!(errno(rename2("b", &long, libc::RENAME_NOREPLACE)), libc::EEXIST);
        rename2("b", &long, libc::RENAME_EXCHANGE).unwrap();
        assert_eq!(fs::read(mount.path(&long)).unwrap(), b"a");
        let fifo = c_path(&mount.path("fifo"));
        // SAFETY: a C string that outlives the call.
        checked(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600).into() }).unwrap();
        assert_eq!(fs::metadata(mount.path("fifo")).unwrap().mode(), libc::S_IFIFO | 0o600);
    });
}

// proves: P51
#[test]
fn attributes_and_extended_attributes_behave() {
    on_both(Consistency::Strict, |mount| {
        let path = mount.path("file");
        fs::write(&path, b"x").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::chown(&path, Some(12), Some(34)).unwrap();
        let file = File::open(&path).unwrap();
        let time = std::time::UNIX_EPOCH + std::time::Duration::new(1_000_000_000, 5);
        file.set_modified(time).unwrap();
        let meta = fs::metadata(&path).unwrap();
        assert_eq!((meta.mode() & 0o7777, meta.uid(), meta.gid()), (0o640, 12, 34));
        assert_eq!((meta.mtime(), meta.mtime_nsec()), (1_000_000_000, 5));
        assert!(meta.created().is_ok(), "statx brings the birth time");
        let (path, name) = (c_path(&path), c"user.colour");
        // SAFETY: C strings and buffers that outlive the calls.
        unsafe {
            let get = |room: &mut [u8]| {
                let into = room.as_mut_ptr().cast();
                checked(libc::getxattr(path.as_ptr(), name.as_ptr(), into, room.len()) as _)
            };
            assert_eq!(errno(get(&mut [0; 9])), libc::ENODATA);
            let set = |flags| {
                let value = b"red".as_ptr().cast();
                checked(libc::setxattr(path.as_ptr(), name.as_ptr(), value, 3, flags).into())
            };
            let both = libc::XATTR_CREATE | libc::XATTR_REPLACE;
            assert_eq!(errno(set(both)), libc::ENODATA);
            set(0).unwrap();
            assert_eq!(errno(set(both)), libc::EEXIST, "it is there, which one of both forbids");
            assert_eq!(get(&mut []).unwrap(), 3);
            assert_eq!(errno(get(&mut [0; 2])), libc::ERANGE);
            let mut value = [0; 9];
            assert_eq!(get(&mut value).unwrap(), 3);
            assert_eq!(&value[..3], b"red");
            let mut list = [0u8; 64];
            let listed = libc::listxattr(path.as_ptr(), list.as_mut_ptr().cast(), list.len());
            assert_eq!(&list[..listed as usize], b"user.colour\0");
            checked(libc::removexattr(path.as_ptr(), name.as_ptr()).into()).unwrap();
            assert_eq!(errno(get(&mut [0; 9])), libc::ENODATA);
            let mut flags: libc::c_long = 0;
            let got = libc::ioctl(file.as_raw_fd(), 0x8008_6601, &mut flags);
            checked(got.into()).unwrap();
            assert_eq!(errno(checked(libc::ioctl(file.as_raw_fd(), 0x1234).into())), libc::ENOTTY);
        }
    });
}

// proves: P45
#[test]
fn a_new_file_has_the_mode_that_the_umask_leaves() {
    on_both(Consistency::Strict, |mount| {
        let path = mount.path("file");
        let made = OpenOptions::new().write(true).create_new(true).mode(0o6777).open(&path);
        drop(made.unwrap());
        // umask(2) tells it only by changing it, for all the tests of this process.
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let umask = status.lines().find_map(|line| line.strip_prefix("Umask:")).unwrap();
        let umask = u32::from_str_radix(umask.trim(), 8).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o6777 & !umask);
    });
}

// proves: P19
#[test]
fn appends_are_placed_by_the_file_system() {
    on_both(Consistency::Strict, |mount| {
        let open = || OpenOptions::new().append(true).create(true).open(mount.path("log")).unwrap();
        let (mut first, mut second) = (open(), open());
        for _ in 0..10 {
            first.write_all(b"one ").unwrap();
            second.write_all(b"two ").unwrap();
        }
        assert_eq!(fs::read(mount.path("log")).unwrap(), b"one two ".repeat(10));
        // Where the kernel of this client believes the end to be does not count.
        let longer = [b'x'; 1000];
        mount.behind_the_kernel_s_back("log", &longer);
        first.write_all(b"three").unwrap();
        assert_eq!(fs::read(mount.path("log")).unwrap(), [&longer[..], b"three"].concat());
    });
}

/// With or without pages in the kernel of the client.
// proves: P101
#[test]
fn fsync_is_asked_of_the_file_system() {
    for consistency in [Consistency::Strict, Consistency::CloseToOpen] {
        on_both(consistency, |mount| {
            let mut file = File::create_new(mount.path("file")).unwrap();
            file.write_all(b"x").unwrap();
            let syncs = || mount.locks.syncs.lock().unwrap().clone();
            assert_eq!(syncs(), [false; 0]);
            file.sync_data().unwrap();
            file.sync_all().unwrap();
            File::open(&mount.at).unwrap().sync_all().unwrap(); // a directory
            assert_eq!(syncs(), [true, false, false]);
        });
    }
}

/// The flags of the open file say so, or those of the call.
// proves: P101
#[test]
fn what_is_to_be_on_media_is_written_so() {
    for consistency in [Consistency::Strict, Consistency::CloseToOpen] {
        on_both(consistency, |mount| {
            let path = mount.path("file");
            for (flags, synced) in
                [(0, false), (libc::O_DSYNC, true), (libc::O_SYNC, true), (libc::O_APPEND, false)]
            {
                let mut how = OpenOptions::new();
                let how = how.write(true).create(true).custom_flags(flags);
                how.open(&path).unwrap().write_all(b"x").unwrap();
                let writes = std::mem::take(&mut *mount.locks.synced_writes.lock().unwrap());
                assert_eq!(writes, [synced], "{flags:#x}");
            }
            let file = OpenOptions::new().write(true).open(&path).unwrap();
            for (flags, synced) in [(0, false), (libc::RWF_DSYNC, true), (libc::RWF_SYNC, true)] {
                let part = libc::iovec { iov_base: b"y".as_ptr().cast_mut().cast(), iov_len: 1 };
                // SAFETY: the kernel reads the one byte.
                let wrote = unsafe { libc::pwritev2(file.as_raw_fd(), &part, 1, 0, flags) };
                assert_eq!(checked(wrote as _).unwrap(), 1);
                let writes = std::mem::take(&mut *mount.locks.synced_writes.lock().unwrap());
                assert_eq!(writes, [synced], "{flags:#x} of the call");
            }
        });
    }
}

#[test]
fn holes_allocation_copies_and_unnamed_files_work() {
    on_both(Consistency::Strict, |mount| {
        let mut file = File::create_new(mount.path("file")).unwrap();
        file.write_all_at(b"end", 1 << 20).unwrap();
        assert_eq!(file.seek(SeekFrom::End(0)).unwrap(), (1 << 20) + 3);
        // SAFETY: no memory is passed.
        unsafe {
            let fd = file.as_raw_fd();
            let data = checked(libc::lseek(fd, 0, libc::SEEK_DATA)).unwrap();
            assert_eq!(data, 1 << 20);
            assert_eq!(errno(checked(libc::lseek(fd, 2 << 20, libc::SEEK_DATA))), libc::ENXIO);
            checked(libc::fallocate(fd, 0, 0, 2 << 20).into()).unwrap();
        }
        assert_eq!(file.metadata().unwrap().len(), 2 << 20);
        assert_eq!(fs::copy(mount.path("file"), mount.path("copy")).unwrap(), 2 << 20);
        let (one, two) = (fs::read(mount.path("file")), fs::read(mount.path("copy")));
        assert!(one.unwrap() == two.unwrap());
        let flags = libc::O_TMPFILE;
        let unnamed = OpenOptions::new().read(true).write(true).custom_flags(flags).open(&mount.at);
        let mut unnamed = unnamed.unwrap();
        unnamed.write_all(b"soon named").unwrap();
        let from = CString::new(format!("/proc/self/fd/{}", unnamed.as_raw_fd())).unwrap();
        let (at, to) = (libc::AT_FDCWD, c_path(&mount.path("named")));
        // SAFETY: two C strings that outlive the call.
        let linked =
            unsafe { libc::linkat(at, from.as_ptr(), at, to.as_ptr(), libc::AT_SYMLINK_FOLLOW) };
        checked(linked.into()).unwrap();
        assert_eq!(fs::read(mount.path("named")).unwrap(), b"soon named");
    });
}

// proves: P1
#[test]
fn strict_sees_at_once_what_another_client_wrote() {
    on_both(Consistency::Strict, |mount| {
        fs::write(mount.path("file"), b"old").unwrap();
        let mut file = File::open(mount.path("file")).unwrap();
        mount.behind_the_kernel_s_back("file", b"newer");
        assert_eq!(fs::metadata(mount.path("file")).unwrap().len(), 5);
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "newer");
        // The kernel does not believe the answers and data that it has just got, either.
        for (round, text) in [&b"third"[..], b"fourth", b"fifths"].into_iter().enumerate() {
            mount.behind_the_kernel_s_back("file", text);
            assert_eq!(fs::metadata(mount.path("file")).unwrap().len(), text.len() as u64);
            let mut seen = vec![0; text.len()];
            file.read_exact_at(&mut seen, 0).unwrap();
            assert_eq!(seen, text, "round {round}");
        }
    });
}

/// The kernel does so, once, if the file that was looked up has gone (ESTALE).
// proves: P33
#[test]
fn a_file_that_is_replaced_while_it_is_being_opened_is_looked_up_again() {
    for consistency in [Consistency::Strict, Consistency::CloseToOpen] {
        on_both(consistency, |mount| {
            let path = mount.path("file");
            fs::write(&path, b"data").unwrap();
            let replaced = |times| mount.locks.replaced.store(times, Ordering::SeqCst);
            replaced(1);
            let lookups = mount.count("lookup");
            File::open(&path).unwrap();
            assert!(mount.count("lookup") > lookups);
            replaced(2);
            assert_eq!(errno(File::open(&path)), libc::ESTALE, "twice within one call");
            File::open(&path).unwrap();
        });
    }
}

/// A name that others move away and give again all the time. A call that was answered with ESTALE
/// looks it up in vain, looks again, and finds it. It got ESTALE a second time, which no program is
/// made for.
// proves: P6
#[test]
fn a_caller_that_retries_after_estale_and_finds_the_name_opens_it() {
    on_both(Consistency::CloseToOpen, |mount| {
        let path = mount.path("log");
        fs::write(&path, b"data").unwrap();
        for flags in [0, libc::O_CREAT, libc::O_NOFOLLOW] {
            mount.locks.moved.store(2, Ordering::SeqCst);
            mount.locks.absent.store(1, Ordering::SeqCst);
            let open = OpenOptions::new().append(true).custom_flags(flags).open(&path);
            assert_eq!(errno(open), 0, "{flags:o}");
            let left = [&mount.locks.moved, &mount.locks.absent];
            assert_eq!(left.map(|left| left.load(Ordering::SeqCst)), [1, 0], "{flags:o}");
            mount.locks.moved.store(0, Ordering::SeqCst);
        }
    });
}

/// What it looks up in another call may have been replaced by the time that it is opened.
// proves: P6
#[test]
fn a_caller_that_retried_after_estale_and_found_nothing_goes_by_names_in_its_next_call() {
    on_both(Consistency::CloseToOpen, |mount| {
        let path = mount.path("file");
        fs::write(&path, b"data").unwrap();
        let looks: [fn(&Path) -> i32; 2] =
            [|path| errno(fs::metadata(path)), |path| errno(File::create_new(path))];
        for (look, found) in looks.into_iter().zip([0, libc::EEXIST]) {
            mount.locks.moved.store(1, Ordering::SeqCst);
            mount.locks.absent.store(2, Ordering::SeqCst);
            assert_eq!(errno(File::open(&path)), libc::ENOENT);
            assert_eq!(mount.locks.moved.load(Ordering::SeqCst), 0);
            assert_eq!(look(&path), found);
            mount.locks.moved.store(1, Ordering::SeqCst);
            File::open(&path).unwrap();
            assert_eq!(mount.locks.moved.load(Ordering::SeqCst), 0, "the name was believed");
        }
    });
}

/// The kernel took the inode for bad, for as long as it knew it: the root, and with it the whole mount.
// proves: P122
#[test]
fn a_directory_that_the_server_once_calls_a_file_is_one_again() {
    for consistency in [Consistency::Strict, Consistency::CloseToOpen] {
        on_both(consistency, |mount| {
            fs::create_dir(mount.path("dir")).unwrap();
            for path in [mount.at.clone(), mount.path("dir")] {
                let dir = File::open(&path).unwrap();
                std::thread::sleep(Duration::from_secs(1)); // by then attributes are asked for
                mount.locks.mistaken.store(1, Ordering::SeqCst);
                let answers = [errno(dir.metadata()), errno(fs::metadata(&path))];
                assert_eq!(mount.locks.mistaken.swap(0, Ordering::SeqCst), 0);
                assert!(
                    answers.iter().all(|answers| [0, libc::ESTALE].contains(answers)),
                    "{answers:?}"
                );
                assert!(dir.metadata().unwrap().is_dir() && fs::metadata(&path).unwrap().is_dir());
                assert!(fs::read_dir(&path).unwrap().all(|entry| entry.is_ok()));
            }
        });
    }
}

/// ext4 keeps what it could allocate, and the kernel went on with the size that the file had had.
// proves: P4
#[test]
fn what_was_allocated_in_part_is_seen() {
    for consistency in [Consistency::Strict, Consistency::CloseToOpen] {
        on_both(consistency, |mount| {
            let path = mount.path("file");
            fs::write(&path, b"abc").unwrap();
            let mut file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
            assert_eq!(file.metadata().unwrap().len(), 3);
            mount.locks.full.store(true, Ordering::SeqCst);
            // SAFETY: no memory is passed.
            let allocated = unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, 8192) };
            assert_eq!(errno(checked(allocated.into())), libc::ENOSPC);
            assert_eq!(file.metadata().unwrap().len(), 4096);
            assert_eq!(fs::metadata(&path).unwrap().len(), 4096);
            assert_eq!(file.seek(SeekFrom::End(0)).unwrap(), 4096);
            mount.locks.full.store(false, Ordering::SeqCst);
        });
    }
}

/// Within less another change may come that leaves the file with the same times.
const TIMES_GO_ON: Duration = Duration::from_millis(150);

// proves: P7
#[test]
fn close_to_open_keeps_pages_until_the_file_changes() {
    on_both(Consistency::CloseToOpen, |mount| {
        let path = mount.path("file");
        fs::write(&path, b"old").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        std::thread::sleep(TIMES_GO_ON);
        // The kernel drops pages when memory is short or a program says so (drop_caches). Other
        // tests do that for a while, so this test tries again.
        let kept = (0..200).any(|_| {
            assert_eq!(fs::read(&path).unwrap(), b"old");
            let reads = mount.count("read");
            assert_eq!(fs::read(&path).unwrap(), b"old");
            let kept = mount.count("read") == reads;
            if !kept {
                std::thread::sleep(Duration::from_millis(20));
            }
            kept
        });
        assert!(kept, "the kernel had the page");
        mount.behind_the_kernel_s_back("file", b"changed");
        assert_eq!(fs::read(&path).unwrap(), b"changed");
        let lookups = mount.count("lookup");
        fs::metadata(&path).unwrap();
        assert!(mount.count("lookup") <= lookups + 1);
    });
}

// proves: P44
#[test]
fn permissions_are_checked() {
    on_both(Consistency::Strict, |mount| {
        let path = mount.path("secret");
        fs::write(&path, b"x").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        let path = c_path(&path);
        // The check of another user is made in a child, which has the rights to lose.
        // SAFETY: the child makes system calls only.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::setgroups(0, std::ptr::null());
                libc::setgid(1234);
                libc::setuid(1234);
                let opened = libc::open(path.as_ptr(), libc::O_RDONLY);
                let refused = opened < 0 && *libc::__errno_location() == libc::EACCES;
                let access = libc::access(path.as_ptr(), libc::R_OK);
                libc::_exit(if refused && access < 0 { 0 } else { 1 });
            }
            let mut status = 0;
            libc::waitpid(child, &mut status, 0);
            status
        };
        assert_eq!(status, 0);
    });
}

/// A thread that takes another identity, or other groups, is somebody else at its next call.
// proves: P44
#[test]
fn who_a_thread_is_counts_at_once_and_its_groups_do() {
    const GROUP: u32 = 4321;
    on_both(Consistency::Strict, |mount| {
        let make = |name: &str, (uid, gid): (u32, u32), mode| {
            let path = mount.path(name);
            fs::write(&path, b"x").unwrap();
            chown(&path, Some(uid), Some(gid)).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            c_path(&path)
        };
        let (own, of_group) = (make("own", (1001, 1001), 0o600), make("group", (0, GROUP), 0o640));
        let closed = mount.path("closed");
        fs::create_dir(&closed).unwrap();
        chown(&closed, Some(0), Some(GROUP)).unwrap();
        fs::set_permissions(&closed, fs::Permissions::from_mode(0o750)).unwrap();
        let within = make("closed/within", (0, 0), 0o644);
        // SAFETY: the child makes system calls only.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                let errno_of_open = |path: &CString| match libc::open(path.as_ptr(), libc::O_RDONLY)
                {
                    fd if fd < 0 => *libc::__errno_location(),
                    fd => {
                        libc::close(fd);
                        0
                    }
                };
                libc::setgroups(1, &GROUP);
                libc::setresgid(1001, 1001, 1001);
                libc::setresuid(0, 1001, 0);
                let first = (errno_of_open(&own), errno_of_open(&of_group));
                libc::setresuid(0, 0, 0);
                libc::setresuid(0, 1002, 0);
                let then = (errno_of_open(&own), errno_of_open(&of_group));
                let mut with_groups = |count: usize| {
                    libc::setresuid(0, 0, 0);
                    libc::setgroups(count, &GROUP);
                    libc::setresuid(0, 1002, 0);
                    errno_of_open(&of_group)
                };
                let changed = [0, 1, 0, 1].map(&mut with_groups);
                // Asked as the real user, who has the groups, too.
                libc::setresuid(1002, 0, 0);
                if libc::access(of_group.as_ptr(), libc::R_OK) != 0 {
                    libc::_exit(4);
                }
                // His groups let him in on the way there, too.
                if libc::access(within.as_ptr(), libc::R_OK) != 0 {
                    libc::_exit(6);
                }
                libc::setgroups(0, &GROUP);
                if libc::access(within.as_ptr(), libc::R_OK) == 0 {
                    libc::_exit(7);
                }
                if libc::access(of_group.as_ptr(), libc::R_OK) == 0 {
                    libc::_exit(5);
                }
                libc::_exit(match (first, then, changed) {
                    ((0, 0), (libc::EACCES, 0), [libc::EACCES, 0, libc::EACCES, 0]) => 0,
                    ((0, 0), (libc::EACCES, 0), _) => 3,
                    ((0, 0), ..) => 1,
                    _ => 2,
                });
            }
            let mut status = 0;
            libc::waitpid(child, &mut status, 0);
            status
        };
        assert_eq!(status, 0, "exit code {}", libc::WEXITSTATUS(status));
    });
}

#[test]
fn what_is_under_way_and_open_is_counted_to_zero() {
    on_both(Consistency::Strict, |mount| {
        for index in 0..50 {
            fs::write(mount.path(&format!("f{index}")), b"x").unwrap();
        }
        let file = File::open(mount.path("f0")).unwrap();
        assert!(mount.reporter.stats().handles >= 1);
        drop(file);
        // The kernel does not wait for RELEASE, and forgets nodes when it needs memory.
        let counts = || {
            let stats = mount.reporter.stats();
            (stats.handles, stats.in_flight.len())
        };
        for _ in 0..6000 {
            if counts() == (0, 0) {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert_eq!(counts(), (0, 0));
        mount.notifier.inval_inode(mount.fs_root(), None).unwrap();
    });
}
