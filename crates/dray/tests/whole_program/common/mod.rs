//! A server and mounts made with the real command, taken down whatever happens.
#![allow(dead_code)] // each test file uses its part

pub mod daemons;
pub mod disks;
pub mod exposition;
pub mod hangs;
mod launcher;
pub mod load;
pub mod ports;

use std::cell::RefCell;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use launcher::Launcher;
pub use launcher::Pid;

/// A directory for everything, a server, and mounts.
pub struct Rig {
    dir: tempfile::TempDir,
    launcher: RefCell<Launcher>,
    server: Option<Pid>,
    /// Where a server says that it is ready, as systemd has it (sd_notify(3)).
    ready: UnixDatagram,
    mounts: Vec<PathBuf>,
}

/// What should take a moment takes at most this long, on a machine that is busy with others' work.
const PATIENCE: Duration = Duration::from_secs(60);

/// Whether this machine cannot mount, which is said.
pub fn skipped() -> bool {
    // SAFETY: no memory is passed.
    let root = unsafe { libc::geteuid() } == 0;
    if !root || !Path::new("/dev/fuse").exists() {
        eprintln!("skipped: mounting needs root and /dev/fuse");
        return true;
    }
    false
}

/// Runs `test` with the option of a transport, if this machine can mount at all: half of all tests on each, by their
/// names. With `DRAY_TRANSPORTS=all`, as `script/test long transports` has it, on each that this machine has.
pub fn on_transports(test: impl Fn(&str)) {
    if skipped() {
        return;
    }
    let all = std::env::var("DRAY_TRANSPORTS").is_ok_and(|which| which == "all");
    let thread = std::thread::current();
    let name = thread.name().expect("a test has the thread's name");
    let is_of_rings = name.bytes().fold(0, |sum: u8, byte| sum.wrapping_add(byte)) % 2 == 1;
    let switch = std::fs::read_to_string("/sys/module/fuse/parameters/enable_uring");
    let has_rings = switch.is_ok_and(|on| on.trim() == "Y");
    if all || !is_of_rings || !has_rings {
        test("transport=classic");
    }
    match has_rings {
        true if all || is_of_rings => test("transport=uring"),
        true => {}
        false => eprintln!("left out: FUSE over io_uring is off, or this kernel has none"),
    }
}

impl Rig {
    /// With a server, and a mount of it with these options.
    pub fn mounted(options: &str) -> (Rig, PathBuf) {
        let mut rig = Rig::new();
        rig.serve(&[]);
        let at = rig.mount("mount", options);
        (rig, at)
    }

