//! A server starts while a file system below one of its exports hangs: a FUSE mount whose own
//! server has been stopped.

use std::fs;
use std::path::PathBuf;

use crate::common::daemons::wait_for_connections;
use crate::common::hangs::{export_of, in_time, use_mount};
use crate::common::{Pid, Rig, on_transports, wait_for};

/// A file system that can be stopped: not even its root answers then.
struct Below {
    rig: Rig,
    at: PathBuf,
    server: Pid,
}

impl Below {
    fn new() -> Below {
        let mut rig = Rig::new();
        rig.serve(&[]);
        let at = rig.mount("below", "transport=classic");
        let server = rig.signal_server(libc::SIGCONT);
        Below { rig, at, server }
    }

    fn stop(&self) {
        self.server.signal(libc::SIGSTOP);
    }

    fn go_on(&self) {
        self.server.signal(libc::SIGCONT);
    }
}

impl Drop for Below {
    fn drop(&mut self) {
        self.go_on();
        self.server.signal(libc::SIGTERM);
        self.rig.end_of(self.server);
    }
}

/// With one thread: whatever of two exports could meet on a thread does.
fn serve(rig: &mut Rig, below: &Below) {
    let export = format!("ice={},squash=none", below.at.display());
    rig.serve(&["--threads", "1", "--export", &export]);
}

// proves: P112
#[test]
fn a_server_that_starts_while_a_file_system_hangs_serves_its_other_exports() {
    on_transports(starts_while_one_hangs);
}

fn starts_while_one_hangs(transport: &str) {
    let (below, mut rig) = (Below::new(), Rig::new());
    serve(&mut rig, &below);
    let well = rig.mount("well", transport);
    let ice = rig.mount_export("ice", "ice", transport);
    let brief = rig.mount_export("ice", "brief", &format!("{transport},timeout=5"));
    fs::write(ice.join("log"), "before\n").unwrap();
    fs::write(well.join("f"), "kept").unwrap();
    // Of its own: the kernel lets nobody out who waits for a directory that another process is
    // just changing.
    fs::create_dir(ice.join("own")).unwrap();
    below.stop();
    let waits = rig.start("mkdir $AT/dir && echo after >>$AT/log", &ice);
    let killed = rig.start("exec mkdir $AT/own/killed", &ice);
    rig.end_server(libc::SIGKILL);

    serve(&mut rig, &below);
    let at = well.clone();
    let read = in_time("the other export", move || {
        use_mount(&at);
        fs::read_to_string(at.join("f")).unwrap()
    });
    assert_eq!(read, "kept");
    let twin = rig.mount("twin", transport);
    in_time("a new mount of the other export", move || use_mount(&twin));
    what_is_said_of_one_that_starts(&rig);

    let error = in_time("a mount with a limit", move || fs::metadata(brief).unwrap_err());
    assert_eq!(error.raw_os_error(), Some(libc::EHOSTDOWN));
    killed.signal(libc::SIGKILL);
    rig.end_of(killed);
    assert!(!waits.is_over());

    below.go_on();
    assert!(rig.end_of(waits).success());
    assert!(ice.join("dir").is_dir());
    assert_eq!(fs::read_to_string(ice.join("log")).unwrap(), "before\nafter\n");
    let state = export_of(&rig, "ice");
    assert!(state["starting"].is_null() && state["hang"].is_null(), "{state}");
    use_mount(&ice);
    let brief = rig.path("brief");
    // Until then calls on a connection that is still away fail, for the limit is over.
    wait_for_connections(&rig, &brief);
    use_mount(&brief);
    // The mount goes before the one below it.
    rig.umount(&ice);
}

fn what_is_said_of_one_that_starts(rig: &Rig) {
    assert!(export_of(rig, "ice")["starting"]["since_s"].as_f64() > Some(0.0));
    assert!(export_of(rig, "data")["starting"].is_null());
    wait_for("the hang to be noticed", || !export_of(rig, "ice")["hang"].is_null());
    let socket = rig.path("socket");
    let text = rig.demand(&["status", socket.to_str().unwrap()]);
    let line = text.lines().find(|line| line.trim_start().starts_with("ice ")).unwrap();
    assert!(line.contains("STARTING, HANGS"), "{text}");

    let (target, at) = (rig.target().replace("export=data", "export=ice"), rig.path("late"));
    fs::create_dir(&at).unwrap();
    let refused = rig.run(&["mount", &target, at.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("`ice` is not open yet"), "{said}");
}

// proves: P112
#[test]
fn what_is_wrong_with_an_export_ends_the_start() {
    let rig = Rig::new();
    fs::write(rig.path("file"), "").unwrap();
    for (dir, said) in [("nothing", "No such file"), ("file", "not a directory")] {
        let export = format!("x={}", rig.path(dir).display());
        let well = format!("data={}", rig.path("export").display());
        let listen = format!("unix://{}", rig.path("socket").display());
        let state = rig.path("state");
        let state = state.to_str().unwrap();
        let words = ["serve", "--export", &well, "--export", &export, "--listen", &listen];
        let output = rig.run(&[&words[..], &["--state", state]].concat());
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(said), "{text}");
    }
}
