//! Servers whose exports are other servers' exports, with real processes. Needs root.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::common::load::{KeptFiles, check_load, load, lock};
use crate::common::{LEAVE_OTHERS_MOUNTS, Rig, on_transports, skipped, wait_for};
use serde_json::Value;

/// A user that files belong to.
const USER: u32 = 4_321;

/// A server of a directory, and one that forwards to it. Other users can get there.
pub struct Levels {
    pub far: Rig,
    pub middle: Rig,
    options: &'static str,
}

impl Levels {
    pub fn new(options: &'static str) -> Levels {
        let mut levels = Levels { far: Rig::new(), middle: Rig::new(), options };
        for rig in [&levels.far, &levels.middle] {
            fs::set_permissions(rig.path("."), fs::Permissions::from_mode(0o755)).unwrap();
        }
        let export = levels.far.path("export");
        fs::set_permissions(export, fs::Permissions::from_mode(0o777)).unwrap();
        levels.far.serve(&[]);
        levels.serve_middle(&[]);
        levels
    }

    fn serve_middle(&mut self, more: &[&str]) {
        let export = format!("up={},{}", self.far.target(), self.options);
        self.middle.serve(&[&["--export", &export], more].concat());
    }

    /// A mount of the server that forwards, and one of the other.
    fn mounts(&mut self, options: &str) -> (PathBuf, PathBuf) {
        let above = self.far.mount("above", options);
        (self.middle.mount_export("up", "below", options), above)
    }

    /// The export that is forwarded, as the status of its server has it.
    fn export(&self) -> Value {
        let status = status(&self.middle);
        let exports = status["exports"].as_array().unwrap();
        exports.iter().find(|export| export["name"] == "up").unwrap().clone()
    }
}

/// Of the server of `rig`.
pub fn status(rig: &Rig) -> Value {
    let text = rig.demand(&["status", "--json"]);
    let mut all = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    all.find(|one| one["kind"] == "server").unwrap()
}

pub fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

// proves: P160
#[test]
fn two_levels_are_one_server_to_their_clients() {
    on_transports(|transport| {
        let mut levels = Levels::new("squash=none");
        let (below, above) = levels.mounts(transport);
        for number in 0..20_u32 {
            let name = format!("f{number}");
            let mut exclusive = OpenOptions::new();
            exclusive.write(true).create_new(true);
            let file = exclusive.open(below.join(&name)).unwrap();
            let there = exclusive.open(above.join(&name)).unwrap_err();
            assert_eq!(there.raw_os_error(), Some(libc::EEXIST));
            file.write_all_at(name.as_bytes(), 0).unwrap();
            assert_eq!(fs::read(above.join(&name)).unwrap(), name.as_bytes());
            let other = open(&above.join(&name));
            lock(&file, libc::F_WRLCK, libc::F_OFD_SETLK).unwrap();
            let refused = lock(&other, libc::F_WRLCK, libc::F_OFD_SETLK).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(libc::EAGAIN));
            // A waiter at one level gets the lock that is given up at the other.
            let waiting =
                std::thread::spawn(move || lock(&other, libc::F_WRLCK, libc::F_OFD_SETLKW));
            lock(&file, libc::F_UNLCK, libc::F_OFD_SETLK).unwrap();
            waiting.join().unwrap().unwrap();
            fs::rename(above.join(&name), above.join("moved")).unwrap();
            assert!(!below.join(&name).exists());
            assert_eq!(fs::metadata(below.join("moved")).unwrap().len(), name.len() as u64);
            fs::remove_file(below.join("moved")).unwrap();
        }
        let appends = [&below, &above].map(|at| {
            let mut log = File::options().append(true).create(true).open(at.join("log")).unwrap();
            std::thread::spawn(move || (0..200).for_each(|_| log.write_all(b"record\n").unwrap()))
        });
        appends.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(fs::read(below.join("log")).unwrap(), b"record\n".repeat(400));
    });
}

