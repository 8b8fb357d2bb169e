//! `dray fsck`: whether names and objects belong together.
//!
//! Sizes are nowhere but in the objects. So a cut of all of them, or the loss of one with the end alone, is not found.

use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use dray_layers::placement::{OBJECTS_DIR, ObjectId, SHARDS};
use serde_json::{Value, json};

use super::{Progress, TargetDisks, directories, listed, object_of, shown};
use crate::args::FsckArgs;
use crate::error::{ErrorContext, Failure};
use crate::output;

/// Where a repair puts objects that nobody has, in the directory of their disk.
const ORPHANS_DIR: &str = "orphans";

/// What is wrong with one file.
enum Finding {
    /// No name has this object.
    Orphan { object: PathBuf, target: usize },
    /// The object is at a disk that has no blocks of it.
    Misplaced { object: PathBuf, target: usize },
    /// The file's name is not that of an object.
    Stray { file: PathBuf },
    /// A stub has data of its own, which nobody sees.
    NotEmpty { stub: PathBuf, bytes: u64 },
    /// Two stubs have the same objects, as after a copy with attributes: a change of one changes the other.
    Shared { stub: PathBuf, other: PathBuf },
    /// Disks have no object of the file, and should.
    Lacking { stub: PathBuf, what: String },
    /// The same, where a hole may be the reason. It is reported, and counts as no damage.
    Hole { stub: PathBuf, what: String },
}

impl Finding {
    fn kind(&self) -> &'static str {
        match self {
            Finding::Orphan { .. } => "orphan",
            Finding::Misplaced { .. } => "misplaced",
            Finding::Stray { .. } => "stray",
            Finding::NotEmpty { .. } => "not-empty",
            Finding::Shared { .. } => "shared",
            Finding::Lacking { .. } => "lacking",
            Finding::Hole { .. } => "hole",
        }
    }

    fn path(&self) -> &Path {
        match self {
            Finding::Orphan { object, .. } | Finding::Misplaced { object, .. } => object,
            Finding::Stray { file } => file,
            Finding::NotEmpty { stub, .. }
            | Finding::Shared { stub, .. }
            | Finding::Lacking { stub, .. }
            | Finding::Hole { stub, .. } => stub,
        }
    }

    fn text(&self) -> String {
        let path = self.path().display();
        match self {
            Finding::Orphan { .. } => format!("{path}: no name has this object"),
            Finding::Misplaced { .. } => {
                format!("{path}: no block of its file belongs to this disk")
            }
            Finding::Stray { .. } => format!("{path}: this is no object"),
            Finding::NotEmpty { bytes, .. } => {
                format!("{path}: it has {bytes} bytes at the home, which nobody sees")
            }
            Finding::Shared { other, .. } => {
                format!("{path}: it has the data of {}, too", other.display())
            }
            Finding::Lacking { what, .. } | Finding::Hole { what, .. } => format!("{path}: {what}"),
        }
    }

    /// Whether something is wrong for sure, or most likely.
    fn is_damage(&self) -> bool {
        !matches!(self, Finding::Hole { .. })
    }

    /// Mends it, and answers how. None: a person has to decide.
    fn repair(&self, disks: &TargetDisks) -> Result<Option<String>, Failure> {
        match self {
            Finding::Orphan { object, target } | Finding::Misplaced { object, target } => {
                let dir = disks.dirs[*target].join(ORPHANS_DIR);
                fs::create_dir_all(&dir).doing(|| shown(&dir))?;
                let to = dir.join(object.file_name().unwrap_or_default());
                fs::rename(object, &to).doing(|| shown(&to))?;
                Ok(Some(format!("moved to {}", to.display())))
            }
            Finding::NotEmpty { stub, .. } => {
                let file = OpenOptions::new().write(true).open(stub).doing(|| shown(stub))?;
                file.set_len(0).doing(|| shown(stub))?;
                Ok(Some("cut".to_owned()))
            }
            Finding::Stray { .. }
            | Finding::Shared { .. }
            | Finding::Lacking { .. }
            | Finding::Hole { .. } => Ok(None),
        }
    }
}

