//! What the command says when it is asked for what cannot be: what happened, to what, and what
//! to do; and the exit code.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::common;
use crate::common::ports::free_port;
use crate::common::{Rig, is_mounted, wait_for};

fn said(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!text.contains("panicked"), "{text}");
    text
}

#[test]
fn addresses_that_cannot_be_listened_at() {
    let rig = Rig::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    fs::write(rig.path("file"), "mine").unwrap();
    let below = |name: &str| format!("unix://{}", rig.path(name).display());
    for (listen, code, words) in [
        (format!("tcp://127.0.0.1:{port}"), 1, "another server listens there (`ss -ltnp`"),
        (below("file"), 1, "something that is no socket"),
        (below("none/socket"), 1, "its directory must exist"),
        (below(&"x".repeat(120)), 1, "at most 107 bytes"),
        ("tcp://192.0.2.1:7440".to_owned(), 1, "this machine has no such address"),
        ("tcp://no.such.host.invalid".to_owned(), 1, "is the name right?"),
        ("tcp://::1:7440".to_owned(), 2, "goes in brackets"),
        ("tcp://127.0.0.1:99999".to_owned(), 2, "up to 65535"),
        ("unix://socket".to_owned(), 2, "absolute path"),
        ("http://127.0.0.1".to_owned(), 2, "tcp://HOST:PORT"),
    ] {
        let export = format!("a={}", rig.path("export").display());
        let state = rig.path("state");
        let args = ["serve", "--export", &export, "--listen", &listen, "--state"];
        let output = rig.run(&[&args[..], &[state.to_str().unwrap()]].concat());
        let said = said(&output);
        assert_eq!(output.status.code(), Some(code), "{listen}: {said}");
        assert!(said.contains(words), "{listen}: {said}");
    }
    assert_eq!(fs::read(rig.path("file")).unwrap(), b"mine");
}

/// Where dray.toml.example has it: only systemd had made that directory before.
#[test]
fn a_socket_beside_the_control_sockets_needs_no_directory_to_be_made() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    fs::remove_dir(rig.path("run")).unwrap();
    rig.serve(&["--listen", &format!("unix://{}", rig.path("run/serve.sock").display())]);
    assert!(std::os::unix::net::UnixStream::connect(rig.path("run/serve.sock")).is_ok());
    assert!(rig.end_server(libc::SIGTERM).success());
}

#[test]
fn an_address_listened_at_twice_is_reported_as_the_same_server() {
    if common::skipped() {
        return;
    }
    let rig = Rig::new();
    let free = free_port();
    let (all, some) = (format!("tcp://0.0.0.0:{free}"), format!("tcp://127.0.0.1:{free}"));
    let (export, state) = (format!("a={}", rig.path("export").display()), rig.path("state"));
    let args = ["serve", "--export", &export, "--listen", &all, "--listen", &some, "--state"];
    let output = rig.run(&[&args[..], &[state.to_str().unwrap()]].concat());
    let words = format!("cannot listen on {some}: this server listens on {all} already");
    assert!(said(&output).contains(&words), "{}", said(&output));
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn every_address_of_both_kinds_can_be_listened_at_in_any_order() {
    if common::skipped() {
        return;
    }
    let port = free_port();
    for hosts in [["0.0.0.0", "[::]"], ["[::]", "0.0.0.0"], ["[::]", "127.0.0.1"]] {
        let mut rig = Rig::new();
        let [first, other] = hosts.map(|host| format!("tcp://{host}:{port}"));
        rig.serve(&["--listen", &first, "--listen", &other]);
        for host in ["127.0.0.1", "::1"] {
            let there = std::net::TcpStream::connect((host, port));
            assert!(there.is_ok(), "{hosts:?}: {host}: {there:?}");
        }
        rig.end_server(libc::SIGTERM);
    }
}

/// Something that listens, and is no dray server: it sends this greeting to each connection.
fn foreign_server(greeting: &'static [u8]) -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for mut socket in listener.incoming().flatten() {
            let _ = socket.write_all(greeting); // it may have gone
            let _ = socket.read(&mut [0; 4096]);
        }
    });
    port
}

