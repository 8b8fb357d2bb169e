//! Audit at a real server: what two users do, what they are refused, and what a kill leaves.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::common;
use crate::common::Rig;
use crate::common::load::Load;
use serde_json::Value;

fn serve(rig: &mut Rig, options: &str) {
    let export = format!("data={},squash=none,{options}", rig.path("export").display());
    let listen = format!("unix://{}", rig.path("socket").display());
    let args = ["serve", "--export", &export, "--listen", &listen, "--state"];
    let mut command = rig.command(&args);
    command.arg(rig.path("state")).env("NOTIFY_SOCKET", rig.path("ready"));
    rig.start_server(&command, None);
}

fn mounted(options: &str) -> (Rig, std::path::PathBuf) {
    let mut rig = Rig::new();
    serve(&mut rig, options);
    let at = rig.mount("mount", "transport=classic");
    (rig, at)
}

fn audit(rig: &Rig, words: &[&str]) -> String {
    let state = rig.path("state").display().to_string();
    rig.demand(&[&["audit"], words, &["--state", &state]].concat())
}

fn records(rig: &Rig, words: &[&str]) -> Vec<Value> {
    let lines = audit(rig, &[words, &["--json"]].concat());
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// All records, once those of `marker` are among them.
fn all_with(rig: &Rig, at: &Path, marker: &str) -> Vec<Value> {
    fs::create_dir(at.join(marker)).unwrap();
    let mut all = Vec::new();
    common::wait_for("the last record", || {
        all = records(rig, &["search", "data"]);
        all.iter().any(|one| one["kind"] == "mkdir" && one["name"] == marker)
    });
    all
}

fn of<'a>(all: &'a [Value], kind: &str, path: &str) -> Vec<&'a Value> {
    all.iter().filter(|one| one["kind"] == kind && one["path"] == path).collect()
}

