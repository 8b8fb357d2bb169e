//! Audits of two servers, read over the network.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::common;
use crate::common::Rig;
use crate::common::ports::free_port;
use serde_json::Value;

/// A server with an audit, and a mount of it.
struct Audited {
    rig: Rig,
    at: PathBuf,
    place: String,
    key: PathBuf,
}

fn serve(rig: &mut Rig, place: &str, key: &Path) {
    let (export, closed, named) = (rig.path("export"), rig.path("closed"), rig.path("named"));
    let listen = [format!("unix://{}", rig.path("socket").display()), format!("tcp://{place}")];
    let exports = [
        format!("data={},squash=none,audit", export.display()),
        format!("closed={},audit=change", closed.display()),
        format!("named={},audit=change,audit_readers=127.0.0.1", named.display()),
    ];
    let auth = format!("psk:{}", key.display());
    let mut command = rig.command(&["serve", "--auth", &auth]);
    for export in &exports {
        command.args(["--export", export]);
    }
    command.args(["--listen", &listen[0], "--listen", &listen[1], "--state"]);
    command.arg(rig.path("state")).env("NOTIFY_SOCKET", rig.path("ready"));
    rig.start_server(&command, None);
}

impl Audited {
    fn new(key: &Path) -> Audited {
        let mut rig = Rig::new();
        let place = format!("127.0.0.1:{}", free_port());
        fs::create_dir(rig.path("closed")).unwrap();
        fs::create_dir(rig.path("named")).unwrap();
        serve(&mut rig, &place, key);
        let at = rig.mount("mount", &format!("transport=classic,auth=psk:{}", key.display()));
        Audited { rig, at, place, key: key.to_owned() }
    }

    fn make(&self, name: &str) {
        fs::create_dir(self.at.join(name)).unwrap();
    }

    fn audit(&self, words: &[&str]) -> std::process::Output {
        let auth = format!("psk:{}", self.key.display());
        self.rig.run(&[&["audit"], words, &["--auth", &auth]].concat())
    }
}

fn lines(output: &[u8]) -> Vec<Value> {
    let text = String::from_utf8_lossy(output);
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

fn made<'a>(records: &'a [Value], server: &str) -> Vec<&'a str> {
    let of_server = records.iter().filter(|one| one["server"] == server && one["kind"] == "mkdir");
    of_server.filter_map(|one| one["name"].as_str()).collect()
}

fn key_in(rig: &Rig, name: &str) -> PathBuf {
    let key = rig.path(name);
    rig.demand(&["key", key.to_str().unwrap()]);
    key
}

