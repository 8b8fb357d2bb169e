//! Which transport a mount takes, what it says about that, and mounts of ordinary users.

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::common;
use crate::common::daemons::wait_for_daemon;
use crate::common::{Rig, is_mounted, wait_for};
use serde_json::Value;

/// A user without any rights that every machine has (fusermount3 wants a name): nobody.
const USER: u32 = 65_534;

/// Whether this machine's kernel offers rings that `auto` takes.
fn has_ring() -> bool {
    let switch = fs::read_to_string("/sys/module/fuse/parameters/enable_uring");
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map(|number| number.parse::<u32>().unwrap_or(0));
    let release = (numbers.next().unwrap(), numbers.next().unwrap());
    switch.is_ok_and(|text| text.starts_with('Y')) && release >= (6, 18)
}

fn status(rig: &Rig, at: &Path) -> Value {
    let text = rig.demand(&["status", at.to_str().unwrap(), "--json"]);
    serde_json::from_str(&text).unwrap()
}

// proves: P100
#[test]
fn a_mount_chooses_its_transport_and_says_why() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let forced = rig.mount("forced", "transport=classic");
    let shown = status(&rig, &forced);
    assert_eq!(
        (&shown["transport"], &shown["transport_reason"]),
        (&"classic".into(), &Value::Null)
    );
    let chosen = rig.mount("chosen", "");
    fs::write(chosen.join("file"), "some").unwrap();
    assert_eq!(fs::read(forced.join("file")).unwrap(), b"some");
    let shown = status(&rig, &chosen);
    if has_ring() {
        assert_eq!(shown["transport"], "uring", "{shown}");
        assert_eq!(shown["transport_reason"], Value::Null);
    } else {
        assert_eq!(shown["transport"], "classic");
        assert!(shown["transport_reason"].as_str().is_some_and(|why| !why.is_empty()), "{shown}");
        let text = rig.demand(&["status", chosen.to_str().unwrap()]);
        assert!(text.contains("no ring: "), "{text}");
    }
    rig.umount(&forced);
    rig.umount(&chosen);
}

// proves: P347
#[test]
fn reads_and_writes_larger_than_max_io_are_several_requests() {
    if common::skipped() {
        return;
    }
    const SIZE: usize = 512 << 10;
    let mut rig = Rig::new();
    rig.serve(&[]);
    let (smaller, usual) = (rig.mount("smaller", "max_io=128K"), rig.mount("usual", ""));
    for (at, requests) in [(&smaller, SIZE / (128 << 10)), (&usual, 1)] {
        // In memory that begins where a page does. Under strict each call is sent as it is.
        let mut memory = vec![7u8; SIZE + 4096];
        let begin = memory.as_ptr().align_offset(4096);
        let data = &mut memory[begin..begin + SIZE];
        let file = fs::File::create_new(at.join(format!("{requests}"))).unwrap();
        file.write_all_at(data, 0).unwrap();
        data.fill(0);
        let file = fs::File::open(at.join(format!("{requests}"))).unwrap();
        file.read_exact_at(data, 0).unwrap();
        assert!(data.iter().all(|byte| *byte == 7));
        let ops = &status(&rig, at)["ops"];
        assert_eq!((&ops["write"], &ops["read"]), (&requests.into(), &requests.into()), "{at:?}");
    }
    rig.umount(&smaller);
    rig.umount(&usual);
}

