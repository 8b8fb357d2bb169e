//! Servers of a projection that keep limits together: real ones, which talk to each other.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::{Rig, wait_for};
use dray_client::{ConnectOptions, RemoteFs, SessionMemory, connect_timeout};
use dray_core::{
    Buf, Context, CreateHow, FileSystem, Identity, Name, NodeId, OpenHow, Pid, RequestId, Uid,
    Write,
};
use dray_layers::placement::parse_definitions;
use dray_rt::{DriverKind, Executor, ExecutorHandle, Scope, sleep};
use serde_json::Value;

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };
const USER: u32 = 1000;
const LIMIT_MIB: u64 = 40;
const CALL_BYTES: usize = 256 << 10;
/// Calls of each client at a time.
const DEPTH: u64 = 8;
/// From the start of `dray qos set` at one server until calls go on at another one.
const SPREAD_MAX: Duration = Duration::from_millis(100);
const FOR_EVER: Duration = Duration::from_secs(60);

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

fn definition_of(name: &str, rigs: &[&Rig]) -> String {
    let socket = |rig: &&Rig| format!("'unix://{}'", rig.path("socket").display());
    let servers: Vec<String> = rigs.iter().map(socket).collect();
    let (servers, path) = (servers.join(", "), rigs[0].path("export"));
    fs::set_permissions(&path, Permissions::from_mode(0o777)).unwrap();
    format!(
        "[projection.{name}]\nlayout = 'cluster'\nservers = [{servers}]\npath = '{}'\n\
         export = {{ squash = 'none' }}\n",
        path.display()
    )
}

/// A projection over the export of the first of these; the definition, and the file that each has.
fn define(rigs: &[&Rig]) -> String {
    let text = definition_of("scratch", rigs);
    rigs.iter().for_each(|rig| fs::write(rig.path("projections.toml"), &text).unwrap());
    text
}

fn serve(rig: &mut Rig) {
    let file = rig.path("projections.toml");
    rig.serve(&["--projections", file.to_str().unwrap()]);
}

