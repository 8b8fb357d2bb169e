//! dray among the programs of a system: mount(8) and fstab, fusermount3 for ordinary users, and
//! what is installed. Needs root.

use std::fs;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::{PoisonError, RwLock};

use crate::common;
use crate::common::{LEAVE_OTHERS_MOUNTS, Rig};

/// The program, where everybody may run it.
fn program(rig: &Rig) -> std::path::PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let program = rig.path("dray");
    if !program.exists() {
        rig.copy_program(std::path::Path::new(env!("CARGO_BIN_EXE_dray")), &program);
        fs::set_permissions(rig.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    }
    program
}

/// The device may be closed to users on machines where nobody needed it. And where tests work devices
/// may be forbidden, as in Debian 13's /tmp, so that it is on a file system of its own.
const OPEN_DEVICE: &str = r#"
    mkdir "$DIR/dev"
    mount -t tmpfs dev "$DIR/dev"
    mknod "$DIR/dev/fuse" c 10 229
    chmod 666 "$DIR/dev/fuse"
    mount --bind "$DIR/dev/fuse" /dev/fuse
"#;

/// The test with an automount point runs while no other test makes a namespace: that would have a copy of
/// the point, too. A process that comes across the copy waits for ever.
static NAMESPACES: RwLock<()> = RwLock::new(());

/// Runs a script in namespaces of its own (unshare(1)), where what it mounts is its own affair;
/// `$DRAY`, `$TARGET` and `$DIR` are set. Answers what it printed.
fn in_namespace(rig: &Rig, spaces: &[&str], script: &str) -> String {
    let _no_automount_point = NAMESPACES.read().unwrap_or_else(PoisonError::into_inner);
    let output = Command::new("unshare")
        .args(spaces)
        .args(["timeout", "300", "sh", "-euxc", &format!("{LEAVE_OTHERS_MOUNTS}{script}")])
        .env("DRAY", program(rig))
        .env("TARGET", rig.target())
        .env("DIR", rig.path("").to_str().unwrap().trim_end_matches('/'))
        .env("DRAY_RUN_DIR", rig.path("run"))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {text}{errors}", output.status);
    text
}

#[test]
fn ordinary_users_mount_through_fusermount3() {
    let mut rig = Rig::new();
    rig.serve(&[]);
    let anybody = || std::os::unix::fs::PermissionsExt::from_mode(0o777);
    fs::set_permissions(rig.path("socket"), anybody()).unwrap();
    fs::set_permissions(rig.path("export"), anybody()).unwrap();
    let script = r#"
        mkdir "$DIR/user" "$DIR/user/run" "$DIR/user/mnt"
        chown -R 65534:65534 "$DIR/user"
        export DRAY_RUN_DIR="$DIR/user/run" AT="$DIR/user/mnt"
        exec setpriv --reuid 65534 --regid 65534 --clear-groups sh -euc '
            "$DRAY" mount "$TARGET" "$AT"
            trap "fusermount3 -uqz $AT || true" EXIT
            echo mine > "$AT/file"
            "$DRAY" status "$AT" --interval 0
            stat -c %u "$AT/file"
            "$DRAY" umount "$AT"
        '
    "#;
    let text = in_namespace(&rig, &["--mount"], &format!("{OPEN_DEVICE}{script}"));
    assert!(text.contains("MOUNT") && text.ends_with("65534\n"), "{text}");
    assert_eq!(fs::read(rig.path("export/file")).unwrap(), b"mine\n");
    assert_eq!(
        std::os::unix::fs::MetadataExt::uid(&rig.path("export/file").metadata().unwrap()),
        65534
    );
}

