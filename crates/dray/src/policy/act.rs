//! Which files match, and what is done with them.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};

use serde_json::json;

use super::known::{KnownFile, KnownFiles};
use super::place::{PolicyFile, SeenFile};
use super::rules::{FILE_WORD, Policy, PolicyAction};
use crate::audit::time;
use crate::error::Failure;
use crate::output;

/// What came of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicyOutcome {
    /// Files that match, and were acted on.
    pub matched: u64,
    pub bytes: u64,
    /// Files whose command failed, or that cannot be looked at.
    pub failed: u64,
    /// There were more than one run acts on.
    pub is_cut: bool,
}

impl Policy {
    /// Whether what is known of a file leaves it possible that it matches.
    fn may_match(&self, path: &[u8], file: &KnownFile, now_us: u64) -> bool {
        let beneath = path.strip_prefix(&self.path[..]);
        // The directory of the export is listed and opened like others, and is no file.
        path != b"/"
            && beneath.is_some_and(|rest| rest.first() == Some(&b'/') || rest.is_empty())
            && self.older_s.is_none_or(|age| is_past(file.changed_us, age, now_us))
            && self.idle_s.is_none_or(|age| is_past(file.used_us, age, now_us))
    }

    /// Whether a file matches, as it is now. The later of what the log says and what the file says
    /// counts.
    fn matches(&self, file: &KnownFile, seen: &SeenFile, now_us: u64) -> bool {
        let changed_us = file.changed_us.max(seen.changed_us);
        let used_us = file.used_us.max(seen.read_us).max(changed_us);
        self.older_s.is_none_or(|age| is_past(changed_us, age, now_us))
            && self.idle_s.is_none_or(|age| is_past(used_us, age, now_us))
            && self.larger_bytes.is_none_or(|least| seen.size_bytes >= least)
            && self.smaller_bytes.is_none_or(|most| seen.size_bytes <= most)
            && self.owner.is_none_or(|owner| seen.uid == owner)
    }
}

fn is_past(time_us: u64, age_s: u64, now_us: u64) -> bool {
    now_us.saturating_sub(time_us) / 1_000_000 >= age_s
}

/// Acts on all files that match. `is_dry`: says what would be done. Files that
/// have been gone for a while are forgotten.
pub fn act(
    policy: &Policy,
    known: &mut KnownFiles,
    (is_dry, is_json): (bool, bool),
) -> Result<PolicyOutcome, Failure> {
    let now_us = dray_rt::wall_clock().as_micros() as u64;
    let mut outcome = PolicyOutcome::default();
    let mut owners: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
    let may_match = known.files.iter().filter(|(path, file)| policy.may_match(path, file, now_us));
    let all: Vec<_> = may_match.map(|(path, file)| (path.clone(), *file)).collect();
    for (path, file) in all {
        let place = PolicyFile::find(&policy.root, &path);
        let seen = place.and_then(|place| Ok((place.look()?, place)));
        let (seen, place) = match seen {
            Ok((Some(seen), place)) => {
                if file.absent_us != 0 {
                    known.insert(path.clone(), KnownFile { absent_us: 0, ..file });
                }
                (seen, place)
            }
            Ok((None, _)) => {
                known.absent(&path, now_us);
                continue;
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                known.absent(&path, now_us);
                continue;
            }
            Err(error) => {
                output::complain(format_args!("{}: {error}", String::from_utf8_lossy(&path)));
                outcome.failed += 1;
                continue;
            }
        };
        if !policy.matches(&file, &seen, now_us) {
            continue;
        }
        if outcome.matched >= policy.most {
            outcome.is_cut = true;
            break;
        }
        (outcome.matched, outcome.bytes) = (outcome.matched + 1, outcome.bytes + seen.size_bytes);
        match &policy.action {
            PolicyAction::Report => {
                let (count, bytes) = owners.entry(seen.uid).or_default();
                (*count, *bytes) = (*count + 1, *bytes + seen.size_bytes);
            }
            PolicyAction::Run(command) if !is_dry => {
                if let Err(why) = run(command, &place) {
                    output::complain(format_args!("{}: {why}", String::from_utf8_lossy(&path)));
                    outcome.failed += 1;
                }
            }
            PolicyAction::List | PolicyAction::Run(_) => print(&path, &file, &seen, is_json)?,
        }
    }
    for (uid, (count, bytes)) in owners {
        match is_json {
            true => output::print_json(&json!({"uid": uid, "files": count, "bytes": bytes}))?,
            false => output::print_line(format_args!("uid={uid}: {count} files, {bytes} bytes"))?,
        }
    }
    Ok(outcome)
}