    pub fn new() -> Rig {
        let launcher = RefCell::new(Launcher::new());
        let dir = tempfile::Builder::new().prefix("dray-command-").tempdir().unwrap();
        for name in ["export", "state", "run", "said"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        let ready = UnixDatagram::bind(dir.path().join("ready")).unwrap();
        ready.set_nonblocking(true).unwrap();
        Rig { dir, launcher, server: None, ready, mounts: Vec::new() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The command with our own run directory.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dray"));
        command.args(args).env("DRAY_RUN_DIR", self.path("run")).env("DRAY_LOG", "warn");
        command.stdin(Stdio::null());
        command
    }

    /// Runs it to its end.
    pub fn run(&self, args: &[&str]) -> Output {
        self.output(&self.command(args))
    }

    fn output(&self, command: &Command) -> Output {
        self.launcher.borrow_mut().output(command, &self.path("said"))
    }

    /// Runs it and demands success; answers what it printed.
    pub fn demand(&self, args: &[&str]) -> String {
        let output = self.run(args);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            output.status.success(),
            "dray {args:?}: {}\n{text}{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        text
    }

    /// Copies a program that will be run. Not by ourselves. Children that other tests are just
    /// starting would inherit what we write to, and what is open for writing is not run (ETXTBSY).
    pub fn copy_program(&self, from: &Path, to: &Path) {
        let mut copy = Command::new("cp");
        let copied = self.output(copy.arg(from).arg(to)).status;
        assert!(copied.success(), "cp {} {}: {copied}", from.display(), to.display());
    }

    /// Starts a server of `export` on a Unix socket, with further arguments.
    pub fn serve(&mut self, more: &[&str]) {
        let server = self.server_command(more);
        self.start_server(&server, None);
    }

    /// The same; what it says goes to a file.
    pub fn serve_logging(&mut self, log: &Path, more: &[&str]) {
        let server = self.server_command(more);
        self.start_server(&server, Some(log));
    }

    /// The same in a mount namespace in which `from` is at `at`, a directory.
    pub fn serve_at(&mut self, (from, at): (&Path, &Path), log: &Path, more: &[&str]) {
        let server = self.server_command(more);
        let mut apart = Command::new("unshare");
        apart.envs(server.get_envs().filter_map(|(name, value)| Some((name, value?))));
        apart.env("FROM", from).env("AT", at);
        let script = self.path("serve-at.sh");
        let bind = r#"mount --bind "$FROM" "$AT""#;
        std::fs::write(&script, format!("{bind}\n{LEAVE_OTHERS_MOUNTS}\nexec \"$@\"\n")).unwrap();
        apart.args(["--mount", "--propagation", "private", "sh", "-eu"]).arg(script);
        apart.arg(server.get_program()).args(server.get_args());
        self.start_server(&apart, Some(log));
    }

    /// The same with so many descriptors, and no way to have more.
    pub fn serve_with_descriptors(&mut self, count: usize, more: &[&str]) {
        self.serve_within(&[&format!("--nofile={count}")], more);
    }

    /// The same within these limits, as prlimit(1) writes them.
    pub fn serve_within(&mut self, limits: &[&str], more: &[&str]) {
        let server = self.server_command(more);
        let mut limited = Command::new("prlimit");
        limited.envs(server.get_envs().filter_map(|(name, value)| Some((name, value?))));
        limited.args(limits).arg(server.get_program()).args(server.get_args());
        self.start_server(&limited, None);
    }

    /// The same with no more capabilities than these, as capabilities(7) writes them.
    pub fn serve_with_capabilities(&mut self, names: &[&str], more: &[&str]) {
        let server = self.with_capabilities(names, &self.server_command(more));
        self.start_server(&server, None);
    }

    /// Runs a server that is expected to fail, with no more capabilities than these.
    pub fn run_server_with_capabilities(&self, names: &[&str], more: &[&str]) -> Output {
        self.output(&self.with_capabilities(names, &self.server_command(more)))
    }

    fn with_capabilities(&self, names: &[&str], command: &Command) -> Command {
        let mut set = String::from("--bounding-set=-all");
        for name in names {
            set += &format!(",+{}", name.trim_start_matches("CAP_").to_lowercase());
        }
        let mut limited = Command::new("setpriv");
        limited.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?)))).arg(set);
        limited.arg(command.get_program()).args(command.get_args());
        limited
    }

    fn server_command(&self, more: &[&str]) -> Command {
        let export = format!("data={},squash=none", self.path("export").display());
        let listen = format!("unix://{}", self.path("socket").display());
        let state = self.path("state");
        let args = ["serve", "--export", &export, "--listen", &listen, "--state"];
        let mut command = self.command(&args);
        command.env("NOTIFY_SOCKET", self.path("ready")).arg(state).args(more);
        command
    }

    /// Starts a server, and waits until it serves.
    pub fn start_server(&mut self, command: &Command, log: Option<&Path>) {
        self.is_ready(); // what a former server has said
        self.server = Some(self.launcher.get_mut().start(command, None, log));
        wait_for("the server", || self.is_ready());
    }

    /// Whether a server has said so since this was asked before: it listens wherever it is to.
    fn is_ready(&self) -> bool {
        let (mut said, mut ready) = ([0; 4096], false);
        while let Ok(length) = self.ready.recv(&mut said) {
            ready |= said[..length].starts_with(b"READY=1");
        }
        ready
    }

    /// Sends the server a signal and waits for its end.
    pub fn end_server(&mut self, signal: i32) -> std::process::ExitStatus {
        let server = self.server.take().unwrap();
        server.signal(signal);
        self.launcher.get_mut().wait(server)
    }

    /// The server, which goes on being the rig's: for signals that do not end it.
    pub fn server(&self) -> Pid {
        self.server.unwrap()
    }

    /// Stops the server, and waits until no thread of it runs: the kernel stops them one after the other.
    pub fn stop_server(&self) {
        self.server().signal(libc::SIGSTOP);
        let tasks = format!("/proc/{}/task", self.server().0);
        let stands = |task: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(task.unwrap().path().join("stat"));
            // A thread that has ended meanwhile is none. One that waits in the kernel has not to be asked.
            stat.is_err() || stat.is_ok_and(|stat| stat.contains(") T ") || stat.contains(") D "))
        };
        wait_for("all threads to stand", || std::fs::read_dir(&tasks).unwrap().all(stands));
    }

    /// Sends the server a signal; the caller waits for its end.
    pub fn signal_server(&mut self, signal: i32) -> Pid {
        let server = self.server.take().unwrap();
        server.signal(signal);
        server
    }

    /// Starts the command.
    pub fn start_command(&mut self, args: &[&str]) -> Pid {
        let command = self.command(args);
        self.launcher.get_mut().start(&command, None, None)
    }

    /// Starts an application: a shell script, with `at` as `$AT`.
    pub fn start(&mut self, script: &str, at: &Path) -> Pid {
        let mut command = Command::new("sh");
        command.args(["-c", script]).env("AT", at);
        self.launcher.get_mut().start(&command, None, None)
    }

    /// Runs a program to its end as user `uid`, behind the words of `limit`.
    pub fn run_as(&self, uid: u32, limit: &[&str], program: &str, words: &[&str]) -> Output {
        let mut command = as_user(uid);
        command.env("DRAY_RUN_DIR", self.path("run")).args(limit).arg(program).args(words);
        self.output(&command)
    }

    /// As [`Rig::start`], as user `uid`.
    pub fn start_as(&mut self, uid: u32, script: &str, at: &Path) -> Pid {
        let mut command = as_user(uid);
        command.args(["sh", "-c", script]).env("AT", at);
        self.launcher.get_mut().start(&command, None, None)
    }

    /// Waits for the end of what was started here.
    pub fn end_of(&mut self, pid: Pid) -> std::process::ExitStatus {
        let begin = Instant::now();
        while !pid.is_over() {
            let waited = begin.elapsed();
            assert!(waited < PATIENCE, "waited in vain for the end of {}", pid.whereabouts());
            std::thread::sleep(Duration::from_millis(20));
        }
        self.launcher.get_mut().wait(pid)
    }

    pub fn target(&self) -> String {
        self.target_of("data")
    }

    fn target_of(&self, export: &str) -> String {
        format!("dray+unix://{}?export={export}", self.path("socket").display())
    }

    /// Mounts in the background.
    pub fn mount(&mut self, name: &str, options: &str) -> PathBuf {
        self.mount_with(Path::new(env!("CARGO_BIN_EXE_dray")), name, options)
    }

    /// As [`Rig::mount`], with another copy of the program.
    pub fn mount_with(&mut self, program: &Path, name: &str, options: &str) -> PathBuf {
        let target = self.target();
        self.mount_target(program, &target, name, options)
    }

    /// As [`Rig::mount`], of another export.
    pub fn mount_export(&mut self, export: &str, name: &str, options: &str) -> PathBuf {
        let target = self.target_of(export);
        self.mount_target(Path::new(env!("CARGO_BIN_EXE_dray")), &target, name, options)
    }

    /// As [`Rig::mount`], where that may fail.
    pub fn try_mount(&mut self, name: &str) -> Option<PathBuf> {
        let at = self.path(name);
        std::fs::create_dir(&at).unwrap();
        self.mounts.push(at.clone());
        let mounted = self.run(&["mount", &self.target(), at.to_str().unwrap()]).status.success();
        mounted.then_some(at)
    }

    /// As [`Rig::mount`]. Answers what it said, too.
    pub fn mount_saying(&mut self, name: &str, options: &str) -> (PathBuf, String) {
        let target = self.target();
        self.mount_with_output(Path::new(env!("CARGO_BIN_EXE_dray")), &target, (name, options))
    }

    fn mount_target(&mut self, program: &Path, target: &str, name: &str, options: &str) -> PathBuf {
        self.mount_with_output(program, target, (name, options)).0
    }

    fn mount_with_output(
        &mut self,
        program: &Path,
        target: &str,
        (name, options): (&str, &str),
    ) -> (PathBuf, String) {
        let at = self.path(name);
        if !at.exists() {
            std::fs::create_dir(&at).unwrap(); // else it was mounted before
        }
        self.mounts.push(at.clone());
        let mut command = Command::new(program);
        command.env("DRAY_RUN_DIR", self.path("run")).env("DRAY_LOG", "warn").stdin(Stdio::null());
        command.env("DRAY_STATE_DIR", self.path("mounts-state"));
        command.arg("mount").arg(target).arg(&at).args(["-o", options]);
        // On a busy machine a server says that it is ready before all exports are open, since one may hang.
        let mut said = String::new();
        wait_for("the export is open, and mounted", || {
            let output = self.output(&command);
            said = String::from_utf8_lossy(&output.stderr).into_owned();
            let opens = said.contains("is not open yet");
            assert!(output.status.success() || opens, "mount: {}\n{said}", output.status);
            output.status.success()
        });
        (at, said)
    }

    /// A mount has been moved there.
    pub fn moved_to(&mut self, name: &str) -> PathBuf {
        let at = self.path(name);
        self.mounts.push(at.clone());
        at
    }

    /// Mounts from a pid namespace of its own: the mount's daemon sees no caller. Answers what ends
    /// with the mount.
    pub fn mount_unseeing(&mut self, name: &str, options: &str) -> (PathBuf, Pid) {
        let at = self.path(name);
        std::fs::create_dir(&at).unwrap();
        self.mounts.push(at.clone());
        let mut command = Command::new("unshare");
        command.env("DRAY_RUN_DIR", self.path("run")).env("DRAY_LOG", "warn");
        command.args(["--pid", "--fork", env!("CARGO_BIN_EXE_dray"), "mount", "--foreground"]);
        command.arg(self.target()).arg(&at).args(["-o", options]);
        let mounting = self.launcher.get_mut().start(&command, None, None);
        wait_for("the mount", || is_mounted_by_dray(&at) && at.metadata().is_ok());
        (at, mounting)
    }

    /// Unmounts. Children that other tests are just starting may have inherited our files
    /// for a moment, so one try is not enough.
    pub fn umount(&mut self, at: &Path) {
        wait_for("the unmounting", || self.run(&["umount", at.to_str().unwrap()]).status.success());
        self.mounts.retain(|mount| mount != at);
        assert!(!is_mounted(at));
    }

    /// Unmounts, and waits until nothing of the mount is left.
    pub fn end_of_mount(&mut self, at: &Path) {
        self.umount(at);
        daemons::gone(at);
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        for at in self.mounts.drain(..) {
            let path = std::ffi::CString::new(at.to_str().unwrap()).unwrap();
            // SAFETY: the C string outlives the call. What is not mounted stays so.
            unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
        }
        if let Some(server) = self.server.take() {
            server.signal(libc::SIGKILL);
            self.launcher.get_mut().wait(server);
        }
        self.launcher.get_mut().end_all();
    }
}