/// Root was shown its own mounts only, and did not find what an unusual session had mounted.
#[test]
fn root_is_shown_the_mounts_of_users() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let anybody = || std::os::unix::fs::PermissionsExt::from_mode(0o777);
    fs::set_permissions(rig.path("socket"), anybody()).unwrap();
    let script = r#"
        mkdir "$DIR/user" "$DIR/user/session" "$DIR/user/mnt"
        chown -R 65534:65534 "$DIR/user"
        unset DRAY_RUN_DIR
        export AT="$DIR/user/mnt"
        trap 'umount -l "$AT" 2> /dev/null || true' EXIT
        XDG_RUNTIME_DIR="$DIR/user/session" \
            setpriv --reuid 65534 --regid 65534 --clear-groups "$DRAY" mount "$TARGET" "$AT"
        "$DRAY" status --interval 0 | grep -cF "MOUNT $AT "
        "$DRAY" status --interval 0 "$AT" | grep -cF "MOUNT $AT "
        "$DRAY" upgrade "$AT"
        "$DRAY" umount "$AT"
    "#;
    let text = in_namespace(&rig, &["--mount"], &format!("{OPEN_DEVICE}{script}"));
    assert_eq!(text, "1\n1\n");
    // Unmounting has waited for their end.
    assert!(common::processes("mount-supervisor", &rig.path("user/mnt")).is_empty());
}

#[test]
fn a_line_of_fstab_is_enough() {
    let mut rig = Rig::new();
    rig.serve(&[]);
    fs::write(rig.path("export/file"), "content").unwrap();
    let text = in_namespace(
        &rig,
        &["--mount"],
        r#"
        mkdir "$DIR/mnt" "$DIR/sbin"
        ln -s "$DRAY" "$DIR/sbin/mount.dray"
        mount --bind "$DIR/sbin" "$(readlink -f /sbin)"
        echo "$TARGET $DIR/mnt dray ro,nosuid,_netdev,nofail,timeout=60 0 0" > "$DIR/fstab"
        mount --fstab "$DIR/fstab" "$DIR/mnt"
        trap 'umount -l "$DIR/mnt" 2> /dev/null || true' EXIT
        cat "$DIR/mnt/file"
        grep -c "fuse.dray.* ro,nosuid" /proc/mounts
        touch "$DIR/mnt/file" 2> /dev/null && echo writable
        umount "$DIR/mnt"
        "#,
    );
    assert_eq!(text, "content1\n");
}

/// Puts mount.dray where mount(8) looks for it, a line in fstab, and a server at the default
/// port of a network of its own.
const SERVED_AT_THE_DEFAULT_PORT: &str = r#"
    ip link set lo up
    mkdir -p "$DIR/mnt" "$DIR/sbin"
    for name in mount.dray mount.fuse.dray; do ln -s "$DRAY" "$DIR/sbin/$name"; done
    mount --bind "$DIR/sbin" "$(readlink -f /sbin)"
    touch "$DIR/fstab"
    mount --bind "$DIR/fstab" /etc/fstab
    line() { echo "$1 $DIR/mnt dray $2 0 0" > "$DIR/fstab"; }
    flags() { findmnt -no OPTIONS "$DIR/mnt" | cut -d, -f1-4; }
    "$DRAY" -q serve --export "a=$DIR/export,squash=none" --state "$DIR/state" & SERVER=$!
    trap 'command umount -l "$DIR/mnt" 2> /dev/null || true; kill $SERVER' EXIT
    # Who looks at all mounts may be in it for a moment.
    umount() {
        n=0; until command umount "$@"; do n=$((n+1)); [ $n -lt 300 ] || return 1; sleep 0.1; done
    }
    n=0; until "$DRAY" status a > /dev/null 2>&1 || [ $n = 600 ]; do n=$((n+1)); sleep 0.1; done
"#;

fn with_server(rig: &Rig, script: &str) -> String {
    in_namespace(rig, &["--mount", "--net"], &format!("{SERVED_AT_THE_DEFAULT_PORT}{script}"))
}