/// Context switches of all threads of a process since they began, of its own will.
fn switches(pid: i32) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let count = |task: fs::DirEntry| {
        let status = fs::read_to_string(task.path().join("status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        line.trim().parse::<u64>().ok()
    };
    tasks.flatten().filter_map(count).sum()
}

/// A mount whose caller has ended makes no wake-ups.
#[test]
fn workers_of_a_classic_mount_rest_after_a_caller() {
    if common::skipped() {
        return;
    }
    let (mut rig, at) = Rig::mounted("transport=classic");
    fs::write(at.join("file"), "some").unwrap();
    let daemon = wait_for_daemon(&at);
    for _ in 0..2_000 {
        drop(fs::File::open(at.join("file")).unwrap());
    }
    wait_for("a second without a wake-up", || {
        let before = switches(daemon);
        std::thread::sleep(Duration::from_secs(1));
        switches(daemon) == before
    });
    rig.umount(&at);
}

/// /dev/fuse as udev makes it, also where there is no udev: open to everybody. One test at a
/// time, since it is the machine's.
struct OpenDevice {
    before: Option<u32>,
    _alone: MutexGuard<'static, ()>,
}

static ALONE: Mutex<()> = Mutex::new(());

impl OpenDevice {
    fn new() -> OpenDevice {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let mode = fs::metadata("/dev/fuse").unwrap().permissions().mode() & 0o777;
        let before = (mode != 0o666).then_some(mode);
        fs::set_permissions("/dev/fuse", fs::Permissions::from_mode(0o666)).unwrap();
        OpenDevice { before, _alone: alone }
    }
}

impl Drop for OpenDevice {
    fn drop(&mut self) {
        if let Some(mode) = self.before {
            let _ = fs::set_permissions("/dev/fuse", fs::Permissions::from_mode(mode));
        }
    }
}

/// A mount that belongs to an ordinary user, whose programs alone may use it.
struct Own {
    rig: Rig,
    at: PathBuf,
    _device: OpenDevice,
}

impl Own {
    /// `limit`: words in front of the command that mounts. None where users cannot mount.
    fn new(limit: &[&str], options: &str) -> Option<Own> {
        if common::skipped() {
            return None;
        }
        let found =
            |name: &str| ["/bin", "/usr/bin"].iter().any(|dir| Path::new(dir).join(name).exists());
        if !found("fusermount3") || !found("setpriv") {
            eprintln!("skipped: needs fusermount3 and setpriv");
            return None;
        }
        let device = OpenDevice::new();
        let mut rig = Rig::new();
        rig.serve(&[]);
        let open = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        open(&rig.path(""), 0o755);
        open(&rig.path("export"), 0o777);
        open(&rig.path("socket"), 0o777);
        for name in ["run", "mount"] {
            let _ = fs::create_dir(rig.path(name)); // one of them is there
            chown(rig.path(name), Some(USER), Some(USER)).unwrap();
        }
        let at = rig.path("mount");
        // Where everybody may run it: the tree may be below a home that is closed to others.
        let program = rig.path("dray");
        rig.copy_program(Path::new(env!("CARGO_BIN_EXE_dray")), &program);
        let (target, place) = (rig.target(), at.to_str().unwrap().to_owned());
        let mount = ["mount", &target, &place, "-o", options];
        let output = rig.run_as(USER, limit, program.to_str().unwrap(), &mount);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Some(Own { rig, at, _device: device })
    }

    fn status(&self) -> Value {
        let place = self.at.to_str().unwrap();
        let words = ["status", place, "--json"];
        let output = self.rig.run_as(USER, &[], self.rig.path("dray").to_str().unwrap(), &words);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        serde_json::from_str(&text)
            .unwrap_or_else(|_| panic!("{text}{}", String::from_utf8_lossy(&output.stderr)))
    }

    fn umount(&self) {
        let place = self.at.to_str().unwrap().to_owned();
        wait_for("the unmounting", || {
            let words = ["umount", &place];
            self.rig
                .run_as(USER, &[], self.rig.path("dray").to_str().unwrap(), &words)
                .status
                .success()
        });
        assert!(!is_mounted(&self.at));
    }

    fn daemon(&self) -> Option<i32> {
        common::processes("mount-daemon", &self.at).first().copied()
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let path = std::ffi::CString::new(self.at.to_str().unwrap()).unwrap();
        // SAFETY: the C string outlives the call. What is not mounted stays so.
        unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
    }
}

/// Each line is appended once, and a directory is made and removed; any error ends it.
const WORK: &str = "set -e; cd $AT; n=0; \
    while [ ! -e $AT/stop ]; do echo $n >>$NAME; mkdir $NAME.$n; rmdir $NAME.$n; n=$((n+1)); done; \
    echo $n >$NAME.count";

/// As many at least, however slow the machine is.
const KILLS_MIN: u64 = 6;

// proves: P93
#[test]
fn a_user_s_mount_survives_kills_of_its_daemon() {
    for options in ["transport=classic", "transport=uring"] {
        let Some(mut own) = Own::new(&[], options) else { return };
        let workers: Vec<_> = ["one", "two", "three"]
            .iter()
            .map(|name| own.rig.start_as(USER, &format!("NAME={name}; {WORK}"), &own.at))
            .collect();
        let lines = |own: &Own| {
            let text = fs::read_to_string(own.rig.path("export/one")).unwrap_or_default();
            text.lines().count()
        };
        let (begin, mut kills) = (Instant::now(), 0u64);
        while begin.elapsed() < Duration::from_secs(4) || kills < KILLS_MIN {
            let before = lines(&own);
            wait_for("progress", || lines(&own) > before);
            let Some(pid) = own.daemon() else { continue };
            // SAFETY: no memory is passed.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            kills += 1;
            std::thread::sleep(Duration::from_millis(60 + kills * 37 % 90));
        }
        fs::write(own.rig.path("export/stop"), "").unwrap();
        for worker in workers {
            assert!(own.rig.end_of(worker).success(), "an application saw an error");
        }
        let shown = own.status();
        eprintln!("{options}: {kills} kills, {} lines", lines(&own));
        if options == "transport=classic" || has_ring() {
            assert_eq!(format!("transport={}", shown["transport"].as_str().unwrap()), options);
        }
        for name in ["one", "two", "three"] {
            let read =
                |file: String| fs::read_to_string(own.rig.path("export").join(file)).unwrap();
            let count: u64 = read(format!("{name}.count")).trim().parse().unwrap();
            let expected: String = (0..count).map(|number| format!("{number}\n")).collect();
            assert_eq!(read(name.to_owned()), expected, "{name}");
        }
        own.umount();
    }
}

/// An ordinary user may lock too little memory for an io_uring.
// proves: P100
#[test]
fn a_user_without_memory_for_a_ring_gets_a_classic_mount() {
    let Some(own) = Own::new(&["prlimit", "--memlock=4096:4096"], "") else { return };
    let shown = own.status();
    assert_eq!(shown["transport"], "classic", "{shown}");
    assert!(shown["transport_reason"].is_string(), "{shown}");
    if has_ring() {
        let why = shown["transport_reason"].as_str().unwrap();
        assert!(why.starts_with("io_uring cannot be used"), "{why}");
    }
    own.umount();
}
