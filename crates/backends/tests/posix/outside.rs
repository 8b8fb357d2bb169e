//! Changes beside dray are reported, and those of the export itself are not.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::rig::*;
use dray_backends::posix::PosixOptions;
use dray_core::*;

/// No step waits for so long, on a busy machine either.
const FOR_EVER: Duration = Duration::from_secs(30);

/// What was reported to an export; none: changes were missed.
type Report = Option<Vec<OutsideChange>>;

struct Listener {
    reported: Mutex<Sender<Report>>,
    /// Held by a test that keeps the export from hearing more.
    held: Mutex<()>,
}

impl OnOutsideChanges for Listener {
    fn changed(&self, changes: &[OutsideChange]) {
        self.reported.lock().unwrap().send(Some(changes.to_vec())).unwrap();
        drop(self.held.lock().unwrap());
    }

    fn missed(&self) {
        self.reported.lock().unwrap().send(None).unwrap();
    }
}

fn watching() -> PosixOptions {
    PosixOptions { watches_outside: true, ..plain() }
}

fn listen(kit: &Kit) -> (Arc<Listener>, Receiver<Report>) {
    let (reported, hears) = channel();
    let listener = Arc::new(Listener { reported: Mutex::new(reported), held: Mutex::new(()) });
    kit.fs.watch_outside(listener.clone()).unwrap();
    (listener, hears)
}

/// Does something as another program does: not on a thread that works for the export.
fn beside<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| scope.spawn(work).join().unwrap())
}

/// Waits until each of `expected` was reported. Everything that was reported meanwhile.
fn until_reported(
    hears: &Receiver<Report>,
    expected: &[(FileId, LeaseKinds)],
) -> Vec<OutsideChange> {
    let mut reported: Vec<OutsideChange> = Vec::new();
    let is_reported = |reported: &[OutsideChange], (id, kinds): (FileId, LeaseKinds)| {
        reported.iter().any(|change| change.id == id && change.kinds.contains(kinds))
    };
    while !expected.iter().all(|one| is_reported(&reported, *one)) {
        let more = hears.recv_timeout(FOR_EVER);
        let more =
            more.unwrap_or_else(|_| panic!("of {expected:?} only {reported:?} was reported"));
        reported.extend(more.expect("nothing is missed"));
    }
    reported
}

