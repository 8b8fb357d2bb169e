//! The server under load: `dray serve` as a process that is watched, killed and started again.

use std::fs::{self, OpenOptions};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::many::ManyClientsPlan;
use crate::{CommandResult, context, cpu, idle};

/// The export's name.
pub const EXPORT: &str = "data";
/// A server that has not begun to listen by then never will.
const START_MAX: Duration = Duration::from_secs(60);

/// A running server.
pub struct ServerProcess {
    child: Child,
    plan: ManyClientsPlan,
}

/// What it takes at one moment.
#[derive(Clone, Copy, Debug)]
pub struct ResourceUsage {
    /// Resident, KiB.
    pub resident_kib: u64,
    /// Open descriptors.
    pub descriptors: usize,
    /// CPU time so far.
    pub cpu: Duration,
    /// Context switches so far.
    pub switches: u64,
}

impl ServerProcess {
    /// Starts it over `plan.store`.
    pub fn start(plan: &ManyClientsPlan) -> CommandResult<ServerProcess> {
        let text = format!(
            "listen = [\"tcp://{}\"]\nstate = \"{}\"\nlease_s = {}\nclients_max = 20000\n\
             [[export]]\nname = \"{EXPORT}\"\ndir = \"{}\"\nsquash = \"none\"\n\
             insecure = true\ndirect = true\nleases = {}\n", // thousands of clients of one machine: ports below 1024 are too few
            plan.address,
            plan.work.join("state").display(),
            plan.lease.as_secs(),
            plan.store.display(),
            plan.leases,
        );
        fs::write(config(plan), text).map_err(context("the server's configuration"))?;
        let server = ServerProcess { child: spawn(plan, None)?, plan: plan.clone() };
        server.wait_until_it_listens()?;
        Ok(server)
    }

    fn wait_until_it_listens(&self) -> CommandResult {
        let begin = Instant::now();
        while TcpStream::connect(self.plan.address).is_err() {
            if begin.elapsed() > START_MAX {
                return Err(format!(
                    "the server does not listen; see {}",
                    log(&self.plan).display()
                ));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// The id of the server's process.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Kills the server's process: it dies at once.
    pub fn kill(&mut self) -> CommandResult {
        self.child.kill().map_err(context("killing the server"))?;
        self.child.wait().map(drop).map_err(context("waiting for the server's end"))
    }

    /// Starts another process in the place of the server. A process that gets another `boot` takes
    /// its machine for one that has lost what was not on media.
    pub fn start_again(&mut self, boot: Option<u128>) -> CommandResult {
        self.child = spawn(&self.plan, boot)?;
        self.wait_until_it_listens()
    }

    /// What it takes now.
    pub fn look(&self) -> ResourceUsage {
        let pid = self.pid();
        ResourceUsage {
            resident_kib: idle::resident_kib(&[pid]),
            descriptors: fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count),
            cpu: cpu::of_process(pid).unwrap_or_default(),
            switches: idle::switches(&[pid]),
        }
    }

    /// Lines that it has logged.
    pub fn log_lines(&self) -> usize {
        fs::read_to_string(log(&self.plan)).map_or(0, |text| text.lines().count())
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.kill(); // or it has ended by itself
    }
}

fn config(plan: &ManyClientsPlan) -> PathBuf {
    plan.work.join("dray.toml")
}

fn log(plan: &ManyClientsPlan) -> PathBuf {
    plan.work.join("server.log")
}

fn spawn(plan: &ManyClientsPlan, boot: Option<u128>) -> CommandResult<Child> {
    let open = || OpenOptions::new().create(true).append(true).open(log(plan));
    let (out, err) = (open().map_err(context("log"))?, open().map_err(context("log"))?);
    let mut serve = plan.command();
    serve.args(["serve", "--config"]).arg(config(plan));
    if let Some(key) = &plan.key {
        serve.args(["--auth", &format!("psk:{key}")]);
    }
    if let Some(boot) = boot {
        serve.args(["--boot-id", &format!("{boot:032x}")]);
    }
    serve.stdin(Stdio::null()).stdout(out).stderr(err);
    serve.spawn().map_err(context("dray serve"))
}
