//! Slips of the pen and of the mind: what was asked for is not done otherwise in silence, and what is
//! said is what happened.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};

use crate::common::{Rig, is_mounted, skipped, wait_for};

const USER: u32 = 54_321;

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// `cto` was taken for `ro`, as was any word of three letters.
#[test]
fn options_of_other_systems_are_answered_with_those_of_dray() {
    let rig = Rig::new();
    let mount = |options: &str| rig.run(&["mount", "dray://127.0.0.1/a", "/mnt", "-o", options]);
    for (options, words) in [
        ("cto", "`cto`: by default (consistency=strict) each call sees"),
        ("ro,noac", "`noac`: attr_timeout=SECONDS under consistency=close-to-open"),
        ("soft,timeo=600", "`soft`: calls wait for ever, and can be killed; timeout=SECONDS"),
        ("qxz", "`qxz`; there are: timeout"),
        ("to", "`to`; there are: timeout"),
        ("timeot=3", "did you mean `timeout`?"),
        ("replay=64", "`replay=64`: without a unit it is 64 bytes; say 64M"),
    ] {
        let output = mount(options);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(2), "{options}: {said}");
        assert!(said.contains(words) && !said.contains("mean `ro`"), "{options}: {said}");
    }
    for (export, words) in [
        ("a=/tmp,allow=10.1.1.1/8", "say 10.0.0.0/8 for all of these, or 10.1.1.1 for that one"),
        ("a=/tmp,allow=10.0.0.0/8,10.1.1.1/16", "say 10.1.0.0/16 for all of these"),
        ("a=/tmp,no_root_squash", "`no_root_squash`: squash=none"),
    ] {
        let output = rig.run(&["serve", "--export", export]);
        assert_eq!(output.status.code(), Some(2), "{export}: {}", said(&output));
        assert!(said(&output).contains(words), "{export}: {}", said(&output));
    }
    let config = rig.path("dray.toml");
    fs::write(&config, "[[export]]\nname='a'\ndir='/tmp'\nallow=['fd00::1/8']\n").unwrap();
    let output = rig.run(&["serve", "--config", config.to_str().unwrap()]);
    assert!(
        said(&output).contains("export `a`: `fd00::1/8` is an address and no range: say fd00::/8")
    );
}

/// The messages were of a directory that could not be made, of a file that could not be read, or of a key.
#[test]
fn the_need_to_be_root_to_serve_is_reported_first() {
    if skipped() {
        return;
    }
    let rig = Rig::new();
    let dray = rig.path("dray");
    rig.copy_program(std::path::Path::new(env!("CARGO_BIN_EXE_dray")), &dray);
    fs::set_permissions(rig.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    let closed = rig.path("closed");
    fs::write(&closed, "[[export]]\nname='a'\ndir='/tmp'\n").unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o600)).unwrap();
    let (closed, key) = (closed.to_str().unwrap(), format!("psk:{}", closed.display()));
    for args in [
        &["serve", "--export", "a=/tmp"][..],
        &["serve", "--export", "a=/tmp", "--state", "/nowhere/at/all"],
        &["serve", "--export", "a=/nowhere", "--listen", "tcp://127.0.0.1:1"],
        &["serve", "--config", closed],
        &["serve", "--export", "a=/tmp", "--auth", &key],
    ] {
        let output = rig.run_as(USER, &[], dray.to_str().unwrap(), args);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {said}");
        assert!(said.starts_with("dray: `dray serve` must be started by root"), "{args:?}: {said}");
    }
}

/// The remount succeeded, and changed nothing.
#[test]
fn a_remount_that_asks_for_more_than_flags_fails() {
    if skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let at = rig.mount("mount", "timeout=60");
    let (target, place) = (rig.target(), at.to_str().unwrap().to_owned());
    let remount = |options: &str| rig.run(&["mount", &target, &place, "-o", options]);
    for (options, words) in [
        ("remount,consistency=close-to-open", "it has consistency=strict, and"),
        ("remount,ro,timeout=5", "it has timeout=60, and timeout=5 takes another mount"),
        ("remount,replay=0", "`dray umount"),
        ("remount,noallow_other", "a remount changes ro, rw, suid, dev and exec alone"),
    ] {
        let output = remount(options);
        assert_eq!(output.status.code(), Some(1), "{options}: {}", said(&output));
        assert!(said(&output).contains(words), "{options}: {}", said(&output));
    }
    assert!(fs::write(at.join("file"), "written").is_ok(), "nothing of that was done");
    assert!(remount("remount,ro,timeout=60,consistency=strict").status.success());
    assert!(fs::write(at.join("file"), "written").is_err());
    rig.umount(&at);
}