#[test]
fn targets_that_are_no_dray_servers() {
    let rig = Rig::new();
    let at = rig.path("state");
    fs::create_dir_all(&at).unwrap();
    for (greeting, words) in [
        (&b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n"[..], "what answers there is no dray server"),
        (b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", "is no dray server"),
        (b"", "is it a dray server, and has it room"),
    ] {
        let target = format!("dray://127.0.0.1:{}/data", foreign_server(greeting));
        for args in [&["mount", &target, at.to_str().unwrap()][..], &["survey", &target]] {
            let output = rig.run(args);
            let said = said(&output);
            assert_eq!(output.status.code(), Some(3), "{args:?}: {said}");
            assert!(said.contains(words), "{args:?}: {said}");
        }
    }
}

#[test]
fn keys_that_are_none() {
    let rig = Rig::new();
    for (name, text, mode) in [("empty", "", 0o600), ("short", "abc", 0o600)] {
        fs::write(rig.path(name), text).unwrap();
        fs::set_permissions(rig.path(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    fs::write(rig.path("open"), "0123456789abcdef0123").unwrap();
    fs::set_permissions(rig.path("open"), fs::Permissions::from_mode(0o644)).unwrap();
    let file = |name: &str| format!("psk:{}", rig.path(name).display());
    for (auth, words) in [
        (file("empty"), "at least 16 bytes"),
        (file("short"), "at least 16 bytes"),
        (file("open"), "chmod 600"),
        (file("none"), "there is none; make one with `dray key"),
        ("psk:/tmp".to_owned(), "it is a directory"),
        ("psk:".to_owned(), "psk:FILE"),
        ("psk".to_owned(), "psk:FILE"),
        ("pks:/key".to_owned(), "psk:FILE"),
    ] {
        let options = format!("auth={auth}");
        let (target, at) = (rig.target(), rig.path("state"));
        let mount = ["mount", &target, at.to_str().unwrap(), "-o", &options];
        for args in [&["serve", "--export", "a=/tmp", "--auth", &auth][..], &mount] {
            let output = rig.run(args);
            let said = said(&output);
            assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
            assert!(said.contains(words), "{args:?}: {said}");
        }
    }
}

/// `dray survey` named the option of a mount.
#[test]
fn a_missing_key_is_reported_with_the_option_for_it() {
    let mut rig = Rig::new();
    let key = rig.path("key");
    fs::write(&key, "0123456789abcdef").unwrap();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    rig.serve(&["--auth", &format!("psk:{}", key.display())]);
    let (target, at) = (rig.target(), rig.path("said"));
    for args in [&["survey", &target][..], &["mount", &target, at.to_str().unwrap()]] {
        let output = rig.run(args);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(4), "{args:?}: {said}");
        assert!(said.contains("-o auth=psk:FILE") && said.contains("--auth psk:FILE"), "{said}");
    }
}

#[test]
fn configurations_that_make_no_sense_are_named_with_their_file() {
    let rig = Rig::new();
    let config = rig.path("dray.toml");
    for (text, words) in [
        ("lissen = []\n", "line 1: unknown key `lissen` in the top level; did you mean `listen`?"),
        ("[export]\nname = 'a'\n", "[[export]], with two brackets"),
        ("[[export]]\nname='a'\ndir='/tmp'\nreadonly=true\n", "did you mean `read_only`?"),
        ("[[export]]\nname='a'\ndir='/tmp'\nread_only='yes'\n", "expected true or false"),
        ("[[export]]\nname='a'\ndir='/tmp'\nsquash='rot'\n", "did you mean `root`?"),
        ("[[export]]\nname='a'\n", "export `a` has no directory, as in dir = \"/srv/home\""),
        ("threads = 1\n", "has no [[export]]"),
        ("auth='pks:/key'\n[[export]]\nname='a'\ndir='/tmp'\n", "auth is none or psk:FILE"),
        ("listen = ['tpc://0.0.0.0']\n", "listen: `tpc://0.0.0.0`"),
        ("clients_max = 0\n", "would admit no client"),
        ("metrics = '9100'\n", "is not ADDR:PORT"),
        ("a = [\n", "unclosed array"),
    ] {
        fs::write(&config, text).unwrap();
        let output = rig.run(&["serve", "--config", config.to_str().unwrap()]);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(2), "{text}: {said}");
        assert!(said.contains("dray.toml: ") && said.contains(words), "{text}: {said}");
        assert!(!said.ends_with("\n\n"), "{said:?}");
    }
}

/// A missing configuration ended with 1, a missing key with 2.
#[test]
fn files_of_the_command_line_that_cannot_be_read_are_wrong_arguments() {
    let rig = Rig::new();
    let none = rig.path("none");
    let (none, key) = (none.to_str().unwrap(), format!("psk:{}", none.to_str().unwrap()));
    let option = format!("auth={key}");
    for args in [
        &["serve", "--config", none][..],
        &["serve", "--config", "/"],
        &["serve", "--export", "a=/tmp", "--auth", &key],
        &["mount", "dray://127.0.0.1/a", "/mnt", "-o", &option],
        &["survey", "dray://127.0.0.1/a", "--auth", &key],
    ] {
        let output = rig.run(args);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
        assert!(
            ["No such file", "Is a directory", "there is none"]
                .iter()
                .any(|why| said.contains(why)),
            "{args:?}: {said}"
        );
    }
}

/// What was said did not lead on, or led astray.
#[test]
fn what_is_said_leads_on() {
    let rig = Rig::new();
    fs::write(rig.path("file"), "").unwrap();
    let file = rig.path("file");
    let config = rig.path("dray.toml");
    let export = "[[export]]\nname='a'\ndir='/tmp'\nanongid=4294967295\n";
    fs::write(&config, export).unwrap();
    let serve = ["serve", "--export", "a=/tmp"];
    let mount = ["mount", "dray://127.0.0.1/a", "/mnt", "-o"];
    for (args, code, words) in [
        (&[&serve[..], &["--state", file.to_str().unwrap()]].concat()[..], 1, "is not a directory"),
        (&["serve", "--export", "a=/tmp,anonuid=4294967295"], 2, "below 4294967295"),
        (&["serve", "--config", config.to_str().unwrap()], 2, "`anongid` is a number below"),
        (&[&serve[..], &["--export", "a=/"]].concat()[..], 2, "give one of them another name"),
        (&["survey", "/tmp", "--block", "5M"], 2, "a multiple of 4K up to 1M"),
        // A directory that is missing is 1, wherever.
        (&["survey", "/nowhere/at/all"], 1, "No such file or directory (os error 2); name a"),
        (&["survey", file.to_str().unwrap()], 1, "it is not a directory"),
        (&["evict", "x", "--state", "/nowhere"], 1, "cannot find the state directory /nowhere"),
        (&["survey", "/tmp", "--block", "x"], 2, "a multiple of 4K up to 1M"),
        (&[&mount[..], &["consistency=x"]].concat()[..], 2, "close-to-open or immutable\n"),
        (&[&mount[..], &["replay=64MiB"]].concat()[..], 2, "K, M or G"),
    ] {
        let output = rig.run(args);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
        assert!(said.contains(words), "{args:?}: {said}");
    }
}

#[test]
fn a_level_of_logging_that_is_none_is_named() {
    let rig = Rig::new();
    let mut command = Command::new(env!("CARGO_BIN_EXE_dray"));
    command.arg("status").env("DRAY_RUN_DIR", rig.path("run")).env("DRAY_LOG", "verbose");
    let said = said(&command.output().unwrap());
    assert!(said.contains("DRAY_LOG=`verbose` is none of error, warn"), "{said}");
}

/// A directory that is mounted at a second place.
struct Bound(PathBuf);

impl Bound {
    fn new(dir: &Path, at: &Path) -> Bound {
        fs::create_dir_all(dir).unwrap();
        fs::create_dir(at).unwrap();
        let status = Command::new("mount").arg("--bind").args([dir, at]).status().unwrap();
        assert!(status.success());
        Bound(at.to_owned())
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// Only names were compared: locks were not shared, and nothing was logged.
#[test]
fn directories_that_two_exports_share_are_reported_whatever_they_are_called() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let (dir, link, log) = (rig.path("export"), rig.path("link"), rig.path("log"));
    fs::create_dir(dir.join("within")).unwrap();
    std::os::unix::fs::symlink(&dir, &link).unwrap();
    let again = format!("again={}", link.display());
    let within = format!("within={}", link.join("within").display());
    let round = format!("round={}/within/..", dir.display());
    // Another mount of the directory above `within`, and a mount of nothing that is exported.
    let (bound, apart) = (rig.path("bound"), rig.path("apart"));
    let _bound = Bound::new(&dir, &bound);
    let _apart = Bound::new(&rig.path("state-of-nobody"), &apart);
    let (bound, apart) =
        (format!("bound={}", bound.display()), format!("apart={}", apart.display()));
    let mut exports = vec!["--export", &again, "--export", &within, "--export", &round];
    exports.extend(["--export", &bound, "--export", &apart]);
    rig.serve_logging(&log, &exports);
    let said = fs::read_to_string(&log).unwrap();
    assert!(!said.contains("`apart`"), "{said}");
    for two in
        ["`data` and `again`", "`data` and `within`", "`again` and `within`", "`data` and `round`"]
            .into_iter()
            .chain(["`data` and `bound`", "`within` and `bound`"])
    {
        assert!(said.contains(&format!("exports {two} have files in common")), "{two}: {said}");
    }
}

#[test]
fn mount_points_that_cannot_be() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let at = rig.mount("mo unt", "");
    fs::write(rig.path("file"), "").unwrap();
    std::os::unix::fs::symlink(&at, rig.path("link")).unwrap();
    for (name, words) in [
        ("none", "make the directory first"),
        ("file", "is not a directory"),
        ("mo unt/", "has a dray mount already"),
        ("link", "has a dray mount already"),
        ("/", "would not be visible"),
    ] {
        let output = rig.run(&["mount", &rig.target(), rig.path(name).to_str().unwrap()]);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(1), "{name}: {said}");
        assert!(said.contains(words), "{name}: {said}");
    }
    // A path in the mount means the mount.
    fs::create_dir(at.join("dir")).unwrap();
    let text = rig.demand(&["status", at.join("dir").to_str().unwrap(), "--interval", "0"]);
    assert!(text.starts_with("MOUNT"), "{text}");
    let socket = format!("unix://{}", rig.path("socket").display());
    assert!(rig.demand(&["status", &socket, "--interval", "0"]).starts_with("SERVER"));
    let output = rig.run(&["status", "tcp://192.0.2.1"]);
    assert!(said(&output).contains("no server of this machine listens at tcp://192.0.2.1:7440"));
    assert_eq!(output.status.code(), Some(3), "nobody answered");
    assert_eq!(rig.run(&["status", "dray://192.0.2.1/data"]).status.code(), Some(3));
    rig.umount(&at);
}

/// "/mnt is not a mount of dray; those are: /mnt" was said of one that is covered.
#[test]
fn what_is_in_the_way_of_unmounting_is_said() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let at = rig.mount("mount", "");
    let (place, within) = (at.to_str().unwrap().to_owned(), at.join("within"));
    fs::create_dir(&within).unwrap();
    for (over, words) in [(&at, "something else mounted over it"), (&within, "findmnt -R")] {
        let mount = Command::new("mount").args(["-t", "tmpfs", "none"]).arg(over).status();
        assert!(mount.unwrap().success());
        let output = rig.run(&["umount", &place]);
        let status = rig.run(&["status", &place, "--interval", "0"]);
        assert!(Command::new("umount").arg(over).status().unwrap().success());
        assert_eq!(output.status.code(), Some(1));
        assert!(said(&output).contains(words), "{}", said(&output));
        assert!(status.status.success(), "it is there: {}", said(&status));
    }
    rig.umount(&at);
}

/// The mount was made, every call failed with ESTALE, and neither end said why.
#[test]
fn an_export_whose_directory_is_gone_is_reported_at_both_ends() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let (log, place) = (rig.path("log"), rig.path("at"));
    rig.serve_logging(&log, &[]);
    fs::create_dir(&place).unwrap();
    fs::rename(rig.path("export"), rig.path("moved")).unwrap();
    let target = rig.target();
    let mount = ["mount", &target, place.to_str().unwrap()];
    rig.demand(&mount); // a directory that was moved is the same
    rig.umount(&place);
    fs::create_dir(rig.path("export")).unwrap();
    let dir = rig.path("export").display().to_string();
    let hears =
        |words: &str| wait_for("the log", || fs::read_to_string(&log).unwrap().contains(words));
    hears(&format!("export `data`: its directory is no longer at {dir}"));
    let shown = rig.demand(&["status", "--interval", "0"]);
    assert!(shown.contains("  DIRECTORY MOVED"), "{shown}");
    fs::remove_dir(rig.path("moved")).unwrap();
    let output = rig.run(&mount);
    let said = said(&output);
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(said.contains("the directory of the export is gone"), "{said}");
    assert!(said.contains("restart `dray serve`") && !is_mounted(&place), "{said}");
    hears(&format!("export `data`: its directory {dir} is gone"));
    let shown = rig.demand(&["status", "--interval", "0"]);
    assert!(shown.contains("  DIRECTORY GONE"), "{shown}"); // and not `answers`
}