fn chmod(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

// proves: P277
#[test]
fn what_programs_change_beside_the_export_is_reported() {
    for kind in Kind::NATIVE {
        let Some(disk) = Disk::new(kind, 64) else { continue };
        eprintln!("on {kind:?}");
        on(&disk, watching(), async |kit| {
            let cx = &kit.root_user;
            let dir = kit.common("dir").await;
            let other = kit.common("other").await;
            let file = kit.file(cx, dir, "file", 0o644, b"data").await;
            let doomed = kit.file(cx, dir, "doomed", 0o644, b"data").await;
            let (_listener, hears) = listen(kit);
            assert_eq!(kit.fs.outside_unnoticed(), None);
            let (attributes, all) = (LeaseKinds::ATTRIBUTES, LeaseKinds::ALL);
            let at = |name: &str| kit.path.join(name);
            type Step<'a> = (&'a str, Vec<(FileId, LeaseKinds)>, Box<dyn Fn() + Send + 'a>);
            let write = || {
                let opened = fs::OpenOptions::new().append(true).open(at("dir/file"));
                opened.unwrap().write_all(b"more").unwrap();
            };
            let steps: [Step<'_>; 8] = [
                ("write", vec![(file, attributes)], Box::new(write)),
                ("chmod", vec![(file, attributes)], Box::new(|| chmod(&at("dir/file"), 0o600))),
                ("chmod of a directory", vec![(dir, all)], Box::new(|| chmod(&at("dir"), 0o700))),
                ("create", vec![(dir, all)], Box::new(|| fs::write(at("dir/new"), "").unwrap())),
                (
                    "mkdir",
                    vec![(other, all)],
                    Box::new(|| fs::create_dir(at("other/sub")).unwrap()),
                ),
                (
                    "unlink",
                    vec![(dir, all), (doomed, attributes)],
                    Box::new(|| fs::remove_file(at("dir/doomed")).unwrap()),
                ),
                (
                    "rename",
                    vec![(dir, all), (other, all), (file, attributes)],
                    Box::new(|| fs::rename(at("dir/file"), at("other/file")).unwrap()),
                ),
                (
                    "link",
                    vec![(dir, all), (file, attributes)],
                    Box::new(|| fs::hard_link(at("other/file"), at("dir/link")).unwrap()),
                ),
            ];
            for (what, expected, step) in steps {
                eprintln!("{what}");
                while hears.try_recv().is_ok() {} // what the last step did besides
                beside(step);
                until_reported(&hears, &expected);
            }
        });
    }
}

// proves: P278
#[test]
fn what_the_export_changes_itself_is_not_reported() {
    for kind in [Kind::Tmpfs, Kind::Ext4] {
        let Some(disk) = Disk::new(kind, 64) else { continue };
        eprintln!("on {kind:?}");
        on(&disk, watching(), async |kit| {
            let cx = &kit.root_user;
            let sentinel = kit.file(cx, kit.root, "sentinel", 0o644, b"").await;
            let (_listener, hears) = listen(kit);
            for round in 0..20 {
                let dir = kit.common(&format!("dir{round}")).await;
                let file = kit.file(cx, dir, "file", 0o644, &[1; 100_000]).await;
                let mode = SetAttr { mode: Some(0o600), ..SetAttr::default() };
                kit.fs.setattr(cx, file, mode).await.unwrap();
                kit.fs.setxattr(cx, file, b"user.a", b"b", XattrSet::Any).await.unwrap();
                kit.fs.link(cx, file, kit.root, name("link")).await.unwrap();
                kit.rename(cx, (dir, "file"), (dir, "moved"), RenameHow::Replace).await.unwrap();
                kit.unlink(cx, dir, "moved").await.unwrap();
                kit.unlink(cx, kit.root, "link").await.unwrap();
            }
            beside(|| chmod(&kit.path.join("sentinel"), 0o600));
            let reported = until_reported(&hears, &[(sentinel, LeaseKinds::ATTRIBUTES)]);
            assert!(reported.iter().all(|change| change.id == sentinel), "{reported:?}");
        });
    }
}

/// Both exports are served by this process.
// proves: P277
#[test]
fn what_another_export_of_the_server_changes_is_reported() {
    let Some(disk) = Disk::new(Kind::Tmpfs, 64) else { return };
    on(&disk, watching(), async |kit| {
        let dir = kit.common("dir").await;
        let (_listener, hears) = listen(kit);
        beside(|| {
            on(&disk, plain(), async |other| {
                let dir = other.lookup(&other.root_user, other.root, "dir").await.unwrap().id;
                other.file(&other.root_user, dir, "file", 0o644, b"data").await;
            });
        });
        until_reported(&hears, &[(dir, LeaseKinds::ALL)]);
    });
}

/// The kernel keeps so many events, and drops further ones.
// proves: P279
#[test]
fn too_many_changes_at_once_are_reported_as_missed() {
    const MOST: usize = 50_000;
    let limit = fs::read_to_string("/proc/sys/fs/fanotify/max_queued_events");
    let limit = limit.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(usize::MAX);
    if limit > MOST {
        return eprintln!("left out: the kernel keeps {limit} events");
    }
    let Some(disk) = Disk::new(Kind::Tmpfs, 256) else { return };
    on(&disk, watching(), async |kit| {
        kit.common("dir").await;
        let (listener, hears) = listen(kit);
        let held = listener.held.lock().unwrap();
        beside(|| fs::write(kit.path.join("dir/first"), "").unwrap());
        hears.recv_timeout(FOR_EVER).unwrap().expect("nothing is missed yet");
        beside(|| {
            for file in 0..limit + 100 {
                fs::write(kit.path.join(format!("dir/{file}")), "1").unwrap();
            }
        });
        drop(held);
        while hears.recv_timeout(FOR_EVER).expect("missed changes are reported").is_some() {}
        // It goes on behind that.
        let file = kit.lookup(&kit.root_user, kit.root, "dir").await.unwrap().id;
        beside(|| chmod(&kit.path.join("dir"), 0o755));
        until_reported(&hears, &[(file, LeaseKinds::ALL)]);
    });
}

// proves: P280
#[test]
fn it_says_why_changes_are_not_noticed() {
    if let Some(disk) = Disk::new(Kind::Ramfs, 64) {
        on(&disk, watching(), async |kit| {
            let listener = listen_to_nothing();
            assert!(kit.fs.outside_unnoticed().unwrap().contains("off"));
            let why = kit.fs.watch_outside(listener).unwrap_err();
            assert!(why.contains("ramfs has no handles"), "{why}");
            assert_eq!(kit.fs.outside_unnoticed(), Some(why));
        });
    }
    if let Some(disk) = Disk::new(Kind::Tmpfs, 64) {
        on(&disk, plain(), async |kit| {
            kit.fs.watch_outside(listen_to_nothing()).unwrap();
            assert!(kit.fs.outside_unnoticed().unwrap().contains("`watch_outside` is off"));
        });
    }
}

fn listen_to_nothing() -> Arc<Listener> {
    Arc::new(Listener { reported: Mutex::new(channel().0), held: Mutex::new(()) })
}

/// A mark does not keep a file system, and its thread ends with the export.
#[test]
fn a_file_system_that_is_watched_can_be_unmounted() {
    let Some(mut disk) = Disk::new(Kind::Tmpfs, 64) else { return };
    let (reported, hears) = channel();
    let listener = Arc::new(Listener { reported: Mutex::new(reported), held: Mutex::new(()) });
    on(&disk, watching(), async |kit| kit.fs.watch_outside(listener.clone()).unwrap());
    drop(listener);
    // The thread had the other end.
    assert!(matches!(
        hears.recv_timeout(FOR_EVER),
        Err(std::sync::mpsc::RecvTimeoutError::Disconnected)
    ));
    disk.unmount();
}