/// Looks at all names and objects. Errors: a server has one of the disks, or something is wrong and stays so.
pub fn run(args: &FsckArgs) -> Result<(), Failure> {
    let disks = TargetDisks::open(&directories(&args.which, args.projections.as_deref())?)?;
    let mut progress = Progress::new(args.json);
    let (stubs, mut findings) = look_at_names(&disks, &mut progress)?;
    let objects = look_at_objects(&disks, &stubs, (&mut findings, &mut progress))?;
    let mut left = 0;
    let mut listing = Vec::new();
    for finding in &findings {
        let mended = if args.repair { finding.repair(&disks)? } else { None };
        left += usize::from(mended.is_none() && finding.is_damage());
        match args.json {
            true => listing.push(as_json(finding, mended)),
            false => output::print_line(match mended {
                Some(how) => format!("{}: {how}", finding.text()),
                None => finding.text(),
            })?,
        }
    }
    let (name, files) = (&disks.definition.name, stubs.len());
    match args.json {
        true => output::print_json(&json!({
            "projection": name, "files": files, "objects": objects, "findings": listing, "left": left,
        }))?,
        false => output::print_line(format!(
            "projection {name}: {files} files with data, {objects} objects, {} findings, {left} left",
            findings.len()
        ))?,
    }
    match left {
        0 => Ok(()),
        _ => Err(Failure::new(format!("{left} things are not as they should be"))),
    }
}

fn as_json(finding: &Finding, mended: Option<String>) -> Value {
    json!({
        "kind": finding.kind(), "path": finding.path().to_string_lossy(), "what": finding.text(),
        "mended": mended,
    })
}

/// The files that have data, by the ids of their objects.
type Stubs = HashMap<ObjectId, (u64, PathBuf)>;

fn look_at_names(
    disks: &TargetDisks,
    progress: &mut Progress,
) -> Result<(Stubs, Vec<Finding>), Failure> {
    let (mut stubs, mut findings) = (Stubs::new(), Vec::new());
    disks.walk_names(|path, seen| {
        if !seen.is_file() {
            return Ok(());
        }
        progress.say(|| format!("{} names so far", stubs.len()));
        if seen.len() > 0 {
            findings.push(Finding::NotEmpty { stub: path.to_owned(), bytes: seen.len() });
        }
        let Some(object) = object_of(path)? else { return Ok(()) };
        match stubs.get(&object) {
            Some((ino, other)) if *ino != seen.ino() => {
                findings.push(Finding::Shared { stub: path.to_owned(), other: other.clone() });
            }
            Some(_) => {} // a further name
            None => {
                stubs.insert(object, (seen.ino(), path.to_owned()));
                if let Some(absence) = disks.absence(object)? {
                    let (stub, what) = (path.to_owned(), absence.text(disks));
                    findings.push(match absence.is_damage() {
                        true => Finding::Lacking { stub, what },
                        false => Finding::Hole { stub, what },
                    });
                }
            }
        }
        Ok(())
    })?;
    Ok((stubs, findings))
}

/// Answers how many objects there are.
fn look_at_objects(
    disks: &TargetDisks,
    stubs: &Stubs,
    (findings, progress): (&mut Vec<Finding>, &mut Progress),
) -> Result<u64, Failure> {
    let mut count = 0;
    for (target, dir) in disks.dirs.iter().enumerate() {
        for shard in 0..SHARDS {
            for path in listed(&dir.join(OBJECTS_DIR).join(format!("{shard:02x}")))? {
                progress.say(|| format!("{count} objects so far"));
                let Some(object) = id_of(&path).filter(|object| object.shard() == shard) else {
                    findings.push(Finding::Stray { file: path });
                    continue;
                };
                count += 1;
                if !stubs.contains_key(&object) {
                    findings.push(Finding::Orphan { object: path, target });
                } else if !disks.targets_of(object).contains(&target) {
                    findings.push(Finding::Misplaced { object: path, target });
                }
            }
        }
    }
    Ok(count)
}

/// Of an object's file.
fn id_of(path: &Path) -> Option<ObjectId> {
    let name = path.file_name()?.to_str()?;
    let object = ObjectId(u128::from_str_radix(name, 16).ok()?);
    (object.to_string() == name).then_some(object)
}
