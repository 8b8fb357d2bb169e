//! The configuration file of a server. packaging/dray.toml.example documents every key.

use std::path::{Path, PathBuf};
use std::time::Duration;

use dray_backends::posix::{Inline, Squash};
use dray_core::{Errno, Gid, Op, Uid};
use dray_fabric::Address;
use dray_layers::faults::{Fault, When};
use serde::Deserialize;

use crate::error::{Doing, Failure};
use crate::export::{ExportPlan, squash_of};
use crate::nearest::hint;

/// The file, as written.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Config {
    /// Where to listen.
    pub listen: Vec<String>,
    /// `none` or `psk:FILE`.
    pub auth: Option<String>,
    /// `ADDR:PORT` of the metrics.
    pub metrics: Option<String>,
    /// State directory.
    pub state: Option<PathBuf>,
    /// Threads.
    pub threads: Option<usize>,
    /// How long clients may be away, seconds.
    pub lease_s: Option<u64>,
    /// Memory for data on its way, MiB.
    pub buffers_mib: Option<usize>,
    /// Clients at once.
    pub clients_max: Option<usize>,
    /// Of these at one address.
    pub clients_of_one_address_max: Option<usize>,
    /// Whether `[[fault]]` is heeded.
    pub faults: bool,
    /// The exports.
    pub export: Vec<ExportTable>,
    /// Things that go wrong on purpose.
    pub fault: Vec<FaultTable>,
}

/// One `[[export]]`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ExportTable {
    name: String,
    dir: PathBuf,
    read_only: bool,
    squash: Option<String>,
    anonuid: Option<u32>,
    anongid: Option<u32>,
    allow: Vec<String>,
    direct: bool,
    inline: Option<String>,
    threads: usize,
}

/// One `[[fault]]`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct FaultTable {
    /// The export that it is for; none: all.
    pub export: Option<String>,
    op: Option<String>,
    error: Option<String>,
    delay_ms: u64,
    one_in: Option<u64>,
    nth: Option<u64>,
}

const KEYS: [&str; 12] = [
    "listen",
    "auth",
    "metrics",
    "state",
    "threads",
    "lease_s",
    "buffers_mib",
    "clients_max",
    "clients_of_one_address_max",
    "faults",
    "export",
    "fault",
];
const EXPORT_KEYS: [&str; 10] = [
    "name",
    "dir",
    "read_only",
    "squash",
    "anonuid",
    "anongid",
    "allow",
    "direct",
    "inline",
    "threads",
];
const FAULT_KEYS: [&str; 6] = ["export", "op", "error", "delay_ms", "one_in", "nth"];

impl Config {
    /// Reads a file. Errors: it cannot be read, is no TOML, or says something unknown.
    pub fn read(path: &Path) -> Result<Config, Failure> {
        let shown = path.display();
        let text = std::fs::read_to_string(path)
            .doing(|| format!("cannot read the configuration {shown}"))?;
        Config::parse(&text).map_err(|what| Failure::usage(format!("{shown}: {what}")))
    }

    fn parse(text: &str) -> Result<Config, String> {
        let table: toml::Table =
            text.parse().map_err(|error: toml::de::Error| error.to_string())?;
        check_keys(text, "the top level", &table, &KEYS)?;
        for (name, keys) in [("export", &EXPORT_KEYS[..]), ("fault", &FAULT_KEYS[..])] {
            let tables = table.get(name).and_then(toml::Value::as_array);
            for one in tables.into_iter().flatten().filter_map(toml::Value::as_table) {
                check_keys(text, &format!("[[{name}]]"), one, keys)?;
            }
        }
        toml::from_str(text).map_err(|error| error.to_string())
    }

    /// Addresses to listen on.
    pub fn addresses(&self) -> Result<Vec<Address>, String> {
        self.listen.iter().map(|text| text.parse()).collect()
    }

    /// The exports.
    pub fn exports(&self) -> Result<Vec<ExportPlan>, String> {
        self.export.iter().map(ExportTable::plan).collect()
    }

    /// Faults for export `name`; none unless they are switched on.
    pub fn faults_of(&self, name: &str) -> Result<Vec<Fault>, String> {
        let ours = |fault: &&FaultTable| fault.export.as_deref().is_none_or(|only| only == name);
        match self.faults {
            true => self.fault.iter().filter(ours).map(FaultTable::plan).collect(),
            false => Ok(Vec::new()),
        }
    }

    /// How long clients may be away.
    pub fn lease(&self) -> Result<Option<Duration>, String> {
        match self.lease_s {
            Some(seconds @ 1..=86_400) => Ok(Some(Duration::from_secs(seconds))),
            Some(_) => Err("lease_s is a number of seconds from 1 to 86400".to_owned()),
            None => Ok(None),
        }
    }
}

/// Refuses keys that are not known, naming the one that was probably meant.
fn check_keys(text: &str, place: &str, table: &toml::Table, known: &[&str]) -> Result<(), String> {
    let Some(key) = table.keys().find(|key| !known.contains(&key.as_str())) else {
        return Ok(());
    };
    let hint = hint(key, known.iter().copied());
    let line = line_of(text, key).map_or(String::new(), |line| format!("line {line}: "));
    Err(format!("{line}unknown key `{key}` in {place}{hint}"))
}

