//! The command as a user meets it: the real binary, real sockets, real mounts. Needs root.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::Command;

use crate::common;
use crate::common::ports::free_port;
use crate::common::{Pid, Rig, is_mounted, wait_for};
use serde_json::Value;

fn stderr(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn status(rig: &Rig, target: &str) -> Vec<Value> {
    let text = rig.demand(&["status", target, "--json", "--interval", "0"]);
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

// proves: P5
#[test]
fn what_one_mount_writes_another_reads() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let (one, two) = (rig.mount("one", "rw"), rig.mount("two", "ro,consistency=close-to-open"));
    let content: Vec<u8> = (0..3_000_000u32).map(|n| (n % 253) as u8).collect();
    fs::create_dir(one.join("dir")).unwrap();
    fs::write(one.join("dir/file"), &content).unwrap();
    assert_eq!(fs::read(two.join("dir/file")).unwrap(), content);
    assert_eq!(fs::read(rig.path("export/dir/file")).unwrap(), content);
    let error = fs::write(two.join("other"), "x").unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EROFS));
    rig.umount(&one);
    rig.umount(&two);
}

/// As their options say: by TCP, whose clients have addresses.
// proves: P52, P120
#[test]
fn exports_are_for_whom_and_for_what_they_are_offered() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let listen = format!("127.0.0.1:{}", free_port());
    let export = |name: &str, options: &str| {
        let dir = rig.path(name);
        fs::create_dir(&dir).unwrap();
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
        format!("{name}={}{options}", dir.display())
    };
    // 192.0.2.0/24 is nobody's (RFC 5737).
    let elsewhere = export("elsewhere", ",allow=192.0.2.0/24,squash=none");
    let here = export("here", ",allow=192.0.2.0/24,allow=127.0.0.0/8");
    let fixed = export("fixed", ",ro,squash=none");
    let listening = format!("tcp://{listen}");
    let exports = ["--export", &*elsewhere, "--export", &*here, "--export", &*fixed];
    rig.serve(&[&exports[..], &["--listen", &*listening]].concat());
    let at = rig.path("by-address");
    fs::create_dir(&at).unwrap();
    let mount = |rig: &Rig, export: &str| {
        rig.run(&["mount", &format!("dray://{listen}/{export}"), at.to_str().unwrap()])
    };
    let refused = mount(&rig, "elsewhere");
    assert_eq!(refused.status.code(), Some(4), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("is not open to 127.0.0.1"), "{}", stderr(&refused));
    assert!(!is_mounted(&at));

    assert!(mount(&rig, "here").status.success());
    let made = fs::write(at.join("file"), "root's").and_then(|()| fs::metadata(at.join("file")));
    rig.umount(&at);
    let made = made.unwrap();
    assert_eq!((made.uid(), made.gid()), (65_534, 65_534), "root is squashed unless asked for");

    assert!(mount(&rig, "fixed").status.success());
    let written = fs::write(at.join("file"), "new");
    rig.umount(&at);
    assert_eq!(written.unwrap_err().raw_os_error(), Some(libc::EROFS));

    // To a Unix socket come those whom its mode lets in.
    let local = rig.mount_export("elsewhere", "local", "");
    fs::write(local.join("file"), "root's").unwrap();
    assert_eq!(fs::metadata(rig.path("elsewhere/file")).unwrap().uid(), 0);
    rig.umount(&local);
}

