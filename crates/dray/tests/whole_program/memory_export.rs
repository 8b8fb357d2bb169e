//! An export of another backend than a directory.

use std::fs;

use crate::common;
use crate::common::Rig;

#[test]
fn an_export_in_memory_is_served_and_is_empty_after_a_restart() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let export = ["--export", "scratch=,backend=memory,squash=none,size_mib=1"];
    rig.serve(&export);
    let at = rig.mount_export("scratch", "mount", "");
    fs::write(at.join("file"), "x").unwrap();
    assert_eq!(fs::read(at.join("file")).unwrap(), b"x");
    let full = fs::write(at.join("large"), vec![1; 2 << 20]).unwrap_err();
    assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
    let status = rig.demand(&["status"]);
    assert!(status.contains("memory:scratch"), "{status}");
    rig.end_server(libc::SIGTERM);
    rig.serve(&export);
    assert_eq!(fs::read(at.join("file")).unwrap_err().raw_os_error(), Some(libc::ENOENT));
    rig.umount(&at);
}
