//! Read-ahead and merged writes of an export: their options, and the layer around what serves it.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dray_core::FileSystem;
use dray_layers::aggregate::{
    Aggregate, AggregateOptions, BLOCK_BYTES, PendingEra, PendingOptions, Recovered, recover,
};
use dray_rt::Executor;

use crate::error::Failure;
use crate::mount::option_values::parse_size;

/// The options, on the command line and in the configuration.
pub const AGGREGATION_OPTIONS: [&str; 2] = ["read_ahead", "merge_writes"];

/// With less, one client that reads one file has no window beside the one that it reads in.
const READ_AHEAD_MIN_BYTES: u64 = 4 << 20;
/// With less, one client has less than two blocks.
const MERGE_MIN_BYTES: u64 = 4 << 20;

/// How long a former server may have the file for pending data, and how often that is tried.
const FORMER_MAX: Duration = Duration::from_secs(5);
const FORMER_LOOK: Duration = Duration::from_millis(50);

/// How much memory an export has for each of both; 0: it is off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AggregationPlan {
    pub read_ahead_bytes: u64,
    pub merge_bytes: u64,
}

impl AggregationPlan {
    /// Takes one of the options. Errors: what is wrong with its value, in words.
    pub fn set(&mut self, option: &str, value: &str) -> Result<(), String> {
        let (bytes, least) = match option {
            "read_ahead" => (&mut self.read_ahead_bytes, READ_AHEAD_MIN_BYTES),
            _ => (&mut self.merge_bytes, MERGE_MIN_BYTES),
        };
        *bytes = match value {
            "no" | "0" => 0,
            _ => parse_size(value).map_err(|what| format!("`{option}`: {what}"))?,
        };
        match *bytes {
            0 => Ok(()),
            few if few < least => {
                let least = least >> 20;
                Err(format!("`{option}` is at least {least}M, or 0 for nothing, not `{value}`"))
            }
            _ => Ok(()),
        }
    }

    fn is_on(self) -> bool {
        self.read_ahead_bytes > 0 || self.merge_bytes > 0
    }
}

/// The file for pending data, and what its content has to belong to.
pub struct PendingFile<'a> {
    pub export: &'a str,
    pub path: &'a Path,
    pub era: PendingEra,
}

/// Writes what a former server has left pending, whether the option is on now or not. Puts the
/// layer around `fs` if it is on. None: it is off. Errors: the file below or the one for pending
/// data is not to be had; nothing is lost.
pub fn aggregate(
    plan: AggregationPlan,
    pending: &PendingFile<'_>,
    fs: &Arc<dyn FileSystem>,
    lost: &Arc<AtomicBool>,
    executor: &mut Executor,
) -> Result<Option<Arc<Aggregate>>, Failure> {
    let PendingFile { export, path, era } = *pending;
    let cannot = |what: &str, error: &std::io::Error| {
        let shown = path.display();
        Failure::new(format!(
            "export `{export}`: cannot {what} the pending data in {shown}: {error}"
        ))
    };
    let is_lost = || lost.load(Ordering::SeqCst);
    let begun = dray_rt::now();
    let recovered = loop {
        match executor.block_on(recover(path, era, &**fs, is_lost)) {
            // A former server is about to end.
            Err(error) if error.kind() == ErrorKind::WouldBlock && begun.elapsed() < FORMER_MAX => {
                std::thread::sleep(FORMER_LOOK);
            }
            recovered => break recovered.map_err(|error| cannot("write", &error))?,
        }
    };
    report(export, &recovered);
    if plan.merge_bytes == 0 {
        let _ = std::fs::remove_file(path); // it holds nothing; mostly it is not there
    }
    if !plan.is_on() {
        return Ok(None);
    }
    let bytes = |number| usize::try_from(number).unwrap_or(usize::MAX);
    let merging = plan.merge_bytes >= BLOCK_BYTES as u64;
    let options = AggregateOptions {
        read_ahead_bytes: bytes(plan.read_ahead_bytes),
        pending: merging.then(|| PendingOptions {
            path: path.to_owned(),
            bytes: bytes(plan.merge_bytes),
            era,
        }),
        lost: lost.clone(),
    };
    let layer = Aggregate::new(fs.clone(), options, recovered.failed);
    Ok(Some(Arc::new(layer.map_err(|error| cannot("keep", &error))?)))
}

fn report(export: &str, recovered: &Recovered) {
    let Recovered { bytes, gone_bytes, failed } = recovered;
    if *bytes > 0 || *gone_bytes > 0 {
        log::warn!(
            "export `{export}`: the former server was killed with pending data; {bytes} bytes are \
             written now, {gone_bytes} were of files that are gone"
        );
    }
    if !failed.is_empty() {
        log::error!(
            "export `{export}`: pending data of {} files could not be written and are lost; the next open of \
             such a file reports the error",
            failed.len()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_what_is_too_little_is_refused() {
        let mut plan = AggregationPlan::default();
        assert!(!plan.is_on());
        plan.set("read_ahead", "8M").unwrap();
        plan.set("merge_writes", "1G").unwrap();
        let expected = AggregationPlan { read_ahead_bytes: 8 << 20, merge_bytes: 1 << 30 };
        assert_eq!(plan, expected);
        plan.set("read_ahead", "0").unwrap();
        plan.set("merge_writes", "no").unwrap();
        assert!(!plan.is_on());
        assert!(plan.set("merge_writes", "1M").unwrap_err().contains("at least 4M"));
        assert!(plan.set("read_ahead", "much").unwrap_err().contains("a size such as"));
        assert!(plan.set("read_ahead", "").is_err());
    }
}
