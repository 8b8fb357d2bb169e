//! Finds the servers above, and opens an export of theirs.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dray_backends::backend::{
    Backend, BackendResources, BackendSource, Difference, FoundBackend, FsIdentity, NotedIdentity,
    UnavailableReason,
};
use dray_client::{
    ClientConnection, ClientMemory, ConnectError, ConnectOptions, LeaseWish, Target,
};
use dray_core::fnv1a;
use dray_core::{Errno, Error, FsInfo, NodeId, Result};
use dray_rt::{DriverKind, Executor};

use super::callers::CallerPolicy;
use super::connection::{CONNECT_MAX, UpperConnection, may_pass};
use super::fs::ForwardFs;
use crate::key;
use crate::serve::plan::parse_auth;
use crate::serve::state::boot_id;

/// What is kept of changes until it is on media above, as at a mount.
const REPLAY_BYTES: u64 = 64 << 20;

/// An export of other servers, whether they are there or not.
#[derive(Clone, Debug)]
pub struct UpperServers {
    /// The export here.
    pub name: String,
    /// The node of this process in greetings.
    pub node: NodeId,
    /// The target as the administrator wrote it.
    pub dir: PathBuf,
    pub target: Target,
    /// Whether they ask for a key, and where that is; none: as `dray mount` has it.
    pub auth: Option<String>,
    pub callers: CallerPolicy,
    /// What they lease to this server is leased on to its clients.
    pub leases: bool,
}

impl UpperServers {
    fn options(&self) -> std::result::Result<ConnectOptions, String> {
        let auth = self.auth.clone().unwrap_or_else(key::default_auth);
        let key = parse_auth(&auth).map_err(|failure| failure.message)?;
        Ok(ConnectOptions { key, replay_bytes: REPLAY_BYTES, ..ConnectOptions::default() })
    }

    /// Says hello and goodbye. Errors: no server can be reached, or one refuses.
    async fn greet(
        &self,
        options: &ConnectOptions,
        node: NodeId,
    ) -> std::result::Result<Greeted, ConnectError> {
        let memory = ClientMemory::HeapOf(node);
        let greeting = ClientConnection::connect(&self.target, options, &memory, CONNECT_MAX);
        let client = greeting.await?;
        client.goodbye();
        let squashes = client.sessions().iter().any(|session| session.squashes());
        let is_projection = client.projection().is_some();
        Ok(Greeted { info: client.info().clone(), squashes, is_projection })
    }

    /// Greets in our own name, and in the names of the servers that wait for exports of ours. One
    /// of the servers above may be ours, or wait for ours.
    async fn greet_for_all(&self) -> std::result::Result<FsInfo, UnavailableReason> {
        let options = self.options().map_err(UnavailableReason::Wrong)?;
        let first = self.greet(&options, self.node).await;
        if first.as_ref().err().is_none_or(may_pass) {
            for node in super::nodes().waiting_for(&self.name) {
                // What else is wrong the first greeting has said.
                let greeted = self.greet(&options, node).await;
                if let Err(error @ ConnectError::Refused { errno: Errno::ELOOP, .. }) = greeted {
                    return Err(UnavailableReason::Wrong(error.to_string()));
                }
            }
        }
        match first {
            Ok(Greeted { squashes: true, .. }) => {
                Err(UnavailableReason::Wrong(SQUASHED.to_owned()))
            }
            Ok(Greeted { is_projection: true, .. }) if self.leases => {
                Err(UnavailableReason::Wrong(PROJECTION.to_owned()))
            }
            Ok(Greeted { info, .. }) => Ok(info),
            Err(error) if may_pass(&error) => Err(UnavailableReason::Awaited {
                why: format!("{} does not serve it: {error}", self.target),
                expected: self.target.to_string(),
                found: "no answer".to_owned(),
            }),
            Err(error) => Err(UnavailableReason::Wrong(error.to_string())),
        }
    }
}

/// What the servers above have said to a greeting.
struct Greeted {
    info: FsInfo,
    squashes: bool,
    is_projection: bool,
}

/// What to do about leases of several servers.
const PROJECTION: &str = "the target is a projection over several servers: what these lease cannot be leased on; \
    leave `leases` out";

