//! Makes a session from a target.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use dray_core::FsInfo;
use dray_fabric::{Connect, ConnectFrom, ConnectInTurn};
use dray_rpc::auth::Key;
use dray_rpc::client::{
    ClientOptions, ClientSession, ConnectError, LeaseShare, LeaseWish, SessionGroup, SessionMemory,
    WriteBackOptions,
};

use crate::target::Target;

/// How a client behaves.
#[derive(Clone, Debug, Default)]
pub struct ConnectOptions {
    /// The key, if the server wants one.
    pub key: Option<Key>,
    /// How long a call waits for a server that is away before it fails with `EHOSTDOWN`;
    /// none: for ever.
    pub timeout: Option<Duration>,
    /// What was written and is not known to be on media is kept up to this size. It is sent again
    /// should the server's machine lose power. 0: its loss is only reported.
    pub replay_bytes: u64,
    /// What is open is cached: the server is to tell of changes by others
    /// ([`SessionControl::hear_changes_by`](dray_core::SessionControl::hear_changes_by)).
    pub caches: bool,
    /// The front end does not check who calls, because all callers are one user at the server. A
    /// server where callers are several users is refused.
    pub counts_on_one_user: bool,
    /// Whether names and attributes are to be leased (ADR 0049).
    pub leases: LeaseWish,
    /// The place of the session among those with servers that lease parts of the same files.
    pub lease_share: Option<LeaseShare>,
    /// Fingerprint of the definition of the projection by which files are placed; 0: none is known.
    pub definition: u64,
    /// All sessions of the mount, where there is one for each slice of a projection.
    pub group: Option<Arc<SessionGroup>>,
    /// A directory for what was written under a write lease, and can be written to its file no more (ADR 0053).
    pub aside: Option<PathBuf>,
    /// A log on a local disk for what is kept under write leases (ADR 0058).
    pub write_back: Option<Box<WriteBackOptions>>,
}

/// Begins a session with the server of `target`, served by the calling task's executor.
/// If `memory` is that of a process that died, its session goes on.
pub async fn connect_session(
    target: &Target,
    options: &ConnectOptions,
    memory: SessionMemory,
) -> Result<Arc<ClientSession>, ConnectError> {
    session_over(connector(target, options), &target.export, options, memory).await
}

/// As [`connect_session`], for an `export` of whatever server `connector` leads to, such as one of
/// this process ([`dray_fabric::local`]).
pub async fn session_over(
    connector: Arc<dyn Connect>,
    export: &str,
    options: &ConnectOptions,
    memory: SessionMemory,
) -> Result<Arc<ClientSession>, ConnectError> {
    ClientSession::connect(connector, session_options(export, options), memory).await
}

/// Goes on with the session of a process before us, whether its server can be reached or not;
/// see [`ClientSession::take_over`].
pub async fn take_over_session(
    target: &Target,
    options: &ConnectOptions,
    memory: SessionMemory,
    patience: Duration,
    replaceable: bool,
) -> Option<Result<Arc<ClientSession>, ConnectError>> {
    let (connector, options) =
        (connector(target, options), session_options(&target.export, options));
    ClientSession::take_over(connector, options, memory, patience, replaceable).await
}

/// Begins a session with a server that may be away; see [`ClientSession::begin`].
pub(crate) async fn begin_session(
    target: &Target,
    options: &ConnectOptions,
    memory: SessionMemory,
    info: FsInfo,
    patience: Duration,
) -> Result<Arc<ClientSession>, ConnectError> {
    let (connector, options) =
        (connector(target, options), session_options(&target.export, options));
    ClientSession::begin(connector, options, memory, info, patience).await
}

/// A session that begins with its first call, with whichever of the servers of `target` serves its export
/// then; see [`ClientSession::begin_with_use`].
pub(crate) fn session_with_use(
    target: &Target,
    options: &ConnectOptions,
    memory: SessionMemory,
    info: FsInfo,
) -> Arc<ClientSession> {
    let (connector, options) =
        (connector(target, options), session_options(&target.export, options));
    ClientSession::begin_with_use(connector, options, memory, info)
}

/// A client without a key shows that its machine vouches for it, as far as it may.
fn connector(target: &Target, options: &ConnectOptions) -> Arc<dyn Connect> {
    let from = match options.key {
        Some(_) => ConnectFrom::Any,
        None => ConnectFrom::ReservedPort,
    };
    let first = dray_fabric::connector(&target.address, from);
    if target.is_single() {
        return first;
    }
    let others = target.others.iter().map(|address| dray_fabric::connector(address, from));
    Arc::new(ConnectInTurn::new(std::iter::once(first).chain(others).collect()))
}

fn session_options(export: &str, options: &ConnectOptions) -> ClientOptions {
    ClientOptions {
        export: export.to_owned(),
        key: options.key.clone(),
        timeout: options.timeout,
        host: host_name(),
        replay_bytes: options.replay_bytes,
        split_min_bytes: ClientOptions::SPLIT_MIN_BYTES,
        caches: options.caches,
        counts_on_one_user: options.counts_on_one_user,
        leases: match options.definition == 0 || options.lease_share.is_some() {
            true => options.leases,
            // A server of a projection does not recall what others have leased, unless the definition says so.
            false => LeaseWish::No,
        },
        lease_share: options.lease_share.clone(),
        definition: options.definition,
        group: options.group.clone(),
        aside: options.aside.clone(),
        // The servers of a projection lease no writes.
        write_back: options.write_back.as_deref().filter(|_| options.definition == 0).cloned(),
    }
}

/// As [`connect_session`], but gives up after `wait`.
pub async fn connect_timeout(
    target: &Target,
    options: &ConnectOptions,
    wait: Duration,
    memory: SessionMemory,
) -> Result<Arc<ClientSession>, ConnectError> {
    match dray_rt::timeout(wait, connect_session(target, options, memory)).await {
        Ok(result) => result,
        Err(_) => Err(ConnectError::Unreachable {
            target: target.address.to_string(),
            error: io::Error::from_raw_os_error(libc::ETIMEDOUT),
        }),
    }
}

fn host_name() -> String {
    let mut name = [0u8; 256];
    // SAFETY: the kernel writes at most that many bytes.
    let result = unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len()) };
    let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
    match result {
        0 => String::from_utf8_lossy(&name[..end]).into_owned(),
        _ => "unknown".to_owned(),
    }
}