#[test]
fn the_status_shows_server_and_mounts() {
    if common::skipped() {
        return;
    }
    let (mut rig, at) = Rig::mounted("");
    fs::write(at.join("file"), vec![1; 100_000]).unwrap();
    let open = fs::File::open(at.join("file")).unwrap();
    let mount = &status(&rig, at.to_str().unwrap())[0];
    assert_eq!(mount["kind"], "mount");
    assert_eq!(mount["target"], rig.target());
    assert_eq!(mount["server"]["connected"], true);
    assert_eq!((&mount["written_bytes"], &mount["read_bytes"]), (&100_000.into(), &0.into()));
    assert!(mount["open_files"].as_u64().unwrap() >= 1, "{mount}");
    let server = &status(&rig, "data")[0];
    assert_eq!(server["kind"], "server");
    assert_eq!(server["clients"].as_array().unwrap().len(), 1, "{server}");
    assert_eq!(server["clients"][0]["written_bytes"], 100_000);
    assert!(server["clients"][0]["open_files"].as_u64().unwrap() >= 1);
    assert_eq!(server["exports"][0]["ops"]["write"]["bytes"], 100_000);
    assert_eq!(server["buffers"]["used_bytes"], 0);
    let both = status(&rig, &rig.target());
    assert_eq!(both.iter().map(|one| &one["kind"]).collect::<Vec<_>>(), ["server", "mount"]);
    let other = rig.target().replace("data", "other");
    assert_eq!(rig.run(&["status", &other]).status.code(), Some(1));
    let text = rig.demand(&["status", "--interval", "0.1"]);
    for part in ["SERVER", "MOUNT", "CLIENT", "operations/s", "data"] {
        assert!(text.contains(part), "{part} is missing in\n{text}");
    }
    let session = server["clients"][0]["session"].as_str().unwrap();
    assert!(rig.demand(&["evict", session]).contains("evicted 1"));
    assert_eq!(rig.run(&["evict", "nobody"]).status.code(), Some(1));
    drop(open);
    rig.umount(&at);
    let gone = || rig.run(&["status", at.to_str().unwrap()]).status.code() == Some(1);
    wait_for("the end of the mount", gone);
}

#[test]
fn calls_under_way_are_shown_with_path_user_and_job() {
    if common::skipped() {
        return;
    }
    let (mut rig, at) = Rig::mounted("");
    fs::create_dir(at.join("dir")).unwrap();
    let script = "exec 9>$AT/dir/held; flock 9; \
        SLURM_JOB_ID=77 flock $AT/dir/held true & WAITER=$!; \
        read go < $AT/../go; kill $WAITER; wait";
    let go = at.join("../go");
    assert!(Command::new("mkfifo").arg(&go).status().unwrap().success());
    let pid = rig.start(script, &at);
    let waiting = |of: &str| {
        let operations = status(&rig, of)[0]["operations"].as_array().unwrap().clone();
        operations.into_iter().find(|one| one["job"] == "77")
    };
    wait_for("the lock to be waited for", || {
        waiting("data").is_some() && waiting(at.to_str().unwrap()).is_some()
    });
    let held = |dir: &str| rig.path(dir).join("dir/held").display().to_string();
    let (server, mount) = (waiting("data").unwrap(), waiting(at.to_str().unwrap()).unwrap());
    assert_eq!((&server["path"], &server["op"]), (&held("export").into(), &"lock".into()));
    assert_eq!((&mount["path"], &mount["op"]), (&held("mount").into(), &"setlkw".into()));
    for operation in [server, mount] {
        assert_eq!(operation["uid"], 0);
        assert!(operation["age_s"].as_f64().is_some_and(|age| age > 0.0), "{operation}");
    }
    fs::write(go, "\n").unwrap();
    rig.end_of(pid);
}

// proves: P79
#[test]
fn a_server_that_returns_is_gone_on_with() {
    if common::skipped() {
        return;
    }
    let (mut rig, at) = Rig::mounted("");
    let mut file = fs::File::create(at.join("file")).unwrap();
    file.write_all(b"before ").unwrap();
    assert!(rig.end_server(libc::SIGTERM).success());
    assert!(!rig.path("socket").exists(), "the socket is left behind");
    let writer = std::thread::spawn(move || file.write_all(b"and after"));
    std::thread::sleep(std::time::Duration::from_millis(200));
    rig.serve(&[]);
    writer.join().unwrap().unwrap();
    assert_eq!(fs::read(rig.path("export/file")).unwrap(), b"before and after");
    rig.umount(&at);
}

