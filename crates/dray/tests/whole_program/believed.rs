//! Under `close-to-open`, open(2) finds what has a name now, though the kernel believes in another file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::common;
use crate::common::daemons;

/// Longer than a server keeps what has been removed.
const GONE: Duration = Duration::from_millis(500);

/// Two mounts whose kernel believes names for longer than any test takes, over each transport.
fn on_two_mounts(check: impl Fn(&Path, &Path)) {
    if common::skipped() {
        return;
    }
    common::on_transports(|transport| {
        let options = format!("consistency=close-to-open,attr_timeout=3600,{transport}");
        let (_rig, one, other) = common::two_mounts(&options);
        check(&one, &other);
    });
}

fn replace(dir: &Path, name: &str, text: &str) {
    fs::write(dir.join("new"), text).unwrap();
    fs::rename(dir.join("new"), dir.join(name)).unwrap();
}

fn read(path: &Path) -> Result<String, io::ErrorKind> {
    fs::read_to_string(path).map_err(|error| error.kind())
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|at| at.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

// proves: P6
#[test]
fn what_others_replaced_removed_or_moved_is_not_opened_by_its_former_name() {
    on_two_mounts(|one, other| {
        for name in ["replaced", "removed", "moved", "made anew"] {
            fs::write(one.join(name), "old").unwrap();
            assert_eq!(read(&other.join(name)).unwrap(), "old");
        }
        (0..5).for_each(|round| {
            let text = format!("new {round}");
            replace(one, "replaced", &text);
            assert_eq!(read(&other.join("replaced")).unwrap(), text);
        });
        fs::remove_file(one.join("removed")).unwrap();
        assert_eq!(read(&other.join("removed")), Err(io::ErrorKind::NotFound));
        fs::rename(one.join("moved"), one.join("there")).unwrap();
        assert_eq!(read(&other.join("moved")), Err(io::ErrorKind::NotFound));
        assert_eq!(read(&other.join("there")).unwrap(), "old");
        // O_CREAT of what the kernel takes to be there.
        fs::remove_file(one.join("made anew")).unwrap();
        fs::write(other.join("made anew"), "by the other").unwrap();
        assert_eq!(read(&one.join("made anew")).unwrap(), "by the other");
    });
}

/// O_TRUNC would cut what was to be kept.
// proves: P6
#[test]
fn what_others_moved_away_is_not_cut() {
    on_two_mounts(|one, other| {
        fs::write(one.join("log"), "kept").unwrap();
        assert_eq!(read(&other.join("log")).unwrap(), "kept");
        fs::rename(one.join("log"), one.join("log.1")).unwrap();
        fs::write(one.join("log"), "next").unwrap();
        fs::write(other.join("log"), "and next").unwrap();
        for dir in [one, other] {
            assert_eq!(read(&dir.join("log.1")).unwrap(), "kept");
            assert_eq!(read(&dir.join("log")).unwrap(), "and next");
        }
    });
}

// proves: P6
#[test]
fn what_has_several_names_is_opened_by_those_that_it_has_now() {
    on_two_mounts(|one, other| {
        fs::write(one.join("first"), "both").unwrap();
        fs::hard_link(one.join("first"), one.join("second")).unwrap();
        for name in ["first", "second"] {
            assert_eq!(read(&other.join(name)).unwrap(), "both");
        }
        replace(one, "first", "another");
        assert_eq!(read(&other.join("first")).unwrap(), "another");
        assert_eq!(read(&other.join("second")).unwrap(), "both");
        // A name that this mount itself gives and takes.
        fs::hard_link(other.join("second"), other.join("third")).unwrap();
        fs::remove_file(other.join("third")).unwrap();
        replace(one, "second", "and another");
        assert_eq!(read(&other.join("second")).unwrap(), "and another");
    });
}

/// The rights to the file that is gone are asked for first. So open(2) is answered with ESTALE,
/// too: once for a call.
#[test]
fn what_is_gone_before_its_rights_are_asked_for_is_looked_up_once_more() {
    on_two_mounts(|one, other| {
        fs::write(one.join("first"), "old").unwrap();
        fs::hard_link(one.join("first"), one.join("second")).unwrap();
        for name in ["first", "second"] {
            assert_eq!(read(&other.join(name)).unwrap(), "old");
        }
        drop(File::open(other.join("second")).unwrap()); // at which a young file's attributes are dropped
        replace(one, "first", "new");
        fs::hard_link(one.join("first"), one.join("third")).unwrap();
        fs::rename(one.join("third"), one.join("second")).unwrap();
        std::thread::sleep(GONE);
        let [seen, there] = [other, one].map(|dir| fs::metadata(dir.join("first")).unwrap());
        assert_eq!(seen.ino(), there.ino());
        assert_eq!(read(&other.join("second")).unwrap(), "new", "it has two names again");
    });
}

// proves: P6
#[test]
fn directories_are_listed_and_programs_run_by_the_names_that_they_have_now() {
    on_two_mounts(|one, other| {
        fs::create_dir(one.join("dir")).unwrap();
        fs::write(one.join("dir/old"), "").unwrap();
        assert_eq!(names(&other.join("dir")), ["old"]);
        fs::rename(one.join("dir"), one.join("former")).unwrap();
        fs::create_dir(one.join("dir")).unwrap();
        assert!(names(&other.join("dir")).is_empty());
        assert_eq!(names(&other.join("former")), ["old"]);
        let program = |status| {
            replace(one, "program", &format!("#!/bin/sh\nexit {status}\n"));
            let mode = fs::Permissions::from_mode(0o755);
            fs::set_permissions(one.join("program"), mode).unwrap();
        };
        for status in [3, 4] {
            program(status);
            let run = Command::new(other.join("program")).status().unwrap();
            assert_eq!(run.code(), Some(status));
        }
    });
}

/// No program names the file then.
// proves: P6
#[test]
fn what_is_open_is_opened_again_by_its_descriptor_whatever_its_name_is_now() {
    on_two_mounts(|one, other| {
        for name in ["replaced", "moved"] {
            fs::write(one.join(name), "old").unwrap();
        }
        fs::create_dir(one.join("dir")).unwrap();
        fs::write(one.join("dir/old"), "").unwrap();
        let [replaced, moved, dir] =
            ["replaced", "moved", "dir"].map(|name| File::open(other.join(name)).unwrap());
        replace(one, "replaced", "new");
        fs::rename(one.join("moved"), one.join("there")).unwrap();
        fs::rename(one.join("dir"), one.join("former")).unwrap();
        fs::create_dir(one.join("dir")).unwrap();
        let again = |file: &File| format!("/proc/self/fd/{}", file.as_raw_fd());
        for _ in 0..3 {
            for file in [&replaced, &moved] {
                assert_eq!(fs::read_to_string(again(file)).unwrap(), "old");
            }
            assert_eq!(names(Path::new(&again(&dir))), ["old"]);
            let ls = Command::new("ls").arg(".").current_dir(again(&dir)).output().unwrap();
            assert_eq!(String::from_utf8(ls.stdout).unwrap(), "old\n");
        }
        let mut unnamed = OpenOptions::new();
        let unnamed = unnamed.read(true).write(true);
        let mut file = std::os::unix::fs::OpenOptionsExt::custom_flags(unnamed, libc::O_TMPFILE)
            .open(other)
            .unwrap();
        file.write_all(b"no name").unwrap();
        assert_eq!(fs::read_to_string(again(&file)).unwrap(), "no name");
    });
}

/// One mount replaces a file all the time, by two names in turn; threads of another open it. No
/// thread may find less than was there before. `meanwhile` goes on until it says no. Answers how
/// often an open was answered with ESTALE, which must go away when the program calls again.
fn opened_while_it_is_replaced(
    (one, other): (&Path, &Path),
    mut meanwhile: impl FnMut(u64) -> bool,
) -> usize {
    let (reached, over) = (AtomicU64::new(0), AtomicBool::new(false));
    let again = AtomicUsize::new(0);
    replace(one, "file", "0");
    fs::hard_link(one.join("file"), one.join("link")).unwrap();
    let open = |path: &Path| match File::open(path) {
        // Gone too long between its lookup and its opening.
        Err(error) if error.raw_os_error() == Some(libc::ESTALE) => {
            again.fetch_add(1, Ordering::SeqCst);
            File::open(path).unwrap()
        }
        opened => opened.unwrap(),
    };
    std::thread::scope(|scope| {
        for reader in 0..4 {
            let (reached, over, open) = (&reached, &over, &open);
            let path = other.join(if reader % 2 == 0 { "file" } else { "link" });
            scope.spawn(move || {
                while !over.load(Ordering::SeqCst) {
                    let least = reached.load(Ordering::SeqCst);
                    let mut text = String::new();
                    open(&path).read_to_string(&mut text).unwrap();
                    assert!(text.parse::<u64>().unwrap() >= least, "{text} after {least}");
                }
            });
        }
        let _over = OnDrop(|| over.store(true, Ordering::SeqCst));
        for round in 1.. {
            fs::write(one.join("new"), round.to_string()).unwrap();
            fs::hard_link(one.join("new"), one.join("more")).unwrap();
            fs::rename(one.join("new"), one.join("file")).unwrap();
            fs::rename(one.join("more"), one.join("link")).unwrap();
            reached.store(round, Ordering::SeqCst);
            if !meanwhile(round) {
                break;
            }
        }
    });
    again.into_inner()
}

// proves: P6
#[test]
fn who_opens_what_is_being_replaced_finds_what_was_there_by_then() {
    on_two_mounts(|one, other| {
        let again = opened_while_it_is_replaced((one, other), |round| round < 300);
        assert!(again <= 3, "{again} opened it once more: the machine is not that busy");
    });
}

/// A daemon knows no names that its predecessor gave the kernel, but knows which callers it
/// answered with ESTALE to look them up. Else most deaths would be seen by somebody.
// proves: P6
#[test]
fn so_does_who_opens_it_while_the_mount_s_daemon_is_killed() {
    const KILLS: usize = 10;
    const APART: Duration = Duration::from_millis(300);
    if common::skipped() {
        return;
    }
    common::on_transports(|transport| {
        let options = format!("consistency=close-to-open,attr_timeout=3600,{transport}");
        let (rig, one, other) = common::two_mounts(&options);
        let (mut kills, mut last) = (0, Instant::now());
        let again = opened_while_it_is_replaced((&one, &other), |_| {
            if last.elapsed() > APART
                && let Some(daemon) = daemons::daemon(&other)
            {
                daemons::signal(daemon, libc::SIGKILL);
                (kills, last) = (kills + 1, Instant::now());
            }
            kills < KILLS
        });
        assert!(again <= KILLS / 4, "{again} opened it once more");
        // What a daemon died over is open for nobody.
        common::wait_for("files to be closed", || {
            let status = rig.demand(&["status", "data", "--json"]);
            let status: serde_json::Value = serde_json::from_str(&status).unwrap();
            let clients = status["clients"].as_array().unwrap();
            assert_eq!(clients.len(), 2);
            clients.iter().all(|client| client["open_files"] == 0)
        });
        // Nor does a daemon take it for open.
        common::wait_for("handles to be closed", || {
            [&one, &other].iter().all(|at| {
                let status = rig.demand(&["status", at.to_str().unwrap(), "--json"]);
                let status: serde_json::Value = serde_json::from_str(&status).unwrap();
                status["open_files"] == 0
            })
        });
    });
}

/// The kernel still believes names that the former daemon gave it.
// proves: P6
#[test]
fn the_next_daemon_of_a_mount_opens_what_has_the_name_now() {
    on_two_mounts(|one, other| {
        let names = ["replaced", "removed", "same"];
        for name in names {
            fs::write(one.join(name), "old").unwrap();
            assert_eq!(read(&other.join(name)).unwrap(), "old");
        }
        let before = daemons::wait_for_daemon(other);
        daemons::signal(before, libc::SIGKILL);
        common::wait_for("the next daemon", || {
            daemons::daemon(other).is_some_and(|daemon| daemon != before)
        });
        replace(one, "replaced", "new");
        fs::remove_file(one.join("removed")).unwrap();
        let [replaced, removed, same] = names.map(|name| read(&other.join(name)));
        assert_eq!((replaced.unwrap(), same.unwrap()), ("new".into(), "old".into()));
        assert_eq!(removed, Err(io::ErrorKind::NotFound));
    });
}

struct OnDrop<F: Fn()>(F);

impl<F: Fn()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
