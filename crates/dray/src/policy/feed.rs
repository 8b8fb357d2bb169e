//! Brings what a policy knows up to date: from the log, and from a scan if that is asked for.

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use dray_layers::audit::{AuditFilter, Text};

use super::known::{KnownFile, KnownFiles, PolicyBookmark};
use super::rules::Policy;
use crate::audit::access::log_text;
use crate::audit::feed::{Begin, FeedPlan};
use crate::audit::merge::{Merge, MergeStep, Merged};
use crate::audit::sources::LogSource;
use crate::error::{ErrorContext, Failure};
use crate::output;

/// Reads the logs of the policy on from where they were read last. Errors: one cannot be read; what
/// is known stays what it was then.
pub fn catch_up(known: &mut KnownFiles, sources: &[LogSource]) -> Result<(), Failure> {
    let mut plans = Vec::new();
    for source in sources {
        let summary = source.open()?.summary()?;
        let server = source.server().unwrap_or_default();
        let log = summary.log.map_or(String::new(), log_text);
        let bookmark = known.bookmarks.entry(server).or_default();
        if bookmark.log != log && !bookmark.log.is_empty() {
            known.missing += 1; // what was in the former log is not known
        }
        if bookmark.log != log {
            *bookmark = PolicyBookmark { log, next_index: summary.first_index };
        }
        plans.push(FeedPlan {
            name: None,
            filter: AuditFilter::default(),
            from: Some(bookmark.next_index),
            begin: Begin::Oldest,
            once: true,
        });
    }
    let mut merge = Merge::start(sources, &plans)?;
    loop {
        match merge.next()? {
            MergeStep::Some(some) => {
                for one in some {
                    match one {
                        Merged::Record(_, record) => known.learn(&record),
                        Merged::Away(why) => return Err(Failure::new(why).nobody_answered()),
                        Merged::Back(_) => {}
                    }
                }
            }
            MergeStep::Progress(..) => {}
            MergeStep::End(_) => break,
        }
    }
    for (number, source) in sources.iter().enumerate() {
        let bookmark = known.bookmarks.entry(source.server().unwrap_or_default()).or_default();
        bookmark.next_index = merge.next_of(number).unwrap_or(bookmark.next_index);
    }
    Ok(())
}

/// Takes in the files that are there, as they are now. Errors: a directory cannot be read.
pub fn scan(known: &mut KnownFiles, policy: &Policy) -> Result<u64, Failure> {
    let root = policy.root.as_path();
    let relative = std::ffi::OsStr::from_bytes(policy.path.strip_prefix(b"/").unwrap_or_default());
    let (mut dirs, mut found) = (vec![root.join(relative)], 0);
    while let Some(dir) = dirs.pop() {
        let entries = std::fs::read_dir(&dir).doing(|| format!("cannot read {}", dir.display()))?;
        for entry in entries {
            let entry = entry.doing(|| format!("cannot read {}", dir.display()))?;
            let Ok(meta) = entry.metadata() else { continue }; // it has just been removed
            let path = entry.path();
            if meta.is_dir() {
                dirs.push(path);
            } else if meta.is_file() {
                known.see(path_in_export(root, &path), file_of(&meta));
                found += 1;
            }
        }
    }
    Ok(found)
}

fn path_in_export(root: &Path, path: &Path) -> Text {
    let below = path.strip_prefix(root).unwrap_or(path).as_os_str().as_bytes();
    [b"/", below].concat().into()
}

fn file_of(meta: &std::fs::Metadata) -> KnownFile {
    let micros = |seconds: i64| u64::try_from(seconds).unwrap_or(0).saturating_mul(1_000_000);
    let changed_us = micros(meta.mtime());
    KnownFile { changed_us, used_us: changed_us.max(micros(meta.atime())), absent_us: 0 }
}

/// Says what may be missing in what is known.
pub fn warn(known: &KnownFiles) {
    if known.missing > 0 {
        output::complain(format_args!(
            "records are missing in the log, so there may be files that this policy does not know: --scan \
             finds them"
        ));
    }
    if known.left_out > 0 {
        output::complain(format_args!("{} files are too many to be known", known.left_out));
    }
}
