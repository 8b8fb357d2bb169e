//! Leases and the cache on a local disk at real mounts: what they save, and that nothing is seen late.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common;
use crate::common::{Rig, on_transports};
use serde_json::Value;

/// Round trips of others on the machine, which look at mount points.
const ASKING: u64 = 4;
/// No step waits for so long, on a busy machine either.
const FOR_EVER: Duration = Duration::from_secs(30);

fn serve(rig: &mut Rig) {
    let export = format!("data={},squash=none,leases", rig.path("export").display());
    let listen = format!("unix://{}", rig.path("socket").display());
    let args = ["serve", "--export", &export, "--listen", &listen, "--state"];
    let mut command = rig.command(&args);
    command.arg(rig.path("state")).env("NOTIFY_SOCKET", rig.path("ready"));
    rig.start_server(&command, None);
}

pub(crate) fn two_mounts(transport: &str) -> (Rig, PathBuf, PathBuf) {
    let mut rig = Rig::new();
    serve(&mut rig);
    let options = format!("leases=yes,{transport}");
    let [one, other] = ["one", "other"].map(|name| rig.mount(name, &options));
    (rig, one, other)
}

fn status(rig: &Rig, at: &Path) -> Value {
    let status = rig.demand(&["status", at.to_str().unwrap(), "--json"]);
    serde_json::from_str(&status).unwrap()
}

fn calls(rig: &Rig, at: &Path) -> u64 {
    status(rig, at)["server"]["calls"].as_u64().unwrap()
}

/// A tree of 20 directories of 20 files.
pub(crate) fn tree(at: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for dir in 0..20 {
        let dir = at.join(format!("dir{dir}"));
        fs::create_dir(&dir).unwrap();
        for file in 0..20 {
            files.push(dir.join(format!("file{file}")));
            fs::write(files.last().unwrap(), "content").unwrap();
        }
    }
    files
}

/// Whether the mount has leases, and whether its kernel checks callers, which only those need.
fn leased(rig: &Rig, at: &Path) -> (bool, bool) {
    let mounts = fs::read_to_string("/proc/mounts").unwrap();
    let line = mounts.lines().find(|line| line.split(' ').nth(1) == at.to_str()).unwrap();
    (status(rig, at)["server"]["leases"].is_object(), line.contains("default_permissions"))
}

// proves: P287
#[test]
fn a_mount_takes_leases_where_there_are_some_unless_its_options_refuse() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    serve(&mut rig);
    let [one, auto, none] = [("one", ""), ("auto", "leases=auto"), ("none", "leases=no")]
        .map(|(name, options)| rig.mount(name, options));
    fs::write(one.join("file"), "content").unwrap();
    let asked = |at: &Path| {
        fs::metadata(at.join("file")).unwrap();
        let before = calls(&rig, at);
        (0..100).for_each(|_| assert!(fs::metadata(at.join("file")).unwrap().is_file()));
        calls(&rig, at) - before
    };
    for at in [&one, &auto] {
        assert_eq!(leased(&rig, at), (true, true));
        assert!(asked(at) <= ASKING);
    }
    assert_eq!(leased(&rig, &none), (false, false));
    assert!(asked(&none) >= 100);
    let mut plain = Rig::new();
    plain.serve(&[]);
    let at = plain.mount("one", "leases=auto");
    assert_eq!(leased(&plain, &at), (false, false));
}

// proves: P220
#[test]
fn what_nobody_else_touches_costs_no_round_trip() {
    if common::skipped() {
        return;
    }
    on_transports(|transport| {
        let (rig, one, _other) = two_mounts(transport);
        let files = tree(&one);
        let look = || {
            for file in &files {
                assert_eq!(fs::metadata(file).unwrap().len(), 7);
                assert!(fs::metadata(file.with_extension("absent")).is_err());
            }
        };
        look();
        let before = calls(&rig, &one);
        look();
        // Longer than the kernel believes names: the daemon answers.
        std::thread::sleep(Duration::from_millis(1300));
        look();
        let asked = calls(&rig, &one) - before;
        assert!(asked <= ASKING, "{asked} round trips for {} files", files.len());
    });
}

