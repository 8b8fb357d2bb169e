//! Where the log of an export is.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use dray_layers::audit::{Consumers, SegmentFile, segments};

use crate::control::{self, ProcessKind};
use crate::error::{ErrorContext, Failure};
use crate::paths;
use crate::serve::audit::{SPILL_FILE, log_dir};

/// A log on this machine.
#[derive(Clone, Debug)]
pub struct LogPlace {
    pub export: String,
    pub dir: PathBuf,
    /// Directories with segments.
    pub dirs: Vec<PathBuf>,
}

impl LogPlace {
    /// Finds the log. Errors: there is none, or several servers have one of this export.
    pub fn find(export: &str, state: Option<&Path>) -> Result<LogPlace, Failure> {
        let states = match state {
            Some(state) => vec![state.to_owned()],
            None => known_states(),
        };
        let has_log = |state: &&PathBuf| log_dir(state, export).is_dir();
        let found: BTreeSet<PathBuf> = states
            .iter()
            .filter(has_log)
            .map(|state| std::fs::canonicalize(state).unwrap_or_else(|_| state.clone()))
            .collect();
        let mut found = found.into_iter();
        let (first, second) = (found.next(), found.next());
        match (first, second) {
            (Some(state), None) => Ok(LogPlace::in_state(&state, export)),
            (Some(one), Some(other)) => {
                let (one, other) = (one.display(), other.display());
                Err(Failure::usage(format!(
                    "there are several audits of `{export}`: name the state directory with --state {one} \
                     or --state {other}"
                )))
            }
            (None, _) => Err(Failure::new(format!(
                "no audit of an export `{export}` on this machine: is `audit` set for it, and are you the \
                 server's user? (--state names the server's state directory)"
            ))),
        }
    }

    /// The log of an export in a state directory.
    pub fn in_state(state: &Path, export: &str) -> LogPlace {
        let dir = log_dir(state, export);
        let spill = std::fs::read(dir.join(SPILL_FILE)).ok();
        let spill = spill.map(|path| PathBuf::from(OsStr::from_bytes(&path)));
        let dirs = std::iter::once(dir.clone()).chain(spill).collect();
        LogPlace { export: export.to_owned(), dir, dirs }
    }

    pub fn consumers(&self) -> Consumers {
        Consumers::of(&self.dir)
    }

    pub fn segments(&self) -> Result<Vec<SegmentFile>, Failure> {
        segments(&self.dirs).doing(|| self.cannot_read())
    }

    pub fn cannot_read(&self) -> String {
        format!("cannot read the audit in {}", self.dir.display())
    }
}

/// State directories of servers that run, and those in the usual place.
fn known_states() -> Vec<PathBuf> {
    let answers = control::ask_all(ProcessKind::Server.all(), "status").into_iter();
    let running =
        answers.filter_map(|(_, answer)| Some(PathBuf::from(answer.ok()?["state"].as_str()?)));
    let base = paths::state_dir();
    let entries = std::fs::read_dir(&base).into_iter().flatten().flatten();
    running.chain(entries.map(|entry| entry.path())).chain([base]).collect()
}
