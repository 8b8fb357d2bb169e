//! Mounts of a projection with failover, over three servers that agree in etcd. Needs root.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::common::load::{KeptFiles, Load, check_load, load, lock};
use crate::common::{LEAVE_OTHERS_MOUNTS, Rig, wait_for};
use dray_testkit::etcd::Etcd;
use serde_json::Value;

/// The longest pause of an application when any process dies.
pub const FAILOVER_MAX: Duration = Duration::from_secs(5);

/// A lease, and what etcd and the survivors need behind it.
const TAKEOVER_MAX: Duration = Duration::from_secs(4);

/// Three servers, the rig of the first one mounts, and etcd.
pub struct Cluster {
    pub servers: Vec<Rig>,
    /// Where each server has the file system; empty: all at one place.
    below: Vec<PathBuf>,
    _etcd: Etcd,
}

impl Cluster {
    /// None: etcd is not installed, which has been said.
    pub fn new(layout: &str) -> Option<Cluster> {
        Cluster::over(layout, &[])
    }

    /// Each server has the file system by a directory of its own, if these are given.
    pub fn over(layout: &str, below: &[PathBuf]) -> Option<Cluster> {
        let servers: Vec<Rig> = (0..3).map(|_| Rig::new()).collect();
        let dir = servers[0].path("etcd");
        fs::create_dir(&dir).unwrap();
        let etcd = Etcd::start(&dir)?;
        let names: Vec<String> = servers
            .iter()
            .map(|rig| format!("'unix://{}'", rig.path("socket").display()))
            .collect();
        let path = servers[0].path("export");
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        let text = format!(
            "[cluster]\netcd = ['{}']\n[projection.scratch]\nservers = [{}]\npath = '{}'\n{layout}\n\
             export = {{ squash = 'none' }}\n",
            etcd.url(),
            names.join(", "),
            path.display()
        );
        fs::write(servers[0].path("projections.toml"), text).unwrap();
        let mut cluster = Cluster { servers, below: below.to_vec(), _etcd: etcd };
        (0..3).for_each(|number| cluster.serve(number));
        wait_for("all slices to be in step", || cluster.is_settled());
        Some(cluster)
    }

    pub fn serve(&mut self, number: usize) {
        let file = self.servers[0].path("projections.toml");
        let at = self.servers[0].path("export");
        let log = self.servers[number].path("log");
        let args = ["--projections", file.to_str().unwrap()];
        match self.below.get(number) {
            Some(below) => self.servers[number].serve_at((below, &at), &log, &args),
            None => self.servers[number].serve_logging(&log, &args),
        }
    }

    fn mount(&mut self, number: usize, name: &str) -> PathBuf {
        self.mount_with(number, name, "")
    }

    pub fn mount_with(&mut self, number: usize, name: &str, options: &str) -> PathBuf {
        self.servers[number].mount_export("scratch", name, options)
    }

    /// The address of a server, as the definition has it.
    fn name(&self, number: usize) -> String {
        format!("unix://{}", self.servers[number].path("socket").display())
    }

    /// What a server says of all slices; null, if it is not there.
    fn failover(&self, number: usize) -> Value {
        let text = self.servers[number].run(&["status", "--json"]).stdout;
        // A line for each server and mount.
        let all = text.split(|byte| *byte == b'\n');
        let mut all = all.filter_map(|line| serde_json::from_slice::<Value>(line).ok());
        let server = all.find(|one| one["kind"] == "server").unwrap_or_default();
        let exports = server["exports"].as_array().cloned().unwrap_or_default();
        let failover = exports.into_iter().map(|export| export["failover"].clone());
        failover.into_iter().find(Value::is_object).unwrap_or_default()
    }

    /// The numbers of a server's sessions.
    fn sessions(&self, number: usize) -> Vec<String> {
        let text = self.servers[number].demand(&["status", "--json"]);
        let all = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let server = all.into_iter().find(|one| one["kind"] == "server").unwrap();
        let clients = server["clients"].as_array().cloned().unwrap_or_default();
        clients.iter().map(|one| one["session"].as_str().unwrap().to_owned()).collect()
    }