/// A server and two mounts of it; other users can get there.
pub fn two_mounts(options: &str) -> (Rig, PathBuf, PathBuf) {
    use std::os::unix::fs::PermissionsExt;
    let mut rig = Rig::new();
    std::fs::set_permissions(rig.path("."), std::fs::Permissions::from_mode(0o755)).unwrap();
    rig.serve(&[]);
    let [one, other] = ["one", "other"].map(|name| rig.mount(name, options));
    (rig, one, other)
}

/// What the launcher's shell says of an end. A process that ends with 128 and a number looks to it
/// like one that the signal of that number has ended.
pub fn exit_code(status: std::process::ExitStatus) -> i32 {
    use std::os::unix::process::ExitStatusExt;
    status.code().or(status.signal().map(|signal| 128 + signal)).unwrap()
}

/// For a script in a mount namespace of its own, which has a copy of each mount: takes dray's away, but
/// for that of `$AT`. A mount exists as long as one of its copies: other tests would wait for the end
/// of theirs until the namespace ends. A copy goes by itself when the directory that it is on is
/// removed.
pub const LEAVE_OTHERS_MOUNTS: &str = r#"
    sed -n 's/^[^ ]* \([^ ]*\) fuse\.dray .*/\1/p' /proc/mounts | while read -r other; do
        other=$(printf %b "$other")
        [ "$other" = "${AT:-}" ] || umount -l "$other" || true
    done
