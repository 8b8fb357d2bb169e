//! Programs at the server change files beside dray, and mounts with leases see that.

use std::fs::{self, File, FileTimes, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use crate::common;
use crate::common::disks::Disk;
use crate::common::hangs::export_of;
use crate::common::{Rig, on_transports};

/// No step waits for so long, on a busy machine either.
const FOR_EVER: Duration = Duration::from_secs(30);

/// A server of an export on a disk of its own, where no other program changes anything. The disk is to be dropped
/// first. None where this machine has no such disk.
fn serve_watching() -> Option<(Rig, Disk)> {
    let (mut rig, disk) = (Rig::new(), Disk::new("ext4")?);
    let export = rig.path("export").display().to_string();
    disk.mount(&rig.path("export"));
    let export = format!("data={export},squash=none,leases,watch_outside");
    let listen = format!("unix://{}", rig.path("socket").display());
    let args = ["serve", "--export", &export, "--listen", &listen, "--state"];
    let mut command = rig.command(&args);
    command.arg(rig.path("state")).env("NOTIFY_SOCKET", rig.path("ready"));
    rig.start_server(&command, None);
    Some((rig, disk))
}

/// Waits until the mount shows what is expected, which is not what it shows at first. The client is in contact
/// with the server all the time, so that no lease ends by itself.
fn until_seen(what: &str, at: &Path, mut is_seen: impl FnMut() -> bool) -> Duration {
    let begun = Instant::now();
    while !is_seen() {
        assert!(begun.elapsed() < FOR_EVER, "{what} was not seen");
        fs::write(at.join("contact"), "").unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
    begun.elapsed()
}

// proves: P277
#[test]
fn what_programs_at_the_server_change_is_seen_while_leases_hold() {
    if common::skipped() {
        return;
    }
    on_transports(|transport| {
        let Some((mut rig, _disk)) = serve_watching() else { return };
        let (at, export) =
            (rig.mount("mount", &format!("leases=yes,{transport}")), rig.path("export"));
        assert_eq!(export_of(&rig, "data")["outside"]["noticed"], true);
        fs::create_dir(at.join("dir")).unwrap();
        fs::write(at.join("dir/file"), "four").unwrap();
        fs::write(at.join("dir/doomed"), "").unwrap();
        let long_ago = FileTimes::new().set_modified(SystemTime::UNIX_EPOCH);
        File::options().write(true).open(at.join("dir/file")).unwrap().set_times(long_ago).unwrap();
        // What is read through it stays in the kernel.
        let open = File::open(at.join("dir/file")).unwrap();
        let content = || {
            let mut content = [0; 16];
            let bytes = open.read_at(&mut content, 0).unwrap();
            content[..bytes].to_vec()
        };
        let names = || fs::read_dir(at.join("dir")).unwrap().count();
        let size = || fs::metadata(at.join("dir/file")).map(|file| file.len()).ok();
        let mode = || fs::metadata(at.join("dir/file")).unwrap().permissions().mode() & 0o777;
        let is_there = |name: &str| fs::symlink_metadata(at.join(name)).is_ok();
        let look = || {
            let there = ["dir/new", "dir/doomed", "moved"].map(is_there);
            (names(), size(), content(), there)
        };
        let mut longest = Duration::ZERO;
        let mut seen = |what: &str, change: &dyn Fn(), is_seen: &dyn Fn() -> bool| {
            for _ in 0..3 {
                look(); // what it sees is leased
            }
            assert!(!is_seen(), "{what}");
            change();
            let took = until_seen(what, &at, is_seen);
            eprintln!("{what}: {} ms", took.as_millis());
            longest = longest.max(took);
        };
        let append = || {
            let file = OpenOptions::new().append(true).open(export.join("dir/file"));
            file.unwrap().write_all(b"more").unwrap();
        };
        seen("append", &append, &|| size() == Some(8) && content() == b"fourmore");
        let new = || fs::write(export.join("dir/new"), "").unwrap();
        seen("create", &new, &|| is_there("dir/new") && names() == 3);
        let unlink = || fs::remove_file(export.join("dir/doomed")).unwrap();
        seen("unlink", &unlink, &|| !is_there("dir/doomed") && names() == 2);
        let chmod = || {
            let mode = fs::Permissions::from_mode(0o640);
            fs::set_permissions(export.join("dir/file"), mode).unwrap();
        };
        seen("chmod", &chmod, &|| mode() == 0o640);
        let write = || {
            let file = OpenOptions::new().write(true).open(export.join("dir/file")).unwrap();
            file.write_all_at(b"FOUR", 0).unwrap();
        };
        seen("write", &write, &|| content() == b"FOURmore");
        let rename = || fs::rename(export.join("dir/file"), export.join("moved")).unwrap();
        seen("rename", &rename, &|| is_there("moved") && size().is_none() && names() == 1);
        eprintln!("the longest: {} ms", longest.as_millis());
        let outside = export_of(&rig, "data")["outside"].clone();
        assert!(outside["changes"].as_u64().unwrap() >= 6, "{outside}");
        assert_eq!(outside["missed"], 0);
    });
}

// proves: P278
#[test]
fn what_clients_change_recalls_nothing_of_their_own() {
    if common::skipped() {
        return;
    }
    on_transports(|transport| {
        let Some((mut rig, _disk)) = serve_watching() else { return };
        let at = rig.mount("mount", &format!("leases=yes,{transport}"));
        let sentinel = at.join("sentinel");
        fs::write(&sentinel, "").unwrap();
        for number in 0..100 {
            let dir = at.join(format!("dir{number}"));
            fs::create_dir(&dir).unwrap();
            fs::write(dir.join("file"), vec![1; 20_000]).unwrap();
            fs::set_permissions(dir.join("file"), PermissionsExt::from_mode(0o600)).unwrap();
            fs::rename(dir.join("file"), dir.join("moved")).unwrap();
            if number % 3 == 0 {
                fs::remove_file(dir.join("moved")).unwrap();
            }
            assert!(fs::metadata(dir).is_ok());
        }
        let counts = || {
            let export = export_of(&rig, "data");
            let count = |of: &str, what: &str| export[of][what].as_u64().unwrap();
            (count("leases", "held"), count("leases", "recalls"), count("outside", "changes"))
        };
        assert!(fs::metadata(&sentinel).is_ok());
        let (held, recalls, changes) = counts();
        assert!(held > 50 && (recalls, changes) == (0, 0), "{held}, {recalls}, {changes}");
        // Events come in the order of the changes: those of the mount have been read before this one.
        fs::set_permissions(rig.path("export/sentinel"), PermissionsExt::from_mode(0o604)).unwrap();
        let mode = || fs::metadata(&sentinel).unwrap().permissions().mode() & 0o777;
        until_seen("chmod", &at, || mode() == 0o604);
        let (_, recalls, changes) = counts();
        assert_eq!((recalls, changes), (1, 1));
    });
}

// proves: P280
#[test]
fn the_status_says_whether_changes_beside_dray_are_noticed() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let exports = [("watched", ",leases,watch_outside"), ("plain", ",leases"), ("bare", "")];
    let mut args = Vec::new();
    for (name, options) in exports {
        fs::create_dir(rig.path("export").join(name)).unwrap();
        let at = rig.path("export").join(name);
        args.extend([
            "--export".to_owned(),
            format!("{name}={},squash=none{options}", at.display()),
        ]);
    }
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let others = [
        "CHOWN",
        "DAC_OVERRIDE",
        "DAC_READ_SEARCH",
        "FOWNER",
        "FSETID",
        "SETUID",
        "SETGID",
        "MKNOD",
    ];
    let mut capabilities = others.to_vec();
    for has_right in [false, true] {
        if has_right {
            capabilities.push("SYS_ADMIN");
        }
        rig.serve_with_capabilities(&capabilities, &args);
        let outside = |name: &str| export_of(&rig, name)["outside"].clone();
        let why = |name: &str| outside(name)["why_not"].as_str().unwrap_or_default().to_owned();
        assert_eq!(outside("watched")["noticed"], has_right);
        assert_eq!(why("watched").contains("CAP_SYS_ADMIN"), !has_right, "{}", why("watched"));
        assert!(why("plain").contains("`watch_outside` is off"));
        assert!(outside("bare").is_null());
        let table = rig.demand(&["status"]);
        let expected = match has_right {
            true => "watched: 0 changes beside dray noticed",
            false => {
                "watched: changes beside dray are not noticed: the server has no CAP_SYS_ADMIN"
            }
        };
        assert!(table.contains(expected), "{table}");
        rig.end_server(libc::SIGTERM);
    }
}