    /// The slices that a server answers calls for, in their order.
    pub fn served(&self, number: usize) -> Vec<String> {
        let failover = self.failover(number);
        let slices = failover["slices"].as_array().cloned().unwrap_or_default();
        let here = slices.iter().filter(|slice| slice["answered_here"] == true);
        let mut names: Vec<String> = here.map(|slice| short(slice).to_owned()).collect();
        names.sort();
        names
    }

    /// Each server serves what it is the home of, and has a backup that could take over.
    pub fn is_settled(&self) -> bool {
        (0..3).all(|number| {
            let failover = self.failover(number);
            let slices = failover["slices"].as_array().cloned().unwrap_or_default();
            let is_right = |slice: &Value| {
                let is_home = short(slice).starts_with(&number.to_string());
                slice["in_step"] == true
                    && slice["slice_recovering"] == false
                    && (slice["answered_here"] == true) == is_home
            };
            slices.len() == 6 && slices.iter().all(is_right)
        })
    }

    /// What the servers have said, for a test that fails.
    fn logs(&self) -> String {
        let log = |rig: &Rig| fs::read_to_string(rig.path("log")).unwrap_or_default();
        self.servers.iter().map(log).collect::<Vec<_>>().join("\n----\n")
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.logs());
        }
    }
}

/// A slice without the name of its projection.
fn short(slice: &Value) -> &str {
    slice["slice"].as_str().and_then(|name| name.rsplit('/').next()).unwrap_or_default()
}

/// Waits until each application has gone on, and answers how long the slowest stood still.
pub fn standstill(load: &Load, cluster: &Cluster, dead: usize) -> Duration {
    let survivors: Vec<usize> = (0..3).filter(|number| *number != dead).collect();
    let begun = Instant::now();
    wait_for("the survivors to serve", || {
        survivors.iter().all(|number| cluster.served(*number).len() == 3)
    });
    let taken_over = begun.elapsed();
    std::thread::sleep(Duration::from_secs(1)); // who goes on last is seen, too
    let longest = load.take_longest();
    println!(
        "failover_s {:.3}, all slices served after {:.3} s",
        longest.as_secs_f64(),
        taken_over.as_secs_f64()
    );
    longest
}

// proves: P147, P148
#[test]
fn a_server_that_dies_is_replaced_within_five_seconds_and_gets_its_share_back() {
    let Some(mut cluster) = Cluster::new("layout = 'cluster'") else { return };
    let (at, other) = (cluster.mount(0, "at"), cluster.mount(2, "other"));
    let kept = KeptFiles::new(&at);
    let load = load(&at);
    std::thread::sleep(Duration::from_millis(500));
    load.take_longest();
    cluster.servers[1].end_server(libc::SIGKILL);
    let longest = standstill(&load, &cluster, 1);
    assert!(longest < FAILOVER_MAX, "an application stood still for {longest:?}");
    // Half of the share is at each survivor, and nothing else has moved.
    assert_eq!(cluster.served(0), ["0.1", "0.2", "1.0"]);
    assert_eq!(cluster.served(2), ["1.2", "2.0", "2.1"]);
    check_spread(&cluster, &at);
    cluster.serve(1);
    wait_for("the share to be back", || cluster.is_settled());
    std::thread::sleep(Duration::from_millis(500));
    let longest = load.take_longest();
    println!("giving back {:.3} s", longest.as_secs_f64());
    assert!(longest < FAILOVER_MAX, "an application stood still for {longest:?}");
    let rounds = load.end();
    check_load(&other, &rounds);
    kept.check(&at);
}

/// A mount says of each server which slices it serves.
fn check_spread(cluster: &Cluster, at: &Path) {
    let text = cluster.servers[0].demand(&["status", at.to_str().unwrap(), "--json"]);
    let status: Value = serde_json::from_str(&text).unwrap();
    let servers = status["projection"]["servers"].as_array().unwrap();
    let slices_of = |number: usize| servers[number]["slices"].as_array().unwrap().len();
    assert_eq!(slices_of(1), 0, "{}", status["projection"]);
}

