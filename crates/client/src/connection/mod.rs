//! What a target leads to: one session with one server, or a session with each server of a projection.

use std::sync::Arc;
use std::time::Duration;

use dray_core::{FileSystem, FsInfo, HoldLeases, NodeId, Stack};
use dray_fabric::Address;
use dray_layers::placement::{
    Definition, FilePlaces, Layout, Placement, Slices, WrongTree, find_wrong_tree, own_disks_stack,
    parse_definitions, placed_stack, probe_target,
};
use dray_rpc::client::{ClientSession, ConnectError, LeaseGroup, LeaseShare, RemoteFs};

mod slices;

use crate::connector::{
    ConnectOptions, begin_session, connect_session, connect_timeout, take_over_session,
};
use crate::memory::ClientMemory;
use crate::target::Target;

/// A server that does not answer within this time is away. The sessions with the others begin without it.
pub(super) const SERVER_PATIENCE: Duration = Duration::from_secs(3);
/// A server that nobody has reached yet is tried once more, at least for so long.
const BEGIN_PATIENCE: Duration = Duration::from_millis(100);

/// The sessions that a client has, and what they are for. Cheap to clone.
#[derive(Clone)]
pub struct ClientConnection {
    /// In the order of the definition, with failover one for each slice; one without a projection, and where a
    /// client uses one server.
    sessions: Vec<Arc<ClientSession>>,
    projection: Option<Arc<ClientProjection>>,
}

/// The projection that a client uses.
pub struct ClientProjection {
    /// As its servers have it.
    pub definition: Definition,
    slices: Slices,
    /// Of all threads: the kernel asks one for a directory and another one for what is in it.
    places: Arc<FilePlaces>,
    /// The sessions, if the servers lease what they own.
    leases: Option<Arc<LeaseGroup>>,
}

impl ClientProjection {
    /// Errors: the text of a server is no definition, or one that this client cannot use.
    fn of(text: &str) -> Result<Arc<ClientProjection>, ConnectError> {
        let wrong = |why: String| ConnectError::Protocol(format!("a server's definition: {why}"));
        let mut definitions = parse_definitions(text).map_err(|errors| {
            wrong(errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))
        })?;
        let definition = definitions.pop().filter(|_| definitions.is_empty());
        let definition = definition.ok_or_else(|| wrong("it is not of one projection".into()))?;
        let slices = Slices::of(Placement::new(&definition));
        let owners = slices.clone();
        let leases = definition.leases;
        let leases = leases.then(|| LeaseGroup::new(move |id| usize::from(owners.home(id).0)));
        Ok(Arc::new(ClientProjection { definition, slices, places: Arc::default(), leases }))
    }

    /// Which slice has what.
    pub fn slices(&self) -> &Slices {
        &self.slices
    }

    /// The export of each server that the client `node` uses, with its position in the definition.
    fn targets(&self, node: NodeId) -> Result<Vec<(usize, Target)>, ConnectError> {
        let target = |(index, server): (usize, &String)| {
            let address: Address = server.parse().map_err(ConnectError::Protocol)?;
            Ok((index, Target::at(address, self.definition.name.clone())))
        };
        let only = match self.definition.layout {
            Layout::LoadBalance => Some(usize::from(self.slices.placement().of_client(node).0)),
            Layout::Cluster | Layout::ClusterStripe | Layout::File | Layout::Stripe => None,
        };
        let all = self.definition.servers.iter().enumerate();
        all.filter(|(index, _)| only.is_none_or(|only| only == *index)).map(target).collect()
    }

    /// The same for the session of one server or slice.
    pub(super) fn options_of(&self, member: usize, options: &ConnectOptions) -> ConnectOptions {
        let share = |group: &Arc<LeaseGroup>| LeaseShare { group: group.clone(), member };
        ConnectOptions { lease_share: self.leases.as_ref().map(share), ..options.clone() }
    }

    /// The servers' file system is known by now.
    pub(super) fn found(&self, info: &FsInfo) {
        self.leases.iter().for_each(|group| group.set_root(info.root));
    }

    pub(super) fn options(&self, options: &ConnectOptions) -> ConnectOptions {
        ConnectOptions { definition: self.definition.fingerprint(), ..options.clone() }
    }
}

impl From<Arc<ClientSession>> for ClientConnection {
    fn from(session: Arc<ClientSession>) -> ClientConnection {
        ClientConnection { sessions: vec![session], projection: None }
    }
}

