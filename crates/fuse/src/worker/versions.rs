//! Which version of a file the kernel's page cache holds, under close-to-open.
//!
//! The kernel drops the pages of a former version when the process that opened the file has got the
//! answer that says so. Others who open it before that must not be answered that they keep them. It
//! is said to them, too, until a request through one of these open files shows that it is done.
//!
//! A version is known by the file's times and size. Times are coarse: before Linux 6.13 as a tick of the
//! kernel's clock, and some file systems keep seconds. A change soon after another can leave a file with
//! the same of all. So pages are kept only if they were dropped at an open so late that the times had
//! gone on. An owner of the clock says so ([`AtOpen::times_past`]); where nobody does, this version has to
//! have been seen long enough ago ([`Attr::grain`]).

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::{AtOpen, Attr, IdMap, Timestamp};
use dray_rt::Instant;

/// Versions remembered; beyond it all are forgotten, which costs cached pages only.
const VERSIONS_MAX: usize = 1 << 20;
/// Where nobody says it who has the clock that times are from. A version that old was there long
/// before it was seen, also if that clock is wrong by nearly as much.
const OLD_SECONDS: i64 = 60;

#[derive(Default)]
pub(crate) struct Versions {
    seen: Mutex<VersionTable>,
}

#[derive(Default)]
struct VersionTable {
    files: IdMap<u64, Version>,
    /// The last number given to a version.
    numbers: u64,
}

struct Version {
    mtime: Timestamp,
    ctime: Timestamp,
    size: u64,
    /// When it was seen first.
    since: Instant,
    /// What was changed without a trace was so before the kernel was last asked to drop pages.
    settled: bool,
    number: u64,
    /// The kernel has no pages of a version before this one.
    dropped: bool,
    /// The file system has said that it would report changes by others, and has reported none.
    watched: bool,
}

impl Version {
    fn is_of(&self, attr: &Attr) -> bool {
        (self.mtime, self.ctime, self.size) == (attr.mtime, attr.ctime, attr.size)
    }

    /// No other client has changed the file. If this is another version, this mount has made it,
    /// and its kernel has that version's pages. Others may change the file from now on without a
    /// trace.
    fn changed_here(&mut self, attr: &Attr, moment: OpenTime) {
        if !self.is_of(attr) {
            (self.mtime, self.ctime, self.size) = (attr.mtime, attr.ctime, attr.size);
            (self.since, self.settled) = (moment.now, false);
        }
    }
}

/// Names the version for which the kernel is asked to drop the pages of others; never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageDrop(pub(crate) u64);

/// When a file was opened.
#[derive(Clone, Copy)]
pub(crate) struct OpenTime {
    pub(crate) now: Instant,
    /// Since 1970.
    pub(crate) wall: Duration,
}

impl OpenTime {
    pub(crate) fn now() -> OpenTime {
        OpenTime { now: dray_rt::now(), wall: dray_rt::wall_clock() }
    }

    fn is_long_after(self, attr: &Attr) -> bool {
        let last = attr.mtime.sec.max(attr.ctime.sec);
        (self.wall.as_secs() as i64).saturating_sub(last) > OLD_SECONDS
    }
}