/// What to do about an export that is squashed above.
const SQUASHED: &str = "the server there squashes users, and a server that forwards looks at files as \
    root, on behalf of its clients: export it to this machine with squash=none there (by `allow`, or to \
    those who know its key), and say here whom to squash";

impl BackendSource for UpperServers {
    fn find(
        &self,
        _: Option<NotedIdentity<'_>>,
    ) -> std::result::Result<Box<dyn FoundBackend>, UnavailableReason> {
        let executor = Executor::new(DriverKind::Epoll);
        let mut executor = executor.map_err(|error| {
            UnavailableReason::Wrong(format!("cannot start an executor to look for it: {error}"))
        })?;
        let info = executor.block_on(self.greet_for_all())?;
        let identity = FsIdentity {
            kind: "dray".to_owned(),
            uuid: Some(format!("{:032x}", info.uuid.0)),
            source: self.target.to_string(),
            at: String::new(),
            directory: None,
            in_memory: false,
        };
        Ok(Box::new(FoundUpper { servers: self.clone(), identity }))
    }

    fn died(&self, _: Option<NotedIdentity<'_>>) -> UnavailableReason {
        UnavailableReason::Wrong(format!("{} is waited for, and does not die", self.target))
    }
}

/// An export of other servers that one of them has.
struct FoundUpper {
    servers: UpperServers,
    identity: FsIdentity,
}

impl FoundBackend for FoundUpper {
    fn dir(&self) -> &Path {
        &self.servers.dir
    }

    fn identity(&self) -> Option<&FsIdentity> {
        Some(&self.identity)
    }

    fn difference(&self, noted: NotedIdentity<'_>) -> Option<Difference> {
        let same = noted.identity.uuid == self.identity.uuid;
        (!same).then_some(Difference::FileSystem)
    }

    fn shared_id_key(&self) -> std::result::Result<Option<u128>, String> {
        Err("its files have the ids of the server that it is forwarded to".to_owned())
    }

    fn open(self: Box<Self>, resources: BackendResources) -> Result<Arc<dyn Backend>> {
        let UpperServers { name, target, callers, leases, .. } = &self.servers;
        let failed = |why: String| Error::new(Errno::EIO).because(why);
        let mut options = self.servers.options().map_err(failed)?;
        options.leases = if *leases { LeaseWish::LeasedOn } else { LeaseWish::No };
        let path = memory_path(&resources.state_file, target);
        let memory = ClientMemory::open_files(&path, boot_id()).map_err(|error| {
            failed(format!("cannot use the memory of its session, {}: {error}", path.display()))
        })?;
        let node = memory.session(0).map_err(|error| failed(error.to_string()))?.node();
        super::nodes().add(node, name);
        let connection = UpperConnection::begin(name, target.clone(), options, memory);
        let connection = connection.map_err(|error| failed(error.to_string()))?;
        if *leases && connection.client.projection().is_some() {
            return Err(failed(PROJECTION.to_owned())); // it was none a moment ago
        }
        Ok(Arc::new(ForwardFs::new(connection, *callers, *leases)))
    }
}

/// The memory of the sessions with the servers of `target`. That of another target is removed: nobody
/// goes on with it.
fn memory_path(state_file: &Path, target: &Target) -> PathBuf {
    let name = state_file.file_name().unwrap_or_default().to_string_lossy();
    let begin = format!("{name}+upper-"); // no export has a + in its name
    let own = format!("{begin}{:016x}", fnv1a(target.to_string().as_bytes()));
    let dir = state_file.parent().unwrap_or(Path::new("."));
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let other = entry.file_name().to_string_lossy().into_owned();
        if other.starts_with(&begin) && !other.starts_with(&own) {
            let _ = fs::remove_file(entry.path()); // it only takes space
        }
    }
    dir.join(own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_another_target_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let state_file = dir.path().join("paths-a");
        let [one, other] = ["dray://a/x", "dray://b/x"].map(|text| text.parse().unwrap());
        let first = memory_path(&state_file, &one);
        for path in [&first, &dir.path().join("paths-b+upper-1"), &state_file] {
            fs::write(path, "").unwrap();
        }
        assert_eq!(memory_path(&state_file, &one), first);
        assert!(first.exists());
        assert_ne!(memory_path(&state_file, &other), first);
        assert!(!first.exists() && state_file.exists());
        assert!(dir.path().join("paths-b+upper-1").exists());
    }
}
