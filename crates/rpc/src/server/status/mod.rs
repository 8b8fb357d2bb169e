//! The state of a server, for `dray status`.

pub(crate) mod jobs;
pub(crate) mod paths;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use dray_core::{Context, NodeId, Op, Pid};
use dray_rt::Instant;

use crate::server::execute::ShownOperand;
use crate::server::export::Export;
use crate::server::leases::{LeaseStatus, OutsideStatus};
use crate::server::recovery::tally::RecoveryStatus;
use crate::server::service::{Inner, lock};
use crate::server::session::ServerSession;
use crate::server::status::jobs::{Callers, Jobs};
use crate::server::status::paths::Subject;

/// Calls under way that a status lists: the oldest ones. Each client may have two thousand.
const OPERATIONS_MAX: usize = 4096;

/// A server's exports, clients and calls under way.
#[derive(Clone, Debug, Default)]
pub struct ServerStatus {
    /// Names of the exports, and what is below each.
    pub exports: Vec<(String, String)>,
    /// All clients with a session.
    pub clients: Vec<ClientStatus>,
    /// Calls that are being carried out, the oldest first.
    pub operations: Vec<OperationStatus>,
    /// Further ones, for which there is no room here.
    pub operations_left_out: usize,
    /// Changes that came again, and were not carried out again.
    pub repeated_calls: u64,
    /// Buffers lent, bytes.
    pub buffer_used_bytes: usize,
    /// Buffers that may be lent, bytes.
    pub buffer_limit_bytes: usize,
    /// Names of exports, and of how many files of each two clients stored into shared mappings at
    /// the same time.
    pub mapped_twice: Vec<(String, u64)>,
    /// Names of the exports that lease something, and their leases.
    pub leases: Vec<(String, LeaseStatus)>,
    /// The same names, and what became of changes outside dray.
    pub outside: Vec<(String, OutsideStatus)>,
    /// The cost of a loss of the machine's power.
    pub recovery: RecoveryStatus,
    /// The refusals to clients, which leave others their share.
    pub refused: RefusedStatus,
}

impl ServerStatus {
    /// The status of two servers in one process, which have the same memory for data and different
    /// clients. `other` is that of slices of an export that this one has, too.
    pub fn and(mut self, other: ServerStatus) -> ServerStatus {
        self.clients.extend(other.clients);
        self.operations.extend(other.operations);
        self.operations.sort_by_key(|operation| std::cmp::Reverse(operation.age));
        let too_many = self.operations.len().saturating_sub(OPERATIONS_MAX);
        self.operations.truncate(OPERATIONS_MAX);
        self.operations_left_out += other.operations_left_out + too_many;
        self.repeated_calls += other.repeated_calls;
        self.mapped_twice.extend(other.mapped_twice);
        self.leases.extend(other.leases);
        self.outside.extend(other.outside);
        self.recovery = self.recovery.and(other.recovery);
        self.refused = self.refused.and(other.refused);
        self
    }
}

/// How often clients were refused what they, or their address, had their share of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RefusedStatus {
    /// To open a file.
    pub files: u64,
    /// A lock.
    pub locks: u64,
    /// To mount.
    pub clients: u64,
    /// A connection.
    pub connections: u64,
}

impl RefusedStatus {
    fn and(self, other: RefusedStatus) -> RefusedStatus {
        RefusedStatus {
            files: self.files + other.files,
            locks: self.locks + other.locks,
            clients: self.clients + other.clients,
            connections: self.connections + other.connections,
        }
    }
}

/// A session, as the status shows it.
#[derive(Clone, Debug)]
pub struct ClientStatus {
    /// Number to evict it by.
    pub session: u64,
    /// The client, which has a session for each slice of a projection that it uses.
    pub node: NodeId,
    /// Host name that it gave.
    pub host: String,
    /// Address that it comes from.
    pub peer: String,
    /// Export that it uses.
    pub export: String,
    /// Connections now.
    pub connections: usize,
    /// Open files.
    pub files: usize,
    /// Calls carried out.
    pub calls: u64,
    /// Bytes that it read.
    pub read_bytes: u64,
    /// Bytes that it wrote.
    pub written_bytes: u64,
    /// How long it has had no connection.
    pub away: Option<Duration>,
    /// The leases of the client; none if it has asked for none, or gets none.
    pub leases: Option<LeaseStatus>,
}