/// The test takes some seconds, since a rate is measured.
// proves: P211
#[test]
fn two_servers_of_a_projection_keep_one_limit() {
    if crate::common::skipped() {
        return;
    }
    let (mut one, mut other) = (Rig::new(), Rig::new());
    let text = define(&[&one, &other]);
    let definition = parse_definitions(&text).unwrap().remove(0).fingerprint();
    for rig in [&mut one, &mut other] {
        serve(rig);
        let (user, limit) = (format!("match.user={USER}"), format!("limit={LIMIT_MIB}M"));
        // The first finds the other one away, which has the rule when it is there.
        rig.run(&["qos", "set", "capped", &user, "match.export=scratch", &limit]);
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

/// What `dray qos show` says of the shared export at the server that is asked, and at the other one.
fn shown(rig: &Rig) -> [Value; 2] {
    let output = rig.run(&["qos", "show", "--json"]);
    let shown: Value = serde_json::from_slice(&output.stdout).unwrap();
    let exports = shown["exports"].as_array().unwrap();
    let shared = exports.iter().find(|one| one["name"] == "scratch").unwrap();
    [shared.clone(), shared["others"][0].clone()]
}

fn has_rules(shown: &Value, names: &[&str]) -> bool {
    shown["rules"].as_object().is_some_and(|rules| rules.keys().eq(names))
}

// proves: P246
#[test]
fn a_rule_reaches_all_servers_and_those_that_were_away_when_they_are_back() {
    if crate::common::skipped() {
        return;
    }
    let (mut one, mut other) = (Rig::new(), Rig::new());
    define(&[&one, &other]);
    [&mut one, &mut other].into_iter().for_each(serve);
    let set = |rig: &Rig, name: &str, user: &str| {
        let user = format!("match.user={user}");
        rig.run(&["qos", "set", name, &user, "match.export=scratch", "limit=10M"])
    };
    // The servers may not have met: what is said then is true, and the rule follows.
    wait_for("the other server", || set(&one, "a", "7").status.success());
    assert!(has_rules(&shown(&other)[0], &["a"]), "{:?}", shown(&other));
    assert!(has_rules(&shown(&one)[1], &["a"]), "{:?}", shown(&one));
    assert!(one.demand(&["qos", "show"]).contains("scratch at unix://"));
    // One that is away is named, and has both rules when it is back, though it had none to keep.
    other.end_server(libc::SIGKILL);
    let set_meanwhile = set(&one, "b", "8");
    let said = String::from_utf8_lossy(&set_meanwhile.stderr).into_owned();
    assert_eq!(set_meanwhile.status.code(), Some(3), "{said}");
    assert!(said.contains("follows when it is back") && said.contains("unix://"), "{said}");
    let show = one.run(&["qos", "show"]);
    assert_eq!(show.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&show.stderr).contains("it is away: unix://"));
    serve(&mut other);
    wait_for("both rules", || has_rules(&shown(&other)[0], &["a", "b"]));
    // A removal reaches the others as well.
    wait_for("a removal", || {
        let removed = other.run(&["qos", "remove", "a"]);
        removed.status.success() || has_rules(&shown(&other)[0], &["b"])
    });
    wait_for("its effect", || has_rules(&shown(&one)[0], &["b"]));
}

/// One rule of the user, set at a server; the command goes on meanwhile.
fn begin_to_set(rig: &mut Rig, limit: &str) {
    let (user, limit) = (format!("match.user={USER}"), format!("limit={limit}"));
    rig.start_command(&["qos", "set", "capped", &user, &limit]);
}

/// How long until calls that a limit holds up at the other server have gone on.
async fn spread(one: &mut Rig, done: &AtomicU64) -> Duration {
    // Each call is many seconds of that limit: soon all of them wait.
    begin_to_set(one, "1K");
    let mut seen = None;
    while seen.replace(done.load(Ordering::SeqCst)) != Some(done.load(Ordering::SeqCst)) {
        sleep(Duration::from_millis(500)).await;
    }
    let (begun, held_at) = (Instant::now(), seen.unwrap());
    begin_to_set(one, "4G");
    while done.load(Ordering::SeqCst) == held_at {
        assert!(begun.elapsed() < FOR_EVER, "the rule has not reached the other server");
        sleep(Duration::from_millis(1)).await;
    }
    begun.elapsed()
}

/// A third server that takes connections, and answers nothing, is no reason for the others to wait.
// proves: P253
#[test]
fn a_rule_acts_at_another_server_at_once_though_a_third_one_hangs() {
    if crate::common::skipped() {
        return;
    }
    let (mut one, mut other, mut third) = (Rig::new(), Rig::new(), Rig::new());
    let text = define(&[&one, &other, &third]);
    let definition = parse_definitions(&text).unwrap().remove(0).fingerprint();
    // Another projection of the third server, which rules are for as well.
    let both = definition_of("aside", &[&one, &third]) + &text;
    [&one, &third].iter().for_each(|rig| fs::write(rig.path("projections.toml"), &both).unwrap());
    [&mut one, &mut other, &mut third].into_iter().for_each(serve);
    wait_for("the other servers", || {
        one.run(&["qos", "set", "capped", "match.user=1", "weight=2"]).status.success()
    });
    third.server().signal(libc::SIGSTOP);
    Executor::new(DriverKind::Epoll).unwrap().block_on(async {
        let (client, scope) = (connect(&other, definition).await, Scope::new());
        let done = writes(&client, "a", &scope).await;
        let mut times = Vec::new();
        // The machine may be slow at one time. The code is not slow each time.
        while times.iter().all(|time| *time > SPREAD_MAX) {
            assert!(times.len() < 20, "a rule needs that long to reach another server: {times:?}");
            times.push(spread(&mut one, &done).await);
        }
        scope.kill();
        client.session().goodbye();
        sleep(Duration::from_millis(100)).await; // the goodbye is sent
    });
    third.server().signal(libc::SIGCONT);
}
