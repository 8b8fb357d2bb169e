//! A server without a configured state directory finds its own, wherever it listens.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::common;
use crate::common::hangs::report_of_server;
use crate::common::ports::free_port;
use crate::common::{Rig, is_mounted_by_dray, wait_for};

fn command(rig: &Rig, words: &[&str]) -> Command {
    let mut command = rig.command(words);
    command.env("DRAY_STATE_DIR", rig.path("states")).env("NOTIFY_SOCKET", rig.path("ready"));
    command
}

/// Serves the rig's directory `data`, with no state directory but where there is one in `more`.
fn serve(rig: &mut Rig, listen: &str, more: &[&str]) {
    let export = format!("data={},squash=none", rig.path("export").display());
    let words = ["serve", "--export", &export, "--listen", listen];
    let command = command(rig, &[&words[..], more].concat());
    let log = rig.path("log");
    rig.start_server(&command, Some(&log));
}

fn mount(rig: &mut Rig, port: u16) -> std::path::PathBuf {
    let at = rig.moved_to("mount"); // taken away in the end
    fs::create_dir(&at).unwrap();
    rig.demand(&["mount", &format!("dray://127.0.0.1:{port}/data"), at.to_str().unwrap()]);
    assert!(is_mounted_by_dray(&at));
    at
}

fn state_of(rig: &Rig) -> String {
    let state = report_of_server(rig)["state"].as_str().unwrap().to_owned();
    Path::new(&state).file_name().unwrap().to_string_lossy().into_owned()
}

/// Every mount was stale: the state directory was named after the address.
// proves: P79
#[test]
fn a_mount_goes_on_when_its_server_listens_elsewhere() {
    if common::skipped() {
        return;
    }
    let (mut rig, port) = (Rig::new(), free_port());
    serve(&mut rig, &format!("tcp://127.0.0.1:{port}"), &[]);
    assert_eq!(state_of(&rig), "main");
    let at = mount(&mut rig, port);
    fs::write(at.join("file"), "kept").unwrap();
    let mut open = fs::File::open(at.join("file")).unwrap();
    rig.end_server(libc::SIGTERM);
    serve(&mut rig, &format!("tcp://0.0.0.0:{port}"), &[]);
    assert_eq!(state_of(&rig), "main");
    assert_eq!(std::io::read_to_string(&mut open).unwrap(), "kept");
    drop(open);
    assert_eq!(fs::read_to_string(at.join("file")).unwrap(), "kept");
    rig.umount(&at);
}

/// As a former version named it.
// proves: P79
#[test]
fn a_state_directory_that_knows_the_export_is_found() {
    if common::skipped() {
        return;
    }
    let (mut rig, port) = (Rig::new(), free_port());
    let name = format!("tcp---127.0.0.1-{port}");
    let former = rig.path("states").join(&name);
    let listen = format!("tcp://127.0.0.1:{port}");
    serve(&mut rig, &listen, &["--state", former.to_str().unwrap()]);
    fs::remove_file(former.join("origins.toml")).unwrap(); // it had none
    let at = mount(&mut rig, port);
    fs::write(at.join("file"), "kept").unwrap();
    rig.end_server(libc::SIGTERM);
    serve(&mut rig, &format!("tcp://0.0.0.0:{port}"), &[]);
    assert_eq!(state_of(&rig), name);
    assert_eq!(fs::read_to_string(at.join("file")).unwrap(), "kept");
    rig.umount(&at);
    rig.end_server(libc::SIGTERM);
    // A user who names another one gets a warning.
    let other = rig.path("state");
    serve(&mut rig, &listen, &["--state", other.to_str().unwrap()]);
    let log = fs::read_to_string(rig.path("log")).unwrap();
    let expected = format!("start with --state {}", former.display());
    assert!(
        log.contains("export `data` is new to the state directory") && log.contains(&expected),
        "{log}"
    );
}

#[test]
fn servers_of_one_machine_have_a_state_directory_each() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let sockets = ["one", "other"].map(|name| format!("unix://{}", rig.path(name).display()));
    fs::create_dir(rig.path("second")).unwrap();
    let second = format!("second={}", rig.path("second").display());
    for _ in 0..2 {
        serve(&mut rig, &sockets[0], &[]);
        // The same directory: it is another server's.
        let export = format!("again={}", rig.path("export").display());
        let mut refused = command(&rig, &["serve", "--export", &export, "--listen", &sockets[1]]);
        let refused = refused.output().unwrap();
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && said.contains("another dray server uses"), "{said}");
        let words = ["serve", "--export", &second, "--listen", &sockets[1]];
        let mut other = command(&rig, &words);
        let mut other = other.env_remove("NOTIFY_SOCKET").spawn().unwrap();
        let states = || {
            let text = rig.demand(&["status", "--json", "--interval", "0"]);
            let state = |line: &str| {
                serde_json::from_str::<serde_json::Value>(line).unwrap()["state"].clone()
            };
            let mut names: Vec<String> = text.lines().map(|line| state(line).to_string()).collect();
            names.sort();
            names
        };
        wait_for("both servers", || rig.path("other").exists() && states().len() == 2);
        let names = states();
        assert!(names[0].ends_with("/main\"") && names[1].ends_with("/main-2\""), "{names:?}");
        // SAFETY: no memory is passed; it is our child, and has not been waited for.
        unsafe { libc::kill(other.id() as i32, libc::SIGTERM) };
        other.wait().unwrap();
        rig.end_server(libc::SIGTERM);
    }
}