/// The server was said to be away, and the message did not say what was wrong.
#[test]
fn the_status_says_why_a_server_does_not_take_a_mount() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let key = |name: &str, content: &str| {
        fs::write(rig.path(name), content).unwrap();
        fs::set_permissions(rig.path(name), fs::Permissions::from_mode(0o600)).unwrap();
        format!("psk:{}", rig.path(name).display())
    };
    let (ours, other) = (key("ours", "0123456789abcdef"), key("other", "fedcba9876543210"));
    rig.serve(&["--auth", &ours]);
    let at = rig.mount("mount", &format!("auth={ours}"));
    let place = at.to_str().unwrap();
    let error = || status(&rig, place)[0]["server"]["error"].clone();
    assert_eq!(error(), Value::Null);
    rig.end_server(libc::SIGTERM);
    let says = |rig: &Rig, what: &str| {
        let error = status(rig, place)[0]["server"]["error"].clone();
        error.as_str().is_some_and(|error| error.contains(what))
    };
    wait_for("nobody to be there", || says(&rig, "is `dray serve` running there?"));
    let log = rig.path("log");
    rig.serve_logging(&log, &["--auth", &other]);
    wait_for("the other key to be noticed", || says(&rig, "compare the key files"));
    // There it was a connection that somebody had closed.
    wait_for("the server's log to say so, too", || {
        fs::read_to_string(&log).unwrap().contains("; perhaps its key is another one")
    });
    let text = rig.demand(&["status", "--interval", "0", place]);
    assert!(text.contains("AWAY") && text.contains("compare the key files"), "{text}");
    rig.end_server(libc::SIGTERM);
    rig.serve(&["--auth", &ours]);
    wait_for("the end of it", || status(&rig, place)[0]["server"]["error"].is_null());
    assert_eq!(status(&rig, place)[0]["server"]["connected"], true);
    rig.umount(&at);
}

/// The mount was looked at to find out whether it is a socket.
#[test]
fn a_mount_whose_server_is_away_tells_its_status() {
    if common::skipped() {
        return;
    }
    let (mut rig, at) = Rig::mounted("");
    std::os::unix::fs::symlink(&at, rig.path("link")).unwrap();
    rig.end_server(libc::SIGKILL);
    for path in [at.clone(), at.join("some/where"), rig.path("link"), rig.path("link/there")] {
        wait_for("the daemon to notice", || {
            let mut status = std::process::Command::new("timeout");
            status.args(["-s", "KILL", "60", env!("CARGO_BIN_EXE_dray"), "status", "--json"]);
            status.args(["--interval", "0"]).arg(&path).env("DRAY_RUN_DIR", rig.path("run"));
            let output = status.output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success(), "{}: {}", path.display(), stderr(&output));
            said.contains("\"connected\":false")
        });
    }
    for words in [&["mount", &rig.target()][..], &["umount", "--lazy"]] {
        let mut command = std::process::Command::new("timeout");
        command.args(["-s", "KILL", "60", env!("CARGO_BIN_EXE_dray")]).args(words);
        command.arg(rig.path("link")).env("DRAY_RUN_DIR", rig.path("run"));
        let code = command.status().unwrap().code();
        assert_eq!(code, Some(i32::from(words[0] == "mount")), "{words:?} of a link");
    }
    assert!(!is_mounted(&at));
}

