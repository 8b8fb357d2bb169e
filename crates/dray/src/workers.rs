//! The threads that serve connections: one executor each, at home on its CPU.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use dray_fabric::{Peer, StreamConnection};
use dray_rpc::server::Server;
use dray_rt::sync::oneshot;
use dray_rt::{DriverKind, Executor, Handle};

/// A server's threads.
pub struct Workers {
    workers: Vec<Worker>,
    /// CPUs that this process may use, in order.
    cpus: Vec<usize>,
    next: AtomicUsize,
}

struct Worker {
    handle: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Workers {
    /// Starts `count` threads; 0: one for each CPU. As many threads as CPUs are pinned to
    /// one each. Errors: those of the system calls that make executors and threads.
    pub fn start(count: usize) -> io::Result<Workers> {
        let cpus = allowed_cpus();
        let count = if count == 0 { cpus.len() } else { count };
        let mut workers = Vec::with_capacity(count);
        for index in 0..count {
            let home = if count == cpus.len() { Some(cpus[index]) } else { None };
            workers.push(Worker::start(index, home)?);
        }
        Ok(Workers { workers, cpus, next: AtomicUsize::new(0) })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.workers.len()
    }

    /// Serves a connection: by the worker at home where its packets arrive, which spares
    /// wake-ups across CPUs, else by the next one.
    pub fn serve(&self, server: &Server, socket: OwnedFd, peer: Peer) {
        let index = match dray_fabric::incoming_cpu(&socket) {
            Some(cpu) if peer != Peer::Local => {
                self.cpus.iter().position(|known| *known == cpu).unwrap_or(cpu)
            }
            _ => self.next.fetch_add(1, Ordering::Relaxed),
        };
        let server = server.clone();
        self.workers[index % self.workers.len()].handle.spawn(async move {
            match StreamConnection::new(socket, peer) {
                Ok(connection) => server.serve(Arc::new(connection)).await,
                Err(error) => log::error!("cannot serve a connection of {peer}: {error}"),
            }
        });
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        for worker in &mut self.workers {
            worker.stop.take().map(|stop| stop.send(()));
        }
        for worker in &mut self.workers {
            worker.thread.take().map(JoinHandle::join);
        }
    }
}

impl Worker {
    fn start(index: usize, home: Option<usize>) -> io::Result<Worker> {
        let mut executor = Executor::new(DriverKind::Epoll)?;
        let handle = executor.handle();
        let (stop, stopped) = oneshot::channel();
        let thread =
            std::thread::Builder::new().name(format!("dray-serve-{index}")).spawn(move || {
                if let Some(cpu) = home {
                    pin_here(cpu);
                }
                let _ = executor.block_on(stopped); // an error too means that it is over
            })?;
        Ok(Worker { handle, stop: Some(stop), thread: Some(thread) })
    }
}

/// CPUs that this process may run on, at least one.
fn allowed_cpus() -> Vec<usize> {
    // SAFETY: a zeroed set is a valid one; the kernel writes at most its size.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        match libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) {
            0 => set,
            _ => return vec![0],
        }
    };
    // SAFETY: the numbers are below the set's size.
    let allowed = |cpu: &usize| unsafe { libc::CPU_ISSET(*cpu, &set) };
    let cpus: Vec<usize> = (0..libc::CPU_SETSIZE as usize).filter(allowed).collect();
    if cpus.is_empty() { vec![0] } else { cpus }
}

/// Keeps this thread on `cpu`. Where that cannot be it runs anywhere, which is slower only.
fn pin_here(cpu: usize) {
    // SAFETY: a zeroed set is a valid one, `cpu` came out of such a set, and the set
    // outlives the call.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_start_run_and_stop() {
        let workers = Workers::start(3).unwrap();
        assert_eq!(workers.len(), 3);
        let (send, receive) = std::sync::mpsc::channel();
        for worker in &workers.workers {
            let send = send.clone();
            worker.handle.spawn(async move { send.send(()).unwrap() });
        }
        for _ in 0..3 {
            receive.recv_timeout(std::time::Duration::from_secs(10)).unwrap();
        }
    }
}
