//! Policies at a real export: what the log says of files, and what a scan adds.

use std::fs;
use std::path::PathBuf;

use crate::common;
use crate::common::Rig;

fn audited() -> (Rig, PathBuf) {
    let mut rig = Rig::new();
    let export = format!("data={},squash=none,audit", rig.path("export").display());
    fs::write(rig.path("export/before"), "12345").unwrap();
    let listen = format!("unix://{}", rig.path("socket").display());
    let mut command = rig.command(&["serve", "--export", &export, "--listen", &listen, "--state"]);
    command.arg(rig.path("state")).env("NOTIFY_SOCKET", rig.path("ready"));
    rig.start_server(&command, None);
    let at = rig.mount("mount", "transport=classic");
    (rig, at)
}

fn run(rig: &Rig, words: &[&str]) -> Vec<String> {
    let (config, state) = (rig.path("policy.toml"), rig.path("state"));
    let known = rig.path("known");
    let args = ["policy", "--config", config.to_str().unwrap(), "run"];
    let places = ["--log-state", state.to_str().unwrap(), "--state", known.to_str().unwrap()];
    rig.demand(&[&args[..], words, &places].concat()).lines().map(str::to_owned).collect()
}

// proves: P209, P210
#[test]
fn a_policy_acts_on_what_the_log_says_and_on_nothing_that_has_changed_since() {
    if common::skipped() {
        return;
    }
    let (rig, at) = audited();
    let root = rig.path("export");
    let rules = |name: &str, rest: &str| {
        format!("[policy.{name}]\nlog = 'data'\nroot = '{}'\n{rest}\n", root.display())
    };
    let config = [
        rules("all", ""),
        rules("small", "path = '/d'\nsmaller = '4'\ndo = 'run'\ncommand = ['rm', '{}']"),
        rules("old", "older = '1h'\ndo = 'run'\ncommand = ['rm', '{}']"),
    ];
    fs::write(rig.path("policy.toml"), config.concat()).unwrap();
    fs::create_dir(at.join("d")).unwrap();
    for (name, text) in [("d/small", "123"), ("d/large", "12345"), ("e", "123"), ("gone", "1")] {
        fs::write(at.join(name), text).unwrap();
    }
    fs::rename(at.join("e"), at.join("f")).unwrap();
    fs::remove_file(at.join("gone")).unwrap();
    let mut all = Vec::new();
    common::wait_for("the log", || {
        all = run(&rig, &["all"]);
        all.len() >= 3 && !all.contains(&"/gone".to_owned()) && !all.contains(&"/e".to_owned())
    });
    assert_eq!(all, ["/d/large", "/d/small", "/f"], "what is older than the log is not known");
    assert_eq!(run(&rig, &["all", "--scan"]), ["/before", "/d/large", "/d/small", "/f"]);
    assert_eq!(run(&rig, &["small", "--dry-run"]), ["/d/small"]);
    assert!(at.join("d/small").exists());
    run(&rig, &["small"]);
    assert!(!at.join("d/small").exists() && at.join("d/large").exists() && at.join("f").exists());
    // The log knows of no change of this one, but the file does.
    fs::write(root.join("before"), "behind the server's back").unwrap();
    run(&rig, &["old", "--scan"]);
    assert!(root.join("before").exists());
}
