//! Shares of bandwidth by the project of files: a real file system that tells projects, a real mount.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use crate::common;
use crate::common::Rig;
use serde_json::Value;

const PROJECT: u32 = 7;

/// A file system with projects at the rig's export, until it is dropped. None: this machine cannot have one.
struct ProjectDisk<'a>(&'a Path);

impl<'a> ProjectDisk<'a> {
    fn mount(image: &Path, at: &'a Path) -> Option<ProjectDisk<'a>> {
        // XFS has projects without quotas, whatever the kernel knows of these. It wants 300 MiB, which stay a hole.
        File::create(image).unwrap().set_len(400 << 20).unwrap();
        let is_done =
            |command: &mut Command| command.output().is_ok_and(|out| out.status.success());
        let made = is_done(Command::new("mkfs.xfs").arg("-q").arg(image))
            && is_done(Command::new("mount").args(["-o", "loop"]).arg(image).arg(at));
        made.then(|| ProjectDisk(at))
    }
}

impl Drop for ProjectDisk<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0).status(); // else the directory is not removed, which is seen
    }
}

/// Calls of a class so far.
fn calls(rig: &Rig, rule: &str, class: &str) -> u64 {
    let shown: Value = serde_json::from_str(&rig.demand(&["qos", "show", "--json"])).unwrap();
    let classes = shown["exports"][0]["qos"]["classes"].as_array().cloned().unwrap_or_default();
    let ours = classes.iter().find(|one| one["rule"] == rule && one["class"] == class);
    ours.map_or(0, |one| one["calls"].as_u64().unwrap())
}

// proves: P247
#[test]
fn calls_on_files_of_a_project_belong_to_its_class() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let (image, export) = (rig.path("image"), rig.path("export"));
    let Some(disk) = ProjectDisk::mount(&image, &export) else {
        return eprintln!("left out: no XFS here, so no projects");
    };
    let (ours, others) = (export.join("ours"), export.join("others"));
    [&ours, &others].iter().for_each(|dir| fs::create_dir(dir).unwrap());
    let of_project = ["-p", &PROJECT.to_string(), "+P"];
    assert!(Command::new("chattr").args(of_project).arg(&ours).status().unwrap().success());
    fs::write(ours.join("old"), [1; 5000]).unwrap();
    rig.serve(&[]);
    rig.demand(&["qos", "set", "climate", &format!("match.project={PROJECT}"), "weight=2"]);
    let at = rig.mount("mount", "");
    // Elsewhere nothing is of the project.
    for number in 0..20 {
        fs::write(at.join(format!("others/{number}")), "words").unwrap();
    }
    assert_eq!(calls(&rig, "climate", ""), 0);
    // What is made in its directory is, from the creation on; and what was there.
    for number in 0..20 {
        fs::write(at.join(format!("ours/{number}")), "words").unwrap();
    }
    let made = calls(&rig, "climate", "");
    assert!(made >= 40, "{made} of 20 creations and 20 writes");
    assert_eq!(fs::read(at.join("ours/old")).unwrap().len(), 5000);
    assert!(calls(&rig, "climate", "") > made);
    // One class for each project; none is project 0.
    rig.demand(&["qos", "remove", "climate"]);
    rig.demand(&["qos", "set", "projects", "each=project"]);
    for dir in ["ours", "others"] {
        fs::write(at.join(dir).join("last"), "words").unwrap();
    }
    assert!(calls(&rig, "projects", &PROJECT.to_string()) > 0);
    assert!(calls(&rig, "projects", "0") > 0);
    rig.umount(&at);
    rig.end_server(libc::SIGTERM);
    drop(disk);
}
