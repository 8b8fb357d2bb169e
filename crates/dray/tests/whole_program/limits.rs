//! Names, disks and descriptors at their limits, and clients that are not wanted any more:
//! the real command, real mounts. Needs root.

use std::ffi::{CString, OsStr};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use crate::common;
use crate::common::{Rig, is_mounted, wait_for};

fn errno<T>(result: io::Result<T>) -> i32 {
    result.err().and_then(|error| error.raw_os_error()).unwrap_or(0)
}

fn flock(file: &File) -> io::Result<()> {
    // SAFETY: no memory is passed.
    match unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A tmpfs, taken down in the end.
struct Tmpfs<'a>(&'a Path);

impl<'a> Tmpfs<'a> {
    fn new(at: &'a Path, options: &str) -> io::Result<Tmpfs<'a>> {
        let (path, options) = (c_path(at), CString::new(options)?);
        // SAFETY: C strings that outlive the call.
        let result = unsafe {
            let (kind, data) = (c"tmpfs".as_ptr(), options.as_ptr().cast());
            libc::mount(kind, path.as_ptr(), kind, 0, data)
        };
        if result == 0 { Ok(Tmpfs(at)) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for Tmpfs<'_> {
    fn drop(&mut self) {
        // SAFETY: a C string that outlives the call. What is not mounted stays so.
        unsafe { libc::umount2(c_path(self.0).as_ptr(), libc::MNT_DETACH) };
    }
}

fn c_path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

// proves: P75
#[test]
fn an_evicted_mount_fails_its_calls_and_a_new_one_works() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let (at, other) = (rig.mount("mount", ""), rig.mount("other", ""));
    fs::write(at.join("file"), "data").unwrap();
    let mut file = File::open(at.join("file")).unwrap();
    flock(&file).unwrap();
    let theirs = File::open(other.join("file")).unwrap();
    assert_eq!(errno(flock(&theirs)), libc::EAGAIN);
    let status = rig.demand(&["status", "data", "--json", "--interval", "0"]);
    let server: serde_json::Value = serde_json::from_str(status.lines().next().unwrap()).unwrap();
    let clients = server["clients"].as_array().unwrap();
    let holder = clients.iter().find(|client| client["written_bytes"] == 4).unwrap();
    rig.demand(&["evict", holder["session"].as_str().unwrap()]);

    flock(&theirs).expect("the lock is free at once");
    assert_eq!(errno(file.read(&mut [0; 4])), libc::ESHUTDOWN);
    for _ in 0..3 {
        assert_eq!(errno(fs::metadata(at.join("file"))), libc::ESHUTDOWN, "it stays out");
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
    assert_eq!(fs::read(other.join("file")).unwrap(), b"data", "nobody else is disturbed");
    let place = at.to_str().unwrap();
    let status = rig.demand(&["status", place, "--interval", "0"]);
    assert!(status.contains("EVICTED"), "{status}");
    let status = rig.demand(&["status", place, "--json", "--interval", "0"]);
    assert!(status.contains("\"evicted\":true"), "{status}");
    drop(file);
    rig.umount(&at);
    let again = rig.mount("again", "");
    assert_eq!(fs::read(again.join("file")).unwrap(), b"data");
    drop(theirs);
    rig.umount(&again);
    rig.umount(&other);
}

/// The successor of an evicted mount's daemon cannot go on either, and no process may wait for it
/// for ever.
// proves: P75
#[test]
fn an_evicted_mount_whose_daemon_dies_is_ended() {
    if common::skipped() {
        return;
    }
    let (rig, at) = Rig::mounted("");
    let status = |target: &str| -> serde_json::Value {
        let text = rig.demand(&["status", target, "--json", "--interval", "0"]);
        serde_json::from_str(text.lines().next().unwrap()).unwrap()
    };
    let daemon = status(at.to_str().unwrap())["pid"].as_i64().unwrap();
    let session = status("data")["clients"][0]["session"].as_str().unwrap().to_owned();
    rig.demand(&["evict", &session]);
    // SAFETY: no memory is passed; the process is the mount's.
    assert_eq!(unsafe { libc::kill(daemon as i32, libc::SIGKILL) }, 0);
    wait_for("the end of the mount", || !is_mounted(&at));
}

// proves: P36
#[test]
fn names_of_every_kind_and_length() {
    if common::skipped() {
        return;
    }
    let (mut rig, at) = Rig::mounted("");
    let every_byte: Vec<u8> = (1..=255).filter(|byte| *byte != b'/').collect();
    let names: Vec<Vec<u8>> = vec![
        every_byte,
        vec![b'x'; 255],
        vec![0xff; 255],
        b"\n \t\x1b[31m".to_vec(),
        "\u{fc}\u{20ac}".as_bytes().to_vec(),
        b"-rf *".to_vec(),
    ];
    for name in &names {
        let path = at.join(OsStr::from_bytes(name));
        fs::write(&path, name).unwrap();
        assert_eq!(&fs::read(&path).unwrap(), name);
        let below = rig.path("export").join(OsStr::from_bytes(name));
        assert_eq!(&fs::read(&below).unwrap(), name, "the same bytes below");
    }
    let mut listed: Vec<_> =
        fs::read_dir(&at).unwrap().map(|e| e.unwrap().file_name().as_bytes().to_vec()).collect();
    let mut expected = names.clone();
    listed.sort();
    expected.sort();
    assert_eq!(listed, expected);

    let long = at.join(OsStr::from_bytes(&[b'x'; 256]));
    let too_long = [
        errno(fs::metadata(&long)),
        errno(File::create(&long)),
        errno(fs::create_dir(&long)),
        errno(fs::rename(at.join("-rf *"), &long)),
        errno(fs::hard_link(at.join("-rf *"), &long)),
        errno(fs::remove_file(&long)),
        errno(std::os::unix::fs::symlink("target", &long)),
    ];
    assert_eq!(too_long, [libc::ENAMETOOLONG; 7]);
    let dir = File::open(&at).unwrap();
    // SAFETY: a C string that outlives the call; no other memory is passed.
    let empty = unsafe { libc::openat(dir.as_raw_fd(), c"".as_ptr(), libc::O_RDONLY) };
    assert_eq!((empty, io::Error::last_os_error().raw_os_error()), (-1, Some(libc::ENOENT)));
    drop(dir);
    rig.umount(&at);
}

fn open_dir(dir: &OwnedFd, name: &std::ffi::CStr) -> OwnedFd {
    // SAFETY: a C string that outlives the call; the descriptor is new and ours.
    unsafe {
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
        let fd = libc::openat(dir.as_raw_fd(), name.as_ptr(), flags);
        assert!(fd >= 0, "{}", io::Error::last_os_error());
        OwnedFd::from_raw_fd(fd)
    }
}

// proves: P36
#[test]
fn paths_as_long_as_they_may_be_and_trees_deeper_than_that() {
    if common::skipped() {
        return;
    }
    let (mut rig, at) = Rig::mounted("");
    let name = CString::new(vec![b'd'; 255]).unwrap();
    // 64 levels of 255 bytes: four times PATH_MAX.
    let mut dirs = vec![OwnedFd::from(File::open(&at).unwrap())];
    for _ in 0..64 {
        let above = dirs.last().unwrap();
        // SAFETY: a C string that outlives the call.
        let made = unsafe { libc::mkdirat(above.as_raw_fd(), name.as_ptr(), 0o755) };
        assert_eq!(made, 0, "{}", io::Error::last_os_error());
        dirs.push(open_dir(above, &name));
    }
    let deepest = dirs.last().unwrap();
    let (file, create) = (c"file", libc::O_CREAT | libc::O_WRONLY);
    // SAFETY: a C string that outlives the call; the descriptor is new and ours.
    let mut made = unsafe {
        File::from_raw_fd(libc::openat(deepest.as_raw_fd(), file.as_ptr(), create, 0o644))
    };
    made.write_all(b"deep").unwrap();
    drop(made);
    let level = "d".repeat(255);
    let path = |levels: usize| at.join(vec![level.as_str(); levels].join("/"));
    let fitting = (4095 - at.as_os_str().len()) / 256;
    assert!(fs::metadata(path(fitting)).unwrap().is_dir());
    assert_eq!(errno(fs::metadata(path(16))), libc::ENAMETOOLONG);
    // SAFETY: C strings that outlive the calls.
    unsafe {
        assert_eq!(libc::unlinkat(deepest.as_raw_fd(), file.as_ptr(), 0), 0);
        while let Some(below) = dirs.pop() {
            drop(below);
            let Some(above) = dirs.last() else { break };
            let gone = libc::unlinkat(above.as_raw_fd(), name.as_ptr(), libc::AT_REMOVEDIR);
            assert_eq!(gone, 0, "{}", io::Error::last_os_error());
        }
    }
    assert_eq!(fs::read_dir(&at).unwrap().count(), 0);
    rig.umount(&at);
}

// proves: P134
#[test]
fn a_full_disk_is_an_error_of_the_write_and_of_nothing_else() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let export = rig.path("export");
    let _small = Tmpfs::new(&export, "size=4m").unwrap();
    rig.serve(&[]);
    let at = rig.mount("mount", "");
    fs::write(at.join("kept"), "kept").unwrap();
    let mut large = File::create(at.join("large")).unwrap();
    let full = (0..100).find_map(|_| large.write_all(&vec![1; 1 << 20]).err());
    assert_eq!(full.and_then(|error| error.raw_os_error()), Some(libc::ENOSPC));
    assert_eq!(fs::read(at.join("kept")).unwrap(), b"kept");
    drop(large);
    fs::remove_file(at.join("large")).unwrap();
    fs::write(at.join("next"), vec![2; 1 << 20]).unwrap();
    rig.umount(&at);
    rig.end_server(libc::SIGTERM);
}

/// If a write of aio(7) fails, or one past the cache, the kernel cuts the file to the size that it
/// believes in. What another mount had written behind that was lost.
// proves: P20
#[test]
fn a_write_that_fails_cuts_off_nothing_that_others_wrote() {
    const OTHERS_BYTES: usize = 1 << 20;
    common::on_transports(|transport| {
        for mode in ["strict", "close-to-open"] {
            let mut rig = Rig::new();
            let export = rig.path("export");
            let _small = Tmpfs::new(&export, "size=4m").unwrap();
            let empty_bytes = free_bytes(&export);
            rig.serve(&[]);
            let options = format!("consistency={mode},{transport}");
            let (one, other) = (rig.mount("one", &options), rig.mount("other", &options));
            for way in ["aio", "aio and O_DIRECT", "O_DIRECT", "pwrite"] {
                let flags = if way.contains("DIRECT") { libc::O_DIRECT } else { 0 };
                let mut open = File::options();
                let file = open.read(true).write(true).create(true).custom_flags(flags);
                let file = file.open(one.join("file")).unwrap();
                fs::write(other.join("file"), vec![b'o'; OTHERS_BYTES]).unwrap();
                let mut full = File::create(export.join("full")).unwrap();
                while full.write_all(&[0; 4096]).is_ok() {}
                let data = Page(vec![b'x'; 12_288]);
                let at = 2 * OTHERS_BYTES as u64;
                let write = || match way.starts_with("aio") {
                    true => write_by_aio(&file, at, data.aligned()),
                    false => file.write_at(data.aligned(), at),
                };
                let written = write();
                let case = format!("{way}, {options}: {written:?}");
                assert!(written.is_err(), "{case}");
                let left = fs::read(export.join("file")).unwrap();
                assert!(left == [b'o'; OTHERS_BYTES], "{case}: {} bytes are left", left.len());
                // A program that truncates the file itself means it: here behind a write that fails within
                // the file, which the kernel does not undo.
                file.set_len(2 * at).unwrap();
                assert!(write().is_err(), "{case}");
                file.set_len(10).unwrap();
                assert_eq!(fs::metadata(export.join("file")).unwrap().len(), 10, "{case}");
                drop((file, full));
                fs::remove_file(export.join("full")).unwrap();
                fs::remove_file(one.join("file")).unwrap();
                // The server hears of a close a little later.
                wait_for("the space of both", || free_bytes(&export) == empty_bytes);
            }
            [one, other].iter().for_each(|mount| rig.umount(mount));
            rig.end_server(libc::SIGTERM);
        }
    });
}

/// Once any write had failed, cutting by io_uring(7) was answered and not done. It comes from a
/// thread that is not seen to be in ftruncate(2).
// proves: P20
#[test]
fn a_file_that_io_uring_cuts_is_cut_though_writes_failed() {
    common::on_transports(|options| {
        let mut rig = Rig::new();
        let export = rig.path("export");
        let _small = Tmpfs::new(&export, "size=1m").unwrap();
        rig.serve(&[]);
        let at = rig.mount("mount", options);
        fs::write(at.join("file"), "0123456789").unwrap();
        assert!(fs::write(at.join("big"), vec![b'x'; 2 << 20]).is_err());
        fs::remove_file(at.join("big")).unwrap();
        let file = File::options().write(true).open(at.join("file")).unwrap();
        match cut_by_io_uring(&file, 4) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                eprintln!("left out: io_uring of this kernel cuts no files");
            }
            cut => {
                cut.unwrap();
                assert_eq!(fs::metadata(export.join("file")).unwrap().len(), 4);
            }
        }
        drop(file);
        rig.umount(&at);
        rig.end_server(libc::SIGTERM);
    });
}

