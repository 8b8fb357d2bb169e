//! Chooses the state directory of a server that was started without `--state`.
//!
//! The listening address decides nothing: it may differ at the next start, and clients must find their
//! sessions. A server takes the directory that knows its exports. A server whose exports are in no directory
//! takes the first free one. So several servers of one machine find their own directories.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::at_once;
use crate::control::{self, ProcessKind};
use crate::error::Failure;
use crate::paths;
use crate::serve::export::ExportPlan;
use crate::serve::state::{StateDir, escaped, known_dirs};

/// The first of those that are made, below [`paths::state_dir`]; others have a number behind it.
const NAME: &str = "main";

/// Servers of one machine without a configured state directory.
const SERVERS_MAX: usize = 64;

/// Directories that are looked at. Earlier versions made one for each address.
const LOOKED_AT_MAX: usize = 1000;

/// How long the file system of an export may take to say what a directory is called without links.
/// Without an answer the directory goes by the name that it was given.
const ANSWER_MAX: Duration = Duration::from_millis(500);

/// A state directory that knows some of a server's exports.
struct Candidate {
    dir: PathBuf,
    /// The exports that it knows, by their directories.
    known: Vec<String>,
    /// When something was last noted there.
    used: SystemTime,
}

/// The directory of an export, by each of its names, as state directories have them.
struct ExportNames {
    name: String,
    dirs: Vec<String>,
}

/// Opens the state directory of a server of these exports: the one that it was `given`, else the one
/// that knows them. Errors: another server has it, or it cannot be used.
pub fn open(given: Option<&Path>, exports: &[ExportPlan]) -> Result<StateDir, Failure> {
    let wanted = wanted(exports);
    let candidates = candidates(&paths::state_dir(), &wanted);
    if let Some(given) = given {
        let state = StateDir::open(given)?;
        warn_of_others(&state, &candidates, &wanted);
        return Ok(state);
    }
    for candidate in &candidates {
        match StateDir::try_open(&candidate.dir)? {
            Some(state) => {
                warn_of_others(&state, &candidates, &wanted);
                return Ok(state);
            }
            // One that serves others only has split from this one.
            None if serves_others_only(&candidate.dir, &wanted) => {}
            None => return Err(in_use(candidate)),
        }
    }
    let state = new(&paths::state_dir())?;
    for candidate in &candidates {
        state.exports().take_over(&candidate.dir, &candidate.known)?;
    }
    Ok(state)
}

fn wanted(exports: &[ExportPlan]) -> Vec<ExportNames> {
    let exports = exports.iter().filter(|export| export.backend.has_directory());
    let dirs: Vec<PathBuf> = exports.clone().map(|export| export.dir.clone()).collect();
    // A file system that hangs is waited for by its own export alone.
    let plain = at_once::each(ANSWER_MAX, dirs, |dir| std::fs::canonicalize(dir).ok());
    let one = |(export, plain): (&ExportPlan, Option<Option<PathBuf>>)| {
        let given = std::path::absolute(&export.dir).unwrap_or_else(|_| export.dir.clone());
        let dirs = plain.flatten().into_iter().chain([given]).map(|dir| escaped(&dir)).collect();
        ExportNames { name: export.name.clone(), dirs }
    };
    exports.zip(plain).map(one).collect()
}

/// State directories below `base`, and `base` itself, that know any of the wanted exports. The one that knows
/// most comes first, then the one that was used last.
fn candidates(base: &Path, wanted: &[ExportNames]) -> Vec<Candidate> {
    let entries = std::fs::read_dir(base).into_iter().flatten().flatten();
    let below = entries.map(|entry| entry.path()).take(LOOKED_AT_MAX);
    let candidate = |dir: PathBuf| {
        let is_wanted = |dir: &String| wanted.iter().any(|one| one.dirs.contains(dir));
        let known: Vec<String> = known_dirs(&dir).into_iter().filter(is_wanted).collect();
        let used = last_used(&dir);
        (!known.is_empty()).then_some(Candidate { dir, known, used })
    };
    let mut all: Vec<Candidate> = below.chain([base.to_owned()]).filter_map(candidate).collect();
    all.sort_by_key(|one| std::cmp::Reverse((one.known.len(), one.used)));
    all
}

fn last_used(dir: &Path) -> SystemTime {
    let changed = |name| std::fs::metadata(dir.join(name)).and_then(|meta| meta.modified()).ok();
    let all = ["boot", "exports.toml", "sessions"].into_iter().filter_map(changed);
    all.max().unwrap_or(SystemTime::UNIX_EPOCH)
}

/// Says so where a mount may be looked for in vain.
fn warn_of_others(state: &StateDir, candidates: &[Candidate], wanted: &[ExportNames]) {
    let own = std::fs::canonicalize(state.dir()).unwrap_or_else(|_| state.dir().to_owned());
    let is_own = |dir: &Path| std::fs::canonicalize(dir).is_ok_and(|dir| dir == own);
    let known = known_dirs(state.dir());
    for one in wanted {
        let knows = |known: &[String]| known.iter().any(|dir| one.dirs.contains(dir));
        if knows(&known) {
            continue;
        }
        let mut others =
            candidates.iter().filter(|other| knows(&other.known) && !is_own(&other.dir));
        if let Some(other) = others.next() {
            log::warn!(
                "export `{}` is new to the state directory {}, and {} knows it: mounts that were made \
                 with that are stale here; start with --state {} to have them go on",
                one.name,
                state.dir().display(),
                other.dir.display(),
                other.dir.display()
            );
        }
    }
}

