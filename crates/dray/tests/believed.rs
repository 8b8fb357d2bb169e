//! Under `close-to-open`, open(2) finds what has a name now, though the kernel believes in another file.

mod common;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

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

/// Nobody names anything then.
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

/// One mount replaces a file all the time, by two names in turn; threads of another open it. Nobody may
/// find less than was there before, and nobody an error.
#[test]
fn who_opens_what_is_being_replaced_finds_what_was_there_by_then() {
    const ROUNDS: u64 = 300;
    on_two_mounts(|one, other| {
        let (reached, over) = (AtomicU64::new(0), AtomicBool::new(false));
        replace(one, "file", "0");
        fs::hard_link(one.join("file"), one.join("link")).unwrap();
        std::thread::scope(|scope| {
            for reader in 0..4 {
                let (reached, over) = (&reached, &over);
                let path = other.join(if reader % 2 == 0 { "file" } else { "link" });
                scope.spawn(move || {
                    while !over.load(Ordering::SeqCst) {
                        let least = reached.load(Ordering::SeqCst);
                        let mut text = String::new();
                        File::open(&path).unwrap().read_to_string(&mut text).unwrap();
                        assert!(text.parse::<u64>().unwrap() >= least, "{text} after {least}");
                    }
                });
            }
            let _over = OnDrop(|| over.store(true, Ordering::SeqCst));
            for round in 1..=ROUNDS {
                fs::write(one.join("new"), round.to_string()).unwrap();
                fs::hard_link(one.join("new"), one.join("more")).unwrap();
                fs::rename(one.join("new"), one.join("file")).unwrap();
                fs::rename(one.join("more"), one.join("link")).unwrap();
                reached.store(round, Ordering::SeqCst);
            }
        });
    });
}

struct OnDrop<F: Fn()>(F);

impl<F: Fn()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
