//! Directories that other clients have removed, for programs that still work there.

use std::ffi::CString;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;

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

/// Removes an empty directory as another client would.
fn removed_by_another(mount: &TestMount, dir: &str) {
    use dray_core::{Context, FileSystem, Name, RemoveKind};
    let (fs, dir) = (mount.fs.clone(), dir.to_owned());
    let mut executor = dray_rt::Executor::new(dray_rt::DriverKind::Epoll).unwrap();
    executor.block_on(async move {
        let (cx, name) = (Context::system(), Name::new(dir.as_bytes()).unwrap());
        fs.remove(&cx, fs.info().root, name, RemoveKind::Directory).await.unwrap();
    });
}

/// The answers that a program gets for names in the directory `dir`, which it has as its working directory.
fn names_in(dir: i32, file: &CString) -> Vec<(&'static str, i32)> {
    let (x, at) = (c"x".as_ptr(), libc::AT_FDCWD);
    let creating = libc::O_CREAT | libc::O_RDWR;
    let mut answers = Vec::new();
    let mut note = |call, result: libc::c_int| {
        answers.push((call, errno(checked(result.into()))));
    };
    // SAFETY: C strings that outlive the calls; nothing that was opened is used.
    unsafe {
        note("open", libc::openat(dir, x, libc::O_RDONLY));
        note("open to make", libc::openat(dir, x, creating, 0o600));
        note("open to make anew", libc::openat(dir, x, creating | libc::O_EXCL, 0o600));
        note("mkdir", libc::mkdirat(dir, x, 0o700));
        note("mknod", libc::mknodat(dir, x, libc::S_IFIFO | 0o600, 0));
        note("symlink", libc::symlinkat(c"a".as_ptr(), dir, x));
        note("link", libc::linkat(at, file.as_ptr(), dir, x, 0));
        note("rename to", libc::renameat(at, file.as_ptr(), dir, x));
        note("rename from", libc::renameat(dir, x, at, file.as_ptr()));
        note("unlink", libc::unlinkat(dir, x, 0));
        note("rmdir", libc::unlinkat(dir, x, libc::AT_REMOVEDIR));
        note("stat", libc::fstatat(dir, x, &mut std::mem::zeroed(), 0));
        note("access", libc::faccessat(dir, x, libc::F_OK, 0));
        note("tmpfile", libc::openat(dir, c".".as_ptr(), libc::O_TMPFILE | libc::O_RDWR, 0o600));
    }
    answers
}

/// A program in a directory that another client had removed got ESTALE, for which programs
/// are not made, where Linux says ENOENT.
// proves: P34
#[test]
fn in_a_directory_that_others_have_removed_there_is_nothing() {
    for consistency in [Consistency::Strict, Consistency::CloseToOpen] {
        on_both(consistency, |mount| {
            fs::write(mount.path("file"), b"").unwrap();
            let file = c_path(&mount.path("file"));
            for round in 0..2 {
                fs::create_dir(mount.path("dir")).unwrap();
                let mut open = OpenOptions::new();
                let dir =
                    open.read(true).custom_flags(libc::O_PATH).open(mount.path("dir")).unwrap();
                removed_by_another(mount, "dir");
                let answers = names_in(dir.as_raw_fd(), &file);
                let others: Vec<_> =
                    answers.iter().filter(|(_, errno)| *errno != libc::ENOENT).collect();
                assert!(others.is_empty(), "{consistency:?}, {round}: {others:?}");
            }
        });
    }
}

/// As long as somebody has it open, what is asked of the directory itself is answered as on Linux.
/// That holds for a process that has it as its working directory, too.
// proves: P34
#[test]
fn a_directory_that_is_open_is_there_after_its_removal() {
    on_both(Consistency::Strict, |mount| {
        for by_another in [false, true] {
            fs::create_dir(mount.path("dir")).unwrap();
            let dir = fs::File::open(mount.path("dir")).unwrap();
            let mut open = OpenOptions::new();
            let path = open.read(true).custom_flags(libc::O_PATH).open(mount.path("dir")).unwrap();
            match by_another {
                true => removed_by_another(mount, "dir"),
                false => fs::remove_dir(mount.path("dir")).unwrap(),
            }
            // What was looked up is there for a moment anyway (`departed` in backends).
            std::thread::sleep(std::time::Duration::from_millis(600));
            for one in [&dir, &path] {
                let seen = one.metadata().unwrap();
                assert!(seen.is_dir() && seen.nlink() == 0, "{by_another}");
                let again = format!("/proc/self/fd/{}", one.as_raw_fd());
                assert_eq!(fs::read_dir(&again).unwrap().count(), 0, "{by_another}");
                // SAFETY: a C string that outlives the call; nothing that was opened is used.
                let x = unsafe { libc::openat(one.as_raw_fd(), c"x".as_ptr(), libc::O_RDONLY) };
                assert_eq!(errno(checked(x.into())), libc::ENOENT, "{by_another}");
            }
            dir.set_permissions(fs::Permissions::from_mode(0o711)).unwrap();
            assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o711);
            dir.sync_all().unwrap();
        }
    });
}

/// A path leads to what has its name now, and what others removed is in nobody's way.
// proves: P34
#[test]
fn a_directory_that_others_removed_and_made_anew_is_found_by_its_path() {
    on_both(Consistency::CloseToOpen, |mount| {
        for call in ["mkdir", "write", "symlink", "rename", "link"] {
            fs::create_dir(mount.path("dir")).unwrap();
            fs::write(mount.path("file"), b"").unwrap();
            assert!(mount.path("dir").exists());
            removed_by_another(mount, "dir");
            made_by_another(mount, "dir");
            let at = mount.path("dir/x");
            let done = match call {
                "mkdir" => fs::create_dir(&at),
                "write" => fs::write(&at, b"x"),
                "symlink" => symlink("a", &at),
                "rename" => fs::rename(mount.path("file"), &at),
                _ => fs::hard_link(mount.path("file"), &at),
            };
            assert_eq!(errno(done), 0, "{call}");
            match call {
                "mkdir" => fs::remove_dir(&at).unwrap(),
                _ => fs::remove_file(&at).unwrap(),
            }
            fs::remove_dir(mount.path("dir")).unwrap();
        }
    });
}

fn made_by_another(mount: &TestMount, dir: &str) {
    use dray_core::{Context, FileSystem, Make, Name};
    let (fs, dir) = (mount.fs.clone(), dir.to_owned());
    let mut executor = dray_rt::Executor::new(dray_rt::DriverKind::Epoll).unwrap();
    executor.block_on(async move {
        let (cx, name) = (Context::system(), Name::new(dir.as_bytes()).unwrap());
        fs.make(&cx, fs.info().root, name, Make::Directory { mode: 0o755 }).await.unwrap();
    });
}