/// Whether the server that has this state directory says that it serves none of these exports.
fn serves_others_only(state: &Path, wanted: &[ExportNames]) -> bool {
    let Ok(state) = std::fs::canonicalize(state) else { return false };
    let socket = ProcessKind::Server.socket(&paths::short_name(&state));
    let Ok(report) = control::ask(&socket, "status") else { return false };
    let Some(exports) = report["exports"].as_array() else { return false };
    let dirs = exports.iter().filter_map(|export| export["dir"].as_str());
    let served: Vec<String> = dirs.map(|dir| escaped(Path::new(dir))).collect();
    !wanted.iter().any(|one| one.dirs.iter().any(|dir| served.contains(dir)))
}

fn in_use(candidate: &Candidate) -> Failure {
    let (shown, known) = (candidate.dir.display(), candidate.known.join(", "));
    Failure::new(format!(
        "another dray server uses the state directory {shown}, which knows the export of {known}: stop \
         that server, or give this one a directory of its own with --state, in which its exports are \
         others to clients"
    ))
}

/// The first below `base` that no other server has, and no client needs.
fn new(base: &Path) -> Result<StateDir, Failure> {
    for number in 1..=SERVERS_MAX {
        let name = if number == 1 { NAME.to_owned() } else { format!("{NAME}-{number}") };
        let dir = base.join(name);
        if let Some(state) = StateDir::try_open(&dir)?
            && !has_sessions(&dir)
        {
            return Ok(state);
        }
    }
    let base = base.display();
    Err(Failure::new(format!(
        "{base} has {SERVERS_MAX} state directories of other servers: name one for this server with --state"
    )))
}

/// Whether clients may come back to it. A client that has mounted and is away for longer than a
/// lease has none. It needs no more than that it is still known there which export is which.
fn has_sessions(dir: &Path) -> bool {
    std::fs::read_dir(dir.join("sessions")).is_ok_and(|mut sessions| sessions.next().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(dirs: &[&str]) -> Vec<ExportNames> {
        let one = |dir: &&str| ExportNames { name: "a".into(), dirs: vec![(*dir).to_owned()] };
        dirs.iter().map(one).collect()
    }

    fn knows(base: &Path, name: &str, dirs: &[&str]) {
        let state = StateDir::open(&base.join(name)).unwrap();
        dirs.iter().for_each(|dir| _ = state.exports().identity(Path::new(dir)).unwrap());
    }

    #[test]
    fn the_directory_that_knows_most_exports_is_taken_and_of_those_the_last_one_used() {
        let base = tempfile::tempdir().unwrap();
        let base = base.path();
        assert!(candidates(base, &wanted(&["/srv/a"])).is_empty());
        knows(base, "tcp---127.0.0.1-7440", &["/srv/a"]);
        knows(base, "main", &["/srv/c"]);
        let names = |dirs: &[&str]| -> Vec<String> {
            let found = candidates(base, &wanted(dirs));
            let name =
                |one: &Candidate| one.dir.file_name().unwrap().to_string_lossy().into_owned();
            found.iter().map(name).collect()
        };
        assert_eq!(names(&["/srv/a"]), ["tcp---127.0.0.1-7440"]);
        assert!(names(&["/srv/d"]).is_empty());
        knows(base, "tcp---0.0.0.0-7440", &["/srv/a", "/srv/b"]);
        assert_eq!(names(&["/srv/a", "/srv/b"])[0], "tcp---0.0.0.0-7440");
        let old = std::fs::File::open(base.join("tcp---0.0.0.0-7440/exports.toml")).unwrap();
        old.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        assert_eq!(names(&["/srv/a"])[0], "tcp---127.0.0.1-7440");
        std::fs::write(base.join("main/exports.toml"), "version = 99").unwrap();
        assert!(names(&["/srv/c"]).is_empty(), "it cannot be read");
    }

    #[test]
    fn a_new_server_takes_what_nobody_has_and_no_client_needs() {
        let base = tempfile::tempdir().unwrap();
        let base = base.path();
        let first = new(base).unwrap();
        assert_eq!(first.dir(), base.join("main"));
        let second = new(base).unwrap();
        assert_eq!(second.dir(), base.join("main-2"));
        drop((first, second));
        std::fs::create_dir(base.join("main/sessions")).unwrap();
        assert_eq!(new(base).unwrap().dir(), base.join("main"));
        std::fs::write(base.join("main/sessions/session-1"), "").unwrap();
        assert_eq!(new(base).unwrap().dir(), base.join("main-2"));
    }

    #[test]
    fn who_an_export_is_goes_with_it_when_its_server_is_split() {
        let base = tempfile::tempdir().unwrap();
        let base = base.path();
        knows(base, "main", &["/srv/a", "/srv/b"]);
        let identity =
            |state: &StateDir, dir: &str| state.exports().identity(Path::new(dir)).unwrap();
        let old = StateDir::open(&base.join("main")).unwrap();
        let split = StateDir::open(&base.join("main-2")).unwrap();
        split.exports().take_over(old.dir(), &["/srv/b".to_owned()]).unwrap();
        assert_eq!(identity(&split, "/srv/b"), identity(&old, "/srv/b"));
        assert_ne!(identity(&split, "/srv/a"), identity(&old, "/srv/a"));
    }
}
