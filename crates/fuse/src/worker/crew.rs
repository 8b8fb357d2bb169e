//! The threads that serve a mount, each with its executor, from before it is known what there is to
//! serve. Whether every one of them can have an io_uring decides about that.

use std::io;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;

use dray_rt::{DriverKind, Executor};

use crate::worker::cpus;

/// What a thread does with its executor.
pub(crate) type Job = Box<dyn FnOnce(Executor) -> io::Result<()> + Send>;

/// Threads that wait for their jobs.
pub(crate) struct Crew {
    /// The CPU of each thread.
    pub(crate) cpus: Vec<usize>,
    members: Vec<Member>,
}

struct Member {
    job: Sender<Job>,
    thread: JoinHandle<io::Result<()>>,
}

impl Crew {
    /// Starts a thread for each of `cpus`, with an executor of this kind; `pin` keeps each on
    /// its CPU. Errors: those of making threads and executors; none of them is left then.
    pub(crate) fn assemble(kind: DriverKind, cpus: Vec<usize>, pin: bool) -> io::Result<Crew> {
        let (sender, receiver) = mpsc::channel();
        let mut crew = Crew { cpus: Vec::new(), members: Vec::new() };
        for (index, cpu) in cpus.iter().enumerate() {
            let (job, jobs) = mpsc::channel();
            let (sender, home) = (sender.clone(), pin.then_some(*cpu));
            let body = move || member(kind, home, &sender, &jobs);
            let name = format!("dray-fuse-{index}");
            match std::thread::Builder::new().name(name).spawn(body) {
                Ok(thread) => crew.members.push(Member { job, thread }),
                Err(error) => return crew.disband(error),
            }
        }
        drop(sender);
        for made in receiver.iter().take(cpus.len()) {
            if let Err(error) = made {
                return crew.disband(error);
            }
        }
        crew.cpus = cpus;
        Ok(crew)
    }

    /// Ends all threads, so that what they had is free again.
    fn disband(self, error: io::Error) -> io::Result<Crew> {
        for Member { job, thread } in self.members {
            drop(job);
            let _ = thread.join(); // it has nothing to say
        }
        Err(error)
    }

    /// Gives each thread its job, in order.
    pub(crate) fn start(
        self,
        jobs: impl IntoIterator<Item = Job>,
    ) -> Vec<JoinHandle<io::Result<()>>> {
        let start = |(member, job): (Member, Job)| {
            let _ = member.job.send(job); // it waits for it
            member.thread
        };
        self.members.into_iter().zip(jobs).map(start).collect()
    }
}

fn member(
    kind: DriverKind,
    home: Option<usize>,
    sender: &Sender<io::Result<()>>,
    jobs: &Receiver<Job>,
) -> io::Result<()> {
    // Before anything is connected: the server serves a connection on the CPU that it was
    // made on.
    if let Some(cpu) = home {
        let _ = cpus::pin_to(cpu); // else it runs anywhere, which is slower only
    }
    let made = Executor::new(kind);
    let (executor, result) = match made {
        Ok(executor) => (Some(executor), Ok(())),
        Err(error) => (None, Err(error)),
    };
    let _ = sender.send(result); // who asks may have given up
    match (executor, jobs.recv()) {
        (Some(executor), Ok(job)) => job(executor),
        _ => Ok(()), // disbanded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_gets_its_job_and_its_cpu() {
        let cpus = vec![cpus::allowed()[0]; 3];
        let crew = Crew::assemble(DriverKind::Epoll, cpus.clone(), true).unwrap();
        let (sender, receiver) = mpsc::channel();
        let jobs = (0..3).map(|index| {
            let sender = sender.clone();
            let job: Job = Box::new(move |mut executor| {
                let number = executor.block_on(async move { index });
                sender.send((number, cpus::allowed())).map_err(|_| io::ErrorKind::Other.into())
            });
            job
        });
        for thread in crew.start(jobs.collect::<Vec<_>>()) {
            thread.join().unwrap().unwrap();
        }
        drop(sender);
        let mut done: Vec<_> = receiver.into_iter().collect();
        done.sort_unstable();
        let pinned = vec![cpus[0]];
        assert_eq!(done, [(0, pinned.clone()), (1, pinned.clone()), (2, pinned)]);
    }

    /// No executor of this kind can be had: a stand-in for io_uring where it is switched off.
    #[test]
    fn a_crew_that_is_not_needed_ends() {
        let crew = Crew::assemble(DriverKind::Epoll, cpus::allowed(), false).unwrap();
        assert!(crew.disband(io::ErrorKind::Other.into()).is_err());
    }
}
