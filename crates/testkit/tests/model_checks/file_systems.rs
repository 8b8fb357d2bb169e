//! The posix backend on the other file systems of a server's disks: xfs, btrfs and overlay. The
//! directed suite; generated sequences against the model, on the bare file system and on the
//! backend over it. (tmpfs and ext4: `model.rs` and `suite.rs`. Ids over a restart of the
//! server: the backend's own tests.)
//!
//! Needs root, mkfs.xfs and mkfs.btrfs, and a kernel that has the file systems; what is
//! missing is said and left out.

use std::io;
use std::path::Path;

use dray_core::RenameHow;
use dray_testkit::conformance::{OptionalFeatures, PathTarget, run, suite};
use dray_testkit::fixture::{Image, Overlay, block_on, skipped_without_root};
use dray_testkit::model::Quirks;
use dray_testkit::step::{Action, Step};

use crate::site::{agree, generated, on_posix, posix};

/// What could be mounted; none, with the reason said, where it cannot be had here.
fn had<T>(name: &str, made: impl FnOnce() -> io::Result<T>) -> Option<T> {
    if skipped_without_root() {
        return None;
    }
    match made() {
        Ok(made) => Some(made),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            eprintln!("skipped: {name}: {error}");
            None
        }
        Err(error) => panic!("{name}: {error}"),
    }
}

fn keeps_its_promises(root: &Path, offers: OptionalFeatures) {
    let fs = posix(root);
    block_on(suite(&[fs.clone(), fs], offers));
    dray_backends::posix::release().unwrap();
}

/// The bare file system, which tells whether the model is right, and the backend over it.
/// `own` adds the habits of this file system.
fn agrees(root: &Path, own: impl Fn(Quirks) -> Quirks) {
    let (bare, served) = (own(Quirks::kernel()), own(Quirks::served()));
    generated(60, |steps| {
        let words = |error: io::Error| error.to_string();
        let dir = root.join("case");
        std::fs::create_dir(&dir).map_err(words)?;
        let mut target = PathTarget::new(&[&dir], bare).map_err(words)?;
        let result = block_on(run(&mut target, steps));
        drop(target);
        std::fs::remove_dir_all(&dir).map_err(words)?;
        result.map_err(|divergence| format!("{divergence:?}"))
    });
    on_posix(root, 60, |fs, _, steps| block_on(agree(vec![fs.clone(), fs], served, steps)));
}

#[test]
fn xfs_keeps_the_promises() {
    if let Some(xfs) = had("xfs", Image::xfs) {
        keeps_its_promises(xfs.path(), OptionalFeatures::ALL);
    }
}

#[test]
fn xfs_agrees_with_the_model() {
    if let Some(xfs) = had("xfs", Image::xfs) {
        agrees(xfs.path(), Quirks::on_xfs);
    }
}

/// The model had it as on ext4, where the times of what changes places stay.
#[test]
fn a_directory_exchanged_on_xfs_has_a_new_time() {
    let Some(xfs) = had("xfs", Image::xfs) else { return };
    let step = |action| Step { client: 0, who: 0, action };
    let lstat = |path| step(Action::Lstat { path });
    let (inner, outer) = (vec![2, 0], vec![0]);
    let how = RenameHow::Exchange;
    let mkdir = |path| step(Action::Mkdir { path, mode: 0o777 });
    let steps = [
        mkdir(vec![2]),
        mkdir(inner.clone()),
        mkdir(outer.clone()),
        step(Action::Utimens { path: outer.clone(), mtime_sec: Some(1) }),
        step(Action::Rename { from: inner.clone(), to: outer.clone(), how }),
        lstat(inner),
        lstat(outer),
    ];
    let mut bare = PathTarget::new(&[xfs.path()], Quirks::kernel().on_xfs()).unwrap();
    block_on(run(&mut bare, &steps)).unwrap();
}

#[test]
fn btrfs_keeps_the_promises() {
    if let Some(btrfs) = had("btrfs", Image::btrfs) {
        let offers = OptionalFeatures { shift_range: false, ..OptionalFeatures::ALL };
        keeps_its_promises(btrfs.path(), offers);
    }
}

#[test]
fn btrfs_agrees_with_the_model() {
    if let Some(btrfs) = had("btrfs", Image::btrfs) {
        agrees(btrfs.path(), Quirks::on_btrfs);
    }
}

fn overlay() -> io::Result<Overlay> {
    Overlay::new(64 << 20)
}

#[test]
fn an_overlay_keeps_the_promises() {
    if let Some(overlay) = had("overlay", overlay) {
        let offers =
            OptionalFeatures { zero_range: false, shift_range: false, ..OptionalFeatures::ALL };
        keeps_its_promises(overlay.path(), offers);
    }
}

#[test]
fn an_overlay_agrees_with_the_model() {
    if let Some(overlay) = had("overlay", overlay) {
        agrees(overlay.path(), |all| all);
    }
}
