//! The sessions of a projection with failover: one for each slice, begun with its first use.

use std::sync::Arc;
use std::time::Duration;

use dray_core::{FsInfo, NodeId};
use dray_fabric::Address;
use dray_layers::placement::{FAILOVER_SERVERS_MAX, SliceIndex};
use dray_rpc::client::{ClientSession, ConnectError, SessionGroup};

use super::{ClientConnection, ClientProjection, SERVER_PATIENCE, joined, no_memory};
use crate::connector::{ConnectOptions, connect_session, session_with_use, take_over_session};
use crate::memory::ClientMemory;
use crate::target::Target;

/// Slices that a client begins a session with at most, until one answers what the projection is.
const FIRST_TRIES_MAX: usize = 6;
/// Until the next slice is tried, when one is about to be served.
const AGAIN_AFTER: Duration = Duration::from_millis(500);

/// The memory for the sessions of all slices lies in front of that for the definition.
const _: () =
    assert!(FAILOVER_SERVERS_MAX * (FAILOVER_SERVERS_MAX - 1) <= ClientMemory::SESSIONS_MAX);

impl ClientProjection {
    /// The export of each slice, at its home, or else at its successor.
    fn slice_targets(&self) -> Result<Vec<Target>, ConnectError> {
        let servers: Result<Vec<Address>, String> =
            self.definition.servers.iter().map(|server| server.parse()).collect();
        let servers = servers.map_err(ConnectError::Protocol)?;
        let slices = &self.slices;
        let target = |slice: SliceIndex| {
            let home = servers[usize::from(slices.home_of(slice).0)].clone();
            let successor = slices.successor_of(slice).map(|next| usize::from(next.0));
            let others = successor.into_iter().map(|next| servers[next].clone()).collect();
            Target { address: home, others, export: slices.export_of(slice, &self.definition.name) }
        };
        Ok(slices.all().map(target).collect())
    }

    fn slice_options(&self, options: &ConnectOptions) -> ConnectOptions {
        let group = Some(SessionGroup::new(options.replay_bytes));
        ConnectOptions { group, ..self.options(options) }
    }

    /// Begins the session of one slice, which says what the projection is. The others begin with their use.
    /// Errors: no slice can be reached, or one refuses.
    pub(super) async fn connect_slices(
        self: Arc<Self>,
        options: &ConnectOptions,
        memory: &ClientMemory,
    ) -> Result<ClientConnection, ConnectError> {
        let node = memory.session(0).map_err(no_memory)?.node();
        let (options, targets) = (self.slice_options(options), self.slice_targets()?);
        let (first, session) = self.first_session(&targets, &options, (memory, node)).await?;
        let mut sessions = vec![None; targets.len()];
        sessions[first] = Some(session);
        self.with_slices(&targets, &options, (memory, node), sessions)
    }

    /// The session with a slice that is served. Which one is tried first depends on the client, so that the
    /// clients of a site do not all begin at one server.
    async fn first_session(
        &self,
        targets: &[Target],
        options: &ConnectOptions,
        (memory, node): (&ClientMemory, NodeId),
    ) -> Result<(usize, Arc<ClientSession>), ConnectError> {
        // The next one has another home. The successor may have to see first that a home is gone.
        let servers = self.definition.servers.len();
        let (first, step) = (usize::from(self.slices.placement().of_client(node).0), servers - 1);
        let mut failure = None;
        for number in 0..FIRST_TRIES_MAX.max(servers) {
            let index = (first * step + number * step) % targets.len();
            let own = memory.session_of(index, node).map_err(no_memory)?;
            let options = self.options_of(index, options);
            let tried = connect_session(&targets[index], &options, own);
            match dray_rt::timeout(SERVER_PATIENCE, tried).await {
                Ok(Ok(session)) => return Ok((index, session)),
                Ok(Err(error @ ConnectError::Unreachable { .. })) => failure = Some(error),
                Ok(Err(error)) if !error.is_lasting() => {
                    failure = Some(error);
                    dray_rt::sleep(AGAIN_AFTER).await;
                }
                Err(_) => {}
                Ok(Err(error)) => return Err(self.explained(&targets[index], error)),
            }
        }
        Err(failure.unwrap_or_else(|| ConnectError::Unreachable {
            target: joined(targets[..1].iter()),
            error: std::io::Error::from_raw_os_error(libc::ETIMEDOUT),
        }))
    }

    /// Goes on with the sessions that the process before us had begun. None if it had none.
    pub(super) async fn take_over_slices(
        self: Arc<Self>,
        options: &ConnectOptions,
        memory: &ClientMemory,
        (patience, replaceable): (Duration, bool),
    ) -> Result<Option<ClientConnection>, ConnectError> {
        let node = memory.session(0).map_err(no_memory)?.node();
        let (options, targets) = (self.slice_options(options), self.slice_targets()?);
        let tries = targets.iter().enumerate().map(|(index, target)| {
            let options = self.options_of(index, &options);
            let memory = memory.session_of(index, node);
            Box::pin(async move {
                let memory = memory.map_err(no_memory)?;
                take_over_session(target, &options, memory, patience, replaceable).await.transpose()
            }) as dray_core::Fut<'_, super::Reached>
        });
        let reached = dray_rt::join_all(tries.collect()).await;
        let mut sessions = Vec::with_capacity(reached.len());
        for (target, one) in targets.iter().zip(reached) {
            sessions.push(one.map_err(|error| self.explained(target, error))?);
        }
        if sessions.iter().all(Option::is_none) {
            return Ok(None);
        }
        self.with_slices(&targets, &options, (memory, node), sessions).map(Some)
    }

    /// The sessions that there are, and for all other slices such as begin with their use.
    fn with_slices(
        self: Arc<Self>,
        targets: &[Target],
        options: &ConnectOptions,
        (memory, node): (&ClientMemory, NodeId),
        sessions: Vec<Option<Arc<ClientSession>>>,
    ) -> Result<ClientConnection, ConnectError> {
        let info: Option<FsInfo> = sessions.iter().flatten().next().map(|one| one.info().clone());
        let info = info.expect("one session has begun");
        self.found(&info);
        let all = sessions.into_iter().zip(targets).enumerate().map(|(index, (one, target))| {
            if let Some(session) = one {
                return Ok(session);
            }
            let own = memory.session_of(index, node).map_err(no_memory)?;
            Ok(session_with_use(target, &self.options_of(index, options), own, info.clone()))
        });
        let sessions = all.collect::<Result<_, ConnectError>>()?;
        Ok(ClientConnection { sessions, projection: Some(self) })
    }
}
