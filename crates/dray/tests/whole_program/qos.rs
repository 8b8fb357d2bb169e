//! Shares of bandwidth, with real mounts and `dray qos`.

use std::fs::{self, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::common;
use crate::common::{Rig, on_transports, wait_for};
use serde_json::Value;

const GREEDY: u32 = 1000;

fn shown(rig: &Rig) -> Value {
    serde_json::from_str(&rig.demand(&["qos", "show", "--json"])).unwrap()
}

/// What is shown of the class of this rule.
fn class(rig: &Rig, rule: &str) -> Value {
    let shown = shown(rig);
    let classes = shown["exports"][0]["qos"]["classes"].as_array().cloned().unwrap_or_default();
    classes.into_iter().find(|class| class["rule"] == rule).unwrap_or(Value::Null)
}

/// Any user may write here.
fn open_to_all(rig: &Rig, at: &Path) {
    fs::set_permissions(rig.path("."), Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(rig.path("export"), Permissions::from_mode(0o777)).unwrap();
    wait_for("the mount", || fs::metadata(at).is_ok());
}

/// The next write of the one who is held up begins later than that.
const FOR_EVER: Duration = Duration::from_secs(40);

/// Far more calls of one user than a mount can have under way.
const MUCH: &str = "for i in $(seq 90); do dd if=/dev/zero of=$AT/greedy$i bs=1M count=1 oflag=direct \
                    2>/dev/null & done; wait";

// proves: P195
#[test]
fn a_user_who_is_held_up_holds_nobody_up_on_the_same_mount_or_beside_it() {
    if common::skipped() {
        return;
    }
    on_transports(|transport| {
        let mut rig = Rig::new();
        rig.serve(&[]);
        let [at, beside] = ["mount", "beside"].map(|name| rig.mount(name, transport));
        open_to_all(&rig, &at);
        rig.demand(&["qos", "set", "greedy", &format!("match.user={GREEDY}"), "limit=16K"]);
        let greedy = rig.start_as(GREEDY, MUCH, &at);
        wait_for("calls that wait", || class(&rig, "greedy")["waiting"].as_u64() > Some(20));
        let begun = Instant::now();
        for at in [&at, &beside] {
            for round in 0..10 {
                let path = at.join(format!("other{round}"));
                fs::write(&path, "some words").unwrap();
                let file = fs::File::open(&path).unwrap();
                file.read_exact_at(&mut [0; 4], 0).unwrap();
                assert_eq!(file.metadata().unwrap().len(), 10);
                fs::remove_file(&path).unwrap();
            }
        }
        assert!(begun.elapsed() < FOR_EVER, "{:?}", begun.elapsed());
        let held_up = class(&rig, "greedy");
        assert!(held_up["waiting"].as_u64() > Some(20), "nobody had to wait for it: {held_up}");
        rig.demand(&["qos", "remove", "greedy"]);
        assert!(rig.end_of(greedy).success());
        assert_eq!(shown(&rig)["exports"][0]["qos"], Value::Null);
    });
}

// proves: P198
#[test]
fn rules_that_are_kept_are_there_after_a_restart() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let config = rig.path("dray.toml");
    let text = "[qos.rule.of-file]\nmatch = { user = 7 }\nlimit = \"1M\"\n\
                [qos.rule.removed]\nmatch = { user = 8 }\nweight = 2\n";
    fs::write(&config, text).unwrap();
    let config = ["--config", config.to_str().unwrap()];
    rig.serve(&config);
    rig.demand(&["qos", "set", "kept", "match.job=sim*,test", "weight=3", "--keep"]);
    rig.demand(&["qos", "set", "live", "match.group=root", "limit=1G"]);
    rig.demand(&["qos", "remove", "removed", "--keep"]);
    let names = |rig: &Rig| -> Vec<String> {
        let shown = shown(rig);
        let rules = shown["exports"][0]["rules"].as_object().unwrap();
        rules.keys().cloned().collect()
    };
    assert_eq!(names(&rig), ["kept", "live", "of-file"]);
    assert!(rig.demand(&["qos", "top", "--count", "1"]).contains("entitled"));
    rig.end_server(libc::SIGTERM);
    rig.serve(&config);
    assert_eq!(names(&rig), ["kept", "of-file"]);
    rig.demand(&["qos", "remove", "kept", "--keep"]);
    rig.demand(&["qos", "set", "removed", "match.user=9", "weight=2", "--keep"]);
    rig.end_server(libc::SIGTERM);
    rig.serve(&config);
    assert_eq!(names(&rig), ["of-file", "removed"]);
}

// proves: P197
#[test]
fn a_rule_that_is_wrong_changes_nothing_and_is_explained() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    rig.demand(&["qos", "set", "users", "match.user=1-99", "limit=1M"]);
    for (settings, words) in [
        (&["limt=1"][..], "unknown key `limt`; did you mean `limit`?"),
        (&["match.user=50-60", "limit=2M"], "rules `other` and `users` overlap"),
        (&["match.user=100", "limit=0"], "would let no call through"),
        (&["match.user=100", "limit=101%"], "more than the whole"),
        (&["match.export=nowhere", "limit=1M"], "an export that this server does not have"),
    ] {
        let output = rig.run(&[&["qos", "set", "other"][..], settings].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(words), "{settings:?}: {said}");
    }
    let output = rig.run(&["qos", "remove", "other"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("there is no rule `other`"));
    let shown = shown(&rig);
    assert_eq!(shown["exports"][0]["rules"].as_object().unwrap().len(), 1);
}