/// `IORING_OP_FTRUNCATE` (Linux 6.9).
fn cut_by_io_uring(file: &File, size_bytes: u64) -> io::Result<()> {
    use io_uring::{IoUring, opcode, types};
    let mut ring = IoUring::new(2)?;
    let entry = opcode::Ftruncate::new(types::Fd(file.as_raw_fd()), size_bytes).build();
    // SAFETY: no memory is passed, and the file is open until the ring has answered.
    unsafe { ring.submission().push(&entry).unwrap() };
    ring.submit_and_wait(1)?;
    let result = ring.completion().next().unwrap().result();
    if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) }
}

fn free_bytes(at: &Path) -> u64 {
    // SAFETY: the kernel fills in what is zero, and so valid, before.
    unsafe {
        let mut stat: libc::statvfs = std::mem::zeroed();
        assert_eq!(libc::statvfs(c_path(at).as_ptr(), &mut stat), 0);
        stat.f_bfree * stat.f_frsize
    }
}

/// Data of which a part begins at a page and is as long as some.
struct Page(Vec<u8>);

impl Page {
    fn aligned(&self) -> &[u8] {
        let before = self.0.as_ptr().align_offset(4096);
        &self.0[before..before + 4096]
    }
}

/// Writes by aio(7), and waits for what becomes of it.
fn write_by_aio(file: &File, at: u64, data: &[u8]) -> io::Result<usize> {
    const PWRITE: u64 = 1; // IOCB_CMD_PWRITE
    let fd = file.as_raw_fd() as u64;
    // struct iocb in linux/aio_abi.h
    let request = [0, 0, fd << 32 | PWRITE, data.as_ptr() as u64, data.len() as u64, at, 0, 0];
    let (mut context, mut event) = (0u64, [0i64; 4]);
    let none = std::ptr::null::<libc::timespec>();
    // SAFETY: everything outlives the calls, the last of which waits for the end.
    let done = unsafe {
        assert_eq!(libc::syscall(libc::SYS_io_setup, 1, &mut context), 0);
        let done = match libc::syscall(libc::SYS_io_submit, context, 1, &[&request]) {
            1 => libc::syscall(libc::SYS_io_getevents, context, 1, 1, &mut event, none),
            error => error,
        };
        let error = io::Error::last_os_error();
        libc::syscall(libc::SYS_io_destroy, context);
        if done == 1 { event[2] } else { return Err(error) }
    };
    usize::try_from(done).map_err(|_| io::Error::from_raw_os_error(-done as i32))
}

