//! Clients with a session at each server or slice.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dray_core::{
    Context, FileId, FileSystem, FsInfo, HoldLeases, Identity, Pid, RequestId, SessionControl,
};
use dray_fabric::Connect;
use dray_layers::placement::{Placement, Slices, placed_stack};
use dray_rpc::client::{
    ClientOptions, ClientSession, LeaseGroup, LeaseShare, LeaseWish, RemoteFs, SessionMemory,
};
use dray_rt::sleep;

use super::pick;

/// A client with a session at each server, or with each slice.
#[derive(Clone)]
pub struct Client {
    pub number: usize,
    pub fs: Arc<dyn FileSystem>,
    sessions: Vec<RemoteFs>,
    pub requests: Arc<AtomicU64>,
}

/// How a client mounts.
pub struct Mount<'a> {
    pub number: usize,
    pub placement: &'a Placement,
    pub info: &'a FsInfo,
    /// How long clients believe what is leased.
    pub term: Duration,
    /// The export of each slice, and the way there.
    pub ways: Vec<(String, Arc<dyn Connect>)>,
    /// The client believes the owner of a file alone.
    pub believes_owner: bool,
}

impl Client {
    pub async fn mount(mount: Mount<'_>) -> Client {
        let Mount { number, placement, info, term, ways, believes_owner } = mount;
        let (node, slices) = (SessionMemory::heap().node(), Slices::of(placement.clone()));
        let count = slices.count();
        let owner = move |id: FileId| match believes_owner {
            true => count, // nobody: each session counts on itself
            false => usize::from(slices.home(id).0),
        };
        let group = LeaseGroup::new(owner);
        group.set_root(info.root);
        let mut sessions = Vec::new();
        for (member, (export, connector)) in ways.into_iter().enumerate() {
            let memory = SessionMemory::heap();
            memory.set_node(node);
            let share = LeaseShare { group: group.clone(), member };
            let options = options((number, export), share);
            let session = match placement.fails_over() {
                true => ClientSession::begin_with_use(connector, options, memory, info.clone()),
                false => {
                    let session = ClientSession::connect(connector, options, memory).await;
                    let session = session.unwrap();
                    session.attach_another();
                    session
                }
            };
            sessions.push(RemoteFs::new(session));
        }
        sessions.iter().for_each(|session| hear_recalls(session, term));
        let stacks = sessions.iter().map(|remote| RemoteFs::stack(remote.session().clone()));
        let holders = sessions.iter().map(|remote| Arc::new(remote.clone()) as Arc<dyn HoldLeases>);
        let (stacks, holders) = (stacks.collect(), holders.collect());
        let fs = placed_stack(placement.clone(), Arc::default(), stacks, holders).fs;
        Client { number, fs, sessions, requests: Arc::new(AtomicU64::new(1)) }
    }

    pub fn cx(&self) -> Context {
        let request = RequestId(self.requests.fetch_add(1, Ordering::Relaxed));
        let node = self.sessions[0].session().node();
        Context::new(node, request, Identity::system(), Pid(self.number as u32 + 1))
    }

    /// Calls that leases have spared.
    pub fn spared(&self) -> u64 {
        let hits = |remote: &RemoteFs| remote.session().status().leases.map_or(0, |one| one.hits);
        self.sessions.iter().map(hits).sum()
    }
}

fn options((number, export): (usize, String), share: LeaseShare) -> ClientOptions {
    ClientOptions {
        export,
        key: None,
        timeout: None,
        host: format!("client{number}"),
        replay_bytes: 1 << 20,
        split_min_bytes: ClientOptions::SPLIT_MIN_BYTES,
        caches: false,
        counts_on_one_user: false,
        leases: LeaseWish::Yes { callers_are_checked: true, keeps_writes: false },
        lease_share: Some(share),
        definition: 1,
        group: None,
        aside: None,
        write_back: None,
    }
}

/// What is asked back is given back at once, or late, or never.
fn hear_recalls(session: &RemoteFs, term: Duration) {
    session.hear_recalls_by(Arc::new(move |_, done| {
        let late = match pick(48) {
            0 => term * 3,
            1..8 => Duration::from_micros(pick(30_000)),
            _ => return drop(done),
        };
        dray_rt::spawn(async move {
            sleep(late).await;
            drop(done);
        });
    }));
}
