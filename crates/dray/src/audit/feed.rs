//! The records of one log on their way to a merge. A thread reads the log and waits where the merge does
//! not keep up.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_layers::audit::{AuditFilter, AuditRecord};
use dray_rt::Instant;

use super::access::{AccessError, LogAccess, consumer_of};
use super::sources::LogSource;
use crate::error::Failure;

/// Records of one log that wait to be merged; more are not read.
const WAITING_MAX: usize = 8192;
/// How long records are waited for at once.
const WAIT: Duration = Duration::from_millis(250);
/// How often a bookmark is kept.
const KEEP_EVERY: Duration = Duration::from_millis(500);
/// How long a server that is away is left alone, at first and at most.
const PAUSE_MIN: Duration = Duration::from_millis(200);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// What is read of each log, and how long.
#[derive(Clone, Debug)]
pub struct FeedPlan {
    /// The consumer whose filter and bookmark count.
    pub name: Option<String>,
    /// What is wanted, without a consumer.
    pub filter: AuditFilter,
    /// Where it begins; none: at the bookmark, or as `begin` says.
    pub from: Option<u64>,
    pub begin: Begin,
    /// The feed ends at the end of the log.
    pub once: bool,
}

/// Where a log is begun with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    Oldest,
    Next,
}

/// What comes out of a log, in order.
pub enum FeedItem {
    Record(Box<AuditRecord>),
    /// All records before this one have come.
    Until(u64),
}

/// How a log is read.
pub enum FeedState {
    /// The server has not answered yet.
    Starting,
    Live,
    /// The server is away, and this is why.
    Away(String),
    /// There is nothing more to come.
    Ended,
    Failed(Failure),
}

/// One log, as a merge sees it.
pub struct Feed {
    pub items: VecDeque<FeedItem>,
    pub state: FeedState,
    /// All its records up to this time have come, microseconds since 1970.
    pub complete_us: u64,
    /// The next record that has not been printed.
    pub printed: Option<u64>,
    pub read_bytes: u64,
    pub whole_bytes: u64,
}

/// All of them.
pub struct Feeds {
    feeds: Mutex<Vec<Feed>>,
    changed: Condvar,
}

impl Feeds {
    pub fn new(count: usize) -> Feeds {
        let feed = || Feed {
            items: VecDeque::new(),
            state: FeedState::Starting,
            complete_us: 0,
            printed: None,
            read_bytes: 0,
            whole_bytes: 0,
        };
        let feeds = (0..count).map(|_| feed()).collect();
        Feeds { feeds: Mutex::new(feeds), changed: Condvar::new() }
    }

    pub fn lock(&self) -> MutexGuard<'_, Vec<Feed>> {
        self.feeds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something has changed.
    pub fn notify(&self) {
        self.changed.notify_all();
    }

    /// Waits for a change, at most so long.
    pub fn wait<'a>(
        &self,
        feeds: MutexGuard<'a, Vec<Feed>>,
        longest: Duration,
    ) -> MutexGuard<'a, Vec<Feed>> {
        self.changed.wait_timeout(feeds, longest).unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Reads one log.
pub struct Feeder<'a> {
    pub source: LogSource,
    pub plan: FeedPlan,
    pub feeds: &'a Feeds,
    pub number: usize,
    /// Where it goes on, and in which log, once that is known.
    next: Option<(u64, Option<u128>)>,
    kept: Option<(u64, Instant)>,
    /// There was something to be printed, or to be passed over.
    has_moved: bool,
}

