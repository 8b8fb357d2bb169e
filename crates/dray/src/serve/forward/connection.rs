//! The sessions of an export with the servers above, on a thread of their own.

use std::io;
use std::sync::mpsc;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use dray_client::{
    ClientConnection, ClientMemory, ConnectError, ConnectOptions, SessionStatus, Target,
};
use dray_core::Errno;
use dray_rt::sync::oneshot;
use dray_rt::{DriverKind, Executor, Instant};

/// As long is waited for a server that does not answer before it is away.
pub const CONNECT_MAX: Duration = Duration::from_secs(15);
/// A server that goes on with sessions of a process before it does not wait longer for those above.
const TAKE_OVER_MAX: Duration = Duration::from_secs(1);
/// Between two attempts.
const CONNECT_PAUSE: Duration = Duration::from_millis(300);

/// Whether waiting helps: a server is away, or its export is not open yet, or full.
pub fn may_pass(error: &ConnectError) -> bool {
    match error {
        ConnectError::Unreachable { .. } => true,
        ConnectError::Refused { errno, .. } => *errno == Errno::EAGAIN,
        ConnectError::Definition { .. } | ConnectError::Protocol(_) => false,
    }
}

/// The sessions, and the thread that has their first connections.
pub struct UpperConnection {
    pub client: ClientConnection,
    /// Since when each server has been seen away.
    away: Mutex<Vec<Option<Instant>>>,
    /// The thread ends when this is dropped.
    _stop: oneshot::Sender<()>,
}

impl UpperConnection {
    /// Connects, and goes on with the sessions in `memory`, if there are any. It waits for servers that
    /// are away. Errors: a server refuses.
    pub fn begin(
        export: &str,
        target: Target,
        options: ConnectOptions,
        memory: ClientMemory,
    ) -> Result<UpperConnection, ConnectError> {
        let no_thread = |error: io::Error| {
            ConnectError::Protocol(format!("cannot start the thread of its connections: {error}"))
        };
        let mut executor = Executor::new(DriverKind::Epoll).map_err(no_thread)?;
        let ((give, given), (stop, stopped)) = (mpsc::channel(), oneshot::channel::<()>());
        let export = export.to_owned();
        let work = move || {
            executor.block_on(async move {
                let connected = connect(&export, &target, &options, &memory).await;
                let serves = connected.is_ok();
                let _ = give.send(connected); // it is waited for
                if serves {
                    let _ = stopped.await; // an error is the end, too
                }
            });
        };
        std::thread::Builder::new().name("dray-upper".into()).spawn(work).map_err(no_thread)?;
        let client = given.recv().unwrap_or_else(|_| {
            Err(ConnectError::Protocol("the thread of its connections has ended".to_owned()))
        })?;
        let away = Mutex::new(vec![None; client.sessions().len()]);
        Ok(UpperConnection { client, away, _stop: stop })
    }

    /// The servers that are away, and since when. What was not asked for before counts from now on.
    pub fn away(&self) -> Vec<(SessionStatus, Duration)> {
        let mut away = self.away.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found = Vec::new();
        let all = self.client.sessions().iter().zip(away.iter_mut());
        for (session, since) in all.filter(|(session, _)| session.has_begun()) {
            let status = session.status();
            if status.channels.iter().any(|channel| channel.up) {
                *since = None;
                continue;
            }
            found.push((status, since.get_or_insert_with(dray_rt::now).elapsed()));
        }
        found
    }

    /// Calls that have no answer yet.
    pub fn calls(&self) -> u64 {
        self.client.sessions().iter().map(|session| calls_of(&session.status())).sum()
    }
}

/// Calls of a session that have no answer yet.
pub fn calls_of(status: &SessionStatus) -> u64 {
    status.channels.iter().map(|channel| channel.in_flight).sum()
}

async fn connect(
    export: &str,
    target: &Target,
    options: &ConnectOptions,
    memory: &ClientMemory,
) -> Result<ClientConnection, ConnectError> {
    let mut reported = false;
    loop {
        // This version alone goes on with the sessions, so none is hopeless for want of a version.
        let taken =
            ClientConnection::take_over(target, options, memory, TAKE_OVER_MAX, false).await;
        let connected = match taken {
            Some(outcome) => outcome,
            None => ClientConnection::connect(target, options, memory, CONNECT_MAX).await,
        };
        let error = match connected {
            Ok(client) => {
                // Clients open their files anew: none is attached.
                client.stack().session.attached();
                let name = export.to_owned();
                client.stack().session.find_jobs_by(Box::new(move |callers, tell| {
                    super::nodes().find_jobs(&name, callers, tell);
                }));
                return Ok(client);
            }
            Err(error) => error,
        };
        if !may_pass(&error) {
            return Err(error);
        }
        if !std::mem::replace(&mut reported, true) {
            log::error!("export `{export}` waits for {target}: {error}");
        }
        dray_rt::sleep(CONNECT_PAUSE).await;
    }
}