/// The identity of each caller is the one at its client, but for those that are squashed between.
// proves: P160
#[test]
fn callers_are_themselves_at_both_levels() {
    if skipped() {
        return;
    }
    let mut levels = Levels::new("squash=root");
    let (below, above) = levels.mounts("");
    let run = |script: &str| {
        let at = format!("AT={}", below.display());
        let words = ["env", &at];
        let output = levels.middle.run_as(USER, &words, "sh", &["-ec", script]);
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (done, said) = run("umask 077; mkdir $AT/own; echo secret >$AT/own/file");
    assert!(done, "{said}");
    assert_eq!(fs::metadata(above.join("own/file")).unwrap().uid(), USER);
    assert_eq!(fs::metadata(below.join("own")).unwrap().mode() & 0o777, 0o700);
    let (done, said) = run("mv $AT/own/file $AT/own/moved; ln $AT/own/moved $AT/own/link");
    assert!(done, "a directory that only its owner may look into: {said}");
    // Root here is nobody, and is root there.
    let refused = fs::read(below.join("own/moved")).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied);
    assert_eq!(fs::read(above.join("own/moved")).unwrap(), b"secret\n");
    fs::write(below.join("of-nobody"), "").unwrap();
    assert_eq!(fs::metadata(above.join("of-nobody")).unwrap().uid(), 65_534);
}

#[test]
fn an_export_that_is_read_only_here_takes_changes_there_alone() {
    if skipped() {
        return;
    }
    let mut levels = Levels::new("squash=none,ro");
    let (below, above) = levels.mounts("");
    fs::write(above.join("f"), "x").unwrap();
    assert_eq!(fs::read(below.join("f")).unwrap(), b"x");
    for refused in [
        fs::write(below.join("f"), "y"),
        fs::create_dir(below.join("d")),
        fs::remove_file(below.join("f")),
        fs::set_permissions(below.join("f"), fs::Permissions::from_mode(0o600)),
    ] {
        assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EROFS));
    }
    assert_eq!(fs::read(above.join("f")).unwrap(), b"x");
}

/// Both servers are killed under load, one after the other; no application notices.
// proves: P161
#[test]
fn killed_servers_of_both_levels_lose_nothing() {
    on_transports(|transport| {
        let mut levels = Levels::new("squash=root");
        let mut levels_of_root = Levels::new("squash=none");
        for levels in [&mut levels, &mut levels_of_root] {
            let (below, above) = levels.mounts(transport);
            let kept = KeptFiles::new(&below);
            let load = load(&below);
            for _ in 0..2 {
                std::thread::sleep(Duration::from_millis(300));
                levels.middle.end_server(libc::SIGKILL);
                std::thread::sleep(Duration::from_millis(100));
                levels.serve_middle(&[]);
                std::thread::sleep(Duration::from_millis(500));
                levels.far.end_server(libc::SIGKILL);
                std::thread::sleep(Duration::from_millis(100));
                levels.far.serve(&[]);
            }
            let steps = load.steps.clone();
            let before = steps.load(std::sync::atomic::Ordering::Relaxed);
            wait_for("the load to go on", || {
                steps.load(std::sync::atomic::Ordering::Relaxed) > before + 100
            });
            let turns = load.end();
            check_load(&above, &turns);
            kept.check(&below);
        }
    });
}

/// Longer than other tests: what a client does not come back for is kept for two leases, and is looked
/// for every ten seconds.
// proves: P162
#[test]
fn what_clients_of_a_killed_server_do_not_reopen_is_released() {
    if skipped() {
        return;
    }
    let mut levels = Levels::new("squash=none");
    levels.middle.end_server(libc::SIGTERM);
    let config = levels.middle.path("config.toml");
    fs::write(&config, "lease_s = 1\n").unwrap();
    let config = ["--config", config.to_str().unwrap()].map(str::to_owned);
    let config = config.each_ref().map(String::as_str);
    levels.serve_middle(&config);
    let (below, above) = levels.mounts("");
    let (file, other) = (open(&below.join("f")), open(&above.join("f")));
    lock(&file, libc::F_WRLCK, libc::F_OFD_SETLK).unwrap();
    let open_files = |levels: &Levels| {
        let status = status(&levels.far);
        let clients = status["clients"].as_array().unwrap().clone();
        clients.iter().map(|client| client["open_files"].as_u64().unwrap()).sum::<u64>()
    };
    assert_eq!(open_files(&levels), 2);
    levels.middle.end_server(libc::SIGKILL);
    // The client is gone, too, and says no goodbye to anybody.
    drop(file);
    levels.middle.end_of_mount(&below);
    assert!(lock(&other, libc::F_WRLCK, libc::F_OFD_SETLK).is_err(), "nobody can have it yet");
    levels.serve_middle(&config);
    wait_for("the release", || open_files(&levels) == 1);
    lock(&other, libc::F_WRLCK, libc::F_OFD_SETLK).unwrap();
}

