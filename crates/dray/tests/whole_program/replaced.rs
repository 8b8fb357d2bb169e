//! What becomes of a path, and of who works there, when another mount moves or replaces what it led to.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::common;
use crate::common::two_mounts;

/// Within rename(2) the kernel holds the locks that it takes to give a directory another place in
/// its tree. So a directory that another mount has moved was ESTALE there.
// proves: P32
#[test]
fn a_directory_that_another_mount_moved_is_renamed_and_replaced() {
    if common::skipped() {
        return;
    }
    for options in ["consistency=strict", "consistency=strict,transport=uring"] {
        let (_rig, one, other) = two_mounts(options);
        fs::create_dir_all(one.join("dir")).unwrap();
        for round in 0..20 {
            let name = format!("moved-{round}");
            fs::create_dir_all(one.join(&name).join("below")).unwrap();
            fs::rename(other.join(&name), other.join("dir").join(&name)).unwrap();
            // Back to where this mount has it still, or to a new place.
            let to = if round % 2 == 0 { name.clone() } else { format!("new-{round}") };
            fs::rename(one.join("dir").join(&name), one.join(&to)).unwrap();
            assert!(other.join(&to).join("below").is_dir(), "{options}");
            assert!(!other.join("dir").join(&name).exists());
            // What it is called now is what it stays, for both.
            assert!(one.join(&to).join("below").is_dir());
            fs::rename(one.join(&to), one.join("dir").join("again")).unwrap();
            fs::remove_dir_all(other.join("dir").join("again")).unwrap();

            let (new, victim) = (format!("new-{round}"), format!("victim-{round}"));
            fs::create_dir(one.join(&new)).unwrap();
            fs::create_dir(one.join(&victim)).unwrap();
            fs::rename(other.join(&victim), other.join("dir").join(&victim)).unwrap();
            fs::rename(one.join(&new), one.join("dir").join(&victim)).unwrap();
            assert!(other.join("dir").join(&victim).is_dir() && !other.join(&new).exists());
            fs::remove_dir(one.join("dir").join(&victim)).unwrap();
        }
    }
}

/// The kernel had what is in such a directory in its former place still, and could not give it another one.
// proves: P32
#[test]
fn what_is_in_a_directory_that_another_mount_moved_is_renamed_and_replaced() {
    if common::skipped() {
        return;
    }
    for transport in ["transport=classic", "transport=uring"] {
        let (_rig, one, other) = two_mounts(transport);
        fs::write(one.join("file"), "").unwrap();
        for round in 0..10 {
            fs::create_dir_all(one.join("dir/below")).unwrap();
            assert!(one.join("dir/below").is_dir());
            fs::rename(other.join("dir"), other.join("moved")).unwrap();
            let (file, below) = (one.join("file"), one.join("moved/below"));
            let error = fs::rename(&file, &below).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EISDIR), "{transport}, {round}");
            fs::rename(other.join("moved"), other.join("again")).unwrap();
            fs::rename(one.join("again/below"), one.join("again/new")).unwrap();
            assert!(other.join("again/new").is_dir() && !other.join("again/below").exists());
            fs::remove_dir_all(one.join("again")).unwrap();
        }
    }
}

/// A file that a path has led to is there for a moment when another mount gives the name to another
/// file. The calls stat(2), chmod(2), truncate(2) and open(2) of it failed with ESTALE.
// proves: P33
#[test]
fn what_a_path_led_to_is_used_though_another_mount_replaces_it() {
    if common::skipped() {
        return;
    }
    common::on_transports(|transport| {
        let (_rig, one, other) = two_mounts(&format!("consistency=strict,{transport}"));
        used_though_replaced(&one, &other);
    });
}

/// There, too, a program goes on with what its path has led to. What it looks up once the name has
/// run out is the new one.
// proves: P33
#[test]
fn what_a_path_led_to_under_close_to_open_is_used_though_another_mount_replaces_it() {
    if common::skipped() {
        return;
    }
    common::on_transports(|transport| {
        let (_rig, one, other) = two_mounts(&format!("consistency=close-to-open,{transport}"));
        used_though_replaced(&one, &other);
    });
}

fn used_though_replaced(one: &Path, other: &Path) {
    // The moment may have passed where the machine is busy: then again.
    let used = (0..100).any(|round| {
        let name = format!("file{round}");
        fs::write(one.join(&name), "old").unwrap();
        fs::write(one.join("new"), "new").unwrap();
        let mut look = OpenOptions::new();
        let found = look.read(true).custom_flags(libc::O_PATH).open(other.join(&name)).unwrap();
        fs::rename(one.join("new"), one.join(&name)).unwrap();
        let path = PathBuf::from(format!("/proc/self/fd/{}", found.as_raw_fd()));
        let used = use_old(&path, &found);
        common::wait_for("the new file", || fs::read(other.join(&name)).unwrap() == b"new");
        match used {
            Ok(data) => data == "ol",
            Err(error) if error.raw_os_error() == Some(libc::ESTALE) => false,
            Err(error) => panic!("{error}"),
        }
    });
    assert!(used, "it was never there");
}

/// What calls by path do once they have found the file.
fn use_old(path: &Path, found: &File) -> std::io::Result<String> {
    found.metadata()?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    OpenOptions::new().write(true).open(path)?.set_len(2)?;
    fs::read_to_string(path)
}

/// A process that works in a directory goes on in it when others move the directory.
// proves: P32
#[test]
fn a_process_in_a_directory_that_is_moved_stays_in_it() {
    if common::skipped() {
        return;
    }
    let (_rig, one, other) = two_mounts("consistency=strict");
    fs::create_dir_all(one.join("dir")).unwrap();
    fs::create_dir_all(one.join("here")).unwrap();
    let inside = File::open(one.join("here")).unwrap();
    fs::rename(other.join("here"), other.join("dir").join("here")).unwrap();
    fs::rename(one.join("dir").join("here"), one.join("there")).unwrap();
    let path = PathBuf::from(format!("/proc/self/fd/{}", inside.as_raw_fd()));
    fs::write(path.join("file"), "written from inside").unwrap();
    assert_eq!(fs::read(other.join("there").join("file")).unwrap(), b"written from inside");
    assert_eq!(fs::read_dir(&path).unwrap().count(), 1);
}
