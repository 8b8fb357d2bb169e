//! `dray accept`.

use crate::args::AcceptArgs;
use crate::control::{self, ProcessKind};
use crate::error::Failure;
use crate::{evict, output, unresponsive};

/// Has the server serve an export from what is at its place.
pub fn run(args: &AcceptArgs) -> Result<(), Failure> {
    let name = &args.export;
    if name.is_empty() || name.contains(char::is_whitespace) {
        return Err(Failure::usage("name the export as `dray status` shows it"));
    }
    let (mut asked, mut answers, mut silent) = (0, Vec::new(), Vec::new());
    for socket in servers(args)? {
        match control::ask(&socket, &format!("accept {name}")) {
            Ok(reply) => {
                asked += 1;
                if reply["unknown"] != true {
                    answers.push(reply);
                }
            }
            Err(error) if unresponsive::is_dead(&error) => {}
            Err(error) => silent.push(unresponsive::sentence(&socket, &error)),
        }
    }
    if let Some(answer) = answers.iter().find(|answer| answer["accepted"].is_string()) {
        let what = answer["accepted"].as_str().unwrap_or_default();
        output::print_line(format_args!(
            "export `{name}` is served from {what} from now on: unmount its clients, and mount again"
        ))?;
        return Ok(());
    }
    if let Some(why) = answers.iter().find_map(|answer| answer["error"].as_str()) {
        return Err(Failure::new(why));
    }
    if !silent.is_empty() {
        return Err(Failure::new(silent.join("; ")));
    }
    Err(Failure::new(match asked {
        0 => "no server of this machine answers: is `dray serve` running, and are you its user?"
            .into(),
        _ => format!("no export is called `{name}`: `dray status` shows those that there are"),
    }))
}

fn servers(args: &AcceptArgs) -> Result<Vec<std::path::PathBuf>, Failure> {
    match &args.state {
        Some(state) => evict::server_of(state).map(|socket| vec![socket]),
        None => Ok(ProcessKind::Server.all()),
    }
}
