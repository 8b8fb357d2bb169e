//! An export as it stands: being opened, or open.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use dray_backends::posix::{Hang, PosixFs};
use dray_layers::metrics::Metrics;
use dray_rt::Instant;

use crate::serve::export::ExportPlan;

/// A file system that has not answered a call for this long is said to hang.
const HANG_AFTER: Duration = Duration::from_secs(5);

/// An export, for the status and for whoever opens it.
pub struct Exported {
    pub name: String,
    pub read_only: bool,
    pub metrics: Arc<Metrics>,
    /// The directory, as it was named.
    named: String,
    /// The same without links, known once its file system has answered.
    dir: OnceLock<String>,
    /// As above, and as bytes.
    path: OnceLock<PathBuf>,
    named_path: PathBuf,
    fs: OnceLock<Arc<PosixFs>>,
    begun: Instant,
    open: AtomicBool,
    /// What was last seen at its place.
    place: Mutex<Place>,
    /// Why it could not be opened when that was last tried.
    trouble: Mutex<Option<String>>,
}

/// What has become of the directory itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Place {
    #[default]
    There,
    /// It has been removed.
    Gone,
    /// It was moved, and perhaps another one put in its place, or something was mounted there.
    Elsewhere,
}

/// The opening of an export that is not open.
pub struct Starting {
    /// How long it has lasted.
    pub since: Duration,
    /// What went wrong at the last try, if anything did: it is tried again.
    pub trouble: Option<String>,
}

impl Exported {
    /// One that is about to be opened.
    pub fn new(plan: &ExportPlan) -> Exported {
        Exported {
            name: plan.name.clone(),
            read_only: plan.read_only,
            metrics: Arc::new(Metrics::new()),
            named: plan.dir.display().to_string(),
            dir: OnceLock::new(),
            path: OnceLock::new(),
            named_path: plan.dir.clone(),
            fs: OnceLock::new(),
            begun: dray_rt::now(),
            open: AtomicBool::new(false),
            place: Mutex::default(),
            trouble: Mutex::default(),
        }
    }

    /// Its directory.
    pub fn dir(&self) -> &str {
        self.dir.get().unwrap_or(&self.named)
    }

    /// The same for comparing. One that has not answered yet goes by the name that it was given.
    pub fn path(&self) -> &Path {
        self.path.get().unwrap_or(&self.named_path)
    }

    fn trouble(&self) -> MutexGuard<'_, Option<String>> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It could not be opened. True if that is not what was said before.
    pub fn failed(&self, why: &str) -> bool {
        let mut trouble = self.trouble();
        let new = trouble.as_deref() != Some(why);
        *trouble = Some(why.to_owned());
        new
    }

    /// Its file system has answered: `dir` is its directory without links.
    pub fn answered(&self, dir: &Path, fs: Arc<PosixFs>) {
        *self.trouble() = None;
        let _ = self.dir.set(dir.display().to_string()); // it is opened once
        let _ = self.path.set(dir.to_owned());
        let _ = self.fs.set(fs);
    }

    /// Clients can have it from now on. Answers how long that took.
    pub fn opened(&self) -> Duration {
        self.open.store(true, Ordering::Release);
        self.begun.elapsed()
    }

    /// Its opening, if it is not open yet.
    pub fn starting(&self) -> Option<Starting> {
        let starting = || Starting { since: self.begun.elapsed(), trouble: self.trouble().clone() };
        (!self.open.load(Ordering::Acquire)).then(starting)
    }

    /// Why it takes long to open it, in words.
    pub fn why_late(&self) -> String {
        match self.fs.get() {
            None => format!("the file system below {} does not answer", self.dir()),
            Some(_) => "what its clients had before the restart is taken up again first".to_owned(),
        }
    }

    /// What serves it, once its file system has answered.
    pub fn fs(&self) -> Option<&Arc<PosixFs>> {
        self.fs.get()
    }

    /// What has become of the directory itself, as is looked for now and then. False if that was known.
    pub fn found(&self, place: Place) -> bool {
        let mut known = self.place.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *known, place) != place
    }

    pub fn place(&self) -> Place {
        *self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether any call to the file system below is under way.
    pub fn has_calls(&self) -> bool {
        self.fs.get().is_some_and(|fs| fs.hang(Duration::ZERO).is_some())
    }

    /// What is known of the file system below, if it hangs.
    pub fn hang(&self) -> Option<Hang> {
        match (self.fs.get(), self.starting()) {
            (Some(fs), _) => fs.hang(HANG_AFTER),
            (None, Some(Starting { since, trouble: None })) => {
                (since >= HANG_AFTER).then_some(Hang { calls: 1, since })
            }
            (None, _) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_backends::posix::PosixOptions;
    use dray_core::FsUuid;

    /// That was said also where taking up again what clients had took its time.
    #[test]
    fn a_file_system_is_not_said_to_be_silent_when_it_has_answered() {
        let dir = tempfile::tempdir().unwrap();
        let Ok(fs) = PosixFs::open(dir.path(), FsUuid(1), PosixOptions::default()) else {
            return eprintln!("skipped: needs root");
        };
        let one = Exported::new(&ExportPlan::new("a", dir.path().into()).unwrap());
        assert!(one.why_late().ends_with("does not answer"));
        one.answered(dir.path(), fs);
        assert!(one.why_late().contains("taken up again"));
    }

    #[test]
    fn an_export_is_starting_until_it_is_open_and_says_what_is_in_its_way() {
        let one = Exported::new(&ExportPlan::new("a", "/srv/a".into()).unwrap());
        assert_eq!(one.dir(), "/srv/a");
        assert!(one.hang().is_none(), "it has only begun");
        assert!(one.starting().unwrap().trouble.is_none());
        assert!(one.failed("no") && !one.failed("no") && one.failed("not so either"));
        assert_eq!(one.starting().unwrap().trouble.as_deref(), Some("not so either"));
        one.opened();
        assert!(one.starting().is_none());
    }
}