impl Feeder<'_> {
    pub fn new(source: LogSource, plan: FeedPlan, feeds: &Feeds, number: usize) -> Feeder<'_> {
        Feeder { source, plan, feeds, number, next: None, kept: None, has_moved: false }
    }

    /// Until the log has ended, or for ever.
    pub fn run(mut self) {
        let mut pause = PAUSE_MIN;
        loop {
            let failed = self.source.open().map_err(AccessError::Refused);
            let mut was_live = false;
            let ended = failed.and_then(|mut log| self.pass_on(&mut *log, &mut was_live));
            let is_last = match &ended {
                Ok(()) | Err(AccessError::Refused(_)) => true,
                Err(AccessError::Away(_)) => self.plan.once,
            };
            self.set(|feed| match ended {
                Ok(()) => feed.state = FeedState::Ended,
                Err(AccessError::Refused(failure)) => feed.state = FeedState::Failed(failure),
                Err(AccessError::Away(why)) => feed.state = FeedState::Away(why),
            });
            if is_last {
                return;
            }
            pause = if was_live { PAUSE_MIN } else { (pause * 2).min(PAUSE_MAX) };
            std::thread::sleep(pause);
        }
    }

    fn set(&self, change: impl FnOnce(&mut Feed)) {
        if let Some(feed) = self.feeds.lock().get_mut(self.number) {
            change(feed);
        }
        self.feeds.notify();
    }

    /// Reads until the log has ended, or that fails.
    fn pass_on(&mut self, log: &mut dyn LogAccess, is_live: &mut bool) -> Result<(), AccessError> {
        let (mut next, filter) = self.begin(log)?;
        *is_live = true;
        loop {
            let wait = if self.plan.once { Duration::ZERO } else { WAIT };
            let part = log.read(next, &filter, wait)?;
            let (more, log_id, moved) = (part.more, part.log, part.next_index > next);
            next = part.next_index;
            self.has_moved |= moved;
            self.next = Some((next, log_id.or(self.next.and_then(|(_, log)| log))));
            self.set(|feed| {
                feed.items.extend(part.records.into_iter().map(|one| FeedItem::Record(one.into())));
                if moved {
                    feed.items.push_back(FeedItem::Until(next));
                }
                feed.complete_us = feed.complete_us.max(part.complete_us);
                feed.read_bytes = part.read_bytes;
                feed.state = FeedState::Live;
            });
            let is_end = self.plan.once && !more;
            self.wait_for_room(if is_end { 0 } else { WAITING_MAX });
            self.keep(log, is_end)?;
            if is_end {
                return Ok(());
            }
        }
    }

    /// Where to begin, and with what filter.
    fn begin(&mut self, log: &mut dyn LogAccess) -> Result<(u64, AuditFilter), AccessError> {
        let summary = log.summary()?;
        self.set(|feed| feed.whole_bytes = summary.bytes);
        let consumer = match &self.plan.name {
            Some(name) => Some(consumer_of(&summary, name, self.source.export())?),
            None => None,
        };
        let filter = match consumer {
            Some(consumer) => consumer.filter().map_err(Failure::new)?,
            None => self.plan.filter.clone(),
        };
        let is_same = |log: Option<u128>| log.is_none() || log == summary.log;
        let begin = match (self.next, self.plan.from, consumer, self.plan.begin) {
            (Some((next, log)), _, _, _) if is_same(log) => next,
            // The server has a new log since.
            (Some(_), _, None, _) => summary.first_index,
            (None, Some(from), _, _) => from,
            (_, _, Some(consumer), _) => consumer.bookmark,
            (None, None, None, Begin::Oldest) => summary.first_index,
            (None, None, None, Begin::Next) => summary.next_index,
        };
        self.next = Some((begin, summary.log));
        Ok((begin, filter))
    }

    fn wait_for_room(&self, most: usize) {
        let mut feeds = self.feeds.lock();
        while feeds.get(self.number).is_some_and(|feed| feed.items.len() > most) {
            feeds = self.feeds.wait(feeds, WAIT);
        }
    }

    /// Keeps the bookmark, if that is due. At the end all that was handed on is waited for.
    fn keep(&mut self, log: &mut dyn LogAccess, is_end: bool) -> Result<(), AccessError> {
        let (Some(name), Some((next, log_id))) = (&self.plan.name, self.next) else {
            return Ok(());
        };
        let mut feeds = self.feeds.lock();
        while is_end
            && self.has_moved
            && let Some(feed) = feeds.get(self.number)
            && feed.printed.is_none_or(|printed| printed < next)
        {
            feeds = self.feeds.wait(feeds, WAIT);
        }
        let printed = feeds.get(self.number).and_then(|feed| feed.printed);
        drop(feeds);
        let Some(printed) = printed else { return Ok(()) };
        let is_due = match self.kept {
            Some((kept, _)) if kept >= printed => false,
            Some((_, last)) => is_end || last.elapsed() >= KEEP_EVERY,
            None => true,
        };
        if is_due {
            log.advance(name, log_id, Some(printed))?;
            self.kept = Some((printed, dray_rt::now()));
        }
        Ok(())
    }
}
