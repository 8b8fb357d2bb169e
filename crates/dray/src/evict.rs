//! `dray evict`.

use std::path::PathBuf;

use crate::args::EvictArgs;
use crate::control::{self, Kind};
use crate::error::{Doing, Failure};
use crate::{output, paths};

/// Asks the server to end the client's sessions.
pub fn run(args: &EvictArgs) -> Result<(), Failure> {
    if args.client.is_empty() || args.client.contains(char::is_whitespace) {
        return Err(Failure::usage("a client is a session number or a host name"));
    }
    let mut evicted = 0;
    let mut asked = 0;
    for socket in sockets(args)? {
        let Ok(reply) = control::ask(&socket, &format!("evict {}", args.client)) else { continue };
        asked += 1;
        evicted += reply["evicted"].as_u64().unwrap_or(0);
    }
    match (asked, evicted) {
        (0, _) => Err(Failure::new(
            "no server of this machine answers: is `dray serve` running, and are you its user?",
        )),
        (_, 0) => Err(Failure::new(format!(
            "no client `{}`: `dray status` shows session numbers and host names",
            args.client
        ))),
        _ => output::print_line(format_args!("evicted {evicted} session(s) of {}", args.client)),
    }
}

fn sockets(args: &EvictArgs) -> Result<Vec<PathBuf>, Failure> {
    let Some(state) = &args.state else { return Ok(Kind::Server.all()) };
    let state = std::fs::canonicalize(state).doing(|| {
        let shown = state.display();
        format!("cannot find the state directory {shown} (`dray status` shows that of each server)")
    })?;
    Ok(vec![Kind::Server.socket(&paths::short_name(&state))])
}
