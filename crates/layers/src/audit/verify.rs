//! Checks a whole log.

use std::fs;
use std::io;
use std::path::PathBuf;

use super::log::segments;
use super::salvage::{begins_changed, whole_records};
use super::segment::Hash;
use super::segment_reader::{ReadError, ReadStep, SegmentReader};

/// What was found in a log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Segments that were read.
    pub segments: usize,
    /// Records in them.
    pub records: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// The first record that there is.
    pub first_index: u64,
    /// The number that the next record will have.
    pub next_index: u64,
    /// The hash of all, to be kept elsewhere and compared later.
    pub hash: Hash,
    /// Records that were lost at the end of the log, as by a loss of power. A gap record has each.
    pub lost: u64,
    /// The last segment ends within a batch: it is being written, or its server was killed.
    pub ends_torn: bool,
    /// What is wrong: cut, changed, exchanged or removed.
    pub problems: Vec<String>,
}

/// Checks the whole log in these directories. `progress` learns how many bytes were read, after each
/// segment. `anchor`: the hash that the log must have before this record. Errors: files cannot be read.
pub fn verify(
    dirs: &[PathBuf],
    anchor: Option<(u64, Hash)>,
    mut progress: impl FnMut(u64),
) -> io::Result<Verified> {
    let all = segments(dirs)?;
    let mut found = Verified { next_index: 1, ..Verified::default() };
    let mut before: Option<(u64, Hash, u128)> = None;
    let mut anchored = anchor.is_none();
    for (number, segment) in all.iter().enumerate() {
        let shown = segment.path.display();
        let mut reader = match SegmentReader::open(&segment.path) {
            Ok(reader) => reader,
            Err(ReadError::Io(error)) => return Err(error),
            Err(error) => {
                found.problems.push(format!("{shown}: {error}"));
                found.segments += 1;
                let log = before.map_or(0, |(_, _, log)| log);
                let first_index = segment.first_index;
                let mut reader = SegmentReader::open_broken(&segment.path, log, first_index)?;
                reader.end_index()?;
                let (chain, next_index, _) = reader.known_end();
                before = Some((next_index, chain, log));
                continue;
            }
        };
        let header = reader.header.clone();
        let name_fits = header.first_index == segment.first_index;
        match before {
            None => found.first_index = header.first_index,
            Some((next, hash, log)) => {
                let follows = header.before == hash && header.log == log;
                // Its writer has left out the numbers of records that it did not find.
                if follows && header.first_index >= next {
                    found.lost += header.first_index - next;
                } else {
                    found.problems.push(format!(
                        "{shown}: it does not follow the segment before it, which ends before record {next}"
                    ));
                }
            }
        }
        if !name_fits {
            found.problems.push(format!("{shown}: it has the name of another segment"));
        }
        loop {
            if anchor
                .is_some_and(|(index, hash)| index == reader.next_index && hash == reader.chain)
            {
                anchored = true;
            }
            match reader.step() {
                Ok(ReadStep::Batch(batch)) => found.records += u64::from(batch.count),
                Ok(ReadStep::End) => break,
                Ok(ReadStep::Torn) if number + 1 == all.len() => {
                    found.ends_torn = true;
                    break;
                }
                Ok(ReadStep::Torn) => {
                    found.problems.push(format!("{shown}: it has been cut"));
                    break;
                }
                Err(ReadError::Io(error)) => return Err(error),
                Err(error) => {
                    found.problems.push(format!("{shown}: {error}"));
                    if !reader.go_on_behind()? {
                        break;
                    }
                }
            }
        }
        let (chain, next_index, _) = reader.known_end();
        before = Some((next_index, chain, header.log));
        (found.next_index, found.hash) = (next_index, chain);
        found.segments += 1;
        found.bytes += reader.at_bytes();
        progress(found.bytes);
    }
    found.problems.extend(torn_problems(dirs)?);
    if let Some((index, _)) = anchor.filter(|_| !anchored) {
        found
            .problems
            .push(format!("the log before record {index} is not the one of the given hash"));
    }
    Ok(found)
}

/// What was cut off at a start, though it is not what a torn write leaves.
fn torn_problems(dirs: &[PathBuf]) -> io::Result<Vec<String>> {
    let mut problems = Vec::new();
    for dir in dirs {
        let entries = match fs::read_dir(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            entries => entries?,
        };
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_none_or(|one| one != "torn") {
                continue;
            }
            let (records, shown) = (whole_records(&path)?, path.display());
            if records > 0 {
                problems
                    .push(format!("{shown}: {records} whole records are in it, and in no segment"));
            } else if begins_changed(&path)? {
                problems.push(format!("{shown}: its first batch is complete and has been changed"));
            }
        }
    }
    problems.sort();
    Ok(problems)
}
