//! `dray policy`: rules about files, fed by the audit of an export in place of scans.

mod act;
mod feed;
mod known;
mod place;
mod rules;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;

use crate::args::{PolicyArgs, PolicyCommand, PolicyRunArgs};
use crate::audit::sources::LogSource;
use crate::error::{ErrorContext, Failure};
use crate::flock::lock_within;
use crate::{output, paths};
use known::KnownFiles;
use rules::{DEFAULT_FILE, Policy, PolicyAction};

/// Does what is asked for.
pub fn run(args: &PolicyArgs) -> Result<(), Failure> {
    let file = args.config.clone().unwrap_or_else(|| DEFAULT_FILE.into());
    let policies = rules::read(&file)?;
    match &args.command {
        PolicyCommand::Check => {
            output::print_line(format_args!("{}: {} policies", file.display(), policies.len()))
        }
        PolicyCommand::List(args) => policies.values().try_for_each(|one| show(one, args.json)),
        PolicyCommand::Run(args) => {
            let policy = policies.get(&args.name).ok_or_else(|| {
                let names: Vec<&str> = policies.keys().map(String::as_str).collect();
                Failure::usage(format!(
                    "no policy is called `{}`; there are: {}",
                    args.name,
                    names.join(", ")
                ))
            })?;
            run_one(policy, args)
        }
    }
}

fn show(policy: &Policy, is_json: bool) -> Result<(), Failure> {
    let Policy { name, log, root, action, .. } = policy;
    let path = String::from_utf8_lossy(&policy.path);
    let path = if path.is_empty() { "/" } else { &path };
    if is_json {
        return output::print_json(&json!({
            "name": name, "log": log, "root": root.display().to_string(), "path": path,
            "older_s": policy.older_s, "idle_s": policy.idle_s, "owner": policy.owner,
            "larger_bytes": policy.larger_bytes, "smaller_bytes": policy.smaller_bytes,
            "do": action.name(), "most": policy.most,
        }));
    }
    let root = root.display();
    output::print_line(format_args!(
        "{name}: {} files of {log} at {path}, seen in {root}",
        action.name()
    ))
}

/// Where what a policy knows is kept.
fn state_file(args: &PolicyRunArgs) -> PathBuf {
    let dir = args.state.clone().unwrap_or_else(|| paths::state_dir().join("policy"));
    dir.join(format!("{}.json", args.name))
}

fn run_one(policy: &Policy, args: &PolicyRunArgs) -> Result<(), Failure> {
    let state = state_file(args);
    let _lock = lock(&state)?;
    let cannot = || format!("cannot keep what the policy knows in {}", state.display());
    let mut known = KnownFiles::load(&state).doing(cannot)?;
    let sources = LogSource::named(&policy.log, args.auth.as_deref(), args.log_state.as_deref())?;
    // The log first: what changes during a scan is in the log of the next run.
    feed::catch_up(&mut known, &sources)?;
    if args.scan {
        let found = feed::scan(&mut known, policy)?;
        output::complain(format_args!("{found} files were found by the scan"));
        known.missing = 0;
    }
    feed::warn(&known);
    known.save(&state).doing(cannot)?;
    let outcome = act::act(policy, &mut known, (args.dry_run, args.json))?;
    known.save(&state).doing(cannot)?;
    let would = match (&policy.action, args.dry_run) {
        (PolicyAction::Run(_), true) => "match, and nothing was done with them",
        (PolicyAction::Run(_), false) => "matched",
        (PolicyAction::List | PolicyAction::Report, _) => "match",
    };
    let more = if outcome.is_cut { "; there are more, for the next run" } else { "" };
    let (matched, bytes) = (outcome.matched, outcome.bytes);
    output::complain(format_args!("{matched} files of {bytes} bytes {would}{more}"));
    match outcome.failed {
        0 => Ok(()),
        failed => Err(Failure::new(format!("{failed} files failed"))),
    }
}

/// One run of a policy at a time.
fn lock(state: &Path) -> Result<std::fs::File, Failure> {
    let path = state.with_extension("lock");
    let shown = path.display();
    if let Some(dir) = path.parent() {
        paths::make_private(dir)?;
    }
    let mut options = std::fs::OpenOptions::new();
    let file = options.create(true).truncate(false).write(true).open(&path);
    let file = file.doing(|| format!("cannot open {shown}"))?;
    match lock_within(&file, Duration::ZERO).doing(|| format!("cannot lock {shown}"))? {
        true => Ok(file),
        false => Err(Failure::new("another run of this policy has not ended")),
    }
}
