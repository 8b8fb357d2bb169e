//! Mounts of a projection over three servers that share a directory. Needs root.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common;
use crate::common::daemons::{signal, wait_for_daemon};
use crate::common::disks::detach;
use crate::common::load::{KeptFiles, check_load, load, lock};
use crate::common::{Rig, on_transports, wait_for};
use serde_json::Value;

const CLUSTER: &str = "layout = 'cluster'";
/// Requests of more than 64 KiB go to several servers.
const STRIPED: &str = "layout = 'cluster-stripe'\nstripe = '64K'";

/// Round trips of a look at what is leased: others on the machine look at mount points.
const LOOKING_ROUND_TRIPS_MAX: u64 = 8;

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
        cluster.start(CLUSTER)
    }

    fn start(mut self, more: &str) -> Cluster {
        self.define(more);
        (0..3).for_each(|number| self.serve(number));
        self
    }

    /// Writes the definition that servers find when they start. `more`: its layout, and options.
    fn define(&self, more: &str) {
        let names: Vec<String> = self
            .servers
            .iter()
            .map(|rig| format!("'unix://{}'", rig.path("socket").display()))
            .collect();
        let path = self.servers[0].path("export");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
        let text = format!(
            "[projection.scratch]\nservers = [{}]\npath = '{}'\n{more}\n\
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

    /// Whether the mount is connected to the server with this number. No, while its daemon is being replaced.
    fn is_connected(&self, at: &Path, number: usize) -> bool {
        let output = self.servers[0].run(&["status", at.to_str().unwrap(), "--json"]);
        let status = serde_json::from_slice::<Value>(&output.stdout);
        status.is_ok_and(|status| status["projection"]["servers"][number]["connected"] == true)
    }
}

/// Names and attributes of directories at several servers, and of files in them, are asked for once. Changes by
/// another mount are seen by the next call.
// proves: P271, P272
#[test]
fn what_nobody_else_touches_in_a_cluster_costs_no_round_trip() {
    on_transports(|transport| {
        let mut cluster = Cluster::new("layout = 'cluster'\nleases = true");
        let options = format!("leases=yes,{transport}");
        let (one, two) = (cluster.mount(0, "one", &options), cluster.mount(1, "two", &options));
        let dirs: Vec<PathBuf> = (0..10).map(|number| one.join(format!("dir{number}"))).collect();
        for dir in &dirs {
            fs::create_dir(dir).unwrap();
            (0..10).for_each(|file| fs::write(dir.join(format!("f{file}")), "content").unwrap());
        }
        let look = || {
            let files =
                dirs.iter().flat_map(|dir| (0..10).map(|file| dir.join(format!("f{file}"))));
            for file in files {
                assert_eq!(fs::metadata(&file).unwrap().len(), 7);
                assert!(fs::metadata(file.with_extension("absent")).is_err());
            }
            let find =
                Command::new("find").arg(&one).args(["-name", "f*", "-size", "-8c"]).output();
            let found = String::from_utf8(find.unwrap().stdout).unwrap().lines().count();
            assert_eq!(found, 100);
        };
        // The times of the last access of directories are asked for once more.
        (0..3).for_each(|_| look());
        let before = cluster.status(0, &one)["server"]["calls"].as_u64().unwrap();
        (0..2).for_each(|_| look());
        let asked = cluster.status(0, &one)["server"]["calls"].as_u64().unwrap() - before;
        assert!(asked <= LOOKING_ROUND_TRIPS_MAX, "{asked} round trips");
        let leases = &cluster.status(0, &one)["server"]["leases"];
        assert!(leases["hits"].as_u64().unwrap() > 0, "{leases}");
        // Each step is seen at once, whichever servers the directories have.
        for number in 0..dirs.len() {
            let (from, to) =
                (format!("dir{number}/f0"), format!("dir{}/f0", (number + 1) % dirs.len()));
            let at = |mount: &Path, path: &str| fs::metadata(mount.join(path));
            let moved = at(&one, &from).unwrap().ino();
            let replaced = fs::File::open(one.join(&to)).unwrap();
            fs::rename(two.join(&from), two.join(&to)).unwrap();
            assert_eq!(at(&one, &from).unwrap_err().raw_os_error(), Some(libc::ENOENT));
            assert_eq!(
                (at(&one, &to).unwrap().ino(), replaced.metadata().unwrap().nlink()),
                (moved, 0)
            );
            fs::hard_link(two.join(&to), two.join(&from)).unwrap();
            assert_eq!(
                (at(&one, &from).unwrap().ino(), at(&one, &to).unwrap().nlink()),
                (moved, 2)
            );
            fs::write(two.join(&from), "more content").unwrap();
            assert_eq!(at(&one, &to).unwrap().len(), 12);
            fs::remove_file(two.join(&to)).unwrap();
            assert_eq!(at(&one, &from).unwrap().nlink(), 1);
            assert_eq!(fs::read_dir(&dirs[(number + 1) % dirs.len()]).unwrap().count(), 9);
            fs::write(two.join(&to), "content").unwrap();
            assert_eq!(fs::read(one.join(&to)).unwrap(), b"content");
        }
    });
}

/// A request is split at the ends of blocks, and whatever mount reads finds what one server would have.
// proves: P150
#[test]
fn two_mounts_of_a_striped_cluster_agree() {
    on_transports(|transport| {
        let mut cluster = Cluster::new(STRIPED);
        let (one, two) = (cluster.mount(0, "one", transport), cluster.mount(1, "two", transport));
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o400);
        let file = options.open(one.join("f")).unwrap();
        let wanted: Vec<u8> = (0..900_001).map(pattern).collect();
        file.write_all_at(&wanted, 50_000).unwrap();
        let found = fs::read(two.join("f")).unwrap();
        assert!(found[..50_000].iter().all(|byte| *byte == 0) && found[50_000..] == wanted);
        assert_eq!(found, fs::read(cluster.servers[0].path("export").join("f")).unwrap());
        // Deleted before any block of it was used through this descriptor.
        let kept = fs::File::open(two.join("f")).unwrap();
        fs::remove_file(one.join("f")).unwrap();
        let mut found = vec![0; wanted.len()];
        kept.read_exact_at(&mut found, 50_000).unwrap();
        assert!(found == wanted);
        file.write_all_at(&wanted[1..], 200_000).unwrap();
        kept.read_exact_at(&mut found[1..], 200_000).unwrap();
        assert!(found == wanted);
        // Appends of several mounts and of many blocks lose nothing.
        let mut options = OpenOptions::new();
        options.create(true).append(true);
        let [first, second] = [&one, &two].map(|at| options.open(at.join("log")).unwrap());
        for number in 0..20_u8 {
            for mut log in [&first, &second] {
                std::io::Write::write_all(&mut log, &vec![number; 100_000]).unwrap();
            }
        }
        let log = fs::read(two.join("log")).unwrap();
        assert!(log.chunks(200_000).zip(0..).all(|(both, number)| both == vec![number; 200_000]));
        let status = cluster.status(0, &one);
        for server in status["projection"]["servers"].as_array().unwrap() {
            assert!(server["calls_percent"].as_f64().unwrap() > 5.0, "{server}");
        }
    });
}