impl ClientConnection {
    /// Connects to what `target` names, once. `wait` is for the first server that answers. Of a projection
    /// further servers may be away: calls wait for them. Errors: no server can be reached, or one refuses.
    pub async fn connect(
        target: &Target,
        options: &ConnectOptions,
        memory: &ClientMemory,
        wait: Duration,
    ) -> Result<ClientConnection, ConnectError> {
        let mut failure = None;
        for one in target.each() {
            let own = memory.session(0).map_err(no_memory)?;
            match connect_timeout(&one, options, wait, own).await {
                Ok(session) if target.is_single() => return Ok(session.into()),
                Ok(session) => {
                    session.goodbye();
                    return Err(ConnectError::Protocol(format!(
                        "{one} is no projection, and one server serves it: name one server only"
                    )));
                }
                Err(ConnectError::Definition { text }) => {
                    let projection = ClientProjection::of(&text)?;
                    memory.keep_definition(&text).map_err(no_memory)?;
                    return projection.connect(options, memory).await;
                }
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        Err(failure.expect("a target has an address"))
    }

    /// Goes on with the sessions of a process before us, whether their servers can be reached or not; see
    /// [`ClientSession::take_over`]. None if `memory` does not say enough.
    pub async fn take_over(
        target: &Target,
        options: &ConnectOptions,
        memory: &ClientMemory,
        patience: Duration,
        replaceable: bool,
    ) -> Option<Result<ClientConnection, ConnectError>> {
        let text = match memory.definition() {
            Ok(text) => text,
            Err(error) => return Some(Err(no_memory(error))),
        };
        let Some(text) = text else {
            let own = match memory.session(0) {
                Ok(own) => own,
                Err(error) => return Some(Err(no_memory(error))),
            };
            let session = take_over_session(target, options, own, patience, replaceable).await?;
            return Some(session.map(ClientConnection::from));
        };
        let projection = match ClientProjection::of(&text) {
            Ok(projection) => projection,
            Err(error) => return Some(Err(error)),
        };
        projection.take_over(options, memory, (patience, replaceable)).await.transpose()
    }

    /// The first session: the only one without a projection.
    pub fn session(&self) -> &Arc<ClientSession> {
        &self.sessions[0]
    }

    /// Every session, in the order of the definition, with failover one for each slice. Under `loadbalance` it
    /// is one.
    pub fn sessions(&self) -> &[Arc<ClientSession>] {
        &self.sessions
    }

    /// The projection, if it is one.
    pub fn projection(&self) -> Option<&ClientProjection> {
        self.projection.as_deref()
    }

    /// The export; that of every server is the same.
    pub fn info(&self) -> &FsInfo {
        self.session().info()
    }

    /// Whether all callers are one user at every server that this client has met.
    pub fn one_user(&self) -> bool {
        let mut begun = self.sessions.iter().filter(|session| session.has_begun());
        begun.all(|session| session.one_user())
    }

    /// Whether all servers that this client has met lease what it asks for.
    pub fn has_leases(&self) -> bool {
        let mut begun = self.sessions.iter().filter(|session| session.has_begun());
        begun.all(|session| session.has_leases())
    }

    /// Whether all servers that this client has met lease writes to those who ask for that.
    pub fn has_write_leases(&self) -> bool {
        let mut begun = self.sessions.iter().filter(|session| session.has_begun());
        begun.all(|session| session.has_write_leases())
    }

    /// Gives the calling thread channels of its own, as long as there are not too many.
    pub fn attach_here(&self) {
        self.sessions.iter().for_each(ClientSession::attach_here);
    }

    /// The file system with its sessions, for a front end.
    pub fn stack(&self) -> Stack {
        match &self.projection {
            None => RemoteFs::stack(self.session().clone()),
            Some(projection) if projection.definition.layout == Layout::LoadBalance => {
                RemoteFs::stack(self.session().clone())
            }
            Some(projection) => {
                let stacks = self.sessions.iter().cloned().map(RemoteFs::stack).collect();
                let placement = projection.slices.placement().clone();
                match projection.definition.layout.is_shared() {
                    true => {
                        let holders = self.holders(projection);
                        placed_stack(placement, projection.places.clone(), stacks, holders)
                    }
                    false => own_disks_stack(placement, stacks),
                }
            }
        }
    }

    /// The servers that hold what others change of what they have leased.
    fn holders(&self, projection: &ClientProjection) -> Vec<Arc<dyn HoldLeases>> {
        let holder = |session: &Arc<ClientSession>| -> Arc<dyn HoldLeases> {
            Arc::new(RemoteFs::new(session.clone()))
        };
        let sessions = self.sessions.iter().filter(|_| projection.definition.leases);
        sessions.map(holder).collect()
    }

    /// Ends the sessions: the servers give everything back at once.
    pub fn goodbye(&self) {
        self.sessions.iter().for_each(|session| session.goodbye());
    }
}

/// What came of one server: a session, or that it is away.
type Reached = Result<Option<Arc<ClientSession>>, ConnectError>;

impl ClientProjection {
    /// Connects to every server, to all at once. Errors: none can be reached, or one refuses.
    async fn connect(
        self: Arc<Self>,
        options: &ConnectOptions,
        memory: &ClientMemory,
    ) -> Result<ClientConnection, ConnectError> {
        if self.slices.placement().fails_over() {
            return self.connect_slices(options, memory).await;
        }
        let node = memory.session(0).map_err(no_memory)?.node();
        let (options, targets) = (self.options(options), self.targets(node)?);
        let tries = targets.iter().map(|(index, target)| {
            let options = self.options_of(*index, &options);
            let memory = memory.session_of(*index, node);
            Box::pin(async move {
                let memory = memory.map_err(no_memory)?;
                let tried = connect_session(target, &options, memory);
                match dray_rt::timeout(SERVER_PATIENCE, tried).await {
                    Ok(Ok(session)) => Ok(Some(session)),
                    Ok(Err(ConnectError::Unreachable { .. })) | Err(_) => Ok(None),
                    Ok(Err(error)) => Err(error),
                }
            }) as dray_core::Fut<'_, Reached>
        });
        let reached = dray_rt::join_all(tries.collect()).await;
        if !self.definition.layout.is_shared() {
            for ((_, target), one) in targets.iter().zip(&reached) {
                if let Ok(Some(session)) = one {
                    must_open_objects(target, session).await?;
                }
            }
            let all = reached.iter().map(|one| one.as_ref().ok()?.as_ref());
            if let Some(sessions) = all.collect::<Option<Vec<_>>>() {
                must_be_one_tree(&targets, &sessions).await?;
            }
        }
        self.complete(&options, (memory, node), reached).await
    }

    /// None if the process before us had no session with any server.
    async fn take_over(
        self: Arc<Self>,
        options: &ConnectOptions,
        memory: &ClientMemory,
        (patience, replaceable): (Duration, bool),
    ) -> Result<Option<ClientConnection>, ConnectError> {
        if self.slices.placement().fails_over() {
            return self.take_over_slices(options, memory, (patience, replaceable)).await;
        }
        let node = memory.session(0).map_err(no_memory)?.node();
        let (options, targets) = (self.options(options), self.targets(node)?);
        let tries = targets.iter().map(|(index, target)| {
            let options = self.options_of(*index, &options);
            let memory = memory.session_of(*index, node);
            Box::pin(async move {
                let memory = memory.map_err(no_memory)?;
                take_over_session(target, &options, memory, patience, replaceable).await.transpose()
            }) as dray_core::Fut<'_, Reached>
        });
        let reached = dray_rt::join_all(tries.collect()).await;
        if reached.iter().all(|one| matches!(one, Ok(None))) {
            return Ok(None);
        }
        self.complete(&options, (memory, node), reached).await.map(Some)
    }

    /// What a server of the projection has against this client.
    pub(super) fn explained(&self, target: &Target, error: ConnectError) -> ConnectError {
        let ConnectError::Definition { text } = error else { return error };
        let other = ClientProjection::of(&text).map_or(0, |one| one.definition.fingerprint());
        ConnectError::Protocol(format!(
            "{target} has another definition of the projection ({other:016x}) than the first server \
             ({:016x}): give all servers the same file, and restart them",
            self.definition.fingerprint()
        ))
    }

    /// Begins the sessions with the servers that are away. Errors: one refuses, none is there, or their
    /// exports are not the same.
    async fn complete(
        self: Arc<Self>,
        options: &ConnectOptions,
        (memory, node): (&ClientMemory, NodeId),
        reached: Vec<Reached>,
    ) -> Result<ClientConnection, ConnectError> {
        let targets = self.targets(node)?;
        let mut sessions = Vec::with_capacity(reached.len());
        for ((_, target), one) in targets.iter().zip(reached) {
            sessions.push(one.map_err(|error| self.explained(target, error))?);
        }
        if !self.definition.layout.is_shared() {
            return self.with_own_disks(&targets, sessions);
        }
        let info = sessions.iter().flatten().next().map(|session| session.info().clone());
        let info = info.ok_or_else(|| ConnectError::Unreachable {
            target: joined(targets.iter().map(|(_, target)| target)),
            error: std::io::Error::from_raw_os_error(libc::EHOSTUNREACH),
        })?;
        self.found(&info);
        for ((index, target), session) in targets.iter().zip(&mut sessions) {
            match session {
                Some(session) => must_be_same(target, &info, session.info())?,
                None => {
                    let memory = memory.session_of(*index, node).map_err(no_memory)?;
                    log::warn!("{target} does not answer: calls wait until it does");
                    let own = self.options_of(*index, options);
                    let begun =
                        begin_session(target, &own, memory, info.clone(), BEGIN_PATIENCE).await;
                    *session = Some(begun.map_err(|error| self.explained(target, error))?);
                }
            }
        }
        let sessions = sessions.into_iter().flatten().collect();
        Ok(ClientConnection { sessions, projection: Some(self) })
    }
}

impl ClientProjection {
    /// Each server has files of its own. What they are is known from the server alone, so that none may be
    /// away now.
    fn with_own_disks(
        self: Arc<Self>,
        targets: &[(usize, Target)],
        sessions: Vec<Option<Arc<ClientSession>>>,
    ) -> Result<ClientConnection, ConnectError> {
        if let Some(((_, target), _)) = targets.iter().zip(&sessions).find(|(_, one)| one.is_none())
        {
            return Err(ConnectError::Unreachable {
                target: target.to_string(),
                error: std::io::Error::from_raw_os_error(libc::EHOSTUNREACH),
            });
        }
        let sessions = sessions.into_iter().flatten().collect();
        Ok(ClientConnection { sessions, projection: Some(self) })
    }
}

/// A client that may speak for one user only has no way to the data of files, which belong to none of them.
async fn must_open_objects(
    target: &Target,
    session: &Arc<ClientSession>,
) -> Result<(), ConnectError> {
    let probed = probe_target(&RemoteFs::new(session.clone())).await;
    probed.map_err(|error| {
        ConnectError::Protocol(format!(
            "{target} does not let this client open the data of files ({error}): a projection over servers \
             with their own disks takes a client that speaks for all users, as root with the key does"
        ))
    })
}

/// The holes of an empty disk, or of one of another tree, would be read as zeros.
async fn must_be_one_tree(
    targets: &[(usize, Target)],
    sessions: &[&Arc<ClientSession>],
) -> Result<(), ConnectError> {
    let servers: Vec<RemoteFs> =
        sessions.iter().map(|session| RemoteFs::new(Arc::clone(session))).collect();
    let servers: Vec<&dyn FileSystem> = servers.iter().map(|fs| fs as &dyn FileSystem).collect();
    let wrong = find_wrong_tree(&servers).await.map_err(|error| {
        ConnectError::Protocol(format!(
            "cannot compare the disks of {}: {error}",
            joined(targets.iter().map(|(_, target)| target))
        ))
    })?;
    let Some((at, why)) = wrong else { return Ok(()) };
    let target = &targets[usize::from(at.0)].1;
    Err(ConnectError::Protocol(match why {
        WrongTree::Other => format!(
            "the disk of {target} belongs to another tree than that of the first server: mount the right \
             disk at its server"
        ),
        WrongTree::Empty => format!(
            "the disk of {target} is empty, and the projection has used another one there: mount the right \
             disk at its server; if that is lost for good, remove `objects/tree.{}` from the disk of the \
             first server",
            at.0 + 1
        ),
    }))
}

/// Two servers that serve different trees do not serve one projection.
fn must_be_same(target: &Target, first: &FsInfo, info: &FsInfo) -> Result<(), ConnectError> {
    if (first.uuid, first.root) == (info.uuid, info.root) {
        return Ok(());
    }
    Err(ConnectError::Protocol(format!(
        "{target} serves another directory than the first server of the projection (its root is {}, \
         there it is {}): is the shared file system mounted at both?",
        info.root, first.root
    )))
}

pub(super) fn joined<'a>(targets: impl Iterator<Item = &'a Target>) -> String {
    targets.map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

pub(super) fn no_memory(error: std::io::Error) -> ConnectError {
    ConnectError::Protocol(format!("cannot use the memory of the session: {error}"))
}

#[cfg(test)]
mod tests {
    use dray_rpc::client::SessionMemory;
    use dray_rt::{DriverKind, Executor};

    use super::*;

    /// A daemon died when it had the definition and no session yet. Its successor ended the mount, as if no
    /// server could ever be reached.
    #[test]
    fn a_definition_without_a_session_is_nothing_to_take_over() {
        let memory = SessionMemory::create_memfd().unwrap();
        let memory = ClientMemory::Held(memory.fd().unwrap().try_clone_to_owned().unwrap());
        let text =
            "[projection.x]\nlayout = 'cluster'\nservers = ['unix:///nothing/there']\npath = '/'";
        memory.keep_definition(text).unwrap();
        let target: Target = "dray+unix:///nothing/there?export=x".parse().unwrap();
        let options = ConnectOptions::default();
        let (patience, replaceable) = (Duration::from_millis(10), false);
        let taken = Executor::new(DriverKind::Epoll).unwrap().block_on(
            ClientConnection::take_over(&target, &options, &memory, patience, replaceable),
        );
        assert!(taken.is_none());
    }
}
