//! `dray drain`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use crate::args::DrainArgs;
use crate::control::{self, ProcessKind};
use crate::error::Failure;
use crate::serve::slices::administration::THIS_SERVER;
use crate::{evict, output, unresponsive};

/// Between looks at what is left.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Names of slices that a line of progress shows; the rest is counted.
const SHOWN_MAX: usize = 8;

/// Has a server serve nothing, and waits until that is so. Errors: it cannot be drained, or nobody here
/// knows it.
pub fn run(args: &DrainArgs) -> Result<(), Failure> {
    let server = args.server.as_deref().unwrap_or(THIS_SERVER);
    if server.is_empty() || server.contains(char::is_whitespace) {
        return Err(Failure::usage("a server is named as `dray status` shows it"));
    }
    let sockets = sockets(args.state.as_deref())?;
    if args.server.is_none() && sockets.len() > 1 {
        return Err(Failure::usage(
            "several servers run on this machine: name one, or say --state DIR (`dray status` shows both)",
        ));
    }
    let word = if args.undo { "undrain" } else { "drain" };
    let mut heard = false;
    for socket in sockets {
        let reply = match control::ask(&socket, &format!("{word} {server}")) {
            Ok(reply) => reply,
            Err(error) if unresponsive::is_dead(&error) => continue,
            Err(error) => return Err(Failure::new(unresponsive::sentence(&socket, &error))),
        };
        heard = true;
        if let Some(why) = reply["error"].as_str() {
            return Err(Failure::new(why));
        }
        if reply["projections"].as_u64().unwrap_or(0) > 0 {
            return if args.undo { Ok(()) } else { wait(&socket, server) };
        }
    }
    Err(Failure::new(match heard {
        true => "this machine has no server of a projection with failover that knows such a server",
        false => {
            "no server of this machine answers: is `dray serve` running, and are you its user?"
        }
    }))
}

/// Of the servers that may be asked.
pub fn sockets(state: Option<&Path>) -> Result<Vec<PathBuf>, Failure> {
    match state {
        Some(state) => evict::server_of(state).map(|socket| vec![socket]),
        None => {
            ProcessKind::Server.remove_all_dead();
            Ok(ProcessKind::Server.all())
        }
    }
}

/// Says what is left, each time that it has become less.
fn wait(socket: &Path, server: &str) -> Result<(), Failure> {
    let mut before = usize::MAX;
    loop {
        let reply = control::ask(socket, &format!("drained {server}"))
            .map_err(|error| Failure::new(unresponsive::sentence(socket, &error)))?;
        if let Some(why) = reply["error"].as_str() {
            return Err(Failure::new(why));
        }
        let left: Vec<&str> = reply["left"]
            .as_array()
            .map(|left| left.iter().filter_map(Value::as_str).collect())
            .unwrap_or_default();
        if left.is_empty() {
            return output::print_line("drained: it serves nothing any more");
        }
        if left.len() != before {
            before = left.len();
            let more = if left.len() > SHOWN_MAX { " ..." } else { "" };
            let shown = left[..left.len().min(SHOWN_MAX)].join(" ");
            output::print_line(format_args!("{} slices left: {shown}{more}", left.len()))?;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}
