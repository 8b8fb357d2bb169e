//! The records of several logs, by time.
//!
//! A record comes out when every other log has either a later one, or has said that it has none up to
//! that time. A server that is away, or does not get on, is waited for no longer than [`PATIENCE`]. The
//! records of that server come out late then, in their own order.

use std::sync::Arc;
use std::time::Duration;

use dray_layers::audit::AuditRecord;
use dray_rt::Instant;

use super::feed::{Feed, FeedItem, FeedPlan, FeedState, Feeder, Feeds};
use super::sources::LogSource;
use crate::error::Failure;

/// How long a record of one server waits for word of another one, while records are followed.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often the merge looks without a notice of a change.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// Records that are handed out at once.
const BATCH_RECORDS: usize = 1024;

/// What comes out of a merge.
pub enum Merged {
    /// A record of the log with this number.
    Record(usize, Box<AuditRecord>),
    /// A server is away, and why.
    Away(String),
    /// The server of this log is back.
    Back(usize),
}

/// What a reader of a merge does next.
pub enum MergeStep {
    /// Prints these, and asks again.
    Some(Vec<Merged>),
    /// So many bytes of so many have been read; nothing to print yet.
    Progress(u64, u64),
    /// All logs have ended. With the servers that were away.
    End(Vec<usize>),
}

/// The logs that are merged.
pub struct Merge {
    feeds: Arc<Feeds>,
    once: bool,
    /// A server has answered.
    has_begun: bool,
    /// By log: it has been said that its server is away.
    away: Vec<bool>,
    /// By log: the next record that is not handed out.
    handed: Vec<Option<u64>>,
    /// Since when a record waits for word of another log.
    held_since: Option<Instant>,
}

impl Merge {
    /// Begins to read all of these, each as its plan says. They all have an end, or none has. Errors: a
    /// thread cannot be started.
    pub fn start(sources: &[LogSource], plans: &[FeedPlan]) -> Result<Merge, Failure> {
        let feeds = Arc::new(Feeds::new(sources.len()));
        for (number, (source, plan)) in sources.iter().zip(plans).enumerate() {
            let (source, plan, feeds) = (source.clone(), plan.clone(), feeds.clone());
            let read = move || Feeder::new(source, plan, &feeds, number).run();
            let started = std::thread::Builder::new().name("audit-feed".into()).spawn(read);
            started.map_err(|error| Failure::new(format!("cannot start a thread: {error}")))?;
        }
        let count = sources.len();
        let (away, handed) = (vec![false; count], vec![None; count]);
        let once = plans.iter().all(|plan| plan.once);
        Ok(Merge { feeds, once, has_begun: false, away, handed, held_since: None })
    }

    /// What is next. The caller has printed what it got before. Errors: a log cannot be read, and
    /// to try again is of no use.
    pub fn next(&mut self) -> Result<MergeStep, Failure> {
        let feeds = self.feeds.clone();
        let mut all = feeds.lock();
        self.confirm(&mut all);
        loop {
            let mut out = self.news(&mut all)?;
            self.take(&mut all, &mut out);
            if !out.is_empty() {
                feeds.notify(); // there is room
                return Ok(MergeStep::Some(out));
            }
            self.confirm(&mut all); // there was nothing to print
            // Servers that are away may come back, but not before one was ever there.
            if (self.once || !self.has_begun) && all.iter().all(is_over) {
                return Ok(MergeStep::End((0..all.len()).filter(|at| self.away[*at]).collect()));
            }
            feeds.notify();
            all = feeds.wait(all, LOOK_AGAIN);
            if self.once && all.iter().all(|feed| feed.items.is_empty()) {
                let sum = |of: fn(&Feed) -> u64| all.iter().map(of).sum::<u64>();
                return Ok(MergeStep::Progress(
                    sum(|feed| feed.read_bytes),
                    sum(|feed| feed.whole_bytes),
                ));
            }
        }
    }

    /// The next record of a log that has not been handed out; none: nothing was.
    pub fn next_of(&self, number: usize) -> Option<u64> {
        self.handed.get(number).copied().flatten()
    }

    /// What was handed out has been printed.
    fn confirm(&self, all: &mut [Feed]) {
        for (feed, handed) in all.iter_mut().zip(&self.handed) {
            feed.printed = (*handed).or(feed.printed);
        }
    }

    fn news(&mut self, all: &mut [Feed]) -> Result<Vec<Merged>, Failure> {
        let mut out = Vec::new();
        for (number, feed) in all.iter_mut().enumerate() {
            match &mut feed.state {
                FeedState::Away(why) => {
                    if !std::mem::replace(&mut self.away[number], true) {
                        out.push(Merged::Away(why.clone()));
                    }
                }
                FeedState::Live | FeedState::Ended => {
                    self.has_begun = true;
                    if std::mem::replace(&mut self.away[number], false) {
                        out.push(Merged::Back(number));
                    }
                }
                FeedState::Starting => {}
                FeedState::Failed(failure) => {
                    let failure = std::mem::replace(failure, Failure::unheard());
                    return Err(failure);
                }
            }
        }
        Ok(out)
    }

    /// Takes records while it is known which one is next.
    fn take(&mut self, all: &mut [Feed], out: &mut Vec<Merged>) {
        while out.len() < BATCH_RECORDS {
            for (feed, handed) in all.iter_mut().zip(&mut self.handed) {
                while let Some(FeedItem::Until(next)) = feed.items.front() {
                    *handed = Some(*next);
                    feed.items.pop_front();
                }
            }
            let first = (0..all.len()).filter_map(|at| Some((head_us(&all[at])?, at))).min();
            let Some((time_us, at)) = first else { return };
            let is_held = all
                .iter()
                .any(|feed| head_us(feed).is_none() && !is_past(feed, time_us) && !is_over(feed));
            if is_held && !self.is_out_of_patience() {
                return;
            }
            if !is_held {
                self.held_since = None;
            }
            if let Some(FeedItem::Record(record)) = all[at].items.pop_front() {
                out.push(Merged::Record(at, record));
            }
        }
    }

    /// A search waits as long as it takes: whatever is away does not count there.
    fn is_out_of_patience(&mut self) -> bool {
        let since = *self.held_since.get_or_insert_with(dray_rt::now);
        !self.once && since.elapsed() >= PATIENCE
    }
}

/// The time of the next record of a log.
fn head_us(feed: &Feed) -> Option<u64> {
    match feed.items.front()? {
        FeedItem::Record(record) => Some(record.time_us),
        FeedItem::Until(_) => None,
    }
}

/// Whether a log without a next record has none before this time either.
fn is_past(feed: &Feed, time_us: u64) -> bool {
    feed.complete_us >= time_us
}

/// Whether nothing more is waited for of a log.
fn is_over(feed: &Feed) -> bool {
    match feed.state {
        FeedState::Ended | FeedState::Failed(_) | FeedState::Away(_) => feed.items.is_empty(),
        FeedState::Starting | FeedState::Live => false,
    }
}