impl Versions {
    fn lock(&self) -> MutexGuard<'_, VersionTable> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what `node` is like at an open. None if the kernel has no other pages of it; else
    /// it is to drop what it has, and [`Versions::dropped`] is to be called. `watched`: the file system tells
    /// of each change by others from now on ([`PageValidity::UntilRevoked`]).
    ///
    /// [`PageValidity::UntilRevoked`]: dray_core::PageValidity::UntilRevoked
    pub(crate) fn at_open(
        &self,
        node: u64,
        file: &AtOpen,
        watched: bool,
        moment: OpenTime,
    ) -> Option<PageDrop> {
        let AtOpen { attr, times_past, .. } = file;
        let mut seen = self.lock();
        let VersionTable { files, numbers } = &mut *seen;
        if let Some(known) = files.get_mut(&node) {
            let was_watched = std::mem::replace(&mut known.watched, watched);
            if watched && was_watched && known.dropped {
                known.changed_here(attr, moment);
                return None;
            }
            if known.is_of(attr) {
                if known.settled {
                    return (!known.dropped).then_some(PageDrop(known.number));
                }
                *numbers += 1;
                (known.number, known.dropped) = (*numbers, false);
                known.settled = times_past.unwrap_or(moment.now - known.since >= attr.grain());
                return Some(PageDrop(*numbers));
            }
        }
        if files.len() >= VERSIONS_MAX {
            files.clear();
        }
        *numbers += 1;
        let Attr { mtime, ctime, size, .. } = *attr;
        let settled = times_past.unwrap_or_else(|| moment.is_long_after(attr));
        let (since, number, dropped) = (moment.now, *numbers, false);
        files
            .insert(node, Version { mtime, ctime, size, since, settled, number, dropped, watched });
        Some(PageDrop(number))
    }

    /// Others have changed what `node` stands for.
    pub(crate) fn changed_by_others(&self, node: u64) {
        if let Some(version) = self.lock().files.get_mut(&node) {
            version.watched = false;
        }
    }

    /// Whether `attr`, which was read at some time, is of an earlier version of `node` than was opened, or
    /// may be.
    pub(crate) fn may_be_older(&self, node: u64, attr: &Attr) -> bool {
        let is_before = |opened: &Version| attr.ctime <= opened.ctime && !opened.is_of(attr);
        self.lock().files.get(&node).is_some_and(is_before)
    }

    /// A request has come through a file whose opening was answered so: the kernel has done it.
    pub(crate) fn dropped(&self, node: u64, PageDrop(number): PageDrop) {
        if let Some(version) = self.lock().files.get_mut(&node)
            && version.number == number
        {
            version.dropped = true;
        }
    }