/// A file that a client may only read is made and written by another one, whatever server has it.
// proves: P2, P139
#[test]
fn two_mounts_of_a_cluster_agree() {
    on_transports(|transport| two_mounts_agree(Cluster::new(CLUSTER), transport));
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
    on_transports(|transport| killed_under_load(transport, CLUSTER));
}

// proves: P150
#[test]
fn killed_servers_and_daemons_of_a_striped_cluster_lose_nothing() {
    on_transports(|transport| killed_under_load(transport, STRIPED));
}

fn killed_under_load(transport: &str, layout: &str) {
    let mut cluster = Cluster::new(layout);
    let (at, other) = (cluster.mount(0, "at", transport), cluster.mount(2, "other", transport));
    let kept = KeptFiles::new(&at);
    let mut load = load(&at);
    let pattern = at.join("pattern");
    load.add(rewrite(
        OpenOptions::new()
            .create(true)
            .read(true)
            .write(true)
            .truncate(true)
            .open(&pattern)
            .unwrap(),
    ));
    for number in 0..3 {
        std::thread::sleep(std::time::Duration::from_millis(300));
        cluster.servers[number].end_server(libc::SIGKILL);
        cluster.serve(number);
        std::thread::sleep(std::time::Duration::from_millis(20 + 140 * number as u64));
        let daemon = wait_for_daemon(&at);
        signal(daemon, libc::SIGKILL);
        wait_for("another daemon", || wait_for_daemon(&at) != daemon);
    }
    let rounds = load.end();
    check_load(&other, &rounds);
    kept.check(&at);
    check_pattern(&fs::read(other.join("pattern")).unwrap());
}

/// Writes a pattern of a different length at each round, and reads some of it back.
fn rewrite(file: fs::File) -> impl FnMut(u64) -> std::io::Result<()> {
    move |round| {
        let (at, len) = (round * 37_777 % PATTERN_BYTES, 1 + round * 98_765 % (700 << 10));
        let wanted: Vec<u8> = (at..at + len).map(pattern).collect();
        file.write_all_at(&wanted, at)?;
        let mut found = vec![0; wanted.len()];
        file.read_exact_at(&mut found, at)?;
        match found == wanted {
            true => Ok(()),
            false => Err(std::io::Error::other("read something else")),
        }
    }
}

const PATTERN_BYTES: u64 = 3 << 20;

fn pattern(at: u64) -> u8 {
    (at % 251) as u8 + 1
}

/// Holes are where nothing has been written so far.
fn check_pattern(found: &[u8]) {
    assert!(found.len() > 64 << 10);
    let wrong = found.iter().zip(0..).find(|(byte, at)| **byte != 0 && **byte != pattern(*at));
    assert_eq!(wrong, None);
}

/// Each client uses one server, and nobody changes anything.
// proves: P151
#[test]
fn clients_of_a_balanced_projection_read_at_one_server_each() {
    on_transports(|transport| {
        let mut cluster = Cluster::new("layout = 'loadbalance'");
        fs::write(cluster.servers[0].path("export").join("f"), "text").unwrap();
        let mut used = std::collections::BTreeSet::new();
        for number in 0..6 {
            let at = cluster.mount(number % 3, &format!("m{number}"), transport);
            assert_eq!(fs::read_to_string(at.join("f")).unwrap(), "text");
            let status = cluster.status(number % 3, &at);
            let servers = status["projection"]["servers"].as_array().unwrap();
            assert_eq!((servers.len(), &servers[0]["calls_percent"]), (1, &Value::from(100.0)));
            used.insert(servers[0]["address"].as_str().unwrap().to_owned());
            for refused in [
                fs::write(at.join("f"), "other"),
                fs::write(at.join("new"), ""),
                fs::remove_file(at.join("f")),
                fs::create_dir(at.join("d")),
            ] {
                assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EROFS));
            }
        }
        assert!(used.len() > 1, "six clients at one of three servers: {used:?}");
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
            wait_for("the mount to come back to its server", || cluster.is_connected(&at, number));
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
        let mut cluster = Cluster::new(CLUSTER);
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
    let mut cluster = Cluster::new(CLUSTER);
    let at = cluster.mount(0, "at", "");
    fs::write(at.join("f"), "x").unwrap();
    cluster.define(&format!("{CLUSTER}\nspread_creates = true"));
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