/// mount -a knows a mount again by its source and place, so the source is what fstab says.
#[test]
fn mount_a_finds_what_is_mounted_already() {
    if common::skipped() {
        return;
    }
    let rig = Rig::new();
    let text = with_server(
        &rig,
        r#"
        for source in dray://127.0.0.1/a dray://localhost/a/ dray://localhost:7440/a; do
            line "$source" _netdev,nofail,timeout=60,x-systemd.automount
            mount -a && mount -a
            findmnt -no SOURCE,FSTYPE "$DIR/mnt"
            df --output=source "$DIR/mnt" | tail -n 1
            grep -c " $DIR/mnt " /proc/mounts
            umount "$DIR/mnt"
        done
        "#,
    );
    let mut expected = String::new();
    for source in ["dray://127.0.0.1/a", "dray://localhost/a/", "dray://localhost:7440/a"] {
        expected += &format!("{source} fuse.dray\n{source}\n1\n");
    }
    assert_eq!(text, expected);
}

#[test]
fn a_machine_without_the_device_is_reported() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let text = in_namespace(
        &rig,
        &["--mount"],
        r#"
        mkdir "$DIR/mnt"
        mount -t tmpfs none /dev
        mknod /dev/null c 1 3
        "$DRAY" mount "$TARGET" "$DIR/mnt" 2>&1 || echo "code $?"
        "#,
    );
    assert!(text.contains("modprobe fuse") && text.ends_with("code 1\n"), "{text}");
}

/// What its daemon does not know of: `mount --bind`, `mount --move`, links.
#[test]
fn a_mount_is_found_wherever_it_can_be_reached() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let text = in_namespace(
        &rig,
        &["--mount"],
        r#"
        cd "$DIR"
        mkdir mnt else moved
        "$DRAY" mount "$TARGET" mnt
        mkdir mnt/sub
        mount --bind mnt/sub else
        ln -s "$DIR/mnt" link
        ln -s moved/sub far
        find_it() {
            "$DRAY" status --interval 0 --json "$1" | grep -c '"kind":"mount"'
        }
        for path in mnt mnt/sub else else/none link link/sub; do find_it "$path"; done
        "$DRAY" upgrade else
        "$DRAY" upgrade link
        mkdir mnt/sub/inner
        "$DRAY" mount "$TARGET" mnt/sub/inner
        find_it mnt/sub/inner
        "$DRAY" status --interval 0 --json link/sub/inner/x | grep -c "$DIR/mnt/sub/inner"
        "$DRAY" umount link/sub/inner
        "$DRAY" umount mnt
        find_it else
        mkdir else/still
        "$DRAY" umount else
        "$DRAY" mount "$TARGET" mnt
        mount --move mnt moved
        for path in moved moved/sub far; do find_it "$path"; done
        "$DRAY" upgrade moved
        ! "$DRAY" umount link
        ! "$DRAY" umount far
        ln -s moved there
        "$DRAY" umount there
        ! grep fuse.dray /proc/mounts
        echo done
        "#,
    );
    assert_eq!(text.lines().filter(|line| *line == "1").count(), 12, "{text}");
    assert!(text.ends_with("done\n"), "{text}");
}

#[test]
fn a_mount_can_be_made_read_only_and_writable_again() {
    if common::skipped() {
        return;
    }
    let rig = Rig::new();
    let text = with_server(
        &rig,
        r#"
        line dray://127.0.0.1/a nosuid,timeout=60
        mount "$DIR/mnt"
        echo one > "$DIR/mnt/file"
        mount -o remount,ro "$DIR/mnt"
        flags
        echo two > "$DIR/mnt/file" || echo refused
        mount -o remount,rw "$DIR/mnt"
        flags
        echo three > "$DIR/mnt/file"
        cat "$DIR/mnt/file"
        : > "$DIR/fstab"
        mount -o remount,ro "$DIR/mnt" # by the type that the kernel shows
        flags
        "$DRAY" mount dray://127.0.0.1/a "$DIR" -o remount,ro || echo $?
        "$DRAY" mount dray://127.0.0.1/b "$DIR/mnt" -o remount,rw || echo $?
        flags
        # Without mount(8), which says all flags: what is not named was given up.
        "$DRAY" mount dray://127.0.0.1/a "$DIR/mnt" -o remount,rw,noexec
        flags
        "$DRAY" mount dray://127.0.0.1/a "$DIR/mnt" -o remount,suid
        flags
        "#,
    );
    assert_eq!(
        text,
        "ro,nosuid,relatime,user_id=0\nrefused\nrw,nosuid,relatime,user_id=0\nthree\nro,nosuid,relatime,user_id=0\n1\n\
         1\nro,nosuid,relatime,user_id=0\n\
         rw,nosuid,noexec,relatime\nrw,noexec,relatime,user_id=0\n"
    );
}

