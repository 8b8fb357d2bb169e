//! Loading a place: a timed or counted run of one operation on one or more threads, with
//! the clocks of everybody involved read around it.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use crate::target::{FileCalls, FileLocation};
use crate::{CommandResult, cpu};

/// What was done in one run, and what it cost.
#[derive(Clone, Copy, Debug, Default)]
pub struct RunSample {
    /// Operations that succeeded (a failing one fails the run).
    pub ops: u64,
    /// Bytes that they moved.
    pub bytes: u64,
    /// From the common start to the last thread's end.
    pub wall: Duration,
    /// CPU time of this process.
    pub app_cpu: Duration,
    /// CPU time of the client's daemons.
    pub client_cpu: Duration,
    /// CPU time of the servers.
    pub server_cpu: Duration,
    /// CPU time of kernel threads, of whatever cause.
    pub kernel_cpu: Duration,
    /// CPU time of the whole machine, of whatever cause.
    pub machine_cpu: Duration,
}

impl RunSample {
    /// CPU time of everything that can be attributed: application, client, server.
    pub fn cpu(&self) -> Duration {
        self.app_cpu + self.client_cpu + self.server_cpu
    }
}

/// How long a run lasts.
#[derive(Clone, Copy, Debug)]
pub enum RunLength {
    /// For this time.
    Time(Duration),
    /// For this many operations on each thread.
    Count(u64),
}

/// The daemons whose CPU time counts.
#[derive(Clone, Debug, Default)]
pub struct Daemons {
    /// Process ids of the client's daemons.
    pub client: Vec<i32>,
    /// Process ids of the servers.
    pub server: Vec<i32>,
}

/// One operation of a job: gets its number, answers the bytes that it moved.
pub type JobOperation<'a> = Box<dyn FnMut(u64) -> std::io::Result<usize> + 'a>;

/// Makes the operation of a job (by its number) on its own target.
pub type Prepare<'p, 'e> =
    &'p (dyn Fn(Box<dyn FileCalls>, usize) -> CommandResult<JobOperation<'e>> + Sync);

struct Clocks {
    at: Instant,
    app: Duration,
    client: Duration,
    server: Duration,
    kernel: Duration,
    machine: Duration,
}

impl Clocks {
    fn read(daemons: &Daemons) -> Clocks {
        // The coarse clocks take a millisecond to read: outside what the fine ones see.
        Clocks {
            kernel: cpu::of_kernel_threads(),
            machine: cpu::of_machine(),
            client: cpu::of_processes(&daemons.client),
            server: cpu::of_processes(&daemons.server),
            app: cpu::of_this_process(),
            at: Instant::now(),
        }
    }

    fn since(daemons: &Daemons, before: &Clocks, wall: Duration, app: Duration) -> RunSample {
        let after = Clocks::read(daemons);
        RunSample {
            wall,
            app_cpu: app.saturating_sub(before.app),
            client_cpu: after.client.saturating_sub(before.client),
            server_cpu: after.server.saturating_sub(before.server),
            kernel_cpu: after.kernel.saturating_sub(before.kernel),
            machine_cpu: after.machine.saturating_sub(before.machine),
            ..RunSample::default()
        }
    }
}

/// Runs `jobs` threads. Each connects, prepares an operation by `prepare(target, job)`,
/// waits for the others, and then repeats it. Preparation is in no figure.
pub fn run<'e>(
    place: &FileLocation,
    jobs: usize,
    until: RunLength,
    daemons: &Daemons,
    prepare: Prepare<'_, 'e>,
) -> CommandResult<RunSample> {
    let barrier = Barrier::new(jobs + 1);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..jobs)
            .map(|job| {
                scope.spawn({
                    let barrier = &barrier;
                    move || one_job(place, job, until, barrier, prepare)
                })
            })
            .collect();
        barrier.wait(); // everybody is prepared
        let before = Clocks::read(daemons);
        barrier.wait(); // off they go
        let ended: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        let (wall, app) = (before.at.elapsed(), cpu::of_this_process());
        let mut sample = Clocks::since(daemons, &before, wall, app);
        for one in ended {
            let (ops, bytes) = one.map_err(|_| "a load thread failed".to_owned())??;
            sample.ops += ops;
            sample.bytes += bytes;
        }
        Ok(sample)
    })
}

fn one_job<'e>(
    place: &FileLocation,
    job: usize,
    until: RunLength,
    barrier: &Barrier,
    prepare: Prepare<'_, 'e>,
) -> CommandResult<(u64, u64)> {
    let prepared = place.target().and_then(|target| prepare(target, job));
    // Both barriers are passed whatever happened, or the others would wait for ever.
    barrier.wait();
    barrier.wait();
    let mut operation = prepared?;
    let begin = Instant::now();
    let (mut ops, mut bytes) = (0, 0);
    loop {
        let over = match until {
            RunLength::Time(time) => begin.elapsed() >= time,
            RunLength::Count(count) => ops >= count,
        };
        if over {
            return Ok((ops, bytes));
        }
        let done = operation(ops);
        bytes += done.map_err(|error| format!("operation {ops} of job {job}: {error}"))? as u64;
        ops += 1;
    }
}