#[test]
fn errors_come_before_anything_is_mounted() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let at = rig.path("export");
    let at = at.to_str().unwrap();
    let wrong_export = rig.target().replace("export=data", "export=dta");
    let nobody = rig.target().replace("socket", "nowhere");
    for (target, options, code, hint) in [
        (wrong_export.as_str(), "rw", 4, "data"),
        (nobody.as_str(), "rw", 3, "dray serve"),
        (&rig.target(), "timeot=3", 2, "`timeout`"),
        (&rig.target(), "auth=psk:/nowhere", 2, "/nowhere"),
        ("dray://h", "rw", 2, "no export"),
    ] {
        let output = rig.run(&["mount", target, at, "-o", options]);
        assert_eq!(output.status.code(), Some(code), "{target} {options}");
        assert!(stderr(&output).contains(hint), "{target}: {}", stderr(&output));
    }
    let output = rig.run(&["mount", &rig.target(), "/nowhere/at/all"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(!is_mounted(&rig.path("export")));
    let output = rig.run(&["umount", at]);
    assert!(!output.status.success() && stderr(&output).contains("not a mount"));
}

/// Several found the place free at the same moment, and each of them mounted there.
#[test]
fn of_several_that_mount_at_one_place_at_once_one_does() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let at = rig.path("mount");
    fs::create_dir(&at).unwrap();
    let (target, place) = (rig.target(), at.to_str().unwrap().to_owned());
    let mounting: Vec<Pid> =
        (0..8).map(|_| rig.start_command(&["mount", &target, &place])).collect();
    let mut codes: Vec<i32> =
        mounting.into_iter().map(|one| common::exit_code(rig.end_of(one))).collect();
    codes.sort_unstable();
    let mut mounts = 0;
    while common::is_mounted(&at) {
        mounts += 1;
        Command::new("umount").arg("-l").arg(&at).status().unwrap();
    }
    assert_eq!((mounts, &codes[..]), (1, &[0, 1, 1, 1, 1, 1, 1, 1][..]));
}

#[test]
fn a_mount_that_is_in_use_says_what_to_do() {
    if common::skipped() {
        return;
    }
    let (rig, at) = Rig::mounted("");
    let file = fs::File::create(at.join("file")).unwrap();
    let output = rig.run(&["umount", at.to_str().unwrap()]);
    assert!(!output.status.success() && stderr(&output).contains("--lazy"), "{}", stderr(&output));
    assert!(rig.run(&["mount", &rig.target(), at.to_str().unwrap()]).status.code() == Some(1));
    rig.demand(&["umount", "--lazy", at.to_str().unwrap()]);
    assert!(!is_mounted(&at));
    drop(file);
}

#[test]
fn mount_8_finds_its_helper() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let at = rig.mount("other", "");
    rig.umount(&at);
    let (target, at) = (rig.target(), at.to_str().unwrap().to_owned());
    rig.demand(&["mount.dray", &target, &at, "-f", "-o", "rw,noauto,_netdev,x-systemd.automount"]);
    assert!(!is_mounted(&rig.path("other")));
    let output = rig.run(&["mount.dray", &target, &at, "-o", "nonsense"]);
    assert_eq!(output.status.code(), Some(1));
    let nobody = target.replace("socket", "nowhere");
    assert_eq!(rig.run(&["mount.dray", &nobody, &at]).status.code(), Some(32));
    rig.demand(&["mount.dray", &target, &at, "-sn", "-o", "rw,nosuid,nodev"]);
    assert!(is_mounted(&rig.path("other")));
    rig.demand(&["umount", &at]);
}

#[test]
fn exports_that_cannot_be_are_refused_by_name() {
    let rig = Rig::new();
    let dir = rig.path("export");
    std::fs::write(dir.join("file"), "").unwrap();
    let (dir, state) = (dir.to_str().unwrap().to_owned(), rig.path("state"));
    let serve = |exports: &[String]| {
        let mut args = vec!["serve", "--listen", "unix:///nowhere/socket", "--state"];
        args.push(state.to_str().unwrap());
        exports.iter().for_each(|export| args.extend(["--export", export]));
        let output = rig.run(&args);
        (output.status.code(), stderr(&output))
    };
    for (exports, code, words) in [
        (vec![format!("a={dir}/none")], 1, "cannot export"),
        (vec![format!("a={dir}/file")], 1, "it is not a directory"),
        (vec!["a=/dev/null".into()], 1, "it is not a directory"),
        (vec![format!("a={dir}"), "a=/".into()], 2, "two exports are called `a`"),
        (vec![format!("a/b={dir}")], 2, "cannot name an export"),
        (vec![format!("..={dir}")], 2, "cannot name an export"),
        (vec![format!("={dir}")], 2, "is empty"),
        (vec!["a=".into()], 2, "has no directory"),
        (vec![format!("{}={dir}", "n".repeat(65))], 2, "at most 64 characters"),
    ] {
        let (ended, said) = serve(&exports);
        assert_eq!(ended, Some(code), "{exports:?}: {said}");
        assert!(said.contains(words), "{exports:?}: {said}");
    }
    // The root of all is a directory as others are, and holds the state.
    let (_, said) = serve(&["root=/".into()]);
    assert!(said.contains("`root` holds this server's state directory"), "{said}");
}