fn print(path: &[u8], file: &KnownFile, seen: &SeenFile, is_json: bool) -> Result<(), Failure> {
    let path = String::from_utf8_lossy(path);
    if !is_json {
        return output::print_line(path);
    }
    output::print_json(&json!({
        "path": path, "size": seen.size_bytes, "uid": seen.uid,
        "changed": time::shown(file.changed_us.max(seen.changed_us)),
        "used": time::shown(file.used_us.max(seen.read_us)),
    }))
}

/// Runs the command for a file, in the file's directory. Errors: why it failed, in words.
fn run(command: &[String], place: &PolicyFile) -> Result<(), String> {
    let mut words = command.iter().map(|word| match word == FILE_WORD {
        true => place.name().into_os_string(),
        false => word.into(),
    });
    let program = words.next().ok_or("there is no command")?;
    let shown = program.to_string_lossy();
    let mut child = Command::new(&program);
    child.args(words).current_dir(place.dir()).stdin(Stdio::null());
    match child.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("`{shown}`: {status}")),
        Err(error) => Err(format!("cannot run `{shown}`: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(action: PolicyAction) -> Policy {
        Policy {
            name: "old".into(),
            log: "x".into(),
            root: "/x".into(),
            path: b"/tmp".to_vec(),
            older_s: Some(10),
            idle_s: None,
            larger_bytes: Some(5),
            smaller_bytes: None,
            owner: Some(7),
            action,
            most: 100,
        }
    }

    #[test]
    fn a_file_matches_by_what_the_log_and_the_file_say_whichever_is_later() {
        let policy = policy(PolicyAction::List);
        let known = |changed_us| KnownFile { changed_us, used_us: changed_us, absent_us: 0 };
        let seen =
            |changed_us, size_bytes, uid| SeenFile { size_bytes, uid, changed_us, read_us: 0 };
        let now_us = 100_000_000;
        for (path, is_one) in
            [("/tmp/a", true), ("/tmp", true), ("/tmpx", false), ("/other/tmp/a", false)]
        {
            assert_eq!(policy.may_match(path.as_bytes(), &known(0), now_us), is_one, "{path}");
        }
        assert!(!policy.may_match(b"/tmp/a", &known(91_000_000), now_us));
        let everywhere = Policy { path: Vec::new(), ..policy.clone() };
        let may_match = |path: &str| everywhere.may_match(path.as_bytes(), &known(0), now_us);
        assert!(may_match("/a") && !may_match("/"));
        let matches = |known_us, file| policy.matches(&known(known_us), &file, now_us);
        assert!(matches(0, seen(1_000_000, 5, 7)));
        assert!(!matches(91_000_000, seen(0, 5, 7)), "the log has seen a change");
        assert!(!matches(0, seen(91_000_000, 5, 7)), "the file has changed since");
        assert!(!matches(0, seen(0, 4, 7)) && !matches(0, seen(0, 5, 8)));
    }

    #[test]
    fn a_command_runs_for_each_file_that_matches_and_files_that_are_gone_are_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a", "b -rf", "c"] {
            std::fs::write(dir.path().join(name), "12345").unwrap();
        }
        let command = ["rm", "{}"].map(str::to_owned).to_vec();
        let policy = Policy {
            root: dir.path().to_owned(),
            path: Vec::new(),
            older_s: None,
            owner: None,
            most: 2,
            ..policy(PolicyAction::Run(command))
        };
        let mut known = KnownFiles::default();
        for path in ["/a", "/b -rf", "/c", "/gone"] {
            known.insert(path.as_bytes().into(), KnownFile::default());
        }
        let dry = act(&policy, &mut known, (true, false)).unwrap();
        assert_eq!(dry, PolicyOutcome { matched: 2, bytes: 10, failed: 0, is_cut: true });
        assert!(dir.path().join("a").exists());
        act(&policy, &mut known, (false, false)).unwrap();
        let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().flatten().collect();
        assert_eq!(left.len(), 1);
        act(&policy, &mut known, (false, false)).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let failing =
            Policy { action: PolicyAction::Run(vec!["false".into(), "{}".into()]), ..policy };
        std::fs::write(dir.path().join("d"), "12345").unwrap();
        known.insert(b"/d"[..].into(), KnownFile::default());
        assert_eq!(act(&failing, &mut known, (false, false)).unwrap().failed, 1);
    }
}
