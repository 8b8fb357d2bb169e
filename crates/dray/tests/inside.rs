//! A mount within the directory that its own server exports, as on a machine that exports `/` and
//! tries it.

mod common;

use std::fs;

use common::Rig;

/// The server asked what is mounted there what it is like: its own client, who waited for it. The
/// export stood still until that mount was aborted.
#[test]
fn a_mount_in_its_own_export_is_listed_around() {
    if common::skipped() {
        return;
    }
    for options in ["consistency=close-to-open,attr_timeout=0", "consistency=strict"] {
        let mut rig = Rig::new();
        let within = rig.path("export/in");
        for name in ["at", "dir"] {
            fs::create_dir_all(within.join(name)).unwrap();
        }
        for number in 0..5 {
            fs::write(within.join(format!("file{number}")), "").unwrap();
        }
        rig.serve(&["--threads", "1"]);
        let at = rig.mount("export/in/at", options);
        // The mount is not part of the export, and so in the way of the removal alone.
        let script = "ls -l $AT/in; ls -d $AT/in/dir && ! ls $AT/in/at && ! rm -rf $AT/in";
        let pid = rig.start(script, &at);
        assert!(rig.end_of(pid).success(), "{options}");
        assert_eq!(fs::read_dir(&within).unwrap().count(), 1, "{options}");
        rig.umount(&at);
    }
}
