//! What applications may and may not, where the client's kernel decides or asks oddly.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use crate::common;
use crate::common::Rig;

const ANN: u32 = 1001;
const BOB: u32 = 1002;
const MODES: [&str; 3] =
    ["consistency=strict,transport=classic", "consistency=strict", "consistency=close-to-open"];

/// A server and a mount of it for each mode; other users can get there.
fn in_each_mode(test: impl Fn(&mut Rig, &Path)) {
    if common::skipped() {
        return;
    }
    for options in MODES {
        eprintln!("{options}");
        let (mut rig, at) = mounted(options);
        test(&mut rig, &at);
    }
}

fn mounted(options: &str) -> (Rig, PathBuf) {
    let mut rig = Rig::new();
    fs::set_permissions(rig.path("."), fs::Permissions::from_mode(0o755)).unwrap();
    rig.serve(&[]);
    let at = rig.mount("at", options);
    fs::set_permissions(&at, fs::Permissions::from_mode(0o777)).unwrap();
    (rig, at)
}

/// Does `work` as an ordinary user without groups, on a thread of its own: raw system calls
/// change the identity of one thread.
fn as_user<T: Send>(uid: u32, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            // SAFETY: numbers only, and no groups.
            unsafe {
                assert_eq!(libc::syscall(libc::SYS_setgroups, 0, 0), 0);
                assert_eq!(libc::syscall(libc::SYS_setresgid, uid, uid, uid), 0);
                assert_eq!(libc::syscall(libc::SYS_setresuid, uid, uid, uid), 0);
            }
            work()
        });
        worker.join().unwrap()
    })
}

fn errno<T>(result: io::Result<T>) -> i32 {
    result.err().and_then(|error| error.raw_os_error()).unwrap_or(0)
}

fn c_path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