/// Names, attributes and the extended attributes that `ls` asks for.
// proves: P228, P229
#[test]
fn a_long_listing_costs_no_round_trip_until_something_changes() {
    if common::skipped() {
        return;
    }
    on_transports(|transport| {
        let (rig, one, other) = two_mounts(transport);
        tree(&one);
        let list = || {
            let output = Command::new("ls").arg("-lR").arg(&one).output().unwrap();
            assert!(output.status.success(), "{output:?}");
            String::from_utf8(output.stdout).unwrap().matches("file").count()
        };
        // The times of the last access are asked for once more.
        (0..2).for_each(|_| assert_eq!(list(), 400));
        let before = calls(&rig, &one);
        assert_eq!(list(), 400);
        let asked = calls(&rig, &one) - before;
        assert!(asked <= ASKING, "{asked} round trips");
        fs::write(other.join("dir3/file-new"), "content").unwrap();
        assert_eq!(list(), 401);
        fs::remove_file(other.join("dir3/file-new")).unwrap();
        fs::rename(other.join("dir3/file3"), other.join("moved")).unwrap();
        assert_eq!(list(), 399);
    });
}

/// A mount that knows nothing. Before, `ls` asked for one or two extended attributes of each file.
// proves: P265
#[test]
fn the_first_long_listing_asks_nothing_of_single_files() {
    if common::skipped() {
        return;
    }
    on_transports(|transport| {
        let (rig, one, other) = two_mounts(transport);
        tree(&one);
        let before = calls(&rig, &other);
        let output = Command::new("ls").arg("-lR").arg(&other).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        assert_eq!(String::from_utf8(output.stdout).unwrap().matches("file").count(), 400);
        let asked = calls(&rig, &other) - before;
        assert!(asked <= 8 * 21 + ASKING, "{asked} round trips for 21 directories");
    });
}

/// The creation and the write. Names in a directory that was made here are known to be absent. The answer to the
/// creation has the directory's attributes, and closing needs no answer.
// proves: P230, P263
#[test]
fn a_new_small_file_costs_two_round_trips() {
    if common::skipped() {
        return;
    }
    on_transports(|transport| {
        let (rig, one, other) = two_mounts(transport);
        fs::create_dir(one.join("new")).unwrap();
        let before = calls(&rig, &one);
        for number in 0..100 {
            fs::write(one.join(format!("new/f{number}")), "content").unwrap();
        }
        let asked = calls(&rig, &one) - before;
        assert!(asked <= 2 * 100 + ASKING, "{asked} round trips for 100 files");
        // What is written is looked at, and its attributes are set, as archivers do. It is removed.
        let before = calls(&rig, &one);
        for number in 0..100 {
            let path = one.join(format!("new/g{number}"));
            fs::write(&path, "content").unwrap();
            assert_eq!(fs::metadata(&path).unwrap().len(), 7);
            fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
            let mode = fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
            fs::remove_file(&path).unwrap();
        }
        let asked = calls(&rig, &one) - before;
        assert!(asked <= 4 * 100 + ASKING, "{asked} round trips for 100 files");
        assert_eq!(fs::read_dir(other.join("new")).unwrap().count(), 100);
        assert_eq!(fs::read_dir(one.join("new")).unwrap().count(), 100);
    });
}

/// Each step at one mount is seen at once at the other, whatever that had looked at before.
// proves: P220
#[test]
fn nothing_is_seen_late() {
    if common::skipped() {
        return;
    }
    on_transports(|transport| {
        let (_rig, one, other) = two_mounts(transport);
        for (round, (here, there)) in
            [(&one, &other), (&other, &one)].iter().cycle().take(60).enumerate()
        {
            let [a, b] = ["a", "b"].map(|name| format!("{name}{}", round / 4));
            let seen = |name: &str| fs::metadata(there.join(name)).map(|file| file.len()).ok();
            let (size_a, size_b) = (seen(&a), seen(&b));
            match round % 4 {
                0 => {
                    assert_eq!((size_a, size_b), (None, None), "{round}");
                    fs::write(here.join(&a), "four").unwrap();
                    assert_eq!(seen(&a), Some(4));
                }
                1 => {
                    assert_eq!(size_a, Some(4));
                    let file = OpenOptions::new().append(true).open(here.join(&a));
                    file.unwrap().write_all(b"more").unwrap();
                    assert_eq!(seen(&a), Some(8));
                    fs::set_permissions(here.join(&a), PermissionsExt::from_mode(0o640)).unwrap();
                    let mode = fs::metadata(there.join(&a)).unwrap().permissions().mode();
                    assert_eq!(mode & 0o777, 0o640);
                }
                2 => {
                    assert_eq!(size_a, Some(8));
                    fs::rename(here.join(&a), here.join(&b)).unwrap();
                    assert_eq!((seen(&a), seen(&b)), (None, Some(8)));
                    assert_eq!(fs::read(there.join(&b)).unwrap(), b"fourmore");
                }
                _ => {
                    assert_eq!((size_a, size_b), (None, Some(8)));
                    fs::remove_file(here.join(&b)).unwrap();
                    assert_eq!(seen(&b), None);
                    fs::create_dir(here.join(&b)).unwrap();
                    assert!(fs::metadata(there.join(&b)).unwrap().is_dir());
                }
            }
        }
    });
}

