//! Leases through a server that forwards, with real processes. Needs root.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::common::{Rig, on_transports, skipped, wait_for};
use serde_json::Value;

/// Round trips of others on the machine, which look at mount points.
const ASKING: u64 = 4;
const FILES: usize = 100;

/// A server that leases, one that forwards to it and leases on, and a mount of each.
struct Levels {
    far: Rig,
    middle: Rig,
    below: PathBuf,
    above: PathBuf,
}

impl Levels {
    fn new(transport: &str) -> Levels {
        let (mut far, mut middle) = (Rig::new(), Rig::new());
        for rig in [&far, &middle] {
            fs::set_permissions(rig.path("."), fs::Permissions::from_mode(0o755)).unwrap();
        }
        let leased = format!("leased={},squash=none,leases", far.path("export").display());
        far.serve(&["--export", &leased]);
        let options = format!("leases=yes,{transport}");
        let above = far.mount_export("leased", "above", &options);
        serve_middle(&mut middle, &far);
        let below = middle.mount_export("up", "below", &options);
        Levels { far, middle, below, above }
    }

    fn leases(&self) -> Value {
        let status = self.middle.demand(&["status", self.below.to_str().unwrap(), "--json"]);
        let status: Value = serde_json::from_str(&status).unwrap();
        status["server"].clone()
    }

    /// Calls of the mount below.
    fn calls(&self) -> u64 {
        self.leases()["calls"].as_u64().unwrap()
    }
}

fn serve_middle(middle: &mut Rig, far: &Rig) {
    let target = far.target().replace("=data", "=leased");
    middle.serve(&["--export", &format!("up={target},squash=none,leases")]);
}

fn file(at: &Path, number: usize) -> PathBuf {
    at.join(format!("file{number}"))
}

// proves: P334
#[test]
fn what_nobody_touches_costs_no_round_trip_through_two_levels() {
    if skipped() {
        return;
    }
    on_transports(|transport| {
        let levels = Levels::new(transport);
        let Levels { below, above, .. } = &levels;
        (0..FILES).for_each(|number| fs::write(file(above, number), "content").unwrap());
        let look = || {
            for number in 0..FILES {
                assert_eq!(fs::metadata(file(below, number)).unwrap().len(), 7);
                assert!(fs::metadata(below.join(format!("absent{number}"))).is_err());
            }
        };
        // What was just changed is not leased for a moment.
        wait_for("all to be leased", || {
            look();
            let before = levels.calls();
            look();
            levels.calls() - before <= ASKING
        });
        // Each change at either level is seen by the next call at the other.
        for number in 0..20 {
            fs::write(file(above, number), "longer than before").unwrap();
            assert_eq!(fs::metadata(file(below, number)).unwrap().len(), 18, "{number}");
            fs::write(file(below, number), "x").unwrap();
            assert_eq!(fs::metadata(file(above, number)).unwrap().len(), 1, "{number}");
            fs::rename(file(above, number), above.join("moved")).unwrap();
            assert!(!file(below, number).exists());
            fs::remove_file(below.join("moved")).unwrap();
            assert!(!above.join("moved").exists());
            fs::write(above.join(format!("absent{number}")), "").unwrap();
            assert!(below.join(format!("absent{number}")).exists());
        }
    });
}

/// The server between is killed, or cut off from its clients and from above at once. Changes by others wait for no
/// longer than they may, and are seen.
// proves: P331, P332
#[test]
fn what_was_leased_by_a_server_that_dies_or_stops_is_seen_when_it_is_changed() {
    if skipped() {
        return;
    }
    let mut levels = Levels::new("");
    let (below, above) = (levels.below.clone(), levels.above.clone());
    let length = |at: &Path| fs::metadata(at.join("f")).unwrap().len();
    fs::write(above.join("f"), "1").unwrap();
    let leased = |levels: &Levels| {
        wait_for("it to be leased", || {
            length(&below);
            let before = levels.calls();
            length(&below);
            levels.calls() == before
        });
    };
    leased(&levels);
    levels.middle.end_server(libc::SIGKILL);
    serve_middle(&mut levels.middle, &levels.far);
    let begun = Instant::now();
    fs::write(above.join("f"), "22").unwrap();
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    assert_eq!(length(&below), 2);
    leased(&levels);
    let server = levels.middle.server();
    server.signal(libc::SIGSTOP);
    let changed = std::panic::catch_unwind(|| fs::write(above.join("f"), "333").unwrap());
    server.signal(libc::SIGCONT);
    changed.unwrap();
    assert_eq!(length(&below), 3);
    leased(&levels);
}

#[test]
fn what_a_projection_leases_is_not_leased_on() {
    if skipped() {
        return;
    }
    let (mut far, middle) = (Rig::new(), Rig::new());
    let (socket, file) = (far.path("socket").display().to_string(), far.path("projections.toml"));
    let text = format!(
        "[projection.one]\nlayout = 'cluster'\nleases = true\nservers = ['unix://{socket}']\n\
         path = '{}'\nexport = {{ squash = 'none' }}\n",
        far.path("export").display()
    );
    fs::write(&file, text).unwrap();
    far.serve(&["--projections", file.to_str().unwrap()]);
    let up = format!("up=dray+unix://{socket}?export=one,squash=none,leases");
    let (state, listen) = (middle.path("state"), middle.path("socket"));
    let listen = format!("unix://{}", listen.display());
    let state = state.to_str().unwrap();
    let refused = middle.run(&["serve", "--export", &up, "--state", state, "--listen", &listen]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("leave `leases` out"), "{said}");
}
