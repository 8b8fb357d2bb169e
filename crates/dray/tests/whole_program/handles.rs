//! Handles of files (name_to_handle_at(2)) on mounts of a server: over deaths of the daemon and the server,
//! and when others move what they lead to.

#[path = "../../../fuse/tests/front_end/common/file_handle.rs"]
mod file_handle;

use std::ffi::CString;
use std::fs;
use std::io::Read;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::common::daemons::{signal, wait_for_daemon};
use crate::common::{Rig, on_transports, two_mounts, wait_for};
use file_handle::{FileHandle, drop_inodes};

/// Has the kernel forget all but the root of a mount.
fn all_forgotten(rig: &Rig, at: &Path) {
    wait_for("the kernel to forget", || {
        drop_inodes();
        let text = rig.demand(&["status", at.to_str().unwrap(), "--json"]);
        let status: serde_json::Value = serde_json::from_str(&text).unwrap();
        status["known_files"] == 1
    });
}

// proves: P39
#[test]
fn handles_outlive_daemons_and_servers_but_not_the_mount() {
    on_transports(|transport| {
        for consistency in ["strict", "close-to-open", "immutable"] {
            let options = format!("consistency={consistency},{transport}");
            let mut rig = Rig::new();
            fs::create_dir_all(rig.path("export/a/b")).unwrap();
            fs::write(rig.path("export/a/b/file"), "said").unwrap();
            rig.serve(&[]);
            let at = rig.mount("mount", &options);
            let (dir, file) = (at.join("a/b"), at.join("a/b/file"));
            let handles = [&dir, &file].map(|path| FileHandle::of(path).unwrap());
            let check = |rig: &Rig| {
                assert_eq!(handles[1].read(&at).unwrap(), "said");
                all_forgotten(rig, &at);
                assert_eq!(handles[0].path(&at).unwrap(), dir);
                assert_eq!(handles[1].read(&at).unwrap(), "said");
                assert_eq!(FileHandle::of(&file).unwrap(), handles[1]);
            };
            check(&rig);
            all_forgotten(&rig, &at);
            let daemon = wait_for_daemon(&at);
            signal(daemon, libc::SIGKILL);
            wait_for("another daemon", || wait_for_daemon(&at) != daemon);
            check(&rig);
            rig.end_server(libc::SIGKILL);
            rig.serve(&[]);
            check(&rig);
            rig.umount(&at);
            let at = rig.mount("mount", &options);
            assert!(dir.exists() && file.exists());
            for handle in handles {
                let error = handle.path(&at).unwrap_err();
                assert_eq!(error.raw_os_error(), Some(libc::ESTALE));
            }
        }
    });
}

/// Under close-to-open a file is opened by the name that led to it, and by a handle none did.
// proves: P39
#[test]
fn a_handle_leads_to_its_file_whatever_others_have_made_of_the_name() {
    on_transports(|transport| {
        for consistency in ["strict", "close-to-open"] {
            let options = format!("consistency={consistency},attr_timeout=3600,{transport}");
            let (rig, one, other) = two_mounts(&options);
            for name in ["moved", "linked", "removed"] {
                fs::write(one.join(name), name).unwrap();
            }
            fs::hard_link(one.join("linked"), one.join("link")).unwrap();
            let handles =
                ["moved", "linked", "removed"].map(|name| FileHandle::of(&one.join(name)).unwrap());
            fs::create_dir(other.join("dir")).unwrap();
            fs::rename(other.join("moved"), other.join("dir/away")).unwrap();
            fs::write(other.join("moved"), "another").unwrap();
            fs::remove_file(other.join("linked")).unwrap();
            fs::remove_file(other.join("removed")).unwrap();
            for forgotten in [false, true] {
                if forgotten {
                    all_forgotten(&rig, &one);
                }
                assert_eq!(handles[0].read(&one).unwrap(), "moved");
                assert_eq!(handles[1].read(&one).unwrap(), "linked");
                wait_for("the end of what was removed", || {
                    let read = handles[2].read(&one);
                    read.is_err_and(|error| error.raw_os_error() == Some(libc::ESTALE))
                });
            }
        }
    });
}

/// `struct fanotify_event_metadata`, and the head of `struct fanotify_event_info_fid`.
const EVENT_BYTES: usize = 24;
const INFO_BYTES: usize = 12;

// proves: P39
#[test]
fn fanotify_tells_handles_that_can_be_opened() {
    on_transports(|transport| {
        let (rig, at) = Rig::mounted(transport);
        fs::create_dir(rig.path("export/dir")).unwrap();
        fs::write(rig.path("export/dir/file"), "said").unwrap();
        // SAFETY: the descriptor is owned by nobody else; the path outlives the call.
        let events = unsafe {
            let fd = libc::fanotify_init(libc::FAN_REPORT_FID | libc::FAN_CLOEXEC, 0);
            assert!(fd >= 0, "{}", std::io::Error::last_os_error());
            let path = CString::new(at.join("dir").as_os_str().as_bytes()).unwrap();
            let mask = libc::FAN_OPEN | libc::FAN_EVENT_ON_CHILD;
            let (add, here) = (libc::FAN_MARK_ADD, libc::AT_FDCWD);
            assert_eq!(libc::fanotify_mark(fd, add, mask, here, path.as_ptr()), 0);
            OwnedFd::from_raw_fd(fd)
        };
        assert_eq!(fs::read(at.join("dir/file")).unwrap(), b"said");
        let mut event = [0; 4096];
        let count = fs::File::from(events).read(&mut event).unwrap();
        let handle = FileHandle::in_bytes(&event[EVENT_BYTES + INFO_BYTES..count]);
        all_forgotten(&rig, &at);
        assert_eq!(handle.read(&at).unwrap(), "said");
        assert_eq!(FileHandle::of(&at.join("dir/file")).unwrap(), handle);
    });
}
