//! Rules of policies, as the configuration has them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::audit::{time, uid_of};
use crate::error::{ErrorContext, Failure};
use crate::mount::option_values::parse_size;
use crate::suggestions::{hint, meant};

/// Where rules are if no file is named.
pub const DEFAULT_FILE: &str = "/etc/dray/policy.toml";
/// The keys of a policy.
const KEYS: [&str; 11] =
    ["log", "root", "path", "older", "idle", "larger", "smaller", "owner", "do", "command", "most"];
/// Files that one run of a policy acts on, by default.
const MOST: u64 = 10_000;
/// The word of a command that stands for the file.
pub const FILE_WORD: &str = "{}";

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PolicyTable {
    log: Option<String>,
    root: Option<PathBuf>,
    path: Option<String>,
    older: Option<String>,
    idle: Option<String>,
    larger: Option<String>,
    smaller: Option<String>,
    owner: Option<toml::Value>,
    r#do: Option<String>,
    command: Vec<String>,
    most: Option<u64>,
}

/// What is done with files that match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicyAction {
    /// The paths of the files are printed.
    List,
    /// The number and size of the files are printed, by owner.
    Report,
    /// A command is run for each.
    Run(Vec<String>),
}

impl PolicyAction {
    pub fn name(&self) -> &'static str {
        match self {
            PolicyAction::List => "list",
            PolicyAction::Report => "report",
            PolicyAction::Run(_) => "run",
        }
    }
}

/// A policy. What is none is not asked of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    pub name: String,
    /// The export whose log feeds it, or a target.
    pub log: String,
    /// Where the export's files are to be seen: a mount, or the exported directory.
    pub root: PathBuf,
    /// Files at this path of the export or beneath it.
    pub path: Vec<u8>,
    /// Not changed for so long, seconds.
    pub older_s: Option<u64>,
    /// Neither changed nor opened for so long, seconds.
    pub idle_s: Option<u64>,
    /// At least so many bytes.
    pub larger_bytes: Option<u64>,
    /// At most so many bytes.
    pub smaller_bytes: Option<u64>,
    pub owner: Option<u32>,
    pub action: PolicyAction,
    /// Files that one run acts on, at most.
    pub most: u64,
}

/// The policies of a file, by name. Errors: what is wrong with it.
pub fn read(file: &Path) -> Result<BTreeMap<String, Policy>, Failure> {
    let shown = file.display();
    let text = std::fs::read_to_string(file).doing(|| format!("cannot read {shown}"))?;
    parse(&text).map_err(|what| Failure::usage(format!("{shown}: {what}")))
}

fn parse(text: &str) -> Result<BTreeMap<String, Policy>, String> {
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| error.to_string())?;
    if let Some(key) = table.keys().find(|key| *key != "policy") {
        return Err(format!("unknown table `{key}`{}", hint(key, ["policy"])));
    }
    let Some(policies) = table.get("policy") else { return Ok(BTreeMap::new()) };
    let policies = policies.as_table().ok_or("`policy` is a table of policies: [policy.NAME]")?;
    let of_one = |(name, value): (&String, &toml::Value)| {
        let policy = policy_of(name, value);
        policy
            .map(|policy| (name.clone(), policy))
            .map_err(|what| format!("[policy.{name}]: {what}"))
    };
    policies.iter().map(of_one).collect()
}

