//! The batch jobs of readers, where rules go by them.
//!
//! A process's environment names its job. To look at that can take long, so nobody waits for it: until the job
//! is known a reader has none. It is asked for when a file is opened, and is remembered for other files.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::{FindJobs, Pid};
use dray_rt::{Instant, now};

/// A process may get another job, and a number another process.
const KNOWN_FOR: Duration = Duration::from_secs(10);
/// Processes whose jobs are remembered.
const READERS_MAX: usize = 4096;

#[derive(Default)]
pub(crate) struct ReaderJobs(Arc<Mutex<HashMap<Pid, Reader>>>);

struct Reader {
    asked: Instant,
    /// None: it is not known yet, or there is none.
    job: Option<Box<str>>,
}

impl ReaderJobs {
    fn lock(&self) -> MutexGuard<'_, HashMap<Pid, Reader>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has `find` look for the job of `reader`, if it is not known.
    pub(crate) fn look_for(&self, reader: Pid, find: &FindJobs) {
        let mut readers = self.lock();
        if readers.get(&reader).is_some_and(|known| known.asked.elapsed() < KNOWN_FOR) {
            return;
        }
        if readers.len() >= READERS_MAX {
            readers.retain(|_, known| known.asked.elapsed() < KNOWN_FOR);
        }
        if readers.len() >= READERS_MAX {
            return;
        }
        let job = readers.remove(&reader).and_then(|known| known.job);
        readers.insert(reader, Reader { asked: now(), job });
        drop(readers);
        let readers = self.0.clone();
        let found = move |jobs: Vec<(Pid, Box<str>)>| {
            let job = jobs.into_iter().find(|(of, _)| *of == reader).map(|(_, job)| job);
            let mut readers = readers.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(known) = readers.get_mut(&reader) {
                known.job = job;
            }
        };
        find(vec![reader], Box::new(found));
    }

    /// The job of `reader`, as far as it is known.
    pub(crate) fn of(&self, reader: Pid) -> Option<Box<str>> {
        self.lock().get(&reader).and_then(|known| known.job.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn a_job_is_looked_for_once_in_a_while_and_remembered() {
        let driver = dray_rt::DriverKind::Simulated { seed: 1 };
        dray_rt::Executor::new(driver).unwrap().block_on(async {
            let (jobs, asked) = (ReaderJobs::default(), Arc::new(AtomicUsize::new(0)));
            let count = asked.clone();
            let find: FindJobs = Box::new(move |readers, tell| {
                let number = count.fetch_add(1, Ordering::SeqCst);
                tell(vec![(readers[0], format!("job{number}").into())]);
            });
            assert_eq!(jobs.of(Pid(7)), None);
            for _ in 0..2 {
                jobs.look_for(Pid(7), &find);
                assert_eq!(jobs.of(Pid(7)).as_deref(), Some("job0"));
            }
            dray_rt::sleep(KNOWN_FOR).await;
            jobs.look_for(Pid(7), &find);
            assert_eq!(jobs.of(Pid(7)).as_deref(), Some("job1"));
            (0..2 * READERS_MAX as u32).for_each(|pid| jobs.look_for(Pid(pid), &find));
            assert_eq!(asked.load(Ordering::SeqCst), READERS_MAX + 1);
            assert_eq!(jobs.lock().len(), READERS_MAX);
        });
    }
}