#[test]
fn two_servers_do_not_share_a_state() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let (export, state) = (rig.path("export"), rig.path("state"));
    let export = format!("x={}", export.display());
    let state = state.to_str().unwrap();
    let listen = format!("unix://{}", rig.path("socket2").display());
    let args = ["serve", "--export", &export, "--listen", &listen, "--state", state];
    let output = rig.run(&args);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("another dray server"), "{}", stderr(&output));
}

// proves: P22
#[test]
fn keys_faults_and_metrics_by_configuration() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let key = rig.path("key");
    fs::write(&key, "a key that both sides know\n").unwrap();
    fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let config = rig.path("dray.toml");
    let text = format!(
        "auth = 'psk:{}'\nfaults = true\nmetrics = '127.0.0.1:0'\n[[fault]]\nop = 'setxattr'\n\
         error = 'EDQUOT'\n",
        key.display()
    );
    fs::write(&config, text).unwrap();
    let metrics = format!("127.0.0.1:{}", free_port());
    rig.serve(&["--config", config.to_str().unwrap(), "--metrics", &metrics]);
    let refused = rig.run(&["mount", &rig.target(), rig.path("state").to_str().unwrap()]);
    assert_eq!(refused.status.code(), Some(4), "{}", stderr(&refused));
    let at = rig.mount("mount", &format!("auth=psk:{}", key.display()));
    fs::write(at.join("file"), "x").unwrap();
    let path = std::ffi::CString::new(at.join("file").to_str().unwrap()).unwrap();
    // SAFETY: all pointers are to C strings and a byte that outlive the call.
    let set =
        unsafe { libc::setxattr(path.as_ptr(), c"user.a".as_ptr(), b"1".as_ptr().cast(), 1, 0) };
    let error = std::io::Error::last_os_error();
    assert_eq!((set, error.raw_os_error()), (-1, Some(libc::EDQUOT)));
    let get = |path: &str| {
        let mut socket = TcpStream::connect(&metrics).unwrap();
        socket.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).unwrap();
        let mut reply = String::new();
        socket.read_to_string(&mut reply).unwrap();
        reply
    };
    let reply = get("/metrics");
    assert!(reply.starts_with("HTTP/1.0 200 OK"), "{reply}");
    let counted = "dray_errors_total{export=\"data\",op=\"setxattr\",errno=\"EDQUOT\"} 1";
    assert!(reply.contains(counted), "{reply}");
    assert!(get("/healthz").ends_with("ok\n"));
    assert!(get("/other").starts_with("HTTP/1.0 404"));
    rig.umount(&at);
}

/// exec(2) closes the files of the mount that the child has inherited. It holds a lock then without
/// which the kernel shows nobody the child's environment.
#[test]
fn a_child_that_closes_files_of_the_mount_can_be_started() {
    if common::skipped() {
        return;
    }
    let (mut rig, at) = Rig::mounted("");
    let file = fs::File::create(at.join("file")).unwrap();
    let mut children: Vec<_> =
        (0..8).map(|_| std::process::Command::new("true").spawn().unwrap()).collect();
    assert!(children.iter_mut().all(|child| child.wait().unwrap().success()));
    drop(file);
    rig.umount(&at);
}