"#;

fn as_user(uid: u32) -> Command {
    let mut command = Command::new("setpriv");
    command.args([format!("--reuid={uid}"), format!("--regid={uid}"), "--clear-groups".into()]);
    command.env("DRAY_LOG", "warn");
    command
}

/// Processes of the mount at `at`: those of this kind, by their arguments.
pub fn processes(kind: &str, at: &Path) -> Vec<i32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
        let ours = words.contains(&at.as_os_str().as_encoded_bytes());
        if ours && words.get(1) == Some(&kind.as_bytes()) {
            found.push(pid);
        }
    }
    found
}

pub fn is_mounted(at: &Path) -> bool {
    mount_table().lines().any(|line| line.split(' ').nth(4) == at.to_str())
}

/// Whether a mount of dray is at `at`, whatever else is there, too.
pub fn is_mounted_by_dray(at: &Path) -> bool {
    let ours = |line: &str| line.contains(" - fuse.dray ") && line.split(' ').nth(4) == at.to_str();
    mount_table().lines().any(ours)
}

/// What this machine has mounted; others' mounts may have names that are no text.
fn mount_table() -> String {
    String::from_utf8_lossy(&std::fs::read("/proc/self/mountinfo").unwrap()).into_owned()
}

pub fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < PATIENCE, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
