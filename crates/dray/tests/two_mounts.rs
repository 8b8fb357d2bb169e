//! What two real mounts of one export owe each other, beyond the generated sequences.

mod common;

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use common::Rig;

/// A server and two mounts of it; other users can get there.
fn two_mounts(options: &str) -> (Rig, PathBuf, PathBuf) {
    let mut rig = Rig::new();
    fs::set_permissions(rig.path("."), fs::Permissions::from_mode(0o755)).unwrap();
    rig.serve(&[]);
    let [one, other] = ["one", "other"].map(|name| rig.mount(name, options));
    (rig, one, other)
}

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

/// Users in the list can what it says and nobody else can; the other mount shows the same
/// list; taking a user out of it counts there once attributes have run out.
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

#[test]
fn access_lists_decide_under_strict() {
    if !common::skipped() {
        access_lists_decide("consistency=strict", Duration::ZERO);
        access_lists_are_inherited("consistency=strict");
    }
}

#[test]
fn access_lists_decide_under_close_to_open() {
    if !common::skipped() {
        access_lists_decide("consistency=close-to-open", Duration::from_millis(1200));
        access_lists_are_inherited("consistency=close-to-open");
    }
}

/// Nobody has the file open here, so nobody is told of what others do to it.
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

/// What one mount stores in a mapping the other finds at its next open once it was synced,
/// and once the file was closed; in mappings that it had before, too.
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

#[test]
fn shared_mappings_of_two_mounts_meet_at_msync_close_and_open() {
    if !common::skipped() {
        shared_mappings_meet("consistency=strict");
        shared_mappings_meet("consistency=close-to-open");
    }
}

/// It was seen at the next open, or when attributes ran out: for pages of a mapping never.
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

/// A copy is limited by the size that the client's kernel last heard of, in the kernel's own
/// code, before any file system is asked; asking for the size, as cp(1) does, is enough.
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

/// Within rename(2) the kernel holds the locks that it takes to give a directory another place
/// in its tree, so that one that another mount has moved was ESTALE there.
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

/// What one's path has led to is there for a moment when another mount gives the name to another
/// file: stat(2), chmod(2), truncate(2) and open(2) of it failed with ESTALE.
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

/// Who works in a directory that others move goes on in it.
#[test]
fn whoever_is_in_a_directory_that_is_moved_stays_in_it() {
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
