//! Mounts of a projection over three servers that share a directory. Needs root.

mod common;

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use common::daemons::{signal, wait_for_daemon};
use common::disks::detach;
use common::load::{Kept, check_load, load, lock};
use common::{Rig, on_transports, wait_for};
use serde_json::Value;

/// Three servers of one projection, and the rig that mounts.
struct Cluster {
    servers: Vec<Rig>,
    /// What is mounted on their directory.
    below: Option<PathBuf>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.servers.clear();
        self.below.iter().for_each(|at| detach(at));
    }
}

impl Cluster {
    fn new(more: &str) -> Cluster {
        Cluster { servers: (0..3).map(|_| Rig::new()).collect(), below: None }.start(more)
    }

    /// On a file system whose files have no handles, so that servers learn ids from names.
    fn that_learns() -> Cluster {
        let mut cluster = Cluster { servers: (0..3).map(|_| Rig::new()).collect(), below: None };
        let at = cluster.servers[0].path("export");
        let mount = Command::new("mount").args(["-t", "ramfs", "ramfs"]).arg(&at).status();
        assert!(mount.unwrap().success());
        cluster.below = Some(at);
        cluster.start("")
    }

    fn start(mut self, more: &str) -> Cluster {
        self.define(more);
        (0..3).for_each(|number| self.serve(number));
        self
    }

    /// Writes the definition that servers find when they start.
    fn define(&self, more: &str) {
        let names: Vec<String> = self
            .servers
            .iter()
            .map(|rig| format!("'unix://{}'", rig.path("socket").display()))
            .collect();
        let path = self.servers[0].path("export");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
        let text = format!(
            "[projection.scratch]\nlayout = 'cluster'\nservers = [{}]\npath = '{}'\n{more}\n\
             export = {{ squash = 'none' }}\n",
            names.join(", "),
            path.display()
        );
        fs::write(self.file(), text).unwrap();
    }

    fn file(&self) -> PathBuf {
        self.servers[0].path("projections.toml")
    }

    fn serve(&mut self, number: usize) {
        let file = self.file();
        self.servers[number].serve(&["--projections", file.to_str().unwrap()]);
    }

    /// Mounts by naming the server with this number.
    fn mount(&mut self, number: usize, name: &str, options: &str) -> PathBuf {
        self.servers[number].mount_export("scratch", name, options)
    }

    fn status(&self, number: usize, at: &Path) -> Value {
        let text = self.servers[number].demand(&["status", at.to_str().unwrap(), "--json"]);
        serde_json::from_str(&text).unwrap()
    }
}

/// A file that a client may only read is made and written by another one, whatever server has it.
// proves: P2, P139
#[test]
fn two_mounts_of_a_cluster_agree() {
    on_transports(|transport| two_mounts_agree(Cluster::new(""), transport));
}

/// The same where servers learn ids from names.
// proves: P155, P156
#[test]
fn two_mounts_of_a_cluster_that_learns_agree() {
    on_transports(|transport| two_mounts_agree(Cluster::that_learns(), transport));
}

fn two_mounts_agree(mut cluster: Cluster, transport: &str) {
    let (one, two) = (cluster.mount(0, "one", transport), cluster.mount(1, "two", transport));
    for number in 0..30_u32 {
        let name = format!("f{number}");
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o400 | (number % 2));
        let file = options.open(one.join(&name)).unwrap();
        file.write_all_at(name.as_bytes(), 0).unwrap();
        assert_eq!(fs::read(two.join(&name)).unwrap(), name.as_bytes());
        assert_eq!(options.open(two.join(&name)).unwrap_err().raw_os_error(), Some(libc::EEXIST));
        let other = OpenOptions::new().read(true).write(true).open(two.join(&name)).unwrap();
        lock(&file, libc::F_WRLCK, libc::F_OFD_SETLK).unwrap();
        let refused = lock(&other, libc::F_WRLCK, libc::F_OFD_SETLK).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EAGAIN));
        // Names go from one server's directory to another's.
        let dir = one.join(format!("d{number}"));
        fs::create_dir(&dir).unwrap();
        fs::rename(one.join(&name), dir.join("moved")).unwrap();
        assert!(!two.join(&name).exists());
        let moved = two.join(format!("d{number}/moved"));
        fs::hard_link(&moved, two.join("link")).unwrap();
        assert_eq!(fs::metadata(dir.join("moved")).unwrap().nlink(), 2);
        fs::remove_file(one.join("link")).unwrap();
        assert_eq!(fs::metadata(&moved).unwrap().nlink(), 1);
        assert_eq!(fs::read_dir(two.join(format!("d{number}"))).unwrap().count(), 1);
    }
    let cut = OpenOptions::new().write(true).create(true).truncate(true).open(two.join("d1/moved"));
    drop(cut.unwrap());
    assert_eq!(fs::metadata(one.join("d1/moved")).unwrap().len(), 0);
    // Each server has its share.
    let status = cluster.status(0, &one);
    assert_eq!(status["projection"]["layout"], "cluster");
    let servers = status["projection"]["servers"].as_array().unwrap();
    assert_eq!(servers.len(), 3);
    for server in servers {
        assert_eq!(server["connected"], true);
        assert!(server["calls"].as_u64().unwrap() > 20, "{server}");
    }
}

