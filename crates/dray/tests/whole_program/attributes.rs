//! Attributes of files, access lists and the flags of inodes, through two mounts of one export.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::common;
use crate::common::two_mounts;

// proves: P51
#[test]
fn birth_times_are_those_of_the_file_system_below() {
    if common::skipped() {
        return;
    }
    for options in ["consistency=strict", "consistency=close-to-open"] {
        let (rig, one, other) = two_mounts(options);
        fs::write(one.join("file"), "born").unwrap();
        fs::create_dir(one.join("dir")).unwrap();
        for name in ["file", "dir"] {
            let Ok(below) = fs::metadata(rig.path("export").join(name)).unwrap().created() else {
                eprintln!("left out: the file system below knows no birth times");
                return;
            };
            for mount in [&one, &other] {
                match fs::metadata(mount.join(name)).unwrap().created() {
                    Ok(above) => assert_eq!(above, below, "{name} under {options}"),
                    Err(error) => {
                        assert!(!kernel_has_statx(), "{name} under {options}: {error}");
                        eprintln!("left out: this kernel does not ask a mount for birth times");
                    }
                }
            }
        }
    }
}

/// Whether FUSE has the operation STATX: since Linux 6.6.
fn kernel_has_statx() -> bool {
    let text = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = text.split(['.', '-']).map(|part| part.trim().parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap(), numbers.next().unwrap());
    version >= (6, 6)
}

fn acl_tool(words: &[&str], path: &Path) -> Option<String> {
    let output = match Command::new(words[0]).args(&words[1..]).arg(path).output() {
        Ok(output) => output,
        Err(error) => {
            eprintln!("left out: {}: {error} (package acl)", words[0]);
            return None;
        }
    };
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap())
}

/// Whether an ordinary user, with no group but 65534, can run it to a good end.
fn can(user: u32, program: &str, words: &[String]) -> bool {
    Command::new(program).args(words).uid(user).gid(65_534).output().unwrap().status.success()
}

fn reads(user: u32, path: &Path) -> bool {
    can(user, "cat", &[path.display().to_string()])
}

/// Opens for writing, and writes nothing.
fn writes(user: u32, path: &Path) -> bool {
    let to = format!("of={}", path.display());
    can(user, "dd", &["if=/dev/null".into(), "conv=notrunc".into(), to])
}

/// Users in the list can what it says and nobody else can. The other mount shows the same list.
/// Taking a user out of it counts there once attributes have run out.
fn access_lists_decide(options: &str, attributes_run_out: Duration) {
    let (_rig, one, other) = two_mounts(options);
    let (here, there) = (one.join("listed"), other.join("listed"));
    fs::write(&here, "listed").unwrap();
    fs::set_permissions(&here, fs::Permissions::from_mode(0o600)).unwrap();
    if acl_tool(&["setfacl", "-m", "u:1001:r,u:1003:rw"], &here).is_none() {
        return;
    }
    let shown = acl_tool(&["getfacl", "-cpn"], &there).unwrap();
    assert!(shown.contains("user:1001:r--") && shown.contains("user:1003:rw-"), "{shown}");
    for path in [&here, &there] {
        assert!(reads(1001, path) && !writes(1001, path), "{path:?}");
        assert!(reads(1003, path) && writes(1003, path), "{path:?}");
        assert!(!reads(1002, path) && !writes(1002, path), "{path:?}");
    }
    acl_tool(&["setfacl", "-x", "u:1001"], &here);
    assert!(!reads(1001, &here));
    std::thread::sleep(attributes_run_out);
    assert!(!reads(1001, &there), "the other mount goes by the old list");
    assert!(reads(1003, &there));
}

/// A default list on a directory is inherited by what is made in it, whatever the umask.
fn access_lists_are_inherited(options: &str) {
    let (mut rig, one, other) = two_mounts(options);
    let dir = one.join("inherits");
    fs::create_dir(&dir).unwrap();
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
    if acl_tool(&["setfacl", "-d", "-m", "u::rw,u:1001:rw,g::-,o::-"], &dir).is_none() {
        return;
    }
    let making = rig.start("umask 077; echo inherited > $AT/heir", &dir);
    assert!(rig.end_of(making).success());
    for mount in [&one, &other] {
        let heir = mount.join("inherits/heir");
        assert!(reads(1001, &heir) && !reads(1002, &heir), "{heir:?}");
        assert!(writes(1001, &heir), "the umask counts for {heir:?}");
    }
}

// proves: P45
#[test]
fn access_lists_decide_under_strict() {
    if !common::skipped() {
        access_lists_decide("consistency=strict", Duration::ZERO);
        access_lists_are_inherited("consistency=strict");
    }
}