/// "Invalid argument (os error 22)" was all that was said.
#[test]
fn too_few_descriptors_are_named() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let (target, at) = (rig.target(), rig.path("said"));
    let output = Command::new("sh")
        .args(["-c", "ulimit -n 100; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_dray"), "mount"])
        .arg(&target)
        .arg(&at)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = said(&output);
    assert!(said.contains("may have 100 descriptors") && said.contains("ulimit -Hn"), "{said}");
    assert!(!is_mounted(&at));
}

/// head(1) has what it wanted, and goes.
#[test]
fn a_reader_that_goes_is_no_failure() {
    let script = "{ sleep 0.3; \"$0\" completions powershell; } | true";
    let output = Command::new("bash")
        .args(["-o", "pipefail", "-c", script, env!("CARGO_BIN_EXE_dray")])
        .output()
        .unwrap();
    assert_eq!((output.status.code(), said(&output)), (Some(0), String::new()));
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_dray"))
        .args(["completions", "bash"])
        .stdout(full)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("cannot print"), "{}", said(&output));
}

/// Where options go that are words of ours. bash, run as when TAB is pressed.
#[test]
fn completions_offer_files_where_files_go() {
    let script = r#"
        eval "$("$0" completions bash)"
        compopt() { :; }
        touch a-file
        offers() { COMP_WORDS=(dray "$@"); COMP_CWORD=$#; _dray dray "${!#}" "${@: -2:1}"; }
        offers serve --config a-; echo "config: ${COMPREPLY[*]}"
        offers mount -o a-; echo "option: ${COMPREPLY[*]}"
    "#;
    let dir = Rig::new();
    let mut bash = Command::new("bash");
    let bash = bash.args(["-c", script, env!("CARGO_BIN_EXE_dray")]).current_dir(dir.path(""));
    let output = bash.output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "config: a-file\noption: a-\n");
}