    /// The kernel has forgotten `node`.
    pub(crate) fn forget(&self, node: u64) {
        self.lock().files.remove(&node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a file system says that does not have the clock.
    fn seen(attr: Attr) -> AtOpen {
        AtOpen { attr, no_capability: false, times_past: None }
    }

    /// A moment `millis` after some other, at which files of 1970 are old.
    fn at(millis: u64) -> OpenTime {
        let since = Duration::from_millis(millis);
        let (now, wall) = (Instant::from_nanos(1) + since, Duration::from_secs(1000) + since);
        OpenTime { now, wall }
    }

    /// Two opened a file that had changed. The second was answered that it keeps pages that the first had
    /// been answered to drop, and had not dropped so far.
    // proves: P7
    #[test]
    fn pages_are_kept_once_those_of_former_versions_have_gone() {
        let (versions, attr) = (Versions::default(), seen(Attr::default()));
        let first = versions.at_open(7, &attr, false, at(0)).unwrap();
        assert_eq!(
            versions.at_open(7, &attr, false, at(0)),
            Some(first),
            "nothing shows that it is done"
        );
        versions.dropped(7, first);
        assert_eq!(versions.at_open(7, &attr, false, at(0)), None);
        let changed = seen(Attr { size: 1, ..attr.attr });
        let second = versions.at_open(7, &changed, false, at(0)).unwrap();
        versions.dropped(7, first);
        assert_eq!(versions.at_open(7, &changed, false, at(0)), Some(second));
        versions.dropped(8, second);
        versions.dropped(7, second);
        assert_eq!(versions.at_open(7, &changed, false, at(0)), None);
        versions.forget(7);
        assert_ne!(versions.at_open(7, &changed, false, at(0)), Some(second));
    }

    /// A file of the same size that was changed twice within a tick, or a second, kept the first
    /// change's pages for good.
    // proves: P7
    #[test]
    fn pages_are_dropped_until_times_have_gone_on() {
        for (nsec, grain_millis) in [(1, 100), (0, 3000)] {
            let (versions, time) = (Versions::default(), Timestamp { sec: 1000, nsec });
            let attr = seen(Attr { mtime: time, ctime: time, ..Attr::default() });
            for millis in [10, 10, 10 + grain_millis - 1, 10 + grain_millis] {
                let dropping =
                    versions.at_open(7, &attr, false, at(millis)).expect("it may have changed");
                versions.dropped(7, dropping);
            }
            assert_eq!(versions.at_open(7, &attr, false, at(10 + grain_millis)), None);
            // A file that was not changed for a minute.
            let dropping = versions.at_open(8, &attr, false, at(61_000)).unwrap();
            versions.dropped(8, dropping);
            assert_eq!(versions.at_open(8, &attr, false, at(61_000)), None);
            // Of a clock that goes before ours.
            let time = Timestamp { sec: 1000 + 3600, nsec };
            let ahead = seen(Attr { ctime: time, ..attr.attr });
            let dropping = versions.at_open(8, &ahead, false, at(61_000)).unwrap();
            versions.dropped(8, dropping);
            assert!(versions.at_open(8, &ahead, false, at(61_001)).is_some());
        }
    }
    /// Every file was read from the server twice that had changed within the last minute.
    #[test]
    fn pages_of_young_files_are_kept_if_their_times_are_known_to_be_past() {
        let (versions, time) = (Versions::default(), Timestamp { sec: 1000, nsec: 1 });
        let young = seen(Attr { mtime: time, ctime: time, ..Attr::default() });
        let [young, past] = [false, true].map(|past| AtOpen { times_past: Some(past), ..young });
        let dropping = versions.at_open(7, &past, false, at(10)).unwrap();
        versions.dropped(7, dropping);
        assert_eq!(versions.at_open(7, &past, false, at(10)), None);
        // At the first open at which they are, whatever the own clock says.
        for (file, millis) in [(young, 10), (young, 100_000), (past, 100_000)] {
            let dropping = versions.at_open(8, &file, false, at(millis)).unwrap();
            versions.dropped(8, dropping);
        }
        assert_eq!(versions.at_open(8, &past, false, at(100_000)), None);
    }
    #[test]
    fn pages_of_a_file_that_is_watched_are_kept_until_others_have_changed_it() {
        let (versions, time) = (Versions::default(), |sec| Timestamp { sec, nsec: 1 });
        let of = |sec| seen(Attr { mtime: time(sec), ctime: time(sec), ..Attr::default() });
        // What the kernel has is of a time before it was watched.
        let first = versions.at_open(7, &of(1), true, at(100_000)).unwrap();
        assert_eq!(versions.at_open(7, &of(1), true, at(100_000)), Some(first));
        versions.dropped(7, first);
        // This mount changes it.
        assert_eq!(versions.at_open(7, &of(2), true, at(100_000)), None);
        versions.changed_by_others(7);
        let again = versions.at_open(7, &of(3), true, at(100_000)).unwrap();
        versions.dropped(7, again);
        assert_eq!(versions.at_open(7, &of(4), true, at(100_000)), None);
        // The file is not watched any more. Others may have changed it in the same tick.
        assert!(versions.at_open(7, &of(4), false, at(100_000)).is_some());
        assert!(versions.at_open(7, &of(5), true, at(100_000)).is_some());
    }

    #[test]
    fn what_was_read_before_a_version_was_opened_is_older() {
        let time = |nsec| Timestamp { sec: 1000, nsec };
        let of = |nsec, size| Attr { ctime: time(nsec), size, ..Attr::default() };
        let versions = Versions::default();
        assert!(!versions.may_be_older(7, &of(1, 10)), "it was never opened");
        versions.at_open(7, &seen(of(2, 20)), false, at(10));
        assert!(versions.may_be_older(7, &of(1, 10)) && versions.may_be_older(7, &of(2, 10)));
        assert!(!versions.may_be_older(7, &of(2, 20)) && !versions.may_be_older(7, &of(3, 30)));
    }
}
