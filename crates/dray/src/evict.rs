//! `dray evict`.

use std::path::{Path, PathBuf};

use crate::args::EvictArgs;
use crate::control::{self, ProcessKind};
use crate::error::{ErrorContext, Failure};
use crate::{output, paths, unresponsive};

/// Asks the server to end the client's sessions.
pub fn run(args: &EvictArgs) -> Result<(), Failure> {
    if args.client.is_empty() || args.client.contains(char::is_whitespace) {
        return Err(Failure::usage("a client is a session number or a host name"));
    }
    let mut evicted = 0;
    let mut asked = 0;
    let mut silent = Vec::new();
    for socket in sockets(args)? {
        match control::ask(&socket, &format!("evict {}", args.client)) {
            Ok(reply) => {
                asked += 1;
                evicted += reply["evicted"].as_u64().unwrap_or(0);
            }
            Err(error) if unresponsive::is_dead(&error) => {}
            Err(error) => silent.push(unresponsive::sentence(&socket, &error)),
        }
    }
    if evicted > 0 {
        output::print_line(format_args!("evicted {evicted} session(s) of {}", args.client))?;
    }
    // The question waits for a server that is stopped.
    if !silent.is_empty() {
        let whose = silent.join("; ");
        let what = format!("{whose}; it may end sessions of `{}` when it runs again", args.client);
        return Err(Failure::new(what));
    }
    match (asked, evicted) {
        (0, _) => Err(Failure::new(
            "no server of this machine answers: is `dray serve` running, and are you its user?",
        )),
        (_, 0) => Err(Failure::new(format!(
            "no client `{}`: `dray status` shows session numbers and host names",
            args.client
        ))),
        _ => Ok(()),
    }
}

fn sockets(args: &EvictArgs) -> Result<Vec<PathBuf>, Failure> {
    match &args.state {
        Some(state) => server_of(state).map(|socket| vec![socket]),
        None => Ok(ProcessKind::Server.all()),
    }
}

/// Where the server listens that has this state directory.
pub fn server_of(state: &Path) -> Result<PathBuf, Failure> {
    let state = std::fs::canonicalize(state).doing(|| {
        let shown = state.display();
        format!("cannot find the state directory {shown} (`dray status` shows that of each server)")
    })?;
    Ok(ProcessKind::Server.socket(&paths::short_name(&state)))
}