// proves: P163
#[test]
fn calls_wait_for_a_server_that_is_away_and_can_be_killed() {
    if skipped() {
        return;
    }
    let mut levels = Levels::new("squash=none");
    let (below, _above) = levels.mounts("");
    levels.far.end_server(libc::SIGKILL);
    let mut waiting = levels.middle.start("echo x >$AT/waits", &below);
    let socket = levels.far.path("socket").display().to_string();
    wait_for("the status to say which server is away", || {
        let export = levels.export();
        export["servers_away"].as_str().is_some_and(|away| away.contains(&socket))
            && export["hang"]["calls"].as_u64() > Some(0)
    });
    assert!(!waiting.is_over());
    waiting.signal(libc::SIGKILL);
    levels.middle.end_of(waiting);
    // The one that forwards starts without the other, and says what it waits for.
    levels.middle.end_server(libc::SIGKILL);
    levels.serve_middle(&[]);
    wait_for("the status to say what is waited for", || {
        let starting = levels.export()["starting"].clone();
        starting["error"].as_str().is_some_and(|error| error.contains(&socket))
            && !starting["held_back"].is_null()
    });
    waiting = levels.middle.start("echo y >$AT/waits", &below);
    std::thread::sleep(Duration::from_millis(200));
    assert!(!waiting.is_over());
    levels.far.serve(&[]);
    assert!(levels.middle.end_of(waiting).success());
    assert_eq!(fs::read(levels.far.path("export/waits")).unwrap(), b"y\n");
    wait_for("all to answer", || levels.export()["servers_away"].is_null());
}

// proves: P164
#[test]
fn servers_that_would_serve_themselves_say_so() {
    if skipped() {
        return;
    }
    let mut rigs = [Rig::new(), Rig::new()];
    let targets = rigs
        .each_ref()
        .map(|rig| format!("dray+unix://{}?export=ring", rig.path("socket").display()));
    let error = |rig: &Rig| {
        let status = status(rig);
        let exports = status["exports"].as_array().unwrap();
        let ring = exports.iter().find(|export| export["name"] == "ring").unwrap();
        ring["starting"]["error"].as_str().unwrap_or_default().to_owned()
    };
    // Each of the other, then one of itself.
    for (number, target) in [(0, &targets[1]), (1, &targets[0])] {
        rigs[number].serve(&["--export", &format!("ring={target}")]);
    }
    for rig in &rigs {
        wait_for("the ring to be noticed", || error(rig).contains("served from itself"));
    }
    rigs[1].end_server(libc::SIGTERM);
    rigs[1].serve(&["--export", &format!("ring={}", targets[1])]);
    wait_for("it to be noticed", || error(&rigs[1]).contains("served from itself"));
    // Another export of the same server is no ring.
    rigs[0].end_server(libc::SIGTERM);
    let other = targets[0].replace("ring", "data");
    rigs[0].serve(&["--export", &format!("ring={other},squash=none")]);
    wait_for("the export to open", || {
        let exports = status(&rigs[0])["exports"].as_array().unwrap().clone();
        exports.iter().all(|export| export["starting"].is_null())
    });
    let at = rigs[0].mount_export("ring", "at", "");
    fs::write(at.join("f"), "x").unwrap();
    assert_eq!(fs::read(rigs[0].path("export/f")).unwrap(), b"x");
}

#[test]
fn an_export_that_is_squashed_there_is_refused() {
    if skipped() {
        return;
    }
    let (mut far, middle) = (Rig::new(), Rig::new());
    let squashed = format!("squashed={}", far.path("export").display());
    far.serve(&["--export", &squashed]);
    let target = format!("dray+unix://{}?export=squashed", far.path("socket").display());
    let (state, socket) = (middle.path("state"), middle.path("socket"));
    let refused = middle.run(&[
        "serve",
        "--export",
        &format!("up={target}"),
        "--state",
        state.to_str().unwrap(),
        "--listen",
        &format!("unix://{}", socket.display()),
    ]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("squash=none there"), "{said}");
}