/// A server is stopped: no connection to it breaks. Its clients go to the others, which have its share. When
/// it goes on it answers nobody.
// proves: P147, P203
#[test]
fn clients_leave_a_server_that_is_stopped_and_it_does_not_answer_when_it_goes_on() {
    let Some(mut cluster) = Cluster::new("layout = 'cluster'") else { return };
    let (at, other) = (cluster.mount(0, "at"), cluster.mount(2, "other"));
    let load = load(&at);
    std::thread::sleep(Duration::from_millis(500));
    load.take_longest();
    cluster.servers[1].server().signal(libc::SIGSTOP);
    wait_for("the survivors to serve", || {
        [0, 2].iter().all(|number| cluster.served(*number).len() == 3)
    });
    std::thread::sleep(FAILOVER_MAX);
    // The applications do all in turn: each of them has gone on since the takeover.
    let (steps, relaxed) = (load.steps.clone(), std::sync::atomic::Ordering::Relaxed);
    let before = steps.load(relaxed);
    wait_for("the applications", || steps.load(relaxed) > before + 20);
    let longest = load.take_longest();
    assert!(longest < FAILOVER_MAX + TAKEOVER_MAX, "an application stood still for {longest:?}");
    cluster.servers[1].server().signal(libc::SIGCONT);
    wait_for("the share to be back", || cluster.is_settled());
    let rounds = load.end();
    check_load(&other, &rounds);
}

// proves: P145
#[test]
fn a_server_that_is_drained_serves_nothing_and_no_application_notices() {
    let Some(mut cluster) = Cluster::new("layout = 'cluster'") else { return };
    let (at, other) = (cluster.mount(0, "at"), cluster.mount(2, "other"));
    let load = load(&at);
    let name = cluster.name(1);
    // Any server of the projection can be asked.
    let said = cluster.servers[0].demand(&["drain", &name]);
    assert!(said.contains("drained"), "{said}");
    assert_eq!(cluster.served(1), [""; 0]);
    // Nobody could take over what these two share with the drained one.
    let refused = cluster.servers[2].run(&["drain"]);
    let why = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && why.contains("scratch/2.1"), "{why}");
    // Longer than a server that is not drained waits for its share.
    std::thread::sleep(Duration::from_secs(4));
    assert_eq!(cluster.served(1), [""; 0]);
    cluster.servers[1].demand(&["drain", "--undo"]);
    wait_for("the share to be back", || cluster.is_settled());
    let rounds = load.end();
    check_load(&other, &rounds);
}

/// Nothing is under way while a projection is quiesced, whichever process dies meanwhile. Then everything goes on.
// proves: P202
#[test]
fn a_projection_that_is_quiesced_rests_until_it_is_resumed() {
    let Some(mut cluster) = Cluster::new("layout = 'cluster'") else { return };
    let (at, other) = (cluster.mount(0, "at"), cluster.mount(2, "other"));
    let kept = KeptFiles::new(&at);
    let load = load(&at);
    std::thread::sleep(Duration::from_millis(300));
    let said = cluster.servers[1].demand(&["quiesce", "scratch"]);
    assert!(said.contains("no call is under way"), "{said}");
    let before = tree(&cluster.servers[0].path("export"));
    assert!((0..3).all(|number| cluster.served(number).is_empty()));
    let refused = cluster.servers[2].run(&["drain"]);
    let why = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && why.contains("it is quiesced"), "{why}");
    let shown = cluster.servers[2].demand(&["status"]);
    assert!(shown.contains("QUIESCED at"), "{shown}");
    // Who takes over, and who comes back, lets nobody in.
    cluster.servers[1].end_server(libc::SIGKILL);
    wait_for("the others to see that", || {
        let slices = cluster.failover(0)["slices"].as_array().cloned().unwrap_or_default();
        !slices.iter().any(|slice| slice["served_by"] == cluster.name(1).as_str())
    });
    cluster.serve(1);
    let said = cluster.servers[0].demand(&["quiesce", "scratch"]);
    assert!(said.contains("no call is under way"), "{said}");
    assert!((0..3).all(|number| cluster.served(number).is_empty()));
    assert_eq!(before, tree(&cluster.servers[0].path("export")));
    load.take_longest();
    cluster.servers[2].demand(&["quiesce", "scratch", "--undo"]);
    wait_for("the shares to be back", || cluster.is_settled());
    let rounds = load.end();
    check_load(&other, &rounds);
    kept.check(&at);
    let refused = cluster.servers[0].run(&["quiesce", "none"]);
    let why = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && why.contains("with failover that has this name"), "{why}");
}

