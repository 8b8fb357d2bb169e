//! `dray survey`, of everything that it can be asked of.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;

use crate::common;
use crate::common::{Rig, is_mounted, wait_for};
use serde_json::Value;

/// What a survey of `what` prints, as short as it can be.
fn rows(rig: &Rig, what: &str) -> Vec<Value> {
    let args = ["survey", what, "--seconds", "0.01", "--threads", "1", "--block", "4K", "--json"];
    let lines = rig.demand(&args);
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_survey_has_four_cuts_where_the_server_is_on_this_machine() {
    if common::skipped() {
        return;
    }
    let (mut rig, at) = Rig::mounted("");
    let (dir, target) = (rig.path("export"), rig.target());
    // Of a directory of whatever name, which was refused; and within a mount, which was taken for
    // a directory that is to be served.
    let (odd, link, within) = (OsStr::from_bytes(b"odd,\\\xff"), dir.join("link"), at.join("link"));
    fs::create_dir(dir.join(odd)).unwrap();
    std::os::unix::fs::symlink(odd, &link).unwrap();
    let paths = [&dir, &link, &at, &within].map(|path| path.to_str().unwrap());
    for what in paths.into_iter().chain([&*target]) {
        let rows = rows(&rig, what);
        let cuts: BTreeSet<&str> = rows.iter().filter_map(|row| row["cut"].as_str()).collect();
        assert_eq!(cuts, BTreeSet::from(["backend", "full", "null", "transport"]), "{what}");
        for row in &rows {
            for key in ["p50_us", "p99_us", "cpu_us_per_op", "per_s"] {
                assert!(row[key].as_f64().is_some_and(|number| number > 0.0), "{what}: {row}");
            }
        }
    }
    fs::remove_dir(dir.join(odd)).unwrap();
    fs::remove_file(&link).unwrap();
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0, "what was written is removed");
    rig.umount(&at);
}

/// How operations on names scale, of a directory, a mount and a target.
#[test]
fn a_survey_of_metadata_creates_looks_and_unlinks() {
    if common::skipped() {
        return;
    }
    let (mut rig, at) = Rig::mounted("");
    let (dir, target) = (rig.path("export"), rig.target());
    for what in [dir.to_str().unwrap(), at.to_str().unwrap(), &target] {
        let args =
            ["survey", what, "--metadata", "--seconds", "0.02", "--threads", "1,3", "--json"];
        let lines = rig.demand(&args);
        let rows: Vec<Value> = lines.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        for cut in ["backend", "full"] {
            let of_cut = rows.iter().filter(|row| row["cut"] == cut);
            let seen: BTreeSet<String> = of_cut
                .inspect(|row| assert!(row["per_s"].as_f64() > Some(0.0), "{what}: {row}"))
                .map(|row| format!("{} {} {}", row["op"], row["threads"], row["directories"]))
                .collect();
            assert_eq!(seen.len(), 3 * 2 * 2, "{what} {cut}: {seen:?}");
        }
    }
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0, "what was made is removed");
    let refused = rig.run(&["survey", dir.to_str().unwrap(), "--metadata", "--block", "4K"]);
    assert!(!refused.status.success());
    rig.umount(&at);
}

/// With few calls `null` can look slower than `full`, and nothing said that it is chance.
#[test]
fn a_survey_of_few_calls_says_so() {
    let rig = Rig::new();
    if common::skipped() {
        return;
    }
    let dir = rig.path("export");
    let args = ["survey", dir.to_str().unwrap(), "--threads", "1", "--block", "1M", "--seconds"];
    let text = rig.demand(&[&args[..], &["0.01"]].concat());
    assert!(text.contains("fewer than 100 calls"), "{text}");
}

/// Ctrl-C, in each cut that has something to be removed.
#[test]
fn a_survey_that_is_interrupted_leaves_nothing_behind() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let dir = rig.path("export");
    let names = |dir: &std::path::Path| -> Vec<_> {
        fs::read_dir(dir).unwrap().flatten().map(|entry| entry.path()).collect()
    };
    for (cut, signal) in [("backend", libc::SIGINT), ("full", libc::SIGTERM)] {
        let args = ["survey", dir.to_str().unwrap(), "--seconds", "2", "--threads", "1"];
        let survey = rig.start_command(&[&args[..], &["--block", "4K"]].concat());
        let base = std::env::temp_dir().join(format!("dray-survey-{}", survey.0));
        let begun = || match cut {
            "full" => is_mounted(&base.join("mount")),
            _ => !names(&dir).is_empty(),
        };
        wait_for("the cut", begun);
        survey.signal(signal);
        assert_eq!(common::exit_code(rig.end_of(survey)), 128 + signal, "{cut}");
        assert!(names(&dir).is_empty(), "{:?}", names(&dir));
        assert!(!base.exists() && !is_mounted(&base.join("mount")), "{cut}");
    }
}

