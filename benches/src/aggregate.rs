//! Read-ahead and merged writes over a file system that is slow for each call.
//!
//! Two servers' worth of exports, alike but for the options: one passes calls on as they come, the other
//! one reads ahead and merges writes. Each is over a file system in user space that takes some
//! milliseconds for a call (script/lib/slow_fs.py). The arms take turns in each round.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::args::BenchArgs;
use crate::json::Value;
use crate::measure::Measure;
use crate::{CommandResult, context};

/// What a program reads and writes at once.
const CALL_BYTES: usize = 4096;
/// A start takes at most this long.
const START_MAX: Duration = Duration::from_secs(20);
/// The arms, and the options of their exports.
const ARMS: [(&str, &str); 2] =
    [("passed", ""), ("aggregated", ",read_ahead=64M,merge_writes=64M")];

/// `aggregate --dray PROGRAM --slow-fs SCRIPT [--delay-ms N] [--mib N] [--rounds N]`
///
/// Prints the gains, which are ratios of medians, and the largest requests below.
pub fn run(args: &BenchArgs) -> CommandResult {
    let (dray, slow_fs) = (args.need("dray")?, args.need("slow-fs")?);
    let delay_ms: f64 = args.number("delay-ms", 2.0)?;
    let mib = args.number::<usize>("mib", 4)?.clamp(1, 1024);
    let rounds = args.number::<u32>("rounds", 3)?.clamp(1, 100);
    let rig = Rig::start(dray, slow_fs, delay_ms)?;
    let mut times = [const { (Vec::new(), Vec::new()) }; ARMS.len()];
    for round in 0..rounds {
        for (arm, times) in times.iter_mut().enumerate() {
            let path = rig.mount(arm).join(format!("file{round}"));
            let (write, read) = (write(&path, mib << 20)?, read(&path, mib << 20)?);
            for (what, time) in [("write", write), ("read", read)] {
                let rate = mib as f64 / time.as_secs_f64().max(1e-9);
                put(ARMS[arm].0, &format!("slow_backing_{what}.mib_per_s"), rate, "MiB/s", round);
            }
            times.0.push(write);
            times.1.push(read);
            fs::remove_file(&path).map_err(context("remove"))?;
        }
    }
    let [passed, aggregated] = times;
    let gain = |passed: Vec<Duration>, now: Vec<Duration>| {
        median(passed).as_secs_f64() / median(now).as_secs_f64().max(1e-9)
    };
    put("aggregated", "slow_backing_write_gain", gain(passed.0, aggregated.0), "ratio", 0);
    put("aggregated", "slow_backing_read_gain", gain(passed.1, aggregated.1), "ratio", 0);
    for (arm, (name, _)) in ARMS.iter().enumerate() {
        for what in ["read", "write"] {
            let kib = rig.largest_request(arm, what)? / 1024.0;
            put(name, &format!("slow_backing_{what}_max_kib"), kib, "KiB", 0);
        }
    }
    Ok(())
}

