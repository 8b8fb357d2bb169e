//! Projections: several servers over one directory, and clients with the right definition and others.

use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::common;
use crate::common::Rig;
use crate::common::hangs::export_of;
use dray_client::{ConnectError, ConnectOptions, RemoteFs, SessionMemory, connect_timeout};
use dray_core::{Context, CreateHow, Errno, FileSystem, Name, OpenHow};
use dray_layers::placement::{Definition, parse_definitions};
use dray_rt::{DriverKind, Executor};

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };

/// A definition over these servers and this directory.
fn definition(servers: &[&Rig], path: &Path, more: &str) -> String {
    let servers: Vec<String> =
        servers.iter().map(|rig| format!("'unix://{}'", rig.path("socket").display())).collect();
    let (servers, path) = (servers.join(", "), path.display());
    format!(
        "[projection.scratch]\nlayout = 'cluster'\nservers = [{servers}]\npath = '{path}'\n{more}\n"
    )
}

/// Serves the projections in this text, and logs to `log` beside it.
fn serve(rig: &mut Rig, text: &str) {
    let file = rig.path("projections.toml");
    fs::write(&file, text).unwrap();
    let log = rig.path("log");
    rig.serve_logging(&log, &["--projections", file.to_str().unwrap()]);
}

fn parsed(text: &str) -> Definition {
    parse_definitions(text).unwrap().remove(0)
}

async fn connect(rig: &Rig, definition: u64) -> Result<RemoteFs, ConnectError> {
    let socket = rig.path("socket");
    let target = format!("dray+unix://{}?export=scratch", socket.display()).parse().unwrap();
    let options = ConnectOptions { definition, ..ConnectOptions::default() };
    let patience = Duration::from_secs(60);
    connect_timeout(&target, &options, patience, SessionMemory::heap()).await.map(RemoteFs::new)
}

#[test]
fn servers_of_a_projection_are_one_file_system_to_clients_with_its_definition() {
    if common::skipped() {
        return;
    }
    let (mut one, mut other) = (Rig::new(), Rig::new());
    let text = definition(&[&one, &other], &one.path("export"), "export = { squash = 'none' }");
    let expected = parsed(&text);
    serve(&mut one, &text);
    serve(&mut other, &text);
    for (number, rig) in [(1, &one), (2, &other)] {
        let projection = export_of(rig, "scratch")["projection"].clone();
        assert_eq!((&projection["number"], &projection["servers"]), (&number.into(), &2.into()));
        assert_eq!(projection["layout"], "cluster");
        assert_eq!(projection["fingerprint"], format!("{:016x}", expected.fingerprint()));
        assert!(export_of(rig, "data")["projection"].is_null());
        let said = rig.demand(&["status", rig.path("socket").to_str().unwrap()]);
        assert!(said.contains(&format!("server {number} of 2")), "{said}");
    }
    Executor::new(DriverKind::Epoll).unwrap().block_on(async {
        match connect(&one, 0).await.err().unwrap() {
            ConnectError::Definition { text } => assert_eq!(text, expected.canonical()),
            error => panic!("{error:?}"),
        }
        let log = || fs::read_to_string(one.path("log")).unwrap();
        assert!(!log().contains("ended in its handshake"), "it had only asked: {}", log());
        assert!(matches!(connect(&one, 7).await.err().unwrap(), ConnectError::Definition { .. }));
        common::wait_for("a line of the log", || log().contains("have different definitions"));
        let mine = expected.fingerprint();
        let (names, files) =
            (connect(&one, mine).await.unwrap(), connect(&other, mine).await.unwrap());
        assert_eq!(names.info().uuid, expected.fs_uuid());
        assert_eq!((names.info().uuid, names.info().root), (files.info().uuid, files.info().root));
        let (cx, name) = (Context::system(), Name::new(b"f").unwrap());
        let (entry, _file) = names.create(&cx, names.info().root, name, NEW).await.unwrap();
        assert_eq!(files.getattr(&cx, entry.id).await.unwrap().ino, entry.id.ino);
        [names, files].iter().for_each(|fs| fs.session().goodbye());
        dray_rt::sleep(Duration::from_millis(100)).await; // the goodbyes are sent
    });
}

/// The mount does not go on in part: neither with the files that were open nor by new calls.
#[test]
fn a_restart_with_another_definition_ends_the_sessions_of_the_former_one() {
    if common::skipped() {
        return;
    }
    let (mut rig, other) = (Rig::new(), Rig::new());
    let export = rig.path("export");
    let [first, second] = ["spread_creates = false", "spread_creates = true"]
        .map(|more| definition(&[&rig, &other], &export, more));
    serve(&mut rig, &first);
    let mut executor = Executor::new(DriverKind::Epoll).unwrap();
    executor.block_on(async {
        let fs = connect(&rig, parsed(&first).fingerprint()).await.unwrap();
        let cx = Context::system();
        let file = fs.open(&cx, fs.info().root, OpenHow::DIRECTORY).await.unwrap();
        assert!(rig.end_server(libc::SIGTERM).success());
        serve(&mut rig, &second);
        let errors = [fs.statfs(&cx).await.err(), file.getattr(&cx).await.err()];
        assert_eq!(errors.map(|error| error.unwrap().errno()), [Errno::ESHUTDOWN; 2]);
        assert!(fs.session().status().redefined);
        let fs = connect(&rig, parsed(&second).fingerprint()).await.unwrap();
        fs.statfs(&cx).await.unwrap();
        fs.session().goodbye();
        dray_rt::sleep(Duration::from_millis(100)).await; // the goodbye is sent
    });
}