/// Servers and the daemon of the mount are killed under load; no application notices.
// proves: P141
#[test]
fn killed_servers_and_daemons_of_a_cluster_lose_nothing() {
    on_transports(|transport| {
        let mut cluster = Cluster::new("");
        let (at, other) = (cluster.mount(0, "at", transport), cluster.mount(2, "other", transport));
        let kept = Kept::new(&at);
        let load = load(&at);
        for number in 0..3 {
            std::thread::sleep(std::time::Duration::from_millis(300));
            cluster.servers[number].end_server(libc::SIGKILL);
            cluster.serve(number);
            // One death after the other: a daemon that dies while it comes back to a server is another test.
            wait_for("the mount to come back to its server", || {
                cluster.status(0, &at)["projection"]["servers"][number]["connected"] == true
            });
            std::thread::sleep(std::time::Duration::from_millis(300));
            let daemon = wait_for_daemon(&at);
            signal(daemon, libc::SIGKILL);
            wait_for("another daemon", || wait_for_daemon(&at) != daemon);
        }
        let turns = load.end();
        check_load(&other, &turns);
        kept.check(&at);
    });
}

/// Applications at work in directories that are moved, at servers that forget what they have not noted, below
/// daemons that know no names.
// proves: P157
#[test]
fn killed_servers_that_learn_and_daemons_lose_nothing() {
    on_transports(|transport| {
        let mut cluster = Cluster::that_learns();
        let (at, other) = (cluster.mount(0, "at", transport), cluster.mount(2, "other", transport));
        let moved = open_below_what_moves(&at);
        let load = load(&at);
        for number in 0..3 {
            std::thread::sleep(std::time::Duration::from_millis(200));
            cluster.servers[number].end_server(libc::SIGKILL);
            cluster.serve(number);
            wait_for("the mount to come back to its server", || {
                cluster.status(0, &at)["projection"]["servers"][number]["connected"] == true
            });
            let daemon = wait_for_daemon(&at);
            signal(daemon, libc::SIGKILL);
            wait_for("another daemon", || wait_for_daemon(&at) != daemon);
        }
        let turns = load.end();
        check_load(&other, &turns);
        for (number, file) in moved.iter().enumerate() {
            let mut read = [0; 2];
            file.read_exact_at(&mut read, 0).unwrap();
            file.write_all_at(b"more", 2).unwrap();
            assert_eq!(read, *b"ab");
            let path = other.join(format!("to{number}/deeper/new"));
            assert_eq!(fs::read(path).unwrap(), b"abmore");
        }
    });
}

/// Files that are open while they and the directories above get other names.
fn open_below_what_moves(at: &Path) -> Vec<fs::File> {
    let open = |number| {
        let (from, to) = (at.join(format!("from{number}")), at.join(format!("to{number}")));
        fs::create_dir_all(from.join("deep")).unwrap();
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).open(from.join("deep/old"));
        let file = file.unwrap();
        file.write_all_at(b"ab", 0).unwrap();
        fs::rename(&from, &to).unwrap();
        fs::rename(to.join("deep"), to.join("deeper")).unwrap();
        fs::rename(to.join("deeper/old"), to.join("deeper/new")).unwrap();
        file
    };
    (0..12).map(open).collect()
}

#[test]
fn a_mount_begins_while_a_server_is_away_and_goes_on_when_it_comes() {
    on_transports(|transport| {
        let mut cluster = Cluster::new("");
        cluster.servers[1].end_server(libc::SIGTERM);
        let at = cluster.mount(0, "at", transport);
        let status = cluster.status(0, &at);
        let connected: Vec<bool> = status["projection"]["servers"]
            .as_array()
            .unwrap()
            .iter()
            .map(|server| server["connected"] == true)
            .collect();
        assert_eq!(connected, [true, false, true]);
        let path = at.clone();
        let writing = std::thread::spawn(move || {
            for number in 0..30 {
                fs::write(path.join(format!("f{number}")), format!("{number}")).unwrap();
            }
        });
        std::thread::sleep(std::time::Duration::from_millis(300));
        assert!(!writing.is_finished(), "all of thirty files were at two of three servers");
        cluster.serve(1);
        writing.join().unwrap();
        for number in 0..30 {
            assert_eq!(
                fs::read_to_string(at.join(format!("f{number}"))).unwrap(),
                number.to_string()
            );
        }
    });
}

// proves: P140
#[test]
fn a_definition_is_never_half_seen() {
    if common::skipped() {
        return;
    }
    let mut cluster = Cluster::new("");
    let at = cluster.mount(0, "at", "");
    fs::write(at.join("f"), "x").unwrap();
    cluster.define("spread_creates = true");
    cluster.servers[2].end_server(libc::SIGTERM);
    cluster.serve(2);
    // A new mount finds servers that do not agree.
    let place = cluster.servers[0].path("new");
    fs::create_dir(&place).unwrap();
    let target =
        format!("dray+unix://{}?export=scratch", cluster.servers[0].path("socket").display());
    let refused = cluster.servers[0].run(&["mount", &target, place.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("another definition"), "{said}");
    let third = cluster.servers[2].path("socket");
    assert!(said.contains(third.to_str().unwrap()), "{said}");
    // The one that is there goes on with the servers that have its definition alone.
    wait_for("the end of the session", || {
        cluster.status(0, &at)["projection"]["servers"][2]["redefined"] == true
    });
    for number in [0, 1] {
        cluster.servers[number].end_server(libc::SIGTERM);
        cluster.serve(number);
    }
    cluster.servers[0].umount(&at);
    let at = cluster.mount(1, "again", "");
    assert_eq!(fs::read_to_string(at.join("f")).unwrap(), "x");
}