/// A file of ann's with this mode.
fn file_of_ann(path: &Path, content: &[u8], mode: u32) {
    fs::write(path, content).unwrap();
    chown(path, Some(ANN), Some(ANN)).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

const CAPABILITY: &std::ffi::CStr = c"security.capability";

/// Gives a program CAP_NET_BIND_SERVICE (`struct vfs_cap_data`, version 2, effective).
fn give_capability(path: &Path) {
    let value: Vec<u8> = [0x0200_0001u32, 0x400, 0, 0, 0].map(u32::to_le_bytes).concat();
    let path = c_path(path);
    let (name, from) = (CAPABILITY.as_ptr(), value.as_ptr().cast());
    // SAFETY: the strings outlive the call, and the value is as long as it says.
    let set = unsafe { libc::setxattr(path.as_ptr(), name, from, value.len(), 0) };
    assert_eq!(set, 0, "{}", io::Error::last_os_error());
}

fn has_capability(path: &Path) -> bool {
    let path = c_path(path);
    // SAFETY: the strings outlive the call, and nothing is written.
    let bytes =
        unsafe { libc::getxattr(path.as_ptr(), CAPABILITY.as_ptr(), std::ptr::null_mut(), 0) };
    bytes > 0
}

fn fallocate(file: &File, flags: i32) -> io::Result<()> {
    // SAFETY: numbers only.
    match unsafe { libc::fallocate(file.as_raw_fd(), flags, 0, 100) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Root's mounts were for everybody, whatever was asked for.
#[test]
fn a_mount_of_root_s_can_be_for_root_alone() {
    if common::skipped() {
        return;
    }
    for (options, refused) in [("", 0), ("noallow_other", libc::EACCES)] {
        let (rig, at) = mounted(options);
        fs::write(at.join("file"), "some").unwrap();
        assert_eq!(errno(as_user(ANN, || fs::read(at.join("file")))), refused, "{options}");
        assert_eq!(fs::read(at.join("file")).unwrap(), b"some");
        drop(rig);
    }
}

type Change = fn(&Path) -> io::Result<()>;

/// Ways to change what is in a file that one may write to.
const CHANGES: [(&str, Change); 6] = [
    ("write", |path| OpenOptions::new().write(true).open(path)?.write_all(b"x")),
    ("truncate", |path| OpenOptions::new().write(true).open(path)?.set_len(3)),
    ("truncate(2)", |path| {
        // SAFETY: the path outlives the call.
        match unsafe { libc::truncate(c_path(path).as_ptr(), 3) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }),
    ("allocate", |path| fallocate(&OpenOptions::new().write(true).open(path)?, 0)),
    ("append", |path| OpenOptions::new().append(true).open(path)?.write_all(b"x")),
    ("O_TRUNC", |path| OpenOptions::new().write(true).truncate(true).open(path).map(drop)),
];

/// The client's kernel leaves it to the server, in a flag of each of these requests.
// proves: P46
#[test]
fn a_change_of_a_program_clears_its_set_id_bits() {
    in_each_mode(|_, at| {
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
        for (what, change) in CHANGES {
            for (who, left) in [(ANN, 0o777), (BOB, 0o777), (0, 0o6777)] {
                let path = at.join(format!("{what}-{who}"));
                file_of_ann(&path, b"a program", 0o6777);
                as_user(who, || change(&path)).unwrap_or_else(|error| panic!("{what}: {error}"));
                assert_eq!(mode(&path), left, "{what} by {who}");
            }
        }
        let (path, other) = (at.join("copied"), at.join("other"));
        fs::write(&other, "another program").unwrap();
        file_of_ann(&path, b"a program", 0o6777);
        let copy = || {
            let to = OpenOptions::new().write(true).open(&path)?;
            io::copy(&mut File::open(&other)?, &mut &to)
        };
        assert_eq!((as_user(BOB, copy).unwrap(), mode(&path)), (15, 0o777));
        file_of_ann(&path, b"a program", 0o6777);
        as_user(ANN, || chown(&path, None, Some(ANN))).unwrap();
        assert_eq!(mode(&path), 0o777, "a change of the group that changes nothing");
    });
}

/// The client's kernel removes them itself, in the name of the caller, who may not remove
/// attributes of that kind. Each of these calls failed with EPERM.
// proves: P47
#[test]
fn a_change_of_a_program_clears_its_capabilities() {
    let writable = |path: &Path| OpenOptions::new().write(true).open(path);
    in_each_mode(|_, at| {
        for (what, change) in CHANGES {
            for who in [ANN, BOB] {
                let path = at.join(format!("{what}-{who}"));
                file_of_ann(&path, b"a program", 0o666);
                give_capability(&path);
                as_user(who, || change(&path)).unwrap_or_else(|error| panic!("{what}: {error}"));
                assert!(!has_capability(&path), "{what} by {who}");
            }
        }
        let path = at.join("given");
        file_of_ann(&path, b"a program", 0o644);
        give_capability(&path);
        assert_eq!(errno(as_user(BOB, || writable(&path))), libc::EACCES);
        assert!(has_capability(&path), "nobody has changed it");
        for mode in [0o644, 0o666] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let given = as_user(BOB, || chown(&path, Some(BOB), None));
            assert_eq!((errno(given), has_capability(&path)), (libc::EPERM, true), "{mode:o}");
        }
        as_user(ANN, || chown(&path, None, Some(ANN))).unwrap();
        assert!(!has_capability(&path), "chown");
        give_capability(&path);
        let other = at.join("other");
        fs::write(&other, "another program").unwrap();
        let copied = as_user(ANN, || {
            let to = OpenOptions::new().write(true).open(&path)?;
            io::copy(&mut File::open(&other)?, &mut &to)
        });
        assert_eq!((copied.unwrap(), has_capability(&path)), (15, false));
    });
}

/// The right to run a program is not the right to read it, and is no less.
// proves: P48
#[test]
fn the_right_to_execute_is_asked_of_the_server() {
    in_each_mode(|rig, at| {
        let program = at.join("program");
        rig.copy_program(Path::new("/bin/true"), &program);
        let mode = |mode| fs::set_permissions(&program, fs::Permissions::from_mode(mode)).unwrap();
        let runs =
            |rig: &Rig| rig.run_as(ANN, &[], program.to_str().unwrap(), &[]).status.success();
        mode(0o711);
        assert!(runs(rig), "a program that cannot be read");
        assert_eq!(errno(as_user(ANN, || File::open(&program))), libc::EACCES);
        mode(0o744);
        assert!(!runs(rig), "a program that others may only read");
        mode(0o755);
        assert!(runs(rig));
    });
}

/// Reads all of a process's memory that is mapped from `path`.
fn read_mapped(pid: i32, path: &Path) -> io::Result<usize> {
    let memory = File::open(format!("/proc/{pid}/mem"))?;
    let mut read = 0;
    for line in fs::read_to_string(format!("/proc/{pid}/maps"))?.lines() {
        let Some((start, end)) = line.split(' ').next().and_then(|range| range.split_once('-'))
        else {
            continue;
        };
        if line.ends_with(path.to_str().unwrap()) {
            let address = |text| u64::from_str_radix(text, 16).unwrap();
            let mut bytes = vec![0; (address(end) - address(start)) as usize];
            memory.read_exact_at(&mut bytes, address(start))?;
            read += bytes.len();
        }
    }
    Ok(read)
}

/// What was opened to be executed is opened again for those who have it, as any file is.
// proves: P48
#[test]
fn a_program_that_runs_goes_on_over_a_restart_whatever_its_mode() {
    in_each_mode(|rig, at| {
        let program = at.join("program");
        rig.copy_program(Path::new("/bin/bash"), &program);
        fs::set_permissions(&program, fs::Permissions::from_mode(0o711)).unwrap();
        let script = r#"exec "$AT/program" -c 'until [ -e "$AT/go" ]; do sleep 0.05; done'"#;
        let running = rig.start_as(ANN, script, at);
        let exe = format!("/proc/{}/exe", running.0);
        common::wait_for("the program", || fs::read_link(&exe).is_ok_and(|exe| exe == program));
        fs::set_permissions(&program, fs::Permissions::from_mode(0o600)).unwrap();
        rig.end_server(libc::SIGKILL);
        rig.serve(&[]);
        let read = read_mapped(running.0, &program).expect("a page of the program");
        assert!(read >= 4096, "{read}");
        fs::write(at.join("go"), "").unwrap();
        assert!(rig.end_of(running).success());
    });
}

/// Under `strict` the client's kernel opens these without looking at their modes.
// proves: P49
#[test]
fn special_files_are_for_those_who_may_open_them() {
    in_each_mode(|_, at| {
        let make = |name: &str, mode: u32, device: libc::dev_t| {
            let path = at.join(name);
            // SAFETY: the path outlives the call.
            assert_eq!(unsafe { libc::mknod(c_path(&path).as_ptr(), mode, device) }, 0);
            fs::set_permissions(&path, fs::Permissions::from_mode(mode & 0o777)).unwrap();
            path
        };
        let open = |path: &Path| {
            OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path)
        };
        let null = libc::makedev(1, 3);
        let device = make("device", libc::S_IFCHR | 0o600, null);
        open(&device).unwrap().write_all(b"gone").unwrap();
        assert_ne!(errno(as_user(ANN, || open(&device))), 0, "a device of root's");
        let seen = as_user(ANN, || fs::symlink_metadata(&device)).unwrap();
        assert!(seen.file_type().is_char_device() && seen.mode() & 0o777 == 0o600);
        open(&device).unwrap().write_all(b"gone").unwrap();
        assert_eq!(fs::metadata(&device).unwrap().rdev(), null);
        let for_all = make("for-all", libc::S_IFCHR | 0o666, null);
        as_user(ANN, || open(&for_all).and_then(|mut null| null.write_all(b"gone"))).unwrap();

        let fifo = make("fifo", libc::S_IFIFO | 0o600, 0);
        let reader = open(&fifo).unwrap();
        if let Ok(mut other) = as_user(ANN, || open(&fifo)) {
            other.write_all(b"not for you").unwrap();
        }
        let heard = io::Read::read(&mut &reader, &mut [0; 20]);
        assert_eq!(errno(heard), libc::EAGAIN, "somebody got into root's FIFO");
        fs::set_permissions(&fifo, fs::Permissions::from_mode(0o622)).unwrap();
        let write = || OpenOptions::new().write(true).open(&fifo)?.write(b"for you");
        as_user(ANN, write).unwrap();
        assert_eq!(io::Read::read(&mut &reader, &mut [0; 20]).unwrap(), 7);

        let socket = at.join("socket");
        let _listener = UnixListener::bind(&socket).unwrap();
        fs::set_permissions(&socket, fs::Permissions::from_mode(0o600)).unwrap();
        UnixStream::connect(&socket).unwrap();
        assert_ne!(errno(as_user(ANN, || UnixStream::connect(&socket))), 0, "root's socket");
        fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
        as_user(ANN, || UnixStream::connect(&socket)).unwrap();
        as_user(ANN, || fs::rename(&fifo, at.join("moved"))).unwrap();
        as_user(ANN, || fs::remove_file(&device)).unwrap();
    });
}

const APPEND: libc::c_long = 0x20; // FS_APPEND_FL

fn set_flags(file: &File, flags: libc::c_long) -> io::Result<()> {
    const SET: libc::c_ulong = 0x4008_6602; // FS_IOC_SETFLAGS
    // SAFETY: the kernel reads an int; there is room for a long.
    match unsafe { libc::ioctl(file.as_raw_fd(), SET, &flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A file that nobody could remove, until this is dropped, whatever becomes of the test.
struct AppendOnly(PathBuf);

impl Drop for AppendOnly {
    fn drop(&mut self) {
        let _ = File::open(&self.0).and_then(|file| set_flags(&file, 0)); // it may be in order
    }
}

/// chattr +a: the file system below must know that a write is an append before it is opened.
// proves: P50
#[test]
fn a_file_that_takes_appends_only_takes_them() {
    in_each_mode(|rig, at| {
        let path = at.join("log");
        fs::write(&path, "one").unwrap();
        let _removable = AppendOnly(rig.path("export/log")); // without the mount, which may be dead
        if let Err(error) = set_flags(&File::open(&path).unwrap(), APPEND) {
            return eprintln!("left out: {error}");
        }
        let writable = OpenOptions::new().write(true).open(&path);
        assert_eq!(errno(writable), libc::EPERM);
        let mut log = OpenOptions::new().append(true).open(&path).unwrap();
        log.write_all(b" two").unwrap();
        rig.end_server(libc::SIGKILL);
        rig.serve(&[]);
        log.write_all(b" three").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"one two three");
        assert_eq!(errno(log.set_len(0)), libc::EPERM);
        set_flags(&File::open(&path).unwrap(), 0).unwrap();
    });
}

/// open(2): such a descriptor takes both rights and gives neither.
// proves: P50
#[test]
fn both_bits_of_the_access_mode_take_both_rights() {
    in_each_mode(|_, at| {
        let path = at.join("file");
        file_of_ann(&path, b"content", 0o644);
        let open = || {
            // SAFETY: the path outlives the call.
            let fd = unsafe { libc::open(c_path(&path).as_ptr(), libc::O_ACCMODE) };
            if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(fd) }
        };
        let fd = as_user(ANN, open).unwrap();
        // SAFETY: ours, and nobody else's.
        let file = unsafe { <File as std::os::fd::FromRawFd>::from_raw_fd(fd) };
        assert_eq!(errno(file.read_at(&mut [0; 4], 0)), libc::EBADF);
        assert_eq!(errno(file.write_at(b"text", 0)), libc::EBADF);
        assert_eq!(errno(as_user(BOB, open)), libc::EACCES);
    });
}

/// Whether the server can do what takes one of its capabilities.
type Needs = fn(&Rig, &Path) -> bool;

fn set_attribute(path: &Path, name: &std::ffi::CStr, value: &[u8]) -> bool {
    let path = c_path(path);
    // SAFETY: the strings and the value outlive the call.
    let set = unsafe {
        libc::setxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0)
    };
    set == 0
}

/// What each capability is for. Names below `at` are new.
const NEEDS: [(&str, Needs); 11] = [
    ("CAP_SETUID", |_, at| made_by_ann(at).is_ok_and(|made| made.uid() == ANN)),
    ("CAP_SETGID", |_, at| made_by_ann(at).is_ok_and(|made| made.gid() == ANN)),
    ("CAP_CHOWN", |_, at| made(at, "chown").is_some_and(|at| chown(at, Some(BOB), None).is_ok())),
    ("CAP_DAC_OVERRIDE", |_, at| fs::write(at.join("closed"), "x").is_ok()),
    ("CAP_FOWNER", |_, at| {
        fs::set_permissions(at.join("closed"), fs::Permissions::from_mode(0o600)).is_ok()
    }),
    ("CAP_FSETID", |_, at| {
        let path = at.join("closed");
        let set = fs::set_permissions(&path, fs::Permissions::from_mode(0o2710));
        set.is_ok() && fs::metadata(path).is_ok_and(|meta| meta.mode() & 0o2000 != 0)
    }),
    ("CAP_MKNOD", |_, at| {
        let path = c_path(&at.join("null"));
        // SAFETY: the path outlives the call.
        unsafe { libc::mknod(path.as_ptr(), libc::S_IFCHR | 0o600, libc::makedev(1, 3)) == 0 }
    }),
    ("CAP_DAC_READ_SEARCH", |rig, _| rig.demand(&["status", "data"]).contains("native ids")),
    ("CAP_LINUX_IMMUTABLE", |_, at| {
        let Some(path) = made(at, "append-only") else { return false };
        let file = File::open(path).unwrap();
        set_flags(&file, APPEND).and_then(|()| set_flags(&file, 0)).is_ok()
    }),
    ("CAP_SETFCAP", |_, at| {
        let value: Vec<u8> = [0x0200_0001u32, 1 << 10, 0, 0, 0].map(u32::to_le_bytes).concat();
        made(at, "program").is_some_and(|path| set_attribute(&path, CAPABILITY, &value))
    }),
    ("CAP_SYS_ADMIN", |_, at| {
        made(at, "trusted").is_some_and(|path| set_attribute(&path, c"trusted.dray", b"1"))
    }),
];

fn made(at: &Path, name: &str) -> Option<PathBuf> {
    let path = at.join(name);
    fs::write(&path, "").ok().map(|()| path)
}

fn made_by_ann(at: &Path) -> io::Result<fs::Metadata> {
    as_user(ANN, || File::create(at.join("of-ann"))?.metadata())
}

/// The capabilities that packaging/dray.service leaves the server.
fn capabilities_of_the_unit() -> Vec<&'static str> {
    let unit = include_str!("../../../../packaging/dray.service");
    let sets = unit.lines().filter_map(|line| line.strip_prefix("CapabilityBoundingSet="));
    sets.flat_map(str::split_ascii_whitespace).collect()
}

/// Names of the `NEEDS` that a server with these capabilities fails.
fn fails(names: &[&str]) -> Vec<&'static str> {
    let mut rig = Rig::new();
    fs::set_permissions(rig.path("."), fs::Permissions::from_mode(0o755)).unwrap();
    let export = rig.path("export");
    fs::set_permissions(&export, fs::Permissions::from_mode(0o777)).unwrap();
    file_of_ann(&export.join("closed"), b"", 0);
    rig.serve_with_capabilities(names, &[]);
    let Some(at) = rig.try_mount("at") else { return NEEDS.map(|(name, _)| name).to_vec() };
    let failed = NEEDS.iter().filter(|(_, needs)| !needs(&rig, &at)).map(|(name, _)| *name);
    let failed = failed.collect();
    rig.umount(&at);
    failed
}