/// A call under way.
#[derive(Clone, Debug)]
pub struct OperationStatus {
    /// Which operation.
    pub op: Op,
    /// Session that it belongs to.
    pub session: u64,
    /// Files that it is about, from the export's root on. Where the path is not known, or the file
    /// system did not answer in time, the file's id.
    pub paths: Vec<String>,
    /// Caller.
    pub uid: u32,
    /// Caller's thread on its node.
    pub pid: Pid,
    /// Caller's job, if known.
    pub job: Option<Box<str>>,
    /// How long it has been under way.
    pub age: Duration,
}

/// A call under way, as it is kept.
pub(crate) struct RunningCall {
    pub(crate) op: Op,
    pub(crate) session: u64,
    pub(crate) cx: Context,
    pub(crate) since: Instant,
    /// The files that it names.
    pub(in crate::server) operands: [Option<ShownOperand>; 2],
}

impl Inner {
    /// Notes a call that did not end at once.
    pub(crate) fn running(&self, running: RunningCall) -> u64 {
        let number = self.next_running.fetch_add(1, Ordering::Relaxed);
        lock(&self.running).insert(number, running);
        number
    }

    pub(crate) fn finished(&self, number: u64) {
        lock(&self.running).remove(&number);
    }

    /// Calls under way, the files that all of them are about, and how many more calls there are.
    fn operations(&self) -> (Vec<Operation>, Vec<Subject>, usize) {
        let sessions = lock(&self.sessions).clone();
        let (mut operations, mut subjects) = (Vec::new(), Vec::new());
        let all = lock(&self.running);
        let left_out = all.len().saturating_sub(OPERATIONS_MAX);
        // The operations' numbers are in the order of their beginnings.
        for running in all.values().take(OPERATIONS_MAX) {
            let begin = subjects.len();
            if let Some(session) = sessions.get(&running.session) {
                let operands = running.operands.iter().flatten();
                let files = operands.filter_map(|operand| operand.subject(session));
                let subject = |(id, name)| Subject::new(session.export.fs.clone(), id, name);
                subjects.extend(files.map(subject));
            }
            operations.push((operation_status(running), begin..subjects.len()));
        }
        (operations, subjects, left_out)
    }

    /// The callers of `operations` whose jobs their clients may know.
    fn callers_without_job(&self, operations: &[Operation]) -> Callers {
        let sessions = lock(&self.sessions);
        let mut callers = Callers::new();
        for (operation, _) in operations.iter().filter(|(operation, _)| operation.job.is_none()) {
            let session = sessions.get(&operation.session);
            if let Some(session) = session.filter(|session| session.knows_jobs()) {
                let of = callers.entry(session.id);
                of.or_insert_with(|| (session.clone(), BTreeSet::new())).1.insert(operation.pid);
            }
        }
        callers
    }

    /// The recovery of all exports together.
    fn recovery(&self) -> RecoveryStatus {
        let exports = self.exports.opened();
        let each = exports.iter().map(|export| export.recovery.status());
        each.fold(RecoveryStatus::default(), RecoveryStatus::and)
    }

    /// The refusals of all exports together.
    fn refused(&self) -> RefusedStatus {
        let exports = self.exports.opened();
        let files = exports.iter().map(|export| export.refused_files.count()).sum();
        let locks = exports.iter().map(|export| export.refused_locks.count()).sum();
        let clients = self.limits.refused_sessions.count();
        RefusedStatus {
            files,
            locks,
            clients,
            connections: self.limits.refused_connections.count(),
        }
    }

