//! Which logs a command is about: one of this machine, or those of one or some servers.

use std::path::Path;

use dray_client::{Key, Target};

use super::access::LogAccess;
use super::local::LocalLog;
use super::place::LogPlace;
use super::remote::{RemoteLog, server_name};
use crate::args::LogArgs;
use crate::error::Failure;
use crate::key;
use crate::serve::parse_auth;

/// Where a log is.
#[derive(Clone, Debug)]
pub enum LogSource {
    /// The files of the log are on this machine.
    Local(LogPlace),
    /// A server has it.
    Remote(Target, Option<Key>),
}

impl LogSource {
    /// The logs that the arguments name. Errors: as [`LogSource::named`].
    pub fn all(args: &LogArgs) -> Result<Vec<LogSource>, Failure> {
        LogSource::named(&args.export, args.auth.as_deref(), args.state.as_deref())
    }

    /// The logs of an export of this machine, or of a target. Errors: there is none, or the target or
    /// the key is wrong.
    pub fn named(
        name: &str,
        auth: Option<&str>,
        state: Option<&Path>,
    ) -> Result<Vec<LogSource>, Failure> {
        if !name.contains("://") {
            return Ok(vec![LogSource::Local(LogPlace::find(name, state)?)]);
        }
        if state.is_some() {
            return Err(Failure::usage(
                "a state directory is for a log of this machine, not for a target",
            ));
        }
        let target: Target = name.parse().map_err(Failure::usage)?;
        let auth = auth.map_or_else(key::default_auth, str::to_owned);
        let key = parse_auth(&auth)?;
        Ok(target.each().map(|one| LogSource::Remote(one, key.clone())).collect())
    }

    /// As [`LogSource::all`], where only one log makes sense. `what`: for what, in words.
    pub fn only(args: &LogArgs, what: &str) -> Result<LogSource, Failure> {
        let mut all = LogSource::all(args)?;
        match (all.pop(), all.is_empty()) {
            (Some(one), true) => Ok(one),
            _ => Err(Failure::usage(format!(
                "each server numbers its own records: name one for {what}"
            ))),
        }
    }

    /// The log itself. Errors: there are no descriptors.
    pub fn open(&self) -> Result<Box<dyn LogAccess>, Failure> {
        Ok(match self {
            LogSource::Local(place) => Box::new(LocalLog::new(place.clone())),
            LogSource::Remote(target, key) => {
                Box::new(RemoteLog::new(target.clone(), key.clone())?)
            }
        })
    }

    /// The name of the export.
    pub fn export(&self) -> &str {
        match self {
            LogSource::Local(place) => &place.export,
            LogSource::Remote(target, _) => &target.export,
        }
    }

    /// The server, as records name it; none: this machine.
    pub fn server(&self) -> Option<String> {
        match self {
            LogSource::Local(_) => None,
            LogSource::Remote(target, _) => Some(server_name(target)),
        }
    }
}

/// Does something with each log. What cannot be done with one is said in the end, and the others go on.
pub fn for_each(
    args: &LogArgs,
    mut each: impl FnMut(&LogSource, &mut dyn LogAccess) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut failures: Vec<Failure> = Vec::new();
    for source in LogSource::all(args)? {
        let done = source.open().and_then(|mut log| each(&source, &mut *log));
        failures.extend(done.err());
    }
    let Some(first) = failures.first() else { return Ok(()) };
    let all: Vec<&str> = failures.iter().map(|failure| failure.message.as_str()).collect();
    Err(Failure { code: first.code, message: all.join("; ") })
}
