//! Audit of an export: its options, and the observer that they mean.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dray_core::FileSystem;
use dray_layers::audit::{Audit, AuditOptions, FullPolicy, KindSet};
use dray_rpc::server::Allow;
use serde::Deserialize;

use crate::error::Failure;
use crate::mount::option_values::parse_size;
use crate::suggestions::meant;

/// The options on the command line.
pub const AUDIT_OPTIONS: [&str; 6] =
    ["audit", "audit_full", "audit_spill", "audit_max", "audit_segment", "audit_readers"];

/// The keys of the table `audit` in the configuration.
pub const AUDIT_KEYS: [&str; 6] = ["kinds", "full", "spill", "max", "segment", "readers"];

/// A segment has at least so many bytes: the tables of its encoding begin anew with each.
const SEGMENT_MIN_BYTES: u64 = 64 << 10;
const SEGMENTS_MIN: u64 = 2;

/// The audit of an export as it was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditPlan {
    /// What is recorded; none: there is no audit.
    pub kinds: Option<KindSet>,
    full: FullPolicy,
    spill: Option<PathBuf>,
    max_bytes: u64,
    segment_bytes: u64,
    /// More than `audit` was asked for.
    has_options: bool,
    /// Machines whose root may read it over the network, whatever the export makes of root.
    pub readers: Vec<Allow>,
}

impl Default for AuditPlan {
    fn default() -> AuditPlan {
        AuditPlan {
            kinds: None,
            full: FullPolicy::Block,
            spill: None,
            max_bytes: 10 << 30,
            segment_bytes: 64 << 20,
            has_options: false,
            readers: Vec::new(),
        }
    }
}

/// The table `audit` of an `[[export]]`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct AuditTable {
    kinds: Option<Vec<String>>,
    full: Option<String>,
    spill: Option<String>,
    max: Option<String>,
    segment: Option<String>,
    readers: Vec<String>,
}

impl AuditTable {
    /// What it means. Errors: what is wrong with it, in words.
    pub fn plan(&self) -> Result<AuditPlan, String> {
        let mut plan = AuditPlan::default();
        let names = self.kinds.as_ref().map_or("all".to_owned(), |kinds| kinds.join("+"));
        plan.set("audit", &names)?;
        let readers = (!self.readers.is_empty()).then(|| self.readers.join("+"));
        let others = [&self.full, &self.spill, &self.max, &self.segment, &readers];
        for (option, value) in AUDIT_OPTIONS[1..].iter().zip(others) {
            value.iter().try_for_each(|value| plan.set(option, value))?;
        }
        plan.check()?;
        Ok(plan)
    }
}

impl AuditPlan {
    /// Takes one of the options. Errors: what is wrong with its value, in words.
    pub fn set(&mut self, option: &str, value: &str) -> Result<(), String> {
        self.has_options |= option != "audit";
        let size = || parse_size(value).map_err(|what| format!("`{option}`: {what}"));
        match option {
            "audit" if matches!(value, "no" | "off") => self.kinds = None,
            "audit" => {
                let names = if matches!(value, "" | "yes") { "all" } else { value };
                self.kinds =
                    Some(names.parse::<KindSet>().map_err(|what| format!("`audit`: {what}"))?);
            }
            "audit_full" => {
                self.full = match value {
                    "block" => FullPolicy::Block,
                    "spill" => FullPolicy::Spill,
                    "drop" => FullPolicy::Drop,
                    _ => {
                        let meant = meant(value, ["block", "spill", "drop"]);
                        return Err(format!(
                            "what an audit does without room is block, spill or drop, not `{value}`{meant}"
                        ));
                    }
                };
            }
            "audit_spill" if Path::new(value).is_absolute() => self.spill = Some(value.into()),
            "audit_spill" => {
                return Err(format!("an audit spills to an absolute path, not `{value}`"));
            }
            "audit_max" => self.max_bytes = size()?,
            "audit_readers" => {
                let ranges = value.split('+').map(str::parse).collect::<Result<_, String>>();
                self.readers = ranges.map_err(|what| format!("`audit_readers`: {what}"))?;
            }
            _ => self.segment_bytes = size()?,
        }
        Ok(())
    }

