//! The raw denominators: two plain blocking processes and one loopback TCP connection.
//!
//! - stream: one side writes 1 MiB messages, the other reads them whole. Nothing comes back but one
//!   byte at the end, so that what was counted has arrived.
//! - ping-pong: 64 bytes there, 4 KiB back, as a small read over a wire would be.
//!
//! The server is this program started again. Both sides set `TCP_NODELAY`, touch the
//! same buffer over and over, and choose no CPU unless asked to share one. They use the
//! system's congestion control, or the one that the command line names: dray has its own on loopback.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use socket2::{Domain, SockRef, Socket, Type};

use crate::load::RunSample;
use crate::{CommandResult, context, cpu};

/// One message of a stream.
const MESSAGE_BYTES: usize = 1 << 20;
/// What a ping-pong asks with.
const QUESTION_BYTES: usize = 64;
/// What it is answered with.
const ANSWER_BYTES: usize = 4096;

/// What a connection is used for; its first byte says so.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// The client writes messages.
    StreamWrite,
    /// The server writes messages.
    StreamRead,
    /// Question and answer.
    PingPong,
}

impl Mode {
    fn byte(self) -> u8 {
        match self {
            Mode::StreamWrite => b'w',
            Mode::StreamRead => b'r',
            Mode::PingPong => b'p',
        }
    }
}

/// How both sides are set up.
#[derive(Clone, Copy, Debug, Default)]
pub struct Setup<'a> {
    /// Both run on this CPU.
    pub pin_cpu: Option<usize>,
    /// Congestion control; none: the system's.
    pub congestion: Option<&'a str>,
}

impl Setup<'_> {
    /// Before a connection begins: what the first one has set up may stay.
    fn prepare(&self, socket: &impl AsFd) -> CommandResult {
        let Some(name) = self.congestion else { return Ok(()) };
        SockRef::from(socket).set_tcp_congestion(name.as_bytes()).map_err(context(name))
    }

    fn connect(&self, port: &str) -> CommandResult<TcpStream> {
        let address: SocketAddr = format!("127.0.0.1:{port}").parse().map_err(context(port))?;
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).map_err(context("socket"))?;
        self.prepare(&socket)?;
        socket.connect(&address.into()).map_err(context(port))?;
        Ok(socket.into())
    }
}

/// The server's side: prints its port, serves one connection, ends.
pub fn serve(setup: Setup<'_>) -> CommandResult {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(context("bind"))?;
    setup.prepare(&listener)?;
    println!("{}", listener.local_addr().map_err(context("address"))?.port());
    if let Some(cpu) = setup.pin_cpu {
        cpu::pin(cpu);
    }
    let (mut socket, _) = listener.accept().map_err(context("accept"))?;
    socket.set_nodelay(true).map_err(context("nodelay"))?;
    let mut mode = [0];
    socket.read_exact(&mut mode).map_err(context("read"))?;
    let mut buffer = vec![1; MESSAGE_BYTES];
    // The client ends each mode by closing its side, which shows as an error here.
    match mode[0] {
        b'r' => while socket.write_all(&buffer).is_ok() {},
        b'p' => {
            while socket.read_exact(&mut buffer[..QUESTION_BYTES]).is_ok()
                && socket.write_all(&buffer[..ANSWER_BYTES]).is_ok()
            {}
        }
        _ => {
            while socket.read_exact(&mut buffer).is_ok() {}
            let _ = socket.write_all(&[0]); // a client that is gone needs no answer
        }
    }
    // Stay until the client has read this process's clock.
    std::io::stdin().read_to_end(&mut Vec::new()).map(drop).map_err(context("stdin"))
}

/// Starts a server and loads it for `time`.
pub fn run(mode: Mode, time: Duration, setup: Setup<'_>) -> CommandResult<RunSample> {
    let this = std::env::current_exe().map_err(context("own path"))?;
    let mut command = Command::new(this);
    command.arg("tcp-serve").stdin(Stdio::piped()).stdout(Stdio::piped());
    if let Some(cpu) = setup.pin_cpu {
        command.args(["--pin", &cpu.to_string()]);
    }
    if let Some(name) = setup.congestion {
        command.args(["--congestion", name]);
    }
    let mut child = command.spawn().map_err(context("tcp-serve"))?;
    // The client runs on a thread of its own: its binding to a CPU ends with it.
    let client = std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            if let Some(cpu) = setup.pin_cpu {
                cpu::pin(cpu);
            }
            drive(&mut child, mode, time, setup)
        });
        client.join().unwrap_or_else(|_| Err("the TCP client failed".into()))
    });
    if client.is_err() {
        let _ = child.kill(); // it may have ended by itself
    }
    child.wait().map_err(context("tcp-serve"))?;
    client
}

fn drive(
    child: &mut Child,
    mode: Mode,
    time: Duration,
    setup: Setup<'_>,
) -> CommandResult<RunSample> {
    let pid = child.id() as i32;
    let out = child.stdout.take().ok_or("tcp-serve has no output")?;
    let mut port = String::new();
    BufReader::new(out).read_line(&mut port).map_err(context("tcp-serve"))?;
    let mut socket = setup.connect(port.trim())?;
    socket.set_nodelay(true).map_err(context("nodelay"))?;
    socket.write_all(&[mode.byte()]).map_err(context("write"))?;
    let mut buffer = vec![1; MESSAGE_BYTES];
    for _ in 0..8 {
        step(&mut socket, &mut buffer, mode).map_err(context("raw TCP"))?; // windows have opened
    }
    let clocks = (Instant::now(), cpu::of_this_process(), cpu::of_process(pid));
    let mut ops = 0u64;
    while clocks.0.elapsed() < time {
        step(&mut socket, &mut buffer, mode).map_err(context("raw TCP"))?;
        ops += 1;
    }
    if mode == Mode::StreamWrite {
        socket.shutdown(std::net::Shutdown::Write).map_err(context("shutdown"))?;
        socket.read_exact(&mut [0]).map_err(context("raw TCP"))?;
    }
    let wall = clocks.0.elapsed();
    let served = cpu::of_process(pid).zip(clocks.2).map(|(after, before)| after - before);
    let message_bytes = if mode == Mode::PingPong { ANSWER_BYTES } else { MESSAGE_BYTES };
    Ok(RunSample {
        ops,
        bytes: ops * message_bytes as u64,
        wall,
        app_cpu: cpu::of_this_process() - clocks.1,
        server_cpu: served.unwrap_or_default(),
        ..RunSample::default()
    })
}

fn step(socket: &mut TcpStream, buffer: &mut [u8], mode: Mode) -> std::io::Result<()> {
    match mode {
        Mode::StreamWrite => socket.write_all(buffer),
        Mode::StreamRead => socket.read_exact(buffer),
        Mode::PingPong => {
            socket.write_all(&buffer[..QUESTION_BYTES])?;
            socket.read_exact(&mut buffer[..ANSWER_BYTES])
        }
    }
}
