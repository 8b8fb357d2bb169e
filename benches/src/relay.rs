//! The floor of forwarding a small read: a question of 64 bytes over loopback, a read(2) of 4 KiB there, and
//! the answer. There is no protocol and no event loop. Each thread that asks has a server process on its
//! CPU. A ring's worker has a server thread there, too.

use std::cell::RefCell;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};

use dray_core::{Errno, Result};
use socket2::SockRef;

use crate::{CommandResult, context, cpu};

const QUESTION_BYTES: usize = 64;
const ANSWER_BYTES: usize = 4096;
/// The congestion control that dray uses on loopback.
const CONGESTION: &[u8] = b"reno";

thread_local! {
    static CONNECTION: RefCell<Option<TcpStream>> = const { RefCell::new(None) };
}

/// The server's side: prints its port and answers one connection, on CPU `pin_cpu`, until that ends.
pub fn serve(file: &str, pin_cpu: usize) -> CommandResult {
    cpu::pin(pin_cpu);
    let file = File::open(file).map_err(context(file))?;
    let pages = (file.metadata().map_err(context("metadata"))?.len() / ANSWER_BYTES as u64).max(1);
    let listener = TcpListener::bind("127.0.0.1:0").map_err(context("bind"))?;
    let _ = SockRef::from(&listener).set_tcp_congestion(CONGESTION); // not each kernel has it
    println!("{}", listener.local_addr().map_err(context("address"))?.port());
    let (mut socket, _) = listener.accept().map_err(context("accept"))?;
    socket.set_nodelay(true).map_err(context("nodelay"))?;
    let mut buffer = [0; ANSWER_BYTES];
    let mut page = 1u64;
    // The one who asks ends by closing its side, which shows as an error here.
    while socket.read_exact(&mut buffer[..QUESTION_BYTES]).is_ok() {
        // Knuth's multiplicative steps: pages in no order.
        page = page.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let at = (page >> 33) % pages * ANSWER_BYTES as u64;
        file.read_exact_at(&mut buffer, at).map_err(context("read"))?;
        if socket.write_all(&buffer).is_err() {
            break;
        }
    }
    Ok(())
}

/// One read over this thread's connection, which the first one makes. Errors: EIO, whatever failed.
pub fn ask(file: &str) -> Result<()> {
    CONNECTION.with_borrow_mut(|connection| {
        let socket = match connection {
            Some(socket) => socket,
            None => connection.insert(connect(file).map_err(|_| Errno::EIO)?),
        };
        let mut buffer = [0; ANSWER_BYTES];
        socket.write_all(&buffer[..QUESTION_BYTES]).map_err(|_| Errno::EIO)?;
        socket.read_exact(&mut buffer).map_err(|_| Errno::EIO)?;
        Ok(())
    })
}

/// Starts a server on this thread's CPU and connects to it.
fn connect(file: &str) -> CommandResult<TcpStream> {
    // SAFETY: no pointers.
    let pin_cpu = unsafe { libc::sched_getcpu() }.max(0).to_string();
    let this = std::env::current_exe().map_err(context("own path"))?;
    let mut server = Command::new(this)
        .args(["relay-serve", "--file", file, "--pin", &pin_cpu])
        .stdout(Stdio::piped())
        .spawn()
        .map_err(context("relay-serve"))?;
    let out = server.stdout.take().ok_or("relay-serve has no output")?;
    let mut port = String::new();
    BufReader::new(out).read_line(&mut port).map_err(context("relay-serve"))?;
    let port: u16 = port.trim().parse().map_err(context("relay-serve"))?;
    let socket = TcpStream::connect(("127.0.0.1", port)).map_err(context("connect"))?;
    socket.set_nodelay(true).map_err(context("nodelay"))?;
    let _ = SockRef::from(&socket).set_tcp_congestion(CONGESTION); // not each kernel has it
    Ok(socket)
}
