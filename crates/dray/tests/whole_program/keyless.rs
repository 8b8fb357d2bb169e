//! Callers for whom a client may speak: with a key, without one, over TCP and by a Unix socket.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::process::{Command, Output};

use crate::common::ports::free_port;
use crate::common::{LEAVE_OTHERS_MOUNTS, Rig, is_mounted, skipped};

/// An ordinary user.
const USER: u32 = 54_321;

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The program, where everybody may run it.
fn program(rig: &Rig) -> String {
    let program = rig.path("dray");
    rig.copy_program(std::path::Path::new(env!("CARGO_BIN_EXE_dray")), &program);
    fs::set_permissions(rig.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    program.to_str().unwrap().to_owned()
}

/// A directory of the user's.
fn users(rig: &Rig, name: &str) -> PathBuf {
    let dir = rig.path(name);
    fs::create_dir(&dir).unwrap();
    std::os::unix::fs::chown(&dir, Some(USER), Some(USER)).unwrap();
    dir
}

/// Any user of a client was any other: he read files of mode 0600 of others.
// proves: P118
#[test]
fn without_a_key_ordinary_users_do_not_speak_for_others() {
    if skipped() {
        return;
    }
    let mut rig = Rig::new();
    let (log, port) = (rig.path("log"), free_port());
    let (listen, open) = (
        format!("tcp://127.0.0.1:{port}"),
        format!("open={},insecure", users(&rig, "o").display()),
    );
    let narrow = format!("narrow={},allow=127.0.0.1", rig.path("export").display());
    rig.serve_logging(&log, &["--listen", &listen, "--export", &open, "--export", &narrow]);
    let (dray, at) = (program(&rig), users(&rig, "at"));
    let at = at.to_str().unwrap();
    let target = |export: &str| format!("dray://127.0.0.1:{port}/{export}");
    let refusals = |words: &[&str], limit: &[&str]| {
        for export in ["data", "narrow"] {
            let target = target(export);
            let words: Vec<&str> =
                words.iter().map(|&word| if word == "TARGET" { &target } else { word }).collect();
            let output = rig.run_as(USER, limit, &dray, &words);
            let said = said(&output);
            assert_eq!(output.status.code(), Some(4), "{words:?}: {said}");
            for word in ["ports below 1024 only", "use a key at both ends", "`insecure`"] {
                assert!(said.contains(word), "{words:?}: {said}");
            }
        }
    };
    refusals(&["mount", "TARGET", at], &[]);
    refusals(&["survey", "TARGET"], &[]);
    // Root of a namespace that he made himself has all capabilities there, and no such port here.
    refusals(&["mount", "TARGET", at], &["unshare", "-Ur"]);
    refusals(&["mount", "TARGET", at], &["unshare", "-Urm"]);
    let text = fs::read_to_string(&log).unwrap();
    assert!(text.contains("ended in its handshake: export `data` takes clients"), "{text}");
    // Every listener without a key is warned of, whichever users are allowed, and what is open to all.
    assert!(text.contains(&format!("no key is asked for at {listen}")), "{text}");
    let insecure =
        format!("export `open` is insecure: every user of each machine that gets to {listen}");
    assert!(text.contains(&insecure) && !text.contains("`data` is insecure"), "{text}");
    let survey =
        ["survey", &target("open"), "--seconds", "0.01", "--threads", "1", "--block", "4K"];
    let output = rig.run_as(USER, &[], &dray, &survey);
    assert!(output.status.success(), "{}", said(&output));
    // Root need not say anything.
    for (export, name) in [("data", "one"), ("narrow", "other")] {
        let at = rig.path(name);
        fs::create_dir(&at).unwrap();
        rig.demand(&["mount", &target(export), at.to_str().unwrap()]);
        fs::write(at.join(name), "content").unwrap_or_else(|_| assert_eq!(export, "narrow"));
        rig.demand(&["umount", at.to_str().unwrap()]);
    }
    assert_eq!(fs::read(rig.path("export/one")).unwrap(), b"content");
}

/// With a key it does not matter where a client comes from, nor who it is.
#[test]
fn who_has_the_key_comes_from_any_port() {
    if skipped() {
        return;
    }
    let mut rig = Rig::new();
    let (log, port) = (rig.path("log"), free_port());
    let key = rig.path("key");
    rig.demand(&["key", key.to_str().unwrap()]);
    let again = rig.run(&["key", key.to_str().unwrap()]);
    assert!(said(&again).contains("name another file"), "{}", said(&again));
    let (listen, auth) = (format!("tcp://127.0.0.1:{port}"), format!("psk:{}", key.display()));
    rig.serve_logging(&log, &["--listen", &listen, "--auth", &auth]);
    assert!(!fs::read_to_string(&log).unwrap().contains("no key is asked for"));
    fs::set_permissions(rig.path("export"), fs::Permissions::from_mode(0o777)).unwrap();
    let (dray, target) = (program(&rig), format!("dray://127.0.0.1:{port}/data"));
    let his = rig.path("his");
    fs::copy(&key, &his).unwrap();
    std::os::unix::fs::chown(&his, Some(USER), Some(USER)).unwrap();
    let his = format!("psk:{}", his.display());
    let survey = ["survey", &target, "--seconds", "0.01", "--threads", "1", "--block", "4K"];
    let output = rig.run_as(USER, &[], &dray, &[&survey[..], &["--auth", &his]].concat());
    assert!(output.status.success(), "{}", said(&output));
    let output = rig.run_as(USER, &[], &dray, &survey);
    assert_eq!(output.status.code(), Some(4), "{}", said(&output));
}

/// Where the socket was opened to users each of them could be anybody.
// proves: P118
#[test]
fn a_user_at_the_unix_socket_is_himself() {
    if skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    fs::set_permissions(rig.path("socket"), fs::Permissions::from_mode(0o666)).unwrap();
    fs::set_permissions(rig.path("export"), fs::Permissions::from_mode(0o777)).unwrap();
    let dray = program(&rig);
    let (survey, target) = (rig.path("export/survey"), rig.target());
    // Files of a survey are made as the user that the surveying process names, and are listed while it lasts.
    let words = format!(
        "{dray} survey '{target}' --seconds 0.5 --threads 1 --block 4K > /dev/null & \
         while ! ls -n {0}/.dray-survey* 2> /dev/null; do sleep 0.05; done; kill $!; wait || true",
        rig.path("export").display()
    );
    drop(survey);
    for (limit, expected) in [(&[][..], USER), (&["unshare", "-Ur"], USER)] {
        let output = rig.run_as(USER, limit, "sh", &["-c", &words]);
        let listed = String::from_utf8_lossy(&output.stdout).into_owned();
        let owner = listed.lines().find_map(|line| line.split_whitespace().nth(2)?.parse().ok());
        assert_eq!(owner, Some(if limit.is_empty() { expected } else { 0 }), "{listed}");
        let made = fs::read_dir(rig.path("export")).unwrap().flatten();
        for file in made {
            assert_eq!(file.metadata().unwrap().uid(), expected);
        }
    }
}

/// What the README tells people to type, word for word, in a network and a tree of its own.
// proves: P118
#[test]
fn the_quick_start_lets_no_user_be_another() {
    if skipped() {
        return;
    }
    const README: &str = include_str!("../../../../README.md");
    let section =
        README.split("\n## ").find(|section| section.starts_with("Two commands")).unwrap();
    let line = |command: &str| {
        let found = section.lines().find_map(|line| {
            line.trim_start().strip_prefix(command).map(|rest| format!("{command}{rest}"))
        });
        found.unwrap_or_else(|| panic!("no `{command}` in {section}"))
    };
    let rig = Rig::new();
    let dray = program(&rig);
    let script = r#"
        ip link set lo up
        ip address add 10.0.0.1/8 dev lo
        for dir in /etc /srv /home /var/lib /run; do mount -t tmpfs -o mode=755 none $dir; done
        echo 10.0.0.1 node1 > /etc/hosts
        echo hosts: files > /etc/nsswitch.conf
        mkdir /etc/dray /srv/home
        echo secret > /srv/home/secret
        chown 1000 /srv/home/secret
        chmod 600 /srv/home/secret
        PATH="$(dirname "$DRAY"):$PATH"
        KEY
        SERVE & SERVER=$!
        trap 'umount -l /home 2> /dev/null || true; kill $SERVER; wait' EXIT
        n=0; until "$DRAY" status home > /dev/null 2>&1 || [ $n = 600 ]; do n=$((n+1)); sleep 0.1; done
        MOUNT

        setpriv --reuid 1000 --regid 1000 --clear-groups cat /home/secret
        mkdir /run/at
        chmod 777 /run/at
        for way in "" "unshare -Ur" "unshare -Urmn"; do
            for option in rw auth=none; do
                setpriv --reuid 2000 --regid 2000 --clear-groups $way \
                    "$DRAY" mount dray://10.0.0.1/home /run/at -o $option 2> /dev/null && echo "in: $way"
            done
        done
        setpriv --reuid 2000 --regid 2000 --clear-groups cat /home/secret 2> /dev/null && echo read
        "$DRAY" umount /home
        echo done
    "#;
    let script =
        script.replace("KEY", &line("dray key")).replace("SERVE &", &(line("dray serve") + " &"));
    let script = script.replace("MOUNT\n", &(line("dray mount") + "\n"));
    let output = Command::new("unshare")
        .args(["--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"])
        .args(["timeout", "120", "sh", "-eux", "-c"])
        .arg(format!("{LEAVE_OTHERS_MOUNTS}{script}"))
        .env("DRAY", &dray)
        .env_remove("DRAY_RUN_DIR")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", said(&output));
    assert!(text.ends_with("secret\ndone\n") && !text.contains("in:"), "{text}{}", said(&output));
    assert!(!is_mounted(&rig.path("at")));
}
