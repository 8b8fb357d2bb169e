//! An export that has several devices, through mounts: programs that go by inode numbers take no
//! file for another.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use crate::common;
use crate::common::Rig;
use dray_testkit::fixture::{Ext4, MountGuard, Tmpfs};

/// A server of an overlay of two file systems whose files have the same numbers; what is dropped
/// after it.
struct Layers {
    rig: Rig,
    _overlay: MountGuard,
    _layers: (Ext4, Ext4, Tmpfs),
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn layers() -> Layers {
    // Without times of birth, by which they would differ.
    let [one, two] = [(), ()].map(|()| Ext4::of_seconds(8 << 20).unwrap());
    for (layer, name) in [(&one, "one"), (&two, "two")] {
        fs::write(layer.path().join(name), name).unwrap();
        fs::hard_link(layer.path().join(name), layer.path().join(format!("{name}-link"))).unwrap();
        fs::create_dir(layer.path().join(format!("{name}-dir"))).unwrap();
    }
    let top = Tmpfs::new(16 << 20).unwrap();
    for dir in ["upper", "work"] {
        fs::create_dir(top.path().join(dir)).unwrap();
    }
    let rig = Rig::new();
    let (lower, top_at) = ([one.path(), two.path()].map(Path::display), top.path().display());
    let options = format!(
        "lowerdir={}:{},upperdir={top_at}/upper,workdir={top_at}/work,xino=off",
        lower[0], lower[1]
    );
    let export = rig.path("export");
    run(Command::new("mount").args(["-t", "overlay", "-o", &options, "overlay"]).arg(&export));
    let overlay = MountGuard::new(&export);
    let number = |name: &str| fs::metadata(export.join(name)).unwrap().ino();
    assert_eq!(number("one"), number("two"), "the test is about equal numbers");
    Layers { rig, _overlay: overlay, _layers: (one, two, top) }
}

fn number(at: &Path, name: &str) -> u64 {
    fs::symlink_metadata(at.join(name)).unwrap().ino()
}

/// Both contents, and what are links of one file.
fn check(at: &Path) {
    for name in ["one", "two"] {
        let link = format!("{name}-link");
        assert_eq!(fs::read_to_string(at.join(name)).unwrap(), name);
        assert_eq!(fs::read_to_string(at.join(&link)).unwrap(), name);
        assert_eq!(number(at, name), number(at, &link));
    }
    assert_ne!(number(at, "one"), number(at, "two"));
    assert_ne!(number(at, "one-dir"), number(at, "two-dir"));
}

/// `cp -a` and `tar` made both one file, with the content of the one that they came to first.
// proves: P41
#[test]
fn copies_of_files_of_two_devices_have_both_contents() {
    if common::skipped() {
        return;
    }
    let mut layers = layers();
    layers.rig.serve(&[]);
    for consistency in ["strict", "close-to-open", "immutable"] {
        let at = layers.rig.mount(consistency, &format!("consistency={consistency}"));
        let copies = layers.rig.path(&format!("copies-{consistency}"));
        fs::create_dir(&copies).unwrap();
        run(Command::new("cp").arg("-a").arg(&at).arg(copies.join("cp")));
        check(&copies.join("cp"));
        let (archive, out) = (copies.join("tar"), copies.join("out"));
        fs::create_dir(&out).unwrap();
        run(Command::new("tar").arg("-C").arg(&at).arg("-cf").arg(&archive).arg("."));
        run(Command::new("tar").arg("-C").arg(&out).arg("-xf").arg(&archive));
        check(&out);
        check(&at);
        for entry in fs::read_dir(&at).unwrap() {
            use std::os::unix::fs::DirEntryExt;
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            assert_eq!(entry.ino(), number(&at, &name), "{name} in a listing");
        }
    }
}

/// What is open and what is looked up again are the files that they were, whichever the server.
// proves: P41
#[test]
fn a_restart_of_the_server_mixes_no_files_of_two_devices() {
    if common::skipped() {
        return;
    }
    let mut layers = layers();
    layers.rig.serve(&[]);
    let at = layers.rig.mount("mount", "consistency=close-to-open");
    let open = ["one", "two"].map(|name| fs::File::open(at.join(name)).unwrap());
    let before = ["one", "two"].map(|name| number(&at, name));
    layers.rig.end_server(libc::SIGKILL);
    layers.rig.serve(&[]);
    for (file, said) in open.into_iter().zip(["one", "two"]) {
        assert_eq!(std::io::read_to_string(file).unwrap(), said);
    }
    check(&at);
    assert_eq!(["one", "two"].map(|name| number(&at, name)), before);
}