#[test]
fn what_cannot_be_served_ends_the_start() {
    if common::skipped() {
        return;
    }
    let (rig, other) = (Rig::new(), Rig::new());
    let file = rig.path("projections.toml");
    let refused = |text: &str, more: &[&str]| {
        fs::write(&file, text).unwrap();
        let listen = format!("unix://{}", rig.path("socket").display());
        let state = rig.path("state");
        let args = ["serve", "--listen", &listen, "--state", state.to_str().unwrap()];
        let file = ["--projections", file.to_str().unwrap()];
        let output = rig.run(&[&args[..], &file, more].concat());
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let path = rig.path("export");
    let good = definition(&[&rig, &other], &path, "");
    for (text, more, words) in [
        (good.replace("'cluster'", "'clutser'"), &[][..], "layout `clutser` is unknown"),
        (definition(&[&rig, &rig], &path, ""), &[], "is there twice"),
        (definition(&[], &path, ""), &[], "servers is empty"),
        (definition(&[&rig], &path, "width = 2"), &[], "width 2"),
        (definition(&[&rig], &path, "stripe = 5000"), &[], "stripe"),
        (definition(&[&other], &path, ""), &[], "say which of the servers it is, with --server"),
        (good.clone(), &["--server", "tcp://io9"], "`tcp://io9` is among the servers of none"),
        (good.clone(), &["--export", "scratch=/tmp"], "two exports are called `scratch`"),
    ] {
        let said = refused(&text, more);
        assert!(said.contains(words), "{text}: {said}");
        assert!(!rig.path("socket").exists(), "nothing is served");
    }
}

/// What a file means, and what is wrong in one, is said without a server.
#[test]
fn a_file_of_projections_is_checked_and_shown() {
    let rig = Rig::new();
    let file = rig.path("projections.toml");
    let good = definition(&[&rig, &rig], &rig.path("export"), "").replacen("socket'", "other'", 1);
    fs::write(&file, &good).unwrap();
    let path = file.to_str().unwrap();
    assert!(rig.demand(&["projection", "check", path]).contains("projection scratch: sound"));
    let shown = rig.demand(&["projection", "show", path]);
    let fingerprint = format!("{:016x}", parsed(&good).fingerprint());
    assert!(shown.contains("layout cluster") && shown.contains(&fingerprint), "{shown}");
    let json = rig.demand(&["projection", "show", path, "scratch", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let shares = json[0]["shares"].as_array().unwrap();
    let files: f64 = shares.iter().map(|one| one["files_percent"].as_f64().unwrap()).sum();
    assert!(shares.len() == 2 && (files - 100.0).abs() < 1e-6, "{json}");
    for (from, to, code, words) in [
        ("other'", "socket'", 2, "is there twice"),
        ("'cluster'", "'clustre'", 2, "one of cluster"),
        ("'unix://", "'tcp://localhost', 'tcp://127.0.0.1', 'unix://", 1, "are one server"),
        ("'unix://", "'tcp://no-such-host.invalid', 'unix://", 1, "has no address here"),
    ] {
        fs::write(&file, good.replacen(from, to, 1)).unwrap();
        let output = rig.run(&["projection", "check", path]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(code) && said.contains(words), "{to}: {said}");
    }
    // Two servers of one machine are two.
    fs::write(
        &file,
        good.replacen("'unix://", "'tcp://127.0.0.1:7001', 'tcp://127.0.0.1', 'unix://", 1),
    )
    .unwrap();
    rig.demand(&["projection", "check", path]);
    // What cannot be resolved is not served.
    fs::write(&file, good.replacen("'unix://", "'tcp://no-such-host.invalid', 'unix://", 1))
        .unwrap();
    let listen = format!("unix://{}", rig.path("socket").display());
    let state = rig.path("state").display().to_string();
    let served = rig.run(&["serve", "--projections", path, "--listen", &listen, "--state", &state]);
    let said = String::from_utf8_lossy(&served.stderr).into_owned();
    assert!(served.status.code() == Some(1) && said.contains("has no address here"), "{said}");
    fs::write(&file, &good).unwrap();
    let missing = rig.run(&["projection", "show", path, "nothing"]);
    assert!(
        String::from_utf8_lossy(&missing.stderr).contains("no projection `nothing`, but scratch")
    );
}

/// The first server has all names. Data are spread, by blocks where files have several.
#[test]
fn of_own_disks_it_is_shown_that_the_home_has_all_names() {
    let rig = Rig::new();
    let file = rig.path("projections.toml");
    let path = file.to_str().unwrap();
    for (layout, more, of_a_file) in [
        ("file", "spread_creates = true", "the data of a file: at one server"),
        ("stripe", "width = 2", "over 2 servers"),
        ("stripe", "data_hash = 'modulo'", "over 3 servers"),
    ] {
        let servers = "['tcp://io1', 'tcp://io2', 'tcp://io3']";
        let text = format!(
            "[projection.own]\nlayout = '{layout}'\nservers = {servers}\npath = '/disk'\n{more}\n"
        );
        fs::write(&file, text).unwrap();
        let shown = rig.demand(&["projection", "show", path]);
        for part in [of_a_file, "names, attributes and locks: at the home tcp://io1:7440", " DATA "]
        {
            assert!(shown.contains(part), "{part} is missing in {shown}");
        }
        assert!(!shown.contains("FILES") && !shown.contains("their directory"), "{shown}");
        let json = rig.demand(&["projection", "show", path, "own", "--json"]);
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let shares = json[0]["shares"].as_array().unwrap();
        let names: Vec<f64> =
            shares.iter().map(|one| one["directories_percent"].as_f64().unwrap()).collect();
        assert_eq!(names, [100.0, 0.0, 0.0], "{layout}");
        for share in shares {
            let data = share["data_percent"].as_f64().unwrap();
            assert!((32.0..35.0).contains(&data), "{layout} {more}: {json}");
        }
    }
}