// proves: P45
#[test]
fn access_lists_decide_under_close_to_open() {
    if !common::skipped() {
        access_lists_decide("consistency=close-to-open", Duration::from_millis(1200));
        access_lists_are_inherited("consistency=close-to-open");
    }
}

/// The flags of an inode, or what is wrong.
fn flags(file: &File, set: Option<u32>) -> std::io::Result<u32> {
    const GET: libc::c_ulong = 0x8008_6601;
    const SET: libc::c_ulong = 0x4008_6602;
    let mut value: libc::c_long = set.map_or(0, libc::c_long::from);
    let request = if set.is_some() { SET } else { GET };
    // SAFETY: the kernel reads or writes an int; there is room for a long.
    match unsafe { libc::ioctl(file.as_raw_fd(), request, &mut value) } {
        0 => Ok(value as u32),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// The kernel asks for more than the flags before it sets them, and gave up.
// proves: P25
#[test]
fn flags_of_an_inode_are_set_through_a_mount() {
    const NODUMP: u32 = 0x40;
    const APPEND: u32 = 0x20;
    if common::skipped() {
        return;
    }
    let (rig, one, other) = two_mounts("consistency=strict");
    fs::write(one.join("file"), "text").unwrap();
    let below = File::open(rig.path("export").join("file")).unwrap();
    let Ok(before) = flags(&below, None) else {
        return eprintln!("left out: the file system below has no flags");
    };
    if flags(&below, Some(before | NODUMP)).is_err() {
        return eprintln!("left out: the file system below does not let them be set");
    }
    let [here, there] = [&one, &other].map(|mount| File::open(mount.join("file")).unwrap());
    assert_eq!(flags(&here, None).unwrap(), before | NODUMP);
    flags(&here, Some(before | APPEND)).unwrap();
    assert_eq!(flags(&below, None).unwrap(), before | APPEND);
    assert_eq!(flags(&there, None).unwrap(), before | APPEND);
    let error = OpenOptions::new().write(true).open(other.join("file")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EPERM));
    flags(&there, Some(before)).unwrap();
    fs::remove_file(one.join("file")).unwrap();
}

/// `struct fsxattr` of linux/fs.h.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Xflags {
    flags: u32,
    extent_bytes: u32,
    extents: u32,
    project: u32,
    cow_extent_bytes: u32,
    padding: [u8; 8],
}

fn xflags(file: &File, set: Option<Xflags>) -> std::io::Result<Xflags> {
    const GET: libc::c_ulong = 0x801c_581f;
    const SET: libc::c_ulong = 0x401c_5820;
    let mut value = set.unwrap_or_default();
    let request = if set.is_some() { SET } else { GET };
    // SAFETY: the kernel reads or writes a struct of this layout.
    match unsafe { libc::ioctl(file.as_raw_fd(), request, &mut value) } {
        0 => Ok(value),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Setting one failed with ENOTTY, and whatever there was looked like none.
// proves: P25
#[test]
fn projects_are_set_through_a_mount() {
    if common::skipped() {
        return;
    }
    common::on_transports(|transport| {
        let (rig, one, other) = two_mounts(&format!("consistency=strict,{transport}"));
        fs::write(one.join("file"), "text").unwrap();
        fs::create_dir(one.join("dir")).unwrap();
        for name in ["file", "dir"] {
            let below = File::open(rig.path("export").join(name)).unwrap();
            let Ok(before) = xflags(&below, None) else {
                return eprintln!("left out: the file system below has no such flags");
            };
            let [here, there] = [&one, &other].map(|mount| File::open(mount.join(name)).unwrap());
            assert_eq!(xflags(&here, None).unwrap(), before);
            const NODUMP: u32 = 0x80;
            let marked = Xflags { flags: before.flags | NODUMP, ..before };
            if xflags(&below, Some(marked)).and_then(|_| xflags(&below, Some(before))).is_err() {
                return eprintln!("left out: the file system below does not let them be set");
            }
            xflags(&here, Some(marked)).unwrap();
            assert_eq!(xflags(&below, None).unwrap(), marked, "{name}");
            let project = Xflags { project: 42, ..before };
            match xflags(&below, Some(project)).and_then(|_| xflags(&below, Some(before))) {
                Ok(_) => {
                    xflags(&here, Some(project)).unwrap();
                    assert_eq!(xflags(&there, None).unwrap(), project, "{name}");
                    assert_eq!(xflags(&below, None).unwrap(), project, "{name}");
                }
                Err(error) => {
                    eprintln!("left out: the file system below has no projects");
                    let refused = xflags(&here, Some(project)).unwrap_err();
                    assert_eq!(refused.raw_os_error(), error.raw_os_error());
                }
            }
            xflags(&there, Some(before)).unwrap();
            assert_eq!(xflags(&below, None).unwrap(), before, "{name}");
        }
    });
}
