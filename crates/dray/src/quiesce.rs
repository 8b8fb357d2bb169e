//! `dray quiesce`.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use crate::args::QuiesceArgs;
use crate::control;
use crate::error::Failure;
use crate::{drain, output, unresponsive};

/// Between looks whether the servers are quiet.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Has all servers of a projection hold new calls, and waits until none is under way. Errors: no server of
/// this machine has such a projection, or etcd does not answer.
pub fn run(args: &QuiesceArgs) -> Result<(), Failure> {
    let projection = &args.projection;
    if projection.is_empty() || projection.contains(char::is_whitespace) {
        return Err(Failure::usage("a projection is named as `dray status` shows it"));
    }
    let word = if args.undo { "resume" } else { "quiesce" };
    let mut heard = false;
    for socket in drain::sockets(args.state.as_deref())? {
        let reply = match control::ask(&socket, &format!("{word} {projection}")) {
            Ok(reply) => reply,
            Err(error) if unresponsive::is_dead(&error) => continue,
            Err(error) => return Err(Failure::new(unresponsive::sentence(&socket, &error))),
        };
        heard = true;
        if let Some(why) = reply["error"].as_str() {
            return Err(Failure::new(why));
        }
        if reply["unknown"] != true {
            return if args.undo { Ok(()) } else { wait(&socket, projection) };
        }
    }
    Err(Failure::new(match heard {
        true => "this machine has no server of a projection with failover that has this name",
        false => {
            "no server of this machine answers: is `dray serve` running, and are you its user?"
        }
    }))
}

/// Says who is waited for, each time that this changes.
fn wait(socket: &Path, projection: &str) -> Result<(), Failure> {
    let (mut before, mut has_begun) = (String::new(), false);
    loop {
        std::thread::sleep(LOOK_EVERY);
        let reply = control::ask(socket, &format!("quiet {projection}"))
            .map_err(|error| Failure::new(unresponsive::sentence(socket, &error)))?;
        if let Some(why) = reply["error"].as_str() {
            return Err(Failure::new(why));
        }
        // The server hears by etcd of its own mark, too.
        let Some(left) = reply["not_quiet"].as_array() else {
            if has_begun {
                return Err(Failure::new("somebody has let calls go on meanwhile"));
            }
            continue;
        };
        has_begun = true;
        if left.is_empty() {
            return output::print_line("quiesced: no call is under way");
        }
        let left: Vec<&str> = left.iter().filter_map(Value::as_str).collect();
        let left = left.join(" ");
        if left != before {
            output::print_line(format_args!("calls are under way at {left}"))?;
            before = left;
        }
    }
}