    /// All but the paths, which are to be found.
    pub(super) fn look(&self) -> StatusSnapshot {
        let pool = self.options.pool.stats();
        let mut clients: Vec<ClientStatus> =
            lock(&self.sessions).values().map(|session| client_status(session)).collect();
        clients.sort_by(|left, right| left.host.cmp(&right.host));
        let exports = self.exports.opened();
        let kind = |export: &Arc<Export>| (export.name.clone(), export.fs.info().kind.clone());
        let mapped_twice =
            |export: &Arc<Export>| (export.name.clone(), export.mappings.conflicts());
        let leases = |export: &Arc<Export>| {
            Some((export.name.clone(), export.lease_table.as_ref()?.status()))
        };
        let outside = |export: &Arc<Export>| {
            export.lease_table.as_ref().map(|_| (export.name.clone(), export.outside.status()))
        };
        let (operations, subjects, operations_left_out) = self.operations();
        let status = ServerStatus {
            exports: exports.iter().map(kind).collect(),
            clients,
            operations: Vec::new(),
            operations_left_out,
            repeated_calls: self.repeated.load(Ordering::Relaxed),
            buffer_used_bytes: pool.used_bytes,
            buffer_limit_bytes: pool.limit_bytes,
            mapped_twice: exports.iter().map(mapped_twice).collect(),
            leases: exports.iter().filter_map(leases).collect(),
            outside: exports.iter().filter_map(outside).collect(),
            recovery: self.recovery(),
            refused: self.refused(),
        };
        let callers = self.callers_without_job(&operations);
        StatusSnapshot { status, operations, subjects, callers }
    }
}

/// A call under way, and which of all subjects are its own.
type Operation = (OperationStatus, Range<usize>);

/// A status without paths.
pub(super) struct StatusSnapshot {
    status: ServerStatus,
    operations: Vec<Operation>,
    /// The files that calls under way are about.
    pub(super) subjects: Vec<Subject>,
    /// The callers of whom a client may know a job.
    pub(super) callers: Callers,
}

impl StatusSnapshot {
    /// The whole status; `paths` are those of the subjects. The oldest call comes first.
    pub(super) fn with(self, paths: &[String], jobs: &Jobs) -> ServerStatus {
        let named = |(operation, of): Operation| OperationStatus {
            paths: paths.get(of).unwrap_or_default().to_vec(),
            job: operation.job.or_else(|| jobs.get(&(operation.session, operation.pid)).cloned()),
            ..operation
        };
        let mut operations: Vec<_> = self.operations.into_iter().map(named).collect();
        operations.sort_by_key(|operation| std::cmp::Reverse(operation.age));
        ServerStatus { operations, ..self.status }
    }
}

fn client_status(session: &ServerSession) -> ClientStatus {
    let connections = session.connections();
    ClientStatus {
        session: session.id,
        node: session.node,
        host: session.host.clone(),
        peer: connections.first().map_or_else(|| "-".into(), |first| first.peer().to_string()),
        export: session.export.name.clone(),
        connections: connections.len(),
        files: session.files_open(),
        calls: session.calls.load(Ordering::Relaxed),
        read_bytes: session.read_bytes.load(Ordering::Relaxed),
        written_bytes: session.written_bytes.load(Ordering::Relaxed),
        away: session.alone_since().map(|since| since.elapsed()),
        leases: session.lease_holder().map(|holder| holder.status()),
    }
}

fn operation_status(running: &RunningCall) -> OperationStatus {
    let who = &running.cx.who;
    OperationStatus {
        op: running.op,
        session: running.session,
        paths: Vec::new(),
        uid: who.uid.0,
        pid: running.cx.pid,
        job: (!who.job.is_empty()).then(|| who.job.clone()),
        age: running.since.elapsed(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::journal::MemoryJournal;
    use crate::server::options::ServerOptions;
    use crate::server::service::Server;

    // proves: P125
    #[test]
    fn the_oldest_calls_are_listed_and_the_rest_is_counted() {
        let driver = dray_rt::DriverKind::Simulated { seed: 1 };
        dray_rt::Executor::new(driver).unwrap().block_on(async {
            let journal = Arc::new(MemoryJournal::default());
            let server = Server::new(ServerOptions::default(), Vec::new(), journal);
            for session in 0..OPERATIONS_MAX as u64 + 7 {
                let (cx, since, operands) = (Context::system(), dray_rt::now(), [None, None]);
                server.inner.running(RunningCall { op: Op::Lock, session, cx, since, operands });
                dray_rt::sleep(Duration::from_millis(1)).await;
            }
            let status = server.status();
            assert_eq!((status.operations.len(), status.operations_left_out), (OPERATIONS_MAX, 7));
            assert_eq!(status.operations[0].session, 0);
        });
    }
}