/// Anybody on the machine could be root in the directory while it was surveyed.
#[test]
fn nobody_else_gets_to_what_a_survey_serves() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let dir = rig.path("export");
    let args = ["survey", dir.to_str().unwrap(), "--seconds", "5", "--threads", "1"];
    let survey = rig.start_command(&[&args[..], &["--block", "4K"]].concat());
    let mount = std::env::temp_dir().join(format!("dray-survey-{}/mount", survey.0));
    wait_for("the cut", || is_mounted(&mount));
    let table = fs::read_to_string("/proc/self/mounts").unwrap();
    let of_mount = |line: &&str| line.split(' ').nth(1) == mount.to_str();
    let line = table.lines().find(of_mount).unwrap();
    let target = line.split(' ').next().unwrap();
    let other = rig.path("other");
    fs::create_dir(&other).unwrap();
    let mounted = rig.run(&["mount", target, other.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&mounted.stderr);
    assert!(!mounted.status.success() && said.contains("key"), "{target}: {said}");
    survey.signal(libc::SIGTERM);
    rig.end_of(survey);
}

/// What had been measured was thrown away, and nothing said what to do.
#[test]
fn a_survey_that_cannot_go_on_shows_what_it_has_and_says_what_to_do() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let fixed = format!("fixed={},ro,squash=none", rig.path("export").display());
    rig.serve(&["--export", &fixed]);
    let fixed = rig.target().replace("export=data", "export=fixed");
    let small = rig.path("small");
    fs::create_dir(&small).unwrap();
    let mut mount = std::process::Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=1m", "none"]).arg(&small);
    assert!(mount.status().unwrap().success());
    let survey = |what: &str| {
        let args = ["survey", what, "--seconds", "0.01", "--threads", "1", "--block", "4K"];
        let output = rig.run(&args);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let outcomes = [survey(small.to_str().unwrap()), survey(&fixed)];
    assert!(fs::read_dir(&small).unwrap().next().is_none());
    assert!(std::process::Command::new("umount").arg(&small).status().unwrap().success());
    let advice = ["32 MiB are needed for each thread", "as the directory at the server"];
    for ((code, shown, said), advice) in outcomes.into_iter().zip(advice) {
        assert_eq!(code, Some(1), "{said}");
        assert!(shown.contains("transport ping") && shown.contains("null      write"), "{shown}");
        assert!(said.contains(advice), "{said}");
    }
}

/// The first cut that could not be made hid those behind it, and the words were those of a failure.
#[test]
fn a_survey_makes_the_cuts_that_can_be_made_and_names_the_others() {
    if common::skipped() {
        return;
    }
    let (mut rig, at) = Rig::mounted("");
    let fixed = format!("fixed={},ro,squash=none", rig.path("export").display());
    rig.end_server(libc::SIGTERM);
    rig.serve(&["--export", &fixed]);
    let fixed = rig.target().replace("export=data", "export=fixed");
    let short = ["--seconds", "0.01", "--threads", "1", "--block", "4K", "--json"];
    let cuts = |output: &std::process::Output| -> BTreeSet<String> {
        let lines = String::from_utf8_lossy(&output.stdout).into_owned();
        let row = |line: &str| serde_json::from_str::<Value>(line).unwrap();
        lines.lines().map(|line| row(line)["cut"].as_str().unwrap().to_owned()).collect()
    };
    let check = |output: &std::process::Output, made: &[&str], missing: &[(&str, &str)]| {
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        let made: BTreeSet<String> = made.iter().map(|cut| (*cut).to_owned()).collect();
        assert_eq!(cuts(output), made, "{said}");
        assert_eq!(said.matches("is missing: ").count(), missing.len(), "{said}");
        for (cut, why) in missing {
            let head = format!("the cut `{cut}` is missing: ");
            let line = said.lines().find(|line| line.contains(&head));
            assert!(line.is_some_and(|line| line.contains(why)), "{cut}: {said}");
        }
    };
    let survey = |what: &str| rig.run(&[&["survey", what][..], &short].concat());
    // What cannot be written to through its server only.
    let output = survey(&fixed);
    check(&output, &["transport", "null", "backend"], &[("full", "at the server")]);
    // A user's, of a directory that is another's.
    let program = rig.path("dray");
    rig.copy_program(env!("CARGO_BIN_EXE_dray").as_ref(), &program);
    fs::set_permissions(rig.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    let (dir, program) = (rig.path("export"), program.to_str().unwrap());
    let words = [&["survey", dir.to_str().unwrap()][..], &short].concat();
    let output = rig.run_as(65_534, &[], program, &words);
    check(&output, &["transport", "null"], &[("backend", "may not write"), ("full", "root")]);
    // What the server has open is not what is at that place now, as in its container.
    let mount = |words: &[&str]| {
        assert!(
            std::process::Command::new("mount").args(words).arg(&dir).status().unwrap().success()
        )
    };
    mount(&["--bind", dir.to_str().unwrap()]);
    mount(&["-o", "remount,ro,bind"]);
    let output = survey(at.to_str().unwrap());
    assert!(std::process::Command::new("umount").arg(&dir).status().unwrap().success());
    check(&output, &["transport", "null", "full"], &[("backend", "cannot write to")]);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0, "what was written is removed");
    rig.umount(&at);
}
