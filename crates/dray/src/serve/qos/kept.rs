//! Changes of rules that the next start of the server is to know: a file in the state directory.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};
use toml::Table;

use super::live::{RuleChange, RuleChanges, RuleStamp};
use super::parse::rule_of;
use crate::error::{ErrorContext, Failure};
use crate::serve::config::read_text;

pub const FILE_NAME: &str = "qos.json";
/// What a file says of itself since changes belong to exports, and have stamps.
const FORMAT: u32 = 2;

/// The file.
#[derive(Deserialize, Serialize)]
struct KeptFile {
    format: u32,
    /// By export.
    exports: BTreeMap<String, Vec<RuleChange>>,
}

/// What was kept, for each of these exports; nothing if there is no file. Errors: it cannot be read or understood.
pub fn read(state_dir: &Path, exports: &[&str]) -> Result<Vec<RuleChanges>, Failure> {
    let path = state_dir.join(FILE_NAME);
    let mut all = vec![RuleChanges::default(); exports.len()];
    if matches!(fs::metadata(&path), Err(error) if error.kind() == io::ErrorKind::NotFound) {
        return Ok(all);
    }
    let (text, shown) = (read_text(&path, "file of kept rules")?, path.display());
    let damaged = || format!("{shown} is damaged; remove it to begin without it");
    let value: serde_json::Value = serde_json::from_str(&text).doing(damaged)?;
    if value["format"] != FORMAT {
        let rules: BTreeMap<String, Option<Table>> =
            serde_json::from_value(value).doing(damaged)?;
        return Ok(of_format_1(&rules, exports));
    }
    let mut file: KeptFile = serde_json::from_value(value).doing(damaged)?;
    for (name, changes) in exports.iter().zip(&mut all) {
        for change in file.exports.remove(*name).unwrap_or_default() {
            changes.take(change).map_err(Failure::new)?;
        }
    }
    Ok(all)
}

/// Of earlier servers: rules by name, for all exports that they match. Any change since then is newer.
fn of_format_1(rules: &BTreeMap<String, Option<Table>>, exports: &[&str]) -> Vec<RuleChanges> {
    let of_export = |export: &&str| {
        let mut changes = RuleChanges::default();
        for (name, rule) in rules {
            let is_for = |table| rule_of(name, table).map_or(true, |rule| rule.is_for(export));
            let rule = rule.as_ref().filter(|table| is_for(table)).cloned();
            let (name, stamp) = (name.clone(), RuleStamp::default());
            let change = RuleChange { name, stamp, rule, keep: true, refused: None };
            let _ = changes.take(change); // earlier servers had no more rules than there may be changes
        }
        changes
    };
    exports.iter().map(of_export).collect()
}

/// Errors: those of writing to the state directory.
pub fn write<'a>(
    state_dir: &Path,
    exports: impl Iterator<Item = (&'a str, &'a RuleChanges)>,
) -> io::Result<()> {
    let of_export = |(name, changes): (&str, &RuleChanges)| {
        (name.to_owned(), changes.iter().cloned().collect())
    };
    let file = KeptFile { format: FORMAT, exports: exports.map(of_export).collect() };
    let (path, new) = (state_dir.join(FILE_NAME), state_dir.join("qos.json.new"));
    let mut out = File::create(&new)?;
    out.write_all(&serde_json::to_vec_pretty(&file)?)?;
    out.sync_all()?;
    fs::rename(new, path)?;
    File::open(state_dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_earlier_servers_kept_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let text = r#"{"a": {"limit": "1G", "match": {"export": "home"}}, "b": null}"#;
        fs::write(dir.path().join(FILE_NAME), text).unwrap();
        let kept = read(dir.path(), &["home", "sw"]).unwrap();
        assert!(kept[0].get("a").unwrap().rule.is_some());
        assert!(kept[1].get("a").unwrap().rule.is_none());
        assert!(kept[0].get("b").unwrap().rule.is_none() && kept[0].get("b").unwrap().keep);
        write(dir.path(), ["home", "sw"].into_iter().zip(&kept)).unwrap();
        assert_eq!(read(dir.path(), &["home", "sw"]).unwrap(), kept);
        fs::write(dir.path().join(FILE_NAME), "{\"a\": 1}").unwrap();
        assert!(read(dir.path(), &["home"]).unwrap_err().message.contains("remove it"));
    }
}