// proves: P177
#[test]
fn what_users_do_and_what_they_are_refused_is_recorded() {
    if common::skipped() {
        return;
    }
    let (rig, at) = mounted("audit");
    fs::create_dir(at.join("open")).unwrap();
    fs::set_permissions(at.join("open"), fs::Permissions::from_mode(0o777)).unwrap();
    fs::create_dir(at.join("closed")).unwrap();
    fs::write(at.join("closed/secret"), "x").unwrap();
    fs::set_permissions(at.join("closed/secret"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(at.join("closed/listed"), "x").unwrap();
    fs::set_permissions(at.join("closed/listed"), fs::Permissions::from_mode(0o600)).unwrap();
    let script = "cd $0 && echo 12345 >open/mine && cat open/mine && mv open/mine open/other && ln -s x open/link; \
                  cat closed/secret; ls -l closed; rm -f closed/secret; chmod 777 closed";
    rig.run_as(1234, &[], "sh", &["-c", script, at.to_str().unwrap()]);
    let all = all_with(&rig, &at, "marker");
    let one = |kind: &str, path: &str| {
        let found = of(&all, kind, path);
        found.first().unwrap_or_else(|| panic!("no {kind} of {path}: {all:#?}")).to_owned().clone()
    };
    let made = one("create", "/open/mine");
    assert_eq!(
        (&made["uid"], &made["result"], &made["client"]),
        (&1234.into(), &"ok".into(), &"local".into())
    );
    assert!(made["id"].is_string() && made["parent"].is_string() && made["node"].is_string());
    let closes = of(&all, "close", "/open/mine");
    assert!(closes.iter().any(|one| one["written_bytes"] == 6 && one["writes"] == 1), "{closes:?}");
    assert!(closes.iter().all(|one| one["uid"] == 1234), "a kernel closes as root: {closes:?}");
    let moved = one("rename", "/open/mine");
    assert_eq!((&moved["to_path"], &moved["uid"]), (&"/open/other".into(), &1234.into()));
    assert_eq!(one("symlink", "/open/link")["uid"], 1234);
    let denied: Vec<_> = all.iter().filter(|one| one["denied"] == true).collect();
    let is_refused = |kind: &str, path: &str| {
        denied.iter().any(|one| one["kind"] == kind && one["path"] == path && one["uid"] == 1234)
    };
    let refused_opens = of(&all, "open", "/closed/secret").len();
    assert!(is_refused("open", "/closed/secret") && refused_opens == 1, "{denied:#?}");
    assert!(!is_refused("open", "/closed/listed"), "nobody has tried to open it: {denied:#?}");
    assert!(
        is_refused("unlink", "/closed/secret") && is_refused("chmod", "/closed"),
        "{denied:#?}"
    );
    assert_eq!(records(&rig, &["search", "data", "--denied"]).len(), denied.len());
    let of_user = records(&rig, &["search", "data", "--user", "1234", "--path", "/open"]);
    assert!(of_user.iter().all(|one| one["uid"] == 1234) && of_user.len() >= 4, "{of_user:#?}");
    assert!(audit(&rig, &["verify", "data"]).contains("anchor"));
    let status = rig.demand(&["status", "data", "--json", "--interval", "0"]);
    let status: Value = serde_json::from_str(&status).unwrap();
    assert!(status["exports"][0]["audit"]["records"].as_u64().unwrap() > 8, "{status}");
}

/// Makes, moves and removes files in the mount `at`, some of them in vain.
fn take_names_away(rig: &Rig, at: &Path) {
    let path = |name: &str| at.join(name);
    fs::create_dir(path("dir")).unwrap();
    fs::create_dir(path("kept")).unwrap();
    for name in ["one", "two", "kept/mine"] {
        fs::write(path(name), "x").unwrap();
    }
    fs::rename(path("one"), path("dir/moved")).unwrap();
    fs::rename(path("two"), path("dir/moved")).unwrap(); // which replaces the first
    rig.run_as(1234, &[], "rm", &["-f", path("kept/mine").to_str().unwrap()]);
    fs::rename(path("dir"), path("there")).unwrap();
    fs::write(path("there/late"), "x").unwrap();
    fs::remove_file(path("there/moved")).unwrap();
    fs::remove_file(path("there/late")).unwrap();
    fs::remove_dir(path("there")).unwrap();
}

/// Checks the ids of what [`take_names_away`] did. `find` asks for all records.
fn check_taken_names(find: impl Fn() -> Vec<Value>) {
    let mut all = Vec::new();
    common::wait_for("each record", || {
        all = find();
        let count = |kind| all.iter().filter(|one| one["kind"] == kind).count();
        ["create", "rename", "unlink", "rmdir"].map(count) == [4, 3, 3, 1]
    });
    let id = |kind: &str, path: &str| {
        let found = of(&all, kind, path);
        let first = found.first().unwrap_or_else(|| panic!("no {kind} of {path}: {all:#?}"));
        first["id"].as_str().unwrap_or_else(|| panic!("no id: {first:#?}")).to_owned()
    };
    let (one, two, dir) = (id("create", "/one"), id("create", "/two"), id("mkdir", "/dir"));
    assert!(one != two && two != dir);
    assert_eq!((id("rename", "/one"), id("rename", "/two")), (one, two.clone()));
    assert_eq!((id("rename", "/dir"), id("rmdir", "/there")), (dir.clone(), dir));
    assert_eq!(id("unlink", "/there/moved"), two);
    assert_eq!(id("unlink", "/there/late"), id("create", "/there/late"));
    let refused = of(&all, "unlink", "/kept/mine")[0];
    assert_eq!((&refused["denied"], &refused["uid"]), (&true.into(), &1234.into()));
    assert_eq!(refused["id"], *id("create", "/kept/mine"));
}

/// A file that is gone has no other record of who it was, and a name can have had many files.
// proves: P440
#[test]
fn what_takes_a_name_away_says_of_which_file() {
    if common::skipped() {
        return;
    }
    let (rig, at) = mounted("audit=change");
    take_names_away(&rig, &at);
    check_taken_names(|| records(&rig, &["search", "data"]));
}

// proves: P440
#[test]
fn at_the_servers_of_a_projection_it_does_so_too() {
    if common::skipped() {
        return;
    }
    let mut servers = [Rig::new(), Rig::new()];
    let [one, two] = servers.each_ref().map(|rig| rig.path("socket").display().to_string());
    let (dir, file) = (servers[0].path("export"), servers[0].path("projections.toml"));
    let text = format!(
        "[projection.shared]\nlayout = 'cluster'\nservers = ['unix://{one}', 'unix://{two}']\npath = '{}'\n\
         export = {{ squash = 'none', audit = {{ kinds = ['change'] }} }}\n",
        dir.display()
    );
    fs::write(&file, text).unwrap();
    for rig in &mut servers {
        rig.serve(&["--projections", file.to_str().unwrap()]);
    }
    let at = servers[0].mount_export("shared", "mount", "transport=classic");
    take_names_away(&servers[0], &at);
    check_taken_names(|| {
        servers.iter().flat_map(|rig| records(rig, &["search", "shared"])).collect()
    });
}

// proves: P178, P181
#[test]
fn every_acknowledged_change_has_its_record_however_often_the_server_is_killed() {
    if common::skipped() {
        return;
    }
    let (mut rig, at) = mounted("audit");
    audit(&rig, &["register", "data", "reader", "--oldest"]);
    let done = Arc::new(Mutex::new(BTreeSet::new()));
    let mut load = Load::new();
    for thread in 0..4 {
        let (at, done) = (at.clone(), done.clone());
        load.add(move |round| {
            let (name, other) = (format!("a-{thread}-{round}"), format!("b-{thread}-{round}"));
            fs::write(at.join(&name), "x")?;
            done.lock().unwrap().insert(format!("create {name}"));
            fs::rename(at.join(&name), at.join(&other))?;
            done.lock().unwrap().insert(format!("rename {name}"));
            fs::remove_file(at.join(&other))?;
            done.lock().unwrap().insert(format!("unlink {other}"));
            Ok(())
        });
    }
    let mut followed = Vec::new();
    for _ in 0..4 {
        let before = done.lock().unwrap().len();
        common::wait_for("some changes", || done.lock().unwrap().len() > before + 60);
        rig.end_server(libc::SIGKILL);
        followed.extend(records(&rig, &["follow", "data", "--name", "reader", "--once"]));
        serve(&mut rig, "audit");
    }
    let rounds = load.end();
    assert!(rounds.iter().all(|rounds| *rounds > 0));
    let all = all_with(&rig, &at, "marker");
    // A close may arrive after the marker, since nobody waits for it.
    common::wait_for("the end of the log", || {
        followed.extend(records(&rig, &["follow", "data", "--name", "reader", "--once"]));
        records(&rig, &["stat", "data"])[0]["lag"] == 0
    });
    let mut recorded: BTreeMap<String, usize> = BTreeMap::new();
    for one in all.iter().filter(|one| one["result"] == "ok") {
        let (kind, name) =
            (one["kind"].as_str().unwrap(), one["name"].as_str().unwrap_or_default());
        *recorded.entry(format!("{kind} {name}")).or_default() += 1;
    }
    let missing: Vec<_> =
        done.lock().unwrap().iter().filter(|one| !recorded.contains_key(*one)).cloned().collect();
    assert_eq!(missing, [""; 0], "of {}", recorded.len());
    assert!(all.iter().all(|one| one["kind"] != "gap"), "nothing is missing");
    let index = |one: &Value| one["index"].as_u64().unwrap();
    assert!(all.iter().map(index).eq(1..=all.len() as u64));
    assert!(followed.iter().map(index).eq(1..=followed.len() as u64), "each once, in order");
    assert!(followed.len() >= all.len());
    audit(&rig, &["verify", "data"]);
}

fn serve_configured(rig: &mut Rig, config: &Path) {
    let listen = format!("unix://{}", rig.path("socket").display());
    let args = ["serve", "--config", config.to_str().unwrap(), "--listen", &listen, "--state"];
    let mut command = rig.command(&args);
    command.arg(rig.path("state")).env("NOTIFY_SOCKET", rig.path("ready"));
    rig.start_server(&command, None);
}

// proves: P183
#[test]
fn sinks_get_every_record_over_kills_and_while_another_one_is_away() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let (config, sink) = (rig.path("dray.toml"), rig.path("sink.json"));
    let (dir, sink_path) = (rig.path("export"), sink.display().to_string());
    let text = format!(
        "[[export]]\nname = 'data'\ndir = '{}'\nsquash = 'none'\naudit = {{ kinds = ['change'] }}\n\
         [audit.sink.file]\ntype = 'file'\npath = '{sink_path}'\n\
         [audit.sink.away]\ntype = 'syslog'\naddress = 'unix:///nowhere/at/all'\n",
        dir.display()
    );
    fs::write(&config, text).unwrap();
    serve_configured(&mut rig, &config);
    let at = rig.mount("mount", "transport=classic");
    for round in 0..3 {
        (0..50).for_each(|number| fs::write(at.join(format!("f{round}-{number}")), "x").unwrap());
        rig.end_server(libc::SIGKILL);
        serve_configured(&mut rig, &config);
    }
    let all = all_with(&rig, &at, "marker");
    let wanted: BTreeSet<u64> = all.iter().map(|one| one["index"].as_u64().unwrap()).collect();
    assert!(wanted.len() > 150);
    let got = || -> BTreeSet<u64> {
        let text = fs::read_to_string(&sink).unwrap_or_default();
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.filter_map(|one| one["index"].as_u64()).collect()
    };
    // The log's own records of starts are no changes.
    let starts = all.iter().filter(|one| one["kind"] == "start").count();
    common::wait_for("the sink to have all", || got().len() + starts >= wanted.len());
    let list = records(&rig, &["list", "data"]);
    let bookmark = |name: &str| {
        list.iter().find(|one| one["name"] == name).and_then(|one| one["bookmark"].as_u64())
    };
    assert_eq!(bookmark("sink-away"), Some(1), "{list:?}");
    assert!(bookmark("sink-file") > Some(100), "{list:?}");
    let moved = |name: &str| list.iter().any(|one| one["name"] == name && one["moved"].is_string());
    assert!(moved("sink-file") && !moved("sink-away"), "{list:?}");
    let shown = audit(&rig, &["list", "data"]);
    assert!(shown.contains("never moved") && !shown.contains("1970"), "{shown}");
}

// proves: P179
#[test]
fn a_log_that_somebody_has_been_at_is_found_and_wrong_questions_are_refused() {
    if common::skipped() {
        return;
    }
    let (mut rig, at) = mounted("audit");
    (0..100).for_each(|number| fs::write(at.join(format!("f{number}")), "x").unwrap());
    all_with(&rig, &at, "marker");
    rig.end_server(libc::SIGTERM);
    let state = rig.path("state").display().to_string();
    let refused = |words: &[&str], what: &str| {
        let output = rig.run(&[&["audit"], words, &["--state", &state]].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(what), "{words:?}: {said}");
    };
    refused(&["follow", "data", "--kinds", "opne"], "there are: all, change");
    refused(&["follow", "data", "--name", "nobody"], "no consumer `nobody`");
    refused(&["register", "data", "a/b"], "letters, digits");
    refused(&["search", "data", "--since", "soon"], "is no time");
    refused(&["search", "nothing"], "no audit of an export `nothing`");
    refused(&["verify", "data", "--anchor", "1:zz"], "INDEX:HASH");
    audit(&rig, &["register", "data", "one", "--oldest"]);
    refused(&["clear", "data", "one", "--to", "999999"], "the last record is");
    let consumer = rig.path("state").join("audit/data/consumers/one.toml");
    let text = fs::read_to_string(&consumer).unwrap();
    let log = text.lines().find(|line| line.starts_with("log = ")).unwrap();
    fs::write(&consumer, text.replace(log, "log = \"00\"")).unwrap();
    refused(&["follow", "data", "--name", "one", "--once"], "belongs to another log");
    refused(&["register", "data", "one", "--oldest"], "deregister `one` and register it anew");
    fs::write(&consumer, "name = ").unwrap();
    refused(&["list", "data"], "`dray audit deregister data one`");
    audit(&rig, &["deregister", "data", "one"]);
    refused(&["deregister", "data", "one"], "no consumer `one`");
    let segments = fs::read_dir(rig.path("state").join("audit/data")).unwrap().flatten();
    let mut segments = segments
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|one| one == "audit"));
    let segment = segments.next().unwrap();
    let mut bytes = fs::read(&segment).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&segment, &bytes).unwrap();
    refused(&["verify", "data"], "damaged or changed");
    // What can be read is printed. A start makes neither the damage nor the records go.
    let all = || records(&rig, &["search", "data", "--kinds", "all"]);
    let before = all();
    assert!(before.len() > 1 && before.iter().any(|one| one["kind"] == "gap"), "{before:#?}");
    serve(&mut rig, "audit");
    let refused_again = rig.run(&["audit", "verify", "data", "--state", &state]);
    assert_eq!(refused_again.status.code(), Some(1));
    rig.end_server(libc::SIGTERM);
}