/// All names below a directory, with sizes and times.
fn tree(dir: &Path) -> Vec<(PathBuf, u64, std::time::SystemTime)> {
    let mut found = Vec::new();
    let mut dirs = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).unwrap().flatten() {
            let about = entry.metadata().unwrap();
            if entry.file_name() == ".dray-removed" {
                continue; // what goes on there is no call
            }
            if about.is_dir() {
                dirs.push(entry.path());
            }
            found.push((entry.path(), about.len(), about.modified().unwrap()));
        }
    }
    found.sort();
    found
}

/// A call that takes long is no reason to leave its server, which is there.
fn wait_long_for_a_lock(cluster: &Cluster, at: &Path, other: &Path) {
    let connected = || -> u64 {
        let text = cluster.servers[0].demand(&["status", at.to_str().unwrap(), "--json"]);
        let status: Value = serde_json::from_str(&text).unwrap();
        let servers = status["projection"]["servers"].as_array().unwrap();
        servers.iter().map(|server| server["reconnections"].as_u64().unwrap()).sum()
    };
    let before = connected();
    let open = |at: &Path| File::options().read(true).write(true).open(at.join("0")).unwrap();
    let (holder, waiter) = (open(other), open(at));
    lock(&holder, libc::F_WRLCK, libc::F_OFD_SETLK).unwrap();
    let waiting = std::thread::spawn(move || lock(&waiter, libc::F_WRLCK, libc::F_OFD_SETLKW));
    std::thread::sleep(Duration::from_secs(5)); // it is probed twice
    assert!(!waiting.is_finished());
    assert_eq!(connected(), before);
    lock(&holder, libc::F_UNLCK, libc::F_OFD_SETLK).unwrap();
    waiting.join().unwrap().unwrap();
}

/// A mount has a session for each slice at several servers. One that an administrator ends is the end of all.
// proves: P203, P204
#[test]
fn an_eviction_is_of_the_whole_mount() {
    let Some(mut cluster) = Cluster::new("layout = 'cluster-stripe'\nstripe = '64K'") else {
        return;
    };
    let (at, other) = (cluster.mount(0, "at"), cluster.mount(2, "other"));
    let files: Vec<PathBuf> = (0..30).map(|number| at.join(number.to_string())).collect();
    let content = vec![7; 300_000];
    files.iter().for_each(|file| fs::write(file, &content).unwrap());
    let before: Vec<usize> = (0..3).map(|number| cluster.sessions(number).len()).collect();
    assert!(before.iter().all(|sessions| *sessions > 1), "{before:?}");
    assert_eq!(fs::read(other.join("0")).unwrap(), content);
    wait_long_for_a_lock(&cluster, &at, &other);
    // Only one of the two mounts: they have nothing in common but the host.
    let ours = cluster.sessions(1)[0].clone();
    cluster.servers[1].demand(&["evict", &ours]);
    let works = |at: &Path| fs::write(at.join("new"), b"x");
    let ended = |at: &Path| {
        let ended = |error: std::io::Error| error.raw_os_error() == Some(libc::ESHUTDOWN);
        let file = |number: u32| fs::metadata(at.join(number.to_string())).is_err_and(ended);
        works(at).is_err() && (0..30).all(file)
    };
    wait_for("the end of one mount", || ended(&at) || ended(&other));
    let goes_on = if ended(&at) { &other } else { &at };
    works(goes_on).unwrap();
    assert_eq!(fs::read(goes_on.join("0")).unwrap(), content);
    assert!((0..30).all(|number| fs::metadata(goes_on.join(number.to_string())).is_ok()));
}