/// The journal of a session needs room in the state directory. Without it a client learns
/// so; those that are there go on.
// proves: P134
#[test]
fn a_full_state_directory_refuses_new_clients_and_keeps_the_old() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let state = rig.path("state");
    let _small = Tmpfs::new(&state, "size=200k,mode=700").unwrap();
    rig.serve(&[]);
    let at = rig.mount("mount", "");
    let filled = fs::write(state.join("filler"), vec![1; 1 << 20]);
    assert_eq!(errno(filled), libc::ENOSPC);
    let refused = rig.path("refused");
    fs::create_dir(&refused).unwrap();
    let output = rig.run(&["mount", &rig.target(), refused.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(said.contains("cannot note a new session"), "{said}");
    for number in 0..100 {
        fs::create_dir(at.join(format!("dir{number}"))).unwrap();
    }
    fs::remove_file(state.join("filler")).unwrap();
    let second = rig.mount("second", "");
    assert!(second.join("dir99").is_dir());
    rig.umount(&second);
    rig.umount(&at);
    rig.end_server(libc::SIGTERM);
}

/// Files that are removed while they are open took the last one: nothing could be read or listed
/// any more.
// proves: P134
#[test]
fn a_server_of_hardly_any_descriptors_refuses_removals_and_serves_the_rest() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve_with_descriptors(80, &[]);
    let at = rig.mount("mount", "");
    let path = |number: usize| at.join(format!("file{number}"));
    let create =
        |number| fs::File::options().read(true).write(true).create_new(true).open(path(number));
    let files: Vec<File> = (0..200).map(|number| create(number).unwrap()).collect();
    let removed = (0..200).find_map(|number| fs::remove_file(path(number)).err().zip(Some(number)));
    let (error, number) = removed.expect("more were removed than the server has descriptors");
    assert_eq!(error.raw_os_error(), Some(libc::ENFILE));
    assert!(number > 0);
    for file in &files {
        std::os::unix::fs::FileExt::write_at(file, b"text", 0).unwrap();
    }
    assert_eq!(fs::read_dir(&at).unwrap().count(), 200 - number);
    drop(files);
    fs::remove_file(path(number)).unwrap();
    rig.umount(&at);
}

