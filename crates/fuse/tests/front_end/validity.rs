//! How long names, attributes and pages are believed is said by each answer. In one mount some
//! files are asked for each time, and others are not, whatever the mount's mode is.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use crate::common::{TestMount, mounted_with};
use dray_core::{FileId, PageValidity, Ttl, Validity};
use dray_fuse::{Consistency, Options, Transport};

/// Longer than any of these tests takes.
const LONG: Duration = Duration::from_secs(3600);
/// Times that each thing is done.
const TIMES: u64 = 5;
/// After it the times of what was written are past (`Attr::grain`), late ticks included.
const GRAIN: Duration = Duration::from_millis(300);

/// All of it is to be asked for each time.
const ASKED: Validity = Validity {
    name: Some(Ttl::ZERO),
    attributes: Some(Ttl::ZERO),
    pages: Some(PageValidity::Never),
};
/// All of it holds.
const HOLDS: Validity = Validity {
    name: Some(Ttl::FOREVER),
    attributes: Some(Ttl::FOREVER),
    pages: Some(PageValidity::UntilRevoked),
};

/// Runs `test` on mounts in this mode. Where its times count they are long ones.
fn on_both(consistency: Consistency, test: impl Fn(&TestMount)) {
    for transport in [Transport::Classic, Transport::Uring] {
        let times = Options { attr_validity: LONG, entry_validity: LONG, ..Options::default() };
        if let Some(mount) = mounted_with(transport, Options { consistency, ..times }) {
            fs::metadata(&mount.at).unwrap(); // the kernel wants that of the root for each path
            test(&mount);
        }
    }
}

/// A file of which answers say this, and of which the kernel has not heard.
fn make(mount: &TestMount, name: &str, validity: Validity) -> FileId {
    let id = mount.made_behind_the_kernel_s_back(name, b"content");
    mount.fs.set_validity(id, validity).unwrap();
    id
}

/// Requests for names and for attributes.
#[derive(Debug, PartialEq)]
enum Lookups {
    Names(u64),
    NamesAndAttributes(u64),
}

/// What was asked for while `run` looked at a file `TIMES` times. The time of birth comes with no
/// lookup: the kernel asks for it once, and believes it then.
fn lookups_in(mount: &TestMount, run: impl FnOnce()) -> Lookups {
    let now = || (mount.count("lookup"), mount.count("getattr") + mount.count("statx"));
    let before = now();
    run();
    let after = now();
    let (names, attributes) = (after.0 - before.0, after.1 - before.1);
    match attributes {
        0..=1 => Lookups::Names(names),
        _ => {
            assert!(attributes >= TIMES - 1, "{attributes} of {TIMES}");
            Lookups::NamesAndAttributes(names)
        }
    }
}

fn reads(mount: &TestMount, run: impl FnOnce()) -> u64 {
    let before = mount.count("read");
    run();
    mount.count("read") - before
}

fn stat(mount: &TestMount, name: &str) {
    (0..TIMES).for_each(|_| assert_eq!(fs::metadata(mount.path(name)).unwrap().len(), 7));
}

fn read(file: &File) {
    let mut bytes = [0; 7];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"content");
}

#[test]
fn names_and_attributes_are_believed_file_by_file() {
    on_both(Consistency::CloseToOpen, |mount| {
        for (name, validity) in [("default", Validity::UNSAID), ("asked", ASKED), ("holds", HOLDS)]
        {
            make(mount, name, validity);
        }
        let attributes = Validity { attributes: Some(Ttl::ZERO), ..Validity::UNSAID };
        make(mount, "attributes", attributes);
        for name in ["default", "holds"] {
            assert_eq!(lookups_in(mount, || stat(mount, name)), Lookups::Names(1), "{name}");
        }
        let asked = lookups_in(mount, || stat(mount, "asked"));
        assert_eq!(asked, Lookups::NamesAndAttributes(TIMES));
        let attributes = lookups_in(mount, || stat(mount, "attributes"));
        assert_eq!(attributes, Lookups::NamesAndAttributes(1));
    });
}

#[test]
fn under_strict_attributes_may_hold_longer_and_names_may_not() {
    on_both(Consistency::Strict, |mount| {
        make(mount, "default", Validity::UNSAID);
        make(mount, "holds", HOLDS);
        let default = lookups_in(mount, || stat(mount, "default"));
        assert_eq!(default, Lookups::NamesAndAttributes(TIMES));
        assert_eq!(lookups_in(mount, || stat(mount, "holds")), Lookups::Names(TIMES));
    });
}

#[test]
fn the_absence_of_a_name_is_believed_as_long_as_is_said() {
    let miss = |mount: &TestMount| {
        (0..TIMES).for_each(|_| assert!(fs::metadata(mount.path("none")).is_err()));
    };
    for (consistency, expected) in [(Consistency::CloseToOpen, 1), (Consistency::Strict, TIMES)] {
        on_both(consistency, |mount| {
            let default = lookups_in(mount, || miss(mount));
            assert_eq!(default, Lookups::Names(TIMES), "the mode has no time for that");
            mount.fs.set_absence(Some(Ttl::of(LONG))).unwrap();
            assert_eq!(lookups_in(mount, || miss(mount)), Lookups::Names(expected));
        });
    }
}

