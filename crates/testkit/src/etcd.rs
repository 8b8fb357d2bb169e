//! An etcd of one member on loopback, for tests.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Where Debian's package etcd-server has it, where a path does not lead to it.
const PROGRAMS: [&str; 2] = ["etcd", "/usr/bin/etcd"];
/// The first port. Those that the kernel gives to programs that ask for any begin at 32,768.
const PORT: u32 = 12_379;
/// etcd should answer within this time, or it counts as failed.
const START_MAX: Duration = Duration::from_secs(60);

/// A running etcd. It is killed when this is dropped.
pub struct Etcd {
    process: Child,
    program: &'static str,
    address: Ipv4Addr,
    /// For clients; the next one is for other members.
    port: u32,
    dir: PathBuf,
}

impl Etcd {
    /// Starts one whose data are in the directory, which must exist. None: it is not installed; the
    /// reason is printed, for the summary of `script/test`.
    pub fn start(dir: &Path) -> Option<Etcd> {
        let runs = |program: &&&str| {
            let mut version = Command::new(program);
            version.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
            version.status().is_ok_and(|status| status.success())
        };
        let Some(program) = PROGRAMS.iter().find(runs) else {
            println!("skipped: etcd is not installed (Debian: etcd-server)");
            return None;
        };
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let port = PORT + 2 * STARTED.fetch_add(1, Ordering::Relaxed);
        // An address of this process alone: its number in 127.64.0.0/10.
        let address = Ipv4Addr::from_bits(0x7f40_0000 | std::process::id() & 0x3f_ffff);
        let process = spawn(program, address, port, dir);
        let etcd = Etcd { process, program, address, port, dir: dir.to_owned() };
        etcd.wait();
        Some(etcd)
    }

    /// What clients connect to.
    pub fn url(&self) -> String {
        format!("http://{}:{}", self.address, self.port)
    }

    /// Waits until it has elected itself: before that its data are not yet complete.
    fn wait(&self) {
        let begun = Instant::now();
        while !self.is_healthy().unwrap_or(false) {
            assert!(begun.elapsed() < START_MAX, "etcd does not start: {}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn is_healthy(&self) -> io::Result<bool> {
        let port = u16::try_from(self.port).expect("a port");
        let mut stream = TcpStream::connect((self.address, port))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        stream.write_all(b"GET /health HTTP/1.0\r\n\r\n")?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        Ok(String::from_utf8_lossy(&answer).contains(r#""health":"true""#))
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("log")).unwrap_or_default()
    }

    /// Stops etcd, which answers nobody until it [goes on](Etcd::go_on).
    pub fn stop(&self) {
        self.signal(libc::SIGSTOP);
    }

    /// See [`Etcd::stop`].
    pub fn go_on(&self) {
        self.signal(libc::SIGCONT);
    }

    /// Kills it, and starts it again with its data.
    pub fn restart(&mut self) {
        self.kill();
        self.process = spawn(self.program, self.address, self.port, &self.dir);
        self.wait();
    }

    /// Kills it.
    pub fn kill(&mut self) {
        // It may be stopped, or have ended by itself, which its log says.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a call without pointers; the process is our child, and was not waited for.
        let done = unsafe { libc::kill(self.process.id().cast_signed(), signal) };
        assert_eq!(done, 0, "a child that runs");
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}

fn spawn(program: &str, address: Ipv4Addr, port: u32, dir: &Path) -> Child {
    let log = File::create(dir.join("log")).expect("a log in the directory of the test");
    let (clients, peers) =
        (format!("http://{address}:{port}"), format!("http://{address}:{}", port + 1));
    let mut command = Command::new(program);
    command.args(["--name", "test", "--data-dir"]).arg(dir.join("data"));
    command.args(["--listen-client-urls", &clients, "--advertise-client-urls", &clients]);
    command.args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers]);
    command.args(["--initial-cluster", &format!("test={peers}")]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    command.spawn().expect("etcd starts")
}