#[test]
fn the_unit_leaves_the_server_the_capabilities_that_it_needs_and_no_others() {
    if common::skipped() {
        return;
    }
    let all = capabilities_of_the_unit();
    let left_out = fails(&["CAP_ALL"]); // for what the file system here has not
    left_out.iter().for_each(|name| eprintln!("left out: {name} is not needed here"));
    assert_eq!(fails(&all), left_out);
    for (without, _) in NEEDS.iter().filter(|(name, _)| !left_out.contains(name)) {
        let rest: Vec<_> = all.iter().copied().filter(|name| name != without).collect();
        assert_eq!(rest.len() + 1, all.len(), "the unit does not name {without}");
        assert!(fails(&rest).contains(without), "{without} is not needed");
    }
    let port = (600..1024).find(|port| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok());
    let listen = format!("tcp://127.0.0.1:{}", port.unwrap());
    let mut rig = Rig::new();
    rig.serve_with_capabilities(&all, &["--listen", &listen]);
    rig.end_server(libc::SIGTERM);
    const PORTS: &str = "CAP_NET_BIND_SERVICE";
    let rest: Vec<_> = all.iter().copied().filter(|name| *name != PORTS).collect();
    let said = rig.run_server_with_capabilities(&rest, &["--listen", &listen]);
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(said.contains("ports below 1024"), "{said}");
    assert_eq!(all.len(), NEEDS.len() + 1, "{all:?}");
}