/// Two servers of one directory as a projection, and one that forwards to both.
// proves: P160, P161
#[test]
fn a_projection_is_forwarded_as_one_server_is() {
    if skipped() {
        return;
    }
    let mut rigs = [Rig::new(), Rig::new(), Rig::new()];
    let [socket, other] = [0, 1].map(|number| rigs[number].path("socket").display().to_string());
    let dir = rigs[0].path("export");
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
    let file = rigs[0].path("projections.toml");
    let text = format!(
        "[projection.both]\nlayout = 'cluster'\nservers = ['unix://{socket}', 'unix://{other}']\n\
         path = '{}'\nexport = {{ squash = 'none' }}\n",
        dir.display()
    );
    fs::write(&file, text).unwrap();
    let projections = ["--projections", file.to_str().unwrap()];
    let up = format!("up=dray+unix://{socket}?export=both,squash=none");
    rigs[0].serve(&projections);
    rigs[1].serve(&projections);
    rigs[2].serve(&["--export", &up]);
    let below = rigs[2].mount_export("up", "below", "");
    let above = rigs[1].mount_export("both", "above", "");
    let kept = KeptFiles::new(&below);
    let load = load(&below);
    for (number, args) in [(2, ["--export", &up]), (1, projections), (0, projections)] {
        std::thread::sleep(Duration::from_millis(300));
        rigs[number].end_server(libc::SIGKILL);
        rigs[number].serve(&args);
    }
    let (steps, relaxed) = (load.steps.clone(), std::sync::atomic::Ordering::Relaxed);
    let before = steps.load(relaxed);
    wait_for("the load to go on", || steps.load(relaxed) > before + 100);
    let turns = load.end();
    check_load(&above, &turns);
    kept.check(&below);
    for number in [0, 1] {
        let clients = status(&rigs[number])["clients"].as_array().unwrap().clone();
        assert!(clients.iter().any(|client| client["calls"].as_u64() > Some(20)));
    }
}

/// Namespaces `far` and `near` have no way to each other; the one that the script runs in has a link to
/// each. All of them go with their processes.
const TWO_FABRICS: &str = r#"
    ip link set lo up
    echo 0 >/proc/sys/net/ipv4/ip_forward
    unshare --net sleep 300 & FAR=$!
    unshare --net sleep 300 & NEAR=$!
    PIDS="$FAR $NEAR"
    trap 'umount -l "$AT" || true; kill $PIDS || true' EXIT
    for side in "far $FAR 1" "near $NEAR 2"; do
        set -- $side
        until [ "$(readlink /proc/$2/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
        ip link add $1 type veth peer name fabric netns $2
        ip addr add 10.77.$3.1/24 dev $1
        ip link set $1 up
        nsenter --net=/proc/$2/ns/net sh -euc "
            ip addr add 10.77.$3.2/24 dev fabric; ip link set fabric up; ip link set lo up"
    done
    FAR=--net=/proc/$FAR/ns/net NEAR=--net=/proc/$NEAR/ns/net
"#;

// proves: P160
#[test]
fn a_router_joins_two_networks_that_cannot_reach_each_other() {
    if skipped() {
        return;
    }
    let rig = Rig::new();
    let script = r#"
        mkdir "$AT" "$DIR/far" "$DIR/router"
        nsenter $FAR "$DRAY" serve --export "data=$DIR/export,squash=none" --auth none \
            --listen tcp://10.77.1.2 --state "$DIR/far" >"$DIR/far/log" 2>&1 & PIDS="$PIDS $!"
        "$DRAY" serve --export data=dray://10.77.1.2/data,squash=none,auth=none --auth none             --listen tcp://10.77.2.1 --state "$DIR/router" >"$DIR/router/log" 2>&1 & PIDS="$PIDS $!"
        ! nsenter $NEAR "$DRAY" mount dray://10.77.1.2/data "$AT" -o auth=none
        nsenter $NEAR "$DRAY" mount dray://10.77.2.1/data "$AT" -o auth=none,retry=30
        echo routed >"$AT/file"
        test "$(cat "$DIR/export/file")" = routed
        echo back >"$DIR/export/other"
        test "$(cat "$AT/other")" = back
        "$DRAY" umount "$AT"
    "#;
    let output = std::process::Command::new("unshare")
        .args(["--net", "--mount", "timeout", "120", "sh", "-eux", "-c"])
        .arg(format!("{LEAVE_OTHERS_MOUNTS}{TWO_FABRICS}{script}"))
        .env("DRAY", env!("CARGO_BIN_EXE_dray"))
        .env("DIR", rig.path("").to_str().unwrap().trim_end_matches('/'))
        .env("AT", rig.path("at"))
        .env("DRAY_RUN_DIR", rig.path("run"))
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", output.status);
}