#[test]
fn a_server_that_comes_late_is_waited_for_if_asked() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let at = rig.path("late");
    fs::create_dir(&at).unwrap();
    let (target, place) = (rig.target(), at.to_str().unwrap().to_owned());
    let output = rig.run(&["mount", &target, &place]);
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));
    let begin = std::time::Instant::now();
    let output = rig.run(&["mount", &target, &place, "-o", "retry=1"]);
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));
    assert!(begin.elapsed() >= std::time::Duration::from_secs(1), "it gave up too early");
    let mounting = rig.start_command(&["mount", &target, &place, "-o", "retry=60"]);
    std::thread::sleep(std::time::Duration::from_millis(1500));
    assert!(!mounting.is_over());
    rig.serve(&[]);
    assert!(rig.end_of(mounting).success());
    assert!(is_mounted(&at));
    rig.demand(&["umount", &place]);
    // A command that gives up waiting leaves no process behind that mounts later.
    rig.end_server(libc::SIGTERM);
    let mounting = rig.start_command(&["mount", &target, &place, "-o", "retry=60"]);
    wait_for("both processes", || words_in_processes(&place) == 2);
    mounting.signal(libc::SIGTERM);
    assert!(!rig.end_of(mounting).success());
    wait_for("the end of both", || words_in_processes(&place) == 0);
}

/// Processes that have this word in their command line.
fn words_in_processes(word: &str) -> usize {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let lines = processes.filter_map(|process| fs::read(process.path().join("cmdline")).ok());
    let with = |line: &Vec<u8>| line.split(|byte| *byte == 0).any(|one| one == word.as_bytes());
    // The shell that starts things has it within a longer word.
    lines.filter(with).count()
}