fn put(arm: &str, metric: &str, value: f64, unit: &str, round: u32) {
    let (arm, metric, unit) = (arm.to_owned(), metric.to_owned(), unit.to_owned());
    let measure = Measure { bench: "aggregate".to_owned(), arm, metric, value, unit, round };
    println!("{}", measure.line());
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// Writes a new file in small calls, and has it on media.
fn write(path: &Path, bytes: usize) -> CommandResult<Duration> {
    let mut file = File::create_new(path).map_err(context("create"))?;
    let begin = Instant::now();
    for number in 0..bytes / CALL_BYTES {
        file.write_all(&[number as u8; CALL_BYTES]).map_err(context("write"))?;
    }
    file.sync_all().map_err(context("sync"))?;
    Ok(begin.elapsed())
}

/// Reads it again in small calls, and checks what it reads.
fn read(path: &Path, bytes: usize) -> CommandResult<Duration> {
    let mut file = OpenOptions::new().read(true).open(path).map_err(context("open"))?;
    let (begin, mut call) = (Instant::now(), [0; CALL_BYTES]);
    for number in 0..bytes / CALL_BYTES {
        file.read_exact(&mut call).map_err(context("read"))?;
        if call != [number as u8; CALL_BYTES] {
            return Err(format!("other data than were written at {}", number * CALL_BYTES));
        }
    }
    Ok(begin.elapsed())
}

/// Slow file systems, a server and its mounts.
struct Rig {
    dray: String,
    dir: PathBuf,
    children: Vec<Child>,
    mounts: Vec<PathBuf>,
}

impl Rig {
    fn start(dray: &str, slow_fs: &str, delay_ms: f64) -> CommandResult<Rig> {
        let dir = std::env::temp_dir().join(format!("dray-aggregate-{}", std::process::id()));
        fs::create_dir(&dir).map_err(context("mkdir"))?;
        let mut rig = Rig { dray: dray.to_owned(), dir, children: Vec::new(), mounts: Vec::new() };
        for arm in 0..ARMS.len() {
            rig.start_below(arm, slow_fs, delay_ms)?;
        }
        rig.serve()?;
        for arm in 0..ARMS.len() {
            rig.mount_export(arm)?;
        }
        Ok(rig)
    }

    fn path(&self, what: &str, arm: usize) -> PathBuf {
        self.dir.join(format!("{what}-{}", ARMS[arm].0))
    }

    fn below(&self, arm: usize) -> PathBuf {
        self.path("below", arm)
    }

    fn mount(&self, arm: usize) -> PathBuf {
        self.path("mount", arm)
    }

    fn start_below(&mut self, arm: usize, slow_fs: &str, delay_ms: f64) -> CommandResult {
        let (source, at) = (self.path("source", arm), self.below(arm));
        for dir in [&source, &at] {
            fs::create_dir(dir).map_err(context("mkdir"))?;
        }
        let mut command = Command::new("/usr/bin/python3");
        command.arg(slow_fs).arg(source).arg(&at).arg(delay_ms.to_string());
        self.children.push(command.spawn().map_err(context("python3"))?);
        self.mounts.push(at.clone());
        wait_for("a slow file system (is python3-pyfuse3 installed?)", || {
            get_xattr(&at, "user.requests").is_some()
        })
    }

    fn serve(&mut self) -> CommandResult {
        let mut command = Command::new(&self.dray);
        command.arg("serve").env("DRAY_RUN_DIR", self.dir.join("run")).env("DRAY_LOG", "warn");
        for (arm, (name, options)) in ARMS.iter().enumerate() {
            let dir = self.below(arm);
            command.arg("--export").arg(format!("{name}={},squash=none{options}", dir.display()));
        }
        let socket = self.dir.join("socket");
        command.arg("--listen").arg(format!("unix://{}", socket.display()));
        command.arg("--state").arg(self.dir.join("state")).stdout(Stdio::null());
        self.children.push(command.spawn().map_err(context("dray serve"))?);
        wait_for("the server", || std::os::unix::net::UnixStream::connect(&socket).is_ok())
    }

    fn mount_export(&mut self, arm: usize) -> CommandResult {
        let at = self.mount(arm);
        fs::create_dir(&at).map_err(context("mkdir"))?;
        let socket = self.dir.join("socket");
        let target = format!("dray+unix://{}?export={}", socket.display(), ARMS[arm].0);
        self.command("mount", &[target.as_ref(), at.as_os_str()])?;
        self.mounts.push(at);
        Ok(())
    }

    fn command(&self, word: &str, args: &[&std::ffi::OsStr]) -> CommandResult {
        let mut command = Command::new(&self.dray);
        command.arg(word).args(args).env("DRAY_RUN_DIR", self.dir.join("run"));
        let status = command.status().map_err(context(word))?;
        if status.success() { Ok(()) } else { Err(format!("dray {word}: {status}")) }
    }

    fn largest_request(&self, arm: usize, what: &str) -> CommandResult<f64> {
        let text = get_xattr(&self.below(arm), "user.requests").ok_or("no count of requests")?;
        let counts = Value::parse(&text).ok_or("a count of requests that is no JSON")?;
        let largest = counts.get(what).and_then(|one| one.get("max_bytes")).and_then(Value::number);
        largest.ok_or_else(|| format!("no count of {what} requests"))
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        for arm in 0..ARMS.len() {
            let at = self.mount(arm);
            if self.mounts.contains(&at) {
                let _ = self.command("umount", &[at.as_os_str()]);
            }
        }
        if let Some(server) = self.children.get(ARMS.len()) {
            // SAFETY: no memory is passed; the child has not been waited for.
            unsafe { libc::kill(server.id() as libc::pid_t, libc::SIGTERM) };
        }
        if let Some(server) = self.children.get_mut(ARMS.len()) {
            let _ = server.wait();
        }
        for arm in 0..ARMS.len() {
            let _ = Command::new("umount").arg(self.below(arm)).status();
        }
        self.children.iter_mut().take(ARMS.len()).for_each(|child| _ = child.wait());
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn wait_for(what: &str, mut is_there: impl FnMut() -> bool) -> CommandResult {
    let begin = Instant::now();
    while !is_there() {
        if begin.elapsed() > START_MAX {
            return Err(format!("{what} does not come"));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn get_xattr(path: &Path, name: &str) -> Option<String> {
    let path = std::ffi::CString::new(path.as_os_str().as_bytes()).ok()?;
    let name = std::ffi::CString::new(name).ok()?;
    let mut bytes = vec![0u8; 4096];
    // SAFETY: both strings end with NUL, and there is room for so many bytes.
    let length = unsafe {
        libc::getxattr(path.as_ptr(), name.as_ptr(), bytes.as_mut_ptr().cast(), bytes.len())
    };
    bytes.truncate(usize::try_from(length).ok()?);
    String::from_utf8(bytes).ok()
}