    /// Whether the options fit each other. Errors: which do not, in words.
    pub fn check(&self) -> Result<(), String> {
        if self.kinds.is_none() && self.has_options {
            return Err("options of an audit need `audit`, too".to_owned());
        }
        if self.segment_bytes < SEGMENT_MIN_BYTES {
            return Err(format!("a segment of an audit has {}K at least", SEGMENT_MIN_BYTES >> 10));
        }
        if self.max_bytes < SEGMENTS_MIN * self.segment_bytes {
            return Err("an audit's largest size is two of its segments at least".to_owned());
        }
        match (self.full, &self.spill) {
            (FullPolicy::Spill, None) => Err("an audit that spills needs a directory".to_owned()),
            (FullPolicy::Block | FullPolicy::Drop, Some(_)) => {
                Err("a directory to spill to is used with `spill` alone".to_owned())
            }
            _ => Ok(()),
        }
    }
}

/// Where the log of an export is, in a state directory.
pub fn log_dir(state: &Path, export: &str) -> PathBuf {
    state.join("audit").join(export)
}

/// The file that names the directory that a log spills to, for commands that read it.
pub const SPILL_FILE: &str = "spill";

/// Opens the log of an export, if there is to be one. `fs` gives paths. Errors: it cannot be
/// written, and then the export is not served.
pub fn open(
    plan: &AuditPlan,
    export: &str,
    state: &Path,
    fs: Arc<dyn FileSystem>,
) -> Result<Option<Arc<Audit>>, Failure> {
    let Some(kinds) = plan.kinds else { return Ok(None) };
    let dir = log_dir(state, export);
    let cannot = |error: std::io::Error| {
        let shown = dir.display();
        Failure::new(format!("export `{export}`: cannot keep its audit in {shown}: {error}"))
    };
    // Two exports may spill to one directory.
    let spill = plan.spill.as_ref().map(|spill| spill.join(export));
    std::fs::create_dir_all(&dir).map_err(cannot)?;
    let note = dir.join(SPILL_FILE);
    // Without one, what was spilled before is still read.
    if let Some(spill) = &spill {
        std::fs::write(note, spill.as_os_str().as_bytes()).map_err(cannot)?;
    }
    let options = AuditOptions {
        export: export.to_owned(),
        dir: dir.clone(),
        kinds,
        full: plan.full,
        spill,
        max_bytes: plan.max_bytes,
        segment_bytes: plan.segment_bytes,
    };
    Audit::open(options, Box::new(move |id| fs.path(id))).map(Some).map_err(cannot)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(text: &str) -> Result<AuditPlan, String> {
        toml::from_str::<AuditTable>(text).map_err(|error| error.to_string())?.plan()
    }

    #[test]
    fn options_are_read_and_what_is_wrong_is_said() {
        let all = plan("").unwrap();
        assert_eq!((all.kinds, all.full), (Some(KindSet::all()), FullPolicy::Block));
        let some = "kinds = ['create', 'unlink']\nfull = 'drop'\nmax = '1G'\nsegment = '1M'";
        let some = plan(some).unwrap();
        assert_eq!(some.kinds.unwrap().names(), ["create", "unlink"]);
        assert_eq!((some.max_bytes, some.segment_bytes), (1 << 30, 1 << 20));
        assert_eq!(plan("readers = ['10.0.0.1', 'fd00::/8']").unwrap().readers.len(), 2);
        for (text, words) in [
            ("kinds = ['opne']", "no kind of record is called `opne`; there are: all"),
            ("full = 'blok'", "did you mean `block`?"),
            ("full = 'spill'", "needs a directory"),
            ("full = 'spill'\nspill = 'x'", "absolute path"),
            ("spill = '/x'", "with `spill` alone"),
            ("max = '0'", "two of its segments"),
            ("segment = '1K'", "64K at least"),
            ("readers = ['io1']", "`audit_readers`: "),
            ("max = 'much'", "a size such as"),
        ] {
            let error = plan(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
        let mut off = AuditPlan::default();
        off.set("audit", "create").unwrap();
        off.set("audit", "no").unwrap();
        assert_eq!(off, AuditPlan::default());
    }
}
