//! Mounts of a projection with failover, over three servers that agree in etcd. Needs root.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::common::load::{KeptFiles, Load, check_load, load};
use crate::common::{Rig, wait_for};
use dray_testkit::etcd::Etcd;
use serde_json::Value;

/// What nobody may stand still for longer than, whoever dies.
const FAILOVER_MAX: Duration = Duration::from_secs(5);

/// Three servers, the rig of the first one mounts, and etcd.
struct Cluster {
    servers: Vec<Rig>,
    _etcd: Etcd,
}

impl Cluster {
    /// None: etcd is not installed, which has been said.
    fn new(layout: &str) -> Option<Cluster> {
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
        let mut cluster = Cluster { servers, _etcd: etcd };
        (0..3).for_each(|number| cluster.serve(number));
        wait_for("all slices to be in step", || cluster.is_settled());
        Some(cluster)
    }

    fn serve(&mut self, number: usize) {
        let file = self.servers[0].path("projections.toml");
        let log = self.servers[number].path("log");
        self.servers[number].serve_logging(&log, &["--projections", file.to_str().unwrap()]);
    }

    fn mount(&mut self, number: usize, name: &str) -> PathBuf {
        self.servers[number].mount_export("scratch", name, "")
    }

    /// What a server says of each of its slices; nothing, if it is not there.
    fn slices(&self, number: usize) -> Vec<Value> {
        let text = self.servers[number].run(&["status", "--json"]).stdout;
        // A line for each server and mount.
        let all = text.split(|byte| *byte == b'\n');
        let all: Vec<Value> = all.filter_map(|line| serde_json::from_slice(line).ok()).collect();
        let exports = all.iter().filter(|one| one["kind"] == "server");
        let exports =
            exports.flat_map(|one| one["exports"].as_array().cloned().unwrap_or_default());
        let slices = exports.filter_map(|export| export["slices"].as_array().cloned());
        slices.flatten().collect()
    }

    /// The slices that a server serves, in their order.
    fn served(&self, number: usize) -> Vec<String> {
        let mut names: Vec<String> = self
            .slices(number)
            .iter()
            .filter(|slice| slice["is_primary"] == true)
            .filter_map(|slice| Some(slice["name"].as_str()?.rsplit('/').next()?.to_owned()))
            .collect();
        names.sort();
        names
    }

    /// Each server serves what it is the home of, and has a backup that could take over.
    fn is_settled(&self) -> bool {
        (0..3).all(|number| {
            let slices = self.slices(number);
            let is_right = |slice: &Value| {
                slice["is_primary"] == slice["is_home"]
                    && (slice["is_home"] == false || slice["in_step_s"].is_number())
            };
            slices.len() == 4 && slices.iter().all(is_right)
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

/// Waits until each application has gone on, and answers how long the slowest stood still.
fn standstill(load: &Load, cluster: &Cluster, dead: usize) -> Duration {
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

/// A server was stopped, and others have its share. When it goes on it answers nobody.
// proves: P147
#[test]
fn a_server_that_was_stopped_does_not_answer_when_it_goes_on() {
    let Some(mut cluster) = Cluster::new("layout = 'cluster'") else { return };
    let (at, other) = (cluster.mount(0, "at"), cluster.mount(2, "other"));
    let load = load(&at);
    std::thread::sleep(Duration::from_millis(500));
    cluster.servers[1].server().signal(libc::SIGSTOP);
    wait_for("the survivors to serve", || {
        [0, 2].iter().all(|number| cluster.served(*number).len() == 3)
    });
    std::thread::sleep(Duration::from_secs(2)); // its lease is long over
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
    let name = format!("unix://{}", cluster.servers[1].path("socket").display());
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
