//! The batch jobs of callers, which the kernel's requests do not carry. Their environment tells
//! (`SLURM_JOB_ID` and the like), and is looked at when somebody asks what is going on.
//!
//! Never by a thread that serves requests. To show an environment the kernel takes locks that its
//! process may hold while it waits for us. They are that of its memory (munmap(2) writes back what
//! was mapped) and that of exec(2), which closes files.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use dray_core::{Identity, Pid};

/// How long the caller waits for the answer.
const PATIENCE: Duration = Duration::from_millis(300);
/// Callers looked at for one question; a caller that is not looked at has no job.
const CALLERS_MAX: usize = 256;
/// Threads that may wait for processes at a time.
const THREADS_MAX: usize = 4;
/// Bytes of a process's environment that are searched.
const ENVIRON_MAX_BYTES: u64 = 256 << 10;

/// Callers that belong to a job.
pub type JobTable = HashMap<Pid, Box<str>>;

/// Finds them.
#[derive(Default)]
pub(crate) struct BatchJobs {
    threads: Arc<AtomicUsize>,
}

impl BatchJobs {
    /// Hands the jobs of `callers` to `then`, on a thread of its own; none of them if too many
    /// threads wait already.
    pub(crate) fn find(&self, callers: Vec<Pid>, then: impl FnOnce(JobTable) + Send + 'static) {
        if callers.is_empty() {
            return then(JobTable::new());
        }
        if self.threads.fetch_add(1, Ordering::SeqCst) >= THREADS_MAX {
            self.threads.fetch_sub(1, Ordering::SeqCst);
            return then(JobTable::new());
        }
        let threads = self.threads.clone();
        let thread = std::thread::Builder::new().name("dray-jobs".into()).spawn(move || {
            let callers = callers.into_iter().take(CALLERS_MAX);
            let found = callers.filter_map(|caller| Some((caller, read_job(caller)?))).collect();
            threads.fetch_sub(1, Ordering::SeqCst);
            then(found);
        });
        if thread.is_err() {
            self.threads.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// The jobs of `callers`, as far as they are known soon.
    pub(crate) fn find_soon(&self, callers: Vec<Pid>) -> JobTable {
        let (sender, receiver) = mpsc::channel();
        self.find(callers, move |found| drop(sender.send(found))); // who asked may have gone
        receiver.recv_timeout(PATIENCE).unwrap_or_default()
    }
}

/// None if the process is gone, is nobody's of ours, or belongs to no job.
fn read_job(caller: Pid) -> Option<Box<str>> {
    let file = File::open(format!("/proc/{caller}/environ")).ok()?;
    let mut environ = Vec::new();
    file.take(ENVIRON_MAX_BYTES).read_to_end(&mut environ).ok()?;
    let job = Identity::job_in(|name| {
        let mut lines = environ.split(|&byte| byte == 0);
        let value =
            lines.find_map(|line| line.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
        Some(std::str::from_utf8(value).ok()?.to_owned())
    });
    (!job.is_empty()).then_some(job)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_job_is_what_the_process_has_in_its_environment_now() {
        // As a shell does: the same process with another environment.
        let line = "read go; SLURM_JOB_ID=77 exec sleep 1000";
        let mut shell = Command::new("sh");
        shell.args(["-c", line]).stdin(std::process::Stdio::piped()).env_remove("SLURM_JOB_ID");
        let mut child = shell.spawn().unwrap();
        let (jobs, pid) = (BatchJobs::default(), Pid(child.id()));
        let before = jobs.find_soon(vec![pid]);
        drop(child.stdin.take());
        let begin = std::time::Instant::now();
        let mut job = None;
        while job.is_none() && begin.elapsed().as_secs() < 60 {
            std::thread::sleep(Duration::from_millis(5));
            job = jobs.find_soon(vec![pid]).remove(&pid);
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!((before.get(&pid), job.as_deref()), (None, Some("77")));
        assert_eq!(jobs.find_soon(vec![pid, Pid(0), Pid(0x7fff_fff0)]), JobTable::new());
    }

    #[test]
    fn who_asks_does_not_wait_for_those_who_wait_already() {
        let jobs = BatchJobs::default();
        let own = Pid(std::process::id());
        jobs.threads.store(THREADS_MAX, Ordering::SeqCst);
        let (sender, receiver) = mpsc::channel();
        jobs.find(vec![own], move |found| sender.send(found.len()).unwrap());
        assert_eq!(receiver.try_recv(), Ok(0), "it was answered at once");
        assert_eq!(jobs.threads.load(Ordering::SeqCst), THREADS_MAX);
    }
}
