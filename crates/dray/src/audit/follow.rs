//! Prints records as they come.

use super::feed::{Begin, FeedPlan};
use super::merge::{Merge, MergeStep, Merged};
use super::sources::LogSource;
use crate::args::FollowArgs;
use crate::audit::filter_of;
use crate::audit::render::Format;
use crate::audit::search::ReadProgress;
use crate::error::Failure;
use crate::output;

pub fn run(args: &FollowArgs) -> Result<(), Failure> {
    let sources = match args.from {
        Some(_) => vec![LogSource::only(&args.log, "--from")?],
        None => LogSource::all(&args.log)?,
    };
    let plan = FeedPlan {
        name: args.name.clone(),
        filter: filter_of(&args.filter)?,
        from: args.from,
        begin: if args.once { Begin::Oldest } else { Begin::Next },
        once: args.once,
    };
    print_all(&sources, &plan, args.log.json, &mut ReadProgress::none())
}

/// Prints what comes until it ends. Errors: servers were away to the end.
pub fn print_all(
    sources: &[LogSource],
    plan: &FeedPlan,
    is_json: bool,
    progress: &mut ReadProgress,
) -> Result<(), Failure> {
    let format = if is_json { Format::Json } else { Format::Text };
    let servers: Vec<Option<String>> = sources.iter().map(LogSource::server).collect();
    let server = |number: usize| servers[number].as_deref();
    let plans = vec![plan.clone(); sources.len()];
    let mut merge = Merge::start(sources, &plans)?;
    loop {
        let some = match merge.next()? {
            MergeStep::Some(some) => some,
            MergeStep::Progress(done, whole) => {
                progress.show(done, whole);
                continue;
            }
            MergeStep::End(away) => {
                progress.clear();
                let away: Vec<&str> = away.into_iter().filter_map(server).collect();
                return match away.is_empty() {
                    true => Ok(()),
                    false => Err(Failure::new(format!(
                        "what {} has recorded is not among this",
                        away.join(" and ")
                    ))
                    .nobody_answered()),
                };
            }
        };
        progress.clear();
        let mut lines = String::new();
        for one in some {
            match one {
                Merged::Record(number, record) => {
                    let origin = server(number).map(|name| ("server", name));
                    format.line(&record, origin, &mut lines);
                }
                Merged::Away(why) => output::complain(format_args!("{why}; the others go on")),
                Merged::Back(number) => output::complain(format_args!(
                    "{} is back; what it has recorded meanwhile follows",
                    server(number).unwrap_or_default()
                )),
            }
        }
        output::print(&lines)?;
    }
}