#[test]
fn a_listing_tells_of_files_that_may_be_believed_alone() {
    on_both(Consistency::CloseToOpen, |mount| {
        make(mount, "default", Validity::UNSAID);
        make(mount, "asked", ASKED);
        let list = || assert_eq!(fs::read_dir(&mount.at).unwrap().count(), 2);
        assert_eq!(lookups_in(mount, list), Lookups::Names(0));
        assert_eq!(lookups_in(mount, || stat(mount, "default")), Lookups::Names(0));
        assert_eq!(lookups_in(mount, || stat(mount, "asked")), Lookups::NamesAndAttributes(TIMES));
    });
}

/// Opens the file `TIMES` times and reads it by each of them.
fn read_again(mount: &TestMount, name: &str) {
    (0..TIMES).for_each(|_| read(&File::open(mount.path(name)).unwrap()));
}

#[test]
fn pages_are_kept_file_by_file() {
    let kept = |pages| Validity { pages: Some(pages), ..Validity::UNSAID };
    let never = kept(PageValidity::Never);
    let changed = kept(PageValidity::UntilChanged);
    let revoked = kept(PageValidity::UntilRevoked);
    for (consistency, default) in [(Consistency::CloseToOpen, 1), (Consistency::Strict, TIMES)] {
        on_both(consistency, |mount| {
            for (name, validity, expected) in [
                ("default", Validity::UNSAID, default),
                ("never", never, TIMES),
                ("changed", changed, 1),
                ("revoked", revoked, 1),
            ] {
                make(mount, name, validity);
                std::thread::sleep(GRAIN);
                // The first opens find what may have changed within a tick, and say so.
                read_again(mount, name);
                let again = reads(mount, || read_again(mount, name));
                let expected = if expected == 1 { 0 } else { expected };
                assert_eq!(again, expected, "{name} under {consistency:?}");
                let file = File::open(mount.path(name)).unwrap();
                let once_open = reads(mount, || (0..TIMES).for_each(|_| read(&file)));
                assert_eq!(once_open, expected, "{name} under {consistency:?}");
            }
        });
    }
}

/// Under `close-to-open` the kernel drops pages by itself when it learns of another time of change.
#[test]
fn pages_that_are_kept_until_they_are_revoked_outlive_own_changes() {
    on_both(Consistency::Strict, |mount| {
        let changed = Validity { pages: Some(PageValidity::UntilChanged), ..HOLDS };
        for (name, validity, expected) in [("changed", changed, 1), ("holds", HOLDS, 0)] {
            make(mount, name, validity);
            std::thread::sleep(GRAIN);
            read_again(mount, name);
            let file = OpenOptions::new().write(true).open(mount.path(name)).unwrap();
            file.write_all_at(b"content", 0).unwrap();
            drop(file);
            let after = || read(&File::open(mount.path(name)).unwrap());
            assert_eq!(reads(mount, after), expected, "{name}");
        }
    });
}

#[test]
fn pages_are_dropped_when_the_session_says_that_others_have_changed_the_file() {
    for consistency in [Consistency::CloseToOpen, Consistency::Strict] {
        on_both(consistency, |mount| {
            let id = make(mount, "holds", HOLDS);
            std::thread::sleep(GRAIN);
            read_again(mount, "holds");
            mount.behind_the_kernel_s_back("holds", b"CHANGED");
            // Nothing else, by which the kernel would learn of other times.
            let content = || {
                let mut bytes = [0; 7];
                let file = File::open(mount.path("holds")).unwrap();
                file.read_exact_at(&mut bytes, 0).unwrap();
                bytes
            };
            assert_eq!(&content(), b"content", "nobody has said that it has changed");
            mount.session.changed(id);
            let begin = Instant::now();
            while &content() != b"CHANGED" {
                assert!(begin.elapsed() < Duration::from_secs(60), "it was never seen");
                std::thread::sleep(Duration::from_millis(5));
            }
        });
    }
}

/// A directory's listing is its content.
#[test]
fn a_listing_is_kept_where_that_is_said() {
    on_both(Consistency::CloseToOpen, |mount| {
        let root = mount.fs_root();
        let listed = || {
            let before = mount.count("readdir") + mount.count("readdirplus");
            let names = fs::read_dir(&mount.at).unwrap().count();
            assert_eq!(names, 1);
            mount.count("readdir") + mount.count("readdirplus") - before
        };
        make(mount, "file", Validity::UNSAID);
        assert!(listed() > 0 && listed() > 0);
        mount.fs.set_validity(root, HOLDS).unwrap();
        listed();
        assert_eq!(listed(), 0);
    });
}
