//! Exports where every user is one: the server decides, and the client's kernel knows of it. Needs root.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

use crate::common;
use crate::common::{Rig, wait_for};
use serde_json::Value;

/// The user that owns everything at the server, and another user.
const OWNER: u32 = 4_321;
const USER: u32 = 5_432;

fn squashing(rig: &Rig) -> String {
    format!(
        "squashed={},squash=all,anonuid={OWNER},anongid={OWNER}",
        rig.path("squashed").display()
    )
}

/// A server of `squashed`, with a directory and a file that are the owner's alone.
fn rig() -> Rig {
    let mut rig = Rig::new();
    fs::set_permissions(rig.path("."), fs::Permissions::from_mode(0o755)).unwrap();
    let dir = rig.path("squashed");
    fs::create_dir_all(dir.join("private")).unwrap();
    fs::write(dir.join("private/file"), "content").unwrap();
    for (path, mode) in [("", 0o700), ("private", 0o700), ("private/file", 0o600)] {
        let path = dir.join(path);
        chown(&path, Some(OWNER), Some(OWNER)).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let export = squashing(&rig);
    rig.serve(&["--export", &export]);
    rig
}

/// What the user does, by a shell: its exit code, and what it complained about.
fn does(rig: &Rig, user: u32, at: &Path, script: &str) -> (bool, String) {
    let output =
        rig.run_as(user, &["env", &format!("AT={}", at.display())], "sh", &["-ec", script]);
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Under `close-to-open` and `immutable` the client's kernel went by the ids of its callers, who are all
/// somebody else at the server.
// proves: P52
#[test]
fn users_may_what_the_user_that_they_are_squashed_to_may() {
    const READS: &[&str] = &[
        "test \"$(cat $AT/private/file)\" = content",
        "ls -l $AT/private >/dev/null",
        "test -r $AT/private/file -a -w $AT/private/file -a ! -x $AT/private/file",
        "cd $AT/private && cat file >/dev/null",
    ];
    const CHANGES: &[&str] = &[
        "echo more >>$AT/private/file",
        "echo new >$AT/private/new && test \"$(cat $AT/private/new)\" = new",
        "mkdir $AT/private/sub && touch $AT/private/sub/x && ln -s x $AT/private/sub/link",
        "chmod 640 $AT/private/new && test \"$(stat -c %a $AT/private/new)\" = 640",
        "touch -d 2001-01-01 $AT/private/new",
        "truncate -s 3 $AT/private/file",
        "mv $AT/private/new $AT/private/other && ln $AT/private/other $AT/private/linked",
        "rm -r $AT/private/sub $AT/private/other $AT/private/linked",
    ];
    common::on_transports(|transport| {
        for mode in ["strict", "close-to-open", "immutable"] {
            let mut rig = rig();
            let at =
                rig.mount_export("squashed", "mount", &format!("consistency={mode},{transport}"));
            let changes = if mode == "immutable" { &[][..] } else { CHANGES };
            for script in READS.iter().chain(changes) {
                // Root and a caller with the number of the owner have no more rights than the user.
                for user in [USER, OWNER, 0] {
                    let (done, said) = does(&rig, user, &at, script);
                    assert!(
                        done || changes.contains(script) && user != USER,
                        "{mode}: {script}: {said}"
                    );
                    if changes.contains(script) {
                        break;
                    }
                }
            }
            // What that user may not nobody may, who is root or owner at the client.
            let below = rig.path("squashed");
            fs::write(below.join("roots"), "root's").unwrap();
            fs::set_permissions(below.join("roots"), fs::Permissions::from_mode(0o600)).unwrap();
            fs::create_dir(below.join("dir")).unwrap();
            fs::write(below.join("dir/file"), "root's").unwrap();
            fs::set_permissions(below.join("dir"), fs::Permissions::from_mode(0o700)).unwrap();
            for user in [USER, OWNER, 0] {
                for script in [
                    "cat $AT/roots",
                    "test -r $AT/roots",
                    "cat $AT/dir/file",
                    "chmod 666 $AT/roots",
                ] {
                    assert!(!does(&rig, user, &at, script).0, "{mode}: {user}: {script}");
                }
            }
            if mode != "immutable" {
                assert_eq!(fs::metadata(below.join("private/file")).unwrap().uid(), OWNER);
            }
            rig.umount(&at);
        }
    });
}

/// A mount whose kernel leaves all to the server does not go on with one at which users differ.
/// Names that one of them has looked up would be open to all.
// proves: P52
#[test]
fn a_mount_of_a_squashed_export_waits_where_it_is_squashed_no_more() {
    if common::skipped() {
        return;
    }
    let mut rig = rig();
    let at = rig.mount_export("squashed", "mount", "consistency=close-to-open");
    fs::metadata(at.join("private/file")).unwrap();
    rig.end_server(libc::SIGTERM);
    let other = format!("squashed={},squash=none", rig.path("squashed").display());
    rig.serve(&["--export", &other]);
    let status = |rig: &Rig| -> Value {
        let text = rig.demand(&["status", at.to_str().unwrap(), "--json", "--interval", "0"]);
        serde_json::from_str(text.lines().next().unwrap()).unwrap()
    };
    wait_for("the reason in the status", || {
        let error = status(&rig)["server"]["error"].to_string();
        error.contains("squash=all") && error.contains("mount")
    });
    assert_eq!(status(&rig)["server"]["connected"], false);
    rig.end_server(libc::SIGTERM);
    let export = squashing(&rig);
    rig.serve(&["--export", &export]);
    assert_eq!(fs::read(at.join("private/file")).unwrap(), b"content", "it goes on");
    // A daemon that follows another knows that the export is squashed, too.
    let daemon = common::daemons::daemon(&at).unwrap();
    common::daemons::signal(daemon, libc::SIGKILL);
    assert!(does(&rig, USER, &at, "cat $AT/private/file").0);
    rig.umount(&at);
}
