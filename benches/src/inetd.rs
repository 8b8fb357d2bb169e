//! A listener that gives each connection to a new process as its standard input and output. This is
//! how sshfs reaches an sftp-server without ssh and without a copying process.

use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};

use crate::{CommandResult, context};

/// Connections served in all before it ends: a mount makes one.
const CONNECTIONS_MAX: usize = 1000;

/// Listens on 127.0.0.1:`port` and starts `command` for each connection.
pub fn run(port: u16, command: &[String]) -> CommandResult {
    let (program, args) = command.split_first().ok_or("inetd needs a command")?;
    let listener = TcpListener::bind(("127.0.0.1", port)).map_err(context("bind"))?;
    let mut children: Vec<Child> = Vec::new();
    for _ in 0..CONNECTIONS_MAX {
        let (socket, _) = listener.accept().map_err(context("accept"))?;
        socket.set_nodelay(true).map_err(context("nodelay"))?;
        let input = OwnedFd::from(socket);
        let output = input.try_clone().map_err(context("dup"))?;
        let child = Command::new(program)
            .args(args)
            .stdin(Stdio::from(input))
            .stdout(Stdio::from(output))
            .spawn()
            .map_err(context(program))?;
        children.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        children.push(child);
    }
    Ok(())
}