// proves: P206, P208
#[test]
fn records_of_two_servers_come_by_time_and_those_of_one_that_was_away_follow() {
    if common::skipped() {
        return;
    }
    let keys = Rig::new();
    let key = key_in(&keys, "key");
    let (one, mut other) = (Audited::new(&key), Audited::new(&key));
    let (at_one, at_other) = (one.place.clone(), other.place.clone());
    let target = format!("dray://{at_one},{at_other}/data");
    let said = one.audit(&["register", &target, "both", "--oldest", "--kinds", "change"]);
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    for round in 0..5 {
        one.make(&format!("a{round}"));
        other.make(&format!("b{round}"));
    }
    let mut all = Vec::new();
    let follow = ["follow", &target, "--name", "both", "--once", "--json"];
    common::wait_for("ten records", || {
        let output = one.audit(&follow);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        all.extend(lines(&output.stdout));
        made(&all, &at_one).len() + made(&all, &at_other).len() >= 10
    });
    assert_eq!(made(&all, &at_one), ["a0", "a1", "a2", "a3", "a4"], "each once");
    assert_eq!(made(&all, &at_other), ["b0", "b1", "b2", "b3", "b4"]);
    let search = one.audit(&["search", &target, "--json", "--kinds", "mkdir"]);
    let found = lines(&search.stdout);
    let times: Vec<&str> = found.iter().filter_map(|one| one["time"].as_str()).collect();
    assert!(times.is_sorted() && times.len() == 10, "{times:?}");
    let names: Vec<&str> = found.iter().filter_map(|one| one["name"].as_str()).collect();
    assert_eq!(names, ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3", "a4", "b4"]);
    // One that is away is named, and the other one's records come.
    other.rig.end_server(libc::SIGKILL);
    one.make("a5");
    let mut said = String::new();
    all.clear();
    common::wait_for("the record of the server that is there", || {
        let output = one.audit(&follow);
        assert!(!output.status.success());
        said = String::from_utf8_lossy(&output.stderr).into_owned();
        all.extend(lines(&output.stdout));
        !all.is_empty()
    });
    assert!(said.contains(&at_other) && said.contains("is not among this"), "{said}");
    assert_eq!(made(&all, &at_one), ["a5"]);
    serve(&mut other.rig, &other.place, &key);
    other.make("b5");
    all.clear();
    common::wait_for("the record of the server that was away", || {
        all.extend(lines(&one.audit(&follow).stdout));
        !made(&all, &at_other).is_empty()
    });
    assert_eq!((made(&all, &at_one), made(&all, &at_other)), (vec![], vec!["b5"]));
    let list = lines(&one.audit(&["list", &target, "--json"]).stdout);
    let lags: BTreeMap<_, _> =
        list.iter().map(|one| (one["server"].as_str(), one["lag"].as_u64())).collect();
    assert_eq!(lags.len(), 2, "{list:?}");
}

// proves: P206
#[test]
fn a_follower_goes_on_with_the_servers_that_are_there() {
    if common::skipped() {
        return;
    }
    let keys = Rig::new();
    let key = key_in(&keys, "key");
    let (mut one, mut other) = (Audited::new(&key), Audited::new(&key));
    let target = format!("dray://{},{}/data", one.place, other.place);
    let (out, err) = (one.rig.path("out"), one.rig.path("err"));
    let script = format!(
        "exec {} audit follow {target} --json --kinds mkdir --auth psk:{} >{} 2>{}",
        env!("CARGO_BIN_EXE_dray"),
        key.display(),
        out.display(),
        err.display()
    );
    let at = one.at.clone();
    let follower = one.rig.start(&script, &at);
    let printed = || lines(&fs::read(&out).unwrap_or_default());
    // It begins with the next record, once it has connected.
    let mut round = 0;
    common::wait_for("the first records", || {
        one.make(&format!("first-{round}"));
        other.make(&format!("first-{round}"));
        round += 1;
        std::thread::sleep(std::time::Duration::from_millis(50));
        let all = printed();
        !made(&all, &one.place).is_empty() && !made(&all, &other.place).is_empty()
    });
    other.rig.end_server(libc::SIGKILL);
    one.make("alone");
    common::wait_for("the record of the server that is there", || {
        made(&printed(), &one.place).contains(&"alone")
    });
    common::wait_for("word of the one that is away", || {
        let said = fs::read_to_string(&err).unwrap_or_default();
        said.contains(&other.place) && said.contains("the others go on")
    });
    let (place, key) = (other.place.clone(), other.key.clone());
    serve(&mut other.rig, &place, &key);
    other.make("again");
    common::wait_for("the record of the one that is back", || {
        made(&printed(), &other.place).contains(&"again")
    });
    follower.signal(libc::SIGKILL);
    one.rig.end_of(follower);
}

// proves: P207
#[test]
fn an_audit_is_not_open_to_users_without_a_right_to_it() {
    if common::skipped() {
        return;
    }
    let keys = Rig::new();
    let (key, wrong) = (key_in(&keys, "key"), key_in(&keys, "wrong"));
    let server = Audited::new(&key);
    server.make("secret");
    let refused = |target: &str, key: &Path, words: &str| {
        let auth = format!("psk:{}", key.display());
        let output = server.rig.run(&["audit", "search", target, "--auth", &auth]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(words), "{target}: {said}");
        assert!(output.stdout.is_empty());
    };
    let place = &server.place;
    refused(&format!("dray://{place}/data"), &wrong, "another key");
    refused(&format!("dray://{place}/closed"), &key, "`audit_readers` of the export");
    refused(&format!("dray://{place}/nothing"), &key, "has an audit");
    let named = server.audit(&["search", &format!("dray://{place}/named")]);
    assert!(named.status.success(), "this machine is among `audit_readers`: {named:?}");
    let advance = server.audit(&["register", &format!("dray://{place}/data"), "one", "--oldest"]);
    assert!(advance.status.success());
    let beyond = ["clear", &format!("dray://{place}/data"), "one", "--to", "999999"];
    let said = server.audit(&beyond);
    assert!(String::from_utf8_lossy(&said.stderr).contains("the last record is"), "{said:?}");
    let verify = server.audit(&["verify", &format!("dray://{place}/data")]);
    assert!(String::from_utf8_lossy(&verify.stderr).contains("on its server's machine"));
}