/// Namespace `FAR` has one of three servers, over TCP with a key. Everything else is at the other end of its
/// link. The shell's own directory is `$DIR`.
const FAR_SERVER: &str = r#"
    ip link set lo up
    unshare --net sleep 300 & FAR=$!
    PIDS="$FAR"
    trap 'umount -l "$AT" || true; kill $PIDS || true' EXIT
    until [ "$(readlink /proc/$FAR/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
    ip link add far type veth peer name near netns $FAR
    ip addr add 10.78.1.1/24 dev far
    ip link set far up
    FAR=--net=/proc/$FAR/ns/net
    nsenter $FAR sh -euc "ip addr add 10.78.1.2/24 dev near; ip link set near up; ip link set lo up"
    E=http://10.78.1.1
    etcd --data-dir "$DIR/etcd" --listen-client-urls $E:2379 --advertise-client-urls $E:2379 \
        --listen-peer-urls $E:2380 --initial-advertise-peer-urls $E:2380 --name e \
        --initial-cluster e=$E:2380 >"$DIR/etcd.log" 2>&1 & PIDS="$PIDS $!"
    "$DRAY" key "$DIR/key"
    cat >"$DIR/p.toml" <<TOML
[cluster]
etcd = ["$E"]
[projection.scratch]
layout = "cluster-stripe"
stripe = "64K"
servers = ["tcp://10.78.1.1:7441", "tcp://10.78.1.2:7442", "tcp://10.78.1.1:7443"]
path = "$DIR/export"
export = { squash = "none" }
TOML
    serve() {
        mkdir -p "$DIR/s$1"
        $2 "$DRAY" serve --projections "$DIR/p.toml" --server "tcp://$3" --listen "tcp://$3" \
            --auth "psk:$DIR/key" --state "$DIR/s$1" >>"$DIR/s$1/log" 2>&1 & PIDS="$PIDS $!"
    }
    serve 0 "" 10.78.1.1:7441
    serve 1 "nsenter $FAR" 10.78.1.2:7442
    serve 2 "" 10.78.1.1:7443
    settled() {
        "$DRAY" status --json | python3 -c '
import json, sys
servers = [json.loads(line) for line in sys.stdin]
servers = [one["exports"][0]["failover"] for one in servers if one["kind"] == "server"]
slices = [one["slices"] for one in servers if one]
ok = len(slices) == 3 and all(len(each) == 6 and all(s["in_step"] for s in each) for each in slices)
sys.exit(not ok)'
    }
    until settled; do sleep 0.2; done
    mkdir -p "$AT"
"#;

/// A machine loses its power, or its network: nothing says that its connections are over.
// proves: P203
#[test]
fn clients_leave_a_server_whose_machine_is_silent() {
    if !has_etcd() {
        return;
    }
    let rig = Rig::new();
    let script = r#"
        "$DRAY" mount dray://10.78.1.1:7441/scratch "$AT" -o "auth=psk:$DIR/key"
        for file in $(seq 20); do head -c 300000 /dev/zero >"$AT/$file"; done
        ! "$DRAY" mount dray://10.78.1.1:7441/scratch "$AT" -o auth=none
        nsenter $FAR ip link set near down

        BEGUN=$(date +%s)
        for file in $(seq 20); do echo more >>"$AT/$file"; done
        echo "stood still for $(($(date +%s) - BEGUN)) s"
        test $(($(date +%s) - BEGUN)) -le 10
        for file in $(seq 20); do test "$(stat -c %s "$AT/$file")" = 300005; done
        test "$(cat "$DIR"/export/1 | wc -c)" = 300005
        "$DRAY" umount "$AT"
    "#;
    let output = std::process::Command::new("unshare")
        .args(["--net", "--mount", "timeout", "120", "bash", "-eux", "-c"])
        .arg(format!("{LEAVE_OTHERS_MOUNTS}{FAR_SERVER}{script}"))
        .env("DRAY", env!("CARGO_BIN_EXE_dray"))
        .env("DIR", rig.path("").to_str().unwrap().trim_end_matches('/'))
        .env("AT", rig.path("at"))
        .env("DRAY_RUN_DIR", rig.path("run"))
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}: {said}{errors}", output.status);
    println!("{said}");
}

/// Whether etcd is installed; else that has been said.
fn has_etcd() -> bool {
    let dir = tempfile::tempdir().unwrap();
    Etcd::start(dir.path()).is_some()
}