/// Programs of two mounts create and remove names in one directory all the time. Each would wait for
/// the other if a recall waited for a lock of the kernel.
// proves: P221
#[test]
fn two_mounts_that_change_one_directory_do_not_wait_for_each_other() {
    if common::skipped() {
        return;
    }
    on_transports(|transport| {
        let (_rig, one, other) = two_mounts(transport);
        let (steps, begin) = (AtomicU64::new(0), Instant::now());
        std::thread::scope(|scope| {
            for (who, at) in [&one, &other, &one, &other].into_iter().enumerate() {
                let steps = &steps;
                scope.spawn(move || {
                    for step in 0.. {
                        let (much, took) = (steps.load(Ordering::Relaxed) > 40, begin.elapsed());
                        if took > FOR_EVER || much && took > Duration::from_secs(5) {
                            break;
                        }
                        let [mine, all] = [format!("mine{who}"), "lock".to_owned()];
                        let _ = fs::metadata(at.join(&all));
                        fs::write(at.join(&mine), [0; 10]).unwrap();
                        let made =
                            OpenOptions::new().create_new(true).write(true).open(at.join(&all));
                        if made.is_ok() {
                            fs::remove_file(at.join(&all)).unwrap();
                        }
                        fs::rename(at.join(&mine), at.join(format!("{mine}.{}", step % 7)))
                            .unwrap();
                        steps.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        // There were four, of two seconds each.
        assert!(begin.elapsed() < FOR_EVER, "{} steps", steps.into_inner());
    });
}

/// The requests of the kernel so far that are for data or attributes.
fn asked_for_data(rig: &Rig, at: &Path) -> u64 {
    let requests = &status(rig, at)["ops"];
    ["read", "getattr"].iter().filter_map(|op| requests[op].as_u64()).sum()
}

/// Also through files that were open before the change, and whatever was read between.
// proves: P223, P224
#[test]
fn pages_stay_in_the_kernel_until_another_mount_writes() {
    if common::skipped() {
        return;
    }
    on_transports(|transport| {
        let (rig, one, other) = two_mounts(transport);
        let content = vec![7; 1 << 20];
        fs::write(one.join("file"), &content).unwrap();
        let times = fs::FileTimes::new().set_modified(std::time::SystemTime::UNIX_EPOCH);
        File::options().write(true).open(one.join("file")).unwrap().set_times(times).unwrap();
        std::thread::sleep(Duration::from_millis(600)); // the file rested
        let file = File::open(other.join("file")).unwrap();
        let read = || {
            let mut read = vec![0; 1 << 20];
            file.read_exact_at(&mut read, 0).unwrap();
            read
        };
        assert!(read() == content);
        fs::metadata(other.join("file")).unwrap(); // the time of access may have changed
        let before = asked_for_data(&rig, &other);
        for _ in 0..3 {
            assert!(read() == content && fs::read(other.join("file")).unwrap() == content);
        }
        let asked = asked_for_data(&rig, &other) - before;
        assert!(before > 0);
        // fs::read asks for the size.
        assert!(asked <= 3, "{asked}");
        let writes = OpenOptions::new().write(true).open(one.join("file")).unwrap();
        for round in 0..40u8 {
            let at = u64::from(round % 3) * 500_000;
            writes.write_all_at(&[round], at).unwrap();
            assert_eq!(read()[at as usize], round);
            writes.set_len((1 << 20) + u64::from(round)).unwrap();
            let mut end = [1; 2];
            let (beyond, count) = (1 << 20, usize::from(round).min(2));
            assert_eq!(file.read_at(&mut end, beyond).unwrap(), count);
        }
    });
}

fn cache_of(rig: &Rig, at: &Path) -> Value {
    status(rig, at)["cache"].clone()
}

// proves: P222
#[test]
fn a_file_that_was_read_is_on_the_local_disk_until_it_changes() {
    if common::skipped() {
        return;
    }
    on_transports(|transport| {
        let mut rig = Rig::new();
        serve(&mut rig);
        let plain = rig.mount("plain", &format!("leases=yes,{transport}"));
        let content: Vec<u8> = (0..3_000_000u32).map(|at| (at / 5) as u8).collect();
        fs::write(plain.join("file"), &content).unwrap();
        fs::create_dir(plain.join("set")).unwrap();
        fs::write(plain.join("set/small"), "small").unwrap();
        let cache = rig.path("cache").display().to_string();
        let options = format!("leases=yes,cache={cache},cache_size=64M,{transport}");
        std::thread::sleep(Duration::from_millis(200)); // the times of the files are past
        let cached = rig.mount("cached", &options);
        let path = |at: &Path| at.join("file").display().to_string();
        let attach = |paths: &[&str]| {
            let words: Vec<&str> =
                ["cache", "attach", "-r"].into_iter().chain(paths.iter().copied()).collect();
            rig.demand(&words)
        };
        let said = attach(&[&path(&cached), cached.join("set").to_str().unwrap()]);
        assert_eq!(said, "2 of 2 files are in the cache, whole\n");
        let state = rig.demand(&["cache", "state", &path(&cached), "--json"]);
        let state: Value = serde_json::from_str(&state).unwrap();
        assert_eq!(
            (&state["resident_bytes"], &state["pinned"]),
            (&3_000_000.into(), &false.into())
        );
        let before = cache_of(&rig, &cached);
        assert_eq!(fs::read(cached.join("file")).unwrap(), content);
        let after = cache_of(&rig, &cached);
        assert!(
            after["hit_bytes"].as_u64() >= before["hit_bytes"].as_u64().map(|hit| hit + 3_000_000)
        );
        assert_eq!(after["misses"], before["misses"]);
        // Others change it: nobody reads what was before.
        let writes = OpenOptions::new().write(true).open(plain.join("file")).unwrap();
        for round in 0..20u8 {
            writes.write_all_at(&[round; 100], 1_000_000).unwrap();
            let mut read = [99; 100];
            File::open(cached.join("file")).unwrap().read_exact_at(&mut read, 1_000_000).unwrap();
            assert_eq!(read, [round; 100]);
        }
        // Another daemon finds what the one before has kept.
        rig.umount(&cached);
        let cached = rig.mount("cached", &options);
        assert_eq!(fs::read(cached.join("set/small")).unwrap(), b"small");
        assert_eq!(fs::read(cached.join("set/small")).unwrap(), b"small");
        let again = cache_of(&rig, &cached);
        assert_eq!(
            (&again["misses"], again["hits"].as_u64() > Some(0)),
            (&0.into(), true),
            "{again}"
        );
        let listed = rig.demand(&["cache", "stats", "--dir", &cache, "--json"]);
        let listed: Value = serde_json::from_str(&listed).unwrap();
        assert!(listed["resident_bytes"].as_u64() > Some(3_000_000), "{listed}");
        rig.demand(&["cache", "pin", cached.join("set/small").to_str().unwrap()]);
        let refused = rig.run(&["cache", "state", plain.join("file").to_str().unwrap()]);
        let refused = String::from_utf8(refused.stderr).unwrap();
        assert!(refused.contains("no mount with a cache"), "{refused}");
        rig.umount(&cached);
        rig.demand(&["cache", "clear", "--dir", &cache]);
        assert_eq!(rig.demand(&["cache", "list", "--dir", &cache]), "");
    });
}

/// Which files of which readers are kept: by path, extension and batch job, at a real mount.
// proves: P222
#[test]
fn rules_say_what_is_kept_on_the_local_disk() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    serve(&mut rig);
    let plain = rig.mount("plain", "leases=yes");
    fs::create_dir(plain.join("data")).unwrap();
    for name in ["data/a.h5", "data/b.txt", "data/c.job", "d.h5"] {
        fs::write(plain.join(name), [1; 5000]).unwrap();
    }
    let cache = rig.path("cache").display().to_string();
    let rules = "path=/data/*&ext=h5|ext=job&job=train-*";
    std::thread::sleep(Duration::from_millis(200)); // the times of the files are past
    let cached = rig.mount("cached", &format!("leases=yes,cache={cache},cache_rules={rules}"));
    let resident = |name: &str| {
        let path = cached.join(name).display().to_string();
        let state = rig.demand(&["cache", "state", &path, "--json"]);
        let state: Value = serde_json::from_str(&state).unwrap();
        state["resident_bytes"].as_u64().unwrap()
    };
    let read_by_job = |job: &str| {
        // The job of a process is known soon after its first open.
        let line = "for n in {1..10}; do read -rN 9 text <$FILE; sleep 0.02; done";
        let mut shell = Command::new("bash");
        shell.args(["-c", line]).env("FILE", cached.join("data/c.job")).env("SLURM_JOB_ID", job);
        assert!(shell.output().unwrap().status.success());
    };
    for name in ["data/a.h5", "data/b.txt", "d.h5"] {
        assert_eq!(fs::read(cached.join(name)).unwrap(), [1; 5000]);
    }
    read_by_job("other");
    for name in ["data/b.txt", "data/c.job", "d.h5"] {
        assert_eq!(resident(name), 0, "{name}");
    }
    common::wait_for("the file to be stored", || resident("data/a.h5") == 5000);
    read_by_job("train-7");
    common::wait_for("the file to be stored", || resident("data/c.job") == 5000);
}
