//! Leases of a projection with failover, while a server dies and comes back. Needs root.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::load::{KeptFiles, check_load, load};
use crate::common::wait_for;
use crate::failover::{Cluster, FAILOVER_MAX, standstill};

/// Directories: with so many some are in each slice.
const DIRS: usize = 12;
/// Round trips of a look at what is leased: others on the machine look at mount points.
const LOOKING_ROUND_TRIPS_MAX: u64 = 8;
/// Servers that had clients lease nothing for 30 s. A look each second costs the machine little meanwhile.
const LEASED_AGAIN_WITHIN: Duration = Duration::from_secs(90);
const BETWEEN_LOOKS: Duration = Duration::from_secs(1);

fn dir(at: &Path, number: usize) -> PathBuf {
    at.join(format!("dir{number}"))
}

/// What one mount changes the other one sees at once: a name that another file gets, its size, and a name that goes.
fn changes_seen(
    name: &'static str,
    changer: PathBuf,
    looker: PathBuf,
) -> impl FnMut(u64) -> io::Result<()> {
    move |round| {
        let number = round as usize % DIRS;
        let new = format!("new-{name}{}", round % 7);
        let text = "x".repeat(1 + round as usize % 100);
        let stale = |what: &str| Err(io::Error::other(format!("round {round}: {what} is stale")));
        // Made in one directory, and moved to the next, mostly of another slice.
        let made = dir(&changer, (number + 1) % DIRS).join(new);
        let changed = dir(&changer, number).join(name);
        fs::write(&made, &text)?;
        fs::rename(&made, &changed)?;
        let seen = dir(&looker, number).join(name);
        if fs::metadata(&seen)?.len() != text.len() as u64 {
            return stale("the size");
        }
        if fs::read_to_string(&seen)? != text {
            return stale("the content");
        }
        if round.is_multiple_of(3) {
            fs::remove_file(&changed)?;
            match fs::metadata(&seen) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Ok(_) => return stale("a name that is gone"),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Round trips that a look at all files in the first server's mount costs.
fn round_trips(cluster: &Cluster, at: &Path) -> u64 {
    let calls = || {
        let text = cluster.servers[0].demand(&["status", at.to_str().unwrap(), "--json"]);
        serde_json::from_str::<Value>(&text).unwrap()["server"]["calls"].as_u64().unwrap()
    };
    let before = calls();
    for number in 0..DIRS {
        assert_eq!(fs::metadata(dir(at, number).join("file")).unwrap().len(), 7);
        let absent = fs::metadata(dir(at, number).join("absent")).unwrap_err();
        assert_eq!(absent.kind(), io::ErrorKind::NotFound);
    }
    calls() - before
}

// proves: P324, P325
#[test]
fn leases_outlive_no_server_and_are_given_again() {
    let Some(mut cluster) = Cluster::new("layout = 'cluster'\nleases = true") else { return };
    let at = cluster.mount_with(0, "at", "leases=yes");
    let other = cluster.mount_with(2, "other", "leases=yes");
    for number in 0..DIRS {
        fs::create_dir(dir(&at, number)).unwrap();
        fs::write(dir(&at, number).join("file"), "content").unwrap();
    }
    wait_for("leases", || round_trips(&cluster, &other) <= LOOKING_ROUND_TRIPS_MAX);
    let kept = KeptFiles::new(&at);
    let mut load = load(&at);
    load.add(changes_seen("one", at.clone(), other.clone()));
    load.add(changes_seen("another", other.clone(), at.clone()));
    std::thread::sleep(Duration::from_millis(500));
    load.take_longest();
    cluster.servers[1].end_server(libc::SIGKILL);
    let longest = standstill(&load, &cluster, 1);
    assert!(longest < FAILOVER_MAX, "an application stood still for {longest:?}");
    cluster.serve(1);
    wait_for("the share to be back", || cluster.is_settled());
    let rounds = load.end();
    check_load(&other, &rounds);
    kept.check(&at);
    let begun = Instant::now();
    while round_trips(&cluster, &other) > LOOKING_ROUND_TRIPS_MAX {
        assert!(begun.elapsed() < LEASED_AGAIN_WITHIN, "nothing is leased again");
        std::thread::sleep(BETWEEN_LOOKS);
    }
}