/// The log had the first reason alone, which was not what was wrong any more.
#[test]
fn another_key_is_reported_at_the_server_also_behind_none() {
    if skipped() {
        return;
    }
    let mut rig = Rig::new();
    let [key, other] = ["key", "other"].map(|name| rig.path(name));
    for key in [&key, &other] {
        rig.demand(&["key", key.to_str().unwrap()]);
    }
    let log = rig.path("log");
    rig.serve_logging(&log, &["--auth", &format!("psk:{}", key.display())]);
    let at = rig.path("at");
    fs::create_dir(&at).unwrap();
    let mount = |auth: &str| {
        rig.run(&["mount", &rig.target(), at.to_str().unwrap(), "-o", &format!("auth={auth}")])
    };
    assert_eq!(mount("none").status.code(), Some(4));
    assert_eq!(mount(&format!("psk:{}", other.display())).status.code(), Some(4));
    wait_for("the log", || {
        fs::read_to_string(&log).unwrap().contains("; perhaps its key is another one")
    });
    let text = fs::read_to_string(&log).unwrap();
    let lines: Vec<&str> = text.lines().filter(|line| line.contains("in its handshake")).collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert!(lines[0].contains("the server wants a shared key"), "{text}");
    assert!(!is_mounted(&at));
}

/// A name that turns the direction of what is around it looked like another one.
#[test]
fn names_that_turn_letters_round_are_shown_and_not_obeyed() {
    if skipped() {
        return;
    }
    const TURNING: &str = "in\u{202e}fdp\u{2066}x\u{200f}y\u{61c}z";
    let turns =
        |text: &str| text.chars().any(|letter| "\u{202e}\u{2066}\u{200f}\u{61c}".contains(letter));
    let (mut rig, at) = Rig::mounted("");
    fs::write(at.join(TURNING), "").unwrap();
    fs::create_dir(rig.path(TURNING)).unwrap();
    let script = format!("exec 9>>\"$AT/{TURNING}\"; flock 9; exec flock \"$AT/{TURNING}\" true");
    let waiting = rig.start(&script, &at);
    let names_in = |args: &[&str]| {
        let text = rig.demand(args);
        assert!(!turns(&text), "{text:?}");
        text
    };
    wait_for("the lock in the status", || {
        let text = names_in(&["status", "--json"]);
        let reports =
            text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let shows = |report: serde_json::Value| {
            let paths = report["operations"].as_array().unwrap();
            paths.iter().any(|one| one["path"].as_str().is_some_and(|path| path.ends_with(TURNING)))
        };
        reports.map(shows).filter(|shown| *shown).count() == 2
    });
    let text = names_in(&["status"]);
    assert!(text.contains("in?fdp?x?y?z"), "{text}");
    let missing = rig.path(TURNING).join("none");
    let output = rig.run(&["status", missing.to_str().unwrap()]);
    assert!(!turns(&said(&output)) && said(&output).contains("\\u{202e}"), "{}", said(&output));
    waiting.signal(libc::SIGKILL);
    rig.umount(&at);
}

/// The completions offered no options of mounts. The test runs bash as when TAB is pressed.
#[test]
fn completions_offer_the_options_of_mounts() {
    let script = r#"
        eval "$("$0" completions bash)"
        compopt() { :; }
        offers() { COMP_WORDS=(dray "$@"); COMP_CWORD=$#; _dray dray "${!#}" "${@: -2:1}"; }
        offers mount -o ti; echo "${COMPREPLY[*]}"
        offers mount -o ro,nosu; echo "${COMPREPLY[*]}"
        offers mount -o consistency=i; echo "${COMPREPLY[*]}"
        # As bash takes a line to pieces.
        line() { COMP_LINE="$1"; COMP_POINT=${#COMP_LINE}; shift; offers "$@"; echo "${COMPREPLY[*]}"; }
        line "dray mount -o ro,transport=u" mount -o ro,transport = u
        line "dray mount dray://h/x /mnt -o consistency=" mount dray : //h/x /mnt -o consistency =
        line "dray mount -o ro /mnt -" mount -o ro /mnt -
    "#;
    let mut bash = Command::new("bash");
    let output = bash.args(["-c", script, env!("CARGO_BIN_EXE_dray")]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let lines: Vec<&str> = text.lines().collect();
    let expected = [
        "timeout=",
        "ro,nosuid",
        "consistency=immutable",
        "uring",
        "strict close-to-open immutable",
    ];
    assert_eq!(lines[..5], expected, "{text}{}", said(&output));
    assert!(lines[5].contains("--foreground"), "{text}");
}