// proves: P134
#[test]
fn a_server_of_few_descriptors_keeps_thousands_of_files_open() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve_with_descriptors(256, &[]);
    let at = rig.mount("mount", "");
    let mut files: Vec<File> = (0..2000)
        .map(|number| {
            let path = at.join(format!("file{number}"));
            let mut options = fs::OpenOptions::new();
            let mut file = options.read(true).write(true).create_new(true).open(path).unwrap();
            file.write_all(format!("{number}").as_bytes()).unwrap();
            file
        })
        .collect();
    for (number, file) in files.iter_mut().enumerate() {
        let mut text = [0; 8];
        let read = std::os::unix::fs::FileExt::read_at(file, &mut text, 0).unwrap();
        assert_eq!(&text[..read], format!("{number}").as_bytes());
    }
    // A crowd of connections takes the descriptors that are left. The mount goes on, and
    // the server takes clients again when the crowd has gone.
    let socket = rig.path("socket");
    let crowd: Vec<_> =
        (0..300).map_while(|_| std::os::unix::net::UnixStream::connect(&socket).ok()).collect();
    fs::write(at.join("more"), "more").unwrap();
    drop(crowd);
    drop(files);
    let second = rig.path("second");
    fs::create_dir(&second).unwrap();
    let (target, at_second) = (rig.target(), second.to_str().unwrap().to_owned());
    wait_for("a second mount", || rig.run(&["mount", &target, &at_second]).status.success());
    assert_eq!(fs::read(second.join("more")).unwrap(), b"more");
    rig.umount(&second);
    rig.umount(&at);
}