/// The first line that assigns to `key`.
fn line_of(text: &str, key: &str) -> Option<usize> {
    let assigns = |line: &str| {
        let line = line.trim_start_matches([' ', '\t', '[', '"']);
        let rest = line.strip_prefix(key)?;
        rest.trim_start_matches('"').trim_start().starts_with(['=', ']', '.']).then_some(())
    };
    text.lines().position(|line| assigns(line).is_some()).map(|index| index + 1)
}

impl ExportTable {
    fn plan(&self) -> Result<ExportPlan, String> {
        let of = |what: String| format!("export `{}`: {what}", self.name);
        let mut plan = ExportPlan::new(&self.name, self.dir.clone()).map_err(of)?;
        let uid = self.anonuid.map_or(Squash::NOBODY.0, Uid);
        let gid = self.anongid.map_or(Squash::NOBODY.1, Gid);
        let of = |what: String| format!("export `{}`: {what}", self.name);
        plan.squash = squash_of(self.squash.as_deref().unwrap_or("root"), uid, gid).map_err(of)?;
        for text in &self.allow {
            plan.allow
                .push(text.parse().map_err(|what| format!("export `{}`: {what}", self.name))?);
        }
        plan.inline = match self.inline.as_deref() {
            None | Some("auto") => Inline::Auto,
            Some("always") => Inline::Always,
            Some("never") => Inline::Never,
            Some(word) => {
                return Err(of(format!("inline is auto, always or never, not `{word}`")));
            }
        };
        plan.read_only = self.read_only;
        plan.direct = self.direct;
        plan.threads = self.threads;
        Ok(plan)
    }
}

impl FaultTable {
    fn plan(&self) -> Result<Fault, String> {
        let op = match &self.op {
            None => None,
            Some(name) => Some(find_op(name)?),
        };
        let error = match &self.error {
            None => None,
            Some(name) => Some(find_errno(name)?),
        };
        let when = match (self.one_in, self.nth) {
            (None, None) => When::Always,
            (Some(every), None) => When::OneIn(every),
            (None, Some(nth)) => When::Nth(nth),
            _ => return Err("a fault has one_in or nth, not both".to_owned()),
        };
        Ok(Fault { op, when, delay: Duration::from_millis(self.delay_ms), error })
    }
}

fn find_op(name: &str) -> Result<Op, String> {
    let found = Op::ALL.iter().find(|op| op.name() == name).copied();
    found.ok_or_else(|| {
        let hint = hint(name, Op::ALL.iter().map(|op| op.name()));
        format!("no operation is called `{name}`{hint}")
    })
}

fn find_errno(name: &str) -> Result<Errno, String> {
    let found = (1..134).map(Errno::new).find(|errno| errno.name() == name);
    found.ok_or_else(|| format!("no error number is called `{name}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_is_sound_and_documents_every_key() {
        let example = include_str!("../../../packaging/dray.toml.example");
        // What is commented out must hold when it is not.
        let active: String = example
            .lines()
            .map(|line| line.strip_prefix("#:").unwrap_or(line).to_owned() + "\n")
            .collect();
        let config = Config::parse(&active).unwrap();
        config.addresses().unwrap();
        assert!(!config.exports().unwrap().is_empty());
        assert!(!config.faults_of("home").unwrap().is_empty());
        for key in KEYS.iter().chain(&EXPORT_KEYS).chain(&FAULT_KEYS) {
            assert!(line_of(&active, key).is_some(), "`{key}` is not documented");
        }
        Config::parse(example).unwrap();
    }

    #[test]
    fn unknown_keys_are_refused_with_the_nearest_known() {
        for (text, words) in [
            (
                "\nlissen = []\n",
                "line 2: unknown key `lissen` in the top level; did you mean `listen`?",
            ),
            ("[[export]]\nname = \"a\"\nreadonly = true\n", "did you mean `read_only`?"),
            ("[[exports]]\nname = \"a\"\n", "did you mean `export`?"),
            ("zzzzzz = 1\n", "unknown key `zzzzzz`"),
        ] {
            let error = Config::parse(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn wrong_values_are_named() {
        let exports = |text: &str| Config::parse(text).unwrap().exports().unwrap_err();
        assert!(exports("[[export]]\nname='a'\ndir='/x'\nsquash='x'\n").contains("root, all"));
        assert!(exports("[[export]]\nname='a'\ndir='/x'\nallow=['x']\n").contains("`x`"));
        assert!(exports("[[export]]\nname='a'\n").contains("no directory"));
        assert!(exports("[[export]]\nname='a'\ndir='/x'\ninline='x'\n").contains("inline"));
        assert!(Config::parse("threads = 'many'\n").is_err());
        let faults = "faults=true\n[[fault]]\nop='wirte'\n";
        let error = Config::parse(faults).unwrap().faults_of("a").unwrap_err();
        assert!(error.contains("did you mean `write`?"), "{error}");
        assert!(Config::parse("lease_s = 0\n").unwrap().lease().is_err());
    }

    #[test]
    fn faults_wait_to_be_switched_on() {
        let text = "[[fault]]\nexport='a'\nop='write'\nerror='ENOSPC'\nnth=3\n";
        assert!(Config::parse(text).unwrap().faults_of("a").unwrap().is_empty());
        let on = Config::parse(&format!("faults = true\n{text}")).unwrap();
        assert_eq!(on.faults_of("a").unwrap()[0].when, When::Nth(3));
        assert!(on.faults_of("b").unwrap().is_empty());
    }
}
