//! A log that commands read, wherever it is.

use std::time::Duration;

use dray_layers::audit::{AuditFilter, AuditRecord, Consumer};

use crate::error::Failure;

/// Why a log cannot be read.
#[derive(Debug)]
pub enum AccessError {
    /// The server cannot be reached. It may be back later.
    Away(String),
    /// To try again is of no use.
    Refused(Failure),
}

impl From<Failure> for AccessError {
    fn from(failure: Failure) -> AccessError {
        AccessError::Refused(failure)
    }
}

impl From<AccessError> for Failure {
    fn from(error: AccessError) -> Failure {
        match error {
            AccessError::Away(why) => Failure::new(why).nobody_answered(),
            AccessError::Refused(failure) => failure,
        }
    }
}

/// What there is of a log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogSummary {
    /// The directory, or the server.
    pub place: String,
    /// Which log it is; none: it is empty.
    pub log: Option<u128>,
    pub segments: u64,
    pub bytes: u64,
    /// The number of the oldest record.
    pub first_index: u64,
    /// The number that the next record will have.
    pub next_index: u64,
    pub consumers: Vec<Consumer>,
}

/// Records of a log, and how far it was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogPart {
    pub records: Vec<AuditRecord>,
    /// The number of the next record.
    pub next_index: u64,
    /// The log that was read; none: it is empty.
    pub log: Option<u128>,
    /// There is more to be had at once.
    pub more: bool,
    /// All wanted records up to this time have been handed out, microseconds since 1970; 0: that is
    /// not known.
    pub complete_us: u64,
    /// Bytes of the log that were read so far.
    pub read_bytes: u64,
}

/// One log. Each call waits for a disk or for a server.
pub trait LogAccess {
    /// What there is.
    fn summary(&mut self) -> Result<LogSummary, AccessError>;

    /// Records from this number on. Where there are none, `wait` is how long some are waited for.
    fn read(
        &mut self,
        from: u64,
        filter: &AuditFilter,
        wait: Duration,
    ) -> Result<LogPart, AccessError>;

    /// Adds a consumer, or changes what one wants. A new one begins with the oldest record if
    /// `oldest`, else with the next one. Answers its bookmark.
    fn register(&mut self, consumer: &Consumer, oldest: bool) -> Result<u64, AccessError>;

    /// Removes a consumer.
    fn deregister(&mut self, name: &str) -> Result<(), AccessError>;

    /// Moves a bookmark on; never back. `log`: the one that was read. `to`: the next record that the
    /// consumer has not seen; none: the next one of all. Answers the bookmark.
    fn advance(
        &mut self,
        name: &str,
        log: Option<u128>,
        to: Option<u64>,
    ) -> Result<u64, AccessError>;
}

/// The consumer of this name. Errors: there is none, or its bookmark is one of another log.
pub fn consumer_of<'a>(
    summary: &'a LogSummary,
    name: &str,
    export: &str,
) -> Result<&'a Consumer, Failure> {
    let found = summary.consumers.iter().find(|one| one.name == name);
    let consumer = found.ok_or_else(|| no_consumer(name, export))?;
    check_log(consumer, summary.log)?;
    Ok(consumer)
}

pub fn no_consumer(name: &str, export: &str) -> Failure {
    Failure::new(format!(
        "no consumer `{name}` of the audit of `{export}`: `dray audit list` shows those there are"
    ))
}

/// Whether a bookmark is one of this log. Errors: it is one of another log.
pub fn check_log(consumer: &Consumer, log: Option<u128>) -> Result<(), Failure> {
    match log.map(log_text) {
        Some(log) if !consumer.log.is_empty() && consumer.log != log => Err(Failure::new(format!(
            "the bookmark of `{0}` belongs to another log ({1}; this one is {log}): deregister `{0}` and \
             register it anew",
            consumer.name, consumer.log
        ))),
        Some(_) | None => Ok(()),
    }
}

/// The name of a log in bookmarks.
pub fn log_text(log: u128) -> String {
    format!("{log:032x}")
}