fn policy_of(name: &str, value: &toml::Value) -> Result<Policy, String> {
    dray_layers::audit::Consumer::check_name(name)?;
    let table = value.as_table().ok_or("it is no table")?;
    if let Some(key) = table.keys().find(|key| !KEYS.contains(&key.as_str())) {
        return Err(format!("unknown key `{key}`{}", hint(key, KEYS)));
    }
    let table: PolicyTable = value.clone().try_into().map_err(|error| format!("{error}"))?;
    let length = |key: &str, text: &Option<String>| match text.as_deref().map(time::parse_length) {
        Some(Some(seconds)) if seconds > 0 => Ok(Some(seconds)),
        Some(_) => Err(format!("`{key}` is a length of time such as 12h or 30d")),
        None => Ok(None),
    };
    let size = |key: &str, text: &Option<String>| {
        let size = text.as_deref().map(parse_size).transpose();
        size.map_err(|what| format!("`{key}`: {what}"))
    };
    let path = table.path.clone().unwrap_or_else(|| "/".to_owned());
    if !path.starts_with('/') {
        return Err("`path` begins with a slash, at the root of the export".to_owned());
    }
    let (larger_bytes, smaller_bytes) =
        (size("larger", &table.larger)?, size("smaller", &table.smaller)?);
    if larger_bytes.zip(smaller_bytes).is_some_and(|(larger, smaller)| larger > smaller) {
        return Err("no file is larger than `larger` and smaller than `smaller`".to_owned());
    }
    let root = table.root.clone().filter(|root| root.is_absolute());
    Ok(Policy {
        name: name.to_owned(),
        log: table.log.clone().ok_or("it names no log (an export, or a target)")?,
        root: root.ok_or("`root` is the absolute path of a mount, or of the exported directory")?,
        path: path.trim_end_matches('/').as_bytes().to_vec(),
        older_s: length("older", &table.older)?,
        idle_s: length("idle", &table.idle)?,
        larger_bytes,
        smaller_bytes,
        owner: table.owner.as_ref().map(owner_of).transpose()?,
        action: action_of(&table)?,
        most: table.most.unwrap_or(MOST),
    })
}

fn owner_of(value: &toml::Value) -> Result<u32, String> {
    match value {
        toml::Value::Integer(uid) => u32::try_from(*uid).map_err(|_| "`owner` is no user".into()),
        toml::Value::String(name) => uid_of(name).map_err(|failure| failure.message),
        _ => Err("`owner` is the name or the number of a user".to_owned()),
    }
}

fn action_of(table: &PolicyTable) -> Result<PolicyAction, String> {
    let action = match table.r#do.as_deref() {
        None | Some("list") => PolicyAction::List,
        Some("report") => PolicyAction::Report,
        Some("run") if table.command.iter().any(|word| word == FILE_WORD) => {
            return Ok(PolicyAction::Run(table.command.clone()));
        }
        Some("run") => {
            return Err(format!("`run` needs a `command` with `{FILE_WORD}` as one of its words"));
        }
        Some(other) => {
            let meant = meant(other, ["list", "report", "run"]);
            return Err(format!("`do` is list, report or run, not `{other}`{meant}"));
        }
    };
    match table.command.is_empty() {
        true => Ok(action),
        false => Err("a `command` is run with `do = \"run\"` alone".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_read_and_what_is_wrong_is_said() {
        let all = parse(
            "[policy.old]\nlog = 'scratch'\nroot = '/srv/scratch'\npath = '/tmp/'\nolder = '30d'\n\
             larger = '1M'\nowner = 7\ndo = 'run'\ncommand = ['rm', '--', '{}']\nmost = 5",
        );
        let old = &all.unwrap()["old"];
        assert_eq!((old.path.as_slice(), old.older_s), (&b"/tmp"[..], Some(30 * 86_400)));
        assert_eq!((old.larger_bytes, old.owner, old.most), (Some(1 << 20), Some(7), 5));
        assert_eq!(old.action.name(), "run");
        assert!(parse("").unwrap().is_empty());
        let base = "[policy.a]\nlog = 'x'\nroot = '/x'\n";
        for (text, words) in [
            ("[polcy.a]\n", "did you mean `policy`"),
            ("[policy.a]\nroot = '/x'\n", "names no log"),
            ("[policy.a]\nlog = 'x'\nroot = 'x'\n", "absolute path"),
            (&format!("{base}odler = '3d'"), "did you mean `older`"),
            (&format!("{base}older = 'soon'"), "such as 12h"),
            (&format!("{base}larger = '2M'\nsmaller = '1M'"), "no file is larger"),
            (&format!("{base}do = 'run'"), "needs a `command` with `{}`"),
            (&format!("{base}do = 'lsit'"), "did you mean `list`?"),
            (&format!("{base}command = ['rm']"), "alone"),
            (&format!("{base}path = 'tmp'"), "begins with a slash"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
