//! Labels of SELinux where the client's kernel has no SELinux: programs ask for few, and lose none.

use std::ffi::{CStr, CString};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;

use crate::common::{TestMount, mounted};
use dray_fuse::{Consistency, Transport};

const LABEL: &CStr = c"security.selinux";
const FILES: u64 = 100;

/// Runs `test` on mounts of a kernel without SELinux.
fn without_selinux(test: impl Fn(&TestMount)) {
    let known = fs::read_to_string("/proc/filesystems").unwrap();
    if known.contains("selinuxfs") {
        eprintln!("skipped: the kernel has SELinux");
        return;
    }
    for transport in [Transport::Classic, Transport::Uring] {
        if let Some(mount) = mounted(transport, Consistency::Strict) {
            test(&mount);
        }
    }
}

fn c_path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

fn checked(result: libc::ssize_t) -> Result<usize, i32> {
    let failed = || io::Error::last_os_error().raw_os_error().unwrap_or(0);
    usize::try_from(result).map_err(|_| failed())
}

fn get(path: &Path, name: &CStr) -> Result<Vec<u8>, i32> {
    let (path, mut room) = (c_path(path), [0_u8; 64]);
    // SAFETY: C strings and a buffer that outlive the call.
    let got = unsafe {
        libc::getxattr(path.as_ptr(), name.as_ptr(), room.as_mut_ptr().cast(), room.len())
    };
    checked(got).map(|len| room[..len].to_vec())
}

fn set(path: &Path, name: &CStr, value: &[u8], flags: i32) -> Result<usize, i32> {
    let (path, from) = (c_path(path), value.as_ptr().cast());
    // SAFETY: as above.
    let set = unsafe { libc::setxattr(path.as_ptr(), name.as_ptr(), from, value.len(), flags) };
    checked(set as libc::ssize_t)
}

fn remove(path: &Path, name: &CStr) -> Result<usize, i32> {
    let path = c_path(path);
    // SAFETY: as above.
    checked(unsafe { libc::removexattr(path.as_ptr(), name.as_ptr()) } as libc::ssize_t)
}

fn list(path: &Path) -> Vec<u8> {
    let (path, mut room) = (c_path(path), [0_u8; 256]);
    // SAFETY: as above.
    let listed = unsafe { libc::listxattr(path.as_ptr(), room.as_mut_ptr().cast(), room.len()) };
    room[..checked(listed).unwrap()].to_vec()
}

fn run(program: &str, words: &[&Path]) {
    let done = Command::new(program.split(' ').next().unwrap())
        .args(program.split(' ').skip(1))
        .args(words)
        .output()
        .unwrap();
    assert!(done.status.success() && done.stderr.is_empty(), "{program}: {done:?}");
}

// proves: P338
#[test]
fn ls_asks_for_one_label_and_not_for_each_file_s() {
    without_selinux(|mount| {
        fs::create_dir(mount.path("dir")).unwrap();
        for file in 0..FILES {
            fs::write(mount.path(&format!("dir/{file}")), b"").unwrap();
        }
        let before = mount.count("getxattr");
        run("ls -l", &[&mount.path("dir")]);
        let asked = mount.count("getxattr") - before;
        // The other one is for the ACL of each file.
        assert!(asked <= FILES + 4, "{asked} of {FILES} files");
    });
}

// proves: P338
#[test]
fn a_label_that_is_there_is_shown_set_copied_and_removed() {
    without_selinux(|mount| {
        let [labelled, other, copy] = ["labelled", "other", "copy"].map(|name| mount.path(name));
        fs::write(&labelled, b"x").unwrap();
        fs::write(&other, b"x").unwrap();
        assert_eq!(get(&other, LABEL), Err(libc::EOPNOTSUPP));
        assert_eq!(get(&other, c"user.colour"), Err(libc::ENODATA));
        assert_eq!(set(&other, LABEL, b"a", libc::XATTR_REPLACE), Err(libc::ENODATA));
        assert_eq!(remove(&other, LABEL), Err(libc::ENODATA));
        set(&labelled, LABEL, b"system_u:object_r:x:s0", 0).unwrap();
        set(&labelled, c"user.colour", b"red", 0).unwrap();
        assert_eq!(get(&labelled, LABEL).unwrap(), b"system_u:object_r:x:s0");
        assert_eq!(list(&other), b"");
        assert!(list(&labelled).split(|byte| *byte == 0).any(|name| name == LABEL.to_bytes()));
        run("cp -a", &[&labelled, &copy]);
        assert_eq!(get(&copy, c"user.colour").unwrap(), b"red");
        run("cp -a", &[&other, &mount.path("other copy")]);
        remove(&labelled, LABEL).unwrap();
        assert_eq!(get(&labelled, LABEL), Err(libc::EOPNOTSUPP));
    });
}
