//! A mount within the directory that its own server exports, as on a machine that exports `/` and
//! tries it. Also the export of a mount.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt, chown};
use std::path::PathBuf;
use std::process::Command;

use crate::common;
use crate::common::{Rig, wait_for};

/// The server asked what is mounted there what it is like: its own client, who waited for it. The
/// export stood still until that mount was aborted.
// proves: P42
#[test]
fn a_mount_in_its_own_export_is_listed_around() {
    if common::skipped() {
        return;
    }
    for options in ["consistency=close-to-open,attr_timeout=0", "consistency=strict"] {
        let mut rig = Rig::new();
        let within = rig.path("export/in");
        for name in ["at", "dir"] {
            fs::create_dir_all(within.join(name)).unwrap();
        }
        for number in 0..5 {
            fs::write(within.join(format!("file{number}")), "").unwrap();
        }
        rig.serve(&["--threads", "1"]);
        let at = rig.mount("export/in/at", options);
        // The mount is not part of the export, and so in the way of the removal alone.
        let script = "ls -l $AT/in; ls -d $AT/in/dir && ! ls $AT/in/at && ! rm -rf $AT/in";
        let pid = rig.start(script, &at);
        assert!(rig.end_of(pid).success(), "{options}");
        assert_eq!(fs::read_dir(&within).unwrap().count(), 1, "{options}");
        rig.umount(&at);
    }
}

/// A server, a mount of it, a server that exports that mount, and a mount of this one.
struct Stacked {
    // Dropped first: it is in use by nobody.
    above: Rig,
    below: Rig,
    middle: PathBuf,
    top: PathBuf,
}

impl Stacked {
    fn new() -> Stacked {
        let (mut below, mut above) = (Rig::new(), Rig::new());
        below.serve(&[]);
        let middle = below.mount("middle", "");
        fs::remove_dir(above.path("export")).unwrap();
        std::os::unix::fs::symlink(&middle, above.path("export")).unwrap();
        above.serve(&[]);
        let top = above.mount("top", "");
        Stacked { above, below, middle, top }
    }
}

/// The flag of each call does not reach a file system in user space. What the server above appended
/// went where its kernel last heard the file to end. That was over what others had appended
/// meanwhile.
// proves: P19
#[test]
fn appends_through_an_exported_mount_do_not_mix_with_those_beside_it() {
    if common::skipped() {
        return;
    }
    let mut stacked = Stacked::new();
    let beside = stacked.below.mount("beside", "");
    let append = |dir: &PathBuf| File::options().append(true).create(true).open(dir.join("log"));
    let files = [(append(&stacked.top).unwrap(), b'a'), (append(&beside).unwrap(), b'b')];
    let each = 500;
    std::thread::scope(|scope| {
        for (mut file, letter) in files.iter().map(|(file, letter)| (file, *letter)) {
            scope.spawn(move || (0..each).for_each(|_| file.write_all(&[letter; 10]).unwrap()));
        }
    });
    let log = fs::read(stacked.middle.join("log")).unwrap();
    let whole = |record: &[u8]| record.iter().all(|byte| *byte == record[0]);
    let of = |letter: u8| log.iter().filter(|byte| **byte == letter).count();
    assert_eq!((log.len(), of(b'a'), of(b'b')), (20 * each, 10 * each, 10 * each));
    assert!(log.chunks(10).all(whole));
}

/// The table of paths ended with the server, and what was open with it.
// proves: P40
#[test]
fn what_is_open_through_an_exported_mount_outlives_the_server_above() {
    if common::skipped() {
        return;
    }
    let mut stacked = Stacked::new();
    let top = stacked.top.clone();
    fs::create_dir_all(top.join("dir/deep")).unwrap();
    let path = top.join("dir/deep/file");
    let file = File::options().read(true).append(true).create(true).open(&path).unwrap();
    let script = "cd $AT/dir/deep && touch there && while ! [ -e go ]; do sleep 0.1; done && echo here >came";
    let worker = stacked.above.start(script, &top);
    wait_for("who works there", || top.join("dir/deep/there").exists());
    (&file).write_all(b"before").unwrap();
    fs::rename(top.join("dir"), top.join("moved")).unwrap();
    stacked.above.end_server(libc::SIGKILL);
    stacked.above.serve(&[]);
    (&file).write_all(b" and after").unwrap();
    let mut content = [0; 16];
    file.read_exact_at(&mut content, 0).unwrap();
    assert_eq!(&content, b"before and after");
    fs::write(top.join("moved/deep/go"), "").unwrap();
    assert!(stacked.above.end_of(worker).success());
    assert_eq!(fs::read(top.join("moved/deep/came")).unwrap(), b"here\n");
}

/// A file system in user space may go by the flags of the open alone.
#[test]
fn what_is_to_be_on_media_is_opened_so_below_too() {
    if common::skipped() {
        return;
    }
    let stacked = Stacked::new();
    let mut options = File::options();
    let options = options.write(true).create(true).custom_flags(libc::O_DSYNC);
    let held = options.open(stacked.top.join("synced")).unwrap();
    let server = common::processes("serve", &stacked.above.path("state"));
    let flags: Vec<i32> = server.iter().flat_map(|pid| flags_of(*pid, "synced")).collect();
    assert!(flags.iter().any(|flags| flags & libc::O_DSYNC != 0), "{flags:?}");
    drop(held);
}

/// Flags of the descriptors that a process has of files called `name`.
fn flags_of(pid: i32, name: &str) -> Vec<i32> {
    let mut flags = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten() {
        if !fs::read_link(entry.path()).is_ok_and(|link| link.ends_with(name)) {
            continue;
        }
        let about = format!("/proc/{pid}/fdinfo/{}", entry.file_name().to_str().unwrap());
        let about = fs::read_to_string(about).unwrap_or_default();
        let word = about.lines().find_map(|line| line.strip_prefix("flags:"));
        flags.extend(word.and_then(|word| i32::from_str_radix(word.trim(), 8).ok()));
    }
    flags
}

/// bindfs(1) knows inodes by their paths, and says ENOENT of what has been replaced. The client's
/// kernel asks for the attributes of the file that it believes in. It took that for the answer to
/// open(2).
#[test]
fn what_was_replaced_over_a_file_system_without_handles_is_opened() {
    if common::skipped() {
        return;
    }
    if !Command::new("bindfs").arg("--version").output().is_ok_and(|output| output.status.success())
    {
        eprintln!("left out: there is no bindfs");
        return;
    }
    let mut rig = Rig::new();
    let (real, below) = (rig.path("real"), rig.path("export"));
    fs::create_dir(&real).unwrap();
    assert!(Command::new("bindfs").args([&real, &below]).status().unwrap().success());
    let _below = Unmounted(below.clone());
    rig.serve(&[]);
    let at = rig.mount("at", "consistency=close-to-open,attr_timeout=60");
    let put = |name: &str, text: &str| {
        fs::write(below.join(name), text).unwrap();
        chown(below.join(name), Some(1000), Some(1000)).unwrap();
    };
    put("file", "old");
    fs::metadata(at.join("file")).unwrap();
    put("new", "new");
    fs::rename(below.join("new"), below.join("file")).unwrap();
    assert_eq!(fs::read_to_string(at.join("file")).unwrap(), "new");
    rig.umount(&at);
    rig.end_server(libc::SIGTERM);
}

struct Unmounted(PathBuf);

impl Drop for Unmounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status(); // the assertions have the say
    }
}
