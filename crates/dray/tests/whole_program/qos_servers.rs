//! Servers of a projection that keep limits together: real ones, which talk to each other.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::Rig;
use dray_client::{ConnectOptions, RemoteFs, SessionMemory, connect_timeout};
use dray_core::{
    Buf, Context, CreateHow, FileSystem, Identity, Name, NodeId, OpenHow, Pid, RequestId, Uid,
    Write,
};
use dray_layers::placement::parse_definitions;
use dray_rt::{DriverKind, Executor, ExecutorHandle, Scope, sleep};

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };
const USER: u32 = 1000;
const LIMIT_MIB: u64 = 40;
const CALL_BYTES: usize = 256 << 10;
/// Calls of each client at a time.
const DEPTH: u64 = 8;

fn user() -> Context {
    let who =
        Arc::new(Identity { uid: Uid(USER), gid: dray_core::Gid(USER), ..Identity::default() });
    Context::new(NodeId(1), RequestId(0), who, Pid(1))
}

async fn connect(rig: &Rig, definition: u64) -> RemoteFs {
    let socket = rig.path("socket");
    let target = format!("dray+unix://{}?export=scratch", socket.display()).parse().unwrap();
    let options = ConnectOptions { definition, ..ConnectOptions::default() };
    let patience = Duration::from_secs(60);
    let session = connect_timeout(&target, &options, patience, SessionMemory::heap()).await;
    RemoteFs::new(session.unwrap())
}

/// Writes as much as it may until the scope ends. How much it has written.
async fn writes(fs: &RemoteFs, name: &str, scope: &Scope) -> Arc<AtomicU64> {
    let name = Name::new(name.as_bytes()).unwrap();
    let file = fs.create(&user(), fs.info().root, name, NEW).await.unwrap().1;
    let done = Arc::new(AtomicU64::new(0));
    for place in 0..DEPTH {
        let (file, done) = (file.clone(), done.clone());
        scope.spawn_on(&ExecutorHandle::current(), async move {
            let how = Write::at(place * CALL_BYTES as u64);
            while file.write(&user(), how, Buf::from(vec![1; CALL_BYTES])).await.is_ok() {
                done.fetch_add(CALL_BYTES as u64, Ordering::SeqCst);
            }
        });
    }
    done
}

/// MiB a second of each in that time.
async fn rates(of: &[Arc<AtomicU64>; 2], time: Duration) -> [f64; 2] {
    let bytes = || [0, 1].map(|one: usize| of[one].load(Ordering::SeqCst));
    let before = bytes();
    sleep(time).await;
    let after = bytes();
    [0, 1].map(|one| (after[one] - before[one]) as f64 / f64::from(1 << 20) / time.as_secs_f64())
}

/// The test takes some seconds, since a rate is measured.
// proves: P211
#[test]
fn two_servers_of_a_projection_keep_one_limit() {
    if crate::common::skipped() {
        return;
    }
    let (mut one, mut other) = (Rig::new(), Rig::new());
    let socket = |rig: &Rig| format!("'unix://{}'", rig.path("socket").display());
    let (servers, path) = ([socket(&one), socket(&other)].join(", "), one.path("export"));
    fs::set_permissions(&path, Permissions::from_mode(0o777)).unwrap();
    let text = format!(
        "[projection.scratch]\nlayout = 'cluster'\nservers = [{servers}]\npath = '{}'\n\
         export = {{ squash = 'none' }}\n",
        path.display()
    );
    let definition = parse_definitions(&text).unwrap().remove(0).fingerprint();
    for rig in [&mut one, &mut other] {
        let file = rig.path("projections.toml");
        fs::write(&file, &text).unwrap();
        rig.serve(&["--projections", file.to_str().unwrap()]);
        let (user, limit) = (format!("match.user={USER}"), format!("limit={LIMIT_MIB}M"));
        rig.demand(&["qos", "set", "capped", &user, "match.export=scratch", &limit]);
    }
    Executor::new(DriverKind::Epoll).unwrap().block_on(async {
        let clients = [connect(&one, definition).await, connect(&other, definition).await];
        let scopes = [Scope::new(), Scope::new()];
        let done = [
            writes(&clients[0], "a", &scopes[0]).await,
            writes(&clients[1], "b", &scopes[1]).await,
        ];
        sleep(Duration::from_millis(600)).await;
        let both = rates(&done, Duration::from_secs(2)).await;
        let near = |is: f64| (is - LIMIT_MIB as f64).abs() <= 0.05 * LIMIT_MIB as f64;
        assert!(near(both[0] + both[1]), "{both:?} MiB a second, of {LIMIT_MIB} together");
        assert!((both[0] - both[1]).abs() < 4.0, "{both:?}");
        // What one does not use the other one has.
        scopes[1].kill();
        sleep(Duration::from_millis(600)).await;
        let alone = rates(&done, Duration::from_secs(1)).await;
        assert!(near(alone[0] + alone[1]), "{alone:?}");
        scopes[0].kill();
        clients.iter().for_each(|fs| fs.session().goodbye());
        sleep(Duration::from_millis(100)).await; // the goodbyes are sent
    });
}