#[test]
fn what_fstab_says_to_others_is_no_concern_of_ours() {
    if common::skipped() {
        return;
    }
    let rig = Rig::new();
    let text = with_server(
        &rig,
        r#"
        for options in defaults noauto,nofail _netdev,x-systemd.mount-timeout=30s,x-gvfs-hide \
            users owner group noexec,ro relatime,lazytime,async comment=mine; do
            line dray://127.0.0.1/a "$options"
            mount "$DIR/mnt"
            flags | sed 's/,relatime.*//'
            umount "$DIR/mnt"
        done
        line dray://127.0.0.1/a sync
        mount "$DIR/mnt" 2>&1 || echo $?
        "#,
    );
    let restricted = "rw,nosuid,nodev,noexec";
    let flags = ["rw", "rw", "rw", restricted, "rw,nosuid,nodev", "rw,nosuid,nodev"];
    let flags = [&flags[..], &["ro,noexec", "rw", "rw"]].concat().join("\n");
    let refused =
        "dray: mount option `sync`: not offered: let programs sync what must be on media\n1\n";
    assert_eq!(text, format!("{flags}\n{refused}"));
}

/// An automount point at `at`, as systemd makes it for x-systemd.automount: a process that looks waits
/// for a mount. Answers where the kernel asks for it; none if this kernel has no autofs.
fn automount_point(at: &std::path::Path) -> Option<std::io::PipeReader> {
    use std::os::fd::AsRawFd;
    let (asked, ask) = std::io::pipe().unwrap();
    // SAFETY: takes no memory. Those of our group get past it, as those of systemd's do.
    let group = unsafe { libc::getpgrp() };
    let data = format!("fd={},pgrp={group},minproto=5,maxproto=5,direct", ask.as_raw_fd());
    let [at, data] =
        [at.to_str().unwrap(), &data].map(|text| std::ffi::CString::new(text).unwrap());
    let kind = c"autofs".as_ptr();
    // SAFETY: all pointers are to C strings that outlive the call.
    let done = unsafe { libc::mount(kind, at.as_ptr(), kind, 0, data.as_ptr().cast()) };
    (done == 0).then_some(asked)
}

/// mount(8) calls mount.dray because somebody looked at the place; looking there again would
/// wait for ourselves.
#[test]
fn an_automount_point_is_mounted_on_without_being_looked_at() {
    if common::skipped() {
        return;
    }
    let _no_namespaces = NAMESPACES.write().unwrap_or_else(PoisonError::into_inner);
    let mut rig = Rig::new();
    rig.serve(&[]);
    let at = rig.path("automounted");
    fs::create_dir(&at).unwrap();
    let Some(mut asked) = automount_point(&at) else {
        eprintln!("skipped: this kernel has no autofs");
        return;
    };
    let place = at.to_str().unwrap().to_owned();
    // Another process looks, and waits for the mount.
    let mut looking = Command::new("ls");
    let mut looking = looking.arg(&at).process_group(0).spawn().unwrap();
    asked.read_exact(&mut [0]).unwrap(); // the kernel asks for it
    // In the foreground timeout(1) makes no group of its own.
    let output = Command::new("timeout")
        .args(["--foreground", "-s", "KILL", "60"])
        .arg(program(&rig))
        .args(["mount", &rig.target(), &place])
        .env("DRAY_RUN_DIR", rig.path("run"))
        .output();
    let output = output.unwrap();
    let mounted = common::is_mounted_by_dray(&at);
    let unmounted = mounted && rig.run(&["umount", &place]).status.success();
    let path = std::ffi::CString::new(place).unwrap();
    // SAFETY: the C string outlives the call. Whatever is there is taken away.
    unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
    let _ = looking.kill(); // nobody says to the kernel that it is mounted
    looking.wait().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(mounted && unmounted);
}

