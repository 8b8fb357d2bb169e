//! A server and mounts in a temporary directory, for demonstrations and surveys. Taken
//! down when dropped.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::error::{ErrorContext, Failure};
use crate::{interrupt, key, mount::mount_table, paths};

/// What is started should be ready within this time.
const START_MAX: Duration = Duration::from_secs(20);
/// What is asked to end should have ended within this time; then it is killed.
const END_MAX: Duration = Duration::from_secs(10);

/// What `--export` takes for a directory of any name.
fn export_of(name: &str, dir: &Path) -> OsString {
    let mut text = format!("{name}=").into_bytes();
    for &byte in dir.as_os_str().as_bytes() {
        if matches!(byte, b',' | b'\\') {
            text.push(b'\\');
        }
        text.push(byte);
    }
    text.extend_from_slice(b",squash=none");
    OsString::from_vec(text)
}

/// Processes of dray that serve a directory and mount it elsewhere.
pub struct Sandbox {
    base: PathBuf,
    target: String,
    /// `psk:FILE`.
    auth: OsString,
    mounts: Vec<PathBuf>,
    processes: Vec<Child>,
}

impl Sandbox {
    /// Serves `dir` as an export called `name`, by TCP on loopback. Another user of this machine
    /// can connect there, and without a key would be any user, root, too.
    pub fn serve(name: &str, dir: &Path) -> Result<Sandbox, Failure> {
        let base = std::env::temp_dir().join(format!("dray-{name}-{}", std::process::id()));
        paths::make_private(&base)?;
        let auth = new_key(&base.join("key"))?;
        let port = free_port().doing(|| "cannot find a free port".into())?;
        let address = format!("127.0.0.1:{port}");
        let (mounts, processes) = (Vec::new(), Vec::new());
        let target = format!("dray://{address}/{name}");
        let mut sandbox = Sandbox { base, target, auth, mounts, processes };
        let export = export_of(name, dir);
        let (state, listen) = (sandbox.base.join("state"), format!("tcp://{address}"));
        let (serve, state) = ("serve".as_ref(), state.as_os_str());
        let [on, listen] = ["--listen".as_ref(), listen.as_ref()];
        let auth = sandbox.auth.clone();
        sandbox.spawn(&[
            serve,
            "--export".as_ref(),
            &export,
            on,
            listen,
            "--state".as_ref(),
            state,
            "--auth".as_ref(),
            &auth,
        ])?;
        sandbox.wait_for("the server", || std::net::TcpStream::connect(&address).is_ok())?;
        Ok(sandbox)
    }

    /// Mounts it with these options; answers where.
    pub fn mount(&mut self, name: &str, options: &str) -> Result<PathBuf, Failure> {
        let at = self.base.join(name);
        std::fs::create_dir_all(&at).doing(|| format!("cannot make {}", at.display()))?;
        let target = self.target.clone();
        self.mounts.push(at.clone());
        let mut all = OsString::from(options);
        all.push(if options.is_empty() { "auth=" } else { ",auth=" });
        all.push(&self.auth);
        let words = ["mount", "--foreground", "-o"].map(OsStr::new);
        self.spawn(&[&words[..], &[&all, target.as_ref(), at.as_os_str()]].concat())?;
        self.wait_for("the mount", || mount_table::find(&at).is_some())?;
        Ok(at)
    }

    /// The processes that take part: ours, and the daemons that their supervisors started.
    pub fn processes(&self) -> Vec<u32> {
        let mut all: Vec<u32> = self.processes.iter().map(Child::id).collect();
        for pid in all.clone() {
            let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
            let children = children.unwrap_or_default();
            all.extend(children.split_ascii_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
        }
        all
    }

    fn spawn(&mut self, args: &[&OsStr]) -> Result<(), Failure> {
        let what = || "cannot start a process of dray".to_owned();
        let program = std::env::current_exe().doing(what)?;
        let mut command = Command::new(program);
        command.args(args).env("DRAY_RUN_DIR", self.base.join("run")).env("DRAY_LOG", "error");
        command.stdin(Stdio::null()).stdout(Stdio::null());
        // What is typed at the terminal is for us, who end them in good order.
        command.process_group(0);
        // SAFETY: between fork and exec only this system call is made, which takes no memory.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM); // should we be killed
                Ok(())
            });
        }
        self.processes.push(command.spawn().doing(what)?);
        Ok(())
    }

    fn wait_for(&mut self, name: &str, ready: impl Fn() -> bool) -> Result<(), Failure> {
        let begin = Instant::now();
        while !ready() {
            interrupt::check()?;
            let ended = self.processes.iter_mut().any(|one| matches!(one.try_wait(), Ok(Some(_))));
            if ended || begin.elapsed() > START_MAX {
                return Err(Failure::new(format!("{name} did not start")));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        for at in &self.mounts {
            if mount_table::find(at).is_some()
                && let Err(error) = dray_fuse::unmount(at, true)
            {
                log::warn!("{} is left mounted: {error}", at.display());
            }
        }
        // Mounts first: they say goodbye to the server.
        self.processes.iter_mut().rev().for_each(end);
        if let Err(error) = std::fs::remove_dir_all(&self.base) {
            log::warn!("{} is left behind: {error}", self.base.display());
        }
    }
}

fn end(process: &mut Child) {
    // SAFETY: takes no memory; the child has not been waited for.
    unsafe { libc::kill(process.id() as libc::pid_t, libc::SIGTERM) };
    let begin = Instant::now();
    while matches!(process.try_wait(), Ok(None)) && begin.elapsed() < END_MAX {
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = process.kill(); // it has ended, nearly always
    let _ = process.wait();
}

/// Makes a key; answers the option for servers and mounts that names it.
fn new_key(path: &Path) -> Result<OsString, Failure> {
    key::make(path).doing(|| format!("cannot write {}", path.display()))?;
    let mut auth = OsString::from("psk:");
    auth.push(path);
    Ok(auth)
}

fn free_port() -> std::io::Result<u16> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}