/// Where the repository is, with its scripts.
const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

fn has(program: &str) -> bool {
    let found = Command::new("sh").args(["-c", "command -v \"$0\"", program]).output();
    found.is_ok_and(|output| output.status.success())
}

/// Directories in /run/dray stayed, though it was said that nothing does. The program that is tested copies
/// slowly, so that less is copied than in a demonstration to people.
#[test]
fn the_demonstration_of_the_repository_leaves_nothing_behind() {
    if common::skipped() {
        return;
    }
    if let Some(missing) = ["make", "cc", "python3"].into_iter().find(|program| !has(program)) {
        return eprintln!("skipped: there is no {missing}");
    }
    let rig = Rig::new();
    let script = format!(
        r#"
        mount -t tmpfs run /run
        mkdir "$DIR/target" "$DIR/target/release" "$DIR/demo"
        strip -o "$DIR/target/release/dray" "$DRAY" || ln -s "$DRAY" "$DIR/target/release/dray"
        unset DRAY_RUN_DIR
        export DEMO_BUILT=yes CARGO_TARGET_DIR="$DIR/target" DEMO_DIR="$DIR/demo"
        export DEMO_TREE="{REPOSITORY}/crates/core"
        "{REPOSITORY}/script/demo" --size 32
        find /run "$DIR/demo" -mindepth 1 -printf 'left: %p\n'
    "#
    );
    let text = in_namespace(&rig, &["--mount"], &script);
    assert!(text.contains("The demo is done") && !text.contains("left: "), "{text}");
}

/// Five sixths of what was installed were lines of source for debuggers.
#[test]
fn packages_hold_the_program_and_apart_from_it_what_debuggers_want() {
    if let Some(missing) = ["dpkg-deb", "objcopy"].into_iter().find(|program| !has(program)) {
        return eprintln!("skipped: there is no {missing}");
    }
    let rig = Rig::new();
    let (into, program) = (rig.path("packages"), env!("CARGO_BIN_EXE_dray"));
    let unpacked = |name: &str| {
        let files = fs::read_dir(&into).unwrap().flatten().map(|entry| entry.path());
        let ours = |path: &std::path::PathBuf| {
            path.file_name().unwrap().to_str().unwrap().starts_with(&format!("{name}_"))
        };
        let file = files.into_iter().find(ours).unwrap();
        let at = rig.path(name);
        let mut unpack = Command::new("dpkg-deb");
        assert!(unpack.arg("--extract").arg(file).arg(&at).status().unwrap().success());
        at
    };
    let mut package = Command::new(format!("{REPOSITORY}/script/package"));
    package.args(["--binary", program]).arg(&into).env("DPKG_DEB_COMPRESSOR_TYPE", "none");
    let output = package.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (installed, symbols) = (unpacked("dray").join("usr/bin/dray"), unpacked("dray-dbgsym"));
    let read = |path: &std::path::Path, what: &str| {
        let output = Command::new("readelf").arg(what).arg("-W").arg(path).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let sections = read(&installed, "-S");
    assert!(!sections.contains(".debug_line") && sections.contains(".symtab"), "{sections}");
    assert!(Command::new(&installed).arg("--version").status().unwrap().success());
    let id = read(&installed, "-n").split("Build ID: ").nth(1).unwrap().trim().to_owned();
    let (head, rest) = id.split_at(2);
    let debug = symbols.join(format!("usr/lib/debug/.build-id/{head}/{rest}.debug"));
    assert!(read(&debug, "-S").contains(".debug_line"), "{}", debug.display());
}
